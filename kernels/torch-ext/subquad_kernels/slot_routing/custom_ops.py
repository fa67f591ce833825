"""Slot routing as a custom operator."""

from ..backend import widest
from ..custom_ops import custom_op
from .eager import slot_routing_eager, slot_routing_eager_backward


def _triton():
    from .triton_kernels import slot_routing_triton, slot_routing_triton_backward

    return slot_routing_triton, slot_routing_triton_backward


def _fake(logits, log_decay, topk, bias, score, scale):
    return logits.new_empty(logits.shape, dtype=widest(logits, log_decay, bias))


_slot_routing = custom_op(
    "slot_routing",
    eager=slot_routing_eager,
    eager_backward=slot_routing_eager_backward,
    triton=_triton,
    fake=_fake,
    gradients=2,
)
