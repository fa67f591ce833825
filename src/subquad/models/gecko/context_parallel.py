"""Context parallelism for Gecko (section 3.2 of the paper): positions and documents go from piece to piece, too."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from ...modeling.context_parallel import ContextParallelCache, LinkedLayer
from ...modeling.layer_state import States
from .cache_gecko import GeckoCache


class _AfterBlocks(LinkedLayer):
    """Document starts are known, and needed, before the first block."""

    def get(self, name: str) -> torch.Tensor | None:
        if name != "begins":
            return super().get(name)
        [self.states[name]] = self.link.receive(-1, self.x.new_empty(len(self.x), self.window, dtype=torch.long))
        return self.states[name]

    def update_together(self, states: States, replay: Callable[..., States], *updates: torch.Tensor) -> None:
        super().update_together(states, replay, *updates)
        if "begins" in states and not self.link.is_last:
            self.link.send(1, states["begins"])


class ContextParallelGeckoCache(ContextParallelCache, GeckoCache):
    """A Gecko's [`ContextParallelCache`]."""

    def __init__(self, config: PreTrainedConfig, group: dist.ProcessGroup | None = None):
        super().__init__(config, group)
        self.after_blocks = _AfterBlocks(self.link, self.link_shapes(config, None, ("timenorm",)), self.float32_names)
        self.after_blocks.window = self.window

    def size_of(self, name: str) -> int:
        return self.window  # the ring of keys and values is always a whole one

    def lengths(self, x: torch.Tensor) -> torch.Tensor:
        """Number of tokens before this process's piece x (batch, length, model_dim): int64 (batch)."""
        self.expect(x)
        lengths = torch.zeros(len(x), dtype=torch.long, device=x.device)
        if not self.link.is_first:
            self.link.receive(-1, lengths)
        if not self.link.is_last:
            self.link.send(1, lengths + x.shape[1])
        return lengths

    def ring_size(self, tokens: int) -> int:
        return self.window

    @property
    def held_tokens(self) -> int:
        return self.window

    @property
    def is_initialized(self) -> bool:
        return not self.link.is_first
