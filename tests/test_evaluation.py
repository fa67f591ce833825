"""The frame of `examples/evaluation`: records that a later call goes on with, figures, and the report in a browser."""

import csv
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import types
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from evaluation_cases import TINY
from examples.evaluation import TASKS, figures, report, runs
from examples.evaluation.__main__ import main, parse_arguments


HOSTILE = '<script>document.title = "hostile"</script><img src="http://example.org/a.png">'


def make_task(calls: list) -> types.ModuleType:
    """A task with a module's interface that measures squares; `calls` gets the cells that it really measured."""

    def add_arguments(parser):
        parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2])
        parser.add_argument("--steps", type=int, default=10)

    def measure(arguments, architecture, length):
        calls.append((architecture, length))
        return {"square": length**2 + arguments.seed, "note": None if length == 1 else f'{architecture}, "{length}"'}

    def draw(record):
        figure, axes = figures.new_figure()
        for architecture in task.ARCHITECTURES:
            points = [(row["length"], row["square"]) for row in record["rows"] if row["architecture"] == architecture]
            axes.plot([x for x, _ in points], [y for _, y in points], **figures.line_of(architecture))
        axes.set(xlabel="length (tokens)", ylabel="square (tokens²)")
        axes.legend()
        return {"squares": figure}

    def table(record):
        rows = [[row["architecture"], str(row["length"]), str(row["square"]), "word " * 40] for row in record["rows"]]
        return ["architecture", "length (tokens)", "square", "wide"], rows

    documentation = "Squares of lengths, as `length**2`\nhas them.\n\nA second\nparagraph:\n\n  1 & 4\n  2"
    task = types.ModuleType("squares", documentation)
    task.TITLE = "Squares & roots"
    task.ARCHITECTURES = ("eagle", "finch")
    task.add_arguments, task.measure, task.draw, task.table = add_arguments, measure, draw, table
    task.settings = lambda arguments: {"steps": arguments.steps, "pair": (1, 2)}
    task.cells = lambda arguments: [
        {"architecture": name, "length": length} for name in arguments.architectures for length in arguments.lengths
    ]
    task.findings = lambda record: [f"The largest square is {max(row['square'] for row in record['rows'])} < 1e9."]
    return task


@pytest.fixture
def calls(monkeypatch):
    """The cells that the only task, `squares`, measures."""
    calls = []
    monkeypatch.setitem(sys.modules, "examples.evaluation.squares", make_task(calls))
    for name in list(TASKS):
        monkeypatch.delitem(TASKS, name)
    monkeypatch.setitem(TASKS, "squares", "squares of lengths")
    return calls


def squares(out, *options):
    main(["squares", "--out", str(out), *options])
    return json.loads((out / "squares.json").read_text(encoding="utf-8"))


@pytest.mark.fast
def test_a_call_goes_on_where_the_last_one_ended(calls, tmp_path, capsys):
    first = squares(tmp_path, "--architectures", "finch")
    assert calls == [("finch", 1), ("finch", 2)] and len(first["rows"]) == 2
    assert "The largest square is 4" in capsys.readouterr().out
    assert squares(tmp_path, "--architectures", "finch") == first
    more = squares(tmp_path, "--lengths", "2", "3")
    assert calls[2:] == [("eagle", 2), ("eagle", 3), ("finch", 3)]
    assert more["rows"][:2] == first["rows"] and len(more["rows"]) == 5
    with (tmp_path / "squares.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    written = [{name: "" if value is None else str(value) for name, value in row.items()} for row in more["rows"]]
    assert rows == written and '"2"' in rows[1]["note"]


def test_what_was_measured_otherwise_is_not_mixed(calls, tmp_path):
    before = squares(tmp_path, "--lengths", "1")
    with pytest.raises(ValueError, match=r"squares\.json was measured with steps = 10, not 11; --fresh"):
        squares(tmp_path, "--steps", "11")
    with pytest.raises(ValueError, match=r"with seed = 0, not 3"):
        squares(tmp_path, "--seed", "3")
    assert json.loads((tmp_path / "squares.json").read_text()) == before and len(calls) == 2
    fresh = squares(tmp_path, "--seed", "3", "--lengths", "2", "--fresh")
    assert [row["square"] for row in fresh["rows"]] == [7, 7] and fresh["settings"]["seed"] == 3
    assert fresh["command"] == f"python -m examples.evaluation squares --out {tmp_path} --seed 3 --lengths 2"


def test_a_record_names_all_machines_and_commands_that_measured_it(calls, tmp_path, monkeypatch):
    squares(tmp_path, "--lengths", "1")
    monkeypatch.setattr(runs, "hardware", lambda device: "Another CPU, 1 thread")
    monkeypatch.setattr(runs.torch, "__version__", "3.0")
    again = squares(tmp_path, "--lengths", "1", "--architectures", "finch")
    assert "Another" not in again["hardware"] and "finch" not in again["command"]
    assert "Another" not in (tmp_path / "squares.svg").read_text()
    more = squares(tmp_path, "--lengths", "1", "2")
    assert more["hardware"] == f"{again['hardware']}\nAnother CPU, 1 thread"
    assert more["versions"] == {**again["versions"], "torch": f"{again['versions']['torch']}\n3.0"}
    assert [command.split("--lengths ")[1] for command in more["command"].split("\n")] == ["1", "1 2"]
    assert more["date"] == again["date"]


def record_of(out):
    return runs.Record("killed", {}, command="python", out=out)


def measure_and_die(out):
    def measure(cell):
        if cell == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"twice": 2 * cell}

    record_of(out).measure([{"cell": cell} for cell in range(6)], measure)


def test_a_killed_run_loses_no_row(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=measure_and_die, args=(tmp_path,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    record, cells = record_of(tmp_path), []
    assert [row["twice"] for row in record.rows] == [0, 2, 4]
    record.measure([{"cell": cell} for cell in range(6)], lambda cell: cells.append(cell) or {"twice": 2 * cell})
    assert cells == [3, 4, 5] and [row["cell"] for row in record_of(tmp_path).rows] == list(range(6))


def test_no_half_of_a_file_is_seen(tmp_path, monkeypatch):
    record = record_of(tmp_path)
    record.measure([{"cell": 0}], lambda cell: {})
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    write = Path.write_text

    def fill_the_disk(path, text, **kwargs):
        write(path, text[: len(text) // 2], **kwargs)
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        record.measure([{"cell": 0}, {"cell": 1}], lambda cell: {})
    assert {name: (tmp_path / name).read_text() for name in before} == before
    assert len(record_of(tmp_path).rows) == 1


def test_figures_say_where_they_come_from(calls, tmp_path):
    record = squares(tmp_path, "--architectures", "finch", "--lengths", "1", "20")
    svg = (tmp_path / "squares.svg").read_text(encoding="utf-8")
    said = ElementTree.fromstring(svg).findtext(".//{http://purl.org/dc/elements/1.1/}description")
    drawn = " ".join(re.findall(r"<!-- (.*?) -->", svg))  # each text before its outlines; "--" is "- -" there
    for text in (record["command"], "seed 0", record["hardware"], f"torch {torch.__version__}", record["date"]):
        assert text in said
        assert text.replace("--", "- -") in drawn
    assert "length (tokens)" in drawn and "Finch" in drawn
    main(["squares", "--out", str(tmp_path), "--architectures", "finch", "--lengths", "1"])
    assert (tmp_path / "squares.svg").read_text(encoding="utf-8") == svg
    record["command"] = "python $x_{$ <b>"
    assert "python $x_{$ &lt;b&gt;" in figures.to_svg(figures.draw(make_task([]), record)["squares"], record)


class Page(HTMLParser):
    """What a page is made of: (tag, attributes) and all text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def test_the_report_has_what_was_measured_and_how_to_measure_the_rest(calls, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "shipped")
    out = tmp_path / "out"
    main(["report", "--out", str(out)])
    assert capsys.readouterr().out.strip() == str(out / "report.html")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Squares &amp; roots" in page and "<img" not in page
    assert ">python -m examples.evaluation squares</pre>" in page

    shipped = squares(tmp_path / "shipped", "--lengths", "3")
    page = report.write_report(out).read_text(encoding="utf-8")
    assert "The largest square is 9 &lt; 1e9." in page and "Not measured" not in page
    assert "<p>Squares of lengths, as <code>length**2</code> has them.</p>\n<details>" in page
    assert '<p>A second paragraph:</p>\n<pre tabindex="0">1 &amp; 4\n2</pre>\n</details>' in page
    assert page.count("<img") == 1 and 'alt="Figure squares: square (tokens²), length (tokens).' in page
    assert "<dt>seeds</dt><dd>0</dd>" in page and "<dd>the one that comes with the repository</dd>" in page
    assert all(f"<dt>{name}</dt><dd>{escape(shipped[name])}</dd>" in page for name in ("hardware", "date"))
    assert f">{escape(shipped['command'])}</pre>" in page and f"torch {torch.__version__}" in page
    assert '<tr><td>eagle</td><td class="number">3</td><td class="number">9</td><td>word' in page
    assert report.write_report(out).read_text(encoding="utf-8") == page

    squares(out, "--lengths", "5")
    page = report.write_report(out).read_text(encoding="utf-8")
    assert "The largest square is 25" in page and "<dd>measured here</dd>" in page
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "squares.csv", "squares.json", "squares.svg"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of all tasks, as the repository has them, and of one whose record is hostile and has long words."""
    out = tmp_path_factory.mktemp("report")
    task = make_task([])
    task.TITLE = f"Squares {HOSTILE}"
    task.findings = lambda record: [HOSTILE, "a" * 200]
    row = {"architecture": HOSTILE, "length": 1, "square": 1, "seconds": 1.0}
    record = {"command": f"python {HOSTILE}", "hardware": "b" * 200, "settings": {"c": "c" * 200}, "rows": [row] * 60}
    record |= {"task": "squares", "versions": {"torch": HOSTILE}, "date": HOSTILE}
    runs.write_atomically(out / "squares.json", json.dumps(record))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "examples.evaluation.squares", task)
        patch.setitem(TASKS, "squares", "squares of lengths")
        return report.write_report(out).read_text(encoding="utf-8")


def test_the_page_is_static_and_alone(page):
    """No script, nothing from elsewhere, and no text of a record that a browser would take for more than text."""
    parsed = Page(page)
    assert page.startswith("<!DOCTYPE html>") and ("html", {"lang": "en"}) in parsed.tags
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "iframe", "object", "embed", "base", "form"}
    identifiers = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(set(identifiers)) == len(identifiers)
    for tag, attributes in parsed.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("srcset", "style", "background")}
        assert attributes.get("src", "data:image/svg+xml;base64,").startswith("data:image/svg+xml;base64,")
        assert "href" not in attributes or attributes["href"].removeprefix("#") in identifiers
        assert tag != "img" or attributes["alt"]
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style
    metas = [attributes for tag, attributes in parsed.tags if tag == "meta"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert {"http-equiv": "Content-Security-Policy", "content": policy} in metas
    assert sum(HOSTILE in text for text in parsed.texts) >= 60 + 5


def test_every_task_is_in_the_report(page):
    parsed = Page(page)
    sections = [attributes["id"] for tag, attributes in parsed.tags if tag == "section"]
    assert sections == ["zoo", *TASKS, "squares"]
    for name in TASKS:
        module = importlib.import_module(f"examples.evaluation.{name}")
        assert module.TITLE in parsed.texts
        section = page.partition(f'<section id="{name}"')[2].partition("</section>")[0]
        assert ("<img" in section) == (report.RESULTS / f"{name}.json").exists()


@pytest.mark.parametrize("task", sorted(TINY.keys() - {"encoders", "speed"}))
def test_a_task_measures_each_cell_once(task, run_task, monkeypatch, tmp_path):
    """Its table, figures and CSV file match the record."""
    record, arguments = run_task(task), parse_arguments([task, *TINY[task].split()])
    module, rows = arguments.module, record["rows"]
    cells = module.cells(arguments)
    assert len(rows) == len(cells) and all(any(cell.items() <= row.items() for row in rows) for cell in cells)
    with (tmp_path / f"{task}.csv").open(encoding="utf-8", newline="") as file:
        for row, written in zip(rows, csv.DictReader(file), strict=True):
            texts = {name: "" if value is None else str(value) for name, value in row.items()}
            assert written == dict.fromkeys(written, "") | texts
    for name in figures.draw(module, record):
        svg = ElementTree.parse(tmp_path / f"{name}.svg")
        assert record["command"] in svg.findtext(".//{http://purl.org/dc/elements/1.1/}description")
    header, lines = module.table(record)
    assert lines and all(len(line) == len(header) for line in lines)
    monkeypatch.setattr(module, "measure", None)
    assert run_task(task) == record
    with pytest.raises(ValueError, match="was measured with steps = "):
        run_task(task, "--steps", "9")
