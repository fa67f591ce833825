"""The descriptor of Avey-B."""

from ..architecture import AdapterTargets, Architecture, Costs, OptimizerRecipe, Serving, Support


def describe(config) -> list[str]:
    return [f"splits of {config.chunk_size}, each read with {config.k} others"]


def costs(config, parameters: int) -> Costs:
    """
    FLOPs of the matrix products for a token of a full split: compressor, enricher, mixing (a dynamic layer's are twice
    a static one's) and fuser of every layer, and the head. The ranker, at most `2 d_embed` for every earlier token,
    and elementwise operations are not counted.
    """
    rows, half = config.context_size, config.tail_size // 2
    features = config.expansion_factor * config.d_embed
    weights = features * config.d_embed + (features - half) * config.d_embed  # enricher, fuser
    # The weighted sum of all rows of the window; a dynamic layer computes their similarities first.
    products = sum(2 if dynamic else 1 for dynamic in config.dynamic_layers)
    row = 2 * config.n_layers * weights + 2 * products * rows * half
    compressor = 2 * (config.k + 1) * config.chunk_size * config.d_embed if config.compressor else 0
    # Without a compressor the layers compute the whole window for the tokens of one split.
    inference = compressor + row * (rows // config.chunk_size) + 2 * config.vocab_size * config.d_embed
    return Costs(inference, 3 * inference)


AVEY_B = Architecture(
    model_type="avey-b",
    folder="avey_b",
    title="Avey-B",
    summary="Avey as a bidirectional encoder, with static and dynamic layers",
    config="AveyBConfig",
    heads={
        "AutoModel": "AveyBModel",
        "AutoModelForMaskedLM": "AveyBForMaskedLM",
        "AutoModelForQuestionAnswering": "AveyBForQuestionAnswering",
        "AutoModelForSequenceClassification": "AveyBForSequenceClassification",
        "AutoModelForTokenClassification": "AveyBForTokenClassification",
    },
    describe=describe,
    costs=costs,
    adapter_targets=AdapterTargets(
        projections=["enricher", "fuser"],
        scaled=["enricher"],
        feed_forward=["fuser"],
        norms=["norm", "ln_f"],
    ),
    # Appendix B, which does not specify what decays; matrices, as in Avey.
    recipe=OptimizerRecipe(
        weight_decay=0.01,
        betas=(0.95, 0.95),
        eps=1e-18,
        matrices=("spatial_proj", "down_proj"),
        peak="5e-4 (base), 2.5e-4 (large)",
        warmup="a tenth of the steps",
        decay="cosine to zero",
    ),
    vllm=Serving(refusal="it is an encoder, which reads a text at once and keeps no state"),
    support=Support(
        checkpoints="`.pth` of the trainer, Hub directories",
        parity="both published variants",
        state="none",
        dtypes="yes",
        tensor_parallel="linear layers",
        export="its forward pass; not in ONNX, which cannot search as it does",
        pipelines="fill-mask, classification, tokens, question answering, features",
        serving="no: an encoder",
        lm_eval="no: an encoder",
        trainers="yes (TRL is for causal models)",
        state_tuning="no: an encoder",
    ),
    # The published models; table 3 of the paper has their numbers of parameters.
    presets={
        "avey-b-base": {"d_embed": 768, "n_layers": 30},
        "avey-b-large": {"d_embed": 1024, "n_layers": 46},
    },
)

__all__ = ["AVEY_B"]
