"""Configuration of VisualRWKV."""

from math import isqrt
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ...modeling.configuration_checks import CheckedConfig, check_configuration, check_names
from ...modeling.versions import CACHE_NAMES
from ..rwkv5.configuration_rwkv5 import Rwkv5Config
from ..rwkv6.configuration_rwkv6 import Rwkv6Config
from ..rwkv7.configuration_rwkv7 import Rwkv7Config


TEXT_CONFIGS = {config.model_type: config for config in (Rwkv5Config, Rwkv6Config, Rwkv7Config)}
TEXT_TYPES = "rwkv5, rwkv6 or rwkv7"
# openai/clip-vit-large-patch14-336, the tower of the published models with Eagle and Finch.
CLIP = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
# The towers of the published models with Goose: DINOv2 L/14 with registers, SigLIP SO400M/14 and SAM's ViT-B. Fields
# with the default of transformers are left out.
DINO = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
}
SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
}
# SigLIP's in every model: its GELU is exact, unlike transformers' default, and nothing reads its pooled output.
SIGLIP_FIELDS = {"hidden_act": "gelu", "vision_use_head": False}
READING_ORDERS = {"rwkv6": "alternate"}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_channels", "image_size", "patch_size")


def _check_tower(config: PreTrainedConfig, model_type: str, name: str) -> None:
    """
    Raises:
        ValueError: if the configuration of a tower, the field `name`, is of another type or has impossible sizes.
    """
    if config.model_type != model_type:
        raise ValueError(f"`{name}`: its `model_type` must be {model_type}, got {config.model_type!r}.")
    check_configuration(config, SIZES, ("layer_norm_eps",))
    if config.image_size % config.patch_size:
        raise ValueError(
            f"`{name}`: `image_size` {config.image_size} must be a multiple of `patch_size` {config.patch_size}."
        )


def _of_text_config(name: str) -> property:
    """A field of the text configuration that can also be read and set at the top."""
    return property(
        lambda self: getattr(self.text_config, name), lambda self, value: setattr(self.text_config, name, value)
    )


@strict
class VisualRwkvTowersConfig(CheckedConfig):
    r"""
    Configuration of the three towers that VisualRWKV has with Goose. They read the same image in their own sizes and
    have the same number of patches per side; SAM's has twice as many, and squares of 2 x 2 become one.

    Args:
        dino: a `Dinov2WithRegistersConfig`, or its fields; DINOv2 L/14 for images of 448 x 448 if None.
        siglip: a `SiglipVisionConfig`, or its fields; SigLIP SO400M/14 for images of 448 x 448 if None.
        sam: a `SamVisionConfig`, or its fields; SAM's ViT-B for images of 1024 x 1024 if None.
    """

    model_type = "visual_rwkv_towers"
    sub_configs = dict.fromkeys(("dino", "siglip", "sam"), PreTrainedConfig)

    dino: dict | PreTrainedConfig | None = None
    siglip: dict | PreTrainedConfig | None = None
    sam: dict | PreTrainedConfig | None = None

    def __post_init__(self, **kwargs):
        # Not at the top: see VisualRwkvConfig.
        from transformers import Dinov2WithRegistersConfig, SamVisionConfig, SiglipVisionConfig

        published = {"dino": DINO, "siglip": SIGLIP, "sam": {}}
        always = {"siglip": SIGLIP_FIELDS}
        classes = {"dino": Dinov2WithRegistersConfig, "siglip": SiglipVisionConfig, "sam": SamVisionConfig}
        for name, config_class in classes.items():
            if isinstance(given := getattr(self, name), PreTrainedConfig):
                continue
            # Some attributes that these classes save are not fields.
            fields = {field: value for field, value in (given or {}).items() if field not in vars(config_class())}
            check_names(config_class, fields, kwargs.get("_from_file", False))
            setattr(self, name, config_class(**always.get(name, {}) | (given or published[name])))
        super().__post_init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        """Number of features of a patch, of all towers together."""
        return self.dino.hidden_size + self.siglip.hidden_size + 4 * self.sam.output_channels

    @property
    def patches_per_side(self) -> int:
        """Number of patches per side of the image."""
        return self.dino.image_size // self.dino.patch_size

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        _check_tower(self.dino, "dinov2_with_registers", "vision_config.dino")
        _check_tower(self.siglip, "siglip_vision_model", "vision_config.siglip")
        _check_tower(self.sam, "sam_vision_model", "vision_config.sam")
        for name, value in SIGLIP_FIELDS.items():
            if getattr(self.siglip, name) != value:
                raise ValueError(
                    f"`vision_config.siglip`: `{name}` must be {value!r}, got {getattr(self.siglip, name)!r}."
                )
        if self.dino.num_hidden_layers < 2 or self.siglip.num_hidden_layers < 2:
            raise ValueError(
                "`vision_config`: features are the output of the last layer but one; a tower has only one."
            )
        sides = [tower.image_size // tower.patch_size for tower in (self.dino, self.siglip, self.sam)]
        if not sides[0] == sides[1] == sides[2] / 2:
            raise ValueError(
                f"`vision_config`: DINOv2, SigLIP and SAM have {', '.join(map(str, sides))} patches per side; the "
                "first two must be equal, and the third twice as many."
            )


@strict
class VisualRwkvConfig(CheckedConfig):
    r"""
    Configuration of a VisualRWKV model, section 10.2 of "Eagle and Finch" (arXiv:2404.05892): vision towers, a
    projection, and a language model. There are three published generations. The first two have CLIP and a projection
    without bias: with Eagle (v5.0) the class token of an image comes before its patches, with Finch (v6.0) after them.
    With Goose (v7.00) there are three towers, no class token, and a gated projection.

    Args:
        vision_config: a `CLIPVisionConfig` or a [`VisualRwkvTowersConfig`], or its fields with `model_type`. If None,
            openai/clip-vit-large-patch14-336 with Eagle and Finch, and the published three towers with Goose.
        text_config: a [`Rwkv5Config`], [`Rwkv6Config`] or [`Rwkv7Config`], or its fields with `model_type`; Finch's
            defaults if None.
        image_token_id: the id of the placeholders: `input_ids` has one for each feature of an image. The
            World vocabulary ends before 65530, but its embeddings do not.
        grid_size: use of an image's patches. -1: all of them; n: means over a grid of n x n. With three towers n is
            at most the number of patches per side, and parts of the grid overlap if n does not divide it. With CLIP
            n must divide it; 0 leaves only the class token, and 1 is the mean of the patches (with Eagle the mean of
            patches and class token, instead of both). Files of the trainer for three towers have the square of n as
            `num_token_per_image`, which is read too.
        reading_order: "forward", or "alternate": every second block, from the second one on, reads the patches of an
            image from the last to the first. If None, as the published models were trained: "alternate" with Finch,
            otherwise "forward".
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
        from_file = kwargs.get("_from_file", False)
        if self.text_config is None:
            self.text_config = Rwkv6Config()
        elif isinstance(self.text_config, dict):
            self.text_config = self._text_config(from_file, **self.text_config)
        if self.vision_config is None or isinstance(self.vision_config, dict):
            self.vision_config = self._vision_config(from_file, **(self.vision_config or {}))
        if (tokens := kwargs.pop("num_token_per_image", None)) is not None:
            self._read_tokens(tokens)
        self.tie_word_embeddings = self.tie_word_embeddings or self.text_config.tie_word_embeddings
        if self.reading_order is None:
            self.reading_order = READING_ORDERS.get(self.text_config.model_type, "forward")
        super().__post_init__(**kwargs)

    @staticmethod
    def _text_config(from_file: bool, model_type: str = "rwkv6", **fields: Any) -> PreTrainedConfig:
        if model_type not in TEXT_CONFIGS:
            raise ValueError(f"`text_config`: its `model_type` must be {TEXT_TYPES}, got {model_type!r}.")
        config_class = TEXT_CONFIGS[model_type]
        return config_class.from_dict(fields) if from_file else config_class(**fields)

    def _vision_config(self, from_file: bool, model_type: str | None = None, **fields: Any) -> PreTrainedConfig:
        if model_type is None:
            with_towers = self.text_config.model_type == "rwkv7"
            model_type = VisualRwkvTowersConfig.model_type if with_towers else "clip_vision_model"
        if model_type == VisualRwkvTowersConfig.model_type:
            return VisualRwkvTowersConfig(_from_file=from_file, **fields)
        # Not at the top: it imports the tables of all models, which is slow and needs them to be complete.
        from transformers import CLIPVisionConfig

        if model_type != CLIPVisionConfig.model_type:
            raise ValueError(_wrong_vision(model_type))
        check_names(CLIPVisionConfig, fields, from_file)
        return CLIPVisionConfig(**fields or CLIP)

    def _read_tokens(self, tokens: int) -> None:
        """Sets `grid_size` from the number of tokens of an image, `num_token_per_image`."""
        side = isqrt(max(tokens, 0))
        if self.has_class_token or side**2 != tokens or self.grid_size not in (-1, side):
            raise ValueError(
                f"`num_token_per_image` must be the square of `grid_size` ({self.grid_size}), of a model with three "
                f"towers; got {tokens}."
            )
        self.grid_size = side

    @property
    def towers(self) -> dict[str, PreTrainedConfig]:
        """The configuration of each tower, by the name of its images among the model's arguments."""
        vision = self.vision_config
        if self.has_class_token:
            return {"pixel_values": vision}
        return {"pixel_values": vision.dino, "pixel_values_siglip": vision.siglip, "pixel_values_sam": vision.sam}

    @property
    def image_shapes(self) -> dict[str, tuple[int, int, int]]:
        """The shape of an image (channels, height, width) for each tower, by name as in `towers`."""
        return {name: (x.num_channels, x.image_size, x.image_size) for name, x in self.towers.items()}

    @property
    def has_class_token(self) -> bool:
        """Whether an image has a class token besides its patches, as CLIP makes it."""
        return self.vision_config.model_type != VisualRwkvTowersConfig.model_type

    @property
    def class_token_first(self) -> bool:
        """Whether an image's class token comes before its patches."""
        return self.has_class_token and self.text_config.model_type == "rwkv5"

    @property
    def patches_per_side(self) -> int:
        """Number of patches per side of the image."""
        first = self.towers["pixel_values"]
        return first.image_size // first.patch_size

    @property
    def num_image_tokens(self) -> int:
        """Number of features, and of placeholders, of an image."""
        if self.grid_size == 0 or (self.grid_size == 1 and self.class_token_first):
            return 1
        side = self.patches_per_side if self.grid_size == -1 else self.grid_size
        return side**2 + self.has_class_token

    def validate_architecture(self):
        """Raises a ValueError if sizes do not fit together, before any tensor is created."""
        vision, text = self.vision_config, self.text_config
        if vision.model_type == VisualRwkvTowersConfig.model_type:
            vision.validate_architecture()
        elif vision.model_type == "clip_vision_model":
            _check_tower(vision, "clip_vision_model", "vision_config")
            check_configuration(vision, ("intermediate_size",))
        else:
            raise ValueError(_wrong_vision(vision.model_type))
        if text.model_type not in TEXT_CONFIGS:
            raise ValueError(f"`text_config`: its `model_type` must be {TEXT_TYPES}, got {text.model_type!r}.")
        text.validate_architecture()
        text.validate_names()
        check_configuration(self, ())
        grid, side = self.grid_size, self.patches_per_side
        if self.has_class_token:
            fits, grids = grid in (-1, 0) or (grid > 0 and side % grid == 0), "-1, 0 or a divisor of"
        else:
            fits, grids = grid == -1 or 1 <= grid <= side, "-1, or from 1 to"
        if not fits:
            raise ValueError(f"`grid_size` must be {grids} the {side} patches per side, got {grid}.")
        if self.reading_order not in ("forward", "alternate"):
            raise ValueError(f"`reading_order` must be 'forward' or 'alternate', got {self.reading_order!r}.")
        if not 0 <= self.image_token_id < text.vocab_size:
            raise ValueError(
                f"`image_token_id` must be one of the {text.vocab_size} ids of `text_config`, got "
                f"{self.image_token_id}."
            )


def _wrong_vision(model_type: str) -> str:
    known = f"clip_vision_model or {VisualRwkvTowersConfig.model_type}"
    return f"`vision_config`: its `model_type` must be {known}, got {model_type!r}."


__all__ = ["VisualRwkvConfig", "VisualRwkvTowersConfig"]
