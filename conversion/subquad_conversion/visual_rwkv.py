"""
VisualRWKV: vision towers (`vit.`), a projection (`proj.`) and a language model with the trainer's names (`rwkv.`), in
one file or in the authors' two. With Eagle and Finch the tower is CLIP's and may also come from a CLIP model's
directory.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

from transformers import CLIPVisionConfig, GenerationConfig, PreTrainedConfig

from . import rwkv5_trainer, rwkv6_trainer
from .checkpoint import Checkpoint, open_checkpoint
from .errors import ConversionError
from .formats import (
    Extract,
    Format,
    InferredConfig,
    Shape,
    SourceTensor,
    Tensors,
    count_blocks,
    lengths_of,
    object_in,
    one_line,
)
from .other_versions import OTHER_VISUAL


TEXT = "rwkv."
MODEL = "model."
TOWER = "model.vit.vision_model."
LAYERS = f"{TOWER}encoder.layers."
PROJECTION = "model.proj.weight"
# Some releases of transformers have `vision_model` in the tower's names, others do not.
TOWER_NAME = re.compile(r"vit\.(?:vision_model\.)?((?:embeddings|pre_layrnorm|encoder|post_layernorm)\..+)")
# Suffixes of an export's two files: the language model, without a prefix, and everything else.
TEXT_HALF, VISUAL_HALF = "_rwkv", "_visual"

# The source of each size of the tower: tensor, axis.
TOWER_PLACES = {
    "hidden_size": (f"{TOWER}embeddings.class_embedding", 0),
    "intermediate_size": (f"{LAYERS}0.mlp.fc1.weight", 0),
    "num_channels": (f"{TOWER}embeddings.patch_embedding.weight", 1),
    "patch_size": (f"{TOWER}embeddings.patch_embedding.weight", 2),
    "positions": (f"{TOWER}embeddings.position_embedding.weight", 0),
}
# The same in every CLIP; only used if not stored.
TOWER_HEAD_SIZE = 64
TOWER_ACTIVATION = "quick_gelu"
# Each of these files defines how images are prepared.
PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class InferredVision:
    """
    The configuration of the towers, and what [`InferredConfig`] has of them.

    Attributes:
        fields: of `vision_config`.
        structure: those that names of tensors depend on.
        shape_fields: those of a valid configuration, whatever `fields` does not determine.
        places, notes: as in [`InferredConfig`].
    """

    fields: dict[str, Any]
    structure: dict[str, Any]
    shape_fields: dict[str, Any]
    places: Mapping[str, tuple[str, int]]
    notes: list[str]


class VisualFormat(Format):
    """
    One of the published generations, by the format of its language model. A subclass has its towers.

    Args:
        text: the format of a language model alone.
        title: display name.
        base: what the names of the language model's tensors begin with in that format, apart from the head.
    """

    model_type = "visual_rwkv"

    def __init__(self, text: Format, title: str, base: str):
        self.text = text
        self.title = title
        self.base = base
        self.name = f"visual-{text.model_type}"

    # --- for subclasses ---

    def read_vision(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredVision:
        """
        Infers the towers from the tensors. `given` are the known fields of `vision_config`.

        Raises:
            ConversionError: if they are missing or belong to another model.
        """
        raise NotImplementedError

    def vision_parts(self, name: str) -> Mapping[str, Extract]:
        """As `parts`, for tensors outside the language model."""
        raise NotImplementedError

    def image_settings(self, config: PreTrainedConfig, vision_tower: Path | None) -> tuple[Any, dict[str, Any]]:
        """The image processor, and its other settings for other towers as in `VisualRwkvProcessor`."""
        raise NotImplementedError

    # --- tensors ---

    def is_misused(self, name: str, value: Any, sizes: Mapping[str, Any]) -> bool:
        return "vocab_size" in sizes and self.text.is_misused(name, value, sizes)

    def has_text(self, tensors: Tensors) -> bool:
        """Whether the language model is of this generation."""
        return self.text.matches({name.removeprefix(TEXT): x for name, x in tensors.items() if name.startswith(TEXT)})

    def text_name(self, name: str) -> str:
        """Our name of a tensor of the language model, from its name in a causal language model."""
        return f"{MODEL}{TEXT}{name.removeprefix(self.base)}" if name.startswith(self.base) else name

    def parts(self, name: str) -> Mapping[str, Extract]:
        if not name.startswith(TEXT):
            return self.vision_parts(name)
        return {self.text_name(ours): take for ours, take in self.text.parts(name.removeprefix(TEXT)).items()}

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        vision = self.read_vision(found, object_in(given, "vision_config"))
        text_fields = object_in(given, "text_config")
        if given.get("tie_word_embeddings") is True:
            text_fields["tie_word_embeddings"] = True
        text_found = {
            name.replace(f"{MODEL}{TEXT}", self.base, 1): tensor
            for name, tensor in found.items()
            if tensor.source.startswith(TEXT)
        }
        text = self.text.read(text_found, text_fields)
        notes = text.notes + vision.notes
        if not {"grid_size", "num_token_per_image"} & given.keys():
            notes.append("`grid_size` is not stored in the source; -1, all patches of an image, was assumed")
        text_type = {"model_type": self.text_type}
        return InferredConfig(
            {
                "vision_config": vision.fields,
                "text_config": text_type | text.fields,
            },
            {
                "vision_config": vision.structure,
                "text_config": text_type | text.structure,
            },
            {f"vision_{size}": place for size, place in vision.places.items()}
            | {size: (self.text_name(name), axis) for size, (name, axis) in text.places.items()},
            # The defaults need a vocabulary of the published size, and a width with as many heads.
            shape_fields={"image_token_id": 0, "vision_config": vision.shape_fields},
            tied=text.tied and tuple(map(self.text_name, text.tied)),
            notes=notes,
        )

    def fits(self, name: str, stored: Shape, shape: Shape, fields: Mapping[str, Any]) -> bool:
        return self.text.fits(name, stored, shape, fields["text_config"])

    # --- other files ---

    def gather(
        self, checkpoint: Checkpoint, stack: ExitStack, vision_tower: Path | None, base: Path | None
    ) -> Checkpoint | None:
        """
        Adds the other file of an export, and the tower of the CLIP model in the directory `vision_tower`. All tensors
        get the names of a single file.

        Raises:
            ConversionError: if the other file is missing, `vision_tower` has no vision tower, or the source has one
                too.
        """
        path, names = checkpoint.path, checkpoint.tensors
        parts = [(checkpoint, own_name)]
        if all(name.startswith(("vit.", "proj.")) for name in names):
            other = other_half(path, VISUAL_HALF, TEXT_HALF)
            if other is None or not other.is_file():
                where = f"in {other}, which is missing" if other else f"in a file of its own, <name>{TEXT_HALF}.pth"
                hint = "" if other else f"; put it beside this one and call this one <name>{VISUAL_HALF}.pth"
                raise ConversionError(
                    f"{path} holds only a vision tower or a projection. The language model is {where}{hint}."
                )
            parts.insert(0, (stack.enter_context(open_checkpoint(other)), TEXT.__add__))
        elif any(name.startswith("blocks.0.att.") for name in names):
            other = other_half(path, TEXT_HALF, VISUAL_HALF)
            if other is not None and other.is_file():
                parts = [(checkpoint, TEXT.__add__), (stack.enter_context(open_checkpoint(other)), own_name)]
            elif vision_tower is not None:
                missing = f", which belongs in {other}" if other else ""
                raise ConversionError(f"{path} is a language model without a projection of images{missing}.")
        elif vision_tower is None and not any(name.startswith("vit.") for name in names):
            return None
        if vision_tower is not None:
            if any(name.startswith("vit.") for part, _ in parts for name in part.tensors):
                raise ConversionError(f"{path} has a vision tower of its own: leave out `vision_tower`.")
            parts.append(open_tower(vision_tower, stack))
        merged = Checkpoint(path, settings=checkpoint.settings)
        for part, rename in parts:
            merged.include(part, rename)
        return merged

    # --- the language model ---

    @property
    def text_type(self) -> str:
        return self.text.model_type

    def text_fields(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return object_in(fields, "text_config")

    def with_text_fields(self, fields: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields, "text_config": {**self.text_fields(fields), **added}}

    def with_options(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of a configuration override the settings of `vision_tower`; the language model has options too."""
        options = dict(options)
        if (vision_tower := options.pop("vision_tower", None)) is not None:
            given = {"vision_config": tower_settings(vision_tower)} | given
        text_options = {name: options.pop(name) for name in list(options) if not hasattr(self.config_class, name)}
        if text_options:
            given = self.with_text_fields(given, self.text.with_options({}, text_options))
        return super().with_options(given, options)

    def save_processor(
        self, directory: Path, config: PreTrainedConfig, generation: GenerationConfig, vision_tower: Path | None
    ) -> None:
        """
        Makes a processor from the tokenizer in `directory` and saves it there. An answer ends with the end of a
        document, or with a blank line if that is one token.
        """
        # Image processors need Pillow, unlike everything else here.
        from transformers import AutoTokenizer

        from subquad import VisualRwkvProcessor

        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
            image_processor, others = self.image_settings(config, vision_tower)
            processor = VisualRwkvProcessor(
                image_processor, tokenizer, config.num_image_tokens, other_images=others or None
            )
        except ConversionError:
            raise
        except Exception as error:  # a file may hold anything, so any part of the readers may fail
            raise ConversionError(f"No processor can be made: {one_line(error)}") from error
        if processor.image_token_id != config.image_token_id:
            raise ConversionError(
                f"The tokenizer has {processor.image_token} at the id {processor.image_token_id}, the configuration's "
                f"`image_token_id` is {config.image_token_id}."
            )
        processor.save_pretrained(directory)
        ends = {tokenizer.eos_token_id}
        ids = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and tokenizer.decode(ids) == "\n\n":
            ends.update(ids)
        generation.eos_token_id = sorted(ends - {None})


class ClipFormat(VisualFormat):
    """With CLIP and a projection without bias: Eagle and Finch."""

    def matches(self, tensors: Tensors) -> bool:
        own = "proj.weight" in tensors or any(TOWER_NAME.fullmatch(name) for name in tensors)
        return own and self.has_text(tensors) and not any(other.matches(tensors) for other in OTHER_VISUAL)

    def vision_parts(self, name: str) -> Mapping[str, Extract]:
        if name == "proj.weight":
            return {PROJECTION: None}
        tower = TOWER_NAME.fullmatch(name)
        return {f"{TOWER}{tower[1]}" if tower else name: None}

    def written_name(self, name: str) -> str:
        tower = TOWER_NAME.fullmatch(name.removeprefix(MODEL))
        return f"{TOWER}{tower[1]}" if tower else name

    def read_vision(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredVision:
        if not any(name.startswith(TOWER) for name in found):
            raise ConversionError(
                "The source has no vision tower (tensors `vit.*`): give `vision_tower` (--vision-tower of `subquad "
                "convert`), the directory of the CLIP model that it was trained with."
            )
        tower = lengths_of(found, TOWER_PLACES)
        tower["image_size"] = max(isqrt(max(tower.pop("positions") - 1, 0)), 1) * tower["patch_size"]
        tower["num_hidden_layers"] = max(count_blocks(found, LAYERS), 1)
        width = tower["hidden_size"]
        untold, notes = _untold(width, given)
        features = found[PROJECTION].shape[1:] if PROJECTION in found else ()
        if features and width and features != (width,):
            raise ConversionError(
                f"proj.weight reads {features[0]} features, the vision tower has {width} "
                f"({TOWER_PLACES['hidden_size'][0]}): it is another model's."
            )
        return InferredVision(
            {"model_type": "clip_vision_model", **tower, **untold},
            {"model_type": "clip_vision_model", "num_hidden_layers": tower["num_hidden_layers"]},
            {"model_type": "clip_vision_model", **tower, "num_attention_heads": 1},
            TOWER_PLACES,
            notes,
        )

    def image_settings(self, config: PreTrainedConfig, vision_tower: Path | None) -> tuple[Any, dict[str, Any]]:
        """According to a file in the tower's directory, if there is one, or else as for every CLIP."""
        from transformers import CLIPImageProcessorPil

        size = config.vision_config.image_size
        if vision_tower and any((vision_tower / name).is_file() for name in PREPROCESSORS):
            image_processor = CLIPImageProcessorPil.from_pretrained(vision_tower)
        else:
            image_processor = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=size)
        made = image_processor.crop_size if image_processor.do_center_crop else image_processor.size
        if made != {"height": size, "width": size}:
            raise ConversionError(f"{vision_tower} prepares images of {dict(made)}, its tower reads {size} x {size}.")
        return image_processor, {}


# --- files ---


def own_name(name: str) -> str | None:
    """None for position numbers, which older releases of transformers saved with a tower."""
    return None if name.startswith("vit.") and name.endswith(".position_ids") else name


def open_tower(directory: Path, stack: ExitStack) -> tuple[Checkpoint, Callable[[str], str | None]]:
    """The CLIP model in a directory, and the names of its vision tower's tensors in a VisualRWKV."""
    checkpoint = stack.enter_context(open_checkpoint(directory))
    level = "vision_model." if any(name.startswith("vision_model.") for name in checkpoint.tensors) else ""
    if f"{level}embeddings.class_embedding" not in checkpoint.tensors:
        raise ConversionError(f"{directory} holds no vision tower of CLIP.")
    if not directory.is_dir() or not checkpoint.settings:
        raise ConversionError(f"{directory} must be a directory with a config.json, as CLIP is published.")
    return checkpoint, lambda name: own_name(f"vit.{name}") if name.startswith(level) else None


def other_half(path: Path, ending: str, other: str) -> Path | None:
    """The other file of an export, None if the name of this one does not end in `ending`."""
    stem = path.stem.removesuffix(ending)
    return None if stem == path.stem else path.with_name(f"{stem}{other}{path.suffix}")


def tower_settings(directory: Path) -> dict[str, Any]:
    """The configuration fields of a CLIP model's vision tower."""
    try:
        return CLIPVisionConfig.from_pretrained(directory).to_dict()
    except Exception as error:  # a file may hold anything, so any part of the reader may fail
        raise ConversionError(f"{directory} has no usable config.json: {one_line(error)}") from error


def _untold(width: int, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of the tower that no tensor determines and that are not `given`, and notes."""
    fields = {"num_attention_heads": width // TOWER_HEAD_SIZE, "hidden_act": TOWER_ACTIVATION}
    heads = given.get("num_attention_heads", fields["num_attention_heads"])
    if width and isinstance(heads, int) and (heads < 1 or width % heads):
        raise ConversionError(
            f"The vision tower's {width} channels ({TOWER_PLACES['hidden_size'][0]}) make no {heads} heads; give "
            "`num_attention_heads` in the `vision_config` of a configuration file."
        )
    fields = {name: value for name, value in fields.items() if name not in given}
    return fields, [
        f"the vision tower's `{name}` is not stored in the source; {value} was assumed, as in CLIP"
        for name, value in fields.items()
    ]


FORMATS = (
    ClipFormat(rwkv5_trainer.FORMAT, "VisualRWKV-5.0 (CLIP and Eagle)", "rwkv."),
    ClipFormat(rwkv6_trainer.FORMAT, "VisualRWKV-6.0 (CLIP and Finch)", "rwkv."),
)
