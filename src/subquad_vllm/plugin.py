"""Registers the models with vLLM. A model is imported only when vLLM runs it."""

import warnings

import vllm
from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

from subquad.models import REGISTRY  # importing subquad also registers with AutoConfig and AutoTokenizer

from .configuration import RefusedConvertor, ServedConfig, ServedConvertor
from .served import TESTED, hybrid_name


def register() -> None:
    """See [`subquad_vllm.register`]."""
    if not vllm.__version__.startswith(f"{TESTED}."):
        warnings.warn(f"subquad is tested with vLLM {TESTED}, this is {vllm.__version__}.", stacklevel=2)
    for model_type, architecture in REGISTRY.items():
        serving = architecture.vllm
        if serving.path is None:
            MODEL_ARCH_CONFIG_CONVERTORS[model_type] = RefusedConvertor
            continue
        own = architecture.heads["AutoModelForCausalLM"]
        for name, path in {own: serving.path, hybrid_name(own): serving.hybrid}.items():
            if path is not None:
                ModelRegistry.register_model(name, path)
                MODELS_CONFIG_MAP[name] = ServedConfig
        MODEL_ARCH_CONFIG_CONVERTORS[model_type] = ServedConvertor
    ReasoningParserManager.register_lazy_module("rwkv", "subquad_vllm.reasoning", "RwkvReasoningParser")
    ToolParserManager.register_lazy_module("rwkv", "subquad_vllm.tools", "RwkvToolParser")
