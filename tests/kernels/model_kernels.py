"""
A table of the operators at published sizes: what their launches must take, beside what they would take at least.

    python tests/kernels/model_kernels.py [--measured FILES] [--write]

The cases are those that the benchmarks measure on a GPU, in bfloat16. They run on tensors without storage, so that no
GPU is needed. The modelled time is the sum over all launches, of kernels and of torch, of the time to read or write
each of their tensors once, to multiply (in torch), or to begin at all. It shows what the division into launches costs,
not how well a kernel does its part: the largest figures of the compiled kernels in `budgets.csv` stand beside it.
`--measured` adds the times of a GPU, of tables that the benchmarks wrote. `--write` puts the table into
kernels/benchmarks/RESULTS.md.
"""

import argparse
import contextlib
import csv
import dataclasses
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import published
import torch
from compile_kernels import read_budgets
from published import benchmark
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction


RESULTS = Path(published.benchmark.__file__).with_name("RESULTS.md")
MARKS = "<!-- modelled: begin -->", "<!-- modelled: end -->"
TARGET, PRECISION = "sm_90", "half"
# Of an H100, as the benchmarks measured them: bytes and operations a second, and the shortest time of a launch.
COPIED, MULTIPLIED, LAUNCH = 3.02e12, 7.5e14, 2e-6
FORWARD, TRAINING = "forward", "forward+backward"
FIGURES = ("registers", "spilled", "barriers", "shared")


def is_view(function: Any) -> bool:
    """Whether a function of torch launches nothing."""
    if any(word in function.__name__ for word in ("empty", "device", "promote_types", "_unsafe_view")):
        return True
    returns = [x.alias_info for x in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def operations(function: Any, arguments: tuple) -> float:
    """The number of operations of a product of matrices; 0 for other functions."""
    if function.__name__.partition(".")[0] not in ("mm", "bmm", "addmm", "baddbmm"):
        return 0
    a, b = [x for x in arguments if isinstance(x, torch.Tensor)][-2:]
    return 2 * a.numel() * b.shape[-1]


class Launches(TorchDispatchMode):
    """The launches of kernels and of torch while it is active: names, and the seconds that each takes at least."""

    def __init__(self):
        super().__init__()
        self.kernels: list[str] = []
        self.functions: list[str] = []
        self.seconds = 0.0

    def count(self, tensors: list[Any], products: float = 0) -> None:
        tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
        moved = sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)
        self.seconds += max(moved / COPIED, products / MULTIPLIED, LAUNCH)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not is_view(function):
            self.functions.append(function.__name__)
            self.count(tree_leaves((args, kwargs, out)), operations(function, args))
        return out

    def __enter__(self):
        def run(kernel, *args, grid=None, warmup=False, **named):
            names = [parameter.name for parameter in kernel.params]
            self.kernels.append(f"{kernel.__module__.split('.')[1]}.{kernel.__name__}")
            self.count(list({**dict(zip(names, args, strict=False)), **named}.values()))

        self.stack = contextlib.ExitStack()
        self.stack.callback(setattr, JITFunction, "run", JITFunction.run)
        JITFunction.run = run
        # As without this mode: nothing hides what is inside of an operator, and what is computed once is kept.
        for module in [module for name, module in sys.modules.items() if name.startswith("subquad_kernels.")]:
            for name in vars(module).keys() & {"_is_plain", "can_keep"}:
                self.stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, lambda *arguments: True)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.stack.close()


def rows_of(case: benchmark.Case, figures: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    """The rows of a case: forward, and if it is no step, forward and backward."""
    rows, backend = [], "triton" if case.has_kernels else "eager"
    for training in (False, True) if case.has_gradients and not case.is_step else (False,):
        inputs = case.inputs(published.Empty())
        if training:
            inputs = {key: x.requires_grad_() if x.is_floating_point() else x for key, x in inputs.items()}
        for _ in range(2):  # what is computed once is computed in the first call
            with Launches() as launches, torch.set_grad_enabled(training):
                out = case.ours(backend, case.inplace and not training, **inputs)
                out = out[0] if isinstance(out, tuple) else out
                if training:
                    leaves = [x for x in inputs.values() if x.requires_grad]
                    torch.autograd.grad(out, leaves, torch.empty_like(out), allow_unused=True)
        products = dataclasses.replace(case, device="cpu").operations(training)  # some count in tensors
        products /= MULTIPLIED
        floor = max(products, case.moved(inputs, out, training) / COPIED)
        used = [figures[name] for name in launches.kernels if name in figures]
        row = {"what": f"{case.name} {TRAINING if training else FORWARD}", **case.row}
        row["what"] = f"{case.name} step" if case.is_step else row["what"]
        row |= {"kernels": len(launches.kernels), "torch": len(launches.functions)}
        row |= {"modelled": 1e3 * max(launches.seconds, products), "floor": 1e3 * floor}
        rows.append(row | {name: max((x[name] for x in used), default="") for name in FIGURES})
    return rows


def all_rows(operators: list[str]) -> list[dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    for row in read_budgets():
        if row["target"] == TARGET and (row["precision"] == PRECISION or row["kernel"] not in figures):
            figures[row["kernel"]] = row
    rows = []
    for name in operators:
        module = importlib.import_module(name)
        if not any("ours" in vars(x) for x in vars(module).values() if inspect.isclass(x)):
            continue
        for which in ("cuda", "step cuda"):
            for case in benchmark.cases_for(published.kind_of(module), which, dtype=torch.bfloat16, device="meta"):
                rows += rows_of(case, figures)
    return rows


def measured_in(paths: list[Path]) -> dict[tuple[str, ...], str]:
    """Milliseconds by what was measured, and its sizes."""
    found, columns = {}, []
    for row in (row for path in paths for row in csv.reader(path.open(encoding="utf-8"))):
        if "milliseconds" in row:  # a table begins
            columns = row
            continue
        row = dict(zip(columns, row, strict=False))
        if row.get("implementation") == "subquad":
            key = (*(row[name] for name in ("what", "batch", "heads", "size", "length")),)
            found[key] = f"{float(row['milliseconds']):.3g}"
    return found


def table(operators: list[str], measured: dict[tuple[str, ...], str]) -> str:
    names = ["launches (torch's)", "modelled ms", "floor ms", "measured ms", *FIGURES]
    lines = [f"| | batch x length | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    for row in all_rows(operators):
        key = (
            row["what"],
            *("" if row[name] is None else str(row[name]) for name in ("batch", "heads", "size", "length")),
        )
        size = "" if row["size"] is None else f" of {row['size']}"
        cells = [row["what"] + size, f"{row['batch']} x {row['length']}"]
        cells += [f"{row['kernels'] + row['torch']} ({row['torch']})"]
        cells += [*(f"{row[name]:.3g}" for name in ("modelled", "floor")), measured.get(key, "")]
        lines.append(f"| {' | '.join(map(str, [*cells, *(row[name] for name in FIGURES)]))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", default=published.OPERATORS, help="default: all")
    parser.add_argument("--measured", nargs="+", default=[], type=Path, metavar="FILE", help="CSV of the benchmarks")
    parser.add_argument("--write", action="store_true", help="replace the table in RESULTS.md")
    options = parser.parse_args()
    text = table(options.operators, measured_in(options.measured))
    if not options.write:
        print(text)
        return
    before, rest = RESULTS.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    RESULTS.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
