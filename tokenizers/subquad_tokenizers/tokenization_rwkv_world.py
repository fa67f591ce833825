"""The RWKV World tokenizer of Eagle, Finch and later RWKV models."""

import functools
import operator
import os
import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from .direct import OF_CALLS, Direct
from .greedy import GreedyEncoder, shared_encoder
from .tokenization_base import SelfContainedMixin
from .vocabulary import (
    CHAR_TO_BYTE,
    WORLD_VOCAB_FILE,
    WORLD_VOCAB_FILE_NAME,
    bytes_to_token,
    read_vocabulary,
    text_to_bytes,
    token_to_bytes,
    write_vocabulary,
)


# The spelling of id 0, the boundary between documents.
DOCUMENT_BOUNDARY = "<|endoftext|>"
# Some published files call it the EOS token. As a special token it would get an id that no model has seen, instead of
# the id of the ordinary token.
BLANK_LINE = "\n\n"

# The turns follow the official templates of Goose's G1 models. A blank line ends a turn, so a turn of the system or
# the user contains none. The assistant's own text stays as the model wrote it, up to its last line: no space follows
# the last colon, because the space belongs to the first token of the answer, and text that begins with white space
# gets none. So an answer that is rendered in a later prompt has the tokens that were generated.
#
# - `thinking`, or `enable_thinking` as others call it: True begins a thought with ` <think`, to which the model adds
#   `>`, and False gives an empty thought, whose end the model completes in the same way. With `style="2025"`, it has
#   the line break of the models of that year.
# - `tools`: JSON schemas, listed in the system's turn, one a line. With `tool_style="signatures"`, as signatures. If
#   no thoughts are asked for, the prompt begins the block of JSON that a call is. Its result is a turn of the user,
#   and JSON if it is neither text nor typed parts.
# - `reasoning_content` of a message is its thought, also an empty one; None means no thought.
#
# Programs that render it alone are jinja2, minijinja, llama.cpp and @huggingface/jinja. The `tojson` of the first
# two escapes characters of HTML, and jinja2's sorts keys; separators differ, too. None knows the marks of an
# assistant's turn, which are in comments: see `SelfContainedMixin.get_chat_template`.
WORLD_CHAT_TEMPLATE = r"""
{%- set names = {'system': 'System', 'user': 'User', 'assistant': 'Assistant', 'tool': 'User'} -%}
{%- macro json(value) -%}
    {%- if value is string and '<é' | tojson != '"<é"' -%}
        {%- set escaped = value.replace('\\', '\\\\').replace('"', '\\"').replace('\n', '\\n') -%}
        {{- '"' ~ escaped.replace('\r', '\\r').replace('\t', '\\t') ~ '"' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for key, item in value | items -%}
            {{- (',' if not loop.first else '') ~ json(key) ~ ':' ~ json(item) -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is iterable and value is not string and value is not none -%}
        {{- '[' -}}
        {%- for item in value -%}{{- (',' if not loop.first else '') ~ json(item) -}}{%- endfor -%}
        {{- ']' -}}
    {%- else -%}
        {{- value | tojson -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro kind(schema) -%}
    {%- if schema.enum -%}
        {%- for value in schema.enum -%}{{- (' | ' if not loop.first else '') ~ json(value) -}}{%- endfor -%}
    {%- elif schema.type is string -%}
        {{- schema.type -}}
    {%- else -%}
        {%- for each in schema.type or schema.anyOf or schema.oneOf or ['any'] -%}
            {{- (' | ' if not loop.first else '') ~ (each if each is string else kind(each)) -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro list_tools() -%}
    {{- 'Tools:\n' ~ ('[\n' if not by_signature else '') -}}
    {%- for tool in tools -%}
        {%- set function = tool.function or tool -%}
        {%- set parameters = function.parameters or {'type': 'object'} -%}
        {%- set properties = parameters.properties or {} -%}
        {%- if function is not mapping or function.name is not string or parameters is not mapping
               or properties is not mapping or (parameters.type != 'object' and not properties) -%}
            {{- raise_exception('The tool ' ~ json(tool) ~ ' is not a JSON schema of a function: it needs a `name`, '
                ~ 'and `parameters` of the type "object" if there are any.') -}}
        {%- endif -%}
        {%- if by_signature -%}
            {{- '- ' ~ function.name ~ '(' -}}
            {%- for key, schema in properties | items -%}
                {%- set optional = '' if key in (parameters.required or []) else '?' -%}
                {{- (', ' if not loop.first else '') ~ key ~ optional ~ ': ' ~ kind(schema) -}}
            {%- endfor -%}
            {{- ')\n' -}}
        {%- else -%}
            {{- '{"name":' ~ json(function.name) -}}
            {{- ',"description":' ~ json(function.description) if function.description else '' -}}
            {{- ',"arguments":' ~ json(properties) ~ ('}\n' if loop.last else '},\n') -}}
        {%- endif -%}
    {%- endfor -%}
    {{- ('' if by_signature else ']\n') ~ 'Return only a JSON function call.' -}}
{%- endmacro -%}
{%- set thought = thinking if thinking is defined else enable_thinking if enable_thinking is defined else none -%}
{%- set year = style if style is defined else '2026' -%}
{%- set tools_as = tool_style if tool_style is defined else 'json' -%}
{%- if thought is not none and thought not in [true, false] -%}
    {{- raise_exception('`thinking` is ' ~ json(thought) ~ ', which is none of true, false and null.') -}}
{%- elif year not in ['2026', '2025'] -%}
    {{- raise_exception('`style` is ' ~ json(year) ~ ', which is neither "2026" nor "2025".') -}}
{%- elif tools_as not in ['json', 'signatures'] -%}
    {{- raise_exception('`tool_style` is ' ~ json(tools_as) ~ ', which is neither "json" nor "signatures".') -}}
{%- endif -%}
{%- set by_signature = tools_as == 'signatures' -%}
{%- set schemas = list_tools() if tools else '' -%}
{%- if schemas and messages[0].role != 'system' -%}{{- 'System: ' ~ schemas ~ '\n\n' -}}{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in names -%}
        {{- raise_exception('The role ' ~ message.role ~ ' is none of system, user, assistant and tool.') -}}
    {%- endif -%}
    {%- set answer = message.role == 'assistant' -%}
    {%- set content = message.content or '' -%}
    {%- set turn = namespace(given='', typed=false, text='', gap='') -%}
    {%- set parts = content if content is iterable and content is not string and content is not mapping else [] -%}
    {%- for part in parts -%}
        {%- if part is mapping and part.type is defined -%}{%- set turn.typed = true -%}{%- endif -%}
    {%- endfor -%}
    {%- if content is string -%}
        {%- set turn.given = content -%}
    {%- elif message.role == 'tool' and not turn.typed -%}
        {%- set turn.given = json(content) -%}
    {%- elif not parts -%}
        {{- raise_exception('The content ' ~ json(content) ~ ' is neither a text nor a list of texts.') -}}
    {%- else -%}
        {%- for part in parts -%}
            {%- if part is string -%}
                {%- set turn.given = turn.given ~ part -%}
            {%- elif part is not mapping or part.type is not defined -%}
                {{- raise_exception('A part of the content, ' ~ json(part) ~ ', has no type.') -}}
            {%- elif part.type != 'text' -%}
                {{- raise_exception('The type ' ~ part.type ~ ' is not text.') -}}
            {%- else -%}
                {%- set turn.given = turn.given ~ part.text -%}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {%- if message.role == 'tool' -%}{%- set turn.given = 'Function output:\n' ~ turn.given -%}{%- endif -%}
    {%- if message.role == 'system' and loop.first -%}{%- set turn.given = turn.given ~ '\n' ~ schemas -%}{%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {%- set function = call.function or call -%}
        {%- set arguments = function.arguments or {} -%}
        {%- if function.name is not string -%}
            {{- raise_exception('The call ' ~ json(call) ~ ' has no name.') -}}
        {%- elif arguments is not string and arguments is not mapping -%}
            {{- raise_exception('The arguments of the call ' ~ json(call) ~ ' are neither an object nor a string.') -}}
        {%- endif -%}
        {%- set arguments = arguments if arguments is string else json(arguments) -%}
        {%- set written = '```json\n{"name":' ~ json(function.name) ~ ',"arguments":' ~ arguments ~ '}\n```' -%}
        {%- set turn.given = turn.given ~ ('\n' if turn.given.strip() else '') ~ written -%}
    {%- endfor -%}
    {%- if answer and message.reasoning_content is string -%}
        {%- set gap = '\n\n' if turn.given and turn.given == turn.given.lstrip() else '' -%}
        {%- set turn.given = '<think>' ~ message.reasoning_content ~ '</think>' ~ gap ~ turn.given -%}
    {%- endif -%}
    {%- if not answer -%}{%- set turn.given = turn.given.replace('\r\n', '\n') -%}{%- endif -%}
    {%- for line in turn.given.split('\n') -%}
        {%- if line.strip() or (line and not answer) -%}
            {%- set turn.text = turn.text ~ turn.gap ~ line -%}
            {%- set turn.gap = '\n' -%}
        {%- elif answer -%}
            {%- set turn.gap = turn.gap ~ line ~ '\n' -%}
        {%- endif -%}
    {%- endfor -%}
    {%- set text = turn.text if answer else turn.text | trim -%}
    {%- set begun = text.startswith('CONTINUE_FINAL_MESSAGE_TAG') or text != text.lstrip() -%}
    {%- set space = ' ' if text and not begun else '' -%}
    {{- names[message.role] ~ ':' -}}
    {%- if answer -%}
        {#- {% generation %} -#}{{- space ~ text ~ '\n\n' -}}{#- {% endgeneration %} -#}
    {%- else -%}
        {{- space ~ text ~ '\n\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'Assistant:' -}}
    {%- if thought -%}
        {{- ' <think' -}}
    {%- elif tools -%}
        {{- ' ```json' -}}
    {%- elif thought is not none -%}
        {{- ' <think>\n</think' if year == '2025' else ' <think></think' -}}
    {%- endif -%}
{%- endif -%}
""".strip()
# Beginnings of the turns after an answer.
STOP_STRINGS = ("\n\nUser:", "\n\nSystem:")

# Valid JSON, in the language of the package `regex`, up to an object that is a call: a name and an object of
# arguments, in any order, and other fields that do not matter. `~` is white space, and `@` a string.
_CALL = r"""(?(DEFINE)
(?P<value>@|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+|true|false|null|(?&array)|(?&object))
(?P<array>\[~(?:(?&value)~(?:,~(?&value)~)*+)?+\])
(?P<object>\{~(?:(?&pair)(?:,~(?&pair))*+)?+\})
(?P<pair>@~:~(?&value)~)
(?P<name>"name"~:~@~)
(?P<arguments>"arguments"~:~(?&object)~)
(?P<other>(?!"(?:name|arguments)")(?&pair))
(?P<one>(?&name),~(?:(?&other),~)*+(?&arguments)|(?&arguments),~(?:(?&other),~)*+(?&name))
(?P<call>\{~(?:(?&other),~)*+(?&one)(?:,~(?&other))*+\})
)""".replace("\n", "")
_CALL = _CALL.replace("@", r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"')
_CALL = _CALL.replace("~", r"[ \t\n\r]*+")


def _response_template(end: str | AddedToken | None) -> dict:
    """
    How `parse_response` reads an answer to a prompt of `WORLD_CHAT_TEMPLATE`: thoughts, tool calls, and the rest. The
    next turn is not part of the answer, nor is `end`, the EOS token. The fields keep all white space except what the
    template writes: a space before the answer, a blank line after a thought, a line break before a call, and the end
    of the turn.

    A call is a complete object of JSON with a name and arguments. It may be in a block of JSON, in `<tool_call>`,
    after `**Tool Call:**`, on a line of its own, or in a list; the closing marks may be missing. A call that is cut
    off is content.
    """
    ends = "|".join([r"(?<=\n\n)(?:User|System):", *([re.escape(str(end))] if end else [])])
    marks = r"(?:(?:\*\*Tool Calls?:?\*\*:?|<tool_call>|```(?:json)?)\s*+)++"
    # In a stream, a match that reaches the end of the text waits for more.
    fence, tag = r"(?:```|`{1,2}\Z)", r"(?:</tool_call>|</?[a-z_]*\Z)"
    on_its_own = r"(?<=(?:\A|\n|\},?)\s*)"
    return {
        # An empty thought is kept only if the field has a default.
        "defaults": {"role": "assistant", "reasoning_content": None},
        "start_anchor": "Assistant:",
        "fields": {
            "reasoning_content": {
                "open_pattern": r"\A\s*<think>",
                "close_pattern": rf"</think>(?:\n\n(?=\S)|\n{{1,2}}\Z)?|\s*(?={ends})",
                "content_args": {"strip": False},
            },
            "tool_calls": {
                # The first group lets the search skip text that cannot be a call.
                "open_pattern": r"(?=[\n*<`\[{])(?:(?<!(?:\A|</think>)\s*)\n)?"
                + rf"(?:{marks}|{on_its_own})(?:\[\s*+)?(?=\{{)(?=(?&call)){_CALL}",
                # The call itself is the content: the match is the text after it.
                "close_pattern": rf"(?:(?<!\}})(?&call)\K)?\s*+,?\s*+\]?\s*+(?:{fence}\s*+)?(?:{tag}\s*+)?{_CALL}",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
                },
            },
            "content": {
                "close_pattern": rf"\A (?=\S)|\A\s+\Z|\n\s*\Z|(?:\n\s*)?(?:{ends}).*",
                "content_args": {"strip": False},
                "repeats": True,
                "join": "\n",
            },
        },
    }


def _boundary(added_tokens_decoder: dict | None) -> str:
    """The spelling of id 0. In published repositories it is `<s>`, one of their added tokens."""
    return str((added_tokens_decoder or {}).get(0, DOCUMENT_BOUNDARY))


def _special_tokens(boundary: str, **given: str | AddedToken | None) -> dict[str, str | AddedToken | None]:
    """
    Special tokens with the default spelling get the spelling of id 0; otherwise they would be new tokens. So does a
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
    if _has_turns(chat_template):
        options.setdefault("response_template", _response_template(end))


def _has_turns(chat_template: str | dict[str, str] | None) -> bool:
    """Whether the template for conversations of all kinds has the turns of World."""
    template = chat_template.get("default") if isinstance(chat_template, dict) else chat_template
    return "Assistant:" in (template or "")


def _read_pattern(options: dict) -> dict[str, bool]:
    """
    The options `add_bos_token` and `add_eos_token` among the arguments of a tokenizer. transformers does not save
    them, so they are also saved as a pattern, which is removed from the arguments.
    """
    pattern = options.pop("special_tokens_pattern", None) or "none"
    saved = {} if pattern == "none" else {f"add_{name}_token": name in pattern for name in ("bos", "eos")}
    return saved | {name: bool(options[name]) for name in ("add_bos_token", "add_eos_token") if name in options}


def _in_raw_text(token: str | AddedToken) -> str | AddedToken:
    """
    The token, matched before normalization if it depends on the surrounding text. The normalizer writes a space as
    `Ġ`, which is a letter.
    """
    if isinstance(token, str) or not (token.lstrip or token.rstrip or token.single_word):
        return token
    flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "special")}
    return AddedToken(token.content, normalized=False, **flags)


def _find_vocabulary(vocab_file: str | None, name_or_path: str | None) -> str:
    if vocab_file is not None:
        return vocab_file
    # Only a tokenizer that is made without files gets the vocabulary of the package: another model's directory
    # without its vocabulary must not be taken for World.
    if name_or_path:
        raise ValueError(
            f"{name_or_path} has no {WORLD_VOCAB_FILE_NAME}, the vocabulary of RWKV World. If the model was trained "
            "with it, save `RwkvWorldTokenizerFast()` in that directory."
        )
    return WORLD_VOCAB_FILE


class RwkvWorldTokenizerFast(SelfContainedMixin, PreTrainedTokenizerFast):
    """
    RWKV World tokenizer: greedy longest match over the bytes of the text, with offsets and a `tokenizer.json` that
    loads without this package. There a regular expression finds the longest match: the vocabulary as a trie, with each
    continuation as an optional group.

    Here a trie in C, compiled at first use, finds the ids, offsets and words of a text or a list of texts, truncated
    and padded or not. The tokenizers library, which takes 5 to 50 times as long, gives the same. It is called for
    pairs, words, strides, overflowing tokens and token types; for texts with an added token that depends on what is
    around it; if components of `backend_tokenizer` are not those of World; and without a C compiler, with a warning.
    (After the first call, another component of the same type is noticed only if it is the normalizer or the
    post-processor.) The encodings of the trie have what can be read from a `tokenizers.Encoding`, and not the methods
    that change it.

    The ids 1 to 65529 are the tokens. Id 0 is the boundary between documents, written `<|endoftext|>`: it is the BOS,
    EOS and padding token. So `vocab_size` is 65530. Published models have 65536 embeddings: the first added tokens get
    the unused ids 65530 to 65535, and only more tokens than that make a model grow. An id without a token decodes to
    nothing.

    As strings, tokens are in the alphabet of byte-level tokenizers, in which a space is `Ġ`. If ids decode to bytes
    that are not UTF-8, the text contains U+FFFD; [`decode_bytes`] has the bytes themselves. [`encode_bytes`] takes any
    bytes, and is the fastest way to the ids of a text.

    Args:
        vocab_file: path of the vocabulary; the World models' if this and `tokenizer_file` are None.
        tokenizer_file: path of a `tokenizer.json`, used instead of `vocab_file`.
        bos_token: the token that begins a document. It is put before a text only with `add_bos_token=True`, as the
            authors of Goose do in their evaluations.
        eos_token: the token that ends a document. It is put after a text only with `add_eos_token=True`. In a chat, a
            turn ends with a blank line: the token `ĊĊ`, id 261.
        pad_token: the padding token. By default it has the same id as `eos_token`, so a collator that removes padding
            from the loss by its id also removes the end of documents. If that matters, use one of the unused ids.
        unk_token: never needed, because every byte is a token.
        chat_template: the template of `apply_chat_template`; by default the World models', `User: ...` and
            `Assistant: ...` with a blank line after each turn. For Goose's G1 models, it also takes `tools`,
            `tool_style` ("json" or "signatures"), `thinking` (True or False), or `enable_thinking`, and `style`
            ("2026", or "2025" for the models of that year). A wrong value of these, a tool that is not a JSON schema
            of a function, and a call without a name are errors. With such turns, `parse_response` makes a message from
            an answer, and `stop_strings` has the beginnings of the next turns.
        padding_side: "left" by default, which generation needs.
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
        if any(token.content == BLANK_LINE for token in added.values()):  # only a complete `tokenizer.json` has it
            self._tokenizer = _build_backend(_tokens_of(self._tokenizer), added[0].content)
            self._tokenizer.add_tokens([token for token in added.values() if token.content != BLANK_LINE])
        self.init_kwargs["special_tokens_pattern"] = None  # the property is saved instead

    @property
    def special_tokens_pattern(self) -> str:
        """The tokens added to every text, saved under this name."""
        added = {"bos": self.add_bos_token, "eos": self.add_eos_token}
        return "_".join(name for name in added if added[name]) or "none"

    @property
    def stop_strings(self) -> list[str]:
        """
        The beginnings of the turn after an answer, for the `stop_strings` of `generate`, the `stop` of a server, and
        so on; empty if the chat template does not have the turns of World. A model in a directory written by `subquad
        convert` ends its answers in such chats anyway.
        """
        return [*STOP_STRINGS] if _has_turns(self.chat_template) else []

    @functools.cached_property
    def _encoder(self) -> GreedyEncoder:
        tokens = _tokens_by_id(self._tokenizer)
        if max(tokens) >= len(tokens):
            raise ValueError("the ids of the vocabulary are not 0, 1, 2, ...: this is no World tokenizer")
        return shared_encoder(tuple(tokens[index] for index in range(1, len(tokens))))

    def encode_bytes(self, data: bytes) -> list[int]:
        """The ids of any bytes, UTF-8 or not. Special and added tokens in them are not recognised."""
        return self._encoder.encode(bytes(data))

    # package only
    def _get_direct(self) -> Direct:
        direct = self.__dict__.get("_direct")
        if direct is None or not direct.is_current(self._tokenizer):
            if direct is not None and direct.backend is not self._tokenizer:
                self.__dict__.pop("_encoder", None)
            try:
                encoder = self._encoder
            except ValueError:  # of another vocabulary
                encoder = None
            pattern = _longest_match(tuple(encoder.tokens)) if encoder else ""
            direct = self.__dict__["_direct"] = Direct(self._tokenizer, encoder, pattern)
        return direct

    # package only
    @functools.wraps(PreTrainedTokenizerFast.encode)
    def encode(self, text, text_pair=None, add_special_tokens=True, *arguments, **options):
        # For a short text most of the time would be spent on options that it does not have.
        if isinstance(text, str) and text_pair is None and not arguments and not options:
            backend, split = self._tokenizer, self.split_special_tokens
            if backend.truncation is None is backend.padding and backend.encode_special_tokens == split:
                ids = self._get_direct().encode(text, split, add_special_tokens)
                if ids is not None and len(ids) <= self.model_max_length:
                    return ids
        return super().encode(text, text_pair, add_special_tokens, *arguments, **options)

    # package only
    @functools.wraps(PreTrainedTokenizerFast.__call__)
    def __call__(self, text=None, *arguments, **options):
        # The same for a call. Without truncation and padding there is nothing to be found out before.
        if text is not None and not arguments and options.keys() <= OF_CALLS:
            return self._encode_plus(text, **options)
        return super().__call__(text, *arguments, **options)

    # package only
    def _encode_plus(self, text, text_pair=None, *arguments, **options):
        if text_pair is None and not arguments:
            encoded = self._get_direct().call(self, text, **options)
            if encoded is not None:
                return encoded
        return super()._encode_plus(text, text_pair, *arguments, **options)

    def decode(self, token_ids, skip_special_tokens=False, **options):
        """As in transformers, which looks at every id of a list one by one."""
        if type(token_ids) is list and token_ids:
            if type(token_ids[0]) is list:
                return [self._decode(each, skip_special_tokens, **options) for each in token_ids]
            if isinstance(token_ids[0], int):
                return self._decode(token_ids, skip_special_tokens, **options)
        return super().decode(token_ids, skip_special_tokens, **options)

    def batch_decode(self, sequences, skip_special_tokens=False, clean_up_tokenization_spaces=None, **options):
        """As in transformers."""
        options["clean_up_tokenization_spaces"] = clean_up_tokenization_spaces
        if type(sequences) is list and sequences and type(sequences[0]) is list:
            return self.decode(sequences, skip_special_tokens, **options)
        return super().batch_decode(sequences, skip_special_tokens, **options)

    def _decode(self, token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=None, **options):
        clean = (
            self.clean_up_tokenization_spaces if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        )
        texts = self._get_texts(bool(skip_special_tokens))
        if options or clean or isinstance(token_ids, dict) or not texts.as_library:
            return super()._decode(token_ids, skip_special_tokens, clean_up_tokenization_spaces, **options)
        return texts.join([token_ids] if isinstance(token_ids, int) else token_ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int], skip_special_tokens: bool = False) -> bytes:
        """
        The bytes of `ids`, the inverse of [`encode_bytes`]. An id without a token has none.

        Raises:
            OverflowError: if an id is negative, or does not fit into 32 bits.
        """
        return self._get_texts(bool(skip_special_tokens)).join(ids)

    def _get_texts(self, skip_special_tokens: bool) -> "_Texts":
        state = self._tokenizer.get_vocab_size(), type(self._tokenizer.decoder)
        known, texts = self.__dict__.get("_texts", (None, {}))
        if known != state:
            texts = {}
            self.__dict__["_texts"] = state, texts
        if skip_special_tokens not in texts:
            texts[skip_special_tokens] = _Texts(self._tokenizer, skip_special_tokens)
        return texts[skip_special_tokens]

    def __getstate__(self) -> dict:
        """Without what is made anew when it is needed, so that a tokenizer that has been used is the same."""
        return {name: value for name, value in vars(self).items() if name not in ("_direct", "_encoder", "_texts")}

    def _add_tokens(self, new_tokens, special_tokens: bool = False) -> int:
        self.__dict__.pop("_direct", None)
        self.__dict__.pop("_texts", None)
        return super()._add_tokens([_in_raw_text(token) for token in new_tokens], special_tokens)

    @classmethod
    def _from_pretrained(cls, resolved_vocab_files, *args, **kwargs):
        if _holds_trie(resolved_vocab_files.get("tokenizer_file")):
            del resolved_vocab_files["tokenizer_file"]
            resolved_vocab_files["vocab_file"] = WORLD_VOCAB_FILE
        return super()._from_pretrained(resolved_vocab_files, *args, **kwargs)

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


# The name in `tokenizer_config.json`, which transformers writes without the ending. It once belonged to another class.
RwkvWorldTokenizer = RwkvWorldTokenizerFast


def _holds_trie(tokenizer_file: str | None) -> bool:
    """Whether a `tokenizer.json` has a model that only rwkv-rs's fork of the tokenizers library reads."""
    if tokenizer_file is None:
        return False
    with open(tokenizer_file, "rb") as file:
        return re.search(rb'"type"\s*:\s*"RwkvTrie"', file.read()) is not None


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


class _Texts(dict):
    """
    Ids to bytes; an id without a token has none.

    Attributes:
        as_library: whether the tokenizers library decodes all ids to these bytes. In added tokens that it finds before
            normalization, it takes some letters for bytes.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skip_special_tokens: bool):
        super().__init__(_tokens_by_id(backend))
        self.as_library = isinstance(backend.decoder, decoders.ByteLevel)
        for index, token in backend.get_added_tokens_decoder().items():
            text = token.content.encode()
            self.as_library &= token.normalized or token_to_bytes(token.content) == text
            self[index] = b"" if token.special and skip_special_tokens else text

    def __missing__(self, index: int) -> bytes:
        if not 0 <= index < 2**32:
            raise OverflowError(f"{index} is no id: the tokenizers library has ids of 32 bits")
        return b""

    def join(self, ids: Sequence[int]) -> bytes:
        if type(sum(ids)) is not int:  # also 1.0 would be found
            ids = [*map(operator.index, ids)]
        return b"".join(map(self.__getitem__, ids))


def _tokens_by_id(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """The tokens of a backend, without added ones."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    text = "".join(vocabulary)
    if {*text} <= CHAR_TO_BYTE.keys():  # all at once
        data, start, tokens = text_to_bytes(text), 0, {}
        for token, index in vocabulary.items():
            tokens[index] = data[start : start + len(token)]
            start += len(token)
        return tokens
    return {index: token_to_bytes(token) for token, index in vocabulary.items()}


def _tokens_of(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The tokens with the ids 1, 2, ... of a backend that `_build_backend` made."""
    tokens = _tokens_by_id(backend)
    return [tokens[index] for index in sorted(tokens) if index > 0]


def _build_backend(tokens: Sequence[bytes], boundary: str) -> tokenizers.Tokenizer:
    vocabulary, pattern = _parts(tuple(tokens), boundary)
    # There are no unknown tokens, because every byte is a token.
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=boundary))
    backend.normalizer = normalizers.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(boundary, normalized=False, special=True)])
    return backend


@functools.lru_cache(maxsize=4)
def _parts(tokens: tuple[bytes, ...], boundary: str) -> tuple[dict[str, int], tokenizers.Regex]:
    """What backends of the same vocabulary share: neither part is changed by anyone."""
    return _string_vocabulary(tokens, boundary), tokenizers.Regex(_longest_match(tokens))


@functools.lru_cache(maxsize=4)
def _longest_match(tokens: tuple[bytes, ...]) -> str:
    """A regular expression that matches the longest of `tokens`, in the alphabet of byte-level tokenizers."""
    return _continuations(sorted(map(bytes_to_token, tokens)))


def _continuations(suffixes: list[str]) -> str:
    """The continuations of a common prefix; `suffixes` are sorted. Alternatives differ in their first character."""
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
