"""The architectures that the shared tests run on; another one joins by one line in `CAUSAL` or `ENCODERS`."""

import copy

import pytest
import torch
import transformers

import subquad


VOCABULARY = 97

# Model type to the fields of a tiny configuration, with an odd number of heads where there are any.
ENCODERS = {"avey-b": {"d_embed": 48, "n_layers": 3, "chunk_size": 8}}
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
    "avey": {"d_embed": 48, "n_blocks": 3, "chunk_size": 8, "k": 4},
    # A hybrid: attention over a window between two slot memories.
    "raven": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_heads": 3,
        "num_slots": 12,
        "topk": 5,
        "use_output_gate": True,
        "intermediate_size": 64,
        "attn": {"layers": [1], "num_heads": 3, "num_kv_heads": 1, "window_size": 9, "qkv_bias": True},
    },
    # One of the ids is the begin token, which begins documents.
    "gecko": {
        "model_dim": 48,
        "num_layers": 3,
        "num_heads": 3,
        "z_dim": 24,
        "value_dim": 72,
        "ffn_hidden_dim": 64,
        "cema_ndim": 4,
        "chunk_size": 8,
        "timenorm_num_groups": 4,
        "num_rope_heads": 2,
    },
}

# The models that come with the package: the same promises hold for trained weights.
TRAINED = {
    "eagle-abc": "rwkv5",
    "finch-abc": "rwkv6",
    "avey-abc": "avey",
    "raven-abc": "raven",
    "gecko-abc": "gecko",
    "avey-b-abc": "avey-b",
}

RWKV = ("rwkv5", "rwkv6")
each_model = pytest.mark.parametrize("model_type", CAUSAL | ENCODERS)
each_causal = pytest.mark.parametrize("model_type", CAUSAL)
each_causal_and_trained = pytest.mark.parametrize(
    "model_type", [*CAUSAL, *(name for name, model_type in TRAINED.items() if model_type in CAUSAL)]
)
each_model_and_trained = pytest.mark.parametrize("model_type", [*CAUSAL, *ENCODERS, *TRAINED])
each_head = pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [(name, auto_class) for name in CAUSAL | ENCODERS for auto_class in subquad.ARCHITECTURES[name][2]],
)
each_rwkv = pytest.mark.parametrize("model_type", RWKV)

# The linear layers that adapters are put on.
LINEAR = {name: ["key", "value", "receptance", "gate", "output"] for name in RWKV} | {
    name: ["enricher", "fuser"] for name in ("avey", "avey-b")
}
LINEAR["gecko"] = ["wz", "wv", "wr", "wh1", "wh2", "fc1", "fc2", "fc3"]
LINEAR["raven"] = ["q_proj", "k_proj", "v_proj", "o_proj", "r_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_config(model_type: str, **fields):
    config_class = getattr(subquad, subquad.ARCHITECTURES[model_type][1])
    fields = {"vocab_size": VOCABULARY, **(CAUSAL | ENCODERS)[model_type], **fields}
    if fields.get("num_hidden_layers") == 1 and "attn" in fields:
        fields["attn"] = None
    return config_class(**fields)


def lm_class(model_type: str) -> str:
    """The Auto class of the model that is trained on text alone."""
    return "AutoModelForMaskedLM" if model_type in ENCODERS else "AutoModelForCausalLM"


def model_class(model_type: str, auto_class: str | None = None):
    """The class behind an Auto class, [`lm_class`] where None."""
    auto_class = auto_class or lm_class(model_type)
    return getattr(subquad, subquad.ARCHITECTURES[model_type][2][auto_class])


def tiny_model(model_type: str, auto_class: str | None = None, seed: int = 0, **fields):
    """
    A tiny model in which no parameter is zero or constant, so that each takes part in every comparison; or, of a name
    in `TRAINED`, that model.
    """
    if model_type in TRAINED:
        path = subquad.embedded_model(model_type)
        model = model_class(TRAINED[model_type]).from_pretrained(path, dtype=torch.float32, **fields).eval()
        # Its defaults, which sample and end a tune, are not those of the tests.
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        return model
    torch.manual_seed(seed)
    model = model_class(model_type, auto_class)(copy.deepcopy(tiny_config(model_type, **fields))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def _filled_up(x: torch.Tensor, shape: list[int]) -> torch.Tensor:
    more = [n for size, room in zip(x.shape[::-1], shape[::-1], strict=True) for n in (0, room - size)]
    return torch.nn.functional.pad(x, more)


def assert_same_states(cache, expected) -> None:
    """Whether two caches hold the same; what one of them has more room for must be zero."""
    for layer, layer_expected in zip(cache.layers, expected.layers, strict=True):
        assert layer.states.keys() == layer_expected.states.keys()
        for name, state in layer.states.items():
            other = layer_expected.states[name]
            if name in ("embeddings", "sums", "keys", "values", "memory_keys"):
                room = [max(sizes) for sizes in zip(state.shape, other.shape, strict=True)]
                state, other = (_filled_up(x, room) for x in (state, other))
            torch.testing.assert_close(state, other, atol=1e-4, rtol=1e-4)
