"""
Finch (RWKV-6.0) as flash-linear-attention saves it: model type `rwkv6` too, with other names, other configuration
fields, and low-rank matrices in the layout of linear layers.
"""

from collections.abc import Mapping
from typing import Any

from subquad.models.rwkv6.loading_rwkv6 import FLASH_LINEAR_ATTENTION

from .formats import Take, Tensors
from .rwkv import Rwkv6Format


# Fields that are kept, by their names there. The ids of special tokens are not: they belong to that package's default
# tokenizer, which published models do not have.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "intermediate_size": "intermediate_size",
    "norm_eps": "layer_norm_epsilon",
    "tie_word_embeddings": "tie_word_embeddings",
    "use_cache": "use_cache",
}


class Rwkv6Fla(Rwkv6Format):
    name = "rwkv6-fla"
    title = "Finch (RWKV-6.0), flash-linear-attention's layout"

    def matches(self, tensors: Tensors) -> bool:
        return {"model.layers.0.attn.x_bias", "model.layers.0.attn.bonus"} <= tensors.keys()

    def parts(self, name: str) -> dict[str, Take]:
        return FLASH_LINEAR_ATTENTION.read_name(name)

    def with_options(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        fields = {ours: given[theirs] for theirs, ours in FIELDS.items() if theirs in given}
        return super().with_options(fields, options)


FORMAT = Rwkv6Fla()
