"""Finch (RWKV-6.0) as the trainer saves it: one `.pth` whose names start with `emb`, `blocks`, `ln_out`, `head`."""

from transformers import PreTrainedConfig

from subquad.hub.loading import NameMap

from .rwkv import TRAINER_NAMES, Rwkv6Format, untold_divisor


class Rwkv6Trainer(Rwkv6Format):
    name = "rwkv6-trainer"
    title = "Finch (RWKV-6.0), trainer checkpoint"
    attention = "blocks.0.att."
    name_map = NameMap(TRAINER_NAMES)
    target = "pth"

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        return untold_divisor(config)


FORMAT = Rwkv6Trainer()
