"""
Avey-B, in two layouts. What is published on the Hub has our names; in a state dict of a head they start with `model.`.
The code that came with the paper has names of its own, a variant of the model of its own, and `avey` for its type.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from subquad.models.avey_b.configuration_avey_b import DYNAMIC, LAYER_PATTERNS

from .formats import Format, Plan, Tensors
from .layout import Shape, count_blocks, plan_tensors, sizes_of, sources_of, split_sizes, tail_size, tie


# Where each size is read: tensor, axis.
SIZES = {
    "vocab_size": ("embed.weight", 0),
    "d_embed": ("embed.weight", 1),
    "features": ("layers.0.enricher.weight", 0),
    "fused": ("layers.0.fuser.weight", 1),
}
COMPRESSOR = "ranker.down_proj"
COMPRESSOR_SIZES = {"chunk_size": (COMPRESSOR, 0), "compressed_rows": (COMPRESSOR, 1)}

# What tells a field by being there: the end of a tensor's name.
TOLD_BY = {"compressor": COMPRESSOR, "residual_gain": ".alpha", "final_norm": "ln_f.weight"}
HUB = {"compressor": True, "residual_gain": True, "final_norm": False}
PAPER = {
    "compressor": True,
    "residual_gain": False,
    "final_norm": True,
    "hidden_act": "relu2",
    "similarity_norm": "sum",
}


def hub_name(name: str) -> str:
    return name.removeprefix("model.")


def paper_name(name: str) -> str:
    # A classifier holds the masked language model, and the model alone may be saved too.
    name = name.removeprefix("avey_model.").removeprefix("base_avey_model.")
    if name == "embeddings.weight":
        return "embed.weight"
    layer = re.fullmatch(r"(layers\.\d+\.)(?:ctxt\.(?:contextualizer\.)?)?(.+)", name)
    return layer[1] + re.sub(r"^rms_norm\b", "norm", layer[2]) if layer else name


def matches_hub(tensors: Tensors) -> bool:
    return any(hub_name(name).startswith(("layers.0.enricher.", "layers.0.fuser.")) for name in tensors)


def matches_paper(tensors: Tensors) -> bool:
    return any(re.match(r"(avey_model\.)?(base_avey_model\.)?layers\.0\.ctxt\.", name) for name in tensors)


def model_shapes(sizes: Mapping[str, Any], dynamic: list[bool], rows: int, tail: int) -> dict[str, Shape]:
    """
    Name to shape of a whole masked language model, in the order in which they are used; `rows` are those of a window.
    """
    d, size = sizes["d_embed"], sizes["chunk_size"]
    features = sizes["expansion_factor"] * d
    shapes: dict[str, Shape] = {"embed.weight": (sizes["vocab_size"], d)}
    if sizes["compressor"]:
        shapes[COMPRESSOR] = (size, (sizes["k"] + 1) * size)
    for i, is_dynamic in enumerate(dynamic):
        layer = f"layers.{i}."
        shapes[f"{layer}norm.weight"] = (d,)
        shapes |= {f"{layer}enricher.weight": (features, d), f"{layer}enricher.bias": (features,)}
        if not is_dynamic:
            shapes[f"{layer}spatial_proj"] = (rows, rows)
        shapes |= {f"{layer}fuser.weight": (d, features - tail // 2), f"{layer}fuser.bias": (d,)}
        if sizes["residual_gain"]:
            shapes[f"{layer}alpha"] = ()
    if sizes["final_norm"]:
        shapes["ln_f.weight"] = (d,)
    return shapes | {"lm_head.weight": (sizes["vocab_size"], d)}


def plan(
    canonical_name: Callable[[str], str], variant: Mapping[str, Any], tensors: Tensors, given: Mapping[str, Any]
) -> Plan:
    sources = sources_of(tensors, canonical_name)
    found = {target: tensors[name] for target, name in sources.items()}

    fields = {name: _field(name, value, found, given) for name, value in variant.items()}
    read = sizes_of(found, SIZES | COMPRESSOR_SIZES if fields["compressor"] else SIZES)
    d, layers = read["d_embed"], count_blocks(found, "layers.")
    expansion = read["features"] // d if d else 0
    tail, proportion = tail_size(expansion * d, read["fused"], given)

    matrices = [f"layers.{i}.spatial_proj" for i in range(layers)]
    pattern, dynamic, fits = _pattern([name not in found for name in matrices], given)
    if fields["compressor"]:
        rows = chunk_size = read["chunk_size"]
        k = max(read["compressed_rows"] // chunk_size - 1, 1) if chunk_size else 0
    else:
        matrix = next((name for name in matrices if name in found), "")
        rows = sizes_of(found, {"rows": (matrix, 0)})["rows"]
        chunk_size, k, _ = split_sizes(sources.get(matrix, ""), rows, 1, given)
    sizes = {
        "vocab_size": read["vocab_size"],
        "d_embed": d,
        "n_layers": layers,
        "chunk_size": chunk_size,
        "k": k,
        "expansion_factor": expansion,
        "context_proportion": proportion,
        "layer_pattern": pattern,
    } | fields
    shapes = model_shapes(sizes, dynamic, rows, tail)
    twins = []
    if given.get("tie_word_embeddings") is not False:
        twins = tie(shapes, sources, "embed.weight", "lm_head.weight")
    model = "avey-b" if fits else f"avey-b with the layer pattern {pattern}"
    read |= {"expansion_factor": expansion}
    return Plan(sizes, plan_tensors(model, tensors, sources, shapes, read, _fits), twins)


def _fits(target: str, stored: Shape, shape: Shape) -> bool:
    """A checkpoint of training has vectors of one element where published files have scalars."""
    return stored in (shape, shape or (1,))


def _field(name: str, value: Any, found: Tensors, given: Mapping[str, Any]) -> Any:
    """From the tensors as far as they tell it, else from the configuration, else the `value` of the variant."""
    if name in TOLD_BY and any(target.endswith(TOLD_BY[name]) for target in found):
        return True
    told = given.get(name)
    return told if isinstance(told, type(value)) else value


def _pattern(found: list[bool], given: Mapping[str, Any]) -> tuple[str, list[bool], bool]:
    """
    Of the layers' pattern the name, which layers are dynamic by it, and whether these are the ones `found` to be:
    else it is the pattern to hold them against.
    """
    patterns = {name: [kind == DYNAMIC for kind in kinds(len(found))] for name, kinds in LAYER_PATTERNS.items()}
    told = given.get("layer_pattern")
    # The configuration's first: of few layers several patterns are the same.
    names = sorted(patterns, key=lambda name: name != told)
    fitting = [name for name in names if patterns[name] == found]
    name = (fitting or names)[0]
    return name, patterns[name], bool(fitting)


HUB_FORMAT = Format(
    "avey-b-hub", "Avey-B, published model or training checkpoint", "avey-b", matches_hub, partial(plan, hub_name, HUB)
)
PAPER_FORMAT = Format(
    "avey-b-paper",
    "Avey-B, the paper's variant",
    "avey-b",
    matches_paper,
    partial(plan, paper_name, PAPER),
    config_types=("avey",),
)
