"""
Everything that needs a GPU, in one run: the tests of the kernels, the models at tiny sizes, and then every benchmark.
Ours is measured before its competitors. RESULTS.md collects everything, after every step.

steps (--steps):
  tests     tests/kernels, in parallel
  smoke     benchmarks/models.py --quick
  compile   the calls that will be measured, several operators at a time, and their check against the reference
  ours      every benchmark, ours only
  others    the same benchmarks of the competitors, and first calls

Each step gets its share of the remaining minutes. Required besides torch and triton: transformers, pytest and
pytest-xdist. The packages of this repository need not be installed.

examples:
  python benchmarks/gpu.py
  python benchmarks/gpu.py --steps tests ours --minutes 9
  python benchmarks/gpu.py --steps others --resume
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch


sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels" / "benchmarks"))

from measuring import BROKEN, OURS, SHAPE, read_rows, write_atomically


ROOT = Path(__file__).resolve().parents[1]
OPERATORS = ROOT / "kernels" / "benchmarks"
MODELS = ROOT / "benchmarks" / "models.py"
SHARED = ("benchmark", "measuring")
SCRIPTS = tuple(sorted(path for path in OPERATORS.glob("*.py") if path.stem not in SHARED))
DONE = "done"
STEPS = ("tests", "smoke", "compile", "ours", "others")
GRACE = 10  # seconds that a script may take to begin and to end
PATHS = [ROOT, *(ROOT / name for name in ("src", "kernels/torch-ext", "tokenizers", "conversion"))]


@dataclass(frozen=True)
class Task:
    """
    A command, or several at a time.

    Attributes:
        name: name in the report, and of its log.
        step: one of STEPS.
        weight: its minutes if there is time for everything.
        commands: arguments of the interpreter, by the name of the log. "LIMIT" in it stands for minutes.
    """

    name: str
    step: str
    weight: float
    commands: dict[str, list[str]]


def tasks(out: Path) -> Iterator[Task]:
    pytest = ["-m", "pytest", str(ROOT / "tests" / "kernels"), "-n", str(os.cpu_count()), "--dist", "worksteal"]
    pytest += ["-p", "no:cacheprovider", f"--rootdir={ROOT}", f"--junitxml={out / 'tests.xml'}", "-m", "not slow"]
    yield Task("tests", "tests", 5, {"tests": pytest})
    limit, of_models = ["--minutes", "LIMIT"], ["read", "decode", "generate", "train"]
    smoke = [str(MODELS), "--quick", "--no-compile", *limit, "--parts", "check", *of_models]
    yield Task("smoke", "smoke", 2, {"smoke": smoke})
    how = ["--ours", "--seconds", "0", *limit, "--parts", "check", "operator", "step"]
    yield Task("compile", "compile", 3, {f"compile_{path.stem}": [str(path), *how] for path in SCRIPTS})
    for step, weight, ours, part in (("ours", 0.6, ["--ours"], "check"), ("others", 0.3, [], "first")):
        how = ["--out", str(out), "--resume", *ours, "--seconds", "0.2", *limit, "--parts"]
        for path in SCRIPTS:
            command = [str(path), *how, part, "operator", "step"]
            yield Task(f"{path.stem}, {step}", step, weight, {f"{path.stem}_{step}": command})
        yield Task(f"models, {step}", step, 6 * weight, {f"models_{step}": [str(MODELS), *how, *of_models]})


def run(command: list[str], log: Path, seconds: float) -> str:
    """Runs a command, and returns how it ended. Its child processes end with it."""
    deadline = time.monotonic() + seconds + GRACE
    command = [sys.executable, *(f"{seconds / 60:.2f}" if word == "LIMIT" else word for word in command)]
    paths = os.pathsep.join([*map(str, PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
    how = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": paths}, "start_new_session": True}
    for _ in range(3):
        with open(log, "a", encoding="utf-8") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **how)
            try:
                code = process.wait(max(1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"not done after {seconds + GRACE:.0f} s"
        if code != BROKEN:  # otherwise the rows after the one that broke the context are missing
            break
    if code:
        return f"exit status {code}, see {log.name}"
    missing = [line for line in log.read_text(encoding="utf-8").splitlines() if "did not begin within" in line]
    return missing[-1] if missing else DONE


def run_together(commands: dict[str, list[str]], out: Path, seconds: float) -> dict[str, str]:
    """Half as many commands at a time as there are processors; `seconds` are for all of them."""
    workers = min(len(commands), max(1, os.cpu_count() // 2))
    seconds /= math.ceil(len(commands) / workers)
    with ThreadPoolExecutor(workers) as pool:
        ends = [pool.submit(run, command, out / f"{name}.log", seconds) for name, command in commands.items()]
    return {name: end.result() for name, end in zip(commands, ends, strict=True)}


def run_tasks(options: argparse.Namespace) -> bool:
    """Returns whether everything is done."""
    deadline = time.monotonic() + 60 * options.minutes
    chosen = [task for task in tasks(options.out) if task.step in options.steps]
    record = options.out / "gpu.json"
    ended: dict[str, Any] = json.loads(record.read_text()) if options.resume and record.exists() else {}
    for n, task in enumerate(chosen):
        left = deadline - time.monotonic()
        seconds = left * task.weight / sum(other.weight for other in chosen[n:]) - GRACE
        start = time.monotonic()
        ends = run_together(task.commands, options.out, seconds) if seconds > 1 else {task.name: "not begun"}
        end = "; ".join(f"{name}: {text}" if len(ends) > 1 else text for name, text in ends.items() if text != DONE)
        ended[task.name] = {"end": end or DONE, "seconds": time.monotonic() - start}
        print(f"{task.name}: {ended[task.name]['end']} ({ended[task.name]['seconds']:.0f} s)", flush=True)
        write_atomically(record, lambda path: path.write_text(json.dumps(ended, indent=1)))
        write_report(options.out, ended)
    return all(ended[task.name]["end"] == DONE for task in chosen)


# The report.


def tested(path: Path) -> list[str]:
    """The outcome of the tests, and the failed ones."""
    if not path.exists():
        return []
    cases = list(ElementTree.parse(path).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"- {case.get('classname')}.{case.get('name')}" for case in failed]
    return [f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped", "", *names]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def line(group: dict[str, dict[str, Any]]) -> str:
    """One shape: ours, its floor, and its speed relative to each of the others."""
    first, ours = next(iter(group.values())), group.get(OURS, {})
    mine, least = ours.get("milliseconds"), ours.get("floor_milliseconds")
    shape = " x ".join(str(first[name]) for name in ("batch", "length") if first[name])
    sizes = " x ".join(str(first[name]) for name in ("heads", "size") if first[name])
    share = f"{least / mine:.0%}" if mine and least else ""
    others = []
    for name, row in group.items():
        if name != OURS and row["milliseconds"]:
            ratio = f" ({row['milliseconds'] / mine:.2f})" if mine else ""
            others.append(f"{name} {number(row['milliseconds'])}{ratio}")
    notes = [f"{name}: {row['note']}" for name, row in group.items() if row["note"]]
    cells = [first["what"], shape, sizes, number(mine), number(least), share, number(ours.get("MiB"))]
    return "| " + " | ".join([*cells, ", ".join(others), "; ".join(notes).replace("|", "/")]) + " |"


def table(paths: list[Path]) -> list[str]:
    """A table of all rows of some files."""
    lines = ["| what | batch x length | heads x size | ms | floor | of it | MiB | others (times ours) | notes |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for path in paths:
        groups: dict[tuple, dict[str, dict[str, Any]]] = {}
        for row in read_rows(path):
            if row["part"] != "check":
                groups.setdefault(tuple(row[field] for field in SHAPE), {})[row["implementation"]] = row
        lines += [line(group) for group in groups.values()]
    return lines


def write_report(out: Path, ended: dict[str, Any]) -> None:
    paths = sorted(out.glob("*.csv"), key=lambda path: (path.stem == "models", path.stem))
    found = {row["versions"]: None for path in paths for row in read_rows(path)}
    lines = ["# On a GPU", "", *found, "", "## Tests and checks", "", *tested(out / "tests.xml"), ""]
    lines += [f"- {name}: {task['end']} ({task['seconds']:.0f} s)" for name, task in ended.items()]
    lines += ["", "## Times", "", *table(paths), ""]
    write_atomically(out / "RESULTS.md", lambda path: path.write_text("\n".join(lines), encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="default: all")
    parser.add_argument("--minutes", type=float, default=25, help="of the whole run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="default: build/gpu")
    parser.add_argument("--resume", action="store_true", help="add to what --out holds, instead of starting afresh")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        for pattern in ("*.csv", "*.log", "gpu.json", "tests.xml"):
            for path in options.out.glob(pattern):
                path.unlink()
    done = run_tasks(options)
    print(f"the results are in {options.out / 'RESULTS.md'}")
    raise SystemExit(not done)


if __name__ == "__main__":
    main()
