"""Raven ("High-Recall Sequence Modeling with Sparse Memory Routing"): memory, attention, block, model, heads."""

import dataclasses
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.integrations import use_kernelized_func
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.output_capturing import capture_outputs

from subquad_kernels import slot_memory, slot_memory_state, slot_routing

from ...base import RecurrentPreTrainedModel
from ...cache import LayerState
from ...generation import RecurrentGenerationMixin
from ...heads import CausalLMHead, SequenceClassificationHead
from ...layers import Linear, replaceable
from ...layout import TokenLayout
from ...padding import Tokens
from ...tensor_parallel import local_part
from .cache_raven import RavenCache
from .configuration_raven import RavenConfig


slot_memory, slot_routing = replaceable(slot_memory, slot_routing)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In float32, or float64 if it is that: decays and angles need more digits than 16-bit numbers have."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclasses.dataclass
class RavenLayout(TokenLayout):
    """
    What all layers have to know of the tokens of a layout.

    Attributes:
        reaches: of attention layers, by their window.
        rotations: cosines and sines of rotary embeddings, by size of a head and theta.
    """

    reaches: dict[int | None, "Reach"] = dataclasses.field(default_factory=dict)
    rotations: dict[tuple[int, float], tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def add_rotation(self, size: int, theta: float) -> None:
        """Finds the angles of rotary embeddings of heads of that size."""
        frequencies = theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=self.position.device) / -size)
        angles = (self.position[..., None] * frequencies)[:, :, None]
        self.rotations[size, theta] = angles.cos(), angles.sin()

    def rotate(self, x: torch.Tensor, theta: float) -> torch.Tensor:
        """Rotary embeddings of x, (batch, length, heads, size)."""
        cos, sin = self.rotations[x.shape[-1], theta]
        left, right = _wide(x).chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class RavenSlotMemory(nn.Module):
    """Section 4.1: a memory of slots for each head, of which a token is written to few and reads all."""

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

    def decay(self, x: torch.Tensor) -> torch.Tensor:
        """Logarithm of the decay of what a token is written to, a: (batch, length, heads), with "GLA" (..., slots)."""
        if self.config.decay_type == "GLA":
            f = _wide(self.f_proj(x)).unflatten(-1, (-1, self.config.num_slots))
            return F.logsigmoid(f) / self.config.gate_logit_normalizer
        A_log, dt_bias = _wide(local_part(self.A_log)), _wide(local_part(self.dt_bias))
        return -A_log.exp() * F.softplus(_wide(self.a_proj(x)) + dt_bias)  # equation 19

    def route(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Logarithm of what every slot keeps at a token, a r: (batch, length, heads, slots); table 1."""
        config = self.config
        if config.router == "swa":
            slot = (place % config.num_slots)[:, :, None, None].expand(-1, -1, config.num_kv_heads, 1)
            log_f = x.new_zeros(*slot.shape[:3], config.num_slots, dtype=torch.float32)
            return log_f.scatter(3, slot, -torch.inf)
        a = self.decay(x)
        if config.router == "gsa":
            return a
        m = self.r_proj(x).unflatten(-1, (-1, config.num_slots))
        if config.add_gumbel_noise and self.training:
            m = _wide(m) - torch.empty_like(_wide(m)).exponential_().log()  # equation 23
        bias = local_part(self.r_bias) if config.bias_rmm else None
        return slot_routing(m, a, config.topk, bias=bias, score=config.router_score, scale=config.router_scale)

    def forward(self, x: torch.Tensor, layout: RavenLayout, cache: RavenCache | None, state: LayerState | None):
        config, tokens = self.config, layout.tokens
        q = self.q_norm(self.feature_map(self.q_proj(x).unflatten(-1, (-1, config.head_k_dim))))
        k = self.k_norm(self.feature_map(self.k_proj(x).unflatten(-1, (-1, config.head_k_dim))))
        v = F.silu(self.v_proj(x)).unflatten(-1, (-1, config.head_v_dim))
        if config.use_rope:
            q, k = layout.rotate(q, config.rope_theta), layout.rotate(k, config.rope_theta)
        log_f = self.route(x, layout.position)[:, :, : k.shape[2]]  # a window is the same in all heads
        log_f = tokens.erase(log_f)  # padding is written nowhere
        if self.groups > 1:
            k, v, log_f = (y.repeat_interleave(self.groups, dim=2) for y in (k, v, log_f))

        inplace = state is not None and state.can_overwrite("slots")
        out, after = tokens.by_document(slot_memory, state and state.get("slots"), inplace, q=q, k=k, v=v, log_f=log_f)
        if state is not None:
            state.update("slots", after, slot_memory_state, k, v, log_f)
        out = F.silu(out)
        if config.use_output_gate:
            gate = self.o_gate_proj(x).view(out.shape)
            return self.o_proj((self.o_norm(out) * F.silu(gate)).flatten(2)), None
        return self.o_proj(self.g_norm(out.flatten(2))), None


class Reach(NamedTuple):
    """
    What the tokens of a layout attend to, in layers with the same window: the layout's own keys, behind what the cache
    held; or, of one token and where there is no window, what the cache holds once they are in it.

    Attributes:
        own: whether the layout's keys are read as they are.
        held: which of a window's keys are read before them, (batch, window); None: none.
        room: how many of the keys that a cache without a window holds are read.
        mask: (batch or 1, 1, length, keys), True where a token attends to a key; None where that is plainly causal.
        varlen: for flash attention in place of a mask: the numbers of the tokens that attend and of the keys there
            are, among those of all rows, and the borders of the documents among them.
    """

    own: bool
    held: torch.Tensor | None
    room: int
    mask: torch.Tensor | None
    varlen: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None


def find_reach(layout: RavenLayout, window: int | None, cache: RavenCache | None, flash: bool) -> Reach:
    """What the tokens of a layout attend to; `flash` tells whether by flash attention, which takes no masks."""
    packed, padded = layout.document is not None, layout.tokens.mask is not None
    alike = not (packed or padded or flash) and (cache is None or cache.same_lengths)
    rows = 1 if alike else layout.tokens.batch  # one row stands for all where they are alike
    place, kept, length, device = (
        layout.position[:rows],
        layout.kept[:rows],
        layout.tokens.length,
        layout.position.device,
    )
    own, held, room = True, None, 0
    before = torch.zeros(rows, 0, dtype=torch.long, device=device)  # places of the keys that are not the layout's
    real = before.bool()
    if cache is not None and not packed and (window is None or length == 1):
        own = False
        if window is None:
            room = cache.room_for(length)
            room = room if cache.is_compileable else min(room, cache.get_seq_length() + length)
            before = torch.arange(room, device=device).expand(rows, -1)
        else:
            before = place - (place - torch.arange(window, device=device)) % window
        real = (before >= 0) & (before <= place[:, -1:])
    elif cache is not None and cache.is_initialized:
        lengths = cache.lengths(layout.position)[:rows, None]
        if window is None:
            room = cache.room_for(0) if cache.is_compileable else cache.get_seq_length()
            before = torch.arange(room, device=device).expand(rows, -1)
            real = before < lengths
        else:
            before = lengths - window + torch.arange(window, device=device)
            held, real = before % window, before >= 0

    # No mask is needed where every token attends to all keys up to its own, and none is missing.
    if own:  # while a graph is traced, it would be one of few lengths
        short = window is None or flash or (not torch.compiler.is_compiling() and length <= window)
        causal = before.shape[1] == 0 and short
    else:
        causal = window is None and not cache.is_compileable and cache.same_lengths
        causal = causal and room == cache.get_seq_length() + length and length in (1, room)
    mask = varlen = None
    if packed or padded or not causal:
        here = torch.ones_like(kept) if packed else kept
        if own:
            before, real = torch.cat((before, place), 1), torch.cat((real, here), 1)
        if flash:
            varlen = _find_varlen(layout.tokens, here, real)
        else:
            mask = real[:, None] & (before[:, None] <= place[:, :, None])
            if window is not None:
                mask &= before[:, None] > place[:, :, None] - window
            if packed:
                first = torch.zeros_like(before[:, : before.shape[1] - length])
                mask &= layout.document[:, :, None] == torch.cat((first, layout.document), 1)[:, None]
            mask = (mask | ~here[:, :, None])[:, None]  # padding reads anything: of nothing there is no softmax
    return Reach(own, held, room, mask, varlen)


def _find_varlen(tokens: Tokens, here: torch.Tensor, real: torch.Tensor):
    """`Reach.varlen`, where `here` (batch, length) and `real` (batch, keys) tell which tokens and keys there are."""
    if tokens.cu_seqlens is None:
        queries, keys = here.sum(1), real.sum(1)
    else:
        queries = tokens.cu_seqlens.long().diff()
        keys = queries.clone()
        keys[tokens.first] += real[:, : real.shape[1] - tokens.length].sum(1)
    ends = [F.pad(counts.cumsum(0), (1, 0)).int() for counts in (queries, keys)]
    return here.flatten().nonzero()[:, 0], real.flatten().nonzero()[:, 0], *ends


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
    Softmax attention in plain torch, as transformers' attention functions have it: query (batch, heads, length, size),
    key and value (batch, key heads, keys, size), mask True where a query attends to a key, causal where None. Returns
    (batch, length, heads, size) and the weights.
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
    """Softmax attention, over a sliding window or the whole text, in some layers of a hybrid (section 5.3)."""

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

    def remember(
        self, name: str, x: torch.Tensor, layout: RavenLayout, cache: RavenCache | None, state: LayerState | None
    ):
        """Puts keys or values, (batch, length, heads, size), into the cache; returns those that the layout reads."""
        if cache is None:
            return x
        reach = layout.reaches[self.window]
        if self.window is None:
            if not reach.own:
                room = cache.room_for(x.shape[1])
                return cache.append(state, name, layout.tokens.erase(x), layout.position, room)[:, : reach.room]
            read = torch.cat((state.get(name)[:, : reach.room], x), dim=1) if reach.room else x
            cache.restart(state, name, x, layout.kept_position, layout.kept)
            return read
        name, read = f"window_{name}", x
        if reach.held is not None:
            index = reach.held[..., None, None].expand(x.shape[0], -1, *x.shape[2:])
            read = torch.cat((state.get(name).gather(1, index), x), dim=1)
        ring = cache.update_window(state, name, x, layout.kept_position, layout.kept, self.window, layout.all_real)
        return read if reach.own else ring

    def forward(self, x: torch.Tensor, layout: RavenLayout, cache: RavenCache | None, state: LayerState | None):
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.theta is not None:
            q, k = layout.rotate(q, self.theta), layout.rotate(k, self.theta)
        k, v = (
            self.remember("keys", k, layout, cache, state),
            self.remember("values", v, layout, cache, state),
        )
        k, v = k.to(q.dtype), v.to(q.dtype)

        reach, options = layout.reaches[self.window], {}
        if reach.varlen is not None:
            queries, keys, q_ends, k_ends = reach.varlen
            options = {
                "cu_seq_lens_q": q_ends,
                "cu_seq_lens_k": k_ends,
                "max_length_q": q.shape[1],
                "max_length_k": k.shape[1],
            }
            q = q.flatten(0, 1)[None, queries]
            k, v = (y.flatten(0, 1)[None, keys] for y in (k, v))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(
            *(self, *(y.transpose(1, 2) for y in (q, k, v)), reach.mask),
            scaling=self.head_dim**-0.5,
            sliding_window=self.window,
            **options,
        )
        if reach.varlen is not None:
            out = out.new_zeros(x.shape[0] * x.shape[1], *out.shape[2:]).index_copy(0, queries, out[0])
        return self.o_proj(out.reshape(*x.shape[:2], -1)), weights


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
class RavenBlock(GradientCheckpointingLayer):
    def __init__(self, config: RavenConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        mixer = RavenSlotMemory if config.attention(layer_idx) is None else RavenAttention
        self.attn = mixer(config, layer_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = RavenMLP(config)

    def forward(self, x: torch.Tensor, layout: RavenLayout, past_key_values: RavenCache | None = None) -> torch.Tensor:
        state = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        out, _ = self.attn(self.attn_norm(x), layout, past_key_values, state)
        x = x + out
        return x + self.mlp(self.mlp_norm(x))


class RavenPreTrainedModel(RecurrentPreTrainedModel):
    config: RavenConfig
    config_class = RavenConfig
    base_model_prefix = "model"
    _no_split_modules = ["RavenBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"attentions": RavenAttention}
    cache_class = RavenCache

    def new_cache(self, static: bool = False, max_cache_len: int | None = None) -> RavenCache:
        """An empty [`RavenCache`] for this model."""
        return RavenCache(self.config, static, max_cache_len)

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
            if hasattr(module, "A_log"):  # as Mamba-2 begins: decays of many lengths, steps of 0.001 to 0.1
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

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def set_input_embeddings(self, new_embeddings: nn.Embedding) -> None:
        self.embeddings = new_embeddings

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: RavenCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: (batch, length) token ids.
            attention_mask: (batch, length), 0 where a token is padding, before or after a row's text; with a cache it
                may also cover the tokens of earlier calls.
            position_ids: (batch, length); read only to find where packed documents begin (a position that does not
                follow on the one before), and not while a graph is traced: `torch.compile` and export need
                `cu_seqlens`. They have no other influence: rotary embeddings count a document's own tokens.
            past_key_values: the state after earlier tokens, updated in place.
            inputs_embeds: (batch, length, hidden_size), in place of `input_ids`.
            use_cache: whether to return the state; `config.use_cache` where None, but not in training.
            cu_seqlens: (documents + 1), the borders of documents packed into one row; also as `cu_seq_lens_q`.

        Returns:
            last_hidden_state (batch, length, hidden_size), where padding after a text repeats its last token and
            padding before it is zero; past_key_values; hidden_states (embeddings and the output of every block, the
            last one normalised); where `output_attentions`, attentions: the weights of the layers that are softmax
            attention, (batch, heads, length, keys), with `attn_implementation="eager"`. Of a single token behind a
            window, key i is the last one at a place that is i modulo the window.

        Raises:
            ValueError: before any work, where an argument does not fit; the message names it.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x, tokens, past_key_values, use_cache = self.read_inputs(
            input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, past_key_values, use_cache, **kwargs
        )
        layout = self._read(x, tokens, past_key_values)

        hidden_states = (x,) if output_hidden_states else None
        for layer in self.layers[: self.config.num_hidden_layers]:
            x = layer(x, layout, past_key_values=past_key_values)
            if output_hidden_states:
                hidden_states += (x,)
        x = self.norm(x)

        x = self.fill_output(x, tokens, past_key_values)
        if past_key_values is not None:
            past_key_values.finish(layout.kept_position, layout.kept, packed=layout.document is not None)
        if output_hidden_states:
            hidden_states = (*hidden_states[:-1], x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=hidden_states,
        )

    def _read(self, x: torch.Tensor, tokens: Tokens, cache: RavenCache | None) -> RavenLayout:
        """What the layers have to know of the tokens of a layout."""
        config = self.config
        if cache is not None and cache.growing:
            cache.room_for(x.shape[1])  # or an error, before anything has changed
        lengths = torch.zeros(x.shape[0], dtype=torch.long, device=x.device) if cache is None else cache.lengths(x)
        layout, flash = RavenLayout.after(lengths, tokens), is_flash_attention_requested(config)
        if cache is not None and (tokens.mask is not None or tokens.starts is not None):
            cache.same_lengths = False
        for spec in config.attention_specs:
            if spec["window_size"] not in layout.reaches:
                layout.reaches[spec["window_size"]] = find_reach(layout, spec["window_size"], cache, flash)
            if spec["use_rope"]:
                layout.add_rotation(config.hidden_size // spec["num_heads"], spec["rope_theta"])
        if config.use_rope:
            layout.add_rotation(config.head_k_dim, config.rope_theta)
        return layout


class RavenForCausalLM(CausalLMHead, RavenPreTrainedModel, RecurrentGenerationMixin):
    """Raven with the head that predicts the next token."""

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
