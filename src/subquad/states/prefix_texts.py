"""Texts in order, so that those with the same beginning are neighbours."""

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence

import numpy as np
import torch


# A text as bytes: its ids, big-endian, so that texts are in the order of their ids.
_ID = np.dtype(">u4")


def text_key(ids: Sequence[int] | torch.Tensor | np.ndarray) -> bytes:
    """
    The text of ids (tokens) as bytes, of which each token has [`WIDTH`].

    Raises:
        ValueError: if they are no ids.
    """
    ids = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids)
    if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >> 32)):
        raise ValueError(f"A text must be a sequence of ids, got {ids.dtype} {ids.shape} {ids.ravel()[:4]}.")
    return ids.astype(_ID).tobytes()


def text_ids(key: bytes) -> np.ndarray:
    """The ids of a text, int64 (tokens)."""
    return np.frombuffer(key, _ID).astype(np.int64)


WIDTH = _ID.itemsize


def shared_bytes(a: bytes, b: bytes) -> int:
    """The size of the longest common beginning of two texts, in whole tokens."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    different = np.frombuffer(a, _ID, size // WIDTH) != np.frombuffer(b, _ID, size // WIDTH)
    return int(different.argmax()) * WIDTH


def shared_among(keys: Iterable[bytes]) -> dict[bytes, set[int]]:
    """The sizes of the beginnings that each text shares with another one."""
    keys = sorted(set(keys))
    near = np.array([shared_bytes(a, b) for a, b in itertools.pairwise(keys)], dtype=np.int64)
    shared = {}
    for n, key in enumerate(keys):  # what two texts share is the least of what is shared by neighbours between them
        sides = np.minimum.accumulate(near[n:]), np.minimum.accumulate(near[:n][::-1])
        shared[key] = {size for side in sides for size in side.tolist()}
    return shared


class SortedTexts:
    """A set of texts, as [`text_key`] makes them, in which beginnings are found in logarithmic time."""

    def __init__(self):
        self._keys: list[bytes] = []

    def add(self, key: bytes) -> None:
        """Adds a text that is not there."""
        insort(self._keys, key)

    def remove(self, key: bytes) -> None:
        """Removes a text that is there."""
        del self._keys[bisect_left(self._keys, key)]

    def longest_beginning(self, key: bytes) -> bytes | None:
        """The longest text with which `key` begins."""
        while key and (place := bisect_right(self._keys, key)):
            before = self._keys[place - 1]
            if len(before) <= len(key) and key.startswith(before):
                return before
            # A beginning of `key` is not above `before`, so `before` begins with it, too.
            key = key[: shared_bytes(before, key)]
        return None

    def longest_shared(self, key: bytes) -> int:
        """The size of the longest beginning that `key` shares with a text."""
        place = bisect_left(self._keys, key)
        return max((shared_bytes(key, near) for near in self._keys[max(place - 1, 0) : place + 1]), default=0)
