"""The descriptor of Finch (RWKV-6)."""

from dataclasses import replace

from ..architecture import Serving
from ..rwkv5.architecture import FUSED, RWKV5


RWKV6 = replace(
    RWKV5,
    model_type="rwkv6",
    folder="rwkv6",
    title="Finch (RWKV-6)",
    summary="Eagle with a token shift and a decay that depend on the data",
    config="Rwkv6Config",
    heads={
        "AutoModel": "Rwkv6Model",
        "AutoModelForCausalLM": "Rwkv6ForCausalLM",
        "AutoModelForSequenceClassification": "Rwkv6ForSequenceClassification",
    },
    # Table 10 of the paper; finch-7b was published later.
    presets={
        "finch-1.6b": {"hidden_size": 2048, "num_hidden_layers": 24, "initializer_range": 3e-4},
        "finch-3b": {"hidden_size": 2560, "num_hidden_layers": 32, "initializer_range": 2e-4},
        "finch-7b": {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "initializer_range": 1.5e-4,
            "lora_rank_tokenshift": 64,
            "lora_rank_decay": 128,
        },
    },
    vllm=Serving("subquad_vllm.rwkv:FinchForCausalLM"),
    support=replace(RWKV5.support, checkpoints=f"{RWKV5.support.checkpoints}, GGUF"),
    other_names="loading_rwkv6",
    fused=replace(
        FUSED,
        classes={
            "": "Rwkv6Block",
            "attention": "Rwkv6TimeMixing",
            "attention.ln_x": "Rwkv5GatedNorm",
            "feed_forward": "Rwkv6ChannelMixing",
        },
        parameters={
            **{f"mu_{letter}": f"attention.time_maa_{letter}" for letter in "xwkvrg"},
            "shift.down": "attention.time_maa_w1",
            "shift.up": "attention.time_maa_w2",
            "decay.base": "attention.time_decay",
            "decay.down": "attention.time_decay_w1",
            "decay.up": "attention.time_decay_w2",
            "bonus": "attention.time_faaaa",
            "mu_ffn_key": "feed_forward.time_maa_k",
            "mu_ffn_receptance": "feed_forward.time_maa_r",
        },
        options=lambda block: {"heads": block.attention.ln_x.num_groups},
    ),
    tunable_state=replace(RWKV5.tunable_state, module="Rwkv6TimeMixing"),
)

__all__ = ["RWKV6"]
