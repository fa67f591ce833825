"""The product of a linear layer, by the faster of the two CPU libraries of torch."""

import torch
import torch.nn.functional as F


_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """
    `torch.nn.functional.linear`: x (..., in), weight (out, in), bias (out) to (..., out).

    In float32 on a CPU and without gradients the product is computed by oneDNN instead of torch's default, MKL. That
    is 2.2 times as fast on an AMD EPYC, where MKL seems not to use AVX-512. Otherwise, and for weights that are not
    plain tensors (for example quantised ones), this is torch's own function.
    """
    if (
        _ONEDNN is not None
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and type(x) is torch.Tensor
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and x.numel() > 0
        and torch.backends.mkldnn.enabled
    ):
        return _ONEDNN(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
