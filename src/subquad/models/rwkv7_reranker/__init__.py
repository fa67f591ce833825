"""EmbeddingRWKV's reranker, which scores a document and a query by the states of the embedding model."""

from typing import TYPE_CHECKING

from .architecture import *


if TYPE_CHECKING:  # at run time the classes are imported when they are first used
    from .configuration_rwkv7_reranker import *
    from .modeling_rwkv7_reranker import *
