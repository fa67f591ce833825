"""
Goose (RWKV-7), in five layouts: the trainer's names, alone or after `rwkv7.` as in the RWKV organisation's
repositories, which are ours; those of flash-linear-attention and of rwkv-rs; and web-rwkv's, the trainer's with
transposed matrices. The type in a configuration does not tell them apart: several have `rwkv7`.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from subquad.models.rwkv7.loading_rwkv7 import FLASH_LINEAR_ATTENTION

from .formats import Format, Found, Reading, Shape, Take, Tensors, count_blocks, lengths_of


EMBEDDINGS, HEAD = "rwkv7.emb.weight", "head.weight"
# Where each size is read: tensor, axis. The first block does not mix values: that rank is read in the second one.
PLACES = {
    "vocab_size": (EMBEDDINGS, 0),
    "hidden_size": (EMBEDDINGS, 1),
    "num_heads": ("rwkv7.blocks.0.att.r_k", 0),
    "head_dim": ("rwkv7.blocks.0.att.r_k", 1),
    "intermediate_size": ("rwkv7.blocks.0.ffn.key.weight", 0),
    "decay_low_rank_dim": ("rwkv7.blocks.0.att.w1", 1),
    "a_low_rank_dim": ("rwkv7.blocks.0.att.a1", 1),
    "v_low_rank_dim": ("rwkv7.blocks.1.att.v1", 1),
    "gate_low_rank_dim": ("rwkv7.blocks.0.att.g1", 1),
}
# Many files have them, and no runtime reads them.
UNUSED = re.compile(r"rwkv7\.blocks\.0\.att\.v[012]")
# A tuned initial state among the weights.
STATE = re.compile(r"rwkv7\.blocks\.\d+\.att\.time_state")
# Vectors, which come with and without axes of length 1.
VECTORS = re.compile(r"(att\.(x_[rwkvag]|[wav]0|k_[ka])|ffn\.x_k)$")
# Tensors that only relatives of the model have. The names of their other tensors may be the same.
RELATED = re.compile(r"\.ffn\.s_emb|\.qkv\.|\.enn|\.attn\.q_proj\.|^(rwkv|vit)\.")


class Rwkv7Format(Format):
    """
    A layout of Goose.

    Attributes:
        sign: the name of a tensor that only this layout has.
    """

    model_type = "rwkv7"
    # Published configurations have numbers of heads that mean nothing.
    misused_fields = ("num_heads",)
    sign: str

    def matches(self, tensors: Tensors) -> bool:
        return self.sign in tensors and not any(RELATED.search(name) for name in tensors)

    def is_buffer(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in (UNUSED, STATE))

    def read(self, found: Mapping[str, Found], given: Mapping[str, Any]) -> Reading:
        layers = count_blocks(found, "rwkv7.blocks.")
        places, fields = dict(PLACES), {"num_hidden_layers": layers}
        if layers < 2:
            del places["v_low_rank_dim"]
        notes = []
        if any(STATE.fullmatch(name) for name in found):
            notes.append("the tuned initial state was left out; `subquad.load_time_states` reads it into an adapter")
        return Reading(
            lengths_of(found, places) | fields,
            fields,
            places,
            tied=(EMBEDDINGS, HEAD) if given.get("tie_word_embeddings") is True else None,
            notes=notes,
        )

    def fits(self, name: str, stored: Shape, shape: Shape, fields: Mapping[str, Any]) -> bool:
        if VECTORS.search(name):
            return [length for length in stored if length != 1] == [length for length in shape if length != 1]
        return stored == shape


class Rwkv7Trainer(Rwkv7Format):
    name = "rwkv7-trainer"
    title = "Goose (RWKV-7), trainer checkpoint"
    sign = "blocks.0.att.r_k"

    def matches(self, tensors: Tensors) -> bool:
        return super().matches(tensors) and not is_transposed(tensors)

    def rename(self, name: str) -> str:
        return f"rwkv7.{name}" if re.match(r"(emb|blocks|ln_out)\.", name) else name


class Rwkv7Web(Rwkv7Trainer):
    name = "rwkv7-web"
    title = "Goose (RWKV-7), web-rwkv's layout"

    def matches(self, tensors: Tensors) -> bool:
        return Rwkv7Format.matches(self, tensors) and is_transposed(tensors)

    def parts(self, name: str) -> dict[str, Take]:
        low_rank = re.fullmatch(r"blocks\.\d+\.att\.[wavg][12]", name)
        return {self.rename(name): torch.t if low_rank else None}


def is_transposed(tensors: Tensors) -> bool:
    """Whether the low-rank matrices are those of web-rwkv, (rank, width) first. The rank is below the width."""
    first = tensors.get("blocks.0.att.g1")
    return first is not None and len(first.shape) == 2 and first.shape[0] < first.shape[1]


class Rwkv7Hub(Rwkv7Format):
    name = "rwkv7-hub"
    title = "Goose (RWKV-7), Hub model"
    sign = "rwkv7.blocks.0.att.r_k"


class Rwkv7Fla(Rwkv7Format):
    name = "rwkv7-fla"
    title = "Goose (RWKV-7), flash-linear-attention's layout"
    config_types = ("rwkv7_native",)
    sign = "model.layers.0.attn.r_k"

    def parts(self, name: str) -> dict[str, Take]:
        return FLASH_LINEAR_ATTENTION.read_name(name)


class Rwkv7Rs(Rwkv7Format):
    name = "rwkv7-rs"
    title = "Goose (RWKV-7), rwkv-rs's layout"
    config_types = ("rwkv",)
    sign = "model.layers.0.linear_attn.r_k"
    names = {
        r"^model\.embed_tokens\.": "rwkv7.emb.",
        r"^model\.embedding_norm\.": "rwkv7.blocks.0.ln0.",
        r"^model\.norm\.": "rwkv7.ln_out.",
        r"^lm_head\.": "head.",
        r"^model\.layers\.(\d+)\.": r"rwkv7.blocks.\1.",
        r"\.input_layernorm\.": ".ln1.",
        r"\.post_attention_layernorm\.": ".ln2.",
        r"\.linear_attn\.g_norm\.": ".att.ln_x.",
        r"\.linear_attn\.r_proj\.": ".att.receptance.",
        r"\.linear_attn\.k_proj\.": ".att.key.",
        r"\.linear_attn\.v_proj\.": ".att.value.",
        r"\.linear_attn\.o_proj\.": ".att.output.",
        r"\.linear_attn\.": ".att.",
        r"\.mlp\.": ".ffn.",
    }

    def rename(self, name: str) -> str:
        for pattern, ours in self.names.items():
            name = re.sub(pattern, ours, name, count=1)
        return name


FORMATS = (Rwkv7Trainer(), Rwkv7Web(), Rwkv7Hub(), Rwkv7Fla(), Rwkv7Rs())
