"""
The pool of states, which the blocks of a model read and write.

vLLM gives each request a slot in the pool of each block. In a step it reads some tokens of each of several requests:
first the requests that read one token, then the others. All tokens are one flat sequence; the blocks see it as
a batch of rows of one token, (tokens, 1, width), and only token shifts and recurrences know the requests. These two
are custom operators of a compiled step, which find the requests and the pool when they run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CompilationConfig, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor, split_decodes_and_prefills
from vllm.v1.kv_cache_interface import MambaSpec

import subquad_kernels
from subquad.modeling.protocols import BlockCache, BlockState, CallTokens


# Name of a state to its shape without the batch, and its dtype.
StateSizes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass
class StepMetadata:
    """
    The requests of a step.

    Attributes:
        slots: each request's row in the pools, int64 (requests).
        before: number of tokens that each request has read before, on the host.
        single: number of requests that read one token. They come first.
        lengths: number of tokens that each of the others reads, on the host.
        bounds: boundaries of the requests' tokens in the flat sequence, (requests + 1).
        bounds_of_several: the same for the requests with several tokens, among their tokens alone.
        first, last: the indices of each request's first and last token in the flat sequence, int64 (requests).
    """

    slots: torch.Tensor
    before: list[int]
    single: int
    lengths: list[int]
    bounds: torch.Tensor
    bounds_of_several: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


class StepMetadataBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Builds the [`StepMetadata`] of each step, and clears the used slots of new requests."""

    kv_cache_spec: MambaSpec
    reorder_batch_threshold = 1  # requests with one token come first
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: MambaSpec, layers: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layers, vllm_config, device)
        self.layers = layers
        # A captured graph reads the slots of every step from the same address.
        self.slots = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int64, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StepMetadata:
        common, mode = common_attn_metadata, self.vllm_config.cache_config.mamba_cache_mode
        blocks = mamba_get_block_table_tensor(common.block_table_tensor, common.seq_lens, self.kv_cache_spec, mode)
        slots = self.slots[: common.num_reqs].copy_(blocks[:, 0])
        lengths, bounds = common.query_start_loc_cpu.diff(), common.query_start_loc
        # Lengths after the step. On the host they are exact, because there is no speculative decoding.
        before = common.seq_lens_cpu_upper_bound - lengths
        begins = (before == 0).nonzero()[:, 0]
        if len(begins):
            self.clear(slots[begins.to(slots.device, non_blocking=True)])
        single, *_ = split_decodes_and_prefills(common, decode_threshold=1)
        return StepMetadata(
            slots=slots,
            before=before.tolist(),
            single=single,
            lengths=lengths[single:].tolist(),
            bounds=bounds,
            bounds_of_several=bounds[single:] - single,
            first=bounds[:-1].long(),
            last=bounds[1:].long() - 1,
        )

    def clear(self, slots: torch.Tensor) -> None:
        """Writes zeros to some slots."""
        blocks = self.vllm_config.compilation_config.static_forward_context
        for name in self.layers:
            for pool in blocks[name].kv_cache:
                pool.index_fill_(0, slots, 0)


class UncapturedBuilder(StepMetadataBuilder):
    """For models whose steps depend on work on the host, which CUDA graphs cannot capture."""

    _cudagraph_support = AttentionCGSupport.NEVER


class StateBackend(AttentionBackend):
    """The metadata that a [`BlockStates`] needs from vLLM."""

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


class UncapturedBackend(StateBackend):
    """The same with [`UncapturedBuilder`]."""

    @staticmethod
    def get_builder_cls() -> type[StepMetadataBuilder]:
        return UncapturedBuilder


class BlockStates(MambaBase):
    """
    The pool of states of one block.

    Args:
        vllm_config: vLLM's settings, in which the pool is registered.
        sizes: the states. States of 4-byte numbers come first, for alignment.
        name: a unique name that contains the number of the block.
        captured: whether CUDA graphs may capture the steps of requests with one token.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR  # any of them: the backend is our own

    def __init__(self, vllm_config: VllmConfig, sizes: StateSizes, name: str, captured: bool):
        self.sizes, self.name, self.captured = sizes, name, captured
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
        return StateBackend if self.captured else UncapturedBackend

    def metadata(self) -> StepMetadata | None:
        """The requests of this step; None while vLLM measures the memory of a step."""
        metadata = get_forward_context().attn_metadata
        return None if metadata is None else metadata[self.name]

    def pools(self) -> dict[str, torch.Tensor]:
        """The states of all slots, (slots, ...), by name."""
        return dict(zip(self.sizes, self.kv_cache, strict=True))


def shift(x: torch.Tensor, block: str, name: str) -> torch.Tensor:
    """
    The token before each token of a step, for a token shift. The last token of each request is stored.

    Args:
        x: the tokens, (tokens, 1, width).
        block: name of a [`BlockStates`].
        name: name of the state with the last token of each request.

    Returns:
        the token before each of x, (tokens, width).
    """
    states = get_forward_context().no_compile_layers[block]
    step, x = states.metadata(), x[:, 0]
    if step is None:
        return x.roll(1, 0)
    pool = states.pools()[name]
    before = pool.index_select(0, step.slots)
    last = x[step.last] if step.lengths else x
    pool.index_copy_(0, step.slots, last.to(pool.dtype))
    before = before.to(x.dtype)
    return x.roll(1, 0).index_copy_(0, step.first, before) if step.lengths else before


def recur(
    operator: Callable, block: str, name: str, sequences: dict[str, torch.Tensor], arguments: dict[str, Any]
) -> torch.Tensor:
    """
    Runs a recurrence for the requests of a step: first for those with one token, then for the others, packed.

    Args:
        operator: a recurrence of `subquad_kernels`.
        block: name of a [`BlockStates`].
        name: name of the state of the recurrence.
        sequences: arguments of the operator with a value for each token, (tokens, 1, ...).
        arguments: its other arguments, except the state.

    Returns:
        the output, (tokens, 1, ...).
    """
    states = get_forward_context().no_compile_layers[block]
    step = states.metadata()

    def part(select):
        return {**arguments, **{name: select(x) for name, x in sequences.items()}}

    if step is None:  # one text is as long as the step
        return operator(**part(lambda x: x.transpose(0, 1)))[0].transpose(0, 1)
    pool, n = states.pools()[name], step.single
    if not step.lengths:
        return operator(**part(lambda x: x), initial_state=pool, indices=step.slots)[0]
    packed, bounds = part(lambda x: x[n:].transpose(0, 1)), step.bounds_of_several
    out = operator(**packed, initial_state=pool, indices=step.slots[n:], cu_seqlens=bounds)[0].transpose(0, 1)
    if n:
        of_single = operator(**part(lambda x: x[:n]), initial_state=pool, indices=step.slots[:n])[0]
        out = torch.cat((of_single, out))
    return out


def recur_in_graph(
    sequences: list[torch.Tensor],
    weights: list[torch.Tensor],
    names: str,
    out_dtype: torch.dtype | None,
    operator: str,
    block: str,
    name: str,
) -> torch.Tensor:
    """As [`recur`], with the names of the sequences and the weights, and of an operator of `subquad_kernels`."""
    n, named = len(sequences), names.split()
    arguments: dict[str, Any] = dict(zip(named[n:], weights, strict=True))
    if out_dtype is not None:
        arguments["out_dtype"] = out_dtype
    sequences = dict(zip(named[:n], sequences, strict=True))
    return recur(getattr(subquad_kernels, operator), block, name, sequences, arguments).contiguous()


def empty_output(
    sequences: list[torch.Tensor],
    weights: list[torch.Tensor],
    names: str,
    out_dtype: torch.dtype | None,
    operator: str,
    block: str,
    name: str,
) -> torch.Tensor:
    """A tensor of the shape and dtype that [`recur_in_graph`] returns."""
    v = sequences[names.split().index("v")]
    return torch.empty_like(v, dtype=out_dtype, memory_format=torch.contiguous_format)


direct_register_custom_op("subquad_shift", shift, fake_impl=lambda x, block, name: torch.empty_like(x[:, 0]))
direct_register_custom_op("subquad_recur", recur_in_graph, fake_impl=empty_output)
# vLLM cuts the graphs that it captures at operators with metadata.
CompilationConfig._attention_ops += ["vllm::subquad_shift", "vllm::subquad_recur"]


@dataclass
class InSlots:
    """The place of a state for [`shift`] and [`recur`]: the name of its block, and its own."""

    block: str
    name: str


class BlockSlots(BlockState):
    """The states of a block, which only [`shift`] and [`recur`] read and write."""

    def __init__(self, block: str):
        self.block = block

    def get(self, name: str) -> InSlots:
        return InSlots(self.block, name)

    def can_overwrite(self, name: str) -> bool:
        return True

    def update_with(self, name: str, replay: Callable, x: torch.Tensor) -> None:
        """[`shift`] has kept the last tokens of the same x."""

    def update(self, name: str, state: InSlots, replay: Callable, *updates: torch.Tensor) -> None:
        """[`recur`] has written the state. Nothing is recorded: requests are never rolled back."""


class Blocks(BlockCache):
    """The states of all blocks."""

    def __init__(self, layers: list[BlockSlots | None]):
        self.layers = layers


class StepTokens(CallTokens):
    """The tokens of a step: rows of one token, none of them padding."""

    mask = starts = cu_seqlens = None

    def forward_fill(self, x: torch.Tensor, before: InSlots) -> torch.Tensor:
        return x

    def zero_padding(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def token_before(self, x: torch.Tensor, before: InSlots) -> torch.Tensor:
        """See [`shift`]."""
        run = torch.ops.vllm.subquad_shift if torch.compiler.is_compiling() else shift
        return run(x, before.block, before.name)

    def run_packed(
        self,
        operator: Callable,
        sequences: dict[str, torch.Tensor],
        initial_state: InSlots,
        inplace: bool = False,
        **arguments,
    ) -> tuple[torch.Tensor, InSlots]:
        """See [`recur`]."""
        block, name = initial_state.block, initial_state.name
        if not torch.compiler.is_compiling():
            return recur(operator, block, name, sequences, arguments), initial_state
        out_dtype = arguments.pop("out_dtype", None)
        names, tensors = " ".join([*sequences, *arguments]), (list(sequences.values()), list(arguments.values()))
        return torch.ops.vllm.subquad_recur(*tensors, names, out_dtype, operator.__name__, block, name), initial_state
