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
LINES = {
    "transformer": ("transformer", "#8c8c8c"),
    "avey": ("Avey", "#009E73"),
    "gecko": ("Gecko", "#56B4E9"),
    "raven": ("Raven", "#CC79A7"),
    "goose": ("Goose", "#E69F00"),
    "finch": ("Finch", "#D55E00"),
    "eagle": ("Eagle", "#0072B2"),
}
LINE_HEIGHT = 10.0  # points between two labels
# By field: the title, the number of its units per unit of the title, and the ticks of the axis.
PANELS = {
    "state_kibibytes": ("kept of the text, MiB", 1024, (1, 10, 100)),
    "milliseconds_per_token": ("one more token, ms", 1, (3, 5, 10, 20, 40)),
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
    """A figure of `size` inches, and its axes side by side, with the ink of a theme."""
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


def apart(heights: list[float], distance: float) -> list[float]:
    """The heights, moved as little as possible to be `distance` apart. Equal ones get the order of the list."""
    groups: list[list[int]] = []

    def span(group):
        middle, half = sum(heights[i] for i in group) / len(group), distance * (len(group) - 1) / 2
        return middle - half, middle + half

    for i in sorted(range(len(heights)), key=lambda i: (heights[i], -i)):
        groups.append([i])
        while len(groups) > 1 and span(groups[-2])[1] + distance > span(groups[-1])[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [height for _, height in sorted((i, span(g)[0] + distance * n) for g in groups for n, i in enumerate(g))]


def draw(record: dict, theme: str) -> Figure:
    """Memory and time for one more token by the length of the text, with the ink of a theme."""
    with rc_context(style(theme)):
        figure, panels = styled_axes(theme, 2, (8, 3))
        for axes, (field, (title, unit, ticks)) in zip(panels, PANELS.items(), strict=True):
            ends = []
            for architecture, (_, colour) in LINES.items():
                rows = [row for row in record["rows"] if row["architecture"] == architecture]
                x, y = [row["length"] for row in rows], [row[field] / unit for row in rows]
                axes.plot(x, y, color=colour, linewidth=2, marker="o", markersize=3)
                ends.append((x[-1], y[-1]))
            axes.set(xscale="log", yscale="log", title=title, xlabel="tokens of context")
            axes.set_xticks(x, [f"{length:,}" for length in x])
            axes.set_yticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_xlim(right=x[-1] * 2.6)
            axes.set_ylim(bottom=axes.get_ylim()[0] * 0.6)
            figure.draw_without_rendering()  # places the axes
            heights = [float(y) * 72 / figure.dpi for _, y in axes.transData.transform(ends)]
            look = {"textcoords": "offset points", "va": "center", "fontsize": 9}
            for i, moved in enumerate(apart(heights, LINE_HEIGHT)):
                label, colour = list(LINES.values())[i]
                axes.annotate(label, ends[i], (6, moved - heights[i]), color=colour, **look)
    return figure


if __name__ == "__main__":
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    folder = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/figures"
    for theme in INK:
        save(draw(record, theme), folder / f"front-{theme}.svg")
