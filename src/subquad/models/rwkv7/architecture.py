"""The descriptor of Goose (RWKV-7)."""

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
    return [f"{config.num_heads} heads of {config.head_dim}"]


def costs(config, parameters: int) -> Costs:
    """
    State and FLOPs: 2 FLOPs for a parameter and 9 for an element of the state. A token reads it with the key
    to remove (2), decays it (1), subtracts the old value (2), adds the new one (2), and reads it with the
    receptance (2). Training takes three times that.
    """
    wkv = config.num_hidden_layers * config.hidden_size * config.head_dim
    shifts = config.num_hidden_layers * 2 * config.hidden_size
    inference = 2 * parameters + 9 * wkv
    return Costs(inference, 3 * inference, fixed_state=(wkv, shifts))


def _preset(layers: int, width: int, ranks: tuple[int, int, int], **fields: int) -> dict[str, int]:
    """Ranks of the decay and the in-context learning rate, of the mixing of values, and of the gate."""
    names = ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
    sizes = dict(zip(names, (ranks[0], *ranks), strict=True))
    return {"hidden_size": width, "num_hidden_layers": layers, **sizes, **fields}


RWKV7 = Architecture(
    model_type="rwkv7",
    folder="rwkv7",
    title="Goose (RWKV-7)",
    summary="a generalised delta rule on a matrix-valued state per head, with decays and learning rates by channel",
    config="Rwkv7Config",
    heads={
        "AutoModel": "Rwkv7Model",
        "AutoModelForCausalLM": "Rwkv7ForCausalLM",
        "AutoModelForSequenceClassification": "Rwkv7ForSequenceClassification",
    },
    describe=describe,
    costs=costs,
    adapter_targets=AdapterTargets(
        projections=["receptance", "key", "value", "output"],
        scaled=["att.key", "att.value"],
        feed_forward=["ffn.value"],
        norms=["ln0", "ln1", "ln_x", "ln2", "ln_out"],
    ),
    # The trainer's: decay on linear layers and embeddings only, twice the learning rate for `w0`.
    recipe=OptimizerRecipe(
        weight_decay=0.1,
        betas=(0.9, 0.99),
        eps=1e-18,
        rates={"w0": 2.0},
        peak="6e-4 (0.1B), 4e-4 (0.4B), 3e-4 (1.5B)",
        warmup="10 steps, from 1 %",
        decay="cosine",
    ),
    vllm=Serving("subquad_vllm.rwkv:GooseForCausalLM"),
    support=Support(
        checkpoints="`.pth` of the trainer, Hub directories, `.st` of web-rwkv, GGUF",
        parity="the package `rwkv`, flash-linear-attention",
        state="constant",
        dtypes="yes (states in float32)",
        tensor_parallel="heads, states",
        export="prefill and decoding; the same in ONNX",
    ),
    # The published sizes. The ranks do not follow a single formula.
    presets={
        "goose-0.1b": _preset(12, 768, (64, 32, 128)),
        "goose-0.4b": _preset(24, 1024, (64, 32, 128)),
        "goose-1.5b": _preset(24, 2048, (96, 64, 256)),
        "goose-2.9b": _preset(32, 2560, (96, 64, 320)),
        "goose-7.2b": _preset(32, 4096, (128, 96, 480)),
        "goose-13.3b": _preset(61, 4096, (192, 128, 384)),
        "goose-pile-168m": _preset(12, 768, (64, 32, 128), vocab_size=50304),
        "goose-pile-421m": _preset(24, 1024, (64, 32, 160), vocab_size=50304),
        "goose-pile-1.47b": _preset(24, 2048, (96, 64, 256), vocab_size=50304),
    },
    tunable_state=TunableState(
        module="Rwkv7TimeMixing",
        name="wkv",
        shape=lambda config: (config.num_heads, config.head_dim, config.head_dim),
        scale=1.0,
        transposed=False,
    ),
    other_names="loading_rwkv7",
    fused=FusedModel(
        kind="delta_wkv",
        blocks="blocks",
        first_norm="blocks.0.ln0",
        last_norm="ln_out",
        classes={
            "": "Rwkv7Block",
            "att": "Rwkv7TimeMixing",
            "att.ln_x": "Rwkv7GatedNorm",
            "ffn": "Rwkv7ChannelMixing",
        },
        layers={
            **{name: f"att.{name}" for name in ("receptance", "key", "value", "output")},
            **{f"ffn_{name}": f"ffn.{name}" for name in ("key", "value")},
        },
        norms={"ln1": "ln1", "ln2": "ln2", "ln_x": "att.ln_x"},
        parameters={
            **{f"mu_{letter}": f"att.x_{letter}" for letter in "rwkvag"},
            **{
                f"{name}.{part}": f"att.{letter}{number}"
                for name, letter in (("decay", "w"), ("rate", "a"), ("mix", "v"), ("gate", "g"))
                for part, number in (("base", 0), ("down", 1), ("up", 2))
                if name != "gate" or part != "base"
            },
            "k_k": "att.k_k",
            "k_a": "att.k_a",
            "bonus": "att.r_k",
            "mu_ffn_key": "ffn.x_k",
        },
        options=lambda block: {"heads": block.att.ln_x.num_groups},
        optional=("mix.base", "mix.down", "mix.up"),
    ),
    onnx=("prefill", "decode"),
    # From rwkv7-hf and a fork of transformers. In transformers itself, `rwkv` is RWKV-4.
    other_types={"rwkv7_native": {}, "rwkv7_hf_adapter": {}, "rwkv": {"architecture_version": "rwkv7"}},
)

__all__ = ["RWKV7"]
