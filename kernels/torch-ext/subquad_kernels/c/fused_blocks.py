"""One token of all blocks of RWKV on a CPU, in one call of the C library of `native.py`."""

import ctypes
from collections.abc import Callable, Collection, Sequence

import torch

from ..block_shapes import Block, check_alike
from ..checks import check_stored
from ..int4_linear import int4_layout
from ..int8_linear import LARGEST, MOST_INPUTS, adds_exactly, int8_layout
from .native import library, readable


_pointer, _size, _number = ctypes.c_size_t, ctypes.c_ssize_t, ctypes.c_int


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class _Matrix(ctypes.Structure):
    _fields_ = [*_fields(_pointer, "weight", "scale"), *_fields(_size, "outputs", "inputs"), ("bits", _number)]


class _Offset(ctypes.Structure):
    _fields_ = [*_fields(_pointer, "down", "up", "base"), ("rank", _size)]


class _Block(ctypes.Structure):
    _fields_ = [
        *_fields(_number, "dtype", "stream", "largest"),
        *_fields(_size, "width", "inner", "heads", "middle"),
        *_fields(_pointer, "ln1", "ln1_bias", "ln2", "ln2_bias", "ln_x", "ln_x_bias"),
        *_fields(ctypes.c_float, "eps", "eps_x"),
        ("bonus", _pointer),
    ]


class _WkvBlock(ctypes.Structure):
    _fields_ = [
        ("common", _Block),
        *_fields(_pointer, "mu_r", "mu_k", "mu_v", "mu_g", "mu_w", "mu_x"),
        ("of_token", _number),
        *_fields(_Offset, "shift", "decay"),
        *_fields(_Matrix, "receptance", "key", "value", "gate", "output"),
        *_fields(_pointer, "mu_ffn_key", "mu_ffn_receptance"),
        *_fields(_Matrix, "ffn_key", "ffn_receptance", "ffn_value"),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("threads", ctypes.c_uint),
        ("run", _pointer),
        ("rows", _size),
        *_fields(_pointer, "x", "v_first", "states"),
    ]


class _DeltaBlock(ctypes.Structure):
    _fields_ = [
        ("common", _Block),
        *_fields(_pointer, "mu_r", "mu_w", "mu_k", "mu_v", "mu_a", "mu_g"),
        *_fields(_Offset, "decay", "rate", "mix", "gate", "factor"),
        *_fields(_pointer, "k_k", "k_a"),
        *_fields(_Matrix, "receptance", "key", "value", "output"),
        ("mu_ffn_key", _pointer),
        *_fields(_Matrix, "ffn_key", "ffn_value"),
    ]


KINDS = {"wkv": _WkvBlock, "delta_wkv": _DeltaBlock, "deep_delta_wkv": _DeltaBlock}


# Of matrices of integers: their bits, and how they are stored.
_INTEGERS = {torch.int8: (8, int8_layout), torch.uint8: (4, int4_layout)}


def _address(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """
    The address of a parameter.

    Raises:
        ValueError: if the library expects something else, or if it does not lie within its storage.
    """
    check_stored(name, x, shape, dtype, torch.device("cpu"))
    if not readable(dtype, x):
        raise ValueError(f"`{name}` must be a plain tensor, whose memory holds its numbers, got {type(x).__name__}.")
    storage, address = x.untyped_storage(), x.data_ptr()
    if not storage.data_ptr() <= address <= address + x.nbytes <= storage.data_ptr() + storage.nbytes():
        raise ValueError(f"`{name}` must lie within its storage, which has {storage.nbytes()} bytes.")
    return address


class FusedBlock(Block):
    """
    A block that the library can read: the addresses of its parameters, which the caller must keep alive and in place.
    They have one dtype, except integer matrices and their scales, which are as in `int8_linear` and `int4_linear`.
    """

    refusal = "The library does not read"

    def limits(self) -> tuple[Collection[torch.dtype], Callable[[int], bool]]:
        if (found := library()) is None:
            raise ValueError("The C library is not available.")
        return found.dtypes, found.fits_head

    def take(self, parameters: dict[str, torch.Tensor]) -> None:
        """Stores the addresses of the parameters, which may have leading axes of length 1."""
        self.struct, dtypes = KINDS[self.kind](), library().dtypes
        common = self.struct.common
        common.dtype, common.stream = dtypes[self.dtype], dtypes[self.stream_dtype]
        common.largest = LARGEST if adds_exactly() else LARGEST // 2
        common.width, common.inner, common.middle = self.width, self.inner, self.middle
        common.heads, common.eps, common.eps_x = self.heads, self.eps, self.eps_x
        if self.kind == "wkv":
            self.struct.of_token = self.of_token
        for name, shape in self.shapes.items():
            group, _, part = name.rpartition(".")
            target = getattr(self.struct, group) if group else self.struct
            x = parameters[name]
            if part == "weight" and x.dtype in _INTEGERS:
                if (scale := parameters.get(f"{group}.scale")) is None:
                    raise ValueError(f"There must be a tensor `{group}.scale`.")
                target.bits, layout = _INTEGERS[x.dtype]
                if target.bits == 8 and shape[1] > MOST_INPUTS:
                    raise ValueError(f"`{name}` must have at most {MOST_INPUTS} inputs, got {shape[1]}.")
                stored, of_scale = layout(*shape)
                target.weight = _address(name, x, *stored)
                target.scale = _address(f"{group}.scale", scale, *of_scale)
            else:
                if len(shape) == 1:  # some are stored by head, some with axes for rows and tokens
                    by_heads = shape == (self.inner,) and x.shape == self.state_shape[:2]
                    shape = tuple(x.shape) if by_heads else (*(x.dim() - 1) * [1], *shape)
                owner = target if group or hasattr(target, part) else target.common
                setattr(owner, part, _address(name, x, shape, self.dtype))
            if part == "weight":
                target.outputs, target.inputs = shape
            elif part == "up":
                target.rank = x.shape[-2]


class FusedBlocks:
    """
    Blocks of one kind, one dtype and one width, as the library reads them one after another.

    Args:
        blocks: at least one. In Goose, all except the first read the first block's values.

    Raises:
        ValueError: if the blocks do not fit each other.
    """

    def __init__(self, blocks: Sequence[FusedBlock]):
        first, found = blocks[0], library()
        check_alike(blocks, "dtype", "rank")
        self._structs = (KINDS[first.kind] * len(blocks))(*(block.struct for block in blocks))
        self._run = found.wkv_blocks if first.kind == "wkv" else found.delta_blocks
        self._parallel = found.parallel
        self.number, self.dtype, self.stream_dtype = len(blocks), first.dtype, first.stream_dtype
        self.width, self.inner, self.state_shape = first.width, first.inner, first.state_shape
        self.rank, self._keeps_values = first.rank, first.kind != "wkv"

    def bytes_by_unit(self) -> int:
        """The size in bytes of what [`copy_by_unit`] returns."""
        struct = self._structs[0]
        return library().bytes_by_unit(ctypes.byref(struct.ffn_value), struct.common.dtype)

    def copy_by_unit(self, number: int) -> torch.Tensor:
        """
        A copy of the last weight of a block's feed-forward network, the same numbers by hidden unit: a token reads
        those of units that are not zero.

        Raises:
            ValueError: if there is no such copy of this weight.
            RuntimeError: if there is no memory.
        """
        if self.width % 64:
            raise ValueError(f"The width must be a multiple of 64, got {self.width}.")
        struct, copy = self._structs[number], torch.empty(self.bytes_by_unit(), dtype=torch.uint8)
        threads = torch.get_num_threads() if self._parallel else 1
        weight = ctypes.byref(struct.ffn_value)
        if library().copy_by_unit(weight, struct.common.dtype, copy.data_ptr(), threads, self._parallel):
            raise ValueError("A weight is not finite, and times zero it would not be zero.")
        return copy

    def __call__(
        self,
        x: torch.Tensor,
        before: Sequence[torch.Tensor | None],
        before_ffn: Sequence[torch.Tensor | None],
        states: Sequence[torch.Tensor | None],
        inplace: bool,
        by_unit: Sequence[torch.Tensor | None] | None = None,
        cores: torch.Tensor | None = None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]] | None:
        """
        One token of each row. All tensors except x and the states have `dtype`, and all are contiguous.

        Args:
            x: the residual stream (B, 1, D), in `stream_dtype`. It is overwritten by the output of the last block.
            before, before_ffn: for each block, the normalised tokens before, for the two token shifts, (B, D); None
                means zeros.
            states: for each recurrence, float32 (B, H, K, V), or (B, H, V, K) for Goose; None means zeros.
            inplace: whether to write the new states into `states`; missing ones are created.
            by_unit: for each block, what `copy_by_unit` returned, or None. One row reads it in place of the weight.
            cores: with DeepEmbed, each block's matrix of each token, (blocks, B, 1, R, R); else None.

        Returns:
            these tokens, normalised, for the next call's `before` and `before_ffn`; and the new states. None, with
            nothing changed, if the arguments do not match each other or the blocks.

        Raises:
            MemoryError: if there is no memory. The states may have been changed then.
        """
        rows, shift = x.shape[0], (x.shape[0], self.width)
        if x.shape[1:] != (1, self.width) or not readable(self.stream_dtype, x):
            return None
        if any(y is not None and y.shape != shift for y in (*before, *before_ffn)):
            return None
        if any(y is not None and y.shape != (rows, *self.state_shape) for y in states):
            return None
        if not readable(self.dtype, *before, *before_ffn) or not readable(torch.float32, *states):
            return None
        if by_unit is not None:
            size = self.bytes_by_unit()
            if not readable(torch.uint8, *by_unit) or any(y is not None and y.numel() != size for y in by_unit):
                return None
        wanted = (self.number, rows, 1, self.rank, self.rank) if self.rank else None
        if (cores if cores is None else cores.shape) != wanted or not readable(self.dtype, cores):
            return None
        after = x.new_empty(2 * self.number, rows, self.width, dtype=self.dtype).unbind()
        after, after_ffn = after[: self.number], after[self.number :]
        new_states = [
            state if inplace and state is not None else x.new_empty((rows, *self.state_shape), dtype=torch.float32)
            for state in states
        ]
        optional = (self.number * [None] if each is None else each for each in (by_unit, cores))
        of_blocks = zip(before, before_ffn, after, after_ffn, states, new_states, *optional, strict=True)
        addresses = [y if y is None else y.data_ptr() for of_block in of_blocks for y in of_block]
        call = _Call(torch.get_num_threads() if self._parallel else 1, self._parallel, rows, x.data_ptr())
        places = (ctypes.c_void_p * len(addresses))(*addresses)
        call.states = ctypes.addressof(places)
        if self._keeps_values:
            v_first = x.new_empty(rows, self.inner, dtype=self.dtype)
            call.v_first = v_first.data_ptr()
        if self._run(self._structs, self.number, ctypes.byref(call)):
            raise MemoryError("There is no memory for a token of the blocks.")
        return after, after_ffn, new_states
