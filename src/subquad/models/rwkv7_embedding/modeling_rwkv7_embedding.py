"""EmbeddingRWKV (arXiv:2601.07861): embeddings of texts from Goose (RWKV-7), by a head for each task."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils import can_return_tuple

from ...modeling.arguments import check_strings, checks_arguments
from ...modeling.base import RecurrentPreTrainedModel
from ...modeling.cache import RecurrentCache, accept_cache
from ...modeling.layers import LayerNorm, Linear, check_inputs
from ...modeling.padding import find_mask, should_check
from ...modeling.versions import RecurrentModelOutput, cache_of, named_cache
from ..rwkv7.modeling_rwkv7 import Rwkv7Model
from .configuration_rwkv7_embedding import (
    DOCUMENT,
    QUERY,
    QUERY_AFTER_DOCUMENT,
    Rwkv7EmbeddingConfig,
)


# The tasks that sentence-transformers names in `encode_query` and `encode_document`: either side of a retrieval.
SIDES = ("query", "document")


def init_linear(layer: nn.Linear) -> None:
    """Initialises a head's layer as torch does, without a bias: no rule is published."""
    init.kaiming_uniform_(layer.weight, a=5**0.5)
    if layer.bias is not None:
        init.zeros_(layer.bias)


@dataclass
class Rwkv7EmbeddingOutput(RecurrentModelOutput):
    """
    `BaseModelOutputWithPast` with the embeddings.

    Attributes:
        pooler_output: (batch, hidden_size), not divided by their norm; None if no token of the call ends a text.
    """

    pooler_output: torch.Tensor | None = None


class Rwkv7EmbeddingCache(RecurrentCache):
    """The states of the embedding model. They also fit a reranker that has this model in it."""

    @classmethod
    def sizes_of(cls, config: PreTrainedConfig) -> dict[str, Any]:
        """As in [`RecurrentCache`], with the embedding model's type for a reranker too."""
        return super().sizes_of(config) | {"model_type": Rwkv7EmbeddingConfig.model_type}


class Rwkv7EmbeddingHead(nn.Module):
    """The embedding of one task: norm(p + W2 relu(W1 p))."""

    def __init__(self, config: Rwkv7EmbeddingConfig):
        super().__init__()
        width = config.hidden_size
        self.fc1 = Linear(width, width, bias=False)
        self.fc2 = Linear(width, width, bias=False)
        self.norm = LayerNorm(width, eps=config.norm_eps)

    def forward(self, p: torch.Tensor) -> torch.Tensor:
        """p and the output (batch, hidden_size)."""
        return self.norm(p + self.fc2(torch.relu(self.fc1(p))))


class Rwkv7EmbeddingPreTrainedModel(RecurrentPreTrainedModel):
    config: Rwkv7EmbeddingConfig
    config_class = Rwkv7EmbeddingConfig
    cache_class = Rwkv7EmbeddingCache
    base_model_prefix = "model"
    _no_split_modules = ["Rwkv7Block"]
    # Present in published files, but unused.
    _keys_to_ignore_on_load_unexpected = [r"blocks\.0\.att\.v[012]$"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The heads; the blocks have their own rules."""
        if isinstance(module, nn.Linear):
            init_linear(module)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.rwkv.emb

    def set_input_embeddings(self, new_embeddings: nn.Module) -> None:
        self.rwkv.emb = new_embeddings


class Rwkv7EmbeddingModel(Rwkv7EmbeddingPreTrainedModel):
    """
    Goose's blocks (`rwkv`), and the heads of the tasks (`head`). `model.rwkv.load_state_dict` takes the blocks of a
    Goose that generates text, for training.
    """

    def __init__(self, config: Rwkv7EmbeddingConfig):
        super().__init__(config)
        self.rwkv = Rwkv7Model(config)
        self.head = nn.ModuleDict({f"{task}_head": Rwkv7EmbeddingHead(config) for task in config.tasks})
        self.post_init()

    def find_head(self, task: str | None) -> Rwkv7EmbeddingHead:
        """
        The head of a task. None, "query" and "document" mean `config.default_task`.

        Raises:
            ValueError: if there is no such task; the message lists the tasks.
        """
        name = self.config.default_task if task is None or task in SIDES else task
        if name not in self.config.tasks:
            raise ValueError(f"`task` must be one of {', '.join((*self.config.tasks, *SIDES))}, got {task!r}.")
        return self.head[f"{name}_head"]

    def find_ends(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
        """
        Real tokens with the id `config.end_token_id`, bool (batch, length). None if there are none.

        Raises:
            ValueError: if some rows have none.
        """
        ends = input_ids == self.config.end_token_id
        mask = find_mask(attention_mask, *input_ids.shape, input_ids.device)
        ends = ends if mask is None else ends & mask
        if not should_check(input_ids):
            return ends  # the embedding of a row without one is NaN
        found = ends.any(1).tolist()
        if any(found) and not all(found):
            raise ValueError(
                f"`input_ids`, row {found.index(False)}: no real token has the id {self.config.end_token_id} "
                "(`end_token_id`), at which texts are pooled, but other rows have it."
            )
        return ends if any(found) else None

    @checks_arguments
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        cache: RecurrentCache | None = None,
        use_cache: bool | None = None,
        task: str | None = None,
        **kwargs,
    ) -> Rwkv7EmbeddingOutput:
        """
        Args:
            input_ids: (batch, length). Each text ends with `config.end_token_id`; if it has several such tokens, their
                mean is pooled. Embeddings cannot be given instead, because pooling looks for the id.
            attention_mask: (batch, length), 0 for padding, which may be anywhere in a row and changes nothing. The
                authors read padding as tokens of the id 0; a mask of ones does the same.
            cache: the states after earlier tokens, updated in place; also as `past_key_values`. A text may be read in
                several calls; only tokens of the last one are pooled.
            use_cache: whether to return the states. If None, `config.use_cache`, but not in training.
            task: the head, one of `config.tasks`; `config.default_task` if None, "query" or "document".

        Returns:
            pooler_output (batch, hidden_size), the embeddings, whose similarity is their cosine; None if no row has
            a token to pool. last_hidden_state, cache and hidden_states as in [`Rwkv7Model`].

        Raises:
            ValueError: before any work, if an argument does not fit; the message names it.
        """
        return self.embed(input_ids, task, attention_mask=attention_mask, cache=cache, use_cache=use_cache, **kwargs)

    def embed(self, input_ids: torch.Tensor, task: str | None = None, **options: Any) -> Rwkv7EmbeddingOutput:
        """The embeddings, also of a model whose `forward` gives something else; see there."""
        head = self.find_head(task)
        ends = self.find_ends(check_inputs(self.config, input_ids, None), options.get("attention_mask"))
        outputs = self.read(input_ids, **options)
        x, pooled = outputs.last_hidden_state, None
        if ends is not None:
            ends = ends.to(x.device).unsqueeze(-1)
            pooled = head(((x.float() * ends).sum(1) / ends.sum(1)).to(x.dtype))
        return Rwkv7EmbeddingOutput(
            last_hidden_state=x,
            pooler_output=pooled,
            hidden_states=outputs.hidden_states,
            **named_cache(cache_of(outputs)),
        )

    def query_text(self, query: str) -> str:
        """The text of a query for its embedding."""
        check_strings(query=query)
        return QUERY.format(instruction=self.config.instruction, query=query)

    def document_text(self, document: str) -> str:
        """The text of a document for a reranker, without an end token. A query follows it."""
        check_strings(document=document)
        return DOCUMENT.format(instruction=self.config.instruction, document=document)

    def query_after_document(self, query: str) -> str:
        """The text of a query for a reranker, after [`document_text`]."""
        check_strings(query=query)
        return QUERY_AFTER_DOCUMENT.format(query=query)

    def read(
        self,
        input_ids: torch.Tensor,
        cache: RecurrentCache | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> RecurrentModelOutput:
        """The output of the blocks alone, with a cache that also fits a reranker. For the arguments see `forward`."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = accept_cache(cache, self.cache_class)
        if cache is None and use_cache:
            cache = self.new_cache()
        return self.rwkv(input_ids, cache=cache, use_cache=use_cache, **options | {"return_dict": True})


__all__ = ["Rwkv7EmbeddingCache", "Rwkv7EmbeddingModel", "Rwkv7EmbeddingPreTrainedModel"]
