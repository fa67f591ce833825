"""Registers operators with `torch.library`, so that `torch.compile`, `torch.export` and autograd see through them."""

import re
from collections.abc import Callable

import torch

from .backend import contiguous, dispatch, without_autocast


# Another copy of this package in the same process registers its operators in a namespace of its own.
_NAMESPACE = re.sub(r"\W", "_", __name__.rpartition(".")[0], flags=re.ASCII)


def custom_op(
    name: str,
    *,
    eager: Callable,
    eager_backward: Callable | None = None,
    triton: Callable[[], tuple[Callable, ...]] | None = None,
    fake: Callable,
    mutates_args: tuple[str, ...] = (),
    gradients: int = 0,
    outputs: int = 1,
    saved: int = 0,
) -> torch.library.CustomOpDef:
    """
    Registers an operator, and its backward pass as operator `name`_backward. Between them only the inputs are kept.

    Args:
        name: of the operator.
        eager: the implementation in plain torch. The annotations of its arguments and results are the schema.
        eager_backward: the backward pass in plain torch. For each output of `eager` it takes the gradient, then all
            inputs. It returns the gradients of those of the first inputs that are not None.
        triton: imports the Triton kernels and returns the same one or two functions. The operator then has a last
            argument `backend`, see [`dispatch`].
        fake: takes the inputs and returns empty tensors of the shapes and dtypes of the outputs.
        mutates_args: names of the arguments that are written to.
        gradients: number of inputs, the first ones, that have gradients.
        outputs: number of outputs.
        saved: number of outputs, the last ones, that only the backward pass needs. It takes them instead of their
            gradients.
    """
    operator = name.rstrip("_")
    op = _define(name, _choose(operator, eager, triton), eager, triton, mutates_args)
    op.register_fake(lambda *arguments: fake(*(arguments if triton is None else arguments[:-1])))
    if eager_backward is None:
        return op

    run = _choose(operator, eager_backward, triton and (lambda: triton()[1:]), outputs)

    def given(arguments):
        return [x for x in arguments[outputs : outputs + gradients] if x is not None]

    def run_backward(*arguments):
        return [x.to(of.dtype).contiguous() for x, of in zip(run(*arguments), given(arguments), strict=True)]

    backward = _define(f"{name}_backward", run_backward, eager_backward, triton)
    backward.register_fake(lambda *arguments: [x.new_empty(x.shape) for x in given(arguments)])

    def setup_context(ctx, inputs, output):
        kept = output[outputs - saved :] if saved else ()
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in (*kept, *inputs)))
        ctx.options = [None if isinstance(x, torch.Tensor) else x for x in (*kept, *inputs)]

    def differentiate(ctx, *grads):
        tensors = ctx.saved_tensors  # non-reentrant checkpointing returns them once only
        arguments = [option if x is None else x for x, option in zip(tensors, ctx.options, strict=True)]
        found = iter(backward(*grads[: outputs - saved], *arguments))
        inputs = enumerate(arguments[saved:])
        return tuple(next(found) if n < gradients and x is not None else None for n, x in inputs)

    op.register_autograd(differentiate, setup_context=setup_context)
    return op


def _choose(operator: str, eager: Callable, triton: Callable | None, first: int = 0) -> Callable:
    """The function that runs what [`dispatch`] chooses for the first tensor from argument `first` on."""

    def example(inputs):
        return next(x for x in inputs[first:] if isinstance(x, torch.Tensor))

    def run_eager(*inputs):
        with without_autocast(example(inputs)):
            outputs = eager(*inputs)
        if isinstance(outputs, torch.Tensor):
            return outputs.contiguous()
        return None if outputs is None else tuple(contiguous(*outputs))

    def run(*arguments):
        *inputs, backend = arguments
        return dispatch(operator, backend, example(inputs), lambda: triton()[0](*inputs), lambda: run_eager(*inputs))

    return run_eager if triton is None else run


def _define(name, run, eager, triton, mutates_args=()):
    schema = torch.library.infer_schema(eager, mutates_args=mutates_args)
    if triton is not None:
        schema = schema.replace(") -> ", ", str backend) -> ", 1)
    return torch.library.custom_op(f"{_NAMESPACE}::{name}", run, mutates_args=mutates_args, schema=schema)
