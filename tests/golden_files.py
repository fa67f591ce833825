"""What the authors' own code computed, with the weights and the configuration it did so with."""

import json
from pathlib import Path

from safetensors import safe_open


FOLDER = Path(__file__).parent / "golden"


def read_golden(name):
    """All tensors, the weights among them by the authors' names, and the fields of the configuration."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    weights = {name.removeprefix("weights."): x for name, x in tensors.items() if name.startswith("weights.")}
    named = {name: json.loads(metadata[name].lower()) for name in metadata.keys() - {"config", "model", "note"}}
    return tensors, weights, json.loads(metadata["config"]) | named
