"""
Chunks of tokens, which recurrences in plain torch compute together.

Inside a chunk the token pairs are covered by halving. Of two neighbouring blocks, every token of the right one reads
every token of the left one in one matrix product, after the reads have been decayed from the boundary of the blocks to
their token and the writes from their token to the boundary. The blocks then merge, and blocks twice as long follow.

Every factor is the exponential of a sum of log decays, never of a difference. So none exceeds 1 or suffers
cancellation, for any decays. The price is log2(chunk) products over blocks instead of one over chunks. (The slot
memory begins with blocks longer than one token where its decays are weak enough for one product.)
"""

import itertools

import torch

from .backend import cdiv
from .documents import document_bounds


CHUNK_SIZE = 64
# A chunk is halved while gaps lengthen the sequences by more than this factor, but not below SHORTEST tokens.
MOST_FILLED = 1.25
SHORTEST = 16


class ChunkLayout:
    """
    The layout of sequences in chunks: (B, T, H, .) <-> (B, H, N, C, .). Gaps are filled with zeros, tokens that change
    nothing.

    Attributes:
        chunk: C, the number of tokens of a chunk, at most `chunk_size`.
        chunks: the number of chunks of each sequence. A state passes through them and starts over after them.
        packed: whether the sequences are documents of one row.
    """

    def __init__(
        self, length: int, cu_seqlens: torch.Tensor | None, device: torch.device, chunk_size: int = CHUNK_SIZE
    ):
        bounds = document_bounds(cu_seqlens, length)
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        self.length = length
        chunk = min(chunk_size, 1 << max(max(lengths) - 1, 0).bit_length())
        while chunk > SHORTEST and chunk * sum(cdiv(n, chunk) for n in lengths) > MOST_FILLED * sum(lengths):
            chunk //= 2
        self.chunk, self.chunks = chunk, [cdiv(n, chunk) for n in lengths]
        self.packed = len(lengths) > 1
        if self.packed:
            first = [sum(self.chunks[:n]) * self.chunk for n in range(len(lengths))]
            tokens = [torch.arange(a, a + n) for a, n in zip(first, lengths, strict=True)]
            self._index = torch.cat(tokens).to(device)

    def chunks_of(self, x: torch.Tensor) -> torch.Tensor:
        """As [`to_chunks`]; a view of x if there are no gaps."""
        filled = sum(self.chunks) * self.chunk
        if self.packed:
            x = x.new_zeros(1, filled, *x.shape[2:]).index_copy_(1, self._index, x)
        elif filled != self.length:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, filled - self.length))
        return torch.unflatten(x, 1, (-1, self.chunk)).permute(0, 3, 1, 2, 4)

    def to_chunks(self, x: torch.Tensor) -> torch.Tensor:
        return self.chunks_of(x).contiguous()

    def from_chunks(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1, 4).flatten(1, 2)
        return x[:, self._index] if self.packed else x[:, : self.length]

    def state_of(self, states: torch.Tensor, sequence: int) -> torch.Tensor:
        """The state of one document, or the states of all rows, which pass through the chunks together."""
        return states[sequence : sequence + 1] if self.packed else states


def halves(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The left and the right block of every pair of blocks: (..., C, D) -> (..., C / 2 / block, block, D) each."""
    return torch.unflatten(x, -2, (-1, 2, block)).unbind(-3)
