"""Faster implementations of special cases of an operator. The package `c` adds them; model repositories have none."""

from collections.abc import Callable
from typing import Any


_ADDED: dict[str, Callable] = {}


def adds(name: str) -> Callable[[Callable], Callable]:
    """Decorates a shortcut for an operator. Its arguments have been checked."""

    def add(function: Callable) -> Callable:
        _ADDED[name] = function
        return function

    return add


def shortcut(name: str, *arguments: Any) -> Any:
    """The result of the shortcut of that name; None if there is none, or if it does not support these arguments."""
    function = _ADDED.get(name)
    return None if function is None else function(*arguments)
