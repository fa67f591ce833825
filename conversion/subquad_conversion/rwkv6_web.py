"""
Finch (RWKV-6.0) for web-rwkv and Ai00: the trainer's tensors in float16, some under other names, and with transposed
low-rank matrices.
"""

from transformers import PreTrainedConfig

from subquad.hub.loading import NameMap, transposed

from .formats import Tensors
from .rwkv import TRAINER_NAMES, Rwkv6Format, check_divisor


class Rwkv6Web(Rwkv6Format):
    name = "rwkv6-web"
    title = "Finch (RWKV-6.0), web-rwkv's layout"
    name_map = NameMap(
        names={
            **{f".time_mix_{x}$": f".time_maa_{x}" for x in "xwkvrg"},
            ".time_first$": ".time_faaaa",
            **TRAINER_NAMES,
        },
        parts={
            ".attention.time_mix_w1": transposed(".attention.time_maa_w1"),
            ".attention.time_mix_w2": transposed(".attention.time_maa_w2"),
            ".attention.time_decay_w1": transposed(".attention.time_decay_w1"),
            ".attention.time_decay_w2": transposed(".attention.time_decay_w2"),
        },
    )
    target = "st"

    def matches(self, tensors: Tensors) -> bool:
        return "blocks.0.att.time_mix_x" in tensors

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        check_divisor(config, "web-rwkv")
        return []


FORMAT = Rwkv6Web()
