"""Positions of a call's tokens: in the splits of their texts, and in the windows that the blocks read."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from subquad_kernels.tracing import can_read_values

from ...modeling.padding import Tokens, read_values, send_values
from .cache_avey import AveyCache


# Maximum number of rows that go through the blocks together if no gradient is needed: a long text has too many windows
# for the memory.
MAX_ROWS = 2**16


@dataclass
class Windows:
    """
    Windows (section 2.2) as rows of one tensor: first the rows of missing splits, shared by all windows, then the
    windows, grouped by their number of retrieved splits.

    Attributes:
        selection: the splits that end the windows.
        groups: number of retrieved splits, and the indices of the selected splits that retrieve that many.
        zero_rows: inputs of each block's contextualizer for the rows of missing splits.
        missing: number of these rows in the tensor; 0 if `zero_rows` has them from an earlier tensor.
    """

    selection: "Selection"
    groups: list[tuple[int, torch.Tensor]]
    zero_rows: list[torch.Tensor]
    missing: int

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All rows (rows, width) except missing splits', as one tensor (windows, rows, width) per group."""
        shapes = [(chosen.shape[0], self.selection.rows(retrieved)) for retrieved, chosen in self.groups]
        return self._split(x[self.missing :], shapes)

    def _split(self, x: torch.Tensor, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
        parts = x.split([windows * rows for windows, rows in shapes])
        return [torch.unflatten(part, 0, shape) for part, shape in zip(parts, shapes, strict=True)]

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """Selects the output rows, (windows * kept, width), from all rows."""
        return torch.cat([part[:, -self.selection.kept :].flatten(0, 1) for part in self.split(x)])

    def parts(
        self, tail: torch.Tensor, gate: torch.Tensor, layer_idx: int, last: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]]:
        """
        The inputs of a block's contextualizer, call by call: rows (windows, rows, width), the gates of the output
        rows, the rows of missing splits before them, and the total number of rows.

        Args:
            tail: all rows, (rows, width).
            gate: the gates of all rows; in the `last` block, of the output rows.
        """
        if self.missing:
            zero_rows = tail[: self.missing]
            if not torch.is_grad_enabled():
                self.zero_rows.append(zero_rows.clone())
        else:
            zero_rows = self.zero_rows[layer_idx].to(tail.device) if self.zero_rows else None
        if last:
            gates = self._split(gate, [(chosen.shape[0], self.selection.kept) for _, chosen in self.groups])
        else:
            gates = self.split(gate)
            if self.missing:
                yield zero_rows[None], gate[None, : self.missing], None, self.missing
        context = self.selection.rows(self.selection.most)
        for rows, gate_rows in zip(self.split(tail), gates, strict=True):
            before = context - rows.shape[1]
            yield rows, gate_rows, zero_rows[:before] if before > 0 else None, context


@dataclass
class Selection:
    """
    The splits of a call that are contextualised, because they hold wanted tokens.

    Attributes:
        number: of each split in its text, int64 (texts, selected).
        current: their embeddings, (texts, selected, chunk_size, d_embed).
        begin, end: the range of output tokens in these splits.
        source: the index of each wanted token among the output tokens, (texts or 1, wanted).
        most: maximum number of splits that one retrieves, k - 1.
        groups: number of retrieved splits, and the indices of the selected splits that retrieve that many. All
            retrieve `most` if the numbers are not known on the host.
    """

    number: torch.Tensor
    current: torch.Tensor
    begin: int
    end: int
    source: torch.Tensor
    most: int
    groups: dict[int, torch.Tensor]

    @property
    def kept(self) -> int:
        """Number of output tokens of a split."""
        return self.end - self.begin

    def rows(self, retrieved: int) -> int:
        """Number of rows of a window with that many retrieved splits."""
        return retrieved * self.current.shape[2] + self.end

    def windows(self, cache: AveyCache | None) -> Iterator[Windows]:
        """
        The windows of all selected splits, one pass through the blocks at a time. The cache keeps the contextualizers'
        inputs for the rows of missing splits.
        """
        constant = not torch.is_grad_enabled()
        keeps, fewest, missing = cache is not None and constant, min(self.groups), 0
        zero_rows = (cache.zero_rows if keeps else None) or []
        if not zero_rows and fewest < self.most:
            missing = self.current.shape[2] * (self.most if keeps else self.most - fewest)
        for groups in self._batches(MAX_ROWS if constant else sys.maxsize):
            yield Windows(self, groups, zero_rows, missing)
            missing = 0
        if keeps:
            cache.zero_rows = zero_rows or None  # an empty list would trigger a recompilation

    def _batches(self, limit: int) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """The groups, cut into lists with about `limit` rows or fewer each."""
        batch, room = [], limit
        for retrieved, chosen in self.groups.items():
            rows = self.rows(retrieved)
            while chosen.shape[0]:
                fits = room // rows
                if batch and fits < 1:
                    yield batch
                    batch, room = [], limit
                    continue
                batch.append((retrieved, chosen[: max(fits, 1)]))
                room -= batch[-1][1].shape[0] * rows
                chosen = chosen[max(fits, 1) :]
        yield batch

    def tokens(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The wanted tokens, (texts, wanted, width), from the output rows of all windows."""
        x, order = torch.cat(parts), torch.cat(list(self.groups.values())).argsort()
        texts, windows = self.number.shape[0], self.number.numel()
        x = torch.unflatten(x, 0, (windows, -1))[order.to(x.device)].view(texts, -1, x.shape[-1])
        source = self.source.expand(texts, -1)[..., None].expand(-1, -1, x.shape[-1])
        return x.gather(1, source.to(x.device))


@dataclass
class Text:
    """
    The tokens that a call can see. Each text (a row of the batch, or a packed document) begins with a split.

    Attributes:
        splits: embeddings, zero where there is no token: (texts, splits, chunk_size, d_embed). Packed documents follow
            one another as a single text.
        position: the index of each token of the call among the tokens of `splits`, (texts, tokens). Padding has
            the index of the last token before it, or -1 if there is none.
        first: number of the split that begins the document of each split, (1, splits); None without packed documents.
        fresh: whether the positions are 0, 1, ...: each text begins with this call and has no padding.
        known: the values of `position`, or of `first` if documents are packed; None if not known on the host.
    """

    splits: torch.Tensor
    position: torch.Tensor
    first: torch.Tensor | None
    fresh: bool
    known: np.ndarray | None

    def select(self, wanted: int, one_by_one: bool, most: int) -> Selection:
        """
        The splits that hold the `wanted` last tokens of every text.

        Args:
            one_by_one: whether each token has a window of its own, which ends with it.
            most: maximum number of splits that one retrieves.
        """
        size, splits, position = self.splits.shape[2], self.splits, self.position[:, -wanted:].clamp_min(0)
        device, number, offset = splits.device, position // size, position % size
        begin, end, run, retrieved = 0, size, None, None
        if self.first is not None:
            number = torch.arange(splits.shape[1], device=device)[None]
            current, source = splits, position
            if self.known is not None:
                retrieved = np.arange(splits.shape[1]) - self.known
            return Selection(number, current, begin, end, source, most, group(number, run, retrieved, most))

        known = None if self.known is None else self.known[:, -wanted:].clip(min=0)
        if known is None and not self.fresh and can_read_values(position):
            known = read_values(position=position)["position"]
        if not one_by_one and (self.fresh or (known is not None and (known == known[:1]).all())):
            low, high = self.position.shape[1] - wanted, self.position.shape[1] - 1
            if not self.fresh:
                low, high = known[0, 0].item(), known[0, -1].item()
            run = first, last = low // size, high // size
            number = torch.arange(first, last + 1, device=device)[None]
            current = splits[:, first : last + 1]
            if first == last:
                begin, end = low % size, high % size + 1
            source = position - first * size - begin
        else:
            window = torch.arange(wanted, device=device) if one_by_one else number - number[:, :1]
            if known is not None:
                retrieved = known // size
            if not one_by_one:
                # The last tokens of a text are in one split more than they would fill, or in two more.
                span = (wanted + size - 2) // size + 1
                if known is not None:
                    span = (retrieved[:, -1] - retrieved[:, 0]).max().item() + 1
                    retrieved = (retrieved[:, :1] + np.arange(span)).clip(max=splits.shape[1] - 1)
                number = (number[:, :1] + torch.arange(span, device=device)).clamp_max(splits.shape[1] - 1)
            current = splits[torch.arange(splits.shape[0], device=device)[:, None], number]
            if one_by_one:
                current = current * (torch.arange(size, device=device) <= offset[..., None])[..., None]
            if known is not None and (one_by_one or number.shape[1] == 1):
                begin, end = (known % size).min().item(), (known % size).max().item() + 1
            source = window * (end - begin) + offset - begin
        number = number.expand(splits.shape[0], -1)
        return Selection(number, current, begin, end, source, most, group(number, run, retrieved, most))

    def new_token(self, sums: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """
        For a call with one token per text: the token, (texts, 1, 1, d_embed), and from the `sums` of the cache the
        scores of the tokens before it in its split, (texts, 1, splits).
        """
        splits, position = self.splits, self.position
        token = splits.flatten(1, 2)[
            torch.arange(splits.shape[0], device=splits.device)[:, None], position.clamp_min(0)
        ]
        begins = position % splits.shape[2] == 0
        if tokens.mask is not None:
            token, begins = tokens.zero_padding(token), begins & tokens.mask
        sums = F.pad(sums, (0, splits.shape[1] - sums.shape[1])).masked_fill(begins, 0.0)
        return token[:, None], sums[:, None]

    def last_scores(self, scores: torch.Tensor, selection: Selection, tokens: Tokens) -> torch.Tensor:
        """Selects the scores of the split with the last token of each row, (rows, splits)."""
        device, splits = self.splits.device, self.splits.shape[1]
        if self.first is None:
            rows = torch.arange(scores.shape[0], device=device)
            return scores[rows, selection.source[:, -1] // selection.kept]
        last = self.position.view(tokens.batch, -1)[:, -1] // self.splits.shape[2]
        begin, local = self.first[0, last], torch.arange(splits, device=device)
        scores = scores[0, last[:, None], (begin[:, None] + local).clamp_max(splits - 1)]
        return scores.masked_fill(local >= (last - begin)[:, None], float("-inf"))


def group(
    number: torch.Tensor, run: tuple[int, int] | None, retrieved: np.ndarray | None, most: int
) -> dict[int, torch.Tensor]:
    """
    [`Selection.groups`] of the splits `number` (texts, selected).

    Args:
        run: the first and the last number, if they are the same in all texts and known on the host.
        retrieved: otherwise the number of splits before each in its document, (texts, selected), if known on the host.
    """
    windows, groups = torch.arange(number.numel(), device=number.device).view(number.shape), {}
    if run is not None:
        first, last = run
        for n in range(most):
            if first <= n <= last:
                groups[n] = windows[:, n - first]
        if last >= most:
            groups[most] = windows[:, max(most - first, 0) :].flatten()
    elif retrieved is not None:
        counts = retrieved.ravel().clip(max=most)
        for n in np.unique(counts).tolist():
            groups[n] = send_values(np.flatnonzero(counts == n), number.device)
    else:
        groups[most] = windows.flatten()
    return groups


def read_text(x: torch.Tensor, tokens: Tokens, cache: AveyCache | None, size: int) -> Text:
    """
    The embeddings of a call, x (batch, length, d_embed), in splits of `size` tokens, after the tokens in the cache.
    The new ones are added to the cache.
    """
    return (_read_rows if tokens.cu_seqlens is None else _read_documents)(x, tokens, cache, size)


def _read_rows(x: torch.Tensor, tokens: Tokens, cache: AveyCache | None, size: int) -> Text:
    fresh = tokens.mask is None
    position = torch.arange(x.shape[1], device=x.device)[None] if fresh else tokens.mask.cumsum(1) - 1
    x, known = tokens.zero_padding(x), None
    if can_read_values(x) and (fresh or "mask" in tokens.known):
        known = np.arange(x.shape[1])[None] if fresh else tokens.known["mask"].cumsum(1) - 1
        known = np.broadcast_to(known, x.shape[:2])
    if cache is not None:
        fresh = fresh and not cache.is_initialized
        position = cache.lengths(x)[:, None] + position
        if known is not None and cache.is_initialized:
            known = cache.known_lengths()[:, None] + known
        room = cache.capacity_for(x.shape[1])
        embeddings = cache.append(cache.after_blocks, "embeddings", x, position, room).to(x.dtype)
    else:
        embeddings = F.pad(x, (0, 0, 0, -x.shape[1] % size))
        if not fresh:
            source = position.clamp_min(0)[..., None].expand_as(x)
            embeddings = torch.zeros_like(embeddings).scatter_add(1, source, x)
    return Text(torch.unflatten(embeddings, 1, (-1, size)), position.expand(x.shape[0], -1), None, fresh, known)


def _read_documents(x: torch.Tensor, tokens: Tokens, cache: AveyCache | None, size: int) -> Text:
    device, held, lengths = x.device, None, None
    documents = tokens.cu_seqlens.shape[0] - 1
    extra = torch.zeros(documents, dtype=torch.long, device=device)
    if cache is not None and cache.is_initialized:  # the first document of every row continues the cache
        held, lengths = cache.after_blocks.states["embeddings"], cache.lengths(x)
        extra[tokens.first] = lengths
    read, room = (0, 0) if cache is None else (cache.get_seq_length(), cache.capacity_for(x.shape[1]))

    rows, x = x.shape[0], x.flatten(0, 1)
    bounds = tokens.cu_seqlens.long()
    sizes = bounds.diff() + extra
    ends = (-(-sizes // size)).cumsum(0)  # in splits
    begins = ends - -(-sizes // size)
    steps = torch.arange(x.shape[0], device=device)
    document = torch.searchsorted(bounds[1:], steps, right=True)
    position = begins[document] * size + extra[document] + steps - bounds[document]

    # While a graph is traced, the maximum number of splits for any document lengths.
    splits = (x.shape[0] + rows * read + documents * (size - 1)) // size
    known = None
    if "cu_seqlens" in tokens.known and can_read_values(x):
        known_sizes = tokens.known_lengths()
        known_first = np.searchsorted(tokens.known["cu_seqlens"], np.arange(rows) * tokens.length)
        if held is not None:
            known_sizes[known_first] += cache.known_lengths()
        numbers = -(-known_sizes // size)
        known = np.repeat(numbers.cumsum() - numbers, numbers)[None]
        splits = known.size
    embeddings = x.new_zeros(splits * size, x.shape[1])
    embeddings = embeddings.scatter_add(0, position[:, None].expand_as(x), x)
    if held is not None:
        steps = torch.arange(held.shape[1], device=device)
        source = (begins[tokens.first, None] * size + steps).where(steps < lengths[:, None], 0)
        source = source.flatten()[:, None].expand(-1, x.shape[1])
        embeddings = embeddings.scatter_add(0, source, held.flatten(0, 1).to(x.dtype))
    number = torch.arange(splits, device=device)
    first = begins[torch.searchsorted(ends, number, right=True).clamp_max(documents - 1)]
    if cache is not None:
        begin, lengths = begins[tokens.last, None] * size, sizes[tokens.last]
        steps = torch.arange(room, device=device)
        kept = embeddings[(begin + steps).clamp_max(splits * size - 1)]
        cache.replace(kept * (steps < lengths[:, None])[..., None], lengths, tokens)
        if known is not None:
            cache.know_lengths(known_sizes[np.append(known_first[1:], documents) - 1])
    return Text(embeddings.view(1, splits, size, -1), position[None], first[None], False, known)


__all__ = ["MAX_ROWS", "Selection", "Text", "Windows", "read_text"]
