"""Eagle (RWKV-5), section 4.1 of "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence"."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.integrations import use_kernelized_func
from transformers.utils.output_capturing import capture_outputs

from subquad_kernels import wkv, wkv_state

from ...decoding.generation import RecurrentGenerationMixin
from ...modeling.arguments import checks_arguments
from ...modeling.base import RecurrentBlock, RecurrentPreTrainedModel
from ...modeling.cache import RecurrentCache

# package only
from ...modeling.context_parallel import ContextParallelCache
from ...modeling.heads import CausalLMHead, SequenceClassificationHead
from ...modeling.layers import LayerNorm, Linear, group_norm_gate, replaceable, token_shift, wide_dtype, widen
from ...modeling.padding import last_token
from ...modeling.protocols import NO_STATE, BlockCache, BlockState, CallTokens
from ...modeling.tensor_parallel import local_part
from ...modeling.versions import RecurrentModelOutput
from .configuration_rwkv5 import Rwkv5Config


(wkv,) = replaceable(wkv)


class Rwkv5GatedNorm(nn.GroupNorm):
    """The norm of each head's output, and the gate: equations 7 and 20."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x (batch, length, heads, head_size), gate and the output (batch, length, heads * head_size)."""
        return group_norm_gate(x, gate, local_part(self.weight), local_part(self.bias), self.eps)


class Rwkv5TimeMixing(nn.Module):
    """Section 4.1.2: the linear attention, with a learned decay per channel."""

    def __init__(self, config: Rwkv5Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_size = config.num_attention_heads, config.head_size
        width, inner = config.hidden_size, config.attention_hidden_size
        self.add_mixing(config)

        self.receptance = Linear(width, inner, bias=False)
        self.key = Linear(width, inner, bias=False)
        self.value = Linear(width, inner, bias=False)
        self.gate = Linear(width, inner, bias=False)
        self.output = Linear(inner, width, bias=False, wide=True)
        self.ln_x = Rwkv5GatedNorm(self.num_heads, inner, eps=1e-5 * config.head_size_divisor**2)

    def add_mixing(self, config: Rwkv5Config) -> None:
        """The parameters of token shift, decay and bonus."""
        self.time_decay = nn.Parameter(torch.empty(self.num_heads, self.head_size))
        self.time_faaaa = nn.Parameter(torch.empty(self.num_heads, self.head_size))  # u, the bonus
        self.time_mix_key = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.time_mix_value = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.time_mix_receptance = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.time_mix_gate = nn.Parameter(torch.empty(1, 1, config.hidden_size))

    def mix(self, x: torch.Tensor, before: torch.Tensor | None, starts: torch.Tensor | None) -> list[torch.Tensor]:
        """
        Equation 3: the inputs of receptance, key, value and gate, (batch, length, hidden_size) each. The fifth is the
        decay's, which only Finch reads.
        """
        mix = torch.cat((self.time_mix_receptance, self.time_mix_key, self.time_mix_value, self.time_mix_gate))
        # time_mix_* is one minus the paper's mu. In float32, because the difference would round.
        mixed = token_shift(x, state=before, mu=1 - mix.squeeze(1).float(), starts=starts)
        return [*mixed.unbind(), x]

    def log_decay(self, x: torch.Tensor) -> torch.Tensor:
        """Log w of equation 5, (heads, head_size). It does not depend on x, unlike Finch's."""
        return -local_part(self.time_decay).float().exp()

    def forward(self, x: torch.Tensor, tokens: CallTokens, state: BlockState = NO_STATE) -> torch.Tensor:
        """x (batch, length, hidden_size); the output has the same shape."""
        last = state.get("attention_shift")
        x = tokens.forward_fill(x, last)
        x_r, x_k, x_v, x_g, x_w = self.mix(x, tokens.token_before(x, last), tokens.starts)

        # Equation 4; 16 of Finch.
        by_head = (*x.shape[:2], -1, self.head_size)
        r = self.receptance(x_r).view(by_head)
        k = tokens.zero_padding(self.key(x_k)).view(by_head)
        v = self.value(x_v).view(by_head)
        g = self.gate(x_g)
        log_w = self.log_decay(x_w)
        if tokens.mask is not None:
            log_w = tokens.zero_padding(log_w.expand(by_head))  # padding neither adds to the state nor decays it

        # Equations 8 and 9; 21 and 22 of Finch.
        sequences, shared = {"r": r, "k": k, "v": v}, {"u": local_part(self.time_faaaa)}
        if log_w.dim() == 2:
            shared["log_w"] = log_w  # the same for every token
        else:
            sequences["log_w"] = log_w
        entering, inplace = state.get("wkv"), state.can_overwrite("wkv")
        wide = wide_dtype(v)  # sums of values may overflow float16
        out, leaving = tokens.run_packed(wkv, sequences, entering, inplace, **shared, out_dtype=wide)
        state.update_with("attention_shift", last_token, x)
        state.update("wkv", leaving, wkv_state, k, v, log_w.expand(by_head))
        return self.output(self.ln_x(out, g))


class Rwkv5ChannelMixing(nn.Module):
    """Section 4.1.3, equations 10 to 13."""

    def __init__(self, config: Rwkv5Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.add_mixing(config)
        self.key = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.receptance = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.value = Linear(config.intermediate_size, config.hidden_size, bias=False, wide=True)

    def add_mixing(self, config: Rwkv5Config) -> None:
        """The parameters of the token shift."""
        self.time_mix_key = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.time_mix_receptance = nn.Parameter(torch.empty(1, 1, config.hidden_size))

    @property
    def mu(self) -> torch.Tensor:
        """Weights of the token before, for key and receptance, (2, hidden_size)."""
        return 1 - torch.cat((self.time_mix_key, self.time_mix_receptance)).squeeze(1).float()

    def forward(self, x: torch.Tensor, tokens: CallTokens, state: BlockState = NO_STATE) -> torch.Tensor:
        """x (batch, length, hidden_size); the output has the same shape."""
        last = state.get("feed_forward_shift")
        x = tokens.forward_fill(x, last)
        before = tokens.token_before(x, last)
        x_k, x_r = token_shift(x, state=before, mu=self.mu, starts=tokens.starts).unbind()
        state.update_with("feed_forward_shift", last_token, x)
        v = self.value(F.relu(self.key(x_k)).square())
        return torch.sigmoid(self.receptance(x_r)) * v


@use_kernelized_func([group_norm_gate, token_shift, wkv])
class Rwkv5Block(RecurrentBlock):
    time_mixing_class, channel_mixing_class = Rwkv5TimeMixing, Rwkv5ChannelMixing

    def __init__(self, config: Rwkv5Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        if layer_idx == 0:
            self.pre_ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.ln1 = LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.ln2 = LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attention = self.time_mixing_class(config, layer_idx)
        self.feed_forward = self.channel_mixing_class(config, layer_idx)

    def forward(self, x: torch.Tensor, tokens: CallTokens, cache: BlockCache | None = None) -> torch.Tensor:
        state = NO_STATE if cache is None else cache.layers[self.layer_idx]
        if self.layer_idx == 0:
            x = widen(self.pre_ln(x))
        x = x + self.attention(self.ln1(x), tokens, state)
        return x + self.feed_forward(self.ln2(x), tokens, state)


class Rwkv5PreTrainedModel(RecurrentPreTrainedModel):
    config: Rwkv5Config
    config_class = Rwkv5Config
    base_model_prefix = "rwkv"
    # package only
    context_parallel_class = ContextParallelCache
    _no_split_modules = ["Rwkv5Block"]
    _input_embed_layer = "embeddings"
    _can_record_outputs = {"hidden_states": Rwkv5Block}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Appendix H."""
        config = self.config
        if isinstance(module, Rwkv5TimeMixing):
            self._init_mixing(module)
            # From the first channel (0) to the last (1).
            i = torch.arange(config.attention_hidden_size)
            to_one = i / max(config.attention_hidden_size - 1, 1)
            l, layers = module.layer_idx, config.num_hidden_layers
            r0 = l / max(layers - 1, 1)
            init.copy_(module.time_decay, (-6 + 5 * to_one ** (0.7 + 1.3 * r0)).view_as(module.time_decay))
            init.copy_(module.time_faaaa, (r0 * (1 - to_one) + 0.1 * ((i + 1) % 3)).view_as(module.time_faaaa))
            init.zeros_(module.output.weight)
            init.constant_(module.ln_x.weight, ((1 + l) / layers) ** 0.7)
            init.zeros_(module.ln_x.bias)
            self._init_projections(module.receptance, module.key, module.value, module.gate)
        elif isinstance(module, Rwkv5ChannelMixing):
            self._init_mixing(module)
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

    def _mixing_ramp(self, module: nn.Module) -> tuple[torch.Tensor, float, float]:
        """Channels from 0 to 1, and the depth of the layer: r_0 rises from 0 to 1, r_1 falls from 1 to 1 / layers."""
        l, layers = module.layer_idx, self.config.num_hidden_layers
        return torch.arange(self.config.hidden_size) / self.config.hidden_size, l / max(layers - 1, 1), 1 - l / layers

    def _init_mixing(self, module: nn.Module) -> None:
        """The token shift. The published weights are one minus the paper's mu: they weight the token itself."""
        ramp, r0, r1 = self._mixing_ramp(module)
        mix = {"time_mix_key": ramp**r1, "time_mix_receptance": ramp**r1}
        if isinstance(module, Rwkv5TimeMixing):
            mix["time_mix_value"] = ramp**r1 + 0.3 * r0
            mix["time_mix_receptance"] = mix["time_mix_gate"] = ramp ** (r1 / 2)
        for name, values in mix.items():
            init.copy_(getattr(module, name), values.view(1, 1, -1))

    @staticmethod
    def _init_projections(*projections: nn.Linear) -> None:
        for projection in projections:
            rows, columns = projection.weight.shape
            if rows > columns:
                init.orthogonal_(projection.weight, gain=rows / columns)
            else:
                init.kaiming_uniform_(projection.weight, a=5**0.5)  # the default of nn.Linear


class Rwkv5Model(Rwkv5PreTrainedModel):
    """The blocks of Eagle, without a head."""

    block_class = Rwkv5Block

    def __init__(self, config: Rwkv5Config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(self.block_class(config, i) for i in range(config.num_hidden_layers))
        self.ln_out = LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
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
        for block in self.blocks[: self.config.num_hidden_layers]:
            x = block(x, tokens, cache)
        return self.finish_forward(self.ln_out(x), tokens, cache, use_cache)


class Rwkv5ForCausalLM(CausalLMHead, RecurrentGenerationMixin, Rwkv5PreTrainedModel):
    """Eagle with a language modeling head."""

    model_class = Rwkv5Model
    lm_head_name = "head"
    _tp_plan = {"head": "colwise_gather_output"}
    _tied_weights_keys = {"head.weight": "rwkv.embeddings.weight"}

    def __init__(self, config: Rwkv5Config):
        super().__init__(config)
        self.rwkv = self.model_class(config)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class Rwkv5ForSequenceClassification(SequenceClassificationHead, Rwkv5PreTrainedModel):
    """Eagle with a linear classifier on the last token."""

    model_class = Rwkv5Model

    def __init__(self, config: Rwkv5Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.rwkv = self.model_class(config)
        self.score = Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


__all__ = ["Rwkv5ForCausalLM", "Rwkv5ForSequenceClassification", "Rwkv5Model", "Rwkv5PreTrainedModel"]
