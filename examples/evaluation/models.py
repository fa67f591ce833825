"""The compared architectures, as small models of the same width and depth and about the same size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    LlamaConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from subquad import AveyBConfig, AveyConfig, GeckoConfig, RavenConfig, Rwkv5Config, Rwkv6Config, Rwkv7Config
from subquad.models import REGISTRY
from subquad.training.optimizer import parameter_groups


NAMES = {
    "eagle": "Eagle",
    "finch": "Finch",
    "goose": "Goose",
    "avey": "Avey",
    "raven": "Raven",
    "gecko": "Gecko",
    "avey-b": "Avey-B",
    "transformer": "Transformer (RoPE)",
}
ENCODERS = ("avey-b",)
PEERS = {"bert": "BERT", "modernbert": "ModernBERT"}  # competitors of Avey-B in `encoders`, by model type
CAUSAL = tuple(name for name in NAMES if name not in ENCODERS)


class Size(NamedTuple):
    """The arguments of [`make_config`] that have the same name."""

    width: int
    layers: int
    context: int
    window: int
    lr: float

    @property
    def layered(self) -> dict[str, int]:
        return {"hidden_size": self.width, "num_hidden_layers": self.layers}


# A function for each architecture: its configuration class, and the fields for a size.


def _eagle(size: Size):
    return Rwkv5Config, {
        **size.layered,
        "head_size": 32,
        "context_length": size.context,
        "initializer_range": size.lr,
        "intermediate_size": 4 * size.width,
    }


def _finch(size: Size):
    return Rwkv6Config, {
        **size.layered,
        "head_size": 32,
        "context_length": size.context,
        "initializer_range": size.lr,
        "lora_rank_tokenshift": size.width // 8,
        "lora_rank_decay": size.width // 8,
        "intermediate_size": 13 * size.width // 4,
    }


def _goose(size: Size):
    return Rwkv7Config, {
        **size.layered,
        "head_dim": 32,
        "decay_low_rank_dim": size.width // 4,
        "a_low_rank_dim": size.width // 4,
        "v_low_rank_dim": size.width // 8,
        "gate_low_rank_dim": 3 * size.width // 8,
    }


def _avey(size: Size):
    # Other layers have about 14 width**2 parameters; a layer of Avey has 7 width**2 and the square of a window.
    width, layers = size.width, size.layers
    blocks = max(round(14.2 * layers * width**2 / (6.8 * width**2 + (2 * size.window) ** 2)), layers + layers // 4)
    return AveyConfig, {"d_embed": width, "n_blocks": blocks, "chunk_size": size.window // 2, "k": 4}


def _raven(size: Size):
    return RavenConfig, {
        **size.layered,
        "num_heads": size.width // 32,
        "num_slots": 32,
        "topk": 16,
        "use_output_gate": True,
        "intermediate_size": 21 * size.width // 8,
    }


def _gecko(size: Size):
    return GeckoConfig, {
        "model_dim": size.width,
        "num_layers": size.layers,
        "num_heads": max(size.width // 64, 1),
        "z_dim": size.width // 2,
        "value_dim": 3 * size.width // 2,
        "ffn_hidden_dim": 41 * size.width // 16,
        "timenorm_num_groups": size.width // 16,
        "cema_ndim": 8,
        "chunk_size": size.window,
    }


def _avey_b(size: Size):
    return AveyBConfig, {"d_embed": size.width, "n_layers": 2 * size.layers, "chunk_size": size.window // 2, "k": 3}


def _transformer(size: Size):
    return LlamaConfig, {
        **size.layered,
        "num_attention_heads": size.width // 32,
        "intermediate_size": 27 * size.width // 8,
        "max_position_embeddings": size.context,
    }


def _bert(size: Size):
    # As published: norms after each sum, GELU, and a feed-forward four times as wide. The standard deviation of the
    # initial weights is the published 0.02 at a width of 768, and proportional to 1 / sqrt(width). No model here has
    # dropout.
    return BertConfig, {
        **size.layered,
        "num_attention_heads": size.width // 32,
        "intermediate_size": 4 * size.width,
        "max_position_embeddings": size.context,
        "type_vocab_size": 1,
        "initializer_range": 0.02 * (768 / size.width) ** 0.5,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _modernbert(size: Size):
    # Every third layer from the first on is global, as published. The others see an eighth of a training row.
    return ModernBertConfig, {
        **size.layered,
        "num_attention_heads": size.width // 32,
        "intermediate_size": 13 * size.width // 4,
        "max_position_embeddings": size.context,
        "local_attention": size.window // 2,
        "cls_token_id": None,
        "sep_token_id": None,
    }


CONFIGS: dict[str, Callable[[Size], tuple[type[PreTrainedConfig], dict[str, Any]]]] = {
    "eagle": _eagle,
    "finch": _finch,
    "goose": _goose,
    "avey": _avey,
    "raven": _raven,
    "gecko": _gecko,
    "avey-b": _avey_b,
    "transformer": _transformer,
    "bert": _bert,
    "modernbert": _modernbert,
}


def make_config(
    architecture: str,
    *,
    vocabulary: int,
    width: int = 128,
    layers: int = 4,
    context: int = 1024,
    window: int = 128,
    lr: float = 3e-3,
    **others: Any,
) -> PreTrainedConfig:
    """
    Args:
        architecture: a name of `NAMES`, of which `"transformer"` is a Llama, or of `PEERS`.
        vocabulary: number of token ids.
        width: width of the model, a multiple of 32.
        layers: number of layers, each with token and channel mixing. Avey and Avey-B, whose layers are smaller, get
            more of them, for about the same number of parameters.
        context: number of tokens of a training row.
        window: number of tokens that attention sees: a chunk of Gecko, two splits of Avey and Avey-B, twice the
            local attention of ModernBERT.
        lr: learning rate of the training, which is also the scale of the initial embeddings of Eagle and Finch.
        others: fields of the configuration, which override the small model's: `bos_token_id`, `topk` and so on.

    Raises:
        ValueError: if `width` is not a multiple of 32, or `architecture` is not one of `NAMES` and `PEERS`.
    """
    if width % 32:
        raise ValueError(f"`width` must be a multiple of 32, got {width}.")
    if architecture not in CONFIGS:
        raise ValueError(f"`architecture` must be one of {', '.join(CONFIGS)}, got {architecture!r}.")
    config_class, fields = CONFIGS[architecture](Size(width, layers, context, window, lr))
    return config_class(vocab_size=vocabulary, **{**fields, **others})


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether a model of this configuration predicts masked tokens and does not generate text."""
    architecture = REGISTRY.get(config.model_type)
    return config.model_type in PEERS if architecture is None else architecture.is_encoder


def most_tokens(config: PreTrainedConfig) -> int | None:
    """The number of tokens that a model can read, if it has a table of positions, like BERT; None for any number."""
    return config.max_position_embeddings if isinstance(config, BertConfig) else None


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A language model with random weights: causal, or masked for an encoder."""
    auto = AutoModelForMaskedLM if is_encoder(config) else AutoModelForCausalLM
    return auto.from_config(config)


# Adam's settings in the papers of the transformers: GPT-3, BERT, ModernBERT.
ADAM: dict[str, dict[str, Any]] = {
    "llama": {"betas": (0.9, 0.95)},
    "bert": {"betas": (0.9, 0.999), "eps": 1e-6},
    "modernbert": {"betas": (0.9, 0.98), "eps": 1e-6},
}


def make_optimizer(model: PreTrainedModel, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW with the groups of `subquad.training.optimizer`; a transformer's matrices and embeddings decay."""
    if model.config.model_type in REGISTRY:
        groups = parameter_groups(model, lr, weight_decay)
    else:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        groups = [{"lr": lr, **ADAM[model.config.model_type], **group} for group in groups]
    return torch.optim.AdamW(groups, fused=True)


def take_step(
    loss: torch.Tensor,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """One step of a training, with a gradient whose norm is at most 1."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)


def make_cycle(optimizer: torch.optim.Optimizer, steps: int, rise: float) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rates rise to the optimizer's in a share of the steps, and fall along a cosine."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, peaks, steps, pct_start=rise, cycle_momentum=False)


def make_schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate rises in the first tenth of the steps, and falls to zero in the second half."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(10 * (step + 1) / steps, 1.0, 2 - 2 * step / steps)
    )
