"""
Draws what a state costs next to a transformer's keys and values, from the numbers of `subquad info`.

    python docs/states_figure.py    # writes docs/figures/states-light.svg and states-dark.svg
"""

import sys
from pathlib import Path

from front_figure import INK, save, styled_axes

from subquad.hub.info import describe, format_bytes


# Presets of about one size, with the colours of the front page, and how far their labels move, in points.
PRESETS = {
    "avey-1.5b": ("Avey 1.5B", "#009E73", 0),
    "gecko-1b": ("Gecko 1B", "#56B4E9", 0),
    "raven-0.8b": ("Raven 0.8B", "#CC79A7", 0),
    "goose-1.5b": ("Goose 1.5B", "#E69F00", -7),
    "finch-1.6b": ("Finch 1.6B", "#D55E00", 6),
}
LENGTHS = [2**n for n in range(8, 21)]


def draw(theme: str):
    """The bytes that are kept of a text, by its length."""
    figure, (axes,) = styled_axes(theme, 1, (8, 3.6))
    transformer = describe("finch-1.6b").transformer_bytes_after
    lines = {"a transformer like Finch": (transformer, "#8c8c8c", 0)}
    lines |= {label: (describe(name).state_bytes_after, *more) for name, (label, *more) in PRESETS.items()}
    for label, (size, colour, above) in lines.items():
        sizes = [size(length) for length in LENGTHS]
        axes.plot(LENGTHS, sizes, color=colour, linewidth=2)
        text = f"{label}: {format_bytes(sizes[-1])}"
        axes.annotate(
            text, (LENGTHS[-1], sizes[-1]), (6, above), textcoords="offset points", color=colour, va="center"
        )
    ticks = LENGTHS[::2]
    axes.set(xscale="log", yscale="log", title="kept of a text", xlabel="tokens")
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks], fontsize=8)
    axes.set_yticks([10**n for n in range(6, 13)], [format_bytes(10**n) for n in range(6, 13)])
    axes.set_ylim(1e6, 6e11)
    axes.minorticks_off()
    axes.set_xlim(right=LENGTHS[-1] * 3e2)
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "figures"
    for theme in INK:
        save(draw(theme), folder / f"states-{theme}.svg")
