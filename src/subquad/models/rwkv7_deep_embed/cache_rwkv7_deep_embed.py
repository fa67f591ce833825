"""The cache of RWKV-7b. The states of RWKV-7a are those of Goose, in a [`RecurrentCache`]."""

from transformers import PreTrainedConfig
from transformers.cache_utils import StaticCache

from ...modeling.cache import RecurrentCache
from ...modeling.growing_cache import GrowingCache


class Rwkv7DeepEmbedCache(GrowingCache):
    """
    The states of an RWKV-7b: those of Goose, and of each block's attention the `keys` (batch, room, dea_size) and
    `values` (batch, room, hidden_size) of all tokens by position, which grow with the text, and `qkv_shift` (batch, 2
    dea_size + hidden_size), query, key and value of the last token before the token shift, in float32.

    Args:
        config, static, max_cache_len: see [`GrowingCache`].
    """

    size_names = (*GrowingCache.size_names, "dea_size")
    float32_names = (*RecurrentCache.float32_names, "qkv_shift")
    growing = {"keys": 1, "values": 1}

    # package only
    def state_shapes(self, config: PreTrainedConfig, number: int | None) -> dict[str, tuple[int | None, ...]]:
        shapes = super().state_shapes(config, number)
        if number is None:
            return shapes
        keys, values = config.dea_size, config.hidden_size
        return shapes | {"qkv_shift": (2 * keys + values,), "keys": (None, keys), "values": (None, values)}


class StaticRwkv7DeepEmbedCache(Rwkv7DeepEmbedCache, StaticCache):
    """A static [`Rwkv7DeepEmbedCache`], which transformers recognises as a static cache."""


Rwkv7DeepEmbedCache.static_class = StaticRwkv7DeepEmbedCache


__all__ = ["Rwkv7DeepEmbedCache"]
