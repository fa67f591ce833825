"""Eagle (RWKV-5.2) as published on the Hub: model type `rwkv5`, the names that this package keeps."""

from .rwkv import ATTENTION, OURS, Rwkv5Format


class Rwkv5Hub(Rwkv5Format):
    name = "rwkv5-hub"
    title = "Eagle (RWKV-5.2), Hub model"
    attention = ATTENTION
    name_map = OURS
    target = "hub"


FORMAT = Rwkv5Hub()
