"""What the tests of the operators share."""

from importlib.util import find_spec

import pytest
import torch

import subquad_kernels.backend


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter where there is no GPU.
TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton for this platform")
triton = pytest.param("triton", marks=TRITON)


def relative_error(x: torch.Tensor, expected: torch.Tensor) -> float:
    return ((x.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


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


def without_compiler(monkeypatch, triton_kernels) -> None:
    """Lets every launch of those kernels fail, on a device that Triton seems to know."""

    def fail(*args, **kwargs):
        raise subquad_kernels.backend.KernelError("no compiler")

    monkeypatch.setattr(triton_kernels, "launch", fail)
    monkeypatch.setattr(subquad_kernels.backend, "_failed", set())
    monkeypatch.setattr(subquad_kernels.backend, "_works", lambda device: True)
