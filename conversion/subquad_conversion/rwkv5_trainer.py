"""Eagle (RWKV-5.2) as the trainer saves it: one `.pth` whose names start with `emb`, `blocks`, `ln_out`, `head`."""

from transformers import PreTrainedConfig

from subquad.hub.loading import NameMap

from .formats import Tensors
from .rwkv import TRAINER_NAMES, Rwkv5Format, untold_divisor


MIXES = {"k": "key", "v": "value", "r": "receptance", "g": "gate"}
# Tensors that exist only in web-rwkv's files.
RENAMED = ("blocks.0.att.time_first", "blocks.0.att.time_mix_x")


class Rwkv5Trainer(Rwkv5Format):
    name = "rwkv5-trainer"
    title = "Eagle (RWKV-5.2), trainer checkpoint"
    attention = "blocks.0.att."
    name_map = NameMap(TRAINER_NAMES | {f".time_mix_{x}$": f".time_mix_{word}" for x, word in MIXES.items()})
    target = "pth"

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        return untold_divisor(config)

    def matches(self, tensors: Tensors) -> bool:
        return super().matches(tensors) and not any(name in tensors for name in RENAMED)


FORMAT = Rwkv5Trainer()
