"""States of texts as files of a directory that several processes share."""

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ..hub.foreign_files import one_line
from ..modeling.cache import RecurrentCache
from ..modeling.state_file import ModelIdentity, read_about, read_state_file
from .packed_states import unpack_states
from .prefix_texts import text_ids, text_key


if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.get_logger(__name__)
SUFFIX = ".state"


class StateDirectory:
    """
    A directory with a file for each state. Its name has digests of the model and of the text, so the directory is its
    own index: there is no other file that could be damaged, or contradict it. Files are written by a thread, to a
    temporary name first, and those that were used longest ago are deleted, whichever process has written them. The
    process ends when all have been written.

    Args:
        path: the directory. It need not exist.
        max_bytes: size of all files together.
        max_files: number of all files together.

    No problem with files is fatal: there is a warning.
    """

    def __init__(self, path: str | os.PathLike, max_bytes: int, max_files: int):
        self.path, self.max_bytes, self.max_files = Path(path), max_bytes, max_files
        # The time of the directory's last change that was looked at, and the files that were of no use, with theirs.
        self._seen: int | None = None
        self._useless: dict[str, int] = {}
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Path, bytes, RecurrentCache, ModelIdentity, Callable]] = deque()
        self._writer: threading.Thread | None = None

    def file_of(self, model: ModelIdentity, key: bytes) -> Path:
        """The file for the state of a model after a text."""
        return self.path / f"{model.digest[:16]}-{hashlib.sha256(key).hexdigest()[:32]}{SUFFIX}"

    def changed(self) -> bool:
        """Whether files may have come or gone since the last time."""
        try:
            now = self.path.stat().st_mtime_ns
        except OSError:  # it is not there yet, or may not be read
            now = None
        changed, self._seen = now != self._seen, now
        return changed

    def forget(self) -> None:
        """Looks at all files again."""
        self._seen = None

    def files(self, model: ModelIdentity) -> list[Path]:
        """The files of a model, the one that was used last at the end."""
        begin = f"{model.digest[:16]}-"
        found = [(changed, path) for changed, _, path in self._files() if path.name.startswith(begin)]
        return [path for _, path in sorted(found)]

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Time of the last use, size and path of every state."""
        with suppress(OSError):
            for entry in os.scandir(self.path):
                if entry.name.endswith(SUFFIX):
                    with suppress(OSError):  # another process may have deleted it
                        if entry.is_file():
                            yield entry.stat().st_mtime_ns, entry.stat().st_size, Path(entry.path)

    def text_of(self, file: Path, model: "PreTrainedModel", identity: ModelIdentity) -> bytes | None:
        """The text of a file's state, which is not read; None if the file is damaged or holds another model's."""
        try:
            changed = file.stat().st_mtime_ns
            if self._useless.get(file.name) == changed:
                return None
            key = _text_of(read_about(file), model, identity)
            if key is None or self.file_of(identity, key) != file:
                raise ValueError(f"{file} does not hold the state that its name says.")
            return key
        except Exception as error:  # whatever is wrong with it, the text is read again
            if file.exists():
                self._useless[file.name] = changed
                _warn(error)
        return None

    def load(self, file: Path, key: bytes, model: "PreTrainedModel", identity: ModelIdentity) -> RecurrentCache | None:
        """The state after a text, of one row and on the model's device; None if it cannot be had."""
        try:
            states, about = read_state_file(file)
            if _text_of(about, model, identity) != key or {len(x) for x in states.values()} != {1}:
                raise ValueError(f"{file} is not the file that was there before.")
            cache_class = type(model.new_cache())
            states = unpack_states(states, cache_class.float32_names)
            cache = cache_class.from_states(file, model.config.get_text_config(), states, about)
            self.touch(file)
            return cache.to(model.device, model.dtype)
        except Exception as error:
            if file.exists():
                _warn(error)
        return None

    def touch(self, file: Path) -> None:
        """Notes that a state was used."""
        with suppress(OSError):  # another process may have deleted it
            os.utime(file)

    def delete(self, file: Path) -> None:
        with suppress(OSError):  # not allowed, or already deleted
            file.unlink()

    # Writing.

    def write(self, file: Path, key: bytes, cache: RecurrentCache, identity: ModelIdentity, done: Callable) -> None:
        """Writes a state, which is never modified, in the background, and calls `done()` once the file is there."""
        self._waiting.append((file, key, cache, identity, done))
        self._start()

    def _start(self) -> None:
        with self._lock:
            if self._writer is None or not self._writer.is_alive():  # its start may have been interrupted
                self._writer = threading.Thread(target=self._write_all, name="states")
                self._writer.start()

    @property
    def waiting_bytes(self) -> int:
        """Size of the states that wait to be written."""
        return sum(cache.nbytes for _, _, cache, _, _ in list(self._waiting))

    def flush(self) -> None:
        """Waits until all states have been written."""
        while (writer := self._writer) is not None:
            if writer.is_alive():
                writer.join()
            elif self._waiting:
                self._start()
            else:
                break
        with self._lock:  # which the writer releases at its end
            pass

    def _write_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._writer = None
                    return
                job = self._waiting.popleft()
            self._write(*job)

    def _write(self, file: Path, key: bytes, cache: RecurrentCache, identity: ModelIdentity, done: Callable) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            cache.save(file, identity, {"ids": text_ids(key).tolist()})
        except Exception as error:  # it is still in memory
            reason = one_line(error).replace(str(file), "a state")
            logger.warning_once(f"States are not kept in {self.path}: {reason}")
            return
        self._make_room(file)
        done()

    def _make_room(self, newest: Path) -> None:
        """Deletes the files that were used longest ago, until the others fit; never the newest."""
        files = sorted(self._files())
        size, number = sum(size for _, size, _ in files), len(files)
        for _, each, path in files:
            if size <= self.max_bytes and number <= self.max_files:
                return
            if path != newest:
                self.delete(path)
                size, number = size - each, number - 1


def _text_of(about: dict[str, Any], model: "PreTrainedModel", identity: ModelIdentity) -> bytes | None:
    """The text of a state; None if the state belongs to another model."""
    owner, text = about.get("model"), about.get("text")
    owner = owner.get("digest") if isinstance(owner, dict) else None
    ids = text.get("ids") if isinstance(text, dict) else None
    if owner != identity.digest or not isinstance(ids, list) or len(ids) != about["seen_tokens"]:
        return None
    if {type(each) for each in ids} != {int}:
        return None
    vocabulary = model.config.get_text_config().vocab_size
    return text_key(ids) if min(ids) >= 0 and max(ids) < vocabulary else None


def _warn(error: Exception) -> None:
    logger.warning(f"A state is ignored: {one_line(error)}")
