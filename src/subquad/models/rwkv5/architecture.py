"""The descriptor of Eagle (RWKV-5)."""

from ..architecture import (
    AdapterTargets,
    Architecture,
    Costs,
    FusedModel,
    OptimizerRecipe,
    Serving,
    Support,
    TunableState,
)


def describe(config) -> list[str]:
    return [f"{config.num_attention_heads} heads of {config.head_size}"]


def costs(config, parameters: int) -> Costs:
    """
    State and FLOPs of Eagle and Finch, as in appendix E of "Eagle and Finch" (arXiv:2404.05892): equations (24) and
    (28), 2 FLOPs for a parameter and 6 for an element of the wkv state; (26) and (29), three times that in training.
    """
    wkv = config.num_hidden_layers * config.attention_hidden_size * config.head_size
    shifts = config.num_hidden_layers * 2 * config.hidden_size
    inference = 2 * parameters + 6 * wkv
    return Costs(inference, 3 * inference, fixed_state=(wkv, shifts))


FUSED = FusedModel(
    kind="wkv",
    blocks="blocks",
    first_norm="blocks.0.pre_ln",
    last_norm="ln_out",
    classes={
        "": "Rwkv5Block",
        "attention": "Rwkv5TimeMixing",
        "attention.ln_x": "Rwkv5GatedNorm",
        "feed_forward": "Rwkv5ChannelMixing",
    },
    layers={
        **{name: f"attention.{name}" for name in ("receptance", "key", "value", "gate", "output")},
        **{f"ffn_{name}": f"feed_forward.{name}" for name in ("key", "receptance", "value")},
    },
    norms={"ln1": "ln1", "ln2": "ln2", "ln_x": "attention.ln_x"},
    parameters={
        "mu_r": "attention.time_mix_receptance",
        "mu_k": "attention.time_mix_key",
        "mu_v": "attention.time_mix_value",
        "mu_g": "attention.time_mix_gate",
        "decay.base": "attention.time_decay",
        "bonus": "attention.time_faaaa",
        "mu_ffn_key": "feed_forward.time_mix_key",
        "mu_ffn_receptance": "feed_forward.time_mix_receptance",
    },
    options=lambda block: {"heads": block.attention.ln_x.num_groups, "of_token": True},
)

RWKV5 = Architecture(
    model_type="rwkv5",
    folder="rwkv5",
    title="Eagle (RWKV-5)",
    summary="linear attention with a matrix-valued state per head and learned decays",
    config="Rwkv5Config",
    heads={
        "AutoModel": "Rwkv5Model",
        "AutoModelForCausalLM": "Rwkv5ForCausalLM",
        "AutoModelForSequenceClassification": "Rwkv5ForSequenceClassification",
    },
    describe=describe,
    costs=costs,
    fused=FUSED,
    adapter_targets=AdapterTargets(
        projections=["receptance", "key", "value", "gate", "output"],
        scaled=["attention.key", "attention.value"],
        feed_forward=["feed_forward.value"],
        norms=["pre_ln", "ln1", "ln_x", "ln2", "ln_out"],
    ),
    # Appendix G: decay on linear layers and embeddings only, twice the learning rate for `time_decay`.
    recipe=OptimizerRecipe(
        weight_decay=0.001,
        betas=(0.9, 0.99),
        rates={"time_decay": 2.0},
        peak="4e-4 (0.4B), 3e-4 (1.5B), 2e-4 (3B), 1.5e-4 (7B)",
        warmup="10 steps, from 20 %",
        decay="cosine to 2e-5 ... 1e-5",
    ),
    vllm=Serving("subquad_vllm.rwkv:RwkvForCausalLM"),
    support=Support(
        checkpoints="`.pth` of the trainer, Hub directories, `.st` of web-rwkv",
        parity="the package `rwkv`",
        state="constant",
        dtypes="yes (states in float32)",
        tensor_parallel="heads, states",
        export="prefill and decoding; the same in ONNX",
    ),
    # Table 10 of the paper. eagle-music is section 10.1: bytes of ABC notation.
    presets={
        "eagle-0.4b": {"hidden_size": 1024, "num_hidden_layers": 24},
        "eagle-1.5b": {"hidden_size": 2048, "num_hidden_layers": 24, "initializer_range": 3e-4},
        "eagle-3b": {"hidden_size": 2560, "num_hidden_layers": 32, "initializer_range": 2e-4},
        "eagle-7b": {"hidden_size": 4096, "num_hidden_layers": 32, "initializer_range": 1.5e-4},
        "eagle-music": {"hidden_size": 512, "num_hidden_layers": 24, "vocab_size": 128, "context_length": 1024},
    },
    tunable_state=TunableState(
        module="Rwkv5TimeMixing",
        name="wkv",
        shape=lambda config: (config.num_attention_heads, config.head_size, config.head_size),
        scale=1000.0,
        transposed=True,
    ),
    onnx=("prefill", "decode"),
)

__all__ = ["RWKV5"]
