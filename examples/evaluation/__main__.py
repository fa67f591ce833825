"""The entry point: one command per task, and the report."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path

import torch
from help_formatter import HelpFormatter
from shared import require

from . import TASKS


require("matplotlib", "music21", extra="evaluation")

from . import figures  # noqa: E402
from .runs import Record  # noqa: E402


OUT = Path("build/evaluation")


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
        add("--seed", type=int, default=0, help="seed of weights, data and order")
        add("--device", default="cpu", help="device of the models, such as cuda")
        add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
        module.add_arguments(command)
    command = commands.add_parser(
        "report",
        help="one HTML page of all measurements",
        formatter_class=HelpFormatter,
        description="Make one HTML page, without external resources, of all measurements.",
    )
    command.add_argument("--out", type=Path, default=OUT, help="directory of the tasks' files, and of report.html")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    if arguments.task == "report":
        from .report import write_report

        print(write_report(arguments.out))
        return
    torch.set_num_threads(arguments.threads)
    module = arguments.module
    command = ["python", "-m", "examples.evaluation", *(sys.argv[1:] if argv is None else argv)]
    record = Record(
        arguments.task,
        module.settings(arguments),
        command=shlex.join(word for word in command if word != "--fresh"),
        seed=arguments.seed,
        out=arguments.out,
        device=arguments.device,
        fresh=arguments.fresh,
    )
    record.measure(module.cells(arguments), lambda **cell: module.measure(arguments, **cell))
    for name, figure in figures.draw(module, record.content).items():
        figures.save(figure, record.content, arguments.out / f"{name}.svg")
    print("\n".join(module.findings(record.content)))
    print(f"{record.path} and the files next to it have the numbers and figures.")


if __name__ == "__main__":
    main()
