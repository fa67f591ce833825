"""The norm of Gecko over time (timestep_decay_norm), compared with one of cumulative sums in plain torch."""

import dataclasses
import math
from typing import Any

import torch
from benchmark import PLAIN, Case, Random, main
from torch import Tensor

from subquad_kernels import timestep_decay_norm


OPERATOR = "timestep_decay_norm"
BETAS, EPS = (0.999, 0.9999), 1e-5
SMALL = {"size": 16, "groups": 2}
CHECKED = {"batch": 2, "size": 128, "groups": 4}
CPU = {"size": 1024, "groups": 16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimestepDecayNorm(Case):
    """The sizes of Gecko 7B unless others are given."""

    size: int = 4096
    groups: int = 64

    states = {"initial_state": "state"}
    tolerances = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
    sizes = {
        "small check": [{**SMALL, "length": length} for length in (1, 19)],
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
        inputs = {"x": random.normal(self.batch, self.length, self.size).to(self.dtype)}
        inputs |= {name: (random.normal(self.size) / 10).to(self.dtype) for name in ("weight", "bias")}
        if self.is_step:
            moments = random.normal(self.batch, 3, self.groups).abs()
            moments[:, 2] = 8192  # tokens
            inputs["initial_state"] = moments
        return inputs

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> tuple[Tensor, ...]:
        how = {"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "inplace": inplace, "backend": backend}
        return timestep_decay_norm(**inputs, groups=self.groups, **how)

    def others(self) -> dict[str, Any]:
        return {} if self.is_step else {PLAIN: self.plain}

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (self.groups, -1))
        variance, mean = torch.var_mean(groups, -1, correction=0)
        number, averages = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None], []
        for values, beta in zip((mean, variance), BETAS, strict=True):
            decay = (number * math.log(beta)).exp()
            sums = (values / decay).cumsum(1) * decay * (1 - beta)
            averages.append((sums / -torch.expm1(number * math.log(beta))).unsqueeze(-1))
        mean, variance = averages
        return (((groups - mean) * (variance + EPS).rsqrt()).flatten(-2) * (weight + 1) + bias).to(x.dtype)


if __name__ == "__main__":
    main(TimestepDecayNorm)
