"""Which implementation of an operator runs."""

import os


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
    if backend == "auto":
        backend, source = os.environ.get("SUBQUAD_BACKEND", default), "SUBQUAD_BACKEND"
    if backend not in available:
        raise ValueError(f"{source}={backend!r}: `{operator}` has {', '.join(available)}.")
    return backend
