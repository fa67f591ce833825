"""Eagle (RWKV-5), Finch (RWKV-6) and Goose (RWKV-7) in vLLM."""

import torch
from transformers import PreTrainedConfig
from vllm.model_executor.models.interfaces import IsAttentionFree

from subquad.models.rwkv6 import loading_rwkv6
from subquad.models.rwkv7 import loading_rwkv7

from .serving import ServedForCausalLM, part_of
from .states import StateSizes


class RwkvForCausalLM(ServedForCausalLM, IsAttentionFree):
    state_names = ("wkv", "attention_shift", "feed_forward_shift")

    @classmethod
    def state_sizes(cls, config: PreTrainedConfig, dtype: torch.dtype, processes: int) -> StateSizes:
        heads, size, width = config.num_attention_heads, config.head_dim, config.hidden_size
        own = part_of(heads, processes, any(name.endswith(".ln_x.weight") for name in config.base_model_tp_plan))
        return {
            "wkv": ((own, size, size), torch.float32),
            "attention_shift": ((width,), dtype),
            "feed_forward_shift": ((width,), dtype),
        }

    def run(self, x: torch.Tensor, input_ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        for block in self.base.blocks:
            x = block(x, self.tokens, cache=self.blocks)
        return self.base.ln_out(x)


class FinchForCausalLM(RwkvForCausalLM):
    name_map = loading_rwkv6.FLASH_LINEAR_ATTENTION


class GooseForCausalLM(RwkvForCausalLM):
    name_map = loading_rwkv7.OTHER_NAMES

    def run(self, x: torch.Tensor, input_ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        v_first = None
        for block in self.base.blocks:
            x, v_first = block(x, v_first, self.tokens, cache=self.blocks)
        return self.base.ln_out(x)
