"""Configuration of Goose (RWKV-7)."""

import math
import re
from typing import Any

from huggingface_hub.dataclasses import strict

from ...modeling.configuration_checks import CheckedConfig, check_configuration
from ...modeling.layer_types import all_linear
from ...modeling.tensor_parallel import divides_heads, plan_heads, plan_property
from ...modeling.versions import CACHE_NAMES


# The ranks, each with the layer and letter of the tensor that it is read from: on axis 1 of the RWKV organisation's
# tensors, on axis 0 of flash-linear-attention's. The first layer does not mix values.
RANKS = {
    "decay_low_rank_dim": (0, "w"),
    "a_low_rank_dim": (0, "a"),
    "v_low_rank_dim": (1, "v"),
    "gate_low_rank_dim": (0, "g"),
}
# Published files of flash-linear-attention have it in `num_heads` for any size of model.
MEANINGLESS_HEADS = 32
# The trainer has an option for them that only changes the shape of `r_k`: it would not run.
OTHER_WIDTH = "heads that are not together as wide as the model are not supported"
PACKED = "rwkv7-hf's 8-bit and 4-bit weights are not read; convert the directory that they were made of"
# Prefixes of fields that only rwkv7-hf uses.
RWKV7_HF = ("native_mm", "rwkv7_")
# Patterns of tensors in the first two blocks that only relatives of the model have, and their names. A relative may
# also have the tensors of a later entry: RWKV-8 has RWKV-7b's, and RWKV-7b has RWKV-7a's.
RELATIVES = {
    r"\.(w_u8|q_row|packed(_row|_group)?)$": "RWKV-7 (Goose) with weights that rwkv7-hf packed to 8 or 4 bits",
    r"\.(enn|emm)": "an RWKV-8 preview",
    r"\.qkv\.qq\.": "RWKV-7b, with DeepEmbed and attention",
    r"\.s_emb": "RWKV-7a, with DeepEmbed",
    r"\.attn\.q_proj\.": "a hybrid of RWKV-7 (Goose) and softmax attention",
}


@strict
class Rwkv7Config(CheckedConfig):
    r"""
    Configuration of a Goose (RWKV-7) model (arXiv:2503.14456), with the field names of the RWKV organisation's
    `config.json` files. flash-linear-attention's names, nearly all the same, are read too.

    Args:
        vocab_size: number of token ids, V.
        hidden_size: model dimension, D.
        num_hidden_layers: number of blocks, L.
        head_dim: width of a head, N; `hidden_size / num_heads` or, without that, 64 if None.
        num_heads: number of heads, also as `num_attention_heads`; `hidden_size / head_dim` if None. Files of
            flash-linear-attention always have 32 in this field, so 32 in a file is ignored if there is a `head_dim`.
        intermediate_size: width of the channel mixing; 4 * `hidden_size`, rounded up to a multiple of 32, if None.
        decay_low_rank_dim, a_low_rank_dim, v_low_rank_dim, gate_low_rank_dim: ranks of the maps that make the decay w,
            the in-context learning rate a, the mixing of values v, and the gate g. If None, the trainer's ranks:
            2.5, 2.5, 1.7 and 5 times the square root of `hidden_size`, rounded to a multiple of 32.
        norm_eps: epsilon of every layer norm. The norm over the heads has `head_dim` times this epsilon.
    """

    model_type = "rwkv7"
    attribute_map = {
        "num_attention_heads": "num_heads",
        "head_size": "head_dim",
        "layer_norm_epsilon": "norm_eps",
    }
    keys_to_ignore_at_inference = list(CACHE_NAMES)
    layer_types = all_linear
    base_model_fsdp_plan = {
        "emb": "free_full_weight",
        "blocks.*": "free_full_weight",
        "ln_out": "keep_full_weight",
    }
    # Parameters of each head outside linear layers, see `plan_heads`.
    _head_parameters = {
        **dict.fromkeys(("w0", "w2", "a0", "a2", "v0", "v2", "g2", "k_k", "k_a"), "rowwise"),
        **dict.fromkeys(("r_k", "ln_x.weight", "ln_x.bias"), "colwise"),
    }
    # How the other parts of a block are split.
    _block_plan = {"ffn.key": "colwise", "ffn.value": "rowwise"}
    # package only
    _relatives = RELATIVES  # the models whose tensors are refused

    # From other packages. The trainer has no limit on the length of a text. Halving the residual stream every few
    # layers, as in float16, does not change the output.
    ignored_fields = (
        "attn_mode",
        "context_length",
        "fuse_cross_entropy",
        "fuse_linear_cross_entropy",
        "fuse_norm",
        "initializer_range",
        "max_position_embeddings",
        "rescale_every",
        "use_l2warp",
        "wkv_backend",
        "wkv_implementation",
    )

    vocab_size: int = 65536
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    head_dim: int | None = None
    num_heads: int | None = None
    intermediate_size: int | None = None
    decay_low_rank_dim: int | None = None
    a_low_rank_dim: int | None = None
    v_low_rank_dim: int | None = None
    gate_low_rank_dim: int | None = None
    norm_eps: float = 1e-5
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True

    @property
    def only_values(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """As in [`CheckedConfig`]. All published models have these values."""
        return super().only_values | {
            "attn": ((None,), "softmax attention is not supported"),
            "attention_hidden_size": ((self.hidden_size,), OTHER_WIDTH),
            "value_dim": ((self.hidden_size,), OTHER_WIDTH),
            "hidden_act": (("sqrelu",), "another activation is not supported"),
            "norm_first": ((True,), "a model without a norm of the embeddings is not supported"),
            "norm_bias": ((True,), "norms without biases are not supported"),
            "group_norm_epsilon": ((self.head_dim * self.norm_eps,), "another epsilon is not supported"),
            "embedding_layer_norm_fused": ((False,), "a norm that is part of the embeddings is not supported"),
            "use_deep_embed": ((False,), "the DeepEmbed of RWKV-8 is not supported"),
            "architecture_version": (("rwkv7",), "this is another model"),
            "number_of_conv_states": ((2,), "a block keeps one token before each of its two layers"),
            "wkv_state_dtype": (("float32",), "states are kept in float32 only; leave the field out"),
            **dict.fromkeys(("use_native_mm4", "use_native_mm8"), ((False,), PACKED)),
        }

    def __post_init__(self, **kwargs):
        if kwargs.get("_from_file"):
            self._read_rwkv7_hf(kwargs)
            if self.head_dim is not None and self.num_heads == MEANINGLESS_HEADS:
                self.num_heads = None
        for alias, name in self.attribute_map.items():
            if (value := kwargs.pop(alias, None)) is None:
                continue
            if (given := getattr(self, name)) not in (getattr(type(self), name), value):
                raise ValueError(f"`{alias}` is {value!r}, but `{name}`, which means the same, is {given!r}.")
            setattr(self, name, value)  # sizes below depend on it
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_heads if self.num_heads else 64
        if self.num_heads is None:
            self.num_heads = self.hidden_size // max(self.head_dim, 1)
        ratio = kwargs.pop("hidden_ratio", None) or 4
        if self.intermediate_size is None:
            self.intermediate_size = math.ceil(self.hidden_size * ratio / 32) * 32
        for name, factor in zip(RANKS, (2.5, 2.5, 1.7, 5.0), strict=True):
            if getattr(self, name) is None:
                setattr(self, name, max(32, round(factor * self.hidden_size**0.5 / 32) * 32))
        super().__post_init__(**kwargs)

    def _read_rwkv7_hf(self, given: dict[str, Any]) -> None:
        """Drops the fields of rwkv7-hf, including a BOS token that its tokenizer never produces."""
        theirs = [name for name in given if name.startswith(RWKV7_HF)]
        for name in theirs:
            del given[name]
        if self.bos_token_id == 1 and (theirs or str(given.get("model_type")).startswith(RWKV7_HF)):
            self.bos_token_id = 0

    @plan_property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallel processes share the model: by heads, if their number divides the number of heads."""
        into, split = ("receptance", "key", "value"), divides_heads(self, self.num_heads)
        return {
            "emb": "embedding_rowwise",
            **plan_heads("blocks.*.att", into, "output", self._head_parameters, split),
            **{f"blocks.*.{name}": style for name, style in self._block_plan.items()},
        }

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "intermediate_size", *RANKS)
        check_configuration(self, sizes, ("norm_eps",))
        if self.hidden_size % self.head_dim:
            raise ValueError(f"`hidden_size` ({self.hidden_size}) must be a multiple of `head_dim` ({self.head_dim}).")
        if self.num_heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"`num_heads` ({self.num_heads}) times `head_dim` ({self.head_dim}) must be `hidden_size` "
                f"({self.hidden_size}): {OTHER_WIDTH}."
            )

    # package only
    def set_sizes_from_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """
        Reads sizes that published `config.json` files lack or misstate from a checkpoint's tensors.

        Args:
            shapes: name to shape of the tensors of the first two blocks, under any names that load. Missing
                names change nothing.

        Raises:
            ValueError: if a tensor belongs to a relative of the model.
        """
        for pattern, title in self._relatives.items():
            if found := next((name for name in shapes if re.search(pattern, name)), None):
                raise ValueError(f"{found} is a tensor of {title}, not of the model type {self.model_type}.")
        for name, shape in shapes.items():
            place = re.search(r"(?:blocks|layers)\.([01])\.(?:attn?|linear_attn|ffn|mlp)\.(.+)$", name)
            if place is None or len(shape) < 2:
                continue
            layer, leaf = int(place[1]), place[2]
            for size, (first, letter) in RANKS.items():
                if layer == first and leaf in (f"{letter}1", f"{letter}_lora.lora.0.weight"):
                    setattr(self, size, shape[leaf == f"{letter}1"])
            if layer == 0 and leaf == "r_k":
                self.num_heads, self.head_dim = shape[-2:]
            elif layer == 0 and leaf == "key.weight" and shape[1] == self.hidden_size:  # unless packed to a few bits
                self.intermediate_size = shape[0]


__all__ = ["Rwkv7Config"]
