"""What the tests of the operators share. Each module of this package is the case of one operator."""

import contextlib
import functools
import importlib
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import subquad_kernels.backend


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Without a GPU Triton's interpreter runs the kernels.
TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton for this platform")
triton = pytest.param("triton", marks=TRITON)
EACH = pytest.mark.parametrize("backend", ["eager", triton])

EAGER, KERNELS = ("eager",), ("triton",)
BOTH = EAGER + KERNELS
PLAIN = ("reference", "eager")
ALL = PLAIN + KERNELS


@dataclass(frozen=True, eq=False)
class Example:
    """
    A call that is compared with the reference.

    Args:
        sizes: what the operator's `make` takes.
        backends: the backends that run it.
        tolerance: relative error of results and gradients.
        patches: values of attributes of the operator's modules, for example `{"eager.VALUES": 64}`.
        floor: smallest norm of a result or gradient that errors are relative to.
    """

    sizes: dict = field(default_factory=dict)
    backends: tuple[str, ...] = BOTH
    tolerance: float = 1e-5
    patches: dict[str, Any] = field(default_factory=dict)
    floor: float = 1e-30


@dataclass(frozen=True)
class Pieces:
    """How a text is cut into several calls: the axis of time of arguments and of the first result, and what a call
    takes from the arguments and results of the call before it."""

    axes: dict[str, int]
    state: Callable[[dict, tuple], dict] = lambda arguments, results: {"initial_state": results[1]}
    out: int = 1
    lengths: tuple[tuple[int, ...], ...] = ((1, 1, 3), (33, 1, 4))
    sizes: dict = field(default_factory=dict)

    def cut(self, arguments: dict, start: int, stop: int) -> dict:
        given = {name: axis for name, axis in self.axes.items() if arguments.get(name) is not None}
        part = {name: arguments[name].narrow(axis, start, stop - start) for name, axis in given.items()}
        return {**arguments, **part}


@dataclass(frozen=True)
class Documents:
    """Packed documents: what `make` takes for such a row, and the arguments of document n alone, cut out of it."""

    sizes: dict
    lengths: tuple[int, ...]
    alone: Callable[[dict, int], dict]


def placed(inputs: dict, dtype, float32=(), state=True, documents=None, out_dtype=None) -> dict:
    """Arguments of a recurrence on the device, of a dtype but for those named in `float32`, and what else it takes."""
    inputs = {name: x.to(torch.float32 if name in float32 else dtype).to(DEVICE) for name, x in inputs.items()}
    if not state:
        del inputs["initial_state"]
    if documents:
        bounds = [0, *itertools.accumulate(documents)]
        inputs["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    return {**inputs, "out_dtype": out_dtype} if out_dtype else inputs


def own_state(part: dict, n: int) -> dict:
    """With `cu_seqlens` each document has a state."""
    return {"cu_seqlens": None, "initial_state": part["initial_state"][n : n + 1]}


def first_state(part: dict, n: int) -> dict:
    """With `starts` the state is that before the first document."""
    return {"starts": None, "initial_state": part["initial_state"] if n == 0 else None}


# Boundaries of documents that do not rise from 0 to the length of 5, for `Operator.wrong_values`.
WRONG_BOUNDS = tuple(
    ({"batch": 1, "state": False}, {"cu_seqlens": torch.tensor(bounds)}, "`cu_seqlens` must rise from 0 to 5")
    for bounds in ([0, 3], [1, 5], [0, 4, 2, 5])
)


def initial_state(arguments: dict) -> dict[int, torch.Tensor]:
    return {1: arguments["initial_state"]}


@dataclass(frozen=True, eq=False, repr=False)
class Operator:
    """
    The case of an operator.

    Args:
        function: the public function.
        make: the arguments of a call, from sizes that all have defaults. It takes `dtype`, too.
        examples: calls that are compared with the reference.
        calls: names of the small examples that every other test runs: one of each kind of call.
        wrong: changes of the arguments, and the ValueError that they raise.
        wrong_values: what `make` takes, changes of values that are found while the operator works, on a CPU, and the
            error.
        base: what `make` takes for the arguments that are changed.
        dtype: of the first result; other results are float32, or float64 if an argument is.
        constants: floating point arguments that have no gradient.
        results: the tensors that are compared, made from what the function returns.
        parts: sizes along the last axis of parts that are compared each by itself: of the first result (`"out"`) and
            of gradients by the name of the argument.
        written: the tensors that a call in place writes to, by the number of the result.
        in_place: names of the examples that are also run in place.
        state: the function that computes the second result alone, from the arguments and a backend.
        states: names of the examples that it is compared with.
        kernels: whether the operator has Triton kernels.
        exact: whether the kernels compute results of float32 exactly from arguments of half precision.
        lean: whether the backward pass keeps nothing but the arguments.
        plain_reference: whether autocast does not change the reference either.
        caps: sizes up to which a tile, a block or a fast path of the kernels goes, and what comes after them.
    """

    function: Callable
    make: Callable[..., dict]
    examples: dict[str, Example]
    calls: tuple[str, ...]
    wrong: list[tuple[dict, str]]
    dtype: Callable[[dict], torch.dtype]
    wrong_values: tuple[tuple[dict, dict, str], ...] = ()
    base: dict = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    results: Callable[..., tuple] = lambda *results: results
    parts: Callable[[dict], dict[str, tuple[int, ...]]] = lambda arguments: {}
    written: Callable[[dict], dict[int, torch.Tensor]] | None = None
    in_place: tuple[str, ...] = ()
    pieces: Pieces | None = None
    documents: Documents | None = None
    state: Callable[[dict, str], torch.Tensor] | None = None
    states: tuple[str, ...] = ()
    kernels: bool = True
    exact: bool = False
    lean: bool = False
    plain_reference: bool = True
    caps: tuple[dict, ...] = ()

    def __repr__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return self.function.__name__

    def module(self, path: str = "") -> Any:
        return importlib.import_module(f"subquad_kernels.{self.name}{path and '.' + path}")

    def patch(self, monkeypatch, example: Example) -> None:
        for path, value in example.patches.items():
            module, _, name = path.rpartition(".")
            monkeypatch.setattr(self.module(module), name, value)

    def run(self, arguments: dict, **options) -> tuple[torch.Tensor, ...]:
        return self.compared(self.function(**arguments, **options))

    def compared(self, results) -> tuple[torch.Tensor, ...]:
        return self.results(*(results if isinstance(results, tuple) else (results,)))


class Expected(NamedTuple):
    """Results of the reference in float64, weights of their sum, and its gradients by the name of the argument."""

    results: list[torch.Tensor]
    weights: list[torch.Tensor | None]
    grads: dict[str, torch.Tensor]


def differentiable(operator: Operator, arguments: dict, dtype: torch.dtype | None = None) -> tuple[dict, dict]:
    """The arguments with leaves in the layout that they have, and the leaves."""
    floats = {n: x.detach() for n, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    floats = {name: x.to(dtype or x.dtype) for name, x in floats.items()}
    leaves = {name: x.requires_grad_() for name, x in floats.items() if name not in operator.constants}
    return {**arguments, **floats}, leaves


def weighted_gradients(results, leaves: dict, weights, **options) -> dict[str, torch.Tensor]:
    pairs = [(x, weight.to(x)) for x, weight in zip(results, weights, strict=True) if weight is not None]
    if not pairs:
        return {}
    results, weights = map(list, zip(*pairs, strict=True))
    grads = torch.autograd.grad(results, list(leaves.values()), weights, **options)
    return dict(zip(leaves, grads, strict=True))


def expect(operator: Operator, arguments: dict, weight: float | None = None) -> Expected:
    """What the reference makes of the arguments. Weights are random numbers that every dtype has, or all the same."""
    arguments, leaves = differentiable(operator, arguments, torch.float64)
    results = operator.run(arguments, backend="reference")
    generator = torch.Generator().manual_seed(1)

    def weights_of(x):
        if weight is not None:
            return torch.tensor(weight, device=x.device).expand(x.shape)
        return torch.randn(x.shape, generator=generator).half().bfloat16().to(x.device)

    weights = [weights_of(x) if x.requires_grad else None for x in results]
    grads = weighted_gradients(results, leaves, weights, materialize_grads=True)
    return Expected([x.detach() for x in results], weights, grads)


@functools.cache
def _expected(operator: Operator, sizes: tuple) -> Expected:
    return expect(operator, operator.make(**dict(sizes)))


def expected(operator: Operator, sizes: dict) -> Expected:
    return _expected(operator, tuple(sorted(sizes.items())))


def relative_error(x: torch.Tensor, expected: torch.Tensor, floor: float = 1e-30) -> float:
    assert x.shape == expected.shape
    return ((x.double() - expected).norm() / expected.norm().clamp_min(floor)).item()


def assert_close(x, expected, tolerance: float, name="out", parts=(), floor: float = 1e-30) -> None:
    """Compares numbers by their relative error, each part by itself, and others exactly."""
    if not expected.is_floating_point():
        assert torch.equal(x, expected), name
        return
    assert x.shape == expected.shape, name
    parts = parts or (x.shape[-1] if x.dim() else 1,)
    sides = (one.reshape(*one.shape or (1,)).split(parts, dim=-1) for one in (x, expected))
    for part, expected_part in zip(*sides, strict=True):
        assert relative_error(part, expected_part, floor) < tolerance, name


def result_dtypes(operator: Operator, arguments: dict) -> tuple[torch.dtype, torch.dtype]:
    """Of the first result, and of the others."""
    floats = [x.dtype for x in tree_leaves(arguments) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return operator.dtype(arguments), torch.float64 if torch.float64 in floats else torch.float32


def assert_results(operator, arguments, found, wanted: Expected, tolerance, exact=False, floor: float = 1e-30) -> None:
    """Compares results. `exact` says that float32 accumulates whatever the arguments' precision is."""
    dtypes = result_dtypes(operator, arguments)
    for n, (x, y) in enumerate(zip(found, wanted.results, strict=True)):
        bound, parts = tolerance, operator.parts(arguments).get("out", ()) if n == 0 else ()
        if y.is_floating_point():
            assert x.dtype == dtypes[min(n, 1)], n
            if exact and x.dtype == torch.float32:
                bound = min(tolerance, 3e-6)
        assert_close(x, y, bound, f"result {n}", parts, floor)


def assert_as_expected(
    operator: Operator,
    arguments: dict,
    wanted: Expected,
    call: Callable,
    tolerance: float = 1e-5,
    exact: bool = False,
    floor: float = 1e-30,
) -> None:
    """Compares results and gradients, and the dtypes of both. No argument is changed."""
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    inputs, leaves = differentiable(operator, arguments)
    found = operator.compared(call(**inputs))
    assert_results(operator, arguments, found, wanted, tolerance, exact, floor)
    parts = operator.parts(arguments)
    for name, grad in weighted_gradients(found, leaves, wanted.weights).items():
        assert grad.dtype == leaves[name].dtype
        assert_close(grad, wanted.grads[name], tolerance, f"gradient of {name}", parts.get(name, ()), floor)
    for name, x in before.items():
        torch.testing.assert_close(arguments[name], x, rtol=0, atol=0, equal_nan=True, msg=f"{name} has changed")


def assert_like_reference(operator: Operator, arguments: dict, backend: str, **options) -> None:
    """Compares results and gradients of arguments that no example makes."""
    call = functools.partial(operator.function, backend=backend)
    assert_as_expected(operator, arguments, expect(operator, arguments), call, **options)


def unspecialized(kernel) -> tuple[str, ...]:
    """The arguments of a kernel for whose values Triton does not compile it again."""
    interpreted = hasattr(kernel, "rewriter")
    settings = kernel.rewriter.kwargs if interpreted else vars(kernel)
    return tuple(settings["do_not_specialize"] or ())


def on_device(change: dict) -> dict:
    """A change of arguments, whose tensors are written down without a device."""

    def move(x):
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            return x
        # A copy to another device would have another layout, if rows overlap.
        memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        return memory.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())

    return {name: move(x) for name, x in change.items()}


def assert_same_results(found, leaves: dict, expected, expected_leaves: dict, tolerance: float) -> None:
    """Compares tensors with those that a reference makes in float64, and the gradients of what they are made from."""
    for x, expected_x in zip(found, expected, strict=True):
        assert relative_error(x, expected_x) < tolerance
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in found]
    grads = torch.autograd.grad(found, list(leaves.values()), weights)
    expected = torch.autograd.grad(expected, list(expected_leaves.values()), [w.double() for w in weights])
    for (name, x), grad, expected_grad in zip(leaves.items(), grads, expected, strict=True):
        assert grad.dtype == x.dtype
        assert relative_error(grad, expected_grad) < tolerance, name


class Broken:
    """A kernel that does not compile."""

    def __init__(self, kernel):
        self.fn = kernel.fn

    def run(self, *arguments, grid, warmup, **constants):
        raise RuntimeError("no compiler")


class Launches:
    """
    Notes the launches of an operator's kernels, on a device that Triton seems to know, in a process of its own as it
    were. They do nothing unless `run`. The one with the number `broken` fails.
    """

    def __init__(self, monkeypatch, operator: Operator, broken: int | None = None, run: bool = False):
        self.names, self.grids, self.broken, self.run, self.works = [], [], broken, run, True
        monkeypatch.setattr(operator.module("triton_kernels"), "launch", self)
        monkeypatch.setattr(subquad_kernels.backend, "_works", lambda device: self.works)
        monkeypatch.setattr(subquad_kernels.backend, "_failed", {})
        monkeypatch.setattr(subquad_kernels.backend, "_warned", set())

    def __call__(self, kernel, grid, *arguments, **constants):
        if 0 in grid:
            return
        broken = len(self.names) == self.broken
        self.names.append(kernel.fn.__name__)
        self.grids.append(grid)
        if broken or self.run:
            subquad_kernels.backend.launch(Broken(kernel) if broken else kernel, grid, *arguments, **constants)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN, so that values which nobody has written are noticed."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = fills


class Waits:
    """Notes where Python would wait for a GPU: where it reads values of tensors, or sends it numbers."""

    READING = "tolist", "item", "nonzero", "cpu", "__bool__", "__int__", "__float__", "__index__"

    def __enter__(self):
        self.found, self.context = [], pytest.MonkeyPatch()
        for name in self.READING:
            self.context.setattr(torch.Tensor, name, self.noting(name, getattr(torch.Tensor, name)))
        for name in ("tensor", "as_tensor"):
            self.context.setattr(torch, name, self.noting(name, getattr(torch, name)))
        for name in ("__getitem__", "__setitem__"):
            self.context.setattr(torch.Tensor, name, self.noting_lists(name, getattr(torch.Tensor, name)))
        # An index of bools is looked for in the profile, because torch does not call the method.
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profile.__enter__()
        return self

    def noting(self, name, method):
        def read(tensor, *args, **kwargs):
            self.found.append((name, self.place()))
            return method(tensor, *args, **kwargs)

        return read

    @staticmethod
    def place() -> str:
        """The line of the package that is running; none if the loop of transformers' `generate` is."""
        for frame in reversed(traceback.extract_stack()):
            if "/subquad" in frame.filename:
                return f"{frame.filename}:{frame.lineno}"
            if "/transformers/generation/" in frame.filename:
                break
        return ""

    def noting_lists(self, name, method):
        def read(tensor, index, *args):
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, list) for i in indices):
                self.found.append((name, self.place()))
            return method(tensor, index, *args)

        return read

    def __exit__(self, *error):
        self.profile.__exit__(*error)
        self.context.undo()
        counts = {event.key: event.count for event in self.profile.key_averages()}
        indices = sum(counts.get(f"aten::{name}", 0) for name in ("nonzero", "masked_select", "_unique2"))
        indices -= [name for name, _ in self.found].count("nonzero")
        self.found += [("an index of bools", "")] * indices


class Made(TorchDispatchMode):
    """Notes the sizes of the tensors that operations make: in elements and in bytes, views of others aside."""

    def __init__(self):
        super().__init__()
        self.elements, self.bytes = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        known = [x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.elements.append(x.numel())
                self.bytes.append(x.nbytes)
        return made
