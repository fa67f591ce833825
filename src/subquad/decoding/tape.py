"""
What a captured token adds to the records of a cache, so that it can be taken back: the graph writes the updates of one
token to buffers, at a place that it counts itself.
"""

import operator
import weakref

import torch

from ..modeling.cache import RecurrentCache
from ..modeling.layer_state import MAX_RECORDED, Record


# Tokens that the buffers hold. When they are full, the records take a copy, and the buffers are written again.
CAPACITY = 64


class TapedRecord(Record):
    """A record to which a graph adds tokens. They are read from the tape when somebody needs them."""

    def __init__(self, record: Record, tape: "Tape", buffers: list[torch.Tensor]):
        # Other tensors of the same memory, which is then in use as long as the record.
        self._tape, self._buffers, self._taken = tape, [x.detach() for x in buffers], 0
        super().__init__(record.replay, record.before, record.updates)

    @property
    def updates(self) -> tuple[torch.Tensor, ...]:
        start, self._taken = self._taken, self._tape.count
        if start < self._taken:
            self.extend(tuple(x[:, start : self._taken] for x in self._buffers))
        return self._held

    @updates.setter
    def updates(self, updates: tuple[torch.Tensor, ...]) -> None:
        self._held = updates

    def __reduce__(self) -> tuple:
        """A copy has its own tokens."""
        return Record, (self.replay, self.before, self.updates)


class Tape:
    """
    The updates of the tokens that a graph has read since a cache began to use it.

    Args:
        rows: rows of the cache.

    Attributes:
        count: how many tokens they are.
    """

    def __init__(self, rows: int, device: torch.device):
        self.rows, self.count = rows, 0
        self._place = torch.zeros(1, dtype=torch.long, device=device)
        self._buffers: dict[tuple[int, str], list[torch.Tensor]] = {}
        self._held: list[weakref.ref[TapedRecord]] = []

    @property
    def tensors(self) -> dict[tuple[int, str, int], torch.Tensor]:
        return {(*name, n): x for name, buffers in self._buffers.items() for n, x in enumerate(buffers)}

    def write(self, cache: RecurrentCache) -> None:
        """Moves the records of one token from the cache of a graph to the tape. Both are captured."""
        for name, record in _records(cache).items():
            if name not in self._buffers:
                self._buffers[name] = [x.new_zeros(self.rows, CAPACITY, *x.shape[2:]) for x in record.updates]
            for buffer, x in zip(self._buffers[name], record.updates, strict=True):
                buffer.index_copy_(1, self._place, x)
        for layer in cache.all_layers:
            layer.records.clear()
        self._place += 1

    def is_held_by(self, cache: RecurrentCache) -> bool:
        """Whether the records of a cache get the next token, and there is room for it."""
        records, held = list(_records(cache).values()), [record() for record in self._held]
        return self.count < CAPACITY and len(records) == len(held) and all(map(operator.is_, records, held))

    def start(self, cache: RecurrentCache) -> None:
        """
        Adds the tokens from now on to the records of a cache.

        Raises:
            RuntimeError: if the cache has other records than the tape.
        """
        records = _records(cache)
        if records.keys() != self._buffers.keys():
            raise RuntimeError(f"a token records {[*self._buffers]}, the cache {[*records]}")
        self.rewind()
        self._held = []
        for (number, key), record in records.items():
            taped = TapedRecord(record, self, self._buffers[number, key])
            cache.all_layers[number].records[key] = taped
            self._held.append(weakref.ref(taped))

    def rewind(self) -> None:
        self.count = 0
        self._place.zero_()


def take_from_tapes(cache: RecurrentCache) -> None:
    """Gives the records of a cache their own copy of all tokens: from now on no tape adds any."""
    for (number, key), record in _records(cache).items():
        if isinstance(record, TapedRecord):
            own = cache.all_layers[number].records[key] = Record(record.replay, record.before, record.updates)
            if own.tokens > 2 * MAX_RECORDED:
                own.keep(MAX_RECORDED)


def _records(cache: RecurrentCache) -> dict[tuple[int, str], Record]:
    """All records by the number of their layer and their name."""
    return {(number, key): x for number, layer in enumerate(cache.all_layers) for key, x in layer.records.items()}
