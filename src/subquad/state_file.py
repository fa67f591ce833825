"""
Files of states: one safetensors file with the states of all blocks, what they belong to, and a checksum of both.

The checksum shows damage, and that something was changed. It is no signature: whoever writes the file can compute it.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .foreign_files import check_file, one_line


# The keys of the file's metadata.
ABOUT, CHECKSUM = "subquad_state", "sha256"


@dataclass(frozen=True)
class ModelIdentity:
    """
    What a state file says about the model that it belongs to.

    Attributes:
        name: the model, as people call it.
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
    Writes states and what is known about them. The file is complete, or is not there: it gets its name at the end.

    Args:
        about: values for JSON.
    """
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    text = json.dumps(about)
    temporary = f"{os.fspath(path)}.{os.getpid()}.incomplete"
    try:
        save_file(tensors, temporary, metadata={"format": "pt", ABOUT: text, CHECKSUM: _checksum(tensors, text)})
        os.replace(temporary, path)
    except SafetensorError as error:  # a directory that does not exist, a full disk
        raise OSError(f"{os.fspath(path)} cannot be written: {one_line(error)}") from error
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def read_state_file(path: str | os.PathLike) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """
    The states in a file, on the CPU, and what [`write_state_file`] was told about them.

    Raises:
        ValueError: if the file is damaged or was changed, or holds something else.
    """
    with _open(path) as file:
        # Copies, because a file's tensors begin at any address, by which matrix products choose their order of
        # additions: the text would go on with other rounding.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        metadata = file.metadata()
    if _checksum(tensors, metadata[ABOUT]) != metadata.get(CHECKSUM):
        raise ValueError(f"{os.fspath(path)} is damaged or was changed: its checksum is another one.")
    return tensors, _parse(path, metadata[ABOUT])


def read_about(path: str | os.PathLike) -> dict[str, Any]:
    """
    What is known about the states in a file, without the states and without a check of them.

    Raises:
        ValueError: if the file is damaged, or holds something else.
    """
    with _open(path) as file:
        return _parse(path, file.metadata()[ABOUT])


@contextmanager
def _open(path: str | os.PathLike) -> Iterator[safe_open]:
    """A file that holds states."""
    path = os.fspath(path)
    check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            if ABOUT not in (file.metadata() or {}):
                raise ValueError(f"{path} does not hold a cache.")
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {one_line(error).rstrip('.')}.") from error


def _parse(path: str | os.PathLike, text: str) -> dict[str, Any]:
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is damaged: {one_line(error).rstrip('.')}.") from error
    tokens = about.get("seen_tokens") if isinstance(about, dict) else None
    if not isinstance(tokens, int) or tokens < 0 or not isinstance(about.get("sizes"), dict):
        raise ValueError(f"{os.fspath(path)} does not hold a cache that this version can read.")
    return about


def check_owner(path: str | os.PathLike, about: dict[str, Any], model: ModelIdentity) -> None:
    """
    Args:
        about: what [`read_state_file`] returned.
        model: the model that is to continue from the states.

    Raises:
        ValueError: if the states belong to another model, or do not say to which one.
    """
    found = about.get("model")
    if not isinstance(found, dict):
        raise ValueError(f"{os.fspath(path)} does not say which model it belongs to; {model} is loaded.")
    owner = ModelIdentity(str(found.get("name")), str(found.get("digest")))
    if owner.digest != model.digest:
        raise ValueError(f"{os.fspath(path)} is a state of the model {owner}, but {model} is loaded.")


def describe_owner(model: ModelIdentity | None) -> dict[str, str] | None:
    """A model's identity as [`check_owner`] reads it."""
    return None if model is None else asdict(model)


__all__ = ["ModelIdentity", "check_owner", "read_about", "read_state_file", "write_state_file"]
