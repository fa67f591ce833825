"""The parameters of a block of Eagle (RWKV-5), Finch (RWKV-6) or Goose (RWKV-7): their names and shapes."""

from collections.abc import Sequence
from typing import Any

import torch


# The highest rank, summed over all maps of a token shift. `block.c` has room for so many channels.
MOST_RANKS = 1024
# The low ranks of a block, and into how many maps each is divided.
MAPS = {"wkv": {"shift": 5, "decay": 1}, "delta_wkv": {"decay": 1, "rate": 1, "mix": 1, "gate": 1}}


def block_shapes(
    kind: str, sizes: tuple[int, int, int], parameters: dict[str, torch.Tensor]
) -> dict[str, tuple[int, ...]]:
    """
    The shapes of all that a block has, matrices as (outputs, inputs).

    Args:
        kind: `"wkv"` for Eagle and Finch, `"delta_wkv"` for Goose.
        sizes: the hidden size, the channels of all heads, and the intermediate size.
        parameters: are asked for the ranks, and for what some blocks do not have.

    Raises:
        ValueError: if there are low ranks with a part that is missing, or too many ranks.
    """
    width, inner, middle = sizes
    names = ["ln1", "ln1_bias", "ln2", "ln2_bias", "mu_r", "mu_k", "mu_v", "mu_g", "mu_ffn_key"]
    of_inner = ["ln_x", "ln_x_bias", "bonus", "decay.base"]
    shapes = dict.fromkeys((f"{name}.weight" for name in ("receptance", "key", "value")), (inner, width))
    shapes |= {"output.weight": (width, inner), "ffn_key.weight": (middle, width), "ffn_value.weight": (width, middle)}
    low_ranks = [name for name in MAPS[kind] if f"{name}.up" in parameters]
    if kind == "wkv":
        names.append("mu_ffn_receptance")
        names += [mu for name, mu in (("shift", "mu_x"), ("decay", "mu_w")) if name in low_ranks]
        shapes |= {"gate.weight": (inner, width), "ffn_receptance.weight": (width, width)}
    else:
        names += ["mu_w", "mu_a"]
        of_inner += ["k_k", "k_a", "rate.base", *(["mix.base"] if "mix" in low_ranks else [])]
        low_ranks += [name for name in ("decay", "rate", "gate") if name not in low_ranks]
    for name in low_ranks:
        maps, down = MAPS[kind][name], parameters.get(f"{name}.down")
        ranks = down.shape[-1] if down is not None and down.dim() else 0
        if not 0 < ranks <= MOST_RANKS or ranks % maps:
            raise ValueError(f"`{name}.down` must have up to {MOST_RANKS} columns for {maps} maps, got {ranks}.")
        shapes[f"{name}.down"] = (width, ranks)
        shapes[f"{name}.up"] = (maps, ranks // maps, width) if maps > 1 else (ranks, inner)
    return shapes | dict.fromkeys(names, (width,)) | dict.fromkeys(of_inner, (inner,))


def check_alike(blocks: Sequence[Any], *names: str) -> None:
    """
    Raises:
        ValueError: if blocks differ in sizes or in the attributes of these names; or if they are Goose's, and not
            just the first one has values of its own.
    """
    first = blocks[0]
    for number, block in enumerate(blocks):
        for name in ("kind", "width", "inner", "middle", "state_shape", *names):
            if (value := getattr(block, name)) != getattr(first, name):
                raise ValueError(f"Block {number} has the {name} {value}, the first one {getattr(first, name)}.")
        if first.kind == "delta_wkv" and block.mixes != (number > 0):
            raise ValueError(f"Block {number} reads the values of another block, or should.")
