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

from subquad.modeling.padding import Tokens
from subquad.modeling.protocols import NO_STATE
from subquad.models.gecko.cache_gecko import GeckoCache
from subquad.models.gecko.positions_gecko import Rows, State, StepPositions, find_bos, find_positions

from .serving import ServedForCausalLM, part_of
from .states import BlockStates, StateSizes, StepMetadata


logger = init_logger(f"vllm.{__name__}")  # vLLM shows what comes under its own name
# The states of a block that are rings of tokens. A token changes one row of each.
RINGS = ("keys", "values", "memory_keys")
# The states of a block that a token changes as a whole. The others are read and changed in place.
COPIED = ("timenorm", "cema")
MEMORY = ("memory", "normalizer")
# States kept after the blocks: names in the pool and in the cache. vLLM requires all blocks to be alike, so every
# block has space for them; the first block's is used. It is small compared with the rings.
AFTER_BLOCKS = {"final_timenorm": "timenorm", "begins": "begins"}


@ignore_torch_compile
class GeckoForCausalLM(ServedForCausalLM, IsAttentionFree):
    """Its step is not compiled, because its batches depend on the lengths of the requests."""

    captured = False
    state_names = (*COPIED, *MEMORY, *AFTER_BLOCKS, *RINGS)

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
        for rows, most, index, mask in batches(step):
            cache = SlotCache(config, self.states, step.slots[rows], positions[index[:, 0]], most, index.shape[1] == 1)
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
        positions = find_positions(self.config, x, tokens, bos, cache, training=False)
        if cache is not None:
            cache.count_tokens(positions)
            if cache.one_token:
                positions = SlotPositions(**vars(positions))
                positions.memory["indices"] = positions.attention["indices"] = cache.slots
        for i, block in enumerate(self.base.layers):
            if cache is not None:
                cache.read(i)
            x = block(x, positions, cache=cache)
            if cache is not None:
                cache.write(i)
        x = self.base.output["final_norm"](x, positions, NO_STATE if cache is None else cache.after_blocks)
        if cache is not None:
            cache.write_after_blocks()
        return x


def batches(step: StepMetadata) -> list[tuple[torch.Tensor | slice, int, torch.Tensor, torch.Tensor | None]]:
    """
    The batches of a step: the requests with one token, then the others, grouped so that at least half of each row is
    filled, and new requests apart. For each batch: its requests, the largest number of tokens they have read, the
    index of each of its tokens in the step (batch, length), and the mask of real tokens, or None if all are real.
    """
    first, found = step.first, []
    if step.single:
        found.append((slice(step.single), max(step.before[: step.single]), first[: step.single, None], None))
    for begins in (True, False):
        waiting = [i for i, before in enumerate(step.before[step.single :]) if (before == 0) == begins]
        waiting.sort(key=step.lengths.__getitem__)
        while waiting:
            longest = step.lengths[waiting[-1]]
            chosen = [i for i in waiting if 2 * step.lengths[i] > longest]
            del waiting[len(waiting) - len(chosen) :]
            rows = torch.tensor(chosen, device=first.device) + step.single
            steps, most = torch.arange(longest, device=first.device), max(step.before[step.single + i] for i in chosen)
            lengths = step.bounds[rows + 1] - step.bounds[rows]
            mask = None if step.lengths[chosen[0]] == longest else steps < lengths[:, None]
            index = first[rows, None] + (steps if mask is None else steps.minimum(lengths[:, None] - 1))
            found.append((rows, most, index, mask))
    return found


class SlotCache(GeckoCache):
    """
    The cache of a batch of requests. Their states are read from their slots and written back block by block, except
    for states that a single token reads in place.

    Args:
        config: configuration of the model.
        blocks: the pools.
        slots: the slots of the requests, (batch).
        lengths: number of tokens that each request has read, (batch).
        most: the largest of these numbers.
        one_token: whether each request reads one token.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        blocks: list[BlockStates],
        slots: torch.Tensor,
        lengths: torch.Tensor,
        most: int,
        one_token: bool,
    ):
        super().__init__(config)
        self.pools, self.slots, self.most, self.one_token = [block.pools() for block in blocks], slots, most, one_token
        names = AFTER_BLOCKS if config.boundary_token_id is not None else ("final_timenorm",)
        states = {AFTER_BLOCKS[name]: self.pools[0][name].index_select(0, slots) for name in names}
        if "begins" in states:
            states["begins"] = states["begins"].long()
        self.after_blocks.states = {**states, "lengths": lengths}

    @property
    def is_initialized(self) -> bool:
        """Whether there are states. An empty slot is read as zeros, which mean the same as no state."""
        return self.one_token or self.most > 0

    def ring_size(self, tokens: int) -> int:
        """The number of rows of the rings that are in use once `tokens` more are read, rounded up."""
        size = 64
        while size < min(self.window, self.most + tokens):
            size *= 2
        return min(size, self.window)

    @property
    def held_tokens(self) -> int:
        return self.ring_size(0)

    def read(self, block: int) -> None:
        """Reads the states of a block."""
        pools = self.pools[block]
        if self.one_token:
            rows = self.ring_size(1)
            states = {name: pools[name].index_select(0, self.slots) for name in COPIED}
            states |= {name: pools[name] for name in MEMORY} | {name: pools[name][:, :, :rows] for name in RINGS}
        elif self.is_initialized:
            rows = self.held_tokens
            states = {name: pools[name].index_select(0, self.slots) for name in (*COPIED, *MEMORY)}
            states |= {name: pools[name][:, :, :rows].index_select(0, self.slots) for name in RINGS}
        else:
            states = {}
        self.layers[block].states = states

    def write(self, block: int) -> None:
        """Writes the states of a block back, and frees their memory."""
        for name, state in self.layers[block].states.items():
            if not self.one_token or name in COPIED:
                self.write_state(self.pools[block][name], state, name in RINGS)
        self.layers[block].states = {}

    def write_state(self, pool: torch.Tensor, state: torch.Tensor, is_ring: bool = False) -> None:
        """Writes a state (batch, ...) to the slots of a pool; of a ring the first rows."""
        pool = pool[:, :, : state.shape[2]] if is_ring else pool
        pool.index_copy_(0, self.slots, state.to(pool.dtype))

    def write_after_blocks(self) -> None:
        for name, own in AFTER_BLOCKS.items():
            if own in self.after_blocks.states:
                self.write_state(self.pools[0][name], self.after_blocks.states[own])


class SlotPositions(StepPositions):
    """A single token of each request, written to the rings in the slots before they are read."""

    def write(self, state: State, rows: Rows, memory: torch.Tensor, normalizer: torch.Tensor) -> Rows:
        """Writes the rows of the tokens to the rings, and returns these. The memory stays in place."""
        rings = {name: state.get(name) for name in rows}
        place = self.read.position[:, 0] % (2 * self.chunk_size)
        for name, x in rows.items():
            rings[name].transpose(1, 2)[self.attention["indices"], place] = x[:, :, 0].to(rings[name].dtype)
        return rings
