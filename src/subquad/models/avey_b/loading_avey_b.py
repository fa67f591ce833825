"""Loading and saving of `alpha`: a scalar in files, a vector of one element in a model."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter

from .configuration_avey_b import AveyBConfig


class ScalarToVector(MergeModulelist):
    """
    Loads `alpha`. The base class marks operations that stack their inputs. If transformers shards weights at loading,
    it then counts the scalar as one element, which one process gets.
    """

    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        model: PreTrainedModel,
        full_layer_name: str,
        **kwargs,
    ) -> dict[str, torch.Tensor]:
        (tensors,) = input_dict.values()
        if not tensors:  # another process has it
            alpha = model.get_parameter(full_layer_name)
            tensors = [torch.empty(0, dtype=alpha.dtype, device=alpha.device_mesh.device_type)]
        return {target_patterns[0]: tensors[0].reshape(-1)}  # the file of a state dict may hold a vector

    @property
    def reverse_op(self) -> ConversionOps:
        return VectorToScalar()


class VectorToScalar(ConversionOps):
    """Saves `alpha`."""

    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs,
    ) -> dict[str, torch.Tensor]:
        ((vector,),) = input_dict.values()
        return {target_patterns[0]: vector.reshape(())}

    @property
    def reverse_op(self) -> ConversionOps:
        return ScalarToVector()


# A copy of this file, in a repository, registers its own.
register_checkpoint_conversion_mapping(
    AveyBConfig.model_type, [WeightConverter(".alpha", ".alpha", [ScalarToVector()])], overwrite=True
)


def load_scalar(layer: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *args) -> None:
    """A hook for `load_state_dict`, because a `Trainer` loads files of `save_pretrained` with it."""
    if (name := f"{prefix}alpha") in state_dict and state_dict[name].dim() == 0:
        state_dict[name] = state_dict[name][None]


__all__ = ["load_scalar"]
