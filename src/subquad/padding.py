"""
The one place where padded batches and packed documents are made exact.

A recurrent model is exact under padding when a padding token changes no state, the first real token finds as its
predecessor what came before the padding, and what is read at the end of a row comes from its last real token. All
three follow from one rule: where a token is padding, what a mixer sees of it is what it saw of the last real token
before.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils._pytree import tree_map


def can_look_at(x: torch.Tensor) -> bool:
    """
    Whether Python may branch on the values of a tensor: not while a graph is traced or captured, nor where there are
    none.
    """
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return False
    return x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def can_check(x: torch.Tensor) -> bool:
    """
    Whether to look at the tokens of a call, x (batch, length, ...), for what may be wrong with them. One token was
    most likely chosen by the model itself: a GPU would have to wait at every step of a decoding loop.
    """
    return can_look_at(x) and (x.device.type == "cpu" or x.shape[1] > 1)


def last_token(state: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """The token shift's state after the tokens x (batch, tokens, width), whatever it was before."""
    return x[:, -1].clone()


def shift(x: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Every row of x (batch, length, ...) moved to the left by so many tokens (batch), round and round."""
    source = (torch.arange(x.shape[1], device=x.device) + shifts.to(x.device)[:, None]) % x.shape[1]
    return x.gather(1, source.view(*source.shape, *[1] * (x.dim() - 2)).expand_as(x))


class Tokens:
    """
    Which tokens of one call are real, and where documents begin among them.

    Args:
        batch, length, device: of the call's tokens.
        attention_mask: (batch, at least `length`), 0 where a token is padding; its last `length` columns are read, the
            ones before belong to tokens of earlier calls. Padding may stand before or after the tokens of a row.
        position_ids: (batch or 1, length). A position that does not follow on the one before begins a new document.
            Not read while the model is traced (pass `cu_seqlens` then).
        cu_seqlens: (documents + 1), the borders 0, ..., length of documents packed into one row. The first document of
            a call continues the cache.

    Attributes:
        mask: bool (batch, length), False where a token is padding; None where none is.
        cu_seqlens: the borders of documents in the rows laid behind one another, None where nothing is packed.
        starts: bool (batch or 1, length), where documents begin; None likewise.
        first, last: for each row, the number of its first and its last document.
        initial: the state that every document begins with, see [`~Tokens.beginning_with`]; zero where None.

    Raises:
        ValueError: where a shape does not fit, a mask has holes, or documents are packed into a padded batch.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        device: torch.device,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ):
        self.batch, self.length = batch, length
        self.initial = None
        self.mask = self._read_mask(attention_mask, device)
        self._source = None
        if self.mask is not None:
            # For every token the last real one up to it, counted from 1; 0 is what the cache holds.
            count = torch.arange(1, length + 1, device=device)
            self._source = torch.where(self.mask, count, 0).cummax(dim=1).values

        self.cu_seqlens = self.starts = None
        if cu_seqlens is not None:
            self._read_borders(cu_seqlens.to(device))
        elif position_ids is not None and length > 1:
            self._read_positions(position_ids.to(device))

    def to(self, device: torch.device, non_blocking: bool = False) -> "Tokens":
        """A copy on another device, for models whose blocks lie on several."""
        other = copy.copy(self)
        for name in ("mask", "_source", "starts", "cu_seqlens"):
            if (x := getattr(self, name)) is not None:
                setattr(other, name, x.to(device, non_blocking=non_blocking))
        return other

    def beginning_with(self, initial: torch.Tensor) -> "Tokens":
        """The same tokens, where every document begins with the state `initial` (...), not with zeros."""
        other = copy.copy(self)
        other.initial = initial
        return other

    def _read_mask(self, attention_mask, device):
        if attention_mask is None:
            return None
        shape = tuple(attention_mask.shape)
        if len(shape) != 2 or shape[0] != self.batch or shape[1] < self.length:
            raise ValueError(f"`attention_mask` must be ({self.batch}, {self.length} or more), got {shape}.")
        mask = attention_mask[:, -self.length :].to(device) != 0
        if not can_check(mask):
            return mask
        begins = torch.nn.functional.pad(mask, (1, 0))
        texts = (~begins[:, :-1] & begins[:, 1:]).sum(1)
        full, holes = torch.stack((mask.all(), (texts > 1).any())).tolist()  # one wait for a GPU, not two
        if full:
            return None
        if holes:
            row = int(texts.argmax())
            raise ValueError(
                f"`attention_mask` has a hole in row {row}: padding may only stand before or after a text."
            )
        return mask

    def _read_borders(self, cu_seqlens):
        if self.batch != 1 or self.mask is not None:
            raise ValueError("`cu_seqlens` describes one row without padding; got a batch of several or a mask.")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"`cu_seqlens` must be int32 or int64 of shape (documents + 1,), got {cu_seqlens.dtype} "
                f"{tuple(cu_seqlens.shape)}."
            )
        if can_look_at(cu_seqlens):
            bounds = cu_seqlens.tolist()
            if bounds[0] != 0 or bounds[-1] != self.length or sorted(set(bounds)) != bounds:
                raise ValueError(
                    f"`cu_seqlens` must rise from 0 to {self.length}, with no empty document; got {bounds}."
                )
        self.cu_seqlens = cu_seqlens
        starts = torch.zeros(self.length + 1, dtype=torch.bool, device=cu_seqlens.device)
        self.starts = starts.index_fill(0, cu_seqlens[1:].long(), True)[None, : self.length]
        self.first, self.last = [0], [cu_seqlens.shape[0] - 2]

    def _read_positions(self, position_ids):
        shape = tuple(position_ids.shape)
        if shape not in ((1, self.length), (self.batch, self.length)):
            raise ValueError(f"`position_ids` must be ({self.batch}, {self.length}), got {shape}.")
        if not can_look_at(position_ids):
            return
        position_ids = position_ids.expand(self.batch, self.length)
        restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
        if self.mask is not None:
            restarts &= self.mask[:, 1:] & self.mask[:, :-1]  # the position of padding means nothing
        if not bool(restarts.any()):
            return
        if self.mask is not None:
            raise ValueError("`position_ids` restart inside a row with padding: documents are packed without any.")
        self.starts = torch.nn.functional.pad(restarts, (1, 0))
        begins = self.starts.clone()
        begins[:, 0] = True
        bounds = begins.flatten().nonzero().flatten()
        self.cu_seqlens = torch.nn.functional.pad(bounds, (0, 1), value=self.batch * self.length)
        rows = begins.sum(1).cumsum(0).tolist()
        self.first, self.last = [0, *rows[:-1]], [n - 1 for n in rows]

    def shifts(self) -> torch.Tensor | None:
        """Number of padding tokens before the text of each row, (batch); None where there can be none."""
        if self.mask is None or self.length == 1:
            return None
        shifts = self.mask.int().argmax(1)
        return None if can_look_at(shifts) and not shifts.any() else shifts

    def shifted(self, shifts: torch.Tensor) -> "Tokens":
        """The same tokens, where every row begins with its text."""
        return Tokens(self.batch, self.length, self.mask.device, shift(self.mask, shifts))

    def fill(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """
        What padding reads is what the last real token before it read.

        Args:
            x: (batch, length, width).
            before: what the last real token of earlier calls read, (batch, width); zero where None.
        """
        if self._source is None:
            return x
        before = torch.zeros_like(x[:, 0]) if before is None else before
        source = self._source.to(x.device)  # of a model on several devices, the last block's
        return torch.cat((before.unsqueeze(1), x), dim=1).gather(1, source.unsqueeze(-1).expand_as(x))

    def erase(self, x: torch.Tensor) -> torch.Tensor:
        """Zero where a token is padding; x: (batch, length, ...)."""
        if self.mask is None:
            return x
        return x.masked_fill(~self.mask.view(*self.mask.shape, *[1] * (x.dim() - 2)), 0.0)

    def by_document(
        self,
        operator: Callable,
        inputs: tuple[torch.Tensor, ...],
        weights: tuple,
        state: torch.Tensor | None,
        inplace: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Calls `operator(*inputs, *weights, state, cu_seqlens=...)` for inputs (batch, length, ...) and a state (batch,
        ...) or None, so that documents do not see each other. Returns the output (batch, length, ...) and the state
        after the last document of every row, which without documents may be `state` itself, changed in place.
        """
        if self.cu_seqlens is None:
            if state is None and self.initial is not None:
                state = self.initial.expand(self.batch, *self.initial.shape)
            return operator(*inputs, *weights, state, inplace=inplace)
        inputs = [x.flatten(0, 1).unsqueeze(0) for x in inputs]
        if state is not None or self.initial is not None:
            initial = torch.zeros_like(state[0]) if self.initial is None else self.initial
            entering = initial.repeat(self.cu_seqlens.shape[0] - 1, *[1] * initial.dim())
            if state is not None:
                entering[self.first] = state
            state = entering
        out, state = operator(*inputs, *weights, state, cu_seqlens=self.cu_seqlens)
        return out.view(self.batch, self.length, *out.shape[2:]), state[self.last]


AnyCall = TypeVar("AnyCall", bound="Call")


@dataclasses.dataclass
class Call:
    """
    The tokens of a call, and where they lie in their documents (without packed documents, a row is one).

    Attributes:
        tokens: which are real, and where documents begin.
        place: of each token in its document, from 0 on, (batch, length); of padding that of the last token before it,
            -1 where there is none.
        document: number of each token's document in its row, where documents are packed, (batch, length). The first,
            0, continues the cache.
        kept, kept_place: which tokens the cache may keep, those of every row's last document, and their places,
            (batch, length), which never fall: -1 before that document begins.
    """

    tokens: Tokens
    place: torch.Tensor
    document: torch.Tensor | None
    kept: torch.Tensor
    kept_place: torch.Tensor

    @property
    def plain(self) -> bool:
        """Whether there is neither padding nor a border of documents."""
        return self.tokens.mask is None and self.document is None

    @classmethod
    def of(cls: type[AnyCall], tokens: Tokens, lengths: torch.Tensor) -> AnyCall:
        """The tokens that follow `lengths` (batch) earlier ones of their rows."""
        lengths, document = lengths[:, None], None
        steps = torch.arange(tokens.length, device=lengths.device).expand(tokens.batch, -1)
        kept = torch.ones_like(steps, dtype=torch.bool) if tokens.mask is None else tokens.mask
        place = lengths + (steps if tokens.mask is None else kept.long().cumsum(1) - 1)
        kept_place = place
        if tokens.starts is not None:
            starts = tokens.starts.expand(tokens.batch, -1)
            document = starts.long().cumsum(1)
            place = steps - torch.where(starts, steps, 0).cummax(1).values + lengths * (document == 0)
            kept = document == document[:, -1:]
            kept_place = place.where(kept, -1)
        return cls(tokens, place, document, kept, kept_place.contiguous())

    def beginning_with(self: AnyCall, initial: torch.Tensor) -> AnyCall:
        """See [`Tokens.beginning_with`]."""
        return dataclasses.replace(self, tokens=self.tokens.beginning_with(initial))

    def to(self: AnyCall, device: torch.device, non_blocking: bool = False) -> AnyCall:
        """A copy on another device, for models whose layers lie on several."""

        def move(x):
            return x.to(device, non_blocking=non_blocking) if isinstance(x, torch.Tensor | Tokens) else x

        fields = {field.name: tree_map(move, getattr(self, field.name)) for field in dataclasses.fields(self)}
        return type(self)(**fields)
