"""Greedy longest-match encoding of bytes: by compiled functions or, without a compiler, in Python."""

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from subquad_native.compiling import CompiledLibrary


class Functions(NamedTuple):
    """
    The functions of `greedy.c` for the tokens of an encoder. Other threads run while a long text is encoded.

    Attributes:
        encode_bytes: from bytes to a list of ids.
        encode_text: the same from a string.
        encode_with_offsets: from a string to the ids, and the first character of each token and the one after its
            last, as a list of pairs. A part of a character has the offsets of the character.
    """

    encode_bytes: Callable[[bytes], list[int]]
    encode_text: Callable[[str], list[int]]
    encode_with_offsets: Callable[[str], tuple[list[int], list[tuple[int, int]]]]


def _load(path: Path) -> Callable[[list[bytes]], tuple]:
    # Errors of names that this Python lacks come now, and not when a function is called.
    make = ctypes.PyDLL(str(path), mode=os.RTLD_NOW).subquad_greedy
    make.argtypes, make.restype = [ctypes.py_object], ctypes.py_object
    return make


_COMPILED = CompiledLibrary("greedy", [Path(__file__).with_name("greedy.c")], _load)


def explain() -> tuple[Callable[[list[bytes]], tuple] | None, str]:
    """The function that makes [`Functions`], or None, and the reason."""
    return _COMPILED.explain()


class GreedyEncoder:
    """
    Encodes bytes as the longest token that matches, then the longest one that matches after it, and so on. Every byte
    is read once, so time is linear for all bytes. Nothing is remembered from one text to the next.

    Args:
        tokens: the tokens; the first one has id 1. Every single byte must be one of them.

    Attributes:
        functions: the compiled functions; None if there are none.

    Raises:
        ValueError: if a byte is not a token, a token is empty, or one occurs twice.
    """

    # package only
    functions: Functions | None = None

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = list(tokens)
        self._trie: tuple | None = None
        # package only
        self._compile()

    # package only
    def _compile(self) -> None:
        make, reason = explain()
        if make is not None:
            self.functions = Functions(*make(self.tokens))
        else:
            from transformers.utils import logging  # heavy

            logger = logging.get_logger(__name__)
            logger.warning_once(f"The World tokenizer runs without its C library, and more slowly: {reason}.")

    # Nothing ever changes, so copies may share the encoder. A pickle only needs the tokens.
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return type(self), (self.tokens,)

    def encode(self, data: bytes) -> list[int]:
        """The ids of `data`."""
        # package only
        if self.functions is not None:
            return self.functions.encode_bytes(data)
        if self._trie is None:
            self._trie = _build_trie(self.tokens)
        children, done, rest = self._trie
        ids, node = [], 0
        following = children[0]
        for byte in data:
            child = following.get(byte)
            while child is None:
                ids += done[node]
                node = rest[node]
                following = children[node]
                child = following.get(byte)
            node = child
            following = children[child]
        while node:
            ids += done[node]
            node = rest[node]
        return ids


@functools.lru_cache(maxsize=4)
def shared_encoder(tokens: tuple[bytes, ...]) -> GreedyEncoder:
    """An encoder that tokenizers with the same tokens share."""
    return GreedyEncoder(tokens)


def _build_trie(tokens: Sequence[bytes]) -> tuple[list[dict[int, int]], list[tuple[int, ...]], list[int]]:
    """
    The trie, as three lists with an entry for each node: the node that each byte leads to; and, for a byte that leads
    to no node, the ids of the first tokens of the path and the node of the rest of the path. Node 0 is the root.
    """
    known = {*tokens}
    if len(known) < len(tokens) or b"" in known or any(bytes([byte]) not in known for byte in range(256)):
        raise ValueError("every byte must be a token, no token may be empty, and none may occur twice")
    # Numbers instead of nested dictionaries, because the garbage collector does not visit these.
    children: list[dict[int, int]] = [{}]
    token_at = {}
    for index, token in enumerate(tokens, 1):
        node = 0
        for byte in token:
            following = children[node]
            node = following.get(byte)
            if node is None:
                node = following[byte] = len(children)
                children.append({})
        token_at[node] = index
    done: list[tuple[int, ...]] = [()] * len(children)
    rest = [0] * len(children)
    for node, index in token_at.items():
        done[node] = (index,)
    # At a node where no token ends, the path is its parent's and one more byte: the tokens are the tokens of the
    # parent's path, then of the rest with that byte. Only nodes nearer to the root are needed, so go level by level.
    level = [0]
    while level:
        below = []
        for node in level:
            for byte, child in children[node].items():
                below.append(child)
                if child not in token_at:
                    ids, at = done[node], rest[node]
                    while byte not in children[at]:
                        ids += done[at]
                        at = rest[at]
                    done[child], rest[child] = ids, children[at][byte]
        level = below
    leaf: dict[int, int] = {}
    return [following or leaf for following in children], done, rest
