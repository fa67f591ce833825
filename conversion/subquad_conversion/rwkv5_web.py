"""Eagle (RWKV-5.2) for web-rwkv and Ai00: the trainer's tensors in float16, one of them under another name."""

from transformers import PreTrainedConfig

from subquad.hub.loading import NameMap

from .formats import Tensors
from .rwkv import Rwkv5Format, check_divisor
from .rwkv5_trainer import FORMAT as TRAINER


class Rwkv5Web(Rwkv5Format):
    name = "rwkv5-web"
    title = "Eagle (RWKV-5.2), web-rwkv's layout"
    attention = "blocks.0.att."
    name_map = NameMap({".att.time_first$": ".att.time_faaaa", **TRAINER.name_map.names})
    target = "st"

    def matches(self, tensors: Tensors) -> bool:
        newer = "blocks.0.att.time_mix_x" in tensors
        return super().matches(tensors) and "blocks.0.att.time_first" in tensors and not newer

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        check_divisor(config, "web-rwkv")
        return []


FORMAT = Rwkv5Web()
