"""Choice of an operator's implementation and dtype, and launching of Triton kernels."""

import contextlib
import functools
import importlib.util
import inspect
import os
import subprocess
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch


class KernelError(RuntimeError):
    """A Triton kernel could not be compiled or launched."""


_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Operators whose kernels could not be imported.
_not_imported: set[str] = set()
# Failed kernel specializations and their reasons. Eager runs instead.
_failed: dict[Callable, dict[tuple, str]] = {}
# Operators and reasons that have been warned about.
_warned: set[tuple[str, str]] = set()


@functools.cache
def _capable(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _works(device: torch.device) -> bool:
    """Whether Triton supports the device: a CUDA GPU of compute capability 8.0 or above, or a ROCm GPU."""
    return _HAS_TRITON and device.type == "cuda" and _capable(device)


def choose_backend(operator: str, backend: str, available: tuple[str, ...], x: torch.Tensor) -> str:
    """
    Resolves the `backend` argument of an operator.

    Args:
        operator: name of the operator, for the error.
        backend: `"auto"` or a member of `available`. The environment variable `SUBQUAD_BACKEND` overrides `"auto"`;
            `triton` there means eager for an operator without kernels.
        available: the implementations of the operator. The package also has `"reference"`, the paper's recurrence.
        x: an input of the widest dtype, on the device of all inputs.

    Returns:
        A member of `available`, or `"auto"`, which [`dispatch`] resolves: Triton if it works, otherwise eager.

    Raises:
        ValueError: if the operator lacks the implementation, or Triton cannot compute with the tensor.
    """
    source = "backend"
    # package only
    available = tuple(sorted((*available, "reference")))
    if backend == "auto" and os.environ.get("SUBQUAD_BACKEND"):
        backend, source = os.environ["SUBQUAD_BACKEND"], "SUBQUAD_BACKEND"
        if backend == "triton" and "triton" not in available:
            backend = "eager"
    if backend == "auto":
        return "auto" if x.device.type == "cuda" and x.dtype != torch.float64 else "eager"
    if backend not in available:
        raise ValueError(f"{source}={backend!r}: `{operator}` has {', '.join(available)}.")
    if backend == "triton":
        if not _HAS_TRITON:
            raise ValueError(f"{source}='triton': the package triton is not installed.")
        if x.device.type not in ("cuda", "meta") and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(f"{source}='triton': the tensors are on {x.device}, and TRITON_INTERPRET is not 1.")
        if x.dtype == torch.float64:
            raise ValueError(f"{source}='triton': `{operator}` computes in float32, got float64.")
    return backend


def explain_backend(operator: str, available: tuple[str, ...], device: torch.device) -> tuple[str, str]:
    """
    The default implementation for float32 tensors on that device, and the reason. For other arguments see
    [`choose_backend`], whose errors this raises too.
    """
    chosen = choose_backend(operator, "auto", available, torch.empty(0, device=device))
    if forced := os.environ.get("SUBQUAD_BACKEND"):
        return chosen, f"SUBQUAD_BACKEND={forced}"
    if chosen == "eager":
        return chosen, f"Triton does not run on a device of type {device.type}"
    if "triton" not in available:
        return "eager", "there are no kernels for it"
    if not _HAS_TRITON:
        return "eager", "the package triton is not installed"
    if not _capable(device):
        return "eager", "the kernels need compute capability 8.0"
    failed = [reason for name, reason in _warned if name == operator]
    return ("eager", failed[0]) if failed else ("triton", "the GPU is supported")


def dispatch(operator: str, backend: str, x: torch.Tensor, triton: Callable[[], Any], eager: Callable[[], Any]) -> Any:
    """
    Calls the implementation that [`choose_backend`] returned. `"auto"` means Triton on a device that it supports. If a
    kernel of this call does not compile there, eager runs instead, with one warning that gives the reason.
    """
    if backend == "eager" or (backend == "auto" and (operator in _not_imported or not _works(x.device))):
        return eager()
    try:
        return triton()
    except (KernelError, ImportError) as error:
        if backend == "triton":
            raise
        if isinstance(error, ImportError):
            _not_imported.add(operator)
        reason = operator, str(error)
        if reason not in _warned:
            _warned.add(reason)
            warnings.warn(f"`{operator}` runs in plain torch: {error}", RuntimeWarning, stacklevel=2)
    return eager()


def launch(kernel: Any, grid: tuple[int, ...], /, *arguments: Any, **constants: Any) -> None:
    """
    Runs a Triton kernel on the device of its first tensor. `num_warps`, 4 by default, is among the constants, because
    Python compares every named parameter with each of them.

    Raises:
        KernelError: if it does not compile, needs more registers, shared memory or programs than the device has, or
            failed before for the same dtypes and constants.
    """
    if 0 in grid:
        return
    if grid[0] >= 2**31 or (len(grid) > 1 and max(grid[1:]) >= 2**16):
        raise KernelError(f"{kernel.fn.__name__} would need a grid of {grid} programs")
    device = first_tensor(arguments).device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *arguments, **constants)
    constants.setdefault("num_warps", 4)
    failed = _failed.get(kernel.fn)
    if failed and (reason := failed.get(_variant(kernel, device, arguments, constants))):
        raise KernelError(reason)
    try:
        # Like `kernel[grid](...)`, but without making a function first. Newer versions of Triton fuse a product and a
        # sum, as older ones did, only when told to.
        kernel.run(*arguments, grid=grid, warmup=False, num_stages=1, enable_fp_fusion=True, **constants)
    except Exception as error:
        if not _says_that_it_cannot_run(error):
            raise
        reason = f"{kernel.fn.__name__} failed on {device}: {type(error).__name__}: {error}"
        _failed.setdefault(kernel.fn, {})[_variant(kernel, device, arguments, constants)] = reason
        raise KernelError(reason) from error


def _says_that_it_cannot_run(error: Exception) -> bool:
    """Whether Triton could not compile or load a kernel. Other errors come from the device or the arguments."""
    from triton.runtime.errors import TritonError

    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or str(error).startswith("Triton Error"):
        return False
    return isinstance(error, TritonError | RuntimeError | subprocess.CalledProcessError)


def _variant(kernel: Any, device: torch.device, arguments: tuple, constants: dict) -> tuple:
    """The key of a Triton specialization: dtypes, alignments, constants, and properties of numbers."""
    parameters = inspect.signature(kernel.fn).parameters.values()
    compiled = []
    for x, parameter in zip(arguments, parameters, strict=False):
        if isinstance(x, torch.Tensor):
            x = x.dtype, x.data_ptr() % 16 == 0
        elif "constexpr" not in str(parameter.annotation):
            x = (x == 1, x % 16 == 0, x >= 2**31) if type(x) is int else type(x)
        compiled.append(x)
    return device, *compiled, *constants.items()


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up. (Triton's version also works in kernels, and takes 1.5 microseconds.)"""
    return -(x // -y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def block_size(size: int, most: int = 1 << 16) -> int:
    """The block size for a dimension: a power of two, and at least the minimum of a product."""
    return min(max(16, next_power_of_2(size)), most)


def contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors, contiguous, as kernels read them."""
    return [None if x is None else x.contiguous() for x in tensors]


def dense_rows(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, or a copy if the values of a row are not adjacent in memory."""
    return x if x is None or x.stride()[-1] == 1 else x.contiguous()


def strided(x: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    """A tensor (B, H, T, size) in a layout that kernels can read, and all its strides except the last."""
    strides = x.stride()
    if strides[3] != 1:
        x = x.contiguous()
        strides = x.stride()
    return x, *strides[:3]


def first_tensor(arguments: Iterable[Any]) -> torch.Tensor:
    """The first tensor among the arguments."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            return x
    raise ValueError("there is no tensor")


def of_widest(*tensors: torch.Tensor | None) -> torch.Tensor:
    """A float64 tensor if there is one, otherwise the first tensor."""
    double = torch.float64
    for x in tensors:
        if x is not None and x.dtype is double:
            return x
    return tensors[0]


def widest(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype that plain torch computes in: float64 if an input is float64, otherwise float32."""
    return torch.promote_types(of_widest(*tensors).dtype, torch.float32)


def common_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The smallest dtype that can hold all tensors."""
    dtype = tensors[0].dtype
    for x in tensors:
        if x.dtype is not dtype:
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def cast(dtype: torch.dtype, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors in that dtype."""
    return [None if x is None else x.to(dtype) for x in tensors]


def multiprocessors(x: torch.Tensor) -> int:
    """The number of multiprocessors of the device of x; each runs at least one program of a kernel at a time."""
    return _multiprocessors(x.device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132  # of an H100 or H200


def shared_memory(x: torch.Tensor) -> int:
    """The shared memory, in bytes, that a program may use on the device of x."""
    return _shared_memory(x.device)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # ROCm lacks the first attribute.
        return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return (227 if torch.version.hip is None else 64) * 1024  # of an H100 or H200, or of AMD


def in_wide_dtype(run: Callable, floats: tuple[torch.Tensor | None, ...], *others: Any) -> Any:
    """`run(*floats, *others)` in the [`widest`] dtype of the floats, without autocast."""
    with without_autocast(first_tensor(floats)):
        return run(*cast(widest(*floats), *floats), *others)


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context that turns autocast off on the device of x."""
    device = x.device.type
    # The device meta has no autocast. Asking torch.amp.is_autocast_available breaks graphs in torch 2.11.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def step_states(
    initial_state: torch.Tensor | None, inplace: bool, x: torch.Tensor, shape: tuple[int, ...]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """
    The states before and after a decoding step of one token: the input, and the tensor to write to. With `inplace`
    these are None and `initial_state`, otherwise new float32 tensors on the device of x; None means zeros.
    """
    if inplace:
        return None, initial_state
    if initial_state is None:
        initial_state = x.new_zeros(shape, dtype=torch.float32)
    state = initial_state.float().contiguous()
    return state, torch.empty_like(state)
