"""
GGUF, the files of llama.cpp: one file with weights of many types, the sizes of the model and its tokenizer. The
package `gguf` reads and writes it.
"""

import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AddedToken

from subquad.hub import foreign_files
from subquad.hub.weight_files import check_shared

from .errors import ConversionError
from .vocabularies import ENDS, SPECIAL, Vocabulary
from .writer import OutputTensor, whole


# The types that `gguf` can write, by their names in it, each with the number of weights that share a scale.
TYPES = {"F32": 1, "F16": 1, "BF16": 1, "Q8_0": 32, "Q5_1": 32, "Q5_0": 32, "Q4_1": 32, "Q4_0": 32}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The weights of linear layers and the embeddings. llama.cpp expects all others in float32.
MATRICES = re.compile(r"(token_embd|output|blk\.\d+\.(time|channel)_mix_(receptance|key|value|gate|output))\.weight")
# Weights that are halved after every few blocks, in files with that setting.
RESCALED = re.compile(r"blk\.(\d+)\.(time_mix_output|channel_mix_value)\.weight")
RESCALE_EVERY = "rescale_every_n_layers"
# Limits on what becomes Python objects: entries and tensors of a header, and tokens. Lists stay in the mapped file.
MOST_FIELDS, MOST_TENSORS, MOST_TOKENS = 2**12, 2**15, 2**18
# Types of tokens, and the text of unused tokens.
NORMAL, CONTROL, USER_DEFINED, UNUSED_KIND, BYTE = 1, 3, 4, 5, 6
UNUSED = "[PAD{}]"
TOKENIZER, TEMPLATE = "tokenizer.ggml.model", "tokenizer.chat_template"
LISTS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", f"{TEMPLATE}s")
LENGTH = struct.Struct("<Q")  # of a string
TOKEN_ID, AROUND = "tokenizer.ggml.{}_token_id", "tokenizer.ggml.add_{}_token"
# The role of a token to its name in the header. The last two end a turn and a message.
TOKEN_IDS = {name: name for name in SPECIAL} | {"unk": "unknown", "sep": "seperator", "pad": "padding"}
TOKEN_IDS |= {name: name for name in ENDS}


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


def open_gguf(file: Path) -> tuple[dict[str, Stored], dict[str, Any], Callable[[], Vocabulary | None]]:
    """
    The tensors of a file, the entries of its header that are not lists, and a function that reads its tokenizer.
    Quantised weights are read as float32.

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
        check_shared(file, sum(int(tensor.n_bytes) for tensor in reader.tensors))
    except Exception as error:  # a damaged file may raise anything
        reason = foreign_files.one_line(error).rstrip(".")
        raise ConversionError(f"{file} is not a GGUF file, or is damaged: {reason}.") from error
    if parts > 1:
        raise ConversionError(
            f"{file} is one of {parts} parts; `llama-gguf-split --merge FIRST.gguf OUT.gguf` makes one file of them."
        )
    return tensors, entries, partial(_read_vocabulary, gguf, file, reader, entries)


def _read_vocabulary(gguf: ModuleType, file: Path, reader: Any, entries: Mapping[str, Any]) -> Vocabulary | None:
    """
    The tokenizer in a file, None if there is none.

    Raises:
        ConversionError: if it has another type, or is damaged.
    """
    if (kind := entries.get(TOKENIZER, "none")) in ("none", "no_vocab"):
        return None
    if kind != "rwkv":
        raise ConversionError(
            f"{file} has a tokenizer of the type {kind!r}, which is not read; give a directory with one as "
            "`tokenizer`, or none."
        )
    try:
        lists = {name: _entries(gguf, reader.fields[name]) for name in LISTS if name in reader.fields}
    except Exception as error:  # a damaged file may raise anything
        raise ConversionError(f"{file} has a damaged tokenizer: {foreign_files.one_line(error)}.") from error
    texts, kinds, named = (lists.get(name, []) for name in LISTS)
    kinds = kinds or [NORMAL] * len(texts)
    ids = {use: entries[name] for use, key in TOKEN_IDS.items() if (name := TOKEN_ID.format(key)) in entries}
    places, template = range(len(texts)), entries.get(TEMPLATE)
    whole = all(type(index) is int and index in places for index in ids.values()) and len(kinds) == len(texts)
    if not (texts and whole) or {type(each) for each in (*texts, *named, template or "")} != {str}:
        raise ConversionError(f"{file} has a damaged tokenizer: {len(texts)} tokens, {len(kinds)} types, ids {ids}.")
    # After the last ordinary token come the added tokens, and space for more of them.
    size = 1 + max((index for index, kind in enumerate(kinds) if kind in (NORMAL, BYTE)), default=0)
    last = max((index for index, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)), default=0)
    tokens = [_unescaped(text) for text in texts[:size]]
    added = {0: AddedToken(tokens[0].decode(errors="replace"), normalized=False, special=True)}
    for index in range(1, last + 1):
        if kinds[index] in (CONTROL, USER_DEFINED) or index >= size:
            special = kinds[index] == CONTROL
            content = _unescaped(texts[index]).decode(errors="replace")
            added[index] = AddedToken(content, normalized=not special, special=special)
    if named:
        template = {"default": template} | {name: entries.get(f"{TEMPLATE}.{name}") for name in named}
        template = {name: text for name, text in template.items() if text}
    around = tuple(name for name in ("bos", "eos") if entries.get(AROUND.format(name)))
    return Vocabulary(tokens, added, ids, template, around)


def _unescaped(text: str) -> bytes:
    """The bytes of a token, which has some of Python's escapes."""
    letters = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}

    def plain(found: re.Match) -> bytes:
        return bytes([int(found[2], 16)]) if found[2] else letters.get(found[1], found[1])

    return re.sub(rb"\\(x([0-9a-f]{2})|.)", plain, text.encode(errors="surrogateescape"), flags=re.DOTALL)


def _reader(gguf: ModuleType, file: Path) -> Any:
    class Reader(gguf.GGUFReader):
        """
        As the base class, which would read on for as long as a damaged length demands, and makes an object of every
        list entry. Here the last part of a list has the bytes of all entries.
        """

        def _get(self, offset, dtype, count=1, *args, **kwargs):
            found = super()._get(offset, dtype, count, *args, **kwargs)
            if len(found) != int(count):
                raise ValueError("it ends too early")
            return found

        def _build_fields(self, offs, count):
            if count > MOST_FIELDS:
                raise ValueError(f"it has {count:,} entries")
            return super()._build_fields(offs, count)

        def _build_tensor_info(self, offs, count):
            if count > MOST_TENSORS:
                raise ValueError(f"it has {count:,} tensors")
            return super()._build_tensor_info(offs, count)

        def _get_field_parts(self, orig_offs, raw_type):
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            start = orig_offs + 12
            kind, length = gguf.GGUFValueType(self._get(orig_offs, "<u4")[0]), int(self._get(orig_offs + 4, "<u8")[0])
            if kind == gguf.GGUFValueType.STRING:
                end = start
                for _ in range(length):
                    end += LENGTH.size + LENGTH.unpack_from(self.data, end)[0]
                data = self._get(start, "u1", end - start)
            elif kind in self.gguf_scalar_to_np:
                data = self._get(start, self.gguf_scalar_to_np[kind], length)
            else:
                raise ValueError("it has a list of lists")
            parts = [self._get(orig_offs, "<u4"), self._get(orig_offs + 4, "<u8"), data]
            return 12 + data.nbytes, parts, [2], [gguf.GGUFValueType.ARRAY, kind]

    return Reader(file)


def _entries(gguf: ModuleType, field: Any) -> list[Any]:
    """The entries of a list in the header."""
    kind, (*_, length, data) = field.types[-1], field.parts
    if field.types[0] != gguf.GGUFValueType.ARRAY or (number := int(length[0])) > MOST_TOKENS:
        raise ValueError(f"{field.name} is no list of at most {MOST_TOKENS:,} entries")
    if kind != gguf.GGUFValueType.STRING:
        return data.tolist()
    entries, end = [], 0
    for _ in range(number):
        start = end + LENGTH.size
        end = start + LENGTH.unpack_from(data, end)[0]
        entries.append(str(data[start:end].tobytes(), encoding="utf-8"))
    return entries


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
    """The type in which to write a tensor, if `wanted` is the type of linear layers' weights."""
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
    vocabulary: Vocabulary | None,
    ends: Mapping[str, int],
) -> None:
    """
    Writes a file, a tensor at a time.

    Args:
        advance: called repeatedly with the number of bytes written.
        kinds: the type of every tensor.
        main: the type of most weights, as the header records it.
        architecture: its name in llama.cpp.
        fields: the entries of the header that begin with that name.
        vocabulary: a greedy tokenizer; None for a file without one.
        ends: from [`find_ends`].
    """
    gguf = import_gguf()
    writer = gguf.GGUFWriter(path, architecture)
    numpy_dtype = torch.empty(0).numpy().dtype  # used only to recognise packed bytes
    try:
        for name, value in fields.items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{name}", value)
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if main == "F32" else f"MOSTLY_{main}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_tokenizer(gguf, writer, vocabulary, ends, fields["vocab_size"])
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
    gguf: ModuleType, writer: Any, vocabulary: Vocabulary | None, ends: Mapping[str, int], vocab_size: int
) -> None:
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
        return
    texts, kinds = token_texts(vocabulary, vocab_size)
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    for name, index in {**vocabulary.ids, **ends}.items():
        writer.add_uint32(TOKEN_ID.format(TOKEN_IDS[name]), index)
    for name in vocabulary.around:
        writer.add_bool(AROUND.format(name), True)
    template = vocabulary.chat_template
    if isinstance(template, Mapping):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def token_texts(vocabulary: Vocabulary, vocab_size: int) -> tuple[list[str], list[int]]:
    """
    The texts of all tokens, and their types.

    Raises:
        ConversionError: if llama.cpp would match a token differently, or refuse the file.
    """
    tokens, added = vocabulary.tokens, vocabulary.added
    if (size := max([len(tokens), *(index + 1 for index in added)])) > vocab_size:
        raise ConversionError(f"The tokenizer has {size} ids, the model a vocabulary of {vocab_size}.")
    # llama.cpp's greedy tokenizer has bytes with Python's escapes.
    texts = [repr(token)[2:-1] for token in tokens] + [UNUSED.format(i) for i in range(len(tokens), vocab_size)]
    kinds = [NORMAL] * len(tokens) + [UNUSED_KIND] * (vocab_size - len(tokens))
    for index, token in added.items():
        content, kinds[index] = token.content, CONTROL if token.special else USER_DEFINED
        if index >= len(tokens):
            # It is matched as stored, so it must not contain escapes.
            kinds[index] = UNUSED_KIND if content == UNUSED.format(index) else kinds[index]
            texts[index] = content
        faults = {
            "is searched for together with spaces around it": token.lstrip or token.rstrip,
            "is only found as a word of its own": token.single_word,
            "has a backslash": "\\" in content,
            "is empty": not content,
            f"differs from {tokens[index : index + 1]}": index < len(tokens) and content.encode() != tokens[index],
        }
        if fault := next((name for name, found in faults.items() if found), None):
            raise ConversionError(f"GGUF cannot hold the token {content!r} (id {index}), which {fault}. {WITHOUT}")
    for text, times in Counter(texts).items():
        if times > 1:
            first, second, *_ = (index for index, each in enumerate(texts) if each == text)
            raise ConversionError(
                f"The token {text!r} has the ids {first} and {second}; llama.cpp refuses such files. {WITHOUT}"
            )
    return texts, kinds


WITHOUT = "With `tokenizer` none, the file has none."


def find_ends(vocabulary: Vocabulary, stops: Sequence[int], vocab_size: int) -> dict[str, int]:
    """
    The tokens that end an answer, by their names in GGUF: the tokenizer's EOS, if it is among them, and up to two
    others. If only the end of a document ends an answer, the end of a turn in World's template is added for llama.cpp.

    Raises:
        ConversionError: if there are more than three, or an id is not in the vocabulary.
    """
    if strange := [index for index in stops if not isinstance(index, int) or not 0 <= index < vocab_size]:
        raise ConversionError(f"`eos_token_id` has {strange[0]!r}, which is no id of a vocabulary of {vocab_size}.")
    eos = vocabulary.ids.get("eos")
    if eos is None and not stops:
        return {}
    eos = eos if eos in stops or not stops else stops[0]
    turn = vocabulary.end_of_turn
    others = sorted(dict.fromkeys(index for index in stops if index != eos), key=lambda index: index != turn)
    if len(others) > 2:
        raise ConversionError(f"`eos_token_id` is {[*stops]}; GGUF has room for 3 tokens that end an answer.")
    if not others:
        others = [eos] if eos else [turn] if turn is not None else []
    return {"eos": eos, **dict(zip(("eot", "eom"), others, strict=False))}
