"""The states of one block of a recurrent model, and the record by which they are rebuilt after fewer tokens."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from subquad_kernels.tracing import is_inference


# How many of the last tokens can be removed while the past is recorded. No draft comes near this length.
MAX_RECORDED = 256

States = dict[str, torch.Tensor | None]


def static_copy(x: torch.Tensor) -> torch.Tensor:
    """A copy marked as having a fixed address: CUDA graphs write to no other tensors."""
    if torch.compiler.is_compiling():  # a traced tensor cannot be marked
        return x.clone(memory_format=torch.contiguous_format)
    with torch.inference_mode(False):  # inference tensors cannot be written to outside inference mode
        x = x.detach().clone(memory_format=torch.contiguous_format)
    torch._dynamo.mark_static_address(x, guard=False)  # no recompilation for another address
    return x


@dataclass
class Record:
    """Data to rebuild states: their values before the recorded tokens, and each token's contribution."""

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
        """Drops all but the last `tokens` tokens."""
        if (older := self.tokens - tokens) > 0:
            self.before = self.states_after(older)
            self.updates = tuple(x[:, older:].clone() for x in self.updates)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Record":
        before = {name: None if state is None else function(state) for name, state in self.before.items()}
        return Record(self.replay, before, tuple(function(x) for x in self.updates))


def _replay_one(name: str, replay: Callable[..., torch.Tensor], before: States, *updates: torch.Tensor) -> States:
    return {name: replay(before[name], *updates)}


@dataclass(eq=False)
class LayerState:
    """The named states of one block. The batch is the first dimension of every tensor."""

    states: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    records: dict[str, Record] = field(default_factory=dict, repr=False)
    record_past: bool = False
    static: bool = False
    # Whether static states were reset and no token has been read since.
    fresh: bool = False
    # The rows that were reset and have read no token since, bool (batch); None if there are none.
    fresh_rows: torch.Tensor | None = None
    # Names of states that were read with gradients enabled: a graph may hold them, even if they do not require grad.
    aliased: set[str] = field(default_factory=set, repr=False)

    # Attributes that transformers expects of a cache layer.
    keys = values = None
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    @property
    def is_compileable(self) -> bool:
        return self.static

    def get(self, name: str) -> torch.Tensor | None:
        """The state of that name. None or all zeros means that no token has been read."""
        state = self.states.get(name)
        if state is not None and torch.is_grad_enabled() and (self.static or is_inference(state)):
            return state.clone()  # the backward pass may need it after it is overwritten
        return state

    def can_overwrite(self, name: str) -> bool:
        """Whether an operator may write the new state over the old one."""
        held = self.states.get(name)
        if held is None or held.dtype != torch.float32 or not held.is_contiguous():
            return False
        if torch.compiler.is_compiling() and not self.static:  # a trace cannot check for inference tensors
            return False
        return not self.record_past and self.can_modify(name, held)

    def can_modify(self, name: str, held: torch.Tensor) -> bool:
        """Whether a state from [`~LayerState.get`] may be modified in place: no graph needs it."""
        if torch.is_grad_enabled() or held.requires_grad or name in self.aliased:
            return False
        return not is_inference(held) or torch.is_inference_mode_enabled()

    def note_alias(self, name: str) -> None:
        """Notes whether a graph may hold the state, which was just set and which this call still reads."""
        if torch.is_grad_enabled():
            self.aliased.add(name)
        else:
            self.aliased.discard(name)

    def write(self, name: str, state: torch.Tensor) -> None:
        """Sets a state without recording it; in place if the layer is static and holds a tensor that fits."""
        if not self.static:
            self.states[name] = state
            return
        held = self.states.get(name)
        if held is None or any(getattr(held, x) != getattr(state, x) for x in ("shape", "dtype", "device")):
            self.states[name] = static_copy(state)
        elif held is not state:
            held.copy_(state.detach())

    def update(
        self, name: str, state: torch.Tensor, replay: Callable[..., torch.Tensor], *updates: torch.Tensor
    ) -> None:
        """
        Sets a state after the tokens of a call.

        Args:
            name: name of the state.
            state: its new value, (batch, ...).
            replay: a function of a module, `replay(state before or None, *updates) -> state`, that rebuilds a state
                from an earlier one and the contributions of the tokens since then.
            updates: these contributions, (batch, tokens, ...) each. Kept only while the past is recorded.
        """
        self.update_together({name: state}, functools.partial(_replay_one, name, replay), *updates)

    def update_with(self, name: str, replay: Callable[..., torch.Tensor], *updates: torch.Tensor) -> None:
        """[`~LayerState.update`] with a new value that `replay` computes."""
        self.update(name, replay(self.states.get(name), *updates), replay, *updates)

    def update_together(
        self, states: dict[str, torch.Tensor], replay: Callable[..., States], *updates: torch.Tensor
    ) -> None:
        """As [`~LayerState.update`], for states that depend on each other: `replay(states, *updates) -> states`."""
        if not self.record_past:
            self.records.clear()
        else:
            key = next(iter(states))
            if key in self.records:
                self.records[key].extend(updates)
            else:
                self.records[key] = Record(replay, {name: self.states.get(name) for name in states}, updates)
            if self.records[key].tokens > 2 * MAX_RECORDED:  # not at every token
                self.records[key].keep(MAX_RECORDED)
        self.replace(states)

    def set(self, states: States) -> None:
        """Sets states after the tokens of a call, without recording anything."""
        self.records.clear()
        self.replace(states)

    def replace(self, states: States) -> None:
        """Sets states after the tokens of a call, and leaves the record of the past as it is."""
        self.fresh, self.fresh_rows = False, None
        for name, state in states.items():
            self.write(name, state)

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function(tensor)`."""
        for name, state in self.states.items():
            self.write(name, function(state))
        self.fresh_rows = None if self.fresh_rows is None else function(self.fresh_rows)
        self.records = {name: record.map(function) for name, record in self.records.items()}

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "LayerState":
        """A copy with `function(tensor)` for every tensor; results must not share memory with their inputs."""
        other = copy.copy(self)
        other.states, other.aliased = {}, set()
        for name, state in self.states.items():
            other.write(name, function(state))
        other.fresh_rows = None if self.fresh_rows is None else function(self.fresh_rows)
        other.records = {name: record.map(function) for name, record in self.records.items()}
        return other

    def frozen(self) -> "LayerState":
        """A non-static copy that shares the tensors; neither modifies them from now on."""
        self.aliased.update(self.states)
        other = copy.copy(self)
        other.states, other.records, other.aliased, other.static = dict(self.states), {}, set(self.states), False
        return other

    def detach(self) -> None:
        """Detaches the states from their graph, which may still need their memory."""
        self.aliased.update(self.states)
        self.apply(torch.Tensor.detach)

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
        for state in self.states.values():  # Dynamo of torch 2.8 cannot trace `next` with a default
            return state.shape[0]
        return -1

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Replaces the states of rows by zeros; `rows` is bool (batch). Drops the record of the past."""
        self.records.clear()
        for name, state in self.states.items():
            self.write(name, state.masked_fill(rows.to(state.device).view(-1, *[1] * (state.dim() - 1)), 0))
        if self.states:  # no call ends it for a layer without states
            self.fresh_rows = rows if self.fresh_rows is None else rows | self.fresh_rows.to(rows.device)

    def reset(self) -> None:
        self.records.clear()
        self.fresh_rows = None
        if self.static:
            self.fresh = True
            for state in self.states.values():
                state.zero_()
        else:
            self.states.clear()


@LinearAttentionCacheLayerMixin.register
@dataclass(eq=False)
class LinearAttentionState(LayerState):
    """
    The states of a block that transformers treats as linear attention, which it reads by number: recurrent states, and
    convolution states (batch, channels, tokens), such as the last token of a token shift.
    """

    recurrent_names: tuple[str, ...] = ()
    convolution_names: tuple[str, ...] = ()

    @property
    def number_of_states(self) -> int:
        return max(1, len(self.recurrent_names), len(self.convolution_names))

    def _numbered(self, names: tuple[str, ...]) -> dict[int, torch.Tensor | None]:
        return dict.fromkeys(range(self.number_of_states)) | {i: self.states.get(x) for i, x in enumerate(names)}

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        return self._numbered(self.recurrent_names)

    @property
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        states = self._numbered(self.convolution_names)
        return {i: state if state is None else state.unsqueeze(-1) for i, state in states.items()}

    @property
    def is_recurrent_states_initialized(self) -> dict[int, bool]:
        return {i: state is not None for i, state in self.recurrent_states.items()}

    @property
    def is_conv_states_initialized(self) -> dict[int, bool]:
        return {i: state is not None for i, state in self.conv_states.items()}

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether a token has been read, for each number of a state."""
        return dict.fromkeys(range(self.number_of_states), bool(self.states) and not self.fresh)
