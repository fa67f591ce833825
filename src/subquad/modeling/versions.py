"""
Differences between versions of transformers: the tested range, and the name of the cache.

transformers 5.24 renamed `past_key_values` to `cache`, as an argument and as a field of outputs. The models call it
`cache`. With every version they accept either name as an argument, and outputs have both as attributes.
"""

import dataclasses
import re
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)


# The oldest and the newest minor version that was tested.
TESTED = {"torch": ((2, 8), (2, 14)), "transformers": ((5, 16), (5, 24))}

# The names of the cache: ours, and the one before transformers 5.24.
CACHE_NAMES = ("cache", "past_key_values")


def minor_version(version: str) -> tuple[int, int]:
    """(5, 24) of "5.24.0"."""
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()
    return int(major), int(minor)


def describe_tested() -> str:
    """The versions that were tested, as a sentence."""
    ranges = (f"{name} {a}.{b} to {c}.{d}" for name, ((a, b), (c, d)) in TESTED.items())
    return f"Tested with {' and '.join(ranges)}."


def newer_than_tested() -> list[str]:
    """The installed packages whose minor version is newer than the newest that was tested, with their versions."""
    installed = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    return [f"{name} {version}" for name, version in installed.items() if minor_version(version) > TESTED[name][1]]


def _name_of_cache() -> str:
    """The name that the installed transformers has for the cache."""
    fields = [field.name for field in dataclasses.fields(BaseModelOutputWithPast)]
    for name in CACHE_NAMES:
        if name in fields:
            return name
    raise ImportError(
        f"transformers {transformers.__version__} has another name for the cache than {' or '.join(CACHE_NAMES)}; "
        f"its outputs have {', '.join(fields)}. {describe_tested()}"
    )


CACHE_NAME = _name_of_cache()
# Whether `prefill_chunk_size` reads a text from its beginning even if the cache holds a part of it.
CHUNKS_FROM_THE_BEGINNING = minor_version(transformers.__version__) < (5, 23)


def named_cache(cache: Any) -> dict[str, Any]:
    """The cache as a keyword argument for the outputs and functions of the installed transformers."""
    return {CACHE_NAME: cache}


def cache_of(output: Any) -> Any:
    """The cache in an output of the installed transformers."""
    return getattr(output, CACHE_NAME)


class _EitherName:
    """Mixin: an output whose cache is also available under the other name."""

    def __getattr__(self, name: str) -> Any:
        if name in CACHE_NAMES and name != CACHE_NAME:
            return getattr(self, CACHE_NAME)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class RecurrentModelOutput(_EitherName, BaseModelOutputWithPast):
    """`BaseModelOutputWithPast`, with the attributes `cache` and `past_key_values` in every version."""


class RecurrentCausalLMOutput(_EitherName, CausalLMOutputWithPast):
    """`CausalLMOutputWithPast`, with the attributes `cache` and `past_key_values` in every version."""


class RecurrentClassifierOutput(_EitherName, SequenceClassifierOutputWithPast):
    """`SequenceClassifierOutputWithPast`, with the attributes `cache` and `past_key_values` in every version."""
