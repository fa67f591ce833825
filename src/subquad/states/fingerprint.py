"""What the states of a model depend on, so that states of earlier weights are not taken for those of later ones."""

import weakref
from collections.abc import Callable

import torch
from torch import nn


# How PEFT's layers keep which adapters are active, which are merged into the weights, and how much they count.
SETTINGS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
# Numbers of each tensor that are compared. They tell of changes that torch does not count: those through `.data`, and
# those of tensors that were made in inference mode.
SAMPLE = 8


class Fingerprint:
    """
    What a model's states depend on, as it is now: its parameters and buffers, the settings of its adapters, and hooks.
    It takes a small part of the time of a decoding step, and keeps none of the tensors alive.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module):
        self._settings: list[tuple[str, str]] = []
        # Weak references to tensors and hooks. While an object lives, there is one of them.
        self._parts: list[weakref.ref] = []
        self._counts: list[tuple[int, int | None]] = []
        samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for module in model.modules():
            own = vars(module)
            self._settings += [(name, repr(own[name])) for name in SETTINGS if name in own]
            self._parts += [weakref.ref(hook) for hook in _hooks(module)]
            for x in (*module._parameters.values(), *module._buffers.values()):
                if x is None or x.is_meta:  # weights that are loaded for each call, and forgotten after it
                    continue
                self._parts.append(weakref.ref(x))
                plain = type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided
                self._counts.append((x.data_ptr() if plain else 0, None if x.is_inference() else x._version))
                if plain and x.numel():
                    samples.setdefault((x.device, x.dtype), []).append(_sample(x))
        self._samples = {kind: torch.cat(found) for kind, found in samples.items()}

    def matches(self, other: "Fingerprint") -> bool:
        """Whether nothing has changed between the two."""
        return (
            self._settings == other._settings
            and self._counts == other._counts
            and len(self._parts) == len(other._parts)
            and all(a is b for a, b in zip(self._parts, other._parts, strict=True))
            and self._samples.keys() == other._samples.keys()
            and all(torch.equal(x, other._samples[kind]) for kind, x in self._samples.items())
        )


def _hooks(module: nn.Module) -> list[Callable]:
    """What is called with a module. PEFT also chooses the adapters of a batch's rows in this way."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _sample(x: torch.Tensor) -> torch.Tensor:
    """A few numbers from all over the memory of a tensor."""
    if x.is_contiguous():
        extent = x.numel()
    else:
        extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    count = min(extent, SAMPLE)
    return x.as_strided((count,), (extent // count,))
