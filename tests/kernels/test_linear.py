"""The product of a linear layer is that of torch, whichever library computes it."""

import sys

import pytest
import torch
from resident_memory import resident_memory
from torch import nn

from subquad_kernels import linear, matmul
from subquad_kernels.c.products import _ONEDNN, _find_onednn


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 7), (2, 5, 7), (2, 0, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_torch(shape, dtype, with_bias):
    torch.manual_seed(0)
    layer = nn.Linear(7, 11, bias=with_bias, dtype=dtype)
    x = torch.randn(*shape, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, layer.weight, layer.bias), layer(x))
        # Weights and inputs may be views.
        wide = torch.randn(7, 22, dtype=dtype)[:, ::2].T
        torch.testing.assert_close(linear(x, wide, layer.bias), nn.functional.linear(x, wide, layer.bias))
        flipped = torch.randn(*shape, dtype=dtype).transpose(0, -1).contiguous().transpose(0, -1)
        torch.testing.assert_close(linear(flipped, layer.weight), nn.functional.linear(flipped, layer.weight))


def test_gradients_autocast_and_compilation_are_torch():
    layer, x = nn.Linear(7, 11), torch.randn(3, 7)
    linear(x, layer.weight, layer.bias).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(11, 7))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, layer.weight, layer.bias).dtype == torch.bfloat16
    with torch.no_grad():
        compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, layer.weight, layer.bias), layer(x))


@pytest.mark.parametrize("rows", [1, 3, 16, 33, 64, 300, 512, 513, 4096, 4100, 4200])
def test_large_products_equal_torch(rows):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 2048), torch.randn(rows, 2, 64)[:, 1]
    with torch.no_grad():
        out = linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(out, layer(x))
        assert out.is_contiguous()
        torch.testing.assert_close(
            linear(x.view(1, rows, 1, 64), layer.weight), (out - layer.bias).view(1, rows, 1, -1)
        )


@pytest.mark.skipif(_ONEDNN is None, reason="oneDNN is not faster on this CPU")
@pytest.mark.parametrize(("rows", "expected"), [(64, True), (2, False)])
def test_onednn_computes_large_products_without_gradients(rows, expected):
    layer, x = nn.Linear(128, 256), torch.randn(rows, 128)
    with torch.profiler.profile() as profile, torch.no_grad():
        linear(x, layer.weight, layer.bias)
    assert any("mkldnn" in event.key for event in profile.key_averages()) == expected


@pytest.mark.parametrize(("capability", "expected"), [("AVX512", True), ("AVX2", False), ("DEFAULT", False)])
def test_onednn_needs_avx512(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert (_find_onednn() is not None) == (expected and torch.backends.mkldnn.is_available())


def test_memory_does_not_grow_with_the_number_of_lengths():
    torch.manual_seed(0)
    layer, x = nn.Linear(256, 512), torch.randn(1100, 256)
    lengths = torch.arange(60, 1100)[torch.randperm(1040)].tolist()[:500]
    with torch.no_grad():
        linear(x, layer.weight)
        before = resident_memory()
        for length in lengths:
            linear(x[:length], layer.weight)
        assert resident_memory() - before < 50e6


@pytest.fixture(params=["fast", "slow", ""], ids=["instructions", "slow instructions", "no instructions"])
def instructions(request, monkeypatch):
    """The instructions that the CPU is taken to have for 16-bit dtypes."""
    module = sys.modules["subquad_kernels.c.products"]
    monkeypatch.setattr(module, "multiplies", lambda dtype: bool(request.param))
    monkeypatch.setattr(module, "multiplies_slowly", lambda dtype: request.param == "slow")
    return request.param


@pytest.mark.parametrize("rows", [1, 2, 5, 33, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("onednn", [True, False])
def test_16_bit_products(rows, dtype, onednn, instructions, monkeypatch):
    """A weight of several tiles, which do not divide it; sums are float32's, so only the result is rounded."""
    if not onednn:
        monkeypatch.setattr(sys.modules["subquad_kernels.c.products"], "_ONEDNN", None)
    torch.manual_seed(0)
    monkeypatch.setattr(sys.modules["subquad_kernels.c.products"], "_TILE", 2**13)
    layer, x = nn.Linear(130, 500, dtype=dtype), torch.randn(2, rows, 130, dtype=dtype)[:1]
    with torch.no_grad():
        for bias in (layer.bias, None):
            exact = nn.functional.linear(x.double(), layer.weight.double(), bias if bias is None else bias.double())
            out = linear(x, layer.weight, bias)
            assert (out.dtype, out.shape) == (dtype, (1, rows, 500))
            # Torch's own dot products round a sum before they add the bias.
            assert (out - exact).abs().max() <= 1.1 * torch.finfo(dtype).eps * exact.abs().max()
        product = matmul(x, layer.weight.T)
        torch.testing.assert_close(product, out, rtol=torch.finfo(dtype).eps, atol=1e-3)
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("rows", [64, 128])
def test_products_without_fast_instructions_are_computed_in_float32(rows, instructions, monkeypatch):
    """Where there is no C library."""
    monkeypatch.setattr(sys.modules["subquad_kernels.c.products"], "library", lambda: None)
    weight, x = torch.randn(256, 128, dtype=torch.float16), torch.randn(rows, 128, dtype=torch.float16)
    with torch.profiler.profile(record_shapes=True) as profile, torch.no_grad():
        linear(x, weight)
    conversions = [event for event in profile.key_averages() if event.key == "aten::copy_"]
    assert bool(conversions) == (not instructions or (instructions == "slow" and rows == 128))
    with torch.profiler.profile(record_shapes=True) as profile, torch.no_grad():
        matmul(x, weight.T)
    conversions = [event for event in profile.key_averages() if event.key == "aten::copy_"]
    assert bool(conversions) == (not instructions)


def test_few_rows_do_not_turn_onednn_on(monkeypatch):
    """Someone may have turned it off; and an error leaves it on."""
    weight, x = torch.randn(256, 128, dtype=torch.bfloat16), torch.randn(1, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            linear(x[:, 1:], weight)
        assert torch.backends.mkldnn.enabled
        torch._C._set_mkldnn_enabled(False)
        try:
            linear(x, weight)
            assert not torch.backends.mkldnn.enabled
        finally:
            torch._C._set_mkldnn_enabled(True)
