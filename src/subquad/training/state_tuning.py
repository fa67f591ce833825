"""
State tuning: trains the initial state of a recurrent model, and nothing else.

    from peft import get_peft_model
    from subquad import StateTuningConfig

    model = get_peft_model(model, StateTuningConfig(task_type="CAUSAL_LM"))

It is an adapter like any other of PEFT: train, `save_pretrained`, `PeftModel.from_pretrained`, `set_adapter`,
`disable_adapter`. It costs nothing at inference, neither time nor tokens.
"""

import dataclasses
import functools
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn

from ..modeling.layer_state import LayerState, States
from ..modeling.padding import Tokens
from ..modeling.positions import TokenPositions
from ..models import REGISTRY
from ..models.architecture import TunableState


PREFIX = "state_tuning_"
_NO_MERGING = "A trained initial state cannot be merged: the model does not have a weight for it."
# Class name of a recurrence to its state.
TUNABLE: dict[str, TunableState] = {
    architecture.tunable_state.module: architecture.tunable_state
    for architecture in REGISTRY.values()
    if architecture.tunable_state is not None
}


class PeftType(str, Enum):
    """Like an entry of PEFT's own enumeration, which cannot be extended."""

    STATE_TUNING = "STATE_TUNING"


@dataclass
class StateTuningConfig(PeftConfig):
    """
    Configuration of a trained initial state.

    Args:
        target_modules: names of the recurrences whose initial state is trained, or a regular expression that matches
            them; if None, every recurrence of the model.
        exclude_modules: names of recurrences to leave out, or a regular expression.
        modules_to_save: other modules to train and save too, such as the head of a classifier.
    """

    target_modules: list[str] | str | None = field(default=None)
    exclude_modules: list[str] | str | None = field(default=None)
    modules_to_save: list[str] | None = field(default=None)

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = PeftType.STATE_TUNING


class TunedTokens(Tokens):
    """Tokens whose documents begin with the state `initial` (...) instead of zeros."""

    _fields = (*Tokens._fields, "initial")

    def __init__(self, tokens: Tokens, initial: torch.Tensor):
        tokens._copy_to(self)
        self.initial = initial

    def entering_states(self, state: torch.Tensor | None) -> torch.Tensor:
        if self.cu_seqlens is None:
            return self.initial.expand(self.batch, *self.initial.shape) if state is None else state
        entering = self.initial.repeat(self.cu_seqlens.shape[0] - 1, *[1] * self.initial.dim())
        if state is not None:
            entering[self.first] = state
        return entering


def _replay_from(initial: torch.Tensor, replay, before: States, *updates: torch.Tensor) -> States:
    """Rebuilds states from the trained initial state if the text begins with the recorded tokens."""
    rows = len(updates[0])
    before = {k: initial.expand(rows, *initial.shape) if x is None else x for k, x in before.items()}
    return replay(before, *updates)


class StateTuningLayer(nn.Module, BaseTunerLayer):
    """
    A recurrence with a trained initial state: the parameter times the scale, so that the usual learning rates of
    adapters fit.
    """

    adapter_layer_names = (f"{PREFIX}states",)

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: StateTuningConfig, shape: tuple[int, ...]):
        super().__init__()
        self.base_layer = base_layer
        self.shape, self.tunable = shape, TUNABLE[type(base_layer).__name__]
        self.state_tuning_states = nn.ParameterDict()
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: StateTuningConfig) -> None:
        """Adds an initial state of zeros. Texts begin with zeros anyway, so training starts from the same model."""
        initial = torch.zeros(self.shape)
        device = next(self.base_layer.parameters()).device
        if device.type != "meta":  # the device of offloaded weights
            initial = initial.to(device)
        self.state_tuning_states[adapter_name] = nn.Parameter(initial)
        self.set_adapter(adapter_name, inference_mode=config.inference_mode)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        if not isinstance(adapter_names, str) and len(adapter_names) > 1:
            raise ValueError(f"A text begins with one state: adapters {adapter_names} cannot be active together.")
        super().set_adapter(adapter_names, inference_mode=inference_mode)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(_NO_MERGING)

    def forward(self, x: torch.Tensor, tokens: Tokens | TokenPositions, *cache_and_state):
        """Takes the arguments of the recurrence. Its state, a [`LayerState`] if there is a cache, is the last one."""
        adapters = [] if self.disable_adapters else self.active_adapters
        if not adapters or adapters[0] not in self.state_tuning_states:
            return self.base_layer(x, tokens, *cache_and_state)
        initial = self.state_tuning_states[adapters[0]]
        initial = initial.to(torch.promote_types(initial.dtype, torch.float32)) * self.tunable.scale
        if isinstance(tokens, TokenPositions):
            tokens = dataclasses.replace(tokens, tokens=TunedTokens(tokens.tokens, initial))
        else:
            tokens = TunedTokens(tokens, initial)
        state, name = cache_and_state[-1] if cache_and_state else None, self.tunable.name
        if not isinstance(state, LayerState):  # there is no cache
            return self.base_layer(x, tokens, *cache_and_state)
        held = None if state.fresh else state.get(name)
        if held is not None and state.fresh_rows is None:
            return self.base_layer(x, tokens, *cache_and_state)
        # Texts begin with this call. A copy, because operators may overwrite the cache's tensors.
        rows = initial.expand(len(x), *initial.shape)
        if held is not None:
            begins = state.fresh_rows.to(held.device).view(-1, *[1] * initial.dim())
            rows = torch.where(begins, rows, held)
        state.write(name, rows.clone(memory_format=torch.contiguous_format))
        out = self.base_layer(x, tokens, *cache_and_state)
        if (record := state.records.get(name)) is not None:
            # If all tokens are removed, no state is left, and the next text may have another initial state.
            record.before[name] = None
            record.replay = functools.partial(_replay_from, initial, record.replay)
        return out


class StateTuningModel(BaseTuner):
    """The model of [`StateTuningConfig`], which `get_peft_model` creates."""

    prefix = PREFIX
    tuner_layer_cls = StateTuningLayer
    target_module_mapping = {}

    def _prepare_adapter_config(self, peft_config: StateTuningConfig, model_config: dict) -> StateTuningConfig:
        return peft_config

    def _prepare_model(self, peft_config: StateTuningConfig, model: nn.Module) -> None:
        names = [name for name, module in model.named_modules() if type(module).__name__ in TUNABLE]
        if not names:
            raise ValueError(f"State tuning: {type(model).__name__} does not have a state that can be trained.")
        if (getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1) > 1:
            raise ValueError("State tuning: a model whose heads are split over several processes cannot be tuned.")
        if peft_config.target_modules is None:
            # Names that also match the model without a head or with another one, and layers already wrapped.
            prefix = f"{getattr(model, 'base_model_prefix', '')}."
            peft_config.target_modules = [name.removeprefix(prefix).removesuffix(".base_layer") for name in names]

    def _create_and_replace(
        self,
        peft_config: StateTuningConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
    ) -> None:
        if isinstance(target, StateTuningLayer):
            target.update_layer(adapter_name, peft_config)
            return
        tunable = TUNABLE.get(type(target).__name__)
        if tunable is None:
            raise ValueError(
                f"`target_modules`: {current_key} is a {type(target).__name__}, without a state to train."
            )
        shape = tunable.shape(self.model.config.get_text_config())
        layer = StateTuningLayer(target, adapter_name, peft_config, shape)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        setattr(parent, child_name, new_module)  # PEFT's own method looks for a `weight`

    @contextmanager
    def _enable_peft_forward_hooks(self, *args, **kwargs):
        if kwargs.get("adapter_names") is not None:
            raise ValueError("`adapter_names`: all texts of a batch begin with the state of one adapter.")
        yield

    def _check_merge_allowed(self) -> None:
        raise ValueError(_NO_MERGING)


# Not through `register_peft_method`, which only accepts PEFT's own names.
PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.STATE_TUNING] = StateTuningConfig
PEFT_TYPE_TO_TUNER_MAPPING[PeftType.STATE_TUNING] = StateTuningModel
PEFT_TYPE_TO_PREFIX_MAPPING[PeftType.STATE_TUNING] = PREFIX
