"""The tokens that RWKV-7a and 7b read, and the keys that the attention of RWKV-7b sees."""

import dataclasses

import torch

from ...modeling.padding import Tokens
from ...modeling.positions import Movable, TokenPositions
from ...modeling.protocols import BlockState
from ...modeling.ring import restart
from .cache_rwkv7_deep_embed import Rwkv7DeepEmbedCache


@dataclasses.dataclass
class Reach(Movable):
    """
    The keys that the tokens of a call see.

    Attributes:
        positions: of the call's tokens.
        mask: (batch or 1, length, keys), True where a token sees a key.
        own: whether the tokens read their own keys, behind the keys that a cache held before. If not, they read the
            cache as it is after the call.
        held: number of rows to read from the cache.
        room: capacity of the cache in tokens after the call; 0 without a cache.
    """

    positions: TokenPositions
    mask: torch.Tensor
    own: bool
    held: int
    room: int

    def remember(
        self, cache: Rwkv7DeepEmbedCache | None, state: BlockState, name: str, x: torch.Tensor
    ) -> torch.Tensor:
        """Writes keys or values x (batch, length, size) to the cache; returns the ones to attend to."""
        if cache is None:
            return x
        if not self.own:
            x = self.positions.tokens.zero_padding(x)
            return cache.append(state, name, x, self.positions.position, self.room)[:, : self.held]
        read = torch.cat((state.get(name)[:, : self.held].to(x.dtype), x), dim=1) if self.held else x
        restart(state, name, x, self.positions, self.room)
        return read


@dataclasses.dataclass
class DeepEmbedTokens(Movable):
    """
    The tokens of a call, as all blocks need them.

    Attributes:
        tokens: which tokens are real, and where documents begin.
        input_ids: (batch, length), which choose the rows of the tables.
        reach: of RWKV-7b.
    """

    tokens: Tokens
    input_ids: torch.Tensor
    reach: Reach | None


def find_reach(x: torch.Tensor, tokens: Tokens, cache: Rwkv7DeepEmbedCache | None) -> Reach:
    """
    The reach of the tokens x (batch, length, hidden_size), after the cache's tokens.

    Raises:
        ValueError: if the cache is static and has no room for them.
    """
    lengths = torch.zeros(x.shape[0], dtype=torch.long, device=x.device) if cache is None else cache.lengths(x)
    positions = TokenPositions.after(lengths, tokens)
    position, length, room = positions.position, tokens.length, 0 if cache is None else cache.capacity_for(x.shape[1])
    if cache is not None and tokens.starts is None:
        held = room if cache.is_compileable else min(room, cache.get_seq_length() + length)
        # Padding before a text sees the first key: a softmax of none is not defined.
        mask = torch.arange(held, device=x.device) <= position.clamp_min(0)[..., None]
        return Reach(positions, mask, False, held, room)

    held, steps = 0, torch.arange(length, device=x.device)
    mask = (steps <= steps[:, None])[None]
    if tokens.mask is not None:
        mask = (mask & positions.kept[:, None]) | ~positions.kept[..., None]  # padding sees all keys
    if positions.document is not None:
        mask = mask & (positions.document[:, None] == positions.document[..., None])
        if cache is not None and cache.is_initialized:
            held = room if cache.is_compileable else cache.get_seq_length()
            before = (torch.arange(held, device=x.device) < lengths[:, None])[:, None]
            continues = (positions.document == 0)[..., None]
            mask = torch.cat((before & continues, mask), dim=2)
    return Reach(positions, mask, True, held, room)
