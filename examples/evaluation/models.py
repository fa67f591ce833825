"""The architectures that are compared, as small models of one width, one depth and about one size."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from subquad import ARCHITECTURES, AveyBConfig, AveyConfig, GeckoConfig, RavenConfig, Rwkv5Config, Rwkv6Config
from subquad.optimizer import parameter_groups


NAMES = {
    "eagle": "Eagle",
    "finch": "Finch",
    "avey": "Avey",
    "raven": "Raven",
    "gecko": "Gecko",
    "avey-b": "Avey-B",
    "transformer": "Transformer (RoPE)",
}
CAUSAL = tuple(name for name in NAMES if name != "avey-b")


def make_config(
    architecture: str,
    *,
    vocabulary: int,
    width: int = 128,
    layers: int = 4,
    context: int = 1024,
    window: int = 128,
    lr: float = 3e-3,
    **ids: int,
) -> PreTrainedConfig:
    """
    Args:
        architecture: a name of `NAMES`; `"transformer"` is a Llama.
        vocabulary: number of token ids.
        width: of the model, a multiple of 32.
        layers: blocks of a layer each of token and channel mixing. Avey and Avey-B, whose layers are smaller, have
            more, so that they have about as many parameters.
        context: tokens of a training row.
        window: tokens that are looked at as they are: a chunk of Gecko's, two splits of Avey's and Avey-B's.
        lr: learning rate of the training, which Eagle and Finch initialise their embeddings by.
        ids: `bos_token_id` and so on.

    Raises:
        ValueError: where `width` is no multiple of 32, or `architecture` none of `NAMES`.
    """
    if width % 32:
        raise ValueError(f"`width` must be a multiple of 32, got {width}.")
    size: dict[str, Any] = {"vocab_size": vocabulary, **ids}
    layered = {"hidden_size": width, "num_hidden_layers": layers}
    match architecture:
        case "eagle":
            rest = {
                "head_size": 32,
                "context_length": context,
                "initializer_range": lr,
                "intermediate_size": 4 * width,
            }
            return Rwkv5Config(**size, **layered, **rest)
        case "finch":
            rest = {"head_size": 32, "context_length": context, "initializer_range": lr}
            ranks = {"lora_rank_tokenshift": width // 8, "lora_rank_decay": width // 8}
            return Rwkv6Config(**size, **layered, **rest, **ranks, intermediate_size=13 * width // 4)
        case "avey":
            # Layers of the others have about 14 width**2 parameters, Avey's 7 width**2 and a window's square.
            blocks = max(round(14.2 * layers * width**2 / (6.8 * width**2 + (2 * window) ** 2)), layers + layers // 4)
            return AveyConfig(**size, d_embed=width, n_blocks=blocks, chunk_size=window // 2, k=4)
        case "raven":
            rest = {"num_heads": width // 32, "num_slots": 32, "topk": 16, "use_output_gate": True}
            return RavenConfig(**size, **layered, **rest, intermediate_size=21 * width // 8)
        case "gecko":
            rest = {"num_heads": max(width // 64, 1), "z_dim": width // 2, "value_dim": 3 * width // 2}
            norms = {"timenorm_num_groups": width // 16, "cema_ndim": 8, "chunk_size": window}
            return GeckoConfig(
                **size, model_dim=width, num_layers=layers, ffn_hidden_dim=41 * width // 16, **rest, **norms
            )
        case "avey-b":
            return AveyBConfig(**size, d_embed=width, n_layers=2 * layers, chunk_size=window // 2, k=3)
        case "transformer":
            rest = {"num_attention_heads": width // 32, "intermediate_size": 27 * width // 8}
            return LlamaConfig(**size, **layered, **rest, max_position_embeddings=context)
    raise ValueError(f"`architecture` must be one of {', '.join(NAMES)}, got {architecture!r}.")


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """With random weights, and the head of a language model: a masked one for an encoder."""
    auto = AutoModelForMaskedLM if config.model_type == "avey-b" else AutoModelForCausalLM
    return auto.from_config(config)


def make_optimizer(model: PreTrainedModel, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW with the groups of `subquad.optimizer`; the transformer has those of GPT-3."""
    if model.config.model_type in ARCHITECTURES:
        groups = parameter_groups(model, lr, weight_decay)
    else:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        groups = [{"lr": lr, "betas": (0.9, 0.95), **group} for group in groups]
    return torch.optim.AdamW(groups, fused=True)
