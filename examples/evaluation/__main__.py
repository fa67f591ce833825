"""The entry point: one command per task, all of them within a budget, and the report."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from help_formatter import HelpFormatter
from shared import require

from . import TASKS


require("matplotlib", "music21", extra="evaluation")

from . import figures, plan  # noqa: E402
from .report import write_report  # noqa: E402
from .runs import Record  # noqa: E402


OUT = Path("build/evaluation")
# Rows of several hundred lengths need more matrix kernels than oneDNN usually keeps. Otherwise it would recompile most
# of them in every step, which takes up to a third of the time of a small model.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.evaluation", description=__doc__)
    commands = parser.add_subparsers(dest="task", metavar="TASK", required=True)
    for name, summary in TASKS.items():
        module = importlib.import_module(f".{name}", __package__)
        command = commands.add_parser(name, help=summary, description=module.__doc__, formatter_class=HelpFormatter)
        command.set_defaults(module=module)
        add = command.add_argument
        add(
            "--architectures",
            nargs="+",
            choices=module.ARCHITECTURES,
            default=list(module.ARCHITECTURES),
            help="architectures to measure",
        )
        add(
            "--out",
            type=Path,
            default=OUT,
            help="directory of TASK.json, TASK.csv and figures; an earlier run is continued",
        )
        add("--fresh", action="store_true", help="discard the measurements of an earlier run")
        if seeds := getattr(module, "SEEDS", None):
            add(
                "--seeds",
                type=int,
                nargs="+",
                default=list(seeds),
                help="seeds of weights, data and order: a row each",
            )
        else:
            add("--seed", type=int, default=0, help="seed of weights, data and order")
        add("--device", default="cpu", help="device of the models, such as cuda")
        add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
        module.add_arguments(command)
    command = commands.add_parser(
        "all",
        help="all tasks, as far as a budget of hours goes, and the report",
        formatter_class=HelpFormatter,
        description=plan.__doc__,
    )
    plan.add_arguments(command)
    command = commands.add_parser(
        "report",
        help="one HTML page of all measurements",
        formatter_class=HelpFormatter,
        description="Make one HTML page, without external resources, of all measurements.",
    )
    command.add_argument("--out", type=Path, default=OUT, help="directory of the tasks' files, and of report.html")
    return parser.parse_args(argv)


def record_of(arguments: argparse.Namespace, command: list[str]) -> Record:
    """The record of a task, with the measurements of earlier runs."""
    settings = arguments.module.settings(arguments)
    if not hasattr(arguments.module, "SEEDS"):
        settings = {"seed": arguments.seed, **settings}
    command = ["python", "-m", "examples.evaluation", *command]
    return Record(
        arguments.task,
        settings,
        command=shlex.join(word for word in command if word != "--fresh"),
        out=arguments.out,
        device=arguments.device,
        fresh=arguments.fresh,
    )


def measure(arguments: argparse.Namespace, record: Record, cells: list[dict[str, Any]]) -> None:
    """Measures the cells that are missing in the record, and draws the figures of all cells."""
    module = arguments.module
    record.measure(cells, lambda **cell: module.measure(arguments, **cell))
    for name, figure in figures.draw(module, record.content).items():
        figures.save(figure, record.content, arguments.out / f"{name}.svg")


def measure_all(arguments: argparse.Namespace) -> None:
    """The tasks within the budget, most informative cells first, and the report."""
    common = ["--threads", str(arguments.threads), "--device", arguments.device]
    tasks = {name: parse_arguments([name, *common, "--out", str(arguments.out)]) for name in arguments.tasks}
    records = {name: record_of(task, [name, *common]) for name, task in tasks.items()}
    seconds = 3600 * arguments.budget
    jobs = plan.jobs_of(tasks, {name: record.rows for name, record in records.items()})
    taken, left = plan.fitting(jobs, seconds)
    print(plan.described(taken, left, arguments.budget))
    if arguments.dry_run:
        return
    start = time.perf_counter()
    for job in taken:
        if time.perf_counter() - start + job.seconds > seconds:
            print(f"The budget ends before {job}. The same command goes on from there.")
            break
        measure(tasks[job.task], records[job.task], job.cells)
    print(write_report(arguments.out))


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    torch.set_num_threads(getattr(arguments, "threads", torch.get_num_threads()))
    if arguments.task == "report":
        print(write_report(arguments.out))
        return
    if arguments.task == "all":
        measure_all(arguments)
        return
    record = record_of(arguments, sys.argv[1:] if argv is None else argv)
    measure(arguments, record, arguments.module.cells(arguments))
    print("\n".join(arguments.module.findings(record.content)))
    print(f"{record.path} and the files next to it have the numbers and figures.")


if __name__ == "__main__":
    main()
