"""The record of a task: a JSON file, which a later run continues, and a CSV file."""

from __future__ import annotations

import csv
import datetime
import io
import json
import platform
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

import subquad
from subquad.hub.new_files import replacing


def hardware(device: str = "cpu") -> str:
    """The name of the processor or accelerator."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def write_atomically(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def rounded(value: Any) -> Any:
    """Measured values, with six significant digits."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


class Record:
    """
    The rows of a task. Each cell has a row with its parameters, its measurements, and the seconds that it took.

    Args:
        task: name of the task.
        settings: all other settings that affect the numbers, as JSON values.
        command: the command that repeats the task.
        out: directory of the files, created if it does not exist.
        device: device of the models.
        fresh: whether to discard the measurements of an earlier run.

    Raises:
        ValueError: if an earlier run had other settings and `fresh` is false.
    """

    def __init__(
        self,
        task: str,
        settings: dict[str, Any],
        *,
        command: str,
        out: Path,
        device: str = "cpu",
        fresh: bool = False,
    ):
        self.path = out / f"{task}.json"
        self.call = {"command": command, "hardware": hardware(device), "date": datetime.date.today().isoformat()}
        self.versions = {
            "subquad": subquad.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        self.content = {
            "task": task,
            **self.call,
            "versions": dict(self.versions),
            "settings": json.loads(json.dumps(settings)),  # as they are after reading the file
            "rows": [],
        }
        if self.path.exists() and not fresh:
            earlier = read_record(self.path)
            mine, theirs = self.content["settings"], earlier["settings"]
            for name in sorted({*mine, *theirs}):
                if mine.get(name) != theirs.get(name):
                    raise ValueError(
                        f"{self.path} was measured with {name} = {theirs.get(name)!r}, not {mine.get(name)!r}; "
                        "--fresh discards it, --out takes another directory."
                    )
            self.content = earlier

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.content["rows"]

    def measure(self, cells: Iterable[dict[str, Any]], function: Callable[..., dict[str, Any]]) -> None:
        """
        Calls `function(**cell)` for every cell without a row, and shows a progress bar. The row is the cell together
        with the results, rounded to six digits. The file is written after every cell.
        """
        cells = list(cells)
        todo = [cell for cell in cells if not any(cell.items() <= row.items() for row in self.rows)]
        bar = tqdm(todo, initial=len(cells) - len(todo), total=len(cells), desc=self.content["task"], unit="cell")
        for cell in bar:
            bar.set_postfix_str(", ".join(map(str, cell.values())))
            start = time.perf_counter()
            measured = rounded(function(**cell))
            self.rows.append({**cell, **measured, "seconds": round(time.perf_counter() - start, 1)})
            self.sign()
            self.save()

    def sign(self) -> None:
        """Adds command, hardware, date and versions of this run, each as a line if it is new."""
        for said, now in ((self.content, self.call), (self.content["versions"], self.versions)):
            for name, value in now.items():
                if value not in said.setdefault(name, value).split("\n"):
                    said[name] += f"\n{value}"

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        head = json.dumps({**self.content, "rows": []}, indent=1)
        write_atomically(self.path, head.removesuffix("[]\n}") + f"[\n{rows}\n]\n}}\n")
        table = io.StringIO(newline="")
        fields = list(dict.fromkeys(name for row in self.rows for name in row))
        writer = csv.DictWriter(table, fields)
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(self.path.with_suffix(".csv"), table.getvalue())


def read_record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def keep_model(directory: Path, settings: dict[str, Any], train: Callable[[], Any], fresh: bool = False) -> float:
    """
    Trains a model and saves it, if the directory does not have one that was trained with these settings.

    Args:
        directory: where the model is kept, with the file `training.json`.
        settings: settings that affect the model, as JSON values.
        train: called without arguments, returns a model of transformers.
        fresh: whether to train in any case.

    Returns:
        the seconds of the training, even if it was an earlier one.
    """
    path = directory / "training.json"
    training = read_record(path) if path.exists() else {}
    if training.get("settings") != json.loads(json.dumps(settings)) or fresh:
        start = time.perf_counter()
        model = train()
        training = {"settings": settings, "seconds": round(time.perf_counter() - start, 1)}
        new = directory.with_name(directory.name + ".new")
        model.save_pretrained(new)
        (new / path.name).write_text(json.dumps(training), encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        new.rename(directory)
    return training["seconds"]


def seeds_of(record: dict[str, Any]) -> str:
    """The seeds of a record as a text, from its rows or its settings."""
    seeds = sorted({row["seed"] for row in record["rows"] if "seed" in row}) or [record["settings"].get("seed", 0)]
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
