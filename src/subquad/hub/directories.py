"""New directories and files of models that appear complete or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .new_files import PARTIAL, partial_directory, remove_abandoned, sync


class DirectoryError(ValueError):
    """A directory that cannot be made; the message gives the reason."""


def _nearest(path: Path) -> Path:
    """The path itself if it exists, else the nearest parent that does."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _check_space(directory: Path, size: int) -> None:
    if size > (free := shutil.disk_usage(directory).free):
        raise DirectoryError(f"The weights need {size:,} bytes; {directory} has {free:,} free.")


def check_free(destination: Path) -> None:
    """
    Removes files that killed processes left in the directory.

    Raises:
        DirectoryError: if [`new_directory`] could not make the directory.
    """
    if destination.is_dir():
        remove_abandoned(destination)
        if unfinished := [path.name for path in destination.iterdir() if PARTIAL.fullmatch(path.name)]:
            raise DirectoryError(
                f"{destination} holds {unfinished[0]}, which another process writes to. If none does, delete it."
            )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise DirectoryError(f"{destination} exists already and is not an empty directory.")
    if not (existing := _nearest(destination)).is_dir():
        raise DirectoryError(f"{destination} cannot be made, because {existing} is a file.")


@contextmanager
def new_directory(destination: Path, size: int) -> Iterator[Path]:
    """
    A temporary directory whose content moves to `destination` if the block succeeds, and is deleted if it fails. If
    the process is killed, the next one cleans up.

    Raises:
        DirectoryError: if the disk has fewer than `size` bytes free, or `destination` is filled meanwhile.
    """
    existing = _nearest(destination)
    moved = []
    with partial_directory(existing) as directory:
        _check_space(existing, size)
        try:
            yield directory
            for path in directory.rglob("*"):
                if path.is_file():
                    sync(path)
            if existing == destination:
                # Fill it rather than replace it: it may be a mount point or have its own permissions.
                if any(path != directory for path in destination.iterdir()):
                    raise DirectoryError(f"Something else was written to {destination} meanwhile.")
                for path in sorted(directory.iterdir(), key=lambda path: path.name == "config.json"):
                    moved.append(path)
                    path.rename(destination / path.name)
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
    if not (existing := _nearest(destination.parent)).is_dir():
        raise DirectoryError(f"{destination} cannot be made, because {existing} is a file.")


@contextmanager
def new_file(destination: Path, size: int) -> Iterator[Path]:
    """
    The path of a temporary file that becomes `destination` if the block succeeds, and is deleted if it fails.

    Raises:
        DirectoryError: if the disk has fewer than `size` bytes free, or `destination` is written meanwhile.
    """
    existing = _nearest(destination.parent)
    with partial_directory(existing) as directory:
        _check_space(existing, size)
        path = directory / destination.name
        yield path
        sync(path)
        destination.parent.mkdir(parents=True, exist_ok=True)
        check_new_file(destination)
        path.rename(destination)
