"""
The wheel in an environment of its own: it is made from the source distribution, installed, and used.

    python tests/release.py [--from DIRECTORY] [REQUIREMENT ...]

By default pip installs what the wheel needs, in its newest versions or as the requirements say ("torch==2.8.*"). With
--from the packages of that directory are used as they are, and nothing is downloaded; if torch is not among them, only
what works without torch is tried.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path


ROOT = Path(__file__).parents[1]
# Of the tree, what neither the tests nor the builds read.
LEFT_OUT = {
    ".git",
    ".venv",
    ".venv-vllm",
    ".venv-versions",
    "build",
    "dist",
    "runs",
    "_generated",
    "__pycache__",
    "*.egg-info",
}
BUILD = "from setuptools import build_meta; print(build_meta.build_{}({!r}))"

WITHOUT_TORCH = """
import sys, subquad, subquad_tokenizers, subquad_vllm
from subquad.hub.info import known_names
assert all(subquad.embedded_model(name) for name in known_names()["embedded models"])
from subquad_tokenizers import greedy
assert all(source.is_file() for source in greedy._COMPILED.sources), greedy._COMPILED.sources
world = subquad_tokenizers.RwkvWorldTokenizerFast()
text = "The Eiffel tower is in 東京? \\n\\n"
assert world.decode(world(text)["input_ids"]) == text
assert all(module.__file__.startswith(sys.prefix) for module in (subquad, subquad_tokenizers, subquad_vllm))
"""
TINY_MODEL = """
import torch, subquad
from subquad_kernels.c import native
from transformers import AutoModelForCausalLM
assert all(source.is_file() for source in native._SOURCES), native._SOURCES
model = AutoModelForCausalLM.from_config(subquad.Rwkv6Config(
    vocab_size=50, hidden_size=32, head_size=16, num_hidden_layers=2, intermediate_size=48
))
ids = torch.randint(1, 50, (2, 20))
loss = model(ids, labels=ids).loss
loss.backward()
assert loss.isfinite() and all(p.grad is not None for p in model.parameters())
assert model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0).shape == (2, 24)
"""


def build(source: Path, folder: Path) -> tuple[Path, Path]:
    """The source distribution of the tree at `source`, and the wheel that is made from it."""

    def make(kind, tree):
        result = subprocess.run(
            [sys.executable, "-c", BUILD.format(kind, str(folder))], cwd=tree, capture_output=True, text=True
        )
        if result.returncode:
            raise RuntimeError(result.stdout + result.stderr)
        return folder / result.stdout.splitlines()[-1]

    with tempfile.TemporaryDirectory() as work:
        tree = Path(work, "tree")
        shutil.copytree(source, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        sdist = make("sdist", tree)
        with tarfile.open(sdist) as file:
            file.extractall(work, filter="data")
        return sdist, make("wheel", Path(work, sdist.name.removesuffix(".tar.gz")))


def environment(folder: Path, wheel: Path, packages: str | None, requirements: list[str]) -> Path:
    """A new environment with the wheel; returns its Python."""
    venv.create(folder, with_pip=packages is None)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if packages is None:
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel, *requirements], check=True)
        return python
    libraries = next(folder.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True)
    # Files in that directory that name further ones are not read: an editable subquad there is not found.
    (libraries / "packages.pth").write_text(f"{Path(packages).resolve()}\n")
    return python


def use(python: Path, folder: Path) -> None:
    """Raises CalledProcessError if the package in that environment does not work."""
    # The tree is not on the path, and packages of the user's account are not either.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SUBQUAD", "TRITON"))}
    clean |= {"HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}

    def run(*command):
        subprocess.run([python, *command], cwd=folder, env=clean, check=True)

    has_torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    torch = subprocess.run([python, "-c", has_torch], cwd=folder, env=clean).returncode == 0
    run("-c", WITHOUT_TORCH)
    run("-m", "subquad_cli", "info", "finch-1.6b")
    if torch:
        run("-c", TINY_MODEL)
        run("-m", "subquad_cli", "doctor")
    print("ok" if torch else "ok, without torch", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="*", metavar="REQUIREMENT")
    parser.add_argument("--from", dest="packages", metavar="DIRECTORY", help="use the packages of a directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        _, wheel = build(ROOT, work)
        use(environment(work / "environment", wheel, args.packages, args.requirements), work)


if __name__ == "__main__":
    main()
