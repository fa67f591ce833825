"""
The slot memory of Raven (slot_memory), compared with flash-linear-attention (on a GPU, if it can be imported), which
gets the same inputs, with decays and writes already computed. Its kernels may take minutes to tune.
"""

import dataclasses
from typing import Any

import torch
from benchmark import FLA, Case, Peer, Random, main
from measuring import load_fla
from slot_routing import SlotRouting, plain_routing
from torch import Tensor

from subquad_kernels import slot_memory


OPERATOR = "slot_memory"
SMALL = {"heads": 2, "size": 16, "slots": 12, "topk": 5}
CHECKED = {"batch": 2, "heads": 2, "size": 64, "slots": 48, "topk": 8, "carried": True}


def for_fla(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, initial_state: Tensor | None = None) -> dict[str, Any]:
    inputs = {"q": q, "k": k, "v": v, "s": (-log_f.expm1()).to(k.dtype), "g": log_f.to(k.dtype)}
    if initial_state is None:
        return inputs
    keys, values = initial_state.split(q.shape[-1], -1)
    return {**inputs, "initial_state": (keys.mT.contiguous(), values.contiguous())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotMemory(Case):
    heads: int = 4
    size: int = 256
    slots: int = 256
    topk: int = 32

    states = {"initial_state": "state"}
    # Logits of 256 products go through an exponential, which enlarges what bfloat16 rounds off.
    tolerances = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
    most_reference = 1024
    sizes = {
        "small check": [
            {**SMALL, "length": 1},
            {**SMALL, "length": 19},
            {**SMALL, "length": 19, "documents": (0, 3, 3, 19), "carried": True},
        ],
        "check": [
            *({**CHECKED, "length": length} for length in (1, 63, 65, 200)),
            {**CHECKED, "length": 65, "carried": False},
            {**CHECKED, "batch": 1, "length": 201, "documents": (0, 3, 3, 67, 68, 201)},
        ],
        "GPU check": [
            {"batch": 2},
            {"batch": 2, "length": 200},
            {"length": 1000, "heads": 1},
            # Of many heads, a program walks through the whole text.
            {**CHECKED, "batch": 1, "length": 300, "heads": 150, "size": 32, "slots": 64},
        ],
        "quick": [{**SMALL, "length": length} for length in (16, 24)],
        "cpu": [{"length": 1024}],
        "cuda": [{"batch": batch, "length": length} for batch, length in ((8, 2048), (8, 8192), (1, 65536))],
        "step quick": [{**SMALL}],
        "step cpu": [{"batch": batch} for batch in (1, 8)],
        "step cuda": [{"batch": batch} for batch in (1, 8, 32, 256)],
    }
    # Of an H200.
    targets = (
        ("slot_memory first forward+backward", None, 1, 20e3),
        ("slot_memory forward", FLA, 1, 1 / 0.6),
        ("slot_memory forward+backward", FLA, 1, 1 / 0.6),
    )

    def inputs(self, random: Random) -> dict[str, Tensor]:
        """The log decays are float32, as in a model, but numbers that the dtype can represent."""
        tokens = self.batch, self.length, self.heads, self.size
        inputs = {name: random.normal(*tokens).to(self.dtype) for name in "qkv"}
        names = ("batch", "length", "heads", "slots", "topk", "dtype", "device")
        routes = SlotRouting(**{name: getattr(self, name) for name in names}).inputs(random)
        inputs["log_f"] = plain_routing(**routes, topk=self.topk).to(self.dtype).float()
        if self.carried or self.is_step:
            inputs["initial_state"] = random.normal(self.count, self.heads, self.slots, 2 * self.size)
        return inputs

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> tuple[Tensor, ...]:
        return slot_memory(**inputs, cu_seqlens=self.cu_seqlens, inplace=inplace, backend=backend)

    def others(self) -> dict[str, Any]:
        fla = None if self.carried else load_fla("fla.ops.gsa", self.device)
        if fla is None:
            return {}
        operator = fla.fused_recurrent_gsa if self.is_step else fla.chunk_gsa
        return {FLA: Peer(for_fla, lambda **inputs: operator(**inputs, scale=1.0, output_final_state=True)[0])}

    def moved(self, inputs: dict[str, Tensor], out: Tensor, training: bool) -> float:
        """Of the state, a step writes the chosen slots alone."""
        if not self.is_step:
            return super().moved(inputs, out, training)
        state = 4 * inputs["initial_state"].numel()
        return super().moved(inputs, out, training) - state * (1 - self.topk / self.slots)


if __name__ == "__main__":
    main(SlotMemory)
