"""
Draws the figure of the front page and of the README from the record of `python -m examples.evaluation speed`.

    python docs/front_figure.py    # writes docs/figures/front-light.svg and front-dark.svg
"""

import json
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure


ROOT = Path(__file__).parent.parent
RECORD = ROOT / "examples/evaluation/results/speed.json"
INK = {"light": ("#1f2328", "#d0d7de"), "dark": ("#e6edf3", "#3d444d")}
# Names, colours and where the label of a line stands, in points above its end.
LINES = {
    "transformer": ("transformer", "#8c8c8c", 0),
    "avey": ("Avey", "#009E73", 0),
    "gecko": ("Gecko", "#56B4E9", 0),
    "raven": ("Raven", "#CC79A7", 0),
    "finch": ("Finch", "#D55E00", 4),
    "eagle": ("Eagle", "#0072B2", -5),
}
# By field: the title, how many of its units make that of the title, and the numbers beside the axis.
PANELS = {
    "state_kibibytes": ("kept of the text, MiB", 1024, (1, 10, 100)),
    "milliseconds_per_token": ("one more token, ms", 1, (3, 5, 10, 20)),
}


def style(theme: str) -> dict:
    """The settings of a figure with the ink of a theme."""
    ink, grid = INK[theme]
    return {
        "font.size": 10,
        "axes.edgecolor": grid,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "grid.color": grid,
        "svg.fonttype": "path",
        "svg.hashsalt": "subquad",
        "text.color": ink,
        "xtick.color": ink,
        "ytick.color": ink,
    }


def styled_axes(theme: str, columns: int, size: tuple[float, float]) -> tuple[Figure, list]:
    """A figure of so many inches, and its axes side by side, with the ink of a theme."""
    with rc_context(style(theme)):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        axes = list(figure.subplots(1, columns, squeeze=False)[0])
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
            each.grid(linewidth=0.5)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """The same numbers make the same file."""
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "subquad"}):
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def draw(record: dict, theme: str) -> Figure:
    """Memory and time for one more token by the length of the text, with the ink of a theme."""
    with rc_context(style(theme)):
        figure, panels = styled_axes(theme, 2, (8, 3))
        for axes, (field, (title, unit, ticks)) in zip(panels, PANELS.items(), strict=True):
            for architecture, (label, colour, above) in LINES.items():
                rows = [row for row in record["rows"] if row["architecture"] == architecture]
                x, y = [row["length"] for row in rows], [row[field] / unit for row in rows]
                axes.plot(x, y, color=colour, linewidth=2, marker="o", markersize=3)
                end, offset = (x[-1], y[-1]), (6, above)
                axes.annotate(label, end, offset, textcoords="offset points", color=colour, va="center", fontsize=9)
            axes.set(xscale="log", yscale="log", title=title, xlabel="tokens of context")
            axes.set_xticks(x, [f"{length:,}" for length in x])
            axes.set_yticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_xlim(right=x[-1] * 2.6)
            axes.set_ylim(bottom=axes.get_ylim()[0] * 0.7)
    return figure


if __name__ == "__main__":
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    folder = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/figures"
    for theme in INK:
        save(draw(record, theme), folder / f"front-{theme}.svg")
