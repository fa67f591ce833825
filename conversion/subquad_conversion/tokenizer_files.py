"""Which tokenizer goes beside a converted model."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from subquad.foreign_files import check_links
from subquad_tokenizers import WORLD_MODEL_TYPES, WORLD_VOCAB_FILE, WORLD_VOCAB_FILE_NAME, read_vocabulary

from .checkpoint import read_json
from .errors import ConversionError


# The World vocabulary has 65,530 ids; published models round it up to 65,536 rows.
WORLD_VOCABULARIES = range(65530, 65537)
BYTES_VOCABULARY = 128
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
FILES = (
    "tokenizer.json",
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    WORLD_VOCAB_FILE_NAME,
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)
# Any of these makes a tokenizer; the others only accompany one.
VOCABULARIES = ("tokenizer.json", WORLD_VOCAB_FILE_NAME, "vocab.json", "vocab.txt", "tokenizer.model")


@dataclass(frozen=True)
class Vocabulary:
    """
    What a greedy tokenizer consists of, for files that hold a tokenizer of their own.

    Attributes:
        tokens: in the order of their ids. The first one is the boundary between documents.
        chat_template: how conversations become text, None if the tokenizer has no template.
    """

    tokens: list[bytes]
    chat_template: str | None


@dataclass(frozen=True)
class TokenizerChoice:
    """
    A tokenizer to write.

    Attributes:
        title: what it is, None if there is none.
        save: writes its files into a directory.
        note: why, if the user did not choose it.
        token_ids: `bos_token_id` and so on, as far as the tokenizer has them; some configurations lack some.
        vocabulary: reads the tokens; None if the tokenizer is not greedy.
    """

    title: str | None
    save: Callable[[Path], object]
    note: str | None
    token_ids: dict[str, int]
    vocabulary: Callable[[], Vocabulary] | None = None


def choose_tokenizer(choice: str | Path, source: Path | None, model_type: str, vocab_size: int) -> TokenizerChoice:
    """
    The tokenizer that `choice` means, found before any weight is written.

    Args:
        choice: `auto`, `rwkv-world`, `bytes`, `none`, or a directory that holds a tokenizer.
        source: the directory of a Hub model, None for any other file.
        model_type: of the model to write.
        vocab_size: number of rows of the embeddings.

    Raises:
        ConversionError: if a directory holds no tokenizer or one that needs code of its own, or if a tokenizer made
            here has more ids than the model.
    """
    if choice == "none":
        return TokenizerChoice(None, lambda directory: None, None, {})
    if choice == "rwkv-world":
        return _world(vocab_size, None)
    if choice == "bytes":
        return _bytes(vocab_size, None)
    if choice != "auto":
        directory = Path(choice)
        if not directory.is_dir():
            raise ConversionError(f"A tokenizer is auto, rwkv-world, bytes, none or a directory; got {str(choice)!r}.")
        check_links(directory)
        files = _files(directory)
        if not files:
            raise ConversionError(f"{directory} holds no tokenizer (none of {', '.join(VOCABULARIES)}).")
        if _needs_foreign_code(directory):
            raise ConversionError(f"The tokenizer in {directory} needs code of its own, which is never run.")
        return _copy(directory, files, None)

    files = _files(source) if source else []
    is_world = model_type in WORLD_MODEL_TYPES and vocab_size in WORLD_VOCABULARIES
    if source and files:
        if not _needs_foreign_code(source):
            return _copy(source, files, "the tokenizer was found beside the weights")
        if is_world:
            return _world(vocab_size, "the tokenizer replaces the source's, which needs code of its own")
    elif is_world:
        return _world(vocab_size, f"the tokenizer was chosen by the vocabulary of {vocab_size}")
    elif vocab_size == BYTES_VOCABULARY:
        return _bytes(vocab_size, f"the tokenizer was chosen by the vocabulary of {vocab_size}")
    unknown = f"none is known for {model_type} and a vocabulary of {vocab_size}"
    why = "the source's needs code of its own" if files else unknown
    return TokenizerChoice(None, lambda directory: None, f"no tokenizer was written: {why}", {})


def _world(vocab_size: int, note: str | None) -> TokenizerChoice:
    from subquad_tokenizers import RwkvWorldTokenizerFast

    tokenizer = RwkvWorldTokenizerFast()
    vocabulary = partial(_world_vocabulary, WORLD_VOCAB_FILE, tokenizer.chat_template)
    return _own("RWKV World", tokenizer, vocab_size, note, vocabulary)


def _bytes(vocab_size: int, note: str | None) -> TokenizerChoice:
    from subquad_tokenizers import ByteTokenizer

    return _own("bytes", ByteTokenizer(), vocab_size, note, _bytes_vocabulary)


def _world_vocabulary(file: str | Path, chat_template: str | None) -> Vocabulary:
    return Vocabulary([b"<|endoftext|>", *read_vocabulary(file)], chat_template)


def _bytes_vocabulary() -> Vocabulary:
    return Vocabulary([bytes([code]) for code in range(BYTES_VOCABULARY)], None)


def _own(
    title: str, tokenizer: Any, vocab_size: int, note: str | None, vocabulary: Callable[[], Vocabulary]
) -> TokenizerChoice:
    if len(tokenizer) > vocab_size:
        raise ConversionError(
            f"The {title} tokenizer has {len(tokenizer)} ids, the model a vocabulary of {vocab_size}."
        )
    token_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    token_ids = {name: number for name, number in token_ids.items() if number is not None}
    return TokenizerChoice(title, tokenizer.save_pretrained, note, token_ids, vocabulary)


def has_tokenizer(directory: Path) -> bool:
    return bool(_files(directory))


def _files(directory: Path) -> list[str]:
    found = [name for name in FILES if (directory / name).is_file()]
    return found if any(name in VOCABULARIES for name in found) else []


def _needs_foreign_code(directory: Path) -> bool:
    """Whether the tokenizer there is a class of the repository, whose code is not copied."""
    file = directory / CONFIG
    return file.is_file() and "auto_map" in read_json(file)


def _copy(directory: Path, files: list[str], note: str | None) -> TokenizerChoice:
    def save(destination: Path) -> None:
        for name in files:
            shutil.copyfile(directory / name, destination / name)

    title, vocabulary = f"copied from {directory}", _vocabulary_in(directory, files)
    return TokenizerChoice(title, save, note, _special_ids(directory), vocabulary)


def _vocabulary_in(directory: Path, files: list[str]) -> Callable[[], Vocabulary] | None:
    """Reads the tokens of one of our tokenizers, or of a published one of RWKV."""
    settings = read_json(directory / CONFIG) if CONFIG in files else {}
    if settings.get("tokenizer_class") == "ByteTokenizer":
        return _bytes_vocabulary
    if WORLD_VOCAB_FILE_NAME not in files:
        return None
    template = settings.get("chat_template")
    if TEMPLATE in files:
        template = (directory / TEMPLATE).read_text(encoding="utf-8")
    if not isinstance(template, str):
        template = None
    return partial(_world_vocabulary, directory / WORLD_VOCAB_FILE_NAME, template)


def _special_ids(directory: Path) -> dict[str, int]:
    """The ids of the special tokens that `tokenizer_config.json` names, as far as `tokenizer.json` has them."""
    settings, contents = directory / CONFIG, directory / "tokenizer.json"
    if not settings.is_file() or not contents.is_file():
        return {}
    settings, contents = read_json(settings), read_json(contents)
    ids = {token["content"]: token["id"] for token in contents.get("added_tokens") or ()}
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token", "mask_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            found[f"{name}_id"] = ids[token]
    return found
