"""
Trials: the needle in a haystack with other training recipes, one thing changed at a time.

The papers' small models keep their recall far beyond the length of the training: Raven to 16 times it (table 2 of
"Raven"), Avey to 128 times (figure 6 of "Don't Pay Attention"). Every recipe here adopts a setting of the paper that
the common settings lack, or changes a possible obstacle: weight decay, noise, slots, splits, the ranker's inputs.

The rows of the training have 256 tokens at most and a step has 1,024, half as many as for the needle in a haystack, so
that a model takes minutes. The tests have 1, 4 and 16 times the length of the training. Two recipes of Avey have
answers of one digit, which are easier, and one of these has rows of 512 tokens. `recipes.py` has the recipes.

Obstacles, as far as these numbers show:

  Raven   Its decays begin near 1, so that slots fill up slowly. In longer texts they hold more of the haystack than
          they ever did in training: needles near the end are lost first, not the oldest ones (see the needle in a
          haystack). With decays that begin faster the memory is as full in training as later. With one seed, a model
          with more steps alone gives most answers at 4 times the length, and one with faster decays alone does not
          learn the task. With both, one seed gives nearly all answers there, and the other one gives two thirds. The
          common recipe gives nearly all with one of its seeds too. Seeds change the numbers more than the recipes do,
          and rounding changes them as much. Without noise, with a router of two layers, with fewer slots written, or
          with three times the learning rate, the model learns little or nothing (one seed each). Without weight decay
          it gives as many answers at 4 times the length as the common recipe with this seed, and with a third of the
          learning rate fewer.
  Avey    If its ranker does not retrieve the split with the first digit, the answer is hardly ever right. If it does,
          most answers of five digits are right, and all answers of one digit with splits of 32 tokens (untied-short).
          A boundary of splits often parts five digits from their words or from each other, and fewer of these needles
          are found. With untied-short and the number, every needle that lies in one split is found, also at 16 times
          the length (one seed). Splits of 64 tokens (untied-short-wide) are cut less often, but 70 % of the answers
          are right if the split is retrieved. The ranker finds fewer passkeys than numbers. A possible reason is that
          the passkey's haystack repeats a few sentences, which may also be next to the question. Scores as in the
          paper (max) change little. If no row shows the whole answer (digit), or more splits are retrieved, the model
          learns less.

    python -m examples.evaluation trials --architectures raven --recipes sparse --seeds 0 1
"""

from __future__ import annotations

import argparse
from typing import Any

from . import needle
from .figures import line_of, new_figure
from .models import NAMES
from .recipes import COMMON, RECIPES, chosen, names_of_recipes
from .spread import Spread, bars_of, by


TITLE = "What was tried for the needle"
ARCHITECTURES = tuple(RECIPES)
SEEDS = (0,)
SHARED = needle.SHARED
# The needle's settings for rows of half the length.
SMALLER = {"train_length": 256, "tokens": 1024, "steps": 2500, "lengths": [256, 1024, 4096]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = names_of_recipes()
    parser.add_argument("--recipes", nargs="+", choices=names, default=names, help="names of recipes")
    needle.add_settings(parser)
    parser.set_defaults(**SMALLER)


settings, measure = needle.settings, needle.measure


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {"architecture": architecture, "recipe": name, "seed": seed, "variant": variant, "length": length}
        for architecture in arguments.architectures
        for name in RECIPES[architecture]
        if name in arguments.recipes
        for seed in arguments.seeds
        for variant in needle.VARIANTS
        for length in arguments.lengths
    ]


def results(record: dict[str, Any]) -> dict[str, dict[str, dict[int, Spread]]]:
    """
    Accuracy by architecture, recipe and length, in the order of `RECIPES`: means over seeds and variants, with the
    spread of the seeds.
    """
    found: dict[str, dict[str, dict[int, Spread]]] = {}
    rows = by(record["rows"], "architecture", "recipe", "length")
    for architecture, recipes in RECIPES.items():
        for name in recipes:
            cells = {length: alike for (*which, length), alike in rows.items() if which == [architecture, name]}
            for length in sorted(cells):
                seeds = by(cells[length], "seed").values()
                means = [sum(row["accuracy"] for row in seed) / len(seed) for seed in seeds]
                found.setdefault(architecture, {}).setdefault(name, {})[length] = Spread.of(means)
    return found


def draw(record: dict[str, Any]) -> dict[str, Any]:
    found = results(record)
    most = max(map(len, found.values()))
    figure, grid = new_figure(1, len(found), height=1.4 + 0.32 * most, sharex=True, squeeze=False)
    for axes, (architecture, recipes) in zip(grid[0], found.items(), strict=True):
        lengths = sorted({length for line in recipes.values() for length in line})
        colour = line_of(architecture)["color"]
        for place, length in enumerate(lengths):
            points = {row: line[length] for row, line in enumerate(recipes.values()) if length in line}
            means = [spread.mean for spread in points.values()]
            shade = 0.3 + 0.7 * (place + 1) / len(lengths)
            style = {"color": colour, "alpha": shade, "marker": "os^Dv"[place % 5], "capsize": 2.5}
            axes.errorbar(
                means, [*points], xerr=bars_of(points.values()), linestyle="none", label=f"{length:,} tokens", **style
            )
        axes.set_yticks(range(len(recipes)), [*recipes])
        axes.invert_yaxis()
        axes.set(title=NAMES[architecture], xlabel="right answers (share)", xlim=(-0.03, 1.03))
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return {"trials": figure}


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    lengths = sorted({row["length"] for row in record["rows"]})
    header = ["model", "recipe", "what it changes", "seeds", *(f"right at {length:,}" for length in lengths)]
    trained = by(record["rows"], "architecture", "recipe")
    rows = []
    for architecture, recipes in results(record).items():
        for name, line in recipes.items():
            alike = trained[architecture, name]
            what = [NAMES[architecture], name, RECIPES[architecture][name].why]
            right = [line[length].text() if length in line else "–" for length in lengths]
            minutes = sum(row["training_seconds"] for row in alike) / len(alike) / 60
            seeds = str(max(spread.count for spread in line.values()))
            rows.append([*what, seeds, *right, f"{minutes:.1f}", f"{alike[0]['parameters']:,}"])
    return [*header, "minutes of training", "parameters"], rows


def boundaries(record: dict[str, Any], architecture: str) -> list[str]:
    """The shares of right answers if the needle crosses a boundary of Avey's splits, over lengths and variants."""
    rows = [row for row in record["rows"] if row["architecture"] == architecture and "cut" in row and "whole" in row]
    texts = []
    for (name,), alike in by(rows, "recipe").items():
        cut, whole = (sum(row[part] for row in alike) / len(alike) for part in ("cut", "whole"))
        texts.append(f"{name} {cut:.1%} and {whole:.1%}")
    if not texts:
        return []
    what = "right answers over all lengths, if the needle crosses a boundary of splits and if not"
    return [f"{NAMES[architecture]}, {what}: {', '.join(texts)}."]


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else "–"


def retrievals(record: dict[str, Any], architecture: str) -> list[str]:
    """The share of texts where the ranker retrieves the split with the first digit, and of right answers if so."""
    rows = [row for row in record["rows"] if row["architecture"] == architecture and "retrieved" in row]
    said = []
    for (name, variant), alike in by(rows, "recipe", "variant").items():
        # All rows have equally many texts.
        found = sum(row["retrieved"] for row in alike)
        right = sum(row["retrieved"] * row.get("right_if_retrieved", 0.0) for row in alike)
        others = sum((1 - row["retrieved"]) * row.get("right_if_not", 0.0) for row in alike)
        shares = (share(found, len(alike)), share(right, found), share(others, len(alike) - found))
        said.append("{} with the {} {} ({} and {})".format(name, variant, *shares))
    if not said:
        return []
    what = "texts in which the ranker retrieves the split with the first digit, and in brackets right answers"
    return [f"{NAMES[architecture]}, {what} in these texts and in the others, over all lengths: {', '.join(said)}."]


def findings(record: dict[str, Any]) -> list[str]:
    said = []
    for architecture, recipes in results(record).items():
        short = {name for name in recipes if "digits" in RECIPES[architecture][name].options}
        alike = {name: line for name, line in recipes.items() if name not in short}
        for length in sorted({length for line in alike.values() for length in line}):
            there = {name: line[length] for name, line in alike.items() if length in line}
            best = max(there, key=lambda name: there[name].mean)
            text = f"{NAMES[architecture]} at {length:,} tokens: {there[best].text('.1%')} with {best}, the best of "
            text += f"{len(there)} recipes"
            if COMMON in there:
                text += f"; {there[COMMON].text('.1%')} with the common one"
            said.append(text + ".")
        for name in sorted(short):
            answers = ", ".join(f"{spread.text('.1%')} at {length:,}" for length, spread in recipes[name].items())
            number = RECIPES[architecture][name].options["digits"]
            said.append(f"{NAMES[architecture]} with {name}, whose answers have {number} digit: {answers}.")
        untried = [name for name in RECIPES[architecture] if name not in recipes]
        text = f"recipes.py chooses {chosen(architecture)} for {NAMES[architecture]}'s needle in a haystack."
        said.append(text + (f" Not measured yet: {', '.join(untried)}." if untried else ""))
        said += boundaries(record, architecture) + retrievals(record, architecture)
    return said
