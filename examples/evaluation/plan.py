"""
All tasks within a budget of hours, and one page of all measurements.

    python -m examples.evaluation all --budget 0.5 --dry-run
    python -m examples.evaluation all --budget 0.5 --threads 1

Cells that share a training are one job. The time of a job is estimated from the seconds of its cells, or of the most
similar cells, in the records of the output directory and of the repository. A new cell is more informative than
another seed of a measured one: the first seed of every cell comes before the second, and within a round the shortest
jobs come first. A job that does not fit in the remaining budget is left out. The plan is printed before anything runs.

A later call with the same --out continues where the last one ended. Every task has the settings of its own command, so
`python -m examples.evaluation TASK` measures the same cells, and its options choose single ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import TASKS
from .report import RESULTS
from .runs import read_record
from .spread import by


UNKNOWN = 60.0  # seconds of a cell without a record of its task
# Fields of a cell, the most important for its time first.
FIELDS = ("architecture", "recipe", "problem", "text", "length", "width", "layers", "context", "variant")


class Job(NamedTuple):
    """Cells of a task that are measured together, and the seconds that they should take."""

    task: str
    round: int
    cells: list[dict[str, Any]]
    seconds: float

    def __str__(self) -> str:
        same = {
            name: value for name, value in self.cells[0].items() if all(cell[name] == value for cell in self.cells)
        }
        return f"{self.task} ({', '.join(str(value) for value in same.values() if value is not None)})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--budget", type=float, default=1.0, metavar="HOURS", help="hours that all jobs may take together")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="tasks to measure")
    add("--dry-run", action="store_true", help="print the plan and measure nothing")
    add("--out", type=Path, default=Path("build/evaluation"), help="directory of records, figures and report.html")
    add("--device", default="cpu", help="device of the models, such as cuda")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")


def expected(cell: dict[str, Any], rows: list[dict[str, Any]], what: str = "seconds") -> float:
    """The mean seconds of the rows most similar to a cell, field by field."""
    for name in FIELDS:
        alike = [row for row in rows if name in cell and row.get(name) == cell[name]]
        rows = alike or rows
    return sum(row[what] for row in rows) / len(rows) if rows else UNKNOWN


def together(cells: list[dict[str, Any]], rows: list[dict[str, Any]]) -> float:
    """The seconds of cells that share a training, which some of the rows may have reused from an earlier run."""
    seconds, trained = sum(expected(cell, rows) for cell in cells), [row for row in rows if "training_seconds" in row]
    return max(seconds, expected(cells[0], trained, "training_seconds")) if trained else seconds


def jobs_of(tasks: dict[str, argparse.Namespace], measured: dict[str, list[dict[str, Any]]]) -> list[Job]:
    """
    The remaining jobs, in the order of the plan.

    Args:
        tasks: the arguments of each task's command.
        measured: the rows of each task in the output directory.
    """
    jobs = []
    for task, arguments in tasks.items():
        module, known = arguments.module, list(measured[task])
        path = RESULTS / f"{task}.json"
        known += read_record(path)["rows"] if path.exists() else []
        cells = module.cells(arguments)
        left = [cell for cell in cells if not any(cell.items() <= row.items() for row in measured[task])]
        seeds = list(getattr(arguments, "seeds", []))
        for group in by(left, *getattr(module, "SHARED", cells[0] if cells else ())).values():
            turn = seeds.index(group[0]["seed"]) if "seed" in group[0] else 0
            jobs.append(Job(task, turn, group, together(group, known)))
    return sorted(jobs, key=lambda job: (job.round, job.seconds))


def fitting(jobs: Iterable[Job], seconds: float) -> tuple[list[Job], list[Job]]:
    """The jobs that fit in some seconds, each taken if it fits in the remaining time, and the others."""
    taken, left = [], []
    for job in jobs:
        fits = job.seconds <= seconds
        (taken if fits else left).append(job)
        seconds -= job.seconds * fits
    return taken, left


def described(taken: list[Job], left: list[Job], budget: float) -> str:
    """The plan: a line for each task and round, and the jobs left out."""
    lines = [f"{len(taken)} jobs of about {hours(taken)} fit in {budget:g} hours:"]
    for (task, turn), jobs in by([job._asdict() for job in taken], "task", "round").items():
        cells, minutes = sum(len(job["cells"]) for job in jobs), sum(job["seconds"] for job in jobs) / 60
        lines.append(f"  {task}, seed {turn + 1} of each cell: {cells} cells, {minutes:.1f} minutes")
    if left:
        cells = sum(len(job.cells) for job in left)
        lines.append(
            f"{len(left)} jobs ({cells} cells, about {hours(left)}) do not fit; a larger --budget takes them:"
        )
        for (task,), jobs in by([job._asdict() for job in left], "task").items():
            lines.append(f"  {task}: {len(jobs)} jobs, {sum(job['seconds'] for job in jobs) / 3600:.2f} hours")
    return "\n".join(lines)


def hours(jobs: Iterable[Job]) -> str:
    return f"{sum(job.seconds for job in jobs) / 3600:.2f} hours"
