"""Compiling a library: the compiler, its flags, and the folders for what it makes."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from .library_file import find_library, keep_library


T = TypeVar("T")
FLAGS = ("-std=gnu11", "-O2", "-fno-math-errno", "-shared", "-fPIC")
# Timeout of a compiler in seconds; it needs one or two.
_PATIENCE = 120
# Folders to remove when the process ends.
_kept: list[tempfile.TemporaryDirectory] = []


class Unavailable(Exception):
    """The library is not available. The message gives the reason."""


class CompiledLibrary(Generic[T]):
    """
    A library of C, which the C compiler of this machine makes when it is first asked for. Later processes find it.

    Args:
        name: the beginning of its file's name.
        sources: the file to compile, and the files that it includes.
        load: makes what `get` returns from the path of the library.
    """

    def __init__(self, name: str, sources: Sequence[Path], load: Callable[[Path], T]):
        self.name, self.sources, self._load = name, sources, load
        self._loading = threading.Lock()
        self._found: tuple[T | None, str] | None = None

    def get(self) -> T | None:
        """The library. None if it is not available."""
        return (self._found or self.explain())[0]

    def explain(self) -> tuple[T | None, str]:
        """The library or None, and the reason."""
        with self._loading:  # one thread compiles while others wait
            if self._found is None:
                try:
                    self._found = self.compile()
                except Unavailable as error:
                    self._found = None, str(error)
                except (OSError, AttributeError) as error:
                    self._found = None, f"{type(error).__name__}: {error}"
            return self._found

    def compile(self) -> tuple[T, str]:
        """
        The library, from the cache or from the compiler, and its origin. The name of the file is a hash of everything
        that it depends on.

        Raises:
            Unavailable: if the library is not available.
            ValueError: if `SUBQUAD_NATIVE` is neither 0 nor 1.
        """
        if (value := os.environ.get("SUBQUAD_NATIVE") or "1") not in ("0", "1"):
            raise ValueError(f"SUBQUAD_NATIVE must be 0 or 1, got {value!r}.")
        if value == "0":
            raise Unavailable("SUBQUAD_NATIVE=0")
        machine = platform.machine()
        if os.name != "posix" or machine not in ("x86_64", "aarch64", "arm64"):
            raise Unavailable(f"it is not made for {platform.system()} on {machine}")
        if not all(source.is_file() for source in self.sources):
            raise Unavailable("its source is not part of this copy of the code")
        names = (os.environ.get("CC", "").strip(), "cc", "gcc", "clang")
        compiler = next((found for name in names if name and (found := shutil.which(name))), None)
        if compiler is None:
            raise Unavailable("there is no C compiler: neither $CC nor cc, gcc or clang is there")
        flags = [*FLAGS, "-march=native" if machine == "x86_64" else "-mcpu=native"]
        if sys.platform == "darwin":  # whose linker asks where Python's own functions are
            flags += ["-undefined", "dynamic_lookup"]
        command = [compiler, *flags, *os.environ.get("SUBQUAD_NATIVE_FLAGS", "").split(), str(self.sources[0]), "-o"]
        version = (_run([compiler, "--version"]).splitlines() or [""])[0]
        key = "\0".join((*command, version, machine, _cpu()))
        code = b"".join(source.read_bytes() for source in self.sources)
        name = f"{self.name}-{hashlib.sha256(key.encode() + code).hexdigest()[:24]}"
        reasons = []
        for folder in _folders():
            try:
                found = self._in_folder(folder, name, command)
            except OSError as error:  # the folder is unsafe, not writable, or may not hold code
                reasons.append(str(error))
            else:
                return found, "; ".join([f"compiled by {version}", *(f"not kept: {reason}" for reason in reasons)])
        raise Unavailable(f"no folder for it can be used: {reasons[-1]}")

    def _in_folder(self, folder: Path, name: str, command: list[str]) -> T:
        """The library of that name in a folder. The command creates it if needed."""
        if folder.is_dir() and (path := find_library(folder, name)):
            return self._load(path)
        made = []

        def make(path: Path) -> None:
            # The compiler's temporary files are removed with this folder.
            _run([*command, str(path)], path.parent)
            made.append(self._load(path))

        keep_library(folder, name, make)
        return made[0]


def _folders() -> Iterator[Path]:
    """Folders for the library: the user's cache or, if that is not writable, a folder of this process."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if home.is_absolute():
        yield home / "subquad"
    # With a new name, because everyone may write there.
    folder = tempfile.TemporaryDirectory(prefix="subquad-", ignore_cleanup_errors=True)
    _kept.append(folder)
    yield Path(folder.name)


def _run(command: list[str], temporary: Path | None = None) -> str:
    """
    The output of a command, with a folder for its temporary files.

    Raises:
        Unavailable: if it fails, or takes too long.
    """
    environment = os.environ | ({} if temporary is None else {"TMPDIR": str(temporary)})
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=_PATIENCE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=environment,
        )
    except subprocess.TimeoutExpired:
        reason = f"{command[0]} took more than {_PATIENCE} seconds"
        # Every process would wait for it.
        warnings.warn(f"{reason}, so torch replaces the C library. SUBQUAD_NATIVE=0 saves the time.", stacklevel=2)
        raise Unavailable(reason) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise Unavailable(f"{command[0]} failed with {done.returncode}: {reason}")
    return done.stdout


def _cpu() -> str:
    """The instructions of the CPU: different machines may share a folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "CPU part", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))
