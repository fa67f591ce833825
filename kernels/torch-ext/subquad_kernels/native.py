"""
Products of few rows on a CPU, by `products.c`: a library that the C compiler of this machine makes when the first
product of a worthwhile size is asked for. Where that is not possible, `library` returns None.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch


# Up to this number of rows the library is asked; above, torch's libraries are faster.
MOST_ROWS = 8
# Weights with fewer elements take torch's products: the caches hold them, and tests of tiny models compile nothing.
WORTHWHILE = 2**15
# From this number of elements on all threads read a weight.
_FOR_THREADS = 2**18
_SOURCE = Path(__file__).with_name("products.c")
_FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC")
# Seconds after which a compiler is given up; it needs one or two.
_PATIENCE = 120
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_loading = threading.Lock()
# What `explain` returns, and folders that are removed when the process ends.
_found: "tuple[Library | None, str] | None" = None
_kept: list[tempfile.TemporaryDirectory] = []


class Unavailable(Exception):
    """There is no library. The message says why."""


class Library:
    """The functions of `products.c`, which read the memory of tensors: `linear.py` sees that they are what is said."""

    def __init__(self, path: Path):
        loaded = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
        self._linear, self._matmul = loaded.subquad_linear, loaded.subquad_matmul
        self._int8_linear = loaded.subquad_int8_linear
        self._int8_linear.argtypes = [*4 * [pointer], *3 * [size], ctypes.c_int, ctypes.c_uint, pointer]
        self._linear.argtypes = [ctypes.c_int, *4 * [pointer], *3 * [size], ctypes.c_uint, pointer]
        self._matmul.argtypes = [ctypes.c_int, *3 * [pointer], *4 * [size]]
        self._matmul.restype = None
        self.dtypes = {x: n for x, n in _DTYPES.items() if x != torch.float16 or loaded.subquad_has_float16()}
        # Of the OpenMP that torch has loaded: threads of another one would disturb it.
        self._parallel = ctypes.cast(getattr(ctypes.CDLL(None), "GOMP_parallel", None), pointer)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """
        x (..., in) times weight (out, in), transposed, plus bias (out): (..., out). None if there is no memory, or
        several threads are needed and torch has another kind of them.
        """
        outputs, width = weight.shape
        threads = torch.get_num_threads() if weight.numel() >= _FOR_THREADS else 1
        if threads > 1 and not self._parallel:
            return None
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], outputs))
        failed = self._linear(
            self.dtypes[x.dtype], x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
            out.data_ptr(), x.numel() // width, outputs, width, threads, self._parallel,
        )  # fmt: skip
        return None if failed else out

    def int8_linear(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, largest: int
    ) -> torch.Tensor | None:
        """[`subquad_kernels.int8_linear`] of x in float32, rounded to integers up to `largest`, without a bias."""
        outputs, width = weight.shape
        threads = torch.get_num_threads() if weight.numel() >= _FOR_THREADS else 1
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], outputs))
        failed = self._int8_linear(
            x.data_ptr(), weight.data_ptr(), scale.data_ptr(), out.data_ptr(),
            x.numel() // width, outputs, width, largest, threads, self._parallel,
        )  # fmt: skip
        return None if failed else out

    def matmul(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x (..., k) times y (k, m), or x (..., n, k) times y (..., k, m) of the same dimensions: (..., m)."""
        width, outputs = y.shape[-2:]
        batches = y.numel() // (width * outputs)
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], outputs))
        rows = x.numel() // (width * batches)
        pointers = x.data_ptr(), y.data_ptr(), out.data_ptr()
        self._matmul(self.dtypes[x.dtype], *pointers, batches, rows, width, outputs)
        return out


def library() -> Library | None:
    """The library, which the first call compiles if no process has done so. None if it is not available."""
    return (_found or explain())[0]


def explain() -> tuple[Library | None, str]:
    """The library or None, and why."""
    global _found
    with _loading:  # so that one thread compiles, and others wait
        if _found is None:
            _found = _load()
        return _found


def _load() -> tuple[Library | None, str]:
    try:
        return _compile()
    except Unavailable as error:
        return None, str(error)
    except (OSError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"


def _compile() -> tuple[Library, str]:
    """
    The library, from the cache or from the compiler, and whose work it is. The name of the file is a hash of all that
    it depends on.

    Raises:
        Unavailable: if there is none.
    """
    if os.environ.get("SUBQUAD_NATIVE") == "0":
        raise Unavailable("SUBQUAD_NATIVE=0")
    machine = platform.machine()
    if os.name != "posix" or machine not in ("x86_64", "aarch64", "arm64"):
        raise Unavailable(f"it is not made for {platform.system()} on {machine}")
    if not _SOURCE.is_file():
        raise Unavailable("its source is not part of this copy of the code")
    names = (os.environ.get("CC", "").strip(), "cc", "gcc", "clang")
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable("there is no C compiler: neither $CC nor cc, gcc or clang is there")
    command = [compiler, *_FLAGS, "-march=native" if machine == "x86_64" else "-mcpu=native", str(_SOURCE), "-o"]
    version = (_run([compiler, "--version"]).splitlines() or [""])[0]
    key = "\0".join((*command, version, machine, _cpu()))
    name = f"products-{hashlib.sha256(key.encode() + _SOURCE.read_bytes()).hexdigest()[:24]}.so"
    reason = None
    for folder in _folders():
        try:
            return _library_at(folder / name, command), f"compiled by {version}"
        except OSError as error:  # of a folder that cannot be written, or where no code may be executed
            reason = error
    raise Unavailable(f"no folder for it can be used: {reason}")


def _library_at(path: Path, command: list[str]) -> Library:
    """
    The library in that file, which the command writes if there is none. It appears there when it is known to load, so
    that several processes may do this at the same time.
    """
    if path.is_file():
        return Library(path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(descriptor)
    try:
        _run([*command, temporary])
        found = Library(Path(temporary))
        os.replace(temporary, path)
        return found
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _folders() -> Iterator[Path]:
    """Where the library may be: in the user's cache, or if that cannot be written, in a folder of this process."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if home.is_absolute():
        yield home / "subquad"
    # Of a new name, because everyone may write there.
    folder = tempfile.TemporaryDirectory(prefix="subquad-", ignore_cleanup_errors=True)
    _kept.append(folder)
    yield Path(folder.name)


def _run(command: list[str]) -> str:
    """
    The output of a command.

    Raises:
        Unavailable: if it fails, or takes too long.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took more than {_PATIENCE} seconds") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise Unavailable(f"{command[0]} failed with {done.returncode}: {reason}")
    return done.stdout


def _cpu() -> str:
    """The instructions of the CPU: a folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "CPU part", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))
