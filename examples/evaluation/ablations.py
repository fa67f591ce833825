"""
Ablations: every model with and without its paper's main idea, in tasks where it should matter.

The ranker of Avey (appendix K of "Don't Pay Attention"), the router of Raven (table 2 of "Raven": Gated Slot Attention
writes to all slots), and the working memory of Gecko (section 3.3 of "Gecko") are tested by the needle in a haystack,
in rows as long as in training and longer ones, with the smaller settings of the trials. The decay of Finch
that depends on the data (section 4.2.2 of "Eagle and Finch") is tested by multi-query associative recall, where figure
4 has Finch above Eagle. Both models of a pair have the same seed, rows and common settings, and differ in one switch:

  Avey    --k 1 --chunk-size 128: one split as long as the window, and no other is retrieved
  Raven   router "gsa", decay_type "GLA": every token is written to all slots
  Gecko   readouts of the working memory are zero
  Finch   the low-rank term of the decay is zero and stays so

The first two are fields of the configuration, the others `without` in baselines.py. Accuracies are means over the
seeds, and over both variants of the needle. One pair:

    python -m examples.evaluation ablations --architectures finch --seeds 0
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from . import mqar, needle, trials
from .figures import line_of, new_figure
from .models import NAMES
from .recipes import ABLATIONS, COMMON, WITHOUT
from .spread import Spread, bars_of, by


TITLE = "Ablations"
ARCHITECTURES = tuple(ABLATIONS)
RECALL = ("finch",)  # the architectures that recall pairs; the others find needles
SEEDS = (0, 1)
SHARED = ("architecture", "recipe", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    needle.add_settings(parser)
    smaller = {**trials.SMALLER, "lengths": trials.SMALLER["lengths"][:2]}
    parser.set_defaults(**smaller)
    add = parser.add_argument
    add("--recall-length", type=int, default=128, help="tokens of the rows of associative recall")
    add("--recall-width", type=int, default=32, help="width of the models of associative recall")
    add("--recall-steps", type=int, default=800, help="maximum number of their training steps")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **needle.settings(arguments),
        "recall_width": arguments.recall_width,
        "recall_steps": arguments.recall_steps,
    }


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {"architecture": architecture, "recipe": recipe, "seed": seed, "length": length}
        for seed in arguments.seeds
        for architecture in arguments.architectures
        for recipe in (COMMON, WITHOUT)
        for length in ([arguments.recall_length] if architecture in RECALL else arguments.lengths)
    ]


def recall_arguments(arguments: argparse.Namespace) -> argparse.Namespace:
    """The settings of associative recall, with only the first learning rate."""
    parser = argparse.ArgumentParser()
    mqar.add_arguments(parser)
    options = parser.parse_args(["--steps", str(arguments.recall_steps)])
    options.lrs, options.device = options.lrs[:1], arguments.device
    return options


def measure(arguments: argparse.Namespace, architecture: str, recipe: str, seed: int, length: int) -> dict[str, Any]:
    if architecture in RECALL:
        gone = ABLATIONS[architecture][1].without if recipe == WITHOUT else ""
        options, width = recall_arguments(arguments), arguments.recall_width
        row = mqar.measure(options, architecture, length, width, options.words, seed, gone)
        return {name: row[name] for name in ("accuracy", "steps", "parameters")}
    rows = {name: needle.measure(arguments, architecture, recipe, seed, name, length) for name in needle.VARIANTS}
    accuracies = {name: row["accuracy"] for name, row in rows.items()}
    return {
        "accuracy": sum(accuracies.values()) / len(accuracies),
        **accuracies,
        **{name: rows[needle.VARIANTS[0]][name] for name in ("parameters", "training_seconds")},
    }


class Pair(NamedTuple):
    """The accuracies of an architecture at a length, with a part and without it."""

    architecture: str
    length: int
    having: Spread
    lacking: Spread

    @property
    def part(self) -> str:
        return ABLATIONS[self.architecture][0]

    @property
    def name(self) -> str:
        return NAMES[self.architecture]


def pairs_of(record: dict[str, Any]) -> list[Pair]:
    """All pairs with both measurements."""
    spreads = {
        cell: Spread.of(row["accuracy"] for row in rows)
        for cell, rows in by(record["rows"], "architecture", "recipe", "length").items()
    }
    found = [
        Pair(architecture, length, spread, spreads[architecture, WITHOUT, length])
        for (architecture, recipe, length), spread in spreads.items()
        if recipe == COMMON and (architecture, WITHOUT, length) in spreads
    ]
    return sorted(found, key=lambda pair: (ARCHITECTURES.index(pair.architecture), pair.length))


def draw(record: dict[str, Any]) -> dict[str, Any]:
    pairs = pairs_of(record)
    if not pairs:
        return {}
    figure, axes = new_figure(height=1.4 + 0.4 * len(pairs))
    for place, pair in enumerate(pairs):
        colour = line_of(pair.architecture)["color"]
        for shift, alpha, spread in ((-0.18, 1.0, pair.having), (0.18, 0.4, pair.lacking)):
            style = {"height": 0.34, "color": colour, "alpha": alpha, "capsize": 2.5}
            axes.barh(place + shift, spread.mean, xerr=bars_of([spread]), error_kw={"elinewidth": 1.0}, **style)
    labels = [f"{pair.name}, {pair.part},\n{pair.length:,} tokens" for pair in pairs]
    axes.set_yticks(range(len(pairs)), labels)
    axes.invert_yaxis()
    axes.set(xlabel="right answers (share); pale: without the part", xlim=(0, 1.03))
    return {"ablations": figure}


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "part", "task", "length (tokens)", "seeds", "with", "without", "difference (points)"]
    rows = []
    for pair in pairs_of(record):
        task = mqar.TITLE if pair.architecture in RECALL else needle.TITLE
        seeds = " and ".join(str(count) for count in dict.fromkeys((pair.having.count, pair.lacking.count)))
        what = [pair.name, pair.part, task, f"{pair.length:,}", seeds]
        difference = 100 * (pair.having.mean - pair.lacking.mean)
        rows.append([*what, pair.having.text(), pair.lacking.text(), f"{difference:+.1f}"])
    return header, rows


def verdict(having: Spread, lacking: Spread) -> str:
    """Whether the spreads of the seeds are apart."""
    if having.least > lacking.greatest:
        text = "the worst model with it is better than the best without it"
    elif having.greatest < lacking.least:
        text = "the best model with it is worse than the worst without it"
    else:
        return "the difference is within the spread of the seeds"
    return text + (", of one seed each" if having.count == lacking.count == 1 else "")


def findings(record: dict[str, Any]) -> list[str]:
    pairs = pairs_of(record)
    said = [
        f"{pair.name} at {pair.length:,} tokens: {pair.having.text('.1%')} of the answers are right with the "
        f"{pair.part}, {pair.lacking.text('.1%')} without it; {verdict(pair.having, pair.lacking)}."
        for pair in pairs
    ]
    measured = {pair.architecture for pair in pairs}
    missing = [NAMES[name] for name in ARCHITECTURES if name not in measured]
    return said + ([f"Not measured yet: {', '.join(missing)}."] if missing else [])
