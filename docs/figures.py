"""
Draws the figures of the site and of the README from the records in the repository, for light and dark pages.

    python docs/figures.py    # writes docs/figures/*.svg
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from subquad.hub.info import describe, format_bytes


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from examples.evaluation import speed  # noqa: E402


POINTS, BELOW = {"textcoords": "offset points"}, {"loc": "outside lower center", "ncols": 5, "fontsize": 8}
INK = {"light": ("#1f2328", "#d0d7de"), "dark": ("#e6edf3", "#3d444d")}
GREY, OURS, OTHER = "#8c8c8c", "#D55E00", "#0072B2"
ARCHITECTURES = {
    "transformer": ("transformer", GREY),
    "avey": ("Avey", "#009E73"),
    "gecko": ("Gecko", "#56B4E9"),
    "raven": ("Raven", "#CC79A7"),
    "goose": ("Goose", "#E69F00"),
    "finch": ("Finch", "#D55E00"),
    "eagle": ("Eagle", "#0072B2"),
}
# Of the front page, by field: the title, the number of its units per unit of the title, and the ticks of the axis.
BY_LENGTH = {
    "state_kibibytes": ("kept of the text, MiB", 1024, (1, 10, 100)),
    "milliseconds_per_token": ("one more token, ms", 1, (3, 5, 10, 20, 40)),
}
# Presets of about one size, and how far their labels move, in points.
PRESETS = {"avey-1.5b": 0, "gecko-1b": 0, "raven-0.8b": 0, "goose-1.5b": -7, "finch-1.6b": 6}
SERVERS = {"transformers serve": OURS, "vLLM": OTHER, "transformers serve, one after the other": GREY}
ANSWERS = {"tokens_per_second": "tokens per second", "answer_median_seconds": "seconds until an answer is whole"}
PHASES = {"short": "2,000 short requests, 16 at a time", "waiting": "64 being answered, 1,000 waiting"}
# Packages on a CPU: colour, and rows of the record with 32, 8 and 4 bits.
PACKAGES = {
    "subquad": (OURS, ("subquad float32", "subquad int8", "subquad int4")),
    "llama.cpp": (OTHER, ("llama.cpp F32", "llama.cpp Q8_0", "llama.cpp Q4_0")),
    "rwkv": (GREY, ("rwkv fp32",)),
}
# Columns of the record of the tokenizers: label and colour.
TOKENIZERS = {
    "encode_bytes": ("encode_bytes", "#CC79A7"),
    "call": ("tokenizer(text)", OURS),
    "offsets": ("the same with offsets", "#E69F00"),
    "rust": ("pyrwkv_tokenizer", OTHER),
    "trie": ("package rwkv", GREY),
    "BPE": ("BPE, package tokenizers", "#56B4E9"),
}
TEXTS = ("ASCII", "Chinese", "code", "emoji")


def style(theme: str) -> dict:
    """The settings of a figure with the ink of a theme. The same numbers make the same file."""
    ink, grid = INK[theme]
    inked = ("axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), grid),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
        **{"font.size": 10, "grid.linewidth": 0.5, "lines.linewidth": 2, "lines.markersize": 3},
        **{"svg.fonttype": "path", "svg.hashsalt": "subquad"},
    }


def axes_in_a_row(columns: int, height: float = 3) -> tuple[Figure, list]:
    """A figure of `height` inches and its axes, side by side."""
    figure = Figure(figsize=(8, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def bars(axes, groups: tuple[str, ...], series: dict[str, tuple[str, list[float]]]) -> None:
    """Bars with their numbers, side by side in each group. By label: colour, and a number for each group or less."""
    width = 0.84 / len(series)
    for i, (name, (colour, values)) in enumerate(series.items()):
        places = [n + (i - (len(series) - 1) / 2) * width for n in range(len(values))]
        drawn = axes.bar(places, values, width * 0.92, color=colour, label=name)
        axes.bar_label(drawn, [f"{value:.3g}" if value == value else "" for value in values], fontsize=6.5)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")


def read(path: str) -> dict:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def table(heading: str) -> dict[str, dict[str, float]]:
    """The first number of each cell of the table below a heading of benchmarks/RESULTS.md, by row and column."""
    text = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8").partition(f"\n## {heading}")[2]
    lines = re.search(r"(?m)(^\|.*\n)+", text)[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    numbers = {row[0]: [float((cell.split() or ["nan"])[0]) for cell in row[1:]] for row in rows}
    return {name: dict(zip(header[1:], cells, strict=True)) for name, cells in numbers.items()}


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


def front() -> Figure:
    """Memory and time for one more token by the length of the text."""
    figure, panels = axes_in_a_row(2)
    record = read("examples/evaluation/results/speed.json")
    for axes, (field, (title, unit, ticks)) in zip(panels, BY_LENGTH.items(), strict=True):
        values, ends = speed.series(record, field), []
        for name, (_, colour) in ARCHITECTURES.items():
            x, y = list(values[name]), [value / unit for value in values[name].values()]
            axes.plot(x, y, color=colour, marker="o")
            ends.append((x[-1], y[-1]))
        axes.set(xscale="log", yscale="log", title=title, xlabel="tokens of context")
        axes.set_xticks(x, [f"{length:,}" for length in x])
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(right=x[-1] * 2.6)
        axes.set_ylim(bottom=axes.get_ylim()[0] * 0.6)
        figure.draw_without_rendering()  # places the axes
        heights = [float(y) * 72 / figure.dpi for _, y in axes.transData.transform(ends)]
        for i, moved in enumerate(apart(heights, 10.0)):
            name, colour = list(ARCHITECTURES.values())[i]
            axes.annotate(name, ends[i], (6, moved - heights[i]), color=colour, va="center", fontsize=9, **POINTS)
    return figure


def states() -> Figure:
    """The bytes that are kept of a text by its length, from the numbers of `subquad info`."""
    figure, (axes,) = axes_in_a_row(1, 3.6)
    lengths = [2**n for n in range(8, 21)]
    lines = [("a transformer like Finch", describe("finch-1.6b").transformer_bytes_after, GREY, 0)]
    for preset, above in PRESETS.items():
        name, colour = ARCHITECTURES[preset.partition("-")[0]]
        lines.append((f"{name} {preset.partition('-')[2].upper()}", describe(preset).state_bytes_after, colour, above))
    for name, size, colour, above in lines:
        sizes = [size(length) for length in lengths]
        axes.plot(lengths, sizes, color=colour)
        text = f"{name}: {format_bytes(sizes[-1])}"
        axes.annotate(text, (lengths[-1], sizes[-1]), (6, above), color=colour, va="center", **POINTS)
    axes.set(xscale="log", yscale="log", title="kept of a text", xlabel="tokens")
    axes.set_xticks(lengths[::2], [f"{length:,}" for length in lengths[::2]], fontsize=8)
    axes.set_yticks([10**n for n in range(6, 13)], [format_bytes(10**n) for n in range(6, 13)])
    axes.set_ylim(1e6, 6e11)
    axes.minorticks_off()
    axes.set_xlim(right=lengths[-1] * 3e2)
    return figure


def serving() -> Figure:
    """Tokens per second of all clients together, and how long one waits, by the number of clients."""
    figure, panels = axes_in_a_row(len(ANSWERS))
    record = read("examples/serving/records/servers-finch-abc.json")
    for axes, (field, title) in zip(panels, ANSWERS.items(), strict=True):
        for server, colour in SERVERS.items():
            rows = [row for row in record["rows"] if row["server"] == server]
            x, y = [row["clients"] for row in rows], [row[field] for row in rows]
            axes.plot(x, y, color=colour, marker="o", label=server)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [str(clients) for clients in x])
        axes.set(title=title, xlabel="clients")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    figure.legend(*panels[0].get_legend_handles_labels(), **BELOW)
    return figure


def serving_memory() -> Figure:
    """The memory of the server's processes, by the requests that it has answered."""
    figure, panels = axes_in_a_row(len(PHASES), 2.6)
    for axes, (phase, title) in zip(panels, PHASES.items(), strict=True):
        rows = [row for row in read("examples/serving/records/soak-finch-abc.json")["rows"] if row["phase"] == phase]
        x, y = [row["answered"] for row in rows], [row["mebibytes"] for row in rows]
        axes.plot(x, y, color=OURS, marker="o")
        axes.set(title=title, xlabel="answered requests", ylabel="MiB")
        axes.set_ylim(0, max(y) * 1.1)
    return figure


def laptop() -> Figure:
    """Tokens per second of CPU time, by the bits of a weight, beside other packages."""
    figure, panels = axes_in_a_row(3)
    record = table("Beside llama.cpp (`cpu.py`, 2026-11-27)")
    for axes, column in zip(panels, ("next token, 1 text", "next token, 32 texts", "prompt of 512"), strict=True):
        series = {name: (colour, [record[row][column] for row in rows]) for name, (colour, rows) in PACKAGES.items()}
        bars(axes, ("32 bits", "8 bits", "4 bits"), series)
        axes.set(title=column)
    panels[0].set_ylabel("tokens per second")
    figure.legend(*panels[0].get_legend_handles_labels(), **BELOW)
    return figure


def tokenizers() -> Figure:
    """Megabytes of text per second of each encoder."""
    figure, (axes,) = axes_in_a_row(1)
    record = table("Tokenizers")
    rows = [record[f"{kind}, 4,000 characters"] for kind in TEXTS]
    bars(axes, TEXTS, {name: (colour, [row[c] for row in rows]) for c, (name, colour) in TOKENIZERS.items()})
    axes.set(ylabel="MB of text per second", title="texts of 4,000 characters, one thread")
    figure.legend(*axes.get_legend_handles_labels(), **BELOW)
    return figure


def main(folder: Path, themes: Iterable[str]) -> None:
    for theme in themes:
        with rc_context(style(theme)):
            for draw in (front, states, serving, serving_memory, laptop, tokenizers):
                path = folder / f"{draw.__name__.replace('_', '-')}-{theme}.svg"
                draw().savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main(ROOT / "docs/figures", INK)
