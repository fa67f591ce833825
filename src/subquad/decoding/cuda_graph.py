"""
Decoding on a GPU: the kernels of one token are captured into a CUDA graph once and then replayed, instead of some
thousand calls from Python that take longer than the kernels. Of RWKV, Raven and Gecko, these are kernels of whole
blocks if there are few rows; of others, those that the model itself launches. If the cache records the past, they are
the model's own kernels, and others that write what the token adds to the record.
"""

import functools
import operator
import os
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.utils import logging

from subquad_kernels.fused_step import BLOCKS, MOST_ROWS, StepBlocks
from subquad_kernels.tracing import is_observed

from ..modeling.cache import RecurrentCache
from ..modeling.layer_state import LayerState
from ..modeling.padding import Tokens
from .fused import ModelOfBlocks, find_fused
from .step import EagerStep, Unsuitable, check_ids
from .tape import Tape, take_from_tapes
from .watch import Watch, look_up, weights_of


if TYPE_CHECKING:
    from ..models.architecture import Architecture, FusedModel

logger = logging.get_logger(__name__)
# The number of graphs in a process. Those that were used longest ago are dropped.
MOST_GRAPHS = 8
# What an adapter of PEFT computes depends on these attributes of its layers.
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class Key(NamedTuple):
    """What a graph is made for."""

    model: "weakref.ref[ExaminedModel]"
    settings: tuple[str | bool | None, ...]
    adapters: str
    stream: torch.cuda.Stream
    records_past: bool
    shapes: tuple[tuple[str, torch.Size, torch.dtype], ...]


# The one that was used last comes last.
_kept: "list[CapturedToken]" = []
_examined: "WeakKeyDictionary[nn.Module, ExaminedModel]" = WeakKeyDictionary()
_streams: dict[torch.device, torch.cuda.Stream] = {}
# Graphs share memory, so what is copied to and from one must not be mixed with the replay of another.
_lock = threading.RLock()


class CudaGraphStep:
    """
    The decoding step by CUDA graphs, see [`DecodingStep`]. The first token with states of new shapes is read by the
    model itself, the second one is captured. The model itself also reads a token while something observes torch's
    operations, where states have to grow, and where a record of the past begins.
    """

    kind = "cuda_graph"

    def __init__(
        self, model: PreTrainedModel, fused: "FusedModel | None", cache: RecurrentCache, batch_size: int, alone: bool
    ):
        self.model, self.fused, self.cache, self.batch_size = model, fused, cache, batch_size
        self.eager = EagerStep(model, cache, batch_size)
        self._suitable, self._captured, self._key = True, None, None
        with _lock:
            examined = look_up(_examined, model, ExaminedModel, True)
        self._sealed, self._weights = (examined, weights_of(model)) if alone else (None, [])
        self._settings = (
            os.environ.get("SUBQUAD_BACKEND"),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        check_ids(input_ids, self.batch_size)
        with _lock:
            logits = self._replay(input_ids, attention_mask)
        return self.eager(input_ids, attention_mask) if logits is None else logits

    def _replay(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
        """The logits; None, and nothing has changed, if the model itself is to read the token."""
        cache, device = self.cache, input_ids.device
        if not self._suitable or self.model.training or is_observed(device.type):
            return None
        # A capture by somebody else, or weights that are computed once for several calls.
        if torch.cuda.is_current_stream_capturing() or parametrize._cache_enabled:
            return None
        if input_ids.dtype not in (torch.int64, torch.int32):  # an error of the model
            return None
        if attention_mask is not None and (attention_mask.dim() != 2 or len(attention_mask) != self.batch_size):
            return None
        if any(layer.fresh_rows is not None for layer in cache.all_layers):
            return None
        records_past = cache.records_past
        if records_past and not any(layer.records for layer in cache.all_layers):
            return None
        if (most := cache.fixed_until) is not None and cache.get_seq_length() >= most:
            return None
        try:
            model = self._sealed or look_up(_examined, self.model, ExaminedModel)
        except Unsuitable as reason:
            logger.info("Each token is read by the model itself from now on: %s", reason)
            self._suitable = False
            return None
        if device != model.device:
            return None
        captured, stream = self._captured, torch.cuda.current_stream(device)
        made_for = weakref.ref(model), self._settings, model.adapters, stream, records_past
        if captured is None or captured.key[:5] != made_for or not captured.is_held_by(cache):
            take_from_tapes(cache)
            states = cache.named_states()
            if cache.batch_size != self.batch_size or any(x.device != device for x in states.values()):
                return None
            key = Key(*made_for, tuple((name, states[name].shape, states[name].dtype) for name in sorted(states)))
            free = (each for each in _kept if each.key == key and each.is_free_for(cache))
            captured, before, self._key = next(free, None), self._key, key
            # It is captured for the second token: there may be no second one, and a first one may change the shapes.
            if key in model.failed or (captured is None and key != before):
                return None
        else:
            key = captured.key
        try:
            captured = self._captured = captured or CapturedToken(key, self.model, cache)
            captured.prepare(self.model, self.fused, cache, attention_mask is not None)
            return captured.read(cache, input_ids, attention_mask)
        except Exception as error:
            model.failed.add(key)
            self._captured = None
            if captured in _kept:
                _kept.remove(captured)
            why = f"{type(error).__name__}: {error}"
            logger.warning_once(f"A CUDA graph has failed, so each token is read by the model itself: {why}")
            return None


def make(
    architectures: Iterable["Architecture"],
    model: PreTrainedModel,
    cache: RecurrentCache,
    batch_size: int,
    alone: bool = False,
) -> CudaGraphStep:
    """
    Raises:
        Unsuitable: if a token of the model cannot be captured.
    """
    if model.uncapturable:
        raise Unsuitable(model.uncapturable)
    if type(cache) is not model.cache_class:
        raise Unsuitable(f"the cache is a {type(cache).__name__}.")
    if any(module.training for module in model.modules()):
        raise Unsuitable("the model, or a part of it, is in training mode.")
    return CudaGraphStep(model, find_fused(architectures, model), cache, batch_size, alone)


class CapturedToken:
    """
    The kernels that read one token of each row, for states at constant addresses. The cache that is read holds these
    states itself, so it is always up to date. Another cache gets a graph of its own as long as anybody holds them.

    Attributes:
        key: what it is made for.
        graphs: by whether there is a mask, the graph and the logits that it writes.
        tape: what the tokens add to the records of a cache that records the past; else None.
    """

    def __init__(self, key: Key, model: PreTrainedModel, cache: RecurrentCache):
        self.key, self.graphs = key, {}
        self.cache = model.new_cache(static=True)
        self.cache.set_states(cache.named_states())
        self.cache.seen_tokens = 0  # counted by Python, for the cache that holds the states
        self._states, rows = self.cache.named_states(), cache.batch_size
        for layer in self.cache.all_layers:
            layer.record_past = key.records_past
        with torch.inference_mode(False):
            self.tape = Tape(rows, model.device) if key.records_past else None
            self._ids = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
            self._mask = torch.ones(rows, 1, dtype=torch.bool, device=model.device)
        self._alone = self._uses()
        self._held: list[weakref.ref[torch.Tensor]] = []

    def _uses(self) -> dict[str | tuple, int]:
        """How many tensors have the memory of each state, and of each part of the tape."""
        tensors = self._states | ({} if self.tape is None else self.tape.tensors)
        return {name: torch._C._storage_Use_Count(x.untyped_storage()._cdata) for name, x in tensors.items()}

    def is_held_by(self, cache: RecurrentCache) -> bool:
        """Whether a cache holds the states, and nobody else may need them as they are."""
        layers = cache.all_layers
        states = [x for layer in layers for x in layer.states.values()]
        same = len(states) == len(self._held) and all(map(operator.is_, states, [held() for held in self._held]))
        same = same and (self.tape is None or self.tape.is_held_by(cache))
        return same and not any(layer.aliased for layer in layers)

    def is_free_for(self, cache: RecurrentCache) -> bool:
        """Whether nobody but the cache holds any of the states, and nobody a part of the tape."""
        uses, lent = self._uses(), any(layer.aliased for layer in cache.all_layers)
        if self.tape is not None and any(uses[name] > self._alone[name] for name in self.tape.tensors):
            return False
        for name, x in cache.named_states().items():
            own = not lent and _is_same_memory(x, self._states[name])
            if not own and uses[name] > self._alone[name]:
                return False
        return True

    def prepare(self, model: PreTrainedModel, fused: "FusedModel | None", cache: RecurrentCache, masked: bool) -> None:
        """Lets a cache hold the states, with its own values in them, and captures what is not captured yet."""
        if masked not in self.graphs:
            # Graphs that belong to the same stream, and so are never replayed at the same time, share memory.
            others = [each for each in (*_kept, self) if each.key.stream == self.key.stream]
            pools = (graph.pool() for each in others for graph, _ in each.graphs.values())
            take_from_tapes(cache)
            self._capture(model, fused, masked, next(pools, None))
        if self.is_held_by(cache):
            return
        _copy(cache.named_states(), self._states)
        with torch.inference_mode(False):
            cache.set_states({name: x.detach() for name, x in self._states.items()})
            if self.tape is not None:
                self.tape.start(cache)
        for layer in cache.all_layers:
            layer.aliased.clear()
            if self.tape is None:
                layer.records.clear()  # left from a recording that has ended
        self._held = [weakref.ref(x) for layer in cache.all_layers for x in layer.states.values()]
        _kept[:] = [*(each for each in _kept if each is not self), self][-MOST_GRAPHS:]

    def _capture(self, model: PreTrainedModel, fused: "FusedModel | None", masked: bool, pool: tuple | None) -> None:
        """Captures the kernels; `pool` is the memory that they may share."""
        mask, rows = self._mask if masked else None, len(self._ids)
        # The kernels of whole blocks do not write what a token adds to a record.
        blocks = find_blocks(model, fused, rows) if self.tape is None else None
        read = functools.partial(self._read_by_model, EagerStep(model, self.cache, rows), mask)
        current = torch.cuda.current_stream(model.device)
        if (stream := _streams.get(model.device)) is None:
            stream = _streams[model.device] = torch.cuda.Stream(model.device)
        graph = torch.cuda.CUDAGraph()
        before = {name: x.clone() for name, x in self._states.items()}
        if self.tape is not None:
            self.tape.rewind()
        stream.wait_stream(current)
        try:
            # The outer one restores the stream if the end of the capture raises an error.
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
                # Compiles kernels, which cannot be captured.
                if blocks is not None and blocks.read(self._ids, mask, self.cache) is not None:
                    read = functools.partial(blocks.read, self._ids, mask, self.cache)
                else:
                    read()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    logits = read()
        finally:
            current.wait_stream(stream)
            _copy(before, self._states)
        if any(x is not self._states[name] for name, x in self.cache.named_states().items()):
            raise RuntimeError("the states have other shapes after a token")
        self._alone = self._uses() | self._alone
        self.graphs[masked] = graph, logits

    def _read_by_model(self, step: EagerStep, mask: torch.Tensor | None) -> torch.Tensor:
        logits = step(self._ids, mask)
        if self.tape is not None:
            self.tape.write(self.cache)
        return logits

    def read(
        self, cache: RecurrentCache, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits (batch, vocabulary) after one token of each row of the cache that holds the states."""
        graph, logits = self.graphs[attention_mask is not None]
        out = torch.empty_like(logits)  # while nothing has changed, if there is no memory
        self._ids.copy_(input_ids)
        if attention_mask is not None:
            self._mask.copy_(attention_mask[:, -1:])
        graph.replay()  # all of it or, with an error, nothing
        cache.seen_tokens += 1
        if self.tape is not None:
            self.tape.count += 1
        return out.copy_(logits)


class FusedToken(ModelOfBlocks):
    """A model for the fused kernels. They write states in place, so the cache must be static."""

    def __init__(self, model: PreTrainedModel, fused: "FusedModel"):
        super().__init__(model, fused, BLOCKS[fused.kind])
        self.blocks = StepBlocks(self.found)

    def read_blocks(
        self, x: torch.Tensor, tokens: Tokens, layers: list[LayerState], positions: dict[str, torch.Tensor]
    ) -> bool:
        states = [[layer.states.get(name) for name in self.states] for layer in layers]
        if not self.blocks(x, states, tokens.mask, positions):
            return False
        for layer, of_layer in zip(layers, states, strict=True):
            layer.set(dict(zip(self.states, of_layer, strict=True)))
        return True


def find_blocks(model: PreTrainedModel, fused: "FusedModel | None", rows: int) -> FusedToken | None:
    """The model for the fused kernels; None if they are not made for it, or for so many rows."""
    if fused is None or rows > MOST_ROWS:
        return None
    try:
        return FusedToken(model, fused)
    except ValueError as reason:
        logger.info("The model's own kernels are captured: %s", reason)
        return None


def _copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    """Copies states that have other memory, with one kernel for each dtype."""
    names = [name for name, x in source.items() if not _is_same_memory(x, target[name])]
    for dtype in {target[name].dtype for name in names}:
        same = [name for name in names if target[name].dtype == dtype]
        torch._foreach_copy_([target[name] for name in same], [source[name].detach() for name in same])


def _is_same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


class ExaminedModel:
    """
    A model as its graphs rely on it.

    Attributes:
        device: where all of it is.
        failed: keys of the graphs that could not be captured or replayed.

    Raises:
        ValueError: if a token of it cannot be captured; the message says why.
    """

    def __init__(self, model: PreTrainedModel):
        self.device, self.failed = model.device, set()
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if type(x) not in (torch.Tensor, nn.Parameter) or x.device != self.device:
                raise ValueError(f"`{name}` is a {type(x).__name__} on {x.device}, the model is on {self.device}.")
        for name, module in model.named_modules():
            for attribute, x in vars(module).items():
                if isinstance(x, torch.Tensor):
                    raise ValueError(f"`{name}.{attribute}` is a tensor, but neither a parameter nor a buffer.")
        self._watch = Watch([model])
        self._watch.everything(model)
        self._watch.start()
        # Without the model's own attributes: PEFT puts something there that would keep the model alive.
        modules = [vars(module) for module in model.modules() if module is not model]
        configs = [vars(config) for config in (model.config, model.config.get_text_config())]
        adapted = [attributes for attributes in modules if _OF_ADAPTERS[0] in attributes]
        self._of_adapters = [(attributes, name) for attributes in adapted for name in _OF_ADAPTERS]
        # Numbers and names that decide which kernels run, or are among their arguments.
        self._attributes = [
            (attributes, name)
            for attributes in (*modules, *configs)
            for name, value in attributes.items()
            if name not in _OF_ADAPTERS and isinstance(value, bool | int | float | str | None)
        ]
        self._before = _values(self._attributes)
        weakref.finalize(self, _drop, weakref.ref(self)).atexit = False

    @property
    def adapters(self) -> str:
        """Which adapters are active or merged, and how strongly."""
        return repr(_values(self._of_adapters))

    def is_unchanged(self, thoroughly: bool = False) -> bool:
        """`thoroughly`: whether to look at the numbers in all modules, too. That takes a millisecond."""
        return self._watch.is_unchanged() and not (thoroughly and _values(self._attributes) != self._before)


def _values(places: list[tuple[dict, str]]) -> list:
    return [names.get(name) for names, name in places]


def _drop(model: "weakref.ref[ExaminedModel]") -> None:
    """Drops the graphs of a model that is gone, or has changed."""
    _kept[:] = [each for each in _kept if each.key.model is not model]
