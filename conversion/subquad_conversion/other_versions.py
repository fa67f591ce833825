"""Formats that are known but not supported, so that errors can name them."""

import re
from functools import partial

from subquad.models.rwkv7_deep_embed.configuration_rwkv7_deep_embed import OTHER_RELATIVES

from .formats import Refusal, Tensors
from .rwkv import has_gate, has_vector_decay
from .rwkv7_deep_embed import has_attention, has_tables


# Names of block 0's time mixing start with one of these: trainer, Hub.
ATTENTIONS = ("blocks.0.att.", "rwkv.blocks.0.attention.")


def _ends(tensors: Tensors, *endings: str) -> bool:
    return any(name.endswith(endings) for name in tensors)


def _has_part(tensors: Tensors, *parts: str) -> bool:
    return any(part in name for name in tensors for part in parts)


def _has(tensors: Tensors, name: str) -> bool:
    return any(f"{attention}{name}" in tensors for attention in ATTENTIONS)


def _is_relative_of_goose(pattern: str, tensors: Tensors) -> bool:
    if re.search(pattern, ".attn.q_proj.") and not _ends(tensors, ".r_k"):  # many models have this name
        return False
    return any(re.search(pattern, name) for name in tensors)


def _is_version_4(tensors: Tensors) -> bool:
    return _has(tensors, "time_first") and not _has(tensors, "ln_x.weight")


def _is_version_5_0(tensors: Tensors) -> bool:
    return _has(tensors, "ln_x.weight") and not any(has_gate(tensors, attention) for attention in ATTENTIONS)


def _is_version_5_1(tensors: Tensors) -> bool:
    return any(has_gate(tensors, attention) and not has_vector_decay(tensors, attention) for attention in ATTENTIONS)


def _starts(tensors: Tensors, *beginnings: str) -> bool:
    return any(name.startswith(beginnings) for name in tensors)


def _has_siglip(tensors: Tensors) -> bool:
    """A tower of transformers' `SiglipVisionModel`, which pools by attention and has a bias that CLIP lacks."""
    return _starts(tensors, "vit.vision_model.head.", "vit.head.") or (
        _starts(tensors, "vit.") and _ends(tensors, ".patch_embedding.bias")
    )


def _is_inside_another_model(tensors: Tensors) -> bool:
    return _starts(tensors, "rwkv.emb.", "rwkv.blocks.0.att.", "vit.")


def has_goose(tensors: Tensors) -> bool:
    """Whether the language model of a VisualRWKV is Goose."""
    return _starts(tensors, "rwkv.") and _ends(tensors, ".att.k_k", ".att.r_k")


# Variants with Goose that are not version 7.00.
OTHER_GOOSE = (
    Refusal(
        "VisualRWKV-7.10, without a vision tower",
        lambda tensors: has_goose(tensors) and (_starts(tensors, "vrwkv.") or _has_part(tensors, ".ffn_v.")),
    ),
    Refusal(
        "VisualRWKV-7.03 or 7.04, which compress images by blocks of their own",
        lambda tensors: has_goose(tensors) and _starts(tensors, "vtc."),
    ),
    Refusal(
        "VisualRWKV-7.01 or 7.02, with the tower SigLIP alone",
        lambda tensors: has_goose(tensors) and _has_siglip(tensors),
    ),
    Refusal(
        "VisualRWKV-7 with a linear projection",
        lambda tensors: has_goose(tensors) and "proj.weight" in tensors and _starts(tensors, "vit.dino", "vit.sam"),
    ),
)

# Most of these files contain a supported language model, so they are tried before the formats.
OTHER_VISUAL = (
    *OTHER_GOOSE,
    Refusal("VisualRWKV-7 (Goose) with other towers or without its projection", has_goose),
    Refusal(
        "VisualRWKV with the towers SigLIP, DINOv2 and SAM (6.1x, 6.2x, HD, UHD)",
        lambda tensors: _starts(tensors, "vit.siglip", "vit.dino", "vit.sam"),
    ),
    Refusal("VisualRWKV with the tower SigLIP (6.1)", _has_siglip),
    Refusal(
        "VisualRWKV with a projection of several layers (6.1x, 6.2x, HD, UHD)",
        lambda tensors: _starts(tensors, "proj.") and not tensors.keys() & {"proj.weight", "proj.bias"},
    ),
    Refusal(
        "VisualRWKV with the towers CLIP and SAM (5.4)",
        lambda tensors: _starts(tensors, "clip_projector.", "sam_projector."),
    ),
    Refusal(
        "VisualRWKV whose language model attends to the image (5.3)",
        lambda tensors: _starts(tensors, "rwkv.") and any(".tiny_att." in name for name in tensors),
    ),
)

# The first match wins.
REFUSALS = (
    Refusal("EmbeddingRWKV's reranker by products of states", lambda tensors: _starts(tensors, "ranking_head.")),
    *OTHER_VISUAL,
    *(Refusal(title, partial(_is_relative_of_goose, pattern)) for pattern, title in OTHER_RELATIVES.items()),
    Refusal(
        "RWKV-7a or 7b with merged tables, or in a layout that is not known",
        lambda tensors: has_tables(tensors) or any(re.match(r"[skv]_emb\.\d", name) for name in tensors),
    ),
    Refusal("RWKV-7b's attention without DeepEmbed", has_attention),
    Refusal(
        "RWKV-7 (Goose) in the layers of another model, such as ARWKV or QRWKV",
        lambda tensors: _has_part(tensors, ".mlp.gate_proj.") and _ends(tensors, ".r_k", ".k_k", ".k_a"),
    ),
    Refusal(
        "RWKV-7 (Goose) in a layout that is not known",
        lambda tensors: _ends(tensors, ".k_k", ".r_k"),
    ),
    Refusal("RWKV-4", _is_version_4),
    Refusal("RWKV-5.0, without a gate", _is_version_5_0),
    Refusal("RWKV-5.1, with one decay a head", _is_version_5_1),
    Refusal(
        "part of a larger model such as VisualRWKV (names carry a `rwkv.` or `vit.` prefix)", _is_inside_another_model
    ),
    Refusal("Megalodon", lambda tensors: _ends(tensors, ".mega.cema.omega")),
)
