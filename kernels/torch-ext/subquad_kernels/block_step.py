"""One token of a whole block of RWKV on a CPU, in one call of the C library of `native.py`."""

import ctypes

import torch

from .int8_linear import LARGEST, adds_exactly
from .native import GROUP, STRIP, Library, library


_pointer, _size, _number = ctypes.c_size_t, ctypes.c_ssize_t, ctypes.c_int
# The most channels between two weights, those of all maps of a token shift together: `block.c` has room for so many.
_MOST_RANKS = 1024


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class _Matrix(ctypes.Structure):
    _fields_ = [*_fields(_pointer, "weight", "scale"), *_fields(_size, "outputs", "inputs"), ("bits", _number)]


class _Offset(ctypes.Structure):
    _fields_ = [*_fields(_pointer, "down", "up", "base"), ("rank", _size)]


class _Block(ctypes.Structure):
    _fields_ = [
        *_fields(_number, "dtype", "stream", "largest"),
        ("threads", ctypes.c_uint),
        ("run", _pointer),
        *_fields(_size, "rows", "width", "inner", "heads", "middle"),
        *_fields(_pointer, "x", "out", "before", "before_ffn", "after", "after_ffn", "state", "new_state"),
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


class _DeltaBlock(ctypes.Structure):
    _fields_ = [
        ("common", _Block),
        *_fields(_pointer, "mu_r", "mu_w", "mu_k", "mu_v", "mu_a", "mu_g"),
        *_fields(_Offset, "decay", "rate", "mix", "gate"),
        *_fields(_pointer, "k_k", "k_a", "v_first"),
        *_fields(_Matrix, "receptance", "key", "value", "output"),
        ("mu_ffn_key", _pointer),
        *_fields(_Matrix, "ffn_key", "ffn_value"),
    ]


_KINDS = {"wkv": _WkvBlock, "delta_wkv": _DeltaBlock}


# Of matrices of integers.
_BITS = {torch.int8: 8, torch.uint8: 4}


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    """Outputs and inputs of a matrix."""
    return (weight.shape[0] * STRIP, weight.shape[1] * GROUP) if weight.dim() == 3 else tuple(weight.shape)


class BlockStep:
    """
    A block that is ready to be called with one token of a few rows: the addresses of its parameters.

    Args:
        kind: `"wkv"` for Eagle (RWKV-5) and Finch (RWKV-6), `"delta_wkv"` for Goose (RWKV-7).
        parameters: by the names of `block.c`: the matrices (out, in) as `NAME.weight`, those of integers with a
            `NAME.scale`, as `int8_linear` and `int4_linear` have them; the low ranks as `NAME.down`, `NAME.up` and
            `NAME.base`; and vectors. All but matrices of integers and their scales have one dtype. They are not kept:
            who calls the block sees that they live, and have not changed their places.
        heads: number of heads.
        eps: of the two norms of the block's input.
        eps_x: of the norm of the heads.
        of_token: whether the interpolations weigh the token itself, as in Eagle, and not the one before.

    Attributes:
        dtype: of the parameters, and of the tokens that are kept.
        stream_dtype: of the input and the output: float32 if `dtype` is float16, whose range they may exceed.

    Raises:
        ValueError: if the library cannot compute such a block; the message says why.
    """

    def __init__(
        self,
        kind: str,
        parameters: dict[str, torch.Tensor],
        heads: int,
        eps: float,
        eps_x: float,
        of_token: bool = False,
    ):
        found = library()
        if found is None:
            raise ValueError("There is no library.")
        self._run = found.wkv_block if kind == "wkv" else found.delta_block
        self._struct = _KINDS[kind]()
        self.width, self.inner = parameters["ln1"].shape[0], parameters["ln_x"].shape[0]
        self._sizes = {"": self.width, "inner": self.inner, "middle": _shape(parameters["ffn_key.weight"])[0]}
        self.dtype = parameters["ln1"].dtype
        self.stream_dtype = torch.float32 if self.dtype == torch.float16 else self.dtype
        self._check_sizes(found, heads)
        for name, x in parameters.items():
            self._set(name, x)
        common = self._struct.common
        common.dtype, common.stream = found.dtypes[self.dtype], found.dtypes[self.stream_dtype]
        common.largest = LARGEST if adds_exactly() else LARGEST // 2
        common.width, common.inner, common.middle = self._sizes.values()
        common.heads, common.eps, common.eps_x = heads, eps, eps_x
        common.run = found.parallel
        self.state_shape = heads, self.inner // heads, self.inner // heads
        # Whether it reads the values of the first block of Goose.
        self._mixes = "mix.up" in parameters
        if kind == "wkv":
            self._struct.of_token = of_token

    def _check_sizes(self, found: Library, heads: int) -> None:
        if self.dtype not in found.dtypes:
            raise ValueError(f"The library does not read {self.dtype}.")
        if any(not size or size % 16 for size in self._sizes.values()):
            raise ValueError(f"The widths must be multiples of 16, got {list(self._sizes.values())}.")
        if self.inner % heads or not found.fits_head(self.inner // heads):
            raise ValueError(f"There cannot be {heads} heads of {self.inner} channels.")

    def _set(self, name: str, x: torch.Tensor) -> None:
        """Notes the address of a parameter."""
        group, _, part = name.rpartition(".")
        target = getattr(self._struct, group) if group else self._struct
        wanted = self.dtype
        if part == "weight" and x.dtype in _BITS:
            wanted, target.bits = x.dtype, _BITS[x.dtype]
        elif part == "scale":
            wanted = torch.bfloat16 if x.dim() == 3 else torch.float32
        if x.dtype != wanted or not x.is_cpu or not x.is_contiguous():
            raise ValueError(f"`{name}` must be contiguous, on the CPU and {wanted}.")
        if part == "weight":
            target.outputs, target.inputs = _shape(x)
            if (target.outputs, target.inputs) != self._matrix_shape(group):
                raise ValueError(f"`{name}` must be {self._matrix_shape(group)}, got {_shape(x)}.")
        elif part == "down":
            maps = 5 if group == "shift" else 1
            target.rank = x.shape[1] // maps
            if x.shape[0] != self.width or x.shape[1] % maps or x.shape[1] > _MOST_RANKS:
                raise ValueError(f"`{name}` is {tuple(x.shape)}.")
        elif part == "up":
            if x.numel() != (5 * target.rank * self.width if group == "shift" else target.rank * self.inner):
                raise ValueError(f"`{name}` is {tuple(x.shape)}.")
        else:
            of_inner = part == "base" or name in ("ln_x", "ln_x_bias", "bonus", "k_k", "k_a")
            size = self.inner if of_inner else self.width
            if part == "scale":
                outputs, inputs = self._matrix_shape(group)
                size = outputs * inputs // GROUP if x.dim() == 3 else outputs
            if x.numel() != size:
                raise ValueError(f"`{name}` must have {size} elements, got {tuple(x.shape)}.")
        setattr(target if group or hasattr(self._struct, part) else self._struct.common, part, x.data_ptr())

    def _matrix_shape(self, name: str) -> tuple[int, int]:
        width, inner, middle = self._sizes.values()
        return {
            "output": (width, inner),
            "ffn_key": (middle, width),
            "ffn_value": (width, middle),
            "ffn_receptance": (width, width),
        }.get(name, (inner, width))

    def __call__(
        self,
        x: torch.Tensor,
        before: torch.Tensor | None,
        before_ffn: torch.Tensor | None,
        state: torch.Tensor | None,
        inplace: bool,
        v_first: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """
        Args:
            x: (B, 1, D), contiguous, in `stream_dtype`.
            before, before_ffn: the normalised token before, of the two token shifts, (B, D); None means zeros.
            state: of the recurrence, float32 (B, H, K, V), or (B, H, V, K) of Goose; None means zeros.
            inplace: whether the new state is written into `state`.
            v_first: the values of the first block of Goose, (B, 1, H * V); None in that block.

        Returns:
            the output (B, 1, D); this token, normalised, for the next call's `before` and `before_ffn`; the new state;
            and in Goose `v_first`. None, and nothing is changed, if the arguments do not fit each other or the block.

        Raises:
            MemoryError: if there is no memory. The state may have been changed then.
        """
        rows, shift = x.shape[0], (x.shape[0], self.width)
        if (
            x.shape[1:] != (1, self.width)
            or (before is not None and before.shape != shift)
            or (before_ffn is not None and before_ffn.shape != shift)
            or (state is not None and state.shape != (rows, *self.state_shape))
            or (v_first is None) == self._mixes
            or (v_first is not None and v_first.shape != (rows, 1, self.inner))
        ):
            return None
        # A copy, because other threads may call the same block.
        p = type(self._struct).from_buffer_copy(self._struct)
        b = p.common
        out = torch.empty_like(x)
        after, after_ffn = (x.new_empty(rows, self.width, dtype=self.dtype) for _ in range(2))
        new_state = state
        if not inplace:
            new_state = x.new_empty((rows, *self.state_shape), dtype=torch.float32)
        b.threads, b.rows = torch.get_num_threads() if b.run else 1, rows
        b.x, b.out, b.after, b.after_ffn = x.data_ptr(), out.data_ptr(), after.data_ptr(), after_ffn.data_ptr()
        if before is not None:
            b.before = before.data_ptr()
        if before_ffn is not None:
            b.before_ffn = before_ffn.data_ptr()
        if state is not None:
            b.state = state.data_ptr()
        b.new_state = new_state.data_ptr()
        if type(p) is _DeltaBlock:
            if v_first is None:
                v_first = x.new_empty(rows, 1, self.inner, dtype=self.dtype)
            p.v_first = v_first.data_ptr()
        if self._run(ctypes.byref(p)):
            raise MemoryError("There is no memory for a token of a block.")
        return out, after, after_ffn, new_state, v_first
