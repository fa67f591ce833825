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

from ..hub.foreign_files import TIME_STATE, listed, reading
from ..hub.new_files import replacing
from ..hub.weight_files import check_finite, is_dense, open_pytorch, open_weights
from ..training.state_tuning import StateTuningLayer


WEB = ".st"  # the suffix of web-rwkv's files
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
        path: a `.pth` file of RWKV-LM or RWKV-PEFT, read without running code, the same as `.safetensors`, or an
            `.st` file of web-rwkv and Ai00.

    Raises:
        ValueError: if the file is not readable, or its states do not fit the model. The model is unchanged then.
    """
    layers, states = _layers_of(model), _read(Path(path))
    if states.keys() != layers.keys():
        raise ValueError(
            f"{path} holds states of {_numbers(states)}, and the model has the layers {_numbers(layers)} to be tuned."
        )
    new = {}
    for index, layer in layers.items():
        state, parameter = states[index], _parameter(layer)
        if len(state.shape) != 3 or (state.mT if _transposed(layer, path) else state).shape != layer.shape:
            shape, wanted = tuple(state.shape), tuple(layer.shape)
            raise ValueError(f"{path}: the state of layer {index} is {shape}, the model's is {wanted}.")
        state = (state.double() / layer.tunable.scale).to(parameter.dtype)
        check_finite(f"{path}: the state of layer {index}", state)
        new[parameter] = (state.mT if _transposed(layer, path) else state).to(parameter.device)
    with torch.no_grad():
        for parameter, state in new.items():
            parameter.copy_(state)


def save_time_states(model: nn.Module, path: str | os.PathLike) -> None:
    """
    Writes the initial states of the active adapter of a model, in float32, or in float16 for web-rwkv and Ai00.

    Args:
        model: a model with the adapter of [`StateTuningConfig`].
        path: a `.pth` or `.safetensors` file, or an `.st` file for web-rwkv and Ai00.

    Raises:
        ValueError: if `path` ends otherwise, or float16 cannot represent a state.
        OSError: if the file cannot be written.
    """
    suffix = Path(path).suffix
    if suffix not in (".pth", *SAFETENSORS):
        raise ValueError(f"`path` must end with .pth or {' or '.join(SAFETENSORS)}, got {os.fspath(path)!r}.")
    states = {}
    for index, layer in _layers_of(model).items():
        state = _parameter(layer).detach().cpu().float() * layer.tunable.scale
        if suffix == WEB and not (state := state.half()).isfinite().all():
            raise ValueError(f"{path}: the state of layer {index} has numbers that float16 cannot represent.")
        states[f"blocks.{index}.att.time_state"] = (state.mT if _transposed(layer, path) else state).contiguous()
    with replacing(path) as temporary:
        (save_file if suffix in SAFETENSORS else torch.save)(states, temporary)


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
        with open_weights(path) as file, reading(path):
            content = {name: file.get_tensor(name) for name in file.keys() if TIME_STATE.fullmatch(name)}
    else:
        content = open_pytorch(path)
    states = {}
    for name, tensor in content.items():
        if not (match := TIME_STATE.fullmatch(str(name))):
            continue
        if not isinstance(tensor, torch.Tensor) or not is_dense(tensor) or not tensor.is_floating_point():
            raise ValueError(f"{path}: {name} is not a tensor of floating point numbers.")
        if (index := int(match[1])) in states:
            raise ValueError(f"{path} has two states of layer {index}.")
        states[index] = tensor
    if not states:
        raise ValueError(f"{path} holds no tensor with a name like blocks.0.att.time_state.")
    return states


def _numbers(layers: Iterable[int]) -> str:
    return listed([str(layer) for layer in sorted(layers)])


__all__ = ["load_time_states", "save_time_states"]
