"""
Sub-quadratic language models as ordinary Hugging Face models.

Importing this package is enough for `AutoConfig`, `AutoTokenizer`, `AutoModel`, `AutoModelForCausalLM`, ... to know
the architectures below. Nothing heavy is imported until one of these classes is.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings


__version__ = "0.1.0"

# Model type to its folder, its configuration, and the classes behind the Auto classes.
ARCHITECTURES = {
    "rwkv5": (
        "subquad.models.rwkv5",
        "Rwkv5Config",
        {
            "AutoModel": "Rwkv5Model",
            "AutoModelForCausalLM": "Rwkv5ForCausalLM",
            "AutoModelForSequenceClassification": "Rwkv5ForSequenceClassification",
        },
    ),
    "rwkv6": (
        "subquad.models.rwkv6",
        "Rwkv6Config",
        {
            "AutoModel": "Rwkv6Model",
            "AutoModelForCausalLM": "Rwkv6ForCausalLM",
            "AutoModelForSequenceClassification": "Rwkv6ForSequenceClassification",
        },
    ),
    "avey": (
        "subquad.models.avey",
        "AveyConfig",
        {
            "AutoModel": "AveyModel",
            "AutoModelForCausalLM": "AveyForCausalLM",
            "AutoModelForSequenceClassification": "AveyForSequenceClassification",
        },
    ),
    "avey-b": (
        "subquad.models.avey_b",
        "AveyBConfig",
        {
            "AutoModel": "AveyBModel",
            "AutoModelForMaskedLM": "AveyBForMaskedLM",
            "AutoModelForQuestionAnswering": "AveyBForQuestionAnswering",
            "AutoModelForSequenceClassification": "AveyBForSequenceClassification",
            "AutoModelForTokenClassification": "AveyBForTokenClassification",
        },
    ),
    "raven": (
        "subquad.models.raven",
        "RavenConfig",
        {
            "AutoModel": "RavenModel",
            "AutoModelForCausalLM": "RavenForCausalLM",
            "AutoModelForSequenceClassification": "RavenForSequenceClassification",
        },
    ),
    "gecko": (
        "subquad.models.gecko",
        "GeckoConfig",
        {
            "AutoModel": "GeckoModel",
            "AutoModelForCausalLM": "GeckoForCausalLM",
            "AutoModelForSequenceClassification": "GeckoForSequenceClassification",
        },
    ),
    "visual_rwkv": (
        "subquad.models.visual_rwkv",
        "VisualRwkvConfig",
        {
            "AutoModel": "VisualRwkvModel",
            "AutoModelForMultimodalLM": "VisualRwkvForConditionalGeneration",
            "AutoModelForImageTextToText": "VisualRwkvForConditionalGeneration",
        },
    ),
}

_EXPORTS = {
    "AveyCache": "subquad.cache",
    "ContextParallelCache": "subquad.context_parallel",
    "GeckoCache": "subquad.cache",
    "RavenCache": "subquad.cache",
    "RecurrentCache": "subquad.cache",
    "StateTuningConfig": "subquad.state_tuning",
    "PRESETS": "subquad.presets",
    "QuestionAnsweringPipeline": "subquad.question_answering",
    "embedded_model": "subquad.info",
    "preset_config": "subquad.presets",
    "split_text": "subquad.context_parallel",
}
# Of models that read images: model type to the class behind AutoProcessor.
PROCESSORS = {"visual_rwkv": "VisualRwkvProcessor"}
for _folder, _config, _heads in ARCHITECTURES.values():
    _name = _folder.rpartition(".")[2]
    _EXPORTS[_config] = f"{_folder}.configuration_{_name}"
    _EXPORTS.update(dict.fromkeys(_heads.values(), f"{_folder}.modeling_{_name}"))
for _model_type, _processor in PROCESSORS.items():
    _folder = ARCHITECTURES[_model_type][0]
    _EXPORTS[_processor] = f"{_folder}.processing_{_folder.rpartition('.')[2]}"

__all__ = ["ARCHITECTURES", "PROCESSORS", "__version__", *_EXPORTS]


def lm_auto_class(model_type: str) -> str:
    """
    Name of the Auto class of an architecture's language model: a causal one, the masked one of an encoder, or one that
    reads images, too.
    """
    names = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageTextToText")
    return next(name for name in names if name in ARCHITECTURES[model_type][2])


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__():
    return sorted({*globals(), *_EXPORTS})


# Registration waits until transformers has imported its Auto classes, because making it do so would take as long as
# importing torch does; and until PEFT, if ever, has imported its tables.
_AUTO = "transformers.models.auto."
_PIPELINES = "transformers.pipelines"
# The Auto classes may be imported from within one of these, which the model classes and our pipeline need: they wait
# until it is complete.
_BASES = (
    "transformers.cache_utils",
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.modeling_utils",
    "transformers.models.clip.configuration_clip",
    "transformers.models.clip.modeling_clip",
    "subquad.heads",
    *_EXPORTS.values(),
)


def _register_configurations() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    replaced = []
    for model_type, (_, config, _) in ARCHITECTURES.items():
        if model_type in CONFIG_MAPPING and (owner := CONFIG_MAPPING[model_type].__module__.split(".")[0]) != __name__:
            replaced.append(f"{model_type} of {owner}")
        AutoConfig.register(model_type, __getattr__(config), exist_ok=True)
    if replaced:
        warnings.warn(f"subquad replaces the registration of {', '.join(replaced)}.", stacklevel=2)


def _register_tokenizers() -> None:
    import subquad_tokenizers

    subquad_tokenizers.register(*(__getattr__(config) for _, config, _ in ARCHITECTURES.values()))


def _register_models() -> None:
    from transformers.models.auto import modeling_auto

    # `register` tells the Auto classes; Trainer and the pipelines look at tables of names.
    names = {
        "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "AutoModelForMultimodalLM": modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
        "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    for model_type, (_, config, heads) in ARCHITECTURES.items():
        for auto_class, head in heads.items():
            getattr(modeling_auto, auto_class).register(__getattr__(config), __getattr__(head), exist_ok=True)
            names[auto_class][model_type] = head


def _register_processors() -> None:
    from transformers.models.auto.processing_auto import AutoProcessor

    for model_type, processor in PROCESSORS.items():
        config = ARCHITECTURES[model_type][1]
        AutoProcessor.register(__getattr__(config), __getattr__(processor), exist_ok=True)


def _register_pipelines() -> None:
    from transformers import pipelines
    from transformers.models.auto.modeling_auto import AutoModelForQuestionAnswering

    task, tasks = "question-answering", pipelines.PIPELINE_REGISTRY.supported_tasks
    if task in tasks:
        return
    # Not by `register_pipeline`, which marks the class as a repository's own code: saving would copy it beside the
    # model, and loading would ask for `trust_remote_code`.
    pipeline = __getattr__("QuestionAnsweringPipeline")
    tasks[task] = {"impl": pipeline, "pt": (AutoModelForQuestionAnswering,), "default": {}, "type": "text"}
    # Newer versions refuse the name before they look for it.
    getattr(pipelines, "REMOVED_TASKS", {}).pop(task, None)


def _register_adapters() -> None:
    from .adapters import register

    register()


def _register_state_tuning() -> None:
    importlib.import_module("subquad.state_tuning")


_PENDING = {
    f"{_AUTO}configuration_auto": _register_configurations,
    f"{_AUTO}tokenization_auto": _register_tokenizers,
    f"{_AUTO}modeling_auto": _register_models,
    f"{_AUTO}processing_auto": _register_processors,
    _PIPELINES: _register_pipelines,
    "peft.utils.constants": _register_adapters,
    "peft": _register_state_tuning,
}


def _register_what_can_be(finished: str | None = None) -> None:
    """Registers with everything that is there; `finished` is the module whose import is just ending."""

    def ready(name):
        module = sys.modules.get(name)
        return module is not None and (name == finished or not getattr(module.__spec__, "_initializing", False))

    for name in list(_PENDING):
        bases_ready = all(base not in sys.modules or ready(base) for base in _BASES)
        if ready(name) and (bases_ready or not name.endswith(("modeling_auto", _PIPELINES))):
            register = _PENDING.pop(name, None)  # None where another thread was quicker
            if register is not None:
                register()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `_register_what_can_be` whenever one of the modules it depends on has been imported."""

    def __init__(self):
        self.watched = {*_PENDING, *_BASES}

    def find_spec(self, name, path, target=None):
        # Asked for a spec is not yet imported: whoever asks gets one that registers when it is executed.
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self.watched else None
        if spec is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _register_what_can_be(finished=name)

        spec.loader.exec_module = exec_module
        return spec


_register_what_can_be()
if _PENDING:
    sys.meta_path.insert(0, _AfterImport())
