"""Slot routing as a custom operator, with its backward pass."""

from ..backend import widest
from ..registration import custom_op, register_backward
from .eager import slot_routing_eager, slot_routing_eager_backward


def _triton(*inputs):
    from .triton_kernels import slot_routing_triton

    return slot_routing_triton(*inputs)


def _triton_backward(*inputs):
    from .triton_kernels import slot_routing_triton_backward

    return slot_routing_triton_backward(*inputs)


def _fake(logits, log_decay, topk, bias, score, scale):
    return logits.new_empty(logits.shape, dtype=widest(logits, log_decay, bias))


_slot_routing = custom_op("slot_routing", eager=slot_routing_eager, triton=_triton, fake=_fake)
_slot_routing_backward = register_backward(
    "slot_routing", _slot_routing, eager=slot_routing_eager_backward, triton=_triton_backward, gradients=2
)
