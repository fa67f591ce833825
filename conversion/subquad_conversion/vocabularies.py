"""Greedy tokenizers, such as RWKV World: their vocabularies, for files that cannot store tokenizer files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerBase

from subquad_tokenizers import (
    WORLD_VOCAB_FILE,
    ByteTokenizer,
    RwkvWorldTokenizerFast,
    read_vocabulary,
    write_vocabulary,
)
from subquad_tokenizers.vocabulary import token_to_bytes

from .errors import ConversionError


# Special tokens of a tokenizer, if another program's file has them.
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")
# Names of further tokens that end an answer, found only in files.
ENDS = ("eot", "eom")
BYTES_VOCABULARY = 128
# Beginnings of turns in World's template. Turns end with a blank line.
TURN, END_OF_TURN = "Assistant:", b"\n\n"
# World's tokens that begin an answer, and that begin the other turns.
ANSWER, OTHER_TURNS = (b"Ass", b"istant", b":"), ((b"User", b":"), (b"System", b":"))


@dataclass(frozen=True)
class Vocabulary:
    """
    A greedy tokenizer.

    Attributes:
        tokens: in the order of their ids. The first one is the boundary between documents.
        added: id to token, for tokens that are matched before a text is encoded; the boundary is one of them.
        ids: ids of special tokens, by the names in `SPECIAL`; in a file also in `ENDS`.
        chat_template: the chat template; several, by name; or None.
        around: `bos` and `eos`, if they are put around every text.
    """

    tokens: list[bytes]
    added: Mapping[int, AddedToken]
    ids: Mapping[str, int]
    chat_template: str | Mapping[str, str] | None = None
    around: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        """The template for conversations of all kinds."""
        several = isinstance(self.chat_template, Mapping)
        return (self.chat_template.get("default") if several else self.chat_template) or ""

    @property
    def end_of_turn(self) -> int | None:
        """The token that ends a turn of World's template; the tokenizer has no name for it."""
        return self.tokens.index(END_OF_TURN) if TURN in self.template and END_OF_TURN in self.tokens else None

    @property
    def chat_stops(self) -> dict[str, Any] | None:
        """
        The ends of an answer for `generate`, for World and its turns: `answer`, the tokens that begin one; `turns`,
        the pairs of tokens that begin another turn; `blank` and `line`, tokens that end with a blank line or with a
        line; and `newline`, a line break alone.
        """
        if TURN not in self.template or not is_world(self):
            return None
        find = {token: index for index, token in enumerate(self.tokens) if index}
        return {
            "answer": [find[token] for token in ANSWER],
            "turns": [[find[token] for token in turn] for turn in OTHER_TURNS],
            "blank": [index for token, index in find.items() if token.endswith(END_OF_TURN)],
            "line": [index for token, index in find.items() if token.endswith(b"\n")],
            "newline": find[b"\n"],
        }


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """The vocabulary of one of the tokenizers of `subquad_tokenizers`."""
    added = dict(tokenizer.added_tokens_decoder)
    strings = tokenizer.convert_ids_to_tokens(list(range(tokenizer.vocab_size)))
    tokens = [str(string).encode() if i == 0 else token_to_bytes(string) for i, string in enumerate(strings)]
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in SPECIAL}
    return Vocabulary(
        tokens,
        added,
        {name: index for name, index in ids.items() if index is not None},
        tokenizer.chat_template,
        tuple(name for name in ("bos", "eos") if getattr(tokenizer, f"add_{name}_token", False)),
    )


def tokenizer_of(vocabulary: Vocabulary) -> PreTrainedTokenizerBase:
    """
    The tokenizer of a vocabulary. A special token that is an ordinary token of the vocabulary is left out: otherwise
    the tokenizer would match it in every text.

    Raises:
        ConversionError: if no tokenizer has these ids.
    """
    added, ids = vocabulary.added, vocabulary.ids
    named = [name for name in SPECIAL if ids.get(name) in added]
    options: dict[str, Any] = {f"{name}_token": str(added[ids[name]]) for name in named}
    options |= {f"add_{name}_token": True for name in vocabulary.around}
    options |= {"added_tokens_decoder": dict(sorted(added.items())), "chat_template": vocabulary.chat_template}
    try:
        if is_bytes(vocabulary):
            tokenizer = ByteTokenizer(**options)
        elif is_world(vocabulary):
            tokenizer = RwkvWorldTokenizerFast(**options)
        else:
            with TemporaryDirectory() as directory:
                file = Path(directory) / "vocabulary.txt"
                write_vocabulary(vocabulary.tokens[1:], file)
                tokenizer = RwkvWorldTokenizerFast(vocab_file=str(file), **options)
    except ValueError as error:
        raise ConversionError(f"The tokens make no greedy tokenizer: {error}") from error
    check_ids(tokenizer, {index: token.content for index, token in added.items()})
    return tokenizer


def check_ids(tokenizer: PreTrainedTokenizerBase, contents: Mapping[int, str]) -> None:
    """
    Raises:
        ConversionError: if a token's id differs between a new tokenizer and its files.
    """
    for index, content in contents.items():
        if (found := tokenizer.convert_tokens_to_ids(content)) != index:
            raise ConversionError(
                f"The token {content!r} has the id {index} in the tokenizer's files, and {found} in the tokenizer "
                "that they make: give a directory with another one as `tokenizer`, or none."
            )


def is_world(vocabulary: Vocabulary) -> bool:
    return vocabulary.tokens[1:] == read_vocabulary(WORLD_VOCAB_FILE)


def is_bytes(vocabulary: Vocabulary) -> bool:
    return vocabulary.tokens == [bytes([code]) for code in range(BYTES_VOCABULARY)]


def beyond_world(vocabulary: Vocabulary) -> list[str]:
    """Differences of a tokenizer from the plain World tokenizer, in words."""
    found = [] if is_world(vocabulary) else ["its vocabulary is another"]
    found += [f"{token.content!r} has the id {index}" for index, token in vocabulary.added.items() if index]
    found += [
        f"its {name.upper()} token has the id {vocabulary.ids[name]}" for name in SPECIAL if vocabulary.ids.get(name)
    ]
    return found if TURN in vocabulary.template else [*found, "its chat template is another"]
