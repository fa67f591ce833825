"""
Gecko: the authors' code and we have the same names, which start with `model.` here, all but that of the head. Beside
the weights it saves buffers, which tell some sizes and are not written.
"""

import re
from collections.abc import Mapping
from typing import Any

from subquad.models.gecko.configuration_gecko import GeckoConfig

from .errors import ConversionError
from .formats import Format, Plan, Tensors
from .layout import Shape, count_blocks, plan_tensors, sizes_of, sources_of, tie


EMBEDDINGS, HEAD = "model.embed.weight", "output.output.weight"
LAYERS = "model.layers."
# What a norm begins from, and the frequencies of rotary embeddings, one for each pair of channels of a head.
PRIOR = re.compile(r"model\.(?:layers\.\d+\.mega\.timenorm|output\.final_norm)\.prior_(?:count|mean|var)")
FREQUENCIES = "model.rope.freqs"

# Where each size is read: tensor, axis.
SIZES = {
    "vocab_size": (EMBEDDINGS, 0),
    "model_dim": (EMBEDDINGS, 1),
    "z_dim": (f"{LAYERS}0.mega.wz.weight", 0),
    "value_dim": (f"{LAYERS}0.mega.wv.weight", 0),
    "ffn_hidden_dim": (f"{LAYERS}0.nffn.fc1.weight", 0),
    "cema_ndim": (f"{LAYERS}0.mega.cema.alpha", 1),
}
# What tells a variant by being there: the ends of tensors' names.
TOLD_BY = {
    "norm_affine": (".mega.rmsnorm.weight", ".nffn.norm.weight"),
    "swiglu": (".nffn.fc3.weight",),
    "rescale_nffn": (".nffn.alpha",),
}
# What no weight tells: without the first three a model cannot be run, the others have values that are usual.
UNTOLD = ("num_heads", "chunk_size", "timenorm_num_groups")
ASSUMED = (
    "timenorm_beta1",
    "timenorm_beta2",
    "layernorm_num_groups",
    "norm_eps",
    "two_hop_residual",
    "rope_base",
    "num_rope_heads",
    "scale_emb",
    "document_boundaries",
)


def canonical_name(name: str) -> str:
    return name if name == HEAD else f"model.{name.removeprefix('model.')}"


def matches(tensors: Tensors) -> bool:
    found = [name for name in map(canonical_name, tensors) if name.startswith(f"{LAYERS}0.mega.")]
    # Megalodon, which came before, has some of the names.
    return bool(found) and not any(name.endswith(".cema.omega") for name in found)


def model_shapes(sizes: Mapping[str, Any]) -> dict[str, Shape]:
    """Name to shape of a whole causal language model, in the order in which they are used."""
    d, z, v, n = (sizes[name] for name in ("model_dim", "z_dim", "value_dim", "cema_ndim"))
    hidden = sizes["ffn_hidden_dim"]

    def norm(name: str, *parameters: str) -> dict[str, Shape]:
        return {f"{name}.{parameter}": (d,) for parameter in parameters} if sizes["norm_affine"] else {}

    shapes: dict[str, Shape] = {EMBEDDINGS: (sizes["vocab_size"], d)}
    for i in range(sizes["num_layers"]):
        mega, nffn = f"{LAYERS}{i}.mega.", f"{LAYERS}{i}.nffn."
        shapes |= {f"{mega}timenorm.weight": (d,), f"{mega}timenorm.bias": (d,)}
        shapes |= {f"{mega}cema.alpha": (d, n), f"{mega}cema.delta": (d, n)}
        shapes |= {f"{mega}cema.theta": (d,), f"{mega}cema.gamma": (d, n, 2)}
        shapes |= norm(f"{mega}rmsnorm", "weight")
        for name, rows in (("wz", z), ("wv", v), ("wr", v), ("wh1", d)):
            shapes |= {f"{mega}{name}.weight": (rows, d), f"{mega}{name}.bias": (rows,)}
        shapes |= {f"{mega}wh2.weight": (d, v), f"{mega}gamma": (4, z), f"{mega}beta": (4, z)}
        shapes |= norm(f"{nffn}norm", "weight", "bias")
        shapes |= {f"{nffn}{name}.weight": (hidden, d) for name in (("fc1", "fc3") if sizes["swiglu"] else ("fc1",))}
        shapes[f"{nffn}fc2.weight"] = (d, hidden)
        if sizes["rescale_nffn"]:
            shapes[f"{nffn}alpha"] = (d,)
    final = "model.output.final_norm."
    return shapes | {f"{final}weight": (d,), f"{final}bias": (d,), HEAD: (sizes["vocab_size"], d)}


def plan(tensors: Tensors, given: Mapping[str, Any]) -> Plan:
    sources = sources_of(tensors, canonical_name)
    layers = count_blocks(sources, LAYERS)
    frequencies = sources.pop(FREQUENCIES, None)
    priors = [sources.pop(name) for name in list(sources) if PRIOR.fullmatch(name)]
    found = {target: tensors[name] for target, name in sources.items()}

    sizes = sizes_of(found, SIZES) | {"num_layers": layers}
    fields = {
        name: any(target.endswith(endings) for target in found) or given.get(name) is True
        for name, endings in TOLD_BY.items()
    }
    shapes = model_shapes(sizes | fields)
    fields["share_emb"] = given.get("share_emb", given.get("tie_word_embeddings")) is True
    twins = tie(shapes, sources, EMBEDDINGS, HEAD) if fields["share_emb"] else []
    planned = plan_tensors("gecko", tensors, sources, shapes, sizes)

    fields |= {name: given.get(name) for name in UNTOLD}
    if frequencies:
        fields["num_heads"] = _heads(frequencies, tensors, sizes["z_dim"])
    if priors:
        fields["timenorm_num_groups"] = _groups(priors, tensors, fields["timenorm_num_groups"])
    if untold := [f"`{name}`" for name in UNTOLD if fields[name] is None]:
        raise ConversionError(f"No tensor tells {', nor '.join(untold)}; give it in a configuration file.")
    assumed = [f"`{name}` {getattr(GeckoConfig, name)}" for name in ASSUMED if name not in given]
    notes = [f"what the source does not tell was assumed: {', '.join(assumed)}"] if assumed else []
    return Plan(sizes | fields, planned, twins, notes, priors)


def _heads(frequencies: str, tensors: Tensors, z: int) -> int:
    """How many heads of `z` channels have as many pairs as there are frequencies."""
    shape = tensors[frequencies].shape
    if len(shape) != 1 or not shape[0] or z % (2 * shape[0]):
        raise ConversionError(f"{frequencies} has the shape {shape}, which fits no heads of `z_dim` {z}.")
    return z // (2 * shape[0])


def _groups(priors: list[str], tensors: Tensors, told: Any) -> Any:
    """How many groups of channels the norms have, by what they begin from, else what is `told`."""
    shapes = {tensors[name].shape: name for name in priors if not name.endswith("count")}
    if not shapes:
        return told
    if len(shapes) > 1 or len(min(shapes)) != 1:
        found = ", ".join(f"{name} {shape}" for shape, name in shapes.items())
        raise ConversionError(f"Norms begin from one mean and one variance of each group, got {found}.")
    return min(shapes)[0]


FORMAT = Format("gecko", "Gecko, published model or training checkpoint", "gecko", matches, plan)
