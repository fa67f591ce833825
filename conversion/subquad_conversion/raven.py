"""
Raven: what is published, and what we save, have the same names. A layer is a slot memory or, in a hybrid, softmax
attention, which has nothing but four projections.
"""

import re
from collections.abc import Mapping
from typing import Any

from subquad.models.raven.configuration_raven import RavenConfig

from .errors import ConversionError
from .formats import Format, Plan, Tensors
from .layout import Shape, count_blocks, plan_tensors, sizes_of, sources_of, tie


EMBEDDINGS, HEAD = "model.embeddings.weight", "lm_head.weight"
LAYERS = "model.layers."
MIXER = re.compile(r"model\.layers\.([0-9]+)\.attn\.(.+)")
ATTENTION = {f"{name}_proj.weight" for name in "qkvo"}
ATTENTION_BIASES = {f"{name}_proj.bias" for name in "qkv"}

# What tells a variant by being there: the ends of tensors' names.
VARIANTS = {
    "use_output_gate": {True: (".o_gate_proj.weight", ".o_norm.weight"), False: (".g_norm.weight",)},
    "decay_type": {"GLA": (".f_proj.weight",), "Mamba2": (".a_proj.weight", ".A_log", ".dt_bias")},
    "router": {"raven": (".r_proj.weight", ".r_proj.2.weight")},
    "router_type": {"mlp": (".r_proj.0.weight", ".r_proj.2.weight"), "lin": (".r_proj.weight",)},
    "bias_rmm": {True: (".r_bias",)},
}


def matches(tensors: Tensors) -> bool:
    found = {mixer[2].partition(".")[0] for mixer in map(MIXER.fullmatch, tensors) if mixer}
    # Of memories without a learned router the norms tell. Other models have some of these names, but not together.
    return found >= {"q_proj", "r_proj"} or ("q_norm" in found and not found.isdisjoint({"o_norm", "g_norm"}))


def memory_shapes(sizes: Mapping[str, Any], head_k: int, head_v: int) -> dict[str, Shape]:
    """Name to shape of one slot memory, whose heads have keys and values of these sizes."""
    d, heads, kv_heads = sizes["hidden_size"], sizes["num_heads"], sizes["num_kv_heads"]
    shapes: dict[str, Shape] = {"q_proj.weight": (heads * head_k, d), "k_proj.weight": (kv_heads * head_k, d)}
    shapes |= {"v_proj.weight": (kv_heads * head_v, d), "q_norm.weight": (head_k,), "k_norm.weight": (head_k,)}
    if sizes["router"] != "swa":
        slots = (kv_heads * sizes["num_slots"], d)
        if sizes["decay_type"] == "GLA":
            shapes["f_proj.weight"] = slots
        else:
            shapes |= {"a_proj.weight": (kv_heads, d), "A_log": (kv_heads,), "dt_bias": (kv_heads,)}
    if sizes["router"] == "raven":
        if sizes["router_type"] == "mlp":
            shapes |= {"r_proj.0.weight": (d, d), "r_proj.0.bias": (d,), "r_proj.2.weight": slots}
        else:
            shapes["r_proj.weight"] = slots
        if sizes["bias_rmm"]:
            shapes["r_bias"] = (kv_heads, sizes["num_slots"])
    if sizes["use_output_gate"]:
        shapes |= {"o_gate_proj.weight": (heads * head_v, d), "o_norm.weight": (head_v,)}
    else:
        shapes["g_norm.weight"] = (heads * head_v,)
    return shapes | {"o_proj.weight": (d, heads * head_v)}


def attention_shapes(d: int, key_rows: int, bias: bool) -> dict[str, Shape]:
    """Name to shape of one layer of softmax attention."""
    rows = {"q_proj": d, "k_proj": key_rows, "v_proj": key_rows}
    shapes: dict[str, Shape] = {f"{name}.weight": (length, d) for name, length in rows.items()}
    if bias:
        shapes |= {f"{name}.bias": (length,) for name, length in rows.items()}
    return shapes | {"o_proj.weight": (d, d)}


def plan(tensors: Tensors, given: Mapping[str, Any]) -> Plan:
    sources = sources_of(tensors, str)
    layers = count_blocks(tensors, LAYERS)
    mixers: list[set[str]] = [set() for _ in range(layers)]
    for mixer in filter(None, map(MIXER.fullmatch, tensors)):
        if int(mixer[1]) < layers:
            mixers[int(mixer[1])].add(mixer[2])
    entries, found_attention = _entries(given.get("attn"), mixers)
    groups = [entry["layers"] for entry in entries] or [found_attention]
    memory = next((i for i in range(layers) if not any(i in group for group in groups)), 0)

    fields = {name: _variant(name, choices, tensors, given) for name, choices in VARIANTS.items()}
    read, sizes, head_k, head_v = _sizes(tensors, layers, f"{LAYERS}{memory}.attn.", fields, given)
    d = sizes["hidden_size"]
    mixer_shapes = [memory_shapes(sizes | fields, head_k, head_v)] * layers
    key_rows, biased = [], []
    for i, group in enumerate(groups):
        rows = sizes_of(tensors, {"key_rows": (f"{LAYERS}{group[0]}.attn.k_proj.weight", 0)}) if group else {}
        key_rows.append(rows.get("key_rows", 0))
        biased.append(any(mixers[layer] & ATTENTION_BIASES for layer in group))
        for layer in group:
            mixer_shapes[layer] = attention_shapes(d, key_rows[i], biased[i])
        read |= {f"{size} {i}": length for size, length in rows.items()}

    shapes: dict[str, Shape] = {EMBEDDINGS: (sizes["vocab_size"], d)}
    for i, mixer in enumerate(mixer_shapes):
        layer = f"{LAYERS}{i}."
        shapes[f"{layer}attn_norm.weight"] = (d,)
        shapes |= {f"{layer}attn.{name}": shape for name, shape in mixer.items()}
        shapes[f"{layer}mlp_norm.weight"] = (d,)
        width = sizes["intermediate_size"]
        shapes |= {f"{layer}mlp.{name}_proj.weight": (width, d) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (d, width)
    shapes |= {"model.norm.weight": (d,), HEAD: (sizes["vocab_size"], d)}
    twins = tie(shapes, sources, EMBEDDINGS, HEAD) if given.get("tie_word_embeddings") is True else []
    planned = plan_tensors("raven", tensors, sources, shapes, read)

    _check_told(fields["router"], found_attention if not entries else [], given)
    if entries:
        attn = [_entry(*each, d) for each in zip(entries, key_rows, biased, strict=True)]
        fields["attn"] = attn if isinstance(given["attn"], list) else attn[0]
    if isinstance(topk := given.get("topk"), int):
        few = "num_slots" in given and given["num_slots"] is None  # then published models write at most all
        fields["topk"] = min(topk, sizes["num_slots"]) if few else topk
    return Plan(sizes | fields, planned, twins)


def _variant(name: str, choices: Mapping[Any, tuple[str, ...]], tensors: Tensors, given: Mapping[str, Any]) -> Any:
    """From the tensors as far as they tell it, else from the configuration, else what published models are."""
    for choice, endings in choices.items():
        if any(tensor.startswith(LAYERS) and tensor.endswith(endings) for tensor in tensors):
            return choice
    told = given.get(name)
    return getattr(RavenConfig, name) if told is None else told


def _entries(attn: Any, mixers: list[set[str]]) -> tuple[list[dict[str, Any]], list[int]]:
    """The entries of the configuration's `attn`, and the layers that are softmax attention by their tensors."""
    projections = ATTENTION | ATTENTION_BIASES
    found = [i for i, names in enumerate(mixers) if ATTENTION <= names <= projections]
    entries = [] if attn is None else attn if isinstance(attn, list) else [attn]
    for entry in entries:
        heads, told = (entry.get("num_heads"), entry.get("layers")) if isinstance(entry, dict) else (None, None)
        usable = isinstance(told, list) and all(type(i) is int for i in told)
        if not usable or not isinstance(heads, int) or heads < 1:
            raise ConversionError(f"The configuration's `attn` must have `layers` and `num_heads`, got {entry}.")
    told = [i for entry in entries for i in entry["layers"]]
    memories = [i for i, names in enumerate(mixers) if names - projections]
    # A damaged layer that looks like neither is what the configuration says.
    if entries and (
        any(i not in told for i in found) or any(i in memories or i not in range(len(mixers)) for i in told)
    ):
        raise ConversionError(f"The configuration's `attn` has the layers {told}, the tensors have {found}.")
    return entries, found


def _sizes(
    tensors: Tensors, layers: int, memory: str, fields: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, Any], int, int]:
    """
    What a slot memory, whose names start with `memory`, and the rest tell: lengths of axes, 0 where a tensor is
    missing; fields of the configuration; sizes of a head's keys and values.
    """
    places = {
        "vocab_size": (EMBEDDINGS, 0),
        "hidden_size": (EMBEDDINGS, 1),
        "intermediate_size": (f"{LAYERS}0.mlp.gate_proj.weight", 0),
        "head_k": (f"{memory}q_norm.weight", 0),
        "queries": (f"{memory}q_proj.weight", 0),
        "keys": (f"{memory}k_proj.weight", 0),
        "values": (f"{memory}o_proj.weight", 1),
    }
    if fields["router"] == "raven":
        places["slots"] = (f"{memory}r_proj{'.2' if fields['router_type'] == 'mlp' else ''}.weight", 0)
    elif fields["router"] != "swa":
        places["slots"] = (f"{memory}f_proj.weight", 0)
    read = sizes_of(tensors, places)
    d, head_k = read["hidden_size"], read["head_k"]
    heads, kv_heads = (read[name] // max(head_k, 1) for name in ("queries", "keys"))
    head_v = read["values"] // max(heads, 1)
    slots = read["slots"] // max(kv_heads, 1) if "slots" in places else given.get("num_slots") or head_k
    sizes = {name: read[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    sizes |= {"num_hidden_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads, "num_slots": slots}
    for name, width in (("expand_k", heads * head_k), ("expand_v", heads * head_v)):
        misspelled = f"exapnd_{name[-1]}"
        spellings = [spelling for spelling in (name, misspelled) if spelling in given]
        expansion = given[spellings[-1]] if spellings else 1
        if not isinstance(expansion, int | float) or abs(d * expansion - width) > 1e-6:
            expansion = width / max(d, 1)
        # Under both names, so that it goes before whichever is given.
        sizes |= dict.fromkeys({name, *spellings}, expansion)
    return read | {"heads": heads, "kv_heads": kv_heads}, sizes, head_k, head_v


def _entry(entry: dict[str, Any], key_rows: int, bias: bool, d: int) -> dict[str, Any]:
    """An entry of `attn`, with the heads of keys and the biases that the tensors have."""
    heads = entry["num_heads"]
    if not entry["layers"]:
        return entry
    kv_heads = key_rows * heads // max(d, 1)
    if kv_heads * d != key_rows * heads or kv_heads < 1:
        raise ConversionError(
            f"Keys of {key_rows} channels are no heads of softmax attention where `attn['num_heads']` is {heads} and "
            f"`hidden_size` {d}."
        )
    if (entry.get("num_kv_heads") or heads, bool(entry.get("qkv_bias"))) == (kv_heads, bias):
        return entry
    return entry | {"num_kv_heads": kv_heads, "qkv_bias": bias}


def _check_told(router: str, attention: list[int], given: Mapping[str, Any]) -> None:
    """Refuses what cannot be run without a configuration, of which `attention` are the layers of softmax attention."""
    untold = []
    if router == "raven" and given.get("topk") is None:
        untold.append("`topk`")
    if router == "swa" and "num_slots" not in given:
        untold.append("`num_slots`")
    if attention:
        untold.append(
            f"the heads, window and rotary embeddings of softmax attention in the layers {attention} (`attn`)"
        )
    if untold:
        raise ConversionError(f"No tensor tells {', nor '.join(untold)}; give it in a configuration file.")


FORMAT = Format("raven", "Raven, published model or training checkpoint", "raven", matches, plan)
