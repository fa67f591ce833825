"""
A model's own modules with vLLM's linear layers, which can be split, quantised and adapted. They are split by the
tensor parallel plan of the configuration, which transformers also reads.
"""

import re
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.utils.torch_utils import direct_register_custom_op

from subquad.modeling.layers import multiply_wide


# Style of a linear layer in a plan to vLLM's layer and its options.
LINEAR = {
    "colwise": (ColumnParallelLinear, {}),
    "rowwise": (RowParallelLinear, {}),
    "colwise_gather_output": (ColumnParallelLinear, {"gather_output": True}),
    "rowwise_split_input": (RowParallelLinear, {"input_is_parallel": False}),
    None: (ReplicatedLinear, {}),
}


def style_of(name: str, plan: dict[str, str]) -> str | None:
    """The style of a module or parameter in a plan, where * in names stands for a number; None if it has none."""
    return plan.get(name) or plan.get(re.sub(r"\.\d+\.", ".*.", name))


class RoundedRowsMethod(UnquantizedLinearMethod):
    """
    The product of a linear layer on a CPU, for one of a few numbers of rows. oneDNN compiles and keeps code for each
    of them, so otherwise memory would grow with every new number of tokens in a step.

    Args:
        name: name of the layer for vLLM when a compiled step runs.
        outputs: number of its outputs in this process.
    """

    def __init__(self, name: str, outputs: int):
        super().__init__()
        self.name, self.outputs = name, outputs

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.vllm.subquad_linear(x, bias, self.outputs, self.name)
        return multiply_rounded(layer, x, bias)


def multiply_rounded(layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (..., in) to (..., out), padded with rows of zeros."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if size := round_up(count) - count:
        rows = F.pad(rows, (0, 0, 0, size))
    return layer.cpu_linear(rows, layer.weight, bias)[:count].view(*x.shape[:-1], -1)


def apply_to_rows(
    apply: Callable[..., torch.Tensor], layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A quantised product of x (..., in), by a method of vLLM that may only accept (rows, in), as on CPUs with AMX."""
    return apply(layer, x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1)


def apply_wide(
    apply: Callable[..., torch.Tensor], layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A product as in a wide `Linear` of `subquad` in float16, by a method of vLLM. No such layer has a bias."""
    return multiply_wide(partial(apply, layer), x)


def round_up(count: int) -> int:
    """The next of 1, ..., 16, then of eight numbers between powers of two."""
    step = max(1, (1 << (count - 1).bit_length()) // 16)
    return -(-count // step) * step


def multiply_in_graph(x: torch.Tensor, bias: torch.Tensor | None, outputs: int, name: str) -> torch.Tensor:
    """As [`multiply_rounded`], for the layer of this name with that many outputs."""
    return multiply_rounded(get_forward_context().no_compile_layers[name], x, bias).contiguous()


direct_register_custom_op(
    "subquad_linear", multiply_in_graph, fake_impl=lambda x, bias, outputs, name: x.new_empty(*x.shape[:-1], outputs)
)


def use_vllm_layers(model: nn.Module, plan: dict[str, str], vllm_config: VllmConfig, prefix: str) -> None:
    """
    Replaces the linear layers and embeddings of a model on the meta device by vLLM's, in place, and allocates this
    process's part of the other parameters.

    Args:
        model: the model.
        plan: names of modules and parameters in it, with the styles of transformers' tensor parallel plans.
        vllm_config: vLLM's settings.
        prefix: prefix of the model's names in checkpoints.
    """
    device = vllm_config.device_config.device
    layers = vllm_config.compilation_config.static_forward_context
    for name, module in list(model.named_modules()):
        if type(module) is nn.Embedding:
            options = {"params_dtype": module.weight.dtype, "prefix": f"{prefix}.{name}"}
            new = VocabParallelEmbedding(module.num_embeddings, module.embedding_dim, **options)
        elif isinstance(module, nn.Linear):
            layer, options = LINEAR[style_of(name, plan)]
            new = layer(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                params_dtype=module.weight.dtype,
                quant_config=vllm_config.quant_config,
                prefix=f"{prefix}.{name}",
                return_bias=False,
                **options,
            )
            if not isinstance(new.quant_method, UnquantizedLinearMethod):
                new.quant_method.apply = partial(apply_to_rows, new.quant_method.apply)
            else:
                if device.type == "cpu" and type(new.quant_method) is UnquantizedLinearMethod:
                    layers[new.prefix] = new
                    outputs = getattr(new, "output_size_per_partition", new.output_size)
                    new.quant_method = RoundedRowsMethod(new.prefix, outputs)
                if getattr(module, "wide", False) and module.weight.dtype == torch.float16:
                    new.quant_method.apply = partial(apply_wide, new.quant_method.apply)
        else:
            continue
        model.set_submodule(name, new)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, last = name.rpartition(".")
            dim = split_dim(parameter, style_of(name, plan))
            model.get_submodule(owner).register_parameter(last, own_part(parameter, dim, device))


def split_dim(parameter: nn.Parameter, style: str | None) -> int | None:
    """The axis along which a parameter outside linear layers is split, by the styles of `plan_heads`."""
    if style not in ("colwise", "rowwise"):
        return None
    return -1 if style == "rowwise" or parameter.dim() == 1 else -2


def own_part(parameter: nn.Parameter, dim: int | None, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter for this process's part, to be loaded from the whole tensor."""
    shape = list(parameter.shape)
    if dim is not None:
        shape[dim] //= get_tensor_model_parallel_world_size()
    part = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=device), requires_grad=False)
    part.weight_loader = partial(load_part, dim=dim)
    return part


def load_part(parameter: nn.Parameter, loaded: torch.Tensor, dim: int | None) -> None:
    """Loads a parameter from a checkpoint's tensor."""
    if dim is not None:
        size = parameter.shape[dim]
        loaded = loaded.narrow(dim, get_tensor_model_parallel_rank() * size, size)
    if parameter.shape != loaded.shape:
        raise ValueError(f"A tensor of shape {tuple(loaded.shape)} does not fit into {tuple(parameter.shape)}.")
    parameter.data.copy_(loaded)
