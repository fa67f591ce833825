"""What the benchmarks share: medians, rows that are measured and written, and the table at the end."""

import argparse
import csv
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm


FIELDS = (
    *("part", "what", "implementation", "batch", "heads", "size", "length", "dtype"),
    *("milliseconds", "MiB", "tokens_per_second", "floor_milliseconds", "teraflops", "gigabytes_per_second"),
    *("note", "versions"),
)
# What makes two rows comparable.
SHAPE = ("part", "what", "batch", "heads", "size", "length", "dtype")
OURS = "subquad"


def timings(function: Callable[[], Any], device: str, calls: int) -> list[float]:
    """Milliseconds of each of so many calls; on a GPU between events, so that the calls queue up there."""
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


def median_milliseconds(
    function: Callable[[], Any],
    device: str = "cpu",
    seconds: float = 0.5,
    least: int = 3,
    most: int = 200,
    warm_up: bool = True,
) -> float:
    """The median of as many calls as fit into so many seconds, after two that do not count."""
    if not warm_up:
        times = timings(function, device, 1)
        calls = min(max(int(seconds * 1e3 / times[0]), least), most) - 1
        return statistics.median(times + timings(function, device, calls) if calls > 0 else times)
    function()
    estimate = timings(function, device, 1)[0]
    return statistics.median(timings(function, device, min(max(int(seconds * 1e3 / estimate), least), most)))


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """A CUDA graph of it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def wall_milliseconds(function: Callable[[], Any], device: str) -> float:
    """One call as its user sees it, compilation included."""
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def extra_mebibytes(function: Callable[[], Any], device: str) -> float | None:
    """The most memory that a call holds beyond what is held before it; None on a CPU, which does not count it."""
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
    """The most memory that this process holds while a function runs; NaN but on Linux."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        function()
        return float("nan")
    function()
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 1024


def ceilings(device: str, quick: bool) -> tuple[float, float]:
    """Bytes a millisecond of a large copy, read and written, and operations a millisecond of a matrix product."""
    large = device != "cpu" and not quick
    source = torch.randint(256, (2**32 if large else 2**26,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / median_milliseconds(lambda: target.copy_(source), device, least=5)
    width, dtype = (8192, torch.bfloat16) if large else (512, torch.float32)
    a, b = torch.randn(2, width, width, device=device).to(dtype)
    return copied, 2 * width**3 / median_milliseconds(lambda: a @ b, device, least=5)


@torch.no_grad()
def linear_rate() -> float:
    """Operations a millisecond of a linear layer's product, for which there may be a quicker library."""
    from subquad_kernels import linear

    a, b = torch.randn(2, 512, 512)
    return 2 * 512**3 / median_milliseconds(lambda: linear(a, b), least=5)


def measure_ceilings(options: argparse.Namespace) -> str:
    """Puts the rates that floors are made of into the options, and tells them."""
    options.copied, options.multiplied = ceilings(options.device, options.quick)
    if options.device == "cpu":
        options.multiplied = max(options.multiplied, linear_rate())
    rates = f"copies {options.copied / 1e9:.3g} TB/s, multiplies {options.multiplied / 1e9:.3g} TFLOP/s"
    print(rates)
    return rates


def floor(options, operations: float, moved: float) -> float:
    return max(operations / options.multiplied, moved / options.copied)


def with_rate(milliseconds: float, tokens: int, floor: float) -> dict[str, Any]:
    rate = tokens / milliseconds * 1e3
    return {"milliseconds": milliseconds, "tokens_per_second": rate, "floor_milliseconds": floor}


def load_fla(module: str, device: str):
    """A module of flash-linear-attention, or None."""
    if device == "cpu":
        return None
    try:
        return importlib.import_module(module)
    except Exception as error:  # more than ImportError: its import asks Triton for a driver
        print(f"flash-linear-attention is left out: {type(error).__name__}: {error}")
        return None


def size_of(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def sets_beyond_cache(size: int, device: str) -> int:
    """How many inputs of that size to alternate between, so that none is still in the cache."""
    if device == "cpu":
        return 2
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26)
    return max(1, math.ceil(4 * cache / size))


def measure_call(
    options, function: Callable, inputs: list[dict[str, Any]], moved: float, operations: float, **how: Any
) -> dict[str, Any]:
    """
    Fields of a row for `function(**inputs)`, which takes the inputs in turn. In `how`: `training`, forward and
    backward; `graph`, in a CUDA graph; `once`, a single time; `most`, how many times at most.
    """
    turns, device = itertools.cycle(inputs), options.device
    if how.get("training"):
        with torch.no_grad():
            grad = torch.randn_like(function(**inputs[0]))
        for x in itertools.chain.from_iterable(one.values() for one in inputs):
            x.requires_grad_()

        def call():
            leaves = next(turns)
            return torch.autograd.grad(function(**leaves), list(leaves.values()), grad)
    else:

        @torch.no_grad()
        def call():
            return function(**next(turns))

    if how.get("once"):
        milliseconds = median_milliseconds(call, device, 0, 1, warm_up=False)
    elif how.get("graph"):
        replay = captured(lambda: [call() for _ in inputs])
        milliseconds = median_milliseconds(replay, device, options.seconds, options.least) / len(inputs)
    else:
        milliseconds = median_milliseconds(call, device, options.seconds, options.least, how.get("most", 200))
    measured = {"milliseconds": milliseconds, "floor_milliseconds": floor(options, operations, moved)}
    if not how.get("graph") and not how.get("once"):
        measured["MiB"] = extra_mebibytes(call, device)
    return measured


def relative_error(x: torch.Tensor, expected: torch.Tensor) -> float:
    return ((x.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def poisoned(function: Callable[[], Any]) -> Any:
    """Calls a function while every new tensor is full of NaN: what the function does not write is seen."""
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


def versions(device: str) -> str:
    found = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    for name in ("triton", "transformers", "flash-linear-attention"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    found.append(f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name())
    return ", ".join(found)


def add_options(parser: argparse.ArgumentParser, files: str, minutes: float) -> None:
    """What every benchmark is asked for, which writes such files."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help=f"where {files} are written")
    add("--minutes", type=float, default=minutes, help=f"no measurement begins after that long (default: {minutes})")
    add("--seconds", type=float, default=0.5, help="how long each median takes (default: 0.5)")
    add("--device", choices=("cpu", "cuda"), default=device, help=f"default: {device} here")
    add("--quick", action="store_true", help="tiny sizes, each measured once: shows that all parts run")


def add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        dest="compiles",
        help="whether to measure under torch.compile too (default: on a GPU)",
    )


def settle(options: argparse.Namespace) -> None:
    """What follows from the device and from `--quick`, whatever is measured."""
    on_gpu = options.device == "cuda"
    options.least = 1 if options.quick else 3
    options.seconds = 0 if options.quick else options.seconds
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
    options.backend = "triton" if on_gpu else "eager"
    options.check_backend = "triton" if on_gpu or interpreted else "eager"
    options.small_check = options.quick or (interpreted and not on_gpu)
    # The interpreter does not know how to multiply bfloat16.
    options.check_dtypes = [torch.float32, torch.bfloat16] if on_gpu or not interpreted else [torch.float32]
    if "compiles" in options and options.compiles is None:
        options.compiles = on_gpu
    options.dtype = torch.bfloat16 if on_gpu else torch.float32
    options.dtype_name = str(options.dtype).removeprefix("torch.")


def run_afresh(run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Calls a benchmark's `run` with empty caches: what earlier runs compiled would make first calls look cheap."""
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    # What eager took over silently must not pass for a measurement of the kernels.
    warnings.filterwarnings("error", message=".*runs in plain torch")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
        run(options)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """`write` makes the file under another name: whoever looks finds the old one or the whole new one."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class Results:
    """The rows of a run: measured one by one, kept in a file, and what went wrong."""

    def __init__(self, path: Path | None, device: str, seconds: float, versions: str):
        self.path, self.device, self.versions = path, device, versions
        self.rows: list[dict[str, Any]] = []
        self.failed = self.skipped = 0
        self.deadline = time.monotonic() + seconds
        # In a log every refreshed line stays.
        self.live = sys.stderr.isatty()
        interval = 0.1 if self.live else 10
        self.bar = tqdm(file=sys.stderr, mininterval=interval, bar_format="{n} rows [{elapsed}] {desc}")

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append({**row, "versions": self.versions})
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
        """Adds what `function` returns to the row, or why it failed; nothing after the deadline. Whether it did."""
        if time.monotonic() > self.deadline:
            self.skipped += 1
            return False
        name = " ".join(str(row[field]) for field in FIELDS if row.get(field) not in (None, ""))
        self.bar.set_description_str(name, refresh=self.live)
        try:
            measured, done = function(), True
        except torch.OutOfMemoryError:
            measured, done = {"note": "out of memory"}, False
        except Exception as error:
            reason = (str(error).strip() or "no message").splitlines()[0]
            measured, done = {"note": f"failed: {type(error).__name__}: {reason}"}, False
            self.failed += row["implementation"] == OURS
        # Not in the handlers: there the traceback still holds the tensors.
        if self.device != "cpu":
            gc.collect()
            torch.cuda.empty_cache()
        self.add({**row, **measured})
        return done

    def table(self) -> str:
        """One line a shape and a quantity."""
        groups: dict[tuple, dict[str, dict]] = {}
        for row in self.rows:
            if row["part"] != "check":
                groups.setdefault(tuple(row.get(field) for field in SHAPE), {})[row["implementation"]] = row
        lines = [f"batch x length; behind a figure its floor [ ], or what {OURS}'s is of it ( )"]
        for group in groups.values():
            first, ours = next(iter(group.values())), group.get(OURS, {})
            shape = " x ".join(str(first[name]) for name in ("batch", "length") if first.get(name))
            rates = any(row.get("tokens_per_second") for row in group.values())
            for unit, field in (
                ("tokens/s", "tokens_per_second") if rates else ("ms", "milliseconds"),
                ("MiB", "MiB"),
            ):
                cells = []
                for name, row in group.items():
                    if (value := row.get(field)) is None:
                        continue
                    cell = f"{name} {value:.4g}"
                    if name != OURS:
                        cell += f" ({ours[field] / value:.2f})" if value and ours.get(field) else ""
                    elif field != "MiB" and row.get("floor_milliseconds"):
                        reached = row["floor_milliseconds"] / row["milliseconds"]
                        cell += f" [{value / reached if rates else value * reached:.3g}]"
                    if field == "milliseconds" and row.get("teraflops"):
                        cell += f" {row['teraflops']:.3g} TFLOP/s"
                    if field == "milliseconds" and row.get("gigabytes_per_second"):
                        cell += f" {row['gigabytes_per_second']:.3g} GB/s"
                    cells.append(cell)
                if cells:
                    lines.append(f"{first['what']:<31} {shape:<9} {unit:<8} " + ", ".join(cells))
            for name, row in group.items():
                if row.get("note"):
                    lines.append(f"{first['what']:<31} {shape:<9} {name}: {row['note']}")
        return "\n".join(lines)

    def exit(self, minutes: float) -> None:
        """Tells what was left out, and exits with 1 where something failed."""
        if self.skipped:
            print(f"{self.skipped} measurements did not begin within {minutes:g} minutes")
        if self.failed:
            raise SystemExit(1)


def write_report(results: Results, options, name: str, title: str, rates: str, text: str) -> None:
    if options.out is not None:
        report = {"versions": title, "ceilings": rates, "rows": results.rows}
        write_atomically(options.out / f"{name}.json", lambda path: path.write_text(json.dumps(report, indent=1)))
        text = f"```\n{title}\n{rates}\n{text}\n```\n"
        write_atomically(options.out / f"{name}.md", lambda path: path.write_text(text, encoding="utf-8"))


class Check:
    """Cases of a check, whose errors are judged by a tolerance; one row a case."""

    def __init__(self, results: Results):
        self.results, self.wrong, self.count = results, [], 0

    def judge(self, what: str, row: dict[str, Any], tolerance: float, errors: dict[str, float]) -> None:
        """Errors by name; those whose name begins with a bracket are only told."""
        self.count += 1
        judged = {name: error for name, error in errors.items() if not name.startswith("(")}
        worst = max(judged, key=lambda name: math.inf if math.isnan(judged[name]) else judged[name])
        every = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        note = f"largest error {judged[worst]:.1e} ({worst}) of {tolerance:.0e} allowed; {every}"
        self.results.add({"part": "check", "what": what, "implementation": OURS, **row, "note": note})
        if not judged[worst] < tolerance:
            self.wrong.append(f"{what}, {row}: {note}")

    def passed(self, what: str) -> bool:
        """Prints what was found; whether nothing is wrong."""
        self.results.bar.clear()
        print(f"check, {what}: {len(self.wrong)} of {self.count} cases wrong", *self.wrong, sep="\n  ")
        return not self.wrong
