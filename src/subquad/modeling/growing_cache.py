"""A cache that keeps an entry for every token."""

import os

import torch
from transformers import PreTrainedConfig

from subquad_kernels.tracing import can_read_values

from .arguments import check_counts
from .counting_cache import CountingCache
from .layer_state import LayerState
from .padding import expand_to
from .ring import with_capacity
from .state_file import ModelIdentity


class GrowingCache(CountingCache):
    """
    A cache that keeps an entry for every token, so it grows with the text.

    The states that grow, (batch, room, ...), hold the entry of each token at its position in its row, without padding,
    and zeros after that. The room is a whole number of `unit` tokens and doubles when it is used up.

    Args:
        config: configuration of the model that the cache is for.
        static: see [`RecurrentCache`].
        max_cache_len: capacity of a static cache in tokens, rounded up to whole units. Padding and
            documents that have ended count too. If None, `generate` or the first call sets it.
    """

    # Tokens per unit of room.
    unit: int = 64
    # Names of the states that grow, and how many tokens share an entry.
    growing: dict[str, int] = {}

    def __init__(self, config: PreTrainedConfig, static: bool = False, max_cache_len: int | None = None):
        super().__init__(config, static)
        if max_cache_len is not None:
            check_counts(max_cache_len=max_cache_len)
        self._limit = max_cache_len and self._whole_units(max_cache_len)

    def _grown(self) -> list[tuple[LayerState, str, int]]:
        """Layer, name and tokens per entry of every state that grows."""
        states = [(layer, name, tokens) for layer in self.all_layers for name, tokens in self.growing.items()]
        return [(layer, name, tokens) for layer, name, tokens in states if name in layer.states]

    @property
    def _capacity(self) -> int:
        return max([0, *(layer.states[name].shape[1] * tokens for layer, name, tokens in self._grown())])

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Capacity of a static cache in tokens; -1 if there is no limit."""
        return self._capacity or self._limit or -1 if self.after_blocks.static and self.growing else -1

    # package only
    @property
    def grows(self) -> bool:
        return bool(self.growing)

    # package only
    @property
    def fixed_until(self) -> int | None:
        return self._capacity if self.growing else None

    def _whole_units(self, tokens: int) -> int:
        return -(-tokens // self.unit) * self.unit

    def reserve(self, tokens: int) -> None:
        if not self.after_blocks.static or not self.growing:
            return
        room = self._capacity or self._limit
        if room is None:
            self._limit = self._whole_units(tokens)
        elif tokens > room:
            raise ValueError(f"`cache` is static, with a `max_cache_len` of {room} tokens; {tokens} would be kept.")

    def capacity_for(self, tokens: int) -> int:
        """
        Capacity of the cache in tokens once `tokens` more are read.

        Raises:
            ValueError: if the cache is static and too small.
        """
        room, static = self._capacity, self.after_blocks.static
        known = isinstance(self.seen_tokens, int) or can_read_values(self.seen_tokens)
        if static and (room or self._limit) and not known:
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

    def append(self, layer: LayerState, name: str, x: torch.Tensor, position: torch.Tensor, room: int) -> torch.Tensor:
        """
        Stores x (batch, tokens, ...), zero for padding, at the positions (batch or 1, tokens) of their rows. Returns
        the entries of all tokens, (batch, room, ...).
        """
        held = layer.get(name)
        if held is None:
            held = x.new_zeros(x.shape[0], room, *x.shape[2:])
        elif held.shape[1] < room:
            held = with_capacity(held, room - held.shape[1])
        rows = torch.arange(x.shape[0], device=x.device)[:, None] * held.shape[1]
        # Padding adds zero at any position. A CPU would copy all of a 16-bit tensor to scatter into it.
        index, x = (position.clamp_min(0) + rows).flatten(), x.to(held.dtype).flatten(0, 1)
        if held.is_contiguous() and layer.can_modify(name, held):  # a copy for every token would take long
            held.flatten(0, 1).index_add_(0, index, x)
        else:
            held = held.flatten(0, 1).index_add(0, index, x).view_as(held)
        layer.replace({name: held})
        layer.note_alias(name)
        return held

    # package only
    def find_fault(self, config: PreTrainedConfig, states: dict[str, torch.Tensor], tokens: int) -> str | None:
        if fault := super().find_fault(config, states, tokens):
            return fault
        shared = {name: self.growing.get(name.rpartition(".")[2]) for name in states}
        rooms = {name: states[name].shape[1] * number for name, number in shared.items() if number is not None}
        for name, room in rooms.items():
            if room != max(rooms.values()) or room % self.unit or room < tokens:
                return f"{name} has room for {room} tokens, after {tokens}"
        return None

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        lengths = self.after_blocks.states.get("lengths")
        for layer, name, tokens in self._grown():
            if lengths is None:
                del layer.states[name]
            elif tokens == 1:
                state = layer.states[name]
                kept = torch.arange(state.shape[1], device=state.device) < lengths.to(state.device)[:, None]
                layer.states[name] = state * expand_to(kept, state)

    # package only
    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        config: PreTrainedConfig,
        device: torch.device | str = "cpu",
        static: bool = False,
        model: ModelIdentity | None = None,
        max_cache_len: int | None = None,
    ) -> "GrowingCache":
        """As [`RecurrentCache.load`]; `max_cache_len` is the capacity of a static cache; by default the saved one."""
        saved = super().load(path, config, device, model=model)
        if not static:
            return saved
        cache = cls(config, True, max_cache_len or saved._capacity or None)
        if saved._capacity:
            cache.reserve(saved.get_seq_length())
        more = max((cache._limit or 0) - saved._capacity, 0) if saved._capacity else 0
        states = {}
        for key, state in saved.named_states().items():
            tokens = cache.growing.get(key.rpartition(".")[2])
            states[key] = state if tokens is None else with_capacity(state, more // tokens)
        cache.set_states(states)
        cache.seen_tokens += saved.get_seq_length()
        cache._move_count(device)
        return cache
