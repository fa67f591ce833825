"""
The sliding chunk attention of Gecko (chunk_attention and its step), compared with scaled_dot_product_attention with a
mask over each chunk and the one before, and on a GPU flex_attention. It is plain torch on a GPU too, but for a single
token.
"""

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from benchmark import PLAIN, Case, Random, main
from torch import Tensor

from subquad_kernels import chunk_attention, chunk_attention_step


OPERATOR = "chunk_attention"
FLEX = "flex_attention"
SMALL = {"heads": 2, "key": 4, "value": 6, "chunk": 8}
CHECKED = {"batch": 2, "heads": 2, "key": 32, "value": 96, "chunk": 16}
CPU = {"key": 64, "value": 512, "chunk": 256}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunked(Case):
    """Chunks of tokens, whose keys and values have different sizes: Gecko 7B's by default."""

    heads: int = 4
    key: int = 256
    value: int = 2048
    chunk: int = 2048

    tolerances = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
    sizes = {
        "small check": [
            {"heads": 2, "key": 2, "value": 4, "chunk": 4, "length": 1},
            {"heads": 2, "key": 2, "value": 4, "chunk": 4, "length": 19},
        ],
        "check": [{**CHECKED, "length": length} for length in (1, 65, 200)],
        "GPU check": [{"chunk": 64, "length": 1}, {"chunk": 64, "length": 300}, {"length": 6149}],
        "quick": [{**SMALL, "length": length} for length in (20, 40)],
        "cpu": [{**CPU, "length": length} for length in (1024, 4096)],
        "cuda": [{"batch": batch, "length": length} for batch, length in ((8, 4096), (2, 16384), (1, 32768))],
        "step quick": [{**SMALL, "batch": 2}],
        "step cpu": [CPU],
        "step cuda": [{"batch": batch} for batch in (1, 32)],
    }

    @property
    def size(self) -> int:
        return self.value

    @property
    def number(self) -> Tensor:
        """Of the chunk of each token."""
        return torch.arange(self.length, device=self.device).expand(self.batch, -1) // self.chunk

    def inputs(self, random: Random) -> dict[str, Tensor]:
        """Scores are around 1. Heads lie next to features, as in a model. One token comes with two chunks of keys."""
        keys, scale = 2 * self.chunk if self.is_step else self.length, self.key**-0.25
        shapes = {"q": (self.length, self.key), "k": (keys, self.key), "v": (keys, self.value)}
        return {
            name: (random.normal(self.batch, length, self.heads, size) * (1 if name == "v" else scale))
            .to(self.dtype)
            .transpose(1, 2)
            for name, (length, size) in shapes.items()
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkAttention(Chunked):
    results = ("out",)
    exact = (PLAIN, FLEX)
    has_kernels = False  # but for a single token

    @property
    def mask(self) -> Tensor:
        return torch.ones(1, 2 * self.chunk, dtype=torch.bool, device=self.device)

    @functools.cached_property
    def first(self) -> Tensor:
        """The first key that a token sees."""
        return (self.number - 1).clamp(min=0) * self.chunk

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> Tensor:
        if not self.is_step:
            return chunk_attention(**inputs, first=self.first, chunk_size=self.chunk, aligned=True, backend=backend)
        if backend == "reference":
            return F.scaled_dot_product_attention(*inputs.values(), attn_mask=self.mask, scale=1.0)
        return chunk_attention_step(**inputs, mask=self.mask)

    def others(self) -> dict[str, Any]:
        if self.is_step:
            return {}
        return {PLAIN: self.plain} if self.device == "cpu" else {PLAIN: self.plain, FLEX: self.flexible}

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chunk, length = self.chunk, q.shape[2]
        rest = -length % chunk
        q, k, v = (F.pad(x, (0, 0, 0, rest)).flatten(0, 1).unflatten(1, (-1, chunk)) for x in (q, k, v))
        k, v = (torch.cat((F.pad(x[:, :-1], (0, 0, 0, 0, 1, 0)), x), 2) for x in (k, v))
        number, token, key = (torch.arange(n, device=q.device) for n in (q.shape[1], chunk, 2 * chunk))
        mask = (key <= chunk + token[:, None]) & ((number[:, None, None] > 0) | (key >= chunk))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return out.flatten(1, 2)[:, :length].unflatten(0, (self.batch, self.heads))

    @functools.cached_property
    def flex(self) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def sees(b, h, token, key):
            return (key <= token) & (key // self.chunk >= token // self.chunk - 1)

        mask = create_block_mask(sees, None, None, self.length, self.length, device=self.device)
        return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask, scale=1.0)

    def flexible(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.flex(q, k, v)

    def operations(self, training: bool) -> float:
        if self.is_step:
            return 0
        seen = torch.arange(1, self.length + 1, device=self.device) - self.first[0]
        work = 2 * self.batch * self.heads * (self.key + self.value) * seen.sum().item()
        return 3 * work if training else work


if __name__ == "__main__":
    main(ChunkAttention)
