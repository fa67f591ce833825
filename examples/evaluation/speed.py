"""
Speed and memory by length: tokens per second of reading, milliseconds per written token, the size of the state between
two tokens, and the peak memory of reading.

The papers have figures 6 and 7 of "Eagle and Finch" (section 9: memory and time by sequence length, compared with
FlashAttention), figure 8 of "Don't Pay Attention" (Avey: time to the first token) and figure 2 of "Avey-B" (throughput
by length, and the exponent of its decay). They measure layers, and models of up to a billion parameters, on an A100,
H200 or B200. Here the models have one width, a few million parameters and random weights, and read one text at a time
as `generate` does, without compilation. The transformer has torch's fused attention and the growing cache of
transformers.

    python -m examples.evaluation speed
    python -m examples.evaluation speed --device cuda --width 1024 --layers 24 --window 512 \\
        --lengths 1024 4096 16384 65536 131072

Reading is everything before the first written token: the whole text, with the logits of the last token only. Avey only
needs to process its last split and the splits that it retrieves, and keeps the embeddings of all others. Avey-B, an
encoder, only reads, and has an output for every token.

For each written token, Avey recomputes a whole split, so --tokens should be a multiple of a split, which is half of
the --window. State is the size of the cache after reading, including room for more tokens.

Every cell runs in a process of its own, so that the memory of earlier cells does not count. It reads the text once to
measure the additional peak memory, state included. Then it reads for --seconds, at least three times, and writes. The
cells take turns: all are measured with the first of the --seeds, then all with the next, so that other work on the
machine slows a cell in few of its turns. Times are medians over a turn, and then over the turns. The bars of the
figure are quartiles in the same way. Memory is the resident set of the process on a CPU (Linux only), and the memory
allocated by torch on a GPU, where events measure the time. A cell that takes longer than --limit after its model is
made is stopped. This is recorded, and so is running out of memory.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import multiprocessing
import signal
import statistics
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .figures import line_of, new_figure, short
from .models import NAMES, is_encoder, make_config, make_model
from .spread import by


# Time and memory are measured as in the benchmarks of the operators.
sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))

from measuring import extra_mebibytes, repeated_milliseconds, resident_mebibytes, size_of, timings


TITLE = "Speed and memory"
ARCHITECTURES = tuple(NAMES)
SEEDS = (0, 1, 2)
VOCABULARY = 1024
FITTED = 4  # number of longest lengths to fit an exponent to
# Measured value to its title and unit.
MEASURES = {
    "tokens_per_second": ("Reading", "tokens a second"),
    "milliseconds_per_token": ("Writing", "milliseconds a token"),
    "peak_mebibytes": ("Memory of reading", "peak (MiB)"),
    "state_kibibytes": ("State after reading", "size (KiB)"),
}
FLAT = 1.25  # the largest ratio that still counts as constant


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    lengths = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
    add("--lengths", type=int, nargs="+", default=lengths, help="tokens of the text; on a GPU up to 131072 and more")
    add("--width", type=int, default=256, help="width of the models; on a GPU 1024")
    add("--layers", type=int, default=6, help="layers of the models; on a GPU 24")
    add("--window", type=int, default=128, help="tokens of a chunk of Gecko, or of two splits of Avey; on a GPU 512")
    add("--tokens", type=int, default=64, help="tokens to write")
    add("--seconds", type=float, default=0.5, help="time of reading for a median, of at least 3 times")
    add("--limit", type=float, default=120.0, help="seconds after which a cell is stopped")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("width", "layers", "window", "tokens", "seconds", "limit", "device", "threads")
    dtype = "float32" if torch.device(arguments.device).type == "cpu" else "bfloat16"
    return {**{name: getattr(arguments, name) for name in names}, "dtype": dtype, "batch": 1}


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    each = itertools.product(arguments.seeds, arguments.architectures, arguments.lengths)
    return [{"architecture": architecture, "length": length, "seed": seed} for seed, architecture, length in each]


def peak_mebibytes(function: Callable[[], Any], device: torch.device) -> float | None:
    """The additional peak memory of a call; None if it cannot be measured."""
    if device.type == "cuda":
        return extra_mebibytes(function, "cuda")
    # Return free memory to the system (glibc): otherwise its reuse would not be measured.
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    # `ru_maxrss` would be inherited from the parent process.
    more = -resident_mebibytes(lambda: None) + resident_mebibytes(function)
    return None if math.isnan(more) else more


def state_kibibytes(cache: Any) -> float:
    """The size of the cache between two tokens, including room for more tokens."""
    states = [
        layer.states.values() if hasattr(layer, "states") else (layer.keys, layer.values)
        for layer in getattr(cache, "all_layers", cache.layers)
    ]
    return sum(size_of(*tensors) for tensors in states) / 1024


def middle(what: str, values: list[float]) -> dict[str, Any]:
    """The median of repeated measurements, and their quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
    return {what: median, f"{what}_quartiles": [low, high]}


@torch.no_grad()
def measure_here(
    architecture: str, length: int, seed: int, plan: dict[str, Any], ready: Callable[[], None]
) -> dict[str, Any]:
    """
    The numbers of a cell, in this process.

    Args:
        plan: the settings.
        ready: called when the model is made.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(plan["threads"])
    device = torch.device(plan["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = make_config(
        architecture,
        vocabulary=VOCABULARY,
        width=plan["width"],
        layers=plan["layers"],
        context=length,
        window=plan["window"],
    )
    config.dtype = getattr(torch, plan["dtype"])
    model = make_model(config).to(device).eval()
    encoder = is_encoder(config)
    ids = torch.randint(1, VOCABULARY, (1, length), device=device)
    ready()

    def read(tokens: int = length):
        if encoder:
            return model.base_model(input_ids=ids[:, :tokens])
        return model(input_ids=ids[:, :tokens], use_cache=True, logits_to_keep=1)

    read(min(length, plan["window"]))  # libraries finish loading
    if device.type == "cuda":
        read()  # kernels are compiled and tuned
    measured = {"parameters": model.num_parameters(), "peak_mebibytes": peak_mebibytes(read, device)}
    times = repeated_milliseconds(read, device.type, plan["seconds"], most=50, warm_up=False)
    measured |= middle("tokens_per_second", [1e3 * length / milliseconds for milliseconds in times])
    if encoder:
        return measured
    cache = read().past_key_values
    measured["state_kibibytes"] = state_kibibytes(cache)
    step = model.decoding_step(cache) if hasattr(model, "decoding_step") else None

    def write():
        if step is None:
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        else:
            step(ids[:, :1])

    return measured | middle("milliseconds_per_token", timings(write, device.type, plan["tokens"]))


def serve(sender: Connection, *cell: Any) -> None:
    """The process of a cell: sends None when the model is made, and then the numbers."""
    try:
        sender.send(measure_here(*cell, ready=lambda: sender.send(None)))
    except RuntimeError as error:  # only on a GPU it is an OutOfMemoryError
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        sender.send({"note": "out of memory"})


def measure(arguments: argparse.Namespace, architecture: str, length: int, seed: int) -> dict[str, Any]:
    # A fork of a process that has already imported everything starts quickly. But GPUs cannot be used in a fork if the
    # imports have initialised them.
    forks = "forkserver" in multiprocessing.get_all_start_methods() and torch.device(arguments.device).type == "cpu"
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=serve, args=(sender, architecture, length, seed, settings(arguments)), daemon=True
    )
    process.start()
    sender.close()  # so that the pipe ends when the process does
    try:
        answer = receiver.recv()  # None when the model is made
        if answer is None and not receiver.poll(arguments.limit):
            return {"note": f"stopped after {arguments.limit:g} s"}
        return answer or receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGKILL:
            return {"note": "killed by the system, most likely for its memory"}
        raise RuntimeError(f"{architecture} at {length} tokens ended with exit code {process.exitcode}.") from None
    finally:
        process.kill()
        process.join()


def medians(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of medians over the turns for each architecture and length, in this order."""
    rows = []
    for (architecture, length), turns in by(record["rows"], "architecture", "length").items():
        row = {"architecture": architecture, "length": length}
        for name in set().union(*turns) - row.keys():
            values = [turn[name] for turn in turns if turn.get(name) is not None]
            if name.endswith("quartiles"):
                row[name] = [statistics.median(ends) for ends in zip(*values, strict=True)]
            elif values:
                row[name] = values[0] if name == "note" else statistics.median(values)
        rows.append(row)
    return sorted(rows, key=lambda row: (ARCHITECTURES.index(row["architecture"]), row["length"]))


def series(record: dict[str, Any], what: str) -> dict[str, dict[int, Any]]:
    """A measured value, or its quartiles, by architecture and length."""
    result: dict[str, dict[int, Any]] = {}
    for row in medians(record):
        if row.get(what) is not None:
            result.setdefault(row["architecture"], {})[row["length"]] = row[what]
    return result


def draw(record: dict[str, Any]) -> dict[str, Any]:
    figure, panels = new_figure(2, 2, height=6.0)
    lengths = sorted({row["length"] for row in record["rows"]})
    for (what, (title, unit)), axes in zip(MEASURES.items(), panels.flat, strict=True):
        quartiles = series(record, f"{what}_quartiles")
        for architecture, values in series(record, what).items():
            axes.plot(values.keys(), values.values(), **line_of(architecture))
            if ranges := quartiles.get(architecture):
                errors = [[values[x] - low for x, (low, _) in ranges.items()]]
                errors.append([high - values[x] for x, (_, high) in ranges.items()])
                style = {"fmt": "none", "ecolor": line_of(architecture)["color"], "elinewidth": 1.0, "capsize": 2.0}
                axes.errorbar([*ranges], [values[x] for x in ranges], yerr=errors, **style)
        axes.set(title=title, ylabel=unit, yscale="log", xlabel="length of the text (tokens)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [*map(short, lengths)], fontsize=8)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return {"speed": figure}


def written(number: float | None) -> str:
    """The number with at least three digits, or a dash."""
    return "–" if number is None else f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def with_quartiles(row: dict[str, Any], what: str) -> str:
    """A number of a row, and in brackets its quartiles if it has some."""
    quartiles = row.get(f"{what}_quartiles")
    return written(row.get(what)) + (f" ({'–'.join(map(written, quartiles))})" if quartiles else "")


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "parameters", "length", *(f"{title}: {unit}" for title, unit in MEASURES.values()), "note"]
    rows = []
    for row in medians(record):
        numbers = [with_quartiles(row, what) for what in MEASURES]
        parameters = f"{row['parameters']:,}" if row.get("parameters") else "–"
        rows.append([NAMES[row["architecture"]], parameters, f"{row['length']:,}", *numbers, row.get("note") or ""])
    return header, rows


def exponent(values: dict[int, float]) -> float:
    """The exponent of the length in the growth of the values, by least squares on their logarithms."""
    x, y = (torch.tensor([math.log(number) for number in numbers]) for numbers in (values.keys(), values.values()))
    return ((x - x.mean()) * (y - y.mean())).sum().item() / ((x - x.mean()) ** 2).sum().item()


def said_of(numbers: dict[str, str]) -> str:
    return ", ".join(f"{NAMES[name]} {number}" for name, number in numbers.items())


# Architecture, measured value, and the comparison with a transformer in its paper.
COMPARED = (
    ("finch", "tokens_per_second", "figure 7 of Eagle and Finch: faster beyond 4,000, 4.2 times at 16,000"),
    ("avey", "tokens_per_second", "figure 8 of its paper: faster, by more the longer the text"),
    ("finch", "peak_mebibytes", "figure 6 of Eagle and Finch: 0.6 times"),
)


def compare(record: dict[str, Any], architecture: str, what: str, paper: str) -> list[str]:
    """An architecture compared with the transformer, at the lengths that were measured for both."""
    mine, other = (series(record, what).get(name, {}) for name in (architecture, "transformer"))
    ratios = {length: mine[length] / other[length] for length in mine if length in other}
    if not ratios:
        return []
    more = [f"{length:,}" for length, ratio in ratios.items() if ratio > 1]
    title, unit = MEASURES[what]
    return [
        f"{NAMES[architecture]} beside the transformer, {title.lower()}, {unit}: more at "
        f"{', '.join(more) if more else 'no length'} of {', '.join(f'{length:,}' for length in ratios)}; at "
        f"{max(ratios):,} it is {written(ratios[max(ratios)])} times as much ({paper})."
    ]


def growth(record: dict[str, Any], what: str) -> list[str]:
    """The architectures whose values depend on the length, and by how much."""
    constant, changed = {}, {}
    for name, values in series(record, what).items():
        shortest, longest = min(values), max(values)
        if not (values[longest] and values[shortest]):  # memory that is too small to be seen
            continue
        ratio = values[longest] / values[shortest]
        if shortest == longest:
            continue
        if max(ratio, 1 / ratio) <= FLAT:
            constant[name] = written(values[longest])
        else:
            changed[name] = f"{written(values[longest])} at {longest:,}, {written(ratio)} times that at {shortest:,}"
    parts = [f"about the same at all lengths for {said_of(constant)}"] * bool(constant)
    parts += [f"depends on the length for {said_of(changed)}"] * bool(changed)
    title, unit = MEASURES[what]
    return [f"{title}, {unit}: {'; '.join(parts)}."] * bool(parts)


def findings(record: dict[str, Any]) -> list[str]:
    said = []
    speeds = {name: list(values.items())[-FITTED:] for name, values in series(record, "tokens_per_second").items()}
    decays = {name: f"{-exponent(dict(values)):.2f}" for name, values in speeds.items() if len(values) > 1}
    if decays:
        fitted = max(map(len, speeds.values()))
        said.append(
            "The exponent alpha of the throughput's decay, N^-alpha (0 where time is linear in the length, 1 where "
            f"it is quadratic), over the {fitted} longest lengths read: {said_of(decays)}. Figure 2 of Avey-B has "
            "0.44 for Avey-B, 0.77 and 0.81 for encoders with attention."
        )
    for comparison in COMPARED:
        said += compare(record, *comparison)
    for what in list(MEASURES)[1:]:
        said += growth(record, what)
    ended = [row for row in medians(record) if "note" in row]
    if ended:
        notes = [f"{NAMES[row['architecture']]} at {row['length']:,}: {row['note']}" for row in ended]
        said.append(f"Not measured to the end: {'; '.join(notes)}.")
    return said
