"""PEFT's view of the architectures: modules to adapt, and sizes."""

import functools
from types import ModuleType
from typing import Any

from ..models import REGISTRY


# The methods that train keys and values of attention.
KEYS_AND_VALUES = ("PREFIX_TUNING", "CARTRIDGE")


def register() -> None:
    """Adds the architectures to PEFT's tables of default target modules; each method has a table of its own."""
    from peft.utils import constants

    targets = {model_type: architecture.adapter_targets for model_type, architecture in REGISTRY.items()}
    for name, table in vars(constants).items():
        if name.endswith("_TARGET_MODULES_MAPPING"):
            table.update({model_type: target.projections for model_type, target in targets.items()})
    for model_type, target in targets.items():
        constants.TRANSFORMERS_MODELS_TO_LNTUNING_TARGET_MODULES_MAPPING[model_type] = target.norms
        scaled = target.scaled + target.feed_forward
        constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING[model_type] = scaled
        constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[model_type] = target.feed_forward


def register_prompts(module: ModuleType) -> None:
    """
    Makes `peft.peft_model` find the sizes that prompt learning needs, under any field names, and refuse the methods
    that train keys and values.
    """
    prepare = module._prepare_prompt_learning_config

    @functools.wraps(prepare)
    def prepare_for_any(peft_config: Any, model_config: Any) -> Any:
        if getattr(model_config, "model_type", None) not in REGISTRY:
            return prepare(peft_config, model_config)
        text = model_config.get_text_config()
        if peft_config.peft_type in KEYS_AND_VALUES:
            instead = (
                "`PromptTuningConfig` trains embeddings before a text"
                if REGISTRY[text.model_type].tunable_state is None
                else "state tuning, `subquad.StateTuningConfig`, trains the state that a text begins with"
            )
            raise ValueError(
                f"{peft_config.peft_type.value} trains keys and values, which {model_config.model_type} does not keep "
                f"of all tokens; {instead}."
            )
        sizes = {"token_dim": text.hidden_size, "num_layers": text.num_hidden_layers}
        sizes["num_attention_heads"] = getattr(text, "num_attention_heads", 1)  # only the refused methods read it
        for name, size in sizes.items():
            if getattr(peft_config, name) is None:
                setattr(peft_config, name, size)
        return prepare(peft_config, model_config)

    module._prepare_prompt_learning_config = prepare_for_any
