"""Checks for tracing, capture, and modes that observe torch's operations."""

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode


def is_observed(device_type: str = "cpu") -> bool:
    """Whether autograd, tracing, a mode or a transformation of torch observes operations on a type of device."""
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled(device_type)
        or torch._C._get_tracing_state() is not None
        or is_transformed()
        or _get_current_dispatch_mode() is not None
        or forward_ad._current_level >= 0
        # `torch.set_default_device` is also a mode.
        or any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
    )


def can_read_values(x: torch.Tensor) -> bool:
    """
    Whether Python may branch on the values of a tensor: not while a graph is traced or captured, not under the
    transformations of `torch.func`, and not on the meta device.
    """
    if torch.compiler.is_compiling() or x.device.type == "meta" or is_transformed():
        return False
    return x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def is_transformed() -> bool:
    """Whether a transformation of `torch.func` runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def can_keep(x: torch.Tensor) -> bool:
    """Whether new tensors outlive a call with x: not in a graph, nor under a dispatch mode."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    return x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def can_read_without_sync(x: torch.Tensor) -> bool:
    """Whether Python may branch on the values of x without a synchronization: on a CPU, and not in a trace."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def is_inference(x: torch.Tensor) -> bool:
    """Whether x was made in inference mode, if that can be checked."""
    return not torch.compiler.is_compiling() and x.is_inference()
