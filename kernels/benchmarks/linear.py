"""
The product of a linear layer (linear), compared with torch's. On a CPU and without gradients it goes through
oneDNN; elsewhere both are the same function.
"""

import dataclasses
import itertools
from typing import Any

import torch.nn.functional as F
from benchmark import PLAIN, Case, Random, main
from torch import Tensor

from subquad_kernels import linear


OPERATOR = "linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Case):
    """A layer of `size` inputs, and four times as many outputs."""

    size: int = 2048

    results = ("out",)
    has_kernels = False
    sizes = {
        "small check": [{"size": 12, "length": length} for length in (1, 19)],
        "check": [{"size": 96, "length": length} for length in (1, 65)],
        "quick": [{"size": 12, "length": length} for length in (8, 16)],
        "cpu": [{"size": size, "length": length} for size, length in itertools.product((512, 2048), (64, 512))],
        "cuda": [{"length": length} for length in (512, 4096)],
        "step quick": [{"size": 12}],
        "step cpu": [{"size": size} for size in (512, 2048)],
        "step cuda": [{}],
    }

    def inputs(self, random: Random) -> dict[str, Tensor]:
        shapes = {"x": (self.batch, self.length, self.size), "weight": (4 * self.size, self.size)}
        inputs = {name: random.normal(*shape) for name, shape in shapes.items()}
        return {name: (x * self.size**-0.25).to(self.dtype) for name, x in inputs.items()}

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> Tensor:
        return F.linear(**inputs) if backend == "reference" else linear(**inputs)

    def others(self) -> dict[str, Any]:
        return {PLAIN: F.linear}

    def operations(self, training: bool) -> float:
        work = 2 * self.batch * self.length * 4 * self.size**2
        return 3 * work if training else work


if __name__ == "__main__":
    main(Linear)
