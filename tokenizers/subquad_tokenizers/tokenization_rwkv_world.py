"""The RWKV World tokenizer, of Eagle, Finch and the later RWKV models."""

import os
import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizer, PreTrainedTokenizerFast

from .greedy import GreedyEncoder
from .tokenization_base import SelfContainedMixin
from .vocabulary import (
    WORLD_VOCAB_FILE,
    WORLD_VOCAB_FILE_NAME,
    bytes_to_token,
    read_vocabulary,
    token_to_bytes,
    write_vocabulary,
)


# How id 0, the boundary between documents, is written in text.
DOCUMENT_BOUNDARY = "<|endoftext|>"

# A blank line ends a turn, so there must be none inside a message. No space follows the last colon: the space belongs
# to the first token of the answer.
WORLD_CHAT_TEMPLATE = r"""
{%- set names = {'system': 'System', 'user': 'User', 'assistant': 'Assistant'} -%}
{%- for message in messages -%}
    {%- if message.role not in names -%}
        {{- raise_exception('The role ' ~ message.role ~ ' is none of system, user and assistant.') -}}
    {%- endif -%}
    {%- set content = message.content or '' -%}
    {%- if content is not string -%}
        {%- set content = content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
    {%- endif -%}
    {%- set content = content.replace('\r\n', '\n').split('\n') | select | join('\n') | trim -%}
    {%- set content = (' ' ~ content if content else '') ~ '\n\n' -%}
    {{- names[message.role] ~ ':' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- content -}}{%- endgeneration -%}
    {%- else -%}
        {{- content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
""".strip()


def _boundary(added_tokens_decoder: dict | None) -> str:
    """The spelling of id 0: published repositories have `<s>` there, and say so in their added tokens."""
    return str((added_tokens_decoder or {}).get(0, DOCUMENT_BOUNDARY))


def _special_tokens(boundary: str, **given: str | AddedToken | None) -> dict[str, str | AddedToken | None]:
    """Special tokens left at their default follow the spelling of id 0, instead of becoming tokens of their own."""
    return {name: boundary if str(token) == DOCUMENT_BOUNDARY else token for name, token in given.items()}


def _find_vocabulary(vocab_file: str | None, name_or_path: str | None) -> str:
    if vocab_file is not None:
        return vocab_file
    # Only a tokenizer that is made from nothing gets the table of the package: another model's directory, without its
    # vocabulary, must not pass for World.
    if name_or_path:
        raise ValueError(
            f"{name_or_path} has no {WORLD_VOCAB_FILE_NAME}, which is the vocabulary of RWKV World. If that is the "
            "vocabulary of this model, save `RwkvWorldTokenizerFast()` there."
        )
    return WORLD_VOCAB_FILE


class RwkvWorldTokenizer(SelfContainedMixin, PreTrainedTokenizer):
    """
    RWKV World tokenizer in Python: greedy longest match over the bytes of the text.

    It is the quicker of the two for ids (see [`GreedyEncoder`]) and encodes arbitrary bytes. It knows no offsets: for
    these, and for encoding a batch on several cores, there is [`RwkvWorldTokenizerFast`]. Both give equal ids and
    text, also with tokens that a user adds, unless these take in the space around them (`lstrip`, `rstrip`) or stand
    alone only (`single_word`).

    The ids 1 to 65529 are the tokens, id 0 is the boundary between documents, written `<|endoftext|>`: it begins, ends
    and pads. `vocab_size` is thus 65530. Published models have 65536 embeddings, and tokens that are added get the ids
    that are left, 65530 to 65535, before a model has to grow. An id without a token decodes to nothing.

    Tokens appear as strings in the alphabet of byte-level tokenizers, where a space is `Ġ`. Where ids decode to bytes
    that are not UTF-8, the text has U+FFFD.

    Args:
        vocab_file: path of the vocabulary; the table of the World models where None.
        bos_token: begins a document. No token is added to a text.
        eos_token: ends a document. A chat's turns end with a blank line instead, the token `ĊĊ` with id 261.
        pad_token: fills a batch. It is the same id as `eos_token`: a collator that hides padding from the loss by its
            id hides the end of documents too; give another one of the ids that are left where that matters.
        unk_token: never needed, since every byte is a token.
        chat_template: the template of `apply_chat_template`; by default that of the World models, `User: ...` and
            `Assistant: ...` with a blank line after each turn.
        padding_side: "left" by default, as generation wants it.
        kwargs: as in `PreTrainedTokenizer`.
    """

    vocab_files_names = {"vocab_file": WORLD_VOCAB_FILE_NAME}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        vocab_file: str | None = None,
        bos_token: str | AddedToken | None = DOCUMENT_BOUNDARY,
        eos_token: str | AddedToken | None = DOCUMENT_BOUNDARY,
        pad_token: str | AddedToken | None = DOCUMENT_BOUNDARY,
        unk_token: str | AddedToken | None = None,
        chat_template: str | None = WORLD_CHAT_TEMPLATE,
        **kwargs,
    ):
        tokenizer_file = kwargs.pop("tokenizer_file", None)
        if vocab_file is None and tokenizer_file is not None:
            tokens = _tokens_of(tokenizers.Tokenizer.from_file(tokenizer_file))
        else:
            tokens = read_vocabulary(_find_vocabulary(vocab_file, kwargs.get("name_or_path")))
        boundary = _boundary(kwargs.get("added_tokens_decoder"))
        self._encoder = GreedyEncoder(tokens)
        self._vocab = _string_vocabulary(tokens, boundary)
        self._tokens = list(self._vocab)
        # What decoding puts together. Tokens that are added later join in `_update_trie`.
        self._bytes = dict(enumerate(tokens, 1))
        self._added_tokens_decoder = {0: AddedToken(boundary, normalized=False, special=True)}
        self._added_pattern = None
        kwargs["backend"] = "custom"
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        super().__init__(
            chat_template=chat_template,
            **_special_tokens(
                boundary, bos_token=bos_token, eos_token=eos_token, pad_token=pad_token, unk_token=unk_token
            ),
            **kwargs,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the document boundary among them, without those that were added."""
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        """Token to id, with the tokens that were added."""
        return {**self._vocab, **self._added_tokens_encoder}

    def encode_bytes(self, data: bytes) -> list[int]:
        """The ids of any bytes, UTF-8 or not. Special tokens are not looked for."""
        return self._encoder.encode(bytes(data))

    def decode_bytes(self, ids: Sequence[int], skip_special_tokens: bool = False) -> bytes:
        """The bytes that `ids` stand for. What [`encode_bytes`] returned gives back its argument."""
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        return b"".join([self._bytes.get(index, b"") for index in ids if index not in skipped])

    def _update_trie(self, *args, **kwargs):
        super()._update_trie(*args, **kwargs)
        added = self._added_tokens_decoder
        self._bytes.update({index: token.content.encode("utf-8") for index, token in added.items()})
        # Longest first, as a regular expression takes the first alternative that matches. Tokens that have a say in
        # the text around them are left to the base class.
        contents = sorted((token.content for token in added.values()), key=len, reverse=True)
        plain = not any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        self._added_pattern = re.compile(f"({'|'.join(map(re.escape, contents))})") if plain else None

    def _encode_text(self, text: str, split_special_tokens: bool) -> list[int]:
        """The ids of a text with added tokens in it, these taken for text where `split_special_tokens`."""
        if split_special_tokens:
            return self._encoder.encode(text.encode("utf-8"))
        if self._added_pattern is None:
            return self.convert_tokens_to_ids(self.tokenize(text, split_special_tokens=False))
        parts = self._added_pattern.split(text)
        ids = self._encoder.encode(parts[0].encode("utf-8"))
        for token, part in zip(parts[1::2], parts[2::2], strict=True):
            ids.append(self._added_tokens_encoder[token])
            ids += self._encoder.encode(part.encode("utf-8"))
        return ids

    def _encode_plus(self, text, text_pair=None, **kwargs):
        # The base class goes by way of token strings. It accepts ids in the place of a text, so it gets ids.
        if not (kwargs.get("is_split_into_words") or kwargs.get("sanitize_control_tokens")):
            split = kwargs.get("split_special_tokens")
            split = self.split_special_tokens if split is None else split
            text, text_pair = self._replace_texts(text, split), self._replace_texts(text_pair, split)
        return super()._encode_plus(text, text_pair, **kwargs)

    def _replace_texts(self, text, split_special_tokens: bool):
        if isinstance(text, str):
            # No ids are no input to the base class, an empty text is.
            return self._encode_text(text, split_special_tokens) or ""
        if isinstance(text, (list, tuple)) and text and not isinstance(text[0], int):
            return type(text)([self._replace_texts(item, split_special_tokens) for item in text])
        return text

    def _tokenize(self, text: str, **kwargs) -> list[str]:
        return [self._tokens[index] for index in self._encoder.encode(text.encode("utf-8"))]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._vocab.get(token, self.unk_token_id)

    def _convert_id_to_token(self, index: int) -> str | None:
        return self._tokens[index] if 0 <= index < len(self._tokens) else None

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text that a list of tokens stands for."""
        added = self._added_tokens_encoder
        parts = [token.encode("utf-8") if token in added else token_to_bytes(token) for token in tokens if token]
        return b"".join(parts).decode("utf-8", errors="replace")

    def _decode(self, token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=None, **kwargs) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        text = self.decode_bytes(ids, skip_special_tokens).decode("utf-8", errors="replace")
        if clean_up_tokenization_spaces is None:
            clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
        return self.clean_up_tokenization(text) if clean_up_tokenization_spaces else text

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Write the vocabulary file and return its path."""
        return _save_vocabulary(self._encoder.tokens, save_directory, filename_prefix)


class RwkvWorldTokenizerFast(SelfContainedMixin, PreTrainedTokenizerFast):
    """
    RWKV World tokenizer on the tokenizers library, with offsets and a `tokenizer.json` that needs nothing of this
    package.

    The greedy longest match is a regular expression: the vocabulary as a trie, each continuation an optional group.
    See [`RwkvWorldTokenizer`] for the ids and for the arguments.

    Args:
        vocab_file: path of the vocabulary; the table of the World models where None and there is no `tokenizer_file`.
        tokenizer_file: path of a `tokenizer.json`, which goes before `vocab_file`.
        bos_token, eos_token, pad_token, unk_token, chat_template: as in [`RwkvWorldTokenizer`].
        kwargs: as in `PreTrainedTokenizerFast`.
    """

    vocab_files_names = {"vocab_file": WORLD_VOCAB_FILE_NAME, "tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        vocab_file: str | None = None,
        tokenizer_file: str | None = None,
        bos_token: str | AddedToken | None = DOCUMENT_BOUNDARY,
        eos_token: str | AddedToken | None = DOCUMENT_BOUNDARY,
        pad_token: str | AddedToken | None = DOCUMENT_BOUNDARY,
        unk_token: str | AddedToken | None = None,
        chat_template: str | None = WORLD_CHAT_TEMPLATE,
        **kwargs,
    ):
        if tokenizer_file is None and kwargs.get("tokenizer_object") is None:
            boundary = _boundary(kwargs.get("added_tokens_decoder"))
            tokens = read_vocabulary(_find_vocabulary(vocab_file, kwargs.get("name_or_path")))
            self._tokenizer = _build_backend(tokens, boundary)
        else:
            boundary = DOCUMENT_BOUNDARY
        kwargs["backend"] = "tokenizers"
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        super().__init__(
            tokenizer_file=tokenizer_file,
            chat_template=chat_template,
            **_special_tokens(
                boundary, bos_token=bos_token, eos_token=eos_token, pad_token=pad_token, unk_token=unk_token
            ),
            **kwargs,
        )

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs):
        """Leave the files to `__init__`: the base class would take a tokenizer.json apart and put half of it back."""
        return kwargs

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Write the vocabulary file and return its path."""
        return _save_vocabulary(_tokens_of(self._tokenizer), save_directory, filename_prefix)

    def _save_pretrained(self, save_directory, file_names, legacy_format=None, filename_prefix=None):
        files = super()._save_pretrained(save_directory, file_names, legacy_format, filename_prefix)
        return files + self.save_vocabulary(str(save_directory), filename_prefix)


def _save_vocabulary(tokens: Sequence[bytes], save_directory: str, filename_prefix: str | None) -> tuple[str]:
    name = f"{filename_prefix}-{WORLD_VOCAB_FILE_NAME}" if filename_prefix else WORLD_VOCAB_FILE_NAME
    path = os.path.join(save_directory, name)
    write_vocabulary(tokens, path)
    return (path,)


def _string_vocabulary(tokens: Sequence[bytes], boundary: str) -> dict[str, int]:
    """Token strings to ids, in the order of the ids."""
    vocabulary = {boundary: 0, **{bytes_to_token(token): index for index, token in enumerate(tokens, 1)}}
    if len(vocabulary) != len(tokens) + 1:
        raise ValueError(f"{boundary!r} cannot be the name of id 0, the vocabulary has it as a token")
    return vocabulary


def _tokens_of(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The tokens with the ids 1, 2, ... of a backend that `_build_backend` made."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return [
        token_to_bytes(token) for token, index in sorted(vocabulary.items(), key=lambda item: item[1]) if index > 0
    ]


def _build_backend(tokens: Sequence[bytes], boundary: str) -> tokenizers.Tokenizer:
    vocabulary = _string_vocabulary(tokens, boundary)
    # The model never meets an unknown token, as each byte is one.
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=boundary))
    backend.normalizer = normalizers.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_longest_match(list(vocabulary)[1:])), "isolated")
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(boundary, normalized=False, special=True)])
    return backend


def _longest_match(tokens: Sequence[str]) -> str:
    """A regular expression that matches the longest of `tokens`."""
    return _continuations(sorted(tokens))


def _continuations(suffixes: list[str]) -> str:
    """What may follow a common beginning; `suffixes` are sorted. Alternatives differ in their first character."""
    optional = suffixes[0] == ""
    last, branches = [], []
    for char, group in groupby(suffixes[optional:], key=itemgetter(0)):
        rest = [suffix[1:] for suffix in group]
        if rest == [""]:
            last.append(_escape(char))
        else:
            branches.append(_escape(char) + _continuations(rest))
    if last:
        branches.append(last[0] if len(last) == 1 else f"[{''.join(last)}]")
    if len(branches) == 1 and (last or not optional):
        return branches[0] + "?" * optional
    # Greedy: a longer match goes before the end of the token.
    return f"(?:{'|'.join(branches)})" + "?" * optional


def _escape(char: str) -> str:
    return char if char.isalnum() or ord(char) > 127 else "\\" + char
