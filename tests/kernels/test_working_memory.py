"""The working memory against the paper's recurrence in float64."""

import functools

import pytest
import torch
from kernel_cases import DEVICE, TRITON, assert_same_results, relative_error, triton, without_compiler

import subquad_kernels.backend
from subquad_kernels import working_memory
from subquad_kernels.working_memory import _working_memory, _working_memory_step


# Triton's interpreter is slow: what it runs is small.
EACH = pytest.mark.parametrize("backend", ["eager", triton])
STATES = "memory", "normalizer"


def make(batch, length, keys, heads=2, key=4, value=6, dtype=torch.float32, seed=0):
    """As a model has them: with the heads next to the features."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    return {
        "q": randn(batch, length, heads, key).transpose(1, 2),
        "k": randn(batch, keys, heads, key).transpose(1, 2),
        "v": randn(batch, keys, heads, value).transpose(1, 2),
        "memory": randn(batch, heads, key, value),
        "normalizer": randn(batch, heads, key) + 1,
    }


def make_places(batch, length, chunks, chunk_size, seed=0):
    """Chunks that lie, begin and are missing at random, and tokens that read any version of the memory, or none."""
    generator = torch.Generator().manual_seed(seed)

    def draw(highest, *shape):
        return torch.randint(highest + 1, shape, generator=generator)

    leaving = torch.where(draw(3, batch, chunks) > 0, draw(4, batch, 1) + torch.arange(chunks) * chunk_size, -1)
    begins = torch.where(draw(1, batch, chunks) > 0, draw(chunk_size - 1, batch, chunks), -1)
    reads = []
    for _ in range(batch):
        row = [n for version in range(chunks + 1) for n in [-1] * draw(1) + [version] * draw(chunk_size)]
        row = row[draw(max(len(row) - length, 0)) :] + [-1] * length
        reads.append(row[:length])
    places = {"leaving": leaving, "begins": begins, "reads": torch.tensor(reads)}
    return {"chunk_size": chunk_size, **{name: x.to(DEVICE) for name, x in places.items()}}


def assert_equal_to_recurrence(inputs, places, tolerance, backend):
    """Outputs, states and every gradient."""
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    double = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    empty = {} if "memory" in inputs else dict.fromkeys(STATES)
    out, *states = working_memory(**double, **empty, **places, backend="reference")
    out = out + 0 * sum(x.sum() for x in double.values())  # of what is not used the gradient is 0
    found = working_memory(**inputs, **empty, **places, backend=backend)
    assert_same_results(found, inputs, (out, *states), double, tolerance)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("length", "chunks", "chunk_size"),
    [(1, 0, 4), (1, 1, 4), (1, 3, 2), (5, 1, 7), (16, 4, 4), (33, 5, 8), (13, 2, 32), (9, 0, 16), (6, 4, 1)],
)
def test_forward_and_gradients(length, chunks, chunk_size, seed):
    inputs = make(3, length, chunks * chunk_size + 4, dtype=torch.float64, seed=seed)
    assert_equal_to_recurrence(inputs, make_places(3, length, chunks, chunk_size, seed), 1e-12, "eager")


@TRITON
@pytest.mark.parametrize(
    ("batch", "length", "chunks", "chunk_size", "heads", "key", "value", "dtype"),
    [
        (2, 1, 0, 4, 1, 4, 6, torch.float32),
        (2, 9, 2, 5, 2, 20, 70, torch.float32),
        (1, 70, 2, 37, 1, 8, 12, torch.float32),
        (2, 13, 2, 8, 1, 16, 32, torch.float16),
        (2, 13, 2, 8, 1, 16, 32, torch.bfloat16),
    ],
)
def test_kernels(batch, length, chunks, chunk_size, heads, key, value, dtype):
    inputs = make(batch, length, chunks * chunk_size + 4, heads, key, value, dtype)
    inputs |= {name: inputs[name].float() for name in STATES}
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    assert_equal_to_recurrence(inputs, make_places(batch, length, chunks, chunk_size), tolerance, "triton")


def test_gradcheck():
    inputs = make(2, 5, 9, 1, 2, 3, torch.float64)
    places = make_places(2, 5, 2, 3, seed=1)
    arguments = [x.requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradcheck(lambda *x: working_memory(*x, **places, backend="eager"), arguments)


def make_rows(leaving, begins, reads, chunk_size=4):
    places = {"leaving": leaving, "begins": begins, "reads": reads}
    return {
        "chunk_size": chunk_size,
        **{name: torch.tensor(x, dtype=torch.int64, device=DEVICE) for name, x in places.items()},
    }


@EACH
@pytest.mark.parametrize("scale", [40, 1000])
def test_extreme_keys(scale, backend):
    inputs = make(1, 3, 12, heads=1)
    inputs["k"] = (inputs["k"] * scale).clamp(-60, 60)
    inputs["normalizer"] += inputs["k"][:, :, :4].logsumexp(2)  # nothing is overruled entirely
    # Of numbers as large as 60, float32 knows the exponential to 4e-6.
    assert_equal_to_recurrence(inputs, make_rows([[0, 4, 8]], [[-1, 2, -1]], [[1, 2, 3]]), 2e-5, backend)


@EACH
def test_empty_memory(backend):
    inputs = make(1, 9, 17, heads=1)
    places = make_rows([[1, 5, 9]], [[0, -1, 3]], [[-1, 1, 1, 1, 1, 2, 2, 3, 3]])
    expected = working_memory(**inputs, **places, backend="reference")
    states = {name: inputs.pop(name) for name in STATES}
    nothing = dict.fromkeys(STATES)
    torch.testing.assert_close(working_memory(**inputs, **nothing, **places, backend="reference"), expected)
    assert_equal_to_recurrence(inputs, places, 1e-5, backend)
    for places in (make_rows([[]], [[]], [[0] * 4 + [-1] * 5]), make_rows([[-1]], [[0]], [[-1] * 9])):
        _, *found = working_memory(**inputs, **nothing, **places, backend=backend)
        for x, state in zip(found, states.values(), strict=True):
            assert torch.equal(x, torch.zeros_like(state))


@EACH
def test_what_does_not_count_is_not_looked_at(backend):
    inputs, places = make(2, 2, 11, heads=1), make_rows([[1, 5], [-1, 5]], [[2, -1], [0, 3]], [[1, 2], [0, 2]])
    expected = working_memory(**inputs, **places, backend="reference")
    counted = torch.zeros(2, 11, dtype=torch.bool, device=DEVICE)
    counted[0, 3:9] = counted[1, 8] = True
    for name in ("k", "v"):
        inputs[name] = inputs[name].masked_fill(~counted[:, None, :, None], torch.nan).requires_grad_()
    found = working_memory(**inputs, **places, backend=backend)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    dk, dv = torch.autograd.grad(found[1].square().sum(), [inputs["k"], inputs["v"]])
    assert torch.equal((dv != 0).any(-1).any(1), counted)
    assert torch.equal((dk != 0).any(-1).any(1), counted & torch.tensor([[True], [False]], device=DEVICE))


def plan(start, stop, chunk_size, document):
    """
    Of the tokens start ... stop - 1 of a sequence whose second document begins at token `document`: the first key that
    is still needed, and where chunks leave, begin, and are read. A token reads the chunks before the previous one.
    """

    def absorbed(t):
        return max(t // chunk_size - 1, 0)

    done = absorbed(max(start - 1, 0))
    leaving = [chunk * chunk_size for chunk in range(done, absorbed(stop - 1))]
    begins = [document - at if 0 <= document - at < chunk_size else 0 if at == 0 else -1 for at in leaving]
    reads = [absorbed(t) - done if absorbed(t) else -1 for t in range(start, stop)]
    first = done * chunk_size
    return first, [at - first for at in leaving], begins, reads


@pytest.mark.parametrize(
    ("backend", "pieces"),
    [
        ("eager", (3, 1, 9, 12, 1)),
        ("eager", (1,) * 17),
        pytest.param("triton", (9, 1, 3, 1), marks=TRITON),
    ],
)
def test_carried_state(pieces, backend):
    length, chunk_size = sum(pieces), 4
    inputs = {name: x.requires_grad_() for name, x in make(2, length, length, heads=1).items() if name not in STATES}
    double = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}

    def run(q, k, v, pieces, backend):
        states, start, outs = (None, None), 0, []
        for piece in pieces:
            (first, *row), (_, *other) = (plan(start, start + piece, chunk_size, document) for document in (5, 8))
            places = make_rows(*zip(row, other, strict=True), chunk_size)
            part = q[:, :, start : start + piece], *(x[:, :, first : start + piece] for x in (k, v))
            out, *states = working_memory(*part, *states, **places, backend=backend)
            outs.append(out)
            start += piece
        return torch.cat(outs, 2), *states

    found = run(**inputs, pieces=pieces, backend=backend)
    with torch.no_grad():
        without_graph = run(**inputs, pieces=pieces, backend=backend)
    torch.testing.assert_close(without_graph, found, atol=1e-5, rtol=1e-5)
    assert_same_results(found, inputs, run(**double, pieces=(length,), backend="reference"), double, 1e-5)


STEPS = [
    make_rows([[1], [-1], [0]], [[-1], [3], [2]], [[1], [1], [1]]),
    make_rows([[0], [1], [1]], [[-1], [-1], [1]], [[0], [-1], [1]]),
    make_rows([[-1]] * 3, [[0], [-1], [2]], [[0], [-1], [1]]),
]


@EACH
@pytest.mark.parametrize("places", STEPS)
def test_step(places, backend):
    inputs = make(3, 1, 6)
    double = {name: x.double() for name, x in inputs.items()}
    expected = working_memory(**double, **places, backend="reference")
    before = [inputs[name].clone() for name in STATES]
    kept = places["leaving"][:, 0] < 0
    for inplace in (False, True):
        with torch.no_grad():
            out, *states = working_memory(**inputs, **places, inplace=inplace, backend=backend)
        for x, y in zip((out, *states), expected, strict=True):
            assert relative_error(x, y) < 1e-5
        for name, state, x in zip(STATES, states, before, strict=True):
            assert (state is inputs[name]) == inplace
            assert inplace or torch.equal(inputs[name], x)
            assert torch.equal(state[kept], x[kept])


def test_step_works_for_the_rows_that_absorb(monkeypatch):
    from subquad_kernels.working_memory import eager

    absorb, rows = eager._absorb, []
    monkeypatch.setattr(eager, "_absorb", lambda memory, *rest: rows.append(len(memory)) or absorb(memory, *rest))
    for places in STEPS:
        working_memory(**make(3, 1, 6), **places, backend="eager")
    assert rows == [2, 3]


@EACH
def test_step_of_an_empty_memory(backend):
    inputs = {**make(1, 1, 6), **dict.fromkeys(STATES)}
    places = make_rows([[1]], [[0]], [[1]])
    found = working_memory(**inputs, **places, backend=backend)
    torch.testing.assert_close(found, working_memory(**inputs, **places, backend="reference"), atol=1e-5, rtol=1e-5)


@EACH
def test_in_place_of_many_tokens(backend):
    inputs, places = make(2, 9, 12, heads=1), make_places(2, 9, 2, 4)
    expected = working_memory(**inputs, **places, backend="reference")
    found = working_memory(**inputs, **places, inplace=True, backend=backend)
    assert found[1] is inputs["memory"]
    assert found[2] is inputs["normalizer"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("length", [1, 17])
def test_half_precision(length, dtype, tolerance):
    inputs, places = make(2, length, 20, dtype=dtype), make_places(2, length, 1 if length == 1 else 3, 4, seed=3)
    inputs |= {name: inputs[name].float() for name in STATES}
    double = {name: x.double() for name, x in inputs.items()}
    expected = working_memory(**double, **places, backend="reference")
    for backend in ("eager", "reference"):
        found = working_memory(**inputs, **places, backend=backend)
        assert [x.dtype for x in found] == [dtype, torch.float32, torch.float32]
        # What enters is rounded, the accumulation is not.
        for x, y, bound in zip(found, expected, (tolerance, 1e-6, 1e-6), strict=True):
            assert relative_error(x, y) < bound
    assert_equal_to_recurrence(inputs, places, tolerance, "eager")


@pytest.mark.parametrize(("backend", "length"), [("eager", 1), ("eager", 9), pytest.param("triton", 1, marks=TRITON)])
def test_autocast_changes_nothing(backend, length):
    inputs, places = make(1, length, 12, heads=1), make_rows([[1]], [[-1]], [([1] * 4 + [-1] * 5)[:length]])
    leaves = [x.requires_grad_() for x in inputs.values()]

    def run(backend):
        with torch.no_grad():
            without_graph = working_memory(**inputs, **places, backend=backend)
        found = working_memory(**inputs, **places, backend=backend)
        return *found, *without_graph, *torch.autograd.grad(sum(x.sin().sum() for x in found), leaves)

    expected = run(backend)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = run(backend)
        reference = working_memory(**inputs, **places, backend="reference")
    assert all(x.dtype == torch.float32 for x in found)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(reference, found[:3], atol=1e-5, rtol=1e-5)


@EACH
def test_compiles_without_graph_breaks(backend):
    torch.compiler.reset()
    compiled = torch.compile(
        functools.partial(working_memory, backend=backend), fullgraph=True, backend="aot_eager", dynamic=False
    )
    inputs, places = make(1, 5, 6, heads=1), make_rows([[2]], [[-1]], [[0, 0, 1, 1, 1]])
    leaves = [x.requires_grad_() for x in inputs.values()]
    found, expected = compiled(**inputs, **places), working_memory(**inputs, **places, backend=backend)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(sum(x.sin().sum() for x in one), leaves) for one in (found, expected)]
    torch.testing.assert_close(*grads)

    inputs, places = make(3, 1, 6), STEPS[0]
    expected = working_memory(**inputs, **places, backend="reference")
    found = compiled(**inputs, **places, inplace=True)
    assert found[1] is inputs["memory"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 9])
def test_meta_device(length):
    inputs, places = make(2, length, 12, dtype=torch.bfloat16), make_places(2, length, 1, 4)
    expected = working_memory(**inputs, **places)
    inputs, places = (
        {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        for arguments in (inputs, places)
    )
    for x, y in zip(working_memory(**inputs, **places), expected, strict=True):
        assert (x.device.type, x.shape, x.dtype) == ("meta", y.shape, y.dtype)


@pytest.mark.parametrize(
    ("backend", "empty"), [("eager", False), ("eager", True), pytest.param("triton", False, marks=TRITON)]
)
def test_operator_registration(backend, empty):
    inputs, places = make(1, 2, 6, heads=1), make_rows([[2]], [[0]], [[-1, 1]])
    if empty:
        inputs |= dict.fromkeys(STATES)
    tensors = [None if x is None else x.requires_grad_() for x in inputs.values()]
    chunk_size, *integers = places.values()
    torch.library.opcheck(_working_memory, (*tensors, *integers, chunk_size, backend))


@EACH
def test_registration_of_the_step(backend):
    chunk_size, *integers = STEPS[0].values()
    torch.library.opcheck(_working_memory_step, (*make(3, 1, 6).values(), *integers, chunk_size, backend))


@TRITON
def test_eager_takes_over(monkeypatch):
    from subquad_kernels.working_memory import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    inputs, places = make(2, 9, 12), make_places(2, 9, 2, 4)
    leaves = [x.requires_grad_() for x in inputs.values()]
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        working_memory(**inputs, **places, backend="triton")
    chunk_size, *integers = places.values()
    run = functools.partial(_working_memory, *leaves, *integers, chunk_size, "auto")
    with pytest.warns(RuntimeWarning, match="`working_memory` runs in plain torch: no compiler"):
        found = run()
    expected = working_memory(**inputs, **places, backend="eager")
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(one[0].sin().sum(), leaves) for one in (run(), expected)]
    torch.testing.assert_close(*grads)
    inputs = make(3, 1, 6)
    expected = working_memory(**inputs, **STEPS[0], backend="reference")
    chunk_size, *integers = STEPS[0].values()
    with pytest.warns(RuntimeWarning, match="`working_memory_step` runs in plain torch"):
        out = _working_memory_step(*inputs.values(), *integers, chunk_size, "auto")
    torch.testing.assert_close((out, inputs["memory"], inputs["normalizer"]), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 2, 5)}, "`q` must be"),
        ({"q": torch.zeros(2, 2, 5, 4, dtype=torch.int64)}, "`q` must be floating point, got torch.int64"),
        ({"k": torch.zeros(2, 2, 0, 4)}, "`k` must be"),
        ({"k": torch.zeros(2, 2, 12, 5)}, r"`k` must have shape \(2, 2, 12, 4\), got \(2, 2, 12, 5\)"),
        ({"v": torch.zeros(2, 2, 11, 6)}, "`v` must have shape"),
        ({"v": torch.zeros(2, 2, 12, 6, device="meta")}, "`v` is on meta"),
        ({"memory": torch.zeros(2, 2, 6, 4)}, "`memory` must have shape"),
        ({"memory": None}, "`memory` and `normalizer` go together"),
        ({"normalizer": torch.zeros(2, 2, 6)}, "`normalizer` must have shape"),
        ({"leaving": torch.zeros(2, dtype=torch.int64)}, r"`leaving` must be \(2, chunks\)"),
        ({"leaving": torch.zeros(3, 2, dtype=torch.int64)}, r"`leaving` must have shape \(2, 2\), got \(3, 2\)"),
        ({"begins": torch.zeros(2, 1, dtype=torch.int64)}, "`begins` must have shape"),
        ({"begins": torch.zeros(2, 2, dtype=torch.int32)}, "`begins` must be int64, got torch.int32"),
        ({"reads": torch.zeros(2, 6, dtype=torch.int64)}, "`reads` must have shape"),
        ({"reads": torch.zeros(2, 5, dtype=torch.int64, device="meta")}, "`reads` is on meta"),
        ({"chunk_size": 0}, "`chunk_size` must be at least 1, got 0"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"inplace": True, "memory": None, "normalizer": None}, "`inplace` needs a float32, contiguous `memory`"),
        ({"inplace": True, "normalizer": torch.zeros(2, 2, 4, dtype=torch.float64)}, "contiguous `normalizer`"),
        ({"inplace": True, "memory": torch.zeros(2, 2, 6, 4).mT}, "`inplace` needs a float32, contiguous `memory`"),
        ({"inplace": True, "q": torch.zeros(2, 2, 5, 4, requires_grad=True)}, "`inplace` overwrites states"),
    ],
)
def test_errors_name_the_argument(change, message):
    movable = {name: x for name, x in change.items() if isinstance(x, torch.Tensor) and x.device.type != "meta"}
    inputs = {**make(2, 5, 12), **make_places(2, 5, 2, 4), **change}
    with pytest.raises(ValueError, match=message):
        working_memory(**{**inputs, **{name: x.to(DEVICE) for name, x in movable.items()}})


@TRITON
def test_triton_refuses_float64():
    with pytest.raises(ValueError, match="computes in float32, got float64"):
        working_memory(**make(1, 5, 12, dtype=torch.float64), **make_places(1, 5, 2, 4), backend="triton")


@EACH
@pytest.mark.parametrize(
    ("leaving", "begins", "reads", "message"),
    [
        ([2, 6], [0, 0], [0, 0, 1, 1, 2], "`leaving` must be -1 or where"),
        ([-2, 1], [0, 0], [0, 0, 1, 1, 2], "`leaving` must be"),
        ([1, 5], [4, -1], [0, 0, 1, 1, 2], "`begins` must be -1 or a token"),
        ([1, 5], [0, 0], [0, 0, 1, 1, 3], "`reads` must be -1 or up to"),
        ([1, 5], [0, 0], [1, 1, -1, 0, 0], "`reads` must .* rise"),
        ([1, 5], [0, 0], [1, 1, -1, 1, 2], "`reads` must .* rise"),
        ([1, 5], [0, 0], [1, 1, 1, 1, 1], "at most `chunk_size` of a number"),
    ],
)
def test_wrong_places(leaving, begins, reads, message, backend):
    if DEVICE == "cuda":
        return  # an assertion on the device, after which it could run no other test
    with pytest.raises(RuntimeError, match=message):
        working_memory(**make(1, 5, 9), **make_rows([leaving], [begins], [reads]), backend=backend)
