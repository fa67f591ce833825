"""Configuration of Finch (RWKV-6)."""

import math
from typing import Any

from huggingface_hub.dataclasses import strict

from ...modeling.configuration_checks import check_configuration
from ..rwkv5.configuration_rwkv5 import Rwkv5Config


@strict
class Rwkv6Config(Rwkv5Config):
    r"""
    Configuration of a Finch (RWKV-6.0) model, section 4.2 of "Eagle and Finch" (arXiv:2404.05892): the fields of
    [`Rwkv5Config`], and the ranks of the low-rank maps that make token shift and decay depend on the data.

    Args:
        lora_rank_tokenshift: rank of the token shift's five maps (A, B of equation 14). Published files lack it.
        lora_rank_decay: rank of the decay's map. Published files lack it.
    """

    model_type = "rwkv6"
    _head_parameters = {**Rwkv5Config._head_parameters, "time_decay": "rowwise", "time_decay_w2": "rowwise"}

    # From flash-linear-attention, except for the first.
    ignored_fields = (
        *Rwkv5Config.ignored_fields,
        "attn_mode",
        "fuse_cross_entropy",
        "fuse_linear_cross_entropy",
        "fuse_norm",
        "use_l2warp",
    )

    lora_rank_tokenshift: int = 32
    lora_rank_decay: int = 64

    def __post_init__(self, **kwargs):
        if "proj_low_rank_dim" in kwargs or "gate_low_rank_dim" in kwargs:
            self._read_flash_linear_attention(kwargs)
        super().__post_init__(**kwargs)

    def _read_flash_linear_attention(self, given: dict[str, Any]) -> None:
        """Reads the fields of flash-linear-attention's Finch and removes them from `given`."""
        self.lora_rank_tokenshift = given.pop("proj_low_rank_dim", self.lora_rank_tokenshift)
        self.lora_rank_decay = given.pop("gate_low_rank_dim", self.lora_rank_decay)
        self.layer_norm_epsilon = given.pop("norm_eps", self.layer_norm_epsilon)
        if heads := given.pop("num_heads", None):
            self.head_size = self.hidden_size // heads
        if (ratio := given.pop("hidden_ratio", None)) and self.intermediate_size is None:
            self.intermediate_size = math.ceil(self.hidden_size * ratio / 32) * 32
        given.pop("max_position_embeddings", None)  # 2048 in all files
        # The special tokens belong to that package's default tokenizer, which published models do not use.
        self.bos_token_id, self.eos_token_id, self.pad_token_id = 0, 0, None

    @property
    def only_values(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """As in [`CheckedConfig`]. Files of flash-linear-attention have these fields."""
        return super().only_values | {
            "attn": ((None,), "softmax attention is not supported"),
            "hidden_act": (("sqrelu",), "another activation is not supported"),
            "norm_bias": ((True,), "norms without biases are not supported"),
            "norm_first": ((True,), "a model without a norm of the embeddings is not supported"),
            "expand_k": ((1,), "keys of another width than the model are not supported"),
            "expand_v": ((1,), "values of another width than the model are not supported"),
        }

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        super().validate_architecture()
        check_configuration(self, ("lora_rank_tokenshift", "lora_rank_decay"))

    # package only
    def set_sizes_from_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """As [`Rwkv5Config.set_sizes_from_shapes`], and the two ranks; also from flash-linear-attention's names."""
        ours = {
            "model.layers.0.attn.bonus": "rwkv.blocks.0.attention.time_faaaa",
            "model.layers.0.ffn.key.linear.weight": "rwkv.blocks.0.feed_forward.key.weight",
        }
        super().set_sizes_from_shapes({ours.get(name, name): shape for name, shape in shapes.items()})
        if (shape := shapes.get("model.layers.0.attn.x_proj.2.weight")) is not None:
            self.lora_rank_tokenshift = shape[1] // 5
        if (shape := shapes.get("model.layers.0.attn.w_proj.linear.lora.0.weight")) is not None:
            self.lora_rank_decay = shape[0]
        if (shape := shapes.get("rwkv.blocks.0.attention.time_maa_w2")) is not None:
            self.lora_rank_tokenshift = shape[1]
        if (shape := shapes.get("rwkv.blocks.0.attention.time_decay_w2")) is not None:
            self.lora_rank_decay = shape[0]


__all__ = ["Rwkv6Config"]
