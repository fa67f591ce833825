"""
Multi-query associative recall, by width and length: how many pairs can a model remember and distinguish?

This is figure 4, section 8.2, of "Eagle and Finch" (arXiv:2404.05892), in the set-up of "Zoology" (arXiv:2312.04927).
A row begins with pairs of a key and a value, all different. Then every key occurs once more, more likely near the
pairs than far from them, and the model must predict its value:

    k3 v7 k1 v2 k8 v4 k5 v9 k8 __ k3 __ __ __ k5 __ __ __ __ __ __ __ k1 __ __ __ __ __ __ __ __ __
                            v4    v7          v9                      v2            (only these have a loss)

A longer row has more pairs. Models of two layers read new rows at every step, first with two pairs, later also longer
ones, up to the length of the test; without that, transformers learn the task much later. Training ends when 99% of the
values of the validation rows are right, or after the last step. Several learning rates are tried, and the one with the
best validation accuracy counts. The test rows are yet other rows, the same for all models.

The memory of RWKV-4 has two numbers per channel, so it needs separate channels for every key. To find out whether it
is too small, it is also trained with --fewer-words keys, at the first length and the last width.

Every cell has several seeds, of weights and rows. The numbers are means, with the least and the greatest. A call
measures the first seed of all cells before the second.

Zoology trains models of width 64 to 512 on 64 to 512 tokens of 8,192 words. Here all three are smaller, so that a CPU
is enough. Eagle, Finch and Goose are compared with an Eagle with the memory of RWKV-4, an Eagle with linear attention,
and a transformer. The accuracy of guessing among the values of the row is one divided by the number of pairs.
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import trange
from transformers import PreTrainedModel

from .baselines import BASES, MIXINGS, make_baseline, without
from .figures import NAMES, line_of, new_figure
from .models import make_config, make_model, make_optimizer, make_schedule, take_step
from .spread import Spread, by, draw_spreads


TITLE = "Multi-query associative recall"
ARCHITECTURES = ("finch", "eagle", "goose", "rwkv4", "linear-attention", "transformer")
SEEDS = (0, 1, 2)
WIDTHS, LENGTHS = (32, 64, 128), (64, 128, 256)  # the grid of the command without options
ENOUGH = 0.99  # validation accuracy that ends a training
NEAR, SAME = 0.95, 0.01  # accuracy that the findings call solved, and the largest difference that they ignore
SMALL, FEWER = ("rwkv4",), (8, 16)  # memories of a few numbers per channel; numbers of keys in their extra trainings
# Claims of figure 4: the model near 100% everywhere, and the memory that Eagle and Finch exceed everywhere.
PERFECT, EXCEEDED = ("finch",), {"rwkv4": "RWKV-4"}
BLANK, NOTHING = 0, -100  # the id between queries, and the target of tokens that are not queries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=list(WIDTHS), help="widths of the models; on a GPU also 256 and 512")
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens per row; on a GPU also 512")
    add("--tokens-per-pair", type=int, default=8, help="number of tokens of a row for each pair")
    add("--words", type=int, default=32, help="number of keys, and of values; on a GPU 4096 as in Zoology")
    add(
        "--fewer-words",
        type=int,
        nargs="*",
        help=f"numbers of keys with which {', '.join(SMALL)} is also trained (default: "
        f"{' and '.join(map(str, FEWER))}, if enough for the first length)",
    )
    add(
        "--power", type=float, default=0.01, help="gap g between pairs and query is drawn with weight g ** (power - 1)"
    )
    add("--lrs", type=float, nargs="+", default=[3e-3, 1e-2], help="learning rates to try, in this order")
    add("--steps", type=int, default=800, help="maximum number of training steps; on a GPU 10000")
    add("--tokens", type=int, default=2048, help="tokens per step, so a step has fewer rows if they are longer")
    add("--validate-every", type=int, default=50, help="steps between two validations")
    add("--test-rows", type=int, default=256, help="rows of validation and test")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("tokens_per_pair", "words", "power", "lrs", "steps", "tokens", "validate_every", "test_rows")
    return {name: getattr(arguments, name) for name in names}


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    shortest, longest = 2 * arguments.tokens_per_pair, arguments.words * arguments.tokens_per_pair
    if arguments.tokens_per_pair < 4:
        raise ValueError(f"--tokens-per-pair must be at least 4, got {arguments.tokens_per_pair}.")
    for length in arguments.lengths:
        if not shortest <= length <= min(longest, arguments.tokens):
            raise ValueError(
                f"--lengths must be at least {shortest}, for two pairs, and at most {longest}, for as many pairs as "
                f"--words, and {arguments.tokens}, --tokens of a step; got {length}."
            )
    small = [architecture for architecture in arguments.architectures if architecture in SMALL]
    length, width = arguments.lengths[0], arguments.widths[-1]
    least = math.ceil(length / arguments.tokens_per_pair)
    fewer_words = arguments.fewer_words
    if fewer_words and not small:
        raise ValueError(f"--fewer-words is for {', '.join(SMALL)}, which is not one of --architectures.")
    if fewer_words is None:
        fewer_words = [words for words in FEWER if least <= words < arguments.words]
    if wrong := [words for words in fewer_words if not least <= words < arguments.words]:
        raise ValueError(
            f"--fewer-words must be at least {least}, for the pairs of {length} tokens, and less than --words "
            f"({arguments.words}), got {wrong[0]}."
        )
    sizes = (arguments.architectures, arguments.lengths, arguments.widths, [arguments.words])
    grid, fewer = itertools.product(*sizes), itertools.product(small, [length], [width], fewer_words)
    cells = [dict(zip(("architecture", "length", "width", "words"), cell, strict=True)) for cell in (*grid, *fewer)]
    return [{**cell, "seed": seed} for seed in arguments.seeds for cell in cells]


def make_rows(
    rows: int, length: int, pairs: int, words: int, power: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Args:
        rows: number of rows.
        length: tokens per row, at least 4 times `pairs`.
        pairs: pairs of a key and a value per row.
        words: keys have the ids 1 to `words`, values the ids `words` + 1 to 2 * `words`.
        power: exponent of the distribution of gaps. A gap between the pairs and a query is 1, 2, ... times two tokens,
            and drawn with the weight gap ** (power - 1), without repetition.

    Returns:
        ids (rows, length), and targets (rows, length): the value at the position of every query, `NOTHING` elsewhere.
    """

    def draw(weights: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(weights.expand(rows, -1), pairs, generator=generator)

    keys, values = 1 + draw(torch.ones(words)), 1 + words + draw(torch.ones(words))
    asked = draw(torch.ones(pairs))  # the first one drawn probably gets the smallest gap
    gaps = draw(torch.arange(1, length // 2 - pairs + 1) ** (power - 1))
    positions = 2 * (pairs + gaps)
    ids, targets = torch.full((rows, length), BLANK), torch.full((rows, length), NOTHING)
    ids[:, : 2 * pairs] = torch.stack((keys, values), dim=-1).flatten(1)
    ids.scatter_(1, positions, keys.gather(1, asked))
    targets.scatter_(1, positions, values.gather(1, asked))
    return ids, targets


def make(architecture: str, arguments: argparse.Namespace, length: int, width: int, lr: float) -> PreTrainedModel:
    name = BASES.get(architecture, architecture)
    config = make_config(name, vocabulary=2 * arguments.words + 1, width=width, layers=2, context=length, lr=lr)
    return make_baseline(architecture, config) if architecture in BASES else make_model(config)


def predict(model: PreTrainedModel, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets of the queries, (queries, ids) and (queries)."""
    ids, targets = ids.to(model.device), targets.to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        asked = targets != NOTHING
        logits = model.get_output_embeddings()(hidden[asked])
    return logits.float(), targets[asked]


@torch.no_grad()
def accuracy_of(model: PreTrainedModel, ids: torch.Tensor, targets: torch.Tensor, batch_size: int) -> float:
    model.eval()
    right = []
    for batch in zip(ids.split(batch_size), targets.split(batch_size), strict=True):
        logits, expected = predict(model, *batch)
        right.append(logits.argmax(-1) == expected)
    model.train()
    return torch.cat(right).float().mean().item()


def train(
    arguments: argparse.Namespace, architecture: str, length: int, width: int, lr: float, seed: int, part: str = ""
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """
    One training, perhaps without a part of the model: the model, its validation and test accuracy, and the number of
    steps.
    """
    torch.manual_seed(seed)
    model = without(part, make(architecture, arguments, length, width, lr)).to(arguments.device)
    optimizer = make_optimizer(model, lr, weight_decay=0.0)
    schedule = make_schedule(optimizer, arguments.steps)
    # Training, validation and test have different seeds.
    learn, validate, test = (torch.Generator().manual_seed(3 * seed + place) for place in range(3))

    def rows(number: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = length // arguments.tokens_per_pair
        return make_rows(number, length, pairs, arguments.words, arguments.power, generator)

    lengths = [length]
    while lengths[0] >= 4 * arguments.tokens_per_pair:
        lengths.insert(0, lengths[0] // 2)
    validation = rows(arguments.test_rows, length, validate)
    bar = trange(1, arguments.steps + 1, desc=f"{architecture} {lr:g}", unit="step", leave=False)
    for step in bar:
        # At first all rows have two pairs. In the first half of the steps longer rows are added, and lengths
        # alternate.
        known = min(1 + 2 * len(lengths) * (step - 1) // arguments.steps, len(lengths))
        now = lengths[step % known]
        loss = F.cross_entropy(*predict(model, *rows(arguments.tokens // now, now, learn)))
        take_step(loss, model, optimizer, schedule)
        if step % arguments.validate_every == 0 or step == arguments.steps:
            accuracy = accuracy_of(model, *validation, arguments.tokens // length)
            bar.set_postfix_str(f"{accuracy:.3f}")
            if accuracy >= ENOUGH:
                bar.close()
                break
    tested = accuracy_of(model, *rows(arguments.test_rows, length, test), arguments.tokens // length)
    return model, {
        "accuracy": round(tested, 4),
        "validation": round(accuracy, 4),
        "steps": step,
        "lr": lr,
        "parameters": model.num_parameters(),
    }


def measure(
    arguments: argparse.Namespace, architecture: str, length: int, width: int, words: int, seed: int, part: str = ""
) -> dict[str, Any]:
    arguments = argparse.Namespace(**{**vars(arguments), "words": words})
    tried = []
    for lr in arguments.lrs:
        tried.append(train(arguments, architecture, length, width, lr, seed, part)[1])
        if tried[-1]["validation"] >= ENOUGH:
            break
    best = max(tried, key=lambda result: result["validation"])
    return {"pairs": length // arguments.tokens_per_pair, **best}


def grid_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the grid of lengths and widths, which have all keys."""
    return [row for row in record["rows"] if row["words"] == record["settings"]["words"]]


def lines_of(record: dict[str, Any]) -> dict[str, dict[tuple[int, int], dict[str, Any]]]:
    """Means over the seeds by architecture, length and width, in this order, with the spread of the accuracy."""
    rows = sorted(grid_of(record), key=lambda row: (row["length"], row["width"], row["seed"]))
    lines: dict[str, dict] = {name: {} for name in ARCHITECTURES}
    for (architecture, *cell), alike in by(rows, "architecture", "length", "width").items():
        spread = Spread.of(row["accuracy"] for row in alike)
        same = {name: alike[0][name] for name in ("pairs", "parameters")}
        lines[architecture][tuple(cell)] = {**same, "accuracy": spread.mean, "spread": spread, "rows": alike}
    return {name: line for name, line in lines.items() if line}


def draw(record: dict[str, Any]) -> dict[str, Any]:
    shown = sorted(grid_of(record), key=lambda row: row["length"])
    pairs = {row["length"]: row["pairs"] for row in shown}
    widths = sorted({row["width"] for row in shown})
    figure, grid = new_figure(1, len(pairs), sharey=True, squeeze=False)
    for axes, (length, number) in zip(grid[0], pairs.items(), strict=True):
        for architecture, rows in lines_of(record).items():
            points = {width: row["spread"] for (tokens, width), row in rows.items() if tokens == length}
            draw_spreads(axes, points, **line_of(architecture))
        axes.axhline(1 / number, color="#999999", linewidth=0.8, linestyle=":", label="guess among the row's values")
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, map(str, widths))
        axes.set(title=f"{length} tokens, {number} pairs", xlabel="width (numbers a token)", ylim=(-0.03, 1.03))
    grid[0, 0].set_ylabel("right answers (share)")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return {"mqar": figure}


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "length (tokens)", "pairs", "width", "seeds", "right answers", "steps", "learning rates"]
    return [*header, "parameters"], [
        [
            NAMES[architecture],
            *(str(length), str(cell["pairs"]), str(width), str(cell["spread"].count), cell["spread"].text()),
            f"{sum(row['steps'] for row in cell['rows']) / len(cell['rows']):,.0f}",
            " and ".join(f"{lr:g}" for lr in sorted({row["lr"] for row in cell["rows"]})),
            f"{cell['parameters']:,}",
        ]
        for architecture, rows in lines_of(record).items()
        for (length, width), cell in rows.items()
    ]


def shares(differences: list[float]) -> str:
    """The numbers of differences above `SAME`, below -`SAME`, and in between."""
    above, below = sum(x > SAME for x in differences), sum(x < -SAME for x in differences)
    return f"higher in {above}, lower in {below}, and within {SAME} in {len(differences) - above - below}"


def ends(rows: dict[tuple[int, int], dict[str, Any]], axis: int) -> list[float]:
    """The gain in accuracy from the smallest to the largest length (axis 0) or width (axis 1), the other one fixed."""
    lines: dict[int, list[float]] = {}
    for cell, row in rows.items():  # in the order of both
        lines.setdefault(cell[1 - axis], []).append(row["accuracy"])
    return [line[-1] - line[0] for line in lines.values() if len(line) > 1]


def coverage(record: dict[str, Any]) -> str:
    """The number of measured cells of the grid, and of cells with several seeds."""
    lines = lines_of(record)
    lengths, widths = ({cell[axis] for rows in lines.values() for cell in rows} for axis in (0, 1))
    counts = [cell["spread"].count for rows in lines.values() for cell in rows.values()]
    most = max(counts)
    axes = ARCHITECTURES, LENGTHS, WIDTHS, SEEDS
    names = ("architecture", "length", "width", "seed")
    there = {tuple(row[name] for name in names) for row in grid_of(record)} & {*itertools.product(*axes)}
    whole = math.prod(map(len, axes))
    said = (
        f"Measured: {len(counts)} of {len(lines) * len(lengths) * len(widths)} cells, for {len(lines)} models, "
        f"{len(lengths)} lengths and {len(widths)} widths, {counts.count(most)} of them with {most} "
        f"seed{'s' if most > 1 else ''}, the most that a cell has. Accuracies are means over the seeds."
    )
    if len(there) < whole:
        said += f" The grid of the command without options has {whole} rows, of which {len(there)} are measured."
    return said


def with_fewer_words(record: dict[str, Any], lines: dict[str, dict[tuple[int, int], dict[str, Any]]]) -> list[str]:
    """The accuracies of the small memories by number of keys."""
    said = []
    fewer = [row for row in record["rows"] if row["words"] != record["settings"]["words"]]
    rows = sorted(fewer, key=lambda row: row["words"])
    for (architecture, length, width), alike in by(rows, "architecture", "length", "width").items():
        spreads = {words: Spread.of(row["accuracy"] for row in same) for (words,), same in by(alike, "words").items()}
        if usual := lines.get(architecture, {}).get((length, width)):
            spreads[record["settings"]["words"]] = usual["spread"]
        shares = ", ".join(f"{spread.text('.1%')} with {words}" for words, spread in spreads.items())
        said.append(
            f"{NAMES[architecture]} by number of keys, of which a row of {length} tokens has "
            f"{alike[0]['pairs']}, at width {width}: {shares}."
        )
    return said


def findings(record: dict[str, Any]) -> list[str]:
    lines, said = lines_of(record), [coverage(record)]
    for architecture, rows in lines.items():
        near = sum(row["accuracy"] >= NEAR for row in rows.values())
        guesses = sum(row["accuracy"] < 1.5 / row["pairs"] for row in rows.values())
        (length, width), worst = min(rows.items(), key=lambda item: item[1]["accuracy"])
        sentence = f"{NAMES[architecture]} predicts at least {NEAR:.0%} of the values in {near} of {len(rows)} cells"
        sentence += f", {worst['accuracy']:.1%} in the worst ({length} tokens, width {width})"
        sentence += f"; no better than a guess in {guesses}." if guesses else "."
        if architecture in PERFECT:
            sentence += " In figure 4 it is near 100% everywhere: "
            sentence += "so here." if near == len(rows) else "not so here."
        said.append(sentence)
    said += with_fewer_words(record, lines)
    for newer in ("finch", "eagle"):
        for older in MIXINGS:
            cells = lines.get(newer, {}).keys() & lines.get(older, {}).keys()
            gaps = [lines[newer][cell]["accuracy"] - lines[older][cell]["accuracy"] for cell in sorted(cells)]
            if gaps:
                sentence = f"{NAMES[newer]} against {NAMES[older]}: accuracy is {shares(gaps)} of {len(gaps)} cells"
                sentence += f"; {100 * sum(gaps) / len(gaps):+.1f} points on average."
                if older in EXCEEDED:
                    ahead = "so here." if min(gaps) > SAME else "not so here in every cell."
                    sentence += f" In figure 4 {NAMES[newer]} is above {EXCEEDED[older]}: {ahead}"
                said.append(sentence)
    for axis, what, sign in ((0, "length", -1), (1, "width", 1)):
        gains = [gain for rows in lines.values() for gain in ends(rows, axis)]
        if gains:
            mean = sum(gains) / len(gains)
            sentence = f"From the smallest {what} to the largest, accuracy is {shares(gains)} of {len(gains)} lines"
            sentence += f"; {100 * mean:+.1f} points on average. "
            sentence += f"In figure 4 it {'rises' if sign > 0 else 'falls'} with {what}: "
            said.append(sentence + ("so here." if sign * mean > SAME else "not so here."))
    return said
