"""RWKV-7a and RWKV-7b: Goose with DeepEmbed."""

from typing import TYPE_CHECKING

from .architecture import *


if TYPE_CHECKING:  # at run time the classes are imported when they are first used
    from .cache_rwkv7_deep_embed import *
    from .configuration_rwkv7_deep_embed import *
    from .modeling_rwkv7_deep_embed import *
