"""One HTML page of all measurements, without scripts and external resources."""

from __future__ import annotations

import argparse
import base64
import importlib
import inspect
import re
import shlex
from collections.abc import Iterable
from html import escape
from pathlib import Path
from textwrap import dedent
from typing import Any

from matplotlib.figure import Figure

from subquad.hub.info import EMBEDDED, describe

from . import TASKS, figures
from .runs import read_record, seeds_of, write_atomically


# The latest run of every task, which is part of the repository.
RESULTS = Path(__file__).parent / "results"
ABOUT = """
Small models of all architectures of subquad, compared by `python -m examples.evaluation`. Every section has the
command, seeds and hardware of its numbers. Such small models show how the architectures differ, not how good large
models are.
"""
ABOUT_ZOO = """
The models that come with the package, trained on the same rows of folk tunes in ABC notation with
`examples/train_abc.py` (avey-b-abc at twice the learning rate), as their cards describe them.
`subquad generate --model finch-abc` writes a tune.
"""
# The option that chooses cells by a field.
OPTIONS = {
    "architecture": "--architectures",
    "recipe": "--recipes",
    "problem": "--problems",
    "length": "--lengths",
    "width": "--widths",
    "layers": "--layers",
    "context": "--contexts",
    "seed": "--seeds",
}
# Whatever a record contains, the page must not load or run anything.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
NUMBER = re.compile(r"[-−+]?[\d.]|[-–—]?$")  # also a missing one
STYLE = """
:root { color-scheme: light dark; --text: #1c1c1e; --soft: #55555c; --page: #fff; --box: #f4f4f6; --line: #d8d8de;
  --link: #0b57b0 }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6ea; --soft: #a5a5ae; --page: #17181c; --box: #212329; --line: #3a3c45; --link: #8ab8f5 }
}
body { margin: 0 auto; padding: 1rem; max-width: 52rem; background: var(--page); color: var(--text);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word }
h1, h2, h3 { line-height: 1.25; text-wrap: balance }
h1 { font-size: 1.75rem; margin: 1rem 0 }
h2 { font-size: 1.35rem; margin: 0 0 .75rem }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem }
a { color: var(--link) }
summary { color: var(--link); cursor: pointer }
section { margin-top: 2.5rem; padding-top: 1.5rem; border-top: 1px solid var(--line) }
ul { padding-left: 1.2rem }
li { margin: .3rem 0 }
code, pre { font: .875rem/1.5 ui-monospace, monospace }
code, nav span { display: inline-block; max-width: 100% }
pre, .scroll { overflow: auto; border: 1px solid var(--line); border-radius: 6px }
pre { margin: 0 0 1rem; padding: .6rem .8rem; background: var(--box) }
figure { margin: 1.25rem 0 }
img { box-sizing: border-box; display: block; width: 100%; height: auto; padding: .5rem; background: #fff;
  border: 1px solid var(--line); border-radius: 6px }
.scroll { max-height: 32rem }
table { min-width: 100%; border-collapse: separate; border-spacing: 0; font-size: .875rem;
  font-variant-numeric: tabular-nums }
th, td { padding: .35rem .75rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line) }
tbody tr:last-child > * { border-bottom: 0 }
thead th { position: sticky; top: 0; z-index: 1; background: var(--box) }
th:first-child { left: 0; z-index: 2 }
td:first-child { position: sticky; left: 0; background: var(--page) }
.number { text-align: right }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .4rem 1rem; font-size: .875rem }
dt { color: var(--soft) }
dd { margin: 0 }
@media (max-width: 30rem) { dl { grid-template-columns: minmax(0, 1fr); gap: 0 } dd { margin-bottom: .6rem } }
nav span { color: var(--soft) }
"""


def prose(paragraph: str) -> str:
    """Text as HTML, with code between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(" ".join(paragraph.split())))


def verbatim(text: str) -> str:
    return f'<pre tabindex="0">{escape(text)}</pre>'


def explanation(documentation: str) -> str:
    """The first paragraph, and the others on demand. Indented paragraphs are printed verbatim."""
    first, *others = inspect.cleandoc(documentation).split("\n\n")
    html = f"<p>{prose(first)}</p>"
    if others:
        parts = [verbatim(dedent(other)) if other.startswith(" ") else f"<p>{prose(other)}</p>" for other in others]
        html += "\n<details>\n<summary>More on what is measured</summary>\n" + "\n".join(parts) + "\n</details>"
    return html


def items(lines: Iterable[str]) -> str:
    return "<ul>\n" + "".join(f"<li>{line}</li>\n" for line in lines) + "</ul>"


def table(label: str, header: list[str], rows: list[list[str]]) -> str:
    """A table that scrolls in a box of its own, also by the keyboard; columns of numbers are aligned to the right."""
    numbers = [all(map(NUMBER.match, column)) for column in zip(*rows, strict=True)]
    marks = [' class="number"' if number else "" for number in numbers] or [""] * len(header)
    head = [f'<th scope="col"{mark}>{escape(cell)}</th>' for mark, cell in zip(marks, header, strict=True)]
    lines = []
    for row in rows:
        cells = [f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">\n<table>\n'
        f"<thead>\n<tr>{''.join(head)}</tr>\n</thead>\n<tbody>\n{''.join(lines)}</tbody>\n</table>\n</div>"
    )


def image(name: str, figure: Figure, record: dict[str, Any]) -> str:
    """The figure, embedded in the page. Its alternative text has the titles and labels of its axes."""
    labels = [label for axes in figure.axes for label in (axes.get_title(), axes.get_ylabel(), axes.get_xlabel())]
    said = ", ".join(dict.fromkeys(" ".join(label.split()) for label in labels if label))
    data = base64.b64encode(figures.to_svg(figure, record).encode()).decode()
    alt = escape(f"Figure {name}: {said}. The table below has the numbers.")
    return f'<figure><img alt="{alt}" src="data:image/svg+xml;base64,{data}"></figure>'


def embedded_models() -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of the embedded models: their sizes, and the measurements on their cards."""
    measured = {}
    for path in sorted(EMBEDDED.glob("*/README.md")):
        section = path.read_text(encoding="utf-8").partition("\n## Measured\n")[2].partition("\n## ")[0]
        lines = re.findall(r"^\| ([^-|].*?) \| (.+?) \|$", section, re.MULTILINE)
        measured[path.parent.name] = {"parameters": f"{describe(path.parent.name).parameters:,}", **dict(lines)}
    labels = list(dict.fromkeys(label for card in measured.values() for label in card))
    rows = [[name, *(card.get(label, "") for label in labels)] for name, card in measured.items()]
    return ["model", *labels], rows


def cell_command(task: str, row: dict[str, Any]) -> str:
    """The command that measures one row, or all rows that share its training."""
    module = importlib.import_module(f".{task}", __package__)
    parser = argparse.ArgumentParser()
    parser.add_argument("--architectures")
    parser.add_argument("--seeds" if hasattr(module, "SEEDS") else "--seed")
    module.add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    chosen = {name: row.get(name) for name in getattr(module, "SHARED", row) if OPTIONS.get(name) in known}
    words = [word for name, value in chosen.items() if value is not None for word in (OPTIONS[name], str(value))]
    return shlex.join(["python", "-m", "examples.evaluation", task, *words])


def longest(record: dict[str, Any]) -> str:
    """The time of the slowest row, and its command."""
    row = max(record["rows"], key=lambda row: row["seconds"])
    return f"{row['seconds'] / 60:.1f} minutes: `{cell_command(record['task'], row)}`."


def facts(record: dict[str, Any], origin: str) -> str:
    """The seeds, hardware, versions and settings of the numbers, and the command that repeats them."""
    minutes = sum(row["seconds"] for row in record["rows"]) / 60
    parts = {
        "seeds": seeds_of(record).split(" ", 1)[1],
        "hardware": record["hardware"],
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "date": record["date"],
        "time": f"{minutes:.1f} minutes, {len(record['rows'])} cells",
        "longest cell": longest(record).replace("`", ""),
        "record": origin,
        "settings": ", ".join(f"{name} = {value}" for name, value in record["settings"].items()),
    }
    lines = ""
    for name, said in parts.items():
        text = escape(str(said).replace("\n", " and "))
        lines += f"<dt>{name}</dt><dd>{text}</dd>\n"
    return f"{verbatim(record['command'])}\n<dl>\n{lines}</dl>"


def section(task: str, out: Path) -> tuple[str, str]:
    """The line of a task in the table of contents, and its results, as HTML."""
    module = importlib.import_module(f".{task}", __package__)
    title = escape(module.TITLE)
    parts = [f'<h2 id="{task}-title">{title}</h2>', explanation(module.__doc__)]
    mine, shipped = (directory / f"{task}.json" for directory in (out, RESULTS))
    if mine.exists() or shipped.exists():
        record = read_record(mine if mine.exists() else shipped)
        state = record["date"].split("\n")[-1]
        parts += ["<h3>Findings</h3>", items(map(prose, module.findings(record)))]
        parts += [image(name, figure, record) for name, figure in figures.draw(module, record).items()]
        parts += ["<h3>Numbers</h3>", table(f"Numbers of {module.TITLE}", *module.table(record))]
        origin = "measured here" if mine.exists() else "the one that comes with the repository"
        parts += ["<h3>How it was measured</h3>", facts(record, origin)]
    else:
        state = "not measured"
        parts += ["<p>Not measured yet. This measures it:</p>", verbatim(f"python -m examples.evaluation {task}")]
    line = f'<a href="#{task}">{title}</a> <span>({escape(state)})</span>'
    return line, f'<section id="{task}" aria-labelledby="{task}-title">\n' + "\n".join(parts) + "\n</section>"


def write_report(out: Path) -> Path:
    """
    Writes `report.html` from the records in a directory, and the repository's record for a task without one there. The
    same records give the same file.

    Args:
        out: directory of the tasks' records, created if it does not exist.
    """
    lines, sections = zip(*(section(task, out) for task in TASKS), strict=True)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>subquad: the architectures side by side</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>The architectures of subquad, side by side</h1>
<p>{prose(ABOUT)}</p>
<nav aria-label="Sections">
{items(('<a href="#zoo">The models that come with the package</a>', *lines))}
</nav>
</header>
<main>
<section id="zoo" aria-labelledby="zoo-title">
<h2 id="zoo-title">The models that come with the package</h2>
<p>{prose(ABOUT_ZOO)}</p>
{table("Models that come with the package", *embedded_models())}
</section>
{chr(10).join(sections)}
</main>
</body>
</html>
"""
    path = out / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    return path
