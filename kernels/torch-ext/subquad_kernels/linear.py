"""The product of a linear layer, by the faster of the two CPU libraries of torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F


# Below this number of multiplications MKL is at least as fast as oneDNN.
_WORTHWHILE = 2**21
# oneDNN compiles code for every number of rows, and keeps it (about 0.6 MB). So it gets only about 50 numbers of rows:
# long inputs are cut into blocks of this size, and rows of zeros are added to others.
_BLOCK = 4096


def _find_onednn() -> Callable | None:
    """oneDNN's product, on CPUs with AVX-512. On others MKL is as fast."""
    if torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None


_ONEDNN = _find_onednn()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """
    `torch.nn.functional.linear`: x (..., in), weight (out, in), bias (out) to (..., out).

    In float32 on a CPU with AVX-512 and without gradients, larger products are computed by oneDNN instead of torch's
    default, MKL. That is up to 2.2 times as fast on an AMD EPYC, where MKL seems not to use AVX-512. Otherwise, and
    for weights that are not plain tensors (for example quantised ones), this is torch's own function.
    """
    if (
        _ONEDNN is not None
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.dim() > 0
        and x.numel() * weight.shape[0] >= _WORTHWHILE
        and not torch.is_autocast_enabled("cpu")
        and type(x) is torch.Tensor
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and torch.backends.mkldnn.enabled
    ):
        rows = x.reshape(-1, x.shape[-1])
        blocks = [_product(block, weight, bias) for block in rows.split(_BLOCK)]
        return (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of at most `_BLOCK` rows, by oneDNN if they are enough."""
    count = rows.shape[0]
    if rows.numel() * weight.shape[0] < _WORTHWHILE:
        return F.linear(rows, weight, bias)
    if count != (size := _rounded(count)):
        padded = rows.new_empty(size, rows.shape[1])  # faster than F.pad, which fills all of it first
        padded[:count], padded[count:] = rows, 0
        rows = padded
    return _ONEDNN(rows, weight, bias, "none", [], "")[:count]


def _rounded(count: int) -> int:
    """The next of 1, 2, 4, 8, 16, 32, 48, ..., 256, and from there on eight numbers between two powers of two."""
    power = 1 << (count - 1).bit_length()
    step = max(power // 16, min(power, 16))
    return -(-count // step) * step
