"""
Sub-quadratic language models as ordinary Hugging Face models.

Importing this package makes its architectures known to `AutoConfig`, `AutoTokenizer`, `AutoModel`,
`AutoModelForCausalLM`, ... Nothing heavy is imported until one of these classes is.
"""

import importlib
from typing import TYPE_CHECKING

from .hub import auto_classes
from .models import REGISTRY


if TYPE_CHECKING:
    from .decoding.penalties import DecayingPenaltyLogitsProcessor as DecayingPenaltyLogitsProcessor
    from .hub.info import embedded_model as embedded_model
    from .hub.presets import PRESETS as PRESETS
    from .hub.presets import preset_config as preset_config
    from .modeling.cache import RecurrentCache as RecurrentCache
    from .modeling.context_parallel import context_parallel_cache as context_parallel_cache
    from .modeling.context_parallel import split_text as split_text
    from .models import *
    from .quantization.quantized import Int4Config as Int4Config
    from .quantization.quantized import Int8Config as Int8Config
    from .states.identity import identify as identify
    from .states.prefix_cache import PrefixCache as PrefixCache
    from .states.state_index import StateIndex as StateIndex
    from .states.time_states import load_time_states as load_time_states
    from .states.time_states import save_time_states as save_time_states
    from .tools.question_answering import QuestionAnsweringPipeline as QuestionAnsweringPipeline
    from .training.state_tuning import StateTuningConfig as StateTuningConfig

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
    "DecayingPenaltyLogitsProcessor": "subquad.decoding.penalties",
    "Int4Config": "subquad.quantization.quantized",
    "Int8Config": "subquad.quantization.quantized",
    "PRESETS": "subquad.hub.presets",
    "PrefixCache": "subquad.states.prefix_cache",
    "QuestionAnsweringPipeline": "subquad.tools.question_answering",
    "RecurrentCache": "subquad.modeling.cache",
    "StateIndex": "subquad.states.state_index",
    "StateTuningConfig": "subquad.training.state_tuning",
    "context_parallel_cache": "subquad.modeling.context_parallel",
    "split_text": "subquad.modeling.context_parallel",
    "load_time_states": "subquad.states.time_states",
    "save_time_states": "subquad.states.time_states",
    "embedded_model": "subquad.hub.info",
    "identify": "subquad.states.identity",
    "preset_config": "subquad.hub.presets",
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


auto_classes.start()
