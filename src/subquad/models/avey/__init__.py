"""Avey: a ranker that retrieves splits of the text, and a neural processor that contextualises them."""

from typing import TYPE_CHECKING

from .architecture import *


if TYPE_CHECKING:  # at run time the classes are imported when they are first used
    from .cache_avey import *
    from .configuration_avey import *
    from .modeling_avey import *
