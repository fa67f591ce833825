"""Name maps for files with another package's tensor names. `from_pretrained` reads such files directly."""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform


# A function that extracts one of our tensors from a tensor of another package.
Extract = Callable[[torch.Tensor], torch.Tensor]


class Renaming(WeightRenaming):
    """A renaming that `save_pretrained` does not reverse: models are saved under our names."""

    __slots__ = ()

    def reverse_transform(self) -> WeightTransform:
        return self  # it matches none of our names


class Conversion(WeightConverter):
    """A conversion that `save_pretrained` does not reverse."""

    __slots__ = ()

    def reverse_transform(self) -> WeightTransform:
        return self


class TakeOut(ConversionOps):
    """Extracts our tensors, by the ends of their names, from the tensor that was read."""

    def __init__(self, parts: Mapping[str, Extract]):
        self.parts = parts

    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        model: PreTrainedModel,
        **kwargs,
    ) -> dict[str, torch.Tensor]:
        if hasattr(model.get_parameter_or_buffer(full_layer_name), "device_mesh"):
            raise ValueError("this layout is not read in parts; `subquad convert` makes a directory that is")
        ((tensor,),) = input_dict.values()
        return {name: take(tensor).contiguous() for name, take in self.parts.items()}


@dataclass(frozen=True)
class Part:
    """
    A tensor of another package that holds one or several of ours in another shape.

    Attributes:
        takes: ends of our names, and functions that extract each of ours from the tensor.
    """

    takes: Mapping[str, Extract]
    join: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True)
class NameMap:
    """
    How another package names and shapes the tensors of a model. `subquad convert` reads it in both directions.

    Attributes:
        names: parts of its names, and what takes their place in ours, one after the other. None is part of one of our
            names. `^` and `$` stand for the ends of a name, `{}` for a number.
        parts: ends of names, after that; and how the tensor holds ours.
    """

    names: Mapping[str, str]
    parts: Mapping[str, Part] = field(default_factory=dict)

    def __or__(self, other: "NameMap") -> "NameMap":
        """A map that reads the names of both. Neither may contain what the other replaces in a name."""
        return NameMap({**self.names, **other.names}, {**self.parts, **other.parts})

    def read_name(self, name: str) -> dict[str, Extract | None]:
        """Our names of the tensors that one of the package holds, and how each is taken out of it (None: whole)."""
        for theirs, ours in self.names.items():
            name = name_pattern(theirs).sub(name_replacement(ours), name, count=1)
        for end, part in self.parts.items():
            if name.endswith(end):
                return {name.removesuffix(end) + ours: take for ours, take in part.takes.items()}
        return {name: None}

    def register(self, model_type: str) -> None:
        """Makes `from_pretrained` of the models of this type read the layout, besides ours."""
        transforms = [
            *(Renaming(name_pattern(theirs).pattern, name_replacement(ours)) for theirs, ours in self.names.items()),
            *(Conversion(re.escape(end), list(x.takes), [TakeOut(x.takes)]) for end, x in self.parts.items()),
        ]
        register_checkpoint_conversion_mapping(model_type, transforms, overwrite=True)


@functools.cache
def name_pattern(name: str) -> re.Pattern:
    """The regular expression of a part of a name in [`NameMap`]."""
    return re.compile(re.escape(name).replace(r"\^", "^").replace(r"\$", "$").replace(r"\{\}", r"(\d+)"))


@functools.cache
def name_replacement(name: str) -> str:
    return name.strip("^$").replace("{}", r"\1")


def as_vector(x: torch.Tensor) -> torch.Tensor:
    """A vector in the shape of the trainer, (1, 1, width)."""
    return x.reshape(1, 1, -1)


def transposed(ours: str) -> Part:
    """A tensor that is the transpose of ours in its last two axes."""
    return Part({ours: swap}, swap)


def swap(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2)


def vector(ours: str) -> Part:
    """A tensor that is ours without axes of length 1."""
    return Part({ours: as_vector}, torch.flatten)


__all__ = ["NameMap", "Part", "as_vector", "name_pattern", "name_replacement", "transposed", "vector"]
