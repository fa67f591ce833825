"""What the source formats have in common: a checkpoint's tensors held against the names and shapes of a model."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .errors import ConversionError
from .formats import PlannedTensor, Tensors


Shape = tuple[int, ...]
LISTED = 12  # names of each kind that an error lists
CONTEXT_PROPORTION = 0.5  # of every published model of Avey; only used to say which shapes would be right


def sources_of(tensors: Tensors, canonical_name: Callable[[str], str]) -> dict[str, str]:
    """
    The names of a model's tensors, each with the source's name for it. `canonical_name` turns the source's spelling
    into ours and leaves names that it does not know as they are.
    """
    sources: dict[str, str] = {}
    for name in tensors:
        target = canonical_name(name)
        if target in sources:
            raise ConversionError(f"{sources[target]} and {name} are the same tensor, {target}.")
        sources[target] = name
    return sources


def fields_of(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of the configuration in the field `name` of another, {} where there is none."""
    fields = given.get(name)
    if not isinstance(fields, dict | None):
        raise ConversionError(f"`{name}` must hold an object, found a {type(fields).__name__}.")
    return dict(fields or {})


def sizes_of(found: Tensors, places: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """Sizes from the tensor and axis where each is read; 0 where there is no such tensor or axis."""
    sizes = {}
    for size, (name, axis) in places.items():
        shape = found[name].shape if name in found else ()
        sizes[size] = shape[axis] if len(shape) > axis else 0
    return sizes


def count_blocks(names: Iterable[str], prefix: str) -> int:
    """Number of blocks whose tensors' names begin with `prefix`, a number and a dot."""
    names = list(names)
    rests = [name.removeprefix(prefix).partition(".") for name in names if name.startswith(prefix)]
    blocks = [int(number) for number, dot, _ in rests if dot and number.isascii() and number.isdigit()]
    # A stray block index must not make the list of missing tensors endless.
    return min(max(blocks, default=-1) + 1, len(names))


def tail_size(features: int, fused: int, given: Mapping[str, Any]) -> tuple[int, float]:
    """Size of Avey's tail, of which the fuser gets one half, and the share of the features that it is."""
    tail = 2 * (features - fused)
    if not 0 < tail <= features:  # the shapes that this gives are told as the ones expected
        return int(features * CONTEXT_PROPORTION), CONTEXT_PROPORTION
    share = given.get("context_proportion")
    # A tail is a share rounded down and then up to an even number: many shares give the same.
    if isinstance(share, float) and tail - 1 <= features * share < tail + 1:
        return tail, share
    return tail, tail / features


def split_sizes(
    name: str, rows: int, own: int, given: Mapping[str, Any], assumed: int | None = None
) -> tuple[int, int, list[str]]:
    """
    Size of a split of Avey's and k, the splits of a window beside its `own` ones, as far as the configuration tells
    them, and notes. The tensor `name` only tells the rows of a window, which are their product; 0 where none does.

    Raises:
        ConversionError: where configuration and tensor contradict each other, or nothing tells and there is no size
            of a split to be `assumed`.
    """
    notes = []
    told = {field: given.get(field) for field in ("chunk_size", "k")}
    told = {field: size for field, size in told.items() if isinstance(size, int) and size > 0}
    what = f"{name} has {rows} rows" if rows else "No tensor tells the rows of a window"
    if assumed is None and not (told if rows else len(told) == 2):
        fields = "`chunk_size` or `k`" if rows else "`chunk_size` and `k`"
        raise ConversionError(f"{what}; give {fields} in a configuration file.")
    if "chunk_size" in told:
        chunk_size = told["chunk_size"]
    elif "k" in told:
        chunk_size = rows // (told["k"] + own)
    else:
        chunk_size = assumed
        notes.append(f"the source tells neither `chunk_size` nor `k`; a `chunk_size` of {assumed} was assumed")
    k = told.get("k") or rows // chunk_size - own
    if rows and (k < 1 or chunk_size * (k + own) != rows):
        if not told:
            raise ConversionError(
                f"{what}, which are no splits of {assumed}; give `chunk_size` in a configuration file."
            )
        told_sizes = " and ".join(f"`{field}` of {size}" for field, size in told.items())
        raise ConversionError(f"{what}, which contradicts the configuration's {told_sizes}.")
    return chunk_size, k, notes


def tie(shapes: dict[str, Shape], sources: dict[str, str], embeddings: str, head: str) -> list[tuple[str, str]]:
    """Takes the head away, which the embeddings stand for, and returns the twins to compare where a file has both."""
    shapes.pop(head)
    twin = sources.pop(head, None)
    return [(sources[embeddings], twin)] if twin and embeddings in sources else []


def plan_tensors(
    model_type: str,
    tensors: Tensors,
    sources: Mapping[str, str],
    shapes: Mapping[str, Shape],
    sizes: Mapping[str, float],
    fits: Callable[[str, Shape, Shape], bool] = lambda target, stored, shape: operator.eq(stored, shape),
) -> list[PlannedTensor]:
    """
    Which tensor is written under which name.

    Args:
        model_type: what an error calls the model.
        sources: what [`sources_of`] returned.
        shapes: name to shape of the whole model, in the order to write.
        sizes: those that the tensors settled, 0 where the tensor that tells a size is not there.
        fits: whether a stored shape holds the elements of the wanted one in the same order, given the name as well.

    Raises:
        ConversionError: with a list of all that is missing, unexpected or misshapen.
    """
    missing = [name for name in shapes if name not in sources]
    # Without the tensors that tell the sizes only the names can be checked.
    sized = all(sizes.values()) or not missing
    unexpected = [source for target, source in sources.items() if target not in shapes]
    misshapen = []
    planned = []
    for target, shape in shapes.items():
        if target not in sources:
            continue
        source = sources[target]
        info = tensors[source]
        if not isinstance(info.dtype, torch.dtype):
            misshapen.append(f"{source} (dtype {info.dtype}, expected a floating one)")
        elif sized and not fits(target, info.shape, shape):
            misshapen.append(f"{source} (shape {info.shape}, expected {shape})")
        else:
            planned.append(PlannedTensor(target, source, shape))
    faults = [
        f"{kind}: {', '.join(names[:LISTED])}{f' and {len(names) - LISTED} more' if len(names) > LISTED else ''}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", misshapen))
        if names
    ]
    if faults:
        raise ConversionError(f"The tensors are not those of the model type {model_type}; {'; '.join(faults)}.")
    return planned
