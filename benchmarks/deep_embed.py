"""
One token of RWKV-7a and 7b on a CPU, beside a Goose of the same size: with tables as they are in checkpoints, merged,
and mapped from a file.

Random weights, and ids that are drawn: the rows of a text that repeats its words would stay in the cache. The models
take turns, a few tokens each, on --threads threads; times are medians of a token's CPU time and wall-clock time.
"memory" is what the process holds in its own pages for a model (Linux: RssAnon), after `malloc_trim`. The lookups of a
mapped model are timed alone, too: when the rows come from the disk, because the system was asked to forget the pages
of the file, and again from the system's cache.

examples:
  python benchmarks/deep_embed.py --variants 7a
  python benchmarks/deep_embed.py --variants 7b --contexts 16 1024 4096
"""

import argparse
import contextlib
import ctypes
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import subquad
from subquad.decoding.step import EagerStep


# For measuring as in the operators' benchmarks.
sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels" / "benchmarks"))

from measuring import cpu_name, megabytes


PRESETS = {"7a": "rwkv7a-0.1b", "7b": "rwkv7b-0.1b"}
QUICK = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 128}


def private_megabytes() -> float:
    """Memory in pages of the process that belong to no file; 0 where the system does not tell."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/status") as lines:
        fields = dict(line.split(":") for line in lines)
        return int(fields["RssAnon"].split()[0]) / 1e3
    return 0.0


def forget_pages(directory: Path) -> None:
    """Asks the system to read the files of a directory from the disk again."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write(name: str, directory: Path, dtype: torch.dtype, quick: bool) -> None:
    """A model of a preset with random weights."""
    torch.manual_seed(0)
    config = subquad.preset_config(name)
    if quick:
        attends = {} if getattr(config, "dea_size", None) is None else {"dea_size": 16}
        config = type(config)(**QUICK, **attends)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    model.save_pretrained(directory)


def load(directory: Path, dtype: torch.dtype, own: bool = True):
    """The model of a directory; with `own`, in memory of its own, wherever transformers has put the weights."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    for parameter in model.parameters() if own else ():
        parameter.data = parameter.data.clone()
    return model


def mapped(directory: Path, dtype: torch.dtype):
    """As [`load`], with the tables in the files."""
    model = load(directory, dtype, own=False)
    model.map_tables(directory)
    tables = {id(module.weight) for module in model.modules() if getattr(module, "mapped", False)}
    for parameter in model.parameters():
        if id(parameter) not in tables:
            parameter.data = parameter.data.clone()
    return model


def measure(options: argparse.Namespace, folder: Path) -> None:
    dtype = getattr(torch, options.dtype)
    models, memory = {}, {}

    def add(name: str, make) -> None:
        before = private_megabytes()
        models[name] = make()
        memory[name] = private_megabytes() - before

    write("goose-0.1b", folder / "7", dtype, options.quick)
    add("Goose", lambda: load(folder / "7", dtype))
    for variant in options.variants:
        plain, merged = folder / variant, folder / f"{variant}-merged"
        write(PRESETS[variant], plain, dtype, options.quick)
        other, start = load(plain, dtype, own=False), time.process_time()
        other.merge_tables()
        print(f"{variant}: tables merged in {time.process_time() - start:.1f} s of CPU time")
        other.save_pretrained(merged)
        del other
        add(f"{variant}, tables as in checkpoints", lambda plain=plain: load(plain, dtype))
        add(f"{variant}, merged", lambda merged=merged: load(merged, dtype))
        forget_pages(merged)
        add(f"{variant}, merged, mapped", lambda merged=merged: mapped(merged, dtype))
        forget_pages(merged)

    vocabulary = min(model.config.vocab_size for model in models.values())
    draws = torch.Generator().manual_seed(1)
    for context in options.contexts:
        steps = {}
        for name, model in models.items():
            with torch.no_grad():
                cache = model(torch.randint(vocabulary, (1, context), generator=draws), use_cache=True).cache
            steps[name] = model.decoding_step(cache)
            if steps[name].kind == "cpu":
                steps[f"{name}, in torch"] = EagerStep(model, cache.clone(), 1)
        times = {name: [] for name in steps}
        for number, (name, step) in itertools.product(range(options.rounds + 1), steps.items()):
            for token in torch.randint(vocabulary, (options.tokens,), generator=draws):
                start = time.process_time(), time.perf_counter()
                step(token.view(1, 1))
                if number:  # the first round is not counted
                    times[name].append((time.process_time() - start[0], time.perf_counter() - start[1]))
        print(f"\ncontext of {context} tokens, {options.dtype}, {options.threads} threads, {cpu_name()}")
        print("| model | step | tokens/s, CPU time | wall | weights, MB | memory, MB | cache, MB |\n|" + " --- |" * 7)
        for name, step in steps.items():
            owner = name.removesuffix(", in torch")
            rates = [1 / statistics.median(each) for each in zip(*times[name], strict=True)]
            numbers = megabytes(models[owner]), memory[owner], step.cache.nbytes / 1e6
            print(f"| {name} | {step.kind} | {' | '.join(f'{x:.1f}' for x in (*rates, *numbers))} |", flush=True)

    models.clear()
    steps.clear()
    for variant in options.variants:
        directory = folder / f"{variant}-merged"
        model = mapped(directory, dtype)
        tables = [module for module in model.modules() if getattr(module, "mapped", False)]
        ids = torch.randperm(vocabulary, generator=draws)[: options.rounds * options.tokens].view(-1, 1, 1)
        for path in directory.glob("*.safetensors"):
            forget_mapped_pages(path)
        for state in ("read from the disk", "in the system's cache"):
            times = []
            for token in ids:
                start = time.perf_counter()
                for table in tables:
                    table(token)
                times.append((time.perf_counter() - start) * 1e3)
            print(f"{variant}, {len(tables)} rows of a token, {state}: {statistics.median(times):.2f} ms (wall)")


def forget_mapped_pages(path: Path) -> None:
    """As [`forget_pages`], of a file that this process has mapped: its pages are dropped here first."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/maps") as lines:
        for line in lines:
            if line.rstrip().endswith(str(path)):
                first, last = (int(each, 16) for each in line.split()[0].split("-"))
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 4)  # MADV_DONTNEED
    forget_pages(path.parent)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", nargs="+", choices=tuple(PRESETS), default=list(PRESETS))
    add("--contexts", nargs="+", type=int, default=[16, 1024])
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    add("--threads", type=int, default=1)
    add("--rounds", type=int, default=10, help="turns of every model (default: 10)")
    add("--tokens", type=int, default=20, help="tokens of a turn (default: 20)")
    add("--files", type=Path, help="an empty folder for the models' files, 4 to 11 GB (default: a temporary one)")
    add("--quick", action="store_true", help="tiny models, to see that it runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        measure(options, options.files or Path(temporary))


if __name__ == "__main__":
    main()
