"""The cache of Avey."""

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import StaticCache

from subquad_kernels import maxsim

from ...modeling.growing_cache import GrowingCache
from ...modeling.padding import Tokens, read_values


class AveyCache(GrowingCache):
    """
    The embeddings of all tokens of a text: the cache grows with the text, because the ranker may retrieve any earlier
    split. The blocks have no states, because the weights of retrieved splits change with every token. But their output
    for the rows of missing splits is computed only once, so a cache belongs to the weights of the model that filled
    it.

    The states are kept after the blocks:

    - `embeddings` (batch, room, d_embed): the tokens of each row from its first position on, then zeros.
    - `lengths` (batch): number of tokens of each row, without padding.
    - `sums` (batch, room / chunk_size), float32: MaxSim scores of the split with a row's last token against every
      earlier split; zero if there is none.

    Args:
        config, static, max_cache_len: see [`GrowingCache`]; a unit of room is a split.
    """

    size_names = (*GrowingCache.size_names, "chunk_size")
    recurrent_names = convolution_names = ()
    float32_names = ("sums",)
    # package only
    packed_names = ("embeddings",)

    def __init__(self, config: PreTrainedConfig, static: bool = False, max_cache_len: int | None = None):
        self.unit = config.chunk_size
        self.growing = {"embeddings": 1, "sums": config.chunk_size}
        super().__init__(config, static, max_cache_len)
        # Inputs of each block's contextualizer for the rows of missing splits, the same for every text.
        self.zero_rows: list[torch.Tensor] | None = None

    # package only
    def state_shapes(self, config: PreTrainedConfig, number: int | None) -> dict[str, tuple[int | None, ...]]:
        if number is not None:
            return {}
        return {"embeddings": (None, config.hidden_size), "sums": (None,), "lengths": (), "padding": ()}

    @property
    def num_elements(self) -> int:
        return sum(state.numel() for name, state in self.after_blocks.states.items() if name != "padding")

    def keep_scores(self, scores: torch.Tensor) -> None:
        """Keeps the scores (batch, splits) of the split with each row's last token; -inf means no candidate."""
        room = self.after_blocks.states["embeddings"].shape[1] // self.unit
        sums = scores.detach().masked_fill(scores.isneginf(), 0.0)
        self.after_blocks.write("sums", torch.nn.functional.pad(sums, (0, room - sums.shape[1])))

    def replace(self, embeddings: torch.Tensor, lengths: torch.Tensor, tokens: Tokens) -> None:
        """Replaces the embeddings and lengths, after a call in which documents began."""
        self.after_blocks.write("embeddings", embeddings)
        self.after_blocks.write("lengths", lengths)
        self.advance(tokens)

    def known_lengths(self) -> np.ndarray:
        """
        The values of `lengths`. Synchronizes with a GPU only if the host has no copy: if the cache is static, or was
        reordered, cropped, copied or loaded.
        """
        lengths = self.after_blocks.states["lengths"]
        known = getattr(lengths, "known_values", None)
        if known is None:
            known = read_values(lengths=lengths)["lengths"]
            self.know_lengths(known)
        return known

    def know_lengths(self, values: np.ndarray) -> None:
        """Attaches the values of `lengths` to its tensor, which a static cache overwrites."""
        if not self.after_blocks.static:
            self.after_blocks.states["lengths"].known_values = values

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        states = self.after_blocks.states
        if "embeddings" not in states:
            return
        lengths, splits = states["lengths"], torch.unflatten(states["embeddings"], 1, (-1, self.unit))
        number = (lengths[:, None] - 1).clamp_min(0) // self.unit
        current = splits[torch.arange(len(splits), device=lengths.device)[:, None], number]
        self.keep_scores(maxsim(current, splits, number)[:, 0])

    def reset(self) -> None:
        super().reset()
        self.zero_rows = None


class StaticAveyCache(AveyCache, StaticCache):
    """A static [`AveyCache`], which transformers recognises as a static cache."""


AveyCache.static_class = StaticAveyCache


__all__ = ["AveyCache"]
