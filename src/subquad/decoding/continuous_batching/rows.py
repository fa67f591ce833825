"""The running requests of continuous batching: each has a row of one cache, until it ends."""

from typing import TYPE_CHECKING

import torch

from ...modeling.cache import RecurrentCache
from ..step import make_step
from .requests import Request


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def round_up(rows: int) -> int:
    """
    The number of rows of a cache for a number of requests. There are few of them, because each has a decoding step of
    its own.
    """
    unit = 1 if rows <= 4 else 4 if rows <= 32 else 8 if rows <= 64 else 32
    return -(-rows // unit) * unit


class Rows:
    """
    The running requests. A decoding step reads whole batches, so the states of all requests are rows of one cache.
    A request takes a row that nobody uses, by writing its state there, and gives it back by being forgotten. What the
    rows without a request hold is never looked at. All states are copied only if the number of rows changes.

    Attributes:
        places: the request of each row.
        cache: the cache; None if no request is running.
    """

    def __init__(self, model: "PreTrainedModel"):
        self.model, self.cache, self._step = model, None, None
        self.places: list[Request | None] = []

    @property
    def requests(self) -> list[Request]:
        """The running requests, in the order of their rows."""
        return [request for request in self.places if request is not None]

    def put(self, requests: list[Request], cache: RecurrentCache) -> None:
        """Lets requests run, whose states are the rows of `cache`."""
        running = len(self.requests)
        if self.cache is None:
            self.cache = cache
            self._resize(list(range(len(requests))), requests)
            return
        if running + len(requests) > len(self.places):
            self._resize([row for row, each in enumerate(self.places) if each], self.requests, len(requests))
        free = [row for row, request in enumerate(self.places) if request is None][: len(requests)]
        self.cache.write_rows(free, cache)
        for row, request in zip(free, requests, strict=True):
            self.places[row] = request

    def forget(self, requests: list[Request]) -> None:
        """Gives back the rows of requests."""
        gone = set(requests)
        self.places = [None if request in gone else request for request in self.places]
        kept = self.requests
        if not kept:
            self.clear()
        elif round_up(len(kept)) < len(self.places):
            self._resize([row for row, request in enumerate(self.places) if request], kept)

    def state_of(self, request: Request, tokens: int) -> RecurrentCache:
        """A copy of the state of a request, which has read a number of tokens."""
        row = self.places.index(request)
        return self.cache.copy_of_row(row, tokens)

    def clear(self) -> None:
        """Forgets all requests."""
        self.cache = self._step = None
        self.places = []

    def _resize(self, rows: list[int], requests: list[Request], more: int = 0) -> None:
        """Keeps some rows, with room for `more` others."""
        size = round_up(len(rows) + more)
        fill = [rows[0]] * (size - len(rows))  # any state: these rows are not looked at
        if [*rows, *fill] != list(range(self.cache.batch_size)):
            self.cache.batch_select_indices(torch.tensor([*rows, *fill]))
        self.places = [*requests, *[None] * len(fill)]
        self._step = None

    def read(self) -> torch.Tensor:
        """Reads the newest token of each running request. Returns their logits, (requests, vocabulary)."""
        if self._step is None:
            self._step = make_step(self.model, self.cache, len(self.places))
        ids = [[0 if request is None else request.generated_tokens[-1]] for request in self.places]
        logits = self._step(torch.tensor(ids, device=self.model.device))
        if None not in self.places:
            return logits
        rows = [row for row, request in enumerate(self.places) if request is not None]
        return logits[torch.tensor(rows, device=logits.device)]
