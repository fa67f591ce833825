"""
The static layers of Avey-B (static_mixing), compared with the published ones in plain torch. The forward pass works in
place.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from benchmark import PLAIN, Case, Random, main
from torch import Tensor

from subquad_kernels import static_mixing


OPERATOR = "static_mixing"


def plain_static(features: Tensor, v: Tensor, width: int) -> Tensor:
    x, gate, head = features.split((width, width, features.shape[-1] - 2 * width), -1)
    return torch.cat((gate * (v.to(x.dtype) @ x), head), -1)


def windows(*shapes: tuple[int, int, int, int], **fields: Any) -> Iterator[dict[str, Any]]:
    """Of shapes (windows, rows, features, width)."""
    for shape in shapes:
        yield dict(zip(("batch", "length", "features", "size"), shape, strict=True)) | fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixing(Case):
    """Windows of `length` rows of `features` values, of which `size` are mixed and `size` gate them."""

    length: int = 256
    features: int = 3072
    size: int = 768

    results = ("out",)
    is_step = False
    inplace = True
    sizes = {
        "small check": [*windows((2, 9, 24, 8))],
        "check": [
            *windows((1, 1, 2, 1), (3, 40, 100, 40), (2, 33, 66, 33), (2, 72, 256, 64)),
            *windows((1, 256, 3072, 768)),
        ],
        "GPU check": [
            *windows((2, 256, 4096, 1024), (2, 1024, 3072, 768)),
            *windows((300, 256, 3072, 768), (160, 256, 4096, 1024), compared=PLAIN),
        ],
        "quick": [*windows((2, 8, 64, 16))],
        "cpu": [*windows(*((n, 256, 4 * size, size) for n, size in itertools.product((4, 16), (768, 1024))))],
        "cuda": [*windows(*((n, 256, 4 * size, size) for n, size in itertools.product((64, 1024), (768, 1024))))],
    }

    def inputs(self, random: Random) -> dict[str, Tensor]:
        """As the enricher's activation makes them."""
        features = F.gelu(random.normal(self.batch, self.length, self.features))
        return {"features": features.to(self.dtype)}

    def written(
        self, held: dict[str, Tensor], inputs: dict[str, Tensor], expected: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """The result is where the gate was, and what lies before the gate is as it was."""
        before, after = held["features"].tensor_split((self.size,), -1)
        return {
            "gate in place": (after, expected["out"]),
            "x in place": (before, inputs["features"][..., : self.size]),
        }

    @property
    def product(self) -> float:
        """Operations of a product of weights and rows."""
        return 2 * self.batch * self.length**2 * self.size

    def moved(self, inputs: dict[str, Tensor], out: Tensor, training: bool) -> float:
        value = self.batch * self.length * self.dtype.itemsize
        if not training:
            return 3 * self.size * value
        return (2 * self.features + 2 * (self.features - self.size) + 2 * self.size) * value


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticMixing(Mixing):
    def inputs(self, random: Random) -> dict[str, Tensor]:
        return {**super().inputs(random), "v": random.normal(self.length, self.length) / self.length**0.5}

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> Tensor:
        return static_mixing(**inputs, width=self.size, inplace=inplace, backend=backend)

    def others(self) -> dict[str, Any]:
        return {PLAIN: functools.partial(plain_static, width=self.size)}

    def operations(self, training: bool) -> float:
        return 3 * self.product if training else self.product


if __name__ == "__main__":
    main(StaticMixing)
