"""Speed and memory by length, in examples/evaluation: that its numbers are of what they claim, on tiny models."""

import csv
import json
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.evaluation import TASKS, speed
from examples.evaluation.__main__ import main
from examples.evaluation.models import NAMES


TINY = ("--width", "32", "--layers", "2", "--window", "16", "--tokens", "3", "--seconds", "0")
PLAN = {"width": 32, "layers": 2, "window": 16, "tokens": 3, "seconds": 0.0, "device": "cpu", "dtype": "float32"}
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="a CPU's memory is measured on Linux only")


@pytest.fixture
def run(monkeypatch, tmp_path):
    for name in TASKS.keys() - {"speed"}:
        monkeypatch.delitem(TASKS, name)

    def call(*options):
        main(["speed", "--out", str(tmp_path), *TINY, *options])
        return json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))

    return call


def measured_here(architecture, length):
    was = torch.get_num_threads()
    try:
        return speed.measure_here(architecture, length, 0, {**PLAN, "threads": was}, ready=lambda: None)
    finally:
        torch.set_num_threads(was)


def test_cells_are_measured_once_in_processes_of_their_own(run, tmp_path):
    options = ("--lengths", "16", "48", "--architectures", "finch", "avey-b")
    first = run(*options)
    assert [(row["architecture"], row["length"]) for row in first["rows"]] == [
        *(("finch", 16), ("finch", 48)),
        *(("avey-b", 16), ("avey-b", 48)),
    ]
    for row in first["rows"]:
        assert row["tokens_per_second"] > 0 and row["parameters"] > 1000 and "note" not in row
        low, high = row["tokens_per_second_quartiles"]
        assert 0 < low <= row["tokens_per_second"] <= high
        assert ("milliseconds_per_token" in row) == ("state_kibibytes" in row) == (row["architecture"] == "finch")
    assert run(*options) == first
    with (tmp_path / "speed.csv").open(encoding="utf-8", newline="") as file:
        for row, written in zip(first["rows"], csv.DictReader(file), strict=True):
            assert written == {**dict.fromkeys(written, ""), **{name: str(value) for name, value in row.items()}}
    svg = (tmp_path / "speed.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    labels = ("tokens a second", "milliseconds a token", "peak (MiB)", "size (KiB)", "length of the text (tokens)")
    assert all(f"<!-- {label} -->" in svg for label in labels) and "seed 0" in svg and "thread" in svg
    header, rows = speed.table(first)
    assert all(len(row) == len(header) for row in rows) and rows[2][4] == "–"


def test_what_takes_too_long_is_stopped_and_said(run, capsys):
    start = time.monotonic()
    record = run("--lengths", "1048576", "--architectures", "transformer", "--limit", "0")
    assert time.monotonic() - start < 120  # reading would take hours
    (row,) = record["rows"]
    cell = {"architecture": "transformer", "length": 1048576}
    assert row == {**cell, "note": "stopped after 0 s", "seconds": row["seconds"]}
    assert "Not measured to the end: Transformer (RoPE) at 1,048,576: stopped after 0 s." in capsys.readouterr().out


def test_an_error_is_one(run):
    with pytest.raises(RuntimeError, match="eagle at 16 tokens ended with exit code 1"):
        run("--lengths", "16", "--architectures", "eagle", "--width", "33")


# Of two layers of width 32, by the architectures that have a state: its elements after 32 tokens, or None if they
# depend on the room that it has; those that each further token adds; and by how much this may differ.
# A head of 32 x 32 and two shifts a layer, the last output, and the count of padding in 8 bytes.
EAGLE = 2 * (32 * 32 + 2 * 32) + 32 + 2, 0, 0
STATE_ELEMENTS = {
    "transformer": (2 * 2 * 32 * 32, 2 * 2 * 32, 0),
    "avey": (None, 32, 16),
    "eagle": EAGLE,
    "finch": EAGLE,
    "goose": EAGLE,
    "raven": (None, 0, 0),
    "gecko": (None, 0, 0),
}


@pytest.mark.parametrize("architecture", NAMES)
def test_every_architecture_is_measured(architecture, monkeypatch):
    # Elsewhere; the collection of garbage before it takes most of the time.
    monkeypatch.setattr(speed, "peak_mebibytes", lambda function, device: None)
    short, long = (measured_here(architecture, length) for length in (32, 64))
    assert short["parameters"] == long["parameters"]
    if architecture not in STATE_ELEMENTS:
        assert "state_kibibytes" not in long and "milliseconds_per_token" not in long
        return
    # Float32.
    states = [row["state_kibibytes"] * 1024 / 4 for row in (short, long)]
    of_32, per_token, spare = STATE_ELEMENTS[architecture]
    assert states[0] == of_32 if of_32 is not None else states[0] >= 32 * per_token
    assert states[1] - states[0] == pytest.approx(32 * per_token, abs=spare)


@on_linux
def test_memory_is_the_peak_beyond_what_is_held():
    held = torch.ones(2**20)
    device = torch.device("cpu")

    def call():
        first = torch.ones(2**22)  # 16 MiB
        second = torch.ones(2**21) + first[: 2**21]  # 8 MiB, twice at once
        del first, second
        return torch.ones(2**20)

    for _ in range(2):  # the peak begins anew
        assert speed.peak_mebibytes(call, device) == pytest.approx(32, abs=6)
    assert speed.peak_mebibytes(lambda: torch.ones(2**21), device) == pytest.approx(8, abs=1)
    assert speed.peak_mebibytes(lambda: None, device) == pytest.approx(0, abs=1)
    assert held.sum() == 2**20
