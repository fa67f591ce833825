"""Raven, section 4 of "High-Recall Sequence Modeling with Sparse Memory Routing"."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.integrations import use_kernelized_func
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.output_capturing import capture_outputs

from subquad_kernels import slot_memory, slot_memory_state, slot_routing

from ...decoding.generation import RecurrentGenerationMixin
from ...modeling.arguments import checks_arguments
from ...modeling.base import RecurrentBlock, RecurrentPreTrainedModel
from ...modeling.heads import CausalLMHead, SequenceClassificationHead
from ...modeling.layers import Linear, replaceable
from ...modeling.protocols import NO_STATE, BlockState
from ...modeling.tensor_parallel import local_part
from ...modeling.versions import RecurrentModelOutput
from .cache_raven import RavenCache
from .configuration_raven import RavenConfig
from .positions_raven import RavenPositions, at_least_float32, find_positions


slot_memory, slot_routing = replaceable(slot_memory, slot_routing)


class RavenSlotMemory(nn.Module):
    """Section 4.1: a memory of slots for each head. A token is written to a few slots and reads all."""

    def __init__(self, config: RavenConfig, layer_idx: int):
        super().__init__()
        self.config = config
        width, heads, slots = config.hidden_size, config.num_kv_heads, config.num_kv_heads * config.num_slots
        self.groups = config.num_heads // heads
        self.feature_map = {"swish": F.silu, "relu": F.relu}[config.feature_map]

        self.q_proj = Linear(width, config.key_dim, bias=False)
        self.k_proj = Linear(width, config.key_dim // self.groups, bias=False)
        self.v_proj = Linear(width, config.value_dim // self.groups, bias=False)
        self.q_norm = nn.RMSNorm(config.head_k_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_k_dim, eps=config.norm_eps)

        if config.router != "swa":
            if config.decay_type == "GLA":
                self.f_proj = Linear(width, slots, bias=False)
            else:
                self.a_proj = Linear(width, heads, bias=False)
                self.A_log = nn.Parameter(torch.empty(heads))
                self.dt_bias = nn.Parameter(torch.empty(heads))
        if config.router == "raven":
            self.r_proj = Linear(width, slots, bias=False)
            if config.router_type == "mlp":
                self.r_proj = nn.Sequential(Linear(width, width), nn.GELU(), self.r_proj)
            if config.bias_rmm:
                self.r_bias = nn.Parameter(torch.empty(heads, config.num_slots), requires_grad=False)

        if config.use_output_gate:
            self.o_gate_proj = Linear(width, config.value_dim, bias=False)
            self.o_norm = nn.RMSNorm(config.head_v_dim, eps=config.norm_eps)
        else:
            self.g_norm = nn.RMSNorm(config.value_dim, eps=config.norm_eps)
        self.o_proj = Linear(config.value_dim, width, bias=False)

    def log_decay(self, x: torch.Tensor) -> torch.Tensor:
        """
        a, the logarithm of the decay: (batch, length, heads), equation 19 with a bias; or with "GLA" of table 1
        (batch, length, heads, slots).
        """
        if self.config.decay_type == "GLA":
            f = torch.unflatten(at_least_float32(self.f_proj(x)), -1, (-1, self.config.num_slots))
            return F.logsigmoid(f) / self.config.gate_logit_normalizer
        A_log, dt_bias = at_least_float32(local_part(self.A_log)), at_least_float32(local_part(self.dt_bias))
        return -A_log.exp() * F.softplus(at_least_float32(self.a_proj(x)) + dt_bias)

    def route(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """
        a r of equation 18, the log decay of each slot, (batch, length, heads, slots): Raven's router of equation 20
        (with noise 23), or the routers "swa" (12) and "gsa" (14).
        """
        config = self.config
        if config.router == "swa":  # the oldest token's slot keeps nothing
            slot = (position % config.num_slots)[:, :, None, None].expand(-1, -1, config.num_kv_heads, 1)
            log_f = x.new_zeros(*slot.shape[:3], config.num_slots, dtype=torch.float32)
            return log_f.scatter(3, slot, -torch.inf)
        a = self.log_decay(x)
        if config.router == "gsa":
            return a
        m = torch.unflatten(self.r_proj(x), -1, (-1, config.num_slots))
        if config.add_gumbel_noise and self.training:
            m = at_least_float32(m)
            m = m - torch.empty_like(m).exponential_().log()  # equation 23
        return slot_routing(
            logits=m,
            log_decay=a,
            topk=config.topk,
            bias=local_part(self.r_bias) if config.bias_rmm else None,
            score=config.router_score,
            scale=config.router_scale,
        )

    def forward(
        self, x: torch.Tensor, positions: RavenPositions, cache: RavenCache | None, state: BlockState
    ) -> tuple[torch.Tensor, None]:
        """x (batch, length, hidden_size); the output has the same shape. There are no attention weights."""
        config, tokens = self.config, positions.tokens
        q = self.q_norm(self.feature_map(torch.unflatten(self.q_proj(x), -1, (-1, config.head_k_dim))))
        k = self.k_norm(self.feature_map(torch.unflatten(self.k_proj(x), -1, (-1, config.head_k_dim))))
        v = torch.unflatten(F.silu(self.v_proj(x)), -1, (-1, config.head_v_dim))
        if config.use_rope:
            q, k = positions.rotate(q, config.rope_theta), positions.rotate(k, config.rope_theta)
        log_f = self.route(x, positions.position)[:, :, : k.shape[2]]  # with "swa" it is the same in all heads
        log_f = tokens.zero_padding(log_f)  # padding is written to no slot
        if self.groups > 1:
            k, v, log_f = (y.repeat_interleave(self.groups, dim=2) for y in (k, v, log_f))

        sequences = {"q": q, "k": k, "v": v, "log_f": log_f}
        entering, inplace = state.get("slots"), state.can_overwrite("slots")
        out, leaving = tokens.run_packed(slot_memory, sequences, entering, inplace)  # equation 18
        state.update("slots", leaving, slot_memory_state, k, v, log_f)
        out = F.silu(out)
        if config.use_output_gate:
            gate = self.o_gate_proj(x).view(out.shape)
            return self.o_proj((self.o_norm(out) * F.silu(gate)).flatten(2)), None
        return self.o_proj(self.g_norm(out.flatten(2))), None


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Softmax attention in plain torch, with the interface of transformers' attention functions: query (batch, heads,
    length, size), key and value (batch, key heads, keys, size), and a mask that is True where a query sees a key, or
    None for causal attention. Returns (batch, length, heads, size) and the weights.
    """
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    scores = query @ key.mT * scaling
    if attention_mask is None:
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        attention_mask = attention_mask.tril(scores.shape[-1] - scores.shape[-2])
    scores = scores.masked_fill(~attention_mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (weights @ value).transpose(1, 2), weights


class RavenAttention(nn.Module):
    """Softmax attention, over a sliding window or the whole text, in some layers of a hybrid: section 5.3."""

    def __init__(self, config: RavenConfig, layer_idx: int):
        super().__init__()
        spec = config.attention(layer_idx)
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.window, self.theta = spec["window_size"], spec["rope_theta"] if spec["use_rope"] else None
        self.head_dim = config.hidden_size // spec["num_heads"]
        self.num_key_value_groups = spec["num_heads"] // spec["num_kv_heads"]
        key_dim = self.head_dim * spec["num_kv_heads"]
        self.q_proj = Linear(config.hidden_size, config.hidden_size, bias=spec["qkv_bias"])
        self.k_proj = Linear(config.hidden_size, key_dim, bias=spec["qkv_bias"])
        self.v_proj = Linear(config.hidden_size, key_dim, bias=spec["qkv_bias"])
        self.o_proj = Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, positions: RavenPositions, cache: RavenCache | None, state: BlockState
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (batch, length, hidden_size); returns the output, of the same shape, and the attention weights."""
        q, k, v = (
            torch.unflatten(proj(x), -1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.theta is not None:
            q, k = positions.rotate(q, self.theta), positions.rotate(k, self.theta)
        k = positions.remember(cache, state, "keys", k, self.window).to(q.dtype)
        v = positions.remember(cache, state, "values", v, self.window).to(q.dtype)

        reach = positions.reaches[self.window]
        (q, k, v), options = reach.pack(q, k, v)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(
            self,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            reach.mask,
            scaling=self.head_dim**-0.5,
            sliding_window=self.window,
            **options,
        )
        return self.o_proj(reach.unpack(out, *x.shape[:2])), weights


class RavenMLP(nn.Module):
    """Section 4.2: the gated MLP."""

    def __init__(self, config: RavenConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@use_kernelized_func([slot_memory, slot_routing])
class RavenBlock(RecurrentBlock):
    def __init__(self, config: RavenConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        mixer = RavenSlotMemory if config.attention(layer_idx) is None else RavenAttention
        self.attn = mixer(config, layer_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = RavenMLP(config)

    def forward(self, x: torch.Tensor, positions: RavenPositions, cache: RavenCache | None = None) -> torch.Tensor:
        state = NO_STATE if cache is None else cache.layers[self.layer_idx]
        out, _ = self.attn(self.attn_norm(x), positions, cache, state)
        x = x + out
        return x + self.mlp(self.mlp_norm(x))


class RavenPreTrainedModel(RecurrentPreTrainedModel):
    config: RavenConfig
    config_class = RavenConfig
    base_model_prefix = "model"
    cache_class = RavenCache
    _no_split_modules = ["RavenBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _input_embed_layer = "embeddings"
    _can_record_outputs = {"hidden_states": RavenBlock, "attentions": RavenAttention}

    @property
    def uncapturable(self) -> str | None:
        packs = self.config.attention_specs and is_flash_attention_requested(self.config)
        return "flash attention packs the tokens of the rows, whose number Python must know." if packs else None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, RavenSlotMemory):
            if hasattr(module, "A_log"):  # as in Mamba-2: decays from slow to fast, steps from 0.001 to 0.1
                init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1e-4, 16).log())
                steps = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                init.copy_(module.dt_bias, steps + torch.log(-torch.expm1(-steps)))
            if hasattr(module, "r_bias"):
                init.zeros_(module.r_bias)


class RavenModel(RavenPreTrainedModel):
    """The blocks of Raven, without a head."""

    def __init__(self, config: RavenConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(RavenBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    @checks_arguments
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: RavenCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs,
    ) -> RecurrentModelOutput:
        """
        Args:
            input_ids: (batch, length) token ids.
            attention_mask: (batch, length), 0 for padding, which may be anywhere in a row. With a cache it may also
                cover the tokens of earlier calls.
            position_ids: (batch, length). They only show where packed documents begin: at a position that does not
                follow the one before. Exports, and compiled calls with a cache, do not read them;
                `torch.compile(fullgraph=True)` needs `cu_seqlens`. Rotary embeddings count a document's own tokens.
            cache: the states after earlier tokens, updated in place; also as `past_key_values`.
            inputs_embeds: (batch, length, hidden_size), instead of `input_ids`.
            use_cache: whether to return the states. If None, `config.use_cache`, but not in training.
            cu_seqlens: (documents + 1), the boundaries of documents packed into one row; also as `cu_seq_lens_q`.

        Returns:
            last_hidden_state (batch, length, hidden_size), in which padding repeats the last real token before it, or
            is zero if there is none; cache; hidden_states (the embeddings and the output of every block, the last one
            normalized) if `output_hidden_states` is set; attentions if `output_attentions` is set, with
            `attn_implementation="eager"`: the weights of the layers with softmax attention, (batch, heads, length,
            keys). For a single token in a window, key i is the last one at a position p with p % window = i.

        Raises:
            ValueError: before any work, if an argument does not fit; the message names it.
        """
        x, tokens, cache, use_cache = self.start_forward(
            input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache, use_cache, **kwargs
        )
        positions = find_positions(self.config, x, tokens, cache)
        if cache is not None:
            cache.count_tokens(positions)
        for layer in self.layers[: self.config.num_hidden_layers]:
            x = layer(x, positions, cache)
        return self.finish_forward(self.norm(x), tokens, cache, use_cache)


class RavenForCausalLM(CausalLMHead, RecurrentGenerationMixin, RavenPreTrainedModel):
    """Raven with a language modeling head."""

    lm_head_name = "lm_head"
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: RavenConfig):
        super().__init__(config)
        self.model = RavenModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class RavenForSequenceClassification(SequenceClassificationHead, RavenPreTrainedModel):
    """Raven with a linear classifier on the last token."""

    def __init__(self, config: RavenConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = RavenModel(config)
        self.score = Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


__all__ = ["RavenForCausalLM", "RavenForSequenceClassification", "RavenModel", "RavenPreTrainedModel"]
