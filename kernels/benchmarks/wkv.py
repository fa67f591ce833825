"""
The time mixing of Eagle and Finch (wkv), compared with flash-linear-attention (on a GPU, if it can be imported) and
FlashAttention of torch, which computes another function: softmax attention on the same r, k and v.
"""

import dataclasses
import itertools
import math
from typing import Any

import torch.nn.functional as F
from benchmark import FLA, Case, Random, main
from measuring import load_fla
from torch import Tensor, float32
from torch.nn.attention import SDPBackend, sdpa_kernel

from subquad_kernels import wkv


OPERATOR = "wkv"
CHECKED = {"batch": 2, "heads": 2, "carried": True}


def flash_attention(r: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (r, k, v)), is_causal=True)
    return out.transpose(1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wkv(Case):
    heads: int = 64
    size: int = 64
    static: bool = False  # Eagle's decays, of a channel
    wide: bool = False  # decays and results in float32, as in a model

    states = {"initial_state": "state"}
    most_reference = 8192
    sizes = {
        "small check": [
            {"heads": 1, "size": 16, "length": 1},
            {"heads": 1, "size": 16, "length": 19},
            {"heads": 1, "size": 16, "length": 19, "static": True, "documents": (0, 3, 3, 19), "carried": True},
        ],
        "check": [
            *(
                {**CHECKED, "length": length, "static": static, "wide": True}
                for length, static in itertools.product((1, 63, 65, 200), (False, True))
            ),
            {**CHECKED, "length": 200},
            {"batch": 2, "heads": 2, "length": 200},
            {**CHECKED, "batch": 1, "length": 201, "documents": (0, 3, 3, 67, 68, 201), "wide": True},
        ],
        # The kernels cut long texts of few heads into segments, and walk through texts of many heads.
        "GPU check": [
            *({**CHECKED, "length": 1000, "static": static, "wide": True} for static in (False, True)),
            {**CHECKED, "batch": 1, "length": 1400, "documents": (0, 700, 701, 1400), "wide": True},
            {**CHECKED, "batch": 1, "length": 600, "heads": 300, "size": 32, "wide": True},
        ],
        "quick": [{"heads": 2, "size": 16, "length": 32}, {"heads": 2, "size": 16, "length": 64}],
        "cpu": [{"heads": 8, "length": length} for length in (64, 256, 1024, 4096)],
        "cuda": [
            *({"batch": 8, "length": length} for length in (1024, 4096, 16384)),
            {"batch": 8, "length": 4096, "wide": True},
            *({"length": length} for length in (1024, 4096, 16384, 65536)),
        ],
        "step quick": [{"heads": 2, "size": 16}],
        "step cpu": [{"heads": 8, "batch": batch} for batch in (1, 4)],
        "step cuda": [{"batch": batch} for batch in (1, 8, 64, 256)],
    }

    @property
    def name(self) -> str:
        return OPERATOR + " static" * self.static + " as in a model" * self.wide

    def inputs(self, random: Random) -> dict[str, Tensor]:
        """The decays mix memories of a million tokens and of none."""
        tokens = self.batch, self.length, self.heads, self.size
        inputs = {name: random.normal(*tokens).to(self.dtype) for name in "rkv"}
        exponents = random.uniform(*(tokens[2:] if self.static else tokens))
        log_w = -(math.log(1e-6) + (math.log(9.2) - math.log(1e-6)) * exponents).exp()
        inputs["log_w"] = log_w.to(float32 if self.wide else self.dtype)
        inputs["u"] = random.normal(*tokens[2:]).to(self.dtype)
        if self.carried or self.is_step:
            inputs["initial_state"] = random.normal(self.count, self.heads, self.size, self.size)
        return inputs

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> tuple[Tensor, ...]:
        how: dict[str, Any] = {"out_dtype": float32} if self.wide and not self.carried else {}
        return wkv(**inputs, cu_seqlens=self.cu_seqlens, inplace=inplace, backend=backend, **how)

    def others(self) -> dict[str, Any]:
        fla = None if self.static or self.wide or self.carried else load_fla("fla.ops.rwkv6", self.device)
        found: dict[str, Any] = {}
        if fla is not None:
            operator = fla.fused_recurrent_rwkv6 if self.is_step else fla.chunk_rwkv6

            def theirs(r, k, v, log_w, u, initial_state=None):
                how = {"scale": 1.0, "initial_state": initial_state, "output_final_state": True}
                return operator(r, k, v, log_w, u, **how)[0]

            found[FLA] = theirs
        return found if self.is_step or self.wide else {**found, "FlashAttention": flash_attention}


if __name__ == "__main__":
    main(Wkv)
