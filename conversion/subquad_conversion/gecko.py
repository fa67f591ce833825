"""
Gecko: the authors' code has the same names as ours, here with the prefix `model.`, except for the head. Their code
also saves buffers, which determine some sizes and are not written.
"""

import re
from collections.abc import Mapping
from typing import Any

from .errors import ConversionError
from .formats import Format, InferredConfig, SourceTensor, Tensors, count_blocks, lengths_of


EMBEDDINGS, HEAD = "model.embed.weight", "output.output.weight"
LAYERS = "model.layers."
# The initial moments of a norm, and the frequencies of rotary embeddings, one for each pair of channels of a head.
PRIOR = re.compile(r"model\.(?:layers\.\d+\.mega\.timenorm|output\.final_norm)\.prior_(?:count|mean|var)")
FREQUENCIES = "model.rope.freqs"

# The source of each size: tensor, axis.
PLACES = {
    "vocab_size": (EMBEDDINGS, 0),
    "model_dim": (EMBEDDINGS, 1),
    "z_dim": (f"{LAYERS}0.mega.wz.weight", 0),
    "value_dim": (f"{LAYERS}0.mega.wv.weight", 0),
    "ffn_hidden_dim": (f"{LAYERS}0.nffn.fc1.weight", 0),
    "cema_ndim": (f"{LAYERS}0.mega.cema.alpha", 1),
}
# Suffixes of tensor names that show that a field is true.
SHOWN_BY = {
    "norm_affine": (".mega.rmsnorm.weight", ".nffn.norm.weight"),
    "swiglu": (".nffn.fc3.weight",),
    "rescale_nffn": (".nffn.alpha",),
}
# Fields that no weight determines. The first three are needed to run a model, the others have usual values.
REQUIRED = ("num_heads", "chunk_size", "timenorm_num_groups")
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
# Valid values for fields that no shape depends on.
SHAPE_FIELDS = {"num_heads": 1, "num_rope_heads": 0, "timenorm_num_groups": 1}


class GeckoFormat(Format):
    name = "gecko"
    title = "Gecko, published model or training checkpoint"
    model_type = "gecko"

    def matches(self, tensors: Tensors) -> bool:
        found = [name for name in map(self.rename, tensors) if name.startswith(f"{LAYERS}0.mega.")]
        # Megalodon, an earlier model, has some of these names.
        return bool(found) and not any(name.endswith(".cema.omega") for name in found)

    def rename(self, name: str) -> str:
        return name if name == HEAD else f"model.{name.removeprefix('model.')}"

    def is_buffer(self, name: str) -> bool:
        return name == FREQUENCIES or PRIOR.fullmatch(name) is not None

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        sizes = lengths_of(found, PLACES) | {"num_layers": count_blocks(found, LAYERS)}
        variant = {
            name: any(target.endswith(endings) for target in found) or given.get(name) is True
            for name, endings in SHOWN_BY.items()
        }
        tied = given.get("share_emb", given.get("tie_word_embeddings")) is True
        frequencies = found.get(FREQUENCIES)
        priors = [tensor for name, tensor in found.items() if PRIOR.fullmatch(name)]

        def finish() -> dict[str, Any]:
            fields = {name: given.get(name) for name in REQUIRED}
            if frequencies:
                fields["num_heads"] = _heads(frequencies, sizes["z_dim"])
            if priors:
                fields["timenorm_num_groups"] = _groups(priors, fields["timenorm_num_groups"])
            if untold := [f"`{name}`" for name in REQUIRED if fields[name] is None]:
                raise ConversionError(
                    f"No tensor determines {', nor '.join(untold)}; give it in a configuration file."
                )
            return fields

        assumed = [f"`{name}` {getattr(self.config_class, name)}" for name in ASSUMED if name not in given]
        return InferredConfig(
            sizes | variant | {"share_emb": tied},
            {"num_layers": sizes["num_layers"]} | variant,
            PLACES,
            shape_fields=SHAPE_FIELDS,
            tied=(EMBEDDINGS, HEAD) if tied else None,
            notes=[f"values that are not stored in the source were assumed: {', '.join(assumed)}"] if assumed else [],
            zeros=[tensor.source for tensor in priors],
            finish=finish,
        )


def _heads(frequencies: SourceTensor, z: int) -> int:
    """The number of heads, from `z` channels and one frequency per pair of a head's channels."""
    shape = frequencies.shape
    if len(shape) != 1 or not shape[0] or z % (2 * shape[0]):
        raise ConversionError(f"{frequencies.source} has the shape {shape}, which fits no heads of `z_dim` {z}.")
    return z // (2 * shape[0])


def _groups(priors: list[SourceTensor], told: Any) -> Any:
    """The number of groups of channels in the norms, from their initial moments, else `told`."""
    shapes = {tensor.shape: tensor.source for tensor in priors if not tensor.source.endswith("count")}
    if not shapes:
        return told
    if len(shapes) > 1 or len(min(shapes)) != 1:
        found = ", ".join(f"{name} {shape}" for shape, name in shapes.items())
        raise ConversionError(f"Norms begin from one mean and one variance of each group, got {found}.")
    return min(shapes)[0]


FORMAT = GeckoFormat()
