"""The weight files of a model directory, or of a repository on the Hub."""

import os
from pathlib import Path

from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import has_file


def pickled_weights(directory: str | os.PathLike) -> list[Path]:
    """The weight files in a directory that are not safetensors, except for what a Trainer keeps beside them."""
    files = (file for pattern in ("pytorch_model*.bin", "*.pth") for file in Path(directory).glob(pattern))
    return sorted(file for file in files if not file.name.startswith("rng_state"))


def unsafe_weights(path: str | os.PathLike, options: dict) -> list[Path]:
    """
    The weight files of a directory, or of a repository on the Hub, that has none in safetensors.

    Args:
        path: what `from_pretrained` was given.
        options: the keyword arguments of `from_pretrained`.
    """
    # transformers reads a file whatever `use_safetensors` says, and asks the Hub to convert others on the spot.
    if os.path.isfile(path):
        return [] if os.fspath(path).endswith(".safetensors") else [Path(path)]
    subfolder = options.get("subfolder") or ""
    if os.path.isdir(path):
        directory = Path(path) / subfolder
        return [] if any(directory.glob("*.safetensors*")) else pickled_weights(directory)
    names = ("revision", "token", "cache_dir", "local_files_only")
    hub = {name: options[name] for name in names if options.get(name) is not None}

    def exists(name):
        return has_file(path, f"{subfolder}/{name}" if subfolder else name, **hub)

    infix = f".{options['variant']}" if options.get("variant") else ""
    try:
        if exists(f"model{infix}.safetensors") or exists(f"model.safetensors.index{infix}.json"):
            return []
        return [Path("DIRECTORY") / name for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if exists(name)]
    except (OSError, ValueError):  # transformers says what is wrong
        return []
