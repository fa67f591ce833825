"""
VisualRWKV-7.00: three vision towers as timm and SAM name them (`vit.dino_featurizer.`, `vit.siglip_featurizer.`,
`vit.sam_featurizer.`), a gated projection (`proj.`) and Goose with the trainer's names (`rwkv.`).
"""

import re
from collections.abc import Mapping
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from subquad.hub.loading import NameMap, Part
from subquad.models.visual_rwkv.configuration_visual_rwkv import DINO, SIGLIP

from .errors import ConversionError
from .formats import Extract, Shape, SourceTensor, Tensors, count_blocks, lengths_of
from .other_versions import OTHER_GOOSE, has_goose
from .rwkv7 import UNUSED, Rwkv7Trainer
from .visual_rwkv import MODEL, InferredVision, VisualFormat


VIT = f"{MODEL}vit."
DINO_TOWER, SIGLIP_TOWER, SAM_TOWER = f"{VIT}dino.", f"{VIT}siglip.", f"{VIT}sam.vision_encoder."
GATE = f"{MODEL}proj.gate.weight"


def third(x: torch.Tensor, index: int) -> torch.Tensor:
    """Queries, keys or values of one weight or bias."""
    return x.chunk(3)[index]


def thirds(names: tuple[str, str, str]) -> dict[str, Part]:
    """The weight and the bias of timm's `attn.qkv`. `names` are those of three layers."""
    return {
        f".attn.qkv.{kind}": Part({f".{name}.{kind}": partial(third, index=i) for i, name in enumerate(names)})
        for kind in ("weight", "bias")
    }


def with_class_token(x: torch.Tensor) -> torch.Tensor:
    """The positions of patches, and zeros for the class token, which timm stores with its position."""
    return F.pad(x, (0, 0, 1, 0))


def first(x: torch.Tensor) -> torch.Tensor:
    return x[0]


# Names in a tower to those of transformers. DINOv2's are those of releases before 5.18; later ones read them too.
TOWERS = {
    "vit.dino_featurizer.": (
        DINO_TOWER,
        NameMap(
            {
                "^cls_token$": "embeddings.cls_token",
                "^reg_token$": "embeddings.register_tokens",
                "^pos_embed$": "positions",
                "^patch_embed.proj.": "embeddings.patch_embeddings.projection.",
                "^norm.": "layernorm.",
                "^blocks.": "encoder.layer.",
                ".attn.proj.": ".attention.output.dense.",
                ".ls1.gamma$": ".layer_scale1.lambda1",
                ".ls2.gamma$": ".layer_scale2.lambda1",
            },
            {
                "positions": Part({"embeddings.position_embeddings": with_class_token}),
                **thirds(tuple(f"attention.attention.{name}" for name in ("query", "key", "value"))),
            },
        ),
    ),
    "vit.siglip_featurizer.": (
        SIGLIP_TOWER,
        NameMap(
            {
                "^pos_embed$": "positions",
                "^patch_embed.proj.": "embeddings.patch_embedding.",
                "^norm.": "post_layernorm.",
                "^blocks.": "encoder.layers.",
                ".norm1.": ".layer_norm1.",
                ".norm2.": ".layer_norm2.",
                ".attn.proj.": ".self_attn.out_proj.",
            },
            {
                "positions": Part({"embeddings.position_embedding.weight": first}),
                **thirds(tuple(f"self_attn.{letter}_proj" for letter in "qkv")),
            },
        ),
    ),
    "vit.sam_featurizer.": (
        SAM_TOWER,
        NameMap(
            {
                "^patch_embed.proj.": "patch_embed.projection.",
                "^blocks.": "layers.",
                ".norm1.": ".layer_norm1.",
                ".norm2.": ".layer_norm2.",
                "^neck.0.": "neck.conv1.",
                "^neck.1.": "neck.layer_norm1.",
                "^neck.2.": "neck.conv2.",
                "^neck.3.": "neck.layer_norm2.",
            }
        ),
    ),
}
# transformers' names of DINOv2's attention from 5.18 on, and before.
DINO_ATTENTION = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value"}
DINO_ATTENTION |= {"o_proj": "output.dense"}
NEWER_DINO = re.compile(rf"({re.escape(DINO_TOWER)}.*\.attention\.)({'|'.join(DINO_ATTENTION)})(\..*)")
# SigLIP's pooled output, which nothing reads.
POOLING = f"{SIGLIP_TOWER}attn_pool."


def patch_places(weight: str) -> dict[str, tuple[str, int]]:
    """The source of the sizes that a tower's first convolution has."""
    return {size: (weight, axis) for axis, size in enumerate(("hidden_size", "num_channels", "patch_size"))}


# The source of each size of the towers: tensor, axis.
PLACES = {
    "dino": {
        **patch_places(f"{DINO_TOWER}embeddings.patch_embeddings.projection.weight"),
        "positions": (f"{DINO_TOWER}embeddings.position_embeddings", 1),
        "num_register_tokens": (f"{DINO_TOWER}embeddings.register_tokens", 1),
        "intermediate_size": (f"{DINO_TOWER}encoder.layer.0.mlp.fc1.weight", 0),
    },
    "siglip": {
        **patch_places(f"{SIGLIP_TOWER}embeddings.patch_embedding.weight"),
        "positions": (f"{SIGLIP_TOWER}embeddings.position_embedding.weight", 0),
        "intermediate_size": (f"{SIGLIP_TOWER}encoder.layers.0.mlp.fc1.weight", 0),
    },
    "sam": {
        **patch_places(f"{SAM_TOWER}patch_embed.projection.weight"),
        "side": (f"{SAM_TOWER}pos_embed", 1),
        "head_size": (f"{SAM_TOWER}layers.0.attn.rel_pos_h", 1),
        "mlp_dim": (f"{SAM_TOWER}layers.0.mlp.lin1.weight", 0),
        "output_channels": (f"{SAM_TOWER}neck.conv1.weight", 0),
    },
}
# The features of each tower, and the number of its patches that become one.
WIDTHS = {"dino": "hidden_size", "siglip": "hidden_size", "sam": "output_channels"}
PATCHES = {"dino": 1, "siglip": 1, "sam": 4}
TYPES = {"dino": "dinov2_with_registers", "siglip": "siglip_vision_model", "sam": "sam_vision_model"}
TITLES = {"dino": "DINOv2", "siglip": "SigLIP", "sam": "SAM"}
LAYERS = {
    "dino": f"{DINO_TOWER}encoder.layer.",
    "siglip": f"{SIGLIP_TOWER}encoder.layers.",
    "sam": f"{SAM_TOWER}layers.",
}
# The same in the published towers; only used if not stored.
HEADS = 16
# Mean and standard deviation of the pixels: ImageNet's for DINOv2 and SAM.
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


class TowersFormat(VisualFormat):
    """Goose behind DINOv2, SigLIP and SAM."""

    def matches(self, tensors: Tensors) -> bool:
        own = "proj.gate.weight" in tensors or any(name.startswith(tuple(TOWERS)) for name in tensors)
        others = any(other.matches(tensors) for other in OTHER_GOOSE)
        return own and has_goose(tensors) and self.has_text(tensors) and not others

    def vision_parts(self, name: str) -> Mapping[str, Extract]:
        for prefix, (ours, name_map) in TOWERS.items():
            if name.startswith(prefix):
                return {ours + part: take for part, take in name_map.read_name(name.removeprefix(prefix)).items()}
        return {f"{MODEL}{name}" if name.startswith("proj.") else name: None}

    def is_buffer(self, name: str) -> bool:
        text = name.replace(f"{MODEL}rwkv.", self.base, 1)
        return name.startswith(POOLING) or UNUSED.fullmatch(text) is not None

    def shapes(self, fields: Mapping[str, Any]) -> dict[str, Shape]:
        """Without DINOv2's token for hidden patches, which is not in the files and which nothing reads."""
        return {name: shape for name, shape in super().shapes(fields).items() if not name.endswith(".mask_token")}

    def written_name(self, name: str) -> str:
        newer = NEWER_DINO.fullmatch(name)
        return f"{newer[1]}{DINO_ATTENTION[newer[2]]}{newer[3]}" if newer else name

    def read_vision(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredVision:
        missing = [title for name, title in TITLES.items() if not any(x.startswith(LAYERS[name]) for x in found)]
        if missing:
            raise ConversionError(
                f"The source lacks the vision towers {', '.join(missing)} (tensors `vit.*`), which belong in the same "
                "file, or in <name>_visual.pth beside <name>_rwkv.pth."
            )
        sizes = {name: lengths_of(found, places) for name, places in PLACES.items()}
        for name, tower in sizes.items():
            tower["model_type"] = TYPES[name]
            tower["num_hidden_layers"] = max(count_blocks(found, LAYERS[name]), 2)
        dino, siglip, sam = sizes.values()
        dino["image_size"] = isqrt(max(dino.pop("positions") - 1, 1)) * dino["patch_size"]
        siglip["image_size"] = isqrt(max(siglip.pop("positions"), 1)) * siglip["patch_size"]
        sam["image_size"] = sam["side"] * sam["patch_size"]
        dino["mlp_ratio"] = dino.pop("intermediate_size") // max(dino["hidden_size"], 1)
        sam["num_attention_heads"] = sam["hidden_size"] // max(sam.pop("head_size"), 1)
        sam |= _windows(found, sam["num_hidden_layers"], sam.pop("side"))
        self._check_widths(found, sizes)

        untold, notes = {}, []
        for name in ("dino", "siglip"):
            fields = dict(given.get(name) or {}) if isinstance(given.get(name), Mapping | None) else {}
            if "num_attention_heads" not in fields:
                untold[name] = {"num_attention_heads": HEADS}
                notes.append(
                    f"{TITLES[name]}'s `num_attention_heads` is not stored in the source; {HEADS} was assumed, as in "
                    "the published models"
                )
            heads, width = fields.get("num_attention_heads", HEADS), sizes[name]["hidden_size"]
            if width and isinstance(heads, int) and (heads < 1 or width % heads):
                raise ConversionError(
                    f"{TITLES[name]}'s {width} channels make no {heads} heads; give `num_attention_heads` in the "
                    f"`{name}` of the `vision_config` of a configuration file."
                )
        kind = {"model_type": "visual_rwkv_towers"}
        layers = {name: {"num_hidden_layers": tower["num_hidden_layers"]} for name, tower in sizes.items()}
        one_head = {"dino": {"num_attention_heads": 1}, "siglip": {"num_attention_heads": 1}, "sam": {}}
        published = {"dino": DINO, "siglip": SIGLIP, "sam": {}}
        return InferredVision(
            kind | {name: tower | untold.get(name, {}) for name, tower in sizes.items()},
            kind | {name: published[name] | layers[name] for name in sizes},
            kind | {name: tower | one_head[name] for name, tower in sizes.items()},
            {f"{name}_{size}": place for name, places in PLACES.items() for size, place in places.items()},
            notes,
        )

    @staticmethod
    def _check_widths(found: Mapping[str, SourceTensor], sizes: Mapping[str, Mapping[str, Any]]) -> None:
        widths = [(name, PLACES[name][size][0], sizes[name][size]) for name, size in WIDTHS.items()]
        features = found[GATE].shape[1:] if GATE in found else ()
        if not features or not all(width for _, _, width in widths):
            return  # the list of faults is more helpful
        if features != (sum(width * PATCHES[name] for name, _, width in widths),):
            shown = ", ".join(f"{found[place].source} has {width} x {PATCHES[name]}" for name, place, width in widths)
            raise ConversionError(
                f"proj.gate.weight reads {features[0]} features of a patch, but of the vision towers {shown}: they "
                "are another model's."
            )

    def image_settings(self, config: PreTrainedConfig, vision_tower: Path | None) -> tuple[Any, dict[str, Any]]:
        """Images are resized to squares, without a crop."""
        from transformers import CLIPImageProcessorPil

        sizes = {name: {"height": shape[1], "width": shape[2]} for name, shape in config.image_shapes.items()}
        others = {"pixel_values_siglip": HALF, "pixel_values_sam": IMAGENET}
        return (
            CLIPImageProcessorPil(size=sizes["pixel_values"], do_center_crop=False, **IMAGENET),
            {name: {"size": sizes[name], **statistics} for name, statistics in others.items()},
        )


def _windows(found: Mapping[str, SourceTensor], layers: int, side: int) -> dict[str, Any]:
    """SAM's size of windows, and the layers without windows, by the number of relative positions of each layer."""
    whole = 2 * side - 1
    places = {i: (f"{LAYERS['sam']}{i}.attn.rel_pos_h", 0) for i in range(layers)}
    positions = {i: lengths_of(found, {"length": place})["length"] for i, place in places.items()}
    windows = [length for length in positions.values() if length not in (0, whole)]
    return {
        "window_size": (max(set(windows), key=windows.count) + 1) // 2 if windows else 14,
        "global_attn_indexes": [i for i, length in positions.items() if length == whole],
    }


FORMAT = TowersFormat(Rwkv7Trainer(), "VisualRWKV-7.00 (DINOv2, SigLIP, SAM and Goose)", "rwkv7.")
