"""Storage of a compiled library: in a folder that only its owner may write to, named by its content."""

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


# Suffix of folders for building a library, and the age in seconds at which one counts as abandoned.
_TEMPORARY, _OLD = ".tmp", 600


def find_library(folder: Path, name: str) -> Path | None:
    """
    The library of a name, which stands for sources, compiler and CPU, in a folder. None if there is no complete one.

    Raises:
        OSError: if there is no such folder, or if other users may write to it.
    """
    _check_owner(folder, folder.stat())
    found = None
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_TEMPORARY):
            _remove_if_old(path)
        elif path.name.startswith(f"{name}-") and found is None:
            _check_owner(path, path.lstat())
            if path.name == _whole_name(name, path):
                found = path
            else:  # shortened or changed: reading past its end would kill the process
                path.unlink(missing_ok=True)
    return found


def keep_library(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    """
    Stores the library of a name, which `make` writes to a file and tests. It appears only when it is complete, so
    several processes may do this at the same time, and a signal at any moment leaves no partial file.

    Raises:
        OSError: if it cannot be written, or if other users may write to the folder.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_owner(folder, folder.stat())
    work = tempfile.mkdtemp(dir=folder, suffix=_TEMPORARY)
    try:
        made = Path(work, "library.so")
        make(made)
        made.chmod(0o700)
        _flush(made)
        os.replace(made, folder / _whole_name(name, made))
        _flush(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _whole_name(name: str, path: Path) -> str:
    """The name of a library with the content of that file."""
    return f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}.so"


def _check_owner(path: Path, found: os.stat_result) -> None:
    """
    Raises:
        PermissionError: if users other than this one and root could have written it: its code would be run.
    """
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(found.st_mode):
        raise PermissionError(f"{path} may be changed by other users")


def _remove_if_old(path: Path) -> None:
    try:
        if time.time() - path.lstat().st_mtime > _OLD:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
    except OSError:  # another process does the same
        pass


def _flush(path: Path) -> None:
    """Makes a written file survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
