"""What is special about the contextualizer."""

import pytest
import torch
from kernel_cases import EACH, TRITON, Made, differentiable, expect, relative_error, weighted_gradients
from kernel_cases.contextualizer import OPERATOR, make, sizes_of

from subquad_kernels import contextualizer


@TRITON
def test_rows_that_begin_at_multiples_of_16_bytes():
    """Are read in another way, with the same results."""
    sizes = sizes_of((2, 30, 70, 64, None, 64), dtype=torch.bfloat16)
    views, aligned = (contextualizer(**make(**sizes, contiguous=x), backend="triton") for x in (False, True))
    assert torch.equal(views, aligned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@EACH
def test_rows_of_zeros(backend, dtype):
    arguments = make(2, 20, 24, 4, width=64, dtype=dtype)
    arguments["z"][:, 3:7] = 0.0
    arguments["prefix"][1] = 0.0
    expected = expect(OPERATOR, arguments)
    inputs, leaves = differentiable(OPERATOR, arguments)
    out = contextualizer(**inputs, backend=backend)
    assert not out[:, 3:7].any()
    grads = weighted_gradients([out], leaves, expected.weights)
    assert all(grad.isfinite().all() for grad in grads.values() if grad.dtype == torch.float32)
    # Next to zero a direction changes ten thousand times as fast.
    real = torch.ones(20, dtype=torch.bool)
    real[3:7] = False
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    assert relative_error(grads["z"][:, real], expected.grads["z"][:, real]) < tolerance
    assert relative_error(grads["v"], expected.grads["v"]) < tolerance
    zeros = {name: torch.zeros_like(x) for name, x in leaves.items()}
    assert not contextualizer(**zeros, backend=backend).any()


@EACH
def test_what_is_above_the_diagonal_or_behind_does_not_count(backend):
    inputs = make(2, 66, 70, 9)
    del inputs["queries"]
    expected = contextualizer(**inputs, backend=backend)
    changed = {name: x.clone() for name, x in inputs.items()}
    changed["v"] += torch.full_like(changed["v"], 7.0).triu(1)
    changed["prefix"][4:] = torch.nan
    assert torch.equal(contextualizer(**changed, backend=backend), expected)
    changed["z"][:, 40:] += 1.0
    found = contextualizer(**changed, backend=backend)
    assert torch.equal(found[:, :40], expected[:, :40])
    assert not torch.equal(found[:, 40:], expected[:, 40:])


def test_eager_never_holds_all_weights(monkeypatch):
    from subquad_kernels.contextualizer import eager

    monkeypatch.setattr(eager, "VALUES", 2**16)
    inputs = make(20, 200, 256, 56, width=8)
    tensors = inputs["z"], inputs["v"], inputs["gate"], inputs["prefix"], 200
    with Made() as made:
        grad = eager.contextualizer_eager(*tensors)
        eager.contextualizer_eager_backward(grad, *tensors)
    assert 0 < max(made.bytes) <= 20 * 256 * 256 * 4 // 16


@TRITON
def test_kernels_hold_the_weights_of_a_few_windows(monkeypatch):
    from subquad_kernels.contextualizer import triton_kernels

    inputs = make(5, 128, 128, None, width=8)
    tensors = inputs["z"], inputs["v"], inputs["gate"], None, 128
    whole = triton_kernels.contextualizer_triton(*tensors)
    grads = triton_kernels.contextualizer_triton_backward(whole, *tensors)
    monkeypatch.setattr(triton_kernels, "BYTES", 2 * 128 * 128 * 4)
    with Made() as made:
        assert torch.equal(triton_kernels.contextualizer_triton(*tensors), whole)
        parts = triton_kernels.contextualizer_triton_backward(whole, *tensors)
    assert max(made.bytes) == 3 * 128 * 128 * 4
    assert all(relative_error(part, grad) < 1e-6 for part, grad in zip(parts, grads, strict=True))


@TRITON
@pytest.mark.parametrize("shared", [0, 1, 140])
def test_one_query_copies_nothing(shared):
    """In windows of several blocks of rows and of columns, with rows of z and of the prefix that are far apart."""
    from subquad_kernels.contextualizer import triton_kernels

    inputs = make(2, 200 - shared, 200, shared + 2 if shared else None, 1, 520, dtype=torch.bfloat16)
    if shared:
        inputs["prefix"] = inputs["prefix"].repeat(1, 2)[:, :520]
    tensors = *(inputs[name] for name in ("z", "v", "gate")), inputs.get("prefix"), 1
    with Made() as made:
        out = triton_kernels.contextualizer_triton(*tensors)
    assert sum(made.bytes) == 2 * (2 * 200 + 2 * 520)  # the weights and the results
    double = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    assert relative_error(out, contextualizer(**double, backend="reference")) < 8e-3
