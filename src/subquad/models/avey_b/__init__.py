"""Avey-B: Avey as an encoder, with static and dynamic layers and a compressor of the retrieved splits."""

from typing import TYPE_CHECKING

from .architecture import *


if TYPE_CHECKING:  # at run time the classes are imported when they are first used
    from .configuration_avey_b import *
    from .modeling_avey_b import *
