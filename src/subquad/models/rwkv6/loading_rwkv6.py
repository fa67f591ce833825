"""The layout of flash-linear-attention, whose type is `rwkv6` too."""

from functools import partial

import torch

from ...loading import Layout, as_vector


ORDER = "rwkvg"  # of the five token shifts there
OUR_ORDER = "wkvrg"


def reorder(groups: torch.Tensor) -> torch.Tensor:
    """(5, ...) in the order of flash-linear-attention to ours."""
    return groups[[ORDER.index(letter) for letter in OUR_ORDER]]


def shift_down(weight: torch.Tensor) -> torch.Tensor:
    """(5 R, D) to A of equation 14, (D, 5 R)."""
    return reorder(weight.unflatten(0, (5, -1))).flatten(0, 1).t()


def shift_up(weight: torch.Tensor) -> torch.Tensor:
    """(D, 5 R) to B of equation 14, (5, R, D)."""
    return reorder(weight.t().unflatten(0, (5, -1)))


def shift(x: torch.Tensor, letter: str) -> torch.Tensor:
    return as_vector(x[ORDER.index(letter)])


FLASH_LINEAR_ATTENTION = Layout(
    names={
        r"^model\.embeddings\.": "rwkv.embeddings.",
        r"^model\.norm\.": "rwkv.ln_out.",
        r"^lm_head\.": "head.",
        r"^model\.layers\.": "rwkv.blocks.",
        r"\.pre_norm\.": ".pre_ln.",
        r"\.attn_norm\.": ".ln1.",
        r"\.ffn_norm\.": ".ln2.",
        r"\.attn\.bonus$": ".attention.time_faaaa",
        r"\.attn\.g_norm\.": ".attention.ln_x.",
        r"\.attn\.o_proj\.": ".attention.output.",
        r"\.attn\.r_proj\.linear\.": ".attention.receptance.",
        r"\.attn\.k_proj\.linear\.": ".attention.key.",
        r"\.attn\.v_proj\.linear\.": ".attention.value.",
        r"\.attn\.g_proj\.linear\.": ".attention.gate.",
        r"\.ffn\.key\.linear\.": ".feed_forward.key.",
        r"\.ffn\.receptance\.linear\.": ".feed_forward.receptance.",
        r"\.ffn\.value\.": ".feed_forward.value.",
    },
    parts={
        ".attn.x_proj.0.mu": {".attention.time_maa_x": as_vector},
        ".attn.x_proj.0.linear.weight": {".attention.time_maa_w1": shift_down},
        ".attn.x_proj.2.weight": {".attention.time_maa_w2": shift_up},
        ".attn.x_bias": {f".attention.time_maa_{x}": partial(shift, letter=x) for x in OUR_ORDER},
        ".attn.w_proj.linear.lora.0.weight": {".attention.time_decay_w1": torch.t},
        ".attn.w_proj.linear.lora.2.weight": {".attention.time_decay_w2": torch.t},
        ".attn.w_proj.linear.lora.2.bias": {".attention.time_decay": as_vector},
        ".ffn.key.mu": {".feed_forward.time_maa_k": as_vector},
        ".ffn.receptance.mu": {".feed_forward.time_maa_r": as_vector},
    },
)

__all__ = ["FLASH_LINEAR_ATTENTION"]
