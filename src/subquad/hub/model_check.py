"""Checks that a model directory holds a model that loads."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import ADAPTER_CONFIG_NAME

from ..models import REGISTRY
from .foreign_files import listed, read_json, reading
from .weight_files import (
    DTYPES,
    Header,
    check_finite,
    complete_sizes,
    open_weights,
    pickled_weights,
    read_headers,
    read_weight_map,
)


# Files of a model directory besides its configuration and its weights.
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
SETTINGS = (
    *TOKENIZER_FILES,
    *("special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("processor_config.json", "preprocessor_config.json"),
)


def model_type_of(directory: Path) -> str:
    """
    The `model_type` of a model directory.

    Raises:
        ValueError: if the directory does not hold a model of this package.
    """
    path = directory / "config.json"
    if not path.is_file():
        _check_not_adapter(directory)
        raise ValueError(f"{directory} has no `config.json`: it is not a model directory.")
    model_type = read_json(path).get("model_type")
    if not isinstance(model_type, str) or model_type not in REGISTRY:
        raise ValueError(f"{path}: `model_type` is {model_type!r}; known are {', '.join(REGISTRY)}.")
    return model_type


def weights_of(directory: Path) -> list[Path]:
    """
    The weight files of a model directory; the index is first if there is one.

    Raises:
        ValueError: if none is in safetensors, or if some are missing.
    """
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        _check_not_adapter(directory)
        pickled = pickled_weights(directory)
        hint = f"; `subquad convert` reads {pickled[0].name}" if pickled else ""
        raise ValueError(f"{directory} has no weights in safetensors{hint}.")
    shards = sorted(set(read_weight_map(index).values()))
    if missing := [name for name in shards if not (directory / name).is_file()]:
        raise ValueError(f"{index} names files that are not there: {', '.join(missing)}.")
    return [index, *(directory / name for name in shards)]


def _check_not_adapter(directory: Path) -> None:
    if (directory / ADAPTER_CONFIG_NAME).is_file():
        raise ValueError(
            f"{directory} holds an adapter, not a model. PEFT's `merge_and_unload()` returns the model with the "
            "adapter in it, if it can be merged: save that, with its tokenizer."
        )


def check_model(directory: str | os.PathLike, values: bool = True) -> PreTrainedConfig:
    """
    Checks a model directory without allocating the model.

    Args:
        values: whether to read all weights and check that they are finite.

    Returns:
        the configuration, with all sizes.

    Raises:
        ValueError: if the model would not load completely; the message names the file.
    """
    directory = Path(directory)
    model_type_of(directory)
    weights = weights_of(directory)
    files = [path for path in weights if path.suffix == ".safetensors"]
    headers = read_headers(files)
    if (index := weights[0]).suffix == ".json":
        lost = [name for name in read_weight_map(index) if name not in headers]
        if lost:
            raise ValueError(f"{index} names tensors that its files do not hold: {listed(lost)}.")
    with reading(directory / "config.json"):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        complete_sizes(config, directory)
        config.validate_architecture()
        config.validate_names()
    for name in SETTINGS:
        if (directory / name).is_file():
            read_json(directory / name)
    if (path := directory / "generation_config.json").is_file():
        with reading(path):
            GenerationConfig.from_pretrained(directory)
    if processor := REGISTRY[config.model_type].processor:
        if (path := directory / "processor_config.json").is_file():
            with reading(path):
                REGISTRY[config.model_type].load(processor).from_pretrained(directory)
    elif any((directory / name).is_file() for name in TOKENIZER_FILES):
        with reading(directory, "the tokenizer"):
            AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    _check_headers(directory, config, headers)
    for path in files if values else ():
        with open_weights(path) as file:
            for name in file.keys():
                if headers[name][1] in DTYPES:
                    check_finite(f"{path}: {name}", file.get_tensor(name))
    return config


def _check_headers(directory: Path, config: PreTrainedConfig, headers: Mapping[str, Header]) -> None:
    """Raises a ValueError if the tensors do not match the model that the configuration describes."""
    if getattr(config, "quantization_config", None) is not None:  # its tensors are packed under other names
        return
    architecture = REGISTRY[config.model_type]
    saved_as = (config.architectures or [None])[0]
    model_class = architecture.load(saved_as) if saved_as in architecture.heads.values() else architecture.lm_class
    with reading(directory / "config.json"), torch.device("meta"):
        model = model_class(config)
    if any(rename != name for name, rename in _renamed(model, headers).items()):  # another package's, see `loading.py`
        _, info = model_class.from_pretrained(directory, output_loading_info=True)
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"{directory}: these weights of {model_class.__name__} are missing: {listed(missing)}.")
        return
    tied = {frozenset(pair) for pair in model.all_tied_weights_keys.items()}
    missing, shapes, dtypes = [], [], []
    for name, tensor in model.state_dict().items():
        if name not in headers:
            if not any(name in pair and pair & headers.keys() for pair in tied):
                missing.append(name)
            continue
        shape, dtype = headers[name]
        if shape != tuple(tensor.shape) and (shape or tensor.numel() != 1):  # a scalar may stand for a vector
            shapes.append(f"{name} (shape {shape}, expected {tuple(tensor.shape)})")
        elif tensor.is_floating_point() and dtype not in DTYPES:
            dtypes.append(f"{name} (dtype {dtype})")
    kinds = {"missing": missing, "of the wrong shape": shapes, "not floating point": dtypes}
    if faults := "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds.items() if names):
        raise ValueError(f"{directory}: the tensors do not match {model_class.__name__}; {faults}.")


def _renamed(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The names of tensors in files, and their names after transformers' conversions at loading."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    return {name: rename_source_key(name, renamings, converters)[0] for name in names}


def unknown_fields(directory: str | os.PathLike) -> list[str]:
    """The fields of a model's configuration that nothing reads, such as users' own."""
    directory = Path(directory)
    fields = read_json(directory / "config.json")
    return sorted(_unknown(fields, REGISTRY[fields["model_type"]].config_class()))


def _unknown(fields: Mapping, known: PreTrainedConfig) -> list[str]:
    names = {*dir(known), *known.to_dict(), "auto_map", "quantization_config", "torch_dtype", "use_bfloat16"}
    found = [name for name in fields if name not in names]
    for name in known.sub_configs:
        if isinstance(fields.get(name), dict):
            found += [f"{name}.{each}" for each in _unknown(fields[name], getattr(known, name))]
    return found
