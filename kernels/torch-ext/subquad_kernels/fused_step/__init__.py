"""One token of all blocks of Eagle, Finch or Goose on a GPU, in seven or eight kernels for each block."""

from collections.abc import Callable, Collection, Sequence

import torch

from ..backend import choose_backend, dispatch
from ..block_shapes import Block, check_alike
from ..checks import check_stored


# The most rows that the kernels are made for. With more, the products of a library for matrices are faster.
MOST_ROWS = 32
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StepBlock(Block):
    """A block that the kernels can read. Its parameters are on one device, in one of three dtypes."""

    refusal = "The kernels do not read"

    def limits(self) -> tuple[Collection[torch.dtype], Callable[[int], bool]]:
        return _DTYPES, lambda size: size <= 256

    def take(self, parameters: dict[str, torch.Tensor]) -> None:
        self.parameters, self.device = parameters, parameters["ln1"].device
        for name, shape in self.shapes.items():
            x = parameters[name]
            if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_neg():
                raise ValueError(f"`{name}` must be a plain tensor, whose memory holds its numbers.")
            if len(shape) == 1 and x.numel() == shape[0]:  # stored by heads, or with axes for rows and tokens
                shape = tuple(x.shape)
            check_stored(name, x, shape, self.dtype, self.device)
        self.ranks = sum(shape[-1] for name, shape in self.shapes.items() if name.endswith(".down"))


class StepBlocks:
    """
    Blocks of one kind, one dtype and one width, which are read one after another.

    Args:
        blocks: at least one. If they are Goose's, only the first one does not read the first block's values.

    Raises:
        ValueError: if the blocks do not fit each other.
    """

    def __init__(self, blocks: Sequence[StepBlock]):
        self.blocks, first = blocks, blocks[0]
        check_alike(blocks, "dtype", "device")
        self._backend = choose_backend("fused_step", "auto", ("eager", "triton"), first.parameters["ln1"])

    def __call__(
        self,
        x: torch.Tensor,
        before: Sequence[torch.Tensor | None],
        before_ffn: Sequence[torch.Tensor | None],
        states: Sequence[torch.Tensor | None],
        mask: torch.Tensor | None = None,
    ) -> bool:
        """
        One token of each row. All but x and the states are in the dtype of the blocks, and all are contiguous.

        Args:
            x: the residual stream (B, 1, D), in float32 if the blocks are float16. The output of the last block is
                written over it.
            before, before_ffn: of each block, the normalised tokens before, of the two token shifts, (B, D). These
                tokens are written over them.
            states: of each recurrence, float32 (B, H, K, V), or (B, H, V, K) of Goose, written over.
            mask: bool (B, 1), False for a row that reads nothing: its states stay.

        Returns:
            whether it was done. It is not if the tensors do not fit the blocks, there are more than `MOST_ROWS` rows,
            or there are no kernels for the device. If a kernel cannot be compiled, one warning says why; the states
            may have been changed then.
        """
        first, rows = self.blocks[0], x.shape[0]
        shift, state = (rows, first.width), (rows, *first.state_shape)
        wanted = [(x, (rows, 1, first.width), first.stream_dtype)]
        wanted += [(y, shift, first.dtype) for y in (*before, *before_ffn)]
        wanted += [(y, state, torch.float32) for y in states]
        if rows > MOST_ROWS or any(not _fits(*each, first.device) for each in wanted):
            return False
        if mask is not None and not _fits(mask, (rows, 1), torch.bool, first.device):
            return False

        def run() -> bool:
            from .triton_kernels import Token, run_delta_block, run_wkv_block

            largest = max(self.blocks, key=lambda block: block.ranks)
            token = Token(largest, x.view(rows, first.width), mask)
            run_block = run_wkv_block if first.kind == "wkv" else run_delta_block
            for block, *of_block in zip(self.blocks, before, before_ffn, states, strict=True):
                run_block(block, token, *of_block)
            return True

        return dispatch("fused_step", self._backend, x, run, lambda: False)


def _fits(x: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return x is not None and x.shape == shape and x.dtype == dtype and x.device == device and x.is_contiguous()


__all__ = ["MOST_ROWS", "StepBlock", "StepBlocks"]
