"""The choice of a tokenizer for a converted model."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from subquad.hub.foreign_files import check_links, listed, one_line, reading
from subquad_tokenizers import WORLD_MODEL_TYPES, WORLD_VOCAB_FILE_NAME

from .checkpoint import read_json
from .errors import ConversionError
from .vocabularies import (
    BYTES_VOCABULARY,
    ENDS,
    Vocabulary,
    beyond_world,
    check_ids,
    tokenizer_of,
    vocabulary_of,
)


# The World vocabulary has 65,530 ids; published models round it up to 65,536 rows.
WORLD_VOCABULARIES = range(65530, 65537)
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
TEMPLATES = "additional_chat_templates"  # a directory
# Classes of tokenizers that are greedy.
GREEDY = ("ByteTokenizer", "RwkvWorldTokenizer", "RwkvWorldTokenizerFast")
# Some published files have it as a special token. Here it stays an ordinary token.
BLANK_LINE = "\n\n"
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
# The models of the package tokenizers in a `tokenizer.json`.
MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")
# Each of these defines a tokenizer; the other files only accompany one.
VOCABULARIES = ("tokenizer.json", WORLD_VOCAB_FILE_NAME, "vocab.json", "vocab.txt", "tokenizer.model")


@dataclass(frozen=True)
class TokenizerChoice:
    """
    A tokenizer to write.

    Attributes:
        title: its description, None if there is none.
        save: writes its files into a directory.
        note: the reason, if the user did not choose it.
        token_ids: `bos_token_id` and so on, if the tokenizer has them; some configurations lack some.
        vocabulary: reads its vocabulary; None if the tokenizer is not greedy.
    """

    title: str | None
    save: Callable[[Path], object]
    note: str | None
    token_ids: dict[str, int | list[int]]
    vocabulary: Callable[[], Vocabulary] | None = None

    def chat_stops(self) -> dict[str, Any] | None:
        """The ends of answers in chats, if it has the turns of World; see [`Vocabulary`]."""
        try:
            return self.vocabulary and self.vocabulary().chat_stops
        except ConversionError:  # damaged files are copied too
            return None


def choose_tokenizer(
    choice: str | Path,
    source: Path | None,
    model_type: str,
    vocab_size: int,
    stored: Callable[[], Vocabulary | None] | None = None,
) -> TokenizerChoice:
    """
    Finds the tokenizer for `choice`, before any weight is written.

    Args:
        choice: `auto`, `rwkv-world`, `bytes`, `none`, or a directory that holds a tokenizer.
        source: the directory of a Hub model, None for any other file.
        model_type: of the model to write.
        vocab_size: number of rows of the embeddings.
        stored: reads the tokenizer in the source's file, if it has one.

    Raises:
        ConversionError: if a directory holds no tokenizer or one that needs its own code, if a tokenizer made here has
            more ids than the model, or if one cannot be read.
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
            raise ConversionError(
                f"`tokenizer` must be auto, rwkv-world, bytes, none or a directory; got {str(choice)!r}."
            )
        check_links(directory)
        files = _files(directory)
        if not files:
            raise ConversionError(f"{directory} holds no tokenizer (none of {', '.join(VOCABULARIES)}).")
        if reason := _unreadable(directory):
            raise ConversionError(f"The tokenizer in {directory} {reason}, so it is not copied.")
        return _copy(directory, files, None)

    if stored is not None and (vocabulary := stored()) is not None:
        return _stored(vocabulary, vocab_size)
    files = _files(source) if source else []
    is_world = model_type in WORLD_MODEL_TYPES and vocab_size in WORLD_VOCABULARIES
    if source and files:
        if not (reason := _unreadable(source)):
            return _copy(source, files, "the tokenizer was found beside the weights")
        if is_world:
            return _world(vocab_size, f"the tokenizer replaces the source's, which {reason}", source)
    elif is_world:
        return _world(vocab_size, f"the tokenizer was chosen by the vocabulary of {vocab_size}")
    elif vocab_size == BYTES_VOCABULARY:
        return _bytes(vocab_size, f"the tokenizer was chosen by the vocabulary of {vocab_size}")
    unknown = f"none is known for {model_type} and a vocabulary of {vocab_size}"
    why = f"the source's {reason}" if files else unknown
    return TokenizerChoice(None, lambda directory: None, f"no tokenizer was written: {why}", {})


def _world(vocab_size: int, note: str | None, replaced: Path | None = None) -> TokenizerChoice:
    from subquad_tokenizers import RwkvWorldTokenizerFast

    # A tokenizer of the same vocabulary whose code is not run may have more tokens.
    more = replaced is not None and max(_stated_ids(replaced), default=0) >= WORLD_VOCABULARIES.start
    if more:
        tokenizer = _load_greedy(replaced)
    else:
        template = None if replaced is None else _chat_template(replaced)
        tokenizer = RwkvWorldTokenizerFast(**({} if template is None else {"chat_template": template}))
    return _own("RWKV World", tokenizer, vocab_size, note)


def _chat_template(directory: Path) -> str | None:
    """The chat template in a directory, which its model was trained with."""
    if (file := directory / TEMPLATE).is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(directory / CONFIG).get("chat_template") if (directory / CONFIG).is_file() else None
    return template if isinstance(template, str) else None


def _bytes(vocab_size: int, note: str | None) -> TokenizerChoice:
    from subquad_tokenizers import ByteTokenizer

    return _own("bytes", ByteTokenizer(), vocab_size, note)


def _stored(vocabulary: Vocabulary, vocab_size: int) -> TokenizerChoice:
    """The tokenizer in another program's file."""
    note, ids = "the tokenizer was found in the file", vocabulary.ids
    turn = vocabulary.end_of_turn
    ends = [ids[name] for name in ("eos", *ENDS) if name in ids and (name == "eos" or ids[name] != turn)]
    if turn is not None and turn in (ids.get(name) for name in ENDS):
        note += f", where a blank line ({turn}) ends a turn; `generate` goes on, unless `eos_token_id` has that, too"
    choice = _own("found in the file", tokenizer_of(vocabulary), vocab_size, note)
    special = {"bos": ids.get("bos"), "eos": sorted({*ends}) if len({*ends}) > 1 else next(iter(ends), None)}
    special = {f"{name}_token_id": index for name, index in special.items() if index is not None}
    return replace(choice, token_ids=choice.token_ids | special)


def _own(title: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int, note: str | None) -> TokenizerChoice:
    if len(tokenizer) > vocab_size:
        raise ConversionError(
            f"The {title} tokenizer has {len(tokenizer)} ids, the model a vocabulary of {vocab_size}."
        )
    token_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    token_ids = {name: number for name, number in token_ids.items() if number is not None}
    return TokenizerChoice(title, tokenizer.save_pretrained, note, token_ids, partial(vocabulary_of, tokenizer))


def has_tokenizer(directory: Path) -> bool:
    return bool(_files(directory))


def _files(directory: Path) -> list[str]:
    found = [name for name in FILES if (directory / name).is_file()]
    return found if any(name in VOCABULARIES for name in found) else []


def _unreadable(directory: Path) -> str | None:
    """Why a tokenizer does not load without the package that wrote it; None if it does."""
    if (file := directory / CONFIG).is_file() and "auto_map" in read_json(file):
        return "needs code of its own"
    model = read_json(file).get("model") if (file := directory / "tokenizer.json").is_file() else None
    kind = model.get("type") if isinstance(model, dict) else None
    if isinstance(kind, str) and kind not in MODELS:
        return f"has a model {kind} in tokenizer.json, which the package tokenizers does not know"
    return None


def _copy(directory: Path, files: list[str], note: str | None) -> TokenizerChoice:
    def save(destination: Path) -> None:
        for name in files:
            shutil.copyfile(directory / name, destination / name)
        if (directory / TEMPLATES).is_dir():
            shutil.copytree(directory / TEMPLATES, destination / TEMPLATES)

    settings = read_json(directory / CONFIG) if CONFIG in files else {}
    greedy = WORLD_VOCAB_FILE_NAME in files or settings.get("tokenizer_class") in GREEDY
    vocabulary = (lambda: vocabulary_of(_load_greedy(directory))) if greedy else None
    return TokenizerChoice(f"copied from {directory}", save, note, _special_ids(directory), vocabulary)


def _load_greedy(directory: Path) -> PreTrainedTokenizerBase:
    """
    The RWKV World or byte tokenizer in a directory, whichever of these classes its files name.

    Raises:
        ConversionError: if it cannot be read, or if its token ids differ from the files' ids.
    """
    from subquad_tokenizers import ByteTokenizer, published

    settings = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    classes = {"ByteTokenizer": ByteTokenizer, "RWKV7Tokenizer": published.RWKV7Tokenizer}
    made = classes.get(settings.get("tokenizer_class"), published.RWKVWorldTokenizer)
    misstated = getattr(made, "misstated", (BLANK_LINE,))
    try:
        with reading(directory, "the tokenizer"):
            tokenizer = made.from_pretrained(directory)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    check_ids(tokenizer, {i: content for i, content in _stated_ids(directory).items() if content not in misstated})
    return tokenizer


def _stated_ids(directory: Path) -> dict[int, str]:
    """The added tokens of a tokenizer, by their ids in its files."""
    found = {}
    try:
        if (file := directory / "added_tokens.json").is_file():
            found |= {int(index): content for content, index in read_json(file).items()}
        if (file := directory / CONFIG).is_file():
            tokens = read_json(file).get("added_tokens_decoder") or {}
            found |= {int(index): token["content"] for index, token in tokens.items()}
        if (file := directory / "tokenizer.json").is_file():
            found |= {int(token["id"]): token["content"] for token in read_json(file).get("added_tokens") or ()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConversionError(f"{file} has damaged tokens: {one_line(error)}.") from error
    return found


def _special_ids(directory: Path) -> dict[str, int]:
    """The ids of the special tokens in `tokenizer_config.json`, if the files have them."""
    if not (directory / CONFIG).is_file():
        return {}
    settings, ids = read_json(directory / CONFIG), {content: i for i, content in _stated_ids(directory).items()}
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token", "mask_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            found[f"{name}_id"] = ids[token]
    return found


def lost_tokenizer(choose: Callable[[], TokenizerChoice], source: Path | None) -> list[str]:
    """
    A note about the source's tokenizer, for a file without one: readers would assume the World tokenizer.

    Args:
        choose: finds the tokenizer.
        source: the directory of a Hub model, None for any other file.
    """
    try:
        chosen = choose()
        if (vocabulary := chosen.vocabulary and chosen.vocabulary()) is not None:
            found = beyond_world(vocabulary)
        else:
            found = ["it is of another kind"] if source and has_tokenizer(source) else []
    except ConversionError as error:
        found = [str(error).rstrip(".")]
    if not found:
        return []
    return [f"the file has no tokenizer, and the source's is not the plain one of RWKV World: {listed(found, 4)}"]
