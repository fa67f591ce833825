"""WKV against its own recurrence in float64."""

import functools
import itertools

import pytest
import torch
from kernel_cases import DEVICE, TRITON, assert_same_results, relative_error, triton, without_compiler

import subquad_kernels.backend
from subquad_kernels import gated_wkv, group_norm_gate, wkv, wkv_state
from subquad_kernels.wkv import _wkv, _wkv_step
from subquad_kernels.wkv.masks import masks_for


# The Triton kernels walk a sequence from end to end, or find first what enters its segments.
EACH = pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(x, marks=TRITON) for x in ("triton", "triton in segments"))], indirect=True
)
# Where sequences are so short that they are one segment, or the same operator is asked for anyway.
PLAIN = pytest.mark.parametrize("backend", ["eager", triton])
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200)
# (weakest, strongest) log decay a step: mixed inside one head, almost none, almost total, and beyond any trained one.
DECAYS = {"trained": (-1e-6, -9.2), "weak": (-1e-6, -1e-6), "strong": (-9.2, -9.2), "extreme": (-1e-6, -150.0)}
# What the interpreter, which is slow, has time for: a length of each kind with every decay, the others with one each;
# every decay is static at some lengths and one a step at others.
CASES = [
    (length, decay, (place + number) % 2 == 1)
    for place, length in enumerate(LENGTHS)
    for number, decay in enumerate(DECAYS)
    if length in (1, 17, 65, 200) or number == place % 4
]


@pytest.fixture
def backend(request, monkeypatch):
    if request.param == "triton in segments":
        from subquad_kernels.wkv import triton_kernels

        monkeypatch.setattr(triton_kernels, "MIN_SEGMENT", 32)
    return request.param.split()[0]


def make(batch, length, heads=2, key=8, value=12, static=False, decay="trained", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    weakest, strongest = (torch.tensor(-x).log() for x in DECAYS[decay])
    shape = (heads, key) if static else (batch, length, heads, key)
    log_w = -torch.exp(weakest + (strongest - weakest) * torch.rand(shape, generator=generator))
    inputs = {
        "r": randn(batch, length, heads, key),
        "k": randn(batch, length, heads, key),
        "v": randn(batch, length, heads, value),
        "log_w": log_w.to(dtype),
        "u": randn(heads, key),
        "initial_state": randn(batch, heads, key, value),
    }
    return {name: x.to(DEVICE) for name, x in inputs.items()}


def oracle(inputs, **kwargs):
    return wkv(**{name: x.double() for name, x in inputs.items()}, backend="reference", **kwargs)


def assert_equal_to_recurrence(inputs, tolerance, **kwargs):
    """Outputs, states and every gradient."""
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    double = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected = wkv(**double, cu_seqlens=kwargs.get("cu_seqlens"), backend="reference")
    assert_same_results(wkv(**inputs, **kwargs), inputs, expected, double, tolerance)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_forward_and_gradients(length, decay, static):
    assert_equal_to_recurrence(make(2, length, static=static, decay=decay), 1e-5, backend="eager")


@TRITON
@pytest.mark.parametrize(("length", "decay", "static"), CASES)
def test_kernels(length, decay, static):
    inputs = make(2, length, heads=1 if length > 65 else 2, static=static, decay=decay)
    assert_equal_to_recurrence(inputs, 1e-5, backend="triton")


@pytest.mark.parametrize("backend", [pytest.param("triton in segments", marks=TRITON)], indirect=True)
@pytest.mark.parametrize(
    ("length", "decay", "static", "dtype"),
    [
        (63, "trained", True, torch.float32),
        (63, "strong", False, torch.bfloat16),
        (65, "strong", False, torch.float32),
        (65, "trained", True, torch.bfloat16),
        (130, "trained", False, torch.float32),
        (130, "strong", True, torch.bfloat16),
    ],
)
def test_segments(length, decay, static, dtype, backend):
    inputs = make(2, length, static=static, decay=decay, dtype=dtype)
    assert_equal_to_recurrence(inputs, 1e-5 if dtype == torch.float32 else 8e-3, backend=backend)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_total_decay(dtype, backend):
    inputs = make(2, 70, dtype=dtype)
    inputs["log_w"][:, ::7] = -torch.inf
    inputs["log_w"][:, 50:] = torch.finfo(dtype).min
    assert_equal_to_recurrence(inputs, 1e-5 if dtype == torch.float32 else 8e-3, backend=backend)


@TRITON
@pytest.mark.parametrize(("length", "decay", "per_step"), CASES)
def test_bfloat16(length, decay, per_step):
    shape = {"heads": 1 if length > 65 else 2, "static": not per_step, "decay": decay}
    inputs = make(2, length, dtype=torch.bfloat16, **shape)
    if length % 2:  # decays of both dtypes
        inputs["log_w"] = make(2, length, **shape)["log_w"]
    inputs["initial_state"] = inputs["initial_state"].float()
    assert_equal_to_recurrence(inputs, 8e-3, backend="triton")


@TRITON
@pytest.mark.parametrize("length", [1, 17, 65])
def test_float16(length):
    inputs = make(2, length, dtype=torch.float16)
    # The products are of numbers of 10 bits: in the interpreter, of 23.
    assert_equal_to_recurrence(inputs, 2e-3, backend="triton", out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("length", [1, 65])
def test_dtypes(dtype, tolerance, length):
    inputs = make(2, length, dtype=dtype)
    out, state = wkv(**inputs)
    expected_out, expected_state = oracle(inputs)
    assert out.dtype == dtype
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(out, expected_out) < tolerance
    # What enters is rounded, the accumulation is not.
    assert relative_error(state, expected_state) < (1e-12 if dtype == torch.float64 else 1e-6)


@EACH
@pytest.mark.parametrize(("key", "value"), [(1, 1), (3, 5), (8, 8), (64, 64), (100, 48), (128, 128), (16, 130)])
def test_head_sizes(key, value, backend):
    assert_equal_to_recurrence(make(1, 50, heads=1, key=key, value=value), 1e-5, backend=backend)


@EACH
@pytest.mark.parametrize("pieces", [(1,) * 9, (3, 1, 70, 1, 65), (64, 72), (129, 1)])
def test_carried_state(pieces, backend):
    length = sum(pieces)
    inputs = make(2, length)
    whole, whole_state = wkv(**inputs)
    state, start, outs = inputs["initial_state"], 0, []
    for piece in pieces:
        part = {name: inputs[name][:, start : start + piece] for name in ("r", "k", "v", "log_w")}
        out, state = wkv(**part, u=inputs["u"], initial_state=state, backend=backend)
        outs.append(out)
        start += piece
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, whole_state, atol=1e-5, rtol=1e-5)


@EACH
@pytest.mark.parametrize(
    ("lengths", "static"),
    [
        ((70,), False),
        ((3, 0, 64, 1, 37), False),
        ((3, 0, 64, 1, 37), True),
        ((1, 1, 1), True),
        ((0, 5), False),
        ((7, 0), True),
    ],
)
def test_packed_documents(lengths, static, backend):
    inputs = make(1, sum(lengths), static=static)
    inputs["initial_state"] = make(len(lengths), 1)["initial_state"]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    assert_equal_to_recurrence(inputs, 1e-5, cu_seqlens=bounds, backend=backend)


@EACH
def test_without_initial_state(backend):
    inputs = make(2, 70)
    inputs["initial_state"] = torch.zeros_like(inputs["initial_state"])
    expected = wkv(**inputs)
    del inputs["initial_state"]
    torch.testing.assert_close(wkv(**inputs, backend=backend), expected)
    first = {name: x[:, :1] if x.dim() == 4 else x for name, x in inputs.items()}
    torch.testing.assert_close(wkv(**first, backend=backend)[0], expected[0][:, :1])


@TRITON
def test_schedules(monkeypatch):
    from subquad_kernels.wkv import triton_kernels

    launched = []
    monkeypatch.setattr(triton_kernels, "launch", lambda kernel, grid, *args, **kwargs: launched.append(grid))

    def programs(batch, length, heads):
        launched.clear()
        r = torch.empty(batch, length, heads, 64, dtype=torch.bfloat16, device="meta")
        u = torch.empty(heads, 64, device="meta")
        triton_kernels.wkv_triton(r, r, r, r, u, None, None, masks_for(r, r, r), r.dtype)
        return [grid[0] for grid in launched]

    monkeypatch.setattr(triton_kernels, "multiprocessors", lambda x: 132)
    assert programs(8, 4096, 64) == [512]
    found, passed, output = programs(1, 65536, 64)
    assert found == output >= 500
    assert passed == 64 * 4
    assert programs(1, 300, 2) == [2]


@PLAIN
def test_in_place(backend):
    for length in (1, 20):
        inputs = make(2, length)
        expected = wkv(**inputs)
        state = inputs["initial_state"]
        with torch.no_grad():
            out, after = wkv(**inputs, inplace=True, backend=backend)
        assert after is state
        torch.testing.assert_close((out, state), expected, atol=1e-5, rtol=1e-5)


@PLAIN
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": torch.zeros(2, 5, 23)}, "`gate` must have shape"),
        ({"gate": torch.zeros(2, 5, 24, dtype=torch.int64)}, "`gate` must be floating point"),
        ({"weight": torch.zeros(3)}, "`weight` must have shape"),
        ({"bias": torch.zeros(24, device="meta")}, "`bias` is on meta"),
    ],
)
def test_gated_checks_before_any_work(change, message, length, backend):
    inputs = make(2, length)
    more = {"gate": torch.zeros(2, 5, 24), "weight": torch.ones(24), "bias": torch.ones(24), **change}
    more = {name: x if x.device.type == "meta" else x.to(DEVICE) for name, x in more.items()}
    more["gate"] = more["gate"][:, :length]
    state = inputs["initial_state"].clone()
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        gated_wkv(**inputs, **more, eps=1e-5, inplace=True, backend=backend)
    assert torch.equal(inputs["initial_state"], state)


@PLAIN
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated(dtype, static, length, inplace, backend):
    inputs = make(2, length, static=static, dtype=dtype)
    inputs["initial_state"] = inputs["initial_state"].float()
    gate = make(2, length, seed=1)["v"].flatten(2).to(dtype)
    weight, bias = torch.linspace(0.5, 2, 24, device=DEVICE), torch.linspace(-1, 1, 24, device=DEVICE)
    double = {name: x.double() for name, x in inputs.items()}
    out, state = wkv(**double, backend="reference")
    expected = group_norm_gate(out, gate.double(), weight.double(), bias.double(), 6.4e-4, backend="reference")
    before = inputs["initial_state"]
    with torch.no_grad():
        found, after = gated_wkv(
            **inputs, gate=gate, weight=weight, bias=bias, eps=6.4e-4, inplace=inplace, backend=backend
        )
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    assert found.dtype == dtype
    assert relative_error(found, expected) < tolerance
    assert relative_error(after, state) < tolerance
    assert (after is before) == inplace


@PLAIN
def test_gradients_of_one_gated_token(backend):
    inputs = {name: x.requires_grad_() for name, x in make(2, 1).items()}
    rest = {"gate": torch.randn(2, 1, 24), "weight": torch.rand(24), "bias": torch.randn(24)}
    inputs.update({name: x.to(DEVICE).requires_grad_() for name, x in rest.items()})
    grads = []
    for one in (backend, "reference"):
        out, state = gated_wkv(**inputs, eps=1e-5, backend=one)
        grads.append(torch.autograd.grad(out.sin().sum() + state.sin().sum(), list(inputs.values())))
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


@PLAIN
def test_long_memory_does_not_drift(backend):
    # After 65,536 steps of a decay of 1 - 1e-6 a product of rounded factors would be off by 9e-4.
    length = 65536 if backend == "eager" or DEVICE == "cuda" else 2048
    k = torch.zeros(1, length, 1, 2, device=DEVICE)
    k[:, 0] = 1.0
    v = torch.ones(1, length, 1, 2, device=DEVICE)
    log_w = torch.full((1, 2), -1e-6, device=DEVICE)
    state = wkv_state(None, k, v, log_w, backend=backend)
    expected = torch.exp(log_w.double() * (length - 1))
    tolerance = 5e-5 if backend == "eager" else 2e-6
    torch.testing.assert_close(state[0, 0, 0].double(), expected[0], rtol=tolerance, atol=0)


@PLAIN
def test_operator_registration(backend):
    for static, bounds in ((False, None), (True, torch.tensor([0, 3, 20], device=DEVICE))):
        inputs = make(1, 20, static=static)
        inputs["initial_state"] = make(1 if bounds is None else 2, 1)["initial_state"]
        arguments = (*(x.requires_grad_() for x in inputs.values()), bounds)
        masks = masks_for(inputs["r"], inputs["k"], inputs["v"]) if backend == "triton" else None
        torch.library.opcheck(_wkv, (*arguments, masks, torch.float32, backend))


@PLAIN
def test_registration_of_the_step(backend):
    inputs = make(2, 1)
    tokens = [inputs[name][:, 0] for name in ("r", "k", "v", "log_w")]
    gate, weight, bias = (torch.ones(*shape, device=DEVICE) for shape in ((2, 1, 24), (24,), (24,)))
    for state, more in itertools.product((None, inputs["initial_state"]), ((None,) * 3, (gate, weight, bias))):
        new_state = torch.ones_like(inputs["initial_state"])
        arguments = (*tokens, inputs["u"], state, new_state, *more, 1e-5, torch.float32, backend)
        torch.library.opcheck(_wkv_step, arguments)


@TRITON
def test_eager_takes_over(monkeypatch):
    from subquad_kernels.wkv import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    inputs = {name: x.requires_grad_() for name, x in make(2, 20).items()}
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        wkv(**inputs, backend="triton")
    masks = masks_for(inputs["r"], inputs["k"], inputs["v"])
    run = functools.partial(_wkv, *inputs.values(), None, masks, torch.float32, "auto")
    with pytest.warns(RuntimeWarning, match="no compiler"):
        found = run()
    assert len(subquad_kernels.backend._failed) == 1  # for this dtype and size
    torch.testing.assert_close(found, wkv(**inputs))
    grads = [torch.autograd.grad(one[0].sin().sum(), list(inputs.values())) for one in (run(), wkv(**inputs))]
    torch.testing.assert_close(*grads)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="`wkv_step` runs in plain torch"):
        first = [inputs[name][:, 0] for name in ("r", "k", "v", "log_w")]
        state = inputs["initial_state"].clone()
        out = _wkv_step(*first, inputs["u"], None, state, None, None, None, 0.0, torch.float32, "auto")
    part = {name: x[:, :1] if x.dim() == 4 and name != "initial_state" else x for name, x in inputs.items()}
    torch.testing.assert_close((out.unsqueeze(1), state), wkv(**part))


@pytest.mark.parametrize(("length", "dtype"), [(1, torch.float16), (40, torch.bfloat16)])
@PLAIN
def test_autocast_changes_nothing(length, dtype, backend):
    inputs = {name: x.requires_grad_() for name, x in make(2, length).items()}

    def with_grads(out, state):
        return out, state, *torch.autograd.grad(out.sin().sum() + state.sin().sum(), list(inputs.values()))

    expected = with_grads(*wkv(**inputs, backend=backend))
    with torch.autocast(DEVICE, dtype=dtype):
        found = wkv(**inputs, backend=backend)
        reference = wkv(**inputs, backend="reference")
    found = with_grads(*found)
    assert all(x.dtype == torch.float32 for x in found)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(reference, found[:2], atol=1e-5, rtol=1e-5)


@TRITON
def test_masks_are_kept_as_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from subquad_kernels.wkv import masks

    masks._kept.cache_clear()
    with FakeTensorMode():
        wkv(**make(2, 20), backend="triton")
    assert_equal_to_recurrence(make(2, 20), 1e-5, backend="triton")


@PLAIN
def test_training_after_inference(backend):
    from subquad_kernels.wkv import masks

    masks._kept.cache_clear()
    with torch.inference_mode():
        wkv(**make(2, 20), backend=backend)
    assert_equal_to_recurrence(make(2, 20), 1e-5, backend=backend)


@PLAIN
def test_compiles_without_graph_breaks(backend):
    torch.compiler.reset()

    def loss(**inputs):
        return wkv(**inputs, backend=backend)[0].square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for length in (1, 33):
        inputs = make(2, length)
        leaf = inputs["k"].requires_grad_()
        (grad,) = torch.autograd.grad(compiled(**inputs), leaf)
        (expected,) = torch.autograd.grad(wkv(**inputs)[0].square().mean(), leaf)
        torch.testing.assert_close(grad, expected)
        with torch.no_grad():
            state = inputs["initial_state"].clone()
            step = torch.compile(functools.partial(wkv, inplace=True, backend=backend), fullgraph=True)
            found = step(**{**inputs, "initial_state": state})
            torch.testing.assert_close(found, wkv(**inputs), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(state, found[1])


def test_state_alone():
    inputs = make(2, 21)
    state = wkv_state(inputs["initial_state"], inputs["k"], inputs["v"], inputs["log_w"])
    torch.testing.assert_close(state, wkv(**inputs)[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": torch.zeros(2, 5, 2, 7)}, r"`r` must have shape \(2, 5, 2, 8\)"),
        ({"k": torch.zeros(2, 0, 2, 8)}, "`k` must be"),
        ({"v": torch.zeros(2, 4, 2, 12)}, "`v` must have shape"),
        ({"v": torch.tensor(1.0)}, "`v` must be"),
        ({"u": torch.zeros(2, 9)}, "`u` must have shape"),
        ({"log_w": torch.zeros(2, 5, 1, 8)}, "`log_w` must have shape"),
        ({"initial_state": torch.zeros(3, 2, 8, 12)}, "`initial_state` must have shape"),
        ({"u": torch.zeros(2, 8, dtype=torch.int64)}, "`u` must be floating point"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "batch of 2"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "`cu_seqlens` must be int32 or int64"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"inplace": True}, "`inplace` needs a float32"),
    ],
)
def test_errors_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        change = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
        inputs = make(2, 5)
        inputs["initial_state"] = (
            inputs["initial_state"].double() if change.get("inplace") else inputs["initial_state"]
        )
        wkv(**{**inputs, **change})


@pytest.mark.parametrize("backend", ["eager", "reference", triton])
@pytest.mark.parametrize("bounds", [[0, 3], [1, 5], [0, 4, 2, 5]])
def test_wrong_document_borders(bounds, backend):
    if (backend, DEVICE) == ("triton", "cuda"):
        return  # an assertion on the device, after which it could run no other test
    error = RuntimeError if backend == "triton" else ValueError
    with pytest.raises(error, match="`cu_seqlens` must rise from 0 to 5"):
        bounds = torch.tensor(bounds, device=DEVICE)
        wkv(**{**make(1, 5), "initial_state": None}, cu_seqlens=bounds, backend=backend)


@TRITON
def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    with pytest.raises(ValueError, match="computes in float32, got float64"):
        wkv(**make(1, 5, dtype=torch.float64), backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    inputs = {name: x.cpu() for name, x in make(1, 5).items()}
    with pytest.raises(ValueError, match="the tensors are on cpu"):
        wkv(**inputs, backend="triton")


def test_environment_chooses_the_backend(monkeypatch):
    inputs = make(1, 5)
    monkeypatch.setenv("SUBQUAD_BACKEND", "reference")
    torch.testing.assert_close(wkv(**inputs), wkv(**inputs, backend="eager"))
    for neutral in ("", "auto"):
        monkeypatch.setenv("SUBQUAD_BACKEND", neutral)
        torch.testing.assert_close(wkv(**inputs), wkv(**inputs, backend="eager"))
    monkeypatch.setenv("SUBQUAD_BACKEND", "nothing")
    with pytest.raises(ValueError, match="SUBQUAD_BACKEND='nothing'"):
        wkv(**inputs)
