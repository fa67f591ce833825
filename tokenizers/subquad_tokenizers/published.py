"""The tokenizer classes that published RWKV repositories name."""

from .tokenization_rwkv_world import RwkvWorldTokenizerFast
from .vocabulary import WORLD_VOCAB_FILE


class RWKVWorldTokenizer(RwkvWorldTokenizerFast):
    """
    Replaces the classes of published repositories. All of these have the World vocabulary, some in a file of another
    format, which is not read.
    """

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
    """The same under another name, that of Goose's repositories."""
