"""States after the beginnings of texts, so that a shared beginning is read once."""

import functools
import hashlib
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.utils import logging

from ..modeling.arguments import check_counts
from ..modeling.cache import RecurrentCache
from ..modeling.state_file import ModelIdentity
from .fingerprint import Fingerprint, digest_of
from .packed_states import DTYPES, pack, unpack
from .prefix_files import StateDirectory
from .prefix_texts import WIDTH, SortedTexts, shared_among, text_ids, text_key


if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.get_logger(__name__)


@dataclass(eq=False)
class _Entry:
    """A state in memory, which is never modified, or in a file, or in both; and its size."""

    cache: RecurrentCache | None
    file: Path | None
    nbytes: int
    # Held while the file is read, so that several threads read it once.
    lock: threading.Lock = field(default_factory=threading.Lock)


class PrefixCache:
    """
    States after the beginnings of texts, for one model. `generate(prefix_cache=...)` uses one, for a text or a batch,
    and so do servers and `subquad chat`. Several threads may use it at once.

    A state cannot be cut back to an earlier token, so it only helps texts that continue from its end. Therefore states
    are kept at the end of every text that is read, where a conversation continues, and where a text first departs from
    an earlier one or from another one of its batch. The third text with a common beginning no longer reads it; in a
    batch, no text but one does. Long texts can have more states (`every`, `after`). When there is no room left, the
    least recently used states are dropped.

    Args:
        max_bytes: memory for states. A single larger state is still kept.
        directory: also keep the states in files there, for other processes and later. They are written in the
            background, and the process ends when all have been written.
        max_disk_bytes: size of all files in the directory together. The least recently used ones are deleted.
        shortest: smallest number of tokens for which a state is kept, and from one state to the next one of `every`,
            `after` or a batch.
        every: also keep a state whenever this number of tokens has been read.
        after: also keep a state after each of these ids, such as the one that ends a turn.
        max_entries: the number of states in memory, and the number of files in the directory.
        dtype: "int8", "bfloat16" or "float16": the large states are stored in it, and texts that continue from them
            are no longer exact; see the guide on states for the loss. None stores them as they are. Files of one dtype
            are not used with another.

    Attributes:
        tokens_asked, tokens_read: numbers of tokens in texts, and of tokens actually read.
        version: a number that changes if the model has changed, see [`~PrefixCache.put`].

    Problems with files are never fatal. A damaged or forged file is ignored with a warning, and so is a disk that is
    full or not writable.

    The states depend on the weights. If these have changed since the last call (training, loading, another adapter
    active, merged or unmerged), the states in memory are dropped. A file belongs to the configuration, weights and
    adapters with which it was made, as [`digest_of`] identifies them, and is used again when the model has these.
    """

    def __init__(
        self,
        max_bytes: int = 2**30,
        directory: str | os.PathLike | None = None,
        max_disk_bytes: int = 10 * 2**30,
        shortest: int = 16,
        every: int | None = None,
        after: Collection[int] = (),
        max_entries: int = 4096,
        dtype: str | None = None,
    ):
        check_counts(max_bytes=max_bytes, max_disk_bytes=max_disk_bytes, shortest=shortest, max_entries=max_entries)
        if every is not None:
            check_counts(every=every)
        if dtype not in (None, *DTYPES):
            raise ValueError(f"`dtype` must be None or one of {', '.join(DTYPES)}, got {dtype!r}.")
        self.max_bytes, self.max_entries, self.dtype = max_bytes, max_entries, dtype
        self.shortest, self.every, self.after = shortest, every, tuple(after)
        for token in self.after:
            check_counts(0, after=token)
        self.directory = None if directory is None else StateDirectory(directory, max_disk_bytes, max_entries)
        self.tokens_asked = self.tokens_read = self.version = 0
        # All that follows is read and written under this lock. States are copied, read and written without it.
        self._lock = threading.RLock()
        # By their texts. The most recently used entry comes last.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._texts = SortedTexts()
        self._model: weakref.ref | None = None
        self._fingerprint: Fingerprint | None = None
        self._identity: ModelIdentity | None = None  # of the files; None if there are none

    def __len__(self) -> int:
        """Number of states."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Size of the states in memory."""
        with self._lock:
            return sum(entry.nbytes for entry in self._entries.values() if entry.cache is not None)

    @torch.no_grad()
    def read(
        self,
        model: "PreTrainedModel",
        input_ids: Sequence[int] | torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> RecurrentCache:
        """
        A cache that has read `input_ids`; it may be modified. Only tokens that no state covers are read.

        Args:
            model: the model that reads the tokens, the same for every call.
            input_ids: the ids of a text without images, (tokens), or of several, (batch, tokens).
            attention_mask: (batch, tokens), 0 for padding, which may be anywhere; None if there is none.

        Raises:
            ValueError: if the states belong to another model, or `input_ids` are no ids, or a shape does not fit.
        """
        input_ids = torch.as_tensor(input_ids)
        rows = input_ids if input_ids.dim() == 2 else input_ids[None]
        if attention_mask is not None and attention_mask.shape != rows.shape:
            shape, wanted = tuple(attention_mask.shape), tuple(rows.shape)
            raise ValueError(f"`attention_mask` must be {wanted}, as `input_ids`, got {shape}.")
        if attention_mask is not None:
            texts = [ids[mask != 0] for ids, mask in zip(rows.cpu(), attention_mask.cpu(), strict=True)]
        else:
            texts = list(rows.cpu())
        reading = self.begin(model, texts)
        while not reading.is_done:
            reading.step()
        return reading.cache(rows.shape[1])

    def begin(self, model: "PreTrainedModel", texts: Sequence[Sequence[int] | torch.Tensor]) -> "Reading":
        """
        Begins to read texts, which is left to the caller to do in steps.

        Args:
            model: as for [`~PrefixCache.read`].
            texts: the ids of each text, (tokens), without padding.
        """
        version = self._check_model(model)
        return Reading(self, model, [text_key(text) for text in texts], version)

    def known(self, ids: Sequence[int] | torch.Tensor) -> int:
        """The number of tokens of a text that need not be read, as far as the states are known by now."""
        with self._lock:
            return len(self._texts.longest_beginning(text_key(ids)) or b"") // WIDTH

    def put(self, ids: Sequence[int] | torch.Tensor, cache: RecurrentCache, version: int | None) -> None:
        """
        Stores a copy of the state after the beginning `ids` of a text, if it is long enough.

        Args:
            ids: the ids of the tokens that the model has read, (tokens).
            cache: the state after them, one row.
            version: `version` of the [`Reading`], or of the prefix cache, when the model began to read the text. If
                the model has changed since, or it is None, nothing is stored.

        Raises:
            ValueError: if `cache` has several rows, or another number of tokens than `ids`.
        """
        self.put_rows([ids], cache, version)

    def put_rows(
        self, texts: Sequence[Sequence[int] | torch.Tensor], cache: RecurrentCache, version: int | None
    ) -> None:
        """
        As [`~PrefixCache.put`] for a batch.

        Args:
            texts: for each row the ids of the tokens that the model has read, (tokens), without padding.
            cache: the states after them.

        Raises:
            ValueError: if `cache` has another number of rows than `texts`, or of tokens than one of them.
        """
        if cache.batch_size != len(texts):
            raise ValueError(f"`cache` must have a row for each text, {len(texts)}, got {max(cache.batch_size, 0)}.")
        for text, padding in zip(texts, cache.padding_read().tolist(), strict=True):
            if padding >= 0 and cache.get_seq_length() - padding != len(text):  # otherwise it is not known
                read = cache.get_seq_length() - padding
                raise ValueError(f"`cache` has read {read} tokens of a text of {len(text)}.")
        states = {}
        for row, key in enumerate(map(text_key, texts)):
            if key and key not in states and not self._touch(key):
                states[key] = cache.copy_of_row(row, len(key) // WIDTH)
                if cache.records_past:
                    states[key].crop(0)
        self._keep(states, version)

    def flush(self) -> None:
        """Waits until all files have been written."""
        if self.directory is not None:
            self.directory.flush()

    def clear(self) -> None:
        """Drops all states, including files of the model as it was at the last call."""
        self.flush()
        with self._lock:
            files = [entry.file for entry in self._entries.values() if entry.file is not None]
            self._drop_all()
            self._model = self._fingerprint = None
        for file in files:
            self.directory.delete(file)

    # The states of the model as it is now.

    def _check_model(self, model: "PreTrainedModel") -> int:
        """Drops the states of earlier weights, and looks for new files. Returns the version of the model."""
        now = Fingerprint(model)
        with self._lock:
            if self._model is not None and self._model() is not model:
                raise ValueError("`prefix_cache` holds the states of another model; each model needs one of its own.")
            if self._fingerprint is None or not now.matches(self._fingerprint):
                self._drop_all()
                self._model, self._fingerprint = weakref.ref(model), now
                self._identity = self._identify(model)
            if self._identity is not None and self.directory.changed():
                self._find_files(model)
            return self.version

    def _drop_all(self) -> None:
        self.version += 1
        self._entries.clear()
        self._texts = SortedTexts()
        if self.directory is not None:
            self.directory.forget()

    def _identify(self, model: "PreTrainedModel") -> ModelIdentity | None:
        if self.directory is None:
            return None
        try:
            digest = hashlib.sha256(f"{digest_of(model)} {self.dtype}".encode()).hexdigest()
            return ModelIdentity(str(model.config._name_or_path) or type(model).__name__, digest)
        except ValueError as error:
            logger.warning_once(f"States are not kept in {self.directory.path}: {error}.")
            return None

    def _is_current(self, version: int | None) -> bool:
        """Whether the model is as it was at a version."""
        with self._lock:
            model, fingerprint = None if self._model is None else self._model(), self._fingerprint
            if version != self.version or model is None:
                return False
        return Fingerprint(model).matches(fingerprint)

    def _find_files(self, model: "PreTrainedModel") -> None:
        """Notes files that have come, without reading their states, and those that have gone."""
        known = {entry.file: key for key, entry in self._entries.items() if entry.file is not None}
        files = self.directory.files(self._identity)
        for file in known.keys() - set(files):
            self._forget_file(known[file])
        for file in files:
            if file not in known and (key := self.directory.text_of(file, model, self._identity)) is not None:
                self._note_file(key, file)

    def _note_file(self, key: bytes, file: Path) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            entry.file = file
            return
        self._entries[key] = _Entry(None, file, 0)
        self._texts.add(key)

    def _forget_file(self, key: bytes) -> None:
        entry = self._entries[key]
        entry.file = None
        if entry.cache is None:
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        del self._entries[key]
        self._texts.remove(key)

    # For a reading. Caches that are given and taken here are never modified.

    def _longest(self, model: "PreTrainedModel", key: bytes, version: int) -> tuple[bytes, RecurrentCache | None]:
        """The longest known beginning of a text, and the state after it."""
        while True:
            with self._lock:
                found = self._texts.longest_beginning(key) if version == self.version else None
                if found is None:
                    return b"", None
                entry, identity = self._entries[found], self._identity
                self._entries.move_to_end(found)
                stored, file = entry.cache, entry.file
            if stored is not None:
                if file is not None:
                    self.directory.touch(file)
                return found, self._as_used(stored, model)
            with entry.lock:
                stored = entry.cache
                if stored is None and (cache := self.directory.load(file, found, model, identity)) is not None:
                    stored = self._as_stored(cache)
                with self._lock:
                    if self._entries.get(found) is not entry:  # dropped meanwhile
                        continue
                    if stored is None:
                        self._remove(found)
                        continue
                    entry.cache, entry.nbytes = stored, stored.nbytes
                    self._drop_oldest()
            return found, self._as_used(stored, model)

    def _as_stored(self, cache: RecurrentCache) -> RecurrentCache:
        return cache if self.dtype is None else pack(cache, self.dtype)

    def _as_used(self, stored: RecurrentCache, model: "PreTrainedModel") -> RecurrentCache:
        return stored if self.dtype is None else unpack(stored, model)

    def _touch(self, key: bytes) -> bool:
        """Whether the state of a text is known, which then is the last one used."""
        with self._lock:
            if known := key in self._entries:
                self._entries.move_to_end(key)
            return known

    def _keep(self, states: dict[bytes, RecurrentCache], version: int | None) -> None:
        """Stores states of one row, by the texts that were read."""
        states = {key: state for key, state in states.items() if len(key) >= self.shortest * WIDTH}
        if not states or not self._is_current(version):
            return
        for key, state in states.items():
            try:
                state = self._as_stored(state)
            except ValueError as error:
                logger.warning_once(f"A state is not kept: {error}.")
                continue
            with self._lock:
                if version != self.version:
                    return
                entry = self._entries.get(key)
                if entry is None:
                    entry = self._entries[key] = _Entry(state, None, state.nbytes)
                    self._texts.add(key)
                self._entries.move_to_end(key)
                self._drop_oldest()
                identity = self._identity
            if identity is not None and entry.file is None and self.directory.waiting_bytes < self.max_bytes:
                file = self.directory.file_of(identity, key)
                done = functools.partial(self._written, key, file, version)
                self.directory.write(file, key, state, identity, done)

    def _count(self, asked: int, read: int) -> None:
        with self._lock:
            self.tokens_asked += asked
            self.tokens_read += read

    def _written(self, key: bytes, file: Path, version: int) -> None:
        with self._lock:
            if version == self.version:
                self._note_file(key, file)

    def _drop_oldest(self) -> None:
        """Drops states until the others fit into the memory and the number of entries."""
        memory, number = self.nbytes, len(self._entries)
        if memory <= self.max_bytes and number <= self.max_entries:
            return
        for key, entry in list(itertools.islice(self._entries.items(), number - 1)):  # never the last one
            if memory <= self.max_bytes and number <= self.max_entries:
                return
            if memory > self.max_bytes and entry.cache is not None:
                entry.cache = None
                memory -= entry.nbytes
            if number > self.max_entries or (entry.cache is None and entry.file is None):
                memory -= 0 if entry.cache is None else entry.nbytes
                self._remove(key)
                number -= 1

    def _stops(self, key: bytes, known: int, shared: Collection[int]) -> list[int]:
        """
        The numbers of tokens, above `known`, after which the state of a text is kept; the last is its length. `shared`
        are those that it shares with other texts of its batch.
        """
        with self._lock:
            branch = self._texts.longest_shared(key) // WIDTH
        length = len(key) // WIDTH
        wanted = set(shared)
        if self.every is not None:
            wanted.update(range(self.every, length, self.every))
        if self.after:
            wanted.update((np.flatnonzero(np.isin(text_ids(key), self.after)) + 1).tolist())
        always = {branch if branch >= self.shortest else 0, length}
        stops, last = [], known
        for stop in sorted(n for n in wanted | always if n > known):
            if stop in always or stop >= last + self.shortest:
                stops.append(stop)
                last = stop
        return stops


class Reading:
    """
    Texts that are read together, each from its longest known beginning on. [`PrefixCache.begin`] makes one. Equal
    beginnings are read once. States are kept in the prefix cache on the way.

    Attributes:
        version: the version of the model, for [`PrefixCache.put`].
    """

    def __init__(self, prefixes: PrefixCache, model: "PreTrainedModel", texts: list[bytes], version: int):
        self.version: int | None = version
        self._prefixes, self._model, self._texts = prefixes, model, texts
        # The states after some beginnings, none of which is modified, and how far each text has come.
        self._states: dict[bytes, RecurrentCache | None] = {b"": None}
        self._at: dict[bytes, bytes] = {}
        self._stops: dict[bytes, list[int]] = {}
        for text in dict.fromkeys(texts):
            self._at[text], state = prefixes._longest(model, text, version)
            self._states[self._at[text]] = state
        for text, sizes in shared_among(texts).items():
            shared = {size // WIDTH for size in sizes}
            self._stops[text] = prefixes._stops(text, len(self._at[text]) // WIDTH, shared)
        prefixes._count(sum(map(len, texts)) // WIDTH, 0)
        # The rows that are read now: for each, the beginning that it comes from and the one that it goes to.
        self._round: list[tuple[bytes, bytes]] = []
        self._ids = self._mask = self._cache = None
        self._read = 0
        # The rows of the last round, and their cache, unless another one was made since.
        self._live: tuple[list[bytes] | None, RecurrentCache | None] = None, None

    @property
    def is_done(self) -> bool:
        """Whether all texts have been read."""
        return not self._round and all(self._at[text] == text for text in self._texts)

    @property
    def tokens(self) -> int:
        """The number of tokens that are still to be read, at most."""
        return sum(len(text) - len(at) for text, at in self._at.items()) // WIDTH - self._read * len(self._round)

    @torch.no_grad()
    def step(self, tokens: int | None = None) -> None:
        """
        Reads a piece of the texts.

        Args:
            tokens: the number of tokens to read at most, over all rows, but at least one of each; None: as far as the
                next state that is kept.
        """
        if not self._round:
            self._begin_round()
        if not self._round:
            return
        rows, length = self._ids.shape
        end = length if tokens is None else min(length, self._read + max(1, tokens // rows))
        piece = slice(self._read, end)
        mask = None if self._mask is None else self._mask[:, piece]
        device = self._model.device
        self._model(
            input_ids=self._ids[:, piece].to(device),
            attention_mask=None if mask is None or bool(mask.all()) else mask.to(device),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._prefixes._count(0, (end - self._read) * rows if mask is None else int(mask.sum()))
        self._read = end
        if end == length:
            self._end_round()

    def _begin_round(self) -> None:
        """Lets every text that is not done go to its next stop. Texts with the same way there share a row."""
        ways: dict[bytes, bytes] = {}
        for text, stops in self._stops.items():
            if stops:
                ways.setdefault(text[: stops[0] * WIDTH], self._at[text])
        self._round = [(begin, end) for end, begin in ways.items()]
        if not self._round:
            return
        parts = [text_ids(end[len(begin) :]) for begin, end in self._round]
        length = max(map(len, parts))
        self._ids = torch.from_numpy(np.stack([np.pad(ids, (length - len(ids), 0)) for ids in parts]))
        lengths = torch.tensor([len(ids) for ids in parts])
        mask = torch.arange(length) >= length - lengths[:, None]
        self._mask, self._read = None if bool(mask.all()) else mask, 0
        self._cache = self._together([begin for begin, _ in self._round])

    def _end_round(self) -> None:
        """Keeps the states that the rows have come to."""
        ends = [end for _, end in self._round]
        reached = {end: self._cache.copy_of_row(row, len(end) // WIDTH) for row, end in enumerate(ends)}
        self._states |= reached
        self._prefixes._keep(reached, self.version)
        self._live = ends, self._cache
        for text, stops in self._stops.items():
            if stops and (end := text[: stops[0] * WIDTH]) in reached:
                self._at[text] = end
                del stops[0]
        needed = set(self._at.values())
        self._states = {key: state for key, state in self._states.items() if key in needed or not key}
        self._round, self._read, self._cache = [], 0, None

    def _together(self, keys: list[bytes]) -> RecurrentCache:
        """A cache that may be modified, with the states after several beginnings as its rows."""
        live, cache = self._live
        self._live = None, None
        if keys == live:  # its rows go on as they are
            return cache
        states = [self._states[key] for key in keys]
        if all(state is None for state in states):
            return self._model.new_cache()
        if len(states) == 1:
            return states[0].clone()
        empty = next(state for state in states if state is not None).clone()
        empty.reset_rows(torch.ones(1, dtype=torch.bool))
        return type(empty).join([empty if state is None else state for state in states])

    def cache(self, length: int) -> RecurrentCache:
        """
        A cache with all texts, which may be modified, as if they had been padded to `length` tokens.

        Raises:
            RuntimeError: if not all of them have been read.
        """
        if not self.is_done:
            raise RuntimeError("`cache` was called before all texts were read.")
        cache = self._together(self._texts)
        if cache.is_initialized:
            cache.set_padding(length, torch.tensor([length - len(text) // WIDTH for text in self._texts]))
        return cache


__all__ = ["PrefixCache", "Reading"]
