"""
Pairs that repeat, by position: does a model use tokens beyond its attention, and beyond the length of its training?

Figure 4 of "Gecko" shows the loss of a language model by the length of its context. The loss falls far beyond the
reach of attention. Folk tunes cannot show this, because a tune contains little information about the next one (see the
loss by position). So here the farthest parts of a text matter as much as the nearest:

    key    k3 k1 k4 k3 k1 ...
    value  v7 v2 v7 v7 v2 ...      every key has one value, new in each row

Keys are drawn at random, again and again. The first value of a key cannot be known, and every later one can. So the
least possible loss at a position is the share of keys that are new there, times the bits of a value. It falls as the
text goes on. Gecko's attention sees a chunk of --window tokens and the chunk before it. A model that sees only these
two does not know keys farther back, so its least possible loss soon stops falling. Both limits are
computed from the test rows. If the loss of a model is below the second one, the model uses tokens farther back.

So Gecko is measured with and without its working memory. Other parts reach farther back than attention too: its moving
average (CEMA), its normalization over time, and the second layer, which sees the first one's outputs.

Training rows grow from 16 tokens to --train-length, and the number of their keys grows with them, to --keys. Test rows
have --keys keys too. They have --length tokens, several times as many, and are the same for all models. Only values
have a loss.
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
from .models import CAUSAL, NAMES, make_config, make_model, make_optimizer, make_schedule, take_step
from .recipes import ABLATIONS
from .spread import Spread, by, two_errors


TITLE = "Pairs that repeat"
ARCHITECTURES = CAUSAL
SEEDS = (0,)
OWN_RATES = {"transformer": "transformer_lr"}  # architecture to the option with its learning rate
ABLATED = ("gecko",)  # architectures that are also measured without the part of `ABLATIONS`
SHORTEST, FEWEST = 16, 4  # tokens and keys of the first training rows
TOKENS_PER_KEY = 8  # of longer training rows
GROWTH = 0.5  # share of the steps in which rows become longer
FIRST = 32  # tokens of the first range of positions; each later one ends at twice as many
CALL = 16384  # tokens that are read in one call
TEST_SEED = 1  # for the test rows, the same for all models
SMALL = 0.02  # a difference in bits that is ignored


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--keys", type=int, default=32, help="keys of a row, and values that they may have")
    add("--train-length", type=int, default=256, help="tokens of the longest training rows")
    add("--length", type=int, default=2048, help=f"tokens of the test rows, {FIRST} times a power of 2")
    add("--width", type=int, default=64, help="width of the models")
    add("--layers", type=int, default=2, help="layers of the models")
    add("--window", type=int, default=32, help="tokens of a chunk of Gecko, or of two splits of Avey")
    add("--steps", type=int, default=2500, help="training steps")
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
    if arguments.length < arguments.train_length:
        raise ValueError(
            f"--length must be at least --train-length ({arguments.train_length}), got {arguments.length}."
        )
    if not FEWEST <= arguments.keys <= arguments.train_length // TOKENS_PER_KEY:
        raise ValueError(
            f"--keys must be from {FEWEST} to {arguments.train_length // TOKENS_PER_KEY}, an eighth of "
            f"--train-length, got {arguments.keys}."
        )
    if arguments.test_rows < 2:
        raise ValueError(f"--test-rows must be at least 2, for the error of a mean, got {arguments.test_rows}.")
    if arguments.window < 2 or arguments.window % 2:
        raise ValueError(f"--window must be an even number, at least 2, got {arguments.window}.")
    if arguments.tokens < arguments.train_length:
        raise ValueError(
            f"--tokens must be at least --train-length ({arguments.train_length}), got {arguments.tokens}."
        )
    return [
        {"architecture": architecture, "part": part, "seed": seed}
        for seed in arguments.seeds
        for architecture in arguments.architectures
        for part in ("", *((ABLATIONS[architecture][1].without,) if architecture in ABLATED else ()))
    ]


def make_rows(rows: int, length: int, keys: int, most: int, generator: torch.Generator) -> torch.Tensor:
    """
    Args:
        rows: number of rows.
        length: tokens per row, an even number: keys and values in turn.
        keys: keys that a row may have, other ones in each row, at most `most`.
        most: keys have the ids 1 to `most`, values the ids `most` + 1 to 2 * `most`.

    Returns:
        ids (rows, length).
    """
    names = torch.rand(rows, most, generator=generator).argsort(-1)
    values = torch.randint(most, (rows, most), generator=generator)
    drawn = torch.randint(keys, (rows, length // 2), generator=generator)
    return torch.stack((1 + names.gather(1, drawn), 1 + most + values.gather(1, drawn)), dim=-1).flatten(1)


def new_keys(ids: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
    """
    Whether the key before each value of ids (rows, length) is new: bool (rows, length / 2). With `chunk`, the tokens
    of a chunk, only the key's own chunk and the chunk before it count.
    """
    found = []
    for row in ids[:, ::2].tolist():
        last: dict[int, int] = {}
        new = []
        for place, key in enumerate(row):
            seen = 0 if chunk is None else (2 * place // chunk - 1) * chunk  # the first token that is seen
            new.append(key not in last or 2 * last[key] < seen)
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
    sizes = {name: getattr(arguments, name) for name in ("width", "layers", "window")}
    ids = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    vocabulary, context = 2 * arguments.keys + 1, arguments.train_length
    config = make_config(architecture, vocabulary=vocabulary, context=context, lr=lr, **sizes, **ids)
    model = without(part, make_model(config)).to(arguments.device).train()
    optimizer = make_optimizer(model, lr, weight_decay=0.0)
    schedule = make_schedule(optimizer, arguments.steps)
    generator = torch.Generator().manual_seed(2 * seed)  # the test's is odd
    bar = trange(arguments.steps, desc=" without ".join(filter(None, (architecture, part))), unit="step", leave=False)
    for step in bar:
        grown = min(step / (GROWTH * arguments.steps), 1.0)
        length = int(SHORTEST * (arguments.train_length / SHORTEST) ** grown) // 2 * 2
        keys = min(max(length // TOKENS_PER_KEY, FEWEST), arguments.keys)
        rows = make_rows(arguments.tokens // length, length, keys, arguments.keys, generator).to(arguments.device)
        with torch.autocast(rows.device.type, torch.bfloat16):
            loss = losses_of(model, rows).mean()
        take_step(loss, model, optimizer, schedule)
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


def least(settings: dict[str, Any], chunk: int | None = None) -> list[float]:
    """The least possible bits a value for each range of the test's rows; from two chunks of tokens if one is given."""
    bits = math.log2(settings["keys"])
    return [part.double().mean().item() * bits for part in parts_of(new_keys(test_rows(settings), chunk))]


@torch.no_grad()
def measure(arguments: argparse.Namespace, architecture: str, part: str, seed: int) -> dict[str, Any]:
    with torch.enable_grad():
        model = train(arguments, architecture, part, seed)
    ids = test_rows(settings(arguments))
    batches = ids.split(max(CALL // arguments.length, 1))
    parts = parts_of(torch.cat([losses_of(model, batch.to(model.device)).cpu() for batch in batches]) / math.log(2))
    errors = [two_errors(part.mean(1).tolist()) for part in parts]  # rows are independent
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


def limits_of(settings: dict[str, Any]) -> dict[str, list[float]]:
    """The least possible bits a value for each range, from all tokens and from two chunks, by the names of both."""
    two = f"least possible from two chunks of {settings['window']}"
    return {"least possible": least(settings), two: least(settings, settings["window"])}


def draw(record: dict[str, Any]) -> dict[str, Any]:
    found = record["settings"]
    ends = [end for _, end in ranges(found["length"])]
    figure, axes = new_figure(height=4.2)
    for (architecture, part), spreads in lines_of(record).items():
        style = {**line_of(architecture), "label": name_of(architecture, part)}
        axes.plot(ends, [spread.mean for spread in spreads], **style, linestyle="--" if part else "-")
        below, above = [spread.least for spread in spreads], [spread.greatest for spread in spreads]
        axes.fill_between(ends, below, above, color=style["color"], alpha=0.15, linewidth=0)
    for (label, limit), line in zip(limits_of(found).items(), (":", "-."), strict=True):
        axes.plot(ends, limit, color="#777777", linestyle=line, linewidth=1.0, label=label)
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
    for label, limit in limits_of(record["settings"]).items():
        rows.append([label, "–", *(f"{bits:.3f}" for bits in limit)])
    return ["model", "seeds", *columns], rows


def findings(record: dict[str, Any]) -> list[str]:
    found, lines = record["settings"], lines_of(record)
    places = ranges(found["length"])
    trained = next(place for place, (_, end) in enumerate(places) if end == found["train_length"])
    (start, end), last = places[trained], places[-1]
    everything, near = (limit[trained] for limit in limits_of(found).values())
    chunks = f"two chunks of {found['window']} tokens"
    said = [
        f"The least possible loss of values at {start:,} to {end:,} tokens is {everything:.3f} bits. It is {near:.3f} "
        f"bits for what sees {chunks}."
    ]
    measured = by(record["rows"], "architecture", "part")
    for cell, spreads in lines.items():
        text = f"{name_of(*cell)}: {spreads[trained].text()} bits at {start:,} to {end:,} tokens, the last that "
        text += f"training had, {spreads[-1].text()} at {last[0]:,} to {last[1]:,}"
        more = spreads[-1].mean - spreads[trained].mean
        error = max(row["error"][place] for row in measured[cell] for place in (trained, -1))
        verdict = "stays" if abs(more) <= max(error, SMALL) else "rises" if more > 0 else "falls"
        below = spreads[trained].greatest < near - error
        text += f": it {verdict}. " + (
            f"It is below what {chunks} allow, so the model uses tokens before them."
            if below
            else f"It is not below what {chunks} allow."
        )
        said.append(text)
    attended = max((place for place, (_, end) in enumerate(places) if end <= 2 * found["window"]), default=0)
    for architecture in ABLATED:
        spreads = lines.get((architecture, ""))
        if spreads is None or attended >= trained:
            continue
        falls = spreads[trained].mean < spreads[attended].mean - SMALL
        said.append(
            f"In figure 4 the loss of {NAMES[architecture]} falls with the context, beyond what its attention sees. "
            f"Here it goes from {spreads[attended].text()} bits at {places[attended][0]} to {places[attended][1]} "
            f"tokens to {spreads[trained].text()} at {start:,} to {end:,}: {'so here' if falls else 'not so here'}."
        )
    missing = [NAMES[name] for name in ARCHITECTURES if (name, "") not in lines]
    return said + ([f"Not measured yet: {', '.join(missing)}."] if missing else [])
