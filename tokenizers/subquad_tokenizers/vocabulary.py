"""Vocabulary files of RWKV World: one token per line, as its id, a Python literal and its length in bytes."""

import ast
import functools
import os
from collections.abc import Sequence
from pathlib import Path


WORLD_VOCAB_FILE_NAME = "rwkv_vocab_v20230424.txt"
# The vocabulary that every World model was trained with.
WORLD_VOCAB_FILE = str(Path(__file__).parent / "data" / WORLD_VOCAB_FILE_NAME)
# The longest literal of a token that is read. The longest one of World has 131 characters.
MAX_LITERAL = 2**14
# Types of the models that were trained with it.
WORLD_MODEL_TYPES = ("rwkv5", "rwkv6", "rwkv7", "rwkv7_embedding", "rwkv7_reranker", "visual_rwkv")


def read_vocabulary(path) -> list[bytes]:
    """
    Reads a vocabulary file. The token with id `i` is at index `i - 1` of the result. Id 0 is the boundary between
    documents, which is not in the file.

    Raises:
        ValueError: if a line is not `id literal length`, a length is wrong, an id or a token occurs twice, the ids are
            not 1, 2, ..., or a byte is not a token. The message names the file and, if there is one, the line.
    """
    found = os.stat(path)
    return [*_read(os.fspath(path), found.st_ino, found.st_size, found.st_mtime_ns)]


@functools.lru_cache(maxsize=4)
def _read(path: str, *state: int) -> tuple[bytes, ...]:
    """`state` changes with the file."""
    tokens: dict[int, bytes] = {}
    line_of: dict[bytes, int] = {}
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            index, token = _parse_line(line, where)
            if index in tokens:
                raise ValueError(f"{where}: id {index} occurs twice")
            if token in line_of:
                raise ValueError(f"{where}: token {token!r} occurs twice, first on line {line_of[token]}")
            tokens[index] = token
            line_of[token] = number
    # Added tokens get ids from the number of tokens on. With a gap in the ids, one of them would get an id twice.
    for index in range(1, len(tokens) + 1):
        if index not in tokens:
            raise ValueError(f"{path}: there are {len(tokens)} tokens, but none with id {index}")
    # Without a token for every byte, some texts could not be encoded.
    missing = [byte for byte in range(256) if bytes([byte]) not in line_of]
    if missing:
        raise ValueError(f"{path}: no token for the single bytes {missing}")
    return tuple(tokens[index] for index in range(1, len(tokens) + 1))


def _parse_line(line: str, where: str) -> tuple[int, bytes]:
    fields = line.rstrip("\r\n")
    index, _, rest = fields.partition(" ")
    literal, _, length = rest.rpartition(" ")
    if not (index.isdecimal() and length.isdecimal() and literal and len(index) < 10 and len(length) < 10):
        raise ValueError(f"{where}: expected `id literal length`, found {line[:80]!r}")
    if len(literal) > MAX_LITERAL:  # its syntax tree would have many times its size
        raise ValueError(f"{where}: the literal has {len(literal):,} characters, and may have {MAX_LITERAL:,}")
    try:
        # Most tokens are written without escapes; reading these directly halves the time.
        plain = literal[0] == literal[-1] == "'" and "\\" not in literal and literal.count("'") == 2
        token = literal[1:-1] if plain else ast.literal_eval(literal.strip())
        token = token.encode("utf-8") if isinstance(token, str) else token
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{where}: {literal} is not the literal of a token ({error})") from error
    if not isinstance(token, bytes):
        raise ValueError(f"{where}: {literal} is a {type(token).__name__}, expected str or bytes")
    if not token:
        raise ValueError(f"{where}: the token is empty")
    if len(token) != int(length):
        raise ValueError(f"{where}: {literal} has {len(token)} bytes, but the line says {length}")
    return int(index), token


def write_vocabulary(tokens: Sequence[bytes], path) -> None:
    """Writes tokens, the first of which has id 1, in the format that [`read_vocabulary`] reads."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for index, token in enumerate(tokens, 1):
            try:
                literal = repr(token.decode("utf-8"))
            except UnicodeDecodeError:
                literal = repr(token)
            file.write(f"{index} {literal} {len(token)}\n")


def _visible_bytes() -> dict[int, str]:
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = (byte for byte in range(256) if byte not in visible)
    return {**{byte: chr(byte) for byte in visible}, **{byte: chr(256 + n) for n, byte in enumerate(hidden)}}


# One printable character for each byte, as in the `ByteLevel` classes of the tokenizers library, which only hold text.
BYTE_TO_CHAR = _visible_bytes()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}
_TO_BYTES = str.maketrans({char: chr(byte) for char, byte in CHAR_TO_BYTE.items()})


def bytes_to_token(data: bytes) -> str:
    """Bytes in the alphabet of byte-level tokenizers."""
    return data.decode("latin-1").translate(BYTE_TO_CHAR)


def text_to_bytes(text: str) -> bytes:
    """The inverse of [`bytes_to_token`], also for several tokens in a row."""
    return text.translate(_TO_BYTES).encode("latin-1")


def token_to_bytes(token: str) -> bytes:
    """The inverse of [`bytes_to_token`]. Other strings are encoded as UTF-8."""
    try:
        return bytes([CHAR_TO_BYTE[char] for char in token])
    except KeyError:
        return token.encode("utf-8", errors="replace")
