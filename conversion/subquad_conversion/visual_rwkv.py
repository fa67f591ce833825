"""
VisualRWKV: a CLIP vision tower (`vit.`), a projection (`proj.weight`) and Eagle or Finch under the trainer's names
(`rwkv.`), in one file or in the two of the authors' export; the tower may also come from a CLIP model's directory.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

from transformers import CLIPVisionConfig, PreTrainedConfig

from . import rwkv5_trainer, rwkv6_trainer
from .checkpoint import Checkpoint, open_checkpoint
from .errors import ConversionError
from .formats import Format, Plan, Tensors
from .layout import Shape, count_blocks, fields_of, plan_tensors, sizes_of, sources_of
from .other_versions import OTHER_VISUAL
from .rwkv_layout import read_layout, trainer_name


TEXT = "rwkv."
TOWER = "model.vit.vision_model."
LAYERS = f"{TOWER}encoder.layers."
PROJECTION = "model.proj.weight"
TOWER_NAME = re.compile(r"vit\.(?:vision_model\.)?((?:embeddings|pre_layrnorm|encoder|post_layernorm)\..+)")
# How the names of an export's two files end: the language model's, without a prefix, and that of all else.
TEXT_HALF, VISUAL_HALF = "_rwkv", "_visual"

# Where each size of the tower is read: tensor, axis.
TOWER_SIZES = {
    "hidden_size": (f"{TOWER}embeddings.class_embedding", 0),
    "intermediate_size": (f"{LAYERS}0.mlp.fc1.weight", 0),
    "num_channels": (f"{TOWER}embeddings.patch_embedding.weight", 1),
    "patch_size": (f"{TOWER}embeddings.patch_embedding.weight", 2),
    "positions": (f"{TOWER}embeddings.position_embedding.weight", 0),
}
# Of every CLIP; only used where nothing tells.
TOWER_HEAD_SIZE = 64
TOWER_ACTIVATION = "quick_gelu"
# Either tells how images are prepared.
PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")


# --- files ---


@contextmanager
def open_parts(source: str | Path, vision_tower: str | Path | None = None) -> Iterator[Checkpoint]:
    """
    As [`open_checkpoint`], with the tensors that belong to those of `source` and lie elsewhere: in the other file of
    an export, and in `vision_tower`, the directory of a CLIP model. All have the names of a single file.

    Raises:
        ConversionError: also where the other file is missing, `vision_tower` has no vision tower, or the source too
            has one.
    """
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(source))
        parts = [(checkpoint, _own_name)]
        if all(name.startswith(("vit.", "proj.")) for name in checkpoint.tensors):
            other = _other_half(checkpoint.path, VISUAL_HALF, TEXT_HALF)
            if other is None or not other.is_file():
                where = f"in {other}, which is missing" if other else f"in a file of its own, <name>{TEXT_HALF}.pth"
                hint = "" if other else f"; lay it beside this one and call this one <name>{VISUAL_HALF}.pth"
                raise ConversionError(
                    f"{checkpoint.path} holds only what stands before a language model. That is {where}{hint}."
                )
            parts.insert(0, (stack.enter_context(open_checkpoint(other)), TEXT.__add__))
        elif any(name.startswith("blocks.0.att.") for name in checkpoint.tensors):
            other = _other_half(checkpoint.path, TEXT_HALF, VISUAL_HALF)
            if other is not None and other.is_file():
                parts = [(checkpoint, TEXT.__add__), (stack.enter_context(open_checkpoint(other)), _own_name)]
            elif vision_tower is not None:
                missing = f", which belongs in {other}" if other else ""
                raise ConversionError(f"{source} is a language model without a projection of images{missing}.")
        if vision_tower is not None:
            if any(name.startswith("vit.") for part, _ in parts for name in part.tensors):
                raise ConversionError(f"{source} has a vision tower of its own: leave out `vision_tower`.")
            parts.append(_tower(stack.enter_context(open_checkpoint(vision_tower))))
        merged = Checkpoint(checkpoint.path, settings=checkpoint.settings)
        for part, rename in parts:
            merged.include(part, rename)
        yield merged


def _own_name(name: str) -> str | None:
    """Without the numbers of the positions, which older releases of transformers saved with a tower."""
    return None if name.startswith("vit.") and name.endswith(".position_ids") else name


def _tower(checkpoint: Checkpoint) -> tuple[Checkpoint, Callable[[str], str | None]]:
    """The vision tower of a CLIP model, and what its tensors are called in a VisualRWKV."""
    level = "vision_model." if any(name.startswith("vision_model.") for name in checkpoint.tensors) else ""
    if f"{level}embeddings.class_embedding" not in checkpoint.tensors:
        raise ConversionError(f"{checkpoint.path} holds no vision tower of CLIP.")
    if not checkpoint.path.is_dir() or not checkpoint.settings:
        raise ConversionError(f"{checkpoint.path} must be a directory with a config.json, as CLIP is published.")
    return checkpoint, lambda name: _own_name(f"vit.{name}") if name.startswith(level) else None


def _other_half(path: Path, ending: str, other: str) -> Path | None:
    stem = path.stem.removesuffix(ending)
    return None if stem == path.stem else path.with_name(f"{stem}{other}{path.suffix}")


def tower_settings(directory: str | Path) -> dict[str, Any]:
    """The fields of a CLIP model's configuration that concern its vision tower."""
    try:
        return CLIPVisionConfig.from_pretrained(directory).to_dict()
    except Exception as error:  # fields of any type reach code that expects theirs
        raise ConversionError(f"{directory} has no usable config.json: {' '.join(str(error).split())}") from error


# --- tensors ---


def matches(text: Callable[[Tensors], bool], tensors: Tensors) -> bool:
    own = "proj.weight" in tensors or any(TOWER_NAME.fullmatch(name) for name in tensors)
    return own and text(_text(tensors)) and not any(other.matches(tensors) for other in OTHER_VISUAL)


def _text(tensors: Tensors) -> Tensors:
    """Those of the language model, under the trainer's names."""
    return {name.removeprefix(TEXT): info for name, info in tensors.items() if name.startswith(TEXT)}


def text_name(name: str) -> str:
    """Our name of a tensor of the language model, given the one that it has in a causal language model."""
    return f"model.{name}" if name.startswith(TEXT) else name


def visual_name(name: str) -> str:
    """Our name of any other tensor."""
    if name == "proj.weight":
        return PROJECTION
    tower = TOWER_NAME.fullmatch(name)
    return f"{TOWER}{tower[1]}" if tower else name


def tower_shapes(sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Name to shape of a whole tower, in the order in which they are used."""
    d, f, patch = sizes["hidden_size"], sizes["intermediate_size"], sizes["patch_size"]

    def affine(name: str, columns: int, *rows: int) -> dict[str, Shape]:
        return {f"{name}.weight": (columns, *rows), f"{name}.bias": (columns,)}

    positions = (sizes["image_size"] // patch) ** 2 + 1 if patch else 0
    shapes: dict[str, Shape] = {
        f"{TOWER}embeddings.class_embedding": (d,),
        f"{TOWER}embeddings.patch_embedding.weight": (d, sizes["num_channels"], patch, patch),
        f"{TOWER}embeddings.position_embedding.weight": (positions, d),
    }
    shapes |= affine(f"{TOWER}pre_layrnorm", d)
    for i in range(sizes["num_hidden_layers"]):
        layer = f"{LAYERS}{i}."
        shapes |= affine(f"{layer}layer_norm1", d)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= affine(f"{layer}self_attn.{name}", d, d)
        shapes |= affine(f"{layer}layer_norm2", d)
        shapes |= affine(f"{layer}mlp.fc1", f, d) | affine(f"{layer}mlp.fc2", d, f)
    return shapes | affine(f"{TOWER}post_layernorm", d)


def plan(text_type: str, canonical_name: Callable[[str], str], tensors: Tensors, given: Mapping[str, Any]) -> Plan:
    others = sources_of({name: info for name, info in tensors.items() if not name.startswith(TEXT)}, visual_name)
    found = {target: tensors[name] for target, name in others.items()}
    if not any(name.startswith(TOWER) for name in found):
        raise ConversionError(
            "The source has no vision tower (tensors `vit.*`): give `vision_tower` (--vision-tower of `subquad "
            "convert`), the directory of the CLIP model that it was trained with."
        )
    tower = _tower_sizes(found)
    untold, notes = _untold(tower["hidden_size"], fields_of(given, "vision_config"))
    features = found[PROJECTION].shape[1:] if PROJECTION in found else ()
    if features and tower["hidden_size"] and features != (tower["hidden_size"],):
        raise ConversionError(
            f"proj.weight reads {features[0]} features, the vision tower has {tower['hidden_size']}: it is another "
            "model's."
        )

    text_fields = fields_of(given, "text_config")
    if given.get("tie_word_embeddings") is True:
        text_fields["tie_word_embeddings"] = True
    text = read_layout(text_type, canonical_name, _text(tensors), text_fields)
    if "grid_size" not in given:
        notes.append("the source does not tell `grid_size`; -1, all patches of an image, was assumed")

    sources = others | {text_name(target): f"{TEXT}{source}" for target, source in text.sources.items()}
    shapes = tower_shapes(tower) | {PROJECTION: (text.sizes["hidden_size"], tower["hidden_size"])}
    shapes |= {text_name(target): shape for target, shape in text.shapes.items()}
    read = text.sizes | {f"vision_{name}": size for name, size in tower.items()}
    planned = plan_tensors("visual_rwkv", tensors, sources, shapes, read, text.fits)
    twins = [(f"{TEXT}{kept}", f"{TEXT}{dropped}") for kept, dropped in text.twins]
    sizes = {
        "vision_config": {"model_type": "clip_vision_model", **tower, **untold},
        "text_config": {"model_type": text_type, **text.sizes},
    }
    return Plan(sizes, planned, twins, text.notes + notes)


def _tower_sizes(found: Tensors) -> dict[str, int]:
    sizes = sizes_of(found, TOWER_SIZES)
    sizes["image_size"] = isqrt(max(sizes.pop("positions") - 1, 0)) * sizes["patch_size"]
    return sizes | {"num_hidden_layers": count_blocks(found, LAYERS)}


def _untold(width: int, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of the tower that no tensor tells and that are not `given`, and notes."""
    fields = {"num_attention_heads": width // TOWER_HEAD_SIZE, "hidden_act": TOWER_ACTIVATION}
    heads = given.get("num_attention_heads", fields["num_attention_heads"])
    if width and isinstance(heads, int) and (heads < 1 or width % heads):
        raise ConversionError(
            f"The vision tower's {width} channels make no {heads} heads; give `num_attention_heads` in the "
            "`vision_config` of a configuration file."
        )
    fields = {name: value for name, value in fields.items() if name not in given}
    return fields, [
        f"the source does not tell the vision tower's `{name}`; {value} was assumed, as in CLIP"
        for name, value in fields.items()
    ]


FORMATS = tuple(
    Format(
        f"visual-{text_type}",
        title,
        "visual_rwkv",
        partial(matches, text_matches),
        partial(plan, text_type, canonical_name),
        text_type=text_type,
    )
    for text_type, title, text_matches, canonical_name in (
        ("rwkv5", "VisualRWKV-5.0 (CLIP and Eagle)", rwkv5_trainer.matches, rwkv5_trainer.canonical_name),
        ("rwkv6", "VisualRWKV-6.0 (CLIP and Finch)", rwkv6_trainer.matches, trainer_name),
    )
)


# --- processor ---


def save_processor(directory: Path, config: PreTrainedConfig, vision_tower: str | Path | None) -> list[int]:
    """
    Makes a processor of the tokenizer in `directory` and saves it there. Images are prepared as the directory of the
    tower says, where that has a file for it, else as for every CLIP.

    Returns:
        the ids that end an answer: the end of a document, and a blank line where that is one token.
    """
    # Image processors need Pillow, which nothing else here does.
    from transformers import AutoTokenizer, CLIPImageProcessorPil

    from subquad import VisualRwkvProcessor

    size = config.vision_config.image_size
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        if vision_tower and any((Path(vision_tower) / name).is_file() for name in PREPROCESSORS):
            image_processor = CLIPImageProcessorPil.from_pretrained(vision_tower)
        else:
            image_processor = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=size)
        processor = VisualRwkvProcessor(image_processor, tokenizer, config.num_image_tokens)
    except Exception as error:  # files of any content reach code that expects theirs
        raise ConversionError(f"No processor can be made: {' '.join(str(error).split())}") from error
    made = image_processor.crop_size if image_processor.do_center_crop else image_processor.size
    if made != {"height": size, "width": size}:
        raise ConversionError(f"{vision_tower} prepares images of {dict(made)}, its tower reads {size} x {size}.")
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
    return sorted(ends - {None})
