"""
Continuous batching behind the interface of transformers: requests join and leave between two tokens. A state of
constant size needs no pages: a request is a row.
"""

from .manager import SERVED as SERVED
from .manager import RecurrentBatchingManager as RecurrentBatchingManager
from .manager import batching_context as batching_context
from .manager import generate_batch as generate_batch
from .manager import start_manager as start_manager
from .manager import why_not as why_not
