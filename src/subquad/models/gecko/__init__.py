"""Gecko: sliding chunk attention with a working memory."""

from typing import TYPE_CHECKING

from .architecture import *


if TYPE_CHECKING:  # at run time the classes are imported when they are first used
    from .cache_gecko import *
    from .configuration_gecko import *
    from .modeling_gecko import *
