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
import triton.language as tl  # noqa: E402
from tracing import corners, traced  # noqa: E402

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


@triton.jit
def _copy_kernel(x, y, N, BLOCK: tl.constexpr):
    ts = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + ts, tl.load(x + ts, mask=ts < N), mask=ts < N)


@triton.jit
def _turned_kernel(x, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    ts = tl.arange(0, BLOCK)
    tl.store(x + ts, ts.to(tl.float32))
    if WAITS:
        tl.debug_barrier()
    for n in range(1):
        tl.store(x + BLOCK + ts, tl.load(x + BLOCK - 1 - n - ts))


@triton.jit
def _count_kernel(x, N):
    steps = 0
    for _ in tl.range(N):
        steps += 1
    tl.store(x, steps)


def found_by(kernel, grid, *arguments, **constants):
    with traced(__name__, *([corners] if arguments[0].device.type == "meta" else [])) as trace:
        kernel[grid](*arguments, **constants)
    return set(trace.found)


def test_accesses_out_of_bounds_are_found():
    x, y = torch.zeros(20), torch.zeros(24)
    assert found_by(_copy_kernel, (3,), x, y, 20, BLOCK=8) == set()
    assert found_by(_copy_kernel, (3,), x, y, 24, BLOCK=8) == {"_copy_kernel, load out of bounds, x"}
    assert found_by(_copy_kernel, (3,), y, x, 24, BLOCK=8) == {"_copy_kernel, store out of bounds, y"}


def test_numbers_of_32_bits_that_overflow_are_found():
    x = torch.empty(2**31 + 64, device="meta")
    found = found_by(_copy_kernel, (2**21 + 1,), x, x.clone(), x.numel(), BLOCK=1024)
    assert found == {"_copy_kernel, load out of bounds, x", "_copy_kernel, store out of bounds, y"}
    assert found_by(_copy_kernel, (2**20,), x, x.clone(), 2**30, BLOCK=1024) == set()


def test_loops_are_whole_again_after_a_trace():
    x, steps = torch.empty(8, device="meta"), torch.zeros(1, dtype=torch.int32)
    found_by(_copy_kernel, (1,), x, x.clone(), 8, BLOCK=8)  # would take few steps of a loop
    _count_kernel[(1,)](steps, 9)
    assert steps == 9


def test_grids_that_are_too_large_are_found():
    x = torch.empty(8, device="meta")
    assert found_by(_copy_kernel, (1, 65536), x, x.clone(), 8, BLOCK=8) == {
        "_copy_kernel, grid (1, 65536, 1) is too large"
    }


def test_programs_that_depend_on_each_other_are_found():
    x, y = torch.zeros(16), torch.zeros(16)
    assert found_by(_copy_kernel, (2, 2), x, y, 16, BLOCK=8) == {"_copy_kernel, two programs write, y"}
    assert found_by(_copy_kernel, (2,), x[:8], x[4:], 12, BLOCK=4) == {
        "_copy_kernel, one program reads what another one writes, x"
    }


@pytest.mark.parametrize("waits", [False, True])
def test_loads_without_a_barrier_are_found(waits):
    wanted = set() if waits else {"_turned_kernel, loaded after a store without a barrier, x"}
    assert found_by(_turned_kernel, (1,), torch.zeros(16), BLOCK=8, WAITS=waits) == wanted
