"""Import paths for `AutoTokenizer`, so that nothing is imported before it is used."""

from .vocabulary import WORLD_MODEL_TYPES


# A class name in `tokenizer_config.json` to the class that loads the files.
CLASSES = {
    name: f"subquad_tokenizers.{module}.{name}"
    for module, names in {
        "published": ("RWKVWorldTokenizer", "Rwkv5Tokenizer", "Rwkv6Tokenizer", "RwkvTokenizer", "RWKV7Tokenizer"),
        "tokenization_bytes": ("ByteTokenizer",),
        "tokenization_rwkv_world": ("RwkvWorldTokenizer", "RwkvWorldTokenizerFast"),
    }.items()
    for name in names
}


def default_class(model_type: str) -> str:
    """
    The class for a directory whose files do not name one: RWKV World for Eagle, Finch and Goose, otherwise a class
    that reads the directory's `tokenizer.json`.
    """
    world = model_type in WORLD_MODEL_TYPES
    return CLASSES["RwkvWorldTokenizerFast"] if world else "transformers.PreTrainedTokenizerFast"
