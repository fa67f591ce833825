"""Fingerprints of what a model's states depend on, to detect states of earlier weights."""

import hashlib
import json
import weakref
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .identity import INCIDENTAL


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Attributes of PEFT's layers: active adapters, merged adapters, and their scaling.
SETTINGS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
# Numbers of each tensor that are compared. They reveal changes that torch does not count: through `.data`, and to
# tensors that were made in inference mode.
SAMPLE = 8
# For each tensor its checksum, and what reveals that it has changed since.
_CHECKSUMS = WeakTensorKeyDictionary()


class Fingerprint:
    """
    A snapshot of what a model's states depend on: parameters, buffers, settings of adapters, and hooks.
    It takes a small fraction of a decoding step, and does not keep tensors alive.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module):
        self._settings: list[tuple[str, str]] = []
        # Weak references to tensors and hooks. An object has only one while it lives.
        self._parts: list[weakref.ref] = []
        self._counts: list[tuple[int, int | None]] = []
        samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for module in model.modules():
            self._settings += _settings(module)
            self._parts += [weakref.ref(hook) for hook in _hooks(module)]
            for x in (*module._parameters.values(), *module._buffers.values()):
                if x is None or x.is_meta:  # offloaded weights, loaded for each call
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


@torch.no_grad()
def digest_of(model: "PreTrainedModel") -> str:
    """
    A hexadecimal digest of what a model's states depend on, the same in every process: its configuration, the names,
    dtypes, shapes and checksums of its parameters and buffers, and the settings of adapters. Only tensors that have
    changed since the last call are read, all of them the first time, 3 GB in about two seconds.

    Raises:
        ValueError: if they depend on something else: weights that are offloaded or packed, or hooks.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in INCIDENTAL}
    about = [json.dumps(config, sort_keys=True, default=str)]
    for name, module in model.named_modules():
        about += [f"{name} {setting} {value}" for setting, value in _settings(module)]
        if _hooks(module):
            raise ValueError(f"the module {name or type(model).__name__} has a hook")
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for part, x in tensors.items():
                if x is None:
                    continue
                if x.is_meta or type(x) not in (torch.Tensor, nn.Parameter) or x.layout != torch.strided:
                    raise ValueError(f"the {kind} {name}.{part} is offloaded or packed")
                about.append(f"{name}.{part} {x.dtype} {tuple(x.shape)} {_checksum(x)}")
    return hashlib.sha256("\n".join(about).encode()).hexdigest()


def _checksum(x: torch.Tensor) -> int:
    """CRC-32 of all bytes of a tensor."""
    # Inference tensors have no version counter.
    version = None if x.is_inference() else x._version
    seen = x.data_ptr(), version, _bytes(_sample(x)).tobytes() if x.numel() else b""
    known, found = _CHECKSUMS.get(x, (None, 0))
    if version is None or seen != known:
        found = zlib.crc32(_bytes(x))
        _CHECKSUMS[x] = seen, found
    return found


def _bytes(x: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, in the order of its elements."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def _settings(module: nn.Module) -> list[tuple[str, str]]:
    """Settings of adapters, except those that were only set to their default."""
    own, default = vars(module), type(module)
    return [(name, repr(own[name])) for name in SETTINGS if name in own and own[name] != getattr(default, name, None)]


def _hooks(module: nn.Module) -> list[Callable]:
    """Hooks of a module. PEFT also chooses adapters per row of a batch with hooks."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _sample(x: torch.Tensor) -> torch.Tensor:
    """A few numbers from all over the memory of a tensor."""
    if x.is_contiguous():
        extent = x.numel()
    else:
        extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    count = min(extent, SAMPLE)
    return x.as_strided((count,), (extent // count,))
