"""The layout of flash-linear-attention, in which many RWKV-7 models are published. The type is `rwkv7` there too."""

from functools import partial

import torch

from ...loading import Layout, as_vector


def row(x: torch.Tensor, index: int) -> torch.Tensor:
    return as_vector(x[index])


FLASH_LINEAR_ATTENTION = Layout(
    names={
        r"^model\.embeddings\.": "rwkv7.emb.",
        r"^model\.norm\.": "rwkv7.ln_out.",
        r"^lm_head\.": "head.",
        r"^model\.layers\.(\d+)\.ffn\.x_k$": r"rwkv7.blocks.\1.ffn.flat_x_k",
        r"^model\.layers\.": "rwkv7.blocks.",
        r"\.pre_norm\.": ".ln0.",
        r"\.attn_norm\.": ".ln1.",
        r"\.ffn_norm\.": ".ln2.",
        r"\.attn\.g_norm\.": ".att.ln_x.",
        r"\.attn\.r_proj\.": ".att.receptance.",
        r"\.attn\.k_proj\.": ".att.key.",
        r"\.attn\.v_proj\.": ".att.value.",
        r"\.attn\.o_proj\.": ".att.output.",
        r"\.attn\.(x_[rwkvag]|r_k)$": r".att.\1",
    },
    # Low-rank matrices are those of linear layers. The first files had all token shifts in one tensor.
    parts={
        **{f".attn.{x}_lora.lora.0.weight": {f".att.{x}1": torch.t} for x in "wavg"},
        **{f".attn.{x}_lora.lora.2.weight": {f".att.{x}2": torch.t} for x in "wavg"},
        **{f".attn.{x}_lora.lora.2.bias": {f".att.{x}0": as_vector} for x in "wav"},
        ".attn.k_k": {".att.k_k": as_vector},
        ".attn.k_a": {".att.k_a": as_vector},
        ".ffn.flat_x_k": {".ffn.x_k": as_vector},
        ".attn.x_x": {f".att.x_{x}": partial(row, index=i) for i, x in enumerate("rwkvag")},
    },
)

__all__ = ["FLASH_LINEAR_ATTENTION"]
