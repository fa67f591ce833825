"""
Containers of tensors: `.pth`/`.bin` archives of PyTorch, safetensors files, directories of either, and GGUF files.

Nothing here depends on a model. Tensors stay in the memory-mapped source until they are read, and only tensors are
unpickled.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from subquad.hub import foreign_files
from subquad.hub.weight_files import DTYPES, is_dense, open_pytorch, open_weights, read_headers, read_weight_map

from .errors import ConversionError, as_conversion_error
from .gguf_files import open_gguf
from .vocabularies import Vocabulary


# Weights of a directory, in transformers' order: the first that exists, a single file or the index of several.
DIRECTORY_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Files with these names belong to a Hub model, with the other files of their directory.
HUB_FILES = ("model.safetensors", "pytorch_model.bin")
# Suffixes of safetensors files; the second is web-rwkv's.
SAFETENSORS = (".safetensors", ".st")
# The only entries of a file that may be lists of integers.
LISTS = ("reranker_layer_idx",)
# Parts that DistributedDataParallel and torch.compile add to names.
WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor; the dtype is a string if it is not one of `DTYPES`."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass
class Checkpoint:
    """
    An open checkpoint.

    Attributes:
        path: the file or directory it was opened from.
        tensors: name to [`TensorInfo`], in stored order, without the additions of training wrappers to names.
        settings: contents of the `config.json` beside a Hub model's weights, or of the header of a GGUF file; {} if
            there is none.
        vocabulary: reads the tokenizer in a GGUF file; None for other files.
        lists: the entries of a PyTorch file that are lists of integers. They count as settings of the model.
    """

    path: Path
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    vocabulary: Callable[[], Vocabulary | None] | None = None
    lists: dict[str, list[int]] = field(default_factory=dict)
    _readers: dict[str, tuple[Path, Callable[[], torch.Tensor]]] = field(default_factory=dict, repr=False)

    @property
    def directory(self) -> Path | None:
        """The directory of a Hub model, None for any other file."""
        if self.path.is_dir():
            return self.path
        return self.path.parent if self.path.name in HUB_FILES else None

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name, a view of the mapped file if the container allows it."""
        file, reader = self._readers[name]
        try:
            return reader()
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ConversionError(f"Tensor {name} of {file} cannot be read: {error}") from error

    def include(self, other: "Checkpoint", rename: Callable[[str], str | None]) -> None:
        """Adds the tensors of another open checkpoint under new names; None leaves a tensor out."""
        for name, info in other.tensors.items():
            file, reader = other._readers[name]
            if (renamed := rename(name)) is not None:
                self._add(file, renamed, info, reader)

    def _add(self, file: Path, name: str, info: TensorInfo, reader: Callable[[], torch.Tensor]) -> None:
        if not name.isprintable():
            raise ConversionError(f"{self.path} holds a tensor with the name {name!r}.")
        if name in self.tensors:
            raise ConversionError(f"{self.path} holds the tensor {name} twice, the second time in {file.name}.")
        self.tensors[name] = info
        self._readers[name] = file, reader


@contextmanager
def open_checkpoint(path: str | Path) -> Iterator[Checkpoint]:
    """
    Opens a `.pth`, `.bin`, `.safetensors`, `.st` or `.gguf` file, or a model directory. Only names, shapes and dtypes
    are read.

    Raises:
        ConversionError: if the file does not exist or is damaged, or if it holds anything but named tensors.
    """
    path = Path(path)
    with ExitStack() as stack:
        checkpoint = Checkpoint(path)
        directory = checkpoint.directory
        if directory is not None and (config := directory / "config.json").exists():
            checkpoint.settings = read_json(config)
        if path.is_dir():
            for file, names in _files_of_directory(path):
                _open_file(checkpoint, file, names, stack)
        elif path.is_file():
            _open_file(checkpoint, path, None, stack)
        else:
            raise ConversionError(f"{path} does not exist.")
        if not checkpoint.tensors:
            raise ConversionError(f"{path} holds no tensors.")
        yield checkpoint


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; anything else is a [`ConversionError`]."""
    with as_conversion_error():
        return foreign_files.read_json(file)


def _files_of_directory(directory: Path) -> list[tuple[Path, set[str] | None]]:
    """The weight files of a directory, each with its names in the index (None: no index)."""
    for candidate in DIRECTORY_FILES:
        file = directory / candidate
        if not file.is_file():
            continue
        if not candidate.endswith(".json"):
            return [(file, None)]
        with as_conversion_error():
            weight_map = read_weight_map(file, Path(candidate.removesuffix(".index.json")).suffix)
        shards: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            if not (directory / shard).is_file():
                raise ConversionError(f"{file} names the shard {shard!r}, which is missing.")
            shards.setdefault(shard, set()).add(name)
        return [(directory / shard, names) for shard, names in shards.items()]
    others = sorted(file.name for file in directory.glob("*.pth"))
    hint = f" It holds {', '.join(others)}: name the file itself." if others else ""
    raise ConversionError(f"{directory} has none of {', '.join(DIRECTORY_FILES)}.{hint}")


def _open_file(checkpoint: Checkpoint, file: Path, names: set[str] | None, stack: ExitStack) -> None:
    with as_conversion_error():
        foreign_files.check_file(file)
    if file.suffix in SAFETENSORS:
        found = _open_safetensors(file, stack)
    elif file.suffix == ".gguf":
        stored, checkpoint.settings, checkpoint.vocabulary = open_gguf(file)
        found = {name: (TensorInfo(shape, dtype), reader) for name, (shape, dtype, reader) in stored.items()}
    else:
        found, lists = _open_torch(file)
        checkpoint.lists |= lists
    if names is not None and (lost := sorted(names - found.keys())):
        raise ConversionError(f"{file} lacks tensors that the index has for it: {', '.join(map(repr, lost[:5]))}.")
    for name, (info, reader) in found.items():
        checkpoint._add(file, WRAPPERS.sub("", name), info, partial(reader, name))


def _open_safetensors(file: Path, stack: ExitStack) -> dict[str, tuple[TensorInfo, Any]]:
    with as_conversion_error():
        handle, headers = stack.enter_context(open_weights(file)), read_headers([file])
    return {
        name: (TensorInfo(shape, DTYPES.get(dtype, dtype)), handle.get_tensor)
        for name, (shape, dtype) in headers.items()
    }


def _open_torch(file: Path) -> tuple[dict[str, tuple[TensorInfo, Any]], dict[str, list[int]]]:
    """The tensors of a file, and its lists of integers."""
    with as_conversion_error():
        content = open_pytorch(file)
    found, lists = {}, {}
    for name, tensor in content.items():
        if name in LISTS and isinstance(tensor, list) and all(type(number) is int for number in tensor):
            lists[name] = tensor
            continue
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or not is_dense(tensor):
            raise ConversionError(
                f"{file} must hold named dense tensors only, found {name!r}: {type(tensor).__name__}.{_hint(content)}"
            )
        dtype = tensor.dtype if tensor.dtype in DTYPES.values() else str(tensor.dtype).removeprefix("torch.")
        found[name] = (TensorInfo(tuple(tensor.shape), dtype), content.__getitem__)
    return found, lists


def _hint(content: dict[Any, Any]) -> str:
    for name, entry in content.items():
        if isinstance(entry, dict) and any(isinstance(value, torch.Tensor) for value in entry.values()):
            return f" It is a training state: save its {name!r} entry to a file of its own."
    return ""
