"""Speed and memory by length, in examples/evaluation: that its numbers are of what they claim, on tiny models."""

import argparse
import csv
import json
import math
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.evaluation import TASKS, figures, speed
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


def test_settings_are_all_but_the_cells():
    parser = argparse.ArgumentParser()
    speed.add_arguments(parser)
    arguments = parser.parse_args([])
    others = {"device": "cpu", "threads": 2}
    vars(arguments).update(others)
    assert speed.settings(arguments) == {
        **{name: value for name, value in vars(arguments).items() if name != "lengths"},
        "dtype": "float32",
        "batch": 1,
    }
    arguments.device = "cuda:1"
    assert speed.settings(arguments)["dtype"] == "bfloat16"


def made_record(**speeds):
    """Rows by architecture of functions of the length: tokens a second, and MiB."""
    rows = []
    for architecture, (rate, peak, state) in speeds.items():
        for length in (1024, 2048, 4096, 8192, 16384):
            row = {"architecture": architecture, "length": length, "parameters": 1, "peak_mebibytes": peak(length)}
            row |= {"tokens_per_second": rate(length), "state_kibibytes": state(length), "milliseconds_per_token": 5.0}
            rows.append(row)
    return {"rows": rows}


def test_findings_are_of_the_numbers():
    record = made_record(
        finch=(lambda n: 1e4, lambda n: n / 100, lambda n: 200.0),
        transformer=(lambda n: 4e4 * (n / 1024) ** -0.75, lambda n: n / 50, lambda n: n * 2.0),
    )
    alpha, faster, memory, *grown = speed.findings(record)
    assert "Finch -0.00, Transformer (RoPE) 0.75." in alpha or "Finch 0.00, Transformer (RoPE) 0.75." in alpha
    # 4 (n / 1024)^-0.75 is less than 1 from 6,502 on.
    assert "more at 8,192, 16,384 of 1,024, 2,048, 4,096, 8,192, 16,384; at 16,384 it is 2 times as much" in faster
    assert "more at no length of" in memory and "at 16,384 it is 0.5 times as much" in memory
    writing, peak, state = grown
    assert writing == (
        "Writing, milliseconds a token: about the same at all lengths for Finch 5, Transformer (RoPE) 5."
    )
    assert "depends on the length for Finch 164 at 16,384, 16 times that at 1,024, Transformer (RoPE) 328" in peak
    assert "about the same at all lengths for Finch 200; depends on the length for Transformer (RoPE) 32,768" in state

    record["rows"] = [*record["rows"][:5], {"architecture": "transformer", "length": 1024, "note": "out of memory"}]
    assert speed.findings(record)[-1] == "Not measured to the end: Transformer (RoPE) at 1,024: out of memory."
    assert not any("beside" in line for line in speed.findings(record))
    assert math.isclose(speed.exponent({n: 3 * n**1.5 for n in (10, 20, 70)}), 1.5, rel_tol=1e-5)


def test_a_median_has_quartiles():
    assert speed.middle("x", [4.0, 1.0, 3.0, 2.0, 5.0]) == {"x": 3.0, "x_quartiles": [2.0, 4.0]}
    assert speed.middle("x", [7.0]) == {"x": 7.0, "x_quartiles": [7.0, 7.0]}
    rows = [
        {"architecture": "finch", "length": length, "parameters": 1, **speed.middle("tokens_per_second", [10.0, 30.0])}
        for length in (256, 512)
    ]
    _, (line, _) = speed.table({"rows": rows})
    assert "20 (15–25)" in line
    (figure,) = figures.draw(speed, {"rows": rows}).values()
    (bars,) = figure.axes[0].collections
    assert not figure.axes[2].collections  # memory is measured once
    assert [bar[:, 1].tolist() for bar in bars.get_segments()] == 2 * [pytest.approx([15.0, 25.0])]
