"""
The dynamic layers of Avey-B (dynamic_mixing), compared with the published ones in plain torch. The forward pass works
in place.
"""

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from benchmark import PLAIN, Random, main
from static_mixing import Mixing
from torch import Tensor

from subquad_kernels import dynamic_mixing


OPERATOR = "dynamic_mixing"
EPS = 1e-12
NORMALIZATIONS = ("l1", "sum")


def plain_dynamic(features: Tensor, width: int, normalization: str, eps: float) -> Tensor:
    x, gate, head = features.split((width, width, features.shape[-1] - 2 * width), -1)
    if normalization == "l1":
        y = F.normalize(x, dim=-1, eps=eps)
        similar = F.normalize(y @ y.mT, p=1, dim=-1, eps=eps)
    else:
        y = x / (x.square().sum(-1, keepdim=True) + eps).sqrt()
        similar = y @ y.mT
        similar = similar / (similar.sum(-1, keepdim=True) + eps)
    return torch.cat((gate * (similar @ x), head), -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicMixing(Mixing):
    normalization: str = "l1"

    sizes = {
        which: [{**size, "normalization": n} for size in sizes for n in NORMALIZATIONS[: 2 if "check" in which else 1]]
        for which, sizes in Mixing.sizes.items()
    }

    @property
    def name(self) -> str:
        return f"{OPERATOR} {self.normalization}"

    def inputs(self, random: Random) -> dict[str, Tensor]:
        if self.normalization == "l1":
            return super().inputs(random)
        features = random.normal(self.batch, self.length, self.features).relu().square()
        return {"features": features.to(self.dtype)}

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> Tensor:
        how = {"normalization": self.normalization, "eps": EPS, "inplace": inplace, "backend": backend}
        return dynamic_mixing(**inputs, width=self.size, **how)

    def others(self) -> dict[str, Any]:
        return {PLAIN: functools.partial(plain_dynamic, width=self.size, normalization=self.normalization, eps=EPS)}

    def operations(self, training: bool) -> float:
        """Of the similarities one half; of their gradient, which is symmetric too, one product."""
        work = self.product + self.batch * self.length * (self.length + 1) * self.size
        return work + 3 * self.product if training else work


if __name__ == "__main__":
    main(DynamicMixing)
