"""The modules that PEFT's methods adapt if their configuration names none."""

from .models import REGISTRY


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
