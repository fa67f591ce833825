"""
A Finch or a Goose on a CPU: subquad in every dtype and in 8 and 4 bits, compared with llama.cpp and the package rwkv.

All have the same random weights. In trained models most hidden units of the feed-forward networks are zero, and
subquad does not read their weights for one text, from its 33rd generated token on. With random weights half of the
units are zero. For each larger share of --zeros the keys are shifted, and there is another table. llama.cpp reads the
file written by `subquad convert --to gguf`, and makes the other types from it itself. Its source comes from PyPI and
is compiled once. If that fails, a line gives the reason, and the rest is measured.

parts (--parts):
  one     one more token of a text
  many    one more token of each of 8 and of 32 texts
  prompt  the first token after a prompt of 512 tokens

Everything runs on --threads threads. The implementations take turns, call by call or in groups of a few calls, so that
other load affects all of them equally. Times are medians of CPU time (all threads, without other processes) and of
wall-clock time. "error" is the norm of the difference from the first implementation's logits after a prompt, divided
by the norm of these.

examples:
  python benchmarks/cpu.py --out build/bench
  python benchmarks/cpu.py --preset finch-1.6b --calls 10
  python benchmarks/cpu.py --model goose --parts one --zeros 0.85
  python benchmarks/cpu.py --implementations "subquad int8" "llama.cpp Q8_0" --threads 2
"""

import argparse
import dataclasses
import functools
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


# For measuring as in the operators' benchmarks.
sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels" / "benchmarks"))

import llama_peer
from measuring import Results, cpu_name, make_parser, megabytes, relative_error, run_benchmark, settle
from models import MODELS, config_of, from_config
from peers import rwkv
from torch import Tensor
from transformers import AutoModelForCausalLM

import subquad
from subquad.decoding.step import make_step
from subquad.models import REGISTRY


PARTS = ("one", "many", "prompt")
# By name: the arguments of `from_pretrained` for our models, or the type of llama.cpp's file.
OURS = {
    "subquad float32": {"dtype": "float32"},
    "subquad bfloat16": {"dtype": "bfloat16"},
    "subquad float16": {"dtype": "float16"},
    "subquad int8": {"dtype": "float32", "quantization_config": subquad.Int8Config()},
    "subquad int4": {"dtype": "float32", "quantization_config": subquad.Int4Config()},
}
LLAMA = {f"llama.cpp {kind}": kind for kind in llama_peer.TYPES}
RWKV = "rwkv fp32"
NAMES = (*OURS, *LLAMA, RWKV)
# At a published size, the weights of these do not fit into memory together with the others.
LARGE = ("subquad float32", "llama.cpp F32", RWKV)
MANY = (8, 32)
# Tokens that are read before the measured ones. The logits of the last are compared.
BEFORE = 16
# Single tokens of one text that are read before the measured ones, more than a step needs to copy weights.
SETTLED = 64


@dataclasses.dataclass
class Runner:
    """
    Attributes:
        read: reads the next tokens (B, T) of the texts; returns the logits (B, V) after the last.
        forget: makes the next tokens begin new texts.
        megabytes: size of the weights.
        most_rows: maximum number of texts at a time.
    """

    read: Callable[[Tensor], Tensor]
    forget: Callable[[], None]
    megabytes: float
    most_rows: int = max(MANY)


def run_ours(path: Path, **how: Any) -> Runner:
    model, kept = AutoModelForCausalLM.from_pretrained(path, **how).eval(), {}

    def read(ids):
        if ids.shape[1] == 1 and kept:
            return kept["step"](ids).float()
        out = model(input_ids=ids, logits_to_keep=1, cache=kept["step"].cache if kept else None)
        kept["step"] = make_step(model, out.cache, alone=True)  # as in `generate`
        return out.logits[:, -1].float()

    return Runner(read, kept.clear, megabytes(model))


def run_llama(path: Path, library: Any) -> Runner:
    model = llama_peer.Llama(library, path, max(MANY))
    return Runner(model.read, model.forget, path.stat().st_size / 1e6)


def run_rwkv(path: Path) -> Runner | None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    package = rwkv(model)
    if package is None:
        return None
    kept: list[Any] = [None]

    def read(ids):
        logits, kept[0] = package.forward(ids[0].tolist(), kept[0])
        return logits[None]

    return Runner(read, lambda: kept.__setitem__(0, None), megabytes(model), most_rows=1)


def gguf_files(library: Any, path: Path, kinds: list[str]) -> dict[str, Path]:
    """Files of llama.cpp, by type, from a directory of ours: one by `subquad convert`, the others by llama.cpp."""
    first = "F32" if "F32" in kinds else "F16"
    files = {kind: path.with_name(f"{kind}.gguf") for kind in {first, *kinds}}
    if not files[first].exists():
        command = ["convert", str(path), str(files[first]), "--to", "gguf", "--gguf-type", first]
        subprocess.run([sys.executable, "-m", "subquad_cli", *command], check=True, stdout=subprocess.DEVNULL)
    for kind, file in files.items():
        if not file.exists():
            llama_peer.quantize(library, files[first], file, kind)
    return files


def make_runners(path: Path, options: argparse.Namespace) -> dict[str, Runner]:
    """The available implementations, by name. For each missing one, a line gives the reason."""
    made: dict[str, Runner | None] = {}
    for name in (name for name in OURS if name in options.implementations):
        made[name] = run_ours(path, **OURS[name])
    kinds = [LLAMA[name] for name in LLAMA if name in options.implementations]
    try:
        if kinds:
            library = llama_peer.load(cpu_name())
            print(library.peer_system().decode().strip())
            files = gguf_files(library, path, kinds)
            made |= {f"llama.cpp {kind}": run_llama(files[kind], library) for kind in kinds}
    except llama_peer.Unavailable as error:
        print(f"llama.cpp is left out: {error}")
    if RWKV in options.implementations:
        made[RWKV] = run_rwkv(path)
    return {name: runner for name, runner in made.items() if runner is not None}


def both_times(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of CPU time and of wall-clock time."""
    wall, spent = time.perf_counter(), time.process_time()
    call()
    return 1e3 * (time.process_time() - spent), 1e3 * (time.perf_counter() - wall)


@torch.no_grad()
def take_turns(
    runners: dict[str, Runner], batch: int, length: int, rounds: int, group: int, vocabulary: int
) -> dict[str, tuple[float, float]]:
    """
    Medians of CPU time and of wall-clock time, in milliseconds, by implementation, of a call that reads `length`
    tokens of each of `batch` texts, the first ones if there are many. Each of `rounds` turns has `group` calls.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (batch, length), generator=generator)
    before = torch.randint(1, vocabulary, (batch, BEFORE), generator=generator)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for n in range(-1, rounds):  # the first turn does not count
        for name, runner in runners.items():
            if n < 0 and length == 1:
                runner.forget()
                runner.read(before)
            for _ in range(SETTLED if n < 0 and batch == length == 1 else group):
                if length > 1:
                    runner.forget()
                times[name].append(both_times(functools.partial(runner.read, ids)))
    measured = {name: found[-rounds * group :] for name, found in times.items()}
    return {name: tuple(map(statistics.median, zip(*found, strict=True))) for name, found in measured.items()}


@torch.no_grad()
def errors_of(runners: dict[str, Runner], vocabulary: int) -> dict[str, float]:
    """Errors of the logits after a prompt, relative to the first implementation."""
    ids = torch.randint(1, vocabulary, (1, BEFORE), generator=torch.Generator().manual_seed(1))
    logits = {}
    for name, runner in runners.items():
        runner.forget()
        logits[name] = runner.read(ids).clone()
    expected = next(iter(logits.values())).double()
    return {name: relative_error(found[..., : expected.shape[-1]], expected) for name, found in logits.items()}


@torch.no_grad()
def shift_keys(model: Any, zeros: float) -> None:
    """Lowers the keys of the feed-forward networks, so that this share of their squares is zero."""
    fused = REGISTRY[model.config.model_type].fused
    ids = torch.randint(1, model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(2))
    for block in model.get_decoder().get_submodule(fused.blocks):
        key, seen = block.get_submodule(fused.layers["ffn_key"]), []
        # All inputs get the same mean, which the shift multiplies.
        block.get_submodule(fused.norms["ln2"]).bias.fill_(1)
        hook = key.register_forward_hook(lambda module, args, out, seen=seen: seen.extend((args[0], out)))
        model(ids)
        hook.remove()
        inputs, keys = seen
        limit = keys.flatten().sort().values[int(zeros * keys.numel())]
        key.weight -= limit / inputs.sum(-1).mean()


def measure(results: Results, options: argparse.Namespace) -> list[str]:
    config = config_of(MODELS[options.model], options)
    lines = []
    for zeros in options.zeros:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(options.files or folder, f"zeros-{zeros}", "model")
            if not path.exists():
                model = from_config(config, "cpu", torch.float32)
                if zeros > 0.5:
                    shift_keys(model, zeros)
                model.save_pretrained(path)
                del model
            gc.collect()
            lines += measure_runners(results, make_runners(path, options), config, zeros, options)
    return lines


def measure_runners(
    results: Results, runners: dict[str, Runner], config: Any, zeros: float, options: argparse.Namespace
) -> list[str]:
    errors = errors_of(runners, config.vocab_size)
    rows: dict[str, list[str]] = {}
    for name, error in errors.items():
        rows[name] = [name, f"{runners[name].megabytes:,.0f}", f"{error:.1e}"]
        row = {"part": "error", "what": "logits", "implementation": name, "batch": 1, "length": BEFORE}
        results.add(
            row
            | {"size": config.hidden_size, "MiB": runners[name].megabytes / 1.048576}
            | {"note": f"error {error:.1e} with {zeros:.0%} zeros"}
        )
    header = ["tokens for each second of CPU time (that passes)", "MB", "error"]
    # The number of texts and of tokens of each, the number of turns, and the calls of a turn.
    few = max(options.calls // 4, 1)
    jobs = {
        "one": [(1, 1, options.calls, 1 if options.quick else 4)],
        "many": [(rows, 1, few, 1 if options.quick else 2) for rows in MANY],
        "prompt": [(1, options.prompt, max(few // 2, 1), 1)],
    }
    for part in options.parts:
        for batch, length, rounds, group in jobs[part]:
            if time.monotonic() > results.deadline:
                results.skipped += 1
                continue
            fit = {name: runner for name, runner in runners.items() if batch <= runner.most_rows}
            what = f"prompt of {length}" if length > 1 else f"next token, {batch} text{'s' * (batch > 1)}"
            times = take_turns(fit, batch, length, rounds, group, config.vocab_size)
            header.append(what)
            for name, row in rows.items():
                if name not in times:
                    row.append("")
                    continue
                rates = [batch * length / milliseconds * 1e3 for milliseconds in times[name]]
                row.append(f"{rates[0]:.4g} ({rates[1]:.4g})")
                for clock, milliseconds, rate in zip(("CPU", "wall"), times[name], rates, strict=True):
                    results.add(
                        {
                            "part": part,
                            "what": f"{what}, {zeros:.0%} zeros, {clock}",
                            "implementation": name,
                            "batch": batch,
                        }
                        | {"length": length, "size": config.hidden_size, "milliseconds": milliseconds}
                        | {"tokens_per_second": rate}
                    )
    sizes = f"{config.num_hidden_layers} layers of {config.hidden_size}, {options.threads} threads"
    lines = [f"{options.model.title()} of {sizes}, {zeros:.0%} of hidden units zero, {cpu_name()}"]
    return lines + [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows.values())]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, PARTS, minutes=30)
    add = parser.add_argument
    add("--model", default="finch", choices=["finch", "goose"], help="default: finch")
    add("--preset", help="a published size, for example finch-1.6b (default: 12 layers of 768)")
    add("--implementations", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    add("--files", type=Path, metavar="DIR", help="a folder that keeps the models' files, for another run")
    add(
        "--zeros",
        type=float,
        nargs="+",
        default=[0.5, 0.85],
        metavar="SHARE",
        help="shares of hidden units (default: 0.5 0.85)",
    )
    add("--threads", type=int, default=1, help="default: 1")
    add("--calls", type=int, default=20, help="turns for one text; a quarter for many (default: 20)")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    settle(options)
    if not all(0.5 <= zeros < 1 for zeros in options.zeros):
        parser.error(f"--zeros: shares must be from 0.5 to below 1, got {options.zeros}")
    options.parts = options.parts or PARTS
    options.prompt = 32 if options.quick else 512
    options.calls = 1 if options.quick else options.calls
    default = [name for name in NAMES if not (options.preset and name in LARGE)]
    options.implementations = options.implementations or default
    if options.ours:
        options.implementations = [name for name in options.implementations if name in OURS]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    run_benchmark("cpu", options, measure)


if __name__ == "__main__":
    main()
