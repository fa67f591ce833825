"""
Finch (RWKV-6), section 4.2 of "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence". It is Eagle
with a token shift and a decay that depend on the data; all else is inherited.
"""

import torch
from torch import nn
from transformers import initialization as init

from subquad_kernels import low_rank

from ...modeling.layers import token_shift
from ...modeling.tensor_parallel import low_rank_of_heads
from ..rwkv5.modeling_rwkv5 import (
    Rwkv5Block,
    Rwkv5ChannelMixing,
    Rwkv5ForCausalLM,
    Rwkv5ForSequenceClassification,
    Rwkv5Model,
    Rwkv5PreTrainedModel,
    Rwkv5TimeMixing,
)
from .configuration_rwkv6 import Rwkv6Config


class Rwkv6TimeMixing(Rwkv5TimeMixing):
    """Section 4.2.2: the linear attention, with a decay that depends on the data."""

    def add_mixing(self, config: Rwkv6Config) -> None:
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

    def mix(self, x: torch.Tensor, before: torch.Tensor | None, starts: torch.Tensor | None) -> list[torch.Tensor]:
        """Equations 14 and 15, ddlerp: the interpolation between a token and the one before depends on both."""
        lerp = token_shift(x, state=before, mu=self.time_maa_x[0], starts=starts)[0]
        offset = low_rank(lerp, self.time_maa_w1, self.time_maa_w2, "tanh")
        mu = torch.cat((self.time_maa_w, self.time_maa_k, self.time_maa_v, self.time_maa_r, self.time_maa_g))
        mixed = token_shift(x, state=before, mu=mu.squeeze(1), offset=offset, starts=starts)
        x_w, x_k, x_v, x_r, x_g = mixed.unbind()
        return [x_r, x_k, x_v, x_g, x_w]

    def log_decay(self, x: torch.Tensor) -> torch.Tensor:
        """Equations 17 and 18: log w, (batch, length, heads, head_size)."""
        down, up = self.time_decay_w1, self.time_decay_w2
        log_w = low_rank_of_heads(x, down, up, "tanh", base=self.time_decay, outer="exp", scale=-1, wide=True)
        return torch.unflatten(log_w, -1, (-1, self.head_size))


class Rwkv6ChannelMixing(Rwkv5ChannelMixing):
    """Section 4.1.3, as in Eagle."""

    def add_mixing(self, config: Rwkv6Config) -> None:
        self.time_maa_k = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.time_maa_r = nn.Parameter(torch.empty(1, 1, config.hidden_size))

    @property
    def mu(self) -> torch.Tensor:
        return torch.cat((self.time_maa_k, self.time_maa_r)).squeeze(1)


class Rwkv6Block(Rwkv5Block):
    time_mixing_class, channel_mixing_class = Rwkv6TimeMixing, Rwkv6ChannelMixing


class Rwkv6PreTrainedModel(Rwkv5PreTrainedModel):
    config: Rwkv6Config
    config_class = Rwkv6Config
    _no_split_modules = ["Rwkv6Block"]
    _can_record_outputs = {"hidden_states": Rwkv6Block}

    def _init_mixing(self, module: nn.Module) -> None:
        """Appendix H; these weights are the paper's mu."""
        ramp, r0, r1 = self._mixing_ramp(module)
        mu = 1 - ramp**r1
        mix = {"time_maa_k": mu, "time_maa_r": mu}
        if isinstance(module, Rwkv6TimeMixing):
            mix |= {"time_maa_x": mu, "time_maa_w": mu, "time_maa_v": mu - 0.3 * r0}
            mix["time_maa_r"] = mix["time_maa_g"] = 1 - ramp ** (r1 / 2)
            for name in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"):
                init.uniform_(getattr(module, name), -1e-4, 1e-4)
        for name, values in mix.items():
            init.copy_(getattr(module, name), values.view(1, 1, -1))


class Rwkv6Model(Rwkv6PreTrainedModel, Rwkv5Model):
    """The blocks of Finch, without a head."""

    block_class = Rwkv6Block


class Rwkv6ForCausalLM(Rwkv6PreTrainedModel, Rwkv5ForCausalLM):
    """Finch with a language modeling head."""

    model_class = Rwkv6Model


class Rwkv6ForSequenceClassification(Rwkv6PreTrainedModel, Rwkv5ForSequenceClassification):
    """Finch with a linear classifier on the last token."""

    model_class = Rwkv6Model


__all__ = ["Rwkv6ForCausalLM", "Rwkv6ForSequenceClassification", "Rwkv6Model", "Rwkv6PreTrainedModel"]
