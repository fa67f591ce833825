"""The state of a recurrent model, behind the cache interface of transformers."""

import copy
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


@dataclass
class _Record:
    """What rebuilds one state: its value before the recorded tokens and what each of them contributed."""

    replay: Callable[..., torch.Tensor]
    before: torch.Tensor | None
    updates: tuple[torch.Tensor, ...]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.before = None if self.before is None else function(self.before)
        self.updates = tuple(function(x) for x in self.updates)


@dataclass
class RecurrentLayer:
    """The named states of one block; the batch comes first in every tensor."""

    states: dict[str, torch.Tensor] = field(default_factory=dict)
    records: dict[str, _Record] = field(default_factory=dict)
    record_past: bool = False

    # What transformers asks of a cache layer. The shapes are static, but `generate` would also build the 4D attention
    # masks of a static key/value cache, for which a recurrent model has no use.
    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def get(self, name: str) -> torch.Tensor | None:
        """The state of that name; None before the first token."""
        return self.states.get(name)

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
        if self.record_past:
            if name in self.records:
                record = self.records[name]
                record.updates = tuple(torch.cat(pair, dim=1) for pair in zip(record.updates, updates, strict=True))
            else:
                self.records[name] = _Record(replay, self.states.get(name), updates)
        else:
            self.records.clear()
        self.states[name] = state

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function(tensor)`."""
        self.states = {name: function(state) for name, state in self.states.items()}
        for record in self.records.values():
            record.map(function)

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        for name, record in self.records.items():
            kept = record.updates[0].shape[1] + tokens_to_remove
            if tokens_to_remove == 0:
                continue
            if kept > 0:
                self.states[name] = record.replay(record.before, *(x[:, :kept] for x in record.updates))
            elif record.before is not None:
                self.states[name] = record.before
            else:
                del self.states[name]
        self.records.clear()

    @property
    def recorded_tokens(self) -> int:
        return min((record.updates[0].shape[1] for record in self.records.values()), default=0)

    @property
    def batch_size(self) -> int:
        return next((state.shape[0] for state in self.states.values()), -1)

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.states.clear()
        self.records.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self.map(lambda x: x.to("cpu", non_blocking=True))


class RecurrentCache(Cache):
    """
    The state of a recurrent model: a few named tensors a block, whose size does not depend on the length of the text.

    `generate` and the models make one by themselves. Passed to a later call (`past_key_values`), it continues the
    text. Rolling back (`crop`) rebuilds the state from the one before the recorded tokens and from what each of these
    contributed, so it needs [`~RecurrentCache.activate_past_recording`] before the tokens are read; assisted decoding
    does that.

    Args:
        config: configuration of the model that the cache is for.
    """

    layer_class = RecurrentLayer

    def __init__(self, config: PreTrainedConfig):
        super().__init__(layers=[self.layer_class() for _ in range(config.num_hidden_layers)])
        self.model_type: str = config.model_type
        self.seen_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens read so far, padding included."""
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.seen_tokens + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1

    def advance(self, tokens: int) -> None:
        """Counts the tokens of a call, after every block has read them."""
        self.seen_tokens += tokens

    def crop(self, tokens_to_remove: int) -> None:
        """
        Forgets the last tokens.

        Args:
            tokens_to_remove: minus the number of tokens to forget; 0 drops the record and keeps the state.

        Raises:
            ValueError: where the number is positive or more tokens than were recorded. Nothing has changed then.
        """
        recorded = min((layer.recorded_tokens for layer in self.layers), default=0)
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative (tokens to forget), got {tokens_to_remove}.")
        if -tokens_to_remove > recorded:
            raise ValueError(
                f"`tokens_to_remove` is {tokens_to_remove}, but the past of {recorded} tokens is recorded. Call "
                "`activate_past_recording()` on the cache before the tokens that may be removed."
            )
        super().crop(tokens_to_remove)
        self.seen_tokens += tokens_to_remove

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self.seen_tokens = 0

    def clone(self) -> "RecurrentCache":
        """An independent copy."""
        return copy.deepcopy(self)

    def to(self, device: torch.device | str) -> "RecurrentCache":
        """Moves the states to a device, in place, and returns the cache."""
        for layer in self.layers:
            layer.map(lambda x: x.to(device))
        return self

    @property
    def num_elements(self) -> int:
        """Number of elements of all states of all rows."""
        return sum(state.numel() for layer in self.layers for state in layer.states.values())

    def save(self, path: str | os.PathLike) -> None:
        """Writes the states to a safetensors file (the record of the past is left out)."""
        tensors = {
            f"layers.{i}.{name}": state.detach().contiguous()
            for i, layer in enumerate(self.layers)
            for name, state in layer.states.items()
        }
        metadata = {"model_type": self.model_type, "layers": len(self.layers), "seen_tokens": self.seen_tokens}
        temporary = f"{os.fspath(path)}.incomplete"
        try:
            save_file(tensors, temporary, metadata={"format": "pt", "cache": json.dumps(metadata)})
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)

    @classmethod
    def load(cls, path: str | os.PathLike, config: PreTrainedConfig, device: str = "cpu") -> "RecurrentCache":
        """
        Reads a file that [`~RecurrentCache.save`] wrote.

        Raises:
            ValueError: where the file holds no cache, or one of another kind of model.
        """
        cache = cls(config)
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = json.loads((file.metadata() or {}).get("cache", "null"))
            if metadata is None:
                raise ValueError(f"{os.fspath(path)} holds no cache.")
            found, wanted = (metadata["model_type"], metadata["layers"]), (cache.model_type, len(cache.layers))
            if found != wanted:
                raise ValueError(
                    f"{os.fspath(path)} holds the cache of a `{found[0]}` model of {found[1]} layers; this one is a "
                    f"`{wanted[0]}` model of {wanted[1]}."
                )
            for key in file.keys():
                _, index, name = key.split(".", 2)
                cache.layers[int(index)].states[name] = file.get_tensor(key)
        cache.seen_tokens = metadata["seen_tokens"]
        return cache


def check_cache(past_key_values: Any, config: PreTrainedConfig, batch: int) -> None:
    """
    Raises:
        ValueError: where a cache is not one of this model, or not of this batch.
    """
    if not isinstance(past_key_values, RecurrentCache):
        raise ValueError(
            f"`past_key_values` must be a RecurrentCache, which the model returns with `use_cache=True`; got "
            f"{type(past_key_values).__name__}."
        )
    found = (past_key_values.model_type, len(past_key_values.layers))
    if found != (config.model_type, config.num_hidden_layers):
        raise ValueError(
            f"`past_key_values` is the cache of a `{found[0]}` model of {found[1]} layers; this one is a "
            f"`{config.model_type}` model of {config.num_hidden_layers}."
        )
    held = past_key_values.batch_size
    if held not in (-1, batch):
        raise ValueError(f"`past_key_values` holds the state of {held} sequences, the input has {batch}.")
