"""
Checks of every configuration before any tensor is made: the names of its fields, and their values.

transformers keeps every unknown field as an attribute that nothing reads. Here a keyword that is not a
field is a TypeError. A `config.json` may come from another implementation: an unknown field is ignored with a
warning, or refused if it resembles a known one.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from .arguments import ALIKE, UnknownArgument, nearest


logger = logging.get_logger(__name__)

# Fields that transformers looks for in any configuration without being fields of its own.
READ_BY_TRANSFORMERS = (
    "auto_map",
    "custom_pipelines",
    "loss_type",
    "processor_class",
    "quantization_config",
    "tokenizer_class",
    "transformers_weights",
)
# Fields that transformers 4 wrote into files and that have no effect.
LEGACY = (
    "add_cross_attention",
    "cross_attention_hidden_size",
    "finetuning_task",
    "is_decoder",
    "prefix",
    "pruned_heads",
    "sep_token_id",
    "task_specific_params",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "torchscript",
    "use_bfloat16",
)
# Names that implementations use for the epsilon of their norms.
EPSILONS = ("eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rms_norm_eps")

# Larger than in any model. Without limits, a file of a few bytes could demand more memory or time than there is.
MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1


class CheckedConfig(PreTrainedConfig):
    """
    The base class of all configurations: every field is either read or refused by name.

    Attributes:
        ignored_fields: fields of other implementations that do not change what the model computes. They are dropped.
    """

    ignored_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def only_values(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """
        Fields of other implementations that select variants of the model: the values that have no effect, which are
        dropped, and why no other is accepted. None, and a list of such values, have no effect either.
        """
        fixed = dict.fromkeys(("rope_parameters", "rope_scaling"), ((None,), "no rotary embedding is scaled"))
        if (own := next((name for name in EPSILONS if hasattr(type(self), name)), None)) is not None:
            reason = f"the epsilon of the norms is `{own}` here"
            others = (name for name in EPSILONS if name != own and name not in self.attribute_map)
            fixed |= dict.fromkeys(others, ((getattr(self, own),), reason))
        return fixed

    def __post_init__(self, _from_file: bool = False, **kwargs):
        """Handles the fields that the class itself does not read."""
        only_values, refused = self.only_values, {}
        for name, value in list(kwargs.items()):
            if name in self.ignored_fields:
                del kwargs[name]
            elif name in only_values:
                del kwargs[name]
                if not self._changes_nothing(value, only_values[name][0]):
                    refused[name] = value
            elif _is_read_only(type(self), name):
                if value not in (None, getattr(self, name)):
                    raise ValueError(
                        f"`{name}` must be {getattr(self, name)!r}, which follows from other fields, got {value!r}."
                    )
                del kwargs[name]
        if isinstance(kwargs.get("model_type"), str):
            del kwargs["model_type"]  # set by the class; directories of other packages have other types
        check_names(type(self), kwargs, _from_file)
        if not _from_file:
            _warn_of_generation(kwargs)
        super().__post_init__(**kwargs)
        vars(self).update(refused)  # `validate_names` refuses them

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in transformers, for the fields of a file. A keyword that looks like a field is an error."""
        returns_unused = kwargs.pop("return_unused_kwargs", False)
        fields = {**config_dict, "_from_file": True}
        config, unused = super().from_dict(fields, return_unused_kwargs=True, **kwargs)
        for name in unused.keys() & config.only_values.keys():
            config._check_value(name, unused.pop(name))
        if returns_unused:
            return config, unused
        # Others are not refused: `AutoTokenizer` also passes its keywords on to this method.
        for name in unused:
            if hint := nearest_fields(cls, name, ALIKE):
                raise UnknownArgument(f"`{name}` is not a field of {cls.__name__}.{hint}")
        return config

    @classmethod
    def from_json_file(cls, json_file):
        """As in transformers."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    def _changes_nothing(self, value: Any, values: tuple[Any, ...]) -> bool:
        if isinstance(value, dict) and value.get("rope_type", value.get("type")) == "default":
            # The default rotary embedding; transformers and vLLM set it on any configuration with a `rope_theta`.
            theta = value.get("rope_theta")
            return theta is None or theta == getattr(self, "rope_theta", theta)
        return all(each is None or each in values for each in (value if isinstance(value, list) else [value]))

    def _check_value(self, name: str, value: Any) -> None:
        values, reason = self.only_values[name]
        if not self._changes_nothing(value, values):
            raise ValueError(f"`{name}` must be {' or '.join(map(repr, values))}, got {value!r}: {reason}.")

    def validate_names(self) -> None:
        """
        Raises:
            ValueError: if a field has a value of another kind of model, or an attribute that was set later resembles a
                field: it would be saved with the others.
        """
        for name in self.only_values:
            self._check_value(name, vars(self).get(name))
        for name in vars(self):
            if not _is_known(type(self), name) and (hint := nearest_fields(type(self), name, ALIKE)):
                raise ValueError(f"`{name}` is not a field of {type(self).__name__}.{hint}")


def check_names(config_class: type[PreTrainedConfig], fields: Mapping[str, Any], from_file: bool = False) -> None:
    """
    Args:
        fields: the keywords for a configuration of this class.
        from_file: whether it was read from a file, in which an unknown field is only reported, once, unless it
            resembles a field.

    Raises:
        UnknownArgument: if a keyword is not a field.
        ValueError: if a field of a file resembles one of the class.
    """
    title = config_class.__name__
    for name, value in fields.items():
        if _is_known(config_class, name):
            continue
        if not from_file:
            own = [each for each in _field_names(config_class) if not hasattr(PreTrainedConfig, each)]
            hint = nearest_fields(config_class, name) or f" The fields are {', '.join(own)}."
            raise UnknownArgument(f"{title}() got an unexpected keyword argument `{name}`.{hint}")
        if hint := nearest_fields(config_class, name, ALIKE):
            raise ValueError(f"`{name}` ({value!r:.80}) is not a field of {title}.{hint}")
        logger.warning_once(f"`{name}` ({value!r:.80}) is not a field of {title} and is ignored.")


def nearest_fields(config_class: type[PreTrainedConfig], name: str, alike: float = 0.6) -> str:
    """Fields of a configuration that resemble a name, as the end of an error message; empty if there are none."""
    if name.endswith("_token"):  # of a tokenizer, which has no ids
        return ""
    return nearest(name, {*_field_names(config_class), *config_class.attribute_map}, alike)


@functools.cache
def _field_names(config_class: type[PreTrainedConfig]) -> list[str]:
    return [field.name for field in dataclasses.fields(config_class)]


def _is_known(config_class: type[PreTrainedConfig], name: str) -> bool:
    """Whether a configuration has a field or transformers reads it, private ones included."""
    of_class = hasattr(config_class, name) and not callable(getattr(config_class, name))
    return name.startswith("_") or of_class or name in config_class.attribute_map or _is_read_by_transformers(name)


@functools.cache
def _is_read_by_transformers(name: str) -> bool:
    if name in READ_BY_TRANSFORMERS or name in LEGACY or name in vars(GenerationConfig()):
        return True
    # transformers stores what it does not read as an attribute.
    return not hasattr(PreTrainedConfig, name) and name not in vars(PreTrainedConfig(**{name: None}))


def _is_read_only(config_class: type[PreTrainedConfig], name: str) -> bool:
    attribute = getattr(config_class, name, None)
    return isinstance(attribute, property) and attribute.fset is None


def _warn_of_generation(keywords: Mapping[str, Any]) -> None:
    """Warns of settings that transformers drops. In a `config.json`, it reads them if there is no other file."""
    for name, default in GenerationConfig._get_default_generation_params().items():
        if keywords.get(name, default) not in (None, default):
            logger.warning_once(
                f"`{name}` ({keywords[name]!r:.80}) is ignored: it belongs to the `generation_config` of a model."
            )


def check_configuration(config: PreTrainedConfig, sizes: Iterable[str], positive: Iterable[str] = ()) -> None:
    """
    Args:
        sizes: names of the fields that are counts.
        positive: names of the fields that may be any finite number above 0.

    Raises:
        ValueError: if a field has a value that no model can have.
    """
    layers = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    for name in sizes:
        value, most = getattr(config, name), MAX_LAYERS if name == layers else MAX_SIZE
        if (value or 0) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if value > most:
            raise ValueError(f"`{name}` must be at most {most}, got {value}.")
    if config.num_labels < 1:
        raise ValueError(f"`num_labels` must be at least 1, got {config.num_labels}.")
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
    # transformers would open that file instead of the checked ones.
    if (file := getattr(config, "transformers_weights", None)) is not None:
        raise ValueError(f"`transformers_weights` is not supported, got {file!r}: weights are in model.safetensors.")
