"""The descriptor of Raven."""

from typing import Any

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
    sizes = [f"{config.num_heads} heads of {config.head_k_dim} with {config.num_slots} slots"]
    if attention := sum(len(spec["layers"]) for spec in config.attention_specs):
        sizes.append(f"softmax attention in {attention} of the layers")
    return sizes


def costs(config, parameters: int) -> Costs:
    """
    FLOPs of the matrix products of all layers and the head, and for every head of a slot memory, with e the sizes of a
    key and a value together, `2 e num_slots` to read it and `3 e` for each row that is written: `topk` rows, all with
    the router "gsa", one with "swa". Softmax attention adds `4 hidden_size` a layer for every token of its full
    window; reads without a window are not counted. The state has the keys and values of the slots and of the tokens in
    a window; softmax attention without a window keeps a key and a value of every token.
    """
    slots, window, growing = _state(config)
    inference = _flops(config)
    return Costs(inference, 3 * inference, fixed_state=(slots, window), growing_state=growing or None)


def _state(config) -> tuple[int, int, int]:
    """Elements of all slots, of all windows of softmax attention, and of every token of the text."""
    memory = config.num_heads * config.num_slots * (config.head_k_dim + config.head_v_dim)
    slots = window = growing = 0
    for spec in map(config.attention, range(config.num_hidden_layers)):
        if spec is None:
            slots += memory
            continue
        token = 2 * spec["num_kv_heads"] * (config.hidden_size // spec["num_heads"])
        if spec["window_size"] is None:
            growing += token
        else:
            window += spec["window_size"] * token
    return slots, window, growing


def _flops(config) -> int:
    d, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    entry = config.head_k_dim + config.head_v_dim
    router = decay = 0
    if config.router == "raven":
        router = kv_heads * config.num_slots * d + (d * d if config.router_type == "mlp" else 0)
    if config.router != "swa":
        decay = kv_heads * d * (config.num_slots if config.decay_type == "GLA" else 1)
    # Queries and output, keys and values.
    weights = d * (heads + kv_heads) * entry + router + decay + (d * config.value_dim if config.use_output_gate else 0)
    written = {"raven": config.topk, "gsa": config.num_slots, "swa": 1}[config.router]
    memory = 2 * weights + heads * entry * (2 * config.num_slots + 3 * written)

    flops = 2 * config.vocab_size * d
    for spec in map(config.attention, range(config.num_hidden_layers)):
        flops += 2 * 3 * d * config.intermediate_size
        if spec is None:
            flops += memory
        else:
            shared = spec["num_heads"] // spec["num_kv_heads"]
            flops += 2 * (2 * d * d + 2 * d * (d // shared)) + 4 * d * (spec["window_size"] or 0)
    return flops


def fused_options(block) -> dict[str, Any]:
    config = block.attn.config
    if config.use_rope:
        raise ValueError("Rotary embeddings of slot memories are not fused.")
    return {
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "topk": config.topk,
        "score": config.router_score,
        "scale": config.router_scale,
        "relu": config.feature_map == "relu",
        "normalizer": config.gate_logit_normalizer,
    }


def fused_start(decoder, x, input_ids, tokens, cache) -> tuple[Any, Any, dict[str, Any], tuple]:
    from .positions_raven import find_positions

    return x, find_positions(decoder.config, x, tokens, cache), {}, ()


RAVEN = Architecture(
    model_type="raven",
    folder="raven",
    title="Raven",
    summary="a memory of slots per head, of which a learned router writes a few for each token",
    config="RavenConfig",
    heads={
        "AutoModel": "RavenModel",
        "AutoModelForCausalLM": "RavenForCausalLM",
        "AutoModelForSequenceClassification": "RavenForSequenceClassification",
    },
    exports={"RavenCache": "cache_raven"},
    describe=describe,
    costs=costs,
    adapter_targets=AdapterTargets(
        projections=["q_proj", "k_proj", "v_proj", "o_gate_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        scaled=["k_proj", "v_proj"],
        feed_forward=["down_proj"],
        norms=["attn_norm", "q_norm", "k_norm", "o_norm", "g_norm", "mlp_norm", "norm"],
    ),
    fused=FusedModel(
        kind="slot_memory",
        blocks="layers",
        first_norm=None,
        last_norm="norm",
        classes={"": "RavenBlock", "attn": "RavenSlotMemory", "mlp": "RavenMLP"},
        layers={
            **{"query": "attn.q_proj", "key": "attn.k_proj", "value": "attn.v_proj", "gate": "attn.o_gate_proj"},
            **{"router": "attn.r_proj", "decay": "attn.a_proj", "slot_decay": "attn.f_proj", "output": "attn.o_proj"},
            **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_value": "mlp.down_proj"},
        },
        norms={"ln1": "attn_norm", "ln2": "mlp_norm", **{f"{x}_norm": f"attn.{x}_norm" for x in "qkog"}},
        parameters={"A_log": "attn.A_log", "dt_bias": "attn.dt_bias", "r_bias": "attn.r_bias"},
        options=fused_options,
        optional=("gate", "decay", "slot_decay", "o_norm", "g_norm", "A_log", "dt_bias", "r_bias"),
        states=("slots",),
        start=fused_start,
    ),
    # Appendix A.3.1: Adam; weight decay is not mentioned.
    recipe=OptimizerRecipe(weight_decay=0.0, peak="4e-4", warmup="1 of 15 billion tokens", decay="cosine"),
    vllm=Serving("subquad_vllm.raven:RavenForCausalLM", hybrid="subquad_vllm.raven:RavenHybridForCausalLM"),
    support=Support(
        checkpoints="Hub directories",
        parity="the published model (2e-4)",
        state="constant; it grows with attention over the whole text",
        dtypes="yes (memories in float32)",
        tensor_parallel="heads, states",
        export="prefill and decoding; decoding in ONNX",
    ),
    # Table 2 of the paper. The sizes of the larger one are derived: the paper only has the numbers of parameters,
    # for Raven and SWA, and the size of the state.
    presets={
        "raven-0.4b": {"hidden_size": 1024, "num_hidden_layers": 24, "num_slots": 256, "use_output_gate": True},
        "raven-0.8b": {
            "hidden_size": 1536,
            "num_hidden_layers": 21,
            "num_heads": 6,
            "num_slots": 256,
            "use_output_gate": True,
            "router_scale": 4,
        },
    },
    tunable_state=TunableState(
        module="RavenSlotMemory",
        name="slots",
        shape=lambda config: (config.num_heads, config.num_slots, config.head_k_dim + config.head_v_dim),
        scale=1.0,
    ),
    onnx=("decode",),
    inspection="inspect_memory",
    float_layers=("r_proj", "a_proj", "f_proj"),  # they choose the slots to write, and how fast these forget
)

__all__ = ["RAVEN"]
