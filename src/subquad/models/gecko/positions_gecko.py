"""Positions, chunks and documents of the tokens that Gecko reads, and the rings of a cache before and after them."""

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from subquad_kernels import chunk_attention, chunk_attention_step, working_memory
from subquad_kernels.tracing import can_read_values

from ...modeling.layer_state import LayerState, States
from ...modeling.layers import replaceable
from ...modeling.padding import Tokens, is_exporting, reorder
from ...modeling.positions import Movable, TokenPositions
from ...modeling.protocols import NoState
from ...modeling.ring import ring_state, write_to_ring
from .cache_gecko import GeckoCache
from .configuration_gecko import GeckoConfig


# Here, because attention depends on the kind of positions, and a cache replays the memory.
chunk_attention, working_memory = replaceable(chunk_attention, working_memory)

State = LayerState | NoState
Pair = tuple[torch.Tensor, torch.Tensor]
Rows = dict[str, torch.Tensor]
# The tokens' rows that a block keeps in rings.
ROWS = ("keys", "values", "memory_keys")


@dataclasses.dataclass
class GeckoPositions(Movable):
    """
    The tokens of a call, as all layers need them.

    Attributes:
        given: the tokens in their given order.
        read: the same tokens as the layers read them: every row begins with its text, and padding follows.
        begin: where each given token's document begins, (batch, length); None if BOS tokens begin no documents.
        chunk_size: the number of tokens of a chunk.
        ring: capacity of the cache's rings in tokens after the call; 0 without a cache.
        starts: True for tokens that begin a document, (batch, length); None if none does.
        rotation: cosines and sines of rotary embeddings, (batch or 1, length, 1, size of a head / 2), if any.
        forgets: `begins` in `memory` for the chunk that leaves attention at a token, (batch, length), if one does.
        memory, attention: arguments of [`subquad_kernels.working_memory`] and of [`subquad_kernels.chunk_attention`]
            or its step, which are the same in all layers.
    """

    given: TokenPositions
    read: TokenPositions
    begin: torch.Tensor | None
    chunk_size: int
    ring: int
    starts: torch.Tensor | None
    rotation: Pair | None
    forgets: torch.Tensor
    memory: dict[str, Any]
    attention: dict[str, Any]

    def text_first(self, x: torch.Tensor) -> torch.Tensor:
        """Moves the texts in x (batch, length, ...) first."""
        return x

    def as_given(self, x: torch.Tensor) -> torch.Tensor:
        """Restores the given order of x (batch, length, ...), whose texts come first."""
        return x

    def rotate(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """Rotary embeddings of the first heads of x (batch, length, heads, size), by pairs of neighbors."""
        if heads == 0:
            return x
        cos, sin = self.rotation
        left, right = torch.unflatten(x[:, :, :heads], -1, (-1, 2)).unbind(-1)
        rotated = torch.stack((left * cos - right * sin, left * sin + right * cos), dim=-1).flatten(-2).to(x.dtype)
        return rotated if heads == x.shape[2] else torch.cat((rotated, x[:, :, heads:]), dim=2)

    def update(self, state: State, name: str, after: torch.Tensor, operator, x: torch.Tensor) -> None:
        """Sets a state to `after`, its value after the tokens x. `operator` needs no other input to recompute it."""
        updates = ()
        if state.record_past:
            starts = torch.zeros_like(self.read.kept) if self.starts is None else self.starts
            updates = self.as_given(x), self.as_given(starts), self.given.kept
        state.update(name, after, functools.partial(replay, operator), *updates)

    def write(self, state: State, rows: Rows, memory: torch.Tensor, normalizer: torch.Tensor) -> Rows:
        """Writes the rows of the call's tokens to the rings and stores the new memory; returns the rings."""
        if self.read.document is not None:  # the memory holds nothing of a last document of at most two chunks
            short = (self.read.kept_position[:, -1] < 2 * self.chunk_size)[:, None, None]
            memory, normalizer = memory.masked_fill(short[..., None], 0.0), normalizer.masked_fill(short, 0.0)
        rings, updates = {}, ()
        for name, x in rows.items():
            ring = state.get(name)
            ring = None if ring is None else ring.transpose(1, 2)
            ring = write_to_ring(state, name, ring, x.transpose(1, 2), self.read, self.ring)
            rings[name] = ring.transpose(1, 2).contiguous()
        if state.record_past:
            given = [self.as_given(x.transpose(1, 2)) for x in rows.values()]
            updates = *given, self.given.kept_position, self.given.kept, self.as_given(self.forgets)
        replay = functools.partial(replay_memory, self.chunk_size)
        state.update_together({**rings, "memory": memory, "normalizer": normalizer}, replay, *updates)
        for name in rings:
            state.note_alias(name)
        return rings


@dataclasses.dataclass
class TextPositions(GeckoPositions):
    """
    Many tokens, which read their own keys behind those that a cache held before.

    Attributes:
        held: the rows of a ring that are read before the tokens of the call, (batch, held), from the oldest token on;
            None without such rows.
        order: the index of each token in the given order, and there the index here, (batch, length) each; None if none
            was moved.
    """

    held: torch.Tensor | None
    order: Pair | None

    def text_first(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else reorder(x, self.order[0])

    def as_given(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else reorder(x, self.order[1])

    def window(self, state: State, rows: Rows) -> Rows:
        """The rows of the call's tokens, (batch, heads, length, size) each, behind the rows of earlier tokens."""
        return rows if self.held is None else {name: behind(state.get(name), x, self.held) for name, x in rows.items()}

    def keep(self, state: State, rows: Rows, window: Rows, *memory: torch.Tensor | None) -> Rows:
        """Stores the call's rows and the new memory, if there is a cache; returns the rows to attend to."""
        if self.ring:
            self.write(state, rows, *memory)
        return window

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
        """Attention over a token's chunk up to the token, and the chunk before."""
        return chunk_attention(q=q, k=k, v=v, **self.attention, dropout_p=dropout)


@dataclasses.dataclass
class StepPositions(GeckoPositions):
    """A single token of each row, which reads the rings of a cache as they are."""

    def window(self, state: State, rows: Rows) -> Rows:
        """The rings before the token; its own rows, (batch, heads, 1, size) each, if there are none."""
        return rows if state.get("memory") is None else {name: state.get(name) for name in rows}

    def keep(self, state: State, rows: Rows, window: Rows, *memory: torch.Tensor) -> Rows:
        """As [`TextPositions.keep`]: the rings have the token's own rows now."""
        return self.write(state, rows, *memory)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
        """As [`TextPositions.attend`], without dropout."""
        return chunk_attention_step(q=q, k=k, v=v, **self.attention)


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
) -> TextPositions | StepPositions:
    """The positions of the tokens x (batch, length, model_dim) after a cache's tokens; for `bos` see [`find_bos`]."""
    single = cache is not None and tokens.length == 1 and tokens.starts is None
    if single and not (training and config.attention_dropout > 0):
        return find_step(config, x, tokens, bos, cache)
    return find_text(config, x, tokens, bos, cache)


def find_text(
    config: GeckoConfig, x: torch.Tensor, tokens: Tokens, bos: torch.Tensor | None, cache: GeckoCache | None
) -> TextPositions:
    """[`find_positions`] of many tokens."""
    size, length, fresh = config.chunk_size, tokens.length, cache is None or not cache.is_initialized
    steps = torch.arange(length, device=x.device)
    lengths = torch.zeros_like(steps[:1]).expand(x.shape[0]) if cache is None else cache.lengths(x)
    given = read = TokenPositions.after(lengths, tokens)
    if (order := find_order(tokens)) is not None:
        tokens = tokens.with_mask(reorder(tokens.mask, order[0]))
        read = TokenPositions.after(lengths, tokens)
        bos = None if bos is None else reorder(bos, order[0])
    position = read.position
    if tokens.mask is not None:  # padding after a text continues its positions
        position = lengths[:, None] + steps
    elif fresh and tokens.starts is None and bos is None:
        position = position[:1]  # one row stands for all
    starts, begin, forgets = find_documents(tokens, bos, position, cache, size)

    # Working memory: the chunks that leave attention, and the tokens that read the memory of earlier ones.
    held = 0 if fresh else cache.held_tokens
    most = max((length - 1) // size - 1, 0) if fresh else -(-length // size)
    # A size of 0 or 1 would specialise an exported program to the lengths of its example.
    if is_exporting() and not isinstance(length, int):
        most = length // size + 2
    real = torch.ones_like(read.kept) if tokens.mask is None else tokens.mask
    leaving, begins, left = find_leaving(position.expand_as(real), real, forgets, held, size, most)
    before = (position // size - 1) * size  # the first token of the chunk before
    reads = torch.where((begin < before) & real, left, -1)
    first = held + steps - (position - torch.maximum(before, begin))
    return TextPositions(
        given=given,
        read=read,
        begin=None if bos is None else begin if order is None else reorder(begin, order[1]),
        chunk_size=size,
        ring=0 if cache is None else cache.ring_size(length),
        starts=starts,
        rotation=find_rotation(config, position, x),
        forgets=forgets,
        memory={"leaving": leaving, "begins": begins, "reads": reads, "chunk_size": size},
        attention={"first": first, "chunk_size": size, "aligned": fresh and tokens.starts is None},
        held=ring_order(lengths[:, None], held) if held else None,
        order=order,
    )


def find_step(
    config: GeckoConfig, x: torch.Tensor, tokens: Tokens, bos: torch.Tensor | None, cache: GeckoCache
) -> StepPositions:
    """[`find_positions`] of a single token of each row."""
    size, lengths = config.chunk_size, cache.lengths(x)
    read, position, ring = TokenPositions.after(lengths, tokens), lengths[:, None], cache.ring_size(1)
    starts, begin, forgets = find_documents(tokens, bos, position, cache, size)
    before = (position // size - 1) * size  # the first token of the chunk before
    # The chunk that leaves a ring begins in the row of the new token.
    leaves = (position % size == 0) & (position >= 2 * size) & read.kept
    leaving = torch.where(leaves, position % (2 * size), -1)
    reads = torch.where((begin < before) & read.kept, leaves.long(), -1)
    age = (position - torch.arange(ring, device=x.device)) % ring
    return StepPositions(
        given=read,
        read=read,
        begin=None if bos is None else begin,
        chunk_size=size,
        ring=ring,
        starts=starts,
        rotation=find_rotation(config, position, x),
        forgets=forgets,
        memory={"leaving": leaving, "begins": forgets, "reads": reads, "chunk_size": size},
        attention={"mask": position - age >= torch.maximum(before, begin)},
    )


def find_rotation(config: GeckoConfig, position: torch.Tensor, x: torch.Tensor) -> Pair | None:
    """`GeckoPositions.rotation` at these positions (batch or 1, length), at least in float32, for the tokens x."""
    if not config.num_rope_heads:
        return None
    pairs = config.z_dim // config.num_heads // 2
    # In float32 the angles of a long text would be wrong by tenths.
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    frequencies = config.rope_base ** (torch.arange(pairs, dtype=wide, device=x.device) / -pairs)
    angles, dtype = (position[..., None] * frequencies)[:, :, None], torch.promote_types(x.dtype, torch.float32)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def find_documents(
    tokens: Tokens, bos: torch.Tensor | None, position: torch.Tensor, cache: GeckoCache | None, size: int
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """
    `GeckoPositions.starts`, the position at which each token's document begins, and `GeckoPositions.forgets`, of
    tokens at these positions (batch or 1, length). `size` is the number of tokens of a chunk.
    """
    window, starts = 2 * size, None if tokens.starts is None else tokens.starts.expand(tokens.batch, -1)
    if bos is None:
        return starts, torch.zeros_like(position), (window - position).clamp_min(-1).expand(tokens.batch, -1)

    bos = bos if tokens.mask is None else bos & tokens.mask
    steps, begin = torch.arange(tokens.length, device=position.device), torch.zeros_like(position)
    before = None if cache is None or not cache.is_initialized else cache.after_blocks.get("begins")
    if before is not None:  # a ring with the begins of earlier tokens
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


def find_order(tokens: Tokens) -> Pair | None:
    """`TextPositions.order`; None if every row begins with its text."""
    if tokens.mask is None or tokens.length == 1:
        return None
    if "mask" in tokens.known and (mask := tokens.known["mask"])[:, :-1][mask[:, 1:]].all():
        return None
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


def replay_memory(size: int, before: States, *updates: torch.Tensor) -> States:
    """The rings and the memory of a block after the tokens of [`GeckoPositions.write`], for chunks of that size."""
    *rows, position, real, forgets = updates
    lengths, rings, window = position[:, :1] + 1 - real[:, :1].long(), {}, {}
    # Chunks are read in one piece, so padding goes to the end.
    order = real_first(real)
    for name, x in zip(ROWS, rows, strict=True):
        ring = before[name]
        after = ring_state(None if ring is None else ring.transpose(1, 2), x, position, real, 2 * size)
        rings[name] = after.transpose(1, 2).contiguous()
        x = reorder(x, order).transpose(1, 2)
        window[name] = x if ring is None else behind(ring, x, ring_order(lengths, ring.shape[2]))
    position, real, forgets = (reorder(x, order) for x in (position, real, forgets))
    length, q = position.shape[1], updates[2].transpose(1, 2)  # the readout is not used
    held = window["keys"].shape[2] - length
    leaving, begins, _ = find_leaving(position, real, forgets, held, size, -(-length // size))
    chunks = {"leaving": leaving, "begins": begins, "reads": torch.full_like(position, -1), "chunk_size": size}
    states = {name: before[name] for name in ("memory", "normalizer")}
    _, memory, normalizer = working_memory(q=q, k=window["memory_keys"], v=window["values"], **states, **chunks)
    return {**rings, "memory": memory, "normalizer": normalizer}


def replay(operator, before: torch.Tensor | None, x, starts, real) -> torch.Tensor:
    """A state of [`GeckoPositions.update`] after the tokens x, (batch, length, model_dim)."""
    return operator(x=x, initial_state=before, starts=starts, real=real)[1]
