"""
Registration of the architectures with transformers and PEFT.

transformers' Auto classes take as long to import as torch does, so registration waits until somebody imports them, and
until PEFT, if ever, has imported its tables.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings

from .models import REGISTRY


_AUTO = "transformers.models.auto."
_PIPELINES = "transformers.pipelines"
# One of these modules, which the model classes and our pipeline need, may itself import the Auto classes. Registering
# models then has to wait until that module is complete.
_BASES = (
    "transformers.cache_utils",
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.modeling_utils",
    "transformers.models.clip.configuration_clip",
    "transformers.models.clip.modeling_clip",
    "subquad.question_answering",
    *(f"subquad.{name}" for name in ("base", "cache", "generation", "heads", "layers", "saving")),
    *(module for architecture in REGISTRY.values() for module in architecture.public_names.values()),
)


def _register_configurations() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    replaced = []
    for model_type, architecture in REGISTRY.items():
        if (
            model_type in CONFIG_MAPPING
            and (owner := CONFIG_MAPPING[model_type].__module__.split(".")[0]) != "subquad"
        ):
            replaced.append(f"{model_type} of {owner}")
        AutoConfig.register(model_type, architecture.config_class, exist_ok=True)
    if replaced:
        warnings.warn(f"subquad replaces the registration of {', '.join(replaced)}.", stacklevel=2)


def _register_tokenizers() -> None:
    import subquad_tokenizers

    subquad_tokenizers.register(*(architecture.config_class for architecture in REGISTRY.values()))


def _register_models() -> None:
    from transformers.models.auto import modeling_auto

    # `register` tells the Auto classes; Trainer and the pipelines look at tables of names.
    tables = {
        "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "AutoModelForMultimodalLM": modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
        "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    for model_type, architecture in REGISTRY.items():
        for auto_class, head in architecture.heads.items():
            model_class = architecture.load(head)
            getattr(modeling_auto, auto_class).register(architecture.config_class, model_class, exist_ok=True)
            tables[auto_class][model_type] = head


def _register_processors() -> None:
    from transformers.models.auto.processing_auto import AutoProcessor

    for architecture in REGISTRY.values():
        if architecture.processor:
            processor = architecture.load(architecture.processor)
            AutoProcessor.register(architecture.config_class, processor, exist_ok=True)


def _register_pipelines() -> None:
    from .question_answering import register

    register()


def _register_adapters() -> None:
    from .adapters import register

    register()


def _register_state_tuning() -> None:
    importlib.import_module("subquad.state_tuning")  # it registers itself, also if it is what imported PEFT


# Module of transformers or PEFT to what is registered once it has been imported.
_PENDING = {
    f"{_AUTO}configuration_auto": _register_configurations,
    f"{_AUTO}tokenization_auto": _register_tokenizers,
    f"{_AUTO}modeling_auto": _register_models,
    f"{_AUTO}processing_auto": _register_processors,
    _PIPELINES: _register_pipelines,
    "peft.utils.constants": _register_adapters,
    "peft": _register_state_tuning,
}


def _register_ready(finished: str | None = None) -> None:
    """Registers with every module that is imported; `finished` is the one whose import is just ending."""

    def ready(name):
        module = sys.modules.get(name)
        return module is not None and (name == finished or not getattr(module.__spec__, "_initializing", False))

    for name in list(_PENDING):
        bases_ready = all(base not in sys.modules or ready(base) for base in _BASES)
        if ready(name) and (bases_ready or not name.endswith(("modeling_auto", _PIPELINES))):
            register = _PENDING.pop(name, None)  # None if another thread was quicker
            if register is not None:
                register()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `_register_ready` whenever one of the modules that registration depends on has been imported."""

    def __init__(self):
        self.watched = {*_PENDING, *_BASES}

    def find_spec(self, name, path, target=None):
        # The module is not imported yet: return a spec that registers once the module has been executed.
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self.watched else None
        if spec is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _register_ready(finished=name)

        spec.loader.exec_module = exec_module
        return spec


def start() -> None:
    """Registers with what is already imported, and with the rest as soon as it is."""
    sys.meta_path.insert(0, _AfterImport())  # first, because registering imports some of the rest
    _register_ready()
