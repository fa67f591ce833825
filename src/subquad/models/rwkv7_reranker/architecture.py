"""The descriptor of EmbeddingRWKV's reranker."""

from ..architecture import Architecture, Costs, Support
from ..rwkv7_embedding.architecture import RWKV7_EMBEDDING, SIZES, SUPPORT


# The fields of the reranker's own blocks, which have the sizes of the embedding model's in published files.
OWN = ("num_hidden_layers", "decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")


def describe(config) -> list[str]:
    return [*RWKV7_EMBEDDING.describe(config), f"a reranker of {config.reranker_config.num_hidden_layers} layers"]


def costs(config, parameters: int) -> Costs:
    """State and FLOPs of the embedding model for a token of the text. The reranker reads one token for each score."""
    return RWKV7_EMBEDDING.costs(config, RWKV7_EMBEDDING.count_parameters(config))


RWKV7_RERANKER = Architecture(
    model_type="rwkv7_reranker",
    folder="rwkv7_reranker",
    title="EmbeddingRWKV's reranker",
    summary="scores of documents and queries from the states of EmbeddingRWKV",
    config="Rwkv7RerankerConfig",
    heads={
        "AutoModel": "Rwkv7RerankerModel",
        "AutoModelForSequenceClassification": "Rwkv7RerankerForSequenceClassification",
    },
    describe=describe,
    costs=costs,
    adapter_targets=RWKV7_EMBEDDING.adapter_targets,
    recipe=RWKV7_EMBEDDING.recipe,
    support=Support(**SUPPORT, pipelines="sentence-transformers"),
    vllm=RWKV7_EMBEDDING.vllm,
    presets={
        f"goose-reranker-{size}": {
            **RWKV7_EMBEDDING.presets[f"goose-embedding-{size}"],
            "reranker_config": {name: RWKV7_EMBEDDING.presets[f"goose-embedding-{size}"][name] for name in OWN},
        }
        for size in SIZES
    },
    embedder=RWKV7_EMBEDDING.embedder,
    files=RWKV7_EMBEDDING.files,
)

__all__ = ["RWKV7_RERANKER"]
