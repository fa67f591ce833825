"""States after the beginnings of texts, so that a shared beginning is read once."""

import hashlib
import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.utils import logging

from ..hub.foreign_files import one_line
from ..modeling.cache import RecurrentCache
from ..modeling.state_file import ModelIdentity, read_about, read_state_file
from .fingerprint import Fingerprint


if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.get_logger(__name__)
SUFFIX = ".state"


@dataclass(eq=False)
class _Entry:
    """A beginning: its ids, the state after them if it is in memory, its file if there is one, and its size."""

    ids: np.ndarray
    cache: RecurrentCache | None
    file: Path | None
    nbytes: int


class PrefixCache:
    """
    States after the beginnings of texts, for one model. `generate(prefix_cache=...)` and `subquad chat` use one.

    A state cannot be cut back to an earlier token, so it only helps texts that continue from its end. Therefore states
    are kept in two places: at the end of every text that is read, where a conversation continues, and where a text
    first departs from an earlier one. The third text with a common beginning no longer reads it. When there is no room
    left, the least recently used states are dropped.

    Args:
        max_bytes: memory for states. A single larger state is still kept.
        directory: also keep the states in files there, for other processes and later. Needs `model`.
        max_disk_bytes: size of all files together.
        model: the result of [`subquad.identify`] for the model; files of other models are ignored.
        shortest: smallest number of tokens for which a state is kept.
        max_entries: the number of states in memory and on disk. Every text is compared with each of them.

    Attributes:
        tokens_asked, tokens_read: numbers of tokens in texts, and of tokens actually read.

    Problems with files are never fatal. A damaged or forged file is ignored with a warning, and so is a disk that is
    full or not writable.

    The states depend on the weights. If these have changed since the last call (training, loading, another adapter
    active, merged or unmerged), the states in memory are dropped. Files are read and written only while the model is
    as it was at the first call, as `model` describes it.
    """

    def __init__(
        self,
        max_bytes: int = 2**30,
        directory: str | os.PathLike | None = None,
        max_disk_bytes: int = 10 * 2**30,
        model: ModelIdentity | None = None,
        shortest: int = 16,
        max_entries: int = 512,
    ):
        numbers = {"max_bytes": max_bytes, "max_disk_bytes": max_disk_bytes}
        for name, number in (numbers | {"shortest": shortest, "max_entries": max_entries}).items():
            if number < 1:
                raise ValueError(f"`{name}` must be at least 1, got {number}.")
        if directory is not None and model is None:
            raise ValueError(
                "`directory` needs `model`, the model whose states the files hold: `subquad.identify(...)`."
            )
        self.max_bytes, self.max_disk_bytes, self.max_entries = max_bytes, max_disk_bytes, max_entries
        self.shortest, self.identity = shortest, model
        self.directory = None if directory is None else Path(directory)
        self.tokens_asked = self.tokens_read = 0
        # The most recently used entry comes last.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._model: weakref.ref | None = None
        self._fingerprint = self._of_files = None
        self._uses_files = directory is not None

    def __len__(self) -> int:
        """Number of states."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Size of the states in memory."""
        return sum(entry.nbytes for entry in self._entries.values() if entry.cache is not None)

    @torch.no_grad()
    def read(self, model: "PreTrainedModel", ids: Sequence[int] | torch.Tensor) -> RecurrentCache:
        """
        A cache of one row that has read `ids`; it may be modified. Only tokens that no state covers are read.

        Args:
            model: the model that reads the tokens, the same for every call.
            ids: the ids of a text without images, (tokens).

        Raises:
            ValueError: if the states belong to another model.
        """
        ids = torch.as_tensor(ids)
        cache, stops = self.plan(model, ids)
        known = cache.get_seq_length()
        for stop in stops:
            piece = ids[None, known:stop].to(model.device)
            model(input_ids=piece, cache=cache, use_cache=True, logits_to_keep=1)
            self.put(ids[:stop], cache)
            known = stop
        return cache

    def plan(
        self, model: "PreTrainedModel", ids: Sequence[int] | torch.Tensor
    ) -> tuple[RecurrentCache, tuple[int, ...]]:
        """
        What is known of a text whose rest is read elsewhere.

        Args:
            model: as for [`~PrefixCache.read`].
            ids: the ids of a text without images, (tokens).

        Returns:
            a cache of one row that has read the longest known beginning; and the numbers of tokens after which the
            state is to be given to [`~PrefixCache.put`], in rising order, the last one of them the length of the text.
        """
        self._check_model(model)
        ids = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids, dtype=np.int64)
        known, cache = self._longest(model, ids)
        self.tokens_asked += len(ids)
        self.tokens_read += len(ids) - known
        stops = sorted({n for n in (self._branch(ids), len(ids)) if n > known})
        return model.new_cache() if cache is None else cache, tuple(stops)

    def put(self, ids: Sequence[int] | torch.Tensor | np.ndarray, cache: RecurrentCache) -> None:
        """
        Stores a copy of the state after the beginning `ids` of a text, if it is long enough.

        If the model has changed since the last `read`, nothing is stored, because the state may be from either model.

        Args:
            ids: the ids of the tokens that the model has read, (tokens).
            cache: the state after them, one row.

        Raises:
            ValueError: if `cache` has several rows, or another number of tokens than `ids`.
        """
        ids = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids, dtype=np.int64)
        if cache.batch_size not in (-1, 1):
            raise ValueError(f"`cache` must hold one sequence, got {cache.batch_size}.")
        if cache.get_seq_length() != len(ids):
            raise ValueError(f"`cache` has read {cache.get_seq_length()} tokens, but `ids` has {len(ids)}.")
        if len(ids) < self.shortest or not self._is_unchanged():
            return
        key = ids.tobytes()
        if key not in self._entries:
            cache = cache.clone()
            cache.crop(0)
            self._entries[key] = entry = _Entry(ids.copy(), cache, None, cache.nbytes)
            if self._uses_files:
                self._write(entry)
        self._entries.move_to_end(key)
        self._drop_oldest()

    def clear(self) -> None:
        """Drops all states, including files."""
        for entry in self._entries.values():
            _delete(entry.file)
        self._entries.clear()
        # Files still belong to the model as it was at the first call. It may have changed since.
        if self.directory is None or (self._model is not None and self._model() is None):
            self._model = None

    def _is_unchanged(self) -> bool:
        """Whether the model of the last `read`, if there was one, is as it was then."""
        if self._model is None:
            return True
        model = self._model()
        return model is not None and Fingerprint(model).matches(self._fingerprint)

    def _check_model(self, model: "PreTrainedModel") -> None:
        """Drops the states of earlier weights."""
        now = Fingerprint(model)
        if self._model is None:
            self._model, self._of_files = weakref.ref(model), now
        elif self._model() is not model:
            raise ValueError("`prefix_cache` holds the states of another model; each model needs one of its own.")
        elif now.matches(self._fingerprint):
            return
        else:
            self._entries.clear()
        self._fingerprint = now
        self._uses_files = self.directory is not None and now.matches(self._of_files)
        if self._uses_files:
            self._find_files(model)

    def _longest(self, model: "PreTrainedModel", ids: np.ndarray) -> tuple[int, RecurrentCache | None]:
        """The number of tokens of the longest known beginning of a text, and a copy of its state."""
        for key, entry in sorted(self._entries.items(), key=lambda item: -len(item[1].ids)):
            length = len(entry.ids)
            if length > len(ids) or not np.array_equal(entry.ids, ids[:length]):
                continue
            if entry.cache is None and not self._load(model, key, entry):
                continue
            self._entries.move_to_end(key)
            if entry.file is not None:
                with suppress(OSError):  # another process may have deleted it
                    os.utime(entry.file)
            cache = entry.cache.clone()
            self._drop_oldest()
            return length, cache
        return 0, None

    def _branch(self, ids: np.ndarray) -> int:
        """The length in tokens of the longest beginning shared with an earlier text."""
        longest = 0
        for entry in self._entries.values():
            length = min(len(entry.ids), len(ids))
            other = np.flatnonzero(entry.ids[:length] != ids[:length])
            longest = max(longest, int(other[0]) if len(other) else length)
        return longest if longest >= self.shortest else 0

    def _drop_oldest(self) -> None:
        """Drops states until the others fit into the memory, the disk and the number of entries."""
        entries = list(self._entries.items())
        memory, disk = self.nbytes, sum(entry.nbytes for _, entry in entries if entry.file is not None)
        for number, (key, entry) in enumerate(entries[:-1]):  # never the last one
            if memory > self.max_bytes and entry.cache is not None:
                entry.cache = None
                memory -= entry.nbytes
            too_many = len(entries) - number > self.max_entries
            if entry.file is not None and (disk > self.max_disk_bytes or too_many):
                _delete(entry.file)
                entry.file = None
                disk -= entry.nbytes
            if too_many or (entry.cache is None and entry.file is None):
                del self._entries[key]

    # Files.

    def _write(self, entry: _Entry) -> None:
        name = hashlib.sha256(self.identity.digest.encode() + str(entry.cache.dtype).encode() + entry.ids.tobytes())
        file = self.directory / f"{name.hexdigest()}{SUFFIX}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            entry.cache.save(file, self.identity, {"ids": entry.ids.tolist()})
        except (OSError, ValueError) as error:  # it is still in memory
            reason = one_line(error).replace(str(file), "a state")
            logger.warning_once(f"States are not kept in {self.directory}: {reason}")
        else:
            entry.file = file

    def _find_files(self, model: "PreTrainedModel") -> None:
        """Notes the files of this model, without reading their states."""
        files = []
        with suppress(OSError):  # a directory that is not there yet, or may not be read
            files = [path for path in self.directory.iterdir() if path.suffix == SUFFIX and path.is_file()]
        found = []
        for file in files:
            try:
                if (ids := self._ids_of(read_about(file), model)) is not None:
                    found.append((file.stat().st_mtime, file.stat().st_size, file, ids))
            except (OSError, ValueError) as error:
                logger.warning(f"A state is ignored: {error}")
        for _, size, file, ids in sorted(found, key=lambda each: each[0]):
            self._entries[ids.tobytes()] = _Entry(ids, None, file, size)

    def _ids_of(self, about: dict[str, Any], model: "PreTrainedModel") -> np.ndarray | None:
        """The ids of the text of a state; None if the state belongs to another model."""
        owner, text = about.get("model"), about.get("text")
        owner = owner.get("digest") if isinstance(owner, dict) else None
        ids = text.get("ids") if isinstance(text, dict) else None
        if (owner, about["dtype"]) != (self.identity.digest, str(model.dtype).removeprefix("torch.")):
            return None
        if not isinstance(ids, list) or len(ids) != about["seen_tokens"] or {type(each) for each in ids} != {int}:
            return None
        vocabulary = model.config.get_text_config().vocab_size
        return np.array(ids, dtype=np.int64) if min(ids) >= 0 and max(ids) < vocabulary else None

    def _load(self, model: "PreTrainedModel", key: bytes, entry: _Entry) -> bool:
        """Reads the state of an entry from its file; drops the entry if that fails."""
        try:
            states, about = read_state_file(entry.file)
            if not np.array_equal(self._ids_of(about, model), entry.ids) or {len(x) for x in states.values()} != {1}:
                raise ValueError(f"{entry.file} is not the file that was there before.")
            cache_class = type(model.new_cache())
            cache = cache_class.from_states(entry.file, model.config.get_text_config(), states, about)
            entry.cache = cache.to(model.device, model.dtype)
        except Exception as error:  # whatever is wrong with it, the text is read again
            logger.warning(f"A state is ignored: {one_line(error)}")
            del self._entries[key]
            return False
        return True


def _delete(file: Path | None) -> None:
    if file is not None:
        with suppress(OSError):  # not allowed, or already deleted
            file.unlink()


__all__ = ["PrefixCache"]
