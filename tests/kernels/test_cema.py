"""The complex moving average against its own recurrence in float64."""

import functools
import itertools

import pytest
import torch
from kernel_cases import DEVICE, TRITON, assert_same_results, relative_error, triton, without_compiler

import subquad_kernels.backend
from subquad_kernels import cema, cema_state
from subquad_kernels.cema import _cema, _cema_step


EACH = pytest.mark.parametrize("backend", ["eager", triton])
FLAGS = ("none", "starts", "one row of starts", "left", "right", "both", "holes")
# Shares a and d of which 1 - ad is |q|: anything between, 1 - 1e-6, nearly 0, and 0 and 1 to the last bit.
DECAYS = {"mixed": None, "slow": -6.9, "fast": 6.9, "extreme": 100.0}


def make(batch, length, width=8, size=4, decay="mixed", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    level = DECAYS[decay]
    inputs = {
        "x": randn(batch, length, width),
        "alpha": randn(width, size) if level is None else torch.full_like(randn(width, size), level),
        "delta": randn(width, size) if level is None else torch.full_like(randn(width, size), level),
        "theta": randn(width) * 2,
        "gamma": randn(width, size, 2),
        "initial_state": randn(batch, width, size, 2),
    }
    if decay == "extreme":
        inputs["alpha"][::2] *= -1
    return inputs


def make_flags(kind, batch, length):
    generator = torch.Generator().manual_seed(length)
    places = torch.arange(length)
    left = places >= torch.tensor([length // 3, 0, length])[:batch, None]
    right = places < torch.tensor([length - length // 2, length, 1])[:batch, None]
    starts = torch.rand(batch, length, generator=generator) < 0.06
    starts[-1, 0] = True
    holes = torch.rand(batch, length, generator=generator) < 0.6
    flags = {
        "none": {},
        "starts": {"starts": starts},
        "one row of starts": {"starts": starts[-1:]},
        "left": {"real": left},
        "right": {"real": right},
        "both": {"real": left & right, "starts": starts},
        "holes": {"real": holes, "starts": starts},
    }[kind]
    return {name: x.to(DEVICE) for name, x in flags.items()}


def assert_equal_to_recurrence(inputs, tolerance, backend, **flags):
    """Outputs, states and every gradient."""
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    double = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected = cema(**double, **flags, backend="reference")
    assert_same_results(cema(**inputs, **flags, backend=backend), inputs, expected, double, tolerance)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    ("length", "width", "size", "slow"),
    [(1, 8, 4, 0), (2, 8, 1, 1), (17, 12, 16, 0), (64, 8, 4, 1), (65, 48, 4, 0), (200, 8, 4, 1)],
)
def test_forward_and_gradients(length, width, size, slow, flags):
    decay, dtype, tolerance = (
        ("mixed", torch.float64, 1e-11),
        ("slow", torch.float32, 2e-5),
    )[(slow + FLAGS.index(flags)) % 2]
    inputs = make(3, length, width, size, decay, dtype)
    assert_equal_to_recurrence(inputs, tolerance, "eager", **make_flags(flags, 3, length))


@pytest.mark.parametrize("decay", ["fast", "extreme"])
@EACH
def test_decays(decay, backend):
    assert_equal_to_recurrence(make(1, 50, size=2, decay=decay), 1e-5, backend)


@TRITON
@pytest.mark.parametrize(
    ("length", "width", "size", "decay", "flags", "dtype"),
    [
        (1, 8, 4, "mixed", "left", torch.float32),
        (2, 70, 1, "slow", "one row of starts", torch.float32),
        (67, 8, 5, "mixed", "none", torch.float32),
        (6, 8, 16, "mixed", "none", torch.bfloat16),
        (66, 8, 1, "mixed", "both", torch.float16),
    ],
)
def test_kernels(length, width, size, decay, flags, dtype):
    inputs = make(2, length, width, size, decay, dtype)
    inputs["initial_state"] = inputs["initial_state"].float()
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert_equal_to_recurrence(inputs, tolerance, "triton", **make_flags(flags, 2, length))


@TRITON
@pytest.mark.parametrize(
    ("batch", "length", "decay", "flags", "state"), [(1, 150, "slow", "none", False), (2, 90, "mixed", "holes", True)]
)
def test_segments(batch, length, decay, flags, state, monkeypatch):
    from subquad_kernels.cema import triton_kernels

    # What enters its segments is found first, where a row is long.
    monkeypatch.setattr(triton_kernels, "MIN_SEGMENT", 64)
    inputs = make(batch, length, size=2, decay=decay)
    if not state:
        del inputs["initial_state"]
    assert_equal_to_recurrence(inputs, 1e-5, "triton", **make_flags(flags, batch, length))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 70])
def test_half_precision(length, dtype):
    inputs = make(2, length, dtype=dtype)
    inputs["initial_state"] = inputs["initial_state"].float()
    double = {name: x.double() for name, x in inputs.items()}
    for backend in ("eager", "reference"):
        out, state = cema(**inputs, backend=backend)
        expected, expected_state = cema(**double)
        assert (out.dtype, state.dtype) == (dtype, torch.float32)
        assert relative_error(out, expected) < 8e-3
        # What enters is rounded, the accumulation is not.
        assert relative_error(state, expected_state) < 3e-6
    assert_equal_to_recurrence(inputs, 8e-3, "eager")


@EACH
@pytest.mark.parametrize("pieces", [(1, 1, 3), (33, 1, 4)])
def test_carried_state(pieces, backend):
    # Backend by backend: nothing but the pieces differs, and the gradient goes through the states.
    inputs = {name: x.requires_grad_() for name, x in make(2, sum(pieces), size=2).items()}
    flags = make_flags("both", 2, sum(pieces))
    state, start, outs = inputs["initial_state"], 0, []
    for piece in pieces:
        part = {name: x[:, start : start + piece] for name, x in (("x", inputs["x"]), *flags.items())}
        out, state = cema(**{**inputs, **part, "initial_state": state}, backend=backend)
        outs.append(out)
        start += piece
    found = torch.cat(outs, 1), state
    double = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    assert_same_results(found, inputs, cema(**double, **flags, backend="reference"), double, 1e-5)


@EACH
@pytest.mark.parametrize("length", [1, 20])
def test_without_initial_state(length, backend):
    inputs = make(2, length, size=2)
    inputs["initial_state"] = torch.zeros_like(inputs["initial_state"])
    expected = cema(**inputs, backend="reference")
    del inputs["initial_state"]
    torch.testing.assert_close(cema(**inputs, backend=backend), expected, atol=1e-5, rtol=1e-5)
    x = inputs["x"].requires_grad_()
    (grad,) = torch.autograd.grad(cema(**inputs, backend=backend)[0].sum(), x)
    (expected,) = torch.autograd.grad(cema(**inputs, backend="reference")[0].sum(), x)
    torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-5)


@EACH
@pytest.mark.parametrize("length", [1, 20])
def test_padding_is_not_looked_at(length, backend):
    inputs = make(2, length, size=2)
    real = make_flags("left", 2, length)["real"]
    real[0, 0] = False
    expected = cema(**inputs, real=real, backend="reference")
    inputs["x"] = inputs["x"].masked_fill(~real.unsqueeze(-1), torch.nan)
    torch.testing.assert_close(cema(**inputs, real=real, backend=backend), expected, atol=1e-5, rtol=1e-5)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    for grad in torch.autograd.grad(cema(**inputs, real=real, backend=backend)[0].sum(), list(inputs.values())):
        assert grad.isfinite().all()


@EACH
@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("flags", ["none", "both"])
def test_in_place(flags, length, backend):
    inputs, flags = make(2, length, size=3), make_flags(flags, 2, length)
    expected = cema(**inputs, **flags, backend="reference")
    state = inputs["initial_state"]
    with torch.no_grad():
        kept = cema(**inputs, **flags, backend=backend)
        out, after = cema(**inputs, **flags, inplace=True, backend=backend)
    assert after is state
    torch.testing.assert_close((out, state), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)


@EACH
def test_many_rows_of_one_token(backend):
    inputs, flags = make(19, 1, width=20, size=3), {"starts": torch.arange(19, device=DEVICE)[:, None] % 3 == 0}
    expected = cema(**inputs, **flags, backend="reference")
    torch.testing.assert_close(cema(**inputs, **flags, backend=backend), expected, atol=1e-5, rtol=1e-5)


def long_memory(length):
    inputs = make(1, length, width=2, size=2, decay="slow")
    inputs["initial_state"] *= 1000.0  # which is what is to be seen
    return inputs


@EACH
def test_long_memory_does_not_drift(backend):
    # Rounded to float32, q would turn the state by 1e-3 in 20,000 tokens.
    length = 20000 if backend == "eager" or DEVICE == "cuda" else 300
    inputs = long_memory(length)
    out, state = cema(**inputs, backend=backend)
    # The recurrence of 20,000 tokens in closed form, in float64.
    alpha, delta, theta = (inputs[name].double().sigmoid() for name in ("alpha", "delta", "theta"))
    angle = torch.arange(1, 3, device=DEVICE, dtype=torch.float64) * torch.pi * theta[:, None]
    log_q = torch.complex(torch.log1p(-alpha * delta), angle)
    powers = (log_q[..., None] * torch.arange(length, -1, -1, device=DEVICE)).exp()
    x, before = inputs["x"][0].double().T, torch.view_as_complex(inputs["initial_state"][0].double())
    expected = powers[..., 0] * before + (powers[..., 1:] * (alpha[..., None] * x[:, None])).sum(-1)
    assert relative_error(state[0], torch.view_as_real(expected)) < 3e-5
    last = (torch.view_as_complex(inputs["gamma"].double()) * expected).sum(-1).real
    assert relative_error(out[0, -1], last) < 3e-5


@EACH
def test_single_steps_do_not_drift(backend):
    inputs = long_memory(100)
    expected = cema(**{name: x.double() for name, x in inputs.items()})[1]
    state = inputs["initial_state"]
    with torch.no_grad():
        for x in inputs["x"].split(1, dim=1):
            _, state = cema(**{**inputs, "x": x, "initial_state": state}, inplace=True, backend=backend)
    assert relative_error(state, expected) < 5e-7


@TRITON
def test_schedules(monkeypatch):
    from subquad_kernels.cema import triton_kernels

    launched = []
    monkeypatch.setattr(triton_kernels, "launch", lambda kernel, grid, *args, **kwargs: launched.append(grid[0]))

    def programs(batch, length, width):
        launched.clear()
        inputs = make(1, 1, width, 16)
        inputs["x"] = torch.empty(batch, length, width, dtype=torch.bfloat16, device="meta")
        inputs["initial_state"] = None
        triton_kernels.cema_triton(**inputs, starts=None, real=None)
        return launched[1:]

    monkeypatch.setattr(triton_kernels, "multiprocessors", lambda x: 132)
    assert programs(8, 4096, 2048) == [256]
    assert programs(1, 300, 64) == [1]
    found, _, walked = programs(1, 32768, 4096)
    assert 396 <= found == walked <= 512


@EACH
@pytest.mark.parametrize("flags", ["none", "both"])
def test_operator_registration(flags, backend):
    for batch in (1, 2):
        inputs, given = make(batch, 5, size=2), make_flags(flags, batch, 5)
        leaves = [x.requires_grad_() for x in inputs.values()]
        if batch == 1:
            leaves[-1] = None
        torch.library.opcheck(_cema, (*leaves, given.get("starts"), given.get("real"), backend))


@EACH
def test_registration_of_the_step(backend):
    inputs = make(2, 1, size=2)
    first = [inputs[name] for name in ("x", "alpha", "delta", "theta", "gamma")]
    first[0] = first[0][:, 0]
    flags = torch.tensor([True, False], device=DEVICE), torch.tensor([False, True], device=DEVICE)
    for state, given in itertools.product((None, inputs["initial_state"]), ((None, None), flags)):
        new_state = torch.ones_like(inputs["initial_state"])
        torch.library.opcheck(_cema_step, (*first, state, new_state, *given, backend))


@TRITON
def test_eager_takes_over(monkeypatch):
    from subquad_kernels.cema import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    inputs = {name: x.requires_grad_() for name, x in make(2, 20).items()}
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        cema(**inputs, backend="triton")
    run = functools.partial(_cema, *inputs.values(), None, None, "auto")
    with pytest.warns(RuntimeWarning, match="`cema` runs in plain torch: no compiler"):
        found = run()
    expected = cema(**inputs, backend="eager")
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(one[0].sin().sum(), list(inputs.values())) for one in (run(), expected)]
    torch.testing.assert_close(*grads)
    first = [x.detach() for x in inputs.values()]
    state = first.pop().clone()
    with pytest.warns(RuntimeWarning, match="`cema_step` runs in plain torch"):
        out = _cema_step(first[0][:, 0], *first[1:], None, state, None, None, "auto")
    part = {name: x[:, :1] if name == "x" else x for name, x in inputs.items()}
    torch.testing.assert_close((out.unsqueeze(1), state), cema(**part, backend="reference"))


@pytest.mark.parametrize(("length", "dtype"), [(1, torch.float16), (20, torch.bfloat16)])
@EACH
def test_autocast_changes_nothing(length, dtype, backend):
    inputs = {name: x.requires_grad_() for name, x in make(2, length, size=2).items()}

    def with_grads(out, state):
        return out, state, *torch.autograd.grad(out.sin().sum() + state.sin().sum(), list(inputs.values()))

    expected = with_grads(*cema(**inputs, backend=backend))
    with torch.autocast(DEVICE, dtype=dtype):
        found = cema(**inputs, backend=backend)
        reference = cema(**inputs, backend="reference")
    found = with_grads(*found)
    assert all(x.dtype == torch.float32 for x in found)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(reference, found[:2], atol=1e-5, rtol=1e-5)


@EACH
def test_compiles_without_graph_breaks(backend):
    torch.compiler.reset()

    def loss(**inputs):
        out, state = cema(**inputs, backend=backend)
        return out.square().mean() + state.square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for length, flags in ((1, "left"), (9, "both")):
        inputs = {**make(2, length, size=2), **make_flags(flags, 2, length)}
        leaf = inputs["alpha"].requires_grad_()
        (grad,) = torch.autograd.grad(compiled(**inputs), leaf)
        (expected,) = torch.autograd.grad(loss(**inputs), leaf)
        torch.testing.assert_close(grad, expected)
        with torch.no_grad():
            state = inputs["initial_state"].clone()
            step = torch.compile(
                functools.partial(cema, inplace=True, backend=backend), fullgraph=True, backend="aot_eager"
            )
            found = step(**{**inputs, "initial_state": state})
            torch.testing.assert_close(found, cema(**inputs, backend="reference"), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(state, found[1])


def test_shapes_on_meta():
    inputs = {name: x.to("meta") for name, x in make(2, 9, dtype=torch.bfloat16).items()}
    for length in (1, 9):
        out, state = cema(**{**inputs, "x": inputs["x"][:, :length]})
        assert (out.shape, out.dtype, out.device.type) == ((2, length, 8), torch.bfloat16, "meta")
        assert (state.shape, state.dtype) == ((2, 8, 4, 2), torch.float32)


def test_state_alone():
    inputs, real = make(2, 21), make_flags("right", 2, 21)["real"]
    first = [inputs[name] for name in ("x", "alpha", "delta", "theta")]
    for given in (None, real):
        state = cema_state(inputs["initial_state"], *first, given)
        torch.testing.assert_close(state, cema(**inputs, real=given)[1])
    torch.testing.assert_close(
        cema_state(None, *first), cema(**{**inputs, "initial_state": None}, backend="reference")[1]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8)}, "`x` must be"),
        ({"x": torch.zeros(2, 0, 8)}, "`x` must be"),
        ({"x": torch.zeros(2, 5, 8, dtype=torch.int64)}, "`x` must be floating point"),
        ({"alpha": torch.zeros(8)}, "`alpha` must be"),
        ({"alpha": torch.zeros(9, 4)}, r"`alpha` must have shape \(8, 4\), got \(9, 4\)"),
        ({"delta": torch.zeros(8, 5)}, "`delta` must have shape"),
        ({"theta": torch.zeros(8, 4)}, "`theta` must have shape"),
        ({"gamma": torch.zeros(8, 4)}, "`gamma` must have shape"),
        ({"gamma": torch.zeros(8, 4, 2, device="meta")}, "`gamma` is on meta"),
        ({"initial_state": torch.zeros(2, 8, 4, dtype=torch.complex64)}, "`initial_state` must have shape"),
        ({"starts": torch.zeros(2, 5)}, "`starts` must be bool, got torch.float32"),
        ({"starts": torch.zeros(3, 5, dtype=torch.bool)}, r"`starts` must have shape \(2, 5\)"),
        ({"real": torch.zeros(1, 5, dtype=torch.bool)}, "`real` must have shape"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"inplace": True, "initial_state": None}, "`inplace` needs a float32"),
    ],
)
def test_errors_name_the_argument(change, message):
    change = {
        name: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
        for name, x in change.items()
    }
    with pytest.raises(ValueError, match=message):
        cema(**{**make(2, 5), **change})


@TRITON
def test_triton_refuses_float64():
    with pytest.raises(ValueError, match="computes in float32, got float64"):
        cema(**make(1, 5, dtype=torch.float64), backend="triton")
