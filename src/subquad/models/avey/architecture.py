"""The descriptor of Avey."""

from ..architecture import AdapterTargets, Architecture, Costs, OptimizerRecipe, Serving, Support


def describe(config) -> list[str]:
    return [f"windows of {config.k} splits of {config.chunk_size}"]


def costs(config, parameters: int) -> Costs:
    """
    FLOPs of the matrix products of a full window, `k * chunk_size` rows: enricher, fuser and contextualizer of every
    block for all of these rows, and the head for one token. This is an upper bound, because rows that nothing reads
    are not computed. Inference recomputes the whole window for one more token. Training shares a window among the
    `chunk_size` tokens of a split. The ranker and elementwise operations are not counted. The cache keeps the
    embedding of every token; one score for every `chunk_size` tokens is not counted.
    """
    rows, half = config.extended_len, config.tail_size // 2
    features = config.expansion_factor * config.d_embed
    weights = features * config.d_embed + (features - half) * config.d_embed  # enricher, fuser
    # Similarities of every row with those up to it, and their weighted sum.
    contextualizer = 2 * 2 * (rows * (rows + 1) // 2) * half
    window = config.n_blocks * (2 * weights * rows + contextualizer)
    head = 2 * config.vocab_size * config.d_embed
    return Costs(window + head, 3 * (window // config.chunk_size + head), growing_state=config.d_embed)


AVEY = Architecture(
    model_type="avey",
    folder="avey",
    title="Avey",
    summary="a ranker that retrieves splits of the text, and a neural processor that contextualises them",
    config="AveyConfig",
    heads={
        "AutoModel": "AveyModel",
        "AutoModelForCausalLM": "AveyForCausalLM",
        "AutoModelForSequenceClassification": "AveyForSequenceClassification",
    },
    exports={"AveyCache": "cache_avey"},
    describe=describe,
    costs=costs,
    adapter_targets=AdapterTargets(
        projections=["enricher", "fuser"],
        scaled=["enricher"],
        feed_forward=["fuser"],
        norms=["rms_norm", "ln_f"],
    ),
    # Appendix A.
    recipe=OptimizerRecipe(
        weight_decay=0.1,
        betas=(0.9, 0.95),
        eps=1e-12,
        matrices=("spatial_proj",),
        peak="1e-3",
        warmup="none",
        decay="cosine to a tenth",
    ),
    vllm=Serving(
        refusal="it keeps the embedding of every token of a text, and vLLM has no memory that grows in this way"
    ),
    support=Support(
        checkpoints="`.pth` of the trainer, Hub directories",
        parity="the published model",
        state="one embedding per token",
        dtypes="yes",
        tensor_parallel="linear layers",
        export="prefill and decoding; not in ONNX, which cannot sort as it does",
        lm_eval="yes; exact with batch size 1, because lm-eval pads without a mask",
        state_tuning="no: it has no state, only the embeddings of all tokens",
    ),
    # Appendix A of "Don't Pay Attention" (arXiv:2506.11305).
    presets={
        "avey-0.1b": {"d_embed": 768, "n_blocks": 26},
        "avey-0.5b": {"d_embed": 768, "n_blocks": 104},
        "avey-1.5b": {"d_embed": 2048, "n_blocks": 48},
    },
)

__all__ = ["AVEY"]
