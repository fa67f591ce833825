"""
Raven: published models have the same names as ours. A layer is a slot memory or, in a hybrid, softmax attention, which
has only four projections.
"""

import re
from collections.abc import Mapping
from typing import Any

from .errors import ConversionError
from .formats import Format, InferredConfig, SourceTensor, Tensors, count_blocks, lengths_of


EMBEDDINGS, HEAD = "model.embeddings.weight", "lm_head.weight"
LAYERS = "model.layers."
MIXER = re.compile(r"model\.layers\.([0-9]+)\.attn\.(.+)")
ATTENTION = {f"{name}_proj.weight" for name in "qkvo"}
ATTENTION_BIASES = {f"{name}_proj.bias" for name in "qkv"}

# Suffixes of tensor names that show a variant.
VARIANTS = {
    "use_output_gate": {True: (".o_gate_proj.weight", ".o_norm.weight"), False: (".g_norm.weight",)},
    "decay_type": {"GLA": (".f_proj.weight",), "Mamba2": (".a_proj.weight", ".A_log", ".dt_bias")},
    "router": {"raven": (".r_proj.weight", ".r_proj.2.weight")},
    "router_type": {"mlp": (".r_proj.0.weight", ".r_proj.2.weight"), "lin": (".r_proj.weight",)},
    "bias_rmm": {True: (".r_bias",)},
}


class RavenFormat(Format):
    name = "raven"
    title = "Raven, published model or training checkpoint"
    model_type = "raven"

    def matches(self, tensors: Tensors) -> bool:
        found = {mixer[2].partition(".")[0] for mixer in map(MIXER.fullmatch, tensors) if mixer}
        if "r_k" in found:  # a hybrid of RWKV-7
            return False
        # The norms show memories without a learned router. Other models have some of these names, but not together.
        return found >= {"q_proj", "r_proj"} or ("q_norm" in found and not found.isdisjoint({"o_norm", "g_norm"}))

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        layers = count_blocks(found, LAYERS)
        mixers: list[set[str]] = [set() for _ in range(layers)]
        for mixer in filter(None, map(MIXER.fullmatch, found)):
            if int(mixer[1]) < layers:
                mixers[int(mixer[1])].add(mixer[2])
        entries, attention = _entries(given.get("attn"), mixers)
        groups = [entry["layers"] for entry in entries] or [attention]
        memory = next((i for i in range(layers) if not any(i in group for group in groups)), 0)
        variant = {name: self._variant(name, choices, found, given) for name, choices in VARIANTS.items()}

        places = _places(f"{LAYERS}{memory}.attn.", variant)
        keys = {i: (f"{LAYERS}{group[0]}.attn.k_proj.weight", 0) for i, group in enumerate(groups) if group}
        sizes = _sizes(lengths_of(found, places), layers, given)
        key_rows = lengths_of(found, keys)
        biased = [any(mixers[layer] & ATTENTION_BIASES for layer in group) for group in groups]
        d = sizes["hidden_size"]

        def finish() -> dict[str, Any]:
            _check_told(variant["router"], attention if not entries else [], given)
            fields = {}
            if entries:
                attn = [
                    _entry(entry, key_rows.get(i, 0), bias, d)
                    for i, (entry, bias) in enumerate(zip(entries, biased, strict=True))
                ]
                fields["attn"] = attn if isinstance(given["attn"], list) else attn[0]
            if isinstance(topk := given.get("topk"), int):
                few = "num_slots" in given and given["num_slots"] is None  # then published models write at most all
                fields["topk"] = min(topk, sizes["num_slots"]) if few else topk
            return fields

        def softmax(heads: int, kv_heads: Mapping[int, int]) -> list[dict[str, Any]]:
            """Entries of `attn` with as many heads as the shapes need: no tensor determines their width."""
            return [
                {
                    "layers": groups[i],
                    "num_heads": heads,
                    "num_kv_heads": kv_heads[i],
                    "qkv_bias": biased[i],
                    "use_rope": False,
                }
                for i in keys
            ]

        # Heads of one channel each. If the keys' channels do not divide the queries', as many as queries are expected.
        kv_heads = {i: rows if rows and d % rows == 0 else d for i, rows in key_rows.items()}
        # For a valid configuration: neither `topk` nor the layers of softmax attention affect a memory's shapes.
        shape_fields = {"topk": 1, "attn": softmax(max(d, 1), kv_heads)}
        structure = {"num_hidden_layers": layers, "topk": 1, "attn": softmax(1, dict.fromkeys(keys, 1))}
        return InferredConfig(
            sizes | variant,
            structure | variant,
            places | {f"key_rows {i}": place for i, place in keys.items()},
            shape_fields=shape_fields,
            tied=(EMBEDDINGS, HEAD) if given.get("tie_word_embeddings") is True else None,
            finish=finish,
        )

    def _variant(
        self,
        name: str,
        choices: Mapping[Any, tuple[str, ...]],
        found: Mapping[str, SourceTensor],
        given: Mapping[str, Any],
    ) -> Any:
        """The variant from the tensors if they show it, else from the configuration, else as in published models."""
        for choice, endings in choices.items():
            if any(target.startswith(LAYERS) and target.endswith(endings) for target in found):
                return choice
        told = given.get(name)
        return getattr(self.config_class, name) if told is None else told


def _places(memory: str, variant: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """The source of each size: tensor, axis. The names of a slot memory start with `memory`."""
    places = {
        "vocab_size": (EMBEDDINGS, 0),
        "hidden_size": (EMBEDDINGS, 1),
        "intermediate_size": (f"{LAYERS}0.mlp.gate_proj.weight", 0),
        "head_k": (f"{memory}q_norm.weight", 0),
        "queries": (f"{memory}q_proj.weight", 0),
        "keys": (f"{memory}k_proj.weight", 0),
        "values": (f"{memory}o_proj.weight", 1),
    }
    if variant["router"] == "raven":
        places["slots"] = (f"{memory}r_proj{'.2' if variant['router_type'] == 'mlp' else ''}.weight", 0)
    elif variant["router"] != "swa":
        places["slots"] = (f"{memory}f_proj.weight", 0)
    return places


def _sizes(read: Mapping[str, int], layers: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the configuration, from the lengths of axes (0 if a tensor is missing)."""
    d, head_k = read["hidden_size"], read["head_k"]
    heads, kv_heads = (max(read[name] // max(head_k, 1), 1) for name in ("queries", "keys"))
    head_v = max(read["values"] // heads, 1)
    slots = max(read["slots"] // kv_heads, 1) if "slots" in read else given.get("num_slots") or head_k
    sizes: dict[str, Any] = {name: read[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    sizes |= {"num_hidden_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads, "num_slots": slots}
    for name, width in (("expand_k", heads * head_k), ("expand_v", heads * head_v)):
        misspelled = f"exapnd_{name[-1]}"
        spellings = [spelling for spelling in (name, misspelled) if spelling in given]
        expansion = given[spellings[-1]] if spellings else 1
        if not isinstance(expansion, int | float) or abs(d * expansion - width) > 1e-6:
            expansion = width / max(d, 1)
        # Under both names, to replace whichever is given.
        sizes |= dict.fromkeys({name, *spellings}, expansion)
    return sizes


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
    # A damaged layer that looks like neither is taken from the configuration.
    if entries and (
        any(i not in told for i in found) or any(i in memories or i not in range(len(mixers)) for i in told)
    ):
        raise ConversionError(f"The configuration's `attn` has the layers {told}, the tensors have {found}.")
    return entries, found


def _entry(entry: dict[str, Any], key_rows: int, bias: bool, d: int) -> dict[str, Any]:
    """An entry of `attn`, with the number of key heads and the biases from the tensors."""
    heads = entry["num_heads"]
    if not entry["layers"]:
        return entry
    kv_heads = key_rows * heads // d
    if kv_heads * d != key_rows * heads or kv_heads < 1:
        raise ConversionError(
            f"Keys of {key_rows} channels do not fill heads of softmax attention if `attn['num_heads']` is {heads} "
            f"and `hidden_size` is {d}."
        )
    if (entry.get("num_kv_heads") or heads, bool(entry.get("qkv_bias"))) == (kv_heads, bias):
        return entry
    return entry | {"num_kv_heads": kv_heads, "qkv_bias": bias}


def _check_told(router: str, attention: list[int], given: Mapping[str, Any]) -> None:
    """Raises an error for missing settings, and for `attention` layers that the configuration does not describe."""
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
        raise ConversionError(f"No tensor determines {', nor '.join(untold)}; give it in a configuration file.")


FORMAT = RavenFormat()
