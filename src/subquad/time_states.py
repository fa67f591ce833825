"""
Tuned initial states in the files that RWKV's trainers and runtimes exchange: `blocks.0.att.time_state` and so on, one
tensor (heads, value channel, key channel) for each layer, alone or among the weights of a model. The `.st` files of
web-rwkv and Ai00 hold the transpose, (heads, key channel, value channel), in float16.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from .foreign_files import TIME_STATE, check_file, listed, one_line
from .state_tuning import StateTuningLayer
from .weight_files import open_weights


WEB = ".st"  # how the names of web-rwkv's files end
SAFETENSORS = (".safetensors", WEB)


def load_time_states(model: nn.Module, path: str | os.PathLike) -> None:
    """
    Reads initial states into the active adapter of a model.

    ```python
    model = get_peft_model(model, StateTuningConfig(task_type="CAUSAL_LM"))
    load_time_states(model, "rwkv7-g1-english-chinese.pth")
    ```

    Args:
        model: a model with the adapter of [`StateTuningConfig`].
        path: a `.pth` file of RWKV-LM or RWKV-PEFT, of which only tensors are read, the same as `.safetensors`, or an
            `.st` file of web-rwkv and Ai00.

    Raises:
        ValueError: if the file is not readable, or its states are not those of the model. Nothing has changed then.
    """
    layers, states = _layers_of(model), _read(Path(path))
    if states.keys() != layers.keys():
        raise ValueError(
            f"{path} holds states of {_numbers(states)}, and the model has the layers {_numbers(layers)} to be tuned."
        )
    new = {}
    for index, layer in layers.items():
        new[index] = states[index].mT if _transposed(layer, path) else states[index]
        if tuple(new[index].shape) != tuple(layer.shape):
            shape, wanted = tuple(states[index].shape), tuple(layer.shape)
            raise ValueError(f"{path}: the state of layer {index} is {shape}, the model's is {wanted}.")
    for index, layer in layers.items():
        parameter = _parameter(layer)
        with torch.no_grad():
            parameter.copy_(new[index].to(parameter.device, torch.float64) / layer.tunable.scale)


def save_time_states(model: nn.Module, path: str | os.PathLike) -> None:
    """
    Writes the initial states of the active adapter of a model, in float32, or in float16 for web-rwkv and Ai00.

    Args:
        model: a model with the adapter of [`StateTuningConfig`].
        path: a `.pth` or `.safetensors` file, or an `.st` file for web-rwkv and Ai00.

    Raises:
        ValueError: if float16 cannot represent a state.
    """
    suffix = Path(path).suffix
    states = {}
    for index, layer in _layers_of(model).items():
        state = _parameter(layer).detach().cpu().float() * layer.tunable.scale
        if suffix == WEB and not (state := state.half()).isfinite().all():
            raise ValueError(f"{path}: the state of layer {index} has numbers that float16 cannot represent.")
        states[f"blocks.{index}.att.time_state"] = (state.mT if _transposed(layer, path) else state).contiguous()
    temporary = Path(f"{os.fspath(path)}.incomplete")
    try:
        if suffix in SAFETENSORS:
            save_file(states, temporary)
        else:
            torch.save(states, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _layers_of(model: nn.Module) -> dict[int, StateTuningLayer]:
    """The recurrences with an initial state, by the number of their layer."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, StateTuningLayer):
            if module.tunable.transposed is None:
                raise ValueError(f"{name}: there are no files of `time_state` for this architecture.")
            found[int(re.search(r"\.(\d+)\.", name)[1])] = module
    if not found:
        raise ValueError(f"`model` is a {type(model).__name__} without the adapter of `StateTuningConfig`.")
    return found


def _transposed(layer: StateTuningLayer, path: str | os.PathLike) -> bool:
    """Whether a file holds the transpose of a layer's state."""
    return layer.tunable.transposed != (Path(path).suffix == WEB)


def _parameter(layer: StateTuningLayer) -> nn.Parameter:
    return layer.state_tuning_states[layer.active_adapters[0]]


def _read(path: Path) -> dict[int, torch.Tensor]:
    if path.suffix in SAFETENSORS:
        with open_weights(path) as file:
            content = {name: file.get_tensor(name) for name in file.keys() if TIME_STATE.fullmatch(name)}
    else:
        check_file(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(f"{path} is not a PyTorch file, or is damaged: {one_line(error).rstrip('.')}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary of tensors, found a {type(content).__name__}.")
    states = {}
    for name, tensor in content.items():
        if (match := TIME_STATE.fullmatch(str(name))) and isinstance(tensor, torch.Tensor):
            states[int(match[1])] = tensor
    if not states:
        raise ValueError(f"{path} holds no tensor with a name like blocks.0.att.time_state.")
    return states


def _numbers(layers: Iterable[int]) -> str:
    return listed([str(layer) for layer in sorted(layers)])


__all__ = ["load_time_states", "save_time_states"]
