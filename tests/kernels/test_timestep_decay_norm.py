"""Timestep decay normalization against its own recurrence in float64."""

import functools
import importlib
import itertools
import math
import os

import pytest
import torch
from kernel_cases import DEVICE, TRITON, assert_same_results, relative_error, triton, without_compiler

import subquad_kernels.backend
from subquad_kernels import timestep_decay_norm, timestep_decay_norm_state
from subquad_kernels.timestep_decay_norm import (
    _timestep_decay_norm,
    _timestep_decay_norm_state,
    _timestep_decay_norm_step,
)


MODULE = importlib.import_module("subquad_kernels.timestep_decay_norm.strips")
LENGTHS = (1, 2, 17, 64, 65, 200)
SIZES = ((32, 1), (96, 8))  # width, groups
# Which of the optional arguments are given.
VARIANTS = {
    "training": {"weight", "bias"},
    "decoding": {"weight", "bias", "initial_state"},
    "packed": {"weight", "bias", "initial_state", "starts"},
    "padded": {"weight", "bias", "initial_state", "real"},
    "all": {"weight", "bias", "initial_state", "starts", "real"},
    "no affine": {"initial_state", "starts"},
    "no bias": {"weight"},
}
NUMBERS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-5}
BACKENDS = ("eager", triton)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Or the interpreter would run hundreds, one after the other."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from subquad_kernels.timestep_decay_norm import triton_kernels

    monkeypatch.setattr(triton_kernels, "multiprocessors", lambda x: 0)


def make(batch=2, length=17, width=48, groups=4, given="all", dtype=torch.float32, seed=0):
    """Also tensors that all differ from row to row and from group to group; documents begin anywhere."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    state = torch.stack((randn(batch, groups), 1 + rand(batch, groups)), 1)
    count = torch.full((batch, 1, groups), 3.0)
    inputs = {
        "x": (randn(batch, length, width) + 1) * (0.5 * randn(batch, length, 1)).exp(),
        "weight": randn(width),
        "bias": randn(width),
        "initial_state": torch.cat((state * (1 - torch.tensor([0.9, 0.99]) ** 3)[:, None], count), 1),
    }
    inputs = {name: x.to(DEVICE, dtype) for name, x in inputs.items()}
    inputs["starts"] = (rand(batch, length) < 0.1).to(DEVICE)
    inputs["real"] = (rand(batch, length) < 0.8).to(DEVICE)
    return {name: x if name in VARIANTS[given] | {"x"} else None for name, x in inputs.items()} | {"groups": groups}


def differentiable(inputs, dtype=None):
    """The same inputs as leaves, and those that have gradients."""
    leaves = {
        name: x.detach().to(dtype).clone().requires_grad_()
        for name, x in inputs.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    return {**inputs, **leaves}, leaves


def assert_close_to_reference(inputs, tolerance, call, **numbers):
    """Output, state and every gradient."""
    inputs, leaves = differentiable(inputs)
    expected_inputs, expected_leaves = differentiable(inputs, torch.float64)
    numbers = NUMBERS | numbers
    found = call(**inputs, **numbers)
    expected = timestep_decay_norm(**expected_inputs, **numbers, backend="reference")
    assert found[0].dtype == inputs["x"].dtype
    assert_same_results(found, leaves, expected, expected_leaves, tolerance)


def with_backend(backend):
    return functools.partial(timestep_decay_norm, backend=backend)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_forward_and_gradients(length, variant):
    assert_close_to_reference(make(length=length, given=variant), 1e-5, with_backend("eager"))


@pytest.mark.parametrize(("width", "groups"), SIZES)
@pytest.mark.parametrize("length", [1, 17, 65])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes(backend, length, width, groups):
    inputs = make(1, length, width, groups)
    assert_close_to_reference(inputs, 1e-5, with_backend(backend))


@TRITON
@pytest.mark.parametrize(
    ("length", "variant"),
    [*((length, "all") for length in LENGTHS), *((65, variant) for variant in VARIANTS if variant != "all")],
)
def test_kernels(length, variant):
    batch = 2 if variant == "all" else 1
    assert_close_to_reference(make(batch, length, given=variant), 1e-5, with_backend("triton"))


@TRITON
@pytest.mark.parametrize(("length", "longest", "largest"), [(19, 1, 4096), (40, 64, 64)])
def test_many_strips(length, longest, largest, monkeypatch):
    from subquad_kernels.timestep_decay_norm import triton_kernels

    monkeypatch.setattr(triton_kernels, "PASSED", 4)
    monkeypatch.setattr(MODULE, "LONGEST", longest)
    monkeypatch.setattr(MODULE, "LARGEST", largest)
    assert_close_to_reference(make(1, length), 1e-5, with_backend("triton"))


@TRITON
def test_few_groups_a_program(monkeypatch):
    from subquad_kernels.timestep_decay_norm import triton_kernels

    monkeypatch.setattr(triton_kernels, "multiprocessors", lambda x: 6)
    for length in (1, 70):
        assert_close_to_reference(make(1, length, width=36, groups=12), 1e-5, with_backend("triton"))


@pytest.mark.parametrize("length", [1, 17])
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_one_channel(backend, length):
    """Their variance is 0, and what is left of a token small."""
    assert_close_to_reference(make(length=length, groups=48), 2e-5, with_backend(backend), eps=0.1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("length", [1, 65])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(backend, length, dtype, tolerance):
    inputs = make(1, length, dtype=dtype)
    assert_close_to_reference(inputs, tolerance, with_backend(backend))
    state = timestep_decay_norm(**inputs, **NUMBERS, backend=backend)[1]
    double = {name: x.double() if name in ("x", "initial_state") else x for name, x in inputs.items()}
    # What enters is rounded, the accumulation is not.
    assert state.dtype == torch.float32
    assert relative_error(state, timestep_decay_norm(**double, **NUMBERS, backend="reference")[1]) < 1e-6


@pytest.mark.parametrize("length", [1, 65])
def test_float64(length):
    assert_close_to_reference(make(length=length, dtype=torch.float64), 1e-12, with_backend("eager"))
    inputs = make(length=length)
    inputs["weight"] = inputs["weight"].double()
    assert timestep_decay_norm(**inputs, **NUMBERS)[1].dtype == torch.float64


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_dtypes(backend):
    inputs = make(dtype=torch.bfloat16)
    inputs["initial_state"] = inputs["initial_state"].float()
    inputs["weight"] = inputs["weight"].float()
    assert_close_to_reference(inputs, 8e-3, with_backend(backend))


@pytest.mark.parametrize("beta", [0.0, 0.999, 0.9999, 1 - 1e-9])
@pytest.mark.parametrize("backend", BACKENDS)
def test_betas(backend, beta):
    for inputs in (make(1, 70, given="training"), make(1, 1, given="training")):
        assert_close_to_reference(inputs, 2e-5, with_backend(backend), beta1=beta, beta2=beta)
    # The first token is normalized by its own statistics, whatever beta is.
    x, one = inputs["x"], {"weight": None, "bias": None, "groups": 4}
    out, _ = timestep_decay_norm(x, **one, beta1=beta, beta2=beta, eps=1e-5, backend=backend)
    torch.testing.assert_close(out[:, 0], torch.nn.functional.group_norm(x[:, 0], 4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents(backend, rows):
    lengths = (3, 1, 64, 2)
    bounds = [0, *itertools.accumulate(lengths)]
    inputs = make(length=sum(lengths), given="decoding")
    starts = torch.zeros(rows, sum(lengths), dtype=torch.bool, device=DEVICE)
    starts[:, bounds[1:-1]] = True
    inputs["starts"] = starts
    out, state = timestep_decay_norm(**inputs, **NUMBERS, backend=backend)
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        one = {**inputs, "x": inputs["x"][:, start:stop], "starts": None}
        if n > 0:
            one["initial_state"] = None
        expected, last = timestep_decay_norm(**one, **NUMBERS)
        torch.testing.assert_close(out[:, start:stop], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-6, rtol=1e-5)
    # A document may begin with the call, too.
    inputs["starts"] = starts.index_fill(1, torch.tensor(0, device=DEVICE), True)
    found = timestep_decay_norm(**inputs, **NUMBERS, backend=backend)
    expected = timestep_decay_norm(**{**inputs, "initial_state": None}, **NUMBERS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert_close_to_reference(inputs, 1e-5, with_backend(backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding(backend, dtype):
    """Padding before a text, after it, and nothing else: the text is what it is alone, and padding is finite."""
    length, spans = 70, ((5, 70), (0, 66), (70, 70))
    inputs = make(3, length, given="training", dtype=dtype)
    real = torch.zeros(3, length, dtype=torch.bool, device=DEVICE)
    for row, (start, stop) in enumerate(spans):
        real[row, start:stop] = True
    out, state = timestep_decay_norm(**{**inputs, "real": real}, **NUMBERS, backend=backend)
    assert out.isfinite().all()
    for row, (start, stop) in enumerate(spans[:2]):
        alone = {**inputs, "x": inputs["x"][row : row + 1, start:stop]}
        expected, last = timestep_decay_norm(**alone, **NUMBERS)
        torch.testing.assert_close(
            out[row : row + 1, start:stop], expected, atol=1e-5, rtol=2e-3 if dtype == torch.float16 else 1e-5
        )
        torch.testing.assert_close(state[row : row + 1], last, atol=1e-6, rtol=1e-5)
    assert not state[2].any()
    # Mean 0, variance 1.
    expected = inputs["x"][2] * (inputs["weight"] + 1) + inputs["bias"]
    torch.testing.assert_close(out[2], expected, atol=1e-2, rtol=1e-2)
    if dtype == torch.float32:
        zeros = torch.zeros(3, 3, 4, device=DEVICE)
        assert_close_to_reference({**inputs, "real": real, "initial_state": zeros}, 1e-5, with_backend(backend))
        one = {**inputs, "x": inputs["x"][:, :1], "real": real[:, :1]}
        assert_close_to_reference({**one, "initial_state": zeros}, 1e-5, with_backend(backend))


@pytest.mark.parametrize("pieces", [(1,) * 9, (3, 1, 70, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_carried_state(backend, pieces):
    inputs, leaves = differentiable(make(length=sum(pieces)))
    whole = timestep_decay_norm(**inputs, **NUMBERS)

    state, start, outs = inputs["initial_state"], 0, []
    for piece in pieces:
        part = {name: inputs[name][:, start : start + piece] for name in ("x", "starts", "real")}
        out, state = timestep_decay_norm(**{**inputs, **part, "initial_state": state}, **NUMBERS, backend=backend)
        outs.append(out)
        start += piece
    found = torch.cat(outs, 1), state
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    grads = [
        torch.autograd.grad(out.sin().sum() + last.sin().sum(), list(leaves.values())) for out, last in (found, whole)
    ]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["decoding", "all"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding_steps(backend, variant):
    inputs = make(length=5, given=variant)
    expected, expected_state = timestep_decay_norm(**inputs, **NUMBERS)
    with torch.no_grad():
        for inplace in (False, True):
            state = before = inputs["initial_state"].clone()
            for t in range(5):
                names = [name for name in ("x", "starts", "real") if inputs[name] is not None]
                part = {name: inputs[name][:, t : t + 1] for name in names}
                token = {**inputs, **part, "initial_state": state}
                out, state = timestep_decay_norm(**token, **NUMBERS, inplace=inplace, backend=backend)
                torch.testing.assert_close(out, expected[:, t : t + 1], atol=1e-5, rtol=1e-5)
                assert (state is before) == inplace
            torch.testing.assert_close(state, expected_state, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place(backend):
    inputs = make(length=70)
    expected = timestep_decay_norm(**inputs, **NUMBERS)
    with torch.no_grad():
        found = timestep_decay_norm(**inputs, **NUMBERS, inplace=True, backend=backend)
    assert found[1] is inputs["initial_state"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_token(backend):
    inputs = make(length=1, given="training")
    with torch.no_grad():
        found = timestep_decay_norm(**inputs, **NUMBERS, backend=backend)
    torch.testing.assert_close(found, timestep_decay_norm(**inputs, **NUMBERS, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_mean_does_not_cancel(backend):
    inputs = make(length=20, given="training")
    inputs["x"] = 1000 + inputs["x"] / inputs["x"].abs().max()
    out, _ = timestep_decay_norm(**inputs, **NUMBERS, backend=backend)
    double = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    assert relative_error(out, timestep_decay_norm(**double, **NUMBERS, backend="reference")[0]) < 2e-3


@pytest.mark.parametrize("backend", ["eager", "steps", triton, "triton in short strips"])
def test_a_long_memory_does_not_drift(backend, monkeypatch):
    # Were beta rounded, the mean would be off by 1e-2.
    if backend == "triton in short strips":
        pytest.importorskip("triton")
        monkeypatch.setattr(MODULE, "LONGEST", 1)
    beta, length = 1 - 2e-6, 100 if backend == "triton in short strips" else 1000
    x = torch.full((1, length, 2), 2.0, device=DEVICE)
    state, arguments = None, (1, beta, beta)
    for part in x.split(1 if backend == "steps" else length, 1):
        state = timestep_decay_norm_state(
            state, part, *arguments, backend=backend.split()[0].replace("steps", "eager")
        )
    expected = -2 * math.expm1(length * math.log(beta))
    assert state[0, 2].item() == length
    assert state[0, 0, 0].item() == pytest.approx(expected, rel=1e-4 if backend == "steps" else 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_endless_text(backend):
    """The count may stop where float32 has no next number: the statistics of such a text need no correction."""
    state = torch.tensor([[[1.0], [4.0], [2.0**24]]], device=DEVICE)
    for length in (1, 3):
        x = torch.full((1, length, 2), 1.0, device=DEVICE)
        x[..., 1] = 5.0
        with torch.no_grad():
            out, after = timestep_decay_norm(x, None, None, 1, 0.999, 0.9999, 1e-5, state, backend=backend)
        torch.testing.assert_close(after[0, :, 0], torch.tensor([3 - 2 * 0.999**length, 4.0, 2.0**24], device=DEVICE))
        assert out.isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "reference", triton])
def test_state_alone(backend):
    for variant in ("all", "decoding"):
        inputs = make(1, 66, given=variant)
        expected = timestep_decay_norm(**inputs, **NUMBERS)[1]
        arguments = inputs["initial_state"], inputs["x"], 4, 0.9, 0.99
        more = {"starts": inputs["starts"], "real": inputs["real"], "backend": backend}
        torch.testing.assert_close(timestep_decay_norm_state(*arguments, **more), expected, atol=1e-6, rtol=1e-5)
        leaf = inputs["x"].clone().requires_grad_()
        after = timestep_decay_norm_state(arguments[0], leaf, *arguments[2:], **more)
        assert torch.autograd.grad(after.sum(), leaf)[0].any()
        without = timestep_decay_norm_state(None, *arguments[1:], **more)
        zeros = torch.zeros_like(arguments[0])
        torch.testing.assert_close(without, timestep_decay_norm_state(zeros, *arguments[1:], **more))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend):
    inputs = make(length=16)
    expected = timestep_decay_norm(**inputs, **NUMBERS, backend="reference")[0]
    strided = {name: x.mT.contiguous().mT if name in ("x", "starts", "real") else x for name, x in inputs.items()}
    strided, leaves = differentiable(strided)
    out = timestep_decay_norm(**strided, **NUMBERS, backend=backend)[0]
    torch.testing.assert_close(out, expected)
    # The gradient of a sum is one number, expanded.
    grads = torch.autograd.grad(out.sum(), list(leaves.values()))
    inputs, leaves = differentiable(inputs)
    out = timestep_decay_norm(**inputs, **NUMBERS, backend="reference")[0]
    torch.testing.assert_close(grads, torch.autograd.grad(out.sum(), list(leaves.values())), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 17])
@pytest.mark.parametrize("backend", ["eager", "reference", triton])
def test_inputs_are_not_changed(backend, length):
    inputs = make(length=length)
    copies = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            timestep_decay_norm(**inputs, **NUMBERS, backend=backend)
    for name, x in copies.items():
        assert torch.equal(x, inputs[name]), name


@pytest.mark.parametrize(("length", "dtype"), [(1, torch.float16), (17, torch.bfloat16)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend, length, dtype):
    inputs, leaves = differentiable(make(length=length))

    def with_gradients(autocast):
        with torch.autocast(DEVICE, dtype=dtype, enabled=autocast):
            out, state = timestep_decay_norm(**inputs, **NUMBERS, backend=backend)
        return out, state, *torch.autograd.grad(out.sin().sum() + state.sin().sum(), list(leaves.values()))

    for found, expected in zip(with_gradients(True), with_gradients(False), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


@pytest.mark.parametrize("variant", ["all", "no bias"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_operator_registration(backend, variant, monkeypatch):
    monkeypatch.setattr(MODULE, "LONGEST", 2)
    inputs, _ = differentiable(make(1, 3, width=8, given=variant))
    arguments = *inputs.values(), 0.9, 0.99, 1e-5, backend
    torch.library.opcheck(_timestep_decay_norm, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_registration_of_step_and_state(backend):
    inputs = make(1, 1, width=8)
    x, weight, bias, state, *flags, groups = inputs.values()
    torch.library.opcheck(_timestep_decay_norm_state, (x, state, *flags, groups, 0.9, 0.99, backend))
    for before in (None, state):
        arguments = x, weight, bias, before, torch.ones_like(state), *flags, groups, 0.9, 0.99, 1e-5, backend
        torch.library.opcheck(_timestep_decay_norm_step, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_graph_breaks(backend):
    torch.compiler.reset()
    call = functools.partial(timestep_decay_norm, **NUMBERS, backend=backend)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for length in (1, 17, 66):
        inputs = make(1, length)
        assert_close_to_reference(
            inputs, 1e-5, lambda **kwargs: compiled(**{k: v for k, v in kwargs.items() if k not in NUMBERS})
        )
    step = torch.compile(functools.partial(call, inplace=True), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        inputs = make(length=1)
        expected = call(**inputs)
        found = step(**inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(inputs["initial_state"], expected[1])


def test_tensors_without_storage():
    inputs = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in make(length=130).items()}
    for length in (1, 130):
        part = {name: inputs[name][:, :length] for name in ("x", "starts", "real")}
        out, state = timestep_decay_norm(**{**inputs, **part}, **NUMBERS)
        assert (out.shape, state.shape, out.device.type) == ((2, length, 48), (2, 3, 4), "meta")


@TRITON
def test_eager_takes_over(monkeypatch):
    from subquad_kernels.timestep_decay_norm import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    inputs = make(length=70)
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        timestep_decay_norm(**inputs, **NUMBERS, backend="triton")
    with pytest.warns(RuntimeWarning, match="`timestep_decay_norm` runs in plain torch: no compiler"):
        _timestep_decay_norm(*inputs.values(), *NUMBERS.values(), "auto")

    def auto(x, weight, bias, initial_state, starts, real, groups, **numbers):
        return _timestep_decay_norm(x, weight, bias, initial_state, starts, real, groups, *numbers.values(), "auto")[
            :2
        ]

    assert_close_to_reference(inputs, 1e-5, auto)
    inputs = make(length=1)
    expected = timestep_decay_norm(**inputs, **NUMBERS)
    tensors = [inputs[name] for name in ("x", "weight", "bias", "initial_state", "starts", "real")]
    x, weight, bias, state, *flags = tensors
    new_state = torch.empty_like(state)
    with pytest.warns(RuntimeWarning, match="`timestep_decay_norm_step` runs in plain torch"):
        out = _timestep_decay_norm_step(x, weight, bias, state, new_state, *flags, 4, *NUMBERS.values(), "auto")
    torch.testing.assert_close((out, new_state), expected)
    with pytest.warns(RuntimeWarning, match="`timestep_decay_norm_state` runs in plain torch"):
        torch.testing.assert_close(_timestep_decay_norm_state(x, state, *flags, 4, 0.9, 0.99, "auto"), expected[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 17)}, r"`x` must be \(batch, length >= 1, width >= 1\), got \(2, 17\)"),
        ({"x": torch.zeros(2, 0, 48)}, r"`x` must be \(batch, length >= 1, width >= 1\), got \(2, 0, 48\)"),
        ({"x": torch.zeros(2, 17, 48, dtype=torch.int64)}, "`x` must be floating point, got torch.int64"),
        ({"groups": 5}, "`groups` must divide 48, the width of `x`, got 5"),
        ({"groups": 0}, "`groups` must divide 48, the width of `x`, got 0"),
        ({"beta1": 1.0}, "`beta1` must be from 0 to below 1, got 1.0"),
        ({"beta2": -0.1}, "`beta2` must be from 0 to below 1, got -0.1"),
        ({"weight": torch.zeros(47)}, r"`weight` must have shape \(48,\), got \(47,\)"),
        ({"bias": torch.zeros(48, dtype=torch.int64)}, "`bias` must be floating point, got torch.int64"),
        ({"bias": torch.zeros(48, device="meta")}, "`bias` is on meta, `x` on "),
        ({"initial_state": torch.zeros(2, 9)}, r"`initial_state` must have shape \(2, 3, 4\), got \(2, 9\)"),
        ({"starts": torch.zeros(2, 17)}, r"`starts` must be bool of shape \(2, 17\) or \(1, 17\), got torch.float32"),
        ({"starts": torch.zeros(3, 17, dtype=torch.bool)}, r"`starts` must be bool .* torch.bool \(3, 17\)"),
        ({"real": torch.zeros(1, 17, dtype=torch.bool)}, r"`real` must be bool of shape \(2, 17\), got .* \(1, 17\)"),
        ({"real": torch.ones(2, 17, dtype=torch.bool, device="meta")}, "`real` is on meta, `x` on "),
        ({"inplace": True, "initial_state": None}, "`inplace` needs a float32, contiguous `initial_state`"),
        ({"backend": "cuda"}, "backend='cuda': `timestep_decay_norm` has eager, reference, triton"),
    ],
)
def test_wrong_arguments(change, message):
    change = {
        k: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for k, x in change.items()
    }
    with pytest.raises(ValueError, match=message):
        timestep_decay_norm(**{**make(), **NUMBERS, **change})


@TRITON
def test_triton_computes_in_float32():
    with pytest.raises(ValueError, match="computes in float32, got float64"):
        timestep_decay_norm(**{**make(), **NUMBERS, "weight": torch.zeros(48).double().to(DEVICE)}, backend="triton")
