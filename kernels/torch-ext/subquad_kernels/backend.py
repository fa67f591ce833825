"""Which implementation of an operator runs, in which precision, and how a Triton kernel is launched."""

import contextlib
import functools
import importlib.util
import os
import re
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import torch


# Of the operators in torch's registry: another copy of this code in the same process has its own.
_NAMESPACE = re.sub(r"\W", "_", __name__.rpartition(".")[0], flags=re.ASCII)


def custom_op(name: str, **options: Any) -> Callable[[Callable], Any]:
    """`torch.library.custom_op`, in the namespace of this copy of the package."""
    return torch.library.custom_op(f"{_NAMESPACE}::{name}", **options)


class KernelError(RuntimeError):
    """A Triton kernel that could not be compiled or launched."""


_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Operator, device, dtype and size of what could not be compiled; eager has taken its place.
_failed: set[tuple] = set()


@functools.cache
def _capable(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _works(device: torch.device) -> bool:
    """Whether Triton knows the device: a GPU of CUDA, from compute capability 8.0, or of ROCm."""
    return _HAS_TRITON and device.type == "cuda" and _capable(device)


def choose_backend(operator: str, backend: str, available: tuple[str, ...], x: torch.Tensor) -> str:
    """
    Resolves the `backend` argument of an operator.

    Args:
        operator: name of the operator, for the error.
        backend: `"auto"` or a member of `available`; the environment variable `SUBQUAD_BACKEND` overrides `"auto"`.
            As it speaks of all operators, `triton` there means eager to one that has no kernels.
        available: the implementations that the operator has.
        x: a tensor on the device, and of the widest dtype, that the operator will compute with.

    Returns:
        A member of `available`, or `"auto"`, which [`dispatch`] takes: Triton where it works, otherwise eager.

    Raises:
        ValueError: where the operator has no such implementation, or Triton cannot run on that tensor.
    """
    source = "backend"
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


def dispatch(operator: str, backend: str, x: torch.Tensor, triton: Callable[[], Any], eager: Callable[[], Any]) -> Any:
    """
    Calls the implementation that [`choose_backend`] named. `"auto"` is Triton on a device that it knows; should a
    kernel not compile there for x, one warning says why, and eager takes its place.
    """
    case = operator, x.device, x.dtype, x.shape[-1]
    if backend == "eager" or (backend == "auto" and (case in _failed or not _works(x.device))):
        return eager()
    try:
        return triton()
    except (KernelError, ImportError) as error:
        if backend == "triton":
            raise
        _failed.add(case)
        warnings.warn(f"`{operator}` runs in plain torch: {error}", RuntimeWarning, stacklevel=2)
        return eager()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """
    Runs a Triton kernel on the device of its first tensor.

    Raises:
        KernelError: where it does not compile, or needs more registers or shared memory than the device has.
    """
    from triton.runtime.errors import TritonError

    if 0 in grid:
        return
    device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        try:
            kernel[grid](*arguments, **constants, num_warps=num_warps, num_stages=1)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (TritonError, RuntimeError, subprocess.CalledProcessError) as error:
            if str(error).startswith("Triton Error"):
                raise  # of the driver: the kernel did compile
            name = getattr(kernel, "__name__", kernel)
            raise KernelError(f"{name} failed on {device}: {type(error).__name__}: {error}") from error


def can_look_at(x: torch.Tensor) -> bool:
    """Whether Python may branch on the values of x: on a CPU, which need not wait, and not while a graph is traced."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors as a kernel reads them."""
    return [None if x is None else x.contiguous() for x in tensors]


def of_widest(*tensors: torch.Tensor | None) -> torch.Tensor:
    """One of the tensors, of float64 if any is: where and in what the operator computes."""
    return next((x for x in tensors if x is not None and x.dtype == torch.float64), tensors[0])


def widest(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype that plain torch computes in: float32, or float64 where one of the inputs is."""
    return torch.promote_types(of_widest(*tensors).dtype, torch.float32)


def cast(dtype: torch.dtype, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors in that dtype."""
    return [None if x is None else x.to(dtype) for x in tensors]


def multiprocessors(x: torch.Tensor) -> int:
    """How many programs of a kernel the device of x runs side by side, at one to a multiprocessor."""
    if x.device.type == "cuda":
        return torch.cuda.get_device_properties(x.device).multi_processor_count
    return 132  # of an H100 or H200


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which autocast leaves the dtypes of operations on tensors like x alone."""
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()
