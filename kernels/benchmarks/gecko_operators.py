"""
The operators of Gecko as gecko.py measures them: sizes, inputs, calls, and what one would write first in plain torch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measuring import size_of
from torch import Tensor

from subquad_kernels import cema, chunk_attention, chunk_attention_step, timestep_decay_norm, working_memory


NORM, CEMA, ATTENTION, MEMORY = OPERATORS = ("norm", "cema", "attention", "memory")
BETAS, EPS = (0.999, 0.9999), 1e-5
STATES = ("initial_state", "memory", "normalizer")  # before a token, and in place after it


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a text from its beginning, or of one token after many."""

    batch: int
    length: int
    width: int
    states: int
    groups: int
    heads: int
    key: int
    value: int
    chunk: int
    dtype: torch.dtype
    device: str
    absorbs: bool = False  # whether a chunk leaves at the one token

    @property
    def row(self) -> dict[str, Any]:
        row = {"batch": self.batch, "length": self.length, "heads": self.heads, "size": self.width}
        return {**row, "dtype": str(self.dtype).removeprefix("torch.")}

    @functools.cached_property
    def places(self) -> dict[str, dict[str, Tensor]]:
        """What attention and memory are told of the tokens."""
        number = torch.arange(self.length, device=self.device).expand(self.batch, -1) // self.chunk
        if self.length == 1:
            leaving, begins, reads = number if self.absorbs else number - 1, number - 1, number + 1
            seen = {"mask": torch.ones(1, 2 * self.chunk, dtype=torch.bool, device=self.device)}
        else:
            chunks = max((self.length - 1) // self.chunk - 1, 0)
            leaving = torch.arange(chunks, device=self.device).repeat(self.batch, 1) * self.chunk
            begins, reads = torch.where(leaving == 0, 0, -1), torch.where(number > 1, number - 1, -1)
            seen = {"first": (number - 1).clamp(min=0) * self.chunk}
        return {ATTENTION: seen, MEMORY: {"leaving": leaving, "begins": begins, "reads": reads}}

    def inputs(self, operator: str, seed: int = 0) -> dict[str, Tensor]:
        """As in a model: heads next to features, scores around 1, averages over few tokens and over thousands."""
        generator = torch.Generator(self.device).manual_seed(seed)
        one, states, channels = self.length == 1, {}, (self.width, self.states)

        def randn(*shape):
            return torch.randn(shape, generator=generator, device=self.device)

        if operator in (ATTENTION, MEMORY):
            keys, scale = 2 * self.chunk if one else self.length, self.key**-0.25
            q, k = (scale * randn(self.batch, length, self.heads, self.key) for length in (self.length, keys))
            v = randn(self.batch, keys, self.heads, self.value)
            inputs = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
            if operator == MEMORY:
                memory = randn(self.batch, self.heads, self.key, self.value)
                states = {"memory": memory, "normalizer": memory[..., 0] + math.log(self.chunk)}
        else:
            inputs = {"x": randn(self.batch, self.length, self.width)}
            if operator == NORM:
                inputs |= {name: randn(self.width) / 10 for name in ("weight", "bias")}
                moments = randn(self.batch, 3, self.groups).abs()
                moments[:, 2] = 4 * self.chunk  # tokens
                states = {"initial_state": moments}
            else:
                inputs |= {"alpha": 2 * randn(*channels), "delta": 2 * randn(*channels), "theta": randn(self.width)}
                inputs["gamma"] = randn(*channels, 2) * self.states**-0.5
                states = {"initial_state": randn(self.batch, *channels, 2)}
        return {name: x.to(self.dtype) for name, x in inputs.items()} | (states if one else {})

    def work(self, operator: str, inputs: dict[str, Tensor], training: bool) -> tuple[float, float]:
        """Bytes that are moved once, and operations of matrix products."""
        given, multiplied, tokens = size_of(*inputs.values()), 0, self.batch * self.heads * self.value
        if self.length == 1:
            states = size_of(*(inputs[name] for name in STATES if name in inputs))
            if operator == MEMORY:  # is only read where no chunk, half of the rings, is absorbed
                return 2 * states + (given - states) / 2 if self.absorbs else states, 0
            return given + states, 0
        if operator == ATTENTION:
            seen = torch.arange(1, self.length + 1, device=self.device) - self.places[ATTENTION]["first"][0]
            multiplied = 2 * tokens * (1 + self.key / self.value) * seen.sum().item()
        elif operator == MEMORY:  # two products absorb a token, one reads
            multiplied = 6 * tokens * self.key * (self.length - 2 * self.chunk)
        out = size_of(inputs["v" if "v" in inputs else "x"])
        return (3 * given + 2 * out, 3 * multiplied) if training else (given + out, multiplied)


# What is measured: functions of the inputs by name.


def ours(operator: str, sizes: Sizes, backend: str, **inputs: Tensor) -> tuple[Tensor, ...]:
    """Output and states, of one token in place."""
    how = {"backend": backend, "inplace": sizes.length == 1}
    if operator == NORM:
        return timestep_decay_norm(**inputs, groups=sizes.groups, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, **how)
    if operator == CEMA:
        return cema(**inputs, **how)
    places = sizes.places[operator]
    if operator == MEMORY:
        inputs = {"memory": None, "normalizer": None, **inputs, **places}
        return working_memory(**inputs, chunk_size=sizes.chunk, **how)
    if sizes.length > 1:
        backend = "eager" if backend == "triton" else backend  # there are no kernels
        return (chunk_attention(**inputs, **places, chunk_size=sizes.chunk, aligned=True, backend=backend),)
    if backend == "reference":
        return (F.scaled_dot_product_attention(*inputs.values(), attn_mask=places["mask"], scale=1.0),)
    return (chunk_attention_step(**inputs, **places),)


def plain_norm(sizes: Sizes, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups = x.float().unflatten(-1, (sizes.groups, -1))
    variance, mean = torch.var_mean(groups, -1, correction=0)
    number, averages = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None], []
    for values, beta in zip((mean, variance), BETAS, strict=True):
        decay = (number * math.log(beta)).exp()
        sums = (values / decay).cumsum(1) * decay * (1 - beta)
        averages.append((sums / -torch.expm1(number * math.log(beta))).unsqueeze(-1))
    mean, variance = averages
    return (((groups - mean) * (variance + EPS).rsqrt()).flatten(-2) * (weight + 1) + bias).to(x.dtype)


def plain_cema(sizes: Sizes, x: Tensor, alpha: Tensor, delta: Tensor, theta: Tensor, gamma: Tensor) -> Tensor:
    length, time = x.shape[1], torch.arange(x.shape[1], device=x.device)
    a, d, share = alpha.float().sigmoid(), delta.float().sigmoid(), theta.float().sigmoid()
    number = torch.arange(1, sizes.states + 1, device=x.device)
    angle = (share[:, None] * number * (2 * math.pi / sizes.states)).unsqueeze(-1) * time
    modulus = (torch.log1p(-a * d).unsqueeze(-1) * time).exp()
    re, im = ((a * part).unsqueeze(-1) for part in gamma.float().unbind(-1))
    kernel = (modulus * (re * angle.cos() - im * angle.sin())).sum(1)
    spectrum = torch.fft.rfft(kernel, n=2 * length) * torch.fft.rfft(x.float().mT, n=2 * length)
    return torch.fft.irfft(spectrum, n=2 * length)[..., :length].mT.to(x.dtype)


def plain_attention(sizes: Sizes, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    chunk, length = sizes.chunk, q.shape[2]
    rest = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, rest)).flatten(0, 1).unflatten(1, (-1, chunk)) for x in (q, k, v))
    k, v = (torch.cat((F.pad(x[:, :-1], (0, 0, 0, 0, 1, 0)), x), 2) for x in (k, v))
    number, token, key = (torch.arange(n, device=q.device) for n in (q.shape[1], chunk, 2 * chunk))
    mask = (key <= chunk + token[:, None]) & ((number[:, None, None] > 0) | (key >= chunk))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return out.flatten(1, 2)[:, :length].unflatten(0, (sizes.batch, sizes.heads))


def plain_memory(sizes: Sizes, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries, keys, values = (x.split(sizes.chunk, 2) for x in (q, k, v))
    outs, memory, z = [torch.zeros_like(x) for x in values[:2]], None, None
    for query, key, value in zip(queries[2:], keys, values, strict=False):
        key, before = key.float(), z
        z = key.logsumexp(2)
        if memory is not None:
            z = torch.logaddexp(before, z)
            value = value - key.softmax(-1).to(v.dtype) @ memory.to(v.dtype)
        added = (key - z.unsqueeze(2)).exp().to(v.dtype).mT @ value
        memory = added.float() if memory is None else (before - z).exp().unsqueeze(-1) * memory + added
        outs.append(query.float().softmax(-1).to(v.dtype) @ memory.to(v.dtype))
    return torch.cat(outs, 2)


PLAIN_FORMS = dict(zip(OPERATORS, (plain_norm, plain_cema, plain_attention, plain_memory), strict=True))


def flex(sizes: Sizes) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(b, h, token, key):
        return (key <= token) & (key // sizes.chunk >= token // sizes.chunk - 1)

    def attend(q, k, v):
        return compiled(q, k, v, block_mask=mask, scale=1.0)

    mask = create_block_mask(sees, None, None, sizes.length, sizes.length, device=sizes.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return attend
