"""
Implementations of single cases that are faster than an operator's own. The package `c` adds them; a model repository
has none.
"""

from collections.abc import Callable
from typing import Any


_ADDED: dict[str, Callable] = {}


def adds(name: str) -> Callable[[Callable], Callable]:
    """Decorates a shortcut for an operator. It takes arguments that were checked."""

    def add(function: Callable) -> Callable:
        _ADDED[name] = function
        return function

    return add


def shortcut(name: str, *arguments: Any) -> Any:
    """The result of the shortcut of that name; None if there is none, or it cannot compute with these arguments."""
    function = _ADDED.get(name)
    return None if function is None else function(*arguments)
