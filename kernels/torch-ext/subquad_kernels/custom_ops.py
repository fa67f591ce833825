"""Registers operators with `torch.library`, so that `torch.compile`, `torch.export` and autograd support them."""

import functools
import inspect
import re
from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from .backend import contiguous, dispatch, first_tensor, without_autocast


# Another copy of this package in the same process uses its own namespace.
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
    hints: int = 0,
) -> Callable:
    """
    Registers an operator, and its backward pass as operator `name`_backward. Only the inputs are kept between them,
    except for `saved` and `hints`. Returns the function to call, see [`_with_shortcut`].

    Args:
        name: name of the operator.
        eager: the implementation in plain torch. The annotations of its arguments and results are the schema.
        eager_backward: the backward pass in plain torch. It takes the gradient of each output of `eager`, then all
            inputs, and returns the gradients of the first inputs that are not None.
        triton: imports the Triton kernels and returns the same one or two functions. The operator then has a last
            argument `backend`, see [`dispatch`].
        fake: takes the inputs and returns empty tensors of the shapes and dtypes of the outputs.
        mutates_args: names of the arguments that are written to. Only the last kernel of a call may write to them, so
            that they are unchanged if a kernel does not compile.
        gradients: number of leading inputs that have gradients.
        outputs: number of outputs.
        saved: number of trailing outputs that only the backward pass needs. It takes them instead of their gradients.
        hints: number of further results that spare the backward pass work, which has arguments for them before the
            inputs. They are None in a trace, which cannot express all of their shapes.
    """
    written = [n for n, x in enumerate(inspect.signature(eager).parameters) if x in mutates_args]
    operator = name.rstrip("_")
    triton = triton and functools.cache(triton)
    run_any = _choose(operator, eager, triton)

    def make(*arguments):
        return fake(*(arguments if triton is None else arguments[:-1]))

    def run_all(*arguments):
        if arguments[0] is not None and arguments[0].numel() == 0:  # possibly nothing to do, as without rows
            results = make(*arguments)
            found = results if isinstance(results, tuple) else (results,)
            if not any(x is not None and x.numel() for x in (*found, *(arguments[n] for n in written))):
                return results
        return run_any(*arguments)

    def run_without_hints(*arguments):
        return run_all(*arguments)[:outputs]

    run = run_without_hints if hints else run_all
    op = _define(name, run, eager, triton, mutates_args, hints)
    op.register_fake(make)
    if eager_backward is None:
        return _with_shortcut(op, run, written)

    first = outputs + hints
    run_either = _choose(operator, eager_backward, triton and (lambda: triton()[1:]), first)

    def given(arguments):
        return [x for x in arguments[first : first + gradients] if x is not None]

    def run_backward(*arguments):
        if not any(x is not None and x.numel() for x in arguments[:outputs]):
            return [x.new_zeros(x.shape) for x in given(arguments)]
        return [x.to(of.dtype).contiguous() for x, of in zip(run_either(*arguments), given(arguments), strict=True)]

    backward = _define(f"{name}_backward", run_backward, eager_backward, triton)
    backward.register_fake(lambda *arguments: [x.new_empty(x.shape) for x in given(arguments)])
    backward.register_vmap(functools.partial(_by_row, backward))
    transformed_backward = _transformed(backward, setup_context=lambda ctx, inputs, output: None)
    call_backward = _with_shortcut(backward, run_backward, [], transformed=transformed_backward)

    def keep(ctx, inputs, output):
        kept = output[outputs - saved : outputs] if saved else ()
        ctx.mark_non_differentiable(*kept)
        # Checkpointing needs the same saved tensors in eager and traced calls, and a trace has no hints.
        kept += (*(x if x.numel() else None for x in output[outputs:]), *[None] * hints)[:hints] if hints else ()
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in (*kept, *inputs)))
        ctx.options = [None if isinstance(x, torch.Tensor) else x for x in (*kept, *inputs)]

    def differentiate(ctx, *grads):
        tensors = ctx.saved_tensors  # non-reentrant checkpointing returns them only once
        arguments = [option if x is None else x for x, option in zip(tensors, ctx.options, strict=True)]
        found = iter(call_backward(*grads[: outputs - saved], *arguments))
        inputs = enumerate(arguments[saved + hints :])
        return tuple(next(found) if n < gradients and x is not None else None for n, x in inputs)

    op.register_autograd(differentiate, setup_context=keep)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):  # a separate setup_context would be slower
            output = run_all(*arguments)
            keep(ctx, arguments, output)
            return output[:outputs] if hints else output

        backward = staticmethod(differentiate)

    transformed = _transformed(op, setup_context=keep, backward=differentiate)
    return _with_shortcut(op, run, written, Differentiable.apply, transformed)


def _transformed(op: Callable, **methods: Callable) -> Callable:
    """
    `op` for the transformations of `torch.func`. They need an autograd function whose forward method has no context,
    unlike the functions that torch makes for custom operators.
    """

    def forward(*arguments):
        results = op(*arguments)
        return tuple(results) if isinstance(results, list) else results

    fields = {name: staticmethod(method) for name, method in {"forward": forward, **methods}.items()}
    return type(op._name, (torch.autograd.Function,), {"generate_vmap_rule": True, **fields}).apply


def _by_row(op: Callable, info, in_dims: tuple[int | None, ...], *arguments) -> tuple[list[torch.Tensor], list[int]]:
    """`op`, which returns a list of tensors, for each row of a batch: torch has no rule for lists."""
    rows = []
    for n in range(info.batch_size):
        pairs = zip(arguments, in_dims, strict=True)
        rows.append(op(*(x if dim is None else x.select(dim, n) for x, dim in pairs)))
    results = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    return results, [0] * len(results)


# Types of arguments, and whether they are tensors.
_TENSORS = torch.Tensor, torch.nn.Parameter
_IS_TENSOR = dict.fromkeys((type(None), bool, int, float, str, torch.dtype), False) | dict.fromkeys(_TENSORS, True)


def _with_shortcut(
    op: Callable,
    run: Callable,
    written: list[int],
    differentiable: Callable | None = None,
    transformed: Callable | None = None,
) -> Callable:
    """
    The function that calls `op`, or its implementation `run` when no hook, gradient or trace could observe it, because
    the bookkeeping of a custom operator takes longer than the kernel of a single token. `written` are the arguments
    that it writes to. Calls with gradients use `differentiable`, and calls under the transformations of `torch.func`
    use `transformed`, if there is one.
    """

    def call(*arguments):
        if torch.compiler.is_compiling():
            return op(*arguments)
        if not _is_plain(arguments):
            if forward_ad._current_level >= 0 and any(map(_has_tangent, arguments)):
                raise NotImplementedError(  # torch's custom operators drop tangents without an error
                    f"`{op._name}` has no forward-mode derivative. Reverse mode works, as in `torch.func.vjp`."
                )
            if transformed is not None and torch._C._functorch.peek_interpreter_stack() is not None:
                return transformed(*arguments)
            return op(*arguments)
        if _needs_gradient(arguments):
            return (differentiable or op)(*arguments)
        changing = [arguments[n] for n in written if not arguments[n].is_inference()]
        if changing:  # lets autograd detect overwritten tensors that it needs
            torch.autograd.graph.increment_version(changing)
        return run(*arguments)

    return call


def _is_plain(arguments: tuple) -> bool:
    """Whether nothing traces, transforms, replaces or observes a call with these arguments."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    ):
        return False
    for x in arguments:
        is_tensor = _IS_TENSOR.get(type(x))
        if is_tensor is None or (is_tensor and (x.is_meta or x.is_neg())):
            return False  # kernels would miss torch's lazy negation
    return True


def _has_tangent(x) -> bool:
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None


def _needs_gradient(arguments: tuple) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in arguments if type(x) in _TENSORS)


def _choose(operator: str, eager: Callable, triton: Callable | None, first: int = 0) -> Callable:
    """The function that calls [`dispatch`] for the first tensor from argument `first` on."""

    def run_eager(*inputs):
        with without_autocast(first_tensor(inputs[first:])):
            outputs = eager(*inputs)
        if isinstance(outputs, torch.Tensor):
            return outputs.contiguous()
        return None if outputs is None else tuple(contiguous(*outputs))

    def run(*arguments):
        inputs, backend = arguments[:-1], arguments[-1]
        x = first_tensor(inputs[first:] if first else inputs)
        return dispatch(operator, backend, x, lambda: triton()[0](*inputs), lambda: run_eager(*inputs))

    return run_eager if triton is None else run


def _define(name, run, eager, triton, mutates_args=(), hints=0):
    schema = torch.library.infer_schema(eager, mutates_args=mutates_args)
    if hints:
        schema = schema.removesuffix(hints * ", Tensor" + ")") + ")"
    if triton is not None:
        schema = schema.replace(") -> ", ", str backend) -> ", 1)
    return torch.library.custom_op(f"{_NAMESPACE}::{name}", run, mutates_args=mutates_args, schema=schema)
