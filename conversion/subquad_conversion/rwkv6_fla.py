"""
Finch (RWKV-6.0) as flash-linear-attention saves it: model type `rwkv6` too, with other names, other configuration
fields, and low-rank matrices in the layout of linear layers.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from .formats import Take, Tensors
from .rwkv import EMBEDDINGS, HEAD, Rwkv6Format


ORDER = "rwkvg"  # of the five token shifts there
OUR_ORDER = "wkvrg"

TOP = {
    "model.embeddings.weight": EMBEDDINGS,
    "model.norm.weight": "rwkv.ln_out.weight",
    "model.norm.bias": "rwkv.ln_out.bias",
    "lm_head.weight": HEAD,
}
# The beginnings of names in a block. The first that fits counts.
PARTS = (
    ("pre_norm.", "pre_ln."),
    ("attn_norm.", "ln1."),
    ("ffn_norm.", "ln2."),
    ("attn.x_proj.0.mu", "attention.time_maa_x"),
    ("attn.w_proj.linear.lora.2.bias", "attention.time_decay"),
    ("attn.bonus", "attention.time_faaaa"),
    ("attn.g_norm.", "attention.ln_x."),
    ("attn.o_proj.", "attention.output."),
    ("attn.r_proj.linear.", "attention.receptance."),
    ("attn.k_proj.linear.", "attention.key."),
    ("attn.v_proj.linear.", "attention.value."),
    ("attn.g_proj.linear.", "attention.gate."),
    ("ffn.key.mu", "feed_forward.time_maa_k"),
    ("ffn.receptance.mu", "feed_forward.time_maa_r"),
    ("ffn.key.linear.", "feed_forward.key."),
    ("ffn.receptance.linear.", "feed_forward.receptance."),
    ("ffn.value.", "feed_forward.value."),
)
# Fields that are kept, by their names there. The ids of special tokens are not: they belong to that package's default
# tokenizer, which published models do not have.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "intermediate_size": "intermediate_size",
    "norm_eps": "layer_norm_epsilon",
    "tie_word_embeddings": "tie_word_embeddings",
    "use_cache": "use_cache",
}


def _reorder(groups: torch.Tensor) -> torch.Tensor:
    """(5, ...) in the order of flash-linear-attention to ours."""
    return groups[[ORDER.index(letter) for letter in OUR_ORDER]]


def _shift_down(weight: torch.Tensor) -> torch.Tensor:
    """(5 R, D) to A of equation 14, (D, 5 R)."""
    return _reorder(weight.unflatten(0, (5, -1))).flatten(0, 1).T


def _shift_up(weight: torch.Tensor) -> torch.Tensor:
    """(D, 5 R) to B of equation 14, (5, R, D)."""
    return _reorder(weight.T.unflatten(0, (5, -1)))


# How the tensors are taken whose layout differs.
LAYOUTS = {
    "attn.x_proj.0.linear.weight": {"attention.time_maa_w1": _shift_down},
    "attn.x_proj.2.weight": {"attention.time_maa_w2": _shift_up},
    "attn.x_bias": {
        f"attention.time_maa_{letter}": partial(torch.select, dim=0, index=ORDER.index(letter)) for letter in OUR_ORDER
    },
    "attn.w_proj.linear.lora.0.weight": {"attention.time_decay_w1": torch.t},
    "attn.w_proj.linear.lora.2.weight": {"attention.time_decay_w2": torch.t},
}


class Rwkv6Fla(Rwkv6Format):
    name = "rwkv6-fla"
    title = "Finch (RWKV-6.0), flash-linear-attention's layout"

    def matches(self, tensors: Tensors) -> bool:
        return {"model.layers.0.attn.x_bias", "model.layers.0.attn.bonus"} <= tensors.keys()

    def parts(self, name: str) -> dict[str, Take]:
        if name in TOP:
            return {TOP[name]: None}
        block = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if block is None:
            return {name: None}
        prefix = f"rwkv.blocks.{block[1]}."
        if block[2] in LAYOUTS:
            return {prefix + ours: take for ours, take in LAYOUTS[block[2]].items()}
        for theirs, ours in PARTS:
            if block[2].startswith(theirs):
                return {prefix + ours + block[2].removeprefix(theirs): None}
        return {prefix + block[2]: None}

    def with_options(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        fields = {ours: given[theirs] for theirs, ours in FIELDS.items() if theirs in given}
        return super().with_options(fields, options)


FORMAT = Rwkv6Fla()
