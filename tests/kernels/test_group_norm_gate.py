"""What is special about the gated norm of the heads."""

import torch
from kernel_cases import DEVICE, EACH, differentiable, expect, relative_error
from kernel_cases.group_norm_gate import OPERATOR, make

from subquad_kernels import group_norm_gate


@EACH
def test_a_head_of_one_value(backend):
    inputs, _ = differentiable(OPERATOR, make(size=1))
    out = group_norm_gate(**inputs, backend=backend)
    torch.testing.assert_close(out, inputs["bias"] * torch.nn.functional.silu(inputs["gate"]))
    grad_x, grad_bias = torch.autograd.grad(out.sum(), (inputs["x"], inputs["bias"]))
    # The variance of a head of one value is zero. The norm divides the rounding error of its mean by sqrt(eps).
    grad_normed = inputs["weight"] * torch.nn.functional.silu(inputs["gate"])
    assert (grad_x.flatten(2).abs() <= 2**-23 * grad_normed.abs() / inputs["eps"] ** 0.5).all()
    torch.testing.assert_close(grad_bias, torch.nn.functional.silu(inputs["gate"]).sum((0, 1)))


@EACH
def test_a_large_mean_does_not_cancel(backend):
    inputs = make(leading=(2, 4), size=64)
    noise = torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    inputs["x"] = (1000.0 + noise).half().float()
    assert relative_error(group_norm_gate(**inputs, backend=backend), expect(OPERATOR, inputs).results[0]) < 1e-4
