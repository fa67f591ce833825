"""
Baselines: Eagle with one of two older memories, its predecessors (section 2 of "Eagle and Finch", arXiv:2404.05892),
and Goose with a memory that may flip the sign of its content.

`make_baseline` builds an Eagle and replaces the recurrence, its norm and its gate by an older memory, or a Goose and
removes more of the state's content. Embeddings, token shift, projections, channel mixing and norms stay, with the same
initial weights, so only the memory differs. The baselines can be trained and can read whole texts. They cannot
generate, because they do not keep a state.

`without` removes a part from a model if no field of the configuration does. The model keeps all of its functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from subquad import Rwkv5ForCausalLM, Rwkv7ForCausalLM
from subquad.modeling.protocols import NO_STATE, CallTokens
from subquad.models.rwkv5.modeling_rwkv5 import Rwkv5TimeMixing
from subquad_kernels import token_shift, wkv


NAMES = {"rwkv4": "RWKV-4 memory", "linear-attention": "Linear attention", "wide-goose": "Goose, eigenvalues from -1"}
BASES = {
    "rwkv4": "eagle",
    "linear-attention": "eagle",
    "wide-goose": "goose",
}  # baseline to the architecture it alters


def decayed_average(k: torch.Tensor, v: torch.Tensor, log_w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """
    Equation 2, for keys of any size, in float32 (in float64 if k is float64):

        wkv_t = (sum_{i<t} e^{(t-1-i) log_w + k_i} v_i + e^{u + k_t} v_t) / (the same with 1 instead of v)

    Both sums are divided by the largest e^{(t-1-i) log_w + k_i} so far, so that no exponential exceeds 1.

    Args:
        k, v: (batch, length, width).
        log_w, u: logarithm of the decay, at most 0, and bonus of the current token, (width).
    """
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    added = torch.stack((v.to(k.dtype), torch.ones_like(v, dtype=k.dtype)), dim=-2)
    with torch.no_grad():  # the quotient does not depend on the largest exponents
        largest = [torch.full_like(k[:, 0], -torch.inf)]
        for k_t in k.unbind(1):
            largest.append(torch.maximum(log_w + largest[-1], k_t))
        earlier, later = torch.stack(largest[:-1], dim=1), torch.stack(largest[1:], dim=1)
        top = torch.maximum(earlier, u + k)
    kept, written = (log_w + earlier - later).exp().unsqueeze(-2), (k - later).exp().unsqueeze(-2) * added
    sums = [torch.zeros_like(added[:, 0])]
    for kept_t, written_t in zip(kept.unbind(1), written.unbind(1), strict=True):
        sums.append(torch.addcmul(written_t, kept_t, sums[-1]))
    before = (earlier - top).exp().unsqueeze(-2) * torch.stack(sums[:-1], dim=1)
    numerator, denominator = (before + (u + k - top).exp().unsqueeze(-2) * added).unbind(-2)
    return numerator / denominator


class OlderTimeMixing(nn.Module):
    """A time mixing with another memory, and with Eagle's token shift and projections."""

    def __init__(self, eagle: Rwkv5TimeMixing):
        super().__init__()
        self.time_mix_receptance = eagle.time_mix_receptance
        self.time_mix_key, self.time_mix_value = eagle.time_mix_key, eagle.time_mix_value
        self.receptance, self.key, self.value = eagle.receptance, eagle.key, eagle.value
        self.output = eagle.output

    def forward(self, x: torch.Tensor, tokens, state=NO_STATE) -> torch.Tensor:
        if state is not NO_STATE:
            raise ValueError("`past_key_values` must be None and `use_cache` false: a baseline does not keep a state.")
        if tokens.mask is not None or tokens.starts is not None:
            raise ValueError("`attention_mask` and `cu_seqlens` must be None: a baseline reads one text per row.")
        mix = torch.cat((self.time_mix_receptance, self.time_mix_key, self.time_mix_value)).squeeze(1).float()
        x_r, x_k, x_v = token_shift(x, None, 1 - mix).unbind()
        out = self.remember(self.receptance(x_r), self.key(x_k), self.value(x_v))
        return self.output(out.to(x.dtype))


class Rwkv4TimeMixing(OlderTimeMixing):
    """RWKV-4: the memory has two numbers per channel, and the receptance gates its readout."""

    def __init__(self, eagle: Rwkv5TimeMixing, depth: float):
        super().__init__(eagle)
        width = eagle.key.weight.shape[0]
        channel = torch.arange(width)
        # The initial values of RWKV-4: from decays that last for a hundred tokens to decays that last for one.
        self.time_decay = nn.Parameter(-5 + 8 * (channel / (width - 1)) ** (0.7 + 1.3 * depth))
        self.time_first = nn.Parameter(-1.2 + 0.5 * ((channel + 1) % 3 - 1))

    def remember(self, r: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(r.float()) * decayed_average(k, v, -self.time_decay.exp(), self.time_first)


class LinearTimeMixing(OlderTimeMixing):
    """Linear attention: the average of all values so far, each weighted by phi(r) · phi(k), phi(x) = elu(x) + 1."""

    def __init__(self, eagle: Rwkv5TimeMixing, depth: float):
        super().__init__(eagle)
        self.heads = eagle.num_heads, eagle.head_size

    def remember(self, r: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        r, k = (1 + F.elu(x.float()).unflatten(-1, self.heads) for x in (r, k))
        v = F.pad(v.float().unflatten(-1, self.heads), (0, 1), value=1.0)  # the last column sums the weights
        out, _ = wkv(r, k, v, k.new_zeros(self.heads), k.new_ones(self.heads))
        return (out[..., :-1] / (out[..., -1:] + 1e-6)).flatten(-2)


MIXINGS = {"rwkv4": Rwkv4TimeMixing, "linear-attention": LinearTimeMixing}


Sequences = dict[str, torch.Tensor]


class ChangedTokens:
    """The tokens of a call, whose recurrence reads `change(sequences)`."""

    def __init__(self, tokens: CallTokens, change: Callable[[Sequences], Sequences]):
        self.tokens, self.change = tokens, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokens, name)

    def run_packed(self, operator: Callable, sequences: Sequences, *rest: Any, **arguments: Any) -> Any:
        return self.tokens.run_packed(operator, self.change(sequences), *rest, **arguments)


def change_sequences(mixing: nn.Module, change: Callable[[Sequences], Sequences]) -> RemovableHandle:
    """Makes the recurrence of a block read `change(sequences)`, after earlier changes."""
    return mixing.register_forward_pre_hook(
        lambda mixing, inputs: (inputs[0], ChangedTokens(inputs[1], change), *inputs[2:]), prepend=True
    )


def widen(sequences: Sequences) -> Sequences:
    """
    The sequences of Goose's recurrence with rates a multiplied by 1 + w. The eigenvalues of

        diag(w) - kappa (a * kappa)ᵀ,    kappa of length 1,

    are then at least -1 for any rates from 0 to 1 and decays w. Without it they are at least w - 1, above -0.455.
    """
    return {**sequences, "a": sequences["a"] * (1 + sequences["log_w"].exp())}


def make_baseline(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """A model of `BASES[name]` with this configuration, random weights, and the memory `name` in all of its blocks."""
    config.use_cache = False
    if BASES[name] == "goose":
        model = Rwkv7ForCausalLM(config)
        for block in model.rwkv7.blocks:
            change_sequences(block.att, widen)
        return model
    model = Rwkv5ForCausalLM(config)
    for layer, block in enumerate(model.rwkv.blocks):
        block.attention = MIXINGS[name](block.attention, depth=layer / max(config.num_hidden_layers - 1, 1))
    return model


def remember_nothing(remember: Callable[..., tuple], *inputs: Any) -> tuple:
    """Readouts of zeros from Gecko's working memory, and its states."""
    out, *states = remember(*inputs)
    return torch.zeros_like(out), *states


def drop_memory(model: PreTrainedModel) -> None:
    """Makes a Gecko read nothing from its working memory, so it only uses attention and CEMA."""
    for layer in model.model.layers:
        layer.mega.remember = partial(remember_nothing, layer.mega.remember)


def fix_decay(model: PreTrainedModel) -> None:
    """Makes a Finch's decays parameters, as in Eagle, without a data-dependent term (section 4.2.2)."""
    for block in model.rwkv.blocks:
        for weight in (block.attention.time_decay_w1, block.attention.time_decay_w2):
            weight.requires_grad_(False)
        with torch.no_grad():
            block.attention.time_decay_w2.zero_()


# Parts that no field of the configuration switches off.
PARTS: dict[str, Callable[[PreTrainedModel], None]] = {"working memory": drop_memory, "changing decay": fix_decay}


def without(part: str, model: PreTrainedModel) -> PreTrainedModel:
    """
    The model, altered in place, without a part of `PARTS`; with all parts if `part` is empty.

    Raises:
        ValueError: if there is no such part.
    """
    if part and part not in PARTS:
        raise ValueError(f"`part` must be one of {', '.join(PARTS)}, got {part!r}.")
    if part:
        PARTS[part](model)
    return model
