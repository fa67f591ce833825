"""Files that appear complete or not at all."""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from .foreign_files import one_line


PARTIAL = re.compile(r"\.subquad-[0-9a-f]{8}\.partial")


@contextmanager
def locked(directory: Path, wait: bool = False) -> Iterator[bool]:
    """
    Holds the lock of a directory, and yields whether it was acquired. The system releases it if the process is killed.
    """
    with ExitStack() as stack:
        held = False
        with suppress(ImportError, OSError):  # not on Windows, and not on every network file system
            import fcntl

            handle = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        yield held


def remove_abandoned(directory: Path) -> None:
    """Removes the temporary directories that killed processes left in a directory."""
    found = []
    with suppress(PermissionError):  # some directories can be written to but not read
        found = [path for path in directory.iterdir() if PARTIAL.fullmatch(path.name)]
    for path in found:
        with locked(path) as abandoned:
            if abandoned:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def partial_directory(parent: Path) -> Iterator[Path]:
    """
    A temporary directory in another one, which is deleted in the end. If the process is killed, the next one cleans
    up.
    """
    remove_abandoned(parent)
    directory = parent / f".subquad-{secrets.token_hex(4)}.partial"
    with ExitStack() as stack:
        try:
            while not directory.is_dir():  # another process may remove it before it is locked
                directory.mkdir()
                stack.enter_context(locked(directory, wait=True))
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def sync(path: Path) -> None:
    """Waits until a file is on the disk."""
    with open(path, "rb+" if os.name == "nt" else "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """
    Turns writing errors of other packages into an OSError that names the file: torch raises a RuntimeError,
    safetensors its own error, and tokenizers a plain Exception.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError | RuntimeError | SafetensorError) and type(error) is not Exception:
            raise
        reason = getattr(error, "strerror", None) or one_line(error)
        raise OSError(f"{path} cannot be written: {reason.rstrip('.')}.") from error


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """
    A temporary file to write, with the name of `path`. It replaces `path` if the block succeeds, and is deleted if it
    fails: a reader finds the old file or the whole new one, even if several threads or processes write it.

    Raises:
        OSError: if the file cannot be written; the message names it.
    """
    path = Path(path)
    with writing(path), partial_directory(path.parent) as directory:
        yield (temporary := directory / path.name)
        sync(temporary)
        os.replace(temporary, path)
