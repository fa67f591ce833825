"""Raven: memory slots with a learned router."""

from typing import TYPE_CHECKING

from .architecture import *


if TYPE_CHECKING:  # at run time the classes are imported when they are first used
    from .cache_raven import *
    from .configuration_raven import *
    from .modeling_raven import *
