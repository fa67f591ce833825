"""
What a block requires of the tokens of a call, its states, and the cache. [`Tokens`], [`LayerState`] and
[`RecurrentCache`] implement this for a batch of texts. An engine with states of its own has its own implementations.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class CallTokens(Protocol):
    """
    The real tokens of a call and the boundaries of its documents.

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
        """The token that a token shift sees before the first token of each row of x; None means zeros."""

    def run_packed(
        self,
        operator: Callable,
        sequences: dict[str, torch.Tensor],
        initial_state: Any,
        inplace: bool = False,
        **arguments: Any,
    ) -> tuple[torch.Tensor, Any]:
        """
        Runs a recurrence of `subquad_kernels` so that documents do not see each other. `sequences` are its arguments
        with a value for each token, (batch, length, ...); the other arguments are the same for every token.

        Returns:
            the output (batch, length, ...), and the state after the last document of every row.
        """


class BlockState(Protocol):
    """The named states of one block. Results of `get` are passed to [`CallTokens`] and then to `update`."""

    def get(self, name: str) -> Any:
        """The state of that name, (batch, ...); None means that no token has been read."""

    def can_overwrite(self, name: str) -> bool:
        """Whether an operator may write the new state over the old one."""

    def update(self, name: str, state: Any, replay: Callable, *updates: torch.Tensor) -> None:
        """
        Sets a state after the tokens of a call.

        Args:
            replay: `replay(state before or None, *updates)` recomputes the state.
            updates: the contribution of each token, (batch, tokens, ...).
        """

    def update_with(self, name: str, replay: Callable, *updates: torch.Tensor) -> None:
        """[`~BlockState.update`] with the state that `replay` computes."""


class NoState:
    """The [`BlockState`] of a block without a cache: nothing was read before, and nothing is kept."""

    record_past = False

    def get(self, name: str) -> None:
        return None

    def can_overwrite(self, name: str) -> bool:
        return False

    def update(self, name: str, state: Any, replay: Callable, *updates: torch.Tensor) -> None:
        pass

    def update_with(self, name: str, replay: Callable, *updates: torch.Tensor) -> None:
        pass


NO_STATE = NoState()


class BlockCache(Protocol):
    """
    The states of all blocks.

    Attributes:
        layers: the states of each block, by its number.
    """

    layers: Sequence[BlockState | None]
