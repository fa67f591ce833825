"""VisualRWKV: images in front of Eagle, Finch and Goose (RWKV-5, 6 and 7)."""

from typing import TYPE_CHECKING

from .architecture import *


if TYPE_CHECKING:  # at run time the classes are imported when they are first used
    from .configuration_visual_rwkv import *
    from .modeling_visual_rwkv import *
    from .processing_visual_rwkv import *
