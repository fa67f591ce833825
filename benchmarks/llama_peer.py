"""
llama.cpp, a competitor on a CPU. Its source comes from PyPI, in the source distribution of llama-cpp-python, and
is compiled once for this machine: the library and its sources take about 300 MB in `~/.cache/subquad`, or in
`$XDG_CACHE_HOME/subquad`. A small library of our own, `llama_peer.c`, connects it to Python.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor


# The version of llama-cpp-python, and the SHA-256 of its file on PyPI.
VERSION = "0.3.36"
DIGEST = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
# Types of files, and their numbers in `enum llama_ftype`.
TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "Q4_0": 2}
SHIM, BEFORE_ALL = (Path(__file__).with_name(name) for name in ("llama_peer.c", "llama_amx.h"))
# It sets up the CPU's tiles (AMX) once per thread, and oneDNN clears them, so it gets its own thread.
_THREAD = ThreadPoolExecutor(1)


class Unavailable(Exception):
    """llama.cpp is not available. The message gives the reason."""


def _run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
        raise Unavailable(f"{Path(str(command[0])).name} failed: {reason.strip()}")


def _source(folder: Path) -> Path:
    """The folder of llama.cpp's source."""
    source = folder / "source"
    if not source.is_dir():
        file = folder / f"llama_cpp_python-{VERSION}.tar.gz"
        _run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"),
            *("--dest", folder, f"llama-cpp-python=={VERSION}"),
        )
        if (digest := hashlib.sha256(file.read_bytes()).hexdigest()) != DIGEST:
            raise Unavailable(f"{file.name} has the SHA-256 {digest} instead of {DIGEST}")
        unpacked = folder / "unpacked"
        with tarfile.open(file) as archive:
            archive.extractall(unpacked, filter="data")
        (unpacked / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp").rename(source)
        shutil.rmtree(unpacked)
        file.unlink()
    return source


def _library(instructions: str) -> Path:
    """The file of our library, which is compiled together with llama.cpp if needed."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None or not (os.environ.get("CXX") or shutil.which("c++")):
        raise Unavailable("there are no compilers of C and C++")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    key = hashlib.sha256("\0".join((VERSION, instructions, BEFORE_ALL.read_text())).encode()).hexdigest()[:16]
    folder = home / "subquad" / f"llama.cpp-{VERSION}-{key}"
    own = hashlib.sha256(SHIM.read_bytes()).hexdigest()[:16]
    library, build = folder / f"llama_peer-{own}.so", folder / "build"
    if library.is_file():
        return library
    print(f"llama.cpp is compiled in {folder}, once, which takes some minutes", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    source, tools = _source(folder), folder / "tools"
    if not (tools / "bin" / "cmake").is_file():
        _run(sys.executable, "-m", "venv", tools)
        _run(tools / "bin" / "python", "-m", "pip", "install", "--quiet", "cmake", "ninja")
    off = ("COMMON", "TOOLS", "EXAMPLES", "TESTS", "SERVER", "APP")
    _run(
        *(tools / "bin" / "cmake", "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
        *(f"-DCMAKE_MAKE_PROGRAM={tools / 'bin' / 'ninja'}", "-DGGML_NATIVE=ON"),
        f"-DCMAKE_CXX_FLAGS=-w -include {BEFORE_ALL}",
        *(f"-DLLAMA_BUILD_{name}=OFF" for name in off),
    )
    _run(tools / "bin" / "cmake", "--build", build, "--target", "llama", "--parallel", os.cpu_count() or 1)
    binaries, temporary = build / "bin", library.with_suffix(".tmp")
    _run(
        *(compiler, "-O2", "-shared", "-fPIC", f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}", SHIM),
        *(f"-L{binaries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{binaries}", "-o", temporary),
    )
    temporary.rename(library)
    return library


@functools.cache
def load(instructions: str) -> ctypes.CDLL:
    """
    Our library, with llama.cpp behind it.

    Args:
        instructions: instructions of this CPU, which the compiled code depends on.

    Raises:
        Unavailable: if it cannot be compiled, for example because there is no network or no compiler.
    """
    try:
        loaded = ctypes.CDLL(str(_library(instructions)))
    except OSError as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error
    loaded.peer_open.restype = ctypes.c_void_p
    loaded.peer_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    loaded.peer_close.argtypes = loaded.peer_forget.argtypes = loaded.peer_vocabulary.argtypes = [ctypes.c_void_p]
    loaded.peer_read.argtypes = [*2 * [ctypes.c_void_p], ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    loaded.peer_system.restype = ctypes.c_char_p
    return loaded


def quantize(library: ctypes.CDLL, source: Path, target: Path, kind: str) -> None:
    """Writes a GGUF file in another type, as `llama-quantize` does."""
    if library.peer_quantize(os.fsencode(source), os.fsencode(target), TYPES[kind], os.cpu_count() or 1):
        raise Unavailable(f"llama.cpp cannot write {kind}")


class Llama:
    """
    A model of llama.cpp.

    Args:
        library: from [`load`].
        path: path of a GGUF file.
        rows: maximum number of texts at a time.

    Raises:
        Unavailable: if it cannot be loaded.
    """

    def __init__(self, library: ctypes.CDLL, path: Path, rows: int):
        self.library = library
        self.peer = library.peer_open(os.fsencode(path), rows, torch.get_num_threads())
        if not self.peer:
            raise Unavailable(f"llama.cpp cannot load {path.name}")
        self.vocabulary = library.peer_vocabulary(self.peer)

    def forget(self) -> None:
        """Makes the next tokens begin new texts."""
        self.library.peer_forget(self.peer)

    def read(self, ids: Tensor) -> Tensor:
        """Reads the next tokens of texts, ids int64 (B, T). Returns the logits after the last, float32 (B, V)."""
        ids = ids.int().contiguous()
        logits = torch.empty(ids.shape[0], self.vocabulary)
        arguments = self.peer, ids.data_ptr(), *ids.shape, logits.data_ptr()
        if failed := _THREAD.submit(self.library.peer_read, *arguments).result():
            raise RuntimeError(f"llama_decode returned {failed}")
        return logits

    def close(self) -> None:
        self.library.peer_close(self.peer)
