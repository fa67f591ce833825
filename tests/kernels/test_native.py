"""The C library for products of few rows: equal to float64, for every instruction set, and never in the way."""

import functools
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from subquad_kernels import int8_linear, linear, matmul, quantize_rows
from subquad_kernels.c import native
from subquad_native.compiling import FLAGS


AVAILABLE, REASON = native.explain()
# Where there is a compiler, a source that it refuses is a failure.
COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
needs_library = pytest.mark.skipif(AVAILABLE is None and not COMPILER, reason=f"no library: {REASON}")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@functools.cache
def compiled(architecture):
    """For several modules of tests."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{architecture}.so"
        command = ["cc", *FLAGS, "-Werror", "-Wall", f"-march={architecture}", native._SOURCES[0], "-o", path]
        subprocess.run(command, check=True)
        return native.Library(path)  # which stays in memory


@pytest.fixture(scope="module", params=["native", "x86-64-v3", pytest.param("x86-64", marks=pytest.mark.thorough)])
def library(request):
    """Compiled for this CPU, for AVX2, and for the oldest of its kind, which cannot read float16."""
    if request.param == "native":
        return AVAILABLE
    if platform.machine() != "x86_64" or (request.param == "x86-64-v3" and "AVX" not in capability()):
        pytest.skip("of another kind of CPU")
    return compiled(request.param)


def capability():
    return torch.backends.cpu.get_cpu_capability()


def random(*shape, dtype, offset=0):
    """Numbers that begin `offset` elements after an address that the allocator gave."""
    count = torch.Size(shape).numel()
    return torch.randn(count + offset, dtype=dtype)[offset:].view(shape)


@needs_library
def test_it_compiles():
    assert AVAILABLE, REASON


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 16, 63, 65, 200])
def test_equals_float64(library, dtype, width):
    if dtype not in library.dtypes:
        pytest.skip("needs conversions of float16")
    torch.manual_seed(width)
    for rows in (*range(1, 9), *((9, 12, 21) if library.linear_rows > 8 else ())):
        for outputs in (1, 63, 64, 129):
            x = random(rows, width, dtype=dtype, offset=rows % 3)
            weight, bias = (random(*shape, dtype=dtype, offset=1) for shape in ((outputs, width), (outputs,)))
            for added in (bias, None):
                exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
                out = library.linear(x, weight, added)
                assert (out - exact).abs().max() <= tolerance(dtype, x, weight)
            if rows > 8:
                continue
            y = random(2, width, outputs, dtype=dtype, offset=1)
            out = library.matmul(x.expand(2, -1, -1), y)
            assert (out - x.double() @ y.double()).abs().max() <= tolerance(dtype, x, y[0].T)


def tolerance(dtype, x, weight):
    """Of sums in float32 that are rounded to the dtype."""
    largest = (x.double().abs() @ weight.double().abs().T).max() + 4
    return largest * (2e-7 if dtype == torch.float32 else torch.finfo(dtype).eps / 2 + 2e-7)


@needs_library
@pytest.mark.parametrize("width", [1, 7, 64, 65, 300])
def test_8_bit_weights_give_what_torch_gives(library, width, monkeypatch):
    """To the last bit, for any number of rows, and in rows that are zero, infinite or NaN."""
    monkeypatch.setattr(sys.modules["subquad_kernels.int8_linear"], "_library_for", lambda *tensors: None)
    largest = 127 if sys.modules["subquad_kernels.int8_linear"].adds_exactly() else 63
    torch.manual_seed(width)
    for rows in (1, 2, 3, 4, 5, 8, 9, 14):
        x = random(rows, width, dtype=torch.float32, offset=1) * 3
        x[-1] = 2
        if rows >= 9:
            x[0], x[1, 0], x[2, -1] = 0, torch.nan, -torch.inf
        for outputs in (1, 66, 129):
            weight = torch.randint(-127, 128, (outputs, width), dtype=torch.int8)
            weight[0] = 127
            scale = torch.rand(outputs)
            out = library.int8_linear(x, weight, scale, largest)
            torch.testing.assert_close(out, int8_linear(x, weight, scale), rtol=0, atol=0, equal_nan=True)


@needs_library
@pytest.mark.parametrize("width", [1, 7, 64, 65, 300])
def test_what_stands_around_8_bit_products(library, width):
    """Rounding many rows and scaling their sums, to the last bit as torch, also if a row is zero, infinite or NaN."""
    torch.manual_seed(width)
    x = random(37, width, dtype=torch.float32, offset=1) * torch.logspace(-30, 30, 37)[:, None]
    x[0], x[1, 0], x[2, -1] = 0, torch.nan, -torch.inf
    for largest in (127, 63):
        found, expected = library.round_rows(x, largest), quantize_rows(x, largest)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    sums = torch.randint(-(2**31), 2**31 - 1, (37, width), dtype=torch.int32)
    scale, row_scale = torch.rand(width), found[1]
    expected = sums.float() * scale * row_scale[:, None]
    out = library.scale_sums(sums, row_scale, scale)
    assert out.data_ptr() == sums.data_ptr()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite(library, dtype):
    """They stay in their row and column, also in the part of a row that fills no vector. Rounding goes to infinity."""
    if dtype not in library.dtypes:
        pytest.skip("needs conversions of float16")
    inf, nan = float("inf"), float("nan")

    def expected(x, weight):  # torch gives NaN for infinity times 1 in bfloat16 on some CPUs
        return F.linear(x.float(), weight.float()).to(dtype)

    for position in (0, 40, 64):
        x, weight = torch.ones(3, 65, dtype=dtype), torch.ones(70, 65, dtype=dtype)
        x[1, position], weight[3, position], weight[67, position], weight[5, position] = inf, nan, -inf, 0
        for rows in (x, x.repeat(4, 1)) if library.linear_rows > 8 else (x,):
            torch.testing.assert_close(library.linear(rows, weight, None), expected(rows, weight), equal_nan=True)
        torch.testing.assert_close(library.matmul(x, weight.T.contiguous()), expected(x, weight), equal_nan=True)
    largest = torch.full((1, 65), torch.finfo(dtype).max, dtype=dtype)
    assert library.linear(largest, torch.ones(1, 65, dtype=dtype), None).item() == inf
    # Every number of 16 bits survives a product with one; subnormal ones too.
    if dtype != torch.float32:
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        out = library.linear(torch.ones(1, 1, dtype=dtype), numbers[:, None], None)[0]
        torch.testing.assert_close(out, numbers, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif("address" not in os.environ.get("SUBQUAD_NATIVE_FLAGS", ""), reason="for `make test-sanitized`")
def test_the_sanitizer_sees_what_is_read_beyond_the_end():
    """Without which the other tests of that run would say nothing."""
    code = """
import torch
from subquad_kernels.c import native

class Short:  # as a weight (3, 64)
    shape, numel = (3, 64), lambda self: 3 * 64
    data_ptr = torch.ones(3 * 64 - 1).data_ptr

native.library().linear(torch.ones(1, 64), torch.ones(3, 64), None)
print("read", flush=True)
native.library().linear(torch.ones(1, 64), Short(), None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and done.stdout == "read\n" and "ERROR: AddressSanitizer" in done.stderr, done.stderr


@needs_library
def test_threads_compute_the_same(library):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 130), torch.randn(2100, 130), torch.randn(2100)
    assert weight.numel() > native._FOR_THREADS
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(library.linear(x, weight, bias))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.fixture
def calls(monkeypatch):
    """How often the library was asked, which stays available."""
    made = []

    class Counting:
        dtypes, linear_rows = dict.fromkeys(DTYPES, 0), 128

        def linear(self, *tensors):
            made.append("linear")
            return F.linear(*tensors)

        def matmul(self, x, y):
            made.append("matmul")
            return x @ y

    monkeypatch.setattr(sys.modules["subquad_kernels.c.products"], "library", Counting)
    return made


def test_what_takes_the_library(calls):
    weight, x = torch.randn(256, 128), torch.randn(2, 4, 128)
    with torch.no_grad():
        linear(x, weight)
        linear(x.transpose(0, 1), weight, torch.randn(256))
        matmul(x[:, :1], torch.randn(128, 256))
        matmul(torch.randn(5, 2, 32), torch.randn(5, 32, 256))
        assert calls == ["linear", "linear", "matmul", "matmul"]


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_views(dtype):
    """torch changes their sign when it reads them, and their memory has the other one."""
    weight, x, bias = (torch.randn(*shape, dtype=dtype) for shape in ((256, 128), (2, 128), (256,)))
    with torch.no_grad():
        for given in itertools.product((x, torch._neg_view(x)), (weight, torch._neg_view(weight)), (bias,)):
            torch.testing.assert_close(linear(*given), F.linear(*given))
        torch.testing.assert_close(linear(x, weight, torch._neg_view(bias)), F.linear(x, weight, -bias))
        torch.testing.assert_close(matmul(torch._neg_view(x), weight.T.contiguous()), -x @ weight.T)
        torch.testing.assert_close(matmul(x, torch._neg_view(weight.T.contiguous())), -x @ weight.T)


@pytest.mark.parametrize("lacking", ["multiplies", "multiplies_slowly"])
def test_more_rows_without_fast_instructions(lacking, calls, monkeypatch):
    products = sys.modules["subquad_kernels.c.products"]
    monkeypatch.setattr(products, lacking, lambda dtype: lacking == "multiplies_slowly")
    weight = torch.randn(256, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        for rows, taken in ((9, 1), (128, 2), (129, 2)):
            linear(torch.randn(rows, 128, dtype=torch.bfloat16), weight)
            assert calls == ["linear"] * taken


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_what_does_not(calls):
    """Gradients, graphs, transformations, modes that watch products, many rows, small weights, views of weights."""
    weight, x, bias = torch.randn(256, 128), torch.randn(4, 128), torch.randn(256)
    expected = F.linear(x, weight)
    linear(x, weight)
    with torch.no_grad():
        linear(torch.randn(9, 128), weight)
        linear(x[:, :64], weight[:, :64])
        linear(x, weight[:128])
        linear(x, weight.double().float().T.contiguous().T)
        linear(x.to("meta"), weight.to("meta"))
        with pytest.raises(RuntimeError):
            linear(x, weight, torch.randn(255))
        with pytest.raises(RuntimeError):
            linear(x[:, 1:], weight)
        with pytest.raises(RuntimeError):
            linear(x, weight, bias.double())
        matmul(x, weight.T)
        matmul(torch.randn(3, 1, 128), torch.randn(3, 2, 128, 64)[:, 0])
        torch.testing.assert_close(torch.func.vmap(linear, (0, None))(x, weight), expected)
        torch.testing.assert_close(torch.func.jvp(lambda x: linear(x, weight), (x,), (x,))[1], expected)
        with forward_ad.dual_level():
            out = linear(forward_ad.make_dual(x, x), weight)
            torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, expected)
        traced = torch.jit.trace(lambda x: linear(x, weight), x, check_trace=False)
        torch.testing.assert_close(traced(2 * x), 2 * expected)
        torch.compile(linear, backend="eager", fullgraph=True)(x, weight)
        with FlopCounterMode(display=False) as counter:
            linear(x, weight)
        assert counter.get_total_flops() == 2 * x.numel() * 256
    assert calls == []
