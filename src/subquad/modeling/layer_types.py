"""The layer types that models report to transformers and accelerate."""

from collections.abc import Callable

from transformers import PreTrainedConfig


def layer_types_property(find: Callable[[PreTrainedConfig], list[str]]) -> property:
    """A configuration's `layer_types`, from `find`; None if the configuration is not valid."""

    def read(config: PreTrainedConfig) -> list[str] | None:
        try:
            config.validate_architecture()
        except Exception:  # transformers reads this property first and reports the fault later
            return None
        return find(config)

    return property(read, doc=find.__doc__)


@layer_types_property
def all_linear(config: PreTrainedConfig) -> list[str]:
    """Layer types reported to transformers: no layer keeps keys of all tokens."""
    return ["linear_attention"] * config.num_hidden_layers
