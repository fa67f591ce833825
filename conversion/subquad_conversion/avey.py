"""
Avey: published models and training checkpoints have the same names; in a state dict of our causal model they start
with `model.`.
"""

from collections.abc import Mapping
from typing import Any

from .errors import ConversionError
from .formats import Format, InferredConfig, SourceTensor, Tensors, count_blocks, lengths_of


CHUNK_SIZE = 64  # of every published model; only used if not stored in a file
CONTEXT_PROPORTION = 0.5  # of every published model; only used for the expected shapes of a damaged file

EMBEDDINGS, HEAD = "wte.weight", "lm_head.weight"
# The source of each size: tensor, axis.
PLACES = {
    "vocab_size": (EMBEDDINGS, 0),
    "d_embed": (EMBEDDINGS, 1),
    "features": ("blocks.0.ctxt.enricher.weight", 0),
    "fused": ("blocks.0.ctxt.fuser.weight", 1),
    "extended_len": ("blocks.0.ctxt.contextualizer.spatial_proj", 0),
}


class AveyFormat(Format):
    name = "avey"
    title = "Avey, published model or training checkpoint"
    model_type = "avey"

    def matches(self, tensors: Tensors) -> bool:
        return any(self.rename(name).startswith("blocks.0.ctxt.") for name in tensors)

    def rename(self, name: str) -> str:
        return name.removeprefix("model.")

    def written_name(self, name: str) -> str:
        return name.removeprefix("model.")

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        read = lengths_of(found, PLACES)
        d, rows = read["d_embed"], read["extended_len"]
        expansion, proportion = feature_sizes(d, read["features"], read["fused"], given)
        chunk_size, k, notes = split_sizes(PLACES["extended_len"][0], rows, 0, given, CHUNK_SIZE)
        blocks = count_blocks(found, "blocks.")
        fields = {
            "vocab_size": read["vocab_size"],
            "d_embed": d,
            "n_blocks": blocks,
            "expansion_factor": expansion,
            "chunk_size": chunk_size,
            "k": k,
            "extended_len": rows,
            "context_proportion": proportion,
        }
        tied = given.get("tie_word_embeddings") is not False
        return InferredConfig(
            fields, {"n_blocks": blocks}, PLACES, tied=(EMBEDDINGS, HEAD) if tied else None, notes=notes
        )


def feature_sizes(d: int, features: int, fused: int, given: Mapping[str, Any]) -> tuple[int, float]:
    """
    The enricher's features in multiples of `d`, and the share of them in the tail. One half of the tail is
    contextualised, the other is its gate, so that `fused` features are left for the fuser.
    """
    expansion = max(features // max(d, 1), 1)
    features = expansion * d
    tail = 2 * (features - fused)
    if not 0 < tail <= features:  # an error will list the resulting shapes as expected
        return expansion, CONTEXT_PROPORTION
    share = given.get("context_proportion")
    # A tail is a share rounded down and then up to an even number: many shares give the same tail.
    if isinstance(share, float) and tail - 1 <= features * share < tail + 1:
        return expansion, share
    return expansion, tail / features


def split_sizes(
    name: str, rows: int, own: int, given: Mapping[str, Any], assumed: int | None = None
) -> tuple[int, int, list[str]]:
    """
    The size of a split, and k, the splits of a window besides its `own` ones, from the configuration if given there,
    and notes. The tensor `name` only determines their product, the rows of a window; 0 if no tensor does.

    Raises:
        ConversionError: if configuration and tensor contradict each other, or if the sizes are unknown and none is
            `assumed` for a split.
    """
    notes = []
    told = {field: given.get(field) for field in ("chunk_size", "k")}
    told = {field: size for field, size in told.items() if isinstance(size, int) and size > 0}
    what = f"{name} has {rows} rows" if rows else "No tensor determines the rows of a window"
    if assumed is None and not (told if rows else len(told) == 2):
        fields = "`chunk_size` or `k`" if rows else "`chunk_size` and `k`"
        raise ConversionError(f"{what}; give {fields} in a configuration file.")
    if "chunk_size" in told:
        chunk_size = told["chunk_size"]
    elif "k" in told:
        chunk_size = rows // (told["k"] + own)
    else:
        chunk_size = assumed
        notes.append(f"neither `chunk_size` nor `k` is stored in the source; a `chunk_size` of {assumed} was assumed")
    k = told.get("k") or (rows // chunk_size - own if chunk_size else 0)
    if rows and (k < 1 or chunk_size * (k + own) != rows):
        if not told:
            raise ConversionError(
                f"{what}, which is not a multiple of a split of {assumed}; give `chunk_size` in a configuration file."
            )
        told_sizes = " and ".join(f"`{field}` of {size}" for field, size in told.items())
        raise ConversionError(f"{what}, which contradicts the configuration's {told_sizes}.")
    return chunk_size, k, notes


FORMAT = AveyFormat()
