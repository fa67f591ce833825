"""The product with 8-bit weights: exact sums of integers, and rows that do not depend on each other."""

import os
import subprocess
import sys

import pytest
import torch

from subquad_kernels import int8_linear, quantize_rows


module = sys.modules["subquad_kernels.int8_linear"]
SHAPES = [(1, 1, 1), (5, 1, 3), (1, 7, 5), (3, 64, 33), (17, 100, 96), (2, 300, 2050), (70, 65, 1), (70, 300, 131)]


def product(x, weight, scale, bias, largest):
    """The same in Python's order: integers of x, an exact sum, two scales, the bias."""
    integers, row_scale = quantize_rows(x, largest)
    sums = integers.long() @ weight.long().T
    out = sums.int() * scale * row_scale[:, None]
    return out if bias is None else out + bias


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_exact(shape, exact, monkeypatch):
    """Also those of the largest integers, where 16 bits would overflow, and by the way that such CPUs take."""
    if exact and not module.adds_exactly():
        pytest.skip("this CPU adds in 16 bits")
    monkeypatch.setattr(module, "adds_exactly", lambda: exact)
    torch.manual_seed(0)
    rows, width, outputs = shape
    largest = 127 if exact else 63
    weight = torch.randint(-127, 128, (outputs, width), dtype=torch.int8)
    weight[:2] = 127
    scale, bias = torch.rand(outputs) + 0.5, torch.randn(outputs)
    x = torch.randn(rows, width)
    x[0] = 3
    for each in (x, -x):
        for b in (bias, None):
            assert torch.equal(int8_linear(each, weight, scale, b), product(each, weight, scale, b, largest))


def test_rows_do_not_depend_on_each_other():
    """The others may be large, infinite or NaN; in any shape, and in 16 bits."""
    torch.manual_seed(0)
    weight, scale = quantize_rows(torch.randn(80, 96))
    x = torch.randn(2, 20, 96) * torch.logspace(-6, 6, 20)[:, None]
    x[0, 3, 5], x[1, 4, 0] = torch.inf, torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        out = int8_linear(x.to(dtype), weight, scale)
        assert out.shape == (2, 20, 80) and out.dtype == dtype
        for b in range(2):
            for t in range(20):
                alone = int8_linear(x[b, t].to(dtype), weight, scale)
                assert torch.equal(out[b, t], alone) or (b, t) in ((0, 3), (1, 4))
    assert not out[0, 3].isfinite().any() and not out[1, 4].isfinite().any()
    assert int8_linear(x[:, :0], weight, scale).shape == (2, 0, 80)
    assert not int8_linear(torch.zeros(1, 96), weight, scale).any()


@pytest.mark.parametrize("rows", [1, 6, 20])
def test_more_inputs_than_32_bits_hold_the_sum_of(rows):
    width = 2**17 + 2400
    weight = torch.full((3, width), 127, dtype=torch.int8)
    weight[1], weight[2, ::2] = -127, 0
    out = int8_linear(torch.ones(rows, width), weight, torch.full((3,), 1 / 127))
    expected = torch.tensor([width, -width, width / 2]).expand(rows, 3)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


def test_rounding():
    """Each number is off by half a step at most, and the largest of a row is exact."""
    torch.manual_seed(0)
    x = torch.randn(50, 33) * torch.logspace(-30, 30, 50)[:, None]
    x[7] = 0
    integers, scale = quantize_rows(x)
    assert integers.dtype == torch.int8 and scale.dtype == torch.float32
    assert torch.equal(integers.abs().amax(1), torch.where(x.any(1), 127, 0).to(torch.int8))
    assert ((integers * scale[:, None] - x).abs() <= 0.501 * scale[:, None]).all()


def test_a_cpu_without_vnni():
    """oneDNN can be told to leave VNNI out; then seven bits are taken, and the sums stay exact."""
    code = """
import sys, torch
from subquad_kernels import int8_linear, quantize_rows
assert sys.modules["subquad_kernels.int8_linear"].adds_exactly() is False
x = torch.full((3, 256), 1.0)
weight = torch.full((40, 256), 127, dtype=torch.int8)
for sign in (1, -1):
    torch.testing.assert_close(int8_linear(sign * x, weight, torch.ones(40)), torch.full((3, 40), sign * 127 * 256.0))
"""
    if sys.platform != "linux" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("needs an x86 CPU")
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
