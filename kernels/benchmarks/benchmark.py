"""The benchmark of an operator: it checks the cases of the operator, then measures them."""

import argparse
import dataclasses
import functools
import importlib
import inspect
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from measuring import (
    COMPILED,
    FLA,
    GRAPH,
    OURS,
    PLAIN,
    Check,
    Results,
    Targets,
    captured,
    extra_mebibytes,
    floor,
    judged_targets,
    make_parser,
    measure_ceilings,
    median_milliseconds,
    poisoned,
    python_of,
    relative_error,
    run_benchmark,
    sets_beyond_cache,
    settle,
    size_of,
    wall_milliseconds,
)
from torch import Tensor


EAGER, REFERENCE = "eager", "reference"
PARTS = ("check", "operator", "step", "first")
ABOUT_PARTS = """
parts (--parts):
  check     results, states written in place and every gradient, against the reference in float64. The kernels are
            checked on a GPU, and on a CPU with TRITON_INTERPRET=1; otherwise the eager form. If a case is wrong,
            nothing else is measured and the exit status is 1.
  operator  forward, and forward and backward, by length
  step      one token, or the last rows of one window: forward, as a call and in a CUDA graph
  first     the first forward and backward pass of a new process that finds nothing compiled (default: on a GPU)

`subquad` is the kernel on a GPU and the eager form on a CPU, `eager` the eager form on a GPU, `reference` the
recurrence one step at a time, `plain` a straightforward implementation in torch.

examples:
  python kernels/benchmarks/NAME.py --quick
  python kernels/benchmarks/NAME.py --parts operator --minutes 2 --out build/bench
  TRITON_INTERPRET=1 python kernels/benchmarks/NAME.py --parts check
"""
PATIENCE = 100  # seconds for the first call
BRIEF = 2**15  # tokens of the largest call with `--brief`
# How far a plain form may be from ours.
PEER_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """An implementation with other inputs. Converting ours to them is not measured."""

    convert: Callable[..., dict[str, Any]]
    function: Function

    def __call__(self, **inputs: Any) -> Any:
        return self.function(**self.convert(**inputs))


class Random:
    """Random float32 tensors."""

    def __init__(self, seed: int, device: str):
        self.how = {"generator": torch.Generator(device).manual_seed(seed), "device": device}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, **self.how)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, **self.how)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """
    A call of an operator. The benchmark of an operator is a subclass, whose fields are its sizes, whose class
    attributes are the cases, and whose methods make the call.

    Attributes:
        batch: rows, or windows.
        length: tokens of a row, or rows of a window.
        documents: the boundaries of packed documents.
        carried: whether the state of an earlier call is given, which the others do not know.
        compared: whose results in float64 are the expected ones: the reference's, or those of one of `others`.
    """

    batch: int = 1
    length: int = 1
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    documents: tuple[int, ...] | None = None
    carried: bool = False
    compared: str = REFERENCE

    # Sizes, by what they are for: "check" with every dtype, "small check" and "GPU check"; "quick", "cpu" and "cuda",
    # and the same after "step ".
    sizes: ClassVar[dict[str, list[dict[str, Any]]]] = {}
    tolerances: ClassVar[dict[torch.dtype, float]] = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
    # Names of what `ours` returns, and the inputs that it overwrites by them if it works in place.
    results: ClassVar[tuple[str, ...]] = ("out", "state")
    states: ClassVar[dict[str, str]] = {}
    # Which of `others` compute the same function, so that their results are checked, and which have kernels to round.
    exact: ClassVar[tuple[str, ...]] = (PLAIN,)
    peers: ClassVar[tuple[str, ...]] = (FLA,)
    # Tokens up to which the reference is measured.
    most_reference: ClassVar[int] = 0
    has_kernels: ClassVar[bool] = True
    has_gradients: ClassVar[bool] = True
    targets: ClassVar[Targets] = ()

    @property
    def name(self) -> str:
        """Of the operator, and of what the case calls of it."""
        return inspect.getmodule(type(self)).OPERATOR

    @property
    def row(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name, None) for name in ("batch", "length", "heads", "size")}
        return {**sizes, "dtype": str(self.dtype).removeprefix("torch.")}

    @property
    def is_step(self) -> bool:
        """Whether the call belongs to the part `step`, and is not differentiated there."""
        return self.length == 1

    @property
    def inplace(self) -> bool:
        """Whether the operator is called in place if no gradient is needed."""
        return self.is_step and bool(self.states)

    @property
    def count(self) -> int:
        """Of the documents, which have a state each."""
        return self.batch if self.documents is None else len(self.documents) - 1

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.documents is None else torch.tensor(self.documents, device=self.device)

    def inputs(self, random: Random) -> dict[str, Tensor]:
        """Of the operator, by name, as a model would give them."""
        raise NotImplementedError

    def ours(self, backend: str, inplace: bool = False, **inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Calls the operator."""
        raise NotImplementedError

    def others(self) -> dict[str, Function]:
        """Functions of the same inputs that return the output alone, by the name of the implementation."""
        return {}

    def written(
        self, held: dict[str, Tensor], inputs: dict[str, Tensor], expected: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """After a call in place with `held`, a copy of the inputs: pairs of tensors that must be equal."""
        return {f"{result} in place": (held[name], expected[result]) for name, result in self.states.items()}

    def tolerance(self, result: str) -> float:
        return self.tolerances[self.dtype]

    def operations(self, training: bool) -> float:
        """Of the matrix products that no implementation can save."""
        return 0

    def moved(self, inputs: dict[str, Tensor], out: Tensor, training: bool) -> float:
        """Bytes that are read or written once."""
        given, outside = size_of(*inputs.values()), size_of(out)
        if training:
            return 3 * given + 2 * outside
        return given + outside + size_of(*(x for name, x in inputs.items() if self.inplace and name in self.states))

    def implementation(self, name: str, backend: str, inplace: bool) -> Function:
        """A function of the inputs that returns the output alone."""
        if name == COMPILED:
            torch.compiler.reset()
            return torch.compile(self.others()[PLAIN], fullgraph=True, dynamic=False)
        if name not in (OURS, EAGER, REFERENCE):
            return self.others()[name]
        backend = backend if name == OURS else name

        def call(**inputs):
            found = self.ours(backend, inplace, **inputs)
            return found[0] if isinstance(found, tuple) else found

        return call


def cases_for(kind: type[Case], which: str, **fields: Any) -> list[Case]:
    return [kind(**sizes, **fields) for sizes in kind.sizes.get(which, ())]


# The check.


def checked_cases(kind: type[Case], options: argparse.Namespace) -> Iterator[Case]:
    if options.small_check:
        yield from cases_for(kind, "small check", device=options.device)
        return
    for dtype in options.check_dtypes:
        for which in ("check", *(("GPU check",) if options.device != "cpu" else ())):
            yield from cases_for(kind, which, dtype=dtype, device=options.device)


def differentiated(case: Case, function: Function, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results of a function and the gradients of its inputs for random weights of the results, by name."""
    leaves = {name: x.detach().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    found = function(**leaves)
    found = dict(zip(case.results, found if isinstance(found, tuple) else (found,), strict=False))
    random = Random(0, case.device)
    weights = {name: random.normal(*x.shape).to(case.dtype).to(x.dtype) for name, x in found.items()}
    smooth = [name for name, x in found.items() if x.requires_grad]
    leaves = {name: x for name, x in leaves.items() if x.requires_grad}
    grads: tuple[Tensor, ...] = ()
    if smooth:
        how = {"materialize_grads": True, "allow_unused": True}
        grads = torch.autograd.grad(
            [found[name] for name in smooth], list(leaves.values()), [weights[name] for name in smooth], **how
        )
    found = {name: x.detach() for name, x in found.items()}
    return found | {f"d{name}": x for name, x in zip(leaves, grads, strict=False)}


def errors_of(case: Case, backend: str) -> dict[str, tuple[float, float | None]]:
    """Errors by name, of ours and on a CPU of the exact others, and how large they may be."""
    inputs = case.inputs(Random(0, case.device))
    exact = case.others()[case.compared] if case.compared != REFERENCE else functools.partial(case.ours, REFERENCE)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    expected = differentiated(case, exact, wide)
    found = poisoned(lambda: differentiated(case, functools.partial(case.ours, backend), inputs))
    errors: dict[str, tuple[float, float | None]] = {
        name: (relative_error(found[name], x), case.tolerance(name)) for name, x in expected.items() if name in found
    }
    if case.inplace:
        # Without gradients a call takes another path, which may write over its inputs.
        held = {name: x.clone() for name, x in inputs.items()}
        with torch.no_grad():
            out = poisoned(lambda: case.implementation(OURS, backend, True)(**held))
        pairs = {"out in place": (out, expected["out"]), **case.written(held, inputs, expected)}
        errors |= {name: (relative_error(x, y.double()), case.tolerance(name)) for name, (x, y) in pairs.items()}
    if case.device != "cpu":  # where nothing but ours runs before ours is measured
        return errors
    others = {name: x for name, x in case.others().items() if name in case.exact and name != case.compared}
    if others and len(case.results) > 1:  # they return the first alone
        expected = differentiated(case, lambda **wide: exact(**wide)[0], wide)
    for name, function in others.items():
        # Plain torch rounds in bfloat16 what the kernels do not.
        allowed = PEER_TOLERANCES[case.dtype] if case.dtype == torch.float32 else None
        found = differentiated(case, function, inputs)
        errors |= {f"{name}'s {key}": (relative_error(found[key], x), allowed) for key, x in expected.items()}
    return errors


def check(results: Results, kind: type[Case], options: argparse.Namespace) -> None:
    """Exits with status 1 if a case is wrong."""
    results.forget("check")
    judged, backend = Check(results), options.check_backend if kind.has_kernels else EAGER
    for case in checked_cases(kind, options):
        what = case.name + " packed" * (case.documents is not None) + " step" * case.is_step
        judged.judge(what, case.row, errors_of(case, backend))
    judged.finish(f"{backend} against the reference in float64")


# The first call.


def first_call(kind: type[Case], name: str, options: argparse.Namespace) -> float:
    """Milliseconds of it in this process. The inputs are made and the libraries loaded before."""
    case = cases_for(kind, options.sizes, dtype=options.dtype, device=options.device)[0]
    inputs = {name: x.requires_grad_(x.is_floating_point()) for name, x in case.inputs(Random(0, case.device)).items()}
    function = case.implementation(name, options.backend, False)
    leaves = [x for x in inputs.values() if x.requires_grad]
    torch.ones(64, 64, device=case.device) @ torch.ones(64, 64, device=case.device)
    if case.device != "cpu":
        importlib.import_module("triton").runtime.driver.active.get_current_target()

    def call():
        out = function(**inputs)
        if out.requires_grad:
            torch.autograd.grad(out.sum(), leaves, allow_unused=True)

    return wall_milliseconds(call, case.device)


def measure_first_call(
    results: Results, script: str, case: Case, name: str, options: argparse.Namespace, patience: float = PATIENCE
) -> None:
    """In a process of its own, which finds nothing compiled."""
    command = [sys.executable, script, "--first-call", name, "--device", options.device, *["--quick"] * options.quick]

    def measure():
        limit = max(1.0, min(patience, results.deadline - time.monotonic()))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            how = {"capture_output": True, "text": True, "check": False, "env": os.environ | caches}
            try:
                done = subprocess.run(command, timeout=limit, **how)
            except subprocess.TimeoutExpired:
                return {"note": f"not done after {limit:.0f} s"}
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
        return {"milliseconds": float(done.stdout.split()[-1])}

    row = {"part": "first", "what": f"{case.name} first forward+backward", "implementation": name}
    results.measure({**row, **case.row}, measure)


# The operator, and one step of it.


def milliseconds_of(call: Callable[[], Any], case: Case, options: argparse.Namespace, **how: Any) -> float:
    return median_milliseconds(call, case.device, options.seconds, options.least, **how)


def measure_case(case: Case, name: str, training: bool, graph: bool, options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a row."""
    measured: dict[str, Any] = {}
    device, inplace = case.device, case.inplace and not training
    one = case.inputs(Random(0, device))
    function = case.implementation(name, options.backend if case.has_kernels else EAGER, inplace)
    with torch.no_grad():
        out = function(**one) if not inplace else function(**{key: x.clone() for key, x in one.items()})
        if name in (*case.exact, *case.peers, COMPILED) and case.compared == REFERENCE:
            ours = case.implementation(OURS, options.backend if case.has_kernels else EAGER, False)(**one)
            error = relative_error(out, ours.double())
            if name in case.peers:
                measured["note"] = f"the output differs from ours by {error:.1e}"
            elif not error < PEER_TOLERANCES[case.dtype]:
                raise ValueError(f"the output differs from ours by {error:.1e}")
    sets = sets_beyond_cache(size_of(*one.values()), device)
    inputs = [one, *(case.inputs(Random(seed, device)) for seed in range(1, sets))]
    if isinstance(function, Peer):
        function, inputs = function.function, [function.convert(**x) for x in inputs]
    turns = itertools.cycle(inputs)
    moved, operations = case.moved(one, out, training), case.operations(training)
    if training:
        grad = torch.randn(out.shape, device=device).to(out.dtype)
        leaves = {id(x): [y.requires_grad_() for y in x.values() if y.is_floating_point()] for x in inputs}

        def call():
            turn = next(turns)
            return torch.autograd.grad(function(**turn), leaves[id(turn)], grad, allow_unused=True)
    else:

        @torch.no_grad()
        def call():
            return function(**next(turns))

    if name == REFERENCE and case.length > 1:  # slow
        measured["milliseconds"] = milliseconds_of(call, case, options, most=3, warm_up=False)
    elif graph:
        replay = captured(lambda: [call() for _ in inputs])
        measured["milliseconds"] = milliseconds_of(replay, case, options) / sets
    else:
        # In place, what is overwritten again and again may grow beyond all bounds.
        measured["milliseconds"] = milliseconds_of(
            call, case, options, most=20 if inplace and not case.states else 200
        )
        measured["MiB"] = extra_mebibytes(call, device)
        if name == OURS and case.is_step and device != "cpu":
            measured["note"] = python_of(call, device)
    if name in (*case.exact, *case.peers, OURS, EAGER, REFERENCE, COMPILED):
        measured["floor_milliseconds"] = floor(options, operations, moved)
        rate = ("teraflops", operations / 1e9) if operations else ("gigabytes_per_second", moved / 1e6)
        measured[rate[0]] = rate[1] / measured["milliseconds"]
    return measured


def others_for(case: Case, training: bool, graph: bool, options: argparse.Namespace) -> Iterator[str]:
    """The reference results of the case."""
    if options.brief:
        yield from (name for name in case.others() if name in case.peers)
        return
    if options.device != "cpu" and case.has_kernels:
        yield EAGER
    yield from case.others()
    if options.compiles and PLAIN in case.others() and not graph:
        yield COMPILED
    # A step of the reference looks at its inputs, which a graph cannot capture.
    short = case.batch * case.length * (8 if training else 1) <= case.most_reference
    if not graph and (case.is_step or short):
        yield REFERENCE


def measure_cases(results: Results, kind: type[Case], part: str, ours: bool, options: argparse.Namespace) -> None:
    which = options.sizes if part == "operator" else f"step {options.sizes}"
    ways = ((False, False), (True, False)) if part == "operator" else ((False, False), (False, True))
    cases = cases_for(kind, which, dtype=options.dtype, device=options.device)
    if options.brief:
        most = BRIEF // 2 if options.share else BRIEF
        cases = [case for case in cases if case.batch * case.length <= most]
    for case in cases:
        for training, graph in ways:
            if (graph and options.device == "cpu") or (training and not case.has_gradients):
                continue
            what = {"operator": "forward+backward" if training else "forward", "step": "step" + GRAPH * graph}[part]
            for name in [OURS] if ours else others_for(case, training, graph, options):
                row = {"part": part, "what": f"{case.name} {what}", "implementation": name, **case.row}
                results.measure(row, functools.partial(measure_case, case, name, training, graph, options))


def main(kind: type[Case], arguments: list[str] | None = None) -> None:
    """The benchmark of an operator, as a command."""
    module = inspect.getmodule(kind)
    name, about = module.OPERATOR, ABOUT_PARTS.replace("NAME", module.OPERATOR)
    parser = make_parser(module.__doc__ + about, PARTS, minutes=4)
    parser.add_argument("--first-call", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    settle(options)
    if options.first_call:
        print(first_call(kind, options.first_call, options))
        return
    parts = options.parts or (PARTS if options.device != "cpu" else PARTS[:-1])
    first = cases_for(kind, options.sizes, dtype=options.dtype, device=options.device)[0]

    def measure(results: Results, options: argparse.Namespace) -> list[str]:
        if "check" in parts:
            check(results, kind, options)
        lines = []
        if set(parts) & {"operator", "step"}:
            lines.append(measure_ceilings(options))
        for ours in options.passes:
            for part in ("operator", "step"):
                if part in parts:
                    measure_cases(results, kind, part, ours, options)
        if "first" in parts:
            for name in [OURS] if options.ours else [OURS, *set(first.others()) & set(kind.peers)]:
                measure_first_call(results, module.__file__, first, name, options)
        return lines + (judged_targets(results.rows, kind.targets) if options.device != "cpu" else [])

    run_benchmark(name, options, measure)
