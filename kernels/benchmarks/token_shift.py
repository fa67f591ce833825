"""The token shifts of Eagle (of four inputs) and of Finch (of five, with offsets), compared with plain torch."""

import dataclasses
import itertools
from typing import Any

import torch.nn.functional as F
from benchmark import PLAIN, Case, Random, main
from torch import Tensor

from subquad_kernels import token_shift


OPERATOR = "token_shift"
FINCH = {"shifts": 5, "offsets": True}


def plain_shift(x: Tensor, mu: Tensor, offset: Tensor | None = None, state: Tensor | None = None) -> Tensor:
    previous = F.pad(x[:, :-1], (0, 0, 1, 0)) if state is None else state[:, None]
    weights = mu[:, None, None] if offset is None else mu[:, None, None] + offset
    return x + (previous - x) * weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenShift(Case):
    size: int = 2048
    shifts: int = 4
    offsets: bool = False

    results = ("out",)
    sizes = {
        "small check": [
            {"batch": 2, "size": 24, "length": length, **how}
            for length, how in itertools.product((1, 19), ({}, FINCH))
        ],
        "check": [
            {"batch": 2, "size": 136, "length": length, **how}
            for length, how in itertools.product((1, 65, 200), ({}, FINCH))
        ],
        "quick": [{"size": 24, "length": length, **how} for length, how in itertools.product((8, 40), ({}, FINCH))],
        "cpu": [
            {"size": 512, "length": length, **how} for length, how in itertools.product((1024, 4096), ({}, FINCH))
        ],
        "cuda": [
            {"batch": batch, "length": length, **how}
            for (batch, length), how in itertools.product(((8, 4096), (1, 32768)), ({}, FINCH))
        ],
        "step quick": [{"size": 24, "batch": 2}],
        "step cpu": [{"size": 512, **how} for how in ({}, FINCH)],
        "step cuda": [{"batch": batch, **how} for batch, how in itertools.product((1, 64), ({}, FINCH))],
    }

    @property
    def name(self) -> str:
        return f"{OPERATOR} {self.shifts}{' with offsets' * self.offsets}"

    def inputs(self, random: Random) -> dict[str, Tensor]:
        x, mu = random.normal(self.batch, self.length, self.size), random.uniform(self.shifts, self.size)
        inputs = {"x": x.to(self.dtype), "mu": mu.to(self.dtype)}
        if self.offsets:
            inputs["offset"] = (random.normal(self.shifts, *x.shape) / 10).to(self.dtype)
        if self.is_step:
            inputs["state"] = random.normal(self.batch, self.size).to(self.dtype)
        return inputs

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> Tensor:
        return token_shift(**{"state": None, **inputs}, backend=backend)

    def others(self) -> dict[str, Any]:
        return {PLAIN: plain_shift}


if __name__ == "__main__":
    main(TokenShift)
