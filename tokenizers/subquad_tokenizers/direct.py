"""Calls of the World tokenizer by the compiled encoder, which give what the tokenizers library gives."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers
from transformers import BatchEncoding, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils import PaddingStrategy

from .greedy import GreedyEncoder
from .vocabulary import bytes_to_token


# Up to this number of added tokens, texts are searched for each of them.
FEW = 8
# Arguments of a tokenizer's call that [`Direct.call`] reads as they are.
OF_CALLS = {
    *("add_special_tokens", "return_attention_mask", "return_length", "return_offsets_mapping"),
    *("return_special_tokens_mask", "return_tensors", "split_special_tokens", "verbose"),
}
_SEVERAL = list, tuple
# The ids before and after a text without special tokens around it.
_NOTHING = (), ()
# Arguments of `_encode_plus` that are left to the library unless they are false.
UNUSED = {"stride", "is_split_into_words", "return_overflowing_tokens", "return_token_type_ids"}


class Window(NamedTuple):
    """
    The tokens of a row: a text's from `first` up to `last`, around them special tokens, and around these padding.

    Attributes:
        begin: ids of the special tokens before the text.
        end: ids of the special tokens after it.
        left: number of padding tokens before everything.
        right: number of padding tokens after everything.
    """

    first: int
    last: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    left: int
    right: int

    @property
    def place(self) -> slice:
        """Where the tokens of the text are in the row."""
        start = self.left + len(self.begin)
        return slice(start, start + self.last - self.first)

    def around(self, values: list, other: Any, padding: Any = None) -> list:
        """The values of the text's tokens with another one for special tokens, and for padding."""
        padding = other if padding is None else padding
        before = [padding] * self.left + [other] * len(self.begin)
        return [*before, *values, *[other] * len(self.end), *[padding] * self.right]


class Direct:
    """
    Encodes texts as a `tokenizers.Tokenizer` does, if its components are those of World. It is outdated when tokens
    have been added or components replaced.

    Args:
        backend: the tokenizer.
        encoder: the encoder of its tokens. None if their ids are not 1, 2, ...
        pattern: the regular expression by which a tokenizer of these tokens splits texts.
    """

    def __init__(self, backend: tokenizers.Tokenizer, encoder: GreedyEncoder | None, pattern: str):
        self.backend, self._state = backend, _state(backend)
        self._functions = encoder and encoder.functions
        splits = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        plain = self._state[1:3] == (normalizers.ByteLevel, pre_tokenizers.Split)
        plain = plain and isinstance(backend.model, models.WordLevel)
        self._encodes = plain and self._functions is not None and json.loads(_dump(backend.pre_tokenizer)) == splits
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token.content for token in added.values() if token.special)
        # Tokens that also take what is around them are left to the library.
        self._refused = [
            token.content for token in added.values() if token.lstrip or token.rstrip or token.single_word
        ]
        raw = {token.content: index for index, token in added.items() if not token.normalized}
        normalized = {token.content: index for index, token in added.items() if token.normalized}
        self._passes = [(_any_of(ids), ids) for ids in (raw, normalized) if ids]
        self._normalized = frozenset(normalized.values())
        self._contents = [*raw, *normalized]
        self._around = _around(self._state[3])

    def is_current(self, backend: tokenizers.Tokenizer) -> bool:
        """Whether the tokenizer is still the one that this was made for."""
        return backend is self.backend and _state(backend) == self._state

    def encode(self, text: str, split_special_tokens: bool, add_special_tokens: bool) -> list[int] | None:
        """The ids of a text. None if the tokenizers library has to find them."""
        around = self._around if add_special_tokens else _NOTHING
        ids = self._encode(text, split_special_tokens) if self._encodes and around is not None else None
        return ids if ids is None or around == _NOTHING else [*around[0], *ids, *around[1]]

    def _holds_added(self, text: str) -> bool:
        if len(self._contents) <= FEW:
            return any(map(text.__contains__, self._contents))
        return any(pattern.search(text) for pattern, _ in self._passes)

    def _refuses(self, text: str) -> bool:
        return any(map(text.__contains__, self._refused))

    def _encode(self, text: str, split_special_tokens: bool) -> list[int] | None:
        if not self._holds_added(text):
            return self._functions.encode_text(text)
        if self._refuses(text):
            return None
        ids: list[int] = []
        for part, index in self._parts(text, split_special_tokens):
            if index is None:
                ids += self._functions.encode_text(part)
            else:
                ids.append(index)
        return ids

    def _parts(self, text: str, split_special_tokens: bool) -> list[tuple[str, int | None]]:
        """The text cut at its added tokens: parts with the id of the token, or None."""
        parts: list[tuple[str, int | None]] = [(text, None)]
        for pattern, ids in self._passes:
            cut: list[tuple[str, int | None]] = []
            for part, index in parts:
                start = 0
                for found in pattern.finditer(part) if index is None else ():
                    if split_special_tokens and found[0] in self._special:
                        continue
                    if start < found.start():
                        cut.append((part[start : found.start()], None))
                    cut.append((found[0], ids[found[0]]))
                    start = found.end()
                if start < len(part):
                    cut.append((part[start:], index))
            parts = cut
        return parts

    def call(
        self,
        tokenizer: PreTrainedTokenizerFast,
        text: Any,
        *,
        add_special_tokens: bool = True,
        padding_strategy: PaddingStrategy = PaddingStrategy.DO_NOT_PAD,
        truncation_strategy: TruncationStrategy = TruncationStrategy.DO_NOT_TRUNCATE,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool | None = None,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        split_special_tokens: bool | None = None,
        verbose: bool = True,
        **others,
    ) -> BatchEncoding | None:
        """
        What the `_encode_plus` of a tokenizer returns for a text or a list of texts. None if that has to be called,
        because of `others` or what is in a text.
        """
        batched = isinstance(text, _SEVERAL) and len(text) > 0
        texts = text if batched else [text]
        around = self._around if add_special_tokens else _NOTHING
        if not self._encodes or around is None or (others and (others.keys() - UNUSED or any(others.values()))):
            return None
        names = tokenizer.model_input_names
        if "token_type_ids" in names and others.get("return_token_type_ids") is None:
            return None
        if split_special_tokens is None:
            split_special_tokens = tokenizer.split_special_tokens
        begin, end = around
        limit = None
        if truncation_strategy != TruncationStrategy.DO_NOT_TRUNCATE:
            limit = max_length - len(begin) - len(end)
            if limit <= 0 or truncation_strategy == TruncationStrategy.ONLY_SECOND:
                return None
        ids: list[list[int]] = []
        offsets: list[list[tuple[int, int]]] = []
        firsts = {}
        for row, each in enumerate(texts):
            if not isinstance(each, str) or (self._refused and self._refuses(each)):
                return None
            if return_offsets_mapping:
                found, pairs = self.locate(each, split_special_tokens)
                offsets.append(pairs)
            else:
                found = self._encode(each, split_special_tokens)
            if limit is not None and len(found) > limit:
                firsts[row] = 0 if tokenizer.truncation_side == "right" else len(found) - limit
                found = found[firsts[row] : firsts[row] + limit]
            ids.append([*begin, *found, *end] if begin or end else found)
        # The library keeps these settings, and they are saved.
        pads = padding_strategy != PaddingStrategy.DO_NOT_PAD
        if pads or limit is not None or not self.backend.truncation is self.backend.padding is None:
            tokenizer.set_truncation_and_padding(
                padding_strategy, truncation_strategy, max_length, 0, pad_to_multiple_of, padding_side
            )
        if self.backend.encode_special_tokens != split_special_tokens:
            self.backend.encode_special_tokens = split_special_tokens
        lengths = [*map(len, ids)]
        masks = None
        if "attention_mask" in names if return_attention_mask is None else return_attention_mask:
            masks = [[1] * length for length in lengths]
        side = tokenizer.padding_side if padding_side is None else padding_side
        if pads:
            target = max(lengths) if padding_strategy == PaddingStrategy.LONGEST else max_length
            if pad_to_multiple_of:
                target += -target % pad_to_multiple_of
            for row, length in enumerate(lengths):
                padding, zeros = [tokenizer.pad_token_id] * (target - length), [0] * (target - length)
                ids[row] = padding + ids[row] if side == "left" else ids[row] + padding
                if masks is not None:
                    masks[row] = zeros + masks[row] if side == "left" else masks[row] + zeros
        if max(map(len, ids)) > tokenizer.model_max_length:
            for each in ids:
                tokenizer._eventual_warn_about_too_long_sequence(each, max_length, verbose)
        results = Results(self, texts, ids, offsets, lengths, firsts, begin, end, side, split_special_tokens)
        values: dict[str, list] = {"input_ids": ids}
        if masks is not None:
            values["attention_mask"] = masks
        if return_special_tokens_mask:
            values["special_tokens_mask"] = [row.special_tokens_mask for row in Rows(results)]
        if return_offsets_mapping:
            values["offset_mapping"] = [*map(results.offsets_of, range(len(ids)))]
        if return_length:
            values["length"] = [*map(len, ids)]
        if not batched and return_tensors is None:
            values = {name: value[0] if isinstance(value[0], list) else value for name, value in values.items()}
        return BatchEncoding(values, Rows(results), tensor_type=return_tensors, n_sequences=1)

    def locate(self, text: str, split_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text and the offsets of its tokens, if [`encode`] finds the ids."""
        encode = self._functions.encode_with_offsets
        if not self._holds_added(text):
            return encode(text)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        for part, index in self._parts(text, split_special_tokens):
            found, pairs = encode(part) if index is None else ([index], [(0, len(part))])
            ids += found
            offsets += [(start + first, start + last) for first, last in pairs]
            start += len(part)
        return ids, offsets

    def tokens(self, text: str, split_special_tokens: bool) -> list[str]:
        """The tokens of a text as strings, if [`encode`] finds the ids."""
        name = self.backend.model.id_to_token
        tokens: list[str] = []
        for part, index in self._parts(text, split_special_tokens):
            if index is None:
                tokens += map(name, self._functions.encode_text(part))
            else:  # as the normalizer writes it
                tokens.append(bytes_to_token(part.encode()) if index in self._normalized else part)
        return tokens


def _dump(component: Any) -> bytes:
    return b"" if component is None else component.__getstate__()


def _state(backend: tokenizers.Tokenizer) -> tuple:
    """What changes when components are replaced or tokens are added. Every call looks at it."""
    post_processor = _dump(backend.post_processor)
    return backend.get_vocab_size(True), type(backend.normalizer), type(backend.pre_tokenizer), post_processor


def _around(post_processor: bytes) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ids that are added before and after a text. None if the post-processor does anything else."""
    if not post_processor:
        return (), ()
    state = json.loads(post_processor)
    if state["type"] != "TemplateProcessing":
        return None
    before: list[int] = []
    after: list[int] = []
    texts = 0
    for piece in state["single"]:
        [(kind, content)] = piece.items()
        if content["type_id"] != 0:
            return None
        if kind == "Sequence":
            texts += 1
        else:
            (after if texts else before).extend(state["special_tokens"][content["id"]]["ids"])
    return (tuple(before), tuple(after)) if texts == 1 else None


def _any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """A pattern for the first of some texts, and the longest of those."""
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))))


class Results(NamedTuple):
    """
    What a call found in texts.

    Attributes:
        direct: what encoded the texts.
        texts: the texts.
        ids: the ids of each row.
        offsets: the offsets of all tokens of each text, or nothing.
        lengths: the number of ids of each row, without padding.
        firsts: the first token of texts that were truncated, by row.
        begin: ids of the special tokens before a text.
        end: ids of the special tokens after it.
        side: "left" or "right": where padding is.
        split_special_tokens: whether special tokens in the texts are ordinary text.
    """

    direct: Direct
    texts: Sequence[str]
    ids: list[list[int]]
    offsets: list[list[tuple[int, int]]]
    lengths: list[int]
    firsts: dict[int, int]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    side: str
    split_special_tokens: bool

    def window(self, row: int) -> Window:
        length, first, missing = self.lengths[row], self.firsts.get(row, 0), len(self.ids[row]) - self.lengths[row]
        left, right = (missing, 0) if self.side == "left" else (0, missing)
        last = first + length - len(self.begin) - len(self.end)
        return Window(first, last, self.begin, self.end, left, right)

    def offsets_of(self, row: int) -> list[tuple[int, int]]:
        """The offsets of the tokens of a row; those around the text have none."""
        if self.offsets:
            found = self.offsets[row]
        else:
            found = self.direct.locate(self.texts[row], self.split_special_tokens)[1]
        if self.lengths[row] == len(self.ids[row]) and not (self.begin or self.end or row in self.firsts):
            return found
        window = self.window(row)
        return window.around(found[window.first : window.last], (0, 0))

    def tokens_of(self, row: int) -> list[str]:
        """The tokens of a row as strings."""
        window, ids, name = self.window(row), self.ids[row], self.direct.backend.id_to_token
        content = self.direct.tokens(self.texts[row], self.split_special_tokens)[window.first : window.last]
        before, after = ids[: window.place.start], ids[window.place.stop :]
        return [*map(name, before), *content, *map(name, after)]


class Rows(Sequence):
    """The encodings of a call, each made when it is asked for."""

    def __init__(self, results: Results):
        self._results = results
        self._made: dict[int, Encoding] = {}

    def __len__(self) -> int:
        return len(self._results.ids)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        row = range(len(self))[index]
        if row not in self._made:
            self._made[row] = Encoding(self._results, row)
        return self._made[row]

    def __reduce__(self):
        return list, ([*self],)


class Encoding:
    """
    What `tokenizers.Encoding` is to its readers: the tokens of one row and their places in the text. Every token is a
    word, as in the tokenizers library. The methods that change an encoding are missing.
    """

    n_sequences = 1
    overflowing: tuple = ()

    def __init__(self, results: Results, row: int):
        self._results, self._row, self._window = results, row, results.window(row)
        self.ids = results.ids[row]
        self._first, self._last = self._window.place.start, self._window.place.stop

    def __len__(self) -> int:
        return len(self.ids)

    def __getstate__(self) -> dict:
        """With what the text and the tokenizer would be needed for."""
        self.tokens, self.offsets  # noqa: B018
        return {name: value for name, value in vars(self).items() if name != "_results"}

    @property
    def attention_mask(self) -> list[int]:
        return self._window.around([1] * (self._last - self._first), 1, 0)

    @property
    def special_tokens_mask(self) -> list[int]:
        return self._window.around([0] * (self._last - self._first), 1)

    @property
    def type_ids(self) -> list[int]:
        return [0] * len(self.ids)

    @property
    def word_ids(self) -> list[int | None]:
        return self._window.around([*range(self._window.first, self._window.last)], None)

    words = word_ids

    @property
    def sequence_ids(self) -> list[int | None]:
        return self._window.around([0] * (self._last - self._first), None)

    @cached_property
    def tokens(self) -> list[str]:
        return self._results.tokens_of(self._row)

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        return self._results.offsets_of(self._row)

    @cached_property
    def _ends(self) -> list[int]:
        return [last for _, last in self.offsets[self._first : self._last]]

    def _is_token(self, token: int) -> bool:
        """Whether a token is one of the text."""
        return self._first <= token < self._last

    def token_to_sequence(self, token_index: int) -> int | None:
        return 0 if self._is_token(token_index) else None

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        return self.offsets[token_index] if self._is_token(token_index) else None

    def token_to_word(self, token_index: int) -> int | None:
        return token_index - self._first + self._window.first if self._is_token(token_index) else None

    def char_to_token(self, char_pos: int, sequence_index: int = 0) -> int | None:
        token = self._first + bisect_right(self._ends, char_pos)
        found = sequence_index == 0 and self._is_token(token) and self.offsets[token][0] <= char_pos
        return token if found else None

    def char_to_word(self, char_pos: int, sequence_index: int = 0) -> int | None:
        token = self.char_to_token(char_pos, sequence_index)
        return None if token is None else self.token_to_word(token)

    def word_to_tokens(self, word_index: int, sequence_index: int = 0) -> tuple[int, int] | None:
        token = word_index - self._window.first + self._first
        return (token, token + 1) if sequence_index == 0 and self._is_token(token) else None

    def word_to_chars(self, word_index: int, sequence_index: int = 0) -> tuple[int, int] | None:
        tokens = self.word_to_tokens(word_index, sequence_index)
        return None if tokens is None else self.offsets[tokens[0]]
