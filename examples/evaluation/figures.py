"""The style of all figures."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from . import baselines, models
from .runs import seeds_of, write_atomically


NAMES = models.NAMES | models.PEERS | baselines.NAMES
# Okabe and Ito's palette, which colour-blind readers can distinguish, with three of Tol's, and markers for prints
# in grey. The baselines are grey.
HUES = (
    *("#0072B2", "#D55E00", "#882255", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    *("#332288", "#999933"),
    *("#6e6e6e", "#a8a8a8", "#8c8c8c"),
)
COLOURS = dict(zip(NAMES, HUES, strict=True))
MARKERS = dict(zip(NAMES, "os<^Dv*xhpPX>", strict=True))
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "image.cmap": "viridis",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "subquad",  # the same numbers make the same file
}


def new_figure(rows: int = 1, columns: int = 1, width: float = 6.4, height: float = 3.6, **kwargs: Any):
    """
    A figure and its axes, like `plt.subplots` but without global state.

    Args:
        width, height: in inches; 6.4 fits a page and is still legible on a phone.
        kwargs: arguments of `Figure.subplots`, such as `sharey=True`.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        return figure, figure.subplots(rows, columns, **kwargs)


def draw(module: ModuleType, record: dict[str, Any]) -> dict[str, Figure]:
    """The figures of a task by name."""
    with rc_context(STYLE):
        return module.draw(record)


def line_of(architecture: str) -> dict[str, str]:
    """Label, colour and marker of an architecture's line, the same in every figure."""
    return {
        "label": NAMES[architecture],
        "color": COLOURS[architecture],
        "marker": MARKERS[architecture],
    }


def short(length: int) -> str:
    """A number of tokens or bytes, as a label of an axis."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def caption(record: dict[str, Any]) -> str:
    """The text below every figure: command, seeds, hardware, versions and date."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    rest = f"{seeds_of(record)}; {record['hardware']}; {versions}; {record['date']}"
    return record["command"] + "\n" + rest.replace("\n", " and ")


def to_svg(figure: Figure, record: dict[str, Any]) -> str:
    """The figure with its command, seeds and hardware below it."""
    with rc_context(STYLE):
        columns = int(figure.get_figwidth() * 17)
        wrap = textwrap.TextWrapper(columns, break_on_hyphens=False).wrap
        lines = [line for part in caption(record).split("\n") for line in wrap(part)]
        # Figures have room for a short caption. A line of a longer one is a tenth of an inch high.
        figure.set_figheight(figure.get_figheight() + 0.1 * max(len(lines) - 3, 0))
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=6, color="#555555", parse_math=False)
        text = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Description": caption(record)}
        figure.savefig(text, format="svg", metadata=metadata)
    return text.getvalue()


def save(figure: Figure, record: dict[str, Any], path: Path) -> None:
    write_atomically(path, to_svg(figure, record))
