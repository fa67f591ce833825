"""The product of a linear layer is that of torch, whichever library computes it."""

import pytest
import torch
from torch import nn

from subquad_kernels import linear
from subquad_kernels.linear import _ONEDNN


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


def test_onednn_is_what_runs_without_gradients():
    if not torch.backends.mkldnn.is_available():
        assert _ONEDNN is None
        return
    layer, x = nn.Linear(7, 11), torch.randn(3, 7)
    with torch.profiler.profile() as profile, torch.no_grad():
        linear(x, layer.weight, layer.bias)
    assert any("mkldnn" in event.key for event in profile.key_averages())
