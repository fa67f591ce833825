"""Tokenizers of the models in `subquad`: RWKV World, and bytes for ABC music. Importing this imports nothing heavy."""

import importlib
from typing import TYPE_CHECKING


_MODULES = {
    "ByteTokenizer": "tokenization_bytes",
    "GreedyEncoder": "greedy",
    "RwkvWorldTokenizer": "tokenization_rwkv_world",
    "RwkvWorldTokenizerFast": "tokenization_rwkv_world",
    "WORLD_CHAT_TEMPLATE": "tokenization_rwkv_world",
    "WORLD_MODEL_TYPES": "vocabulary",
    "WORLD_VOCAB_FILE": "vocabulary",
    "WORLD_VOCAB_FILE_NAME": "vocabulary",
    "read_vocabulary": "vocabulary",
    "write_vocabulary": "vocabulary",
}

__all__ = [
    "WORLD_CHAT_TEMPLATE",
    "WORLD_MODEL_TYPES",
    "WORLD_VOCAB_FILE",
    "WORLD_VOCAB_FILE_NAME",
    "ByteTokenizer",
    "GreedyEncoder",
    "RwkvWorldTokenizer",
    "RwkvWorldTokenizerFast",
    "read_vocabulary",
    "write_vocabulary",
]

if TYPE_CHECKING:
    from .greedy import GreedyEncoder
    from .tokenization_bytes import ByteTokenizer
    from .tokenization_rwkv_world import WORLD_CHAT_TEMPLATE, RwkvWorldTokenizer, RwkvWorldTokenizerFast
    from .vocabulary import (
        WORLD_MODEL_TYPES,
        WORLD_VOCAB_FILE,
        WORLD_VOCAB_FILE_NAME,
        read_vocabulary,
        write_vocabulary,
    )


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_MODULES})
