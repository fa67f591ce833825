"""Directories that appear complete or not at all."""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


PARTIAL = re.compile(r"\.subquad-[0-9a-f]{8}\.partial")


class DirectoryError(ValueError):
    """A directory that cannot be made; the message says why."""


def _nearest(path: Path) -> Path:
    """The path itself if it exists, else the nearest parent that does."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


@contextmanager
def _locked(directory: Path, wait: bool = False) -> Iterator[bool]:
    """
    Holds the lock of a directory, and yields whether it could be had. The system releases it if the process is killed.
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


def _remove_abandoned(directory: Path) -> None:
    """Removes the unfinished directories that killed processes left in a directory."""
    found = []
    with suppress(PermissionError):  # one may write to some directories without reading them
        found = [path for path in directory.iterdir() if PARTIAL.fullmatch(path.name)]
    for path in found:
        with _locked(path) as abandoned:
            if abandoned:
                shutil.rmtree(path, ignore_errors=True)


def check_free(destination: Path) -> None:
    """
    Removes what killed processes left in the directory.

    Raises:
        DirectoryError: if [`new_directory`] could not make the directory.
    """
    if destination.is_dir():
        _remove_abandoned(destination)
        if unfinished := [path.name for path in destination.iterdir() if PARTIAL.fullmatch(path.name)]:
            raise DirectoryError(
                f"{destination} holds {unfinished[0]}, which another process writes to. If none does, delete it."
            )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise DirectoryError(f"{destination} exists already and is not an empty directory.")
    if not (existing := _nearest(destination)).is_dir():
        raise DirectoryError(f"{destination} cannot be made, because {existing} is a file.")


@contextmanager
def _partial(parent: Path, size: int) -> Iterator[Path]:
    """
    A temporary directory in another one, which is deleted if the block fails. If the process is killed, the next one
    deletes what it left.

    Raises:
        DirectoryError: if the disk has fewer than `size` bytes free.
    """
    _remove_abandoned(parent)
    free = shutil.disk_usage(parent).free
    if size > free:
        raise DirectoryError(f"The weights need {size:,} bytes; {parent} has {free:,} free.")
    directory = parent / f".subquad-{secrets.token_hex(4)}.partial"
    with ExitStack() as stack:
        try:
            while not directory.is_dir():  # another process may remove it before it is locked
                directory.mkdir()
                stack.enter_context(_locked(directory, wait=True))
            yield directory
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise


@contextmanager
def new_directory(destination: Path, size: int) -> Iterator[Path]:
    """
    A temporary directory whose content moves to `destination` if the block succeeds, and is deleted if it fails. If
    the process is killed, the next one deletes what it left.

    Raises:
        DirectoryError: if the disk has fewer than `size` bytes free, or `destination` is filled meanwhile.
    """
    existing = _nearest(destination)
    moved = []
    with _partial(existing, size) as directory:
        try:
            yield directory
            if existing == destination:
                # Fill it instead of replacing it: it may be a mount point, or have permissions of its own.
                if any(path != directory for path in destination.iterdir()):
                    raise DirectoryError(f"Something else was written to {destination} meanwhile.")
                for path in sorted(directory.iterdir(), key=lambda path: path.name == "config.json"):
                    moved.append(path)
                    path.rename(destination / path.name)
                directory.rmdir()
            else:
                destination.parent.mkdir(parents=True, exist_ok=True)
                directory.rename(destination)
        except BaseException:
            for path in moved:
                with suppress(OSError):
                    (destination / path.name).rename(path)
            raise


def check_new_file(destination: Path) -> None:
    """
    Raises:
        DirectoryError: if [`new_file`] could not make the file.
    """
    if destination.exists():
        raise DirectoryError(f"{destination} exists already.")
    if not (existing := _nearest(destination)).is_dir():
        raise DirectoryError(f"{destination} cannot be made, because {existing} is a file.")


@contextmanager
def new_file(destination: Path, size: int) -> Iterator[Path]:
    """
    The path of a temporary file that becomes `destination` if the block succeeds, and is deleted if it fails.

    Raises:
        DirectoryError: if the disk has fewer than `size` bytes free, or `destination` is written meanwhile.
    """
    with _partial(_nearest(destination), size) as directory:
        path = directory / destination.name
        yield path
        destination.parent.mkdir(parents=True, exist_ok=True)
        check_new_file(destination)
        path.rename(destination)
        directory.rmdir()
