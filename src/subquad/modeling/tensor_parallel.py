"""
Additions to transformers' tensor parallelism: plans that split heads, and access to the local part of parameters
outside linear layers. A process with some of the heads has only their parameters and states.
"""

from collections.abc import Callable, Iterable

import torch
from transformers import PreTrainedConfig

from subquad_kernels import low_rank, matmul


def divides_heads(config: PreTrainedConfig, *heads: int) -> bool:
    """Whether the heads divide evenly among the processes that load the model."""
    processes = getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1
    return not any(number % processes for number in heads)


def plan_property(plan: Callable[[PreTrainedConfig], dict[str, str]]) -> property:
    """A configuration's `base_model_tp_plan`: the result of `plan`, updated by values assigned to the property."""
    name = "base_model_tp_plan"  # transformers leaves the attribute of this name out of saved configurations

    def read(config: PreTrainedConfig) -> dict[str, str]:
        return {**plan(config), **config.__dict__.get(name, {})}

    def assign(config: PreTrainedConfig, given: dict[str, str]) -> None:
        own = plan(config)
        changed = {key: style for key, style in given.items() if own.get(key) != style}
        # Before 5.21, transformers adds this layer to the plans of tied models. No architecture has such a layer.
        changed.pop("embed_tokens", None)
        config.__dict__[name] = changed

    return property(read, assign, doc=plan.__doc__)


def plan_heads(
    module: str, into: Iterable[str], output: str, parameters: dict[str, str], split: bool
) -> dict[str, str]:
    """
    The plan of a module that works on heads.

    Args:
        module: its name.
        into: names, within the module, of the linear layers whose outputs are the heads.
        output: name of the linear layer that reads all heads.
        parameters: names of other parameters of the heads, with their styles. For a parameter outside linear layers,
            "rowwise" splits the last axis; "colwise" splits the axis before it, or the only one.
        split: whether each process has heads of its own. If not, only the linear layers are split, and every process
            gets their whole output.
    """
    styles = ("colwise", "rowwise") if split else ("colwise_gather_output", "rowwise_split_input")
    plan = {**dict.fromkeys(into, styles[0]), output: styles[1], **(parameters if split else {})}
    return {f"{module}.{name}": style for name, style in plan.items()}


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that this process has; all of it if it is not split."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def low_rank_of_heads(
    x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, *args, base: torch.Tensor | None = None, **kwargs
) -> torch.Tensor:
    """[`subquad_kernels.low_rank`]; if `up` and `base` are split by columns, only the columns of this process."""
    base = None if base is None else local_part(base)
    return low_rank(x, down, up, *args, base=base, multiply=times_own_columns, **kwargs)


def times_own_columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight; if the weight is split by columns, only the columns of the product that this process has."""
    if not hasattr(weight, "to_local"):
        return matmul(x, weight)
    from torch.distributed.tensor import DTensor, Partial, Replicate

    # Every process has all of x, but its columns give only a part of the gradient of x: these parts must be summed.
    x = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
    return matmul(x.to_local(grad_placements=[Partial()]), weight.to_local())
