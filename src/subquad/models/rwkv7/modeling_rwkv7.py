"""Goose (RWKV-7), "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456)."""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.integrations import use_kernelized_func
from transformers.utils.output_capturing import capture_outputs

from subquad_kernels import delta_keys, delta_wkv, delta_wkv_state

from ...decoding.generation import RecurrentGenerationMixin
from ...modeling.arguments import checks_arguments
from ...modeling.base import RecurrentBlock, RecurrentPreTrainedModel
from ...modeling.cache import RecurrentCache

# package only
from ...modeling.context_parallel import ContextParallelCache
from ...modeling.heads import CausalLMHead, SequenceClassificationHead
from ...modeling.layers import (
    LayerNorm,
    Linear,
    group_norm_gate,
    relu_squared,
    replaceable,
    token_shift,
    wide_dtype,
    widen,
)
from ...modeling.padding import last_token
from ...modeling.protocols import NO_STATE, BlockCache, BlockState, CallTokens
from ...modeling.tensor_parallel import local_part, low_rank_of_heads
from ...modeling.versions import RecurrentModelOutput
from .configuration_rwkv7 import Rwkv7Config


(delta_wkv,) = replaceable(delta_wkv)


def projection(inputs: int, outputs: int, gain: float, wide: bool = False) -> Linear:
    """A [`Linear`] without bias. `gain` scales its orthogonal initialization; 0 means zeros."""
    layer = Linear(inputs, outputs, bias=False, wide=wide)
    layer.gain = gain
    return layer


class Rwkv7GatedNorm(nn.GroupNorm):
    """The norm of each head's output, the bonus of the current token, and the gate."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        """x and bonus (batch, length, heads, head_size), gate and the output (batch, length, heads * head_size)."""
        weight, bias = local_part(self.weight), local_part(self.bias)
        return group_norm_gate(x, gate, weight, bias, self.eps, bonus, activation=None)


class Rwkv7TimeMixing(nn.Module):
    """The generalised delta rule: a state per head that forgets by channel and replaces the value under a key."""

    def __init__(self, config: Rwkv7Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_size = config.head_dim
        width = config.hidden_size

        def vector() -> nn.Parameter:
            return nn.Parameter(torch.empty(1, 1, width))

        def low_rank(rank: int) -> tuple[nn.Parameter, nn.Parameter]:
            return nn.Parameter(torch.empty(width, rank)), nn.Parameter(torch.empty(rank, width))

        self.x_r, self.x_w, self.x_k = vector(), vector(), vector()
        self.x_v, self.x_a, self.x_g = vector(), vector(), vector()

        self.w0, (self.w1, self.w2) = vector(), low_rank(config.decay_low_rank_dim)
        self.a0, (self.a1, self.a2) = vector(), low_rank(config.a_low_rank_dim)
        if layer_idx > 0:
            self.v0, (self.v1, self.v2) = vector(), low_rank(config.v_low_rank_dim)
        self.g1, self.g2 = low_rank(config.gate_low_rank_dim)
        self.k_k, self.k_a = vector(), vector()
        self.r_k = nn.Parameter(torch.empty(config.num_heads, self.head_size))

        self.receptance = projection(width, width, gain=1.0)
        self.key = projection(width, width, gain=0.1)
        self.value = projection(width, width, gain=1.0)
        self.output = projection(width, width, gain=0.0, wide=True)
        self.ln_x = Rwkv7GatedNorm(config.num_heads, width, eps=self.head_size * config.norm_eps)

    def forward(
        self, x: torch.Tensor, tokens: CallTokens, v_first: torch.Tensor | None, state: BlockState = NO_STATE
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            x: (batch, length, hidden_size).
            v_first: the first layer's values for the same tokens, (batch, length, hidden_size); None in that layer.

        Returns:
            the output, of the shape of x, and `v_first`.
        """
        last = state.get("attention_shift")
        x = tokens.forward_fill(x, last)
        before = tokens.token_before(x, last)
        mu = torch.cat((self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g)).squeeze(1)
        x_r, x_w, x_k, x_v, x_a, x_g = token_shift(x, state=before, mu=mu, starts=tokens.starts).unbind()

        r, k, v = self.receptance(x_r), self.key(x_k), self.value(x_v)
        # The decay w is between exp(-exp(-1/2)) = 0.545 and 1. The in-context learning rate a is the share of a key's
        # old value that is replaced.
        log_w = low_rank_of_heads(
            x_w, self.w1, self.w2, "tanh", base=self.w0, outer="sigmoid", scale=-math.exp(-0.5), wide=True
        )
        a = low_rank_of_heads(x_a, self.a1, self.a2, base=self.a0, outer="sigmoid")
        g = low_rank_of_heads(x_g, self.g1, self.g2, "sigmoid")
        if v_first is None:
            v_first = v
        else:
            mix = low_rank_of_heads(x_v, self.v1, self.v2, base=self.v0, outer="sigmoid")
            v = torch.addcmul(v, v_first - v, mix)

        by_head = (*x.shape[:2], -1, self.head_size)
        r, k, v, a, log_w = (y.view(by_head) for y in (r, k, v, a, log_w))
        k_k, k_a = (local_part(y).view(-1, self.head_size) for y in (self.k_k, self.k_a))
        kappa, k = delta_keys(k, a, k_k, k_a)
        # Padding does not add to the state, remove from it or decay it.
        k, kappa, log_w = tokens.zero_padding(k), tokens.zero_padding(kappa), tokens.zero_padding(log_w)

        sequences = {"r": r, "k": k, "v": v, "log_w": log_w, "kappa": kappa, "a": a}
        entering, inplace = state.get("wkv"), state.can_overwrite("wkv")
        wide = wide_dtype(v)  # sums of values may overflow float16
        out, leaving = tokens.run_packed(delta_wkv, sequences, entering, inplace, out_dtype=wide)
        bonus = (r.to(wide) * local_part(self.r_k) * k).sum(-1, keepdim=True) * v
        state.update_with("attention_shift", last_token, x)
        state.update("wkv", leaving, delta_wkv_state, k, v, log_w, kappa, a)
        return self.output(self.ln_x(out, g, bonus)), v_first


class Rwkv7ChannelMixing(nn.Module):
    """A feed-forward network on each token and a part of the one before."""

    def __init__(self, config: Rwkv7Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.x_k = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.key = projection(config.hidden_size, config.intermediate_size, gain=1.0)
        self.value = projection(config.intermediate_size, config.hidden_size, gain=0.0, wide=True)

    def activate(self, x: torch.Tensor, tokens: CallTokens, state: BlockState) -> torch.Tensor:
        """The inner activation, (batch, length, intermediate_size), of x (batch, length, hidden_size)."""
        before = state.get("feed_forward_shift")
        x = tokens.forward_fill(x, before)
        before = tokens.token_before(x, before)
        x_k = token_shift(x, state=before, mu=self.x_k[0], starts=tokens.starts)[0]
        state.update_with("feed_forward_shift", last_token, x)
        return relu_squared(self.key(x_k))

    def forward(self, x: torch.Tensor, tokens: CallTokens, state: BlockState = NO_STATE) -> torch.Tensor:
        """x (batch, length, hidden_size); the output has the same shape."""
        return self.value(self.activate(x, tokens, state))


@use_kernelized_func([delta_wkv, group_norm_gate, token_shift])
class Rwkv7Block(RecurrentBlock):
    channel_mixing_class = Rwkv7ChannelMixing

    def __init__(self, config: Rwkv7Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        if layer_idx == 0:
            self.ln0 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.ln1 = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.ln2 = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.att = Rwkv7TimeMixing(config, layer_idx)
        self.ffn = self.channel_mixing_class(config, layer_idx)

    def forward(
        self,
        x: torch.Tensor,
        v_first: torch.Tensor | None,
        tokens: CallTokens,
        cache: BlockCache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and `v_first`, as in [`Rwkv7TimeMixing`]: the first layer's values travel with x."""
        state = NO_STATE if cache is None else cache.layers[self.layer_idx]
        if self.layer_idx == 0:
            x = widen(self.ln0(x))
        out, v_first = self.att(self.ln1(x), tokens, v_first, state)
        x = x + out
        return x + self.ffn(self.ln2(x), tokens, state), v_first


class Rwkv7PreTrainedModel(RecurrentPreTrainedModel):
    config: Rwkv7Config
    config_class = Rwkv7Config
    base_model_prefix = "rwkv7"
    # package only
    context_parallel_class = ContextParallelCache
    _no_split_modules = ["Rwkv7Block"]
    _input_embed_layer = "emb"
    _can_record_outputs = {"hidden_states": Rwkv7Block}
    # Present in published files, but unused.
    _keys_to_ignore_on_load_unexpected = [r"blocks\.0\.att\.v[012]$"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As the published trainer does."""
        if isinstance(module, Rwkv7TimeMixing):
            self._init_time_mixing(module)
        elif isinstance(module, Rwkv7ChannelMixing):
            depth = 1 - module.layer_idx / self.config.num_hidden_layers
            init.copy_(module.x_k, (1 - self._ramp() ** depth**4).view(1, 1, -1))
        elif isinstance(module, nn.Linear) and hasattr(module, "gain"):
            if module.gain:
                init.orthogonal_(module.weight, gain=module.gain)
            else:
                init.zeros_(module.weight)
        elif isinstance(module, nn.Embedding):
            init.uniform_(module.weight, -1e-4, 1e-4)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif module is getattr(self, "score", None):
            init.kaiming_uniform_(module.weight, a=5**0.5)  # the default of nn.Linear

    def _ramp(self) -> torch.Tensor:
        """Channels from 0 to nearly 1."""
        return torch.arange(self.config.hidden_size) / self.config.hidden_size

    def _init_time_mixing(self, module: Rwkv7TimeMixing) -> None:
        config, l, layers = self.config, module.layer_idx, self.config.num_hidden_layers
        width, size = config.hidden_size, config.head_dim
        up, down = l / max(layers - 1, 1), 1 - l / layers  # depth of the layer: from 0 to 1, from 1 to 1 / layers
        i = torch.arange(width)
        to_one = i / max(width - 1, 1)
        z = 2 * (i % size - (size - 1) / 2) / max(size - 1, 1)
        zigzag = z * z.abs()  # over the channels of each head
        vectors = {
            "w0": -5.5 + 6 * to_one ** (1 + up**0.3) + 2.5 * zigzag,
            "a0": -0.19 + 0.3 * zigzag + 0.4 * (to_one - 0.5),
            "k_k": 0.71 - 0.1 * (to_one - 0.5),
            "k_a": torch.full((width,), 1.02),
        }
        for power, names in ((0.2, ("x_r", "x_g")), (0.7, ("x_k", "x_v")), (0.9, ("x_w", "x_a"))):
            vectors |= dict.fromkeys(names, 1 - self._ramp() ** (power * down))
        if l > 0:
            vectors["v0"] = 0.73 - 0.4 * (to_one - 0.5)
        for name, values in vectors.items():
            init.copy_(getattr(module, name), values.view(1, 1, -1))
        for letter in "wavg" if l > 0 else "wag":
            up_map = getattr(module, f"{letter}2")
            init.zeros_(getattr(module, f"{letter}1"))
            init.orthogonal_(up_map, gain=0.1 * max(up_map.shape[0] / width, 1) ** 0.5)
        init.constant_(module.r_k, -0.04)
        init.constant_(module.ln_x.weight, ((1 + l) / layers) ** 0.7)
        init.zeros_(module.ln_x.bias)


class Rwkv7Model(Rwkv7PreTrainedModel):
    """The blocks of Goose, without a head."""

    block_class = Rwkv7Block

    def __init__(self, config: Rwkv7Config):
        super().__init__(config)
        self.emb = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(self.block_class(config, i) for i in range(config.num_hidden_layers))
        self.ln_out = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    @checks_arguments
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: RecurrentCache | None = None,
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
                `torch.compile(fullgraph=True)` needs `cu_seqlens`.
            cache: the states after earlier tokens, updated in place; also as `past_key_values`.
            inputs_embeds: (batch, length, hidden_size), instead of `input_ids`.
            use_cache: whether to return the states. If None, `config.use_cache`, but not in training.
            cu_seqlens: (documents + 1), the boundaries of documents packed into one row; also as `cu_seq_lens_q`.

        Returns:
            last_hidden_state (batch, length, hidden_size), in which padding repeats the last real token before it, or
            is zero if there is none; cache; hidden_states (the embeddings and the output of every block, the last one
            normalised; between the blocks of a float16 model in float32) if `output_hidden_states` is set.

        Raises:
            ValueError: before any work, if an argument does not fit; the message names it.
        """
        x, tokens, cache, use_cache = self.start_forward(
            input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, cache, use_cache, **kwargs
        )
        v_first = None
        for block in self.blocks[: self.config.num_hidden_layers]:
            x, v_first = block(x, v_first, tokens, cache)
        return self.finish_forward(self.ln_out(x), tokens, cache, use_cache)


class Rwkv7ForCausalLM(CausalLMHead, RecurrentGenerationMixin, Rwkv7PreTrainedModel):
    """Goose with a language modeling head."""

    model_class = Rwkv7Model
    lm_head_name = "head"
    _tp_plan = {"head": "colwise_gather_output"}
    _tied_weights_keys = {"head.weight": "rwkv7.emb.weight"}

    def __init__(self, config: Rwkv7Config):
        super().__init__(config)
        self.rwkv7 = self.model_class(config)
        gain = 0.5 * max(config.vocab_size / config.hidden_size, 1) ** 0.5
        self.head = projection(config.hidden_size, config.vocab_size, gain)
        self.post_init()


class Rwkv7ForSequenceClassification(SequenceClassificationHead, Rwkv7PreTrainedModel):
    """Goose with a linear classifier on the last token."""

    model_class = Rwkv7Model

    def __init__(self, config: Rwkv7Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.rwkv7 = self.model_class(config)
        self.score = Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


__all__ = ["Rwkv7ForCausalLM", "Rwkv7ForSequenceClassification", "Rwkv7Model", "Rwkv7PreTrainedModel"]
