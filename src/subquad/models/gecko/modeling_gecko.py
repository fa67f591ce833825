"""Gecko ("An Efficient Neural Architecture Inherently Processing Sequences with Arbitrary Lengths")."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.integrations import use_kernelized_func
from transformers.utils.output_capturing import capture_outputs

from subquad_kernels import cema, timestep_decay_norm

from ...decoding.generation import RecurrentGenerationMixin
from ...modeling.arguments import checks_arguments
from ...modeling.base import RecurrentBlock, RecurrentPreTrainedModel
from ...modeling.heads import CausalLMHead, SequenceClassificationHead
from ...modeling.layers import Linear, replaceable
from ...modeling.padding import Tokens
from ...modeling.protocols import NO_STATE
from ...modeling.tensor_parallel import local_part
from ...modeling.versions import RecurrentModelOutput
from .cache_gecko import GeckoCache
from .configuration_gecko import GeckoConfig

# package only
from .context_parallel import ContextParallelGeckoCache
from .positions_gecko import GeckoPositions, State, chunk_attention, find_bos, find_positions, working_memory


cema, timestep_decay_norm = replaceable(cema, timestep_decay_norm)


class GeckoTimestepDecayNorm(nn.Module):
    """Section 3.1: normalization by decayed averages of means and variances. The weight is stored minus one."""

    def __init__(self, config: GeckoConfig):
        super().__init__()
        beta1, beta2 = float(config.timenorm_beta1), float(config.timenorm_beta2)
        self.options = {"groups": config.timenorm_num_groups, "beta1": beta1, "beta2": beta2, "eps": config.norm_eps}
        self.weight = nn.Parameter(torch.empty(config.model_dim))
        self.bias = nn.Parameter(torch.empty(config.model_dim))

    def forward(self, x: torch.Tensor, positions: GeckoPositions, state: State) -> torch.Tensor:
        """Equations 3, 11 and 12."""
        out, after = timestep_decay_norm(
            x=x,
            weight=self.weight,
            bias=self.bias,
            **self.options,
            initial_state=state.get("timenorm"),
            starts=positions.starts,
            real=positions.read.tokens.mask,
            inplace=state.can_overwrite("timenorm"),
        )
        norm = functools.partial(timestep_decay_norm, weight=None, bias=None, **self.options)
        positions.update(state, "timenorm", after, norm, x)
        return out


class GeckoCEMA(nn.Module):
    """Section 2.1: the complex, damped moving average of each channel."""

    def __init__(self, config: GeckoConfig):
        super().__init__()
        shape = config.model_dim, config.cema_ndim
        self.alpha = nn.Parameter(torch.empty(shape))
        self.delta = nn.Parameter(torch.empty(shape))
        self.theta = nn.Parameter(torch.empty(config.model_dim))
        self.gamma = nn.Parameter(torch.empty(*shape, 2))

    def forward(self, x: torch.Tensor, positions: GeckoPositions, state: State) -> torch.Tensor:
        """Equations 1 and 2. The published gamma is the paper's eta, theta its omega."""
        weights = {"alpha": self.alpha, "delta": self.delta, "theta": self.theta, "gamma": self.gamma}
        out, after = cema(
            x=x,
            **weights,
            initial_state=state.get("cema"),
            starts=positions.starts,
            real=positions.read.tokens.mask,
            inplace=state.can_overwrite("cema"),
        )
        # The first record replays all tokens, possibly after offloading or FSDP freed the module's weights.
        if state.record_past and "cema" not in state.records:
            weights = {name: weight.clone() for name, weight in weights.items()}
        positions.update(state, "cema", after, functools.partial(cema, **weights), x)
        return out


class GeckoRMSNorm(nn.Module):
    """RMS norm of groups of channels. The weight is stored minus one."""

    def __init__(self, config: GeckoConfig):
        super().__init__()
        self.groups, self.eps = config.layernorm_num_groups, config.norm_eps
        weight = nn.Parameter(torch.empty(config.model_dim)) if config.norm_affine else None
        self.register_parameter("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.unflatten(x, -1, (self.groups, -1))
        x = F.rms_norm(x, x.shape[3:], eps=self.eps).flatten(2)
        return x if self.weight is None else torch.addcmul(x, x, self.weight)  # 16 bits do not hold weight + 1


class GeckoLayerNorm(nn.Module):
    """Layer norm of groups of channels. The weight is stored minus one."""

    def __init__(self, config: GeckoConfig):
        super().__init__()
        self.groups, self.eps = config.layernorm_num_groups, config.norm_eps
        for name in ("weight", "bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(config.model_dim)) if config.norm_affine else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.group_norm(x.flatten(0, 1), self.groups, eps=self.eps).view(x.shape)
        return x if self.weight is None else torch.addcmul(x + self.bias, x, self.weight)


class GeckoMega(nn.Module):
    """The first half of a block: moving average, sliding chunk attention and adaptive working memory."""

    def __init__(self, config: GeckoConfig):
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

    def share(self, m: torch.Tensor, positions: GeckoPositions) -> list[torch.Tensor]:
        """Equations 6 to 8, 25 and 26: q and k, and the memory's q and k, (batch, heads, length, size) each."""
        config = self.config
        z = torch.unflatten(self.wz(m), -1, (-1, config.z_dim // config.num_heads))
        z = F.rms_norm(z, z.shape[-1:], eps=config.norm_eps)
        gamma, beta = (torch.unflatten(local_part(w), -1, z.shape[2:]) for w in (self.gamma, self.beta))
        gamma = (gamma + 1) * z.shape[-1] ** -0.5
        q, k, q_m, k_m = ((z * gamma[i] + beta[i]).to(z.dtype) for i in range(4))
        q, k = positions.rotate(q, config.num_rope_heads), positions.rotate(k, config.num_rope_heads)
        return [x.transpose(1, 2) for x in (q, k, q_m, k_m)]

    def remember(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: GeckoPositions, state: State
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Section 3.3: each token's readout of the memory of chunks that have left attention, and the new states."""
        if not positions.ring and positions.memory["leaving"].shape[1] == 0:
            return torch.zeros_like(v), None, None
        return working_memory(  # equations 17 to 24, and 27
            q=q,
            k=k,
            v=v,
            memory=state.get("memory"),
            normalizer=state.get("normalizer"),
            **positions.memory,
            inplace=state.can_overwrite("memory"),
        )

    def forward(self, x: torch.Tensor, positions: GeckoPositions, state: State) -> torch.Tensor:
        """x (batch, length, model_dim); the output has the same shape."""
        config, training = self.config, self.training
        t = self.timenorm(x, positions, state)
        m = self.rmsnorm(self.cema(t, positions, state) + t)  # equation 5
        m = F.dropout(m, config.hidden_dropout, training)
        q, k, q_m, k_m = self.share(m, positions)
        v = F.silu(self.wv(t))  # equation 9
        v = torch.unflatten(v, -1, (-1, config.value_dim // config.num_heads)).transpose(1, 2)
        r = F.silu(self.wr(m))

        rows = {"keys": k, "values": v, "memory_keys": k_m}
        window = positions.window(state, rows)
        remembered, *memory = self.remember(q_m, window["memory_keys"], window["values"], positions, state)
        window = positions.keep(state, rows, window, *memory)
        dropout = config.attention_dropout if training else 0.0
        attended = positions.attend(q, window["keys"], window["values"].to(v.dtype), dropout)  # equation 13
        attended, remembered = (y.to(v.dtype).transpose(1, 2).flatten(2) for y in (attended, remembered))

        out = F.dropout(attended * r + remembered, config.hidden_dropout, training)  # the gate is of attention only
        return F.dropout(self.wh1(m) + self.wh2(out), config.dropout, training)


class GeckoNFFN(nn.Module):
    """The second half of a block: the normalized feed-forward network."""

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, length, model_dim); the output has the same shape."""
        config, training = self.config, self.training
        n = self.norm(x)
        hidden = F.silu(self.fc1(n)) * self.fc3(n) if config.swiglu else F.silu(self.fc1(n))
        out = self.fc2(F.dropout(hidden, config.hidden_dropout, training))
        out = F.dropout(out, config.dropout, training)
        return out if self.alpha is None else out * self.alpha


@use_kernelized_func([cema, chunk_attention, timestep_decay_norm, working_memory])
class GeckoBlock(RecurrentBlock):
    def __init__(self, config: GeckoConfig, layer_idx: int):
        super().__init__()
        self.layer_idx, self.two_hop_residual = layer_idx, config.two_hop_residual
        self.mega = GeckoMega(config)
        self.nffn = GeckoNFFN(config, layer_idx)

    def forward(self, x: torch.Tensor, positions: GeckoPositions, cache: GeckoCache | None = None) -> torch.Tensor:
        state = NO_STATE if cache is None else cache.layers[self.layer_idx]
        x = positions.text_first(x)
        y = x + self.mega(x, positions, state)
        x = (x if self.two_hop_residual else y) + self.nffn(y)
        return positions.as_given(x)


class GeckoPreTrainedModel(RecurrentPreTrainedModel):
    config: GeckoConfig
    config_class = GeckoConfig
    base_model_prefix = "model"
    cache_class = GeckoCache
    # package only
    context_parallel_class = ContextParallelGeckoCache
    _no_split_modules = ["GeckoBlock"]
    _input_embed_layer = "embed"
    _can_record_outputs = {"hidden_states": GeckoBlock}
    # Buffers of the authors' code: angles, which follow from the configuration, and first moments, which are zero.
    _keys_to_ignore_on_load_unexpected = [r"rope\.freqs", r"norm\.prior_(count|mean|var)"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        if isinstance(module, nn.Embedding | GeckoHead):
            std = config.model_dim**-0.5
            init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=(3 * module.in_features) ** -0.5)  # He initialization, for a slope of √5
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

    def start_blocks(
        self,
        x: torch.Tensor,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        tokens: Tokens,
        cache: GeckoCache | None,
    ) -> tuple[torch.Tensor, GeckoPositions]:
        """The input of the blocks, made from embeddings x (batch, length, model_dim), and the tokens' positions."""
        bos = find_bos(self.config, self.embed, input_ids, inputs_embeds)
        if self.config.scale_emb:
            x = x * self.config.model_dim**0.5
        x = F.dropout(x, self.config.dropout, self.training)
        return x, find_positions(self.config, x, tokens, bos, cache, self.training)

    @checks_arguments
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: GeckoCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs,
    ) -> RecurrentModelOutput:
        """
        Args:
            input_ids: (batch, length) token ids. With `config.document_boundaries`, each `bos_token_id` begins a new
                document; chunks continue across it.
            attention_mask: (batch, length), 0 for padding, which may be anywhere in a row. With a cache it may also
                cover the tokens of earlier calls.
            position_ids: (batch, length). They only show where packed documents begin: at a position that does not
                follow the one before. Exports, and compiled calls with a cache, do not read them;
                `torch.compile(fullgraph=True)` needs `cu_seqlens`. Rotary embeddings and chunks count a document's own
                tokens.
            cache: the states after earlier tokens, updated in place; also as `past_key_values`.
            inputs_embeds: (batch, length, model_dim), instead of `input_ids`. A token begins a document if it equals
                the embedding of `bos_token_id`.
            use_cache: whether to return the states. If None, `config.use_cache`, but not in training.
            cu_seqlens: (documents + 1), the boundaries of documents packed into one row; also as `cu_seq_lens_q`.

        Returns:
            last_hidden_state (batch, length, model_dim), in which padding repeats the last real token before it, or is
            zero if there is none; cache; hidden_states (the embeddings and the output of every block, the last one
            normalized) if `output_hidden_states` is set.

        Raises:
            ValueError: before any work, if an argument does not fit; the message names it.
        """
        x, tokens, cache, use_cache = self.start_forward(
            input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache, use_cache, **kwargs
        )
        x, positions = self.start_blocks(x, input_ids, inputs_embeds, tokens, cache)
        if cache is not None:
            cache.count_tokens(positions)
        for layer in self.layers[: self.config.num_layers]:
            x = layer(x, positions, cache)
        state = NO_STATE if cache is None else cache.after_blocks
        x = positions.as_given(self.output["final_norm"](positions.text_first(x), positions, state))
        return self.finish_forward(x, tokens, cache, use_cache)


class GeckoHead(Linear):
    """From the last hidden state to logits."""


class GeckoForCausalLM(CausalLMHead, RecurrentGenerationMixin, GeckoPreTrainedModel):
    """Gecko with a language modeling head."""

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
