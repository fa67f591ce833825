"""The source formats, and the recognition of a checkpoint's format."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from subquad.hub.loading import NameMap

from . import (
    avey,
    avey_b,
    gecko,
    raven,
    rwkv5_hub,
    rwkv5_trainer,
    rwkv5_web,
    rwkv6_fla,
    rwkv6_gguf,
    rwkv6_hub,
    rwkv6_trainer,
    rwkv6_web,
    rwkv7,
    rwkv7_deep_embed,
    rwkv7_embedding,
    rwkv7_gguf,
    visual_rwkv,
    visual_rwkv7,
)
from .adapter_files import describe_directory, describe_file, is_adapter_directory
from .checkpoint import Checkpoint, open_checkpoint
from .errors import ConversionError
from .formats import Format
from .other_versions import REFUSALS


FORMATS: tuple[Format, ...] = (
    rwkv5_trainer.FORMAT,
    rwkv6_trainer.FORMAT,
    rwkv5_hub.FORMAT,
    rwkv6_hub.FORMAT,
    rwkv5_web.FORMAT,
    rwkv6_web.FORMAT,
    rwkv6_fla.FORMAT,
    rwkv6_gguf.FORMAT,
    *rwkv7.FORMATS,
    *rwkv7_deep_embed.FORMATS,
    rwkv7_gguf.FORMAT,
    *rwkv7_embedding.FORMATS,
    avey.FORMAT,
    avey_b.HUB_FORMAT,
    avey_b.PAPER_FORMAT,
    raven.FORMAT,
    gecko.FORMAT,
    *visual_rwkv.FORMATS,
    visual_rwkv7.FORMAT,
)


@contextmanager
def open_source(
    source: str | Path, vision_tower: Path | None = None, base: Path | None = None
) -> Iterator[Checkpoint]:
    """
    As [`open_checkpoint`], including tensors of `source` in other files.

    Args:
        vision_tower: directory of a CLIP model, to be read with a VisualRWKV that has no vision tower.
        base: the model of which `source` is a part, see [`needs_base`].

    Raises:
        ConversionError: also if one of these files is missing or does not fit.
    """
    if is_adapter_directory(Path(source)):
        raise ConversionError(describe_directory(Path(source)))
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(source))
        gathered = (known.gather(checkpoint, stack, vision_tower, base) for known in FORMATS)
        yield next(filter(None, gathered), checkpoint)


def needs_base(source: str | Path) -> bool:
    """Whether a checkpoint is a part of a model, to be read together with the rest."""
    with open_checkpoint(source) as checkpoint:
        return any(known.needs_base(checkpoint.tensors) for known in FORMATS)


def find_target(model_type: str, name: str) -> Format:
    """
    The format for writing models of a type.

    Args:
        name: the format's `target`.

    Raises:
        ConversionError: if there is none.
    """
    targets = {known.target: known for known in FORMATS if known.model_type == model_type and known.target}
    if name in targets:
        return targets[name]
    possible = f"{', '.join(sorted(targets))} are possible" if targets else "only our own directory is possible"
    raise ConversionError(f"`to` is {name!r}, but a model of the type {model_type} cannot be written so: {possible}.")


def trainer_layout(model_type: str) -> NameMap:
    """The trainer's tensor names for a model type, or the model's own if there is no trainer's format."""
    return next((x.name_map for x in FORMATS if x.model_type == model_type and x.target == "pth"), NameMap({}))


def find_format(checkpoint: Checkpoint) -> Format:
    """
    The format of a checkpoint, from the names and shapes of its tensors.

    Raises:
        ConversionError: if its version is not supported, or its format is unknown. The message shows some of the names
            and lists the supported formats.
    """
    tensors = checkpoint.tensors
    supported = f"Supported are: {'; '.join(known.title for known in FORMATS)}."
    examples = sorted(tensors)[:4]
    what = f"{checkpoint.path} holds {len(tensors)} tensors such as {', '.join(examples)}"
    # An adapter may have the tensors by which a format is recognised.
    if description := describe_file(tensors):
        raise ConversionError(f"{what}: this is {description}")
    for known in FORMATS:
        if known.matches(tensors):
            return known
    for refusal in REFUSALS:
        if refusal.matches(tensors):
            raise ConversionError(f"{what}: this is {refusal.title}, which is not supported. {supported}")
    raise ConversionError(f"{what}: no format that is known here. {supported}")
