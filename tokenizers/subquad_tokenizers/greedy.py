"""Greedy longest-match encoding of bytes."""

import re
from collections.abc import Sequence
from itertools import chain, pairwise


# Possible first bytes of a piece: ASCII other than letters and digits, and the first bytes of CJK ideographs (E4 to
# E9), of most South and South-East Asian scripts (E0) and of emoji (F0 on). Any choice is correct; this one keeps
# pieces word-sized.
_HEADS = frozenset(
    [byte for byte in range(128) if not chr(byte).isalnum()] + [0xE0, *range(0xE4, 0xEA), *range(0xF0, 0x100)]
)


class GreedyEncoder:
    """
    Encodes bytes as the longest token that matches, then the longest one that matches after it, and so on.

    Bytes can be cut in two, and the parts encoded on their own, if no token contains the byte before the cut followed
    by the byte after it. Such cuts are found from the byte pairs in the tokens. They split the input into pieces of
    about a word, and the ids of pieces are kept in a bounded dictionary. A new piece goes through a trie, which reads
    every byte once: when no edge continues the path, the last node knows the tokens of the bytes so far, and the node
    to continue from.

    Args:
        tokens: the tokens; the first one has id 1. Every single byte must be one of them.
    """

    max_piece_bytes = 48
    max_pieces = 65536
    block_bytes = 1 << 13
    max_pause_bytes = 1 << 18

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = list(tokens)
        self._ids = {token: index for index, token in enumerate(self.tokens, 1)}
        self._trie = None
        self._pieces = _Pieces(self)
        self._sampled = 0
        self._pause = self.block_bytes // 2
        self._uncached_bytes = 0
        self._split, self._cut = _safe_cuts(self.tokens)

    # Only the dictionary of pieces ever changes, so copies may share the encoder. A pickle only needs the tokens.
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return type(self), (self.tokens,)

    def encode(self, data: bytes) -> list[int]:
        """The ids of `data`."""
        if len(data) <= self.block_bytes:
            return self._encode_block(data)
        # In blocks, so that the pieces of a long text are not all in memory together.
        ids, start = [], 0
        while start < len(data):
            cut = self._cut.search(data, start + self.block_bytes)
            stop = cut.start() if cut else len(data)
            ids += self._encode_block(data[start:stop])
            start = stop
        return ids

    def _encode_block(self, block: bytes) -> list[int]:
        if self._uncached_bytes > 0:
            self._uncached_bytes -= len(block)
            return self.encode_piece(block)
        pieces = self._split(block)
        ids = list(chain.from_iterable(map(self._pieces.__getitem__, pieces)))
        # Noise, where hardly any piece occurs twice, is encoded faster without the dictionary. If most pieces of a
        # sample were new, the dictionary is not used for a while, longer each time. Ordinary text fills it later.
        self._sampled += len(pieces)
        if self._sampled >= 1024:
            noise = 2 * self._pieces.misses > self._sampled
            self._pause = min(2 * self._pause, self.max_pause_bytes) if noise else self.block_bytes // 2
            self._uncached_bytes = self._pause if noise else 0
            self._sampled = self._pieces.misses = 0
        return ids

    def encode_piece(self, piece: bytes) -> list[int]:
        """The ids of `piece`, without splitting it and without the dictionary. Time is linear in its length."""
        if self._trie is None:
            self._trie = _build_trie(self.tokens)
        children, done, rest = self._trie
        ids, node = [], 0
        following = children[0]
        for byte in piece:
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


class _Pieces(dict):
    """Pieces and their ids, computed when they are missing. It is emptied when it is full."""

    def __init__(self, encoder: GreedyEncoder):
        self.encoder = encoder
        self.misses = 0

    def __missing__(self, piece: bytes) -> tuple[int, ...]:
        encoder = self.encoder
        self.misses += 1
        index = encoder._ids.get(piece)
        ids = tuple(encoder.encode_piece(piece)) if index is None else (index,)
        if len(piece) <= encoder.max_piece_bytes:
            if len(self) >= encoder.max_pieces:
                self.clear()
            self[piece] = ids
        return ids


def _build_trie(tokens: Sequence[bytes]) -> tuple[list[dict[int, int]], list[tuple[int, ...]], list[int]]:
    """
    The trie, as three lists with an entry for each node: the node that each byte leads to; and, for a byte that leads
    to no node, the ids of the first tokens of the path and the node of the rest of the path. Node 0 is the root.
    """
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


def _safe_cuts(tokens: Sequence[bytes]):
    """
    A function that splits bytes where no token crosses the cut, and a pattern that finds such cuts one at a time.

    A cut is between a byte outside `_HEADS` and one of `_HEADS`. Pairs of this kind that a token contains are
    exceptions. All combinations of first and second bytes of exceptions are excluded, which is safe and only loses a
    few cuts.
    """
    pairs = set()
    for token in tokens:
        pairs.update(pairwise(token))
    exceptions = [(first, second) for first, second in pairs if first not in _HEADS and second in _HEADS]
    before, after = {first for first, _ in exceptions}, {second for _, second in exceptions}
    rest = set(range(256)) - _HEADS
    head, tail, first, second = map(_byte_class, (_HEADS, rest, before, after))
    # At an exception the piece continues. The `re` module is fastest with runs of a byte class.
    piece = rb"(?:%b+%b*|%b+)(?:(?<=%b)(?=%b)%b+%b*)*" % (head, tail, tail, first, second, head, tail)
    cut = rb"(?<=%b)(?=%b)|(?<=%b)(?=%b)" % (_byte_class(rest - before), head, tail, _byte_class(_HEADS - after))
    return re.compile(piece).findall, re.compile(cut)


def _byte_class(members) -> bytes:
    if not members:
        return rb"(?!)"
    return b"[" + b"".join(rb"\x%02x" % byte for byte in sorted(members)) + b"]"
