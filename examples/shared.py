"""Helpers of the examples: the check of required packages, and the names of models."""

import importlib.util
import os
import sys

from subquad.hub.info import embedded_models


def require(*packages: str, extra: str) -> None:
    """Ends the program with one line if packages of an extra of subquad are missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        sys.exit(f'{sys.argv[0]} needs {", ".join(missing)}: pip install "subquad[{extra}]"')


def model_directory(name: str) -> str:
    """A directory, or the directory of the embedded model of this name."""
    return name if os.path.isdir(name) else str(embedded_models().get(name, name))
