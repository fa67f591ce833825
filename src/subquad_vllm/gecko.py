"""
Gecko in vLLM. Its chunks and rings are laid out for a batch, so a step is two batches: the requests with one token,
and the others, padded at the right.
"""

import torch
from transformers import PreTrainedConfig
from vllm.compilation.decorators import ignore_torch_compile
from vllm.config import CompilationMode, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import IsAttentionFree

from subquad.models.gecko.cache_gecko import GeckoCache
from subquad.models.gecko.layout_gecko import find_bos, find_layout
from subquad.padding import Tokens

from .serving import ServedForCausalLM, part_of
from .states import BlockStates, StateSizes, StepMetadata


logger = init_logger(f"vllm.{__name__}")  # vLLM shows what comes under its own name
# The tokens that a block keeps. A token changes one row of each.
RINGS = ("keys", "values", "memory_keys")
# What the model keeps after its blocks: names in the pool and in the cache. Every block has room for it, because vLLM
# wants them alike; the first one's is used. It is small beside the rings.
AFTER_BLOCKS = {"final_timenorm": "timenorm", "begins": "begins"}


@ignore_torch_compile
class GeckoForCausalLM(ServedForCausalLM, IsAttentionFree):
    """Its step is not compiled: how it is laid out depends on the lengths of the requests."""

    captured = False
    state_names = ("timenorm", "cema", "memory", "normalizer", "final_timenorm", "begins", *RINGS)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if vllm_config.compilation_config.mode != CompilationMode.NONE:
            logger.warning("Gecko runs uncompiled, whatever the settings of vLLM's compilation are.")

    @classmethod
    def state_sizes(cls, config: PreTrainedConfig, dtype: torch.dtype, processes: int) -> StateSizes:
        split = "layers.*.mega.gamma" in config.base_model_tp_plan
        heads = part_of(config.num_heads, processes, split)
        key, value, window = (
            config.z_dim // config.num_heads,
            config.value_dim // config.num_heads,
            2 * config.chunk_size,
        )
        moments = ((3, config.timenorm_num_groups), torch.float32)
        return {
            "timenorm": moments,
            "cema": ((config.model_dim, config.cema_ndim, 2), torch.float32),
            "memory": ((heads, key, value), torch.float32),
            "normalizer": ((heads, key), torch.float32),
            "final_timenorm": moments,
            "begins": ((window,), torch.int32),
            "keys": ((heads, window, key), dtype),
            "values": ((heads, window, value), dtype),
            "memory_keys": ((heads, window, key), dtype),
        }

    def run(self, x: torch.Tensor, input_ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        config, step = self.config, self.states[0].metadata()
        bos = find_bos(config, self.base.embed, input_ids, None if input_ids is not None else x[:, 0])
        if config.scale_emb:
            x = x * config.model_dim**0.5
        if step is None:  # one text is as long as the step
            tokens = Tokens(1, len(x), x.device)
            return self.run_batch(x.transpose(0, 1), tokens, None if bos is None else bos[None], None).transpose(0, 1)
        out = torch.empty_like(x)
        for rows, index, mask in batches(step):
            cache = SlotCache(config, self.states, step.slots[rows], positions[index[:, 0]])
            read = Tokens(*index.shape, x.device, mask)
            y = self.run_batch(x[index, 0], read, None if bos is None else bos[index], cache)
            if mask is None:
                out[index] = y.unsqueeze(2)
            else:
                out[index[mask], 0] = y[mask]
        return out

    def run_batch(
        self, x: torch.Tensor, tokens: Tokens, bos: torch.Tensor | None, cache: "SlotCache | None"
    ) -> torch.Tensor:
        """The output for a batch x, (batch, length, model_dim)."""
        layout = find_layout(self.config, x, tokens, bos, cache, training=False)
        for i, block in enumerate(self.base.layers):
            if cache is not None:
                cache.read(i)
            x = block(x, layout, past_key_values=cache)
            if cache is not None:
                cache.write(i)
        x = self.base.output["final_norm"](x, layout, cache and cache.after_blocks)
        if cache is not None:
            cache.write_after_blocks()
        return x


def batches(step: StepMetadata) -> list[tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor | None]]:
    """
    The batches of a step: the requests with one token, then the others, those together that fill at least half of
    their rows. Of each: which requests it has, the index of each of its tokens in the step (batch, length), and which
    are real, or None if all are.
    """
    first, found = step.first, []
    if step.single:
        rows = torch.arange(step.single, device=first.device)
        found.append((rows, first[rows, None], None))
    waiting = sorted(range(len(step.lengths)), key=step.lengths.__getitem__)
    while waiting:
        longest = step.lengths[waiting[-1]]
        chosen = [i for i in waiting if 2 * step.lengths[i] > longest]
        del waiting[len(waiting) - len(chosen) :]
        rows = torch.tensor(chosen, device=first.device) + step.single
        steps = torch.arange(longest, device=first.device)
        lengths = step.bounds[rows + 1] - step.bounds[rows]
        mask = None if step.lengths[chosen[0]] == longest else steps < lengths[:, None]
        index = first[rows, None] + (steps if mask is None else steps.minimum(lengths[:, None] - 1))
        found.append((rows, index, mask))
    return found


class SlotCache(GeckoCache):
    """
    The cache of a batch of requests, which is read from their slots and written back block by block.

    Args:
        config: configuration of the model.
        blocks: the pools.
        slots: those of the requests, (batch).
        lengths: how many tokens each of these has read, (batch).
    """

    is_initialized = True  # an empty slot is read as zeros, and these mean the same

    def __init__(
        self, config: PreTrainedConfig, blocks: list[BlockStates], slots: torch.Tensor, lengths: torch.Tensor
    ):
        super().__init__(config)
        self.pools, self.slots = [block.pools() for block in blocks], slots
        names = AFTER_BLOCKS if config.boundary_token_id is not None else ("final_timenorm",)
        states = {AFTER_BLOCKS[name]: self.pools[0][name].index_select(0, slots) for name in names}
        if "begins" in states:
            states["begins"] = states["begins"].long()
        self.after_blocks.states = {**states, "lengths": lengths}
        self.row_of_single = None

    def ring_size(self, tokens: int) -> int:
        self.row_of_single = self.after_blocks.states["lengths"] % self.window if tokens == 1 else None
        return self.window

    @property
    def held_tokens(self) -> int:
        return self.window

    def read(self, block: int) -> None:
        """Reads the states of a block."""
        names = (name for name in GeckoForCausalLM.state_names if name not in AFTER_BLOCKS)
        self.layers[block].states = {name: self.pools[block][name].index_select(0, self.slots) for name in names}

    def write(self, block: int) -> None:
        """Writes the states of a block back, and frees their memory."""
        for name, state in self.layers[block].states.items():
            if name in RINGS and self.row_of_single is not None:
                self.write_row(self.pools[block][name], state, self.row_of_single)
            else:
                self.write_state(self.pools[block][name], state)
        self.layers[block].states = {}

    def write_state(self, pool: torch.Tensor, state: torch.Tensor) -> None:
        """Writes a state (batch, ...) to the slots of a pool."""
        pool.index_copy_(0, self.slots, state.to(pool.dtype))

    def write_row(self, pool: torch.Tensor, state: torch.Tensor, row: torch.Tensor) -> None:
        """The same, if of states (batch, heads, rows, size) one `row` (batch) has changed."""
        heads = torch.arange(state.shape[1], device=row.device)
        request = torch.arange(len(row), device=row.device)[:, None]
        pool[self.slots[:, None], heads, row[:, None]] = state[request, heads, row[:, None]]

    def write_after_blocks(self) -> None:
        for name, own in AFTER_BLOCKS.items():
            if own in self.after_blocks.states:
                self.write_state(self.pools[0][name], self.after_blocks.states[own])
