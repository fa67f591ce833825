"""Directories that appear complete or not at all."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class DirectoryError(ValueError):
    """A directory that cannot be made; the message says why."""


def _nearest(path: Path) -> Path:
    """The path itself if it exists, else the nearest parent that does."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_free(destination: Path) -> None:
    """
    Raises:
        DirectoryError: if [`new_directory`] could not make the directory.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise DirectoryError(f"{destination} exists already and is not an empty directory.")
    if not (existing := _nearest(destination)).is_dir():
        raise DirectoryError(f"{destination} cannot be made, because {existing} is a file.")


@contextmanager
def new_directory(destination: Path, size: int) -> Iterator[Path]:
    """
    A temporary directory whose content moves to `destination` if the block succeeds, and is deleted if it fails.

    Raises:
        DirectoryError: if the disk has fewer than `size` bytes free, or `destination` is filled meanwhile.
    """
    existing = _nearest(destination)
    free = shutil.disk_usage(existing).free
    if size > free:
        raise DirectoryError(f"The weights need {size:,} bytes; {existing} has {free:,} free.")
    directory = existing / f".subquad-{secrets.token_hex(4)}.partial"
    moved = []
    try:
        directory.mkdir()
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
        shutil.rmtree(directory, ignore_errors=True)
        raise
