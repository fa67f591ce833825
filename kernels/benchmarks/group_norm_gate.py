"""The gated norm of the heads in Eagle and Finch (group_norm_gate), compared with plain torch."""

import dataclasses
from typing import Any

import torch.nn.functional as F
from benchmark import PLAIN, Case, Random, main
from torch import Tensor

from subquad_kernels import group_norm_gate


OPERATOR = "group_norm_gate"
EPS = 64e-5


def plain_norm(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    normed = F.layer_norm(x, x.shape[-1:], eps=EPS).flatten(-2).to(gate.dtype)
    return (normed * weight + bias) * F.silu(gate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupNormGate(Case):
    heads: int = 32
    size: int = 64

    results = ("out",)
    sizes = {
        "small check": [{"batch": 2, "heads": 3, "size": 8, "length": length} for length in (1, 19)],
        "check": [{"batch": 2, "heads": 3, "size": size, "length": 65} for size in (8, 64)],
        "GPU check": [{"length": 1000}],
        "quick": [{"heads": 2, "size": 8, "length": length} for length in (8, 40)],
        "cpu": [{"heads": 8, "length": length} for length in (1024, 4096)],
        "cuda": [{"batch": batch, "length": length} for batch, length in ((8, 4096), (1, 32768))],
        "step quick": [{"heads": 2, "size": 8}],
        "step cpu": [{"heads": 8}],
        "step cuda": [{"batch": batch} for batch in (1, 64)],
    }

    def inputs(self, random: Random) -> dict[str, Tensor]:
        """The scales of x differ from row to row, and it is float32, as wkv returns it in a model."""
        tokens, width = (self.batch, self.length), self.heads * self.size
        x = (3 + random.normal(*tokens, self.heads, self.size)) * random.normal(*tokens, self.heads, 1).exp()
        shapes = {"gate": (*tokens, width), "weight": (width,), "bias": (width,)}
        return {"x": x, **{name: random.normal(*shape).to(self.dtype) for name, shape in shapes.items()}}

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> Tensor:
        return group_norm_gate(**inputs, eps=EPS, backend=backend)

    def others(self) -> dict[str, Any]:
        return {PLAIN: plain_norm}


if __name__ == "__main__":
    main(GroupNormGate)
