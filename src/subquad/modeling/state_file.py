"""
State files: one safetensors file with the states of all blocks, their owner, and a checksum of both.

The checksum detects damage and changes. It is not a signature: anyone who writes the file can compute it.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..hub.foreign_files import check_file, reading
from ..hub.new_files import replacing


# The keys of the file's metadata.
ABOUT, CHECKSUM = "subquad_state", "sha256"
# Limits on characters of JSON and numbers of states, which become Python objects, and on numbers of tokens.
MOST_CHARACTERS, MOST_STATES, MOST_TOKENS = 2**23, 2**14, 2**48
# Fields in the JSON of every file.
FIELDS = {"sizes": dict, "seen_tokens": int, "dtype": str}


@dataclass(frozen=True)
class ModelIdentity:
    """
    The model that a state file belongs to.

    Attributes:
        name: display name of the model.
        digest: a hexadecimal digest of its configuration and weights, as [`subquad.identify`] makes it.
    """

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:12]})"


def _checksum(tensors: dict[str, torch.Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def write_state_file(path: str | os.PathLike, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    """
    Writes states and their description. The file is complete or absent: it is renamed at the end.

    Args:
        about: a description, to be stored as JSON.

    Raises:
        ValueError: if `about` is so long that the file could not be read.
        OSError: if the file cannot be written.
    """
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    text = json.dumps(about)
    _check_length(path, text)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", ABOUT: text, CHECKSUM: _checksum(tensors, text)})


def read_state_file(path: str | os.PathLike) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """
    The states in a file, on the CPU, and their description.

    Raises:
        ValueError: if the file is damaged or was changed, or holds something else.
    """
    with reading(path, "the states"), open_states(path) as file:
        metadata = file.metadata()
        if len(names := file.keys()) > MOST_STATES:
            raise ValueError(f"{os.fspath(path)} has {len(names):,} states, more than any model.")
        # Copies, because a file's tensors begin at any address. Matrix products choose their order of additions by
        # address, so the text would continue with other rounding.
        tensors = {name: file.get_tensor(name).clone() for name in names}
        if _checksum(tensors, metadata[ABOUT]) != metadata.get(CHECKSUM):
            raise ValueError(f"{os.fspath(path)} is damaged or was changed: its checksum is another one.")
        return tensors, _parse(path, metadata[ABOUT])


def open_states(path: str | os.PathLike) -> safe_open:
    """
    An open file of states, of which parts are read by `get_slice`. Its checksum is not compared.

    Raises:
        ValueError: if the file is damaged, or holds something else.
    """
    path = os.fspath(path)
    check_file(path)
    with reading(path, "the states"):
        file = safe_open(path, framework="pt")
        if ABOUT not in (file.metadata() or {}):
            raise ValueError(f"{path} does not hold a cache.")
        return file


def read_about(path: str | os.PathLike) -> dict[str, Any]:
    """
    The description of the states in a file, without reading or checking the states.

    Raises:
        ValueError: if the file is damaged, or holds something else.
    """
    with reading(path, "the states"), open_states(path) as file:
        return _parse(path, file.metadata()[ABOUT])


def _parse(path: str | os.PathLike, text: str) -> dict[str, Any]:
    _check_length(path, text)
    about = json.loads(text)
    fields = about if isinstance(about, dict) else {}
    wrong = [name for name, kind in FIELDS.items() if type(fields.get(name)) is not kind]
    if wrong or not 0 <= about["seen_tokens"] <= MOST_TOKENS:
        raise ValueError(f"{os.fspath(path)} does not hold a cache that this version can read.")
    return about


def _check_length(path: str | os.PathLike, text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"{os.fspath(path)}: what is known about the states has {len(text):,} characters, and may have "
            f"{MOST_CHARACTERS:,}."
        )


def check_owner(path: str | os.PathLike, about: dict[str, Any], model: ModelIdentity) -> None:
    """
    Args:
        about: the description that [`read_state_file`] returned.
        model: the model that continues from the states.

    Raises:
        ValueError: if the states belong to another model or to an unknown one.
    """
    found = about.get("model")
    if not isinstance(found, dict):
        raise ValueError(f"{os.fspath(path)} does not name the model that it belongs to; {model} is loaded.")
    owner = ModelIdentity(str(found.get("name")), str(found.get("digest")))
    if owner.digest != model.digest:
        raise ValueError(f"{os.fspath(path)} is a state of the model {owner}, but {model} is loaded.")


def describe_owner(model: ModelIdentity | None) -> dict[str, str] | None:
    """
    A model's identity as [`check_owner`] reads it.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(model, ModelIdentity | None):
        raise ValueError(f"`model` must be what `subquad.identify` returns, got {model!r:.80}.")
    return None if model is None else asdict(model)


__all__ = ["ModelIdentity", "check_owner", "open_states", "read_about", "read_state_file", "write_state_file"]
