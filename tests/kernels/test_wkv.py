"""What is special about WKV."""

import pytest
import torch
from kernel_cases import DEVICE, EACH, TRITON, assert_like_reference, relative_error
from kernel_cases.wkv import OPERATOR, make

from subquad_kernels import gated_wkv, group_norm_gate, wkv, wkv_state
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
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": torch.zeros(2, 5, 23)}, "`gate` must have shape"),
        ({"gate": torch.zeros(2, 5, 24, dtype=torch.int64)}, "`gate` must be floating point"),
        ({"weight": torch.zeros(3)}, "`weight` must have shape"),
        ({"bias": torch.zeros(24, device="meta")}, "`bias` is on meta"),
    ],
)
def test_gated_checks_before_any_work(change, message, length, backend):
    inputs = make(2, length)
    more = {"gate": torch.zeros(2, 5, 24), "weight": torch.ones(24), "bias": torch.ones(24), **change}
    more = {name: x if x.device.type == "meta" else x.to(DEVICE) for name, x in more.items()}
    more["gate"] = more["gate"][:, :length]
    state = inputs["initial_state"].clone()
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        gated_wkv(**inputs, **more, eps=1e-5, inplace=True, backend=backend)
    assert torch.equal(inputs["initial_state"], state)


@EACH
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated(dtype, static, length, inplace, backend):
    inputs = make(2, length, static=static, dtype=dtype)
    inputs["initial_state"] = inputs["initial_state"].float()
    gate = inputs["v"].flip(0).flatten(2).clone()
    weight, bias = torch.linspace(0.5, 2, 24, device=DEVICE), torch.linspace(-1, 1, 24, device=DEVICE)
    double = {name: x.double() for name, x in inputs.items()}
    out, state = wkv(**double, backend="reference")
    expected = group_norm_gate(out, gate.double(), weight.double(), bias.double(), 6.4e-4, backend="reference")
    before = inputs["initial_state"]
    with torch.no_grad():
        found, after = gated_wkv(
            **inputs, gate=gate, weight=weight, bias=bias, eps=6.4e-4, inplace=inplace, backend=backend
        )
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    assert found.dtype == dtype
    assert relative_error(found, expected) < tolerance
    assert relative_error(after, state) < tolerance
    assert (after is before) == inplace


@EACH
def test_gradients_of_one_gated_token(backend):
    inputs = {name: x.requires_grad_() for name, x in make(2, 1).items()}
    rest = {"gate": torch.randn(2, 1, 24), "weight": torch.rand(24), "bias": torch.randn(24)}
    inputs.update({name: x.to(DEVICE).requires_grad_() for name, x in rest.items()})
    grads = []
    for one in (backend, "reference"):
        out, state = gated_wkv(**inputs, eps=1e-5, backend=one)
        grads.append(torch.autograd.grad(out.sin().sum() + state.sin().sum(), list(inputs.values())))
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


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
