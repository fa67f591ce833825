"""What every configuration is checked for before any tensor is made."""

import math
from collections.abc import Iterable

import torch
from transformers import PreTrainedConfig


# More than any model has. Without limits, a file of a few bytes could ask for more memory or time than there is.
MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1


def check_configuration(config: PreTrainedConfig, sizes: Iterable[str], positive: Iterable[str] = ()) -> None:
    """
    Args:
        sizes: names of the fields that are numbers of something.
        positive: names of the fields that are any finite numbers above 0.

    Raises:
        ValueError: if a field has a value that no model has.
    """
    layers = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    for name in sizes:
        value, most = getattr(config, name), MAX_LAYERS if name == layers else MAX_SIZE
        if (value or 0) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if value > most:
            raise ValueError(f"`{name}` must be at most {most}, got {value}.")
    for name in positive:
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"`{name}` must be above 0 and finite, got {getattr(config, name)}.")
    if not isinstance(config.model_type, str):
        raise ValueError(f"`model_type` must be a name, got {config.model_type!r}.")
    quantization = getattr(config, "quantization_config", None)
    if not (quantization is None or isinstance(quantization, dict) or hasattr(quantization, "to_dict")):
        raise ValueError(f"`quantization_config` must be an object, got {quantization!r}.")
    names = config.architectures
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"`architectures` must be a list of names, got {names!r}.")
    dtype = getattr(torch, config.dtype, None) if isinstance(config.dtype, str) else config.dtype
    if config.dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"`dtype` must be a floating one, got {config.dtype!r}.")
    # transformers would open that file in place of those that were checked.
    if (file := getattr(config, "transformers_weights", None)) is not None:
        raise ValueError(f"`transformers_weights` is not supported, got {file!r}: weights are in model.safetensors.")
