"""The complex moving averages of Gecko (cema), compared with a convolution by FFT in plain torch."""

import dataclasses
import math
from typing import Any

import torch
from benchmark import PLAIN, Case, Random, main
from torch import Tensor

from subquad_kernels import cema


OPERATOR = "cema"
SMALL = {"size": 16, "averages": 4}
CHECKED = {"batch": 2, "size": 128, "averages": 16}
CPU = {"size": 1024}


def plain_cema(x: Tensor, alpha: Tensor, delta: Tensor, theta: Tensor, gamma: Tensor) -> Tensor:
    length, averages = x.shape[1], alpha.shape[1]
    time, number = torch.arange(length, device=x.device), torch.arange(1, averages + 1, device=x.device)
    a, d, share = alpha.float().sigmoid(), delta.float().sigmoid(), theta.float().sigmoid()
    angle = (share[:, None] * number * (2 * math.pi / averages)).unsqueeze(-1) * time
    modulus = (torch.log1p(-a * d).unsqueeze(-1) * time).exp()
    re, im = ((a * part).unsqueeze(-1) for part in gamma.float().unbind(-1))
    kernel = (modulus * (re * angle.cos() - im * angle.sin())).sum(1)
    spectrum = torch.fft.rfft(kernel, n=2 * length) * torch.fft.rfft(x.float().mT, n=2 * length)
    return torch.fft.irfft(spectrum, n=2 * length)[..., :length].mT.to(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cema(Case):
    """The sizes of Gecko 7B unless others are given."""

    size: int = 4096
    averages: int = 16

    states = {"initial_state": "state"}
    tolerances = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
    sizes = {
        "small check": [{"size": 8, "averages": 2, "length": length} for length in (1, 19)],
        "check": [{**CHECKED, "length": length} for length in (1, 65, 200)],
        "GPU check": [{"length": length} for length in (1, 300)],
        "quick": [{**SMALL, "length": length} for length in (12, 40)],
        "cpu": [{**CPU, "length": length} for length in (1024, 4096)],
        "cuda": [{"batch": batch, "length": length} for batch, length in ((8, 4096), (2, 16384), (1, 32768))],
        "step quick": [{**SMALL, "batch": 2}],
        "step cpu": [CPU],
        "step cuda": [{"batch": batch} for batch in (1, 32)],
    }

    def inputs(self, random: Random) -> dict[str, Tensor]:
        """Averages over few tokens and over thousands."""
        channels = self.size, self.averages
        inputs = {
            "x": random.normal(self.batch, self.length, self.size),
            "alpha": 2 * random.normal(*channels),
            "delta": 2 * random.normal(*channels),
            "theta": random.normal(self.size),
            "gamma": random.normal(*channels, 2) * self.averages**-0.5,
        }
        inputs = {name: x.to(self.dtype) for name, x in inputs.items()}
        if self.is_step:
            inputs["initial_state"] = random.normal(self.batch, *channels, 2)
        return inputs

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> tuple[Tensor, ...]:
        return cema(**inputs, inplace=inplace, backend=backend)

    def others(self) -> dict[str, Any]:
        return {} if self.is_step else {PLAIN: plain_cema}


if __name__ == "__main__":
    main(Cema)
