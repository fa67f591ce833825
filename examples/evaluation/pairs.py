"""
Pairs that repeat, by position: does a model use what lies beyond its attention, and beyond the length of its training?

Figure 4 of "Gecko" shows the loss of a language model by the length of its context. The loss falls far beyond what
attention sees. Folk tunes cannot show this, because a tune says little about the next one (see the loss by position).
So here the farthest parts of a text matter as much as the nearest:

    key    k3 k1 k4 k3 k1 ...
    value  v7 v2 v7 v7 v2 ...      every key has one value, new in each row

Keys are drawn at random, again and again. The first value of a key cannot be known, and every later one can. So the
least possible loss at a position is the share of keys that are new there, times the bits of a value. It falls as the
text goes on. A predictor that sees only the last tokens forgets keys, and its least possible loss soon stays the same.
Both limits are exact. If the loss of a model is below the second one, the model remembers what lies farther back.

Gecko's attention sees at most two chunks, of --window tokens each. So Gecko is measured with and without its working
memory. Its moving average (CEMA) also reaches farther than attention. Training rows have 4 to --keys keys, and grow
from 16 tokens to --train-length. Test rows have --keys keys and --length tokens, several times as many as those of the
training, and are the same for all models. Only values have a loss.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import trange
from transformers import PreTrainedModel

from .baselines import without
from .figures import line_of, new_figure, short
from .models import CAUSAL, NAMES, make_config, make_model, make_optimizer, make_schedule
from .recipes import ABLATIONS
from .spread import Spread, by


TITLE = "Pairs that repeat"
ARCHITECTURES = CAUSAL
SEEDS = (0,)
OWN_RATES = {"transformer": "transformer_lr"}  # architecture to the option with its learning rate
ABLATED = ("gecko",)  # architectures that are also measured without the part of `ABLATIONS`
FEWEST = 4  # keys of a training row
SHORTEST = 16  # tokens of the first training rows
GROWTH = 0.6  # share of the steps in which rows become longer
FIRST = 32  # tokens of the first range of positions; each later one ends at twice as many
CALL = 16384  # tokens that are read in one call
TEST_SEED = 1  # that of the test rows, the same for all models
SMALL = 0.02  # a difference in bits that is ignored


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--keys", type=int, default=64, help="keys of a row, and values that they may have")
    add("--train-length", type=int, default=512, help="tokens of the longest training rows")
    add("--length", type=int, default=4096, help=f"tokens of the test rows, {FIRST} times a power of 2")
    add("--width", type=int, default=64, help="width of the models")
    add("--layers", type=int, default=2, help="layers of the models")
    add("--window", type=int, default=64, help="tokens of a chunk of Gecko, or of two splits of Avey")
    add("--steps", type=int, default=2000, help="training steps")
    add("--tokens", type=int, default=1024, help="tokens per step")
    add("--test-rows", type=int, default=32, help="rows of the test")
    add("--lr", type=float, default=3e-3, help="largest learning rate")
    add("--transformer-lr", type=float, default=1e-3, help="largest learning rate of the transformer")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = "keys train_length length width layers window steps tokens test_rows lr transformer_lr"
    return {name: getattr(arguments, name) for name in names.split()}


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    for name in ("train_length", "length"):
        value = getattr(arguments, name)
        if value < FIRST or value % FIRST or (value // FIRST) & (value // FIRST - 1):
            raise ValueError(f"--{name.replace('_', '-')} must be {FIRST} times a power of 2, got {value}.")
    if arguments.keys < FEWEST:
        raise ValueError(f"--keys must be at least {FEWEST}, got {arguments.keys}.")
    if arguments.tokens < arguments.train_length:
        raise ValueError(
            f"--tokens must be at least --train-length ({arguments.train_length}), got {arguments.tokens}."
        )
    return [
        {"architecture": architecture, "part": part, "seed": seed}
        for seed in arguments.seeds
        for architecture in arguments.architectures
        for part in ("", ABLATIONS[architecture][1].without)[: 1 + (architecture in ABLATED)]
    ]


def make_rows(rows: int, length: int, most: int, fewest: int, generator: torch.Generator) -> torch.Tensor:
    """
    Args:
        rows: number of rows.
        length: tokens per row, an even number: keys and values in turn.
        most: keys have the ids 1 to `most`, values the ids `most` + 1 to 2 * `most`.
        fewest: a row has `fewest` to `most` keys. Their number is drawn so that its logarithm is uniform.

    Returns:
        ids (rows, length).
    """
    shares = torch.rand(rows, 1, generator=generator)
    numbers = (fewest * (most / fewest) ** shares).round().long()
    keys = torch.rand(rows, most, generator=generator).argsort(-1)
    values = torch.randint(most, (rows, most), generator=generator)
    drawn = (torch.rand(rows, length // 2, generator=generator) * numbers).long()
    return torch.stack((1 + keys.gather(1, drawn), 1 + most + values.gather(1, drawn)), dim=-1).flatten(1)


def new_keys(ids: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """
    Whether the key before each value of ids (rows, length) has no value among the last `window` tokens, up to that
    key itself; with None, among all tokens before: bool (rows, length / 2).
    """
    keys = ids[:, ::2].tolist()
    pairs = math.inf if window is None else (window - 1) // 2  # whole pairs before the key
    found = []
    for row in keys:
        last: dict[int, int] = {}
        new = []
        for place, key in enumerate(row):
            new.append(key not in last or place - last[key] > pairs)
            last[key] = place
        found.append(new)
    return torch.tensor(found)


def losses_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Losses in nats of the values in ids (rows, length), each given the tokens before: (rows, length / 2)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, ::2].float()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1::2], reduction="none")


def train(arguments: argparse.Namespace, architecture: str, part: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    lr = getattr(arguments, OWN_RATES.get(architecture, "lr"))
    names = ("width", "layers", "window")
    sizes = {name: getattr(arguments, name) for name in names}
    ids = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    vocabulary, context = 2 * arguments.keys + 1, arguments.train_length
    config = make_config(architecture, vocabulary=vocabulary, context=context, lr=lr, **sizes, **ids)
    model = without(part, make_model(config)).to(arguments.device).train()
    optimizer = make_optimizer(model, lr, weight_decay=0.0)
    schedule = make_schedule(optimizer, arguments.steps)
    generator = torch.Generator().manual_seed(2 * seed)  # that of the test is odd
    bar = trange(arguments.steps, desc=" without ".join(filter(None, (architecture, part))), unit="step", leave=False)
    for step in bar:
        grown = min(step / (GROWTH * arguments.steps), 1.0)
        length = int(SHORTEST * (arguments.train_length / SHORTEST) ** grown) // 2 * 2
        rows = make_rows(arguments.tokens // length, length, arguments.keys, FEWEST, generator).to(arguments.device)
        with torch.autocast(rows.device.type, torch.bfloat16):
            loss = losses_of(model, rows).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix_str(f"{length} tokens, {loss.item() / math.log(2):.2f} bits", refresh=False)
    return model.eval()


def ranges(length: int) -> list[tuple[int, int]]:
    """The ranges of positions, in tokens: the first `FIRST`, and then each as long as all before it."""
    ends = [FIRST * 2**power for power in range((length // FIRST).bit_length())]
    return [*zip([0, *ends], ends, strict=False)]


def parts_of(values: torch.Tensor) -> list[torch.Tensor]:
    """The columns of (rows, length / 2), one for each pair, by the ranges of positions."""
    return [values[:, start // 2 : end // 2] for start, end in ranges(2 * values.shape[1])]


def test_rows(settings: dict[str, Any]) -> torch.Tensor:
    """The ids of the test's rows, (rows, length), which are the same for all models."""
    generator = torch.Generator().manual_seed(TEST_SEED)
    return make_rows(settings["test_rows"], settings["length"], settings["keys"], settings["keys"], generator)


def least(settings: dict[str, Any], window: int | None = None) -> list[float]:
    """The least possible bits a value for each range of the test's rows, if the last `window` tokens are seen."""
    bits = math.log2(settings["keys"])
    return [part.double().mean().item() * bits for part in parts_of(new_keys(test_rows(settings), window))]


@torch.no_grad()
def measure(arguments: argparse.Namespace, architecture: str, part: str, seed: int) -> dict[str, Any]:
    with torch.enable_grad():
        model = train(arguments, architecture, part, seed)
    ids = test_rows(settings(arguments))
    batches = ids.split(max(CALL // arguments.length, 1))
    parts = parts_of(torch.cat([losses_of(model, batch.to(model.device)).cpu() for batch in batches]) / math.log(2))
    # Rows are independent, so their means give the error of the mean: two standard errors.
    errors = [2 * part.mean(1).std().item() / math.sqrt(len(ids)) for part in parts]
    bits = [part.mean().item() for part in parts]
    return {"bits": bits, "error": errors, "parameters": model.num_parameters()}


def in_order(row: dict[str, Any]) -> tuple[int, str, int]:
    return ARCHITECTURES.index(row["architecture"]), row["part"], row["seed"]


def name_of(architecture: str, part: str) -> str:
    return NAMES[architecture] + (f" without {part}" if part else "")


def lines_of(record: dict[str, Any]) -> dict[tuple[str, str], list[Spread]]:
    """Bits a value by architecture and missing part, for each range: the mean and spread of the seeds."""
    rows = by(sorted(record["rows"], key=in_order), "architecture", "part")
    return {
        cell: [Spread.of(bits) for bits in zip(*(row["bits"] for row in alike), strict=True)]
        for cell, alike in rows.items()
    }


def draw(record: dict[str, Any]) -> dict[str, Any]:
    found = record["settings"]
    window = 2 * found["window"]
    ends = [end for _, end in ranges(found["length"])]
    figure, axes = new_figure(height=4.2)
    for (architecture, part), spreads in lines_of(record).items():
        style = {**line_of(architecture), "label": name_of(architecture, part)}
        axes.plot(ends, [spread.mean for spread in spreads], **style, linestyle="--" if part else "-")
        below, above = [spread.least for spread in spreads], [spread.greatest for spread in spreads]
        axes.fill_between(ends, below, above, color=style["color"], alpha=0.15, linewidth=0)
    limits = (("least possible", None, ":"), (f"least possible from the last {window} tokens", window, "-."))
    for label, seen, line in limits:
        axes.plot(ends, least(found, seen), color="#777777", linestyle=line, linewidth=1.0, label=label)
    axes.axvline(found["train_length"], color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ends, [*map(short, ends)])
    axes.set(xlabel="tokens up to the end of a range", ylabel="bits a value", ylim=(0, None))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return {"pairs": figure}


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns = [f"{start:,} to {end:,}" for start, end in ranges(record["settings"]["length"])]
    counts = by(record["rows"], "architecture", "part")
    rows = [
        [name_of(*cell), str(len(counts[cell])), *(spread.text() for spread in spreads)]
        for cell, spreads in lines_of(record).items()
    ]
    window = 2 * record["settings"]["window"]
    for what, seen in (("least possible", None), (f"least from the last {window} tokens", window)):
        rows.append([what, "–", *(f"{bits:.3f}" for bits in least(record["settings"], seen))])
    return ["model", "seeds", *columns], rows


def findings(record: dict[str, Any]) -> list[str]:
    found, lines = record["settings"], lines_of(record)
    places = ranges(found["length"])
    trained = next(place for place, (_, end) in enumerate(places) if end == found["train_length"])
    window = 2 * found["window"]
    (start, end), last = places[trained], places[-1]
    everything, near = least(found)[trained], least(found, window)[trained]
    said = [
        f"The least possible loss of values at {start:,} to {end:,} tokens is {everything:.3f} bits. It is {near:.3f} "
        f"bits for a predictor that sees the last {window} tokens."
    ]
    errors = by(record["rows"], "architecture", "part")
    for cell, spreads in lines.items():
        text = f"{name_of(*cell)}: {spreads[trained].text()} bits at {start:,} to {end:,} tokens, the last that "
        text += f"training had, {spreads[-1].text()} at {last[0]:,} to {last[1]:,}"
        more = spreads[-1].mean - spreads[trained].mean
        error = max(row["error"][place] for row in errors[cell] for place in (trained, -1))
        verdict = "stays" if abs(more) <= max(error, SMALL) else "rises" if more > 0 else "falls"
        below = spreads[trained].greatest < near - error
        text += f": it {verdict}. " + (
            f"It is below what the last {window} tokens allow, so the model uses earlier ones."
            if below
            else f"It is not below what the last {window} tokens allow."
        )
        said.append(text)
    for architecture in ABLATED:
        spreads = lines.get((architecture, ""))
        if spreads is None or end <= window:
            continue
        before = max((place for place, (_, end) in enumerate(places) if end <= window), default=0)
        falls = spreads[trained].mean < spreads[before].mean - SMALL
        said.append(
            f"In figure 4 the loss of {NAMES[architecture]} falls with the context, beyond what its attention sees. "
            f"Here it goes from {spreads[before].text()} bits at {places[before][0]} to {places[before][1]} tokens to "
            f"{spreads[trained].text()} at {start:,} to {end:,}: {'so here' if falls else 'not so here'}."
        )
    missing = [NAMES[name] for name in ARCHITECTURES if (name, "") not in lines]
    return said + ([f"Not measured yet: {', '.join(missing)}."] if missing else [])
