"""States in fewer bytes, for caches that are stored and not in use."""

from typing import TYPE_CHECKING

import torch

from ..modeling.cache import RecurrentCache


if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Dtypes of stored states by their names.
DTYPES = {"int8": torch.int8, "float16": torch.float16, "bfloat16": torch.bfloat16}
# What the name of a tensor with scales ends with.
SCALE = ":scale"


def pack(cache: RecurrentCache, dtype: str) -> RecurrentCache:
    """
    A copy in which the states of `packed_names` have another dtype. It can be saved and unpacked, and is of no other
    use. In int8, every row of a state (its last dimension) has a scale: its largest absolute value becomes 127.

    Args:
        cache: is not modified.
        dtype: a name in [`DTYPES`].

    Raises:
        ValueError: if the dtype cannot represent a state.
    """
    packed = cache.frozen()
    packed.after_blocks = cache.after_blocks.frozen()
    for layer in packed.all_layers:
        for name in layer.states.keys() & set(cache.packed_names):
            if dtype == "int8":
                layer.states[name], found = to_int8(layer.states[name])
                layer.states[name + SCALE] = found
            else:
                found = layer.states[name] = layer.states[name].to(DTYPES[dtype])
            if not found.isfinite().all():
                raise ValueError(f"the state {name} has numbers that {dtype} cannot represent")
    return packed


def to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    x in int8, and the scale of each row (the last dimension), (..., 1) in the dtype of x: the row's largest absolute
    value becomes 127. A scale is not finite if its row is not.
    """
    # At least the least normal number, so that rows of zeros stay zeros.
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(x.dtype).tiny)
    return (x / scale).round_().clamp_(-127, 127).to(torch.int8), scale


def unpack_states(states: dict[str, torch.Tensor], float32_names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """
    The states of a packed cache as those of a usable one, by their names.

    Args:
        float32_names: last parts of the names of those that are at least float32. Others in 16 bits stay so.

    Raises:
        ValueError: if scales are missing or do not fit.
    """
    unpacked = {}
    for name, x in states.items():
        if name.endswith(SCALE):
            if states.get(name.removesuffix(SCALE), x).dtype != torch.int8:
                raise ValueError(f"{name} belongs to no state in int8")
        elif x.dtype == torch.int8:
            scale = states.get(name + SCALE)
            if scale is None or not scale.is_floating_point() or scale.shape != (*x.shape[:-1], 1):
                raise ValueError(f"{name} has no scales that fit")
            unpacked[name] = x.to(scale.dtype) * scale
        else:
            wide = name.rpartition(".")[2] in float32_names and x.dtype.itemsize < 4
            unpacked[name] = x.float() if wide else x.clone()
    return unpacked


def unpack(packed: RecurrentCache, model: "PreTrainedModel") -> RecurrentCache:
    """A cache for the model, with the rounded states."""
    cache, tokens = model.new_cache(), packed.get_seq_length()
    cache.set_states(unpack_states(packed.named_states(), cache.float32_names))
    cache.to(model.device, model.dtype).set_padding(tokens, packed.padding_read())
    return cache
