"""A tiny embedding model and a reranker with it, as directories with their tokenizers."""

import copy
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from subquad import (
    Rwkv7EmbeddingConfig,
    Rwkv7EmbeddingModel,
    Rwkv7RerankerConfig,
    Rwkv7RerankerForSequenceClassification,
)
from subquad.models.rwkv7_embedding.retrieval_files import save_embedding_files, save_reranker_files
from subquad_tokenizers import RwkvWorldTokenizerFast


NAMES = ("embedding-0.1b", "reranker-0.1b")


def save_pair(
    folder: Path, tokenizer: PreTrainedTokenizerBase | None = None, end: int = 65535, seed: int = 0, **fields
) -> tuple[Rwkv7EmbeddingModel, Rwkv7RerankerForSequenceClassification]:
    """Both models, whose parameters are neither zero nor constant, after they are saved under `NAMES`."""
    tokenizer = RwkvWorldTokenizerFast() if tokenizer is None else tokenizer
    sizes = {"vocab_size": end + 1, "end_token_id": end, "hidden_size": 32, "head_dim": 16, "num_hidden_layers": 2}
    torch.manual_seed(seed)
    reranker = Rwkv7RerankerForSequenceClassification(Rwkv7RerankerConfig(**sizes, **fields)).eval()
    with torch.no_grad():
        for parameter in reranker.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    embedder = Rwkv7EmbeddingModel(Rwkv7EmbeddingConfig(**sizes)).eval()
    weights = reranker.state_dict().items()
    embedder.load_state_dict({name: x for name, x in weights if not name.startswith("reranker.")})
    for name, model, save in zip(
        NAMES, (embedder, reranker), (save_embedding_files, save_reranker_files), strict=True
    ):
        model.save_pretrained(folder / name)
        save(folder / name, copy.deepcopy(tokenizer), model.config)
    return embedder, reranker
