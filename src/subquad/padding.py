"""
The one place that makes padded batches and packed documents exact.

A recurrent model is exact under padding if a padding token changes no state, the first real token sees as its
predecessor what came before the padding, and what is read at the end of a row comes from its last real token. All
three follow from one rule: at a padding token, a mixer sees what it saw at the last real token before.
"""

import copy
from collections.abc import Callable

import torch


def can_read_values(x: torch.Tensor) -> bool:
    """
    Whether Python may branch on the values of a tensor. It may not while a graph is traced or captured, and a tensor
    on the meta device has no values.
    """
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return False
    return x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def should_check(x: torch.Tensor) -> bool:
    """
    Whether to check the values of a call's tokens, x (batch, length, ...). A single token was most likely chosen by
    the model itself, and a GPU would have to wait at every step of a decoding loop.
    """
    return can_read_values(x) and (x.device.type == "cpu" or x.shape[1] > 1)


def expand_to(flags: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Values per token, (batch, n), with as many dimensions as x (batch, n, ...)."""
    return flags.view(*flags.shape, *[1] * (x.dim() - 2))


def last_token(state: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """The state of a token shift after the tokens x (batch, tokens, width), whatever it was before."""
    return x[:, -1].clone()


class Tokens:
    """
    Which tokens of a call are real, and where documents begin among them.

    Args:
        batch, length, device: the shape and the device of the call's tokens.
        attention_mask: (batch, at least `length`), 0 for padding. The last `length` columns are read; those before
            belong to the tokens of earlier calls. Padding may be before or after the tokens of a row.
        position_ids: (batch or 1, length). A position that does not follow the one before begins a new document. They
            are not read while the model is traced (pass `cu_seqlens` then).
        cu_seqlens: (documents + 1), the boundaries 0, ..., length of documents packed into one row. The first document
            of a call continues the cache.

    Attributes:
        mask: bool (batch, length), False for padding; None if there is none.
        cu_seqlens: the boundaries of the documents in the concatenated rows; None if nothing is packed.
        starts: bool (batch or 1, length), True where a document begins; None if nothing is packed.
        first, last: the index of the first and the last document of each row, if documents are packed.

    Raises:
        ValueError: if a shape does not fit, a mask has holes, or documents are packed into a padded batch.
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
        self.mask = self._read_mask(attention_mask, device)
        self._source = None
        if self.mask is not None:
            # For every token the last real one up to it, counted from 1; 0 is what the cache holds.
            count = torch.arange(1, length + 1, device=device)
            self._source = torch.where(self.mask, count, 0).cummax(dim=1).values

        self.cu_seqlens = self.starts = None
        if cu_seqlens is not None:
            self._read_boundaries(cu_seqlens.to(device))
        elif position_ids is not None and length > 1:
            self._read_positions(position_ids.to(device))

    def to(self, device: torch.device, non_blocking: bool = False) -> "Tokens":
        """A copy on another device, for models with blocks on several."""
        other = copy.copy(self)
        for name in ("mask", "_source", "starts", "cu_seqlens"):
            if (x := getattr(self, name)) is not None:
                setattr(other, name, x.to(device, non_blocking=non_blocking))
        return other

    def _read_mask(self, attention_mask, device):
        if attention_mask is None:
            return None
        shape = tuple(attention_mask.shape)
        if len(shape) != 2 or shape[0] != self.batch or shape[1] < self.length:
            raise ValueError(f"`attention_mask` must be ({self.batch}, {self.length} or more), got {shape}.")
        mask = attention_mask[:, -self.length :].to(device) != 0
        if not should_check(mask):
            return mask
        padded = torch.nn.functional.pad(mask, (1, 0))
        texts = (~padded[:, :-1] & padded[:, 1:]).sum(1)
        full, holes = torch.stack((mask.all(), (texts > 1).any())).tolist()  # one wait for a GPU, not two
        if full:
            return None
        if holes:
            row = int(texts.argmax())
            raise ValueError(f"`attention_mask` has a hole in row {row}: padding must be before or after the text.")
        return mask

    def _read_boundaries(self, cu_seqlens):
        if self.batch != 1 or self.mask is not None:
            raise ValueError("`cu_seqlens` describes one row without padding; got a batch of several or a mask.")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"`cu_seqlens` must be int32 or int64 of shape (documents + 1,), got {cu_seqlens.dtype} "
                f"{tuple(cu_seqlens.shape)}."
            )
        if can_read_values(cu_seqlens):
            bounds = cu_seqlens.tolist()
            if bounds[0] != 0 or bounds[-1] != self.length or sorted(set(bounds)) != bounds:
                raise ValueError(
                    f"`cu_seqlens` must increase from 0 to {self.length}, with no empty document; got {bounds}."
                )
        self.cu_seqlens = cu_seqlens
        starts = torch.zeros(self.length + 1, dtype=torch.bool, device=cu_seqlens.device)
        self.starts = starts.index_fill(0, cu_seqlens[1:].long(), True)[None, : self.length]
        self.first, self.last = [0], [cu_seqlens.shape[0] - 2]

    def _read_positions(self, position_ids):
        shape = tuple(position_ids.shape)
        if shape not in ((1, self.length), (self.batch, self.length)):
            raise ValueError(f"`position_ids` must be ({self.batch}, {self.length}), got {shape}.")
        if not can_read_values(position_ids):
            return
        position_ids = position_ids.expand(self.batch, self.length)
        restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
        if self.mask is not None:
            restarts &= self.mask[:, 1:] & self.mask[:, :-1]  # the positions of padding mean nothing
        if not bool(restarts.any()):
            return
        if self.mask is not None:
            raise ValueError("`position_ids` restart inside a row with padding: packed documents have no padding.")
        self.starts = torch.nn.functional.pad(restarts, (1, 0))
        begins = self.starts.clone()
        begins[:, 0] = True
        bounds = begins.flatten().nonzero().flatten()
        self.cu_seqlens = torch.nn.functional.pad(bounds, (0, 1), value=self.batch * self.length)
        rows = begins.sum(1).cumsum(0).tolist()
        self.first, self.last = [0, *rows[:-1]], [n - 1 for n in rows]

    def fill(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """
        Repeats at each padding token what the last real token before it has.

        Args:
            x: (batch, length, width).
            before: the same for the last real token of earlier calls, (batch, width); zero if None.
        """
        if self._source is None:
            return x
        before = torch.zeros_like(x[:, 0]) if before is None else before
        source = self._source.to(x.device)  # the last block of a model on several devices may be elsewhere
        return torch.cat((before.unsqueeze(1), x), dim=1).gather(1, source.unsqueeze(-1).expand_as(x))

    def token_before(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor | None:
        """
        What a token shift sees before the first token of each row of x (batch, length, width): `before`, the last
        token of earlier calls. An engine whose rows are the tokens of many texts has another rule.
        """
        return before

    def erase(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, length, ...) with zeros at padding tokens."""
        return x if self.mask is None else x.masked_fill(~expand_to(self.mask, x), 0.0)

    def by_document(
        self, operator: Callable, initial_state: torch.Tensor | None, inplace: bool = False, **arguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Runs a recurrence so that documents do not see each other.

        Args:
            operator: a recurrence of `subquad_kernels`.
            initial_state: the state before the call, (batch, ...); None before the first token.
            inplace: whether it may write the new state over the old one. Packed documents never do.
            arguments: its other arguments. Tensors of three or more dimensions are sequences, (batch, length, ...);
                the others, such as weights, are the same for every token.

        Returns:
            the output (batch, length, ...), and the state after the last document of every row.
        """
        initial_state = self.entering_states(initial_state)
        if self.cu_seqlens is None:
            return operator(**arguments, initial_state=initial_state, inplace=inplace)
        for name, x in arguments.items():
            if isinstance(x, torch.Tensor) and x.dim() >= 3:
                arguments[name] = x.flatten(0, 1).unsqueeze(0)
        out, state = operator(**arguments, initial_state=initial_state, cu_seqlens=self.cu_seqlens)
        return out.view(self.batch, self.length, *out.shape[2:]), state[self.last]

    def entering_states(self, state: torch.Tensor | None) -> torch.Tensor | None:
        """
        The state that enters each document (each row if nothing is packed): a row's first document continues its
        state, (batch, ...), the others begin with zeros. None if all begin with zeros.
        """
        if self.cu_seqlens is None or state is None:
            return state
        entering = torch.zeros_like(state[:1]).repeat(self.cu_seqlens.shape[0] - 1, *[1] * (state.dim() - 1))
        entering[self.first] = state
        return entering
