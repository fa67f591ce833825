"""What every operator promises, with every backend. The cases are in `tests/kernel_cases`."""

import functools
import inspect
import itertools
import sys
import warnings

import pytest
import torch
from kernel_cases import (
    DEVICE,
    TRITON,
    Expected,
    Launches,
    Waits,
    assert_as_expected,
    assert_close,
    assert_results,
    cema,
    chunk_attention,
    contextualizer,
    delta_wkv,
    differentiable,
    dynamic_mixing,
    expect,
    expected,
    group_norm_gate,
    on_device,
    poisoned,
    result_dtypes,
    slot_memory,
    slot_routing,
    split_ranker,
    static_mixing,
    timestep_decay_norm,
    token_shift,
    weighted_gradients,
    wkv,
    working_memory,
)
from torch.utils._python_dispatch import TorchDispatchMode


OPERATORS = [
    module.OPERATOR
    for module in (
        cema,
        chunk_attention,
        contextualizer,
        delta_wkv,
        dynamic_mixing,
        group_norm_gate,
        slot_memory,
        slot_routing,
        split_ranker,
        static_mixing,
        timestep_decay_norm,
        token_shift,
        wkv,
        working_memory,
    )
]
WITH_KERNELS = [operator for operator in OPERATORS if operator.kernels]


def case(*values, backend=None, fast=False, thorough=False):
    """A parameter of a test: an operator, what it is called with, and with which backend."""
    marks = [TRITON] * (backend == "triton") + [pytest.mark.fast] * fast + [pytest.mark.thorough] * thorough
    if backend:
        values = (*values, backend)
    return pytest.param(*values, marks=marks, id="-".join(str(getattr(x, "name", x)) for x in values))


def backends(operator, *more):
    return (*more, "eager", *(["triton"] if operator.kernels else []))


def calls(*more, operators=OPERATORS, names=lambda operator: operator.calls):
    """An operator, one of its calls, and each backend."""
    return pytest.mark.parametrize(
        ("operator", "name", "backend"),
        [
            case(operator, name, backend=backend)
            for operator in operators
            for name in names(operator)
            for backend in backends(operator, *more)
        ],
    )


def each(*more, operators=OPERATORS):
    """An operator, and each backend."""
    return pytest.mark.parametrize(
        ("operator", "backend"),
        [case(operator, backend=backend) for operator in operators for backend in backends(operator, *more)],
    )


def with_options(operator, **options):
    return functools.partial(operator.function, **options)


def take_auto(monkeypatch, operator):
    """Lets `auto` be resolved by the custom operators, as on a GPU."""
    monkeypatch.setattr(operator.module(), "choose_backend", lambda operator, backend, *rest: backend)


@pytest.mark.parametrize(
    ("operator", "name", "backend"),
    [
        case(
            operator,
            name,
            backend=backend,
            fast=backend == "eager" and name in operator.calls,
            thorough=backend == "triton" and name not in operator.calls,
        )
        for operator in OPERATORS
        for name, example in operator.examples.items()
        for backend in example.backends
    ],
)
def test_forward_and_gradients(operator, name, backend, monkeypatch):
    example = operator.examples[name]
    operator.patch(monkeypatch, example)
    arguments, wanted = operator.make(**example.sizes), expected(operator, example.sizes)
    options = {"exact": backend != "triton" or operator.exact, "floor": example.floor}
    if backend == "reference":  # in the precision of the arguments, without gradients
        found = operator.run(arguments, backend=backend)
        assert_results(operator, arguments, found, wanted, example.tolerance, **options)
        return
    call = with_options(operator, backend=backend)
    assert_as_expected(operator, arguments, wanted, call, example.tolerance, **options)


@TRITON
@pytest.mark.parametrize(
    ("operator", "sizes"),
    [pytest.param(x, sizes, id=f"{x.name}-{sizes}") for x in WITH_KERNELS for sizes in x.caps],
)
def test_kernels_at_their_caps_and_past_them(operator, sizes):
    arguments = operator.make(**sizes)
    wanted = expect(operator, arguments)
    with poisoned():
        assert_as_expected(operator, arguments, wanted, with_options(operator, backend="triton"), 2e-5)


@calls("reference", operators=[x for x in OPERATORS if x.written], names=lambda operator: operator.in_place)
def test_in_place(operator, name, backend, monkeypatch):
    example = operator.examples[name]
    operator.patch(monkeypatch, example)
    arguments, wanted = operator.make(**example.sizes), expected(operator, example.sizes)
    check = functools.partial(assert_results, operator, arguments, wanted=wanted, tolerance=example.tolerance)
    tensors = {key: x if x._base is None else x._base for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    before = {key: x.clone() for key, x in tensors.items()}
    written = operator.written(arguments)
    contents = {index: x.clone() for index, x in written.items()}
    for x in arguments.values():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()  # which does not matter under no_grad
    with torch.no_grad():
        kept = operator.function(**arguments, backend=backend)
        check(found=operator.compared(kept))
        assert all(torch.equal(tensors[key], x) for key, x in before.items())
        found = operator.function(**arguments, inplace=True, backend=backend)
    check(found=operator.compared(found))
    results = found if isinstance(found, tuple) else (found,)
    for index, x in written.items():
        assert results[index].data_ptr() == x.data_ptr()
        assert (results[index].shape, results[index].stride()) == (x.shape, x.stride())
        with torch.no_grad():
            x.copy_(contents[index])
    for key, x in before.items():
        assert torch.equal(tensors[key], x), f"{key} has changed beside what is returned"


@each(operators=[operator for operator in OPERATORS if operator.written])
def test_in_place_is_seen_by_autograd(operator, backend):
    """What an earlier operation has saved may not be overwritten unnoticed."""
    arguments = operator.make(**operator.examples[operator.calls[0]].sizes)
    factor = torch.ones((), device=DEVICE, requires_grad=True)
    products = [x * factor for x in operator.written(arguments).values()]
    with torch.no_grad():
        operator.function(**arguments, inplace=True, backend=backend)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.quick_cases("*-eager", "*-(1, 1, 3)-triton")
@pytest.mark.parametrize(
    ("operator", "lengths", "backend"),
    [
        case(operator, lengths, backend=backend)
        for operator in OPERATORS
        if operator.pieces
        for lengths in operator.pieces.lengths
        for backend in backends(operator)
    ],
)
def test_carried_state(operator, lengths, backend, monkeypatch):
    """Calls with pieces of a text do what one call with the whole text does, and gradients go through the states."""
    pieces, sizes = operator.pieces, {**operator.pieces.sizes, "length": sum(lengths)}

    def in_pieces(inplace=False, **arguments):
        outs, state = [], {}
        for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)]):
            part = {**pieces.cut(arguments, start, stop), **state}
            options = {"inplace": True} if inplace else {}
            results = operator.function(**part, **options, backend=backend)
            results = results if isinstance(results, tuple) else (results,)
            outs.append(results[0])
            state = pieces.state(part, results)
        return torch.cat(outs, pieces.out), *results[1:]

    arguments, wanted = operator.make(**sizes), expected(operator, sizes)
    assert_as_expected(operator, arguments, wanted, in_pieces)
    if set(lengths) == {1} or lengths[0] == 1:
        for inplace in (False, *([True] if operator.written else [])):
            with torch.no_grad():
                found = in_pieces(inplace, **operator.make(**sizes))
            assert_results(operator, arguments, found, wanted, 1e-5)


@pytest.mark.parametrize("operator", [case(x, fast=True) for x in OPERATORS if x.documents])
def test_documents_are_independent(operator):
    """The reference computes packed documents as it computes each of them alone. Examples compare the backends."""
    documents = operator.documents
    arguments = operator.make(**documents.sizes)
    run = with_options(operator, backend="reference")
    packed = operator.compared(run(**arguments))
    outs = []
    for n, (start, stop) in enumerate(itertools.pairwise([0, *itertools.accumulate(documents.lengths)])):
        if start == stop:
            continue
        part = operator.pieces.cut({**arguments, **documents.alone(arguments, n)}, start, stop)
        alone = operator.compared(run(**part))
        outs.append(alone[0])
        for x, y in zip(packed[1:], alone[1:], strict=True):
            if len(x) == len(documents.lengths) != len(y):
                torch.testing.assert_close(x[n : n + 1], y)
    torch.testing.assert_close(packed[0], torch.cat(outs, operator.pieces.out))


@calls("reference", operators=[x for x in OPERATORS if x.state], names=lambda operator: operator.states)
def test_state_alone(operator, name, backend):
    arguments = operator.make(**operator.examples[name].sizes)
    double, leaves = differentiable(operator, arguments, torch.float64)
    state = operator.function(**double, backend="reference")[1]
    wanted = torch.autograd.grad(state.sin().sum(), list(leaves.values()), materialize_grads=True)
    before = {key: x.clone() for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    inputs, leaves = differentiable(operator, arguments)
    found = operator.state(inputs, backend)
    with torch.no_grad():
        without_graph = operator.state(arguments, backend)
    assert_close(found, state, 1e-5)
    assert_close(without_graph, state, 1e-5)
    grads = torch.autograd.grad(found.sin().sum(), list(leaves.values()), materialize_grads=True)
    for key, grad, wanted_grad in zip(leaves, grads, wanted, strict=True):
        assert_close(grad, wanted_grad, 1e-5, key, floor=1e-3)
    assert all(torch.equal(arguments[key], x) for key, x in before.items())


@each()
@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_strides(operator, backend, layout):
    """Also of the gradient that arrives: that of a sum is one number, expanded. The memory may begin anywhere."""

    def change(x):
        if not isinstance(x, torch.Tensor):
            return x
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        if x.dim() < 2:
            return x
        if layout == "transposed":
            x = x.transpose(0, -1)
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape).transpose(0, -1)
        return x[:1].expand_as(x) if x.dim() > 2 and x.is_floating_point() else x

    arguments = operator.make(**operator.examples[operator.calls[0]].sizes)
    arguments = {name: change(x) for name, x in arguments.items()}
    call = with_options(operator, backend=backend)
    assert_as_expected(operator, arguments, expect(operator, arguments, weight=1.0), call, floor=1.0)


@calls()
def test_inference_mode(operator, name, backend):
    """With tensors made there or before, whose state may then be changed in training."""
    example = operator.examples[name]
    wanted, inplace = expected(operator, example.sizes), [False] + [True] * (name in operator.in_place)
    for options in [{"inplace": True} if x else {} for x in inplace]:
        before = operator.make(**example.sizes)
        with torch.inference_mode():
            for arguments in (before, operator.make(**example.sizes)):
                found = operator.run(arguments, **options, backend=backend)
                assert_results(operator, arguments, found, wanted, example.tolerance)
        assert not any(x.is_inference() for x in before.values() if isinstance(x, torch.Tensor))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("operator", "name"),
    [
        case(operator, name)
        for operator in OPERATORS
        for name, x in operator.make(**operator.base).items()
        if isinstance(x, torch.Tensor) and operator.name != "dynamic_mixing"  # which takes one tensor
    ],
)
def test_tensors_on_another_device(operator, name):
    arguments = operator.make(**operator.base)
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match="is on .*meta|on meta"):
        operator.function(**arguments)


@each(operators=[x for x in OPERATORS if {"batch", "windows"} & inspect.signature(x.make).parameters.keys()])
def test_nothing_to_do(operator, backend):
    """No rows, or no windows."""
    axis = "windows" if "windows" in inspect.signature(operator.make).parameters else "batch"
    arguments, larger = operator.make(**{axis: 2}), operator.make(**{axis: 3})
    for key, x in arguments.items():
        if isinstance(x, torch.Tensor):
            for n, (old, new) in enumerate(zip(x.shape, larger[key].shape, strict=True)):
                x = x.narrow(n, 0, 0 if old < new else old)
            arguments[key] = x
    inputs, leaves = differentiable(operator, arguments)
    found = operator.run(inputs, backend=backend)
    wanted, more = (expected(operator, {axis: n}) for n in (2, 3))
    for x, y, z in zip(found, wanted.results, more.results, strict=True):
        assert x.shape == tuple(m if m == n else 0 for m, n in zip(y.shape, z.shape, strict=True))
    ones = [
        torch.ones_like(x) if weight is not None else None for x, weight in zip(found, wanted.weights, strict=True)
    ]
    for key, grad in weighted_gradients(found, leaves, ones).items():
        assert torch.equal(grad, torch.zeros_like(leaves[key]))


@pytest.mark.quick_cases("*-eager", "wkv-triton", "slot_memory-triton")
@each()
def test_autocast_changes_nothing(operator, backend):
    """Whatever its dtype is. Those whose backward pass is always an operator may run it under autocast, too."""
    for name, dtype in zip(operator.calls, (torch.bfloat16, torch.float16), strict=False):
        example = operator.examples[name]
        arguments, wanted = operator.make(**example.sizes), expected(operator, example.sizes)
        found = []
        for enabled in (False, True):
            inputs, leaves = differentiable(operator, arguments)
            with torch.autocast(DEVICE, dtype=dtype, enabled=enabled):
                results = operator.run(inputs, backend=backend)
                with torch.no_grad():
                    step = [*operator.run(arguments, backend=backend)]
                    if name in operator.states:
                        step.append(operator.state(arguments, backend))
            with torch.autocast(DEVICE, dtype=dtype, enabled=enabled and operator.lean):
                grads = weighted_gradients(results, leaves, wanted.weights)
            found.append([*results, *grads.values(), *step])
        for x, y in zip(*found, strict=True):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=0, atol=0 if DEVICE == "cpu" else 1e-6)
        if operator.plain_reference:
            with torch.autocast(DEVICE, dtype=dtype):
                reference = operator.run(arguments, backend="reference")
            assert_results(operator, arguments, reference, wanted, 1e-5)


@pytest.mark.thorough
@each()
def test_compiles_without_graph_breaks(operator, backend):
    torch.compiler.reset()
    call = with_options(operator, backend=backend)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for name in operator.calls:
        example = operator.examples[name]
        arguments, wanted = operator.make(**example.sizes), expected(operator, example.sizes)
        assert_as_expected(operator, arguments, wanted, compiled, example.tolerance)
    if operator.written is None:
        return
    in_place = torch.compile(functools.partial(call, inplace=True), fullgraph=True, backend="aot_eager")
    for name in [name for name in operator.in_place if name in operator.calls]:
        example = operator.examples[name]
        arguments, wanted = operator.make(**example.sizes), expected(operator, example.sizes)
        with torch.no_grad():
            found = in_place(**arguments)
        assert_results(operator, arguments, operator.compared(found), wanted, example.tolerance)
        results = found if isinstance(found, tuple) else (found,)
        for index, x in operator.written(arguments).items():
            assert torch.equal(results[index], x)
    # Of tensors that the graph makes.

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def of_made(**arguments):
        made = {
            key: x * 1.0 if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for key, x in arguments.items()
        }
        return call(**made, inplace=True)

    arguments = operator.make(**example.sizes)
    with torch.no_grad():
        found = of_made(**arguments)
    assert_results(operator, arguments, operator.compared(found), wanted, example.tolerance)


def is_backward(function):
    return function.name().endswith("_backward")


class Calls(TorchDispatchMode):
    """Notes which operators of the package are called, and with what."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "subquad_kernels":
            kept = [
                x.detach().clone().requires_grad_(not is_backward(function) and x.requires_grad)
                if isinstance(x, torch.Tensor)
                else x
                for x in args
            ]
            self.found.setdefault((function, *(x is None for x in args)), kept)
        return function(*args, **(kwargs or {}))


@pytest.mark.quick_cases(
    "*small-eager",
    "chunk_attention-float32-eager",
    "dynamic_mixing-margin, l1-eager",
    "group_norm_gate-length 17-eager",
    "slot_routing-one token-eager",
    "timestep_decay_norm-all, 3-eager",
    "token_shift-finch packed, 17-eager",
)
@calls()
def test_registration(operator, name, backend, monkeypatch, request):
    """`torch.library.opcheck` of the operators that a call runs: forward, backward, for one token, in place."""
    backend = "auto" if backend == "eager" and operator.kernels else backend
    take_auto(monkeypatch, operator)
    example = operator.examples[name]
    operator.patch(monkeypatch, example)
    with Calls() as noted:
        inputs, leaves = differentiable(operator, operator.make(**example.sizes))
        results = operator.run(inputs, backend=backend)
        weighted_gradients(results, leaves, expected(operator, example.sizes).weights)
        with torch.no_grad():
            arguments = operator.make(**example.sizes)
            operator.function(**arguments, backend=backend)
            if operator.written and name in operator.in_place:
                operator.function(**arguments, inplace=True, backend=backend)
            if name in operator.states:
                operator.state(arguments, backend)
    assert noted.found
    for (function, *_), args in noted.found.items():
        # Tracing of the forward operator traces its backward pass, and is the same with every backend and call.
        traced = is_backward(function) or request.node.get_closest_marker("thorough")
        checks = {"test_utils": ("test_schema", "test_faketensor")} if traced else {}
        torch.library.opcheck(function, tuple(args), **checks)


@each()
def test_tensors_without_storage(operator, backend):
    """Shapes, dtypes and devices, of results and of gradients."""
    for name in operator.calls:
        sizes = operator.examples[name].sizes
        wanted: Expected = expected(operator, sizes)
        arguments = {
            key: x.to("meta") if isinstance(x, torch.Tensor) else x
            for key, x in operator.make(**{**sizes, "dtype": torch.bfloat16}).items()
        }
        inputs, leaves = differentiable(operator, arguments)
        results = operator.run(inputs, backend=backend)
        dtypes = result_dtypes(operator, arguments)
        for n, (x, y) in enumerate(zip(results, wanted.results, strict=True)):
            assert (x.device.type, x.shape) == ("meta", y.shape)
            assert x.dtype == (dtypes[min(n, 1)] if y.is_floating_point() else y.dtype)
        for key, grad in weighted_gradients(results, leaves, wanted.weights).items():
            assert (grad.device.type, grad.shape, grad.dtype) == ("meta", leaves[key].shape, leaves[key].dtype)


@TRITON
@pytest.mark.fast
@pytest.mark.parametrize(
    ("operator", "name"),
    [
        case(cema.OPERATOR, "one token"),
        case(delta_wkv.OPERATOR, "one token"),
        case(group_norm_gate.OPERATOR, "length 1"),
        case(slot_memory.OPERATOR, "one token"),
        case(slot_routing.OPERATOR, "one token"),
        case(timestep_decay_norm.OPERATOR, "all, 1"),
        case(token_shift.OPERATOR, "before the LoRA, 1"),
        case(wkv.OPERATOR, "one token"),
        case(working_memory.OPERATOR, "step 0"),
    ],
)
def test_a_token_takes_little_python(operator, name, monkeypatch):
    """What surrounds the kernels, counted in calls: a call of torch's dispatcher alone takes longer than these do."""
    monkeypatch.setattr(operator.module("triton_kernels"), "launch", lambda *arguments, **constants: None)
    options = {"inplace": True} if operator.written else {}
    call = with_options(operator, **operator.make(**operator.examples[name].sizes), **options, backend="triton")
    events = []
    with torch.no_grad():
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        sys.setprofile(lambda frame, event, argument: events.append(event))
        call()
        sys.setprofile(None)
    assert not any("subquad_kernels::" in event.key for event in profile.key_averages())
    assert events.count("call") + events.count("c_call") < 100


@pytest.mark.parametrize("operator", OPERATORS, ids=repr)
def test_gradients_take_little_python(operator):
    """The bookkeeping of torch's custom operators takes longer than the kernels of a short sequence."""
    for name in operator.calls:
        inputs, leaves = differentiable(operator, operator.make(**operator.examples[name].sizes))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            results = [x for x in operator.run(inputs, backend="eager") if x.requires_grad]
            if results:
                grads = [torch.ones_like(x) for x in results]
                torch.autograd.grad(results, list(leaves.values()), grads, allow_unused=True)
        assert not any("subquad_kernels::" in event.key for event in profile.key_averages())


@TRITON
@pytest.mark.parametrize(
    ("operator", "name", "kind"),
    [
        case(operator, name, kind)
        for operator in WITH_KERNELS
        for kind, names in (
            ("forward", operator.calls),
            ("backward", operator.calls),
            ("in place", operator.in_place[:3]),
            ("state", operator.states),
        )
        for name in names
    ],
)
def test_eager_takes_over(operator, name, kind, monkeypatch):
    """Whichever launch of a call fails: one warning, and the results and states of plain torch."""
    take_auto(monkeypatch, operator)
    example = operator.examples[name]
    wanted = expected(operator, example.sizes)

    def run(launches):
        arguments = operator.make(**example.sizes)
        if kind == "backward":
            launches.works = False  # until the backward pass
            inputs, leaves = differentiable(operator, arguments)
            results = operator.run(inputs, backend="auto")
            launches.works = True
            return weighted_gradients(results, leaves, wanted.weights)
        with torch.no_grad():
            if kind == "state":
                return operator.state(arguments, "auto")
            return operator.run(arguments, **({"inplace": True} if kind == "in place" else {}), backend="auto")

    def check(found):
        arguments = operator.make(**example.sizes)
        if kind == "backward":
            parts = operator.parts(arguments)
            for key, grad in found.items():
                assert_close(grad, wanted.grads[key], example.tolerance, key, parts.get(key, ()), example.floor)
        elif kind == "state":
            assert_close(found, wanted.results[1], example.tolerance)
        else:
            assert_results(operator, arguments, found, wanted, example.tolerance)

    for number in itertools.count():
        # What launches before it do is seen in a state only.
        launches = Launches(monkeypatch, operator, broken=number, run=kind == "in place")
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            found = run(launches)
        if len(launches.names) <= number:
            break
        check(found)
        (message,) = [str(warning.message) for warning in noted if warning.category is RuntimeWarning]
        assert f"runs in plain torch: {launches.names[-1]} failed on {DEVICE}" in message
        assert message.endswith(": RuntimeError: no compiler")
    assert number > 0 or kind != "forward"


@calls()
def test_python_does_not_wait_for_the_device(operator, name, backend, monkeypatch):
    """With kernels never, and in plain torch once in a call at most."""
    for path in ("eager", "triton_kernels") if operator.kernels else ("eager",):
        monkeypatch.setattr(operator.module(path), "can_read_without_sync", lambda x: False, raising=False)
    if backend == "triton":
        Launches(monkeypatch, operator)
    arguments = operator.make(**operator.examples[name].sizes)
    inputs, leaves = differentiable(operator, arguments)
    options, most = {"inplace": True} if name in operator.in_place else {}, 0 if backend == "triton" else 1
    with Waits() as forward:
        results = [x for x in operator.run(inputs, backend=backend) if x.requires_grad]
    grads = [torch.ones_like(x) for x in results]
    with Waits() as backward:
        if results:
            torch.autograd.grad(results, list(leaves.values()), grads, allow_unused=True)
    with Waits() as inference, torch.no_grad():
        operator.function(**arguments, **options, backend=backend)
    for waits in (forward, backward, inference):
        assert len(waits.found) <= most, waits.found


@TRITON
@pytest.mark.parametrize(
    ("operator", "axis"),
    [
        case(operator, axis)
        for operator in WITH_KERNELS
        for axis in ("batch", "windows", "length", "leading", "heads", "current", "total")
        if axis in inspect.signature(operator.make).parameters
    ],
)
def test_grids_are_possible(operator, axis, monkeypatch):
    """
    A device runs at most 65,535 programs along the second and the third axis of a grid. More are refused, which does
    no harm to an operator of one kernel.
    """
    take_auto(monkeypatch, operator)

    def make(size, **sizes):
        return operator.make(**sizes, **{axis: (size,) if axis == "leading" else size})

    def make_large(size, **sizes):
        """Repeats what belongs to the first of three."""
        arguments, larger = make(2, **sizes), make(3, **sizes)
        for name, x in arguments.items():
            if isinstance(x, torch.Tensor):
                for n, (old, new) in enumerate(zip(x.shape, larger[name].shape, strict=True)):
                    if new > old:
                        x = x.narrow(n, 0, 1).expand(*x.shape[:n], old + (size - 2) * (new - old), *x.shape[n + 1 :])
                arguments[name] = x.contiguous()
        return arguments

    for length in {1, 5} if axis == "batch" and operator.pieces else {None}:
        sizes = {} if length is None else {"length": length}
        arguments = (make if axis in ("length", "total") else make_large)(2**16, **sizes)
        launches = Launches(monkeypatch, operator)
        inputs, leaves = differentiable(operator, arguments)
        results = [x for x in operator.run(inputs, backend="auto") if x.requires_grad]
        if results:
            grads = [torch.ones_like(x) for x in results]
            torch.autograd.grad(results, list(leaves.values()), grads, allow_unused=True)
        with torch.no_grad():
            operator.run(arguments, backend="auto")
        assert launches.names
        for name, grid in zip(launches.names, launches.grids, strict=True):
            assert operator.name == "split_ranker" or max(grid[1:], default=1) < 2**16, (name, grid)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("operator", "change", "message"),
    [
        pytest.param(operator, change, message, id=f"{operator.name}-{n}-{'-'.join(change)}")
        for operator in OPERATORS
        for n, (change, message) in enumerate(operator.wrong)
    ],
)
def test_wrong_arguments(operator, change, message):
    """An error that names the argument and its value, before any work."""
    arguments = {**operator.make(**operator.base), **on_device(change)}
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.device.type != "meta"]
    before = [x.detach().clone() for x in tensors]
    for inplace in {change.get("inplace", False), operator.written is not None}:
        with pytest.raises(ValueError, match=message):
            operator.function(**{**arguments, **({"inplace": inplace} if operator.written else {})})
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize(
    ("operator", "number", "backend"),
    [
        case(operator, number, backend=backend)
        for operator in OPERATORS
        for number in range(len(operator.wrong_values))
        for backend in backends(operator)
    ],
)
def test_wrong_values(operator, number, backend):
    if DEVICE == "cuda":
        return  # an assertion on the device, after which it could run no other test
    sizes, change, message = operator.wrong_values[number]
    with pytest.raises((ValueError, RuntimeError), match=message):
        operator.function(**{**operator.make(**sizes), **change}, backend=backend)


@pytest.mark.fast
@pytest.mark.parametrize("operator", [case(operator) for operator in OPERATORS])
def test_choice_of_the_backend(operator, monkeypatch):
    example = operator.examples[operator.calls[0]]
    arguments, wanted = operator.make(**example.sizes), expected(operator, example.sizes)
    available = "eager, reference, triton" if operator.kernels else "eager, reference$"
    with pytest.raises(ValueError, match=f"^backend='cuda': `{operator.name}` has {available}".replace("$", r"\.")):
        operator.function(**arguments, backend="cuda")
    for value in ("reference", "eager", "", "auto"):
        monkeypatch.setenv("SUBQUAD_BACKEND", value)
        assert_results(operator, arguments, operator.run(arguments), wanted, example.tolerance)
    monkeypatch.setenv("SUBQUAD_BACKEND", "nothing")
    with pytest.raises(ValueError, match=f"^SUBQUAD_BACKEND='nothing': `{operator.name}`"):
        operator.function(**arguments)
    if not operator.kernels:  # a choice of Triton for all operators leaves this one its plain torch
        monkeypatch.setenv("SUBQUAD_BACKEND", "triton")
        assert_results(operator, arguments, operator.run(arguments), wanted, example.tolerance)
        with pytest.raises(ValueError, match=f"^backend='triton': `{operator.name}` has eager, reference"):
            operator.function(**arguments, backend="triton")


@TRITON
@pytest.mark.fast
@pytest.mark.parametrize("operator", [case(operator) for operator in WITH_KERNELS])
def test_triton_is_refused_where_it_cannot_run(operator, monkeypatch):
    arguments = operator.make()
    double = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    with pytest.raises(ValueError, match="computes in float32, got float64"):
        operator.function(**double, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    arguments = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(ValueError, match="the tensors are on cpu"):
        operator.function(**arguments, backend="triton")


@each(operators=[operator for operator in OPERATORS if operator.lean])
def test_the_backward_pass_keeps_the_arguments_alone(operator, backend):
    inputs, _ = differentiable(operator, operator.make())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        operator.function(**inputs, backend=backend)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in inputs.values() if isinstance(x, torch.Tensor)}
