"""
Exact results for padded batches and packed documents.

A recurrent model is exact under padding if a padding token changes no state, if the first real token's predecessor is
the token before the padding, and if readouts at the end of a row come from its last real token. All three follow from
one rule: at a padding token, a mixer sees what it saw at the last real token before.
"""

from collections.abc import Callable

import numpy as np
import torch

from subquad_kernels.tracing import can_read_values, is_transformed


@torch.compiler.assume_constant_result  # Dynamo of torch < 2.12 treats every compiled call as an export
def is_exporting() -> bool:
    """Whether `torch.export` traces the call, with or without Dynamo. Nothing may run outside its graph."""
    return torch.compiler.is_exporting()


def should_check(x: torch.Tensor) -> bool:
    """
    Whether to check the values of a call's tokens, x (batch, length, ...). A single token was most likely chosen by
    the model itself, and a check would synchronize with a GPU at every step of a decoding loop.
    """
    return can_read_values(x) and (x.device.type == "cpu" or x.shape[1] > 1)


def read_values(**tensors: torch.Tensor | None) -> dict[str, np.ndarray]:
    """Values of the tensors that are not None, all on one device. Synchronizes with a GPU once."""
    found = {name: x.contiguous() for name, x in tensors.items() if x is not None}
    if not found:
        return {}
    data = torch.cat([x.view(-1).view(torch.uint8) for x in found.values()]).cpu().numpy()
    ends = np.cumsum([x.nbytes for x in found.values()])
    values = {}
    for (name, x), part in zip(found.items(), np.split(data, ends[:-1]), strict=True):
        values[name] = part.view(torch.empty(0, dtype=x.dtype, device="cpu").numpy().dtype).reshape(x.shape)
    return values


def send_values(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Integers as a tensor on a device, without synchronizing with a GPU."""
    return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=torch.device(device).type == "cuda")


def expand_to(flags: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Values per token, (batch, n), with as many dimensions as x (batch, n, ...)."""
    return flags.view(*flags.shape, *[1] * (x.dim() - 2))


def reorder(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The tokens x (batch, length, ...) in the order (batch, length)."""
    order = order.to(x.device)  # the layers of a model may be on several devices
    return x.gather(1, expand_to(order, x).expand_as(x))


def last_real(mask: torch.Tensor) -> torch.Tensor:
    """For every token of a mask (batch, length) the last real one up to it, counted from 1; 0 if there is none."""
    count = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return torch.where(mask, count, 0).cummax(dim=1).values


def last_token(state: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """The state of a token shift after the tokens x (batch, tokens, width); the earlier state is not used."""
    return x[:, -1].clone()


def find_mask(
    attention_mask: torch.Tensor | None, batch: int, length: int, device: torch.device
) -> torch.Tensor | None:
    """[`Tokens.mask`], even without padding."""
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[0] != batch or shape[1] < length:
        raise ValueError(f"`attention_mask` must be ({batch}, {length} or more), got {shape}.")
    return attention_mask[:, -length:].to(device) != 0


def find_boundaries(cu_seqlens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`cu_seqlens` on a device. Its values are not read."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"`cu_seqlens` must be int32 or int64 of shape (documents + 1,), got {cu_seqlens.dtype} "
            f"{tuple(cu_seqlens.shape)}."
        )
    return cu_seqlens.to(device)


def find_starts(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """[`Tokens.starts`] of one row with these boundaries. Boundaries outside the row are ignored."""
    starts = torch.zeros(length + 1, dtype=torch.bool, device=cu_seqlens.device)
    return starts.index_fill(0, cu_seqlens[1:].long().clamp(0, length), True)[None, :length]


def find_restarts(
    position_ids: torch.Tensor, mask: torch.Tensor | None, batch: int, length: int, device: torch.device
) -> torch.Tensor:
    """Where a position does not follow the one before, bool (batch, length - 1). Values are not read."""
    shape = tuple(position_ids.shape)
    if shape not in ((1, length), (batch, length)):
        raise ValueError(f"`position_ids` must be ({batch}, {length}), got {shape}.")
    position_ids = position_ids.to(device)
    if mask is None:
        return (position_ids[:, 1:] != position_ids[:, :-1] + 1).expand(batch, -1)
    # Padding has no position. After it, a text continues at the next position, or at its column number if the
    # positions count columns.
    last = last_real(mask)[:, :-1]
    position_ids = position_ids.expand(batch, -1)
    step = position_ids[:, 1:] - position_ids.gather(1, (last - 1).clamp_min(0))
    columns = torch.arange(2, length + 1, device=device) - last
    return mask[:, 1:] & (last > 0) & (step != 1) & (step != columns)


def find_predicting(
    batch: int,
    length: int,
    device: torch.device,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor | None:
    """
    The tokens of a call that predict the next token, bool (batch, length): tokens that are real or follow a real one
    of the call, unless the next token begins a document. None if all do. For the arguments see [`Tokens`]; their
    values are not read.
    """
    mask = find_mask(attention_mask, batch, length, device)
    predicting = None if mask is None else last_real(mask) > 0
    if cu_seqlens is not None:
        begins = find_starts(find_boundaries(cu_seqlens, device), length)[:, 1:]
    elif position_ids is not None and length > 1:
        begins = find_restarts(position_ids, mask, batch, length, device)
    else:
        return predicting
    continues = ~torch.nn.functional.pad(begins, (0, 1))
    return continues if predicting is None else predicting & continues


@torch.compiler.disable(
    reason="`position_ids` may mark packed documents, and a graph cannot read where: pass `cu_seqlens` instead"
)
def read_boundaries(restarts: torch.Tensor) -> torch.Tensor | None:
    """`cu_seqlens` of one row, restarts (1, length - 1); None if nothing restarts."""
    if not restarts.any():
        return None
    if restarts.shape[0] > 1:
        raise ValueError(
            "`position_ids` restart inside a row of several: compiled models read packed documents in one."
        )
    begins = restarts[0].nonzero().flatten() + 1
    return torch.cat((begins.new_zeros(1), begins, begins.new_tensor([restarts.shape[1] + 1])))


class Tokens:
    """
    The real tokens of a call and the boundaries of its documents.

    Args:
        batch, length, device: shape and device of the call's tokens.
        attention_mask: (batch, at least `length`), 0 for padding. The last `length` columns are read; columns before
            them belong to the tokens of earlier calls. Padding may be anywhere in a row.
        position_ids: (batch or 1, length). A position that does not follow the one before begins a new document.
            Positions of padding do not matter; positions behind it may or may not count it. Under `torch.compile` they
            are read between two graphs, so `fullgraph=True` needs `cu_seqlens` instead. They are an error under
            `torch.func`, and are not read while the model is exported, captured, or compiled with a cache to continue.
        cu_seqlens: (documents + 1), the boundaries 0, ..., length of documents packed into one row. The first document
            of a call continues the cache.
        input_ids: (batch, length), checked against `vocab_size`.
        wanted: other tensors on the device, also copied to the host.

    Attributes:
        mask: bool (batch, length), False for padding; None if there is none.
        cu_seqlens: the boundaries of the documents in the concatenated rows; None if nothing is packed.
        starts: bool (batch or 1, length), True where a document begins; None if nothing is packed.
        first, last: the index of the first and the last document of each row, (batch), if documents are packed.
        known: host copies of `mask` and `cu_seqlens`, if they are not None and were read, and of the wanted tensors.

    Raises:
        ValueError: if a shape does not fit, an id is outside the vocabulary, or documents are packed into a padded
            batch.
    """

    # The attributes of a copy, by name: not every version of torch can trace `copy.copy`, or an update of `__dict__`.
    _fields = ("batch", "length", "known", "mask", "_source", "cu_seqlens", "starts", "first", "last")

    def __init__(
        self,
        batch: int,
        length: int,
        device: torch.device,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        vocab_size: int | None = None,
        wanted: dict[str, torch.Tensor] | None = None,
    ):
        self.batch, self.length = batch, length
        mask = find_mask(attention_mask, batch, length, device)
        restarts = None
        if cu_seqlens is not None:
            cu_seqlens = find_boundaries(cu_seqlens, device)
        elif position_ids is not None and length > 1:
            restarts = find_restarts(position_ids, mask, batch, length, device)
            if not can_read_values(restarts):
                if torch.compiler.is_compiling():
                    # `torch.compile` may leave a function out of its graphs; an export may not.
                    cu_seqlens = None if is_exporting() else read_boundaries(restarts)
                elif is_transformed():
                    raise ValueError(
                        "`position_ids` cannot be read under `torch.func`: pass `cu_seqlens` for packed documents."
                    )
                restarts = None

        ids = None
        if input_ids is not None and should_check(input_ids):
            ids = torch.stack(torch.aminmax(input_ids))
        self.known = read_values(
            ids=ids,
            mask=mask if mask is not None and should_check(mask) else None,
            cu_seqlens=cu_seqlens if cu_seqlens is not None and can_read_values(cu_seqlens) else None,
            restarts=restarts,
            **wanted or {},
        )
        if ids is not None:
            low, high = self.known.pop("ids").tolist()
            if low < 0 or high >= vocab_size:
                wrong = low if low < 0 else high
                raise ValueError(f"`input_ids` holds {wrong}, but `vocab_size` is {vocab_size}.")
        self._set_mask(None if "mask" in self.known and self.known["mask"].all() else mask)
        if self.mask is None:
            self.known.pop("mask", None)

        self.cu_seqlens = self.starts = self.first = self.last = None
        if cu_seqlens is not None:
            self._set_boundaries(cu_seqlens)
        elif restarts is not None and (begins := self.known.pop("restarts")).any():
            self._set_restarts(restarts, begins)

    def _copy_to(self, other: "Tokens") -> "Tokens":
        for name in self._fields:
            setattr(other, name, getattr(self, name))
        return other

    def to(self, device: torch.device, non_blocking: bool = False) -> "Tokens":
        """A copy on another device, for models with blocks on several."""
        other = self._copy_to(object.__new__(type(self)))
        for name in ("mask", "_source", "starts", "cu_seqlens", "first", "last"):
            if (x := getattr(self, name)) is not None:
                setattr(other, name, x.to(device, non_blocking=non_blocking))
        return other

    def with_mask(self, mask: torch.Tensor) -> "Tokens":
        """A copy with another mask; its values are not read."""
        other = self._copy_to(object.__new__(type(self)))
        other._set_mask(mask)
        other.known = {name: values for name, values in self.known.items() if name != "mask"}
        return other

    def known_lengths(self) -> np.ndarray | None:
        """Number of real tokens of each row, or of each document if they are packed; None if they were not read."""
        if self.cu_seqlens is not None:
            return np.diff(self.known["cu_seqlens"]) if "cu_seqlens" in self.known else None
        if self.mask is not None:
            return self.known["mask"].sum(1) if "mask" in self.known else None
        return np.full(self.batch, self.length)

    def _set_mask(self, mask):
        self.mask, self._source = mask, None
        if mask is not None:
            self._source = last_real(mask)  # 0 is the cached token

    def _set_boundaries(self, cu_seqlens):
        if self.batch != 1 or self.mask is not None:
            raise ValueError("`cu_seqlens` describes one row without padding; got a batch of several or a mask.")
        if "cu_seqlens" in self.known:
            bounds = self.known["cu_seqlens"].tolist()
            if bounds[0] != 0 or bounds[-1] != self.length or sorted(set(bounds)) != bounds:
                raise ValueError(
                    f"`cu_seqlens` must increase from 0 to {self.length}, with no empty document; got {bounds}."
                )
        self.cu_seqlens = cu_seqlens
        self.starts = find_starts(cu_seqlens, self.length)
        self.first = torch.zeros(1, dtype=torch.long, device=cu_seqlens.device)
        self.last = self.first + (cu_seqlens.shape[0] - 2)

    def _set_restarts(self, restarts, known):
        if self.mask is not None:
            raise ValueError("`position_ids` restart inside a row with padding: packed documents have no padding.")
        self.starts = torch.nn.functional.pad(restarts, (1, 0))
        begins = np.pad(known, ((0, 0), (1, 0)), constant_values=True)
        bounds = np.append(begins.ravel().nonzero()[0], begins.size)
        ends = begins.sum(1).cumsum()
        self.known["cu_seqlens"] = bounds
        self.cu_seqlens = send_values(bounds, restarts.device)
        self.first = send_values(np.append(0, ends[:-1]), restarts.device)
        self.last = send_values(ends - 1, restarts.device)

    def forward_fill(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """
        Copies the values of the last real token to the padding tokens after it.

        Args:
            x: (batch, length, width).
            before: values of the last real token of earlier calls, (batch, width); zero if None.
        """
        if self._source is None:
            return x
        before = torch.zeros_like(x[:, 0]) if before is None else before
        source = self._source.to(x.device)  # the last block of a model on several devices may be elsewhere
        return torch.cat((before.unsqueeze(1), x), dim=1).gather(1, source.unsqueeze(-1).expand_as(x))

    def token_before(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor | None:
        """
        The token that a token shift sees before the first token of each row of x (batch, length, width): `before`, the
        last token of earlier calls. Engines that flatten many texts into rows of single tokens override this.
        """
        return before

    def zero_padding(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, length, ...) with zeros at padding tokens."""
        return x if self.mask is None else x.masked_fill(~expand_to(self.mask, x), 0.0)

    def keep_rows(self, before: torch.Tensor | None, after: torch.Tensor) -> torch.Tensor:
        """A state (batch, ...) after a call of one token; rows with padding keep the state before it."""
        if self.mask is None:
            return after
        return torch.where(expand_to(self.mask, after), after, 0 if before is None else before)

    def run_packed(
        self,
        operator: Callable,
        sequences: dict[str, torch.Tensor],
        initial_state: torch.Tensor | None,
        inplace: bool = False,
        **arguments,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Runs a recurrence so that documents do not see each other.

        Args:
            operator: a recurrence of `subquad_kernels`.
            sequences: its arguments with a value for each token, (batch, length, ...), by name.
            initial_state: the state before the call, (batch, ...); None before the first token.
            inplace: whether it may write the new state over the old one. Packed documents never do.
            arguments: its other arguments, which are the same for every token.

        Returns:
            the output (batch, length, ...), and the state after the last document of every row.
        """
        initial_state = self.entering_states(initial_state)
        if self.cu_seqlens is None:
            return operator(**sequences, **arguments, initial_state=initial_state, inplace=inplace)
        packed = {name: x.flatten(0, 1).unsqueeze(0) for name, x in sequences.items()}
        out, state = operator(**packed, **arguments, initial_state=initial_state, cu_seqlens=self.cu_seqlens)
        return out.view(self.batch, self.length, *out.shape[2:]), state[self.last]

    def entering_states(self, state: torch.Tensor | None) -> torch.Tensor | None:
        """
        The state that enters each document (each row if nothing is packed): a row's first document continues the row's
        state, (batch, ...); the others start from zeros. None if all start from zeros.
        """
        if self.cu_seqlens is None or state is None:
            return state
        entering = torch.zeros_like(state[:1]).repeat(self.cu_seqlens.shape[0] - 1, *[1] * (state.dim() - 1))
        entering[self.first] = state
        return entering
