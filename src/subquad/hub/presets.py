"""The presets of all architectures by name: published sizes without weights."""

from typing import TYPE_CHECKING, Any

from ..models import REGISTRY


if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Preset name to model type and configuration fields.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (model_type, fields)
    for model_type, architecture in REGISTRY.items()
    for name, fields in architecture.presets.items()
}


def preset_config(name: str) -> "PreTrainedConfig":
    """
    The configuration of a preset.

    Raises:
        ValueError: if there is no preset of that name; the message lists all presets.
    """
    if name not in PRESETS:
        raise ValueError(f"There is no preset {name!r}; the presets are {', '.join(PRESETS)}.")
    model_type, fields = PRESETS[name]
    return REGISTRY[model_type].config_class(**fields)
