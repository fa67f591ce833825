"""The descriptor of Gecko."""

from typing import Any

from ..architecture import AdapterTargets, Architecture, Costs, FusedModel, OptimizerRecipe, Serving, Support


def describe(config) -> list[str]:
    return [f"{config.num_heads} heads, chunks of {config.chunk_size}"]


def costs(config, parameters: int) -> Costs:
    """
    FLOPs of the matrix products of all layers and the head, and in each layer `2 (z_dim + value_dim)` for every token
    of two chunks, as if attention read both in full; `6 z_dim value_dim / num_heads` to read the working memory and
    for a token's share of what its chunk changes there; and 12 for each complex number of CEMA's state. The state has
    the norms' moments, CEMA's state and the working memory with its normaliser in float32, and the keys, memory keys
    and values of two chunks. The document starts of these tokens are not counted.
    """
    d, z, v = config.model_dim, config.z_dim, config.value_dim
    weights = d * (z + 2 * v + d) + v * d + (3 if config.swiglu else 2) * d * config.ffn_hidden_dim
    attention = 2 * (z + v) * 2 * config.chunk_size
    memory, average = 6 * z * v // config.num_heads, 12 * d * config.cema_ndim
    inference = config.num_layers * (2 * weights + attention + memory + average) + 2 * config.vocab_size * d

    moments = 3 * config.timenorm_num_groups
    remembered = z * (v // config.num_heads + 1)
    recurrent = config.num_layers * (moments + 2 * d * config.cema_ndim + remembered) + moments
    window = config.num_layers * 2 * config.chunk_size * (2 * z + v)
    return Costs(inference, 3 * inference, fixed_state=(recurrent, window))


def fused_options(block) -> dict[str, Any]:
    config, norm = block.mega.config, block.mega.timenorm.options
    others = block.mega.rmsnorm, block.nffn.norm
    if (
        any((x.groups, x.eps) != (config.layernorm_num_groups, norm["eps"]) for x in others)
        or config.norm_eps != norm["eps"]
    ):
        raise ValueError("The norms differ.")
    return {
        "norm": norm,
        "heads": config.num_heads,
        "rotated": config.num_rope_heads,
        "norm_groups": config.layernorm_num_groups,
        "two_hop": block.two_hop_residual,
    }


def fused_start(decoder, x, input_ids, tokens, cache) -> tuple[Any, Any, dict[str, Any], tuple]:
    x, positions = decoder.start_blocks(x, input_ids, None, tokens, cache)
    cos, sin = positions.rotation or (None, None)
    of_blocks = {"position": positions.read.kept_position, "starts": positions.starts, "cos": cos, "sin": sin}
    return x, positions, of_blocks | positions.memory | positions.attention, (positions, cache.after_blocks)


GECKO = Architecture(
    model_type="gecko",
    folder="gecko",
    title="Gecko",
    summary="sliding chunk attention with a working memory of fixed size",
    config="GeckoConfig",
    heads={
        "AutoModel": "GeckoModel",
        "AutoModelForCausalLM": "GeckoForCausalLM",
        "AutoModelForSequenceClassification": "GeckoForSequenceClassification",
    },
    exports={
        "GeckoCache": "cache_gecko",
    },
    describe=describe,
    costs=costs,
    adapter_targets=AdapterTargets(
        projections=["wz", "wv", "wr", "wh1", "wh2", "fc1", "fc2", "fc3"],
        scaled=["wz", "wv"],
        feed_forward=["fc2"],
        norms=["timenorm", "rmsnorm", "norm", "final_norm"],
    ),
    fused=FusedModel(
        kind="working_memory",
        blocks="layers",
        first_norm=None,
        last_norm="output.final_norm",
        classes={
            **{"": "GeckoBlock", "mega": "GeckoMega", "nffn": "GeckoNFFN", "nffn.norm": "GeckoLayerNorm"},
            **{"mega.timenorm": "GeckoTimestepDecayNorm", "mega.cema": "GeckoCEMA", "mega.rmsnorm": "GeckoRMSNorm"},
        },
        layers={
            **{"value": "mega.wv", "gate": "mega.wr", "shared": "mega.wz", "stream": "mega.wh1"},
            **{"output": "mega.wh2", "ffn_gate": "nffn.fc1", "ffn_up": "nffn.fc3", "ffn_value": "nffn.fc2"},
        },
        norms={},
        parameters={
            **{"value.bias": "mega.wv.bias", "gate.bias": "mega.wr.bias"},
            **{"shared.bias": "mega.wz.bias", "stream.bias": "mega.wh1.bias"},
            **{"ln1": "mega.timenorm.weight", "ln1_bias": "mega.timenorm.bias", "ln_m": "mega.rmsnorm.weight"},
            **{"ln2": "nffn.norm.weight", "ln2_bias": "nffn.norm.bias"},
            **{f"cema.{name}": f"mega.cema.{name}" for name in ("alpha", "delta", "theta", "gamma")},
            **{"gamma": "mega.gamma", "beta": "mega.beta", "alpha": "nffn.alpha"},
        },
        options=fused_options,
        optional=("ln_m", "ln2", "ln2_bias", "alpha"),
        states=("timenorm", "cema", "keys", "values", "memory_keys", "memory", "normalizer"),
        start=fused_start,
    ),
    # Section 4.1, for 7B (1B: 0.05), which does not specify what decays either.
    recipe=OptimizerRecipe(
        weight_decay=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        peak="4e-4 (1B), 3.5e-4 (7B)",
        warmup="2,000 steps (1B), 2,500 (7B)",
        decay="cosine",
    ),
    vllm=Serving("subquad_vllm.gecko:GeckoForCausalLM"),
    support=Support(
        checkpoints="`.pth` of the authors' code",
        parity="the authors' wiring, operators in float64",
        state="constant",
        dtypes="yes (states in float32, keys and values not)",
        tensor_parallel="heads, states",
        export="prefill and decoding; decoding in ONNX (prefill has complex numbers)",
        state_tuning="no: its memory starts as forgotten",
    ),
    # Section 4.1 has depth, width, chunk and vocabulary of the larger one, the authors' code the rest. The smaller one
    # is derived: the paper has its depth, width, vocabulary and 1.3B parameters. In both z_dim is d / 4, value_dim
    # 2 d, and a head has 256 channels of z_dim; ffn_hidden_dim 3 d is the multiple of d that comes closest to the
    # number of parameters, with untied heads. Its tokenizer is OLMo's, in which 50279 ends a text; the authors' code
    # adds the BOS token.
    presets={
        "gecko-1b": {
            "model_dim": 2048,
            "num_layers": 16,
            "num_heads": 2,
            "z_dim": 512,
            "value_dim": 4096,
            "ffn_hidden_dim": 6144,
            "vocab_size": 50304,
            "bos_token_id": 50280,
            "eos_token_id": 50279,
        },
        "gecko-7b": {},
    },
    onnx=("decode",),
)

__all__ = ["GECKO"]
