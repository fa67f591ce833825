"""Positions of a call's tokens in the splits of their texts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...modeling.padding import Tokens


@dataclass
class Text:
    """
    The tokens of a call. Each text (a row of the batch, or a packed document) begins with a split.

    Attributes:
        splits: embeddings, zero where there is no token: (texts, splits, chunk_size, d_embed). Texts of different
            lengths follow one another as a single text.
        tokens: the tokens of the call.
        position: the index of each token of the call among the tokens of `splits`, (batch * length); for padding, the
            one after the last. None if the tokens are in the same order as in the batch.
        first, end: number of the split that begins the text of each split, and of the one after its last, (1, splits).
            None if they are 0 and the number of splits.
        longest: number of splits of the longest text, or more while a graph is traced.
    """

    splits: torch.Tensor
    tokens: Tokens
    position: torch.Tensor | None
    first: torch.Tensor | None
    end: torch.Tensor | None
    longest: int

    def in_batch(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The tokens of the call, (batch, length, width), from all splits, (splits, chunk_size, width) each."""
        x = torch.cat([part.flatten(0, 1) for part in parts])
        batch, length, width = self.tokens.batch, self.tokens.length, x.shape[-1]
        if self.position is None:
            return x.view(batch, -1, width)[:, :length]
        return F.pad(x, (0, 0, 0, 1))[self.position.to(x.device)].view(batch, length, width)


def read_text(x: torch.Tensor, tokens: Tokens, size: int) -> Text:
    """The embeddings of a call, x (batch, length, d_embed), zero for padding, in splits of `size` tokens."""
    if tokens.mask is None and tokens.cu_seqlens is None:
        splits = torch.unflatten(F.pad(x, (0, 0, 0, -x.shape[1] % size)), 1, (-1, size))
        return Text(splits, tokens, None, None, None, splits.shape[1])

    device, x = x.device, x.flatten(0, 1)
    if tokens.mask is not None:
        lengths = tokens.mask.sum(1)
        document = torch.arange(tokens.batch, device=device).repeat_interleave(tokens.length)
        offset = tokens.mask.cumsum(1).flatten() - 1
    else:
        bounds, step = tokens.cu_seqlens.long(), torch.arange(x.shape[0], device=device)
        lengths = bounds.diff()
        document = torch.searchsorted(bounds[1:], step, right=True)
        offset = step - bounds[document]
    numbers = -(-lengths // size)  # in splits
    ends = numbers.cumsum(0)
    begins = ends - numbers

    # While a graph is traced, the maximum number of splits for any lengths.
    splits, longest = (x.shape[0] + lengths.shape[0] * (size - 1)) // size, -(-tokens.length // size)
    if (known := tokens.known_lengths()) is not None:
        known = -(-known // size)
        splits, longest = max(int(known.sum()), 1), max(int(known.max()), 1)
    position = begins[document] * size + offset
    if tokens.mask is not None:
        position = position.where(tokens.mask.flatten(), splits * size)
    rows = x.new_zeros(splits * size + 1, x.shape[1]).index_copy(0, position, x)[:-1]
    document = torch.searchsorted(ends, torch.arange(splits, device=device), right=True)
    document = document.clamp_max(lengths.shape[0] - 1)
    return Text(
        rows.view(1, splits, size, -1), tokens, position, begins[None, document], ends[None, document], longest
    )


__all__ = ["Text", "read_text"]
