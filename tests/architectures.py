"""The old name of `cases`, for branches that still import it."""

from cases import *  # noqa: F403
from cases import VOCABULARY  # noqa: F401
