"""Tokenizer classes named in published RWKV repositories."""

import json
from pathlib import Path

from .tokenization_rwkv_world import BLANK_LINE, DOCUMENT_BOUNDARY, RwkvWorldTokenizerFast
from .vocabulary import WORLD_VOCAB_FILE


class RWKVWorldTokenizer(RwkvWorldTokenizerFast):
    """
    Replaces the classes of published repositories. They all have the World vocabulary, some in a file of another
    format, which is not read.

    Attributes:
        misstated: tokens that files may add under ids that no model has seen. The first is an ordinary token.
    """

    misstated: tuple[str, ...] = (BLANK_LINE,)

    @classmethod
    def _from_pretrained(cls, resolved_vocab_files, *args, **kwargs):
        if not resolved_vocab_files.get("tokenizer_file") and not resolved_vocab_files.get("vocab_file"):
            resolved_vocab_files["vocab_file"] = WORLD_VOCAB_FILE
        return RwkvWorldTokenizerFast._from_pretrained(resolved_vocab_files, *args, **kwargs)


class Rwkv5Tokenizer(RWKVWorldTokenizer):
    """The same under another name."""


class Rwkv6Tokenizer(RWKVWorldTokenizer):
    """The same under another name."""


class RwkvTokenizer(RWKVWorldTokenizer):
    """The same under the name in Goose's repositories."""


class RWKV7Tokenizer(RWKVWorldTokenizer):
    """The class of rwkv7-hf. It gives its special tokens id 0, although it saves them with other ids."""

    misstated = (BLANK_LINE, DOCUMENT_BOUNDARY, "<|padding|>")

    @classmethod
    def _from_pretrained(cls, resolved_vocab_files, *args, **kwargs):
        path = resolved_vocab_files.pop("tokenizer_config_file", None)
        settings = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        for name in ("errors", "init_inputs", "model_vocab_size", "tokenizer_class"):
            settings.pop(name, None)
        added = (settings.get("added_tokens_decoder") or {}).items()
        settings["added_tokens_decoder"] = {i: token for i, token in added if token["content"] not in cls.misstated}
        boundary = dict.fromkeys(("bos_token", "eos_token", "pad_token"), DOCUMENT_BOUNDARY)
        return super()._from_pretrained(resolved_vocab_files, *args, **settings | boundary | kwargs)
