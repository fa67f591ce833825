"""Gecko ("An Efficient Neural Architecture Inherently Processing Sequences with Arbitrary Lengths")."""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.integrations import use_kernelized_func
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from subquad_kernels import (
    cema,
    chunk_attention,
    chunk_attention_step,
    timestep_decay_norm,
    timestep_decay_norm_state,
    working_memory,
)

from ...base import RecurrentPreTrainedModel
from ...cache import LayerState, States
from ...generation import RecurrentGenerationMixin
from ...heads import CausalLMHead, SequenceClassificationHead
from ...layers import Linear, replaceable
from ...layout import TokenLayout
from ...padding import Tokens, can_read_values
from ...ring import ring_state
from ...tensor_parallel import local_part
from .cache_gecko import GeckoCache
from .configuration_gecko import GeckoConfig


cema, chunk_attention, timestep_decay_norm, working_memory = replaceable(
    cema, chunk_attention, timestep_decay_norm, working_memory
)


@dataclasses.dataclass
class GeckoLayout(TokenLayout):
    """
    What all layers have to know of the tokens of a layout. Every row begins with its text.

    Attributes:
        cos, sin: of rotary embeddings, (batch or 1, length, 1, size of a head / 2).
        starts: which tokens begin a document, (batch, length); None where none does.
        real: which tokens are no padding, (batch, length); None where none is.
        forgets: what [`subquad_kernels.working_memory`] calls `begins`, of the chunk that leaves attention at a token,
            (batch, length); of tokens at which none does it means nothing.
        one: whether this is one token, which reads the rings of a cache as they are.
        held: where in the rings the tokens lie that are read before the layout's, in their order, (batch, held); None
            where there are none.
        first: of the keys that are read, the first that a token attends to, (batch, length).
        aligned: whether chunks begin at multiples of their size.
        seen: of one token, which keys of a ring it attends to, (batch, ring).
        leaving, begins, reads: see [`subquad_kernels.working_memory`].
        shifts: how far the rows were moved, (batch), see [`Tokens.shifts`]; None where they were not.
        given_position, given_kept: `kept_position` and `kept` of the tokens where they were before that.
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    real: torch.Tensor | None = None
    forgets: torch.Tensor | None = None
    one: bool = False
    held: torch.Tensor | None = None
    first: torch.Tensor | None = None
    aligned: bool = False
    seen: torch.Tensor | None = None
    leaving: torch.Tensor | None = None
    begins: torch.Tensor | None = None
    reads: torch.Tensor | None = None
    shifts: torch.Tensor | None = None
    given_position: torch.Tensor | None = None
    given_kept: torch.Tensor | None = None

    def as_given(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, length, ...) with the tokens where they were given: from there a cache takes them back."""
        return x if self.shifts is None else shift(x, -self.shifts)

    def records(self, state: LayerState, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the tokens contribute to a state that depends on x, `starts` and `real`, where that is recorded."""
        if not state.record_past:
            return ()
        starts = torch.zeros_like(self.kept) if self.starts is None else self.starts
        return self.as_given(x), self.as_given(starts), self.given_kept

    def rotate(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """Rotary embeddings of the first heads of x (batch, length, heads, size), by pairs of neighbours."""
        if heads == 0:
            return x
        left, right = x[:, :, :heads].unflatten(-1, (-1, 2)).unbind(-1)
        pairs = left * self.cos - right * self.sin, left * self.sin + right * self.cos
        rotated = torch.stack(pairs, dim=-1).flatten(-2).to(x.dtype)
        return rotated if heads == x.shape[2] else torch.cat((rotated, x[:, :, heads:]), dim=2)


def find_leaving(
    place: torch.Tensor, real: torch.Tensor, forgets: torch.Tensor, held: int, size: int, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The chunks of `size` tokens that leave attention while the tokens at these places (batch, length) are read, behind
    `held` earlier ones; there are at most `most`. Returns where each begins and where its document does, (batch,
    most), and how many have left once a token is read, (batch, length).
    """
    leaves = (place % size == 0) & (place >= 2 * size) & real
    number = leaves.cumsum(1)
    index = torch.where(leaves, number - 1, most)
    steps = torch.arange(place.shape[1], device=place.device).expand_as(place)
    leaving = torch.full_like(place[:, :1], -1).expand(-1, most + 1).scatter(1, index, steps + held - 2 * size)
    begins = torch.zeros_like(leaving).scatter(1, index, forgets)
    return leaving[:, :most].contiguous(), begins[:, :most].contiguous(), number


def ring_order(lengths: torch.Tensor, ring: int) -> torch.Tensor:
    """Where in a ring the last tokens of texts of such lengths (batch, 1) lie, the oldest first: (batch, ring)."""
    return (lengths + torch.arange(ring, device=lengths.device)) % ring


def shift(x: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Every row of x (batch, length, ...) moved to the left by so many tokens (batch), round and round."""
    source = (torch.arange(x.shape[1], device=x.device) + shifts.to(x.device)[:, None]) % x.shape[1]
    return x.gather(1, source.view(*source.shape, *[1] * (x.dim() - 2)).expand_as(x))


def find_shifts(tokens: Tokens) -> torch.Tensor | None:
    """Number of padding tokens before the text of each row, (batch); None where there can be none."""
    if tokens.mask is None or tokens.length == 1:
        return None
    shifts = tokens.mask.int().argmax(1)
    return None if can_read_values(shifts) and not shifts.any() else shifts


def _behind(held: torch.Tensor, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x (batch, heads, length, size) behind what a ring holds, in that order."""
    held = held.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    return torch.cat((held.to(x.dtype), x), dim=2)


def replay_memory(
    size: int,
    before: States,
    keys: torch.Tensor,
    values: torch.Tensor,
    memory_keys: torch.Tensor,
    place: torch.Tensor,
    real: torch.Tensor,
    forgets: torch.Tensor,
) -> States:
    """What a block's rings and its memory are after these tokens, of chunks of that size."""
    rows = {"keys": keys, "values": values, "memory_keys": memory_keys}
    rings = {
        name: ring_state(None if before[name] is None else before[name].transpose(1, 2), x, place, real, 2 * size)
        for name, x in rows.items()
    }
    lengths = place[:, :1] + 1 - real[:, :1].long()
    # Chunks lie side by side: what is padding goes to the end.
    order = real.int().argsort(dim=1, descending=True, stable=True)
    place, real, forgets = (x.gather(1, order) for x in (place, real, forgets))
    for name, x in rows.items():
        x = x.gather(1, order[..., None, None].expand_as(x)).transpose(1, 2)
        rows[name] = (
            x if before[name] is None else _behind(before[name], x, ring_order(lengths, before[name].shape[2]))
        )
    length = place.shape[1]
    held = rows["keys"].shape[2] - length
    leaving, begins, _ = find_leaving(place, real, forgets, held, size, -(-length // size))
    unread, nothing = memory_keys.transpose(1, 2), torch.full_like(place, -1)
    states = before["memory"], before["normalizer"]
    memory = working_memory(unread, rows["memory_keys"], rows["values"], *states, leaving, begins, nothing, size)
    rings = {name: ring.transpose(1, 2).contiguous() for name, ring in rings.items()}
    return {**rings, "memory": memory[1], "normalizer": memory[2]}


def replay_cema(weights: tuple[torch.Tensor, ...], before: torch.Tensor | None, x, starts, real) -> torch.Tensor:
    """CEMA's state after the tokens x, (batch, length, model_dim)."""
    return cema(x, *weights, before, starts=starts, real=real)[1]


def replay_norm(groups: int, betas: tuple[float, float], before: torch.Tensor | None, x, starts, real) -> torch.Tensor:
    """The moments after the tokens x, (batch, length, model_dim)."""
    return timestep_decay_norm_state(before, x, groups, *betas, starts=starts, real=real)


class GeckoTimestepDecayNorm(nn.Module):
    """Section 3.1: normalised by decayed averages of means and variances. The weight is stored minus one."""

    def __init__(self, config: GeckoConfig):
        super().__init__()
        self.groups, self.eps = config.timenorm_num_groups, config.norm_eps
        self.betas = float(config.timenorm_beta1), float(config.timenorm_beta2)
        self.weight = nn.Parameter(torch.empty(config.model_dim))
        self.bias = nn.Parameter(torch.empty(config.model_dim))

    def forward(self, x: torch.Tensor, layout: GeckoLayout, state: LayerState | None) -> torch.Tensor:
        before, inplace = (None, False) if state is None else (state.get("timenorm"), state.can_overwrite("timenorm"))
        out, after = timestep_decay_norm(
            *(x, self.weight, self.bias, self.groups, *self.betas, self.eps, before),
            starts=layout.starts,
            real=layout.real,
            inplace=inplace,
        )
        if state is not None:
            replay = functools.partial(replay_norm, self.groups, self.betas)
            state.update("timenorm", after, replay, *layout.records(state, x))
        return out


class GeckoCEMA(nn.Module):
    """Section 2.1: the complex, damped moving average of every channel."""

    def __init__(self, config: GeckoConfig):
        super().__init__()
        shape = config.model_dim, config.cema_ndim
        self.alpha = nn.Parameter(torch.empty(shape))
        self.delta = nn.Parameter(torch.empty(shape))
        self.theta = nn.Parameter(torch.empty(config.model_dim))
        self.gamma = nn.Parameter(torch.empty(*shape, 2))

    def forward(self, x: torch.Tensor, layout: GeckoLayout, state: LayerState | None) -> torch.Tensor:
        weights = self.alpha, self.delta, self.theta, self.gamma
        before, inplace = (None, False) if state is None else (state.get("cema"), state.can_overwrite("cema"))
        out, after = cema(x, *weights, before, starts=layout.starts, real=layout.real, inplace=inplace)
        if state is not None:
            # The first record replays all tokens, maybe when offloading or FSDP has freed the module's weights.
            if state.record_past and "cema" not in state.records:
                weights = tuple(w.clone() for w in weights)
            state.update("cema", after, functools.partial(replay_cema, weights), *layout.records(state, x))
        return out


class GeckoRMSNorm(nn.Module):
    """Of groups of channels; the weight is stored minus one."""

    def __init__(self, config: GeckoConfig):
        super().__init__()
        self.groups, self.eps = config.layernorm_num_groups, config.norm_eps
        weight = nn.Parameter(torch.empty(config.model_dim)) if config.norm_affine else None
        self.register_parameter("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (self.groups, -1))
        x = F.rms_norm(x, x.shape[3:], eps=self.eps).flatten(2)
        return x if self.weight is None else torch.addcmul(x, x, self.weight)  # 16 bits do not hold weight + 1


class GeckoLayerNorm(nn.Module):
    """Of groups of channels; the weight is stored minus one."""

    def __init__(self, config: GeckoConfig):
        super().__init__()
        self.groups, self.eps = config.layernorm_num_groups, config.norm_eps
        for name in ("weight", "bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(config.model_dim)) if config.norm_affine else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.group_norm(x.flatten(0, 1), self.groups, eps=self.eps).view(x.shape)
        return x if self.weight is None else torch.addcmul(x + self.bias, x, self.weight)


class GeckoMega(nn.Module):
    """The first half of a block: moving average, sliding chunk attention, working memory."""

    def __init__(self, config: GeckoConfig, layer_idx: int):
        super().__init__()
        self.config = config
        d, z, v = config.model_dim, config.z_dim, config.value_dim
        self.timenorm = GeckoTimestepDecayNorm(config)
        self.cema = GeckoCEMA(config)
        self.rmsnorm = GeckoRMSNorm(config)
        self.wz = Linear(d, z)
        self.wv = Linear(d, v)
        self.wr = Linear(d, v)
        self.wh1 = Linear(d, d)
        self.wh2 = Linear(v, d, bias=False)
        self.gamma = nn.Parameter(torch.empty(4, z))
        self.beta = nn.Parameter(torch.empty(4, z))

    def share(self, m: torch.Tensor, layout: GeckoLayout) -> list[torch.Tensor]:
        """Equations 6-8, 25, 26: q, k and those of the memory, (batch, heads, length, size) each."""
        config = self.config
        z = self.wz(m).unflatten(-1, (-1, config.z_dim // config.num_heads))
        z = F.rms_norm(z, z.shape[-1:], eps=config.norm_eps)
        gamma, beta = (local_part(w).unflatten(-1, z.shape[2:]) for w in (self.gamma, self.beta))
        gamma = (gamma + 1) * z.shape[-1] ** -0.5
        q, k, q_m, k_m = ((z * gamma[i] + beta[i]).to(z.dtype) for i in range(4))
        q, k = layout.rotate(q, config.num_rope_heads), layout.rotate(k, config.num_rope_heads)
        return [x.transpose(1, 2) for x in (q, k, q_m, k_m)]

    def recall(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_m: torch.Tensor,
        k_m: torch.Tensor,
        layout: GeckoLayout,
        cache: GeckoCache | None,
        state: LayerState | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Sections 3.2 and 3.3: what attention over the chunk and the one before it, and what the memory of all chunks
        before these, tell a token; (batch, heads, length, size of a value) each.
        """
        config, rows = self.config, {"keys": k, "values": v, "memory_keys": k_m}
        read, memory, normalizer, inplace = rows, None, None, False
        if state is not None:
            memory, normalizer = state.get("memory"), state.get("normalizer")
            inplace = layout.one and memory is not None and state.can_overwrite("memory")
            if layout.one and memory is not None:
                read = {name: state.get(name) for name in rows}
            elif layout.held is not None:
                read = {name: _behind(state.get(name), x, layout.held) for name, x in rows.items()}

        if state is None and layout.leaving.shape[1] == 0:
            remembered = torch.zeros_like(v)
        else:
            remembered, memory, normalizer = working_memory(
                *(q_m, read["memory_keys"], read["values"], memory, normalizer),
                *(layout.leaving, layout.begins, layout.reads, config.chunk_size),
                inplace=inplace,
            )
        if state is not None:
            if layout.document is not None:  # of a last document that is short
                short = (layout.kept_position[:, -1] < 2 * config.chunk_size)[:, None, None]
                memory, normalizer = memory.masked_fill(short[..., None], 0.0), normalizer.masked_fill(short, 0.0)
            states, updates = {"memory": memory, "normalizer": normalizer}, ()
            if state.record_past:
                kept = [layout.as_given(x.transpose(1, 2)) for x in rows.values()]
                updates = *kept, layout.given_position, layout.given_kept, layout.as_given(layout.forgets)
            replay = functools.partial(replay_memory, config.chunk_size)
            rings = cache.keep(
                state, rows, states, layout.kept_position, layout.kept, layout.all_real, replay, *updates
            )
            if layout.one:
                attended = chunk_attention_step(q, rings["keys"], rings["values"].to(v.dtype), layout.seen)
                return attended, remembered.to(v.dtype)
        dropout = config.attention_dropout if self.training else 0.0
        attended = chunk_attention(
            *(q, read["keys"], read["values"], layout.first, config.chunk_size),
            aligned=layout.aligned,
            dropout_p=dropout,
        )
        return attended, remembered

    def forward(
        self, x: torch.Tensor, layout: GeckoLayout, cache: GeckoCache | None, state: LayerState | None
    ) -> torch.Tensor:
        config, training = self.config, self.training
        t = self.timenorm(x, layout, state)
        m = F.dropout(self.rmsnorm(self.cema(t, layout, state) + t), config.hidden_dropout, training)
        q, k, q_m, k_m = self.share(m, layout)
        v = F.silu(self.wv(t)).unflatten(-1, (-1, config.value_dim // config.num_heads)).transpose(1, 2)
        r = F.silu(self.wr(m))
        attended, remembered = (
            y.transpose(1, 2).flatten(2) for y in self.recall(q, k, v, q_m, k_m, layout, cache, state)
        )
        out = F.dropout(attended * r + remembered, config.hidden_dropout, training)
        return x + F.dropout(self.wh1(m) + self.wh2(out), config.dropout, training)


class GeckoNFFN(nn.Module):
    """The second half of a block: the normalised feed-forward network."""

    def __init__(self, config: GeckoConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        d, hidden = config.model_dim, config.ffn_hidden_dim
        self.norm = GeckoLayerNorm(config)
        self.fc1 = Linear(d, hidden, bias=False)
        if config.swiglu:
            self.fc3 = Linear(d, hidden, bias=False)
        self.fc2 = Linear(hidden, d, bias=False)
        self.register_parameter("alpha", nn.Parameter(torch.empty(d)) if config.rescale_nffn else None)

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y (batch, length, model_dim) is what the block made of x, its input."""
        config = self.config
        n = self.norm(y)
        hidden = F.silu(self.fc1(n)) * self.fc3(n) if config.swiglu else F.silu(self.fc1(n))
        out = F.dropout(
            self.fc2(F.dropout(hidden, config.hidden_dropout, self.training)), config.dropout, self.training
        )
        if self.alpha is not None:
            out = out * self.alpha
        return out + (x if config.two_hop_residual else y)


@use_kernelized_func([cema, chunk_attention, timestep_decay_norm, working_memory])
class GeckoBlock(GradientCheckpointingLayer):
    def __init__(self, config: GeckoConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.mega = GeckoMega(config, layer_idx)
        self.nffn = GeckoNFFN(config, layer_idx)

    def forward(self, x: torch.Tensor, layout: GeckoLayout, past_key_values: GeckoCache | None = None) -> torch.Tensor:
        state = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        out = self.nffn(self.mega(x, layout, past_key_values, state), x)
        return out if past_key_values is None else past_key_values.end_block(out, self.layer_idx)


class GeckoPreTrainedModel(RecurrentPreTrainedModel):
    config: GeckoConfig
    config_class = GeckoConfig
    base_model_prefix = "model"
    _no_split_modules = ["GeckoBlock"]
    # Buffers of the authors' code: of angles that the configuration tells, and of a beginning that is always zero.
    _keys_to_ignore_on_load_unexpected = [r"rope\.freqs", r"norm\.prior_(count|mean|var)"]
    cache_class = GeckoCache

    def new_cache(self, static: bool = False, max_cache_len: int | None = None) -> GeckoCache:
        """An empty [`GeckoCache`] for this model, which has room for any number of tokens."""
        return GeckoCache(self.config, static)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        if isinstance(module, nn.Embedding | GeckoHead):
            std = config.model_dim**-0.5
            init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=(3 * module.in_features) ** -0.5)  # He's, for a slope of √5
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, GeckoTimestepDecayNorm | GeckoLayerNorm | GeckoRMSNorm):
            for parameter in module.parameters():
                init.zeros_(parameter)
        elif isinstance(module, GeckoCEMA):
            d, n = module.alpha.shape
            init.normal_(module.alpha, std=0.2)
            init.normal_(module.delta, std=0.2)
            frequencies = torch.exp(torch.arange(1, d + 1) * (-math.log(d) / d))
            init.copy_(module.theta, frequencies.logit()[torch.randperm(d)].to(module.theta))
            real = torch.randn(d, n, device=module.gamma.device) * n**-0.5
            init.copy_(module.gamma, torch.stack((real, torch.zeros_like(real)), dim=-1))
        elif isinstance(module, GeckoMega):
            init.zeros_(module.gamma)
            init.zeros_(module.beta)
        elif isinstance(module, GeckoNFFN) and module.alpha is not None:
            init.constant_(module.alpha, 0.1 * 0.5**module.layer_idx)


class GeckoModel(GeckoPreTrainedModel):
    """The blocks of Gecko, without a head."""

    def __init__(self, config: GeckoConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.model_dim)
        self.layers = nn.ModuleList(GeckoBlock(config, layer_idx) for layer_idx in range(config.num_layers))
        self.output = nn.ModuleDict({"final_norm": GeckoTimestepDecayNorm(config)})
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def set_input_embeddings(self, new_embeddings: nn.Embedding) -> None:
        self.embed = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: GeckoCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: (batch, length) token ids. Where `config.document_boundaries`, each `bos_token_id` begins a new
                document; chunks go on as if it had not.
            attention_mask: (batch, length), 0 where a token is padding, before or after a row's text; with a cache it
                may also cover the tokens of earlier calls.
            position_ids: (batch, length); read only to find where packed documents begin (a position that does not
                follow on the one before), and not while a graph is traced: `torch.compile` and export need
                `cu_seqlens`. They have no other influence: rotary embeddings and chunks count a document's own tokens.
            past_key_values: the state after earlier tokens, updated in place.
            inputs_embeds: (batch, length, model_dim), in place of `input_ids`. What equals the embedding of
                `bos_token_id` begins a document.
            use_cache: whether to return the state; `config.use_cache` where None, but not in training.
            cu_seqlens: (documents + 1), the borders of documents packed into one row; also as `cu_seq_lens_q`.

        Returns:
            last_hidden_state (batch, length, model_dim), where padding after a text repeats its last token and padding
            before it is zero; past_key_values; hidden_states (embeddings and the output of every block, the last one
            normalised).

        Raises:
            ValueError: before any work, where an argument does not fit; the message names it.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x, tokens, past_key_values, use_cache = self.read_inputs(
            input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, past_key_values, use_cache, **kwargs
        )
        bos = self._find_bos(input_ids, inputs_embeds)
        if self.config.scale_emb:
            x = x * self.config.model_dim**0.5
        x = F.dropout(x, self.config.dropout, self.training)
        shifts, moved = find_shifts(tokens), tokens
        if shifts is not None:
            x = shift(x, shifts)
            moved = Tokens(tokens.batch, tokens.length, tokens.mask.device, shift(tokens.mask, shifts))
            bos = None if bos is None else shift(bos, shifts)
        layout = self._read(x, moved, bos, past_key_values, None if shifts is None else (shifts, tokens))

        hidden_states = (x,) if output_hidden_states else None
        for layer in self.layers[: self.config.num_layers]:
            x = layer(x, layout, past_key_values=past_key_values)
            if output_hidden_states:
                hidden_states += (x,)
        x = self.output["final_norm"](x, layout, None if past_key_values is None else past_key_values.after_blocks)
        if past_key_values is not None:
            x = past_key_values.end_block(x, -1)

        if shifts is not None:
            x = shift(x, -shifts)
            hidden_states = hidden_states and tuple(shift(h, -shifts) for h in hidden_states)
        x = self.fill_output(x, tokens, past_key_values)
        if past_key_values is not None:
            past_key_values.finish(layout.given_position, layout.given_kept, packed=layout.document is not None)
        if output_hidden_states:
            hidden_states = (*hidden_states[:-1], x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=hidden_states,
        )

    def _find_bos(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor | None:
        """Which tokens are begin tokens that begin a document, (batch, length); None where there can be none."""
        bos = self.config.boundary_token_id
        if bos is None:
            return None
        if input_ids is not None:
            return input_ids == bos
        embedding = self.embed(torch.full((1,), bos, device=inputs_embeds.device))
        return (inputs_embeds == embedding.to(inputs_embeds)).all(-1)

    def _read(
        self,
        x: torch.Tensor,
        tokens: Tokens,
        bos: torch.Tensor | None,
        cache: GeckoCache | None,
        given: tuple[torch.Tensor, Tokens] | None,
    ) -> GeckoLayout:
        """
        What the layers have to know of the tokens of a layout, of which `bos` (batch, length) are begin tokens. Where
        the rows were moved, `given` is how far, and the tokens before that.
        """
        size, length = self.config.chunk_size, tokens.length
        steps = torch.arange(length, device=x.device)
        lengths = torch.zeros_like(steps[:1]).expand(x.shape[0]) if cache is None else cache.lengths(x)
        layout, fresh = GeckoLayout.after(lengths, tokens), cache is None or not cache.is_initialized
        layout.real, place = tokens.mask, layout.position
        layout.shifts, unmoved = (None, layout) if given is None else (given[0], TokenLayout.after(lengths, given[1]))
        layout.given_position, layout.given_kept = unmoved.kept_position, unmoved.kept
        if tokens.mask is not None:  # padding, which follows a text, lies where that would go on
            place = lengths[:, None] + steps
            bos = None if bos is None else bos & tokens.mask
        elif fresh and tokens.starts is None and bos is None:
            place = place[:1]  # one row stands for all
        held_begins = None if fresh or bos is None else cache.after_blocks.get("begins")
        layout.starts, begin, layout.forgets = self._find_documents(layout, bos, place, held_begins)
        if bos is not None and cache is not None:
            update = functools.partial(ring_state, window=2 * size)
            now = update(held_begins, begin, layout.kept_position, layout.kept)
            recorded = layout.as_given(begin), layout.given_position, layout.given_kept
            cache.after_blocks.update("begins", now, update, *recorded)

        drops = self.training and self.config.attention_dropout > 0
        layout.one = cache is not None and length == 1 and tokens.starts is None and not drops
        held = 0 if fresh or layout.one else cache.held_tokens
        most = max((length - 1) // size - 1, 0) if fresh else -(-length // size)
        # A size of 0 or 1 would tie a program of many lengths to those of its example.
        if torch.compiler.is_exporting() and not isinstance(length, int):
            most = length // size + 2
        real = torch.ones_like(layout.kept) if tokens.mask is None else tokens.mask
        leaving = find_leaving(place.expand_as(real), real, layout.forgets, held, size, most)
        layout.leaving, layout.begins, number = leaving
        remembers = (place >= 2 * size) & (begin < (place // size - 1) * size) & real
        layout.reads = torch.where(remembers, number, -1)

        seen_from = torch.maximum((place // size - 1) * size, begin)
        if layout.one:
            # The chunk that leaves a ring begins where the token goes.
            layout.leaving = torch.where(layout.leaving == -2 * size, place % (2 * size), -1)
            ring = torch.arange(cache.ring_size(1), device=x.device)
            layout.seen = place - (place - ring) % len(ring) >= seen_from
        else:
            layout.held = ring_order(lengths[:, None], held) if held else None
            layout.first = held + steps - (place - seen_from)
            layout.aligned = fresh and tokens.starts is None

        if self.config.num_rope_heads:
            pairs = self.config.z_dim // self.config.num_heads // 2
            # In float32 the angles of a long text would be wrong by tenths.
            wide = torch.float32 if x.device.type == "mps" else torch.float64
            frequencies = self.config.rope_base ** (torch.arange(pairs, dtype=wide, device=x.device) / -pairs)
            angles = (place[..., None] * frequencies)[:, :, None]
            dtype = torch.promote_types(x.dtype, torch.float32)
            layout.cos, layout.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return layout

    def _find_documents(
        self, layout: GeckoLayout, bos: torch.Tensor | None, place: torch.Tensor, held: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """
        `GeckoLayout.starts`, the place where the document of each token begins, and `GeckoLayout.forgets`. A cache has
        `held` (batch, 2 * chunk_size) where those of earlier tokens begin; None where there are none.
        """
        size, window, tokens = self.config.chunk_size, 2 * self.config.chunk_size, layout.tokens
        starts = None if tokens.starts is None else tokens.starts.expand(tokens.batch, -1)
        if bos is None:
            return starts, torch.zeros_like(place), (window - place).clamp_min(-1).expand_as(layout.position)

        steps, begin = torch.arange(tokens.length, device=place.device), torch.zeros_like(place)
        if held is not None:
            begin = held.gather(1, (place[:, :1] - 1) % window).expand_as(place)
        last = torch.where(bos, steps, -1).cummax(1).values
        begin = torch.where(last < 0, begin, place - (steps - last))
        if starts is not None:  # by a border, or by a begin token after it
            begin = begin.masked_fill(torch.where(starts, steps, -1).cummax(1).values > last, 0)
            starts = bos | starts
        elif bos.device.type != "cpu" or not can_read_values(bos) or bool((bos & (place > 0)).any()):
            starts = bos

        around, source = begin, steps - size - 1  # the last token of the chunk that leaves
        if held is not None:
            around = torch.cat((held.gather(1, ring_order(place[:, :1], window)), begin), dim=1)
            source = source + window
        forgets = around[:, source.clamp_min(0)] - place + window
        return starts, begin, forgets.clamp_min(-1)


class GeckoHead(Linear):
    """From the last hidden state to logits."""


class GeckoForCausalLM(CausalLMHead, GeckoPreTrainedModel, RecurrentGenerationMixin):
    """Gecko with the head that predicts the next token."""

    lm_head_name = "output.output"
    _tp_plan = {"output.output": "colwise_gather_output"}
    _tied_weights_keys = {"output.output.weight": "model.embed.weight"}

    def __init__(self, config: GeckoConfig):
        super().__init__(config)
        self.model = GeckoModel(config)
        self.output = nn.ModuleDict({"output": GeckoHead(config.model_dim, config.vocab_size, bias=False)})
        self.post_init()


class GeckoForSequenceClassification(SequenceClassificationHead, GeckoPreTrainedModel):
    """Gecko with a linear classifier on the last token."""

    def __init__(self, config: GeckoConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = GeckoModel(config)
        self.score = Linear(config.model_dim, config.num_labels, bias=False)
        self.post_init()


__all__ = ["GeckoForCausalLM", "GeckoForSequenceClassification", "GeckoModel", "GeckoPreTrainedModel"]
