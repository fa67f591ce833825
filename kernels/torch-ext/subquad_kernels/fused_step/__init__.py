"""One token of all blocks of a model on a GPU: of RWKV or Raven in 7 or 8 kernels for each block, of Gecko in 15."""

from collections.abc import Callable, Collection, Sequence

import torch

from ..backend import choose_backend, dispatch
from ..block_shapes import Block, check_alike, check_names, check_sizes
from ..checks import check_stored


# The most rows that the kernels are made for. With more, the products of a library for matrices are faster.
MOST_ROWS = 32
# A program of DeepEmbed holds a token's whole matrix.
MOST_RANKS_OF_CORES = 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REFUSAL = "The kernels do not read"


class StepBlock(Block):
    """A block that the kernels can read. Its parameters are on one device, in one of three dtypes."""

    refusal = _REFUSAL

    def limits(self) -> tuple[Collection[torch.dtype], Callable[[int], bool]]:
        return _DTYPES, lambda size: size <= 256

    def take(self, parameters: dict[str, torch.Tensor]) -> None:
        self.parameters, self.device = parameters, parameters["ln1"].device
        _check_tensors(parameters, self.shapes, self.dtype, self.device)
        self.ranks = sum(shape[-1] for name, shape in self.shapes.items() if name.endswith(".down"))
        if self.rank:
            if self.rank > MOST_RANKS_OF_CORES:
                raise ValueError(f"{_REFUSAL} DeepEmbed of rank {self.rank}, more than {MOST_RANKS_OF_CORES}.")
            self.parameters = parameters | {"mu_nothing": torch.zeros_like(parameters["ln2"])}

    def states(self, rows: int, positions: dict[str, torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the normalised tokens before, of the two token shifts, and of the recurrence."""
        shift = (rows, self.width), self.dtype
        return [shift, shift, ((rows, *self.state_shape), torch.float32)]

    def kernels(self) -> tuple[type, Callable]:
        """The room of a token between the kernels, and the function that launches them."""
        from .triton_kernels import ShiftedToken, run_delta_block, run_wkv_block

        return ShiftedToken, run_wkv_block if self.kind == "wkv" else run_delta_block


class SlotBlock:
    """
    A block of Raven with a slot memory that the kernels can read.

    Args:
        kind: `"slot_memory"`.
        parameters: the matrices (out, in) `query`, `key`, `value`, `router`, `output`, `ffn_gate`, `ffn_up` and
            `ffn_value`, as `NAME.weight`; `decay`, of heads, with `A_log` and `dt_bias`, or `slot_decay`; the norms
            `ln1`, `ln2`, `q_norm` and `k_norm`; `g_norm`, or `gate` and `o_norm`; and `r_bias`, if any. All are on
            one device, in one dtype: float32, bfloat16 or float16.
        heads, kv_heads: numbers of heads of queries, and of keys, values and routers.
        eps: of all norms.
        topk, score, scale: see [`subquad_kernels.slot_routing`].
        relu: whether the feature map is ReLU, not SiLU.
        normalizer: divisor of the decays of single slots.

    Raises:
        ValueError: if the kernels cannot compute such a block; the message says why.
    """

    rank = 0  # without DeepEmbed

    def __init__(
        self,
        kind: str,
        parameters: dict[str, torch.Tensor],
        heads: int,
        kv_heads: int,
        eps: float,
        topk: int,
        score: str = "sigmoid",
        scale: float = 1.0,
        relu: bool = False,
        normalizer: float = 1.0,
    ):
        self.kind, self.parameters, self.heads, self.kv_heads, self.eps = kind, parameters, heads, kv_heads, eps
        self.topk, self.score, self.scale = topk, score, float(scale)
        self.relu, self.normalizer = relu, float(normalizer)
        for name in ("query.weight", "output.weight", "router.weight", "ffn_value.weight"):
            if name not in parameters or parameters[name].dim() != 2:
                raise ValueError(f"There must be a matrix `{name}`.")
        query, output, router, last = (parameters[f"{x}.weight"] for x in ("query", "output", "router", "ffn_value"))
        self.width, self.inner = output.shape
        self.middle, self.dtype, self.device = last.shape[1], query.dtype, query.device
        self.stream_dtype = self.dtype
        check_sizes(_REFUSAL, self.dtype, _DTYPES, self.width, self.inner, self.middle)
        if heads % kv_heads or any(size % heads for size in (query.shape[0], self.inner)):
            raise ValueError(f"There cannot be {heads} and {kv_heads} heads of {query.shape[0]} channels.")
        self.key_size, self.slots = query.shape[0] // heads, router.shape[0] // kv_heads
        value_size, by_head = self.inner // heads, "A_log" in parameters
        # In this order, as one kernel computes them.
        outputs = {"query": heads * self.key_size, "key": kv_heads * self.key_size, "value": kv_heads * value_size}
        outputs |= {"gate": self.inner} if "gate.weight" in parameters else {}
        outputs |= {"router": kv_heads * self.slots}
        outputs |= {"decay": kv_heads} if by_head else {"slot_decay": kv_heads * self.slots}
        self.products, self.ranks = list(outputs), sum(outputs.values())
        outputs |= {"ffn_gate": self.middle, "ffn_up": self.middle}
        shapes = {f"{name}.weight": (size, self.width) for name, size in outputs.items()}
        shapes |= {"output.weight": (self.width, self.inner), "ffn_value.weight": (self.width, self.middle)}
        shapes |= dict.fromkeys(("ln1", "ln2"), (self.width,)) | dict.fromkeys(("q_norm", "k_norm"), (self.key_size,))
        shapes |= {"o_norm": (value_size,)} if "gate" in outputs else {"g_norm": (self.inner,)}
        shapes |= {"A_log": (kv_heads,), "dt_bias": (kv_heads,)} if by_head else {}
        shapes |= {"r_bias": (kv_heads, self.slots)} if "r_bias" in parameters else {}
        check_names(parameters, shapes)
        _check_tensors(parameters, shapes, self.dtype, self.device)
        self.state_shape = heads, self.slots, self.key_size + value_size

    def states(self, rows: int, positions: dict[str, torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the slot memory."""
        return [((rows, *self.state_shape), torch.float32)]

    def kernels(self) -> tuple[type, Callable]:
        """As [`StepBlock.kernels`]."""
        from .slot_kernels import SlotToken, run_slot_block

        return SlotToken, run_slot_block


class ChunkBlock:
    """
    A block of Gecko that the kernels can read.

    Args:
        kind: `"working_memory"`.
        parameters: the matrices (out, in) `value`, `gate`, `shared` and `stream`, with their biases, and `output`,
            `ffn_gate`, `ffn_up` and `ffn_value`, as `NAME.weight` and `NAME.bias`; the norms `ln1` with a bias, `ln_m`
            and `ln2` with a bias, the last two if any; `cema.NAME` of [`subquad_kernels.cema`]; `gamma` and `beta` of
            the representation that queries and keys share; and `alpha`, the factors of the last product, if any. All
            are on one device, in one dtype: float32, bfloat16 or float16.
        heads, rotated: numbers of heads, and of the first ones that have rotary embeddings.
        norm: the numbers of [`subquad_kernels.timestep_decay_norm`]. Their epsilon is one of all norms.
        norm_groups: groups of channels of the other norms.
        two_hop: whether the feed-forward network's output is added to the block's input.

    Raises:
        ValueError: if the kernels cannot compute such a block; the message says why.
    """

    rank = 0  # without DeepEmbed

    def __init__(
        self,
        kind: str,
        parameters: dict[str, torch.Tensor],
        heads: int,
        rotated: int,
        norm: dict[str, float],
        norm_groups: int,
        two_hop: bool,
    ):
        self.kind, self.parameters, self.heads, self.rotated = kind, parameters, heads, rotated
        self.norm, self.eps, self.norm_groups, self.two_hop = norm, norm["eps"], norm_groups, two_hop
        for name in ("output.weight", "shared.weight", "ffn_value.weight", "cema.alpha"):
            if name not in parameters or parameters[name].dim() != 2:
                raise ValueError(f"There must be a matrix `{name}`.")
        output, shared, last = (parameters[f"{name}.weight"] for name in ("output", "shared", "ffn_value"))
        self.width, self.inner = output.shape
        self.middle, self.dtype, self.device, self.ranks = last.shape[1], output.dtype, output.device, shared.shape[0]
        self.stream_dtype = self.dtype
        check_sizes(_REFUSAL, self.dtype, _DTYPES, self.width, self.inner, self.ranks, self.middle)
        if any(size % heads for size in (self.ranks, self.inner)):
            raise ValueError(f"There cannot be {heads} heads of {self.ranks} and {self.inner} channels.")
        if any(self.width % number for number in (norm["groups"], norm_groups)):
            raise ValueError(f"There cannot be {norm['groups']} and {norm_groups} groups of {self.width} channels.")
        key_size, value_size, numbers = self.ranks // heads, self.inner // heads, parameters["cema.alpha"].shape[1]
        outputs = {"value": self.inner, "gate": self.inner, "shared": self.ranks, "stream": self.width}
        shapes = {f"{name}.bias": (size,) for name, size in outputs.items()}
        outputs |= {"ffn_gate": self.middle, "ffn_up": self.middle}
        shapes |= {f"{name}.weight": (size, self.width) for name, size in outputs.items()}
        shapes |= {"output.weight": (self.width, self.inner), "ffn_value.weight": (self.width, self.middle)}
        optional = {name: (self.width,) for name in ("ln_m", "ln2", "ln2_bias", "alpha") if name in parameters}
        shapes |= dict.fromkeys(("ln1", "ln1_bias", "cema.theta"), (self.width,)) | optional
        shapes |= dict.fromkeys(("cema.alpha", "cema.delta"), (self.width, numbers))
        shapes |= {"cema.gamma": (self.width, numbers, 2), "gamma": (4, self.ranks), "beta": (4, self.ranks)}
        check_names(parameters, shapes)
        _check_tensors(parameters, shapes, self.dtype, self.device)
        self.state_shape = heads, key_size, value_size
        self.average = self.width, numbers, 2

    def states(self, rows: int, positions: dict[str, torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of moments, moving average, rings of keys, values and memory keys, memory, normalizer."""
        heads, key_size, value_size = self.state_shape
        keys, values = ((heads, positions["mask"].shape[1], size) for size in (key_size, value_size))
        shapes = (3, self.norm["groups"]), self.average, keys, values, keys, self.state_shape, (heads, key_size)
        dtypes = torch.float32, torch.float32, *[self.dtype] * 3, torch.float32, torch.float32
        return [((rows, *shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def kernels(self) -> tuple[type, Callable]:
        """As [`StepBlock.kernels`]."""
        from .gecko_kernels import ChunkToken, run_chunk_block

        return ChunkToken, run_chunk_block


BLOCKS = {
    **dict.fromkeys(("wkv", "delta_wkv", "deep_delta_wkv"), StepBlock),
    **{"slot_memory": SlotBlock, "working_memory": ChunkBlock},
}


def _check_tensors(
    parameters: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> None:
    for name, shape in shapes.items():
        x = parameters[name]
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_neg():
            raise ValueError(f"`{name}` must be a plain tensor, whose memory holds its numbers.")
        if len(shape) == 1 and x.numel() == shape[0]:  # stored by heads, or with axes for rows and tokens
            shape = tuple(x.shape)
        check_stored(name, x, shape, dtype, device)


class StepBlocks:
    """
    Blocks of one kind, one dtype and one width, which are read one after another.

    Args:
        blocks: at least one. If they are Goose's, only the first one does not read the first block's values.

    Raises:
        ValueError: if the blocks do not fit each other.
    """

    def __init__(self, blocks: Sequence[StepBlock | SlotBlock | ChunkBlock]):
        self.blocks, first = blocks, blocks[0]
        check_alike(blocks, "dtype", "device", "rank")
        self._backend = choose_backend("fused_step", "auto", ("eager", "triton"), first.parameters["ln1"])

    def __call__(
        self,
        x: torch.Tensor,
        states: Sequence[Sequence[torch.Tensor | None]],
        mask: torch.Tensor | None = None,
        positions: dict[str, torch.Tensor] | None = None,
    ) -> bool:
        """
        One token of each row. All tensors are contiguous.

        Args:
            x: the residual stream (B, 1, D), in the dtype of the blocks, or in float32 if they are RWKV's in float16.
                The output of the last block is written over it.
            states: of each block, written over. RWKV's are the normalised tokens before, of its two token shifts,
                (B, D), in the dtype of the blocks, and of the recurrence float32 (B, H, K, V), or (B, H, V, K) of
                Goose. Raven's is its slot memory, float32 (B, H, slots, K + V). For Gecko's see `ChunkBlock.states`.
            mask: bool (B, 1), False for a row that reads nothing: its states stay.
            positions: Gecko's, see [`subquad_kernels.fused_step.gecko_kernels.ChunkToken`]. With DeepEmbed, "cores":
                each block's matrix of each token, (blocks, B, 1, R, R), in the dtype of the blocks.

        Returns:
            whether it was done. It is not if the tensors do not fit the blocks, there are more than `MOST_ROWS` rows,
            or there are no kernels for the device. If a kernel cannot be compiled, one warning says why; the states
            may have been changed then.
        """
        first, rows, positions = self.blocks[0], x.shape[0], positions or {}
        wanted = [(x, (rows, 1, first.width), first.stream_dtype)]
        for block, of_block in zip(self.blocks, states, strict=True):
            wanted += [(y, *how) for y, how in zip(of_block, block.states(rows, positions), strict=True)]
        if first.rank:
            shape = (len(self.blocks), rows, 1, first.rank, first.rank)
            wanted.append((positions.get("cores"), shape, first.dtype))
        if rows > MOST_ROWS or any(not _fits(*each, first.device) for each in wanted):
            return False
        if mask is not None and not _fits(mask, (rows, 1), torch.bool, first.device):
            return False

        def run() -> bool:
            make_token, run_block = first.kernels()
            largest = max(self.blocks, key=lambda block: block.ranks)
            token = make_token(largest, x.view(rows, first.width), mask, positions)
            for block, of_block in zip(self.blocks, states, strict=True):
                run_block(block, token, *of_block)
            return True

        return dispatch("fused_step", self._backend, x, run, lambda: False)


def _fits(x: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return x is not None and x.shape == shape and x.dtype == dtype and x.device == device and x.is_contiguous()


__all__ = ["BLOCKS", "MOST_ROWS", "ChunkBlock", "SlotBlock", "StepBlock", "StepBlocks"]
