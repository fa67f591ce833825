"""The states of a recurrent model, behind the cache interface of transformers."""

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from .arguments import check_counts
from .layer_state import LayerState, LinearAttentionState, static_copy
from .padding import Tokens, read_values, should_check
from .state_file import ModelIdentity, check_owner, describe_owner, read_state_file, write_state_file


# The name of the count of padding among the states of a cache.
PADDING = "after_blocks.padding"
# A count that is unknown or has no meaning, as for a row with columns that it never read, joined to a longer one.
NOT_COMPARED = -(2**62)


def add_marked(count: torch.Tensor | None, marks: torch.Tensor) -> torch.Tensor:
    """A token count per row, (batch), after a call; `marks` (batch, tokens) is True for tokens that count."""
    return marks.sum(1) if count is None else count + marks.sum(1).to(count.device)


class RecurrentCache(Cache):
    """
    The states of a recurrent model: a few named tensors per block, whose size does not depend on the length of the
    text.

    `generate` and the models create one by themselves. Passed to a later call (`cache`), it continues the text.
    Rolling back (`crop`) rebuilds the states from the values before the recorded tokens and each token's contribution,
    so call [`~RecurrentCache.activate_past_recording`] before the tokens are read. Assisted decoding does that.

    Args:
        config: configuration of the model that the cache is for.
        static: allocate the states at the first call, which must not be compiled, and write them in place from then
            on. No gradient passes through them. `generate(cache_implementation="static")` makes such a cache, and on
            a GPU compiles the decoding step. [`~RecurrentCache.reset`] fills it with zeros, for a batch of the same
            size. Once it records the past, its states are no longer static. It is an instance of
            `transformers.StaticCache`.
        max_cache_len: not used. It limits the tokens in subclasses whose static states grow with the text.
    """

    # The configuration fields that two models must have in common for the states of one to fit the other.
    size_names: tuple[str, ...] = (
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "head_size",
    )

    # The states that transformers treats as recurrent states and as convolution states.
    recurrent_names: tuple[str, ...] = ("wkv",)
    convolution_names: tuple[str, ...] = ("attention_shift", "feed_forward_shift")

    # States that stay float32 in a model of lower precision, and integer states. The others have the model's dtype.
    float32_names: tuple[str, ...] = ("wkv",)
    integer_names: tuple[str, ...] = ("padding",)

    # States that may be stored in fewer bytes, one scale for each row (the last dimension) in 8 bits.
    # package only
    packed_names: tuple[str, ...] = ("wkv",)

    # The class of static caches, which transformers recognises as such. A subclass has one of its own, or none.
    static_class: "type[RecurrentCache] | None" = None

    def __new__(
        cls, config: PreTrainedConfig | None = None, static: bool = False, *args, **kwargs
    ) -> "RecurrentCache":
        # A copy is made without a configuration.
        return super().__new__(cls.__dict__.get("static_class") or cls if static else cls)

    def __init__(self, config: PreTrainedConfig, static: bool = False, max_cache_len: int | None = None):
        config = config.get_text_config()
        layers = [self.new_layer(config, number, static) for number in range(config.num_hidden_layers)]
        Cache.__init__(self, layers=layers)
        # States kept after the blocks, such as the output of every row's last token.
        self.after_blocks = LayerState(static=static)
        self.sizes = self.sizes_of(config)
        # A tensor if static: with a number, every new count would recompile.
        self.seen_tokens = static_copy(torch.zeros((), dtype=torch.long)) if static else 0

    @classmethod
    def sizes_of(cls, config: PreTrainedConfig) -> dict[str, Any]:
        """The values of `size_names` in a configuration."""
        return {name: getattr(config, name, None) for name in cls.size_names}

    def new_layer(self, config: PreTrainedConfig, number: int, static: bool) -> LayerState:
        """The states of a block, still empty."""
        return LinearAttentionState(
            static=static, recurrent_names=self.recurrent_names, convolution_names=self.convolution_names
        )

    # package only
    def state_shapes(self, config: PreTrainedConfig, number: int | None) -> dict[str, tuple[int | None, ...]]:
        """
        Shapes of a block's states by name, without the batch, once a token is read. None is a size that depends on the
        text.

        Args:
            number: the block; None for the states kept after the blocks.
        """
        if number is None:
            return {"output": (config.hidden_size,), "padding": ()}
        wkv = (config.num_attention_heads, config.head_size, config.head_size)
        return {"wkv": wkv} | dict.fromkeys(self.convolution_names, (config.hidden_size,))

    @property
    def all_layers(self) -> list[LayerState]:
        """The states of the blocks, then the states kept after them."""
        return [*self.layers, self.after_blocks]

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 if there are no states."""
        for layer in self.all_layers:
            if layer.states:
                return layer.batch_size
        return -1

    @property
    def is_initialized(self) -> bool:
        """Whether there are states."""
        return self.batch_size > 0

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for layer in self.all_layers:
            layer.apply(function)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Gives row i the states of row `beam_idx[i]`, for beam search."""
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

    @property
    def is_linear(self) -> list[bool]:
        """
        False for every layer: transformers does not count tokens for a cache of linear attention only, so `generate`
        would read a text from its beginning instead of from the end of this cache.
        """
        return [False] * len(self.layers)

    def reserve(self, tokens: int) -> None:
        """
        Makes sure that the cache has room for `tokens` tokens. A recurrent state always has.

        Raises:
            ValueError: if there is no such room.
        """

    # package only
    @property
    def fixed_until(self) -> int | None:
        """The number of tokens up to which the states keep their shapes; None if they always do."""
        return None

    # package only
    @property
    def grows(self) -> bool:
        """Whether the size of the states depends on the length of the text without an upper limit."""
        return False

    def begin_call(self, tokens: Tokens) -> None:
        """
        Prepares for the tokens of a call.

        Raises:
            ValueError: if the tokens of a call cannot continue the cached text.
        """
        self.after_blocks.record_past = self.records_past  # transformers may end the recording of the layers
        if tokens.cu_seqlens is not None and self.records_past:
            raise ValueError("Packed documents cannot be read while `cache` records the past.")

    def advance(self, tokens: Tokens) -> None:
        """Counts the tokens of a call, and the padding among them, after every block has read them."""
        after = self.after_blocks
        device = next(iter(after.states.values())).device
        # Later calls without padding add 0, but the records of all states must cover the same tokens.
        if tokens.mask is not None or after.record_past or "padding" not in after.states:
            if tokens.mask is None:
                padding = torch.zeros(tokens.batch, tokens.length, dtype=torch.bool, device=device)
            else:
                padding = ~tokens.mask
            after.update_with("padding", add_marked, padding)
        if isinstance(self.seen_tokens, int):
            self.seen_tokens += tokens.length
            return
        self._move_count(device)
        self.seen_tokens.add_(tokens.length)

    def padding_read(self) -> torch.Tensor:
        """A copy of the number of padding tokens that each row has read, int64 (batch)."""
        held = self.after_blocks.states.get("padding")
        return torch.zeros(self.batch_size, dtype=torch.long) if held is None else held.clone()

    def check_mask(self, mask: torch.Tensor, length: int) -> None:
        """
        Compares a mask with the padding already read. Synchronizes with a GPU.

        Args:
            mask: (batch, earlier tokens + length), 0 for padding.
            length: number of tokens of the call.

        Raises:
            ValueError: if it does not have a column for each earlier token, or marks a different number of them as
                padding than when they were read; the message names the row.
        """
        if (earlier := mask.shape[1] - length) == 0:
            return
        if earlier != (seen := self.get_seq_length()):
            raise ValueError(
                f"`attention_mask` has {mask.shape[1]} columns, but `cache` has read {seen} tokens and the input has "
                f"{length}. Give the mask of the whole text, or of the input alone."
            )
        marked = (mask[:, :earlier] == 0).sum(1)
        values = read_values(marked=marked, read=self.padding_read().to(marked.device))
        for row in np.flatnonzero((values["marked"] != values["read"]) & (values["read"] >= 0)):
            raise ValueError(
                f"`attention_mask`, row {row}: {values['marked'][row]} of the first {seen} tokens are marked as "
                f"padding, but when `cache` read them, {values['read'][row]} were. Give the same mask as then, or "
                "read the text again without `cache`."
            )

    def _move_count(self, device: torch.device | str) -> None:
        if isinstance(self.seen_tokens, torch.Tensor) and self.seen_tokens.device != torch.device(device):
            self.seen_tokens = static_copy(self.seen_tokens.to(device))

    def activate_past_recording(self) -> None:
        """Starts to keep the data that [`~RecurrentCache.crop`] needs."""
        for layer in self.all_layers:
            layer.activate_past_recording()
        self.seen_tokens = self.get_seq_length()

    @property
    def records_past(self) -> bool:
        """Whether the cache keeps the data that [`~RecurrentCache.crop`] needs."""
        return any(layer.record_past for layer in self.layers)

    def keep_past(self, tokens: int) -> None:
        """Drops the recorded past except for the last `tokens` tokens: no more can be removed."""
        for layer in self.all_layers:
            for record in layer.records.values():
                record.keep(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """
        Forgets the last tokens.

        Args:
            tokens_to_remove: minus the number of tokens to forget; 0 drops the record and keeps the states.

        Raises:
            ValueError: if the number is positive or more tokens than were recorded. The cache is unchanged then.
        """
        # A layer that only grows needs no record: it keeps an entry for every token, and the last ones can be cut off.
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

    def reset_rows(self, rows: torch.Tensor) -> None:
        """
        Forgets the texts of some rows, which start new texts with the next call, as in training on streams of
        documents. The other rows stay as they are, with their gradients. [`~RecurrentCache.get_seq_length`] does not
        start over, and a mask may have any values for the earlier tokens of the rows. A record of the past is dropped.

        Args:
            rows: bool (batch), True for the rows to forget.

        Raises:
            ValueError: if `rows` has another dtype or shape.
        """
        rows = torch.as_tensor(rows)
        number = max(self.batch_size, 0)
        if rows.dtype != torch.bool or rows.shape != (number,):
            found = f"{rows.dtype} {tuple(rows.shape)}"
            raise ValueError(f"`rows` must be bool ({number}), one for each row of the cache, got {found}.")
        padding = self.padding_read()
        for layer in self.all_layers:
            layer.reset_rows(rows)
        self.after_blocks.write("padding", padding.masked_fill(rows.to(padding.device), NOT_COMPARED))

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RecurrentCache":
        """A copy with `function(tensor)` for every tensor; results must not share memory with their inputs."""
        other = copy.copy(self)
        *other.layers, other.after_blocks = [layer.mapped(function) for layer in self.all_layers]
        if isinstance(self.seen_tokens, torch.Tensor):
            other.seen_tokens = static_copy(self.seen_tokens)
        return other

    @property
    def is_recomputable(self) -> bool:
        """Whether blocks can be recomputed from its earlier states: not while the past is recorded."""
        return not self.records_past

    def frozen(self) -> "RecurrentCache":
        """A snapshot that later calls do not change. It shares the tensors of the blocks' states."""
        other = copy.copy(self)
        other.layers = [layer.frozen() for layer in self.layers]
        if isinstance(self.seen_tokens, torch.Tensor):
            other.seen_tokens = self.seen_tokens.clone()
        return other

    def with_states(self, number: int, states: dict[str, torch.Tensor]) -> "RecurrentCache":
        """A copy whose block `number` reads and writes the dictionary `states`. All other states are shared."""
        other = copy.copy(self)
        other.layers = list(self.layers)
        other.layers[number] = layer = self.layers[number].frozen()
        layer.states = states
        return other

    def detach(self) -> "RecurrentCache":
        """
        Detaches the states from the graph that computed them, in place, and returns the cache. Gradients then stop at
        the beginning of the next call, so a long text can be trained on in pieces.
        """
        for layer in self.all_layers:
            layer.detach()
        return self

    def clone(self) -> "RecurrentCache":
        """An independent copy, including the recorded past."""
        return self._mapped(torch.clone)

    def fork(self, n: int) -> list["RecurrentCache"]:
        """
        `n` independent copies, each of which continues the text on its own, as this cache would.

        Raises:
            ValueError: if `n` is not a whole number, or not positive.
        """
        check_counts(n=n)
        return [self.clone() for _ in range(n)]

    @classmethod
    def join(cls, caches: Sequence["RecurrentCache"]) -> "RecurrentCache":
        """
        One cache with the rows of several, in order, for a batch that continues different texts. The caches stay
        unchanged, and the records of their past are left out.

        The texts may have different lengths. [`~RecurrentCache.get_seq_length`] is the longest, as if the others had
        been padded on the left, so `generate` takes an `attention_mask` that covers that length and the new tokens.
        Its values for the earlier tokens of the shorter texts do not matter.

        Raises:
            ValueError: if the caches belong to different models or dtypes, or if one has not read a token or is
                static: its batch has a fixed size.
        """
        if not caches:
            raise ValueError("`caches` is empty.")
        first = caches[0]
        for number, cache in enumerate(caches):
            what = f"`caches[{number}]`"
            if not isinstance(cache, RecurrentCache):
                raise ValueError(f"{what} must be a RecurrentCache, got {type(cache).__name__}.")
            _check_sizes(what, cache.sizes, first.sizes)
            if cache.after_blocks.static:
                raise ValueError(f"{what} is static: its batch has a fixed size.")
            if not cache.is_initialized:
                raise ValueError(f"{what} has not read a token.")
            kinds = [{name: x.dtype for name, x in c.named_states().items()} for c in (first, cache)]
            for kind in kinds:
                kind.pop(PADDING, None)
            if kinds[0] != kinds[1]:
                raise ValueError(f"{what} has states of {cache.dtype}, `caches[0]` of {first.dtype}.")
        joined = first._mapped(torch.clone)
        joined.seen_tokens = max(cache.get_seq_length() for cache in caches)
        for number, layer in enumerate(joined.all_layers):
            layer.records.clear()
            layer.states = {
                name: _concatenate([cache.all_layers[number].states[name] for cache in caches])
                for name in layer.states.keys() - {"padding"}
            }
            fresh = [cache.all_layers[number].fresh_rows for cache in caches]
            if any(rows is not None for rows in fresh):
                pairs = zip(fresh, caches, strict=True)
                fresh = [torch.zeros(c.batch_size, dtype=torch.bool) if rows is None else rows for rows, c in pairs]
                layer.fresh_rows = _concatenate(fresh)
        padding = [cache.padding_read() for cache in caches]
        for count, cache in zip(padding, caches, strict=True):
            if cache.get_seq_length() < joined.seen_tokens:
                count.fill_(NOT_COMPARED)
        joined.after_blocks.states["padding"] = _concatenate(padding)
        return joined

    def split(self) -> list["RecurrentCache"]:
        """Every row as a cache of its own, with the same number of tokens read. They keep the record of the past."""
        return [self._mapped(lambda x, row=row: x[row : row + 1].clone()) for row in range(max(self.batch_size, 0))]

    # package only
    def write_rows(self, rows: Sequence[int], other: "RecurrentCache") -> None:
        """
        Replaces rows by those of another cache of the model, in place, without gradients. Afterwards no mask is
        compared with what the rows have read.

        Args:
            rows: the row for each row of the other cache.
            other: a cache with a state for each of them.
        """
        self.seen_tokens = max(self.get_seq_length(), other.get_seq_length())
        for layer, new in zip(self.all_layers, other.all_layers, strict=True):
            layer.records.clear()
            for name in new.states.keys() - {"padding"}:
                held, state = layer.states[name], new.states[name]
                if held.shape[1:] != state.shape[1:]:  # states that have reached different capacities
                    room = [max(sizes) for sizes in zip(held.shape[1:], state.shape[1:], strict=True)]
                    held, state = (_with_sizes(x, room) for x in (held, state))
                if name in layer.aliased:  # somebody else reads it
                    held = held.clone()
                    layer.aliased.discard(name)
                held.index_copy_(0, torch.tensor(rows, device=held.device), state)
                layer.write(name, held)
        self.after_blocks.write("padding", torch.full_like(self.padding_read(), NOT_COMPARED))

    # package only
    def copy_of_row(self, row: int, tokens: int) -> "RecurrentCache":
        """A cache with a copy of one row, which has read a number of tokens besides padding."""
        copied = self._mapped(lambda x: x[row : row + 1].clone())
        copied.set_padding(tokens, torch.zeros(1, dtype=torch.long))
        return copied

    # package only
    def set_padding(self, tokens: int, padding: torch.Tensor) -> None:
        """Sets the number of tokens read, padding included, and of the padding among them, int64 (batch)."""
        self.seen_tokens = tokens
        if PADDING in self.named_states():
            self.after_blocks.write("padding", padding.to(self.padding_read().device))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the model that filled it, from states in the model's dtype; None without states."""
        states = self.named_states().items()
        names = self.float32_names
        kinds = [x.dtype for name, x in states if x.is_floating_point() and name.rpartition(".")[2] not in names]
        return kinds[0] if kinds else None

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "RecurrentCache":
        """
        Moves the states to a device, or to a model of another dtype, in place, and returns the cache.

        Args:
            device: target device; None leaves the states where they are.
            dtype: the dtype of the model that continues. States that are float32 in every model keep at least that.

        Raises:
            ValueError: if `dtype` is given while the past is recorded, or is none.
        """
        if dtype is not None:
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"`dtype` must be a torch.dtype, got {dtype!r}.")
            if any(layer.records for layer in self.all_layers):
                raise ValueError("`dtype` cannot change while the past is recorded; `crop(0)` drops the record.")
            for layer in self.all_layers:
                for name, state in layer.states.items():
                    if state.is_floating_point():
                        wide = torch.promote_types(dtype, torch.float32) if name in self.float32_names else dtype
                        layer.write(name, state.to(wide))
        if device is not None:
            self._apply(lambda x: x.to(device))
            self._move_count(device)
        return self

    @property
    def num_elements(self) -> int:
        """Number of elements of the states of all blocks, over all rows."""
        return sum(state.numel() for layer in self.layers for state in layer.states.values())

    @property
    def nbytes(self) -> int:
        """Size of all states, over all rows."""
        return sum(state.nbytes for state in self.named_states().values())

    def _named_layers(self) -> list[tuple[str, LayerState]]:
        return [(f"layers.{i}", layer) for i, layer in enumerate(self.layers)] + [("after_blocks", self.after_blocks)]

    def named_states(self) -> dict[str, torch.Tensor]:
        """Every state under a name of its own, `layers.0.wkv` or `after_blocks.output`."""
        return {f"{of}.{name}": state for of, layer in self._named_layers() for name, state in layer.states.items()}

    # package only
    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """
        Sets states by the names of [`~RecurrentCache.named_states`]. Any rows may have had padding.

        Raises:
            ValueError: if a name is not the name of a state of such a cache.
        """
        layers = dict(self._named_layers())
        for key in states:
            if key.rpartition(".")[0] not in layers:
                raise ValueError(f"`states`: {key!r} is in none of the layers {', '.join(layers)}.")
        for key, state in states.items():
            of, _, name = key.rpartition(".")
            layers[of].write(name, state)

    # package only
    def save(
        self, path: str | os.PathLike, model: ModelIdentity | None = None, text: dict[str, Any] | None = None
    ) -> None:
        """
        Writes the states to a safetensors file, without the record of the past. A failed write leaves no file.

        Args:
            model: the model that filled the cache, as identified by `subquad.identify`. [`~RecurrentCache.load`] can
                then refuse another one.
            text: more values about the text, to be stored as JSON.

        Raises:
            ValueError: if rows were reset and have read no token since: a file cannot represent that.
        """
        if any(layer.fresh_rows is not None for layer in self.all_layers):
            raise ValueError("Rows that were reset must read a token before the cache can be saved.")
        fresh = tuple(f"{of}." for of, layer in self._named_layers() if layer.fresh)
        states = {name: state for name, state in self.named_states().items() if not name.startswith(fresh)}
        about = {
            "sizes": self.sizes,
            "seen_tokens": self.get_seq_length(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "model": describe_owner(model),
            "text": text,
        }
        write_state_file(path, states, about)

    # package only
    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        config: PreTrainedConfig,
        device: torch.device | str = "cpu",
        static: bool = False,
        model: ModelIdentity | None = None,
    ) -> "RecurrentCache":
        """
        Reads a file that [`~RecurrentCache.save`] wrote.

        Args:
            config: configuration of the model that continues the text.
            device: device for the states.
            static: whether the cache is static.
            model: the model that continues the text, from `subquad.identify`. If None, only sizes are compared.

        Raises:
            ValueError: if the file is damaged or was changed, holds no cache, or another model's cache.
        """
        states, about = read_state_file(path)
        if model is not None:
            check_owner(path, about, model)
        return cls.from_states(path, config, states, about, static).to(device)

    # package only
    @classmethod
    def from_states(
        cls,
        path: str | os.PathLike,
        config: PreTrainedConfig,
        states: dict[str, torch.Tensor],
        about: dict[str, Any],
        static: bool = False,
    ) -> "RecurrentCache":
        """
        A cache with the states of a file.

        Args:
            path: path of the file, for errors.
            states, about: the results of [`read_state_file`].

        Raises:
            ValueError: if the states belong to another kind of model.
        """
        path = os.fspath(path)
        config, tokens = config.get_text_config(), about["seen_tokens"]
        cache = cls(config, static)
        _check_sizes(path, about["sizes"], cache.sizes)
        if states and PADDING not in states:  # written by an earlier version
            rows = next(iter(states.values())).shape[:1]
            states = {**states, PADDING: torch.full(rows, NOT_COMPARED)}
        if fault := cache.find_fault(config, states, tokens):
            raise ValueError(f"{path} does not hold the states of such a model: {fault}.")
        cache.set_states(states)
        cache.seen_tokens += tokens
        return cache

    # package only
    def find_fault(self, config: PreTrainedConfig, states: dict[str, torch.Tensor], tokens: int) -> str | None:
        """
        Why the states do not fit this cache after `tokens` tokens; None if they do.

        Args:
            states: by the names of [`~RecurrentCache.named_states`].
        """
        numbers = {f"layers.{number}": number for number in range(len(self.layers))} | {"after_blocks": None}
        shapes = {of: self.state_shapes(config, number) for of, number in numbers.items()}
        shapes = {f"{of}.{name}": shape for of, named in shapes.items() for name, shape in named.items()}
        if not states and not tokens:  # nothing was read
            return None
        if different := sorted(states.keys() ^ shapes.keys()):
            return f"{different[0]!r} is {'missing' if different[0] in shapes else 'unknown'}"
        rows = max([1, *(state.shape[0] for state in states.values() if state.dim())])
        for name, state in states.items():
            shape, short = (rows, *shapes[name]), name.rpartition(".")[2]
            sizes = [size if wanted is None else wanted for size, wanted in zip(state.shape, shape, strict=False)]
            if len(state.shape) != len(shape) or list(state.shape) != sizes:
                return f"{name} has the shape {tuple(state.shape)}, not {shape}"
            dtypes = (torch.float32, torch.float64)
            if short in self.integer_names:
                dtypes = (torch.long,)
            elif short not in self.float32_names:
                dtypes += (torch.float16, torch.bfloat16)
            if state.dtype not in dtypes:
                return f"{name} is {state.dtype}, not {' or '.join(map(str, dtypes))}"
            if not state.isfinite().all():
                return f"{name} holds NaN or infinite numbers"
            if short in self.integer_names and (most := int(state.max())) > tokens:
                return f"{name} is {most} after {tokens} tokens"
        return None


class StaticRecurrentCache(RecurrentCache, StaticCache):
    """A static [`RecurrentCache`], which transformers recognises as a static cache."""


RecurrentCache.static_class = StaticRecurrentCache


def accept_cache(cache: Any, cache_class: type[RecurrentCache]) -> RecurrentCache | None:
    """
    The cache that was passed to a model. None for an empty `DynamicCache` of transformers, which is marked: the same
    one again is an error, because nothing is ever written to it.

    Raises:
        ValueError: if the cache belongs to another kind of model, or was given before.
    """
    if cache is None or isinstance(cache, cache_class):
        return cache
    wanted = f"a {cache_class.__name__}, which `model.new_cache()` makes and `use_cache=True` returns"
    if type(cache) is not DynamicCache or not all(map(_is_unused, cache.layers)):
        raise ValueError(f"`cache` must be {wanted}; got {type(cache).__name__}.")
    if getattr(cache, "_was_given", False):
        raise ValueError(f"`cache` is a DynamicCache that was given before, and is still empty. It must be {wanted}.")
    cache._was_given = True
    return None


def _is_unused(layer: Any) -> bool:
    """Whether a layer of a transformers cache is empty."""
    started = [getattr(layer, f"is_{kind}initialized", False) for kind in ("", "conv_states_", "recurrent_states_")]
    return not any(any(each.values()) if isinstance(each, dict) else each for each in started)


def check_cache(
    cache: RecurrentCache, config: PreTrainedConfig, tokens: Tokens, attention_mask: torch.Tensor | None
) -> None:
    """
    Raises:
        ValueError: if the cache belongs to another model or batch, or the mask does not fit what it has read.
    """
    _check_sizes("`cache`", cache.sizes, cache.sizes_of(config))
    held = cache.batch_size
    if held not in (-1, tokens.batch):
        raise ValueError(f"`cache` holds the state of {held} sequences, the input has {tokens.batch}.")
    if attention_mask is not None and should_check(attention_mask[:, -tokens.length :]):
        cache.check_mask(attention_mask, tokens.length)


def _concatenate(states: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all states, on the device of the first. Smaller states are padded with zeros."""
    shape = [max(sizes) for sizes in zip(*(state.shape[1:] for state in states), strict=True)]
    return torch.cat([_with_sizes(state, shape).to(states[0].device) for state in states])


def _with_sizes(state: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A state (batch, ...) padded with zeros to (batch, *shape)."""
    more = [n for size, room in zip(state.shape[:0:-1], shape[::-1], strict=True) for n in (0, room - size)]
    return torch.nn.functional.pad(state, more)


def _check_sizes(what: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    wrong = [
        f"`{name}` {found.get(name)!r}, not {value!r}" for name, value in wanted.items() if found.get(name) != value
    ]
    if wrong:
        raise ValueError(f"{what} is the cache of another model: {', '.join(wrong)}.")
