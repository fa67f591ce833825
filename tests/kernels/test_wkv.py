"""What is special about WKV."""

import pytest
import torch
from kernel_cases import DEVICE, EACH, TRITON, assert_like_reference
from kernel_cases.wkv import OPERATOR, make

from subquad_kernels import wkv, wkv_state
from subquad_kernels.wkv.masks import masks_for


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
    assert programs(8, 4096, 64) == [512 * 17, 512]
    chunks, found, passed, output = programs(1, 65536, 64)
    assert chunks >= 8000
    assert found == output >= 500
    assert passed == 64 * 4
    assert programs(1, 300, 2) == [2 * 19, 2]


@TRITON
@pytest.mark.parametrize("segment", [32, 512])
def test_documents_are_found_once_a_pass(segment, monkeypatch):
    from subquad_kernels import segments
    from subquad_kernels.wkv import triton_kernels

    found, find = [], segments.Segments._cut_documents
    monkeypatch.setattr(triton_kernels, "MIN_SEGMENT", segment)
    monkeypatch.setattr(segments.Segments, "_cut_documents", lambda *given: found.append(1) or find(*given))
    inputs = make(documents=(3, 60, 7), heads=1)
    leaf = inputs["v"].requires_grad_()
    for _ in range(2):  # as two layers do
        inputs["v"] = wkv(**inputs, backend="triton")[0]
    inputs["v"].sum().backward()
    assert leaf.grad.isfinite().all()
    assert len(found) == 1
    inputs["cu_seqlens"][1] += 1
    assert_like_reference(OPERATOR, {**inputs, "v": leaf.detach()}, "triton")
    assert len(found) == 2


@EACH
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


@TRITON
def test_masks_are_kept_as_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from subquad_kernels.wkv import masks

    masks._kept.cache_clear()
    with FakeTensorMode():
        wkv(**make(2, 20), backend="triton")
    assert_like_reference(OPERATOR, make(2, 20), "triton")


@EACH
def test_training_after_inference(backend):
    from subquad_kernels.wkv import masks

    masks._kept.cache_clear()
    with torch.inference_mode():
        wkv(**make(2, 20), backend=backend)
    assert_like_reference(OPERATOR, make(2, 20), backend)
