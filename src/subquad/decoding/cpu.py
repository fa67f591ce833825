"""
Decoding on a CPU: all blocks of Eagle, Finch, Goose or RWKV-7a read one token in a single call of a C library, instead
of some hundred operations each that take longer to be called than to compute.
"""

import copy
import functools
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from subquad_kernels.c.fused_blocks import KINDS, FusedBlock, FusedBlocks
from subquad_kernels.c.native import MOST_ROWS, WORTHWHILE_CHANNELS
from subquad_kernels.tracing import is_observed

from ..modeling.cache import RecurrentCache
from ..modeling.layer_state import LayerState
from ..modeling.padding import Tokens
from .fused import ModelOfBlocks, find_fused
from .step import EagerStep, Unsuitable, check_ids
from .unit_copies import UnitCopies
from .watch import is_hooked, look_up, weights_of


if TYPE_CHECKING:
    from ..models.architecture import Architecture, FusedModel


class CpuStep:
    """
    The decoding step by the C library, see [`DecodingStep`]. It calls the model itself while something observes
    torch's operations, while the cache records the past, and if the model has become one that the library cannot read.
    """

    kind = "cpu"

    def __init__(
        self, model: PreTrainedModel, fused: "FusedModel", cache: RecurrentCache, batch_size: int, alone: bool
    ):
        self.cache, self.batch_size = cache, batch_size
        self.eager = EagerStep(model, cache, batch_size)
        self._prepare = functools.partial(look_up, _prepared, model, lambda model: PreparedModel(model, fused))
        prepared = self._prepare()
        self._sealed, self._weights = (prepared, weights_of(model)) if alone else (None, [])
        if alone and batch_size == 1 and not is_hooked(model):
            self._sealed = copy.copy(prepared)
            sizes = {x.data_ptr(): x.nbytes() for x in self._weights}
            self._sealed.copies = UnitCopies(prepared.blocks, sum(sizes.values()))

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        check_ids(input_ids, self.batch_size)
        logits = None
        if not (is_observed() or self.cache.records_past):
            with suppress(Unsuitable):
                logits = (self._sealed or self._prepare()).read(input_ids, attention_mask, self.cache)
        return self.eager(input_ids, attention_mask) if logits is None else logits


def make(
    architectures: Iterable["Architecture"],
    model: PreTrainedModel,
    cache: RecurrentCache,
    batch_size: int,
    alone: bool = False,
) -> CpuStep:
    """
    Raises:
        Unsuitable: if the library cannot read the model.
    """
    if batch_size > MOST_ROWS:
        raise Unsuitable(f"there are {batch_size} rows, and the C library is made for {MOST_ROWS}.")
    if (fused := find_fused(architectures, model)) is None or fused.kind not in KINDS:
        raise Unsuitable(f"the C library has no blocks of {type(model).__name__}.")
    return CpuStep(model, fused, cache, batch_size, alone)


_prepared: "WeakKeyDictionary[nn.Module, PreparedModel]" = WeakKeyDictionary()


class PreparedModel(ModelOfBlocks):
    """A model as the library reads it."""

    copies: UnitCopies | None = None

    def __init__(self, model: PreTrainedModel, fused: "FusedModel"):
        super().__init__(model, fused, FusedBlock)
        if self.width < WORTHWHILE_CHANNELS:
            raise ValueError(f"{self.width} channels are as fast in torch.")
        self.blocks = FusedBlocks(self.found)

    def read_blocks(
        self, x: torch.Tensor, tokens: Tokens, layers: list[LayerState], positions: dict[str, torch.Tensor]
    ) -> bool:
        before = [[layer.states.get(name) for layer in layers] for name in self.states]
        overwrite = tokens.mask is None and all(layer.can_overwrite("wkv") for layer in layers)
        copies = None if self.copies is None else self.copies.for_next_token()
        after = self.blocks(x, *before, overwrite, copies, **positions)
        if after is None:
            return False
        for layer, old, new in zip(layers, zip(*before, strict=True), zip(*after, strict=True), strict=True):
            layer.set(dict(zip(self.states, map(tokens.keep_rows, old, new), strict=True)))
        return True
