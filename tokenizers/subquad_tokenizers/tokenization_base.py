"""Common base of all tokenizers: checks of keywords, and saving and pushing with their code."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import AddedToken
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Keywords that transformers 5.16 to 5.24 reads when a tokenizer is made, or that `tokenizer_config.json` has for other
# readers. None of them is in a signature.
SETTINGS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens", "added_tokens_decoder"),
    *("add_bos_token", "add_eos_token", "special_tokens_pattern", "split_special_tokens"),
    *("model_max_length", "max_len", "max_length", "stride", "truncation_side", "truncation_strategy"),
    *("padding_side", "pad_to_multiple_of", "pad_token_type_id", "model_input_names", "clean_up_tokenization_spaces"),
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
    *("token_type_ids_pattern", "token_type_ids_include_special_tokens", "post_processor", "fix_mistral_regex"),
    *("chat_template", "chat_control_tokens", "response_template", "response_schema", "verbose", "backend"),
    *("name_or_path", "processor_class", "tokenizer_class", "auto_map", "files_loaded", "is_local"),
    *("local_files_only", "tokenizer_file", "tokenizer_object", "tokenizer_padding", "tokenizer_truncation"),
)
# Keywords for an upload, or for another form of files. `push_to_hub` passes the last to every kind of object.
SAVING = (
    *("commit_description", "commit_message", "create_pr", "private", "repo_id", "repo_type", "revision", "tags"),
    *("token", "save_jinja_files", "max_shard_size"),
)
# Keywords that transformers passes to calls, not present in every signature.
CALLING = {"max_target_length", "return_offsets_mapping", "sanitize_control_tokens", "split_special_tokens"}
# The marks of an assistant's turn in a chat template, in comments. Only transformers supports these statements.
HIDDEN_MARK = re.compile(r"\{#-? *(\{% *(?:end)?generation *%\}) *-?#\}")
# Similarity, from 0 to 1, from which on a name counts as a misspelling of another.
ALIKE = 0.87


class SelfContainedMixin:
    """
    Mixin for tokenizers, placed before transformers' class, which ignores unknown keywords. A tokenizer that is pushed
    to the Hub also loads without this package.
    """

    def __init__(self, **kwargs):
        known = {*inspect.signature(type(self)).parameters, *SETTINGS}
        title = type(self).__name__
        for name, hint in _unknown(kwargs, known):
            if name.endswith("_token") and isinstance(kwargs[name], str | AddedToken):  # transformers adds the token
                continue
            if not kwargs.get("name_or_path"):
                raise TypeError(f"{title}() got an unexpected keyword argument `{name}`.{hint}")
            # The setting comes from a file, or from a caller of `AutoTokenizer` who means the configuration.
            logger.warning_once(f"`{name}` ({kwargs[name]!r:.80}) is not a setting of {title} and is ignored.{hint}")
        super().__init__(**kwargs)

    def get_chat_template(self, chat_template: str | None = None, tools: list[dict] | None = None) -> str:
        """
        As in transformers, whose `apply_chat_template` renders what this returns. Chat templates may have the marks
        of an assistant's turn, `{% generation %}` and `{% endgeneration %}`, in comments, because programs other than
        transformers do not know them. Here they are uncommented: `return_assistant_tokens_mask` and the
        `assistant_only_loss` of TRL need them.

        Raises:
            ValueError: if `chat_template` is a word but not the name of a template. It would be rendered literally.
        """
        named = self.chat_template if isinstance(self.chat_template, dict) else {}
        if chat_template is not None and "{" not in chat_template and chat_template not in named:
            raise ValueError(
                f"`chat_template` {chat_template!r} is neither a template nor the name of one: the tokenizer has "
                f"{', '.join(map(repr, named)) or 'no named ones'}."
            )
        return HIDDEN_MARK.sub(r"\1", super().get_chat_template(chat_template, tools))

    def _encode_plus(self, *args, **kwargs):
        """As in transformers. All encoding methods end here with the keywords that they do not read."""
        refuse_unknown("A tokenizer's call", kwargs, parameter_names(self.__call__, super()._encode_plus) | CALLING)
        return super()._encode_plus(*args, **kwargs)

    def _decode(self, *args, **kwargs):
        """As in transformers. `decode` and `batch_decode` end here."""
        refuse_unknown("decode()", kwargs, parameter_names(super()._decode))
        return super()._decode(*args, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
        push_to_hub: bool = False,
        *,
        self_contained: bool = False,
        **kwargs,
    ) -> tuple[str, ...]:
        """
        As in transformers. With `self_contained` or `push_to_hub`, the code of the tokenizer is saved too: the
        directory loads with `trust_remote_code=True` without this package, and without remote code if it is installed.
        The code is always saved if the tokenizer was loaded from such a directory.
        """
        refuse_unknown("save_pretrained()", kwargs, {*parameter_names(self.save_pretrained), *SAVING})
        with self._with_code(self_contained or push_to_hub or "auto_map" in self.init_kwargs):
            return super().save_pretrained(save_directory, legacy_format, filename_prefix, push_to_hub, **kwargs)

    def _save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs) -> tuple[str, ...]:
        """As in transformers, which may have copied the module of the class and its imports."""
        module = type(self).__module__
        if self._auto_class is not None and module.startswith("subquad_tokenizers."):
            try:
                from subquad_tokenizers.merging import merge
            except ImportError:  # in a `try`, because only such imports may be missing in a copy of this file
                raise
            for copied in get_relative_import_files(sys.modules[module].__file__):
                Path(save_directory, Path(copied).name).unlink(missing_ok=True)
            for name, text in merge([module]).items():
                Path(save_directory, name).write_text(text, encoding="utf-8", newline="\n")
        return super()._save_pretrained(save_directory, *args, **kwargs)

    def push_to_hub(self, *args, **kwargs):
        """As in transformers. The code of the tokenizer is uploaded too."""
        with self._with_code():
            return super().push_to_hub(*args, **kwargs)

    @contextmanager
    def _with_code(self, code: bool = True) -> Iterator[None]:
        # transformers copies the module of a class with this attribute, and `_save_pretrained` merges its imports.
        if not code or self._auto_class is not None:
            yield
            return
        self._auto_class = "AutoTokenizer"
        try:
            yield
        finally:
            del self._auto_class


def parameter_names(*functions: Callable) -> frozenset[str]:
    """The names of the parameters of some functions or methods."""
    return _names(*(getattr(function, "__func__", function) for function in functions))


@functools.cache
def _names(*functions: Callable) -> frozenset[str]:
    parameters = (each for function in functions for each in inspect.signature(function).parameters.values())
    return frozenset(each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL))


def refuse_unknown(function: str, keywords: Mapping[str, Any], known: Collection[str]) -> None:
    """
    Raises:
        TypeError: if a keyword is not known.
    """
    for name, hint in _unknown(keywords, known):
        raise TypeError(f"{function} got an unexpected keyword argument `{name}`.{hint}")


def _unknown(keywords: Mapping[str, Any], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """
    Yields the keywords that are neither known nor private, each with similar known ones, as the end of an error
    message. A keyword that is None or false is allowed unless it is a misspelling: other versions and other tokenizers
    have it.
    """
    for name, value in keywords.items():
        if name in known or name.startswith("_"):
            continue
        if (value is None or value is False) and not get_close_matches(name, known, cutoff=ALIKE):
            continue
        found = get_close_matches(name, sorted({*known} - {"self", "kwargs"}))
        yield name, f" Did you mean {' or '.join(f'`{each}`' for each in found)}?" if found else ""
