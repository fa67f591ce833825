"""Reading files of unknown origin: every error names the file and the fault."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


# In the Hub's cache the files of a revision are links: models--X/snapshots/REVISION/FILE to models--X/blobs/HASH.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
# A file that git-lfs has not fetched yet.
_POINTER = b"version https://git-lfs.github.com/spec/"

# A tuned initial state in a file of RWKV's trainers and runtimes, alone or among the weights of a model.
TIME_STATE = re.compile(r"(?:.*\.)?blocks\.(\d{1,6})\.att\.time_state")

# Error for the argument `gguf_file` of `from_pretrained`.
GGUF = (
    "`gguf_file`: GGUF files are not loaded as they are. `subquad convert {file} OUT` makes a directory that loads, "
    "with quantised weights in float32."
)


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """
    The object in a JSON file.

    Raises:
        ValueError: if the file cannot be read or does not hold an object.
    """
    path = Path(path)
    check_file(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {one_line(error).rstrip('.')}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, found a {type(content).__name__}.")
    return content


def check_file(path: str | os.PathLike) -> None:
    """
    Raises:
        ValueError: if a file cannot be read, is empty, or has not been fetched.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(len(_POINTER))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not start:
        raise ValueError(f"{path} is empty.")
    if start == _POINTER:
        raise ValueError(f"{path} is a pointer of git-lfs, not the file: `git lfs pull` fetches that.")


def one_line(error: BaseException) -> str:
    """The first sentence of an error, with its type unless users are expected to cause it."""
    text = ""
    for line in str(error).strip().splitlines():
        text = f"{text} {line.strip()}".lstrip()
        if not text.endswith((":", ",")):
            break
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    kind = "" if isinstance(error, ValueError | OSError | ImportError) else f"{type(error).__name__}: "
    return kind + text if text else type(error).__name__


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Prefixes errors with the path, or another name, unless they have it."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


@contextmanager
def reading(path: str | os.PathLike, what: str = "this file") -> Iterator[None]:
    """
    Turns any error of another package's reader into one that names what could not be read. A file may hold anything,
    so any part of its reader may fail.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of our output is gone
        raise
    except Exception as error:
        if isinstance(error, ValueError | OSError) and str(path) in str(error):
            raise
        raise ValueError(f"{path}: {what} cannot be read: {one_line(error).rstrip('.')}.") from error


def check_links(directory: str | os.PathLike, *folders: Path) -> None:
    """
    Args:
        folders: further folders in the directory from which files are read.

    Raises:
        ValueError: if a file of a model directory links to a place outside. The creator of the directory may not be
            allowed to read that file, or to publish it.
    """
    root = Path(directory).resolve()
    folders = (root, root / "additional_chat_templates", *folders)
    for path in (path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())):
        target = path.resolve()
        blob = root.parent.name == _SNAPSHOTS and target.is_relative_to(root.parents[1] / _BLOBS)
        if target.is_file() and not target.is_relative_to(root) and not blob:
            raise ValueError(
                f"{path} is a link to {target}, outside of the model's directory. If the file belongs to the model, "
                "put the file itself there."
            )
