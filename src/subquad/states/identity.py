"""Identity of a model, for its states: a digest that takes milliseconds for weights of any size."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, CONFIG_NAME
from transformers.utils.hub import cached_file

from ..hub.foreign_files import read_json
from ..hub.weight_files import QUIET, adapted_model, find_weights, open_weights
from ..modeling.state_file import ModelIdentity
from ..models import REGISTRY


# Fields of a configuration that do not affect the model's computation.
INCIDENTAL = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
# Bytes of each tensor that the digest covers. Further training changes the first numbers of some tensor.
SAMPLE = 64


def identify(model: str | os.PathLike) -> ModelIdentity:
    """
    The identity of a model, for the files of its states.

    The digest covers the configuration, the names, dtypes and shapes of the weights, and the first 64 bytes of each
    tensor, so that it takes milliseconds. Models of the same sizes have different digests if one of them was trained
    further. An adapter counts together with its model. Of a reranker only its embedding model counts, so that both
    directories have one identity.

    Args:
        model: a model directory, or the name of a model on the Hub.

    Raises:
        ValueError: if it has no configuration, or no weights in safetensors.
    """
    path, base = os.fspath(model), adapted_model(model, {})
    digest = hashlib.sha256()
    for part in _parts(base):
        digest.update(part)
    if (adapter := cached_file(path, ADAPTER_SAFE_WEIGHTS_NAME, **QUIET)) is not None:
        for part in _weights(adapter):
            digest.update(part)
    return ModelIdentity(Path(path).resolve().name if os.path.isdir(path) else path, digest.hexdigest())


def _parts(path: str) -> Iterator[bytes]:
    if (file := cached_file(path, CONFIG_NAME, **QUIET)) is None:
        raise ValueError(f"{path} has no {CONFIG_NAME}.")
    config = {name: value for name, value in read_json(file).items() if name not in INCIDENTAL}
    architecture = REGISTRY.get(config.get("model_type"))
    part = architecture and architecture.embedder
    if part:
        config = {name: value for name, value in config.items() if name in part.fields}
    yield json.dumps(config, sort_keys=True).encode()
    if not (files := find_weights(path)):
        raise ValueError(f"{path} has no weights in safetensors.")
    # Sorted by name, so that the division into files does not matter.
    yield from sorted(each for file in files for each in _weights(file, part.weights if part else ("",)))


def _weights(path: str, prefixes: tuple[str, ...] = ("",)) -> list[bytes]:
    """Name, dtype, shape and the first bytes of the tensors in a safetensors file whose names begin with a prefix."""
    open_weights(path)  # which checks the header
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        parts = []
        for name, entry in header.items():
            if not name.startswith(prefixes):
                continue
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            start = file.read(min(SAMPLE, end - begin))
            parts.append(f"{name} {entry['dtype']} {entry['shape']} ".encode() + start)
    return parts


__all__ = ["identify"]
