"""
Avey: what is published, and what training saves, have the same names; in a state dict of our causal model they start
with `model.`.
"""

from collections.abc import Mapping
from typing import Any

from .errors import ConversionError
from .formats import Format, Plan, Tensors
from .layout import Shape, count_blocks, plan_tensors, sizes_of, sources_of, tie


CHUNK_SIZE = 64  # of every published model; only used where a file does not tell
CONTEXT_PROPORTION = 0.5  # the same; only used to say which shapes would be right

# Where each size is read: tensor, axis.
SIZES = {
    "vocab_size": ("wte.weight", 0),
    "d_embed": ("wte.weight", 1),
    "features": ("blocks.0.ctxt.enricher.weight", 0),
    "fused": ("blocks.0.ctxt.fuser.weight", 1),
    "extended_len": ("blocks.0.ctxt.contextualizer.spatial_proj", 0),
}


def matches(tensors: Tensors) -> bool:
    return any(canonical_name(name).startswith("blocks.0.ctxt.") for name in tensors)


def canonical_name(name: str) -> str:
    return name.removeprefix("model.")


def model_shapes(vocabulary: int, d: int, blocks: int, features: int, tail: int, rows: int) -> dict[str, Shape]:
    """Name to shape of a whole causal language model, in the order in which they are used."""
    shapes: dict[str, Shape] = {"wte.weight": (vocabulary, d)}
    for i in range(blocks):
        block = f"blocks.{i}."
        shapes[f"{block}rms_norm.weight"] = (d,)
        shapes |= {f"{block}ctxt.enricher.weight": (features, d), f"{block}ctxt.enricher.bias": (features,)}
        shapes[f"{block}ctxt.contextualizer.spatial_proj"] = (rows, rows)
        shapes |= {f"{block}ctxt.fuser.weight": (d, features - tail // 2), f"{block}ctxt.fuser.bias": (d,)}
    return shapes | {"ln_f.weight": (d,), "lm_head.weight": (vocabulary, d)}


def plan(tensors: Tensors, given: Mapping[str, Any]) -> Plan:
    sources = sources_of(tensors, canonical_name)
    found = {target: tensors[name] for target, name in sources.items()}

    read = sizes_of(found, SIZES)
    d, rows = read["d_embed"], read["extended_len"]
    expansion = read["features"] // d if d else 0
    features = expansion * d
    tail, proportion = _tail(features, read["fused"], given)
    chunk_size, k, notes = _splits(rows, given)
    sizes = {
        "vocab_size": read["vocab_size"],
        "d_embed": d,
        "n_blocks": count_blocks(found, "blocks."),
        "expansion_factor": expansion,
        "chunk_size": chunk_size,
        "k": k,
        "extended_len": rows,
        "context_proportion": proportion,
    }
    shapes = model_shapes(sizes["vocab_size"], d, sizes["n_blocks"], features, tail, rows)
    twins = []
    if given.get("tie_word_embeddings") is not False:
        twins = tie(shapes, sources, "wte.weight", "lm_head.weight")
    return Plan(sizes, plan_tensors("avey", tensors, sources, shapes, read | sizes), twins, notes)


def _tail(features: int, fused: int, given: Mapping[str, Any]) -> tuple[int, float]:
    """Size of the tail, of which the fuser gets one half, and the share of the features that it is."""
    tail = 2 * (features - fused)
    if not 0 < tail <= features:  # the shapes that this gives are told as the ones expected
        return int(features * CONTEXT_PROPORTION), CONTEXT_PROPORTION
    share = given.get("context_proportion")
    # A tail is a share rounded down and then up to an even number: many shares give the same.
    if isinstance(share, float) and tail - 1 <= features * share < tail + 1:
        return tail, share
    return tail, tail / features


def _splits(rows: int, given: Mapping[str, Any]) -> tuple[int, int, list[str]]:
    """Size of a split and splits of a window. The tensors only tell their product, the rows of a window."""
    notes = []
    told = {name: given.get(name) for name in ("chunk_size", "k")}
    told = {name: size for name, size in told.items() if isinstance(size, int) and size > 0}
    if "chunk_size" in told:
        chunk_size = told["chunk_size"]
    elif "k" in told:
        chunk_size = rows // told["k"]
    else:
        chunk_size = CHUNK_SIZE
        notes.append(f"the source tells neither `chunk_size` nor `k`; a `chunk_size` of {CHUNK_SIZE} was assumed")
    k = told.get("k") or rows // chunk_size
    if rows and chunk_size * k != rows:
        what = f"{SIZES['extended_len'][0]} has {rows} rows"
        if not told:
            raise ConversionError(
                f"{what}, which are no splits of {CHUNK_SIZE}; give `chunk_size` in a configuration file."
            )
        told_sizes = " and ".join(f"`{name}` of {size}" for name, size in told.items())
        raise ConversionError(f"{what}, which contradicts the configuration's {told_sizes}.")
    return chunk_size, k, notes


FORMAT = Format("avey", "Avey, published model or training checkpoint", "avey", matches, plan)
