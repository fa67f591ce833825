"""`AutoTokenizer` for the models of this package."""

from transformers import PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import AutoTokenizer

from .tokenization_bytes import ByteTokenizer
from .tokenization_rwkv_world import RwkvWorldTokenizer, RwkvWorldTokenizerFast
from .vocabulary import WORLD_MODEL_TYPES, WORLD_VOCAB_FILE


class _PublishedTokenizer(RwkvWorldTokenizerFast):
    """
    Replaces the classes that published Eagle and Finch repositories name. All of these repositories have the World
    vocabulary, some in a file of another format, which is not read.
    """

    @classmethod
    def _from_pretrained(cls, resolved_vocab_files, *args, **kwargs):
        if not resolved_vocab_files.get("tokenizer_file") and not resolved_vocab_files.get("vocab_file"):
            resolved_vocab_files["vocab_file"] = WORLD_VOCAB_FILE
        return RwkvWorldTokenizerFast._from_pretrained(resolved_vocab_files, *args, **kwargs)


_PUBLISHED = [
    type(name, (_PublishedTokenizer,), {"__module__": __name__})
    for name in ("RWKVWorldTokenizer", "Rwkv5Tokenizer", "Rwkv6Tokenizer")
]


def register(*config_classes: type) -> None:
    """
    Makes `AutoTokenizer` load tokenizers for models with these configurations: RWKV World for Eagle and Finch, for
    others the `tokenizer.json` of the directory, and every tokenizer of this package by the class name in
    `tokenizer_config.json`. `AutoTokenizer` loads the fast World tokenizer; `RwkvWorldTokenizer.from_pretrained` loads
    the one in Python from the same directory. It is safe to call this again.
    """
    for config_class in config_classes:
        # Every registration makes the name of a class known; the last one decides which class the configuration gets.
        for named in (ByteTokenizer, *_PUBLISHED):
            AutoTokenizer.register(config_class, tokenizer_class=named, exist_ok=True)
        if config_class.model_type in WORLD_MODEL_TYPES:
            AutoTokenizer.register(
                config_class,
                slow_tokenizer_class=RwkvWorldTokenizer,
                fast_tokenizer_class=RwkvWorldTokenizerFast,
                exist_ok=True,
            )
        else:
            AutoTokenizer.register(config_class, tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
