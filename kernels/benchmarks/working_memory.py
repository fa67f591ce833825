"""
The working memory of Gecko (working_memory), compared with one product per chunk in plain torch. "absorbs" is the step
of one token in a chunk at which the memory absorbs a chunk, which takes longer.
"""

import dataclasses
import functools
import math
from typing import Any

import torch
from benchmark import PLAIN, Random, main
from chunk_attention import Chunked
from torch import Tensor

from subquad_kernels import working_memory


OPERATOR = "working_memory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkingMemory(Chunked):
    absorbs: bool = False

    results = ("out", "memory", "normalizer")
    states = {"memory": "memory", "normalizer": "normalizer"}
    sizes = {
        which: [
            {**size, "absorbs": absorbs}
            for size in sizes
            # In two chunks nothing is absorbed.
            if "check" in which or "step" in which or size["length"] > 2 * size.get("chunk", Chunked.chunk)
            for absorbs in ((False, True) if size.get("length", 1) == 1 else (False,))
        ]
        for which, sizes in Chunked.sizes.items()
    }

    @property
    def name(self) -> str:
        return OPERATOR + " absorbs" * self.absorbs

    @functools.cached_property
    def positions(self) -> dict[str, Tensor]:
        """The chunks that leave attention, and the reads of each token."""
        number = self.number
        if self.is_step:
            return {"leaving": number if self.absorbs else number - 1, "begins": number - 1, "reads": number + 1}
        chunks = max((self.length - 1) // self.chunk - 1, 0)
        leaving = torch.arange(chunks, device=self.device).repeat(self.batch, 1) * self.chunk
        begins = torch.where(leaving == 0, 0, -1)
        return {"leaving": leaving, "begins": begins, "reads": torch.where(number > 1, number - 1, -1)}

    def inputs(self, random: Random) -> dict[str, Tensor]:
        inputs = super().inputs(random)
        if self.is_step:
            inputs["memory"] = random.normal(self.batch, self.heads, self.key, self.value)
            inputs["normalizer"] = inputs["memory"][..., 0] + math.log(self.chunk)
        return inputs

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> tuple[Tensor, ...]:
        inputs = {"memory": None, "normalizer": None, **inputs, **self.positions}
        return working_memory(**inputs, chunk_size=self.chunk, inplace=inplace, backend=backend)

    def others(self) -> dict[str, Any]:
        return {} if self.is_step else {PLAIN: self.plain}

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = (x.split(self.chunk, 2) for x in (q, k, v))
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

    def moved(self, inputs: dict[str, Tensor], out: Tensor, training: bool) -> float:
        """A step reads the memory, and if it absorbs a chunk, half of the keys and values, writes it too."""
        if not self.is_step:
            return super().moved(inputs, out, training)
        states = 4 * sum(inputs[name].numel() for name in self.states)
        given = sum(inputs[name].numel() for name in "qkv") * self.dtype.itemsize
        return 2 * states + given / 2 if self.absorbs else states

    def operations(self, training: bool) -> float:
        """Two products absorb a token, one reads."""
        work = 6 * self.batch * self.heads * self.key * self.value * max(self.length - 2 * self.chunk, 0)
        return 3 * work if training else work


if __name__ == "__main__":
    main(WorkingMemory)
