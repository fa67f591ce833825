"""
The slot memory of Raven, its router and the model around them, measured beside flash-linear-attention.

On a GPU all runs in bfloat16. flash-linear-attention (where it can be imported) gets the same inputs, its decays and
writes ready-made, and a model of the same sizes with the same weights. On a CPU, on which that does not run, the
time-parallel form in plain torch runs in float32, beside the recurrence.

parts (each can be left out, --parts):
  first      the first forward and backward pass of a new process that finds nothing compiled, at the published sizes;
             the peer's is given up after 300 s
  check      slot memory (outputs, states, every gradient, the step in place) and router against their recurrences in
             float64. With TRITON_INTERPRET=1 the kernels on a CPU, in float32 at small sizes. If it fails, nothing
             else is measured and the exit status is 1.
  operator   4 heads of 256, 256 slots, of which a token is written to 32: forward, and forward and backward, by
             length; the errors of both on the same inputs, against float64; the router, beside topk and scatter
  decode     one token: as a call, and replayed from a CUDA graph
  models     Raven 0.4B (on a CPU 8 layers of width 512): `generate`, plain and with compiled steps, prefill, and on a
             GPU forward and backward of a training step

Times are medians, between device events on a GPU (of the recurrence, over all tokens, of one call); inputs alternate,
so that none is still in the cache. A floor is the time to move inputs and outputs once (of a model: to multiply, or to
read the weights) at the rates that a large copy and a large matrix product reach in the same run. Memory is the peak
beyond the inputs; of training, all. A minute after the last measurement may have begun, what still runs is given up.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from measuring import (
    OURS,
    SHAPE,
    Check,
    Results,
    add_compile,
    add_options,
    captured,
    load_fla,
    measure_call,
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
    write_report,
)

from subquad_kernels import slot_memory, slot_routing


PARTS = ("first", "check", "operator", "decode", "models")
FLA, TORCH, RECURRENCE = "fla", "torch", "recurrence"
OPERATORS = "fla.ops.gsa"
# Logits of 256 products go through an exponential: what bfloat16 rounds off becomes several times as much.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
PATIENCE = 300  # seconds
# On an H200: what of the peer's time, how many times its tokens/s, and seconds.
MOST_TIME, LEAST_RATE, MOST_SECONDS = 0.6, 10, 20


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    size: int
    slots: int
    topk: int
    dtype: torch.dtype
    device: str

    @property
    def row(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in ("batch", "length", "heads", "size")}
        return {**row, "dtype": str(self.dtype).removeprefix("torch.")}

    def routes(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """What the router reads; the decays mix memories of thousands of tokens and of few."""
        generator = torch.Generator(self.device).manual_seed(seed)
        tokens = self.batch, self.length, self.heads
        logits = torch.randn((*tokens, self.slots), generator=generator, device=self.device).to(self.dtype)
        random = torch.rand(tokens, generator=generator, device=self.device)
        return {"logits": logits, "log_decay": -1e-3 * torch.exp(math.log(16e3) * random)}

    def inputs(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Of the slot memory. The log decays are float32, as in a model, but numbers that the dtype has."""
        generator = torch.Generator(self.device).manual_seed(seed)
        tokens = self.batch, self.length, self.heads, self.size
        q, k, v = (torch.randn(tokens, generator=generator, device=self.device).to(self.dtype) for _ in range(3))
        log_f = plain_routing(**self.routes(seed), topk=self.topk).to(self.dtype).float()
        return {"q": q, "k": k, "v": v, "log_f": log_f}

    def states(self, count: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = count, self.heads, self.slots, 2 * self.size
        return torch.randn(shape, generator=generator, device=self.device)


def plain_routing(logits: torch.Tensor, log_decay: torch.Tensor, topk: int) -> torch.Tensor:
    """The router as published, in ordinary torch."""
    chosen = torch.sigmoid(logits.float()).topk(topk)
    weights = chosen.values / (chosen.values.sum(-1, keepdim=True) + 1e-9)
    return log_decay[..., None] * torch.zeros_like(logits.float()).scatter(-1, chosen.indices, weights)


def for_fla(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_f: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same inputs as flash-linear-attention takes them."""
    return {"q": q, "k": k, "v": v, "s": (-log_f.expm1()).to(k.dtype), "g": log_f.to(k.dtype)}


def of_fla(fla: ModuleType) -> Callable[..., torch.Tensor]:
    """Its operator, (q, k, v, s, g) -> out. Logits are not scaled, and both return the state."""
    return lambda **inputs: fla.chunk_gsa(**inputs, scale=1.0, output_final_state=True)[0]


def of_ours(backend: str) -> Callable[..., torch.Tensor]:
    return lambda **inputs: slot_memory(**inputs, backend=backend)[0]


# The check.


def cases(options) -> Iterator[tuple[Shape, tuple[int, ...] | None]]:
    """Shapes, and the borders of packed documents or None."""
    device = options.device
    if options.small_check:
        shape = Shape(1, 1, 2, 16, 12, 5, torch.float32, device)
        yield shape, None
        yield dataclasses.replace(shape, length=19), None
        yield dataclasses.replace(shape, length=19), (0, 3, 3, 19)
        return
    for dtype in options.check_dtypes:
        shape = Shape(2, 1, 2, 64, 48, 8, dtype, device)
        for length in (1, 63, 65, 200):
            yield dataclasses.replace(shape, length=length), None
        yield dataclasses.replace(shape, batch=1, length=201), (0, 3, 3, 67, 68, 201)
        if device != "cpu" and dtype == options.dtype:
            shape = dataclasses.replace(shape, size=256, slots=256, topk=32)
            for batch, length, heads in ((2, 1, 4), (2, 200, 4), (1, 1000, 1)):
                yield dataclasses.replace(shape, batch=batch, length=length, heads=heads), None
            # Many heads: a program walks the whole sequence.
            yield Shape(1, 300, 150, 32, 64, 8, dtype, device), None


def gradients(
    function: Callable[..., Any], inputs: dict[str, torch.Tensor], weights: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The results of a function and, where these are weighed so, the gradients of its inputs, by name."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    results = function(**leaves)
    results = results if isinstance(results, tuple) else (results,)
    given = [w.to(x.dtype) for w, x in zip(weights, results, strict=True)]
    grads = torch.autograd.grad(results, list(leaves.values()), given)
    names = ("out", "state")[: len(results)]
    return {
        **{name: x.detach() for name, x in zip(names, results, strict=True)},
        **{f"d{name}": x for name, x in zip(leaves, grads, strict=True)},
    }


def wide(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.double() for name, x in inputs.items()}


def memory_errors(shape: Shape, bounds: tuple[int, ...] | None, backend: str) -> dict[str, float]:
    inputs = shape.inputs()
    inputs["initial_state"] = shape.states(shape.batch if bounds is None else len(bounds) - 1)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=shape.device)
    torch.manual_seed(0)
    weights = [torch.randn_like(inputs[name]) for name in ("v", "initial_state")]

    def run(backend):
        return functools.partial(slot_memory, cu_seqlens=cu_seqlens, backend=backend)

    found = poisoned(lambda: gradients(run(backend), inputs, weights))
    expected = gradients(run("reference"), wide(inputs), weights)
    if shape.length == 1:
        # Without gradients one token takes a path of its own, which may write the state in place.
        held = inputs["initial_state"].clone()
        with torch.no_grad():
            arguments = {**inputs, "initial_state": held}
            found["step"], _ = poisoned(lambda: slot_memory(**arguments, inplace=True, backend=backend))
        found["step's state"], expected["step"], expected["step's state"] = held, expected["out"], expected["state"]
    return {name: relative_error(found[name], expected[name]) for name in found}


def routing_errors(shape: Shape, backend: str) -> dict[str, float]:
    inputs = shape.routes()
    torch.manual_seed(0)
    weights = [torch.randn(inputs["logits"].shape, device=shape.device)]

    def run(backend):
        return functools.partial(slot_routing, topk=shape.topk, backend=backend)

    found = poisoned(lambda: gradients(run(backend), inputs, weights))
    expected = gradients(run("reference"), wide(inputs), weights)
    return {name: relative_error(found[name], expected[name]) for name in found}


def check(results: Results, options) -> bool:
    """Whether every error is below its tolerance; one row a case."""
    judged = Check(results)
    for shape, bounds in cases(options):
        what = "packed" if bounds else "rows"
        judged.judge(what, shape.row, TOLERANCES[shape.dtype], memory_errors(shape, bounds, options.check_backend))
        if bounds is None:
            errors = routing_errors(shape, options.check_backend)
            judged.judge("router", shape.row, TOLERANCES[shape.dtype], errors)
    return judged.passed(f"{options.check_backend} against the recurrences in float64")


# The first call.


def first_call(options) -> float:
    """Milliseconds, in this process; the inputs are made, and what both need is loaded, by then."""
    device = options.device
    inputs = options.shapes[0].inputs()
    if options.first_call == FLA:
        function, inputs = of_fla(importlib.import_module(OPERATORS)), for_fla(**inputs)
    else:
        function = of_ours(options.backend)
    grad = torch.randn_like(inputs["v"])
    leaves = [x.requires_grad_() for x in inputs.values()]
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    if device != "cpu":
        importlib.import_module("triton").runtime.driver.active.get_current_target()
    return wall_milliseconds(lambda: torch.autograd.grad(function(**inputs), leaves, grad), device)


def measure_first_call(results: Results, name: str, options) -> None:
    """
    In a process of its own, which keeps what it compiles where this run will look for it: another implementation's
    kernels, and these before the run's first use of them, are not there yet.
    """
    command = [sys.executable, __file__, "--first-call", name, "--device", options.device]

    def measure():
        limit = max(1.0, min(PATIENCE, results.deadline - time.monotonic()))
        try:
            done = subprocess.run(
                command + ["--quick"] * options.quick, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return {"note": f"not done after {limit:.0f} s"}
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
        return {"milliseconds": float(done.stdout.split()[-1])}

    shape = options.shapes[0]
    row = {"part": "first", "what": "first forward+backward", "implementation": name}
    results.measure({**row, **shape.row}, measure)


# The operators.


def measure_operator(name: str, shape: Shape, training: bool, options, fla: ModuleType | None) -> dict[str, Any]:
    one = shape.inputs()
    inside, outside = size_of(*one.values()), size_of(one["v"])
    inputs = [one, *(shape.inputs(seed) for seed in range(1, sets_beyond_cache(inside, shape.device)))]
    function = of_ours("reference" if name == RECURRENCE else options.backend)
    if name == FLA:
        function, inputs = of_fla(fla), [for_fla(**one) for one in inputs]
    moved = 3 * inside + 2 * outside if training else inside + outside
    return measure_call(options, function, inputs, moved, 0, training=training, once=name == RECURRENCE)


def measure_errors(name: str, shape: Shape, options, fla: ModuleType | None) -> dict[str, Any]:
    inputs = shape.inputs()
    torch.manual_seed(0)
    weights = [torch.randn_like(inputs["v"])]
    function = of_ours(options.backend)
    if name == FLA:
        function = lambda **inputs: of_fla(fla)(**for_fla(**inputs))  # noqa: E731
    found = gradients(function, inputs, weights)
    expected = gradients(of_ours("reference"), wide(inputs), weights)
    errors = (f"{key} {relative_error(found[key], x):.1e}" for key, x in expected.items())
    return {"note": "relative errors " + ", ".join(errors)}


def measure_operators(results: Results, name: str, options, fla: ModuleType | None) -> None:
    for shape, training in itertools.product(options.shapes, (False, True)):
        if name == RECURRENCE and training:
            continue  # it would keep every step's state
        row = {"part": "operator", "what": f"forward{'+backward' * training}", "implementation": name, **shape.row}
        results.measure(row, functools.partial(measure_operator, name, shape, training, options, fla))
    if name == FLA:
        shape = options.error_shape
        for either in (OURS, FLA):
            row = {"part": "operator", "what": "against float64", "implementation": either, **shape.row}
            results.measure(row, functools.partial(measure_errors, either, shape, options, fla))


def measure_routers(results: Results, options) -> None:
    def measure(name, shape, training):
        one = shape.routes()
        inside, outside = size_of(*one.values()), 4 * one["logits"].numel()
        inputs = [one, *(shape.routes(seed) for seed in range(1, sets_beyond_cache(inside, shape.device)))]
        function = functools.partial(plain_routing, topk=shape.topk)
        if name == OURS:
            function = functools.partial(slot_routing, topk=shape.topk, backend=options.backend)
        moved = 3 * inside + 2 * outside if training else inside + outside
        return measure_call(options, function, inputs, moved, 0, training=training)

    for shape, training, name in itertools.product(options.shapes, (False, True), (OURS, TORCH)):
        row = {"part": "operator", "what": f"router forward{'+backward' * training}", "implementation": name}
        results.measure({**row, **shape.row}, functools.partial(measure, name, shape, training))


# One token.


def measure_step(name: str, graph: bool, shape: Shape, options, fla: ModuleType | None) -> dict[str, Any]:
    state_size = 4 * shape.batch * shape.heads * shape.slots * 2 * shape.size
    sets = sets_beyond_cache(state_size, shape.device)
    inputs = [shape.inputs(seed) for seed in range(sets)]
    states = [shape.states(shape.batch, seed) for seed in range(sets)]
    # The state is read; of it what is written to is stored.
    moved = size_of(*inputs[0].values(), inputs[0]["v"]) + state_size * (1 + shape.topk / shape.slots)
    if name == FLA:
        inputs = [for_fla(**one) for one in inputs]
        states = [
            (keys.mT.contiguous(), values.contiguous())
            for keys, values in (state.split(shape.size, -1) for state in states)
        ]

    @torch.no_grad()
    def steps():
        for one, state in zip(inputs, states, strict=True):
            if name == FLA:
                fla.fused_recurrent_gsa(**one, scale=1.0, initial_state=state, output_final_state=True)
            else:
                backend = "reference" if name == RECURRENCE else options.backend
                slot_memory(**one, initial_state=state, inplace=True, backend=backend)

    call = captured(steps) if graph else steps
    milliseconds = median_milliseconds(call, shape.device, options.seconds, options.least) / sets
    return {"milliseconds": milliseconds, "floor_milliseconds": moved / options.copied}


def measure_steps(results: Results, options, fla: ModuleType | None) -> None:
    graphs = (False, True) if options.device != "cpu" else (False,)
    for batch, graph, name in itertools.product(options.step_batches, graphs, options.names(fla)):
        shape = dataclasses.replace(options.shapes[0], batch=batch, length=1)
        what = "step in a CUDA graph" if graph else "step"
        row = {"part": "decode", "what": what, "implementation": name, **shape.row}
        results.measure(row, functools.partial(measure_step, name, graph, shape, options, fla))


# The model.


def ravens(config, with_fla: bool) -> dict[str, Callable[[], torch.nn.Module]]:
    """Functions that make a Raven of the same sizes, ours and that of flash-linear-attention with our weights."""
    from subquad import RavenForCausalLM

    def theirs():
        from fla.models.raven import RavenConfig as Config
        from fla.models.raven import RavenForCausalLM as Model

        names = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "hidden_act", "norm_eps")
        names += ("num_heads", "num_kv_heads", "num_slots", "topk", "expand_k", "expand_v", "feature_map")
        names += ("use_output_gate", "decay_type", "bias_rmm", "add_gumbel_noise", "router_score", "router_type")
        ours = RavenForCausalLM(config)
        model = Model(Config(**{name: getattr(config, name) for name in names}))
        model.load_state_dict(ours.state_dict())
        return model

    return {OURS: lambda: RavenForCausalLM(config), **({FLA: theirs} if with_fla else {})}


def measure_ravens(results: Results, options, fla: ModuleType | None) -> None:
    from models import measure_models

    models = ravens(options.config, with_fla=fla is not None)
    batch, length = options.prompts
    training = "" if options.device == "cpu" else "training, no optimizer"
    logits = measure_models(results, options, models, batch, length, options.texts, options.tokens, training)
    if logits.get(OURS) is not None and logits.get(FLA) is not None:
        error = relative_error(logits[FLA], logits[OURS].double())
        row = {"part": "models", "what": "prefill", "implementation": "logits", "batch": batch, "length": length}
        note = f"those of {FLA} differ by {error:.1e}"
        results.add({**row, "dtype": options.dtype_name, "note": note})


# The report.


def targets(rows: list[dict[str, Any]]) -> list[str]:
    """What part of the peer's time, how many times its tokens/s, what the first call takes; whether that is enough."""

    def shape(row):
        return tuple(row.get(field) for field in SHAPE)

    theirs = {shape(row): row for row in rows if row["implementation"] == FLA and row.get("milliseconds")}
    lines = []
    for row in rows:
        if row["implementation"] != OURS or not row.get("milliseconds"):
            continue
        what, peer = f"{row['what']}, {row['batch']} x {row['length']}", theirs.get(shape(row))
        if row["part"] == "first":
            seconds = row["milliseconds"] / 1e3
            met, figure = seconds <= MOST_SECONDS, f"{seconds:.1f} s, at most {MOST_SECONDS}"
        elif (row["part"], row["what"]) == ("models", "generate") or (
            row["part"] == "operator" and row["what"] in ("forward", "forward+backward")
        ):
            if peer is None:
                lines.append(f"{what}: no figure of {FLA}")
                continue
            ratio = row["milliseconds"] / peer["milliseconds"]
            if row["part"] == "operator":
                met, figure = ratio <= MOST_TIME, f"{ratio:.2f} of {FLA}'s time, at most {MOST_TIME}"
            else:
                met, figure = 1 / ratio >= LEAST_RATE, f"{1 / ratio:.1f} times {FLA}'s tokens/s, at least {LEAST_RATE}"
        else:
            continue
        lines.append(f"{what}: {figure}: {'met' if met else 'missed'}")
    return ["targets on an H200", *lines] if lines else []


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Stops what still runs after that long, by a TimeoutError."""

    def stop(number, frame):
        raise TimeoutError("the time is up")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    from subquad import RavenConfig
    from subquad.presets import preset_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, help="default: all on a GPU, all but the first call on a CPU")
    add_options(parser, "raven.csv (after every row), raven.json and raven.md", minutes=8)
    add_compile(parser)
    add("--first-call", choices=(OURS, FLA), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)

    settle(options)
    on_gpu, quick = options.device == "cuda", options.quick
    options.parts = options.parts or (PARTS if on_gpu else PARTS[1:])

    sizes = (2, 16, 12, 5) if quick else (4, 256, 256, 32)
    lengths = [(1, 24)] if quick else [(8, 2048), (8, 8192), (1, 65536)] if on_gpu else [(1, 1024)]
    options.shapes = [Shape(*shape, *sizes, options.dtype, options.device) for shape in lengths]
    options.error_shape = dataclasses.replace(options.shapes[0], batch=1, length=24 if quick else 256)
    options.step_batches = (1, 2) if quick else (1, 8, 32, 256) if on_gpu else (1, 8)

    def names(fla):
        """Whose operators are measured."""
        return (OURS, FLA) if fla is not None else (OURS,) if on_gpu else (OURS, RECURRENCE)

    options.names = names
    if quick:
        small = RavenConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=2, num_slots=12, topk=5)
    else:
        small = RavenConfig(hidden_size=512, num_hidden_layers=8, num_slots=128, topk=16, use_output_gate=True)
    options.config = preset_config("raven-0.4b") if on_gpu and not quick else small
    options.prompts = (2, 40) if quick else (4, 2048) if on_gpu else (1, 1024)
    options.texts = (1, 2) if quick else (1, 32) if on_gpu else (1,)
    options.tokens = 8 if quick else 128 if on_gpu else 32
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.first_call:
        print(first_call(options))
        return
    if options.device == "cpu":
        run_afresh(run, options)
        return
    # A peer that tunes its kernels may take minutes for one measurement.
    with within(60 * (options.minutes + 1)):
        run_afresh(run, options)


def run(options: argparse.Namespace) -> None:
    title = versions(options.device)
    path = None if options.out is None else options.out / "raven.csv"
    results = Results(path, options.device, options.minutes * 60, title)
    shape = options.shapes[0]
    print(f"{title}\n{shape.heads} heads of {shape.size}, {shape.slots} slots, top-{shape.topk}, {shape.row['dtype']}")
    if "first" in options.parts:
        measure_first_call(results, OURS, options)
    if "check" in options.parts and not check(results, options):
        results.bar.close()
        raise SystemExit(1)

    rates, fla = "", None
    if set(options.parts) - {"first", "check"}:
        rates = measure_ceilings(options)
    if set(options.parts) - {"check"}:
        fla = load_fla(OPERATORS, options.device)
    if "operator" in options.parts:
        measure_operators(results, OURS, options, None)
        measure_routers(results, options)
    if "first" in options.parts and fla is not None:
        measure_first_call(results, FLA, options)
    if "operator" in options.parts:
        for name in options.names(fla)[1:]:
            measure_operators(results, name, options, fla)
    if "decode" in options.parts:
        measure_steps(results, options, fla)
    if "models" in options.parts:
        measure_ravens(results, options, fla)
    results.bar.close()
    text = results.table()
    if options.device != "cpu":
        text = "\n".join((text, "\n  ".join(targets(results.rows))))
    print(text)
    write_report(results, options, "raven", title, rates, text)
    results.exit(options.minutes)


if __name__ == "__main__":
    main()
