"""Goose (RWKV-7) as llama.cpp reads it, in GGUF."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from subquad.hub.loading import NameMap, Part, transposed, vector

from .errors import ConversionError
from .formats import Shape
from .rwkv6_gguf import CONSTANTS, fields_of, row, stacked
from .rwkv7 import Rwkv7Format, check_head_dim


# Entries of the header, after `rwkv7.`, to the fields of our configuration.
FIELDS = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_epsilon": "norm_eps",
    "wkv.head_size": "head_dim",
    "attention.decay_lora_rank": "decay_low_rank_dim",
    "attention.iclr_lora_rank": "a_low_rank_dim",
    "attention.value_residual_mix_lora_rank": "v_low_rank_dim",
    "attention.gate_lora_rank": "gate_low_rank_dim",
}


def heads(x: torch.Tensor) -> torch.Tensor:
    """A vector with a row for each head: llama.cpp's heads are 64 wide."""
    return x.reshape(-1, 64)


class Rwkv7Gguf(Rwkv7Format):
    name = "rwkv7-gguf"
    title = "Goose (RWKV-7), GGUF"
    sign = "blk.0.time_mix_r_k.weight"
    name_map = NameMap(
        names={
            "^blk.": "rwkv7.blocks.",
            "^token_embd.": "rwkv7.emb.",
            "^token_embd_norm.": "rwkv7.blocks.0.ln0.",
            "^output_norm.": "rwkv7.ln_out.",
            "^output.": "head.",
            ".attn_norm.": ".ln1.",
            ".attn_norm_2.": ".ln2.",
            ".time_mix_ln.": ".att.ln_x.",
            **{f".time_mix_{name}.": f".att.{name}." for name in ("receptance", "key", "value", "output")},
            **{f".channel_mix_{name}.": f".ffn.{name}." for name in ("key", "value")},
        },
        parts={
            **{f".time_mix_{x}{i}.weight": transposed(f".att.{x}{i}") for x in "wavg" for i in (1, 2)},
            **{f".time_mix_{x}.weight": vector(f".att.{x}") for x in ("w0", "a0", "v0", "k_k", "k_a")},
            ".time_mix_r_k.weight": Part({".att.r_k": heads}, torch.flatten),
            ".time_mix_lerp_fused.weight": Part(
                {f".att.x_{x}": partial(row, index=i) for i, x in enumerate("rwkvag")}, stacked
            ),
            ".channel_mix_lerp_k.weight": vector(".ffn.x_k"),
        },
    )
    target = "gguf"

    def with_options(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        if "general.architecture" in given:  # the header of a file, not a configuration
            given = fields_of(given, "rwkv7", FIELDS)
            if given.get("head_dim", 64) != 64:
                raise ConversionError(f"`rwkv7.wkv.head_size` is {given['head_dim']}; only 64 is supported.")
        return super().with_options(given, options)

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        check_head_dim(config, "llama.cpp")
        return []

    def unused(self, config: PreTrainedConfig) -> dict[str, Shape]:
        """llama.cpp expects value mixing in the first block too, with the rank of the in-context learning rate."""
        width, rank, prefix = config.hidden_size, config.a_low_rank_dim, "blk.0.time_mix_v"
        return {f"{prefix}0.weight": (width,), f"{prefix}1.weight": (rank, width), f"{prefix}2.weight": (width, rank)}

    def target_fields(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()} | CONSTANTS


FORMAT = Rwkv7Gguf()
