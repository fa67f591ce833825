"""What is special about timestep decay normalization."""

import importlib
import math

import pytest
import torch
from kernel_cases import DEVICE, EACH, assert_like_reference, relative_error, triton
from kernel_cases.timestep_decay_norm import FEW, OPERATOR, make

from subquad_kernels import timestep_decay_norm


MODULE = importlib.import_module("subquad_kernels.timestep_decay_norm.strips")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Otherwise the interpreter would run hundreds of programs, one after the other."""
    for path, value in FEW.items():
        module, name = path.split(".")
        monkeypatch.setattr(OPERATOR.module(module), name, value)


def test_float64_weights_make_a_float64_state():
    inputs = make()
    inputs["weight"] = inputs["weight"].double()
    assert timestep_decay_norm(**inputs)[1].dtype == torch.float64


@pytest.mark.parametrize("beta", [0.0, 0.999, 0.9999, 1 - 1e-9])
@EACH
def test_the_first_token_is_normalized_by_its_own_statistics(backend, beta):
    x = make(1, 3)["x"]
    out, _ = timestep_decay_norm(x, None, None, 4, beta, beta, 1e-5, backend=backend)
    torch.testing.assert_close(out[:, 0], torch.nn.functional.group_norm(x[:, 0], 4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@EACH
def test_padding(backend, dtype):
    """Padding before a text, after it, and a row of padding: the text is as without it, and results are finite."""
    length, spans = 70, ((5, 70), (0, 66), (70, 70))
    inputs = make(3, length, given="training", dtype=dtype)
    real = torch.zeros(3, length, dtype=torch.bool, device=DEVICE)
    for row, (start, stop) in enumerate(spans):
        real[row, start:stop] = True
    out, state = timestep_decay_norm(**{**inputs, "real": real}, backend=backend)
    assert out.isfinite().all()
    for row, (start, stop) in enumerate(spans[:2]):
        alone = {**inputs, "x": inputs["x"][row : row + 1, start:stop]}
        expected, last = timestep_decay_norm(**alone)
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
        assert_like_reference(OPERATOR, {**inputs, "real": real, "initial_state": zeros}, backend)
        one = {**inputs, "x": inputs["x"][:, :1], "real": real[:, :1]}
        assert_like_reference(OPERATOR, {**one, "initial_state": zeros}, backend)


@EACH
def test_a_large_mean_does_not_cancel(backend):
    inputs = make(length=20, given="training")
    inputs["x"] = 1000 + inputs["x"] / inputs["x"].abs().max()
    out, _ = timestep_decay_norm(**inputs, backend=backend)
    double = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    assert relative_error(out, timestep_decay_norm(**double, backend="reference")[0]) < 2e-3


@pytest.mark.parametrize("backend", ["eager", "steps", triton, "triton in short strips"])
def test_a_long_memory_does_not_drift(backend, monkeypatch):
    # If beta were rounded, the mean would be off by 1e-2.
    if backend == "triton in short strips":
        pytest.importorskip("triton")
        monkeypatch.setattr(MODULE, "LONGEST", 1)
    beta, length = 1 - 2e-6, 100 if backend == "triton in short strips" else 1000
    x = torch.full((1, length, 2), 2.0, device=DEVICE)
    state, arguments = None, (None, None, 1, beta, beta, 1.0)
    for part in x.split(1 if backend == "steps" else length, 1):
        kind = backend.split()[0].replace("steps", "eager")
        _, state = timestep_decay_norm(part, *arguments, state, backend=kind)
    expected = -2 * math.expm1(length * math.log(beta))
    assert state[0, 2].item() == length
    assert state[0, 0, 0].item() == pytest.approx(expected, rel=1e-4 if backend == "steps" else 1e-5)


@EACH
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
