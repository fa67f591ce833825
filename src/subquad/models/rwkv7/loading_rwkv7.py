"""The layout of flash-linear-attention, in which many RWKV-7 models are published. The type is `rwkv7` there too."""

from functools import partial

import torch

from ...loading import Layout, Part, as_vector, transposed, vector


SHIFTS = "rwkvag"


def row(x: torch.Tensor, index: int) -> torch.Tensor:
    return as_vector(x[index])


FLASH_LINEAR_ATTENTION = Layout(
    names={
        "^model.embeddings.": "rwkv7.emb.",
        "^model.norm.": "rwkv7.ln_out.",
        "^lm_head.": "head.",
        "^model.layers.{}.ffn.x_k$": "model.layers.{}.ffn.flat_x_k",
        "^model.layers.": "rwkv7.blocks.",
        ".pre_norm.": ".ln0.",
        ".attn_norm.": ".ln1.",
        ".ffn_norm.": ".ln2.",
        ".attn.g_norm.": ".att.ln_x.",
        ".attn.r_proj.": ".att.receptance.",
        ".attn.k_proj.": ".att.key.",
        ".attn.v_proj.": ".att.value.",
        ".attn.o_proj.": ".att.output.",
        ".attn.r_k$": ".att.r_k",
        **{f".attn.x_{x}$": f".att.x_{x}" for x in SHIFTS},
    },
    # Low-rank matrices are those of linear layers. The first files had all token shifts in one tensor.
    parts={
        **{f".attn.{x}_lora.lora.0.weight": transposed(f".att.{x}1") for x in "wavg"},
        **{f".attn.{x}_lora.lora.2.weight": transposed(f".att.{x}2") for x in "wavg"},
        **{f".attn.{x}_lora.lora.2.bias": vector(f".att.{x}0") for x in "wav"},
        ".attn.k_k": vector(".att.k_k"),
        ".attn.k_a": vector(".att.k_a"),
        ".ffn.flat_x_k": vector(".ffn.x_k"),
        ".attn.x_x": Part({f".att.x_{x}": partial(row, index=i) for i, x in enumerate(SHIFTS)}),
    },
)

__all__ = ["FLASH_LINEAR_ATTENTION"]
