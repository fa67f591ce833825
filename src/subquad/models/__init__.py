"""
The registry: one line for each architecture.

At run time a line imports the architecture's descriptor; type checkers also see the classes.
"""

from .architecture import Architecture
from .avey import *
from .avey_b import *
from .gecko import *
from .raven import *
from .rwkv5 import *
from .rwkv6 import *
from .rwkv7 import *
from .rwkv7_deep_embed import *
from .rwkv7_embedding import *
from .rwkv7_reranker import *
from .visual_rwkv import *


# Model type to descriptor, in the order in which tables and help texts list them.
REGISTRY: dict[str, Architecture] = {
    value.model_type: value for value in list(globals().values()) if isinstance(value, Architecture)
}
