"""
The contextualizer of Avey, compared with the published one in plain torch, which makes windows x rows x rows tensors.
"""

import dataclasses
import itertools
from typing import Any

import torch
from benchmark import PLAIN, Case, Random, main
from torch import Tensor

from subquad_kernels import contextualizer


OPERATOR = "contextualizer"


def plain_contextualizer(z: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Computes all rows of z (W, C, H), and returns the rows that have a gate."""
    y = z / (z.square().sum(-1, keepdim=True) + 1e-8).sqrt()
    mixed = (v.tril() * (y @ y.mT)).to(z.dtype) @ z
    return mixed[:, -gate.shape[1] :] * gate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contextualizer(Case):
    """`batch` windows of `context` rows, of which all but the last `length` are missing."""

    context: int = 512
    length: int = 512
    queries: int = 512
    size: int = 768
    wide: bool = False  # float32 weights, as under autocast

    results = ("out",)
    sizes = {
        "small check": [
            {"batch": batch, "context": context, "length": length, "queries": queries, "size": size}
            for batch, context, length, queries, size in (
                (1, 1, 1, 1, 8),
                (3, 80, 80, 80, 40),
                (3, 80, 33, 33, 40),
                (2, 72, 50, 7, 64),
            )
        ],
        "GPU check": [
            {"size": 2048, "wide": True},
            *(
                {"batch": batch, "size": size, "wide": True, "compared": PLAIN}
                for batch, size in ((256, 768), (40, 2048))
            ),
        ],
        "quick": [{"batch": 2, "context": 32, "length": 32, "queries": 32, "size": 16}],
        "cpu": [{"batch": batch, "size": size} for batch, size in itertools.product((4, 16), (768, 2048))],
        "cuda": [{"batch": batch, "size": size} for batch, size in itertools.product((32, 256), (768, 2048))],
        "step quick": [{"context": 32, "length": 32, "queries": 1, "size": 16}],
        "step cpu": (steps := [{"size": size, "queries": n} for size, n in itertools.product((768, 2048), (1, 64))]),
        "step cuda": steps,
    }
    sizes["check"] = [
        *sizes["small check"],
        *({"length": length, "queries": n, "wide": True} for length, n in ((512, 512), (128, 128), (512, 1))),
    ]

    @property
    def name(self) -> str:
        last = f" last {self.queries}" if self.is_step else ""
        return f"{OPERATOR} {self.size}{last}"

    @property
    def is_step(self) -> bool:
        return self.queries < self.length

    def inputs(self, random: Random) -> dict[str, Tensor]:
        """z and the gate are parts of wider rows, as in a model, which makes them by relu(x)²."""
        tail = random.normal(self.batch, self.length, 2 * self.size).relu().square().to(self.dtype)
        z, gate = tail.split(self.size, -1)
        v = random.normal(self.context, self.context) / self.context**0.5
        inputs = {"z": z, "v": v.to(torch.float32 if self.wide else self.dtype), "gate": gate[:, -self.queries :]}
        if self.length < self.context:
            inputs["prefix"] = random.normal(self.context - self.length, self.size).to(self.dtype)
        return inputs

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> Tensor:
        return contextualizer(**inputs, queries=self.queries, backend=backend)

    def others(self) -> dict[str, Any]:
        return {PLAIN: plain_contextualizer} if self.length == self.context else {}

    def operations(self, training: bool) -> float:
        """Of the two products, on and below the diagonal."""
        context, before = self.context, self.context - self.queries
        work = 2 * self.batch * self.size * (context * (context + 1) - before * (before + 1))
        return 3 * work if training else work


if __name__ == "__main__":
    main(Contextualizer)
