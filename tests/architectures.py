"""The architectures that the shared tests run on; another one joins by one line in `CAUSAL`."""

import copy

import pytest
import torch

import subquad


VOCABULARY = 97

# Model type to the fields of a tiny configuration, with an odd number of heads where there are any.
CAUSAL = {
    "rwkv5": {"hidden_size": 48, "head_size": 16, "num_hidden_layers": 3, "intermediate_size": 64},
    "rwkv6": {
        "hidden_size": 48,
        "head_size": 16,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "lora_rank_tokenshift": 4,
        "lora_rank_decay": 8,
    },
}

each_causal = pytest.mark.parametrize("model_type", CAUSAL)


def tiny_config(model_type: str, **fields):
    config_class = getattr(subquad, subquad.ARCHITECTURES[model_type][1])
    return config_class(**{"vocab_size": VOCABULARY, **CAUSAL[model_type], **fields})


def model_class(model_type: str, auto_class: str):
    return getattr(subquad, subquad.ARCHITECTURES[model_type][2][auto_class])


def tiny_model(model_type: str, auto_class: str = "AutoModelForCausalLM", seed: int = 0, **fields):
    """A tiny model in which no parameter is zero or constant, so that each takes part in every comparison."""
    torch.manual_seed(seed)
    model = model_class(model_type, auto_class)(copy.deepcopy(tiny_config(model_type, **fields))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
