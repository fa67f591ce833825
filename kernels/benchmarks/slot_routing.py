"""The router of Raven's slots (slot_routing), compared with the published one in plain torch: topk and scatter."""

import dataclasses
import functools
import math
from typing import Any

import torch
from benchmark import PLAIN, Case, Random, main
from torch import Tensor

from subquad_kernels import slot_routing


OPERATOR = "slot_routing"
SMALL = {"heads": 2, "slots": 12, "topk": 5}
CHECKED = {"batch": 2, "heads": 2, "slots": 48, "topk": 8}


def plain_routing(logits: Tensor, log_decay: Tensor, topk: int) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    chosen = torch.sigmoid(logits.to(dtype)).topk(topk)
    weights = chosen.values / (chosen.values.sum(-1, keepdim=True) + 1e-9)
    return log_decay[..., None] * torch.zeros_like(logits, dtype=dtype).scatter(-1, chosen.indices, weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotRouting(Case):
    heads: int = 4
    slots: int = 256
    topk: int = 32

    results = ("out",)
    tolerances = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
    sizes = {
        "small check": [{**SMALL, "length": length} for length in (1, 19)],
        "check": [{**CHECKED, "length": length} for length in (1, 63, 65, 200)],
        "GPU check": [{"length": 1000}, {"batch": 2, "length": 200}],
        "quick": [{**SMALL, "length": length} for length in (16, 24)],
        "cpu": [{"length": 1024}],
        "cuda": [{"batch": batch, "length": length} for batch, length in ((8, 2048), (8, 8192), (1, 65536))],
        "step quick": [{**SMALL}],
        "step cpu": [{"batch": batch} for batch in (1, 8)],
        "step cuda": [{"batch": batch} for batch in (1, 8, 32, 256)],
    }

    @property
    def size(self) -> int:
        return self.slots

    def inputs(self, random: Random) -> dict[str, Tensor]:
        """The decays mix memories of thousands of tokens and of few."""
        tokens = self.batch, self.length, self.heads
        log_decay = -1e-3 * (math.log(16e3) * random.uniform(*tokens)).exp()
        return {"logits": random.normal(*tokens, self.slots).to(self.dtype), "log_decay": log_decay}

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> Tensor:
        return slot_routing(**inputs, topk=self.topk, backend=backend)

    def others(self) -> dict[str, Any]:
        return {PLAIN: functools.partial(plain_routing, topk=self.topk)}


if __name__ == "__main__":
    main(SlotRouting)
