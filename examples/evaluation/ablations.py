"""
Ablations: every model with and without the part that its paper leads with, where the part should matter.

The ranker of Avey (appendix K of "Don't Pay Attention"), the router of Raven (table 2 of "Raven": Gated Slot Attention
writes to all slots), and the working memory of Gecko (section 3.3 of "Gecko") are tested by the needle in a haystack,
in rows as long as those of the training and longer ones, with the smaller settings of the trials. The decay of Finch
that depends on the data (section 4.2.2 of "Eagle and Finch") is tested by multi-query associative recall, where figure
4 has Finch above Eagle. Both models of a pair have the same seed, rows and settings, and one switch between them:

  Avey    --k 1 --chunk-size 128: one split as long as the window, and no other is retrieved
  Raven   router "gsa", decay_type "GLA": every token is written to all slots
  Gecko   what is read from the working memory is zero
  Finch   the low-rank term of the decay is zero and stays so

The first two are fields of the configuration, the others `without` in baselines.py. Accuracies are means over the
seeds, and over both variants of the needle. One pair:

    python -m examples.evaluation ablations --architectures finch --seeds 0
"""

from __future__ import annotations

import argparse
from typing import Any

from . import mqar, needle, trials
from .figures import line_of, new_figure
from .models import NAMES
from .recipes import ABLATIONS, WITHOUT, chosen
from .spread import Spread, by


TITLE = "Ablations"
ARCHITECTURES = tuple(ABLATIONS)
RECALL = ("finch",)  # the architectures that recall pairs; the others find needles
SEEDS = (0, 1)
SHARED = ("architecture", "part", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    needle.add_arguments(parser)
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
        {"architecture": architecture, "part": part, "seed": seed, "length": length}
        for seed in arguments.seeds
        for architecture in arguments.architectures
        for part in ("with", WITHOUT)
        for length in ([arguments.recall_length] if architecture in RECALL else arguments.lengths)
    ]


def recall_arguments(arguments: argparse.Namespace) -> argparse.Namespace:
    """The settings of associative recall, with the first learning rate alone."""
    parser = argparse.ArgumentParser()
    mqar.add_arguments(parser)
    options = parser.parse_args(["--steps", str(arguments.recall_steps)])
    options.lrs, options.device = options.lrs[:1], arguments.device
    return options


def measure(arguments: argparse.Namespace, architecture: str, part: str, seed: int, length: int) -> dict[str, Any]:
    if architecture in RECALL:
        gone = ABLATIONS[architecture][1].without if part == WITHOUT else ""
        row = mqar.measure(recall_arguments(arguments), architecture, length, arguments.recall_width, seed, gone)
        return {"accuracy": row["accuracy"], "parameters": row["parameters"]}
    recipe = WITHOUT if part == WITHOUT else chosen(architecture)
    rows = {name: needle.measure(arguments, architecture, recipe, seed, name, length) for name in needle.VARIANTS}
    accuracies = {name: row["accuracy"] for name, row in rows.items()}
    return {
        "accuracy": sum(accuracies.values()) / len(accuracies),
        **accuracies,
        "parameters": rows[needle.VARIANTS[0]]["parameters"],
    }


def pairs_of(record: dict[str, Any]) -> dict[tuple[str, int], dict[str, Spread]]:
    """The accuracies with and without the part, by architecture and length; only where both were measured."""
    rows = by(record["rows"], "architecture", "length", "part")
    found = {}
    for architecture in ARCHITECTURES:
        for length in sorted({row["length"] for row in record["rows"]}):
            both = {part: rows.get((architecture, length, part)) for part in ("with", WITHOUT)}
            if all(both.values()):
                found[architecture, length] = {
                    part: Spread.of(row["accuracy"] for row in alike) for part, alike in both.items()
                }
    return found


def draw(record: dict[str, Any]) -> dict[str, Any]:
    pairs = pairs_of(record)
    if not pairs:
        return {}
    figure, axes = new_figure(height=1.4 + 0.4 * len(pairs))
    for place, ((architecture, _), both) in enumerate(pairs.items()):
        colour = line_of(architecture)["color"]
        for shift, (part, spread) in zip((-0.18, 0.18), both.items(), strict=True):
            error = [[spread.mean - spread.least], [spread.greatest - spread.mean]]
            style = {"height": 0.34, "color": colour, "alpha": 1.0 if part == "with" else 0.4, "capsize": 2.5}
            axes.barh(place + shift, spread.mean, xerr=error, error_kw={"elinewidth": 1.0}, **style)
    labels = [
        f"{NAMES[architecture]}, {ABLATIONS[architecture][0]},\n{length:,} tokens" for architecture, length in pairs
    ]
    axes.set_yticks(range(len(pairs)), labels)
    axes.invert_yaxis()
    axes.set(xlabel="right answers (share); pale: without the part", xlim=(0, 1.03))
    return {"ablations": figure}


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "part", "task", "length (tokens)", "seeds", "with", "without", "difference (points)"]
    rows = []
    for (architecture, length), both in pairs_of(record).items():
        task = mqar.TITLE if architecture in RECALL else needle.TITLE
        having, lacking = both["with"], both[WITHOUT]
        seeds = " and ".join(str(count) for count in dict.fromkeys((having.count, lacking.count)))
        what = [NAMES[architecture], ABLATIONS[architecture][0], task, f"{length:,}", seeds]
        rows.append([*what, having.text(), lacking.text(), f"{100 * (having.mean - lacking.mean):+.1f}"])
    return header, rows


def findings(record: dict[str, Any]) -> list[str]:
    said = []
    for (architecture, length), both in pairs_of(record).items():
        having, lacking = both["with"], both[WITHOUT]
        if having.least > lacking.greatest:
            verdict = "the worst model with it is better than the best without it"
        elif having.greatest < lacking.least:
            verdict = "the best model with it is worse than the worst without it"
        else:
            verdict = "the difference is within the spread of the seeds"
        said.append(
            f"{NAMES[architecture]} at {length:,} tokens: {having.text('.1%')} of the answers are right with the "
            f"{ABLATIONS[architecture][0]}, {lacking.text('.1%')} without it; {verdict}."
        )
    missing = [
        NAMES[name] for name in ARCHITECTURES if name not in {architecture for architecture, _ in pairs_of(record)}
    ]
    return said + ([f"Not measured yet: {', '.join(missing)}."] if missing else [])
