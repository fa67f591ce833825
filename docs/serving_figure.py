"""
Draws the figures of the page on serving from the records of `python examples/serving/benchmark.py`.

    python docs/serving_figure.py    # writes docs/figures/serving-*.svg and serving-memory-*.svg
"""

import json
import sys
from pathlib import Path

from front_figure import INK, ROOT, save, styled_axes


RECORDS = ROOT / "examples/serving/records"
# Names of servers and their colours.
SERVERS = {"vLLM": "#D55E00", "transformers serve": "#8c8c8c"}
PANELS = {"tokens_per_second": "tokens per second", "answer_median_seconds": "seconds until an answer is whole"}
PHASES = {"short": "2,000 short requests, 16 at a time", "waiting": "64 being answered, 1,000 waiting"}


def read(part: str) -> list[dict]:
    """The rows of a record."""
    return json.loads((RECORDS / f"{part}-finch-abc.json").read_text(encoding="utf-8"))["rows"]


def draw_servers(theme: str):
    """Tokens per second of all clients together, and how long one waits, by the number of clients."""
    figure, panels = styled_axes(theme, len(PANELS), (8, 3))
    for axes, (field, title) in zip(panels, PANELS.items(), strict=True):
        for server, colour in SERVERS.items():
            rows = [row for row in read("servers") if row["server"] == server]
            x, y = [row["clients"] for row in rows], [row[field] for row in rows]
            axes.plot(x, y, color=colour, linewidth=2, marker="o", markersize=3)
            text = f"{server}: {y[-1]:,.0f}" if y[-1] >= 10 else f"{server}: {y[-1]:.1f}"
            axes.annotate(text, (x[-1], y[-1]), (0, 6), textcoords="offset points", color=colour, ha="right")
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [str(clients) for clients in x])
        axes.set(title=title, xlabel="clients")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    return figure


def draw_memory(theme: str):
    """The memory of the server's processes, by the requests that it has answered."""
    figure, panels = styled_axes(theme, len(PHASES), (8, 2.6))
    for axes, (phase, title) in zip(panels, PHASES.items(), strict=True):
        rows = [row for row in read("soak") if row["phase"] == phase]
        x, y = [row["answered"] for row in rows], [row["mebibytes"] for row in rows]
        axes.plot(x, y, color=SERVERS["vLLM"], linewidth=2, marker="o", markersize=3)
        axes.set(title=title, xlabel="answered requests", ylabel="MiB")
        axes.set_ylim(0, max(y) * 1.1)
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/figures"
    for theme in INK:
        save(draw_servers(theme), folder / f"serving-{theme}.svg")
        save(draw_memory(theme), folder / f"serving-memory-{theme}.svg")
