"""Finch (RWKV-6.0) as the trainer saves it: one `.pth` whose names start with `emb`, `blocks`, `ln_out`, `head`."""

from .rwkv import Rwkv6Format, trainer_name


class Rwkv6Trainer(Rwkv6Format):
    name = "rwkv6-trainer"
    title = "Finch (RWKV-6.0), trainer checkpoint"
    attention = "blocks.0.att."

    def rename(self, name: str) -> str:
        return trainer_name(name)


FORMAT = Rwkv6Trainer()
