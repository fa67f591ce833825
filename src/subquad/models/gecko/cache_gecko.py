"""The cache of Gecko."""

import functools

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import StaticCache

from ...modeling.counting_cache import CountingCache
from ...modeling.positions import TokenPositions
from ...modeling.ring import ring_state


class GeckoCache(CountingCache):
    """
    The states of a Gecko, of constant size. Each block keeps, in float32, the moments `timenorm` (batch, 3, groups),
    CEMA's state `cema` (batch, model_dim, cema_ndim, 2), the `memory` (batch, heads, key size, value size) and its
    log-normaliser `normalizer` (batch, heads, key size). For the tokens of at most two chunks it keeps `keys`,
    `values` and `memory_keys` (batch, heads, tokens, size), the token at position p in row p % (2 * chunk_size). After
    the blocks it keeps the moments of the final norm and, if BOS tokens may begin documents, `begins` (batch, 2 *
    chunk_size): the document start of each of those tokens.

    Args:
        config, static, max_cache_len: see [`RecurrentCache`].
    """

    size_names = (
        *CountingCache.size_names,
        "chunk_size",
        "value_dim",
        "z_dim",
        "cema_ndim",
        "timenorm_num_groups",
        "boundary_token_id",
    )

    recurrent_names = ("memory",)
    convolution_names = ()
    float32_names = ("timenorm", "cema", "memory", "normalizer")
    integer_names = (*CountingCache.integer_names, "begins")
    # package only
    packed_names = ("memory", "keys", "values", "memory_keys")

    def __init__(self, config: PreTrainedConfig, static: bool = False, max_cache_len: int | None = None):
        super().__init__(config, static)
        self.window = 2 * config.chunk_size

    # package only
    def state_shapes(self, config: PreTrainedConfig, number: int | None) -> dict[str, tuple[int | None, ...]]:
        timenorm = {"timenorm": (3, config.timenorm_num_groups)}
        if number is None:
            begins = {} if config.boundary_token_id is None else {"begins": (self.window,)}
            return super().state_shapes(config, number) | timenorm | begins
        heads, key, value = config.num_heads, config.z_dim // config.num_heads, config.value_dim // config.num_heads
        return timenorm | {
            "cema": (config.model_dim, config.cema_ndim, 2),
            "keys": (heads, None, key),
            "values": (heads, None, value),
            "memory_keys": (heads, None, key),
            "memory": (heads, key, value),
            "normalizer": (heads, key),
        }

    # package only
    def find_fault(self, config: PreTrainedConfig, states: dict[str, torch.Tensor], tokens: int) -> str | None:
        if fault := super().find_fault(config, states, tokens):
            return fault
        rooms = {x.shape[2] for name, x in states.items() if name.endswith(("keys", "values"))}
        if len(rooms) > 1 or not all(min(tokens, self.window) <= room <= self.window for room in rooms):
            return f"keys and values have room for {sorted(rooms)} tokens, after {tokens}"
        return None

    def count_tokens(self, positions: TokenPositions) -> None:
        """Counts the tokens of a [`GeckoPositions`], and stores the starts of documents marked by BOS tokens."""
        given = positions.given
        if positions.begin is not None:
            replay = functools.partial(ring_state, window=self.window)
            self.after_blocks.update_with("begins", replay, positions.begin, given.kept_position, given.kept)
        super().count_tokens(given)

    def ring_size(self, tokens: int) -> int:
        """Capacity of the keys and values in tokens, once `tokens` more are read."""
        layer, size = self.after_blocks, 64
        if layer.record_past or isinstance(self.seen_tokens, torch.Tensor):  # not known on the host
            return self.window
        if "keys" in self.layers[0].states:
            size = max(size, self.held_tokens)
        while size < self.window and size < self.seen_tokens + tokens:
            size *= 2
        return min(size, self.window)

    # package only
    @property
    def fixed_until(self) -> int | None:
        return self.held_tokens if self.is_initialized and self.held_tokens < self.window else None

    @property
    def held_tokens(self) -> int:
        """Current capacity of the keys and values in tokens."""
        return self.layers[0].states["keys"].shape[2]


class StaticGeckoCache(GeckoCache, StaticCache):
    """A static [`GeckoCache`], which transformers recognises as a static cache."""


GeckoCache.static_class = StaticGeckoCache


__all__ = ["GeckoCache"]
