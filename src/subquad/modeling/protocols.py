"""
What a block asks of the tokens of a call, of its states, and of the cache. [`Tokens`], [`LayerState`] and
[`RecurrentCache`] answer for a batch of texts. An engine with states of its own implements these instead.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class CallTokens(Protocol):
    """
    Which tokens of a call are real, and where documents begin among them.

    Attributes:
        mask: bool (batch, length), False for padding; None if there is none.
        starts: bool (batch or 1, length), True where a document begins; None if nothing is packed.
        cu_seqlens: int (documents + 1), the boundaries of the documents in the concatenated rows; None if nothing is
            packed.
    """

    mask: torch.Tensor | None
    starts: torch.Tensor | None
    cu_seqlens: torch.Tensor | None

    def forward_fill(self, x: torch.Tensor, before: Any) -> torch.Tensor:
        """
        x (batch, length, width), in which padding repeats the last real token before it. `before` is the state with
        the last token of earlier calls.
        """

    def zero_padding(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, length, ...) with zeros at padding tokens."""

    def token_before(self, x: torch.Tensor, before: Any) -> torch.Tensor | None:
        """What a token shift sees before the first token of each row of x; None means zeros."""

    def run_packed(
        self, operator: Callable, initial_state: Any, inplace: bool = False, **arguments: Any
    ) -> tuple[torch.Tensor, Any]:
        """
        Runs a recurrence of `subquad_kernels` so that documents do not see each other.

        Returns:
            the output (batch, length, ...), and the state after the last document of every row.
        """


class BlockState(Protocol):
    """The named states of one block. What `get` returns goes to [`CallTokens`], and comes back to `update`."""

    def get(self, name: str) -> Any:
        """The state of that name, (batch, ...); None means that no token has been read."""

    def can_overwrite(self, name: str) -> bool:
        """Whether an operator may write the new state over the old one."""

    def update(self, name: str, state: Any, replay: Callable, *updates: torch.Tensor) -> None:
        """
        Sets a state after the tokens of a call.

        Args:
            replay: `replay(state before or None, *updates)` computes the same state.
            updates: what each token contributes to it, (batch, tokens, ...).
        """

    def update_with(self, name: str, replay: Callable, *updates: torch.Tensor) -> None:
        """[`~BlockState.update`] with the state that `replay` computes."""


class BlockCache(Protocol):
    """
    The states of all blocks.

    Attributes:
        layers: those of each block, by its number.
    """

    layers: Sequence[BlockState | None]
