"""The shared part of all benchmarks: timing, memory, the rows of a run, and the report at its end."""

import argparse
import contextlib
import csv
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import shlex
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm


FIELDS = (
    *("part", "what", "implementation", "batch", "heads", "size", "length", "dtype"),
    *("milliseconds", "MiB", "tokens_per_second", "floor_milliseconds", "teraflops", "gigabytes_per_second"),
    *("note", "versions", "date", "command"),
)
TEXTS = ("part", "what", "implementation", "dtype", "note", "versions", "date", "command")
# Two rows that agree in these fields can be compared.
SHAPE = ("part", "what", "batch", "heads", "size", "length", "dtype")
OURS, PLAIN, COMPILED, FLA, GRAPH = "subquad", "plain", "plain, compiled", "fla", ", graph"
# Seconds that one measurement may take on a GPU: a peer that tunes its kernels may take minutes. With `--brief`, what
# it needs is compiled before.
LONGEST, LONGEST_BRIEF = 120, 40
# The exit status after an error that leaves nothing of the GPU to this process, and the end of its row's note.
BROKEN, LAST_ROW = 70, "(the GPU's context is broken)"

ABOUT_NUMBERS = """
Times are medians, on a GPU between device events. Inputs alternate, so that they are never in the cache. Everything
runs in bfloat16 on a GPU and in float32 on a CPU. A floor is the larger of two times: moving inputs and outputs once
(for a model: its weights), and computing the unavoidable matrix products, at the rates of a large copy and a large
product in the same run. TFLOP/s and GB/s count these only. MiB are the additional peak memory of the call; for models,
all memory, on a CPU the process's. "graph" replays a CUDA graph, without the time of Python between kernels.
Ours is measured before anything that it is compared with. With --brief, autotuners compare configurations for 20 ms
each in place of 100. --out DIR keeps the rows of NAME in NAME.csv (after every row), NAME.json, NAME.md and, if
matplotlib is installed, NAME.png.
"""


# Time and memory of a call.


def timings(function: Callable[[], Any], device: str, calls: int) -> list[float]:
    """Milliseconds of each of `calls` calls; on a GPU between events, so that the calls queue up there."""
    if device == "cpu":
        times = [time.perf_counter()]
        for _ in range(calls):
            function()
            times.append(time.perf_counter())
        return [(stop - start) * 1e3 for start, stop in itertools.pairwise(times)]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    torch.cuda.synchronize()
    for start, stop in events:
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def repeated_milliseconds(
    function: Callable[[], Any],
    device: str = "cpu",
    seconds: float = 0.5,
    least: int = 3,
    most: int = 200,
    warm_up: bool = True,
) -> list[float]:
    """The times of as many calls as fit into `seconds`, from `least` to `most`. The first two do not count."""
    if not warm_up:
        times = timings(function, device, 1)
        calls = min(max(int(seconds * 1e3 / times[0]), least), most) - 1
        return times + timings(function, device, calls) if calls > 0 else times
    function()
    estimate = timings(function, device, 1)[0]
    return timings(function, device, min(max(int(seconds * 1e3 / estimate), least), most))


def median_milliseconds(*arguments: Any, **named: Any) -> float:
    """The median of [`repeated_milliseconds`], which has the same arguments."""
    return statistics.median(repeated_milliseconds(*arguments, **named))


def wall_milliseconds(function: Callable[[], Any], device: str) -> float:
    """One call as its user sees it, compilation included."""
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def python_of(function: Callable[[], Any], device: str) -> str:
    """The time that Python takes for a call on a GPU, which works meanwhile or later."""

    def microseconds(function):
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                function()
            times.append(time.perf_counter() - start)
        return min(times) / 5 * 1e6

    one = torch.ones(1, device=device)
    call, add = microseconds(function), microseconds(lambda: torch.add(one, 1))
    return f"{call:.1f} us of Python, {call / add:.1f} times torch.add"


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """A CUDA graph of the function."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def extra_mebibytes(function: Callable[[], Any], device: str) -> float | None:
    """The additional peak memory of a call; None on a CPU, where it is not measured."""
    if device == "cpu":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def resident_mebibytes(function: Callable[[], Any]) -> float:
    """The most memory that this process holds while a function runs; NaN on systems other than Linux."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        function()
        return float("nan")
    function()
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 1024


def size_of(*tensors: torch.Tensor) -> int:
    """Bytes of the tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)


def megabytes(model: torch.nn.Module) -> float:
    """Size of the parameters and buffers; tied ones count once."""
    return size_of(*{x.data_ptr(): x for x in (*model.parameters(), *model.buffers())}.values()) / 1e6


def sets_beyond_cache(size: int, device: str) -> int:
    """Number of inputs of `size` bytes to alternate between, so that none is still in the cache."""
    if device == "cpu":
        return 2
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26)
    return min(max(1, math.ceil(4 * cache / size)), 64)


def relative_error(x: torch.Tensor, expected: torch.Tensor) -> float:
    return ((x.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def poisoned(function: Callable[[], Any]) -> Any:
    """Calls a function while every new tensor is full of NaN, so that values which it does not write are noticed."""
    fills, torch.utils.deterministic.fill_uninitialized_memory = True, True
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return function()
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = fills


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises a TimeoutError if the block still runs after `seconds`."""

    def stop(number, frame):
        raise TimeoutError("the time is up")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def tuning(options: argparse.Namespace) -> Iterator[None]:
    """
    How Triton's autotuners compare their configurations: with `--brief` for a fifth of the usual time each; with
    `--compile-only` not at all, so that each configuration of the share is compiled and called once, and no choice is
    kept for other processes.
    """
    if not (options.brief or options.share) or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def once(call, quantiles=(), **how):
        call()
        return [1.0] * len(quantiles)

    def in_share(*arguments):
        found, (n, count) = prune(*arguments), options.share
        return found[n - 1 :: count] or found[:1]

    def not_kept(tuner, key, configs, compare):
        compare()
        return False

    prune = Autotuner.prune_configs
    changed: dict[str, Any] = {"do_bench": staticmethod(functools.partial(do_bench, warmup=5, rep=20))}
    if options.share:
        changed = {"do_bench": staticmethod(once), "prune_configs": in_share, "check_disk_cache": not_kept}
    with mock.patch.multiple(Autotuner, create=True, **changed):
        yield


# Floors.


def measure_ceilings(options: argparse.Namespace) -> str:
    """
    Sets `options.copied`, the bytes that a large copy reads and writes in a millisecond, and `options.multiplied`, the
    operations that a matrix product makes in one. Returns a line that says both.
    """
    device, large = options.device, options.device != "cpu" and not options.quick and not options.share
    size = 2**30 if large else 2**22 if options.quick else 2**26
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    width, dtype = (8192, torch.bfloat16) if large else (512, torch.float32)
    a, b = torch.randn(2, width, width, device=device).to(dtype)
    products = [lambda: a @ b]
    if device == "cpu":  # which has two libraries
        from subquad_kernels import linear

        products.append(torch.no_grad()(lambda: linear(a, b)))
    how = {"device": device, "seconds": options.seconds, "least": 5}
    options.copied = 2 * source.numel() / median_milliseconds(lambda: target.copy_(source), **how)
    options.multiplied = 2 * width**3 / min(median_milliseconds(product, **how) for product in products)
    return f"copies {options.copied / 1e9:.3g} TB/s, multiplies {options.multiplied / 1e9:.3g} TFLOP/s"


def floor(options: argparse.Namespace, operations: float, moved: float) -> float:
    """The milliseconds that `operations` and `moved` bytes take at least."""
    return max(operations / options.multiplied, moved / options.copied)


def with_rate(milliseconds: float, tokens: int, floor: float) -> dict[str, Any]:
    rate = tokens / milliseconds * 1e3
    return {"milliseconds": milliseconds, "tokens_per_second": rate, "floor_milliseconds": floor}


# The rows of a run.


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """`write` makes the file under another name: a reader finds the old file or the whole new one."""
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as directory:
        temporary = Path(directory) / path.name
        write(temporary)
        os.replace(temporary, path)


def versions(device: str) -> str:
    found = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    for name in ("triton", "transformers", "flash-linear-attention"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    found += [f"{torch.get_num_threads()} threads", cpu_name()] if device == "cpu" else [torch.cuda.get_device_name()]
    return ", ".join(found)


# Instructions of x86 and ARM that products are faster with, and what they are called in /proc/cpuinfo.
INSTRUCTIONS = {
    **{"AVX2": "avx2", "AVX-512": "avx512f", "AVX-VNNI": "avx_vnni", "VNNI": "avx512_vnni", "BF16": "avx512_bf16"},
    **{"FP16": "avx512_fp16", "AMX BF16": "amx_bf16", "AMX INT8": "amx_int8", "AMX FP16": "amx_fp16"},
    **{"ARM dot products": "asimddp", "ARM I8MM": "i8mm", "ARM BF16": "bf16", "ARM FP16": "asimdhp", "SVE": "sve"},
}


@functools.cache
def cpu_name() -> str:
    """The CPU, with its relevant instructions for products."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    name = fields.get("model name", platform.machine())
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model')})"
    return ": ".join(filter(None, (name, " ".join(known for known, flag in INSTRUCTIONS.items() if flag in flags))))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, with numbers as they were written."""

    def value(field, text):
        if text == "" or field in TEXTS:
            return text or None
        return int(text) if field in ("batch", "heads", "size", "length") else float(text)

    with open(path, newline="", encoding="utf-8") as file:
        return [{field: value(field, text) for field, text in row.items()} for row in csv.DictReader(file)]


def key_of(row: dict[str, Any]) -> tuple:
    return row["implementation"], *(row.get(field) for field in SHAPE)


def is_over(row: dict[str, Any]) -> bool:
    """Whether a row is not worth another try: what failed of ours is, unless it took the GPU with it."""
    note = row.get("note") or ""
    return row["implementation"] != OURS or not note.startswith(("failed", "not done")) or note.endswith(LAST_ROW)


class Results:
    """The rows of a run, which a file keeps, and the number of failed or unstarted ones."""

    def __init__(
        self,
        path: Path | None,
        device: str,
        seconds: float,
        versions: str,
        resumes: bool = False,
        longest: float = LONGEST,
    ):
        self.path, self.device, self.longest = path, device, longest
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        self.about = {"versions": versions, "date": f"{datetime.now():%Y-%m-%d}", "command": command}
        self.rows: list[dict[str, Any]] = []
        if resumes and path is not None and path.exists():
            self.rows = [row for row in read_rows(path) if is_over(row)]
        self.known = set(map(key_of, self.rows))
        self.failed = self.skipped = 0
        self.deadline = time.monotonic() + seconds
        # A log keeps every line that is refreshed.
        self.live = sys.stderr.isatty()
        interval = 0.1 if self.live else 10
        self.bar = tqdm(file=sys.stderr, mininterval=interval, bar_format="{n} rows [{elapsed}] {desc}")

    def forget(self, part: str) -> None:
        """Drops the rows of a part that every run repeats."""
        self.rows = [row for row in self.rows if row["part"] != part]
        self.known = set(map(key_of, self.rows))

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append({**row, **self.about})
        self.bar.update()
        if self.path is None:
            return

        def write(path):
            with open(path, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(self.rows)

        write_atomically(self.path, write)

    def measure(self, row: dict[str, Any], function: Callable[[], dict[str, Any]]) -> bool:
        """
        Adds the row with the fields that `function` returns, or with a note that says why it failed. After the
        deadline, or if the row is there, nothing is measured. Returns whether there are new fields.
        """
        if key_of(row) in self.known:
            return False
        if time.monotonic() > self.deadline:
            self.skipped += 1
            return False
        name = " ".join(str(row[field]) for field in FIELDS if row.get(field) not in (None, ""))
        self.bar.set_description_str(name, refresh=self.live)
        limit, broken = min(self.longest, 5 + self.deadline - time.monotonic()), False
        try:
            with contextlib.nullcontext() if self.device == "cpu" else within(limit):
                measured, done = function(), True
        except torch.OutOfMemoryError:
            measured, done = {"note": "out of memory"}, False
        except Exception as error:
            reason = (str(error).strip() or "no message").splitlines()[0]
            measured, done = {"note": f"failed: {type(error).__name__}: {reason}"}, False
            self.failed += row["implementation"] == OURS
        # Not in the handlers, where the traceback still holds the tensors.
        if self.device != "cpu":
            gc.collect()
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:
                broken = True
                measured = {"note": f"{measured.get('note') or f'failed: {error}'.splitlines()[0]} {LAST_ROW}"}
        self.add({**row, **measured})
        if broken:
            raise SystemExit(BROKEN)
        return done

    def table(self) -> str:
        """One line for each shape and quantity."""
        groups: dict[tuple, dict[str, dict]] = {}
        for row in self.rows:
            if row["part"] != "check":
                groups.setdefault(tuple(row.get(field) for field in SHAPE), {})[row["implementation"]] = row
        lines = [f"batch x length; after a number its floor [ ], or {OURS}'s number divided by it ( )"]
        for group in groups.values():
            first = next(iter(group.values()))
            shape = " x ".join(str(first[name]) for name in ("batch", "length") if first.get(name))
            start = f"{first['what']:<31} {shape:<9}"
            rates = any(row.get("tokens_per_second") for row in group.values())
            for unit, field in (("tokens/s", "tokens_per_second") if rates else ("ms", "milliseconds"), ("MiB",) * 2):
                found = {name: row for name, row in group.items() if row.get(field) is not None}
                if found:
                    cells = (cell(name, row, field, found.get(OURS)) for name, row in found.items())
                    lines.append(f"{start} {unit:<8} {', '.join(cells)}")
            lines += [f"{start} {name}: {row['note']}" for name, row in group.items() if row.get("note")]
        return "\n".join(lines)

    def exit(self, minutes: float) -> None:
        """Prints what was left out, and exits with status 1 if a measurement of ours failed."""
        if self.skipped:
            print(f"{self.skipped} measurements did not begin within {minutes:g} minutes")
        if self.failed:
            raise SystemExit(1)


def cell(name: str, row: dict[str, Any], field: str, ours: dict[str, Any] | None) -> str:
    text = f"{name} {row[field]:.4g}"
    if name != OURS:
        text += f" ({ours[field] / row[field]:.2f})" if row[field] and ours else ""
    elif field != "MiB" and row.get("floor_milliseconds"):
        reached = row["floor_milliseconds"] / row["milliseconds"]
        text += f" [{row[field] * reached if field == 'milliseconds' else row[field] / reached:.3g}]"
    if field == "milliseconds":
        for unit, rate in (("TFLOP/s", "teraflops"), ("GB/s", "gigabytes_per_second")):
            text += f" {row[rate]:.3g} {unit}" if row.get(rate) else ""
    return text


class Check:
    """Cases whose errors must stay below a tolerance; one row per case."""

    def __init__(self, results: Results):
        self.results, self.wrong, self.count = results, [], 0

    def judge(self, what: str, row: dict[str, Any], errors: dict[str, tuple[float, float | None]]) -> None:
        """`errors` has, by name, an error and how large it may be; None if it is only reported."""
        self.count += 1

        def share(name):  # of what is allowed; NaN counts as infinitely much
            error, allowed = errors[name]
            return math.inf if math.isnan(error) else error / allowed

        worst = max((name for name, (_, allowed) in errors.items() if allowed is not None), key=share)
        every = ", ".join(f"{name} {error:.1e}" for name, (error, _) in errors.items())
        note = f"largest error {errors[worst][0]:.1e} ({worst}) of {errors[worst][1]:.0e} allowed; {every}"
        self.results.add({"part": "check", "what": what, "implementation": OURS, **row, "note": note})
        if not share(worst) < 1:
            self.wrong.append(f"{what}, {row}: {note}")

    def finish(self, what: str) -> None:
        """Prints what was found, and exits with status 1 if a case is wrong."""
        self.results.bar.clear()
        print(f"check, {what}: {len(self.wrong)} of {self.count} cases wrong", *self.wrong, sep="\n  ")
        if self.wrong:
            raise SystemExit(1)


# Targets: (what, peer, shortest length, how many times as fast as the peer). Without a peer: the most milliseconds.
Targets = tuple[tuple[str, str | None, int, float], ...]


def judged_targets(rows: list[dict[str, Any]], targets: Targets) -> list[str]:
    """For every row of ours that has targets, the strictest one for each peer, and whether it is met."""
    rows = [row for row in rows if row.get("milliseconds")]
    found = {key_of(row): row for row in rows}
    lines = []
    for key, row in found.items():
        strictest: dict[str | None, float] = {}
        for what, peer, shortest, bound in targets:
            if key[0] == OURS and row["what"] == what and row["length"] >= shortest:
                strictest[peer] = max(bound, strictest.get(peer, 0))
        for peer, bound in strictest.items():
            start = f"{row['what']}, {row['batch']} x {row['length']}:"
            if peer is None:
                ratio, text = bound / row["milliseconds"], f"{row['milliseconds']:.4g} ms, at most {bound:g}"
            elif (other := found.get((peer, *key[1:]))) is None:
                lines.append(f"{start} no figure of {peer}")
                continue
            else:
                ratio = other["milliseconds"] / row["milliseconds"] / bound
                text = f"{ratio * bound:.2f} times as fast as {peer}, at least {bound:g}"
            lines.append(f"{start} {text}: {'met' if ratio >= 1 else 'missed'}")
    return ["targets", *lines] if lines else []


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Measurements at several lengths: a panel for each measurement and unit, over the length."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        print(f"no plot: {error}")
        return
    panels: dict[tuple[str, str], dict[tuple[str, int], dict[int, float]]] = {}
    for row in rows:
        for unit, field in (("ms", "milliseconds"), ("tokens/s", "tokens_per_second"), ("MiB", "MiB")):
            if row.get(field) and row.get("length"):
                lines = panels.setdefault((row["what"], unit), {})
                lines.setdefault((row["implementation"], row["batch"]), {})[row["length"]] = row[field]
    panels = {name: lines for name, lines in panels.items() if any(len(line) > 1 for line in lines.values())}
    if not panels:
        return
    names = list(dict.fromkeys(name for lines in panels.values() for name, _ in lines))
    batches = sorted({batch for lines in panels.values() for _, batch in lines})
    columns = min(3, len(panels))
    count = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(count, columns, figsize=(4.5 * columns + 2, 4 * count), squeeze=False)
    handles = {}
    for axis, ((what, unit), lines) in zip(axes.flat, panels.items(), strict=False):
        for (name, batch), values in lines.items():
            style = {"color": f"C{names.index(name)}", "linestyle": ("-", "--", ":")[batches.index(batch) % 3]}
            points = zip(*sorted(values.items()), strict=True)
            (handles[f"{name}, batch {batch}"],) = axis.plot(*points, marker="o", **style)
        axis.set(yscale="log", xlabel="tokens", ylabel=unit, title=what)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    figure.set_layout_engine("constrained")
    figure.legend(handles.values(), handles.keys(), loc="outside center right", fontsize="small")
    figure.suptitle(title, fontsize="small")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
    pyplot.close(figure)


# A script.


def make_parser(description: str, parts: tuple[str, ...], minutes: float) -> argparse.ArgumentParser:
    """A parser of the options that every benchmark has."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description + ABOUT_NUMBERS, formatter_class=form)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--parts", nargs="+", choices=parts, metavar="PART", help=f"of {', '.join(parts)} (default: all that apply)")
    add("--out", type=Path, metavar="DIR", help="folder for the record and the figure")
    add("--minutes", type=float, default=minutes, help="after so long no measurement begins (default: %(default)s)")
    add("--seconds", type=float, default=0.5, help="how long a median is taken over (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default=device, help="default: cuda if there is a GPU")
    add("--quick", action="store_true", help="tiny sizes, each measured once: shows that everything runs")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        dest="compiles",
        help="measure under torch.compile too (default: on a GPU)",
    )
    add("--ours", action="store_true", help="measure nothing that it is compared with")
    add("--brief", action="store_true", help="few sizes, and of the others only those with kernels of their own")
    add("--compile-only", metavar="N/M", dest="share", help="compile the N-th of M shares of what `--brief` measures")
    add("--resume", action="store_true", help="keep the rows that --out has, and measure what is missing")
    add("--plot", type=Path, metavar="JSON", help="do not measure: draw the figure of a record, next to it")
    return parser


def settle(options: argparse.Namespace) -> None:
    """Sets what follows from the device and from `--quick`, whatever is measured."""
    on_gpu = options.device == "cuda"
    options.sizes = "quick" if options.quick else options.device
    options.least = 1 if options.quick or options.share else 3
    options.share = tuple(map(int, options.share.split("/"))) if options.share else None
    options.brief = options.brief or options.share is not None
    options.seconds = 0 if options.quick or options.share else options.seconds
    # Whether ours is measured, and then whether the others are. Ours has no configurations to share.
    options.passes = ((True,) if options.share is None or options.share[0] == 1 else ()) + (
        (False,) * (not options.ours)
    )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
    options.backend = "triton" if on_gpu else "eager"
    options.check_backend = "triton" if on_gpu or interpreted else "eager"
    options.small_check = options.quick or (interpreted and not on_gpu)
    # Triton's interpreter cannot multiply bfloat16.
    options.check_dtypes = [torch.float32, torch.bfloat16] if on_gpu or not interpreted else [torch.float32]
    options.compiles = on_gpu if options.compiles is None else options.compiles
    options.dtype = torch.bfloat16 if on_gpu else torch.float32
    options.dtype_name = str(options.dtype).removeprefix("torch.")


def run_benchmark(
    name: str, options: argparse.Namespace, measure: Callable[[Results, argparse.Namespace], list[str]]
) -> None:
    """
    Runs a benchmark and reports it.

    Args:
        name: of the files that are written to `options.out`.
        options: as [`make_parser`] parses and [`settle`] settles them.
        measure: adds rows to the results, and returns lines to print before and behind the table.
    """
    if options.plot is not None:
        report = json.loads(options.plot.read_text())
        plot(report["rows"], options.plot.with_suffix(".png"), report["versions"])
        return
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    title = versions(options.device)
    path = None if options.out is None else options.out / f"{name}.csv"
    longest = math.inf if options.share else LONGEST_BRIEF if options.brief else LONGEST
    results = Results(path, options.device, options.minutes * 60, title, options.resume, longest)
    print(f"{name}\n{title}")
    with warnings.catch_warnings(), tuning(options):
        # An operator that falls back to plain torch must not pass for a measurement of the kernels.
        warnings.filterwarnings("error", message=".*runs in plain torch")
        # What is there already is not garbage, which memory is measured without.
        gc.collect()
        gc.freeze()
        try:
            lines = measure(results, options)
        finally:
            gc.unfreeze()
            results.bar.close()
    text = "\n".join([results.table(), *lines])
    print(text)
    if options.out is not None:
        report = {"versions": title, "rows": results.rows, "text": lines}
        write_atomically(options.out / f"{name}.json", lambda path: path.write_text(json.dumps(report, indent=1)))
        markdown = f"```\n{title}\n{text}\n```\n"
        write_atomically(options.out / f"{name}.md", lambda path: path.write_text(markdown, encoding="utf-8"))
        if not options.brief:
            plot(results.rows, options.out / f"{name}.png", title)
    results.exit(options.minutes)


@functools.cache
def load_fla(module: str, device: str) -> Any:
    """A module of flash-linear-attention, or None on a CPU and if it cannot be imported."""
    if device == "cpu":
        return None
    try:
        return importlib.import_module(module)
    except Exception as error:  # more than ImportError: its import asks Triton for a driver
        print(f"flash-linear-attention is left out: {type(error).__name__}: {error}")
        return None
