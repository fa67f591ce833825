"""The reranker of EmbeddingRWKV (arXiv:2601.07861): one learned token reads the states after document and query."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers.utils import can_return_tuple

from subquad_kernels.tracing import can_read_values

from ...modeling.arguments import checks_arguments
from ...modeling.cache import RecurrentCache
from ...modeling.layers import Linear, check_inputs
from ...modeling.versions import RecurrentClassifierOutput, cache_of, named_cache
from ..rwkv7.configuration_rwkv7 import Rwkv7Config
from ..rwkv7.modeling_rwkv7 import Rwkv7Model
from ..rwkv7_embedding.modeling_rwkv7_embedding import Rwkv7EmbeddingModel, init_linear
from .configuration_rwkv7_reranker import Rwkv7RerankerConfig


class Rwkv7StateReader(Rwkv7Model):
    """Blocks of Goose that read one learned token after given states, and a score of their output."""

    def __init__(self, config: Rwkv7Config):
        super().__init__(config)
        width = config.hidden_size
        self.head = nn.Sequential(Linear(width, width), nn.Tanh(), Linear(width, 1, bias=False))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The head as torch does, the blocks as in Goose."""
        super()._init_weights(module)
        if isinstance(module, Linear) and not hasattr(module, "gain"):
            init_linear(module)

    def score(self, states: list[torch.Tensor]) -> torch.Tensor:
        """
        Args:
            states: for each block the state (batch, heads, head_dim, head_dim) before its token. They stay unchanged.

        Returns:
            the scores, (batch, 1).
        """
        cache = self.new_cache()
        for layer, state in zip(cache.layers, states, strict=True):
            layer.write("wkv", state)
            layer.aliased.add("wkv")
        token = torch.zeros(len(states[0]), 1, dtype=torch.long, device=self.emb.weight.device)
        return self.head(self(token, cache=cache, use_cache=True).last_hidden_state[:, -1])


class Rwkv7RerankerModel(Rwkv7EmbeddingModel):
    """The embedding model in a reranker's directory, without the reranker."""

    config: Rwkv7RerankerConfig
    config_class = Rwkv7RerankerConfig
    _keys_to_ignore_on_load_unexpected = [
        *Rwkv7EmbeddingModel._keys_to_ignore_on_load_unexpected,
        r"^reranker\.",
    ]


class Rwkv7RerankerForSequenceClassification(Rwkv7EmbeddingModel):
    """
    Scores of a document and a query, which the embedding model reads one after the other. The reranker (`reranker`)
    reads only its states. So a document can be read once, and each query continues from a copy of its states.
    """

    config: Rwkv7RerankerConfig
    config_class = Rwkv7RerankerConfig
    # The loss is a mean; `Trainer` weights it.
    accepts_loss_kwargs = False

    def __init__(self, config: Rwkv7RerankerConfig):
        super().__init__(config)
        self.num_labels = 1
        self.reranker = Rwkv7StateReader(config.reranker_config)
        self.post_init()

    def score(self, cache: RecurrentCache) -> torch.Tensor:
        """
        The scores (batch, 1) of document and query, from the embedding model's states after both. Positive means
        relevant; the sigmoid is a probability. The cache stays unchanged.
        """
        states = [cache.layers[layer].states["wkv"] for layer in self.config.read_layers]
        return self.reranker.score([state.to(self.reranker.device) for state in states])

    @checks_arguments
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        cache: RecurrentCache | None = None,
        use_cache: bool | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> RecurrentClassifierOutput:
        """
        Args:
            input_ids: (batch, length), the pair of document and query, or the part of it after `cache`.
            attention_mask: (batch, length), 0 for padding, which may be anywhere in a row and changes nothing. The
                authors read padding as tokens of the id 0; a mask of ones does the same.
            cache: the states after the document, updated in place; also as `past_key_values`. Clone it to read
                another query after the same document.
            use_cache: whether to return the states. If None, `config.use_cache`, but not in training.
            labels: (batch), from 0 (not relevant) to 1 (relevant).

        Returns:
            loss, the mean binary cross-entropy, if `labels` are given; logits (batch, 1), cache, hidden_states.

        Raises:
            ValueError: before any work, if an argument does not fit; the message names it.
        """
        check_inputs(self.config, input_ids, None)
        if labels is not None and labels.numel() != len(input_ids):
            raise ValueError(f"`labels` must be ({len(input_ids)},), one for each row, got {tuple(labels.shape)}.")
        if labels is not None and can_read_values(labels) and not ((labels >= 0) & (labels <= 1)).all():
            raise ValueError(f"`labels` must be from 0 to 1, got {labels.tolist()}.")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        outputs = self.read(input_ids, cache, True, attention_mask=attention_mask, **kwargs)
        states = cache_of(outputs)
        logits = self.score(states)
        loss = None
        if labels is not None:
            labels = labels.reshape(-1, 1).to(logits.device, torch.float32)
            loss = binary_cross_entropy_with_logits(logits.float(), labels)
        return RecurrentClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **named_cache(states if use_cache else None)
        )


__all__ = ["Rwkv7RerankerForSequenceClassification", "Rwkv7RerankerModel"]
