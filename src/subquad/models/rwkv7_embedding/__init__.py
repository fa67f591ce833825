"""EmbeddingRWKV: embeddings of texts from Goose (RWKV-7)."""

from typing import TYPE_CHECKING

from .architecture import *


if TYPE_CHECKING:  # at run time the classes are imported when they are first used
    from .configuration_rwkv7_embedding import *
    from .modeling_rwkv7_embedding import *
