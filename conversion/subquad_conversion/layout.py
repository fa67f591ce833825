"""What the source formats have in common: a checkpoint's tensors held against the names and shapes of a model."""

import operator
from collections.abc import Callable, Iterable, Mapping

import torch

from .errors import ConversionError
from .formats import PlannedTensor, Tensors


Shape = tuple[int, ...]
LISTED = 12  # names of each kind that an error lists


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
