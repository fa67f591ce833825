"""
Everything that needs a GPU, in one run of nine minutes: tests, whole models and operators beside their peers.
RESULTS.md collects everything. It is written every few seconds, so a run that is cut off leaves a table.

steps (--steps), with their seconds; a step that ends early leaves the rest of its time to the following ones:
  kernels    200  tests/kernels, in parallel
  contract   100  tests/contract, with models and inputs on the GPU
  compile     10  beside the tests, from the beginning on: what is measured later is compiled and not yet tuned
  models     145  reading, one more token, `generate` and training of Finch, Goose and Raven: ours, then of Finch
                  flash-linear-attention's and a Llama of the same size. Those of Goose and Raven would need minutes of
                  compilation more: `python benchmarks/models.py --models goose raven`
  operators   85  the operators of these models, beside flash-linear-attention

Nothing else runs while models and operators are measured. Required besides torch and triton: transformers, pytest and
pytest-xdist. flash-linear-attention is left out if it cannot be imported. The packages of this repository need not be
installed.

examples:
  python benchmarks/gpu.py
  python benchmarks/gpu.py --resume                              # whatever is not done yet
  python benchmarks/gpu.py --steps compile models --minutes 5
"""

import argparse
import collections
import contextlib
import itertools
import json
import operator
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch


sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels" / "benchmarks"))

from measuring import BROKEN, OURS, SHAPE, read_rows, write_atomically


ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "benchmarks" / "models.py"
OPERATORS = [ROOT / "kernels" / "benchmarks" / f"{name}.py" for name in ("wkv", "delta_wkv", "slot_memory")]
DONE, COMPILE = "done", "compile"
STEPS = {"kernels": 200, "contract": 100, COMPILE: 10, "models": 145, "operators": 85}
GRACE = 8  # of its seconds, those that a benchmark may take to begin and to end
PERIOD = 3  # seconds from one report to the next
BESIDE = max(1, 3 * (os.cpu_count() or 1) // 8)  # commands that compile beside the tests
CALL = operator.itemgetter("versions", "date", "command")  # what made a row
PATHS = [ROOT, *(ROOT / name for name in ("src", "kernels/torch-ext", "tokenizers", "conversion"))]


@dataclass(frozen=True)
class Task:
    """
    A command.

    Attributes:
        name: name in the report, and of its log.
        step: one of STEPS.
        words: arguments of the interpreter. "LIMIT" in them stands for minutes.
        patience: of its seconds, those from an interrupt, on which pytest reports, to its end.
        environment: variables for the command.
    """

    name: str
    step: str
    words: list[str]
    patience: float = 2
    environment: dict[str, str] = field(default_factory=dict)


def tasks(out: Path) -> Iterator[Task]:
    workers = max(1, (os.cpu_count() or 1) - BESIDE)
    pytest = ["-m", "pytest", "-vv", "-n", str(workers), "--dist", "worksteal", "-p", "no:cacheprovider"]
    for step, device in (("kernels", {}), ("contract", {"SUBQUAD_TEST_DEVICE": "cuda"})):
        words = [*pytest, f"--rootdir={ROOT}", str(ROOT / "tests" / step)]
        yield Task(step, step, words, 12, {"OMP_NUM_THREADS": "1", **device})
    how = ["--no-compile", "--minutes", "LIMIT", "--parts"]
    of_models, of_operators = [*how, "read", "decode", "generate", "train"], [*how, "operator", "step"]
    models = {"finch": [], "goose": ["--ours"], "raven": ["--ours"]}
    measured = {name: [str(MODELS), "--models", name, *peers, *of_models] for name, peers in models.items()}
    measured |= {path.stem: [str(path), *of_operators] for path in OPERATORS}
    for (name, words), share in itertools.product(measured.items(), (1, 2)):
        yield Task(f"{COMPILE} {name} {share}", COMPILE, [*words, "--compile-only", f"{share}/2"])
    brief = ["--brief", "--seconds", "0.1", "--out", str(out), "--resume"]
    for name, which in (("models ours", ["--ours", "--models", *models]), ("models others", ["--models", "finch"])):
        yield Task(name, "models", [str(MODELS), *brief, *which, *of_models])
    for path in OPERATORS:
        yield Task(path.stem, "operators", [str(path), *brief, *of_operators])


class Run:
    """The commands of a run, and how they ended. None of them outlives it."""

    def __init__(self, options: argparse.Namespace):
        self.out, self.record = options.out, options.out / "gpu.json"
        resumed = options.resume and self.record.exists()
        self.ended: dict[str, dict[str, Any]] = json.loads(self.record.read_text()) if resumed else {}
        chosen = [task for task in tasks(self.out) if task.step in options.steps]
        self.tasks = [task for task in chosen if self.ended.get(task.name, {}).get("end") != DONE]
        steps = {task.step: STEPS[task.step] for task in self.tasks}
        end, scale, self.ends = time.monotonic(), 60 * options.minutes / max(sum(steps.values()), 1), {}
        for step, seconds in steps.items():
            end = self.ends[step] = end + scale * seconds
        self.lock, self.is_over, self.running = threading.Lock(), False, set()

    def run_all(self) -> bool:
        """Returns whether everything is done."""
        with ThreadPoolExecutor(BESIDE) as beside, ThreadPoolExecutor(1) as alone:
            try:
                compiled = [beside.submit(self.run, task) for task in self.tasks if task.step == COMPILE]
                for n, task in enumerate(self.tasks):
                    if task.step == COMPILE:
                        self.wait(compiled.pop(0))
                        continue
                    now, same = time.monotonic(), sum(other.step == task.step for other in self.tasks[n:])
                    self.wait(alone.submit(self.run, task, now + (self.ends[task.step] - now) / same))
            finally:
                with self.lock:
                    self.is_over = True
                self.stop(list(self.running), 2)
                self.write()
        return all(self.ended[task.name]["end"] == DONE for task in self.tasks)

    def wait(self, future: Future) -> None:
        while not wait([future], PERIOD).done:
            self.write()
        future.result()
        self.write()

    def write(self) -> None:
        """How everything has ended, for `--resume`, and the report."""
        ended = dict(self.ended)
        paths = sorted(self.out.glob("*.csv"), key=lambda path: (path.stem != "models", path.stem))
        lines = ["# On a GPU", "", *tested(self.out / "kernels.log"), *tested(self.out / "contract.log")]
        for name, about in ended.items():
            lines.append(f"- {name}: {about['end']} ({about['seconds']:.0f} s, {about['date']}) {about['note']}")
        text = "\n".join([*lines, "", *tables(paths), ""])
        write_atomically(self.record, lambda path: path.write_text(json.dumps(ended, indent=1)))
        write_atomically(self.out / "RESULTS.md", lambda path: path.write_text(text, encoding="utf-8"))

    def run(self, task: Task, end: float | None = None) -> None:
        """Runs a command until `end`, or the end of its step."""
        start, end = time.monotonic(), end or self.ends[task.step]
        limit = f"{max(1, end - start - GRACE) / 60:.2f}"
        words = [sys.executable, *(limit if word == "LIMIT" else word for word in task.words)]
        if self.is_over:
            return
        about = {"end": "cut off", "seconds": 0, "note": "", "date": f"{datetime.now():%Y-%m-%d %H:%M}"}
        self.ended[task.name], log = about, self.out / f"{task.name}.log"
        log.unlink(missing_ok=True)
        for _ in range(3):
            how = self.call(task, words, log, end)
            if how != f"exit status {BROKEN}":  # otherwise the rows after the one that broke the context are missing
                break
        missing = re.findall(r".*(?:did not begin within|is left out:).*", log.read_text(encoding="utf-8"))
        about |= {"seconds": round(time.monotonic() - start, 1), "note": missing[-1] if missing else ""}
        if not self.is_over:
            about["end"] = "not complete" if how == DONE and "did not begin" in about["note"] else how
        print(f"{task.name}: {about['end']} ({about['seconds']:.0f} s) {about['note']}", flush=True)

    def call(self, task: Task, words: list[str], log: Path, end: float) -> str:
        paths = os.pathsep.join([*map(str, PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"} | task.environment
        with open(log, "a", encoding="utf-8") as file, self.lock:
            if self.is_over or end - task.patience < time.monotonic():
                return "not begun"
            how = {"cwd": ROOT, "env": environment, "start_new_session": True}
            process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, **how)
            self.running.add(process)
        try:
            code = process.wait(max(0, end - task.patience - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.stop([process], task.patience)
            return "not done in its time"
        finally:
            self.running.discard(process)
        return f"exit status {code}" if code else DONE

    @staticmethod
    def stop(processes: list[subprocess.Popen], seconds: float) -> None:
        """Interrupts processes, and ends them `seconds` later together with their children."""
        for process in processes:
            process.send_signal(signal.SIGINT)
        end = time.monotonic() + seconds
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, end - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# The report.


def tested(log: Path) -> list[str]:
    """The outcome of tests that have run so far, and the failed ones."""
    if not log.exists():
        return []
    found = re.findall(r"^\[gw\d+\] \[ *\d+%\] (\w+) (.*\S)", log.read_text(encoding="utf-8", errors="replace"), re.M)
    counts = collections.Counter(word for word, _ in found)
    failed = [f"- {word}: {name}" for word, name in found if word in ("FAILED", "ERROR")]
    return [f"{log.stem}: " + ", ".join(f"{count} {word.lower()}" for word, count in counts.items()), "", *failed, ""]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def line(group: dict[str, dict[str, Any]], calls: list[tuple]) -> str:
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
    numbers = ", ".join(str(n) for n in sorted({calls.index(CALL(row)) + 1 for row in group.values()}))
    return "| " + " | ".join([*cells, ", ".join(others), "; ".join(notes).replace("|", "/"), numbers]) + " |"


def tables(paths: list[Path]) -> list[str]:
    """A table of all rows of some files, and the calls that made them."""
    files = [[row for row in read_rows(path) if row["part"] != "check"] for path in paths]
    calls = list(dict.fromkeys(CALL(row) for row in itertools.chain(*files)))
    lines = ["| what | batch x length | heads x size | ms | floor | of it | MiB | others (times ours) | notes | by |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for rows in files:
        groups: dict[tuple, dict[str, dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(tuple(row[name] for name in SHAPE), {})[row["implementation"]] = row
        lines += [line(group, calls) for group in groups.values()]
    return [*lines, "", *(f"{n}. {versions}; {date}: `{call}`" for n, (versions, date, call) in enumerate(calls, 1))]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=[*STEPS], help="default: all")
    parser.add_argument("--minutes", type=float, default=9, help="of the whole run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="default: build/gpu")
    parser.add_argument("--resume", action="store_true", help="keep what --out holds, and run what is not done")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        for pattern in ("*.csv", "*.log", "gpu.json", "RESULTS.md"):
            for path in options.out.glob(pattern):
                path.unlink()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    print(f"the results are in {options.out / 'RESULTS.md'}", flush=True)
    raise SystemExit(not Run(options).run_all())


if __name__ == "__main__":
    main()
