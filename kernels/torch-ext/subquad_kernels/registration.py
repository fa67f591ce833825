"""Registers operators with `torch.library`, so that `torch.compile`, `torch.export` and autograd see through them."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.library import CustomOpDef

from .backend import contiguous, dispatch, without_autocast


# Another copy of this package in the same process registers its operators in a namespace of its own.
_NAMESPACE = re.sub(r"\W", "_", __name__.rpartition(".")[0], flags=re.ASCII)


def _implementation(operator: str, eager: Callable, triton: Callable | None, begin: int = 0) -> Callable:
    """
    The function that [`dispatch`] makes of two implementations. Its last argument is `backend`, if there are Triton
    kernels; the first tensor from argument `begin` on is the one that the kernels are compiled for.
    """

    def example(inputs):
        return next(x for x in inputs[begin:] if isinstance(x, torch.Tensor))

    def run_eager(*inputs):
        with without_autocast(example(inputs)):
            results = eager(*inputs)
        if isinstance(results, torch.Tensor):
            return results.contiguous()
        return None if results is None else tuple(contiguous(*results))

    def run(*arguments):
        *inputs, backend = arguments
        return dispatch(operator, backend, example(inputs), lambda: triton(*inputs), lambda: run_eager(*inputs))

    return run_eager if triton is None else run


def _define(
    name: str, run: Callable, eager: Callable, has_backend: bool, mutates_args: tuple[str, ...]
) -> CustomOpDef:
    schema = torch.library.infer_schema(eager, mutates_args=mutates_args)
    if has_backend:
        schema = schema.replace(") -> ", ", str backend) -> ", 1)
    return torch.library.custom_op(f"{_NAMESPACE}::{name}", run, mutates_args=mutates_args, schema=schema)


def custom_op(
    name: str,
    *,
    eager: Callable,
    triton: Callable | None = None,
    fake: Callable,
    mutates_args: tuple[str, ...] = (),
) -> CustomOpDef:
    """
    Registers an operator, in the namespace of this copy of the package.

    Args:
        name: of the operator.
        eager: the implementation in plain torch, which runs without autocast. The operator has its arguments and
            results, as they are annotated.
        triton: the implementation as Triton kernels, which it imports when it is called; the operator then has a last
            argument `backend`, see [`dispatch`].
        fake: takes the arguments of `eager` and returns empty tensors in place of its results.
        mutates_args: names of the arguments that are written to.
    """
    op = _define(name, _implementation(name.rstrip("_"), eager, triton), eager, triton is not None, mutates_args)
    op.register_fake(fake if triton is None else lambda *arguments: fake(*arguments[:-1]))
    return op


def register_backward(
    name: str,
    forward: CustomOpDef,
    *,
    eager: Callable,
    triton: Callable | None = None,
    outputs: int = 1,
    saved: int = 0,
    gradients: int,
) -> CustomOpDef:
    """
    Registers the backward pass of an operator, as the operator `name`_backward.

    Args:
        name: of the operator.
        forward: what [`custom_op`] returned for it.
        eager: the implementation in plain torch. For every output of the operator it takes the gradient, then all
            inputs. It returns the gradients of those of the first inputs that are not None, in their order.
        triton: the same as Triton kernels.
        outputs: number of outputs.
        saved: how many outputs, the last ones, are made for the backward pass alone, which takes them in place of
            their gradients. Besides them the inputs are all that is kept between the passes.
        gradients: how many inputs, the first ones, have gradients.
    """
    run = _implementation(name, eager, triton, outputs)

    def given(arguments):
        return [x for x in arguments[outputs : outputs + gradients] if x is not None]

    def run_backward(*arguments):
        return [x.to(of.dtype).contiguous() for x, of in zip(run(*arguments), given(arguments), strict=True)]

    backward = _define(f"{name}_backward", run_backward, eager, triton is not None, ())
    backward.register_fake(lambda *arguments: [x.new_empty(x.shape) for x in given(arguments)])

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        kept = output[outputs - saved :] if saved else ()
        ctx.mark_non_differentiable(*kept)
        tensors = [x if isinstance(x, torch.Tensor) else None for x in (*kept, *inputs)]
        ctx.save_for_backward(*tensors)
        ctx.options = [None if isinstance(x, torch.Tensor) else x for x in (*kept, *inputs)]

    def differentiate(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors  # non-reentrant checkpointing returns them once only
        arguments = [option if x is None else x for x, option in zip(tensors, ctx.options, strict=True)]
        found = iter(backward(*grads[: outputs - saved], *arguments))
        inputs = arguments[saved:]
        return tuple(next(found) if n < gradients and x is not None else None for n, x in enumerate(inputs))

    forward.register_autograd(differentiate, setup_context=setup_context)
    return backward
