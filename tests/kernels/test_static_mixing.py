"""What is special about the static layer of Avey-B."""

import functools

import pytest
import torch
from kernel_cases import DEVICE, EACH, TRITON, Made, assert_as_expected, assert_like_reference, expect
from kernel_cases.static_mixing import OPERATOR, make

import subquad_kernels.backend
from subquad_kernels import static_mixing


def test_reference():
    inputs = make(windows=2, columns=50, dtype=torch.float64, v_dtype=torch.float64)
    x, gate, head = inputs["features"].split((24, 24, 2), dim=-1)
    expected = torch.cat((gate * torch.einsum("ij,wjc->wic", inputs["v"], x), head), dim=-1)
    torch.testing.assert_close(static_mixing(**inputs, backend="reference"), expected)


@EACH
def test_v_of_float64(backend):
    assert_like_reference(OPERATOR, make(v_dtype=torch.float64), backend)


@EACH
def test_float16_does_not_overflow(backend):
    """The sums are beyond what it holds; the results, and the gradients, are not."""
    inputs = make(context=40, dtype=torch.float16, large=True)
    x = inputs["features"][..., :24].float()
    assert (inputs["v"] @ x).abs().amax() > 2 * torch.finfo(torch.float16).max
    call = functools.partial(static_mixing, backend=backend)
    assert_as_expected(OPERATOR, inputs, expect(OPERATOR, inputs, weight=0.1), call, 1e-3)


@TRITON
def test_nothing_large_is_made_but_the_gradient(monkeypatch):
    from subquad_kernels.static_mixing import eager, triton_kernels

    monkeypatch.setattr(eager, "CACHED", 2 * 5 * 24)
    monkeypatch.setattr(eager, "VALUES", 2 * 5 * 24)
    features, v, _ = make(windows=24).values()
    grad, few = torch.ones(24, 5, 56, device=DEVICE), 8 * 5 * 24
    for forward, backward in (
        (eager.static_mixing_eager, eager.static_mixing_eager_backward),
        (triton_kernels.static_mixing_triton, triton_kernels.static_mixing_triton_backward),
    ):
        with Made() as made:
            forward(features, v, 24, features[..., 24:48])
            backward(grad, features, v, 24)
        assert [n for n in made.elements if n > few] == [features.numel()]


@TRITON
def test_rows_that_are_too_far_apart():
    from subquad_kernels.static_mixing import triton_kernels

    features = torch.empty_strided((1, 3, 2), (2, 2**30, 1), device="meta")
    with pytest.raises(subquad_kernels.backend.KernelError, match="too far apart for 32-bit offsets"):
        triton_kernels.static_mixing_triton(features, torch.empty(3, 3, device="meta"), 1, features[..., 1:])
