"""
The microseconds of Python of ours in a call of one token of each operator, without a GPU.

    PYTHONPATH=kernels/torch-ext python tests/kernels/time_calls.py

The calls are those that the benchmarks measure on a GPU as steps, of one row of bfloat16, with tensors on the CPU and
Triton as the backend; of a benchmark's own Python nothing is measured. Launches do nothing from the `run` of Triton
on. A time is the fastest of many runs of a hundred calls, in time of the CPU. It stands beside the same calls
of `torch.add` with one number, and the number of launches.
"""

import contextlib
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction


sys.path.append(str(Path(__file__).parents[2] / "kernels/benchmarks"))

import benchmark

import subquad_kernels


RUNS, CALLS = 50, 100
OPERATORS = (
    *("token_shift", "group_norm_gate", "slot_routing", "cema", "timestep_decay_norm", "wkv", "delta_wkv"),
    *("split_ranker", "slot_memory", "working_memory", "contextualizer"),
)


def microseconds(*functions: Callable[[], Any]) -> list[float]:
    """Of a call of each function; they take turns."""
    times = [float("inf")] * len(functions)
    for _ in range(RUNS):
        for n, function in enumerate(functions):
            start = time.process_time()
            for _ in range(CALLS):
                function()
            times[n] = min(times[n], time.process_time() - start)
    return [x / CALLS * 1e6 for x in times]


@contextlib.contextmanager
def recorded(module: ModuleType) -> Iterator[list[Callable[[], Any]]]:
    """Notes the calls of operators that a benchmark makes, to make them again."""
    made: list[Callable[[], Any]] = []

    def note(function):
        def call(*arguments, **named):
            made.append(functools.partial(function, *arguments, **named))
            return made[-1]()

        return call

    names = [name for name in subquad_kernels.__all__ if name in vars(module)]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(module, name, note(getattr(module, name))))
        yield made


def calls(operator: str) -> dict[str, Callable[[], Any]]:
    """Calls of the operator alone, by their names."""
    module, found = importlib.import_module(operator), {}
    (kind,) = (x for x in vars(module).values() if getattr(x, "__module__", "") == operator and "ours" in vars(x))
    for case in benchmark.cases_for(kind, "step cuda", dtype=torch.bfloat16):
        if case.batch > 1 or case.name in found:
            continue
        with recorded(module) as made, mock.patch.object(JITFunction, "run"):
            case.ours("triton", case.inplace, **case.inputs(benchmark.Random(0, "cpu")))
        (found[case.name],) = made
    return found


def main() -> None:
    torch.set_num_threads(1)
    for path in Path(subquad_kernels.__path__[0]).glob("*/*kernel*.py"):
        importlib.import_module(f"subquad_kernels.{path.parent.name}.{path.stem}")
    os.environ["TRITON_INTERPRET"] = "1"  # after the kernels, which are not interpreted: for tensors on the CPU
    one = torch.ones(1)
    print("| | microseconds | times torch.add | launches |\n| --- | --- | --- | --- |")
    with torch.no_grad():
        for operator in OPERATORS:
            for name, call in calls(operator).items():
                with mock.patch.object(JITFunction, "run") as run:
                    call()
                    launches = run.call_count
                with mock.patch.object(JITFunction, "run", lambda *arguments, **options: None):
                    ours, add = microseconds(call, lambda: torch.add(one, 1))
                print(f"| {name} | {ours:.1f} | {ours / add:.1f} | {launches} |", flush=True)


if __name__ == "__main__":
    main()
