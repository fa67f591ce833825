"""
Writing files of weights with little memory.

`safetensors.torch.save_file` needs all tensors of a file in memory. The format does not: a header is followed by the
tensors' bytes in order. So only one piece of one tensor is in memory here, besides the mapped source.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from subquad.hub.new_files import writing
from subquad.hub.weight_files import DTYPES, check_finite

from .errors import ConversionError


DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.int8: "I8", torch.uint8: "U8"}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
PIECE = 1 << 18  # elements that are cast and written at a time


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write: name, shape, dtype, and a function that fetches its elements in any dtype and shape."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], torch.Tensor]

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


def parse_size(size: int | str) -> int:
    """A number of bytes from `5GB`, `200MiB` or a number; raises `ConversionError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B|)\s*", str(size).upper())
    if not match or match[2] not in UNITS:
        raise ConversionError(f"A shard size is a number with one of KB, MB, GB, TB, KiB, MiB, GiB; got {size!r}.")
    number = int(float(match[1]) * UNITS[match[2]])
    if number < 1:
        raise ConversionError(f"A shard size must be at least one byte, got {size!r}.")
    return number


def plan_shards(tensors: Iterable[OutputTensor], max_shard_size: int) -> list[list[OutputTensor]]:
    """Cuts the tensors, in order, into files of at most `max_shard_size` bytes; a larger tensor gets its own file."""
    shards: list[list[OutputTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.bytes > room:
            shards.append([])
            room = max_shard_size
        shards[-1].append(tensor)
        room -= tensor.bytes
    return shards


def write_shards(shards: list[list[OutputTensor]], directory: Path, advance: Callable[[int], object]) -> list[str]:
    """
    Writes the files of a model, with an index if there is more than one.

    Args:
        advance: called repeatedly with the number of bytes written.

    Returns:
        The names of the files, the index last.
    """
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(directory / file, shard, advance)
    if len(shards) > 1:
        tensors = [tensor for shard in shards for tensor in shard]
        index = {
            "metadata": {
                "total_parameters": sum(tensor.elements for tensor in tensors),
                "total_size": sum(tensor.bytes for tensor in tensors),
            },
            "weight_map": {tensor.name: file for file, shard in zip(files, shards, strict=True) for tensor in shard},
        }
        files.append("model.safetensors.index.json")
        (directory / files[-1]).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return files


def write_torch(path: Path, tensors: list[OutputTensor], advance: Callable[[int], object]) -> None:
    """Writes a PyTorch file. Tensors that have to be cast or transposed are all in memory."""
    content = {}
    for tensor in tensors:
        content[tensor.name] = whole(tensor, tensor.dtype)
        advance(tensor.bytes)
    with writing(path):
        torch.save(content, path)


def whole(tensor: OutputTensor, dtype: torch.dtype) -> torch.Tensor:
    """
    All elements in another dtype, contiguous and with their own storage: PyTorch would save the whole mapped file with
    each tensor in it. They are copied only if needed.
    """
    tensor = replace(tensor, dtype=dtype)
    stored = tensor.fetch().detach()
    if stored.dtype == dtype and stored.is_contiguous():
        check_finite(tensor.name, stored)
        numbers = stored.reshape(-1).view(torch.uint8).numpy()
        return torch.from_numpy(numbers).view(dtype).reshape(tensor.shape)
    out = torch.empty(tensor.elements, dtype=dtype)
    start = 0
    for piece in _pieces(tensor):
        out[start : start + len(piece)] = piece
        start += len(piece)
    return out.reshape(tensor.shape)


def write_safetensors(path: Path, tensors: list[OutputTensor], advance: Callable[[int], object]) -> None:
    """Writes a safetensors file, a piece of a tensor at a time."""
    # Wide dtypes first, which keeps every tensor aligned to its elements.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.bytes
        entry = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header[tensor.name] = entry
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors:
            for piece in _pieces(tensor):
                data = piece.view(torch.uint8).numpy()
                file.write(data)
                advance(data.nbytes)


def _flat(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """
    The elements in order, at most `PIECE` at a time. A non-contiguous tensor is cut by rows before any of it is
    copied.
    """
    if tensor.is_contiguous() or tensor.numel() <= PIECE:
        yield from tensor.reshape(-1).split(PIECE)
    elif len(tensor) == 1:
        yield from _flat(tensor[0])
    else:
        for rows in tensor.split(max(1, PIECE * len(tensor) // tensor.numel())):
            yield from _flat(rows)


def _pieces(tensor: OutputTensor) -> Iterator[torch.Tensor]:
    """The tensor's elements in order and in its dtype, a few at a time."""
    for stored in _flat(tensor.fetch().detach()):
        if not tensor.dtype.is_floating_point:
            yield stored
            continue
        piece = stored.to(tensor.dtype)
        narrower = torch.finfo(tensor.dtype).max < torch.finfo(stored.dtype).max
        if narrower and not torch.equal(piece.isfinite(), stored.isfinite()):
            largest = stored[stored.isfinite()].abs().max().item()
            raise ConversionError(
                f"{tensor.name} holds {largest:g}, which {str(tensor.dtype).removeprefix('torch.')} cannot represent; "
                "bfloat16 and float32 can."
            )
        check_finite(tensor.name, stored)
        yield piece
