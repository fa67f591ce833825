"""Raven in vLLM. Softmax attention of hybrids is vLLM's."""

import torch
from torch import nn
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import IsAttentionFree, IsHybrid

from subquad.models.raven.modeling_raven import RavenAttention
from subquad.models.raven.positions_raven import RavenPositions

from .configuration import own_config
from .serving import ServedForCausalLM, part_of
from .states import StateSizes


class ServedRaven(ServedForCausalLM):
    state_names = ("slots",)

    @classmethod
    def state_sizes(cls, config: PreTrainedConfig, dtype: torch.dtype, processes: int) -> StateSizes:
        split = "layers.*.attn.k_norm" in config.base_model_tp_plan
        heads = part_of(config.num_heads, processes, split)
        return {"slots": ((heads, config.num_slots, config.head_k_dim + config.head_v_dim), torch.float32)}

    @classmethod
    def has_states(cls, config: PreTrainedConfig, block: int) -> bool:
        return config.attention(block) is None

    def run(self, x: torch.Tensor, input_ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        config, positions = self.config, positions.view(x.shape[:2])
        positions = RavenPositions(self.tokens, positions, document=None, kept=positions, kept_position=positions)
        for spec in config.attention_specs:
            if spec["use_rope"]:
                positions.add_rotation(config.hidden_size // spec["num_heads"], spec["rope_theta"])
        if config.use_rope:
            positions.add_rotation(config.head_k_dim, config.rope_theta)
        for block in self.base.layers:
            x = block(x, positions, cache=self.blocks)
        return self.base.norm(x)


class RavenForCausalLM(ServedRaven, IsAttentionFree):
    """Raven without softmax attention."""


class RavenHybridForCausalLM(ServedRaven, IsHybrid):
    """Raven with softmax attention in some blocks."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name, module in list(self.named_modules()):
            if isinstance(module, RavenAttention):
                self.set_submodule(name, ServedAttention(module, vllm_config, f"{name}.attention"))

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for shape, _ in cls._sizes(vllm_config).values())

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return tuple(dtype for _, dtype in cls._sizes(vllm_config).values())

    @classmethod
    def _sizes(cls, vllm_config: VllmConfig) -> StateSizes:
        model_config, processes = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
        return cls.state_sizes(own_config(model_config.hf_config, processes), model_config.dtype, processes)


class ServedAttention(nn.Module):
    """[`RavenAttention`], whose keys and values vLLM keeps."""

    def __init__(self, attention: RavenAttention, vllm_config: VllmConfig, name: str):
        super().__init__()
        for child_name, child in attention.named_children():
            self.add_module(child_name, child)
        self.theta, self.head_dim = attention.theta, attention.head_dim
        heads = attention.config.hidden_size // self.head_dim
        processes = vllm_config.parallel_config.tensor_parallel_size
        self.attention = Attention(
            heads // processes,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=heads // attention.num_key_value_groups // processes,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            per_layer_sliding_window=attention.window,
            prefix=name,
        )

    def forward(
        self, x: torch.Tensor, positions: RavenPositions, cache: None, state: None
    ) -> tuple[torch.Tensor, None]:
        """As [`RavenAttention.forward`], of tokens (tokens, 1, width)."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.theta is not None:
            q, k = (
                positions.rotate(torch.unflatten(y, -1, (-1, self.head_dim)), self.theta).flatten(2) for y in (q, k)
            )
        out = self.attention(*(y.flatten(0, 1) for y in (q, k, v)))
        return self.o_proj(out.view(*x.shape[:2], -1)), None
