"""Positions of a call's tokens in their documents, for models that need them."""

import dataclasses
from typing import TypeVar

import torch
from torch.utils._pytree import tree_map

from .padding import Tokens


AnyPositions = TypeVar("AnyPositions", bound="Movable")


@dataclasses.dataclass
class Movable:
    """A dataclass for models with layers on several devices."""

    def to(self: AnyPositions, device: torch.device, non_blocking: bool = False) -> AnyPositions:
        """A copy on another device."""

        def move(x):
            return x.to(device, non_blocking=non_blocking) if isinstance(x, torch.Tensor | Tokens | Movable) else x

        fields = {field.name: tree_map(move, getattr(self, field.name)) for field in dataclasses.fields(self)}
        return type(self)(**fields)


@dataclasses.dataclass
class TokenPositions(Movable):
    """
    The tokens of a call and their positions. Without packed documents, a row is one document.

    Attributes:
        tokens: which tokens are real, and where documents begin.
        position: of each token in its document, from 0, (batch, length). Padding repeats the position of the last
            token before it, or has -1 if there is none.
        document: the index of each token's document in its row, (batch, length), if documents are packed. The first,
            0, continues the cache.
        kept: the tokens that the cache may keep: each row's last document, bool (batch, length).
        kept_position: positions of the tokens in that document, (batch, length); -1 before it begins. They never
            decrease.
    """

    tokens: Tokens
    position: torch.Tensor
    document: torch.Tensor | None
    kept: torch.Tensor
    kept_position: torch.Tensor

    @property
    def all_real(self) -> bool:
        """Whether there is no padding and no document boundary."""
        return self.tokens.mask is None and self.document is None

    @classmethod
    def after(cls: type[AnyPositions], lengths: torch.Tensor, tokens: Tokens) -> AnyPositions:
        """The positions of tokens that follow `lengths` (batch) earlier tokens of their rows."""
        lengths, document = lengths[:, None], None
        steps = torch.arange(tokens.length, device=lengths.device).expand(tokens.batch, -1)
        kept = torch.ones_like(steps, dtype=torch.bool) if tokens.mask is None else tokens.mask
        position = lengths + (steps if tokens.mask is None else kept.long().cumsum(1) - 1)
        kept_position = position
        if tokens.starts is not None:
            starts = tokens.starts.expand(tokens.batch, -1)
            document = starts.long().cumsum(1)
            position = steps - torch.where(starts, steps, 0).cummax(1).values + lengths * (document == 0)
            kept = document == document[:, -1:]
            kept_position = position.where(kept, -1)
        return cls(tokens, position, document, kept, kept_position.contiguous())
