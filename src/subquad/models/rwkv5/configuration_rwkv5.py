"""Configuration of Eagle (RWKV-5)."""

from typing import Any

from huggingface_hub.dataclasses import strict

from ...modeling.configuration_checks import CheckedConfig, check_configuration
from ...modeling.layer_types import all_linear
from ...modeling.tensor_parallel import divides_heads, plan_heads, plan_property
from ...modeling.versions import CACHE_NAMES


@strict
class Rwkv5Config(CheckedConfig):
    r"""
    Configuration of an Eagle (RWKV-5.2) model, section 4.1 of "Eagle and Finch" (arXiv:2404.05892), with all fields of
    the published `config.json` files.

    Args:
        vocab_size: number of token ids, V.
        context_length: length of the training sequences. It does not affect the model.
        hidden_size: model dimension, D.
        num_hidden_layers: number of blocks, L.
        attention_hidden_size: total width of the heads; `hidden_size` if None.
        num_attention_heads: number of heads, h; `attention_hidden_size / head_size` if None. Published files have the
            size of a head (64) in this field, so 64 always means that; give `head_size` if you have 64 heads.
        head_size: width of a head; by default from `num_attention_heads`, or 64.
        head_size_divisor: the group norm over the heads has epsilon 1e-5 * head_size_divisor ** 2.
        intermediate_size: width of the channel mix; 3.5 * `hidden_size`, rounded down to a multiple of 32, if None.
        layer_norm_epsilon: epsilon of every layer norm except the one over the heads.
        initializer_range: the embeddings are initialised uniformly in +- this; the paper uses the maximum learning
            rate (table 14).
        rescale_every: accepted and kept, without effect. The published runtime uses it to halve weights and residual
            stream in float16. Here the stream is float32 instead.
    """

    model_type = "rwkv5"
    attribute_map = {"max_position_embeddings": "context_length", "head_dim": "head_size"}
    keys_to_ignore_at_inference = list(CACHE_NAMES)
    layer_types = all_linear
    base_model_fsdp_plan = {
        "embeddings": "free_full_weight",
        "blocks.*": "free_full_weight",
        "ln_out": "keep_full_weight",
    }
    # Parameters of each head outside linear layers, see `plan_heads`.
    _head_parameters = {
        "time_decay": "colwise",
        "time_faaaa": "colwise",
        "ln_x.weight": "colwise",
        "ln_x.bias": "colwise",
    }

    ignored_fields = ("model_version",)

    vocab_size: int = 65536
    context_length: int = 4096
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    attention_hidden_size: int | None = None
    num_attention_heads: int | None = None
    head_size: int | None = None
    head_size_divisor: int = 8
    intermediate_size: int | None = None
    layer_norm_epsilon: float = 1e-5
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = None
    initializer_range: float = 4e-4
    rescale_every: int = 6
    tie_word_embeddings: bool = False
    use_cache: bool = True

    def __post_init__(self, **kwargs):
        if self.attention_hidden_size is None:
            self.attention_hidden_size = self.hidden_size
        width, heads = self.attention_hidden_size, self.num_attention_heads
        if self.head_size is None:
            self.head_size = width // heads if heads and heads != 64 else 64
        # In published files `num_attention_heads` is the size of a head, so it may contradict `head_size`.
        if heads in (None, 64, self.head_size):
            self.num_attention_heads = width // max(self.head_size, 1)
        if self.intermediate_size is None:
            self.intermediate_size = int(self.hidden_size * 3.5) // 32 * 32
        super().__post_init__(**kwargs)

    @property
    def only_values(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """As in [`CheckedConfig`]."""
        reason = "the fields are `head_size` and `num_attention_heads` here"
        return super().only_values | {"num_heads": ((self.num_attention_heads,), reason)}

    @plan_property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallel processes share the model: by heads, if their number divides the number of heads."""
        into, split = ("receptance", "key", "value", "gate"), divides_heads(self, self.num_attention_heads)
        return {
            "embeddings": "embedding_rowwise",
            **plan_heads("blocks.*.attention", into, "output", self._head_parameters, split),
            "blocks.*.feed_forward.key": "colwise",
            "blocks.*.feed_forward.value": "rowwise",
            "blocks.*.feed_forward.receptance": "colwise_gather_output",
        }

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "attention_hidden_size", "head_size")
        positive = ("layer_norm_epsilon", "initializer_range")
        check_configuration(self, (*sizes, "head_size_divisor", "intermediate_size"), positive)
        if self.num_attention_heads * self.head_size != self.attention_hidden_size:
            raise ValueError(
                f"`attention_hidden_size` ({self.attention_hidden_size}) must be `num_attention_heads` "
                f"({self.num_attention_heads}) times `head_size` ({self.head_size})."
            )

    # package only
    def set_sizes_from_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """
        Reads sizes that published `config.json` files lack or misstate from a checkpoint's tensors.

        Args:
            shapes: tensor name (canonical, `rwkv.blocks.0.attention...`) to shape. Missing names change nothing.
        """
        if (shape := shapes.get("rwkv.blocks.0.attention.time_faaaa")) is not None:
            self.num_attention_heads, self.head_size = shape
            self.attention_hidden_size = shape[0] * shape[1]
        shape = shapes.get("rwkv.blocks.0.feed_forward.key.weight", ())
        if len(shape) == 2 and shape[1] == self.hidden_size:  # unless packed to a few bits
            self.intermediate_size = shape[0]


__all__ = ["Rwkv5Config"]
