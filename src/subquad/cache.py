"""The state of a recurrent model, behind the cache interface of transformers."""

import copy
import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from subquad_kernels import maxsim

from .padding import Tokens, can_look_at


# How many of the last tokens can be taken back while the past is recorded: far more than any draft is long.
MAX_RECORDED = 256


def _static(x: torch.Tensor) -> torch.Tensor:
    """A copy marked as a tensor whose address will not change: CUDA graphs write to no other."""
    if torch.compiler.is_compiling():  # a tensor that is traced cannot be marked
        return x.clone(memory_format=torch.contiguous_format)
    with torch.inference_mode(False):  # or it could not be written outside of inference mode
        x = x.detach().clone(memory_format=torch.contiguous_format)
    torch._dynamo.mark_static_address(x)
    return x


def _is_inference(x: torch.Tensor) -> bool:
    """Whether x was made in inference mode, where that can be asked."""
    return not torch.compiler.is_compiling() and x.is_inference()


def _with_room(x: torch.Tensor, more: int) -> torch.Tensor:
    """x (batch, room, ...) with zeros for so many entries more."""
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, more))


def _of_entries(flags: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What is told of each entry, (batch, n), with as many dimensions as x (batch, n, ...)."""
    return flags.view(*flags.shape, *[1] * (x.dim() - 2))


States = dict[str, torch.Tensor | None]


@dataclass
class _Record:
    """What rebuilds states: their values before the recorded tokens and what each of these contributed."""

    replay: Callable[..., States]
    before: States
    updates: tuple[torch.Tensor, ...]

    @property
    def tokens(self) -> int:
        return self.updates[0].shape[1]

    def states_after(self, tokens: int) -> States:
        if tokens == 0:
            return self.before
        return self.replay(self.before, *(x[:, :tokens] for x in self.updates))

    def extend(self, updates: tuple[torch.Tensor, ...]) -> None:
        self.updates = tuple(torch.cat(pair, dim=1) for pair in zip(self.updates, updates, strict=True))

    def keep(self, tokens: int) -> None:
        """Gives up all but the last so many tokens."""
        if (older := self.tokens - tokens) > 0:
            self.before = self.states_after(older)
            self.updates = tuple(x[:, older:].clone() for x in self.updates)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "_Record":
        before = {name: None if state is None else function(state) for name, state in self.before.items()}
        return _Record(self.replay, before, tuple(function(x) for x in self.updates))


def _replay_one(name: str, replay: Callable[..., torch.Tensor], before: States, *updates: torch.Tensor) -> States:
    return {name: replay(before[name], *updates)}


@dataclass(eq=False)
class RecurrentLayer:
    """The named states of one block; the batch comes first in every tensor."""

    states: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    records: dict[str, _Record] = field(default_factory=dict, repr=False)
    record_past: bool = False
    static: bool = False
    # Whether static states were reset and have read nothing since.
    fresh: bool = False
    # Names of states that a text began with, other than zero.
    begun: set[str] = field(default_factory=set, repr=False)
    # Names of states that were read with gradients enabled: a graph may hold them, whether they require any or not.
    lent: set[str] = field(default_factory=set, repr=False)

    # What transformers asks of a cache layer.
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    @property
    def is_compileable(self) -> bool:
        return self.static

    def get(self, name: str) -> torch.Tensor | None:
        """The state of that name; None before the first token, or zeros, which mean the same."""
        state = self.states.get(name)
        if state is not None and torch.is_grad_enabled() and (self.static or _is_inference(state)):
            return state.clone()  # the backward pass may need it after it was overwritten
        return state

    def overwrites(self, name: str) -> bool:
        """Whether an operator may itself write the new state over the old one."""
        held = self.states.get(name)
        if held is None or held.dtype != torch.float32 or not held.is_contiguous():
            return False
        if torch.compiler.is_compiling() and not self.static:  # whether it was made in inference mode cannot be asked
            return False
        return not self.record_past and self.may_change(name, held)

    def may_change(self, name: str, held: torch.Tensor) -> bool:
        """Whether a state, as [`~RecurrentLayer.get`] returned it, may be written in place: no graph needs it."""
        if torch.is_grad_enabled() or held.requires_grad or name in self.lent:
            return False
        return not _is_inference(held) or torch.is_inference_mode_enabled()

    def lend(self, name: str) -> None:
        """Remembers whether a graph may hold the state, which was just set, and which this call goes on to read."""
        if torch.is_grad_enabled():
            self.lent.add(name)
        else:
            self.lent.discard(name)

    def begin(self, name: str, state: torch.Tensor) -> None:
        """Sets a state, (batch, ...), unless a text has begun."""
        if self.fresh or self.get(name) is None:
            # A copy, because operators may write over what a cache holds.
            self.write(name, state.clone(memory_format=torch.contiguous_format))
            self.begun.add(name)

    def write(self, name: str, state: torch.Tensor) -> None:
        """Sets a state and records nothing; in place, where the layer is static and holds a tensor that fits."""
        if not self.static:
            self.states[name] = state
            return
        held = self.states.get(name)
        if held is None or any(getattr(held, x) != getattr(state, x) for x in ("shape", "dtype", "device")):
            self.states[name] = _static(state)
        elif held is not state:
            held.copy_(state.detach())

    def update(
        self, name: str, state: torch.Tensor, replay: Callable[..., torch.Tensor], *updates: torch.Tensor
    ) -> None:
        """
        Sets a state.

        Args:
            name: name of the state.
            state: its value after the tokens of this call, (batch, ...).
            replay: a function of a module, `replay(state before or None, *updates) -> state`, that makes a state from
                what an earlier one was and from what the tokens since then contributed.
            updates: those contributions, (batch, tokens, ...) each. They are kept only while the past is recorded.
        """
        self.update_together({name: state}, functools.partial(_replay_one, name, replay), *updates)

    def update_together(
        self, states: dict[str, torch.Tensor], replay: Callable[..., States], *updates: torch.Tensor
    ) -> None:
        """As [`~RecurrentLayer.update`], of states that need each other: `replay(states, *updates) -> states`."""
        if not self.record_past:
            self.records.clear()
        else:
            key = next(iter(states))
            if key in self.records:
                self.records[key].extend(updates)
            else:
                self.records[key] = _Record(replay, {name: self.states.get(name) for name in states}, updates)
            if self.records[key].tokens > 2 * MAX_RECORDED:  # not at every token
                self.records[key].keep(MAX_RECORDED)
        self.fresh = False
        for name, state in states.items():
            self.write(name, state)

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Puts `function(tensor)` in the place of every tensor."""
        for name, state in self.states.items():
            self.write(name, function(state))
        self.records = {name: record.map(function) for name, record in self.records.items()}

    def clone(self) -> "RecurrentLayer":
        other = copy.copy(self)
        other.states, other.lent, other.begun = {}, set(), set(self.begun)
        for name, state in self.states.items():
            other.write(name, state if self.static else state.clone())
        other.records = {name: record.map(torch.clone) for name, record in self.records.items()}
        return other

    def activate_past_recording(self) -> None:
        # A record holds the state before its tokens, which must not be overwritten.
        self.record_past, self.static = True, False

    def crop(self, tokens_to_remove: int) -> None:
        for record in self.records.values() if tokens_to_remove else ():
            for name, state in record.states_after(record.tokens + tokens_to_remove).items():
                if state is None:
                    del self.states[name]
                else:
                    self.states[name] = state
        self.records.clear()

    @property
    def recorded_tokens(self) -> int:
        return min((record.tokens for record in self.records.values()), default=0)

    @property
    def batch_size(self) -> int:
        return next((state.shape[0] for state in self.states.values()), -1)

    def reset(self) -> None:
        self.records.clear()
        if self.static:
            self.fresh = True
            for state in self.states.values():
                state.zero_()
        else:
            self.states.clear()


class RecurrentCache(Cache):
    """
    The state of a recurrent model: a few named tensors a block, whose size does not depend on the length of the text.

    `generate` and the models make one by themselves. Passed to a later call (`past_key_values`), it continues the
    text. Rolling back (`crop`) rebuilds the state from the one before the recorded tokens and from what each of these
    contributed, so it needs [`~RecurrentCache.activate_past_recording`] before the tokens are read; assisted decoding
    does that.

    Args:
        config: configuration of the model that the cache is for.
        static: allocate the states at the first call, which must not be compiled, and write them in place from then
            on; no gradient passes through them. `generate(cache_implementation="static")` makes such a cache, and on
            a GPU compiles the decoding step. [`~RecurrentCache.reset`] fills it with zeros, for a batch of the same
            size. Once it records the past, it is no longer static.
    """

    def __init__(self, config: PreTrainedConfig, static: bool = False):
        config = config.get_text_config()
        # One layer more than there are blocks: what a model keeps of its own.
        super().__init__(layers=[RecurrentLayer(static=static) for _ in range(config.num_hidden_layers + 1)])
        self.sizes = _sizes(config)
        # Compiled code would be specialised to a number, and compiled again for the next one.
        self.seen_tokens = _static(torch.zeros((), dtype=torch.long)) if static else 0

    @property
    def after_blocks(self) -> RecurrentLayer:
        """What the model keeps after its blocks: the output of every row's last token."""
        return self.layers[-1]

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 where there are no states."""
        return next((layer.batch_size for layer in self.layers if layer.states), -1)

    @property
    def is_initialized(self) -> bool:
        """Whether there are states."""
        return self.batch_size > 0

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for layer in self.layers:
            layer.apply(function)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Takes for row i the states of row `beam_idx[i]`, as beam search wants it."""
        self._apply(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices`, in that order."""
        self._apply(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times."""
        self._apply(lambda x: x.repeat_interleave(repeats, dim=0))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens read so far, padding included."""
        return int(self.seen_tokens)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1

    def reserve(self, tokens: int) -> None:
        """
        Makes sure that there will be room for a text of so many tokens; a recurrent state has it.

        Raises:
            ValueError: where there is no such room.
        """

    def check_tokens(self, tokens: Tokens) -> None:
        """
        Raises:
            ValueError: where the tokens of a call cannot be read after what was.
        """
        if tokens.cu_seqlens is not None and self.records_past:
            raise ValueError("Packed documents cannot be read while `past_key_values` records the past.")

    def advance(self, tokens: int) -> None:
        """Counts the tokens of a call, after every block has read them."""
        if isinstance(self.seen_tokens, int):
            self.seen_tokens += tokens
            return
        self._move_count(next(iter(self.after_blocks.states.values())).device)
        self.seen_tokens.add_(tokens)

    def _move_count(self, device: torch.device | str) -> None:
        if isinstance(self.seen_tokens, torch.Tensor) and self.seen_tokens.device != torch.device(device):
            self.seen_tokens = _static(self.seen_tokens.to(device))

    def activate_past_recording(self) -> None:
        """Keeps from now on what [`~RecurrentCache.crop`] needs."""
        super().activate_past_recording()
        self.seen_tokens = self.get_seq_length()

    @property
    def records_past(self) -> bool:
        """Whether it keeps what [`~RecurrentCache.crop`] needs."""
        return any(layer.record_past for layer in self.layers)

    def keep_past(self, tokens: int) -> None:
        """Gives up the past before the last so many tokens: no more of them can be removed."""
        for layer in self.layers:
            for record in layer.records.values():
                record.keep(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """
        Forgets the last tokens.

        Args:
            tokens_to_remove: minus the number of tokens to forget; 0 drops the record and keeps the state.

        Raises:
            ValueError: where the number is positive or more tokens than were recorded. Nothing has changed then.
        """
        # A layer that only grows has no record: what it keeps of every token tells what it was before.
        recorded = min((layer.recorded_tokens for layer in self.layers if layer.records), default=0)
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative (tokens to forget), got {tokens_to_remove}.")
        if -tokens_to_remove > recorded:
            raise ValueError(
                f"`tokens_to_remove` is {tokens_to_remove}, but the past of {recorded} tokens is recorded. Call "
                "`activate_past_recording()` on the cache before the tokens that may be removed."
            )
        super().crop(tokens_to_remove)
        self.seen_tokens += tokens_to_remove
        if tokens_to_remove and self.seen_tokens == 0:  # the next text may begin with others
            for layer in self.layers:
                for name in layer.begun:
                    layer.states.pop(name, None)

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self.seen_tokens *= 0  # a tensor in place

    def clone(self) -> "RecurrentCache":
        """An independent copy."""
        other = copy.copy(self)
        other.layers = [layer.clone() for layer in self.layers]
        if isinstance(self.seen_tokens, torch.Tensor):
            other.seen_tokens = _static(self.seen_tokens)
        return other

    def to(self, device: torch.device | str) -> "RecurrentCache":
        """Moves the states to a device, in place, and returns the cache."""
        self._apply(lambda x: x.to(device))
        self._move_count(device)
        return self

    @property
    def num_elements(self) -> int:
        """Number of elements of the states of all blocks, over all rows."""
        return sum(state.numel() for layer in self.layers[:-1] for state in layer.states.values())

    def save(self, path: str | os.PathLike) -> None:
        """Writes the states to a safetensors file (the record of the past is left out)."""
        tensors = {
            f"layers.{i}.{name}": state.detach().contiguous()
            for i, layer in enumerate(self.layers)
            for name, state in layer.states.items()
            if not layer.fresh
        }
        metadata = {"sizes": self.sizes, "seen_tokens": self.get_seq_length()}
        temporary = f"{os.fspath(path)}.incomplete"
        try:
            save_file(tensors, temporary, metadata={"format": "pt", "cache": json.dumps(metadata)})
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)

    @classmethod
    def load(
        cls, path: str | os.PathLike, config: PreTrainedConfig, device: str = "cpu", static: bool = False
    ) -> "RecurrentCache":
        """
        Reads a file that [`~RecurrentCache.save`] wrote.

        Raises:
            ValueError: where the file holds no cache, or one of another kind of model.
        """
        cache = cls(config, static)
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = json.loads((file.metadata() or {}).get("cache", "null"))
            if metadata is None:
                raise ValueError(f"{os.fspath(path)} holds no cache.")
            _check_sizes(os.fspath(path), metadata["sizes"], cache.sizes)
            for key in file.keys():
                _, index, name = key.split(".", 2)
                cache.layers[int(index)].write(name, file.get_tensor(key))
        cache.seen_tokens += metadata["seen_tokens"]
        return cache.to(device)


def _add_tokens(lengths: torch.Tensor | None, real: torch.Tensor) -> torch.Tensor:
    """Tokens of each row, (batch), after a call of whose tokens `real` (batch, tokens) tells which are no padding."""
    return real.sum(1) if lengths is None else lengths + real.sum(1)


class CountingCache(RecurrentCache):
    """A cache that knows the places of the tokens: `lengths` (batch), of the last layer, counts those of each row."""

    def lengths(self, x: torch.Tensor) -> torch.Tensor:
        """Number of tokens of each row of the batch x (batch, ...), padding left out: int64 (batch)."""
        lengths = self.after_blocks.get("lengths")
        return torch.zeros(x.shape[0], dtype=torch.long, device=x.device) if lengths is None else lengths

    def count(self, real: torch.Tensor) -> None:
        """Counts the tokens of a call, (batch, tokens), of which some may be padding."""
        lengths = _add_tokens(self.after_blocks.get("lengths"), real)
        self.after_blocks.update("lengths", lengths, _add_tokens, real)

    def finish(self, place: torch.Tensor, real: torch.Tensor, packed: bool) -> None:
        """Counts the tokens of a call, whose places are those of [`at_places`]."""
        if packed:
            self.after_blocks.write("lengths", place[:, -1] + 1)
        else:
            self.count(real)
        self.advance(real.shape[1])


class GrowingCache(CountingCache):
    """
    A cache that keeps something of every token of a text, so that it grows with the text.

    What is kept lies in states (batch, room, ...) by the place of each token in its row, padding left out, and is zero
    beyond. The room is a whole number of `unit` tokens and doubles when it is used up.

    Args:
        config: configuration of the model that the cache is for.
        static: see [`RecurrentCache`].
        max_cache_len: number of tokens that a static cache has room for, rounded up to whole units; padding and
            documents that have ended count too. Where None, `generate` sets it, or else the first call.
    """

    # Tokens of a unit of room.
    unit: int = 64
    # Names of the states that grow, and how many tokens have one entry.
    growing: dict[str, int] = {}

    def __init__(self, config: PreTrainedConfig, static: bool = False, max_cache_len: int | None = None):
        super().__init__(config, static)
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"`max_cache_len` must be at least 1, got {max_cache_len}.")
        self._limit = max_cache_len and self._whole_units(max_cache_len)

    def _grown(self) -> list[tuple[RecurrentLayer, str, int]]:
        """Layer, name and tokens of an entry of every state that grows."""
        states = [(layer, name, tokens) for layer in self.layers for name, tokens in self.growing.items()]
        return [(layer, name, tokens) for layer, name, tokens in states if name in layer.states]

    @property
    def _room(self) -> int:
        return max([0, *(layer.states[name].shape[1] * tokens for layer, name, tokens in self._grown())])

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Number of tokens that a static cache has room for; -1 where there is no limit."""
        return self._room or self._limit or -1 if self.after_blocks.static and self.growing else -1

    def _whole_units(self, tokens: int) -> int:
        return -(-tokens // self.unit) * self.unit

    def reserve(self, tokens: int) -> None:
        if not self.after_blocks.static or not self.growing:
            return
        room = self._room or self._limit
        if room is None:
            self._limit = self._whole_units(tokens)
        elif tokens > room:
            raise ValueError(
                f"`past_key_values` is static, with a `max_cache_len` of {room} tokens; {tokens} would be kept."
            )

    def room_for(self, tokens: int) -> int:
        """
        Tokens that there will be room for, once `tokens` more are read.

        Raises:
            ValueError: where the cache is static and has no such room.
        """
        room, static = self._room, self.after_blocks.static
        if static and (room or self._limit) and not can_look_at(self.seen_tokens):
            return room or self._limit
        needed = self.get_seq_length() + tokens
        self.reserve(needed)
        if needed <= room:
            return room
        if static:
            return self._limit
        room = self.unit
        while room < needed:
            room *= 2
        return room

    def append(
        self, layer: RecurrentLayer, name: str, x: torch.Tensor, place: torch.Tensor, room: int
    ) -> torch.Tensor:
        """
        Keeps x (batch, tokens, ...), zero where a token is padding, at the places (batch or 1, tokens) of their rows.
        Returns what is kept of all tokens, (batch, room, ...).
        """
        held = layer.get(name)
        if held is None:
            held = x.new_zeros(x.shape[0], room, *x.shape[2:])
        elif held.shape[1] < room:
            held = _with_room(held, room - held.shape[1])
        place = _of_entries(place.clamp_min(0), x).expand_as(x)  # of padding, which adds zero, any will do
        x = x.to(held.dtype)
        # In place, because a long text is not copied for every token, unless a backward pass may need what was before.
        held = held.scatter_add_(1, place, x) if layer.may_change(name, held) else held.scatter_add(1, place, x)
        layer.write(name, held)
        layer.lend(name)
        return held

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        lengths = self.after_blocks.states.get("lengths")
        for layer, name, tokens in self._grown():
            if lengths is None:
                del layer.states[name]
            elif tokens == 1:
                state = layer.states[name]
                kept = torch.arange(state.shape[1], device=state.device) < lengths.to(state.device)[:, None]
                layer.states[name] = state * _of_entries(kept, state)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        config: PreTrainedConfig,
        device: str = "cpu",
        static: bool = False,
        max_cache_len: int | None = None,
    ) -> "GrowingCache":
        """As [`RecurrentCache.load`]; a static cache has room for `max_cache_len` tokens, or as much as was saved."""
        saved = super().load(path, config, device)
        if not static:
            return saved
        cache = cls(config, True, max_cache_len or saved._room or None)
        if saved._room:
            cache.reserve(saved.get_seq_length())
        more = max((cache._limit or 0) - saved._room, 0) if saved._room else 0
        for layer, from_file in zip(cache.layers, saved.layers, strict=True):
            for name, state in from_file.states.items():
                if name in cache.growing:
                    state = _with_room(state, more // cache.growing[name])
                layer.write(name, state)
        cache.seen_tokens += saved.get_seq_length()
        cache._move_count(device)
        return cache


class AveyCache(GrowingCache):
    """
    What Avey keeps of a text. It grows with the text: the ranker may retrieve any earlier split, so the embeddings of
    all tokens are kept. The blocks keep nothing of it, because the weights of retrieved splits change with every
    token; but what they make of the rows that stand for missing splits is computed once, so that a cache belongs to
    the weights of the model that filled it.

    The states, in the one layer that there is:

    - `embeddings` (batch, room, d_embed): the tokens of each row from its first place on, then zeros.
    - `lengths` (batch): number of tokens of each row, padding left out.
    - `sums` (batch, room / chunk_size), float32: MaxSim scores of the split that holds a row's last token against
      every earlier one; zero where there is none.

    Args:
        config, static, max_cache_len: see [`GrowingCache`]; a unit of room is a split.
    """

    def __init__(self, config: PreTrainedConfig, static: bool = False, max_cache_len: int | None = None):
        self.unit = config.chunk_size
        self.growing = {"embeddings": 1, "sums": config.chunk_size}
        super().__init__(config, static, max_cache_len)
        self.layers = self.layers[-1:]
        # What the blocks make of the zero rows that stand for splits that a short text lacks: the same for every text.
        self.zero_rows: list[torch.Tensor] | None = None

    @property
    def num_elements(self) -> int:
        return sum(state.numel() for state in self.after_blocks.states.values())

    def rank(self, scores: torch.Tensor) -> None:
        """Keeps the scores (batch, splits) of the split that holds each row's last token; -inf is no candidate."""
        room = self.after_blocks.states["embeddings"].shape[1] // self.unit
        sums = scores.detach().masked_fill(scores.isneginf(), 0.0)
        self.after_blocks.write("sums", torch.nn.functional.pad(sums, (0, room - sums.shape[1])))

    def restart(self, embeddings: torch.Tensor, lengths: torch.Tensor, tokens: int) -> None:
        """Takes the place of what was kept, after a call of so many tokens in which documents began."""
        self.after_blocks.write("embeddings", embeddings)
        self.after_blocks.write("lengths", lengths)
        self.advance(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        states = self.after_blocks.states
        if "embeddings" not in states:
            return
        lengths, splits = states["lengths"], states["embeddings"].unflatten(1, (-1, self.unit))
        number = (lengths[:, None] - 1).clamp_min(0) // self.unit
        current = splits[torch.arange(len(splits), device=lengths.device)[:, None], number]
        self.rank(maxsim(current, splits, number)[:, 0])

    def reset(self) -> None:
        super().reset()
        self.zero_rows = None


def at_places(
    held: torch.Tensor, x: torch.Tensor, wanted: torch.Tensor, place: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """
    What lies at the places `wanted` (batch, n) of each row: `held` (batch, n, ...), or where a call has brought it, x
    (batch, tokens, ...) at the places `place` (batch, tokens), which never fall; `real` tells which tokens count.
    """
    before = place[:, :1] + 1 - real[:, :1].long()  # tokens that the row had
    brought = (wanted >= before) & (wanted <= place[:, -1:])
    index = torch.searchsorted(place.contiguous(), wanted.contiguous())  # of equal places the first is no padding
    index = _of_entries(index.clamp_max(x.shape[1] - 1), x).expand(-1, -1, *x.shape[2:])
    return torch.where(_of_entries(brought, x), x.gather(1, index).to(held.dtype), held)


def ring_state(
    ring: torch.Tensor | None, x: torch.Tensor, place: torch.Tensor, real: torch.Tensor, window: int
) -> torch.Tensor:
    """
    The last tokens of each row, (batch, window, ...), one of place p at p % window and zeros where there is none,
    after the tokens x (batch, tokens, ...) of [`at_places`].
    """
    last = place[:, -1:]
    if ring is None:
        ring = x.new_zeros(x.shape[0], window, *x.shape[2:])
    elif ring.shape[1] < window:  # which it was too small to turn in
        ring = _with_room(ring, window - ring.shape[1])
    wanted = last - (last - torch.arange(window, device=x.device)) % window
    return at_places(ring, x, wanted, place, real).masked_fill(_of_entries(wanted < 0, x), 0)


def turned(
    layer: RecurrentLayer,
    name: str,
    ring: torch.Tensor | None,
    x: torch.Tensor,
    place: torch.Tensor,
    real: torch.Tensor,
    window: int,
    plain: bool,
) -> torch.Tensor:
    """
    [`ring_state`], for which a layer's state of that name may be changed in place where nothing needs it any more. Of
    few tokens only their rows change; `plain` tells that all of them are real.
    """
    few = plain and x.shape[1] <= window
    if ring is None or ring.shape[1] < window or not (few or x.shape[1] == 1):
        return ring_state(ring, x, place, real, window)
    index = _of_entries(place % window, x).expand_as(x)
    rows = x.to(ring.dtype)
    if not plain:
        rows = torch.where(_of_entries(real, x), rows, ring.gather(1, index))
    inplace = not layer.record_past and layer.may_change(name, ring)
    return ring.scatter_(1, index, rows) if inplace else ring.scatter(1, index, rows)


class RavenCache(GrowingCache):
    """
    What Raven keeps of a text: of a slot memory `slots` (batch, heads, slots, size of a key and a value), in float32;
    of attention over a window the `window_keys` and `window_values` (batch, window, heads, size) of the last tokens,
    those of place p at p % window. These do not grow with the text; the `keys` and `values` (batch, room, heads, size)
    of attention without a window do, a token's being at its place.

    Args:
        config, static, max_cache_len: see [`GrowingCache`]; without a layer that grows there is no limit.
    """

    def __init__(self, config: PreTrainedConfig, static: bool = False, max_cache_len: int | None = None):
        if any(spec["window_size"] is None for spec in getattr(config, "attention_specs", ())):
            self.growing = {"keys": 1, "values": 1}
        super().__init__(config, static, max_cache_len)
        # Whether every row is known to have as many tokens as were read.
        self.even = True

    def turn(
        self,
        layer: RecurrentLayer,
        name: str,
        x: torch.Tensor,
        place: torch.Tensor,
        real: torch.Tensor,
        window: int,
        plain: bool,
    ) -> torch.Tensor:
        """Puts the tokens x (batch, tokens, ...) of [`at_places`] into a ring; returns it, (batch, window, ...)."""
        ring = turned(layer, name, layer.get(name), x, place, real, window, plain)
        layer.update(name, ring, functools.partial(ring_state, window=window), x, place, real)
        layer.lend(name)
        return ring

    def restart(
        self, layer: RecurrentLayer, name: str, x: torch.Tensor, place: torch.Tensor, real: torch.Tensor
    ) -> None:
        """Keeps of packed documents each row's last, the tokens x (batch, tokens, ...) of [`at_places`]."""
        held, wanted = layer.get(name), torch.arange(self.room_for(x.shape[1]), device=x.device)[None]
        if held is None:
            held = x.new_zeros(x.shape[0], wanted.shape[1], *x.shape[2:])
        held = _with_room(held, wanted.shape[1] - held.shape[1])
        held = at_places(held, x, wanted.expand(x.shape[0], -1), place, real)
        layer.write(name, held.masked_fill(_of_entries(wanted > place[:, -1:], x), 0.0))

    def reset(self) -> None:
        super().reset()
        self.even = True

    @classmethod
    def load(cls, path: str | os.PathLike, config: PreTrainedConfig, *args, **kwargs) -> "RavenCache":
        cache = super().load(path, config, *args, **kwargs)
        cache.even = False
        return cache


class GeckoCache(CountingCache):
    """
    What Gecko keeps of a text, whose size does not depend on its length. In each block, the moments `timenorm` (batch,
    3, groups) and CEMA's state `cema` (batch, model_dim, cema_ndim, 2), the `memory` (batch, heads, key size, value
    size) and its log-normaliser `normalizer` (batch, heads, key size), in float32; and of the tokens of at most two
    chunks, one of place p at p % (2 * chunk_size), `keys`, `values` and `memory_keys` (batch, heads, tokens, size).
    After the blocks, the moments of the final norm, and where a begin token may begin documents, `begins` (batch, 2 *
    chunk_size), where the document of each of those tokens begins.

    Args:
        config, static: see [`RecurrentCache`].
    """

    def __init__(self, config: PreTrainedConfig, static: bool = False):
        super().__init__(config, static)
        self.window = 2 * config.chunk_size

    def ring_size(self, tokens: int) -> int:
        """How many tokens' keys and values there is room for, once `tokens` more are read."""
        layer, size = self.after_blocks, 64
        if layer.static or layer.record_past:
            return self.window
        if "keys" in self.layers[0].states:
            size = max(size, self.held_tokens)
        while size < self.window and size < self.seen_tokens + tokens:
            size *= 2
        return min(size, self.window)

    @property
    def held_tokens(self) -> int:
        """How many tokens' keys and values there is room for now."""
        return self.layers[0].states["keys"].shape[2]

    def keep(
        self,
        layer: RecurrentLayer,
        rows: dict[str, torch.Tensor],
        states: dict[str, torch.Tensor],
        place: torch.Tensor,
        real: torch.Tensor,
        plain: bool,
        replay: Callable[..., States],
        *updates: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """
        Puts the tokens (batch, heads, tokens, size) of [`turned`] into their rings, which are returned, and sets
        states that depend on them.
        """
        size, rings = self.ring_size(place.shape[1]), {}
        for name, x in rows.items():
            held = layer.get(name)
            held = None if held is None else held.transpose(1, 2)
            ring = turned(layer, name, held, x.transpose(1, 2), place, real, size, plain)
            rings[name] = ring.transpose(1, 2).contiguous()
        layer.update_together({**rings, **states}, replay, *updates)
        for name in rings:
            layer.lend(name)
        return rings

    def hand_on(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """Called with what a block makes, (batch, length, model_dim), once its states are set; returns it."""
        return x


def check_cache(
    past_key_values: Any,
    config: PreTrainedConfig,
    tokens: Tokens,
    cache_class: type[RecurrentCache],
) -> None:
    """
    Raises:
        ValueError: where a cache is not one of this model, or not of this batch, or cannot go on with these tokens.
    """
    if not isinstance(past_key_values, cache_class):
        raise ValueError(
            f"`past_key_values` must be a {cache_class.__name__}, which the model returns with `use_cache=True`; got "
            f"{type(past_key_values).__name__}."
        )
    _check_sizes("`past_key_values`", past_key_values.sizes, _sizes(config))
    held = past_key_values.batch_size
    if held not in (-1, tokens.batch):
        raise ValueError(f"`past_key_values` holds the state of {held} sequences, the input has {tokens.batch}.")
    past_key_values.check_tokens(tokens)


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """What two models must have in common for one's states to fit the other."""
    names = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "head_size", "chunk_size")
    names += ("num_slots", "key_dim", "value_dim", "attention_specs")
    names += ("z_dim", "cema_ndim", "timenorm_num_groups", "boundary_token_id")
    return {name: getattr(config, name, None) for name in names}


def _check_sizes(what: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    wrong = [
        f"`{name}` {found.get(name)!r}, not {value!r}" for name, value in wanted.items() if found.get(name) != value
    ]
    if wrong:
        raise ValueError(f"{what} is the cache of another model: {', '.join(wrong)}.")
