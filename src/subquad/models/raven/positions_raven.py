"""Positions of the tokens that Raven reads, and the keys that softmax attention in hybrids sees."""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.utils.generic import is_flash_attention_requested

from ...modeling.layer_state import LayerState
from ...modeling.padding import Tokens
from ...modeling.positions import TokenPositions
from ...modeling.ring import restart
from .cache_raven import RavenCache
from .configuration_raven import RavenConfig


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or in float64 if it already is: decays and angles need more digits than 16 bits hold."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Reach(NamedTuple):
    """
    The keys that the tokens of a call see, in layers with the same window.

    Attributes:
        own: whether the tokens read their own keys, behind the keys that a cache held before. If not, they read the
            cache as it is after the call: a single token, or attention without a window.
        held: the rows of a window's ring that are read before their own keys, (batch, window); None without such rows.
        room: number of rows to read from a cache without a window.
        mask: (batch or 1, 1, length, keys), True where a token sees a key; None if attention is simply causal.
        varlen: for flash attention, which takes no mask: the indices of the querying tokens and of the keys, in the
            concatenated rows, and the boundaries of the documents among both.
    """

    own: bool
    held: torch.Tensor | None
    room: int
    mask: torch.Tensor | None
    varlen: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None

    def pack(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Query, key and value (batch, length, heads, size), packed for flash attention, and its other arguments."""
        if self.varlen is None:
            return [q, k, v], {}
        queries, keys, q_bounds, k_bounds = self.varlen
        sizes = {"max_length_q": q.shape[1], "max_length_k": k.shape[1]}
        packed = [x.flatten(0, 1)[None, index] for x, index in ((q, queries), (k, keys), (v, keys))]
        return packed, {"cu_seq_lens_q": q_bounds, "cu_seq_lens_k": k_bounds, **sizes}

    def unpack(self, out: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """The output of packed attention as (batch, length, channels), zero for padding."""
        if self.varlen is not None:
            out = out.new_zeros(batch * length, *out.shape[2:]).index_copy(0, self.varlen[0], out[0])
        return out.reshape(batch, length, -1)


@dataclasses.dataclass
class RavenPositions(TokenPositions):
    """
    The tokens of a call, as all layers need them.

    Attributes:
        reaches: the reach of attention, by its window.
        rotations: cosines and sines of rotary embeddings, by the size of a head and theta.
    """

    reaches: dict[int | None, Reach] = dataclasses.field(default_factory=dict)
    rotations: dict[tuple[int, float], tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def add_rotation(self, size: int, theta: float) -> None:
        """Computes the rotary embeddings of heads of that size."""
        frequencies = theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=self.position.device) / -size)
        angles = (self.position[..., None] * frequencies)[:, :, None]
        self.rotations[size, theta] = angles.cos(), angles.sin()

    def rotate(self, x: torch.Tensor, theta: float) -> torch.Tensor:
        """Rotary embeddings of x, (batch, length, heads, size)."""
        cos, sin = self.rotations[x.shape[-1], theta]
        left, right = at_least_float32(x).chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)

    def remember(
        self, cache: RavenCache | None, state: LayerState | None, name: str, x: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Writes keys or values x (batch, length, heads, size) to the cache; returns the ones to attend to."""
        if cache is None:
            return x
        reach = self.reaches[window]
        if window is not None:
            name, read = f"window_{name}", x
            if reach.held is not None:
                index = reach.held[..., None, None].expand(x.shape[0], -1, *x.shape[2:])
                read = torch.cat((state.get(name).gather(1, index), x), dim=1)
            ring = cache.update_window(state, name, x, self, window)
            return read if reach.own else ring
        if not reach.own:
            room = cache.capacity_for(x.shape[1])
            return cache.append(state, name, self.tokens.zero_padding(x), self.position, room)[:, : reach.room]
        read = torch.cat((state.get(name)[:, : reach.room], x), dim=1) if reach.room else x
        restart(state, name, x, self, cache.capacity_for(x.shape[1]))
        return read


def find_positions(config: RavenConfig, x: torch.Tensor, tokens: Tokens, cache: RavenCache | None) -> RavenPositions:
    """The positions of the tokens x (batch, length, hidden_size), after the cache's tokens."""
    if cache is not None and cache.growing:
        cache.capacity_for(x.shape[1])  # or an error, before anything has changed
    lengths = torch.zeros(x.shape[0], dtype=torch.long, device=x.device) if cache is None else cache.lengths(x)
    positions, flash = RavenPositions.after(lengths, tokens), is_flash_attention_requested(config)
    for spec in config.attention_specs:
        if spec["window_size"] not in positions.reaches:
            positions.reaches[spec["window_size"]] = find_reach(positions, spec["window_size"], cache, flash)
        if spec["use_rope"]:
            positions.add_rotation(config.hidden_size // spec["num_heads"], spec["rope_theta"])
    if config.use_rope:
        positions.add_rotation(config.head_k_dim, config.rope_theta)
    return positions


def find_reach(positions: RavenPositions, window: int | None, cache: RavenCache | None, flash: bool) -> Reach:
    """The reach of attention over a window; `flash`: for flash attention, which takes no mask."""
    packed, padded = positions.document is not None, positions.tokens.mask is not None
    alike = not (packed or padded or flash) and (cache is None or cache.same_lengths)
    rows, length = 1 if alike else positions.tokens.batch, positions.tokens.length  # one row for all if equal
    position, kept, device = positions.position[:rows], positions.kept[:rows], positions.position.device
    own, held, room = True, None, 0
    before = torch.zeros(rows, 0, dtype=torch.long, device=device)  # the positions of the keys of a cache
    real = before.bool()
    if cache is not None and not packed and (window is None or length == 1):
        own = False
        if window is None:
            room = cache.capacity_for(length)
            room = room if cache.is_compileable else min(room, cache.get_seq_length() + length)
            before = torch.arange(room, device=device).expand(rows, -1)
        else:
            before = position - (position - torch.arange(window, device=device)) % window
        real = (before >= 0) & (before <= position[:, -1:])
    elif cache is not None and cache.is_initialized:
        lengths = cache.lengths(positions.position)[:rows, None]
        if window is None:
            room = cache.capacity_for(0) if cache.is_compileable else cache.get_seq_length()
            before = torch.arange(room, device=device).expand(rows, -1)
            real = before < lengths
        else:
            before = lengths - window + torch.arange(window, device=device)
            held, real = before % window, before >= 0

    # No mask is needed if every token sees all keys up to its own, and none is missing.
    if own:  # while a graph is traced, it would be one of few lengths
        short = window is None or flash or (not torch.compiler.is_compiling() and length <= window)
        causal = before.shape[1] == 0 and short
    else:
        causal = window is None and not cache.is_compileable and cache.same_lengths
        causal = causal and room == cache.get_seq_length() + length and length in (1, room)
    mask = varlen = None
    if packed or padded or not causal:
        here = torch.ones_like(kept) if packed else kept
        if own:
            before, real = torch.cat((before, position), 1), torch.cat((real, here), 1)
        if flash:
            varlen = find_varlen(positions.tokens, here, real)
        else:
            mask = real[:, None] & (before[:, None] <= position[:, :, None])
            if window is not None:
                mask &= before[:, None] > position[:, :, None] - window
            if packed:
                first = torch.zeros_like(before[:, : before.shape[1] - length])
                mask &= positions.document[:, :, None] == torch.cat((first, positions.document), 1)[:, None]
            mask = (mask | ~here[:, :, None])[:, None]  # padding sees all keys: a softmax of none is not defined
    return Reach(own, held, room, mask, varlen)


def find_varlen(tokens: Tokens, here: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`Reach.varlen`, from the querying tokens `here` (batch, length), and the keys `real` (batch, keys)."""
    if tokens.cu_seqlens is None:
        queries, keys = here.sum(1), real.sum(1)
    else:
        queries = tokens.cu_seqlens.long().diff()
        keys = queries.clone()
        keys[tokens.first] += real[:, : real.shape[1] - tokens.length].sum(1)
    bounds = [F.pad(counts.cumsum(0), (1, 0)).int() for counts in (queries, keys)]
    return here.flatten().nonzero()[:, 0], real.flatten().nonzero()[:, 0], *bounds
