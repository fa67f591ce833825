"""Files whose tensors have the names of another package. `from_pretrained` reads them as they are."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform


# A function that takes one of our tensors out of a tensor of another package.
Take = Callable[[torch.Tensor], torch.Tensor]


class Renaming(WeightRenaming):
    """A renaming that `save_pretrained` does not reverse: models are saved under our names."""

    __slots__ = ()

    def reverse_transform(self) -> WeightTransform:
        return self  # it finds nothing among our names


class Conversion(WeightConverter):
    """A conversion that `save_pretrained` does not reverse."""

    __slots__ = ()

    def reverse_transform(self) -> WeightTransform:
        return self


class TakeOut(ConversionOps):
    """Takes our tensors, by the ends of their names, out of the one that was read."""

    def __init__(self, parts: Mapping[str, Take]):
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
class Layout:
    """
    How another package names and shapes the tensors of a model.

    Attributes:
        names: regular expressions that match parts of its names, and what takes their place, one after the other. None
            matches one of our names.
        parts: ends of names, after that, to the ends of ours; and how each of ours is taken out of the tensor.
    """

    names: Mapping[str, str]
    parts: Mapping[str, Mapping[str, Take]]

    def read_name(self, name: str) -> dict[str, Take | None]:
        """Our names of the tensors that one of the package holds, and how each is taken out of it (None: whole)."""
        for pattern, replacement in self.names.items():
            name = re.sub(pattern, replacement, name, count=1)
        for end, parts in self.parts.items():
            if name.endswith(end):
                return {name.removesuffix(end) + ours: take for ours, take in parts.items()}
        return {name: None}

    def register(self, model_type: str) -> None:
        """Makes `from_pretrained` of the models of this type read the layout, besides ours."""
        transforms = [
            *(Renaming(pattern, replacement) for pattern, replacement in self.names.items()),
            *(Conversion(re.escape(end), list(parts), [TakeOut(parts)]) for end, parts in self.parts.items()),
        ]
        register_checkpoint_conversion_mapping(model_type, transforms, overwrite=True)


def as_vector(x: torch.Tensor) -> torch.Tensor:
    """A vector in the shape of the trainer, (1, 1, width)."""
    return x.view(1, 1, -1)


__all__ = ["Layout", "as_vector"]
