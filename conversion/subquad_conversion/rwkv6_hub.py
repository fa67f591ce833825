"""Finch (RWKV-6.0) as published on the Hub: model type `rwkv6`, the names that this package keeps."""

from .rwkv import ATTENTION, OURS, Rwkv6Format


class Rwkv6Hub(Rwkv6Format):
    name = "rwkv6-hub"
    title = "Finch (RWKV-6.0), Hub model"
    attention = ATTENTION
    layout = OURS
    target = "hub"


FORMAT = Rwkv6Hub()
