"""Formats that are known by name and not supported, so that the answer can say what a file is."""

from .formats import Refusal, Tensors
from .rwkv_layout import has_gate, has_vector_decay


# Names of block 0's time mixing start with one of these: trainer, Hub.
ATTENTIONS = ("blocks.0.att.", "rwkv.blocks.0.attention.")


def _ends(tensors: Tensors, *endings: str) -> bool:
    return any(name.endswith(endings) for name in tensors)


def _has(tensors: Tensors, name: str) -> bool:
    return any(f"{attention}{name}" in tensors for attention in ATTENTIONS)


def _is_version_4(tensors: Tensors) -> bool:
    return _has(tensors, "time_first") and not _has(tensors, "ln_x.weight")


def _is_version_5_0(tensors: Tensors) -> bool:
    return _has(tensors, "ln_x.weight") and not any(has_gate(tensors, attention) for attention in ATTENTIONS)


def _is_version_5_1(tensors: Tensors) -> bool:
    return any(has_gate(tensors, attention) and not has_vector_decay(tensors, attention) for attention in ATTENTIONS)


def _is_inside_another_model(tensors: Tensors) -> bool:
    return any(name.startswith(("rwkv.emb.", "rwkv.blocks.0.att.", "vit.")) for name in tensors)


REFUSALS = (
    Refusal("RWKV-7 (Goose)", lambda tensors: _ends(tensors, ".k_k", ".r_k")),
    Refusal("RWKV-4", _is_version_4),
    Refusal("RWKV-5.0, without a gate", _is_version_5_0),
    Refusal("RWKV-5.1, with one decay a head", _is_version_5_1),
    Refusal(
        "part of a larger model such as VisualRWKV (names carry a `rwkv.` or `vit.` prefix)", _is_inside_another_model
    ),
    Refusal("Megalodon", lambda tensors: _ends(tensors, ".mega.cema.omega")),
)
