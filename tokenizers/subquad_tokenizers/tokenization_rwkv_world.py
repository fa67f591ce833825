"""The RWKV World tokenizer of Eagle, Finch and later RWKV models."""

import os
import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizer, PreTrainedTokenizerFast

from .greedy import GreedyEncoder
from .tokenization_base import CALLING, SelfContainedMixin, parameter_names, refuse_unknown
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
# Some published files call it the EOS token. As a special token it would get an id that no model has seen, instead of
# that of the ordinary token.
BLANK_LINE = "\n\n"

# A blank line ends a turn, so there must be none inside a message. No space follows the last colon: the space belongs
# to the first token of the answer. Goose's G1 models think first: `thinking=True` begins the thought with ` <think`,
# to which the model adds `>`, and `thinking=False` gives an empty thought. Tools are listed in the system's turn, a
# call is a block of JSON, and what it returns is a turn of the user.
WORLD_CHAT_TEMPLATE = r"""
{%- set names = {'system': 'System', 'user': 'User', 'assistant': 'Assistant', 'tool': 'User'} -%}
{%- set schemas = tools | tojson if tools else '' -%}
{%- if schemas and messages[0].role != 'system' -%}{{- 'System: ' ~ schemas ~ '\n\n' -}}{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in names -%}
        {{- raise_exception('The role ' ~ message.role ~ ' is none of system, user, assistant and tool.') -}}
    {%- endif -%}
    {%- set content = message.content or '' -%}
    {%- if content is not string -%}
        {%- set content = content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
    {%- endif -%}
    {%- if message.role == 'tool' -%}{%- set content = 'Function output:\n' ~ content -%}{%- endif -%}
    {%- if message.role == 'system' and loop.first -%}{%- set content = content ~ '\n' ~ schemas -%}{%- endif -%}
    {%- set said = namespace(text=content) -%}
    {%- for call in message.tool_calls or [] -%}
        {%- set said.text = said.text ~ '\n```json\n' ~ (call.function or call) | tojson ~ '\n```' -%}
    {%- endfor -%}
    {%- set content = said.text -%}
    {%- set content = content.replace('\r\n', '\n').split('\n') | select | join('\n') | trim -%}
    {%- set content = (' ' ~ content if content else '') ~ '\n\n' -%}
    {{- names[message.role] ~ ':' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- content -}}{%- endgeneration -%}
    {%- else -%}
        {{- content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'Assistant:' -}}
    {%- if thinking is defined -%}{{- ' <think' if thinking else ' <think></think>\n' -}}{%- endif -%}
{%- endif -%}
""".strip()


def _response_template(end: str | AddedToken | None) -> dict:
    """
    How `parse_response` reads an answer to a prompt of `WORLD_CHAT_TEMPLATE`: thoughts, calls of tools, and the rest.
    A block of JSON is a call if it begins with a name and arguments. The next turn of the user is none of the answer,
    nor is `end`, the EOS token.
    """
    ends = [r"(?<=\n\n)User:", *([re.escape(str(end))] if end else [])]
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "Assistant:",
        "fields": {
            "reasoning_content": {
                "open_pattern": r"\A\s*<think>",
                "close_pattern": rf"</think>\s*|(?={'|'.join(ends)})",
            },
            "tool_calls": {
                "open_pattern": r'\s*```json\s*\{\s*"name":\s*"(?P<name>[^"\n]*)",\s*"arguments":',
                "close_pattern": r"\}\s*```\s*",
                "repeats": True,
                "content": "json",
                "content_args": {"allow_non_json": True},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": rf"\s*(?:{'|'.join(ends)}).*", "repeats": True, "join": "\n"},
        },
    }


def _boundary(added_tokens_decoder: dict | None) -> str:
    """The spelling of id 0. In published repositories it is `<s>`, which is one of their added tokens."""
    return str((added_tokens_decoder or {}).get(0, DOCUMENT_BOUNDARY))


def _special_tokens(boundary: str, **given: str | AddedToken | None) -> dict[str, str | AddedToken | None]:
    """
    Special tokens with the default spelling get the spelling of id 0; else they would become new tokens. So does a
    blank line.
    """
    replaced = (DOCUMENT_BOUNDARY, BLANK_LINE)
    return {name: boundary if str(token) in replaced else token for name, token in given.items()}


def _without_blank_line(options: dict) -> None:
    """Drops the blank line from the added tokens among the arguments of a tokenizer."""
    if decoder := options.get("added_tokens_decoder"):
        kept = {index: token for index, token in decoder.items() if str(token) != BLANK_LINE}
        options["added_tokens_decoder"] = kept


def _add_response_template(options: dict, chat_template: str | None, end: str | AddedToken | None) -> None:
    """Adds the response template to the arguments of a tokenizer, if its chat template has the turns of World."""
    if isinstance(chat_template, str) and "Assistant:" in chat_template:
        options.setdefault("response_template", _response_template(end))


def _pattern(bos: bool, eos: bool) -> str:
    """The name that transformers has for what is added to a text."""
    return "_".join(name for name, added in (("bos", bos), ("eos", eos)) if added) or "none"


def _read_pattern(options: dict) -> dict[str, bool]:
    """
    The options `add_bos_token` and `add_eos_token` among the arguments of a tokenizer. transformers does not save
    them, so they are also saved as a pattern, which is removed from the arguments.
    """
    pattern = options.pop("special_tokens_pattern", None) or "none"
    saved = {} if pattern == "none" else {f"add_{name}_token": name in pattern for name in ("bos", "eos")}
    return saved | {name: bool(options[name]) for name in ("add_bos_token", "add_eos_token") if name in options}


def _surround(begin: list[int], end: list[int], *texts: list[int] | None) -> list[int]:
    """The texts that are not None in a row, each between `begin` and `end`."""
    return [index for text in texts if text is not None for index in (*begin, *text, *end)]


def _in_raw_text(token: str | AddedToken) -> str | AddedToken:
    """
    The token, looked for before normalization if it depends on the text around it. The normalizer writes a space as
    `Ġ`, which is a letter.
    """
    if isinstance(token, str) or not (token.lstrip or token.rstrip or token.single_word):
        return token
    flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "special")}
    return AddedToken(token.content, normalized=False, **flags)


def _find_vocabulary(vocab_file: str | None, name_or_path: str | None) -> str:
    if vocab_file is not None:
        return vocab_file
    # Only a tokenizer that is made without files gets the vocabulary of the package: the directory of another model
    # without its vocabulary must not be taken for World.
    if name_or_path:
        raise ValueError(
            f"{name_or_path} has no {WORLD_VOCAB_FILE_NAME}, the vocabulary of RWKV World. If the model was trained "
            "with it, save `RwkvWorldTokenizerFast()` in that directory."
        )
    return WORLD_VOCAB_FILE


class RwkvWorldTokenizer(SelfContainedMixin, PreTrainedTokenizer):
    """
    RWKV World tokenizer in Python: greedy longest match over the bytes of the text.

    It is the faster of the two for ids (see [`GreedyEncoder`]) and encodes any bytes. It has no offsets. Use
    [`RwkvWorldTokenizerFast`] for these, and to encode a batch on several cores. Both give the same ids and text, also
    with added tokens. Only for added tokens with `single_word` the rules differ: here a space or nothing must be on
    both sides, and there no letter, digit or underscore.

    The ids 1 to 65529 are the tokens. Id 0 is the boundary between documents, written `<|endoftext|>`: it is the BOS,
    EOS and padding token. So `vocab_size` is 65530. Published models have 65536 embeddings: the first added tokens get
    the unused ids 65530 to 65535, and only more tokens than that make a model grow. An id without a token decodes to
    nothing.

    As strings, tokens are in the alphabet of byte-level tokenizers, in which a space is `Ġ`. If ids decode to bytes
    that are not UTF-8, the text contains U+FFFD.

    Args:
        vocab_file: path of the vocabulary; that of the World models if None.
        bos_token: the token that begins a document. It is put before a text only with `add_bos_token=True`, as the
            authors of Goose do in their evaluations.
        eos_token: the token that ends a document. It is put after a text only with `add_eos_token=True`. In a chat, a
            turn ends with a blank line: the token `ĊĊ`, id 261.
        pad_token: the padding token. By default it has the same id as `eos_token`, so a collator that removes padding
            from the loss by its id also removes the end of documents. If that matters, use one of the unused ids.
        unk_token: never needed, because every byte is a token.
        chat_template: the template of `apply_chat_template`; by default that of the World models, `User: ...` and
            `Assistant: ...` with a blank line after each turn. It also takes `tools`, and `thinking` (True or False)
            for Goose's G1 models. With such turns, `parse_response` makes a message of an answer.
        padding_side: "left" by default, which generation needs.
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
        _without_blank_line(kwargs)
        boundary = _boundary(kwargs.get("added_tokens_decoder"))
        self._encoder = GreedyEncoder(tokens)
        self._vocab = _string_vocabulary(tokens, boundary)
        self._tokens = list(self._vocab)
        # The bytes of each id, for decoding. `_update_trie` adds those of added tokens.
        self._bytes = dict(enumerate(tokens, 1))
        self._added_tokens_decoder = {0: AddedToken(boundary, normalized=False, special=True)}
        self._added_pattern = None
        special = _special_tokens(
            boundary, bos_token=bos_token, eos_token=eos_token, pad_token=pad_token, unk_token=unk_token
        )
        _add_response_template(kwargs, chat_template, special["eos_token"])
        added = _read_pattern(kwargs)
        pattern = _pattern(added.get("add_bos_token", False), added.get("add_eos_token", False))
        kwargs["backend"] = "custom"
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        super().__init__(
            chat_template=chat_template,
            special_tokens_pattern=pattern,
            **special,
            **kwargs,
        )
        self.init_kwargs["special_tokens_pattern"] = pattern  # what is in here is saved, as it is then

    @property
    def add_bos_token(self) -> bool:
        """Whether `bos_token` is put before a text."""
        return "bos" in self.special_tokens_pattern

    @add_bos_token.setter
    def add_bos_token(self, value: bool):
        self.special_tokens_pattern = _pattern(value, self.add_eos_token)

    @property
    def add_eos_token(self) -> bool:
        """Whether `eos_token` is put after a text."""
        return "eos" in self.special_tokens_pattern

    @add_eos_token.setter
    def add_eos_token(self, value: bool):
        self.special_tokens_pattern = _pattern(self.add_bos_token, value)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """The ids of one text or two, each with its BOS and EOS token if these are added."""
        begin, end = [self.bos_token_id] * self.add_bos_token, [self.eos_token_id] * self.add_eos_token
        if None in (*begin, *end):
            raise ValueError("`add_bos_token` needs a `bos_token`, and `add_eos_token` an `eos_token`; one is None.")
        return _surround(begin, end, token_ids_0, token_ids_1)

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """1 for the BOS and EOS tokens of [`build_inputs_with_special_tokens`], and 0 for the tokens of the texts."""
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens=True)
        zeros = (None if ids is None else [0] * len(ids) for ids in (token_ids_0, token_ids_1))
        return _surround([1] * self.add_bos_token, [1] * self.add_eos_token, *zeros)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including the document boundary, without added tokens."""
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        """The id of each token, including added tokens."""
        return {**self._vocab, **self._added_tokens_encoder}

    def encode_bytes(self, data: bytes) -> list[int]:
        """The ids of any bytes, UTF-8 or not. Special tokens in them are not recognised."""
        return self._encoder.encode(bytes(data))

    def decode_bytes(self, ids: Sequence[int], skip_special_tokens: bool = False) -> bytes:
        """The bytes of `ids`, the inverse of [`encode_bytes`]."""
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        return b"".join([self._bytes.get(index, b"") for index in ids if index not in skipped])

    def _update_trie(self, *args, **kwargs):
        super()._update_trie(*args, **kwargs)
        added = self._added_tokens_decoder
        self._bytes.update({index: token.content.encode("utf-8") for index, token in added.items()})
        # Longest first, because a regular expression takes the first alternative that matches. The base class handles
        # tokens that depend on the text around them.
        contents = sorted((token.content for token in added.values()), key=len, reverse=True)
        plain = not any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        self._added_pattern = re.compile(f"({'|'.join(map(re.escape, contents))})") if plain else None

    def _encode_text(self, text: str, split_special_tokens: bool) -> list[int]:
        """The ids of a text. With `split_special_tokens`, added tokens in it are encoded like other text."""
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
        if kwargs.pop("return_offsets_mapping", False):
            raise ValueError("`return_offsets_mapping` needs RwkvWorldTokenizerFast: this tokenizer has no offsets.")
        # The base class would make token strings first. It accepts ids instead of a text, so it gets ids.
        if not (kwargs.get("is_split_into_words") or kwargs.get("sanitize_control_tokens")):
            split = kwargs.get("split_special_tokens")
            split = self.split_special_tokens if split is None else split
            text, text_pair = self._replace_texts(text, split), self._replace_texts(text_pair, split)
        return super()._encode_plus(text, text_pair, **kwargs)

    def _replace_texts(self, text, split_special_tokens: bool):
        if isinstance(text, str):
            # The base class refuses an empty list of ids, but not an empty text.
            return self._encode_text(text, split_special_tokens) or ""
        if isinstance(text, (list, tuple)) and text and not isinstance(text[0], int):
            return type(text)([self._replace_texts(item, split_special_tokens) for item in text])
        return text

    def prepare_for_tokenization(self, text: str, **kwargs) -> tuple[str, dict]:
        """As in transformers, whose `tokenize` gives keywords to this alone."""
        refuse_unknown("tokenize()", kwargs, parameter_names(super().prepare_for_tokenization) | CALLING)
        return super().prepare_for_tokenization(text, **kwargs)

    def _tokenize(self, text: str, **kwargs) -> list[str]:
        return [self._tokens[index] for index in self._encoder.encode(text.encode("utf-8"))]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._vocab.get(token, self.unk_token_id)

    def _convert_id_to_token(self, index: int) -> str | None:
        return self._tokens[index] if 0 <= index < len(self._tokens) else None

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of a list of tokens."""
        added = self._added_tokens_encoder
        parts = [token.encode("utf-8") if token in added else token_to_bytes(token) for token in tokens if token]
        return b"".join(parts).decode("utf-8", errors="replace")

    def _decode(self, token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=None, **kwargs) -> str:
        refuse_unknown("decode()", kwargs, parameter_names(self._decode))
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        text = self.decode_bytes(ids, skip_special_tokens).decode("utf-8", errors="replace")
        if clean_up_tokenization_spaces is None:
            clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
        return self.clean_up_tokenization(text) if clean_up_tokenization_spaces else text

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Writes the vocabulary file and returns its path."""
        return _save_vocabulary(self._encoder.tokens, save_directory, filename_prefix)


class RwkvWorldTokenizerFast(SelfContainedMixin, PreTrainedTokenizerFast):
    """
    RWKV World tokenizer on the tokenizers library, with offsets and a `tokenizer.json` that loads without this
    package.

    A regular expression finds the longest match: the vocabulary as a trie, with each continuation as an optional
    group. See [`RwkvWorldTokenizer`] for the ids.

    Args:
        vocab_file: path of the vocabulary; that of the World models if this and `tokenizer_file` are None.
        tokenizer_file: path of a `tokenizer.json`, used instead of `vocab_file`.
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
        _without_blank_line(kwargs)
        if tokenizer_file is None and kwargs.get("tokenizer_object") is None:
            boundary = _boundary(kwargs.get("added_tokens_decoder"))
            tokens = read_vocabulary(_find_vocabulary(vocab_file, kwargs.get("name_or_path")))
            self._tokenizer = _build_backend(tokens, boundary)
        else:
            boundary = DOCUMENT_BOUNDARY
        special = _special_tokens(
            boundary, bos_token=bos_token, eos_token=eos_token, pad_token=pad_token, unk_token=unk_token
        )
        _add_response_template(kwargs, chat_template, special["eos_token"])
        kwargs |= _read_pattern(kwargs)
        kwargs["backend"] = "tokenizers"
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        super().__init__(
            tokenizer_file=tokenizer_file,
            chat_template=chat_template,
            **special,
            **kwargs,
        )
        added = self._tokenizer.get_added_tokens_decoder()
        if any(token.content == BLANK_LINE for token in added.values()):  # only a whole `tokenizer.json` brings it
            self._tokenizer = _build_backend(_tokens_of(self._tokenizer), added[0].content)
            self._tokenizer.add_tokens([token for token in added.values() if token.content != BLANK_LINE])
        self.init_kwargs["special_tokens_pattern"] = None  # saved as the property has it then

    @property
    def special_tokens_pattern(self) -> str:
        """What is added to a text, by which [`RwkvWorldTokenizer`] knows it."""
        return _pattern(self.add_bos_token, self.add_eos_token)

    def _add_tokens(self, new_tokens, special_tokens: bool = False) -> int:
        return super()._add_tokens([_in_raw_text(token) for token in new_tokens], special_tokens)

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs):
        """Leaves the files to `__init__`: the base class would rebuild the tokenizer from parts of a file."""
        return kwargs

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Writes the vocabulary file and returns its path."""
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
        raise ValueError(f"{boundary!r} cannot be the name of id 0, because it is a token of the vocabulary")
    return vocabulary


def _tokens_of(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The tokens with the ids 1, 2, ... of a backend that `_build_backend` made."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return [
        token_to_bytes(token) for token, index in sorted(vocabulary.items(), key=lambda item: item[1]) if index > 0
    ]


def _build_backend(tokens: Sequence[bytes], boundary: str) -> tokenizers.Tokenizer:
    vocabulary = _string_vocabulary(tokens, boundary)
    # There are no unknown tokens, because every byte is a token.
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
    """What may follow a common prefix; `suffixes` are sorted. Alternatives differ in their first character."""
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
    # Greedy: a longer match comes before the end of the token.
    return f"(?:{'|'.join(branches)})" + "?" * optional


def _escape(char: str) -> str:
    return char if char.isalnum() or ord(char) > 127 else "\\" + char
