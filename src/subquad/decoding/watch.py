"""Whether a model is still what it was when a decoding step was made for it. This is asked for every token."""

import weakref
from collections.abc import Callable
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers.utils import output_capturing

from .step import Unsuitable


T = TypeVar("T")


def weights_of(model: nn.Module) -> list[torch.UntypedStorage]:
    """The memory of all parameters and buffers, which stays as long as it is held."""
    return [x.untyped_storage() for x in (*model.parameters(), *model.buffers())]


def is_hooked(model: nn.Module) -> bool:
    """Whether somebody's code runs when parts of the model are called."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def look_up(
    known: "weakref.WeakKeyDictionary[nn.Module, T]", model: nn.Module, make: Callable[[Any], T], *how: bool
) -> T:
    """
    What `make` makes of a model, made anew if the model has changed since the last call.

    Args:
        known: what was made of other models. Addresses must not be copied or saved with a model, as attributes are.
        how: the arguments of its `is_unchanged`.

    Raises:
        Unsuitable: if `make` raises a ValueError.
    """
    if (found := known.get(model)) is None or not found.is_unchanged(*how):
        known.pop(model, None)
        found = None  # what depends on it is dropped
        try:
            found = known[model] = make(model)
        except ValueError as error:
            raise Unsuitable(str(error)) from error
    return found


class Watch:
    """
    What a step relies on that passes by the modules of a model: they stand at their places and run the `forward` of
    their classes, without hooks but those that record outputs if asked to, and their parameters stay where they are.

    Args:
        roots: modules that are passed by themselves. They are not kept alive.

    Attributes:
        absent: places, (dictionary, name), where there must be no parameter.
        values: places of what must stay equal, such as the `eps` of a norm.
        kinds: the classes of the modules, once it is started.
    """

    def __init__(self, roots: list[nn.Module]):
        self.absent: list[tuple[dict, str]] = []
        self.values: list[tuple[dict, str]] = []
        self.kinds: list[type[nn.Module]] = []
        self._tensors: list[tuple[dict, str]] = []
        self._modules: dict[tuple[int, str], tuple[dict, str]] = {}
        self._complete: list[dict] = []  # nothing may be added to them
        self._roots = [weakref.ref(root) for root in roots]

    def module(self, names: dict[str, nn.Module], name: str) -> nn.Module:
        """
        Raises:
            ValueError: if there is no such module.
        """
        if names.get(name) is None:
            raise ValueError(f"There is no `{name}`.")
        self._modules[id(names), name] = names, name
        return names[name]

    def find(self, module: nn.Module, path: str) -> nn.Module:
        """The module at a path in another one, "" for that itself."""
        for name in path.split(".") if path else ():
            module = self.module(module._modules, name)
        return module

    def tensor(self, module: nn.Module, name: str) -> torch.Tensor:
        """
        Raises:
            ValueError: if there is no such parameter or buffer. It may be computed before every call, as torch's
                weight norm and pruning do.
        """
        names = module._parameters if name in module._parameters else module._buffers
        if (x := names.get(name)) is None:
            raise ValueError(f"There is no parameter `{name}`.")
        self._tensors.append((names, name))
        return x

    def operators(self, module: nn.Module) -> None:
        """The operators of a block that `use_kernels=True` may have replaced."""
        operators = getattr(module, "_kernel_funcs", {})
        for name, part in operators.items():
            if isinstance(part, nn.Module):
                self.module(operators, name)

    def everything(self, root: nn.Module) -> None:
        """All that is in a module. Nothing may be added to it."""
        for module in root.modules():
            self._complete += [module._modules, module._parameters, module._buffers]
            for name, part in module._modules.items():
                if part is not None:
                    self.module(module._modules, name)
            for names in (module._parameters, module._buffers):
                for name, x in names.items():
                    (self.absent if x is None else self._tensors).append((names, name))
            self.operators(module)

    def start(self) -> None:
        """
        Notes how everything is now.

        Raises:
            ValueError: if something else is called with a part of the model.
        """
        self._found = [names[name] for names, name in self._modules.values()]
        modules = [*(root() for root in self._roots), *self._found]
        self._namespaces = [module.__dict__ for module in self._found]
        hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._hooked, self._free = [x for x in hooks if x], [x for x in hooks if not x]
        kinds = set(map(type, modules))
        self.kinds = [*{each for kind in kinds for each in kind.__mro__ if issubclass(each, nn.Module)} - {nn.Module}]
        calls = (hook for hooks in self._hooked for hook in hooks.values())
        if self._has_other_forward() or any(call.__module__ != output_capturing.__name__ for call in calls):
            raise ValueError("Something else is called with a part of the model.")
        places = self._modules.values(), self._tensors, self.absent, self.values
        self._places = [([names for names, _ in x], [name for _, name in x]) for x in places]
        self._before = self._look()

    def is_unchanged(self) -> bool:
        try:
            return not self._has_other_forward() and self._look() == self._before
        except TypeError:  # a parameter is missing
            return False

    def _has_other_forward(self) -> bool:
        """Whether there are hooks of all modules, or a module has a `forward` of its own."""
        return (
            bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
            or any("forward" in root().__dict__ for root in self._roots)
            or any(map(dict.__contains__, self._namespaces, repeat("forward")))
        )

    def _look(self) -> tuple[list | bool, ...]:
        """In loops of C alone: it is about all parameters."""
        modules, tensors, absent, values = (list(map(dict.get, *places)) for places in self._places)
        return (
            list(map(id, modules)),
            list(map(type, modules)),
            any(self._free),
            list(map(tuple, self._hooked)),  # their numbers
            [kind.forward for kind in self.kinds],
            list(map(id, tensors)),
            list(map(torch.Tensor.data_ptr, tensors)),
            absent,
            values,
            list(map(len, self._complete)),
        )
