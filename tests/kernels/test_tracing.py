"""Kernels stay in the memory that they are given, and their programs and threads do not depend on each other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import differentiable, weighted_gradients
from test_operator_contract import WITH_KERNELS


if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels are not interpreted", allow_module_level=True)
triton = pytest.importorskip("triton")
from tracing import traced  # noqa: E402

import subquad_kernels  # noqa: E402


@pytest.mark.thorough
@pytest.mark.parametrize("operator", WITH_KERNELS, ids=repr)
def test_programs_and_threads_are_independent(operator, monkeypatch):
    """Every kind of call, and every way to divide its work."""
    divided = {tuple(x.patches): name for name, x in operator.examples.items() if "triton" in x.backends}
    with traced("subquad_kernels") as trace:
        for name in dict.fromkeys((*operator.calls, *divided.values())):
            example = operator.examples[name]
            operator.patch(monkeypatch, example)
            inputs, leaves = differentiable(operator, operator.make(**example.sizes))
            found = operator.run(inputs, backend="triton")
            weighted_gradients(found, leaves, [torch.ones_like(x) if x.requires_grad else None for x in found])
            with torch.no_grad():
                operator.run(operator.make(**example.sizes), backend="triton")
    assert trace.kernels
    assert not trace.found


@pytest.mark.slow
@pytest.mark.parametrize("operator", WITH_KERNELS, ids=repr)
def test_tensors_with_more_elements_than_32_bits_can_count(operator):
    program = Path(__file__).with_name("trace_large.py")
    packages = [str(Path(package.__path__[0]).parent) for package in (subquad_kernels,)]
    paths = os.pathsep.join([*packages, str(program.parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, program, operator.name]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["elements"] > 2**31 and result["kernels"]
    assert not result["found"]


# The tracer itself.
