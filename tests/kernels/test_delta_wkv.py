"""What is special about the recurrence of Goose."""

import pytest
import torch
from allocated import Allocated
from kernel_cases import DEVICE, EACH, TRITON, relative_error
from kernel_cases.delta_wkv import OPERATOR, make

from subquad_kernels import delta_wkv, delta_wkv_state


@TRITON
def test_schedules(monkeypatch):
    """Few heads are cut into segments, unless they are wider than any that is known."""
    from subquad_kernels.delta_wkv import triton_kernels

    launched = []
    monkeypatch.setattr(triton_kernels, "launch", lambda kernel, grid, *args, **kwargs: launched.append(grid))

    def programs(batch, length, heads, size=64):
        launched.clear()
        x = torch.empty(batch, length, heads, size, dtype=torch.bfloat16, device="meta")
        triton_kernels.delta_wkv_triton(x, x, x, x, x, x, None, None, x.dtype)
        return [grid[0] for grid in launched]

    monkeypatch.setattr(triton_kernels, "multiprocessors", lambda x: 132)
    assert programs(8, 4096, 64) == 8 * [512 * 17, 512]  # in slabs of 512 tokens
    chunks, found, multiplied, passed, output = programs(1, 4096, 64)
    assert programs(1, 65536, 64) == 16 * [chunks, found, multiplied, passed, output]
    assert chunks >= 8000
    assert found == multiplied == output >= 500
    assert passed == 64 * 2
    assert programs(1, 300, 2) == [2 * 19, 2]
    for size, tiles, passes in ((128, 2, 4), (256, 8, 8)):
        chunks, found, multiplied, passed, output = programs(1, 65536, 2, size)
        assert found == multiplied == output >= 500 and output % (2 * tiles) == 0
        assert passed == 2 * passes
    assert programs(1, 65536, 2, 512) == [2 * 4096, 2 * 32]


@TRITON
@pytest.mark.parametrize(("batch", "length"), [(8, 16384), (1, 65536)])
def test_memory(monkeypatch, batch, length):
    """Bytes beside the outputs and the gradients, for 64 heads of 64 channels in bfloat16."""
    from subquad_kernels.delta_wkv import triton_kernels

    monkeypatch.setattr(triton_kernels, "launch", lambda *args, **kwargs: None)
    x = torch.empty(batch, length, 64, 64, dtype=torch.bfloat16, device="meta")
    for cu_seqlens in (None, *[torch.empty(9, dtype=torch.int64, device="meta")] * (batch == 1)):
        with Allocated() as forward:
            out, state, passed = triton_kernels.delta_wkv_triton(*[x] * 6, None, cu_seqlens, x.dtype)
        assert forward.peak - x.nbytes < 0.85e9
        assert forward.bytes == out.nbytes + state.nbytes + passed.nbytes
        with Allocated() as backward:
            inputs = torch.empty_like(x), torch.empty_like(state), passed, *[x] * 6, None, cu_seqlens, x.dtype
            triton_kernels.delta_wkv_triton_backward(*inputs)
        assert backward.peak + passed.nbytes - 7 * x.nbytes < 0.85e9
        with Allocated() as backward:  # as in a trace
            triton_kernels.delta_wkv_triton_backward(*inputs[:2], None, *inputs[3:])
        assert backward.peak - 6 * x.nbytes < 0.85e9


@EACH
def test_slabs_of_a_trace(backend, monkeypatch):
    """It has no states that enter them, so the backward pass computes these again."""
    OPERATOR.patch(monkeypatch, OPERATOR.examples["slabs, 97"])
    inputs = make(1, 70, heads=1)

    def loss(inputs):
        out, state = delta_wkv(**inputs, backend=backend)
        return out.square().sum() + state.square().sum()

    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    expected = torch.autograd.grad(loss(leaves), leaves.values())
    for found, wanted in zip(torch.func.grad(loss)(inputs).values(), expected, strict=True):
        assert relative_error(found, wanted.double()) < 1e-6


@EACH
def test_a_first_token_in_16_bits(backend):
    inputs = make(2, 1, dtype=torch.bfloat16) | {"initial_state": None}
    expected, state = delta_wkv(**inputs, backend="reference")
    found, after = delta_wkv(**inputs, backend=backend)
    assert (found.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    assert relative_error(found, expected.double()) < 8e-3 and relative_error(after, state.double()) < 1e-5


@EACH
def test_padding_changes_nothing(backend):
    """Neither the state nor what other tokens read."""
    places = torch.tensor([0, 1, 2, 17, 18, 39])
    inputs = make(2, 40, padding=places.tolist())
    real = torch.ones(40, dtype=torch.bool).scatter(0, places, False).to(DEVICE)
    short = {name: x[:, real] if name != "initial_state" else x for name, x in inputs.items()}
    out, state = delta_wkv(**inputs, backend=backend)
    expected, expected_state = delta_wkv(**short, backend="reference")
    assert relative_error(out[:, real], expected.double()) < 1e-5
    assert relative_error(state, expected_state.double()) < 1e-5
    only = {name: x[:, ~real] if name != "initial_state" else x for name, x in inputs.items()}
    assert torch.equal(delta_wkv(**only, backend=backend)[1], inputs["initial_state"])


@EACH
def test_long_memory_does_not_drift(backend):
    # A decay of 1 - 1e-6, of which products of rounded factors would be off by 1.4e-8 a token.
    length = 65536 if backend == "eager" else 2048
    k = torch.zeros(1, length, 1, 2, device=DEVICE)
    k[:, 0] = 1.0
    v = torch.ones(1, length, 1, 2, device=DEVICE)
    nothing, log_w = torch.zeros_like(k), torch.full_like(k, -1e-6)
    state = delta_wkv_state(None, k, v, log_w, nothing, nothing, backend=backend)
    expected = torch.exp(log_w[0, 0, 0].double() * (length - 1))
    tolerance = 5e-5 if backend == "eager" else 5e-6
    torch.testing.assert_close(state[0, 0, 0].double(), expected, rtol=tolerance, atol=0)


@EACH
def test_a_value_is_replaced(backend):
    """With a decay of 1, a full learning rate and the same key, only what is written last remains."""
    inputs = make(1, 50, state=False)
    k = torch.nn.functional.normalize(inputs["k"][:, :1], dim=-1).expand_as(inputs["k"])
    ones = torch.ones_like(k)
    out, state = delta_wkv(k, k, inputs["v"], 0 * ones, k, ones, backend=backend)
    torch.testing.assert_close(out, inputs["v"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, inputs["v"][:, -1].unsqueeze(-1) * k[:, 0].unsqueeze(-2), rtol=1e-4, atol=1e-5)
