"""Finch (RWKV-6.0) as llama.cpp reads it, in GGUF."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from subquad.hub.loading import NameMap, Part, as_vector, transposed, vector

from .errors import ConversionError
from .formats import Tensors
from .rwkv import Rwkv6Format, check_divisor


SHIFTS = "wkvrg"
LOW_RANK = {
    "time_mix_w1": "time_maa_w1",
    "time_mix_w2": "time_maa_w2",
    "time_mix_decay_w1": "time_decay_w1",
    "time_mix_decay_w2": "time_decay_w2",
}
MATRICES = ("receptance", "key", "value", "gate", "output")
# Entries of the header, after `rwkv6.`, to the fields of our configuration.
FIELDS = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "wkv.head_size": "head_size",
    "time_mix_extra_dim": "lora_rank_tokenshift",
    "time_decay_extra_dim": "lora_rank_decay",
}
# Entries that llama.cpp requires but that have no effect: a state has no limit, and the heads follow from their size.
CONSTANTS = {"context_length": 2**20, "attention.head_count": 0}


def row(x: torch.Tensor, index: int) -> torch.Tensor:
    return as_vector(x[index])


def stacked(*vectors: torch.Tensor) -> torch.Tensor:
    """(1, 1, D) each to (number, 1, 1, D)."""
    return torch.stack(vectors)


def fields_of(entries: Mapping[str, Any], architecture: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Fields of our configuration from the entries of a header."""
    found = {ours: entries.get(f"{architecture}.{name}") for name, ours in names.items()}
    # Numbers are stored in float32, so 1e-5 is not exact.
    return {name: float(f"{x:.7g}") if isinstance(x, float) else x for name, x in found.items() if x is not None}


class Rwkv6Gguf(Rwkv6Format):
    name = "rwkv6-gguf"
    title = "Finch (RWKV-6.0), GGUF"
    name_map = NameMap(
        names={
            "^blk.": "rwkv.blocks.",
            "^token_embd.": "rwkv.embeddings.",
            "^token_embd_norm.": "rwkv.blocks.0.pre_ln.",
            "^output_norm.": "rwkv.ln_out.",
            "^output.": "head.",
            ".attn_norm.": ".ln1.",
            ".attn_norm_2.": ".ln2.",
            ".time_mix_first.weight$": ".attention.time_faaaa",
            ".time_mix_ln.": ".attention.ln_x.",
            **{f".time_mix_{name}.": f".attention.{name}." for name in MATRICES},
            **{f".channel_mix_{name}.": f".feed_forward.{name}." for name in ("receptance", "key", "value")},
        },
        parts={
            **{f".{theirs}.weight": transposed(f".attention.{ours}") for theirs, ours in LOW_RANK.items()},
            ".time_mix_decay.weight": vector(".attention.time_decay"),
            ".time_mix_lerp_x.weight": vector(".attention.time_maa_x"),
            ".time_mix_lerp_fused.weight": Part(
                {f".attention.time_maa_{x}": partial(row, index=i) for i, x in enumerate(SHIFTS)}, stacked
            ),
            # The first files had them as separate tensors.
            **{f".time_mix_lerp_{x}.weight": Part({f".attention.time_maa_{x}": as_vector}) for x in SHIFTS},
            ".channel_mix_lerp_k.weight": vector(".feed_forward.time_maa_k"),
            ".channel_mix_lerp_r.weight": vector(".feed_forward.time_maa_r"),
        },
    )
    target = "gguf"

    def matches(self, tensors: Tensors) -> bool:
        return "blk.0.time_mix_first.weight" in tensors

    def with_options(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        if "general.architecture" in given:  # the header of a file, not a configuration
            given = fields_of(given, "rwkv6", FIELDS) | {"head_size_divisor": 8}
        return super().with_options(given, options)

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        check_divisor(config, "llama.cpp")
        if config.attention_hidden_size != config.hidden_size:
            raise ConversionError(
                f"`attention_hidden_size` is {config.attention_hidden_size} and `hidden_size` {config.hidden_size}; "
                "in llama.cpp they are equal."
            )
        return []

    def target_fields(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()} | CONSTANTS


FORMAT = Rwkv6Gguf()
