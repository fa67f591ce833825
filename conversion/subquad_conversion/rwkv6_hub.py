"""Finch (RWKV-6.0) as published on the Hub: model type `rwkv6`, the names that this package keeps."""

from transformers import PreTrainedConfig

from .rwkv import ATTENTION, OURS, Rwkv6Format


class Rwkv6Hub(Rwkv6Format):
    name = "rwkv6-hub"
    title = "Finch (RWKV-6.0), Hub model"
    attention = ATTENTION
    name_map = OURS
    target = "hub"

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        ranks, known = (config.lora_rank_tokenshift, config.lora_rank_decay), (32, 64)
        if config.hidden_size == 4096:
            known = (64, 128)
        if ranks == known:
            return []
        return [f"code of the organisation's repositories takes the two low ranks for {known} and cannot load {ranks}"]


FORMAT = Rwkv6Hub()
