"""The code of a model repository holds what its model uses, and nothing else."""

import ast
import subprocess
import sys

import pytest

import subquad
from subquad import hub
from subquad.flatten import repository_code
from subquad.models import REGISTRY


# Lines of Python of a repository with a byte tokenizer, rounded up.
LIMITS = {"finch-abc": 3000}
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
        kinds = ("cache", "layout", "loading")
        assert not any(file.endswith(f"_{kind}_{folder}.py") for kind in kinds for folder in others), file


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


@pytest.mark.parametrize("name", LIMITS)
def test_lines_of_a_repository(name, tmp_path):
    files = hub.export(subquad.embedded_model(name), tmp_path / name)
    lines = sum(len((tmp_path / name / file).read_text().splitlines()) for file in files if file.endswith(".py"))
    assert lines <= LIMITS[name]
