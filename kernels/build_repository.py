"""
Builds the Hub kernel repository of `build.toml`: a directory that `kernels.get_local_kernel` loads and that can be
uploaded unchanged. Nothing is compiled here, so the variants of all backends contain the same files.
"""

import argparse
import base64
import hashlib
import json
import shutil
from configparser import ConfigParser
from pathlib import Path


HERE = Path(__file__).resolve().parent


# The package that compiles C. It is imported absolutely, and in a repository it is part of the other one.
LOADER = "subquad_native"


def collect(source: Path) -> dict[str, bytes]:
    """The code in a folder, by its path there."""
    paths = sorted(path for path in source.rglob("*") if path.suffix in (".c", ".h", ".py"))
    return {path.relative_to(source).as_posix(): path.read_bytes() for path in paths}


def build(destination: Path) -> None:
    """
    Writes the repository into a new directory.

    Raises:
        FileExistsError: if the directory exists.
    """
    settings = ConfigParser()  # Python 3.10 cannot read TOML; the values of this file are JSON too
    settings.read(HERE / "build.toml", encoding="utf-8")
    general = {name: json.loads(value) for name, value in settings["general"].items()}
    name = general["name"].replace("-", "_")
    files = collect(HERE / "torch-ext" / name)
    for file, content in files.items():
        dots = "." * len(file.split("/"))
        files[file] = content.replace(f"from {LOADER}.".encode(), f"from {dots}{LOADER}.".encode())
    files |= {f"{LOADER}/{file}": content for file, content in collect(HERE / "torch-ext" / LOADER).items()}
    hashes = {file: hashlib.sha256(content).digest() for file, content in files.items()}
    unique = hashlib.sha256(b"".join(file.encode() + value for file, value in hashes.items())).hexdigest()[:7]

    destination.mkdir(parents=True)
    for path in (HERE / "build.toml", HERE / "README.md", HERE.parent / "LICENSE", HERE.parent / "NOTICE"):
        shutil.copyfile(path, destination / path.name)
    for backend in general["backends"]:
        variant = destination / "build" / f"torch-{backend}"
        for file, content in files.items():
            (variant / file).parent.mkdir(parents=True, exist_ok=True)
            (variant / file).write_bytes(content)
        metadata = {
            # The name under which the module is imported, and the namespace of its operators in torch.
            "id": f"_{name}_{backend}_{unique}",
            "name": general["name"],
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {
                "algorithm": "sha256",
                "files": {file: base64.b64encode(value).decode() for file, value in hashes.items()},
            },
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("destination", type=Path, help="a directory that does not exist yet")
    build(parser.parse_args().destination)
