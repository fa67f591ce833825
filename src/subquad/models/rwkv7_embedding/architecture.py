"""The descriptor of EmbeddingRWKV's embedding model."""

from ..architecture import Architecture, Embedder, Serving, Support
from ..rwkv7.architecture import RWKV7


NO_TEXT = "no: it generates no text"
# Of published files: width and layers are those of the World models that training began with.
SIZES = {"0.1b": "goose-0.1b", "0.4b": "goose-0.4b", "1.4b": "goose-1.5b"}
# Shared with the reranker, which has this model in it.
SUPPORT = {
    "checkpoints": "`.pth` of the trainer",
    "parity": "the package `rwkv-emb`",
    "state": "constant",
    "dtypes": "yes (states in float32)",
    "tensor_parallel": "no",
    "export": "not tested",
    "serving": NO_TEXT,
    "lm_eval": NO_TEXT,
    "adapters": "LoRA",
    "trainers": "sentence-transformers",
    "distributed": "not tested",
    "quantization": "not tested",
    "state_tuning": "no: its first state is part of what was trained",
}

RWKV7_EMBEDDING = Architecture(
    model_type="rwkv7_embedding",
    folder="rwkv7_embedding",
    title="EmbeddingRWKV",
    summary="Goose as a model of embeddings, with a head for each task",
    config="Rwkv7EmbeddingConfig",
    heads={"AutoModel": "Rwkv7EmbeddingModel"},
    describe=RWKV7.describe,
    costs=RWKV7.costs,
    adapter_targets=RWKV7.adapter_targets,
    recipe=RWKV7.recipe,
    support=Support(**SUPPORT, pipelines="sentence-transformers"),
    vllm=Serving(refusal="this plug-in serves models that generate text"),
    presets={f"goose-embedding-{size}": RWKV7.presets[name] for size, name in SIZES.items()},
    embedder=Embedder(weights=("rwkv.", "head."), fields=("norm_eps", "end_token_id", "default_task", "instruction")),
    files=(
        *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
        *("[0-9]*_*/*.json", "[0-9]*_*/*.safetensors"),  # its other modules, such as `1_Normalize`
    ),
)

__all__ = ["RWKV7_EMBEDDING"]
