"""
The ranker of Avey and Avey-B (split_ranker) and its scores (maxsim), compared with the published one, which takes one
split after the other, and one that compares all tokens with all tokens in one product.
"""

import dataclasses
import itertools
from typing import Any

import torch
from benchmark import PLAIN, Case, Random, main
from torch import Tensor

from subquad_kernels import maxsim, split_ranker


OPERATOR = "split_ranker"
LOOP, WHOLE = "plain loop", "plain whole"
AVEY = {"k": 8}
AVEY_B = {"k": 4, "order": "score", "normalization": "min"}
MOST_WHOLE = {"cpu": 2**31, "cuda": 48 * 2**30}  # bytes of the similarities of all tokens


def unit(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


def plain_scores(queries: Tensor, candidates: Tensor) -> Tensor:
    """MaxSim of unit vectors, (B, Q, D) and (B, M, S, D): (B, M)."""
    return torch.einsum("bqd,bmsd->bqms", queries, candidates).amax(-1).sum(1)


def loop_scores(splits: Tensor, **rest: Tensor) -> Tensor:
    """As published: each split with those before it; 0 elsewhere."""
    splits = unit(splits)
    scores = splits.new_zeros(*splits.shape[:2], splits.shape[1])
    for i in range(1, splits.shape[1]):
        scores[:, i, :i] = plain_scores(splits[:, i], splits[:, :i])
    return scores


def whole_scores(splits: Tensor, number: Tensor) -> Tensor:
    """Every token with every token."""
    y = unit(splits).flatten(1, 2)
    similar = (y @ y.mT).view(*splits.shape[:3], *splits.shape[1:3])
    earlier = torch.arange(splits.shape[1], device=splits.device) < number[..., None]
    return similar.amax(-1).sum(2) * earlier


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitRanker(Case):
    """
    The scores of all splits of a text with those before them, or of the last `last` tokens, or the choice of `k - 1`
    splits for each.
    """

    length: int = 4096
    split: int = 64
    size: int = 768
    last: int = 0
    k: int = 0
    order: str = "sequence"
    normalization: str = "first"

    # The products of bfloat16 are exact in float32, in which they are added up.
    tolerances = {torch.float32: 1e-5, torch.bfloat16: 1e-4}
    exact = (PLAIN, LOOP, WHOLE)
    sizes = {
        "small check": [
            *({"length": 40, "split": 8, "size": 24, "last": last} for last in (0, 8, 1)),
            {"length": 40, "split": 8, "size": 24, "k": 5},
            {"length": 48, "split": 8, "size": 24, **AVEY_B},
        ],
        "check": [
            *({"length": 1024, "last": last} for last in (0, 64, 1)),
            {"length": 1024, **AVEY},
            # Of more tokens two may be equally near but for rounding; their gradients then differ.
            {"length": 384, **AVEY_B},
            {"length": 2048, "compared": WHOLE},
        ],
        "GPU check": [{"length": 16384, "compared": WHOLE}],
        "quick": [{"length": 40, "split": 8, "size": 24}, {"length": 40, "split": 8, "size": 24, **AVEY}],
        "cpu": [{"length": length, **how} for length, how in itertools.product((4096, 16384), ({}, AVEY))],
        "cuda": [
            {"length": length, **how} for length, how in itertools.product((4096, 16384, 65536, 131072), ({}, AVEY))
        ],
        "step quick": [{"length": 40, "split": 8, "size": 24, "last": last} for last in (8, 1)],
        "step cpu": [{"length": length, "last": last} for length in (4096, 16384) for last in (64, 1)],
        "step cuda": [{"length": length, "last": last} for length in (4096, 16384, 65536, 131072) for last in (64, 1)],
    }

    @property
    def name(self) -> str:
        if self.k:
            return f"{OPERATOR} {self.normalization}"
        return "maxsim" + {0: " all splits", 1: " one token"}.get(self.last, " last split")

    @property
    def results(self) -> tuple[str, ...]:
        return ("weights", "index") if self.k else ("scores",)

    @property
    def has_gradients(self) -> bool:
        return bool(self.k)

    @property
    def is_step(self) -> bool:
        return self.last > 0

    @property
    def count(self) -> int:
        return self.length // self.split

    def inputs(self, random: Random) -> dict[str, Tensor]:
        """Neighbouring splits have something in common."""
        x, topics = (random.normal(1, self.count, self.split, self.size) for _ in range(2))
        splits = (x + 0.5 * topics[:, :, :1].cumsum(1) / self.count**0.5).to(self.dtype)
        number = torch.arange(self.count, device=self.device)[None]
        return {"splits": splits, "number": number[:, -1:] if self.last else number}

    def queries(self, splits: Tensor) -> Tensor:
        return splits[:, -1:, -self.last :] if self.last else splits

    def ours(
        self, backend: str, inplace: bool = False, *, splits: Tensor, number: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        if not self.k:
            scores = maxsim(self.queries(splits), splits, number, backend=backend)
            return scores.masked_fill(scores.isneginf(), 0)
        how = {"order": self.order, "normalization": self.normalization, "backend": backend}
        index, weights, _ = split_ranker(splits, splits, min(self.k, self.count), number, **how)
        return weights, index.to(weights.dtype)

    def last_scores(self, splits: Tensor, **rest: Tensor) -> Tensor:
        scores = plain_scores(unit(self.queries(splits)[:, 0]), unit(splits[:, :-1]))
        return torch.nn.functional.pad(scores, (0, 1))[:, None]

    def others(self) -> dict[str, Any]:
        if self.k:
            return {}
        if self.last:
            return {PLAIN: self.last_scores}
        fits = self.length**2 * self.dtype.itemsize <= MOST_WHOLE[self.device]
        return {LOOP: loop_scores, **({WHOLE: whole_scores} if fits else {})}

    def tolerance(self, result: str) -> float:
        # Gradients are sums of few products, but of the dtype of the splits.
        return Case.tolerances[self.dtype] if result.startswith("d") else super().tolerance(result)

    def operations(self, training: bool) -> float:
        pairs = self.count - 1 if self.last else self.count * (self.count - 1) // 2
        return 2 * (self.last or self.split) * pairs * self.split * self.size


if __name__ == "__main__":
    main(SplitRanker)
