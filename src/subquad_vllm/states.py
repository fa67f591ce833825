"""
The pool of states, and how the blocks of a model read and write it.

vLLM gives each request a slot in the pool of each block. In a step it reads some tokens of each of several requests:
first those that read one token, then those that read several. All tokens are one flat sequence; the blocks see it as
a batch of rows of one token, (tokens, 1, width), and only token shifts and recurrences know the requests.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor, split_decodes_and_prefills
from vllm.v1.kv_cache_interface import MambaSpec


# Name of a state to its shape without the batch, and its dtype.
StateSizes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass
class StepMetadata:
    """
    The requests of a step.

    Attributes:
        slots: each request's row in the pools, int64 (requests).
        single: how many requests read one token. They come first.
        bounds: where the tokens of each request begin and end in the flat sequence, (requests + 1).
        lengths: how many tokens the others read, on the host.
        fresh: which requests read their first token, bool (requests); None if none does. Their slots hold what others
            left there.
    """

    slots: torch.Tensor
    single: int
    bounds: torch.Tensor
    lengths: list[int]
    fresh: torch.Tensor | None


class StepMetadataBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Finds the [`StepMetadata`] of each step."""

    kv_cache_spec: MambaSpec
    reorder_batch_threshold = 1  # requests with one token come first

    def __init__(self, kv_cache_spec: MambaSpec, layers: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layers, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StepMetadata:
        common = common_attn_metadata
        mode = self.vllm_config.cache_config.mamba_cache_mode
        blocks = mamba_get_block_table_tensor(common.block_table_tensor, common.seq_lens, self.kv_cache_spec, mode)
        single, *_ = split_decodes_and_prefills(common, decode_threshold=1)
        fresh = common.compute_num_computed_tokens() == 0
        if fresh.device.type == "cpu" and not bool(fresh.any()):  # a GPU would have to be waited for
            fresh = None
        lengths = common.query_start_loc_cpu[single:].diff().tolist()
        return StepMetadata(blocks[:, 0].long(), single, common.query_start_loc, lengths, fresh)


class StateBackend(AttentionBackend):
    """Tells vLLM which metadata a [`BlockStates`] needs."""

    @staticmethod
    def get_name() -> str:
        return "SUBQUAD_STATES"

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError("The blocks of a model compute with their states by themselves.")

    @staticmethod
    def get_builder_cls() -> type[StepMetadataBuilder]:
        return StepMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class BlockStates(MambaBase):
    """
    The pool of states of one block.

    Args:
        vllm_config: vLLM's settings, which the pool is announced to.
        sizes: the states. Those of 4-byte numbers come first, so that all begin at multiples of their size.
        name: a name that no other layer has, with the number of the block in it.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR  # any of them: the backend is our own

    def __init__(self, vllm_config: VllmConfig, sizes: StateSizes, name: str):
        self.sizes, self.name = sizes, name
        self.kv_cache = ()
        layers = vllm_config.compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"There are two layers with the name {name}.")
        layers[name] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for shape, _ in self.sizes.values())

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return tuple(dtype for _, dtype in self.sizes.values())

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StateBackend

    def metadata(self) -> StepMetadata | None:
        """The requests of this step; None while vLLM measures how much memory a step takes."""
        metadata = get_forward_context().attn_metadata
        return None if metadata is None else metadata[self.name]


class Requests:
    """
    The tokens of a step, as [`subquad.padding.Tokens`] are those of a call: rows of one token, none of them padding.

    Args:
        metadata: the requests that the tokens belong to.
    """

    mask = starts = cu_seqlens = None

    def __init__(self, metadata: StepMetadata):
        self.single, self.bounds, self.lengths = metadata.single, metadata.bounds, metadata.lengths
        self.several = bool(metadata.lengths)
        self.last = self.bounds[1:].long() - 1
        if self.several:
            self.first = self.bounds[:-1].long()
            self.cu_seqlens_of_several = self.bounds[self.single :] - self.single

    def fill(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        return x

    def erase(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def token_before(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The token before each of x (tokens, 1, width), from what each request read before, (requests, width)."""
        if not self.several:
            return before
        return x[:, 0].roll(1, 0).index_copy_(0, self.first, before.to(x.dtype))

    def by_document(
        self, operator: Callable, initial_state: torch.Tensor, inplace: bool, **arguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`subquad.padding.Tokens.by_document`], with a state for each request (requests, ...), which changes."""
        n = self.single
        if not self.several:
            return operator(**arguments, initial_state=initial_state, inplace=True)

        sequences = {name for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.dim() >= 3}

        def part(select):
            return {name: select(x) if name in sequences else x for name, x in arguments.items()}

        outputs = []
        if n:
            out, _ = operator(**part(lambda x: x[:n]), initial_state=initial_state[:n], inplace=True)
            outputs.append(out)
        packed = part(lambda x: x[n:].transpose(0, 1))
        out, after = operator(**packed, initial_state=initial_state[n:], cu_seqlens=self.cu_seqlens_of_several)
        initial_state[n:] = after
        outputs.append(out.transpose(0, 1))
        return torch.cat(outputs) if n else outputs[0], initial_state


class SlotStates:
    """
    The states of a block for the requests of a step, as [`subquad.cache.LayerState`] is for the rows of a batch: read
    from the slots when the block asks for them, and written back when it sets them.
    """

    def __init__(self, states: BlockStates, metadata: StepMetadata, requests: Requests):
        self.pools = dict(zip(states.sizes, states.kv_cache, strict=True))
        self.slots, self.fresh, self.requests = metadata.slots, metadata.fresh, requests

    def select(self, rows: torch.Tensor) -> "SlotStates":
        """The states of some of the requests."""
        other = copy.copy(self)
        other.slots = self.slots[rows]
        other.fresh = None if self.fresh is None else self.fresh[rows]
        return other

    def get(self, name: str) -> torch.Tensor:
        """A copy of the states, (requests, ...): zeros for a request that begins."""
        held = self.pools[name].index_select(0, self.slots)
        return held if self.fresh is None else held.masked_fill_(self.fresh.view(-1, *[1] * (held.dim() - 1)), 0)

    def can_overwrite(self, name: str) -> bool:
        return True

    def step(self, name: str, replay: Callable, x: torch.Tensor) -> None:
        """Keeps the last token of each request among x (tokens, 1, width)."""
        self.update(name, x[:, 0] if not self.requests.several else x[self.requests.last, 0], replay)

    def update(self, name: str, state: torch.Tensor, replay: Callable | None = None, *updates: torch.Tensor) -> None:
        """Writes the states, (requests, ...), to the slots. Nothing is recorded: no request goes back."""
        pool = self.pools[name]
        pool.index_copy_(0, self.slots, state.to(pool.dtype))

    def update_row(self, name: str, state: torch.Tensor, row: torch.Tensor) -> None:
        """As [`~SlotStates.update`], if of states (requests, heads, rows, size) one `row` (requests) has changed."""
        heads = torch.arange(state.shape[1], device=row.device)
        request = torch.arange(len(row), device=row.device)[:, None]
        self.pools[name][self.slots[:, None], heads, row[:, None]] = state[request, heads, row[:, None]]


class Pool:
    """The states of all blocks in a step, as [`subquad.cache.RecurrentCache`] holds those of a text."""

    def __init__(self, layers: list[SlotStates | None]):
        self.layers = layers
