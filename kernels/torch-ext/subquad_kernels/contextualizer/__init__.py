"""The contextualizer of Avey: every row of a window reads those before it, weighted by what both of them hold."""

import torch

from ..backend import choose_backend, custom_op, dispatch, without_autocast
from .eager import contextualizer_eager, contextualizer_eager_backward
from .reference import contextualizer_reference


BACKENDS = ("eager", "reference", "triton")


@custom_op("contextualizer", mutates_args=())
def _contextualizer(
    z: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    prefix: torch.Tensor | None,
    queries: int,
    backend: str,
) -> torch.Tensor:
    def triton():
        from .triton_kernels import contextualizer_triton

        return contextualizer_triton(z, v, gate, prefix, queries)

    def eager():
        with without_autocast(z):
            return contextualizer_eager(z, v, gate, prefix, queries)

    return dispatch("contextualizer", backend, z, triton, eager)


@_contextualizer.register_fake
def _(z, v, gate, prefix, queries, backend):
    return z.new_empty(z.shape[0], queries, z.shape[2])


@custom_op("contextualizer_backward", mutates_args=())
def _contextualizer_backward(
    grad: torch.Tensor,
    z: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    prefix: torch.Tensor | None,
    queries: int,
    backend: str,
) -> list[torch.Tensor]:
    def triton():
        from .triton_kernels import contextualizer_triton_backward

        return contextualizer_triton_backward(grad, z, v, gate, prefix, queries)

    def eager():
        with without_autocast(z):
            return contextualizer_eager_backward(grad, z, v, gate, prefix, queries)

    return dispatch("contextualizer", backend, z, triton, eager)


@_contextualizer_backward.register_fake
def _(grad, z, v, gate, prefix, queries, backend):
    return [tensor.new_empty(tensor.shape) for tensor in (z, v, gate, prefix) if tensor is not None]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.queries, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    tensors = ctx.saved_tensors  # which non-reentrant checkpointing gives out once
    grads = iter(_contextualizer_backward(grad, *tensors, ctx.queries, ctx.backend))
    return (*[None if tensor is None else next(grads) for tensor in tensors], None, None)


_contextualizer.register_autograd(_backward, setup_context=_setup_context)


def contextualizer(
    z: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None = None,
    prefix: torch.Tensor | None = None,
    queries: int | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """
    Mixes the rows of each window (equation 2 of "Don't Pay Attention", arXiv:2506.11305, without activation and bias):

        out = gate * ((tril(v) * cos) x),    cos_ij = y_i · y_j,    y_i = x_i / sqrt(sum(x_i²) + 1e-8)

    where the C rows of x are the first C - R of `prefix`, the same in every window, and then the R of z. Norms and
    sums are float32 (float64 where z is), under autocast too; products are of the dtype of z. z and gate are read in
    place where the values of a row lie side by side. The (C, C) weights never exist for all windows at once, whatever
    their number, nor are they kept for the backward pass, which keeps the arguments alone.

    Args:
        z: the last R rows of W windows, (W, R, H), H at least 1.
        v: learned weights, (C, C) with 1 <= R <= C; what is above the diagonal does not count.
        gate: (W, Q, H), or None for none.
        prefix: (P, H), P at least C - R; later rows do not count. Needed where R < C.
        queries: Q, the number of last rows that are put out, from 1 to R; R where None.
        backend: `"auto"`, `"triton"`, `"eager"` or `"reference"` (everything in the dtype of the inputs).

    Returns:
        out (W, Q, H) in the dtype of z.

    Raises:
        ValueError: where a shape, a dtype or a device does not fit, before any work.
    """
    queries = z.shape[1] if queries is None and z.dim() == 3 else queries
    _check(z, v, gate, prefix, queries)
    backend = choose_backend("contextualizer", backend, BACKENDS, z)
    if backend == "reference":
        return contextualizer_reference(z, v, gate, prefix, queries).to(z.dtype)
    return _contextualizer(z, v, gate, prefix, queries, backend)


def _check(z, v, gate, prefix, queries):
    if z.dim() != 3 or z.shape[1] == 0 or z.shape[2] == 0:
        raise ValueError(f"`z` must be (windows, rows >= 1, width >= 1), got {tuple(z.shape)}.")
    windows, rows, width = z.shape
    if v.dim() != 2 or v.shape[0] != v.shape[1] or v.shape[0] < rows:
        raise ValueError(f"`v` must be (context, context) with context >= {rows}, got {tuple(v.shape)}.")
    if not 1 <= queries <= rows:
        raise ValueError(f"`queries` must be from 1 to {rows}, the rows of `z`, got {queries}.")
    if gate is not None and gate.shape != (windows, queries, width):
        raise ValueError(f"`gate` must have shape {(windows, queries, width)}, got {tuple(gate.shape)}.")
    shared = v.shape[0] - rows
    if prefix is None and shared:
        raise ValueError(
            f"`prefix` must hold the first {shared} of {v.shape[0]} rows, of which `z` has {rows}; got None."
        )
    if prefix is not None and (prefix.dim() != 2 or prefix.shape[0] < shared or prefix.shape[1] != width):
        raise ValueError(f"`prefix` must be (rows >= {shared}, {width}), got {tuple(prefix.shape)}.")
    for name, tensor in (("z", z), ("v", v), ("gate", gate), ("prefix", prefix)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` must be floating point, got {tensor.dtype}.")
        if tensor.device != z.device:
            raise ValueError(f"`{name}` is on {tensor.device}, `z` on {z.device}.")
