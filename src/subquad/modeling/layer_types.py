"""What transformers and accelerate take the layers of a model for."""

from collections.abc import Callable

from transformers import PreTrainedConfig


def layer_types_property(find: Callable[[PreTrainedConfig], list[str]]) -> property:
    """A configuration's `layer_types`: what the function finds; None if the configuration is not valid."""

    def read(config: PreTrainedConfig) -> list[str] | None:
        try:
            config.validate_architecture()
        except Exception:  # transformers reads this first, and reports what is wrong then
            return None
        return find(config)

    return property(read, doc=find.__doc__)


@layer_types_property
def all_linear(config: PreTrainedConfig) -> list[str]:
    """What transformers takes the layers for: none keeps keys of all tokens."""
    return ["linear_attention"] * config.num_hidden_layers
