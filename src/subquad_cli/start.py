"""A faster start of `subquad generate` and `subquad chat`, in processes that do nothing else."""

import gc
import os
import sys
from argparse import Namespace
from pathlib import Path

from subquad.hub.foreign_files import read_json
from subquad.quantization.methods import METHODS


# transformers imports these packages if they are installed: for its quantisers, losses, assistants and adapters. A
# plain model needs none of them.
UNNEEDED = ("accelerate", "peft", "scipy", "sklearn", "torchao")
# The quantisation methods that do not need them either.
OWN_METHODS = (None, *METHODS.values())


def begin(args: Namespace, path: Path | str) -> None:
    """
    Before transformers is imported: turns garbage collection off, which would scan the objects of imports again and
    again, and blocks imports that a model at `path` does not need. Does nothing if the process is not the command's
    own.
    """
    if not args.own_process:
        return
    gc.disable()
    if is_plain(path):
        for name in UNNEEDED:
            sys.modules.setdefault(name, None)


def ready(args: Namespace) -> None:
    """Once the model is loaded: turns garbage collection on again."""
    if args.own_process:
        gc.enable()


def is_plain(path: Path | str) -> bool:
    """Whether a model directory has no adapter and is not quantised by another package."""
    directory = Path(path)
    if not directory.is_dir() or os.path.isfile(directory / "adapter_config.json"):
        return False
    try:
        quantised = read_json(directory / "config.json").get("quantization_config") or {}
    except ValueError:  # loading it will report the fault
        return False
    return isinstance(quantised, dict) and quantised.get("quant_method") in OWN_METHODS
