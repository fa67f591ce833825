"""Name map for flash-linear-attention's Finch, whose type is also `rwkv6`."""

from functools import partial

import torch

from ...hub.loading import NameMap, Part, as_vector, transposed, vector


ORDER = "rwkvg"  # of the five token shifts there
OUR_ORDER = "wkvrg"


def reorder_groups(groups: torch.Tensor) -> torch.Tensor:
    """(5, ...) in the order of flash-linear-attention to ours."""
    return groups[[ORDER.index(letter) for letter in OUR_ORDER]]


def reorder_back(groups: torch.Tensor) -> torch.Tensor:
    return groups[[OUR_ORDER.index(letter) for letter in ORDER]]


def shift_down(weight: torch.Tensor) -> torch.Tensor:
    """(5 R, D) to A of equation 14, (D, 5 R)."""
    return reorder_groups(torch.unflatten(weight, 0, (5, -1))).flatten(0, 1).t()


def shift_down_back(a: torch.Tensor) -> torch.Tensor:
    return reorder_back(torch.unflatten(a.t(), 0, (5, -1))).flatten(0, 1)


def shift_up(weight: torch.Tensor) -> torch.Tensor:
    """(D, 5 R) to B of equation 14, (5, R, D)."""
    return reorder_groups(torch.unflatten(weight.t(), 0, (5, -1)))


def shift_up_back(b: torch.Tensor) -> torch.Tensor:
    return reorder_back(b).flatten(0, 1).t()


def shift(x: torch.Tensor, letter: str) -> torch.Tensor:
    return as_vector(x[ORDER.index(letter)])


def shifts_back(*vectors: torch.Tensor) -> torch.Tensor:
    return reorder_back(torch.cat(vectors).flatten(1))


FLASH_LINEAR_ATTENTION = NameMap(
    names={
        "^model.embeddings.": "rwkv.embeddings.",
        "^model.norm.": "rwkv.ln_out.",
        "^lm_head.": "head.",
        "^model.layers.": "rwkv.blocks.",
        ".pre_norm.": ".pre_ln.",
        ".attn_norm.": ".ln1.",
        ".ffn_norm.": ".ln2.",
        ".attn.bonus$": ".attention.time_faaaa",
        ".attn.g_norm.": ".attention.ln_x.",
        ".attn.o_proj.": ".attention.output.",
        ".attn.r_proj.linear.": ".attention.receptance.",
        ".attn.k_proj.linear.": ".attention.key.",
        ".attn.v_proj.linear.": ".attention.value.",
        ".attn.g_proj.linear.": ".attention.gate.",
        ".ffn.key.linear.": ".feed_forward.key.",
        ".ffn.receptance.linear.": ".feed_forward.receptance.",
        ".ffn.value.": ".feed_forward.value.",
    },
    parts={
        ".attn.x_proj.0.mu": vector(".attention.time_maa_x"),
        ".attn.x_proj.0.linear.weight": Part({".attention.time_maa_w1": shift_down}, shift_down_back),
        ".attn.x_proj.2.weight": Part({".attention.time_maa_w2": shift_up}, shift_up_back),
        ".attn.x_bias": Part({f".attention.time_maa_{x}": partial(shift, letter=x) for x in OUR_ORDER}, shifts_back),
        ".attn.w_proj.linear.lora.0.weight": transposed(".attention.time_decay_w1"),
        ".attn.w_proj.linear.lora.2.weight": transposed(".attention.time_decay_w2"),
        ".attn.w_proj.linear.lora.2.bias": vector(".attention.time_decay"),
        ".ffn.key.mu": vector(".feed_forward.time_maa_k"),
        ".ffn.receptance.mu": vector(".feed_forward.time_maa_r"),
    },
)

FLASH_LINEAR_ATTENTION.register("rwkv6")

__all__ = ["FLASH_LINEAR_ATTENTION"]
