"""Eagle (RWKV-5.2) as the trainer saves it: one `.pth` whose names start with `emb`, `blocks`, `ln_out`, `head`."""

import re

from .rwkv import Rwkv5Format, trainer_name


MIXES = {"k": "key", "v": "value", "r": "receptance", "g": "gate"}


class Rwkv5Trainer(Rwkv5Format):
    name = "rwkv5-trainer"
    title = "Eagle (RWKV-5.2), trainer checkpoint"
    attention = "blocks.0.att."

    def rename(self, name: str) -> str:
        return re.sub(r"(?<=\.time_mix_)[kvrg]$", lambda mix: MIXES[mix[0]], trainer_name(name))


FORMAT = Rwkv5Trainer()
