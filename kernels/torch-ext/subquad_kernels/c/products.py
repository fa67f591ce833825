"""Products of linear layers, by the fastest CPU library, torch's or our own."""

import math
import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..instructions import has_avx512, multiplies, multiplies_slowly
from ..shortcuts import adds
from ..tracing import is_observed
from .native import MOST_ROWS, WORTHWHILE, library, readable


# Below this number of multiplications MKL is at least as fast as oneDNN.
_WORTHWHILE = 2**21
# oneDNN compiles code for every number of rows, and keeps it (about 0.6 MB). So it only gets about 50 numbers of rows:
# long inputs are cut into blocks of this size, others are padded with rows of zeros.
_BLOCK = 4096
# Up to this number of rows torch's dot products of 16-bit numbers are faster than a product in float32.
_FEW_ROWS = 4
# Below this number of multiplications a 16-bit product takes less time than starting the conversion of its weight.
_CONVERTED = 2**18
# From this number of rows on, converting the weight costs less than slow instructions do.
_MANY_ROWS = 96
# A weight is converted to float32 in tiles of about this number of elements for each thread, which fit in caches.
_TILE = 2**19
# Held while oneDNN is off, so that no other thread turns it on or leaves it off.
_switching = threading.Lock()


def _find_onednn() -> Callable | None:
    """oneDNN's product, on CPUs with AVX-512. On others MKL is as fast."""
    if torch.backends.mkldnn.is_available() and has_avx512():
        return getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None


_ONEDNN = _find_onednn()


def _is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product is computed eagerly on a CPU, in one of three dtypes, and without gradients."""
    return (
        x.is_cpu
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.dim() > 0
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and type(x) is torch.Tensor
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and not x.is_neg()
    )


def fits_library(x: torch.Tensor, weight: torch.Tensor, inner: int, bias: torch.Tensor | None = None) -> bool:
    """
    Whether the library of `native.py` may read the memory of plain tensors: no mode or transformation of torch
    observes the product, there are few rows, and all inputs are contiguous. `inner` is the dimension of the weight
    that the product sums over.
    """
    return (
        weight.dim() >= 2
        and x.shape[-1] == weight.shape[inner]
        and (bias is None or (bias.shape == weight.shape[:1] and readable(x.dtype, bias)))
        and weight.numel() >= WORTHWHILE
        and readable(weight.dtype, weight)
        and not is_observed()
    )


@adds("linear")
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """
    [`subquad_kernels.linear`], on a CPU and without gradients:

    - up to eight rows by our own C library, which reads a weight as fast as memory gives it. The C compiler of the
      machine makes it when the first product of some size is asked for. `SUBQUAD_NATIVE=0` turns it off;
    - in float32 with AVX-512, larger ones by oneDNN instead of torch's default, MKL. That is up to 2.2 times as fast
      on an AMD EPYC, where MKL seems not to use AVX-512;
    - in bfloat16 and float16, many rows by oneDNN if the CPU has fast instructions for the dtype. If not, up to 128
      rows by that library (with AVX-512); for more the weight is converted to float32 in tiles that the cache holds.
      Without a C compiler, few rows by torch's own dot products.

    None in all other cases, and for weights that are not plain tensors, such as quantised ones: torch's own function
    is the fastest then.
    """
    if _is_plain(x, weight):
        work, width = x.numel() * weight.shape[0], x.shape[-1]
        rows = x.numel() // width
        has, slow = x.dtype == torch.float32 or multiplies(x.dtype), multiplies_slowly(x.dtype)
        if (rows <= MOST_ROWS or slow or not has) and weight.dim() == 2 and fits_library(x, weight, 1, bias):
            found = library()
            may = found and x.dtype in found.dtypes and rows <= found.linear_rows
            if may and (out := found.linear(x, weight, bias)) is not None:
                return out
        if x.dtype != torch.float32:
            few = rows <= (1 if has else _FEW_ROWS)
            if few and _ONEDNN is not None:
                return _by_dot_products(x, weight, bias)
            convert = not has or (slow and rows >= _MANY_ROWS)
            if convert and not few and work >= _CONVERTED:
                return _in_float32(x.reshape(-1, width), weight, bias).view(*x.shape[:-1], -1)
        elif _ONEDNN is not None and work >= _WORTHWHILE and torch.backends.mkldnn.enabled:
            return _by_onednn(x.reshape(-1, width), weight, bias).view(*x.shape[:-1], -1)
    return None


@adds("matmul")
def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """
    [`subquad_kernels.matmul`], on a CPU and without gradients: few rows by the library of [`linear`]. On a CPU without
    instructions for a 16-bit dtype, larger products in float32: torch would take about five times as long. None in all
    other cases.
    """
    # Sizes are compared last: in a traced graph that would limit the shapes.
    if _is_plain(x, y):
        # The matrix y is read again for every row.
        rows = x.numel() // x.shape[-1] if y.dim() == 2 else x.shape[-2] if x.shape[:-2] == y.shape[:-2] else 0
        if 0 < rows <= _FEW_ROWS and fits_library(x, y, -2):
            found = library()
            if found and x.dtype in found.dtypes and (out := found.matmul(x, y)) is not None:
                return out
        if x.dtype != torch.float32 and not multiplies(x.dtype) and x.numel() * y.shape[-1] >= _CONVERTED:
            return (x.float() @ y.float()).to(x.dtype)
    return None


def _by_dot_products(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The 16-bit product without oneDNN. torch uses oneDNN on every CPU with AVX-512, at twice the time."""
    if not torch.backends.mkldnn.enabled or not _switching.acquire(blocking=False):
        return F.linear(x, weight, bias)
    # Not `torch.backends.mkldnn.flags`, which sets four more flags in 12 microseconds.
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)
        _switching.release()


def _in_float32(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of 16-bit numbers, computed in float32."""
    outputs, width = weight.shape
    tiles = math.ceil(weight.numel() / (_TILE * torch.get_num_threads()))
    size = min(outputs, math.ceil(outputs / tiles / 64) * 64)  # other sizes are slower in oneDNN
    out = rows.new_empty(rows.shape[0], outputs)
    rows, bias = rows.float(), bias if bias is None else bias.float()
    tile = rows.new_empty(size, width)
    product = F.linear if _ONEDNN is None or not torch.backends.mkldnn.enabled else _by_onednn
    for start in range(0, outputs, size):
        part = slice(min(start, outputs - size), min(start, outputs - size) + size)  # all of one shape, for oneDNN
        tile.copy_(weight[part])
        out[:, part] = product(rows, tile, bias if bias is None else bias[part])
    return out


def _by_onednn(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of any number of rows in float32."""
    blocks = [_block_by_onednn(block, weight, bias) for block in rows.split(_BLOCK)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _block_by_onednn(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of at most `_BLOCK` rows."""
    count = rows.shape[0]
    if count != (size := _rounded(count)):
        padded = rows.new_empty(size, rows.shape[1])  # faster than F.pad, which first fills the whole tensor
        padded[:count], padded[count:] = rows, 0
        rows = padded
    return _ONEDNN(rows, weight, bias, "none", [], "")[:count]


def _rounded(count: int) -> int:
    """The next of 1, 2, 4, 8, 16, 32, 48, ..., 256, then eight numbers between powers of two."""
    power = 1 << (count - 1).bit_length()
    step = max(power // 16, min(power, 16))
    return -(-count // step) * step
