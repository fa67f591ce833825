"""
Goose (RWKV-7), in six formats. Three have the trainer's names: alone, after `rwkv7.` (the RWKV organisation's
repositories, and ours), or after `model.` (rwkv-rs). rwkv-rs had other names before, and flash-linear-attention has
its own. web-rwkv has the trainer's names with transposed matrices. The model type does not distinguish them: several
have `rwkv7`.
"""

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from subquad.hub.loading import NameMap, transposed
from subquad.models.rwkv7.configuration_rwkv7 import MEANINGLESS_HEADS, RELATIVES
from subquad.models.rwkv7.loading_rwkv7 import BONUS, FLASH_LINEAR_ATTENTION, OLD_RWKV_RS, RWKV_RS

from .errors import ConversionError
from .formats import Format, InferredConfig, Shape, SourceTensor, Tensors, count_blocks, lengths_of


EMBEDDINGS, HEAD = "rwkv7.emb.weight", "head.weight"
# The source of each size: tensor, axis. The first block does not mix values: that rank is read from the second one.
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
# Present in many files, but unused by all runtimes.
UNUSED = re.compile(r"rwkv7\.blocks\.0\.att\.v[012]")
# Vectors, which may have axes of length 1.
VECTORS = re.compile(r"(att\.(x_[rwkvag]|[wav]0|k_[ka])|ffn\.x_k)$")
# Tensors of relatives and of larger models. The names of their other tensors may be the same.
RELATED = re.compile("|".join((*RELATIVES, r"^(rwkv|vit)\.")))


class Rwkv7Format(Format):
    """
    A format of Goose.

    Attributes:
        sign: the name of a tensor that only this format has.
        related: pattern of the names of tensors that other models have.
        vectors: pattern of our names of vectors.
    """

    model_type = "rwkv7"
    sign: str
    related, vectors = RELATED, VECTORS

    def matches(self, tensors: Tensors) -> bool:
        return self.sign in tensors and not any(self.related.search(name) for name in tensors)

    def is_misused(self, name: str, value: Any, sizes: Mapping[str, Any]) -> bool:
        return name == "num_heads" and value == MEANINGLESS_HEADS

    def is_buffer(self, name: str) -> bool:
        return UNUSED.fullmatch(name) is not None

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        layers = count_blocks(found, "rwkv7.blocks.")
        places, fields = dict(PLACES), {"num_hidden_layers": layers}
        if layers < 2:
            del places["v_low_rank_dim"]
        return InferredConfig(
            lengths_of(found, places) | fields,
            fields,
            places,
            tied=(EMBEDDINGS, HEAD) if given.get("tie_word_embeddings") is True else None,
        )

    def fits(self, name: str, stored: Shape, shape: Shape, fields: Mapping[str, Any]) -> bool:
        if self.vectors.search(name):
            return [length for length in stored if length != 1] == [length for length in shape if length != 1]
        return stored == shape


class Rwkv7Trainer(Rwkv7Format):
    name = "rwkv7-trainer"
    title = "Goose (RWKV-7), trainer checkpoint"
    sign = "blocks.0.att.r_k"
    name_map = NameMap(
        {"^emb.": "rwkv7.emb.", "^blocks.": "rwkv7.blocks.", "^ln_out.": "rwkv7.ln_out."}, {".att.r_k": BONUS}
    )
    target = "pth"

    def matches(self, tensors: Tensors) -> bool:
        return super().matches(tensors) and not is_transposed(tensors)

    def unused(self, config: PreTrainedConfig) -> dict[str, Shape]:
        """The trainer's first block also has the tensors for mixing values."""
        return value_mixing("blocks.0.att.", config)


class Rwkv7Web(Rwkv7Format):
    name = "rwkv7-web"
    title = "Goose (RWKV-7), web-rwkv's layout"
    sign = Rwkv7Trainer.sign
    name_map = Rwkv7Trainer.name_map | NameMap(
        {}, {f".att.{x}{i}": transposed(f".att.{x}{i}") for x in "wavg" for i in (1, 2)}
    )
    target = "st"

    def matches(self, tensors: Tensors) -> bool:
        return super().matches(tensors) and is_transposed(tensors)

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        check_head_dim(config, "web-rwkv")
        return []


def value_mixing(prefix: str, config: PreTrainedConfig) -> dict[str, Shape]:
    """Name to shape of a block's tensors for mixing values."""
    width, rank = config.hidden_size, config.v_low_rank_dim
    return {f"{prefix}v0": (1, 1, width), f"{prefix}v1": (width, rank), f"{prefix}v2": (rank, width)}


def check_head_dim(config: PreTrainedConfig, runtime: str) -> None:
    """
    Raises:
        ConversionError: if a runtime's epsilon for the norm of the heads differs from the model's.
    """
    if config.head_dim != 64 or config.norm_eps != 1e-5:
        raise ConversionError(
            f"`head_dim` is {config.head_dim} and `norm_eps` {config.norm_eps:g}; {runtime} has an epsilon of 64e-5 "
            "for the norm of the heads written into its code, as for 64 and 1e-5."
        )


def is_transposed(tensors: Tensors) -> bool:
    """Whether the low-rank matrices are transposed as in web-rwkv, (rank, width) first. Ranks are below widths."""
    first = tensors.get("blocks.0.att.g1")
    return first is not None and len(first.shape) == 2 and first.shape[0] < first.shape[1]


class Rwkv7Hub(Rwkv7Format):
    name = "rwkv7-hub"
    title = "Goose (RWKV-7), Hub model"
    sign = "rwkv7.blocks.0.att.r_k"
    name_map = NameMap({}, {".att.r_k": BONUS})
    target = "hub"

    def unused(self, config: PreTrainedConfig) -> dict[str, Shape]:
        """The organisation's first block also has the tensors for mixing values."""
        return value_mixing("rwkv7.blocks.0.att.", config)

    def target_fields(self, config: PreTrainedConfig) -> dict[str, Any]:
        return config.to_diff_dict() | {"norm_bias": True, "wkv_state_dtype": "float32"}


class Rwkv7Fla(Rwkv7Format):
    name = "rwkv7-fla"
    title = "Goose (RWKV-7), flash-linear-attention's layout"
    sign = "model.layers.0.attn.r_k"
    name_map = FLASH_LINEAR_ATTENTION
    target = "fla"

    def target_fields(self, config: PreTrainedConfig) -> dict[str, Any]:
        return config.to_diff_dict() | {
            "architectures": ["RWKV7ForCausalLM"],
            "value_dim": [config.hidden_size] * config.num_hidden_layers,
            "hidden_act": "sqrelu",
            "norm_first": True,
            "norm_bias": True,
            "attn": None,
            # Its fused norm of the removal keys adds an epsilon that was not used in training.
            "fuse_norm": False,
        }


class Rwkv7Rs(Rwkv7Format):
    name = "rwkv7-rs"
    title = "Goose (RWKV-7), rwkv-rs's layout"
    sign = "model.blocks.0.att.r_k"
    name_map = RWKV_RS


class Rwkv7OldRs(Rwkv7Format):
    name = "rwkv7-old-rs"
    title = "Goose (RWKV-7), rwkv-rs's older layout"
    sign = "model.layers.0.linear_attn.r_k"
    name_map = OLD_RWKV_RS


FORMATS = (Rwkv7Trainer(), Rwkv7Web(), Rwkv7Hub(), Rwkv7Fla(), Rwkv7Rs(), Rwkv7OldRs())
