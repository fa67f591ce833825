"""
Avey-B, in two formats. Models on the Hub have our names; in a state dict of a head they start with `model.`. The code
of the paper has other names, its own variant of the model, and the model type `avey`.
"""

import re
from collections.abc import Mapping
from typing import Any

from subquad.models.avey_b.configuration_avey_b import LAYER_PATTERNS

from .avey import feature_sizes, split_sizes
from .formats import Format, InferredConfig, Shape, SourceTensor, Tensors, count_blocks, lengths_of


EMBEDDINGS, HEAD = "embed.weight", "lm_head.weight"
# The source of each size: tensor, axis.
PLACES = {
    "vocab_size": (EMBEDDINGS, 0),
    "d_embed": (EMBEDDINGS, 1),
    "features": ("layers.0.enricher.weight", 0),
    "fused": ("layers.0.fuser.weight", 1),
}
COMPRESSOR = "ranker.down_proj"
COMPRESSOR_PLACES = {"chunk_size": (COMPRESSOR, 0), "compressed_rows": (COMPRESSOR, 1)}
# Suffixes of tensor names that show that a field is true.
SHOWN_BY = {"compressor": COMPRESSOR, "residual_gain": ".alpha", "final_norm": "ln_f.weight"}


class AveyBFormat(Format):
    """
    The common base of both formats.

    Attributes:
        variant: fields that the tensors may not show, with their values in published models of this format.
    """

    model_type = "avey-b"
    variant: Mapping[str, Any]

    def written_name(self, name: str) -> str:
        return name.removeprefix("model.")

    def shapes(self, fields: Mapping[str, Any]) -> dict[str, Shape]:
        """A gain is a scalar in published files, and a vector of one element in the model."""
        shapes = super().shapes(fields)
        return {name: () if name.endswith(".alpha") else shape for name, shape in shapes.items()}

    def fits(self, name: str, stored: Shape, shape: Shape, fields: Mapping[str, Any]) -> bool:
        return stored in (shape, shape or (1,))

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        variant = {name: _variant(name, value, found, given) for name, value in self.variant.items()}
        places = PLACES | COMPRESSOR_PLACES if variant["compressor"] else PLACES
        read = lengths_of(found, places)
        d, layers = read["d_embed"], count_blocks(found, "layers.")
        expansion, proportion = feature_sizes(d, read["features"], read["fused"], given)

        matrices = [f"layers.{i}.spatial_proj" for i in range(layers)]
        pattern, fits = self._pattern([name not in found for name in matrices], given)
        if variant["compressor"]:
            chunk_size = read["chunk_size"]
            k = max(read["compressed_rows"] // max(chunk_size, 1) - 1, 1)
        else:
            matrix = next((name for name in matrices if name in found), None)
            rows = lengths_of(found, {"rows": (matrix, 0)})["rows"]
            chunk_size, k, _ = split_sizes(found[matrix].source if matrix else "", rows, 1, given)
        fields = {
            "vocab_size": read["vocab_size"],
            "d_embed": d,
            "n_layers": layers,
            "chunk_size": chunk_size,
            "k": k,
            "expansion_factor": expansion,
            "context_proportion": proportion,
            "layer_pattern": pattern,
        } | variant
        return InferredConfig(
            fields,
            {"n_layers": layers, "layer_pattern": pattern} | variant,
            places,
            tied=(EMBEDDINGS, HEAD) if given.get("tie_word_embeddings") is not False else None,
            model=None if fits else f"avey-b with the layer pattern {pattern}",
        )

    def _pattern(self, dynamic: list[bool], given: Mapping[str, Any]) -> tuple[str, bool]:
        """The name of the layers' pattern, and whether it makes the same layers `dynamic` as the tensors do."""
        told = given.get("layer_pattern")
        # The configuration's pattern first: with few layers, several patterns are equal.
        names = sorted(LAYER_PATTERNS, key=lambda name: name != told)
        for name in names:
            if self.config_class(n_layers=len(dynamic), layer_pattern=name).dynamic_layers == dynamic:
                return name, True
        return names[0], False


def _variant(name: str, value: Any, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> Any:
    """The value from the tensors if they show it, else from the configuration, else the variant's `value`."""
    if name in SHOWN_BY and any(target.endswith(SHOWN_BY[name]) for target in found):
        return True
    told = given.get(name)
    return told if isinstance(told, type(value)) else value


class AveyBHub(AveyBFormat):
    name = "avey-b-hub"
    title = "Avey-B, published model or training checkpoint"
    variant = {"compressor": True, "residual_gain": True, "final_norm": False}

    def matches(self, tensors: Tensors) -> bool:
        return any(self.rename(name).startswith(("layers.0.enricher.", "layers.0.fuser.")) for name in tensors)

    def rename(self, name: str) -> str:
        return name.removeprefix("model.")


class AveyBPaper(AveyBFormat):
    name = "avey-b-paper"
    title = "Avey-B, the paper's variant"
    config_types = ("avey",)
    variant = {
        "compressor": True,
        "residual_gain": False,
        "final_norm": True,
        "hidden_act": "relu2",
        "similarity_norm": "sum",
    }

    def matches(self, tensors: Tensors) -> bool:
        return any(re.match(r"(avey_model\.)?(base_avey_model\.)?layers\.0\.ctxt\.", name) for name in tensors)

    def rename(self, name: str) -> str:
        # A classifier contains the masked language model; the model may also be saved alone.
        name = name.removeprefix("avey_model.").removeprefix("base_avey_model.")
        if name == "embeddings.weight":
            return EMBEDDINGS
        layer = re.fullmatch(r"(layers\.\d+\.)(?:ctxt\.(?:contextualizer\.)?)?(.+)", name)
        return layer[1] + re.sub(r"^rms_norm\b", "norm", layer[2]) if layer else name


HUB_FORMAT = AveyBHub()
PAPER_FORMAT = AveyBPaper()
