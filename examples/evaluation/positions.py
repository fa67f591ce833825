"""
Loss by position: in single ABC tunes, and in a text of tunes that is many times as long as the training rows.

Tunes: figure 8 of "Eagle and Finch" (section 10.1) compares two generations of RWKV, 24 layers of 512, on 2,162
held-out tunes. Every tune is read alone from its header on, and the loss of each position is averaged over the tunes.
Here the models are the embedded ones, 4 layers of 128, and the tunes are the held-out ones of
`examples/train_abc.py`, about 200.

Long text: figure 4 of "Gecko" shows the perplexity of books by context length, 4K to 4M tokens (a), and their loss by
position (b). Here the held-out tunes are joined to a ring. Every byte is predicted in windows in which its context is
at least half of the context length and less than the whole. So a point of a line is the loss at these positions, as in
(b), and all points are for the same bytes, as in (a): the lines only show the effect of the context. The models were
trained on rows of 1,024 bytes; the longest window is 32 times as long.

How to read it: if a model fails beyond the lengths of its training, its line rises there, like the line of the
transformer with its rotary positions. If a model remembers, its line falls. A tune contains little information about
the next one, so there is not much to remember beyond the tune.

Gecko begins a new document at every id 0, which separates two tunes, and does not see earlier tunes. So it naturally
reads a long text as well as a short one. So it is also measured with `document_boundaries=False`, which it was
not trained for: then the loss is higher, and the question of figure 4 is whether it stays the same.

Avey reads a window in one call, like the code of its authors. The splits that one retrieves depend on all its tokens,
so earlier bytes of a split have a little information about later ones.

Bands and bars are two standard errors: over the tunes, each read alone, and over the parts of the long text. The bands
of the smoothed lines are upper bounds.

All models are measured in float32. The transformer is not part of the package; these commands make and measure it:

    python examples/train_abc.py transformer --output transformer-abc
    python -m examples.evaluation positions --transformer transformer-abc
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from abc_corpus import Corpus, load_corpus
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

import subquad

from .figures import line_of, new_figure, short
from .models import CAUSAL, NAMES
from .spread import two_errors


TITLE = "Loss by position"
ARCHITECTURES = CAUSAL
SEPARATING = ("gecko",)  # architectures with the field `document_boundaries`
BOUNDARY = 0  # the id between two tunes
TRAINED = 1024  # bytes of a row that the models were trained on
BIN = 4  # positions that are averaged
SMOOTHING = 8.0  # standard deviation, in positions, of the smoothed line
FEWEST = 20  # minimum number of tunes that the line is an average of
PARTS = 16  # parts of the long text, whose variation gives the error of a difference
CALL = 32768  # tokens that are read in one call
SMALL = 0.01  # a difference in bits per byte that is ignored


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--transformer",
        type=Path,
        metavar="DIR",
        help="directory of a transformer made by train_abc.py (default: do not measure one)",
    )
    contexts = [256, 1024, 2048, 4096, 8192, 16384, 32768]
    add(
        "--contexts",
        type=int,
        nargs="+",
        default=contexts,
        help="even context lengths; the held-out tunes have 45 kB",
    )


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"bin": BIN, "music21": importlib.metadata.version("music21")}


def directory_of(architecture: str, arguments: argparse.Namespace) -> Path | None:
    given = {"transformer": arguments.transformer}  # architectures without an embedded model
    return given[architecture] if architecture in given else subquad.embedded_model(f"{architecture}-abc")


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    result = []
    for architecture in arguments.architectures:
        directory = directory_of(architecture, arguments)
        if directory is None:
            continue  # the findings mention it
        weights = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()[:8]
        model = {"architecture": architecture, "weights": weights}
        own = True if architecture in SEPARATING else None
        result.append({**model, "text": "tunes", "context": None, "document_boundaries": own})
        for boundaries in (True, False) if own else (None,):
            long = {**model, "text": "long", "document_boundaries": boundaries}
            result += [{**long, "context": context} for context in arguments.contexts]
    return result


corpus = cache(load_corpus)


def long_text(held_out: Corpus, seed: int) -> torch.Tensor:
    """The ids of all held-out tunes in random order, each with the boundary that ends it."""
    tunes = random.Random(seed).sample(held_out.validation, len(held_out.validation))
    return torch.tensor([token for tune in tunes for token in [*tune.encode("ascii"), BOUNDARY]])


def windows(text: torch.Tensor, context: int) -> list[torch.Tensor]:
    """
    Pieces of the text, taken as a ring, with `context` tokens each; the last one is shorter. Without their first
    `context // 2` tokens, the pieces together are the text.

    Raises:
        ValueError: if `context` is odd, less than 2, or longer than the text.
    """
    if context % 2 or not 2 <= context <= len(text):
        raise ValueError(f"`--contexts` must be even, from 2 to the {len(text)} bytes of the text, got {context}.")
    half = context // 2
    ring = torch.cat((text[-half:], text))
    return [ring[start : start + context] for start in range(0, len(text), half)]


def bits_of(model: PreTrainedModel, ids: torch.Tensor, first: int) -> torch.Tensor:
    """Loss in bits of the tokens of ids (rows, length) from `first` on, given the earlier: (rows, length - first)."""
    ids = ids.to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, first - 1 : -1]
    losses = F.cross_entropy(logits.float().transpose(1, 2), ids[:, first:], reduction="none")
    return losses.cpu() / math.log(2)


def in_tunes(model: PreTrainedModel, tunes: list[str]) -> dict[str, Any]:
    """
    Bits per byte of the tunes, each read alone with the boundary at its end; the first byte, always an X, is not
    predicted. Also separately for headers and music and for every bin of positions, with the number of bytes in each
    bin and twice the standard error of each bin, of which every tune has one sample.
    """
    sums, counts = torch.zeros(2, max(map(len, tunes)) // BIN + 1)
    samples: list[list[float]] = [[] for _ in sums]
    totals = {"header": [0.0, 0], "music": [0.0, 0]}
    for tune in tqdm(sorted(tunes, key=len), leave=False, unit="tune"):
        ids = torch.tensor([[*tune.encode("ascii"), BOUNDARY]])
        bits = bits_of(model, ids, 1)[0]
        bins = torch.arange(1, ids.shape[1]) // BIN
        sums.index_add_(0, bins, bits)
        counts.index_add_(0, bins, torch.ones_like(bits))
        for place in bins.unique().tolist():
            samples[place].append(bits[bins == place].mean().item())
        header = tune.index("\n", tune.index("\nK:") + 1)  # the last byte of the line with the key
        for name, part in (("header", bits[:header]), ("music", bits[header:])):
            totals[name][0] += part.sum().item()
            totals[name][1] += len(part)
    return {
        "bits": sums.sum().item() / counts.sum().item(),
        **{name: total / count for name, (total, count) in totals.items()},
        "header_bytes": totals["header"][1] / len(tunes) + 1,
        "by_position": (sums / counts.clamp(min=1)).tolist(),
        "counts": [int(count) for count in counts],
        "errors": [two_errors(values) for values in samples],
    }


def in_context(model: PreTrainedModel, text: torch.Tensor, context: int) -> dict[str, Any]:
    """Bits per byte of the text and of its parts. Each byte has a context of `context // 2` to `context - 1` bytes."""
    *full, last = windows(text, context)
    calls = [*torch.stack(full).split(max(CALL // context, 1)), last[None]] if full else [last[None]]
    bits = torch.cat([bits_of(model, ids, context // 2).flatten() for ids in tqdm(calls, leave=False, unit="call")])
    return {"bits": bits.mean().item(), "parts": [part.mean().item() for part in bits.tensor_split(PARTS)]}


@torch.inference_mode()
def measure(
    arguments: argparse.Namespace,
    architecture: str,
    text: str,
    context: int | None,
    document_boundaries: bool | None,
    **cell: Any,
) -> dict[str, Any]:
    own = {} if document_boundaries is None else {"document_boundaries": document_boundaries}
    directory = directory_of(architecture, arguments)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **own).to(arguments.device).eval()
    if text == "tunes":
        return in_tunes(model, corpus().validation)
    return in_context(model, long_text(corpus(), arguments.seed), context)


def latest(record: dict[str, Any]) -> dict[tuple, dict[str, Any]]:
    """The rows by architecture, boundaries and context (None for the tunes); the last row if weights have changed."""
    return {(row["architecture"], row["document_boundaries"], row["context"]): row for row in record["rows"]}


def lines_of(record: dict[str, Any]) -> dict[tuple, list[dict[str, Any]]]:
    """The rows of the long text by architecture and boundaries, from the shortest context to the longest."""
    lines: dict[tuple, list[dict[str, Any]]] = {}
    for (architecture, boundaries, context), row in latest(record).items():
        if context is not None:
            lines.setdefault((architecture, boundaries), []).append(row)
    return {key: sorted(rows, key=lambda row: row["context"]) for key, rows in sorted(lines.items(), key=in_order)}


def in_order(item: tuple) -> tuple:
    architecture, boundaries = item[0][:2]
    return CAUSAL.index(architecture), boundaries is False


def tunes_of(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = sorted(latest(record).items(), key=in_order)
    return {architecture: row for (architecture, _, context), row in rows if context is None}


def name_of(architecture: str, boundaries: bool | None) -> str:
    return NAMES[architecture] + (" (documents joined)" if boundaries is False else "")


def change(row: dict[str, Any], base: dict[str, Any]) -> tuple[float, float]:
    """The difference in bits per byte to another row, and twice its standard error."""
    differences = [mine - other for mine, other in zip(row["parts"], base["parts"], strict=True)]
    return row["bits"] - base["bits"], two_errors(differences)


def base_of(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((row for row in rows if row["context"] == TRAINED), None)


def smoothed(row: dict[str, Any], field: str = "by_position") -> tuple[list[float], list[float]]:
    """The positions that enough tunes have, and a Gaussian average of the bins around each."""
    bits, counts = torch.tensor(row[field]), torch.tensor(row["counts"])
    middles = torch.arange(len(bits)) * BIN + (BIN - 1) / 2
    weights = torch.exp(-0.5 * ((middles[:, None] - middles) / SMOOTHING) ** 2) * counts
    kept = counts >= FEWEST * BIN
    return middles[kept].tolist(), (weights @ bits / weights.sum(1))[kept].tolist()


def draw(record: dict[str, Any]) -> dict[str, Any]:
    figures = {}
    tunes, lines = tunes_of(record), lines_of(record)
    if tunes:
        figure, axes = new_figure()
        for architecture, row in tunes.items():
            line = {**line_of(architecture), "marker": ""}
            places, bits = smoothed(row)
            axes.plot(places, bits, **line)
            bits, errors = torch.tensor(bits), torch.tensor(smoothed(row, "errors")[1])
            style = {"color": line["color"], "alpha": 0.12, "linewidth": 0}
            axes.fill_between(places, bits - errors, bits + errors, **style)
        header = next(iter(tunes.values()))["header_bytes"]
        axes.axvspan(0, header, color="#eeeeee", zorder=0)
        axes.text(1, 0.02, "mean header", transform=axes.get_xaxis_transform(), fontsize=7)
        axes.set(
            title="Held-out tunes, each by itself", xlabel="position in the tune (bytes)", ylabel="loss (bits a byte)"
        )
        axes.set_xlim(left=0)
        figure.legend(loc="outside upper center", ncols=3)
        figures["positions_tunes"] = figure
    if lines:
        figure, (left, right) = new_figure(1, 2, height=3.8)
        ticks = sorted({row["context"] for rows in lines.values() for row in rows})
        for (architecture, boundaries), rows in lines.items():
            style = {**line_of(architecture), "label": name_of(architecture, boundaries)}
            style["linestyle"] = "--" if boundaries is False else "-"
            contexts = [row["context"] for row in rows]
            left.errorbar(contexts, [row["bits"] for row in rows], [two_errors(row["parts"]) for row in rows], **style)
            if base := base_of(rows):
                more, errors = zip(*(change(row, base) for row in rows), strict=True)
                right.errorbar(contexts, more, errors, **style)
        right.set_yscale("symlog", linthresh=SMALL)
        left.set(title="A long text of held-out tunes", ylabel="loss (bits a byte)")
        right.set(title=f"Less the loss at {TRAINED:,}", ylabel="difference (bits a byte)")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [*map(short, ticks)])
            axes.set_xlabel("length of the context (bytes)")
            axes.axvline(TRAINED, color="#999999", linewidth=0.8, linestyle=":")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
        figures["positions_context"] = figure
    return figures


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "text", "context (bytes)", "bits a byte", f"less that at {TRAINED:,}", "two standard errors"]
    rows = []
    for architecture, row in tunes_of(record).items():
        parts = ((f"tunes, {part}", row[part]) for part in ("header", "music"))
        rows += [[NAMES[architecture], what, "", f"{bits:.3f}", "", ""] for what, bits in parts]
    for (architecture, boundaries), line in lines_of(record).items():
        for row in line:
            name, base = name_of(architecture, boundaries), base_of(line)
            more = [f"{number:+.4f}" for number in change(row, base)] if base else ["", ""]
            more[1] = more[1].removeprefix("+")
            rows.append([name, "long", f"{row['context']:,}", f"{row['bits']:.3f}", *more])
    return header, rows


def findings(record: dict[str, Any]) -> list[str]:
    said = []
    tunes, lines = tunes_of(record), lines_of(record)
    if tunes:
        ranked = sorted(tunes, key=lambda name: tunes[name]["music"])
        losses = [f"{NAMES[name]} {tunes[name]['music']:.3f} ({tunes[name]['header']:.3f})" for name in ranked]
        said.append(f"Bits a byte of the music of single held-out tunes, and of their headers: {', '.join(losses)}.")
    if {"eagle", "finch"} <= tunes.keys():
        more = {part: 100 * (tunes["finch"][part] / tunes["eagle"][part] - 1) for part in ("bits", "header", "music")}
        alike = "as" if more["music"] < min(more["header"], 0) else "not as"
        said.append(
            "In figure 8 a generation of RWKV has 2% less loss than the one before it, mainly in the music. From "
            f"Eagle to Finch it changes by {more['bits']:+.1f}% here, by {more['header']:+.1f}% in the headers and by "
            f"{more['music']:+.1f}% in the music, {alike} there."
        )
    kept: dict[str, list[str]] = {"falls": [], "stays": [], "rises": []}
    for (architecture, boundaries), rows in lines.items():
        base, last = base_of(rows), rows[-1]
        if base is None or last is base:
            continue
        more, error = change(last, base)
        verdict = "stays" if abs(more) <= max(error, SMALL) else "rises" if more > 0 else "falls"
        name = name_of(architecture, boundaries)
        kept[verdict].append(name)
        text = (
            f"{name}: {base['bits']:.3f} bits a byte in contexts of {TRAINED:,} bytes, {last['bits']:.3f} in those of "
        )
        said.append(f"{text}{last['context']:,} ({more:+.4f} ± {error:.4f}).")
    if any(kept.values()):
        parts = [f"{verdict} for {', '.join(names)}" for verdict, names in kept.items() if names]
        said.append(
            "In figure 4 Gecko's loss falls with the context, far beyond what it attends to. Here, beyond the rows of "
            f"the training, the loss {'; it '.join(parts)}; it stays where it changes by no more than {SMALL} bits a "
            "byte or two standard errors."
        )
    if "transformer" not in {row["architecture"] for row in record["rows"]}:
        said.append(
            "The transformer was not measured: `python examples/train_abc.py transformer --output DIR` makes it, "
            "`--transformer DIR` measures it."
        )
    return said
