"""
Weights of 8 and of 4 bits for inference on a CPU, as quantisation methods of transformers.

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=subquad.Int8Config())
    model.save_pretrained("int8")  # loads again without the argument

With 8 bits, every weight of a linear layer and of the embeddings takes one byte. Each output of a layer, and each
token of the embeddings, has a float32 scale. With 4 bits ([`Int4Config`]), 32 inputs of an output of a linear layer
have a bfloat16 scale, so that a weight takes 4.5 bits; both kinds of embeddings have 8 bits. The inputs of a layer are
rounded to 8 bits as well, each token with a scale of its own. Everything else keeps its dtype: norms, decays, low
ranks, the layers that an architecture names in `float_layers`, and heads that are not language modeling heads.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from subquad_kernels import int4_linear, int8_linear, quantize_groups, quantize_rows
from subquad_kernels.checks import check_stored
from subquad_kernels.int4_linear import fits_groups, int4_layout
from subquad_kernels.int8_linear import Stored, int8_layout

from ..hub.weight_files import FLOATING, read_headers
from ..modeling.arguments import nearest
from ..modeling.layers import LINEAR_WEIGHTS, widen
from .methods import METHODS, SCALE


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Int8Config(QuantizationConfigMixin):
    """
    Makes `from_pretrained` load 8-bit weights.

    Args:
        modules_to_not_convert: names of layers that stay in floating point, or regular expressions, matched with the
            beginning or end of a name as in transformers' other quantisation methods. If one of two tied embeddings is
            listed, both stay.

    Raises:
        ValueError: if it is not a list of strings. `from_pretrained` raises it if the model has no such layer.
    """

    _method = METHODS["int8"]

    def __init__(self, modules_to_not_convert: list[str] | None = None, **kwargs):
        kwargs.pop("quant_method", None)
        if kwargs:
            name = sorted(kwargs)[0]
            hint = nearest(name, ("modules_to_not_convert",))
            raise ValueError(f"`quantization_config`: {self._method} has no field {name!r}.{hint}")
        names = modules_to_not_convert
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError(f"`modules_to_not_convert` must be a list of strings, got {names!r}.")
        self.quant_method = self._method
        self.modules_to_not_convert = names or []


class Int4Config(Int8Config):
    """
    Makes `from_pretrained` load 4-bit weights of linear layers. Both kinds of embeddings have 8 bits, and so do layers
    whose outputs are not a multiple of 16 or whose inputs are not a multiple of 32.

    Args:
        modules_to_not_convert: as in [`Int8Config`].

    Raises:
        ValueError: if it is not a list of strings.
    """

    _method = METHODS["int4"]


class _Inference(torch.autograd.Function):
    """A function without a gradient; the backward pass raises an error."""

    @staticmethod
    def forward(ctx, run, x, *arguments):
        return run(x, *arguments)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("Weights of 8 and 4 bits are for inference: no gradient passes through them.")


class IntegerLayer(nn.Module):
    """
    A layer whose weights are integers with scales.

    Attributes:
        weight: int8 or uint8, a parameter without gradient.
        weight_scale: a buffer, which keeps its dtype when the model is cast.
    """

    # From a weight in floating point to integers and scales.
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = staticmethod(quantize_rows)
    # Shape and dtype of the integers, then of the scales, of a weight (rows, width).
    stored: Callable[[int, int], tuple[Stored, Stored]] = staticmethod(int8_layout)

    def __init__(self, layer: nn.Linear | nn.Embedding, pre_quantized: bool, own_scale: bool = True):
        super().__init__()
        self.size = tuple(layer.weight.shape)
        (shape, dtype), (scale_shape, scale_dtype) = self.stored(*self.size)
        if not pre_quantized:  # the float weight is rounded later and then replaced
            shape, dtype = layer.weight.shape, layer.weight.dtype
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        scale = torch.empty(scale_shape, dtype=scale_dtype, device="meta")
        self.register_buffer(SCALE, scale, persistent=own_scale)

    def check_stored(self, tensors: Mapping[str, torch.Tensor | None], prefix: str) -> None:
        """
        Checks the integers and scales that are present, because C code reads their memory.

        Args:
            tensors: by the layer's own names, after a prefix.

        Raises:
            ValueError: with the tensor's name, and its actual and expected shape and dtype.
        """
        for name, (shape, dtype) in zip(("weight", SCALE), self.stored(*self.size), strict=True):
            if (x := tensors.get(prefix + name)) is not None:
                check_stored(prefix + name, x, shape, dtype)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        """As in torch, which would cast integers and scales, or accept anything with `assign=True`."""
        try:
            self.check_stored(state_dict, prefix)
            if SCALE in self._non_persistent_buffers_set and metadata.get("assign_to_params_buffers"):
                raise ValueError(
                    f"`{prefix}{SCALE}` belongs to the embeddings, which `assign=True` would leave behind."
                )
        except ValueError as error:
            errors.append(str(error))
        else:
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _apply(self, fn, recurse=True):
        """Moves and casts as other modules do; the scales keep their dtype."""
        moved = fn(torch.empty(0, dtype=torch.int8, device=self.weight.device))
        if moved.device.type not in ("cpu", "meta"):
            raise ValueError(f"{type(self).__name__} computes on a CPU only, and cannot be moved to {moved.device}.")
        scale = self.weight_scale
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != scale.dtype:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self


class Int8Linear(IntegerLayer):
    """A linear layer with 8-bit weights, see [`subquad_kernels.int8_linear`]."""

    product = staticmethod(int8_linear)

    def __init__(self, layer: nn.Linear, pre_quantized: bool, own_scale: bool = True):
        super().__init__(layer, pre_quantized, own_scale)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.wide = getattr(layer, "wide", False)  # as in [`Linear`]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = widen(x) if self.wide else x
        if torch.is_grad_enabled() and x.requires_grad:
            return _Inference.apply(self.product, x, self.weight, self.weight_scale, self.bias)
        return self.product(x, self.weight, self.weight_scale, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int4Linear(Int8Linear):
    """A linear layer with 4-bit weights, see [`subquad_kernels.int4_linear`]."""

    packed = True  # a byte of the weight has two numbers
    quantize = staticmethod(quantize_groups)
    stored = staticmethod(int4_layout)
    product = staticmethod(int4_linear)


LINEAR_WEIGHTS.update({layer: {"weight": "weight", "scale": SCALE} for layer in (Int8Linear, Int4Linear)})


class Int8Embedding(IntegerLayer):
    """Embeddings with 8-bit weights, and a scale for each token. The result has the dtype of the loaded model."""

    def __init__(self, layer: nn.Embedding, pre_quantized: bool, own_scale: bool = True):
        super().__init__(layer, pre_quantized, own_scale)
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        # Its dtype is the embeddings' dtype, even after the model is cast.
        self.register_buffer("of_dtype", layer.weight.new_empty(0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(ids, self.weight)
        return (rows * self.weight_scale[ids].unsqueeze(-1)).to(self.of_dtype.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def quantized_layers(config: "PreTrainedConfig", quantization: Int8Config) -> dict[str, type[IntegerLayer]]:
    """The names of a language model's integer weights, and the class of each layer."""
    from ..models import REGISTRY

    with torch.device("meta"):
        model = REGISTRY[config.model_type].lm_class(config)
        IntegerQuantizer(quantization)._process_model_before_weight_loading(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, IntegerLayer)}
    return {f"{name}.weight": type(module) for name, module in layers.items()}


def _make_quantize_op(quantizer: "IntegerQuantizer"):
    from transformers.core_model_loading import ConversionOps  # whose module imports the quantisers

    class Quantize(ConversionOps):
        """Rounds a weight of a checkpoint to integers and scales."""

        def convert(
            self, input_dict: dict[str, Any], full_layer_name: str, model: "PreTrainedModel", **kwargs
        ) -> dict[str, torch.Tensor]:
            (weight,) = input_dict.values()
            weight = weight[0] if isinstance(weight, list) else weight
            layer, _ = get_module_from_name(model, full_layer_name)
            integers, scale = layer.quantize(weight)
            if not scale.isfinite().all():
                quantizer.not_finite.append(full_layer_name)  # transformers would only log an error
            return {full_layer_name: integers, full_layer_name.removesuffix("weight") + SCALE: scale}

    return Quantize()


class IntegerQuantizer(HfQuantizer):
    """Loads a model with weights of 8 or 4 bits, from a floating-point or a quantised checkpoint."""

    quantization_config: Int8Config

    def __init__(self, quantization_config: Int8Config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self.method: str = quantization_config.quant_method
        self.not_finite: list[str] = []

    def validate_environment(self, *args, device_map: Any = None, **kwargs) -> None:
        """
        Raises:
            ValueError: if any part of the model would not be on the CPU.
        """
        places = device_map.values() if isinstance(device_map, dict) else [] if device_map is None else [device_map]
        for place in places:
            if str(place) not in ("cpu", "auto") or (str(place) == "auto" and torch.accelerator.is_available()):
                raise ValueError(
                    f"`device_map` must be left out or 'cpu', got {place!r}: products of {self.method} are computed "
                    "on a CPU, and its weights stay in memory. On a GPU, torchao and bitsandbytes have such methods."
                )

    def _process_model_before_weight_loading(self, model: "PreTrainedModel", **kwargs) -> None:
        from ..models import REGISTRY

        architecture = REGISTRY.get(model.config.model_type)
        if architecture is None:
            raise ValueError(f"`quantization_config`: {self.method} is for models of this package, not {type(model)}.")
        head = model.get_output_embeddings()
        tied_head = head if model.all_tied_weights_keys else None
        four = isinstance(self.quantization_config, Int4Config)
        for name, module in self._chosen(model, set(architecture.float_layers)).items():
            if isinstance(module, nn.Embedding):
                layer = Int8Embedding
            else:
                layer = Int4Linear if four and module is not head and fits_groups(*module.weight.shape) else Int8Linear
            model.set_submodule(name, layer(module, self.pre_quantized, own_scale=module is not tied_head))

    def _chosen(self, model: "PreTrainedModel", float_layers: set[str]) -> dict[str, nn.Module]:
        """The layers to convert, by their names: linear layers and embeddings of the body, and the head."""
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        for excluded in () if self.pre_quantized else self.quantization_config.modules_to_not_convert:
            if all(self._may_convert(model, name, [excluded]) for name, _ in model.named_modules()):
                hint = nearest(excluded, {name.rpartition(".")[2] for name, _ in model.named_modules()} - {""})
                raise ValueError(f"`modules_to_not_convert`: {type(model).__name__} has no layer {excluded!r}.{hint}")
        body = set(model.base_model.modules())
        chosen = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | nn.Embedding) and (module in body or module is head)
            if not float_layers & set(name.split("."))
            if self._may_convert(model, name, self.quantization_config.modules_to_not_convert)
        }
        tied = {name: module for name, module in model.named_modules() if module in (head, embeddings)}
        if model.all_tied_weights_keys and not tied.keys() <= chosen.keys():
            # In the configuration, so that a model without the head finds them in floating point too.
            self.quantization_config.modules_to_not_convert += [name for name in tied if name in chosen]
            chosen = {name: module for name, module in chosen.items() if name not in tied}
        return chosen

    def _may_convert(self, model: "PreTrainedModel", name: str, excluded: list[str]) -> bool:
        """Whether a layer may be converted. `excluded` may be of the model with or without a head."""
        prefix = model.base_model_prefix + "."
        names = (name, prefix + name) if model.base_model is model else (name, name.removeprefix(prefix))
        return all(should_convert_module(each, excluded) for each in names)

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **kwargs) -> None:
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        if isinstance(head, Int8Linear) and SCALE in head._non_persistent_buffers_set:
            if head.weight is not embeddings.weight:
                raise ValueError(
                    "`tie_word_embeddings` is set, but the checkpoint has a head that differs from the embeddings: "
                    f"{self.method} needs `tie_word_embeddings=False` for it."
                )
            head.weight_scale = embeddings.weight_scale

        # Code in a repository cannot compute with these weights, so saved files must not name it.
        model.config.__dict__.pop("auto_map", None)
        for name, module in model.named_modules():
            if isinstance(module, IntegerLayer) and hasattr(module.weight, "device_mesh"):
                raise ValueError(f"{name}: {self.method} does not split weights between processes.")

    def check_files(self, model: "PreTrainedModel", files: Iterable[str | os.PathLike]) -> None:
        """
        Args:
            model: a model on the meta device.
            files: its weight files, in safetensors.

        Raises:
            ValueError: if integers in such a checkpoint are stored as floating point, which transformers would
                truncate.
        """
        headers, prefix = read_headers(files) if self.pre_quantized else {}, f"{model.base_model_prefix}."
        for name, module in model.named_modules():
            for stored in {name, prefix + name, name.removeprefix(prefix)} if isinstance(module, IntegerLayer) else ():
                _, dtype = headers.get(f"{stored}.weight", ((), ""))
                if dtype in FLOATING:
                    where = model.config.name_or_path
                    raise ValueError(f"{where}: {stored}.weight must hold the integers of {self.method}, got {dtype}.")

    def check_loaded(self, model: "PreTrainedModel", missing: set[str]) -> None:
        """
        Raises:
            ValueError: if weights to be loaded as integers are missing (they cannot be initialised), not finite, or of
                the wrong dtype or shape.
        """
        path = model.config.name_or_path
        if self.not_finite:
            raise ValueError(
                f"{path}: {self.not_finite[0]} holds NaN or infinite numbers, which {self.method} cannot."
            )
        for name in sorted(missing - model.all_tied_weights_keys.keys()):
            module, part = get_module_from_name(model, name)
            if isinstance(module, IntegerLayer) and part in ("weight", SCALE):
                raise ValueError(
                    f"{path}: {name} of {type(model).__name__} is not in the checkpoint, and {self.method} cannot "
                    "initialise it."
                )
        for name, module in model.named_modules():
            if isinstance(module, IntegerLayer):
                loaded = {f"{name}.weight": module.weight, f"{name}.{SCALE}": module.weight_scale}
                # A tied head gets the embeddings' tensors later.
                module.check_stored({part: x for part, x in loaded.items() if not x.is_meta}, f"{name}.")

    def param_needs_quantization(self, model: "PreTrainedModel", param_name: str, **kwargs) -> bool:
        module, name = get_module_from_name(model, param_name)
        return not self.pre_quantized and isinstance(module, IntegerLayer) and name == "weight"

    def get_quantize_ops(self):
        return _make_quantize_op(self)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


__all__ = ["Int4Config", "Int4Linear", "Int8Config", "Int8Embedding", "Int8Linear", "IntegerQuantizer"]
