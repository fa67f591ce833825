"""The time mixing of Goose (delta_wkv), compared with flash-linear-attention (on a GPU, if it can be imported)."""

import dataclasses
import math
from typing import Any

import torch.nn.functional as F
from benchmark import FLA, Case, Peer, Random, main
from measuring import load_fla
from torch import Tensor, bfloat16, float32

from subquad_kernels import delta_wkv


OPERATOR = "delta_wkv"
CHECKED = {"batch": 2, "heads": 2, "carried": True}


def for_fla(
    r: Tensor, k: Tensor, v: Tensor, log_w: Tensor, kappa: Tensor, a: Tensor, initial_state: Tensor | None = None
) -> dict[str, Any]:
    inputs = {"r": r, "w": log_w.to(k.dtype), "k": k, "v": v, "a": -kappa, "b": a * kappa}
    return inputs if initial_state is None else {**inputs, "initial_state": initial_state.mT.contiguous()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaWkv(Case):
    heads: int = 64
    size: int = 64

    states = {"initial_state": "state"}
    # The gradient of a decay is a difference of what is read from its token on and what is written there.
    tolerances = {float32: 1e-5, bfloat16: 1e-2}
    most_reference = 8192
    sizes = {
        "small check": [
            {"heads": 1, "size": 16, "length": 1},
            {"heads": 1, "size": 16, "length": 19},
            {"heads": 1, "size": 16, "length": 19, "documents": (0, 3, 3, 19), "carried": True},
        ],
        "check": [
            *({**CHECKED, "length": length} for length in (1, 63, 65, 200)),
            {"batch": 2, "heads": 2, "length": 200},
            {**CHECKED, "batch": 1, "length": 201, "documents": (0, 3, 3, 67, 68, 201)},
        ],
        # The kernels cut long texts of few heads into segments, and walk through texts of many heads.
        "GPU check": [
            {**CHECKED, "length": 1000},
            {**CHECKED, "batch": 1, "length": 1400, "documents": (0, 700, 701, 1400)},
            {**CHECKED, "batch": 1, "length": 600, "heads": 300, "size": 32},
            *({**CHECKED, "length": length, "size": size} for length in (150, 1100) for size in (128, 256)),
        ],
        "quick": [{"heads": 2, "size": 16, "length": 32}, {"heads": 2, "size": 16, "length": 64}],
        "cpu": [{"heads": 8, "length": length} for length in (64, 256, 1024, 4096)],
        "cuda": [
            *({"batch": 8, "length": length} for length in (1024, 4096, 16384)),
            *({"length": length} for length in (1024, 4096, 16384, 65536)),
        ],
        "step quick": [{"heads": 2, "size": 16}],
        "step cpu": [{"heads": 8, "batch": batch} for batch in (1, 4)],
        "step cuda": [{"batch": batch} for batch in (1, 8, 64, 256)],
    }

    def inputs(self, random: Random) -> dict[str, Tensor]:
        """The log decays are float32, as in a model, but numbers that the dtype can represent."""
        tokens = self.batch, self.length, self.heads, self.size
        inputs = {name: random.normal(*tokens).to(self.dtype) for name in "rkv"}
        inputs["log_w"] = (-math.exp(-0.5) * random.uniform(*tokens)).to(self.dtype).float()
        inputs["kappa"] = F.normalize(random.normal(*tokens), dim=-1).to(self.dtype)
        inputs["a"] = random.uniform(*tokens).to(self.dtype)
        if self.carried or self.is_step:
            inputs["initial_state"] = random.normal(self.count, self.heads, self.size, self.size)
        return inputs

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> tuple[Tensor, ...]:
        return delta_wkv(**inputs, cu_seqlens=self.cu_seqlens, inplace=inplace, backend=backend)

    def others(self) -> dict[str, Any]:
        fla = None if self.carried else load_fla("fla.ops.rwkv7", self.device)
        if fla is None:
            return {}
        operator = fla.fused_recurrent_rwkv7 if self.is_step else fla.chunk_rwkv7

        def theirs(r, w, k, v, a, b, initial_state=None):
            return operator(r, w, k, v, a, b, scale=1.0, initial_state=initial_state, output_final_state=True)[0]

        return {FLA: Peer(for_fla, theirs)}


if __name__ == "__main__":
    main(DeltaWkv)
