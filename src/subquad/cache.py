"""The states of a recurrent model, behind the cache interface of transformers."""

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
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, StaticCache

from .padding import Tokens


# How many of the last tokens can be removed while the past is recorded. No draft is nearly as long.
MAX_RECORDED = 256

States = dict[str, torch.Tensor | None]


def static_copy(x: torch.Tensor) -> torch.Tensor:
    """A copy marked as a tensor whose address does not change: CUDA graphs write to no other."""
    if torch.compiler.is_compiling():  # a traced tensor cannot be marked
        return x.clone(memory_format=torch.contiguous_format)
    with torch.inference_mode(False):  # otherwise it could not be written outside of inference mode
        x = x.detach().clone(memory_format=torch.contiguous_format)
    torch._dynamo.mark_static_address(x)
    return x


def _is_inference(x: torch.Tensor) -> bool:
    """Whether x was made in inference mode, as far as that can be asked."""
    return not torch.compiler.is_compiling() and x.is_inference()


@dataclass
class Record:
    """What rebuilds states: their values before the recorded tokens, and what each token contributed."""

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
    # Names of states that were read with gradients enabled: a graph may hold them, whether they require any or not.
    lent: set[str] = field(default_factory=set, repr=False)

    # What transformers asks of a cache layer.
    keys = values = None
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    @property
    def is_compileable(self) -> bool:
        return self.static

    def get(self, name: str) -> torch.Tensor | None:
        """The state of that name. None, and zeros, mean that no token has been read."""
        state = self.states.get(name)
        if state is not None and torch.is_grad_enabled() and (self.static or _is_inference(state)):
            return state.clone()  # the backward pass may need it after it was overwritten
        return state

    def can_overwrite(self, name: str) -> bool:
        """Whether an operator may write the new state over the old one."""
        held = self.states.get(name)
        if held is None or held.dtype != torch.float32 or not held.is_contiguous():
            return False
        if torch.compiler.is_compiling() and not self.static:  # it may be from inference mode, which cannot be asked
            return False
        return not self.record_past and self.can_modify(name, held)

    def can_modify(self, name: str, held: torch.Tensor) -> bool:
        """Whether a state, as [`~LayerState.get`] returned it, may be modified in place: no graph needs it."""
        if torch.is_grad_enabled() or held.requires_grad or name in self.lent:
            return False
        return not _is_inference(held) or torch.is_inference_mode_enabled()

    def lend(self, name: str) -> None:
        """Notes whether a graph may hold the state, which was just set and which this call goes on to read."""
        if torch.is_grad_enabled():
            self.lent.add(name)
        else:
            self.lent.discard(name)

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
                from an earlier one and from what the tokens since then contributed.
            updates: these contributions, (batch, tokens, ...) each. They are only kept while the past is recorded.
        """
        self.update_together({name: state}, functools.partial(_replay_one, name, replay), *updates)

    def step(self, name: str, replay: Callable[..., torch.Tensor], *updates: torch.Tensor) -> None:
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
        self.fresh = False
        for name, state in states.items():
            self.write(name, state)

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function(tensor)`."""
        for name, state in self.states.items():
            self.write(name, function(state))
        self.records = {name: record.map(function) for name, record in self.records.items()}

    def clone(self) -> "LayerState":
        other = copy.copy(self)
        other.states, other.lent = {}, set()
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


@LinearAttentionCacheLayerMixin.register
@dataclass(eq=False)
class LinearAttentionState(LayerState):
    """
    The states of a block that transformers takes for linear attention. It reads them by number: those of the
    recurrences, and those of the convolutions, (batch, channels, tokens), such as the last token of a token shift.
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


class RecurrentCache(Cache):
    """
    The states of a recurrent model: a few named tensors per block, whose size does not depend on the length of the
    text.

    `generate` and the models create one by themselves. Passed to a later call (`past_key_values`), it continues the
    text. Rolling back (`crop`) rebuilds the states from those before the recorded tokens and from what each of these
    contributed, so call [`~RecurrentCache.activate_past_recording`] before the tokens are read. Assisted decoding does
    that.

    Args:
        config: configuration of the model that the cache is for.
        static: allocate the states at the first call, which must not be compiled, and write them in place from then
            on. No gradient passes through them. `generate(cache_implementation="static")` makes such a cache, and on
            a GPU compiles the decoding step. [`~RecurrentCache.reset`] fills it with zeros, for a batch of the same
            size. Once it records the past, it is no longer static. It is an instance of `transformers.StaticCache`.
        max_cache_len: not used. Subclasses whose static states grow with the text have room for so many tokens.
    """

    # The configuration fields that two models must have in common for the states of one to fit the other.
    size_names: tuple[str, ...] = (
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "head_size",
    )

    # The states that transformers knows as those of recurrences and of convolutions.
    recurrent_names: tuple[str, ...] = ("wkv",)
    convolution_names: tuple[str, ...] = ("attention_shift", "feed_forward_shift")

    def __init__(self, config: PreTrainedConfig, static: bool = False, max_cache_len: int | None = None):
        config = config.get_text_config()
        layers = [self.new_layer(config, number, static) for number in range(config.num_hidden_layers)]
        Cache.__init__(self, layers=layers)
        self._set_class(static)
        # What the model keeps after its blocks, such as the output of every row's last token.
        self.after_blocks = LayerState(static=static)
        self.sizes = self.sizes_of(config)
        # A tensor if static: compiled code would be specialised to a number, and compiled again for the next one.
        self.seen_tokens = static_copy(torch.zeros((), dtype=torch.long)) if static else 0

    @classmethod
    def sizes_of(cls, config: PreTrainedConfig) -> dict[str, Any]:
        """The values of `size_names` in a configuration."""
        return {name: getattr(config, name, None) for name in cls.size_names}

    def _set_class(self, static: bool) -> None:
        """Makes it an instance of the class of static caches, `static_class`, or of the other one."""
        wanted = cls = type(self)
        if static:
            wanted = cls.__dict__.get("static_class", cls)  # a subclass has its own, or none
        elif issubclass(cls, StaticCache):
            wanted = cls.__base__
        if wanted is not cls:  # compiled code cannot change a class, and makes no static caches
            self.__class__ = wanted

    def new_layer(self, config: PreTrainedConfig, number: int, static: bool) -> LayerState:
        """The states of a block, still without any."""
        return LinearAttentionState(
            static=static, recurrent_names=self.recurrent_names, convolution_names=self.convolution_names
        )

    @property
    def all_layers(self) -> list[LayerState]:
        """The layers of the blocks, and what is kept after them."""
        return [*self.layers, self.after_blocks]

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 if there are no states."""
        return next((layer.batch_size for layer in self.all_layers if layer.states), -1)

    @property
    def is_initialized(self) -> bool:
        """Whether there are states."""
        return self.batch_size > 0

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for layer in self.all_layers:
            layer.apply(function)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Gives row i the states of row `beam_idx[i]`, as beam search needs it."""
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

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a token has been read."""
        return self.get_seq_length() > 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1

    def reserve(self, tokens: int) -> None:
        """
        Makes sure that there will be room for a text of `tokens` tokens. A recurrent state always has it.

        Raises:
            ValueError: if there is no such room.
        """

    def check_tokens(self, tokens: Tokens) -> None:
        """
        Raises:
            ValueError: if the tokens of a call cannot continue what was read.
        """
        self.after_blocks.record_past = self.records_past  # transformers may end the recording of the layers
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
            self.seen_tokens = static_copy(self.seen_tokens.to(device))

    def activate_past_recording(self) -> None:
        """Keeps from now on what [`~RecurrentCache.crop`] needs."""
        for layer in self.all_layers:
            layer.activate_past_recording()
        self._set_class(static=False)
        self.seen_tokens = self.get_seq_length()

    @property
    def records_past(self) -> bool:
        """Whether it keeps what [`~RecurrentCache.crop`] needs."""
        return any(layer.record_past for layer in self.layers)

    def keep_past(self, tokens: int) -> None:
        """Drops the recorded past but for the last `tokens` tokens: no more of them can be removed."""
        for layer in self.all_layers:
            for record in layer.records.values():
                record.keep(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """
        Forgets the last tokens.

        Args:
            tokens_to_remove: minus the number of tokens to forget; 0 drops the record and keeps the states.

        Raises:
            ValueError: if the number is positive or more tokens than were recorded. Nothing has changed then.
        """
        # A layer that only grows has no record: it keeps something of every token, which can be cut off.
        recorded = min((layer.recorded_tokens for layer in self.all_layers if layer.records), default=0)
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative (tokens to forget), got {tokens_to_remove}.")
        if -tokens_to_remove > recorded:
            raise ValueError(
                f"`tokens_to_remove` is {tokens_to_remove}, but the past of {recorded} tokens is recorded. Call "
                "`activate_past_recording()` on the cache before the tokens that may be removed."
            )
        for layer in self.all_layers:
            layer.crop(tokens_to_remove)
        self.seen_tokens += tokens_to_remove

    def reset(self) -> None:
        """Forgets everything."""
        for layer in self.all_layers:
            layer.reset()
        self.seen_tokens *= 0  # in place if it is a tensor

    def clone(self) -> "RecurrentCache":
        """An independent copy."""
        other = copy.copy(self)
        *other.layers, other.after_blocks = [layer.clone() for layer in self.all_layers]
        if isinstance(self.seen_tokens, torch.Tensor):
            other.seen_tokens = static_copy(self.seen_tokens)
        return other

    def to(self, device: torch.device | str) -> "RecurrentCache":
        """Moves the states to a device, in place, and returns the cache."""
        self._apply(lambda x: x.to(device))
        self._move_count(device)
        return self

    @property
    def num_elements(self) -> int:
        """Number of elements of the states of all blocks, over all rows."""
        return sum(state.numel() for layer in self.layers for state in layer.states.values())

    def _named_layers(self) -> list[tuple[str, LayerState]]:
        return [(f"layers.{i}", layer) for i, layer in enumerate(self.layers)] + [("after_blocks", self.after_blocks)]

    def named_states(self) -> dict[str, torch.Tensor]:
        """Every state under a name of its own, `layers.0.wkv` or `after_blocks.output`."""
        return {f"{of}.{name}": state for of, layer in self._named_layers() for name, state in layer.states.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """
        Sets states by the names of [`~RecurrentCache.named_states`]. Any rows may have had padding.

        Raises:
            ValueError: if a name is not that of a state of such a cache.
        """
        layers = dict(self._named_layers())
        for key in states:
            if key.rpartition(".")[0] not in layers:
                raise ValueError(f"`states`: {key!r} is in none of the layers {', '.join(layers)}.")
        for key, state in states.items():
            of, _, name = key.rpartition(".")
            layers[of].write(name, state)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the states to a safetensors file, without the record of the past."""
        fresh = tuple(f"{of}." for of, layer in self._named_layers() if layer.fresh)
        named = self.named_states().items()
        tensors = {name: state.detach().contiguous() for name, state in named if not name.startswith(fresh)}
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
            ValueError: if the file does not hold a cache, or holds one of another kind of model.
        """
        cache = cls(config, static)
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = json.loads((file.metadata() or {}).get("cache", "null"))
            if metadata is None:
                raise ValueError(f"{os.fspath(path)} does not hold a cache.")
            _check_sizes(os.fspath(path), metadata["sizes"], cache.sizes)
            cache.set_states({key: file.get_tensor(key) for key in file.keys()})
        cache.seen_tokens += metadata["seen_tokens"]
        return cache.to(device)


class StaticRecurrentCache(RecurrentCache, StaticCache):
    """A static [`RecurrentCache`], which transformers recognises as one."""


RecurrentCache.static_class = StaticRecurrentCache


def check_cache(
    past_key_values: Any,
    config: PreTrainedConfig,
    tokens: Tokens,
    cache_class: type[RecurrentCache],
) -> None:
    """
    Raises:
        ValueError: if a cache is not one of this model or of this batch, or cannot continue with these tokens.
    """
    if not isinstance(past_key_values, cache_class):
        raise ValueError(
            f"`past_key_values` must be a {cache_class.__name__}, which the model returns with `use_cache=True`; got "
            f"{type(past_key_values).__name__}."
        )
    _check_sizes("`past_key_values`", past_key_values.sizes, cache_class.sizes_of(config))
    held = past_key_values.batch_size
    if held not in (-1, tokens.batch):
        raise ValueError(f"`past_key_values` holds the state of {held} sequences, the input has {tokens.batch}.")
    past_key_values.check_tokens(tokens)


def _check_sizes(what: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    wrong = [
        f"`{name}` {found.get(name)!r}, not {value!r}" for name, value in wanted.items() if found.get(name) != value
    ]
    if wrong:
        raise ValueError(f"{what} is the cache of another model: {', '.join(wrong)}.")
