"""Speed and memory by length, in examples/evaluation: that its numbers are of what they claim, on tiny models."""

import csv
import sys
import time
from xml.etree import ElementTree

import pytest
import torch
from examples.evaluation import speed


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="a CPU's memory is measured on Linux only")


@pytest.mark.thorough
def test_cells_are_measured_once_in_processes_of_their_own(run_task, tmp_path):
    options = ("--lengths", "16", "--architectures", "finch", "avey-b", "--seeds", "0", "1")
    run_task("speed", *options)
    options += ("--lengths", "48", "--architectures", "avey-b", "--seeds", "0")
    first = run_task("speed", *options)
    cells = [("finch", 16, 0), ("avey-b", 16, 0), ("finch", 16, 1), ("avey-b", 16, 1), ("avey-b", 48, 0)]
    assert [(row["architecture"], row["length"], row["seed"]) for row in first["rows"]] == cells
    for row in first["rows"]:
        assert row["tokens_per_second"] > 0 and row["parameters"] > 1000 and "note" not in row
        low, high = row["tokens_per_second_quartiles"]
        assert 0 < low <= row["tokens_per_second"] <= high
        assert ("milliseconds_per_token" in row) == ("state_kibibytes" in row) == (row["architecture"] == "finch")
    assert run_task("speed", *options) == first
    with (tmp_path / "speed.csv").open(encoding="utf-8", newline="") as file:
        for row, written in zip(first["rows"], csv.DictReader(file), strict=True):
            assert written == {**dict.fromkeys(written, ""), **{name: str(value) for name, value in row.items()}}
    svg = (tmp_path / "speed.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    labels = ("tokens a second", "milliseconds a token", "peak (MiB)", "size (KiB)", "length of the text (tokens)")
    assert all(f"<!-- {label} -->" in svg for label in labels) and "seeds 0, 1" in svg and "thread" in svg
    header, rows = speed.table(first)
    assert all(len(row) == len(header) for row in rows) and rows[2][4] == "–" and len(rows) == 3


def test_a_slow_turn_does_not_count():
    rows = [
        {"architecture": "finch", "length": 8, "seed": seed, "milliseconds_per_token": time, "x_quartiles": [time, 9]}
        for seed, time in enumerate((2.0, 50.0, 2.5))
    ]
    (row,) = speed.medians({"rows": rows})
    assert row["milliseconds_per_token"] == 2.5 and row["x_quartiles"] == [2.5, 9]


def test_what_takes_too_long_is_stopped_and_said(run_task, capsys):
    start = time.monotonic()
    options = ("--lengths", "1048576", "--architectures", "transformer", "--limit", "0", "--seeds", "0")
    record = run_task("speed", *options)
    assert time.monotonic() - start < 120  # reading would take hours
    (row,) = record["rows"]
    cell = {"architecture": "transformer", "length": 1048576, "seed": 0}
    assert row == {**cell, "note": "stopped after 0 s", "seconds": row["seconds"]}
    assert "Not measured to the end: Transformer (RoPE) at 1,048,576: stopped after 0 s." in capsys.readouterr().out


def test_an_error_is_one(run_task):
    with pytest.raises(RuntimeError, match="eagle at 16 tokens ended with exit code 1"):
        run_task("speed", "--lengths", "16", "--architectures", "eagle", "--width", "33")


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
