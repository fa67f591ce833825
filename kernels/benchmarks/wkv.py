"""
The WKV operator, and Finch around it, measured beside others on the same inputs.

On a GPU the Triton kernels run in bfloat16, beside flash-linear-attention (where it can be imported), FlashAttention
(of torch) and, where that does not take too long, the plain recurrence. On a CPU the time-parallel form in plain torch
runs in float32.

parts (each can be left out, --parts):
  check     the kernels against the recurrence in float64: outputs, states and every gradient. With TRITON_INTERPRET=1
            on a CPU too. If it fails, nothing is measured and the exit status is 1.
  operator  forward, and forward and backward: time and memory by length, and the first call, which compiles
  decode    one token: as a call, and replayed from a CUDA graph
  models    Finch 1.6B (24 layers, random weights): training, prefill, generate

Times are medians, between device events on a GPU; inputs alternate, so that none is still in the cache. A floor is the
time to move inputs and outputs once (of a model: to multiply, or to read the weights) at the rates that a large copy
and a large matrix product reach in the same run. Memory is the peak beyond the inputs; of training, all.
"""

import argparse
import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import (
    OURS,
    Check,
    Results,
    add_options,
    captured,
    extra_mebibytes,
    load_fla,
    measure_ceilings,
    median_milliseconds,
    poisoned,
    relative_error,
    run_afresh,
    sets_beyond_cache,
    settle,
    size_of,
    versions,
    wall_milliseconds,
    write_atomically,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from subquad_kernels import wkv


PARTS = ("check", "operator", "decode", "models")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
# The recurrence takes one step of one row after the other.
MOST_STEPS = 8192


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    size: int
    dtype: torch.dtype
    device: str
    decay_dtype: torch.dtype | None = None
    static: bool = False

    @property
    def row(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in ("batch", "length", "heads", "size")}
        return {**row, "dtype": str(self.dtype).removeprefix("torch.")}

    def inputs(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Random inputs; the decays mix memories of a million tokens and of none."""
        generator = torch.Generator(self.device).manual_seed(seed)
        tokens = (self.batch, self.length, self.heads, self.size)
        r, k, v = (torch.randn(tokens, generator=generator, device=self.device).to(self.dtype) for _ in range(3))
        shape = tokens[2:] if self.static else tokens
        random = torch.rand(shape, generator=generator, device=self.device)
        log_w = -torch.exp(math.log(1e-6) + (math.log(9.2) - math.log(1e-6)) * random)
        u = torch.randn(tokens[2:], generator=generator, device=self.device).to(self.dtype)
        return {"r": r, "k": k, "v": v, "log_w": log_w.to(self.decay_dtype or self.dtype), "u": u}

    def states(self, count: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(count, self.heads, self.size, self.size, generator=generator, device=self.device)


# The check.


def cases(device: str, quick: bool):
    """Shapes, and the borders of packed documents or None."""
    if quick:
        shape = Shape(1, 1, 1, 16, torch.float32, device)
        yield shape, None
        yield dataclasses.replace(shape, length=19), None
        yield dataclasses.replace(shape, length=19, static=True), (0, 3, 3, 19)
        return
    for dtype in TOLERANCES:
        shape = Shape(2, 1, 2, 64, dtype, device, torch.float32)
        for length, static in itertools.product((1, 63, 65, 200, 1000), (False, True)):
            yield dataclasses.replace(shape, length=length, static=static), None
        yield dataclasses.replace(shape, length=200, decay_dtype=dtype), None
        # Few heads: 1,000 tokens and more are cut into segments. Many: a program walks the whole sequence.
        yield dataclasses.replace(shape, batch=1, length=201), (0, 3, 3, 67, 68, 201)
        yield dataclasses.replace(shape, batch=1, length=1400), (0, 700, 701, 1400)
        yield dataclasses.replace(shape, batch=1, length=600, heads=300, size=32), None


def errors_of(shape: Shape, bounds: tuple[int, ...] | None, backend: str) -> dict[str, float]:
    inputs = shape.inputs()
    inputs["initial_state"] = shape.states(shape.batch if bounds is None else len(bounds) - 1)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=shape.device)
    torch.manual_seed(0)
    weights = [torch.randn_like(inputs[name]) for name in ("v", "initial_state")]

    def run(inputs, backend):
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        results = wkv(**leaves, cu_seqlens=cu_seqlens, backend=backend)
        given = [w.to(x.dtype) for w, x in zip(weights, results, strict=True)]
        grads = torch.autograd.grad(results, list(leaves.values()), given)
        return {
            "out": results[0],
            "state": results[1],
            **{f"d{name}": x for name, x in zip(leaves, grads, strict=True)},
        }

    found = poisoned(lambda: run({name: x.clone() for name, x in inputs.items()}, backend))
    expected = run({name: x.double() for name, x in inputs.items()}, "reference")
    if shape.length == 1:
        # Without gradients one token takes a path of its own, which may write the state in place.
        held = inputs["initial_state"].clone()
        with torch.no_grad():
            arguments = {**inputs, "initial_state": held}
            found["step"], _ = poisoned(lambda: wkv(**arguments, inplace=True, backend=backend))
        found["step's state"], expected["step"], expected["step's state"] = held, expected["out"], expected["state"]
    return {name: relative_error(found[name], expected[name]) for name in found}


def check(results: Results, device: str, backend: str, quick: bool) -> bool:
    """Whether every error is below its tolerance; one row a case."""
    judged = Check(results)
    for shape, bounds in cases(device, quick):
        what = ("static " if shape.static else "") + ("packed" if bounds else "rows")
        judged.judge(what, shape.row, TOLERANCES[shape.dtype], errors_of(shape, bounds, backend))
    return judged.passed(f"{backend} against the recurrence in float64")


# The operator.


def flash_attention(r, k, v, log_w, u):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (r, k, v)), is_causal=True)
    return out.transpose(1, 2)


def as_in_a_model(backend: str) -> Callable:
    return lambda **inputs: wkv(**inputs, out_dtype=torch.float32, backend=backend)[0]


def operators(backend: str, fla) -> dict[str, Callable]:
    """Functions (r, k, v, log_w, u) -> out, all (batch, length, heads, size)."""
    found = {OURS: lambda **inputs: wkv(**inputs, backend=backend)[0]}
    if fla is not None:
        # The decay has another name there.
        found["fla"] = lambda **x: fla.chunk_rwkv6(*x.values(), scale=1.0, output_final_state=True)[0]
    found["FlashAttention"] = flash_attention
    found["recurrence"] = lambda **inputs: wkv(**inputs, backend="reference")[0]
    return found


def call_of(function: Callable, shape: Shape, training: bool, sets: int) -> tuple[Callable[[], Any], int]:
    """A call on one of so many inputs after the other, and the bytes that it moves if it moves each but once."""
    inputs = [shape.inputs(seed) for seed in range(sets)]
    turns = itertools.cycle(inputs)

    def forward():
        with torch.no_grad():
            return function(**next(turns))

    out = forward()
    inside, outside = size_of(*inputs[0].values()), size_of(out)
    if not training:
        return forward, inside + outside
    grad = torch.randn(out.shape, device=shape.device).to(out.dtype)
    for x in itertools.chain.from_iterable(one.values() for one in inputs):
        x.requires_grad_()

    def both():
        leaves = next(turns)
        # FlashAttention has no use for a decay.
        return torch.autograd.grad(function(**leaves), list(leaves.values()), grad, allow_unused=True)

    return both, 3 * inside + 2 * outside


def measure_operator(name: str, function: Callable, shape: Shape, training: bool, options) -> dict[str, Any]:
    size = 4 * shape.batch * shape.length * shape.heads * shape.size * shape.dtype.itemsize
    sets = sets_beyond_cache(size, shape.device)
    call, moved = call_of(function, shape, training, sets)
    measured = {"milliseconds": median_milliseconds(call, shape.device, options.seconds, options.least)}
    if training:
        measured["MiB"] = extra_mebibytes(call, shape.device)
    if name != "FlashAttention":  # which has more to compute than to move
        measured["floor_milliseconds"] = moved / options.copied
    return measured


def first_call(results: Results, name: str, function: Callable, options) -> None:
    """Compiles, so it must come before all else; the inputs are made, and what both need is loaded, by then."""
    shape = options.shapes[0]

    def measure():
        inputs = {key: x.requires_grad_() for key, x in shape.inputs().items()}
        torch.ones(64, 64, device=shape.device) @ torch.ones(64, 64, device=shape.device)
        if shape.device != "cpu":
            importlib.import_module("triton").runtime.driver.active.get_current_target()
        call = lambda: torch.autograd.grad(function(**inputs).sum(), list(inputs.values()), allow_unused=True)  # noqa: E731
        return {"milliseconds": wall_milliseconds(call, shape.device)}

    row = {"part": "operator", "what": "first forward+backward", "implementation": name}
    results.measure({**row, **shape.row}, measure)


def difference(ours: Callable, theirs: Callable, shape: Shape) -> dict[str, Any]:
    found = []
    for function in (ours, theirs):
        torch.manual_seed(0)
        inputs = {name: x.requires_grad_() for name, x in shape.inputs().items()}
        out = function(**inputs)
        grads = torch.autograd.grad(out, list(inputs.values()), torch.randn(out.shape, device=out.device).to(out))
        found.append({"out": out.detach(), **{f"d{name}": x for name, x in zip(inputs, grads, strict=True)}})
    errors = (f"{name} {relative_error(found[0][name], x.double()):.1e}" for name, x in found[1].items())
    return {"note": "relative difference " + ", ".join(errors)}


def measure_operators(results: Results, options, fla) -> None:
    functions = operators(options.backend, fla)
    if fla is not None:
        first_call(results, "fla", functions["fla"], options)
    for shape in options.shapes:
        calls = [(name, function, shape, "") for name, function in functions.items()]
        if shape == options.model_shape and shape.dtype != torch.float32:
            wide = dataclasses.replace(shape, decay_dtype=torch.float32)
            calls.append((OURS, as_in_a_model(options.backend), wide, ", as in a model"))
        for name, function, given, how in calls:
            for training in (False, True):
                if name == "recurrence" and shape.batch * shape.length * (8 if training else 1) > MOST_STEPS:
                    continue
                row = {"part": "operator", "what": f"forward{'+backward' * training}{how}", "implementation": name}
                arguments = name, function, given, training, options
                results.measure({**row, **shape.row}, lambda a=arguments: measure_operator(*a))
        if fla is not None and shape == options.model_shape:
            row = {"part": "operator", "what": "difference from fla", "implementation": OURS, **shape.row}
            results.measure(row, lambda s=shape: difference(functions[OURS], functions["fla"], s))


# One token.


def measure_step(name: str, graph: bool, shape: Shape, options, fla) -> dict[str, Any]:
    state_size = shape.batch * shape.heads * shape.size**2 * 4
    sets = sets_beyond_cache(state_size, shape.device)
    inputs = [(shape.inputs(seed), shape.states(shape.batch, seed)) for seed in range(sets)]
    out_size = size_of(inputs[0][0]["v"])

    @torch.no_grad()
    def steps():
        for one, state in inputs:
            if name == OURS:
                wkv(**one, initial_state=state, inplace=True, backend=options.backend)
            else:
                fla.fused_recurrent_rwkv6(*one.values(), scale=1.0, initial_state=state, output_final_state=True)

    call = captured(steps) if graph else steps
    milliseconds = median_milliseconds(call, shape.device, options.seconds, options.least) / sets
    moved = size_of(*inputs[0][0].values()) + out_size + 2 * state_size
    return {"milliseconds": milliseconds, "floor_milliseconds": moved / options.copied}


def measure_steps(results: Results, options, fla) -> None:
    for batch in options.step_batches:
        shape = dataclasses.replace(options.shapes[0], batch=batch, length=1)
        for graph in (False, True) if options.device != "cpu" else (False,):
            for name in (OURS, "fla") if fla is not None else (OURS,):
                what = "step in a CUDA graph" if graph else "step"
                row = {"part": "decode", "what": what, "implementation": name, **shape.row}
                results.measure(row, lambda a=(name, graph, shape, options, fla): measure_step(*a))


# The report.


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        print(f"no plot: {error}")
        return
    lines: dict[tuple, list[tuple]] = {}
    for row in rows:
        if row["part"] == "operator" and row.get("milliseconds") and row["what"] in ("forward", "forward+backward"):
            key = row["what"], row["implementation"], row["batch"]
            lines.setdefault((*key, "ms"), []).append((row["length"], row["milliseconds"]))
            if row.get("MiB"):
                lines.setdefault((*key, "MiB"), []).append((row["length"], row["MiB"]))
    panels = [("forward", "ms"), ("forward+backward", "ms"), ("forward+backward", "MiB")]
    panels = [panel for panel in panels if any((key[0], key[3]) == panel for key in lines)]
    names = list(dict.fromkeys(key[1] for key in lines))
    batches = sorted({key[2] for key in lines}, reverse=True)
    if not panels:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels) + 2, 4), squeeze=False)
    for axis, (what, unit) in zip(axes[0], panels, strict=True):
        for (row_what, name, batch, row_unit), points in lines.items():
            if (row_what, row_unit) == (what, unit):
                style = {"color": f"C{names.index(name)}", "linestyle": ("-", "--", ":")[batches.index(batch) % 3]}
                axis.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{name}, batch {batch}", **style)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit, title=what)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    figure.set_layout_engine("constrained")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside center right", fontsize="small")
    figure.suptitle(title, fontsize="small")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
    pyplot.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, help="default: all on a GPU, operator on a CPU")
    add_options(parser, "wkv.csv (after every row) and wkv.png", minutes=9)
    add("--heads", type=int, help="default: 64 on a GPU, 8 on a CPU")
    add("--head-size", type=int, default=64, help="default: 64")
    add("--batches", type=int, nargs="+", help="default: 8 and 1 on a GPU, 1 on a CPU")
    add(
        "--lengths",
        type=int,
        nargs="+",
        help="default: 1024, 4096, 16384 (batch 1: 65536) on a GPU, 1 to 4096 on a CPU",
    )
    options = parser.parse_args(arguments)

    settle(options)
    options.compiles = True  # what `generate` has compiled belongs to the model
    on_gpu = options.device == "cuda"
    options.parts = options.parts or (PARTS if on_gpu else ("operator",))
    heads = options.heads or (64 if on_gpu and not options.quick else 8)
    batches = options.batches or ([8, 1] if on_gpu and not options.quick else [1])
    lengths = options.lengths or ([1024, 4096, 16384, 65536] if on_gpu else [1, 64, 256, 1024, 4096])
    if options.quick:
        lengths = options.lengths or [1, 256]
    options.shapes = [
        Shape(batch, length, heads, options.head_size, options.dtype, options.device)
        for batch in batches
        for length in lengths
        if options.lengths or batch == 1 or length <= 16384
    ]
    options.model_shape = options.shapes[min(1, len(lengths) - 1)]
    options.step_batches = (1, 8, 64, 256) if on_gpu and not options.quick else (1, 4)
    return options


def main(arguments: list[str] | None = None) -> None:
    run_afresh(run, parse(arguments))


def run(options: argparse.Namespace) -> None:
    title = versions(options.device)
    path = None if options.out is None else options.out / "wkv.csv"
    results = Results(path, options.device, options.minutes * 60, title)
    shape = options.shapes[0]
    print(f"{title}\n{shape.heads} heads of {shape.size}, {shape.row['dtype']}")
    if "operator" in options.parts:
        first_call(results, OURS, operators(options.backend, None)[OURS], options)
    if "check" in options.parts and not check(results, options.device, options.check_backend, options.quick):
        results.bar.close()
        raise SystemExit(1)

    if set(options.parts) - {"check"}:
        measure_ceilings(options)
        fla = load_fla("fla.ops.rwkv6", options.device)
        if "operator" in options.parts:
            measure_operators(results, options, fla)
            if options.out is not None:
                plot(results.rows, options.out / "wkv.png", title)
        if "decode" in options.parts:
            measure_steps(results, options, fla)
        if "models" in options.parts:
            from models import finches, measure_models

            batch, length, batches, tokens = (2, 64, (1, 2), 8) if options.quick else (4, 4096, (1, 32), 128)
            models = finches(options.quick, with_fla=fla is not None)
            measure_models(results, options, models, batch, length, batches, tokens, "training")
    results.bar.close()
    print(results.table())
    results.exit(options.minutes)


if __name__ == "__main__":
    main()
