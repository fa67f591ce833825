"""
Name maps for RWKV-7 models of other packages: flash-linear-attention and rwkv7-hf (one map), and rwkv-rs (two). Their
type is also `rwkv7`, or one of the descriptor's `other_types`.
"""

from functools import partial

import torch

from ...hub.loading import NameMap, Part, as_vector, transposed, vector


SHIFTS = "rwkvag"


VECTORS = (*(f"x_{x}" for x in SHIFTS), "w0", "a0", "v0", "k_k", "k_a")


def of_heads(x: torch.Tensor) -> torch.Tensor:
    """(heads, head_dim), after axes of length 1 in some files."""
    return x.reshape(x.shape[-2:])


BONUS = Part({".att.r_k": of_heads}, of_heads)


def row(x: torch.Tensor, index: int) -> torch.Tensor:
    return as_vector(x[index])


FLASH_LINEAR_ATTENTION = NameMap(
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
        **{f".attn.x_{x}$": f".att.x_{x}" for x in SHIFTS},
    },
    # Low-rank matrices are linear layers' weights. The first files had all token shifts in one tensor.
    parts={
        **{f".attn.{x}_lora.lora.0.weight": transposed(f".att.{x}1") for x in "wavg"},
        **{f".attn.{x}_lora.lora.2.weight": transposed(f".att.{x}2") for x in "wavg"},
        **{f".attn.{x}_lora.lora.2.bias": vector(f".att.{x}0") for x in "wav"},
        ".attn.r_k": BONUS,
        ".attn.k_k": vector(".att.k_k"),
        ".attn.k_a": vector(".att.k_a"),
        ".ffn.flat_x_k": vector(".ffn.x_k"),
        ".attn.x_x": Part({f".att.x_{x}": partial(row, index=i) for i, x in enumerate(SHIFTS)}),
    },
)

# From a fork of transformers.
RWKV_RS = NameMap(
    names={
        "^model.emb.": "rwkv7.emb.",
        "^model.ln_out.": "rwkv7.ln_out.",
        "^model.blocks.{}.att.r_k$": "model.blocks.{}.att.stored_r_k",
        "^model.blocks.": "rwkv7.blocks.",
    },
    parts={".att.stored_r_k": BONUS},
)

# The first map of the same fork.
OLD_RWKV_RS = NameMap(
    names={
        "^model.embed_tokens.": "rwkv7.emb.",
        "^model.embedding_norm.": "rwkv7.blocks.0.ln0.",
        "^model.norm.": "rwkv7.ln_out.",
        "^lm_head.": "head.",
        "^model.layers.": "rwkv7.blocks.",
        ".input_layernorm.": ".ln1.",
        ".post_attention_layernorm.": ".ln2.",
        ".linear_attn.g_norm.": ".att.ln_x.",
        ".linear_attn.r_proj.": ".att.receptance.",
        ".linear_attn.k_proj.": ".att.key.",
        ".linear_attn.v_proj.": ".att.value.",
        ".linear_attn.o_proj.": ".att.output.",
        **{f".linear_attn.{x}{i}$": f".att.{x}{i}" for x in "wavg" for i in (1, 2)},
        ".mlp.x_k$": ".ffn.flat_x_k",
        ".mlp.": ".ffn.",
    },
    parts={
        **{f".linear_attn.{name}": vector(f".att.{name}") for name in VECTORS},
        ".linear_attn.r_k": BONUS,
        ".ffn.flat_x_k": vector(".ffn.x_k"),
    },
)

# Names that `from_pretrained` reads besides ours.
OTHER_NAMES = FLASH_LINEAR_ATTENTION | RWKV_RS | OLD_RWKV_RS
OTHER_NAMES.register("rwkv7")

__all__ = ["BONUS", "FLASH_LINEAR_ATTENTION", "OLD_RWKV_RS", "OTHER_NAMES", "RWKV_RS"]
