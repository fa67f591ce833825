"""Configuration of Finch (RWKV-6)."""

from huggingface_hub.dataclasses import strict

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

    lora_rank_tokenshift: int = 32
    lora_rank_decay: int = 64

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        super().validate_architecture()
        if hasattr(self, "proj_low_rank_dim"):
            raise ValueError(
                "`proj_low_rank_dim` is a field of flash-linear-attention's Finch, whose tensors have other names. "
                "`subquad convert` makes a directory that loads."
            )
        for name in ("lora_rank_tokenshift", "lora_rank_decay"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")

    def set_sizes_from_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """As [`Rwkv5Config.set_sizes_from_shapes`], and the two ranks."""
        super().set_sizes_from_shapes(shapes)
        if (shape := shapes.get("rwkv.blocks.0.attention.time_maa_w2")) is not None:
            self.lora_rank_tokenshift = shape[1]
        if (shape := shapes.get("rwkv.blocks.0.attention.time_decay_w2")) is not None:
            self.lora_rank_decay = shape[0]


__all__ = ["Rwkv6Config"]
