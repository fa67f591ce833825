"""Copies of weights on a CPU, so that a token does not read those of hidden units that are zero."""

import torch
from transformers.utils import logging

from subquad_kernels.c.fused_blocks import FusedBlocks

from .memory import available_memory


logger = logging.get_logger(__name__)
# Tokens of a text before the first copy. It takes as long as it saves in 10 to 50 tokens, so short texts have none.
_TOKENS_BEFORE = 32


class UnitCopies:
    """
    The last weights of all feed-forward networks by hidden unit, for one text. One block is copied at a token. They
    belong to a step during which nobody changes the model, and end with it, so a copy is never out of date.

    Args:
        weights: the size of all weights of the model in bytes.
    """

    def __init__(self, blocks: FusedBlocks, weights: int):
        self._blocks, self._weights = blocks, weights
        self._copies: list[torch.Tensor | None] = blocks.number * [None]
        self._turns = iter(range(-_TOKENS_BEFORE, blocks.number))

    def for_next_token(self) -> list[torch.Tensor | None]:
        """The copies, by block; None for weights that are read themselves."""
        if (number := next(self._turns, -1)) >= 0:
            try:
                self._check_memory(self._blocks.number - number)
                self._copies[number] = self._blocks.copy_by_unit(number)
            except (ValueError, RuntimeError) as error:
                self._turns = iter(())
                reason = str(error).splitlines()[0]
                logger.warning_once(f"Each token reads the weights of hidden units that are zero, too: {reason}")
        return self._copies

    def _check_memory(self, missing: int) -> None:
        """
        Raises:
            ValueError: if there is no room for the missing copies beside the weights. Weights in mapped files count as
                available memory, and should stay there.
        """
        needed = self._weights + 2 * missing * self._blocks.bytes_by_unit()
        if (available := available_memory()) is None:
            raise ValueError("how much memory is available is not known.")
        if available < needed:  # no number that changes: the warning comes once
            raise ValueError(f"less than {needed >> 20} MB of memory are available.")
