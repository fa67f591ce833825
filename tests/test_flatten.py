"""The code of a model repository holds what its model uses, and nothing else."""

import ast
import subprocess
import sys

import pytest

from subquad.hub.flatten import repository_code
from subquad.models import REGISTRY


# The maximum number of lines of Python in a repository, without those of its tokenizer.
LIMITS = {
    "rwkv5": 7700,
    "rwkv6": 8250,
    "rwkv7": 8050,
    "avey": 6600,
    "avey-b": 4650,
    "raven": 8100,
    "gecko": 10000,
    "visual_rwkv": 8950,
}
each_architecture = pytest.mark.parametrize("architecture", REGISTRY.values(), ids=list(REGISTRY))


def code_of(architecture) -> dict[str, str]:
    kinds = ["configuration", "modeling", *(["processing"] if architecture.processor else [])]
    return repository_code(*(f"{architecture.package}.{kind}_{architecture.folder}" for kind in kinds))


def defined(text: str) -> dict[str, ast.stmt]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.fast
@each_architecture
def test_every_definition_is_used(architecture):
    code = code_of(architecture)
    entries = {f"{kind}_{architecture.folder}.py" for kind in ("configuration", "modeling", "processing")}
    words = {}
    for file, text in code.items():
        for node in ast.parse(text).body:
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            names |= {
                alias.name for each in ast.walk(node) if isinstance(each, ast.ImportFrom) for alias in each.names
            }
            names |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            words[file, getattr(node, "name", node.lineno)] = names
    for file, text in code.items():
        for name in defined(text) if file not in entries else ():
            users = [place for place, names in words.items() if name in names and place != (file, name)]
            strings = any(name in str(value) for names in words.values() for value in names if value != name)
            assert users or strings or name == "_", f"{file}: nothing uses {name}"


@pytest.mark.fast
@each_architecture
def test_nothing_of_another_architecture(architecture):
    built_on = {"rwkv6": {"rwkv5"}, "visual_rwkv": {"rwkv5", "rwkv6"}}.get(architecture.folder, set())
    others = {other.folder for other in REGISTRY.values()} - {architecture.folder} - built_on
    for file in code_of(architecture):
        kind, _, folder = file.removesuffix(".py").partition("_")
        assert not (kind in ("configuration", "modeling", "processing") and folder in others), file
        assert not any(file.endswith(f"_{kind}_{folder}.py") for kind in ("cache", "layout") for folder in others), (
            file
        )


@each_architecture
def test_the_files_are_complete(architecture, tmp_path):
    """No name is undefined, no import is unused or finds nothing."""
    code = code_of(architecture)
    for file, text in code.items():
        (tmp_path / file).write_text(text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                other = code[f"{node.module}.py"]
                for alias in node.names:
                    assert alias.name in other, f"{file} imports {alias.name}"
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "--quiet", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@each_architecture
def test_lines_of_a_repository(architecture):
    lines = sum(len(text.splitlines()) for text in code_of(architecture).values())
    assert lines <= LIMITS[architecture.model_type]
