"""Configuration of VisualRWKV."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ...modeling.configuration_checks import CheckedConfig, check_configuration, check_names
from ...modeling.versions import CACHE_NAMES
from ..rwkv5.configuration_rwkv5 import Rwkv5Config
from ..rwkv6.configuration_rwkv6 import Rwkv6Config


TEXT_CONFIGS = {config.model_type: config for config in (Rwkv5Config, Rwkv6Config)}
# openai/clip-vit-large-patch14-336, the tower of all published models.
TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
READING_ORDERS = {"rwkv5": "forward", "rwkv6": "alternate"}


def _of_text_config(name: str) -> property:
    """A field of the text configuration that can also be read and set at the top."""
    return property(
        lambda self: getattr(self.text_config, name), lambda self, value: setattr(self.text_config, name, value)
    )


@strict
class VisualRwkvConfig(CheckedConfig):
    r"""
    Configuration of a VisualRWKV model, section 10.2 of "Eagle and Finch" (arXiv:2404.05892): a CLIP vision tower, a
    projection without bias, and a language model. There are two published generations: with Eagle (v5.0) the class
    token of an image comes before its patches, with Finch (v6.0) after them.

    Args:
        vision_config: a `CLIPVisionConfig` for the tower, or its fields; openai/clip-vit-large-patch14-336 if None.
        text_config: a [`Rwkv5Config`] or [`Rwkv6Config`], or its fields with `model_type`; Finch's defaults if None.
        image_token_id: the id of the placeholders: `input_ids` has one for each feature of an image. The
            World vocabulary ends before 65530, but its embeddings do not.
        grid_size: use of an image's patches. -1: all of them; 0: none, only the class token; 1: their mean
            (with Eagle the mean of patches and class token, instead of both); n: means of n x n squares, if n divides
            the number of patches per side.
        reading_order: "forward", or "alternate": every second block, from the second one on, reads the patches of an
            image from the last to the first. If None, as the published models were trained: "forward" with Eagle,
            "alternate" with Finch.
    """

    model_type = "visual_rwkv"
    sub_configs = {"vision_config": PreTrainedConfig, "text_config": PreTrainedConfig}
    keys_to_ignore_at_inference = list(CACHE_NAMES)
    base_model_fsdp_plan = {}  # tower and text model have their own
    num_hidden_layers = _of_text_config("num_hidden_layers")
    use_cache = _of_text_config("use_cache")

    vision_config: dict | PreTrainedConfig | None = None
    text_config: dict | PreTrainedConfig | None = None
    image_token_id: int = 65530
    grid_size: int = -1
    reading_order: str | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        if self.vision_config is None or isinstance(self.vision_config, dict):
            # Not at the top: it imports the tables of all models, which is slow and needs them to be complete.
            from transformers import CLIPVisionConfig

            fields = self.vision_config or TOWER
            check_names(CLIPVisionConfig, fields, kwargs.get("_from_file", False))
            self.vision_config = CLIPVisionConfig(**fields)
        if self.text_config is None:
            self.text_config = Rwkv6Config()
        elif isinstance(self.text_config, dict):
            self.text_config = self._text_config(kwargs.get("_from_file", False), **self.text_config)
        self.tie_word_embeddings = self.tie_word_embeddings or self.text_config.tie_word_embeddings
        if self.reading_order is None:
            self.reading_order = READING_ORDERS.get(self.text_config.model_type)
        super().__post_init__(**kwargs)

    @staticmethod
    def _text_config(from_file: bool, model_type: str = "rwkv6", **fields: Any) -> PreTrainedConfig:
        if model_type not in TEXT_CONFIGS:
            raise ValueError(f"`text_config`: its `model_type` must be rwkv5 or rwkv6, got {model_type!r}.")
        config_class = TEXT_CONFIGS[model_type]
        return config_class.from_dict(fields) if from_file else config_class(**fields)

    @property
    def class_token_first(self) -> bool:
        """Whether an image's class token comes before its patches."""
        return self.text_config.model_type == "rwkv5"

    @property
    def patches_per_side(self) -> int:
        """Number of patches per side of the image."""
        return self.vision_config.image_size // self.vision_config.patch_size

    @property
    def num_image_tokens(self) -> int:
        """Number of features, and of placeholders, of an image."""
        if self.grid_size == 0 or (self.grid_size == 1 and self.class_token_first):
            return 1
        return 1 + (self.patches_per_side if self.grid_size == -1 else self.grid_size) ** 2

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        vision, text = self.vision_config, self.text_config
        if vision.model_type != "clip_vision_model":
            raise ValueError(
                f"`vision_config`: its `model_type` must be clip_vision_model, got {vision.model_type!r}."
            )
        if text.model_type not in TEXT_CONFIGS:
            raise ValueError(f"`text_config`: its `model_type` must be rwkv5 or rwkv6, got {text.model_type!r}.")
        text.validate_architecture()
        text.validate_names()
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels")
        check_configuration(vision, (*sizes, "image_size", "patch_size"), ("layer_norm_eps",))
        check_configuration(self, ())
        if vision.image_size % vision.patch_size:
            raise ValueError(
                f"`vision_config`: `image_size` {vision.image_size} must be a multiple of `patch_size` "
                f"{vision.patch_size}."
            )
        if self.grid_size < -1 or (self.grid_size > 0 and self.patches_per_side % self.grid_size):
            raise ValueError(
                f"`grid_size` must be -1, 0 or a divisor of the {self.patches_per_side} patches per side, got "
                f"{self.grid_size}."
            )
        if self.reading_order not in ("forward", "alternate"):
            raise ValueError(f"`reading_order` must be 'forward' or 'alternate', got {self.reading_order!r}.")
        if not 0 <= self.image_token_id < text.vocab_size:
            raise ValueError(
                f"`image_token_id` must be one of the {text.vocab_size} ids of `text_config`, got "
                f"{self.image_token_id}."
            )


__all__ = ["VisualRwkvConfig"]
