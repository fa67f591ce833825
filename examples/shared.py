"""What examples share: the check of the packages that they need, and the names of models."""

import importlib.util
import os
import sys

import subquad


def require(*packages: str, extra: str) -> None:
    """Ends the program with one line if packages are missing, which an extra of subquad installs."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        sys.exit(f'{sys.argv[0]} needs {", ".join(missing)}: pip install "subquad[{extra}]"')


def model_directory(name: str) -> str:
    """A directory, or that of the embedded model of this name."""
    return name if os.path.isdir(name) else str(subquad.embedded_model(name) or name)
