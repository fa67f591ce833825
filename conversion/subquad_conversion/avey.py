"""
Avey: what is published, and what training saves, have the same names; in a state dict of our causal model they start
with `model.`.
"""

from collections.abc import Mapping
from typing import Any

from .formats import Format, Plan, Tensors
from .layout import Shape, count_blocks, plan_tensors, sizes_of, sources_of, split_sizes, tail_size, tie


CHUNK_SIZE = 64  # of every published model; only used where a file does not tell

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
    tail, proportion = tail_size(features, read["fused"], given)
    chunk_size, k, notes = split_sizes(SIZES["extended_len"][0], rows, 0, given, CHUNK_SIZE)
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


FORMAT = Format("avey", "Avey, published model or training checkpoint", "avey", matches, plan)
