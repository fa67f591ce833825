"""
A CPU library for computations with few tokens and for all integer products, from the C files beside this one. The C
compiler of this machine makes it when the first computation of a worthwhile size is requested. If that fails,
`library` returns None.
"""

import ctypes
from pathlib import Path

import torch

from subquad_native.compiling import CompiledLibrary

from ..tracing import is_observed


# Up to this number of rows the library is used; above, torch's libraries are faster.
MOST_ROWS = 8
# Smaller weights use torch's products: they fit in caches, and tests of tiny models compile nothing.
WORTHWHILE = 2**15
# The same for the channels of operators between products.
WORTHWHILE_CHANNELS = 128
# From this number of elements on, all threads read a weight.
_FOR_THREADS = 2**18
_SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in ("block.c", "units.c", "steps.c", "integers.c", "products.c", "vectors.h")
)
# The largest size of a head, and its divisor: the length of the widest vectors.
_MOST, _LANES = 256, 16
# The largest number of slots of a head.
_MOST_SLOTS = 1024
# For weights of 4 bits: inputs that share a scale, and outputs stored together.
GROUP, STRIP = 32, 16
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Step(ctypes.Structure):
    """`struct step` of `steps.c`."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("dtype", "of_bonus")),
        *((name, ctypes.c_ssize_t) for name in ("rows", "heads", "keys", "values", "next")),
        *((name, ctypes.c_void_p) for name in ("r", "k", "v", "kappa", "a", "log_w")),
        ("static_decay", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("bonus", "state", "new_state", "indices")),
        ("states", ctypes.c_ssize_t),
        ("apart", ctypes.c_ssize_t),
        ("out", ctypes.c_void_p),
    ]


class _SlotStep(ctypes.Structure):
    """`struct slot_step` of `steps.c`."""

    _fields_ = [
        ("dtype", ctypes.c_int),
        *((name, ctypes.c_ssize_t) for name in ("rows", "heads", "slots", "keys", "values", "next")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "log_f", "state", "indices")),
        ("states", ctypes.c_ssize_t),
        ("apart", ctypes.c_ssize_t),
        ("out", ctypes.c_void_p),
    ]


class Library:
    """The functions of the library, which read the memory of tensors: callers must check them."""

    def __init__(self, path: Path):
        loaded = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
        self._linear, self._matmul = loaded.subquad_linear, loaded.subquad_matmul
        self._int8_linear = loaded.subquad_int8_linear
        self._int8_linear.argtypes = [*4 * [pointer], *3 * [size], ctypes.c_int, ctypes.c_uint, pointer]
        self._int4_linear = loaded.subquad_int4_linear
        self._int4_linear.argtypes = [*4 * [pointer], *3 * [size], ctypes.c_uint, pointer]
        self._round_rows, self._scale_sums = loaded.subquad_round_rows, loaded.subquad_scale_sums
        self._round_rows.argtypes = [*3 * [pointer], size, size, ctypes.c_int, ctypes.c_uint, pointer]
        self._scale_sums.argtypes = [*3 * [pointer], size, size, ctypes.c_uint, pointer]
        self._round_rows.restype = self._scale_sums.restype = None
        self._linear.argtypes = [ctypes.c_int, *4 * [pointer], *3 * [size], ctypes.c_uint, pointer]
        self._matmul.argtypes = [ctypes.c_int, *3 * [pointer], *4 * [size]]
        number = ctypes.c_int
        self._low_rank = loaded.subquad_low_rank
        self._low_rank.argtypes = [number, number, *5 * [pointer], *5 * [size], number, number, ctypes.c_float]
        self._step, self._token_shift = loaded.subquad_step, loaded.subquad_token_shift
        self._slot_step = loaded.subquad_slot_step
        self._step.argtypes = self._slot_step.argtypes = [pointer, ctypes.c_uint, pointer]
        self._token_shift.argtypes = [number, number, *5 * [pointer], *3 * [size]]
        self._delta_keys = loaded.subquad_delta_keys
        self._delta_keys.argtypes = [number, number, *6 * [pointer], *3 * [size]]
        self._group_norm_gate = loaded.subquad_group_norm_gate
        self._group_norm_gate.argtypes = [
            *2 * [number], *4 * [pointer], ctypes.c_float, pointer, number, pointer, *3 * [size],
        ]  # fmt: skip
        self._token_shift.restype = self._delta_keys.restype = self._group_norm_gate.restype = None
        loaded.subquad_int8_rows.restype = loaded.subquad_linear_rows.restype = size
        # The largest number of rows that `linear` supports.
        self.linear_rows: int = loaded.subquad_linear_rows()
        # Up to this number of rows `int8_linear` is faster than torch.
        self.int8_rows: int = loaded.subquad_int8_rows()
        self.dtypes = {x: n for x, n in _DTYPES.items() if x != torch.float16 or loaded.subquad_has_float16()}
        # One token of all blocks, by structures of `fused_blocks.py`.
        self.wkv_blocks, self.delta_blocks = loaded.subquad_wkv_blocks, loaded.subquad_delta_blocks
        self.wkv_blocks.argtypes = self.delta_blocks.argtypes = [pointer, size, pointer]
        # A copy of a matrix of these, by unit.
        self.bytes_by_unit, self.copy_by_unit = loaded.subquad_bytes_by_unit, loaded.subquad_copy_by_unit
        self.bytes_by_unit.argtypes = [pointer, number]
        self.copy_by_unit.argtypes = [pointer, number, pointer, ctypes.c_uint, pointer]
        self.bytes_by_unit.restype = size
        # From the OpenMP that torch has loaded: threads of another one would disturb it.
        self._parallel = ctypes.cast(getattr(ctypes.CDLL(None), "GOMP_parallel", None), pointer)

    @property
    def parallel(self) -> int:
        """The address of `GOMP_parallel`, 0 if there is none."""
        return self._parallel.value or 0

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """
        x (..., in) times weight (out, in), transposed, plus bias (out): (..., out). None if there is no memory, or if
        several threads are needed and torch uses another threading library.
        """
        outputs, width = weight.shape
        threads = torch.get_num_threads() if weight.numel() >= _FOR_THREADS else 1
        if threads > 1 and not self._parallel:
            return None
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], outputs))
        failed = self._linear(
            self.dtypes[x.dtype], x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
            out.data_ptr(), x.numel() // width, outputs, width, threads, self._parallel,
        )  # fmt: skip
        return None if failed else out

    def int8_linear(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, largest: int
    ) -> torch.Tensor | None:
        """[`subquad_kernels.int8_linear`] of x in float32, rounded to integers up to `largest`, without a bias."""
        outputs, width = weight.shape
        threads = torch.get_num_threads() if weight.numel() >= _FOR_THREADS else 1
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], outputs))
        failed = self._int8_linear(
            x.data_ptr(), weight.data_ptr(), scale.data_ptr(), out.data_ptr(),
            x.numel() // width, outputs, width, largest, threads, self._parallel,
        )  # fmt: skip
        return None if failed else out

    def int4_linear(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
        """[`subquad_kernels.int4_linear`] of x in float32, without a bias. None if there is no memory."""
        width = x.shape[-1]
        outputs = 2 * weight.numel() // width
        threads = torch.get_num_threads() if outputs * width >= _FOR_THREADS else 1
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], outputs))
        failed = self._int4_linear(
            x.data_ptr(), weight.data_ptr(), scale.data_ptr(), out.data_ptr(),
            x.numel() // width, outputs, width, threads, self._parallel,
        )  # fmt: skip
        return None if failed else out

    def round_rows(self, x: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[`subquad_kernels.quantize_rows`] of x in float32."""
        x = x.contiguous()
        integers, scale = x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[0])
        threads = torch.get_num_threads() if x.numel() >= _FOR_THREADS else 1
        pointers = x.data_ptr(), integers.data_ptr(), scale.data_ptr()
        self._round_rows(*pointers, *x.shape, largest, threads, self._parallel)
        return integers, scale

    def scale_sums(self, sums: torch.Tensor, row_scale: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """sums, contiguous int32 (rows, outputs), times row_scale (rows) and scale (outputs), in place."""
        threads = torch.get_num_threads() if sums.numel() >= _FOR_THREADS else 1
        pointers = sums.data_ptr(), row_scale.data_ptr(), scale.data_ptr()
        self._scale_sums(*pointers, *sums.shape, threads, self._parallel)
        return sums.view(torch.float32)

    def matmul(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """
        x (..., k) times y (k, m), or x (..., n, k) times y (..., k, m) of the same dimensions: (..., m). None if there
        is no memory.
        """
        width, outputs = y.shape[-2:]
        batches = y.numel() // (width * outputs)
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], outputs))
        rows = x.numel() // (width * batches)
        pointers = x.data_ptr(), y.data_ptr(), out.data_ptr()
        failed = self._matmul(self.dtypes[x.dtype], *pointers, batches, rows, width, outputs)
        return None if failed else out

    def low_rank(
        self,
        x: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        base: torch.Tensor | None,
        inner: int,
        outer: int,
        scale: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """[`subquad_kernels.low_rank`]. None if there is no memory."""
        groups, (rank, outputs) = up.shape[0] if up.dim() == 3 else 1, up.shape[-2:]
        width = x.shape[-1]
        out = x.new_empty((*up.shape[:-2], *x.shape[:-1], outputs), dtype=out_dtype)
        failed = self._low_rank(
            self.dtypes[x.dtype], self.dtypes[out_dtype], x.data_ptr(), down.data_ptr(), up.data_ptr(), _address(base),
            out.data_ptr(), x.numel() // width, width, groups, rank, outputs, inner, outer, scale,
        )  # fmt: skip
        return None if failed else out

    @staticmethod
    def fits_head(size: int) -> bool:
        """Whether a head may have this many keys or values."""
        return size % _LANES == 0 and size <= _MOST

    def step(
        self,
        r: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_w: torch.Tensor,
        kappa: torch.Tensor | None,
        a: torch.Tensor | None,
        bonus: torch.Tensor | None,
        state: torch.Tensor | None,
        new_state: torch.Tensor,
        indices: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """
        One token of [`subquad_kernels.delta_wkv`], or without `kappa` of [`subquad_kernels.wkv`], to float32. The new
        state is written to `new_state`. None if an index is outside the pool.
        """
        batch, _, heads, keys = k.shape
        values = v.shape[-1]
        out = torch.empty_like(v, dtype=torch.float32)
        p = _Step(
            self.dtypes[v.dtype], 0 if bonus is None else self.dtypes[bonus.dtype], batch, heads, keys, values, 0,
            r.data_ptr(), k.data_ptr(), v.data_ptr(), _address(kappa), _address(a), log_w.data_ptr(),
            log_w.dim() == 2, _address(bonus), _address(state), new_state.data_ptr(), _address(indices),
            new_state.shape[0], new_state.stride(0), out.data_ptr(),
        )  # fmt: skip
        threads = torch.get_num_threads() if batch * heads * keys * values >= _FOR_THREADS else 1
        failed = self._step(ctypes.byref(p), threads, self._parallel)
        return None if failed else out

    def group_norm_gate(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        added: torch.Tensor | None,
        eps: float,
        silu: bool,
    ) -> torch.Tensor:
        """[`subquad_kernels.group_norm_gate`] of x and `added` in float32."""
        heads, size = x.shape[-2:]
        out = torch.empty_like(gate)
        self._group_norm_gate(
            self.dtypes[gate.dtype], self.dtypes[weight.dtype], x.data_ptr(), gate.data_ptr(), weight.data_ptr(),
            bias.data_ptr(), eps, _address(added), silu, out.data_ptr(), x.numel() // (heads * size), heads, size,
        )  # fmt: skip
        return out

    @staticmethod
    def fits_slots(slots: int) -> bool:
        """Whether a head may have this many slots."""
        return slots <= _MOST_SLOTS

    def slot_step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_f: torch.Tensor,
        state: torch.Tensor,
        indices: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """One token of [`subquad_kernels.slot_memory`], which changes the states. None if an index is outside."""
        (batch, _, heads, keys), values, slots = k.shape, v.shape[-1], log_f.shape[-1]
        out = torch.empty_like(v)
        p = _SlotStep(
            self.dtypes[v.dtype], batch, heads, slots, keys, values, 0,
            q.data_ptr(), k.data_ptr(), v.data_ptr(), log_f.data_ptr(), state.data_ptr(), _address(indices),
            state.shape[0], state.stride(0), out.data_ptr(),
        )  # fmt: skip
        threads = torch.get_num_threads() if batch * heads * slots * (keys + values) >= _FOR_THREADS else 1
        failed = self._slot_step(ctypes.byref(p), threads, self._parallel)
        return None if failed else out

    def token_shift(
        self, x: torch.Tensor, state: torch.Tensor | None, mu: torch.Tensor, offset: torch.Tensor | None
    ) -> torch.Tensor:
        """One token of [`subquad_kernels.token_shift`]."""
        number, width = mu.shape
        out = x.new_empty((number, *x.shape))
        self._token_shift(
            self.dtypes[x.dtype], self.dtypes[mu.dtype], x.data_ptr(), _address(state), mu.data_ptr(),
            _address(offset), out.data_ptr(), number, x.shape[0], width,
        )  # fmt: skip
        return out

    def delta_keys(
        self, k: torch.Tensor, a: torch.Tensor, scale: torch.Tensor, mix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[`subquad_kernels.delta_keys`]."""
        heads, size = k.shape[-2:]
        removed, written = torch.empty_like(k), torch.empty_like(k)
        tensors = k, a, scale, mix, removed, written
        rows = k.numel() // (heads * size)
        self._delta_keys(*2 * [self.dtypes[k.dtype]], *(x.data_ptr() for x in tensors), rows, heads, size)
        return removed, written


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def readable(dtype: torch.dtype, *tensors: torch.Tensor | None) -> bool:
    """Whether all tensors that are not None are contiguous in CPU memory, in a real dtype."""
    return all(x is None or (x.dtype == dtype and x.is_contiguous() and in_memory(x)) for x in tensors)


def in_memory(x: torch.Tensor) -> bool:
    """
    Whether a tensor of a real dtype is a plain one with its values in CPU memory. (torch negates a negative view only
    when it is read.)
    """
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.is_cpu and not x.is_neg()


def library_for(channels: int, dtype: torch.dtype, *tensors: torch.Tensor | None) -> Library | None:
    """The library, if it may read these tensors of a dtype, and rows of this many channels are worthwhile."""
    if channels < WORTHWHILE_CHANNELS or is_observed() or not readable(dtype, *tensors):
        return None
    found = library()
    return found if found and dtype in found.dtypes else None


def library_for_heads(tensors: tuple[torch.Tensor | None, ...]) -> Library | None:
    """[`library_for`] with the channels of the first tensor's last two dimensions, heads and their size."""
    heads, size = tensors[0].shape[-2:]
    if not Library.fits_head(size):
        return None
    return library_for(heads * size, tensors[0].dtype, *tensors)


_COMPILED = CompiledLibrary("steps", _SOURCES, Library)


def library() -> Library | None:
    """The library, compiled by the first call if no process has done so. None if it is not available."""
    return _COMPILED.get()


def explain() -> tuple[Library | None, str]:
    """The library or None, and the reason."""
    return _COMPILED.explain()
