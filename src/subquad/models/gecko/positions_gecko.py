"""Positions, chunks and documents of the tokens that Gecko reads, and the rings of a cache before and after them."""

import dataclasses
import functools

import torch
from torch import nn

from subquad_kernels import working_memory
from subquad_kernels.tracing import can_read_values

from ...modeling.layer_state import LayerState, States
from ...modeling.layers import replaceable
from ...modeling.padding import Tokens, is_exporting, reorder
from ...modeling.positions import TokenPositions
from ...modeling.ring import ring_state, write_to_ring
from .cache_gecko import GeckoCache
from .configuration_gecko import GeckoConfig


[working_memory] = replaceable(working_memory)  # here, because a cache replays it

Rows = dict[str, torch.Tensor]


@dataclasses.dataclass
class GeckoPositions(TokenPositions):
    """
    The tokens of a call, as all layers need them. Every row begins with its text: padding before and within it is
    moved to the end.

    Attributes:
        chunk_size: the number of tokens of a chunk.
        starts: True for tokens that begin a document, (batch, length); None if none does.
        real: True for tokens that are not padding, (batch, length); None without padding.
        cos, sin: of rotary embeddings, (batch or 1, length, 1, size of a head / 2).
        held: the rows of a ring that are read before the tokens of the call, (batch, held), from the oldest token on;
            None without such rows.
        first, aligned: see [`subquad_kernels.chunk_attention`].
        seen: see `mask` of [`subquad_kernels.chunk_attention_step`]: a single token reads the rings of a cache as they
            are. None if there are several tokens or no cache.
        leaving, begins, reads: see [`subquad_kernels.working_memory`].
        slots: the index of each row's rings and memory, for a single token, if the states of the cache are pools
            shared by many texts; see `indices` of the same operator.
        forgets: the value of `begins` for the chunk that leaves attention at a token, (batch, length); meaningless at
            other tokens.
        ring: capacity of the rings in tokens after the call.
        order: the index of each token in the given order, (batch, length); None if none was moved.
        back: the index here of each token of the given order.
        given_position, given_kept: `kept_position` and `kept` of the tokens in their given order.
        given_begin: the position at which each of their documents begins, (batch, length); None if BOS tokens do not
            begin documents.
        begins_after: the cache's ring `begins` after the call; None if there is none.
    """

    chunk_size: int = 0
    starts: torch.Tensor | None = None
    real: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    held: torch.Tensor | None = None
    first: torch.Tensor | None = None
    aligned: bool = False
    seen: torch.Tensor | None = None
    leaving: torch.Tensor | None = None
    begins: torch.Tensor | None = None
    reads: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    forgets: torch.Tensor | None = None
    ring: int = 0
    order: torch.Tensor | None = None
    back: torch.Tensor | None = None
    given_position: torch.Tensor | None = None
    given_kept: torch.Tensor | None = None
    given_begin: torch.Tensor | None = None
    begins_after: torch.Tensor | None = None

    def text_first(self, x: torch.Tensor) -> torch.Tensor:
        """Moves the texts in x (batch, length, ...) first."""
        return x if self.order is None else reorder(x, self.order)

    def as_given(self, x: torch.Tensor) -> torch.Tensor:
        """Restores the given order of x (batch, length, ...), whose texts come first."""
        return x if self.back is None else reorder(x, self.back)

    def rotate(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """Rotary embeddings of the first heads of x (batch, length, heads, size), by pairs of neighbors."""
        if heads == 0:
            return x
        left, right = torch.unflatten(x[:, :, :heads], -1, (-1, 2)).unbind(-1)
        pairs = left * self.cos - right * self.sin, left * self.sin + right * self.cos
        rotated = torch.stack(pairs, dim=-1).flatten(-2).to(x.dtype)
        return rotated if heads == x.shape[2] else torch.cat((rotated, x[:, :, heads:]), dim=2)

    def update(self, state: LayerState, name: str, after: torch.Tensor, operator, x: torch.Tensor) -> None:
        """Sets a state to `after`, its value after the tokens x. `operator` needs no other input to recompute it."""
        updates = ()
        if state.record_past:
            starts = torch.zeros_like(self.kept) if self.starts is None else self.starts
            updates = self.as_given(x), self.as_given(starts), self.given_kept
        state.update(name, after, functools.partial(replay, operator), *updates)

    def window(self, state: LayerState | None, rows: Rows) -> Rows:
        """
        The rows to read: the rows of the call's tokens, (batch, heads, length, size) each, behind the rows of earlier
        tokens. A single token reads the rings as they are.
        """
        if state is None or state.get("memory") is None:
            return rows
        if self.seen is not None:
            return {name: state.get(name) for name in rows}
        return {name: behind(state.get(name), x, self.held) for name, x in rows.items()}

    def keep(self, state: LayerState, rows: Rows, memory: torch.Tensor, normalizer: torch.Tensor) -> Rows:
        """Writes the rows of the call's tokens to the rings and stores the new memory; returns the rings."""
        if self.document is not None:  # the memory holds nothing of a last document of at most two chunks
            short = (self.kept_position[:, -1] < 2 * self.chunk_size)[:, None, None]
            memory, normalizer = memory.masked_fill(short[..., None], 0.0), normalizer.masked_fill(short, 0.0)
        rings, updates = {}, ()
        for name, x in rows.items():
            ring = state.get(name)
            ring = None if ring is None else ring.transpose(1, 2)
            ring = write_to_ring(state, name, ring, x.transpose(1, 2), self, self.ring)
            rings[name] = ring.transpose(1, 2).contiguous()
        if state.record_past:
            given = [self.as_given(x.transpose(1, 2)) for x in rows.values()]
            updates = *given, self.given_position, self.given_kept, self.as_given(self.forgets)
        replay = functools.partial(replay_memory, self.chunk_size)
        state.update_together({**rings, "memory": memory, "normalizer": normalizer}, replay, *updates)
        for name in rings:
            state.note_alias(name)
        return rings


def find_bos(
    config: GeckoConfig, embed: nn.Module, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
) -> torch.Tensor | None:
    """True for BOS tokens that begin a document, (batch, length); None if none can."""
    bos = config.boundary_token_id
    if bos is None:
        return None
    if input_ids is not None:
        return input_ids == bos
    embedding = embed(torch.full((1,), bos, device=inputs_embeds.device))
    return (inputs_embeds == embedding.to(inputs_embeds)).all(-1)


def find_positions(
    config: GeckoConfig,
    x: torch.Tensor,
    tokens: Tokens,
    bos: torch.Tensor | None,
    cache: GeckoCache | None,
    training: bool,
) -> GeckoPositions:
    """The positions of the tokens x (batch, length, model_dim) after a cache's tokens; for `bos` see [`find_bos`]."""
    size, length, fresh = config.chunk_size, tokens.length, cache is None or not cache.is_initialized
    steps = torch.arange(length, device=x.device)
    lengths = torch.zeros_like(steps[:1]).expand(x.shape[0]) if cache is None else cache.lengths(x)
    given, order, back = None, *find_order(tokens)
    if order is not None:
        given = TokenPositions.after(lengths, tokens)
        tokens = tokens.with_mask(reorder(tokens.mask, order))
        bos = None if bos is None else reorder(bos, order)
    positions = GeckoPositions.after(lengths, tokens)
    given = given or positions
    positions.given_position, positions.given_kept = given.kept_position, given.kept
    positions.chunk_size, positions.real, positions.order, positions.back = size, tokens.mask, order, back

    position = positions.position
    if tokens.mask is not None:  # padding after a text continues its positions
        position = lengths[:, None] + steps
        bos = None if bos is None else bos & tokens.mask
    elif fresh and tokens.starts is None and bos is None:
        position = position[:1]  # one row stands for all

    # Documents: the position at which each token's document begins.
    before = None if fresh or bos is None else cache.after_blocks.get("begins")
    positions.starts, begin, positions.forgets = find_documents(positions, bos, position, before)
    if bos is not None and cache is not None:
        positions.given_begin = positions.as_given(begin)
        updates = positions.given_begin, positions.given_position, positions.given_kept
        positions.begins_after = ring_state(before, *updates, 2 * size)

    # Working memory: the chunks that leave attention, and the tokens that read the memory of earlier ones.
    one = cache is not None and length == 1 and tokens.starts is None
    one = one and not (training and config.attention_dropout > 0)
    held = 0 if fresh or one else cache.held_tokens
    most = max((length - 1) // size - 1, 0) if fresh else -(-length // size)
    # A size of 0 or 1 would specialise an exported program to the lengths of its example.
    if is_exporting() and not isinstance(length, int):
        most = length // size + 2
    real = torch.ones_like(positions.kept) if tokens.mask is None else tokens.mask
    leaving = find_leaving(position.expand_as(real), real, positions.forgets, held, size, most)
    positions.leaving, positions.begins, left = leaving
    seen_from = torch.maximum((position // size - 1) * size, begin)
    remembers = (position >= 2 * size) & (begin < (position // size - 1) * size) & real
    positions.reads = torch.where(remembers, left, -1)

    # Sliding chunk attention: the keys that a token sees in its own chunk and the one before.
    positions.ring = 0 if cache is None else cache.ring_size(length)
    if one:
        # The chunk that leaves a ring begins in the row of the new token.
        positions.leaving = torch.where(positions.leaving == -2 * size, position % (2 * size), -1)
        ring = torch.arange(positions.ring, device=x.device)
        positions.seen = position - (position - ring) % len(ring) >= seen_from
    else:
        positions.held = ring_order(lengths[:, None], held) if held else None
        positions.first = held + steps - (position - seen_from)
        positions.aligned = fresh and tokens.starts is None
    if config.num_rope_heads:
        pairs = config.z_dim // config.num_heads // 2
        # In float32 the angles of a long text would be wrong by tenths.
        wide = torch.float32 if x.device.type == "mps" else torch.float64
        frequencies = config.rope_base ** (torch.arange(pairs, dtype=wide, device=x.device) / -pairs)
        angles = (position[..., None] * frequencies)[:, :, None]
        dtype = torch.promote_types(x.dtype, torch.float32)
        positions.cos, positions.sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return positions


def find_documents(
    positions: GeckoPositions, bos: torch.Tensor | None, position: torch.Tensor, before: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """
    `GeckoPositions.starts`, the position at which each token's document begins, and `GeckoPositions.forgets`.
    `before` (batch, 2 * chunk_size) is a ring with the begins of earlier tokens; None if there are none.
    """
    size, window, tokens = positions.chunk_size, 2 * positions.chunk_size, positions.tokens
    starts = None if tokens.starts is None else tokens.starts.expand(tokens.batch, -1)
    if bos is None:
        return starts, torch.zeros_like(position), (window - position).clamp_min(-1).expand_as(positions.position)

    steps, begin = torch.arange(tokens.length, device=position.device), torch.zeros_like(position)
    if before is not None:
        begin = before.gather(1, (position[:, :1] - 1) % window).expand_as(position)
    last = torch.where(bos, steps, -1).cummax(1).values
    begin = torch.where(last < 0, begin, position - (steps - last))
    if starts is not None:  # at a boundary, or at a BOS token after it
        begin = begin.masked_fill(torch.where(starts, steps, -1).cummax(1).values > last, 0)
        starts = bos | starts
    elif bos.device.type != "cpu" or not can_read_values(bos) or bool((bos & (position > 0)).any()):
        starts = bos

    around, source = begin, steps - size - 1  # the last token of the chunk that leaves
    if before is not None:
        around = torch.cat((before.gather(1, ring_order(position[:, :1], window)), begin), dim=1)
        source = source + window
    forgets = around[:, source.clamp_min(0)] - position + window
    return starts, begin, forgets.clamp_min(-1)


def find_leaving(
    position: torch.Tensor, real: torch.Tensor, forgets: torch.Tensor, held: int, size: int, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The chunks of `size` tokens, at most `most`, that leave attention while the tokens at these positions (batch,
    length) are read, behind `held` earlier ones. Returns the start of each chunk and of its document, (batch, most),
    and the number that has left after each token, (batch, length).
    """
    leaves = (position % size == 0) & (position >= 2 * size) & real
    number = leaves.cumsum(1)
    index = torch.where(leaves, number - 1, most)
    steps = torch.arange(position.shape[1], device=position.device).expand_as(position)
    leaving = torch.full_like(position[:, :1], -1).expand(-1, most + 1).scatter(1, index, steps + held - 2 * size)
    begins = torch.zeros_like(leaving).scatter(1, index, forgets)
    return leaving[:, :most].contiguous(), begins[:, :most].contiguous(), number


def find_order(tokens: Tokens) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`GeckoPositions.order` and `GeckoPositions.back`; None if every row begins with its text."""
    if tokens.mask is None or tokens.length == 1:
        return None, None
    if "mask" in tokens.known and (mask := tokens.known["mask"])[:, :-1][mask[:, 1:]].all():
        return None, None
    order = real_first(tokens.mask)
    return order, order.argsort(dim=1)


def real_first(real: torch.Tensor) -> torch.Tensor:
    """The order that puts each row's real tokens, marked in `real` (batch, length), before its padding."""
    return real.int().argsort(dim=1, descending=True, stable=True)


def ring_order(lengths: torch.Tensor, ring: int) -> torch.Tensor:
    """The rows of a ring, (batch, ring), from the oldest token to the newest, for texts of `lengths` (batch, 1)."""
    return (lengths + torch.arange(ring, device=lengths.device)) % ring


def behind(ring: torch.Tensor, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x (batch, heads, length, size) behind the rows of a ring, in that order (batch, ring)."""
    held = ring.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    return torch.cat((held.to(x.dtype), x), dim=2)


def replay_memory(
    size: int,
    before: States,
    keys: torch.Tensor,
    values: torch.Tensor,
    memory_keys: torch.Tensor,
    position: torch.Tensor,
    real: torch.Tensor,
    forgets: torch.Tensor,
) -> States:
    """The rings and the memory of a block after these tokens, for chunks of that size."""
    rows = {"keys": keys, "values": values, "memory_keys": memory_keys}
    rings = {
        name: ring_state(None if before[name] is None else before[name].transpose(1, 2), x, position, real, 2 * size)
        for name, x in rows.items()
    }
    lengths = position[:, :1] + 1 - real[:, :1].long()
    # Chunks are read in one piece, so padding goes to the end.
    order = real_first(real)
    position, real, forgets = (reorder(x, order) for x in (position, real, forgets))
    for name, x in rows.items():
        x = reorder(x, order).transpose(1, 2)
        ring = before[name]
        rows[name] = x if ring is None else behind(ring, x, ring_order(lengths, ring.shape[2]))
    length = position.shape[1]
    held = rows["keys"].shape[2] - length
    leaving, begins, _ = find_leaving(position, real, forgets, held, size, -(-length // size))
    _, memory, normalizer = working_memory(
        q=memory_keys.transpose(1, 2),  # the readout is not used
        k=rows["memory_keys"],
        v=rows["values"],
        memory=before["memory"],
        normalizer=before["normalizer"],
        leaving=leaving,
        begins=begins,
        reads=torch.full_like(position, -1),
        chunk_size=size,
    )
    rings = {name: ring.transpose(1, 2).contiguous() for name, ring in rings.items()}
    return {**rings, "memory": memory, "normalizer": normalizer}


def replay(operator, before: torch.Tensor | None, x, starts, real) -> torch.Tensor:
    """A state of [`GeckoPositions.update`] after the tokens x, (batch, length, model_dim)."""
    return operator(x=x, initial_state=before, starts=starts, real=real)[1]
