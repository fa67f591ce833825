"""Slot routing: which slots of its memory a token of Raven writes to, and how much each of them forgets."""

import math

import torch

from ..backend import cast, choose_backend, custom_op, dispatch, of_widest, widest
from .eager import slot_routing_eager, slot_routing_eager_backward
from .reference import slot_routing_reference


BACKENDS = ("eager", "reference", "triton")
SCORES = ("sigmoid", "softmax")


@custom_op("slot_routing", mutates_args=())
def _slot_routing(
    logits: torch.Tensor,
    log_decay: torch.Tensor,
    topk: int,
    bias: torch.Tensor | None,
    score: str,
    scale: float,
    backend: str,
) -> torch.Tensor:
    def triton():
        from .triton_kernels import slot_routing_triton

        return slot_routing_triton(logits, log_decay, topk, bias, score, scale)

    def eager():
        x, a, b = cast(widest(logits, log_decay, bias), logits, log_decay, bias)
        return slot_routing_eager(x, a, topk, b, score, scale).contiguous()

    return dispatch("slot_routing", backend, logits, triton, eager)


@_slot_routing.register_fake
def _(logits, log_decay, topk, bias, score, scale, backend):
    return logits.new_empty(logits.shape, dtype=widest(logits, log_decay, bias))


@custom_op("slot_routing_backward", mutates_args=())
def _slot_routing_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    log_decay: torch.Tensor,
    topk: int,
    bias: torch.Tensor | None,
    score: str,
    scale: float,
    backend: str,
) -> list[torch.Tensor]:
    def triton():
        from .triton_kernels import slot_routing_triton_backward

        return slot_routing_triton_backward(grad, logits, log_decay, topk, bias, score, scale)

    def eager():
        x, a, b = cast(grad.dtype, logits, log_decay, bias)
        return slot_routing_eager_backward(grad, x, a, topk, b, score, scale)

    grads = dispatch("slot_routing", backend, logits, triton, eager)
    return [x.to(of.dtype).contiguous() for x, of in zip(grads, (logits, log_decay), strict=True)]


@_slot_routing_backward.register_fake
def _(grad, logits, log_decay, topk, bias, score, scale, backend):
    return [logits.new_empty(logits.shape), log_decay.new_empty(log_decay.shape)]


def _setup_context(ctx, inputs, output):
    logits, log_decay, ctx.topk, bias, *ctx.options = inputs
    ctx.save_for_backward(logits, log_decay, bias)


def _backward(ctx, grad):
    logits, log_decay, bias = ctx.saved_tensors
    grads = _slot_routing_backward(grad, logits, log_decay, ctx.topk, bias, *ctx.options)
    return (*grads, *[None] * 5)


_slot_routing.register_autograd(_backward, setup_context=_setup_context)


def slot_routing(
    logits: torch.Tensor,
    log_decay: torch.Tensor,
    topk: int,
    *,
    bias: torch.Tensor | None = None,
    score: str = "sigmoid",
    scale: float = 1.0,
    backend: str = "auto",
) -> torch.Tensor:
    """
    The logarithm of what each of M slots keeps of its content at a token (equation 20 of "Raven", and 22 with
    "softmax"): K slots are chosen, and the decay of the head is shared among them.

        log_f[i] = log_decay[i] * r[i],    r[i] = 0 where i is not chosen, and otherwise

        "sigmoid":    r[i] = m[i] / (scale * (sum of the K chosen m + 1e-9)),    m = sigmoid(logits)
        "softmax":    r[i] = m[i] / scale,                                       m = softmax(logits) over all slots

    The chosen are the K largest logits, or with a bias the K largest of m + bias; of equal ones the first. The bias
    has no other effect and gets no gradient. All is computed in float32 (float64 where an input is), under autocast
    too, and the backward pass keeps the inputs alone.

    Args:
        logits: of the router, any noise included, (B, T, H, M). A slot of -inf has weight 0.
        log_decay: at most 0, finite: (B, T, H), or (B, T, H, M) for one a slot.
        topk: K, from 1 to M.
        bias: added to the scores where slots are chosen, (H, M).
        score: `"sigmoid"` or `"softmax"`.
        scale: α of the paper, above 0.
        backend: `"auto"`, `"triton"`, `"eager"` or `"reference"`.

    Returns:
        log_f (B, T, H, M) in float32 (float64), zero where a slot is not chosen.

    Raises:
        ValueError: where a shape, a dtype, a device or an option does not fit, before any work.
    """
    _check(logits, log_decay, topk, bias, score, scale)
    scale = float(scale)
    backend = choose_backend("slot_routing", backend, BACKENDS, of_widest(logits, log_decay, bias))
    if backend == "reference":
        x, a, b = cast(widest(logits, log_decay, bias), logits, log_decay, bias)
        return slot_routing_reference(x, a, topk, b, score, scale)
    return _slot_routing(logits, log_decay, topk, bias, score, scale, backend)


def _check(logits, log_decay, topk, bias, score, scale):
    if logits.dim() != 4 or logits.shape[3] == 0:
        raise ValueError(f"`logits` must be (batch, length, heads, slots >= 1), got {tuple(logits.shape)}.")
    slots = logits.shape[3]
    if log_decay.shape not in (logits.shape, logits.shape[:3]):
        raise ValueError(
            f"`log_decay` must have shape {tuple(logits.shape[:3])} or {tuple(logits.shape)}, got "
            f"{tuple(log_decay.shape)}."
        )
    if bias is not None and bias.shape != logits.shape[2:]:
        raise ValueError(f"`bias` must have shape {tuple(logits.shape[2:])}, got {tuple(bias.shape)}.")
    for name, tensor in (("logits", logits), ("log_decay", log_decay), ("bias", bias)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` must be floating point, got {tensor.dtype}.")
        if tensor.device != logits.device:
            raise ValueError(f"`{name}` is on {tensor.device}, `logits` on {logits.device}.")
    if not isinstance(topk, int) or not 1 <= topk <= slots:
        raise ValueError(f"`topk` must be from 1 to {slots}, the number of slots, got {topk!r}.")
    if score not in SCORES:
        raise ValueError(f"`score` must be one of {SCORES}, got {score!r}.")
    if not 0 < scale < math.inf:
        raise ValueError(f"`scale` must be above 0 and finite, got {scale!r}.")
