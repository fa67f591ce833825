"""The descriptor of RWKV-7a and RWKV-7b."""

import dataclasses
from typing import Any

from ..architecture import Architecture, Costs, Serving, Support
from ..rwkv7.architecture import RWKV7, _preset
from ..rwkv7.architecture import costs as costs_of_goose
from ..rwkv7.architecture import describe as describe_goose


def describe(config) -> list[str]:
    variant = (
        "RWKV-7a" if config.dea_size is None else f"RWKV-7b, with one head of attention of size {config.dea_size}"
    )
    return [variant, *describe_goose(config)]


def costs(config, parameters: int) -> Costs:
    """
    As Goose, without the parameters of the tables, of which a token reads one row each, and with `2 R²` for the
    product with the row of DeepEmbed. RWKV-7b keeps, in each block, a key and a value for each token; query, key and
    value of the last token are float32. Its attention takes `2 (dea_size + hidden_size)` for each earlier token and
    block, which is not counted.
    """
    layers, size = config.num_hidden_layers, config.dea_size
    of_attention = 0 if size is None else size + config.hidden_size
    tables = layers * config.vocab_size * (config.deep_embed_rank**2 + of_attention)
    goose = costs_of_goose(config, parameters - tables)
    inference = goose.inference_flops + layers * 2 * config.deep_embed_rank**2
    if size is None:
        return Costs(inference, 3 * inference, fixed_state=goose.fixed_state)
    wide, narrow = goose.fixed_state
    fixed = wide + layers * (size + of_attention), narrow
    return Costs(inference, 3 * inference, fixed_state=fixed, growing_state=layers * of_attention)


def fused_start(decoder, x, input_ids, tokens, cache) -> tuple[Any, Any, dict[str, Any], tuple]:
    """With the matrices of DeepEmbed of each block."""
    import torch

    blocks = decoder.blocks[: decoder.config.num_hidden_layers]
    x0 = x.to(blocks[0].ln0.weight.dtype)
    return x, None, {"cores": torch.stack([block.ffn.matrices(input_ids, x0) for block in blocks])}, ()


# The only published size.
SIZES: dict[str, Any] = _preset(12, 768, (64, 32, 128))

RWKV7_DEEP_EMBED = Architecture(
    model_type="rwkv7_deep_embed",
    folder="rwkv7_deep_embed",
    title="Goose with DeepEmbed (RWKV-7a, 7b)",
    summary="Goose with a row of a table for each token in every block; RWKV-7b also has one head of attention",
    config="Rwkv7DeepEmbedConfig",
    heads={
        "AutoModel": "Rwkv7DeepEmbedModel",
        "AutoModelForCausalLM": "Rwkv7DeepEmbedForCausalLM",
        "AutoModelForSequenceClassification": "Rwkv7DeepEmbedForSequenceClassification",
    },
    exports={"Rwkv7DeepEmbedCache": "cache_rwkv7_deep_embed"},
    describe=describe,
    costs=costs,
    adapter_targets=dataclasses.replace(
        RWKV7.adapter_targets,
        projections=[*RWKV7.adapter_targets.projections, "qq", "s_emb_x", "k_emb_x", "v_emb_x"],
        norms=[*RWKV7.adapter_targets.norms, "lnq", "lnk", "lnv"],
    ),
    recipe=RWKV7.recipe,  # no trainer of these models is published
    vllm=Serving(
        refusal="its blocks look up rows of tables by token ids, which the blocks of the plug-in do not get, and the "
        "keys of RWKV-7b are narrower than its values"
    ),
    support=Support(
        checkpoints="`.pth` of the trainer",
        parity="the authors' demos; RWKV-7a: the package `rwkv`",
        state="RWKV-7a: constant; RWKV-7b: a key and a value per token",
        dtypes="yes (states in float32, keys and values not)",
        tensor_parallel="heads, states, tables; attention is not split",
        export="prefill and decoding; not in ONNX",
    ),
    presets={"rwkv7a-0.1b": SIZES, "rwkv7b-0.1b": {**SIZES, "dea_size": 256}},
    tunable_state=RWKV7.tunable_state,
    fused=dataclasses.replace(
        RWKV7.fused,
        kind="deep_delta_wkv",
        classes={**RWKV7.fused.classes, "": "Rwkv7DeepEmbedBlock", "ffn": "Rwkv7DeepEmbedChannelMixing"},
        layers={**RWKV7.fused.layers, "qkv": "qkv"},  # refuses RWKV-7b, whose attention is not a linear layer
        parameters={
            **RWKV7.fused.parameters,
            "factor.base": "ffn.s0",
            "factor.down": "ffn.s1",
            "factor.up": "ffn.s2",
        },
        optional=(*RWKV7.fused.optional, "qkv"),
        start=fused_start,
    ),
)

__all__ = ["RWKV7_DEEP_EMBED"]
