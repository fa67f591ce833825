"""WKV against its own recurrence in float64."""

import itertools

import pytest
import torch

from subquad_kernels import wkv, wkv_state
from subquad_kernels.wkv import _wkv


LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200)
# (weakest, strongest) log decay a step: mixed inside one head, almost none, almost total, and beyond any trained one.
DECAYS = {"trained": (-1e-6, -9.2), "weak": (-1e-6, -1e-6), "strong": (-9.2, -9.2), "extreme": (-1e-6, -150.0)}


def make(batch, length, heads=2, key=8, value=12, static=False, decay="trained", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    weakest, strongest = (torch.tensor(-x).log() for x in DECAYS[decay])
    shape = (heads, key) if static else (batch, length, heads, key)
    log_w = -torch.exp(weakest + (strongest - weakest) * torch.rand(shape, generator=generator))
    return {
        "r": randn(batch, length, heads, key),
        "k": randn(batch, length, heads, key),
        "v": randn(batch, length, heads, value),
        "log_w": log_w.to(dtype),
        "u": randn(heads, key),
        "initial_state": randn(batch, heads, key, value),
    }


def oracle(inputs, **kwargs):
    return wkv(**{name: x.double() for name, x in inputs.items()}, backend="reference", **kwargs)


def relative_error(x, expected):
    return ((x.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_forward_and_gradients(length, decay, static):
    inputs = {name: x.requires_grad_() for name, x in make(2, length, static=static, decay=decay).items()}
    expected_inputs = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    out, state = wkv(**inputs)
    expected_out, expected_state = wkv(**expected_inputs, backend="reference")
    assert relative_error(out, expected_out) < 1e-5
    assert relative_error(state, expected_state) < 1e-5

    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator) for x in (out, state)]
    grads = torch.autograd.grad((out, state), list(inputs.values()), weights)
    expected = torch.autograd.grad(
        (expected_out, expected_state), list(expected_inputs.values()), [w.double() for w in weights]
    )
    for name, grad, expected_grad in zip(inputs, grads, expected, strict=True):
        assert relative_error(grad, expected_grad) < 1e-5, name


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


@pytest.mark.parametrize("size", [1, 3, 8, 64, 100, 128])
def test_head_sizes(size):
    inputs = make(1, 70, heads=1, key=size, value=size)
    for x, expected in zip(wkv(**inputs), oracle(inputs), strict=True):
        assert relative_error(x, expected) < 1e-5


@pytest.mark.parametrize("pieces", [(1,) * 9, (3, 1, 70, 1, 125), (64, 64, 72), (199, 1)])
def test_carried_state(pieces):
    length = sum(pieces)
    inputs = make(2, length)
    whole, whole_state = wkv(**inputs)
    state, start, outs = inputs["initial_state"], 0, []
    for piece in pieces:
        part = {name: inputs[name][:, start : start + piece] for name in ("r", "k", "v", "log_w")}
        out, state = wkv(**part, u=inputs["u"], initial_state=state)
        outs.append(out)
        start += piece
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, whole_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("lengths", [(200,), (3, 0, 64, 1, 65, 67), (1, 1, 1), (0, 5), (7, 0)])
def test_packed_documents(lengths, static):
    inputs = make(1, sum(lengths), static=static)
    inputs["initial_state"] = torch.randn(len(lengths), *inputs["initial_state"].shape[1:])
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    bounds = [0, *itertools.accumulate(lengths)]
    out, state = wkv(**inputs, cu_seqlens=torch.tensor(bounds))
    outs, states = [], []
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start == stop:
            states.append(inputs["initial_state"][n : n + 1])
            continue
        part = {name: inputs[name][:, start:stop] for name in ("r", "k", "v")}
        log_w = inputs["log_w"] if static else inputs["log_w"][:, start:stop]
        one, last = wkv(**part, log_w=log_w, u=inputs["u"], initial_state=inputs["initial_state"][n : n + 1])
        outs.append(one)
        states.append(last)
    expected = torch.cat(outs, 1), torch.cat(states)
    torch.testing.assert_close((out, state), expected, atol=1e-5, rtol=1e-5)

    loss = (out.sin().sum() + state.cos().sum(), expected[0].sin().sum() + expected[1].cos().sum())
    grads, expected_grads = (torch.autograd.grad(x, list(inputs.values())) for x in loss)
    for name, grad, expected_grad in zip(inputs, grads, expected_grads, strict=True):
        assert relative_error(grad, expected_grad.double()) < 1e-5, name


def test_packed_documents_against_the_recurrence():
    inputs = make(1, 100)
    inputs["initial_state"] = torch.randn(3, *inputs["initial_state"].shape[1:])
    bounds = torch.tensor([0, 33, 34, 100], dtype=torch.int32)
    for x, expected in zip(wkv(**inputs, cu_seqlens=bounds), oracle(inputs, cu_seqlens=bounds), strict=True):
        assert relative_error(x, expected) < 1e-5


def test_without_initial_state():
    inputs = make(2, 70)
    inputs["initial_state"] = torch.zeros_like(inputs["initial_state"])
    expected = wkv(**inputs)
    del inputs["initial_state"]
    torch.testing.assert_close(wkv(**inputs), expected)
    first = {name: x[:, :1] if x.dim() == 4 else x for name, x in inputs.items()}
    torch.testing.assert_close(wkv(**first)[0], expected[0][:, :1])


def test_long_memory_does_not_drift():
    # After 65,536 steps of a decay of 1 - 1e-6 a product of rounded factors would be off by 9e-4.
    length = 65536
    k = torch.zeros(1, length, 1, 2)
    k[:, 0] = 1.0
    v = torch.ones(1, length, 1, 2)
    log_w = torch.full((1, 2), -1e-6)
    state = wkv_state(None, k, v, log_w)
    expected = torch.exp(log_w.double() * (length - 1))
    torch.testing.assert_close(state[0, 0, 0].double(), expected[0], rtol=5e-5, atol=0)


def test_operator_registration():
    for static, bounds in itertools.product((False, True), (None, torch.tensor([0, 3, 20]))):
        inputs = make(1, 20, static=static)
        inputs["initial_state"] = torch.randn(1 if bounds is None else 2, *inputs["initial_state"].shape[1:])
        arguments = (*(x.requires_grad_() for x in inputs.values()), bounds)
        torch.library.opcheck(_wkv, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 70])
def test_autocast_changes_nothing(length, dtype):
    inputs = {name: x.requires_grad_() for name, x in make(2, length).items()}

    def with_grads(out, state):
        return out, state, *torch.autograd.grad(out.sin().sum() + state.sin().sum(), list(inputs.values()))

    expected = with_grads(*wkv(**inputs))
    with torch.autocast("cpu", dtype=dtype):
        found = wkv(**inputs)
        reference = wkv(**inputs, backend="reference")
    found = with_grads(*found)
    assert all(x.dtype == torch.float32 for x in found)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(reference, found[:2], atol=1e-5, rtol=1e-5)


def test_compiles_without_graph_breaks():
    compiled = torch.compile(lambda **kwargs: wkv(**kwargs)[0].square().mean(), fullgraph=True, backend="aot_eager")
    for length in (1, 33):
        inputs = make(2, length)
        leaf = inputs["k"].requires_grad_()
        (grad,) = torch.autograd.grad(compiled(**inputs), leaf)
        (expected,) = torch.autograd.grad(wkv(**inputs)[0].square().mean(), leaf)
        torch.testing.assert_close(grad, expected)


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
    ],
)
def test_errors_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        wkv(**{**make(2, 5), **change})


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("bounds", [[0, 3], [1, 5], [0, 4, 2, 5]])
def test_wrong_document_borders(bounds, backend):
    with pytest.raises(ValueError, match="`cu_seqlens` must rise from 0 to 5"):
        wkv(**{**make(1, 5), "initial_state": None}, cu_seqlens=torch.tensor(bounds), backend=backend)


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
