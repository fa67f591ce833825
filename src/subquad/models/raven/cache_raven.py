"""The cache of Raven."""

import functools
from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, StaticCache

from ...modeling.growing_cache import GrowingCache
from ...modeling.layer_state import LayerState
from ...modeling.positions import TokenPositions
from ...modeling.ring import ring_state, write_to_ring


@CacheLayerMixin.register
class AttentionState(LayerState):
    """The keys and values of attention without a window."""

    @property
    def keys(self) -> torch.Tensor | None:
        """(batch, heads, room, size); zeros where there is no token yet."""
        keys = self.states.get("keys")
        return keys if keys is None else keys.transpose(1, 2)

    @property
    def values(self) -> torch.Tensor | None:
        """As `keys`."""
        values = self.states.get("values")
        return values if values is None else values.transpose(1, 2)


class RavenCache(GrowingCache):
    """
    The states of a Raven. A slot memory keeps its `slots` (batch, heads, slots, size of a key and a value), in
    float32. Attention over a window keeps the `window_keys` and `window_values` (batch, window, heads, size) of the
    last tokens, position p in row p % window. These do not grow with the text. Attention without a window keeps `keys`
    and `values` (batch, room, heads, size) by position, which do.

    Args:
        config, static, max_cache_len: see [`GrowingCache`]; without a layer that grows there is no limit.
    """

    size_names = (
        *GrowingCache.size_names,
        "num_slots",
        "key_dim",
        "value_dim",
        "attention_specs",
    )

    recurrent_names = float32_names = ("slots",)
    convolution_names = ()
    # package only
    packed_names = ("slots", "window_keys", "window_values", "keys", "values")

    def __init__(self, config: PreTrainedConfig, static: bool = False, max_cache_len: int | None = None):
        if any(spec["window_size"] is None for spec in getattr(config, "attention_specs", ())):
            self.growing = {"keys": 1, "values": 1}
        super().__init__(config, static, max_cache_len)
        # Whether every row is known to have read only real tokens: no padding, no packed documents.
        self.same_lengths = True

    def new_layer(self, config: PreTrainedConfig, number: int, static: bool) -> LayerState:
        if config.layer_types[number] == "full_attention":
            return AttentionState(static=static)
        return super().new_layer(config, number, static)

    # package only
    def state_shapes(self, config: PreTrainedConfig, number: int | None) -> dict[str, tuple[int | None, ...]]:
        if number is None:
            return super().state_shapes(config, number)
        if (spec := config.attention(number)) is None:
            return {"slots": (config.num_heads, config.num_slots, config.head_k_dim + config.head_v_dim)}
        window = spec["window_size"]
        shape = (window, spec["num_kv_heads"], config.hidden_size // spec["num_heads"])
        return dict.fromkeys(("keys", "values") if window is None else ("window_keys", "window_values"), shape)

    def count_tokens(self, positions: TokenPositions) -> None:
        super().count_tokens(positions)
        if not positions.all_real:  # compiled code must not specialise on the old value
            self.same_lengths = False

    def update_window(
        self, layer: LayerState, name: str, x: torch.Tensor, positions: TokenPositions, window: int
    ) -> torch.Tensor:
        """Writes the tokens x (batch, length, ...) to a ring; returns it, (batch, window, ...)."""
        ring = write_to_ring(layer, name, layer.get(name), x, positions, window)
        replay = functools.partial(ring_state, window=window)
        layer.update(name, ring, replay, x, positions.kept_position, positions.kept)
        layer.note_alias(name)
        return ring

    # package only
    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        super().set_states(states)
        self.same_lengths = False

    @classmethod
    def join(cls, caches: Sequence["RavenCache"]) -> "RavenCache":
        return super().join(caches)._compare_lengths()

    # package only
    @classmethod
    def from_states(cls, *args, **kwargs) -> "RavenCache":
        return super().from_states(*args, **kwargs)._compare_lengths()

    def _compare_lengths(self) -> "RavenCache":
        """Checks whether every row has read only real tokens."""
        lengths = self.after_blocks.states.get("lengths")
        self.same_lengths = lengths is None or bool((lengths == self.get_seq_length()).all())
        return self

    # package only
    def set_padding(self, tokens: int, padding: torch.Tensor) -> None:
        super().set_padding(tokens, padding)
        self._compare_lengths()

    # package only
    def write_rows(self, rows: Sequence[int], other: "RavenCache") -> None:
        super().write_rows(rows, other)
        self.same_lengths = False

    def reset_rows(self, rows: torch.Tensor) -> None:
        super().reset_rows(rows)
        self.same_lengths = False

    def reset(self) -> None:
        super().reset()
        self.same_lengths = True


class StaticRavenCache(RavenCache, StaticCache):
    """A static [`RavenCache`], which transformers recognises as a static cache."""


RavenCache.static_class = StaticRavenCache


__all__ = ["RavenCache"]
