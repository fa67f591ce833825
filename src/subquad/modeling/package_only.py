"""Methods that are left out of model repositories."""

from typing import TypeVar


T = TypeVar("T")


def package_only(method: T) -> T:
    """Marks a method for users of the installed package. The code of a model repository is merged without it."""
    return method
