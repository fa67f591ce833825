"""
The tensors of Eagle (RWKV-5.2) and Finch (RWKV-6.0): names and shapes as the published Hub models have them, and the
check of a checkpoint against them. The four source formats differ only in how they spell the names.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .checkpoint import TensorInfo
from .errors import ConversionError
from .formats import Format, Plan, Tensors
from .layout import Shape, count_blocks, plan_tensors, sizes_of, sources_of, tie


HEAD_SIZE = 64  # of every published model; only used where a file does not tell

# Where each size is read: tensor, axis.
SIZES = {
    "vocab_size": ("rwkv.embeddings.weight", 0),
    "hidden_size": ("rwkv.embeddings.weight", 1),
    "attention_hidden_size": ("rwkv.blocks.0.attention.key.weight", 0),
    "intermediate_size": ("rwkv.blocks.0.feed_forward.key.weight", 0),
}
RANKS = {
    "lora_rank_tokenshift": ("rwkv.blocks.0.attention.time_maa_w2", 1),
    "lora_rank_decay": ("rwkv.blocks.0.attention.time_decay_w2", 0),
}


def rwkv_format(
    name: str,
    title: str,
    model_type: str,
    matches: Callable[[Tensors], bool],
    canonical_name: Callable[[str], str],
) -> Format:
    """
    A [`Format`] of this family. `canonical_name` turns the source's spelling into ours and leaves names that it does
    not know as they are.
    """
    return Format(name, title, model_type, matches, partial(_plan, model_type, canonical_name))


def has_gate(tensors: Tensors, attention: str) -> bool:
    """Whether block 0's time mixing, whose names start with `attention`, is gated: version 5.1 and later."""
    return any(f"{attention}{name}" in tensors for name in ("gate.weight", "time_mix_g", "time_mix_gate"))


def has_vector_decay(tensors: Tensors, attention: str) -> bool:
    """Whether every channel of a head has a decay of its own (version 5.2), not the head one for all."""
    decay, key = tensors.get(f"{attention}time_decay"), tensors.get(f"{attention}key.weight")
    if decay is None or key is None:  # a damaged file: the list of what is missing says more than a refusal
        return True
    return decay.elements == key.shape[0] or len(_without_ones(decay.shape)) > 1


def trainer_name(name: str) -> str:
    """A trainer's name in our spelling, as far as both versions agree."""
    block = re.fullmatch(r"(blocks\.\d+\.)(\w+)(\..+)", name)
    if block:
        part = {"att": "attention", "ffn": "feed_forward", "ln0": "pre_ln"}.get(block[2], block[2])
        return f"rwkv.{block[1]}{part}{block[3]}"
    if name == "emb.weight":
        return "rwkv.embeddings.weight"
    return f"rwkv.{name}" if name.startswith("ln_out.") else name


def attention_shapes(model_type: str, sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Name to shape of one block's time mixing."""
    d, a = sizes["hidden_size"], sizes["attention_hidden_size"]
    per_head = (sizes["num_attention_heads"], sizes["head_size"])
    shapes: dict[str, Shape] = {}
    if model_type == "rwkv5":
        shapes["time_decay"] = per_head
        shapes |= {f"time_mix_{part}": (1, 1, d) for part in ("key", "value", "receptance", "gate")}
    else:
        r, s = sizes["lora_rank_tokenshift"], sizes["lora_rank_decay"]
        shapes |= {f"time_maa_{part}": (1, 1, d) for part in "xwkvrg"}
        shapes |= {"time_maa_w1": (d, 5 * r), "time_maa_w2": (5, r, d)}
        shapes |= {"time_decay": (1, 1, a), "time_decay_w1": (d, s), "time_decay_w2": (s, a)}
    shapes["time_faaaa"] = per_head
    shapes |= {f"{part}.weight": (a, d) for part in ("receptance", "key", "value", "gate")}
    return shapes | {"output.weight": (d, a), "ln_x.weight": (a,), "ln_x.bias": (a,)}


def feed_forward_shapes(model_type: str, sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Name to shape of one block's channel mixing."""
    d, f = sizes["hidden_size"], sizes["intermediate_size"]
    mixes = ("time_mix_key", "time_mix_receptance") if model_type == "rwkv5" else ("time_maa_k", "time_maa_r")
    shapes: dict[str, Shape] = dict.fromkeys(mixes, (1, 1, d))
    return shapes | {"key.weight": (f, d), "receptance.weight": (d, d), "value.weight": (d, f)}


def model_shapes(model_type: str, sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Name to shape of a whole causal language model, in the order in which they are used."""
    d, vocabulary = sizes["hidden_size"], sizes["vocab_size"]

    def norm(name: str) -> dict[str, Shape]:
        return {f"{name}.weight": (d,), f"{name}.bias": (d,)}

    shapes: dict[str, Shape] = {"rwkv.embeddings.weight": (vocabulary, d)}
    attention, feed_forward = attention_shapes(model_type, sizes), feed_forward_shapes(model_type, sizes)
    for i in range(sizes["num_hidden_layers"]):
        block = f"rwkv.blocks.{i}"
        if i == 0:
            shapes |= norm(f"{block}.pre_ln")
        shapes |= norm(f"{block}.ln1") | norm(f"{block}.ln2")
        shapes |= {f"{block}.attention.{name}": shape for name, shape in attention.items()}
        shapes |= {f"{block}.feed_forward.{name}": shape for name, shape in feed_forward.items()}
    return shapes | norm("rwkv.ln_out") | {"head.weight": (vocabulary, d)}


@dataclass(frozen=True)
class Layout:
    """
    What a checkpoint's tensors say of a model: `sizes`, `sources` and `shapes` by our names, and as in a [`Plan`] the
    `twins` and `notes`; `fits` is for [`plan_tensors`].
    """

    sizes: dict[str, int]
    sources: dict[str, str]
    shapes: dict[str, Shape]
    twins: list[tuple[str, str]]
    notes: list[str]
    fits: Callable[[str, Shape, Shape], bool]


def read_layout(
    model_type: str, canonical_name: Callable[[str], str], tensors: Tensors, given: Mapping[str, Any]
) -> Layout:
    """The [`Layout`] of a causal language model; what is missing or does not fit shows when it is planned."""
    sources = sources_of(tensors, canonical_name)
    found = {target: tensors[name] for target, name in sources.items()}

    sizes, notes = _sizes(model_type, found, given)
    if "head_size_divisor" not in given:
        notes.append("the source does not tell `head_size_divisor`; 8 was assumed, as in every World model")
    shapes = model_shapes(model_type, sizes)
    twins = []
    if given.get("tie_word_embeddings") is True:
        twins = tie(shapes, sources, "rwkv.embeddings.weight", "head.weight")
    fits = partial(_fits, (sizes["num_attention_heads"], sizes["head_size"]))
    return Layout(sizes, sources, shapes, twins, notes, fits)


def _plan(model_type: str, canonical_name: Callable[[str], str], tensors: Tensors, given: Mapping[str, Any]) -> Plan:
    layout = read_layout(model_type, canonical_name, tensors, given)
    planned = plan_tensors(model_type, tensors, layout.sources, layout.shapes, layout.sizes, layout.fits)
    return Plan(layout.sizes, planned, layout.twins, layout.notes)


def _sizes(model_type: str, found: Tensors, given: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Every size from the tensors, never from each other: published configurations and ranks follow no formula."""
    sizes = sizes_of(found, SIZES if model_type == "rwkv5" else SIZES | RANKS)
    sizes["num_hidden_layers"] = count_blocks(found, "rwkv.blocks.")
    heads, head_size, notes = _heads(model_type, found, sizes["attention_hidden_size"], given)
    return sizes | {"num_attention_heads": heads, "head_size": head_size}, notes


def _heads(model_type: str, found: Tensors, width: int, given: Mapping[str, Any]) -> tuple[int, int, list[str]]:
    """Number and size of the heads. Some trainers flatten the per-head vectors, which hides both."""
    prefix = "rwkv.blocks.0.attention."
    for name in ("time_faaaa", "time_decay") if model_type == "rwkv5" else ("time_faaaa",):
        shape = found[prefix + name].shape if prefix + name in found else ()
        if len(shape) != 2:
            shape = _without_ones(shape)
        if len(shape) == 2:
            return shape[0], shape[1], []
    head_size = given.get("head_size")
    notes = []
    if not isinstance(head_size, int) or head_size < 1:
        head_size = HEAD_SIZE
        notes.append(f"the file does not tell the size of a head; {HEAD_SIZE} was assumed")
    if width % head_size:
        raise ConversionError(
            f"The per-head vectors are flattened and {width} channels are no multiple of a head size of {head_size}; "
            "give `head_size` in a configuration file."
        )
    return width // head_size, head_size, notes


def _fits(per_head: Shape, target: str, stored: Shape, shape: Shape) -> bool:
    """Whether a stored tensor has the elements of `shape` in the same order."""
    if stored == shape:
        return True
    leaf = target.rpartition(".")[2]
    if not leaf.startswith("time_"):
        return False
    # Vectors come with and without axes of length 1, and flattened; decays also a row a head.
    forms = {_without_ones(shape), (TensorInfo(shape, "").elements,)}
    if leaf == "time_decay":
        forms.add(_without_ones(per_head))
    return _without_ones(stored) in forms


def _without_ones(shape: Shape) -> Shape:
    return tuple(length for length in shape if length != 1)
