"""Finch (RWKV-6), section 4.2 of "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence"."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.integrations import use_kernelized_func
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from subquad_kernels import gated_wkv, token_shift, wkv_state

from ...base import RecurrentPreTrainedModel
from ...cache import LayerState, RecurrentCache
from ...generation import RecurrentGenerationMixin
from ...heads import CausalLMHead, SequenceClassificationHead
from ...layers import Linear, replaceable
from ...padding import Tokens, last_token
from ...tensor_parallel import local_part, times_own_columns
from .configuration_rwkv6 import Rwkv6Config


gated_wkv, token_shift = replaceable(gated_wkv, token_shift)


class Rwkv6GatedRecurrence(nn.GroupNorm):
    """
    The recurrence, the LayerNorm of each head of what it puts out, and the gate: equations 19 to 22 in one operator,
    called by the module that has the norm's weights, because offloading loads those of the module that is called.
    """

    def forward(self, tokens: Tokens, r, k, v, gate, log_w, u, state: torch.Tensor | None, inplace: bool):
        sequences = {"r": r, "k": k, "v": v, "gate": gate, "log_w": log_w}
        norm = {"weight": local_part(self.weight), "bias": local_part(self.bias), "eps": self.eps}
        return tokens.by_document(gated_wkv, sequences, state, inplace, u=u, **norm)


class Rwkv6TimeMixing(nn.Module):
    """Section 4.2.2: the linear attention, with a decay that depends on the data."""

    def __init__(self, config: Rwkv6Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_size = config.num_attention_heads, config.head_size
        width, inner = config.hidden_size, config.attention_hidden_size

        self.time_maa_x = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_w = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_k = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_v = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_r = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_g = nn.Parameter(torch.empty(1, 1, width))
        self.time_maa_w1 = nn.Parameter(torch.empty(width, 5 * config.lora_rank_tokenshift))
        self.time_maa_w2 = nn.Parameter(torch.empty(5, config.lora_rank_tokenshift, width))

        self.time_decay = nn.Parameter(torch.empty(1, 1, inner))
        self.time_decay_w1 = nn.Parameter(torch.empty(width, config.lora_rank_decay))
        self.time_decay_w2 = nn.Parameter(torch.empty(config.lora_rank_decay, inner))
        self.time_faaaa = nn.Parameter(torch.empty(self.num_heads, self.head_size))

        self.receptance = Linear(width, inner, bias=False)
        self.key = Linear(width, inner, bias=False)
        self.value = Linear(width, inner, bias=False)
        self.gate = Linear(width, inner, bias=False)
        self.output = Linear(inner, width, bias=False)
        self.ln_x = Rwkv6GatedRecurrence(self.num_heads, inner, eps=1e-5 * config.head_size_divisor**2)

    def ddlerp(self, x: torch.Tensor, before: torch.Tensor | None, starts: torch.Tensor | None):
        """Data-dependent interpolation between a token and the one before, for w, k, v, r, g (equations 14, 15)."""
        low = torch.tanh(token_shift(x, before, self.time_maa_x[0], starts=starts)[0] @ self.time_maa_w1)
        low = low.view(-1, 5, low.shape[-1] // 5).transpose(0, 1)
        offset = (low @ self.time_maa_w2).view(5, *x.shape)
        mu = torch.cat((self.time_maa_w, self.time_maa_k, self.time_maa_v, self.time_maa_r, self.time_maa_g))
        return token_shift(x, before, mu.squeeze(1), offset, starts).unbind()

    def forward(self, x: torch.Tensor, tokens: Tokens, state: LayerState | None = None) -> torch.Tensor:
        before = state and state.get("attention_shift")
        x = tokens.fill(x, before)
        x_w, x_k, x_v, x_r, x_g = self.ddlerp(x, before, tokens.starts)

        heads = (*x.shape[:2], -1, self.head_size)
        r = self.receptance(x_r).view(heads)
        k = tokens.erase(self.key(x_k)).view(heads)
        v = self.value(x_v).view(heads)
        g = self.gate(x_g)
        # Equations 17 and 18; padding neither adds to the state nor decays it.
        d = times_own_columns(torch.tanh(x_w @ self.time_decay_w1), self.time_decay_w2)
        d = local_part(self.time_decay).float() + d
        log_w = tokens.erase(-d.exp()).view(heads)

        inplace = state is not None and state.can_overwrite("wkv")
        u = local_part(self.time_faaaa)
        out, after = self.ln_x(tokens, r, k, v, g, log_w, u, state and state.get("wkv"), inplace)
        if state is not None:
            state.update("attention_shift", last_token(None, x), last_token, x)
            state.update("wkv", after, wkv_state, k, v, log_w)
        return self.output(out)


class Rwkv6ChannelMixing(nn.Module):
    """Section 4.1.3, equations 10 to 13."""

    def __init__(self, config: Rwkv6Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.time_maa_k = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.time_maa_r = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.key = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.receptance = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.value = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, tokens: Tokens, state: LayerState | None = None) -> torch.Tensor:
        before = state and state.get("feed_forward_shift")
        x = tokens.fill(x, before)
        mu = torch.cat((self.time_maa_k, self.time_maa_r)).squeeze(1)
        x_k, x_r = token_shift(x, before, mu, starts=tokens.starts).unbind()
        if state is not None:
            state.update("feed_forward_shift", last_token(None, x), last_token, x)
        v = self.value(F.relu(self.key(x_k)).square())
        return torch.sigmoid(self.receptance(x_r)) * v


@use_kernelized_func([gated_wkv, token_shift])
class Rwkv6Block(GradientCheckpointingLayer):
    def __init__(self, config: Rwkv6Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        if layer_idx == 0:
            self.pre_ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.ln1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.ln2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attention = Rwkv6TimeMixing(config, layer_idx)
        self.feed_forward = Rwkv6ChannelMixing(config, layer_idx)

    def forward(self, x: torch.Tensor, tokens: Tokens, past_key_values: RecurrentCache | None = None) -> torch.Tensor:
        state = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        if self.layer_idx == 0:
            x = self.pre_ln(x)
        x = x + self.attention(self.ln1(x), tokens, state)
        return x + self.feed_forward(self.ln2(x), tokens, state)


class Rwkv6PreTrainedModel(RecurrentPreTrainedModel):
    config: Rwkv6Config
    config_class = Rwkv6Config
    base_model_prefix = "rwkv"
    _no_split_modules = ["Rwkv6Block"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Appendix H."""
        config = self.config
        if isinstance(module, Rwkv6TimeMixing | Rwkv6ChannelMixing):
            width, inner = config.hidden_size, config.attention_hidden_size
            l, layers = module.layer_idx, config.num_hidden_layers
            r0, r1 = l / max(layers - 1, 1), 1 - l / layers
            ramp = torch.arange(width) / width
            mu = 1 - ramp**r1
        if isinstance(module, Rwkv6TimeMixing):
            for name in ("time_maa_x", "time_maa_w", "time_maa_k"):
                init.copy_(getattr(module, name), mu.view(1, 1, -1))
            init.copy_(module.time_maa_v, (mu - 0.3 * r0).view(1, 1, -1))
            for name in ("time_maa_r", "time_maa_g"):
                init.copy_(getattr(module, name), (1 - ramp ** (r1 / 2)).view(1, 1, -1))
            for name in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"):
                init.uniform_(getattr(module, name), -1e-4, 1e-4)
            i = torch.arange(inner)
            to_one = i / max(inner - 1, 1)
            init.copy_(module.time_decay, (-6 + 5 * to_one ** (0.7 + 1.3 * r0)).view(1, 1, -1))
            init.copy_(module.time_faaaa, (r0 * (1 - to_one) + 0.1 * ((i + 1) % 3)).view_as(module.time_faaaa))
            init.zeros_(module.output.weight)
            init.constant_(module.ln_x.weight, ((1 + l) / layers) ** 0.7)
            init.zeros_(module.ln_x.bias)
            self._init_projections(module.receptance, module.key, module.value, module.gate)
        elif isinstance(module, Rwkv6ChannelMixing):
            init.copy_(module.time_maa_k, mu.view(1, 1, -1))
            init.copy_(module.time_maa_r, mu.view(1, 1, -1))
            init.zeros_(module.value.weight)
            init.zeros_(module.receptance.weight)
            self._init_projections(module.key)
        elif isinstance(module, nn.Embedding):
            init.uniform_(module.weight, -config.initializer_range, config.initializer_range)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif module is getattr(self, "head", None):
            init.orthogonal_(module.weight, gain=0.5)
        elif module is getattr(self, "score", None):
            self._init_projections(module)

    @staticmethod
    def _init_projections(*projections: nn.Linear) -> None:
        for projection in projections:
            rows, columns = projection.weight.shape
            if rows > columns:
                init.orthogonal_(projection.weight, gain=rows / columns)
            else:
                init.kaiming_uniform_(projection.weight, a=5**0.5)  # the default of nn.Linear


class Rwkv6Model(Rwkv6PreTrainedModel):
    """The blocks of Finch, without a head."""

    def __init__(self, config: Rwkv6Config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Rwkv6Block(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.ln_out = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def set_input_embeddings(self, new_embeddings: nn.Embedding) -> None:
        self.embeddings = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: RecurrentCache | None = None,
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
                `cu_seqlens`. They have no other influence.
            past_key_values: the state after earlier tokens, updated in place.
            inputs_embeds: (batch, length, hidden_size), in place of `input_ids`.
            use_cache: whether to return the state; `config.use_cache` where None, but not in training.
            cu_seqlens: (documents + 1), the borders of documents packed into one row; also as `cu_seq_lens_q`.

        Returns:
            last_hidden_state (batch, length, hidden_size), where padding after a text repeats its last token and
            padding before it is zero; past_key_values; hidden_states (embeddings and the output of every block, the
            last one normalised).

        Raises:
            ValueError: before any work, where an argument does not fit; the message names it.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x, tokens, past_key_values, use_cache = self.read_inputs(
            input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, past_key_values, use_cache, **kwargs
        )

        hidden_states = (x,) if output_hidden_states else None
        for block in self.blocks[: self.config.num_hidden_layers]:
            x = block(x, tokens, past_key_values=past_key_values)
            if output_hidden_states:
                hidden_states += (x,)
        return self.make_output(self.ln_out(x), tokens, past_key_values, use_cache, hidden_states)


class Rwkv6ForCausalLM(CausalLMHead, Rwkv6PreTrainedModel, RecurrentGenerationMixin):
    """Finch with the head that predicts the next token."""

    lm_head_name = "head"
    _tp_plan = {"head": "colwise_gather_output"}
    _tied_weights_keys = {"head.weight": "rwkv.embeddings.weight"}

    def __init__(self, config: Rwkv6Config):
        super().__init__(config)
        self.rwkv = Rwkv6Model(config)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class Rwkv6ForSequenceClassification(SequenceClassificationHead, Rwkv6PreTrainedModel):
    """Finch with a linear classifier on the last token."""

    def __init__(self, config: Rwkv6Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.rwkv = Rwkv6Model(config)
        self.score = Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


__all__ = ["Rwkv6ForCausalLM", "Rwkv6ForSequenceClassification", "Rwkv6Model", "Rwkv6PreTrainedModel"]
