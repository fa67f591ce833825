"""
Finch (RWKV-6.0) as saved by flash-linear-attention: also model type `rwkv6`, with other names and configuration
fields, and low-rank matrices as linear layers' weights.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from subquad.models.rwkv6.loading_rwkv6 import FLASH_LINEAR_ATTENTION

from .errors import ConversionError
from .formats import Tensors
from .rwkv import Rwkv6Format


# Fields to keep, by their names there. The ids of special tokens are dropped: they belong to that package's default
# tokenizer, which published models do not use.
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
    name_map = FLASH_LINEAR_ATTENTION
    target = "fla"

    def matches(self, tensors: Tensors) -> bool:
        return {"model.layers.0.attn.x_bias", "model.layers.0.attn.bonus"} <= tensors.keys()

    def with_options(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        fields = {ours: given[theirs] for theirs, ours in FIELDS.items() if theirs in given}
        return super().with_options(fields, options)

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        if config.attention_hidden_size != config.hidden_size:
            raise ConversionError(
                f"`attention_hidden_size` is {config.attention_hidden_size} and `hidden_size` {config.hidden_size}; "
                "in flash-linear-attention's layout they are equal."
            )
        if config.head_size_divisor == 1:
            return []
        epsilon = 1e-5 * config.head_size_divisor**2
        return [
            f"flash-linear-attention normalises the heads with an epsilon of {config.layer_norm_epsilon:g}; this "
            f"model was trained with {epsilon:g}, so that its answers there differ slightly"
        ]

    def target_fields(self, config: PreTrainedConfig) -> dict[str, Any]:
        return {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()} | {
            "model_type": "rwkv6",
            "architectures": ["RWKV6ForCausalLM"],
            "dtype": config.to_diff_dict()["dtype"],
            "num_heads": config.num_attention_heads,
            "proj_low_rank_dim": config.lora_rank_tokenshift,
            "gate_low_rank_dim": config.lora_rank_decay,
            "expand_k": 1.0,
            "expand_v": 1.0,
            "hidden_act": "sqrelu",
            "norm_first": True,
            "norm_bias": True,
            "attn": None,
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
        }


FORMAT = Rwkv6Fla()
