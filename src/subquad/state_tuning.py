"""
State tuning: what a recurrent model has in its state when a text begins is trained, and nothing else.

    from peft import get_peft_model
    from subquad import StateTuningConfig

    model = get_peft_model(model, StateTuningConfig(task_type="CAUSAL_LM"))

An adapter as any other of PEFT: train, `save_pretrained`, `PeftModel.from_pretrained`, `set_adapter`,
`disable_adapter`. It costs nothing at inference, in time or in the length of the text.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn

from .padding import Call, Tokens


PREFIX = "state_tuning_"
_NO_MERGING = "A trained initial state cannot be merged: the weights of the model have no place for it."


class PeftType(str, Enum):
    """As an entry of PEFT's own, which has no place for others."""

    STATE_TUNING = "STATE_TUNING"


@dataclass
class StateTuningConfig(PeftConfig):
    """
    Configuration of a trained initial state.

    Args:
        target_modules: names of the recurrences whose initial state is trained, or a regular expression that matches
            them; every recurrence of the model where None.
        exclude_modules: names, or a regular expression, of those that are not.
        modules_to_save: other modules to train and save along, such as the head of a classifier.
    """

    target_modules: list[str] | str | None = field(default=None)
    exclude_modules: list[str] | str | None = field(default=None)
    modules_to_save: list[str] | None = field(default=None)

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = PeftType.STATE_TUNING


class StateTuningLayer(nn.Module, BaseTunerLayer):
    """
    A recurrence (a module with `state_name`, `state_shape` and `state_scale`) of which every text begins with a
    trained state: the parameter times the scale, so that learning rates that are usual for adapters suit it.
    """

    adapter_layer_names = (f"{PREFIX}states",)

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: StateTuningConfig):
        super().__init__()
        self.base_layer = base_layer
        self.state_tuning_states = nn.ParameterDict()
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: StateTuningConfig) -> None:
        """Adds an initial state of zeros, which is what a text begins with anyway: training starts at the model."""
        initial = torch.zeros(self.base_layer.state_shape)
        device = next(self.base_layer.parameters()).device
        if device.type != "meta":  # where the weights are when they are not offloaded
            initial = initial.to(device)
        self.state_tuning_states[adapter_name] = nn.Parameter(initial)
        self.set_adapter(adapter_name, inference_mode=config.inference_mode)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        if not isinstance(adapter_names, str) and len(adapter_names) > 1:
            raise ValueError(f"A text begins with one state: adapters {adapter_names} cannot be active together.")
        super().set_adapter(adapter_names, inference_mode=inference_mode)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(_NO_MERGING)

    def forward(self, x: torch.Tensor, tokens: Tokens | Call, *cache_and_state):
        """As the recurrence is called: its state, a [`~subquad.cache.RecurrentLayer`] or None, comes last."""
        state = cache_and_state[-1] if cache_and_state else None
        adapters = [] if self.disable_adapters else self.active_adapters
        if adapters and adapters[0] in self.state_tuning_states:
            initial = self.state_tuning_states[adapters[0]]
            initial = initial.to(torch.promote_types(initial.dtype, torch.float32)) * self.base_layer.state_scale
            tokens = tokens.beginning_with(initial)
            if state is not None:  # so that it can be rolled back to where the text began
                state.begin(self.base_layer.state_name, initial.expand(len(x), *initial.shape))
        return self.base_layer(x, tokens, *cache_and_state)


class StateTuningModel(BaseTuner):
    """The model of [`StateTuningConfig`], which `get_peft_model` makes."""

    prefix = PREFIX
    tuner_layer_cls = StateTuningLayer
    target_module_mapping = {}

    def _prepare_adapter_config(self, peft_config: StateTuningConfig, model_config: dict) -> StateTuningConfig:
        return peft_config

    def _prepare_model(self, peft_config: StateTuningConfig, model: nn.Module) -> None:
        names = [name for name, module in model.named_modules() if hasattr(module, "state_shape")]
        if not names:
            raise ValueError(f"State tuning: {type(model).__name__} has no state of the kind that can be trained.")
        if (getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1) > 1:
            raise ValueError("State tuning: a model whose heads several processes share cannot be tuned.")
        if peft_config.target_modules is None:
            # Names that also fit the model without a head, or with another one, and the layer that is already wrapped.
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
        if not hasattr(target, "state_shape"):
            raise ValueError(f"`target_modules`: {current_key} is a {type(target).__name__}, which has no state.")
        layer = StateTuningLayer(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        setattr(parent, child_name, new_module)  # PEFT's own would look for a `weight`

    @contextmanager
    def _enable_peft_forward_hooks(self, *args, **kwargs):
        if kwargs.get("adapter_names") is not None:
            raise ValueError("`adapter_names`: all texts of a batch begin with the state of one adapter.")
        yield

    def _check_merge_allowed(self) -> None:
        raise ValueError(_NO_MERGING)


# Not by `register_peft_method`, which takes the names that PEFT itself has and no others.
PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.STATE_TUNING] = StateTuningConfig
PEFT_TYPE_TO_TUNER_MAPPING[PeftType.STATE_TUNING] = StateTuningModel
PEFT_TYPE_TO_PREFIX_MAPPING[PeftType.STATE_TUNING] = PREFIX
