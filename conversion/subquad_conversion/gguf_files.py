"""
GGUF, the files of llama.cpp: one file with weights of many types, the sizes of the model and its tokenizer. The
package `gguf` reads and writes it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from subquad import foreign_files

from .errors import ConversionError
from .writer import OutputTensor, whole


# The types that `gguf` can write, by their names there, each with the number of weights that share a scale.
TYPES = {"F32": 1, "F16": 1, "BF16": 1, "Q8_0": 32, "Q5_1": 32, "Q5_0": 32, "Q4_1": 32, "Q4_0": 32}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The weights of linear layers and the embeddings. llama.cpp expects all others in float32.
MATRICES = re.compile(r"(token_embd|output|blk\.\d+\.(time|channel)_mix_(receptance|key|value|gate|output))\.weight")
# Weights that are divided by two after every so many blocks, where the file says so.
RESCALED = re.compile(r"blk\.(\d+)\.(time_mix_output|channel_mix_value)\.weight")
RESCALE_EVERY = "rescale_every_n_layers"
MOST_ENTRIES = 2**20  # of a list in the header, such as the tokens
END_OF_TURN = b"\n\n"


def import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConversionError("GGUF files need the package gguf: pip install 'subquad[gguf]'.") from error
    return gguf


def check_type(name: str) -> None:
    """
    Raises:
        ConversionError: if weights cannot be written with this type.
    """
    if name in TYPES:
        return
    if name in import_gguf().GGMLQuantizationType.__members__ or re.fullmatch(r"I?Q\d_(K_)?[A-Z]+", name):
        raise ConversionError(
            f"`gguf_type` {name} is one of those that only llama.cpp makes: write F16 or BF16, then run "
            f"`llama-quantize IN.gguf OUT.gguf {name}`. Here {', '.join(TYPES)} can be written."
        )
    raise ConversionError(f"`gguf_type` must be one of {', '.join(TYPES)}; got {name!r}.")


# --- reading ---


# Shape and dtype of a tensor, and the function that reads it.
Stored = tuple[tuple[int, ...], torch.dtype, Callable[[str], torch.Tensor]]


def open_gguf(file: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """
    The tensors of a file, and the entries of its header that are not lists. Quantised weights are read as float32.

    Raises:
        ConversionError: if it is damaged, or has parts in other files.
    """
    gguf = import_gguf()
    try:
        reader = _reader(gguf, file)
        entries = {
            name: entry.contents()
            for name, entry in reader.fields.items()
            if entry.types and entry.types[0] != gguf.GGUFValueType.ARRAY
        }
        every = int(entries.get(f"{entries.get('general.architecture')}.{RESCALE_EVERY}", 0))
        tensors = {}
        for tensor in reader.tensors:
            shape = tuple(reversed(tensor.shape.tolist()))
            if prod(shape) != tensor.n_elements:
                raise ValueError(f"{tensor.name} has the shape {shape}")
            dtype = DTYPES.get(tensor.tensor_type.name, torch.float32)
            tensors[tensor.name] = shape, dtype, partial(_read, gguf, tensor, shape, every)
        parts = int(entries.get("split.count", 1))
    except Exception as error:  # a damaged file may raise anything
        reason = foreign_files.one_line(error).rstrip(".")
        raise ConversionError(f"{file} is not a GGUF file, or is damaged: {reason}.") from error
    if parts > 1:
        raise ConversionError(
            f"{file} is one of {parts} parts; `llama-gguf-split --merge FIRST.gguf OUT.gguf` makes one file of them."
        )
    return tensors, entries


def _reader(gguf: ModuleType, file: Path) -> Any:
    class Reader(gguf.GGUFReader):
        """As the base class, which would go on for as long as a damaged length says."""

        def _get(self, offset, dtype, count=1, *args, **kwargs):
            found = super()._get(offset, dtype, count, *args, **kwargs)
            if len(found) != int(count):
                raise ValueError("it ends too early")
            return found

        def _get_field_parts(self, orig_offs, raw_type):
            if raw_type == gguf.GGUFValueType.ARRAY and (length := self._get(orig_offs + 4, "u8")[0]) > MOST_ENTRIES:
                raise ValueError(f"it has a list of {length:,} entries")
            return super()._get_field_parts(orig_offs, raw_type)

    return Reader(file)


def _read(gguf: ModuleType, tensor: Any, shape: tuple[int, ...], every: int, name: str) -> torch.Tensor:
    kind = tensor.tensor_type.name
    if kind == "BF16":
        stored = torch.from_numpy(tensor.data.copy()).view(torch.bfloat16)
    elif kind in DTYPES:
        stored = torch.from_numpy(tensor.data.copy())
    else:
        stored = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    stored = stored.reshape(shape)
    if every > 0 and (match := RESCALED.fullmatch(name)):
        stored = stored * 2 ** (int(match[1]) // every)
    return stored


# --- writing ---


def type_for(dtype: str) -> str:
    """The type of weights with a dtype of torch, by its name."""
    return next((kind for kind, each in DTYPES.items() if str(each) == f"torch.{dtype}"), "F32")


def type_of(tensor: OutputTensor, wanted: str) -> str:
    """The type that a tensor is written with, if `wanted` is the one for the weights of linear layers."""
    if not MATRICES.fullmatch(tensor.name):
        return "F32"
    return "F16" if tensor.shape[-1] % TYPES[wanted] else wanted


def size_of(tensor: OutputTensor, kind: str) -> int:
    """Number of bytes of a tensor."""
    block, size = import_gguf().GGML_QUANT_SIZES[import_gguf().GGMLQuantizationType[kind]]
    return tensor.elements // block * size


def write_gguf(
    path: Path,
    tensors: list[OutputTensor],
    advance: Callable[[int], object],
    *,
    kinds: Mapping[str, str],
    main: str,
    architecture: str,
    fields: Mapping[str, int | float],
    tokens: Sequence[bytes] | None,
    chat_template: str | None,
) -> None:
    """
    Writes a file, a tensor at a time.

    Args:
        advance: called with the number of bytes written, again and again.
        kinds: the type of every tensor.
        main: that of most weights, which the header tells.
        architecture: llama.cpp's name of it.
        fields: the entries of the header that begin with that name.
        tokens: the tokens of a greedy tokenizer, in the order of their ids; None for a file without one. The first one
            is the boundary between documents.
        chat_template: how conversations become text.
    """
    gguf = import_gguf()
    writer = gguf.GGUFWriter(path, architecture)
    numpy_dtype = torch.empty(0).numpy().dtype  # looked at only to tell packed bytes
    try:
        for name, value in fields.items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{name}", value)
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if main == "F32" else f"MOSTLY_{main}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_tokenizer(gguf, writer, tokens, chat_template, fields["vocab_size"])
        for tensor in tensors:
            kind = kinds[tensor.name]
            type_number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(tensor.name, tensor.shape, numpy_dtype, size_of(tensor, kind), type_number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            kind = kinds[tensor.name]
            writer.write_tensor_data(_encoded(gguf, tensor, kind))
            advance(size_of(tensor, kind))
    finally:
        writer.close()


def _encoded(gguf: ModuleType, tensor: OutputTensor, kind: str) -> Any:
    stored = whole(tensor, DTYPES.get(kind, torch.float32))
    if kind == "BF16":
        return stored.view(torch.int16).numpy()
    return stored.numpy() if kind in DTYPES else gguf.quants.quantize(stored.numpy(), gguf.GGMLQuantizationType[kind])


def _add_tokenizer(
    gguf: ModuleType, writer: Any, tokens: Sequence[bytes] | None, chat_template: str | None, vocab_size: int
) -> None:
    if tokens is None:
        writer.add_tokenizer_model("no_vocab")
        return
    # llama.cpp's greedy tokenizer has bytes with Python's escapes.
    texts = [repr(token)[2:-1] for token in tokens]
    unused = range(len(tokens), vocab_size)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([*texts, *(f"[PAD{index}]" for index in unused)])
    writer.add_token_types([kinds.CONTROL, *[kinds.NORMAL] * (len(tokens) - 1), *[kinds.UNUSED] * len(unused)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    if chat_template:
        writer.add_chat_template(chat_template)
        if END_OF_TURN in tokens:
            writer.add_eot_token_id(tokens.index(END_OF_TURN))
