"""Slot routing: the choice of memory slots that a token of Raven writes to, and how much each of them forgets."""

import math

import torch

from ..backend import cast, choose_backend, of_widest, widest
from ..checks import check_tensors
from .custom_ops import _slot_routing
from .reference import slot_routing_reference


BACKENDS = ("eager", "triton")
SCORES = ("sigmoid", "softmax")


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
    The logarithm of the fraction that each of M slots keeps of its content at a token (equation 20 of "Raven", and 22
    with "softmax"). K slots are chosen, and share the decay of the head:

        log_f[i] = log_decay[i] * r[i],    r[i] = 0 if slot i is not chosen, otherwise

        "sigmoid":    r[i] = m[i] / (scale * (sum of the K chosen m + 1e-9)),    m = sigmoid(logits)
        "softmax":    r[i] = m[i] / scale,                                       m = softmax(logits) over all slots

    The chosen slots have the K largest logits, or with `bias` the K largest m + bias; the first ones if values are
    equal. The bias has no other effect and no gradient. Everything is computed in float32 (float64
    if an input is float64), also under autocast. Only the inputs are kept for the backward pass.

    Args:
        logits: of the router, including any noise, (B, T, H, M). A slot with logit -inf has weight 0.
        log_decay: at most 0, finite: (B, T, H), or (B, T, H, M) for one decay per slot.
        topk: K, from 1 to M.
        bias: added to the scores when slots are chosen, (H, M).
        score: `"sigmoid"` or `"softmax"`.
        scale: α of the paper, above 0.
        backend: `"auto"`, `"triton"` or `"eager"`.

    Returns:
        log_f (B, T, H, M) in float32 (float64), zero for slots that are not chosen.

    Raises:
        ValueError: if a shape, a dtype, a device or an option does not fit, before any work.
    """
    _check(logits, log_decay, topk, bias, score, scale)
    scale = float(scale)
    backend = choose_backend("slot_routing", backend, BACKENDS, of_widest(logits, log_decay, bias))
    # package only
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
    expected = {
        "logits": (logits, logits.shape),
        "log_decay": (log_decay, log_decay.shape),
        "bias": (bias, logits.shape[2:]),
    }
    check_tensors(expected, "logits", logits)
    if not isinstance(topk, int) or not 1 <= topk <= slots:
        raise ValueError(f"`topk` must be from 1 to {slots}, the number of slots, got {topk!r}.")
    if score not in SCORES:
        raise ValueError(f"`score` must be one of {SCORES}, got {score!r}.")
    if not 0 < scale < math.inf:
        raise ValueError(f"`scale` must be above 0 and finite, got {scale!r}.")
