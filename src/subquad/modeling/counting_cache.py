"""A cache that counts the tokens of each row."""

import torch
from transformers import PreTrainedConfig

from .cache import RecurrentCache, add_marked
from .positions import TokenPositions


# The name of the counts among the states of a cache.
LENGTHS = "after_blocks.lengths"


class CountingCache(RecurrentCache):
    """A [`RecurrentCache`] that counts the tokens of each row: `lengths` (batch), kept after the blocks."""

    integer_names = (*RecurrentCache.integer_names, "lengths")

    # package only
    def state_shapes(self, config: PreTrainedConfig, number: int | None) -> dict[str, tuple[int | None, ...]]:
        return super().state_shapes(config, number) | ({"lengths": ()} if number is None else {})

    # package only
    def find_fault(self, config: PreTrainedConfig, states: dict[str, torch.Tensor], tokens: int) -> str | None:
        fault = super().find_fault(config, states, tokens)
        if fault is None and states and (least := int(states[LENGTHS].min())) < 0:
            return f"{LENGTHS} is {least}"
        return fault

    def lengths(self, x: torch.Tensor) -> torch.Tensor:
        """Number of tokens of each row of the batch x (batch, ...), without padding: int64 (batch)."""
        lengths = self.after_blocks.get("lengths")
        return torch.zeros(x.shape[0], dtype=torch.long, device=x.device) if lengths is None else lengths

    def count(self, real: torch.Tensor) -> None:
        """Counts the tokens of a call; `real` (batch, tokens) is False for padding."""
        self.after_blocks.update_with("lengths", add_marked, real)

    def count_tokens(self, positions: TokenPositions) -> None:
        """Counts the tokens of each row's last document, which a later call may continue."""
        if positions.document is None:
            self.count(positions.kept)
        else:
            self.after_blocks.write("lengths", positions.kept_position[:, -1] + 1)
