"""What is special about the complex moving average."""

import pytest
import torch
from kernel_cases import DEVICE, EACH, relative_error
from kernel_cases.cema import make, make_flags

from subquad_kernels import cema


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
def test_many_rows_of_one_token(backend):
    inputs, flags = make(19, 1, width=20, size=3), {"starts": torch.arange(19, device=DEVICE)[:, None] % 3 == 0}
    expected = cema(**inputs, **flags, backend="reference")
    torch.testing.assert_close(cema(**inputs, **flags, backend=backend), expected, atol=1e-5, rtol=1e-5)


def long_memory(length):
    inputs = make(1, length, width=2, size=2, decay="slow")
    inputs["initial_state"] *= 1000.0  # an error of the state is then easy to see
    return inputs


@EACH
def test_long_memory_does_not_drift(backend):
    # Rounded to float32, q would rotate the state by 1e-3 in 20,000 tokens.
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
