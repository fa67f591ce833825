"""Every kernel compiles for the GPUs that it is meant for, within the budgets of budgets.csv."""

import ast
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import TRITON

import subquad
import subquad_kernels


FOLDER = Path(__file__).parent
# The most shared memory of a program there, in bytes.
SHARED = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_120": 99, "gfx942": 64, "gfx1100": 64}
# Operators whose kernels compile in a second.
QUICK = ("group_norm_gate", "slot_routing", "split_ranker", "static_mixing", "token_shift")
FIGURES = ("shared", "registers", "spilled", "barriers", "narrow", "misread", "refused")


def budgets() -> dict[tuple[str, str, str], dict[str, int]]:
    with open(FOLDER / "budgets.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["target"], row["kernel"], row["precision"]): {name: int(row[name]) for name in FIGURES} for row in rows
    }


def kernels_of_package() -> set[str]:
    """By the names of their operators and their own."""
    found, package = set(), Path(subquad_kernels.__path__[0])
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                found.add(f"{path.relative_to(package).with_suffix('').parts[0]}.{node.name}")
    return found


def printed(program, tmp_path, *arguments) -> str:
    """What a program of this folder prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    packages = [str(Path(package.__path__[0]).parent) for package in (subquad, subquad_kernels)]
    environment["PYTHONPATH"] = os.pathsep.join([*packages, os.environ.get("PYTHONPATH", "")])
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, FOLDER / program, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def compiled(tmp_path, *arguments) -> dict[tuple[str, str, str], dict[str, int]]:
    """What compile_kernels.py prints, as [`budgets`] returns the table."""
    rows = json.loads(printed("compile_kernels.py", tmp_path, *arguments).splitlines()[-1])
    return {(row["target"], row["kernel"], row["precision"]): {name: row[name] for name in FIGURES} for row in rows}


def assert_within(found) -> None:
    """If a figure has grown on purpose, `python tests/kernels/compile_kernels.py --write` writes it down."""
    allowed = budgets()
    unknown = sorted(found.keys() - allowed.keys())
    assert not unknown, "budgets.csv lacks them"
    over = [
        f"{' '.join(key)}: {name} {used[name]}, at most {allowed[key][name]}"
        for key, used in found.items()
        for name in FIGURES
        if used[name] > allowed[key][name]
    ]
    assert not over


@pytest.mark.thorough
@TRITON
def test_quick_kernels_are_within_their_budgets(tmp_path):
    found = compiled(tmp_path, "sm_120", "gfx942", "--without-models", "--operators", *QUICK)
    assert {kernel.partition(".")[0] for _, kernel, _ in found} == set(QUICK)
    assert_within(found)


@pytest.mark.slow
@TRITON
@pytest.mark.parametrize("target", SHARED)
def test_kernels_are_within_their_budgets(target, tmp_path):
    found = compiled(tmp_path, target)
    assert_within(found)
    kernels = {kernel for _, kernel, _ in found}
    assert kernels == {kernel for other, kernel, _ in budgets() if other == target}
    assert kernels == kernels_of_package()


@pytest.mark.slow
@TRITON
def test_what_the_tests_launch_is_not_misread(tmp_path):
    found = compiled(tmp_path, "sm_90", "--without-models", "--all", "--small")
    assert not [key for key, used in found.items() if used["misread"] or used["refused"]]


def test_budgets_are_what_the_gpus_have():
    for (target, kernel, precision), allowed in budgets().items():
        assert allowed["shared"] <= SHARED[target] * 1024, (target, kernel, precision)
        assert allowed["misread"] == allowed["refused"] == 0, (target, kernel, precision)


def test_what_triton_refuses_is_not_written():
    """
    A constant that `tl.cdiv` computes is a value of the program in older versions, and a loop must not change its
    variable. A number that is returned is an int32, and other values must be the same.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in Path(subquad_kernels.__path__[0]).rglob("*.py")}
    for path in (path for path, text in texts.items() if "@triton.jit" in text):
        for node in ast.walk(ast.parse(texts[path])):
            here = f"{path}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "tl.constexpr":
                assert "cdiv" not in ast.unparse(node.value), here
            if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
                names = [x for statement in node.body for x in ast.walk(statement) if isinstance(x, ast.Name)]
                assert not any(x.id == node.target.id and isinstance(x.ctx, ast.Store) for x in names), here
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                returned = [x.value for x in ast.walk(node) if isinstance(x, ast.Return) and x.value is not None]
                assert len(returned) < 2 or not any(isinstance(x, ast.Constant) for x in returned), here
