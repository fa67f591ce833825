"""Directories that appear complete or not at all."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import ConversionError


def _nearest(path: Path) -> Path:
    """The path itself where it exists, else the first above it that does."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_free(destination: Path) -> None:
    """
    Raises:
        ConversionError: where [`new_directory`] could make no such directory.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConversionError(f"{destination} exists already and is not an empty directory.")
    if not (existing := _nearest(destination)).is_dir():
        raise ConversionError(f"{destination} cannot be made, because {existing} is a file.")


@contextmanager
def new_directory(destination: Path, size: int) -> Iterator[Path]:
    """A directory whose content becomes `destination`'s where the block succeeds, and vanishes where it does not."""
    existing = _nearest(destination)
    free = shutil.disk_usage(existing).free
    if size > free:
        raise ConversionError(f"The weights need {size:,} bytes; {existing} has {free:,} free.")
    directory = existing / f".subquad-{secrets.token_hex(4)}.partial"
    moved = []
    try:
        directory.mkdir()
        yield directory
        if existing == destination:
            # Filled and not replaced: it may be a mount point, or have permissions of its own.
            if any(path != directory for path in destination.iterdir()):
                raise ConversionError(f"Something else was written to {destination} meanwhile.")
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
