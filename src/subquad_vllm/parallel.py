"""
A model's own modules with vLLM's linear layers, which can be split, quantised and adapted. The tensor parallel plan of
the configuration, which transformers reads too, says how they are split.
"""

import re
from functools import partial

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


# Style of a linear layer in a plan to vLLM's layer and its options.
LINEAR = {
    "colwise": (ColumnParallelLinear, {}),
    "rowwise": (RowParallelLinear, {}),
    "colwise_gather_output": (ColumnParallelLinear, {"gather_output": True}),
    "rowwise_split_input": (RowParallelLinear, {"input_is_parallel": False}),
    None: (ReplicatedLinear, {}),
}


def style_of(name: str, plan: dict[str, str]) -> str | None:
    """The style of a module or parameter in a plan, in whose names * stands for a number; None if it has none."""
    return plan.get(name) or plan.get(re.sub(r"\.\d+\.", ".*.", name))


def use_vllm_layers(
    model: nn.Module, plan: dict[str, str], quant_config: QuantizationConfig | None, prefix: str, device: torch.device
) -> None:
    """
    Replaces the linear layers and embeddings of a model on the meta device by vLLM's, in place, and gives the other
    parameters memory: that of this process's part.

    Args:
        model: the model.
        plan: names of modules and parameters in it, with the styles of transformers' tensor parallel plans.
        quant_config: how vLLM quantises the linear layers.
        prefix: what comes before the model's names in checkpoints.
        device: where the parameters are.
    """
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
                quant_config=quant_config,
                prefix=f"{prefix}.{name}",
                return_bias=False,
                **options,
            )
        else:
            continue
        model.set_submodule(name, new)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, last = name.rpartition(".")
            dim = split_dim(parameter, style_of(name, plan))
            model.get_submodule(owner).register_parameter(last, own_part(parameter, dim, device))


def split_dim(parameter: nn.Parameter, style: str | None) -> int | None:
    """The axis along which a parameter outside linear layers is split; see [`subquad.tensor_parallel.plan_heads`]."""
    if style not in ("colwise", "rowwise"):
        return None
    return -1 if style == "rowwise" or parameter.dim() == 1 else -2


def own_part(parameter: nn.Parameter, dim: int | None, device: torch.device) -> nn.Parameter:
    """A parameter without values, of which this process has a part, and which is loaded from the whole."""
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
