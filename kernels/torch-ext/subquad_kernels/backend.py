"""Which implementation of an operator runs, and in which precision."""

import contextlib
import os

import torch


def choose_backend(operator: str, backend: str, available: tuple[str, ...], default: str) -> str:
    """
    Resolves the `backend` argument of an operator.

    Args:
        operator: name of the operator, for the error.
        backend: `"auto"` or a member of `available`; the environment variable `SUBQUAD_BACKEND` overrides `"auto"`.
        available: the implementations that the operator has.
        default: what `"auto"` means where the environment says nothing.

    Raises:
        ValueError: where the operator has no such implementation.
    """
    source = "backend"
    if backend == "auto" and os.environ.get("SUBQUAD_BACKEND"):
        backend, source = os.environ["SUBQUAD_BACKEND"], "SUBQUAD_BACKEND"
    if backend == "auto":
        return default
    if backend not in available:
        raise ValueError(f"{source}={backend!r}: `{operator}` has {', '.join(available)}.")
    return backend


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which autocast leaves the dtypes of operations on tensors like x alone."""
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()
