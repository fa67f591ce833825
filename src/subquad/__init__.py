"""
Sub-quadratic language models as ordinary Hugging Face models.

Importing this package makes its architectures known to `AutoConfig`, `AutoTokenizer`, `AutoModel`,
`AutoModelForCausalLM`, ... Nothing heavy is imported until one of these classes is.
"""

import importlib
from typing import TYPE_CHECKING

from . import registration
from .models import REGISTRY


if TYPE_CHECKING:
    from .cache import RecurrentCache as RecurrentCache
    from .identity import identify as identify
    from .info import embedded_model as embedded_model
    from .models import *
    from .penalties import DecayingPenaltyLogitsProcessor as DecayingPenaltyLogitsProcessor
    from .prefix_cache import PrefixCache as PrefixCache
    from .presets import PRESETS as PRESETS
    from .presets import preset_config as preset_config
    from .quantized import Int4Config as Int4Config
    from .quantized import Int8Config as Int8Config
    from .question_answering import QuestionAnsweringPipeline as QuestionAnsweringPipeline
    from .state_tuning import StateTuningConfig as StateTuningConfig
    from .time_states import load_time_states as load_time_states
    from .time_states import save_time_states as save_time_states

__version__ = "0.1.0"

# Model type to the import path of its folder, its configuration class, and Auto class to model class.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, str]]] = {
    model_type: (architecture.package, architecture.config, architecture.heads)
    for model_type, architecture in REGISTRY.items()
}
# Model type to the class behind AutoProcessor, for models that read images.
PROCESSORS: dict[str, str] = {
    model_type: architecture.processor for model_type, architecture in REGISTRY.items() if architecture.processor
}
# Public name to the module that defines it. They are imported when they are first used.
_EXPORTS = {
    "DecayingPenaltyLogitsProcessor": "subquad.penalties",
    "Int4Config": "subquad.quantized",
    "Int8Config": "subquad.quantized",
    "PRESETS": "subquad.presets",
    "PrefixCache": "subquad.prefix_cache",
    "QuestionAnsweringPipeline": "subquad.question_answering",
    "RecurrentCache": "subquad.cache",
    "StateTuningConfig": "subquad.state_tuning",
    "load_time_states": "subquad.time_states",
    "save_time_states": "subquad.time_states",
    "embedded_model": "subquad.info",
    "identify": "subquad.identity",
    "preset_config": "subquad.presets",
}
for _architecture in REGISTRY.values():
    _EXPORTS |= _architecture.public_names

__all__ = ["ARCHITECTURES", "PROCESSORS", "__version__", *_EXPORTS]


def lm_auto_class(model_type: str) -> str:
    """Name of the Auto class of an architecture's language model: causal, masked (an encoder), or reading images."""
    return REGISTRY[model_type].lm_auto_class


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__():
    return sorted({*globals(), *_EXPORTS})


registration.start()
