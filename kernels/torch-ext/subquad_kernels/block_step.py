"""One token of a whole block of RWKV on a CPU, in one call of the C library of `native.py`."""

import ctypes

import torch

from .checks import check_stored
from .int4_linear import int4_layout
from .int8_linear import LARGEST, MOST_INPUTS, adds_exactly, int8_layout
from .native import STRIP, Library, library, readable


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


# The low ranks of a block, and into how many maps each is divided.
_MAPS = {"wkv": {"shift": 5, "decay": 1}, "delta_wkv": {"decay": 1, "rate": 1, "mix": 1, "gate": 1}}
# Of matrices of integers: their bits, and how they are stored.
_INTEGERS = {torch.int8: (8, int8_layout), torch.uint8: (4, int4_layout)}


def _shapes(kind: str, sizes: tuple[int, int, int], parameters: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """
    The shapes of all that a block has, matrices as (outputs, inputs). `parameters` are asked for the ranks, and for
    what some blocks do not have.

    Raises:
        ValueError: if there are low ranks with a part that is missing, or too many ranks.
    """
    width, inner, middle = sizes
    names = ["ln1", "ln1_bias", "ln2", "ln2_bias", "mu_r", "mu_k", "mu_v", "mu_g", "mu_ffn_key"]
    of_inner = ["ln_x", "ln_x_bias", "bonus", "decay.base"]
    shapes = dict.fromkeys((f"{name}.weight" for name in ("receptance", "key", "value")), (inner, width))
    shapes |= {"output.weight": (width, inner), "ffn_key.weight": (middle, width), "ffn_value.weight": (width, middle)}
    low_ranks = [name for name in _MAPS[kind] if f"{name}.up" in parameters]
    if kind == "wkv":
        names.append("mu_ffn_receptance")
        names += [mu for name, mu in (("shift", "mu_x"), ("decay", "mu_w")) if name in low_ranks]
        shapes |= {"gate.weight": (inner, width), "ffn_receptance.weight": (width, width)}
    else:
        names += ["mu_w", "mu_a"]
        of_inner += ["k_k", "k_a", "rate.base", *(["mix.base"] if "mix" in low_ranks else [])]
        low_ranks += [name for name in ("decay", "rate", "gate") if name not in low_ranks]
    for name in low_ranks:
        maps, down = _MAPS[kind][name], parameters.get(f"{name}.down")
        ranks = down.shape[-1] if down is not None and down.dim() else 0
        if not 0 < ranks <= _MOST_RANKS or ranks % maps:
            raise ValueError(f"`{name}.down` must have up to {_MOST_RANKS} columns for {maps} maps, got {ranks}.")
        shapes[f"{name}.down"] = (width, ranks)
        shapes[f"{name}.up"] = (maps, ranks // maps, width) if maps > 1 else (ranks, inner)
    return shapes | dict.fromkeys(names, (width,)) | dict.fromkeys(of_inner, (inner,))


def _address(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """
    Where a parameter begins.

    Raises:
        ValueError: if it is not what the library reads there, or does not lie within its storage.
    """
    check_stored(name, x, shape, dtype, torch.device("cpu"))
    if not readable(dtype, x):
        raise ValueError(f"`{name}` must be a plain tensor, whose memory holds its numbers, got {type(x).__name__}.")
    storage, address = x.untyped_storage(), x.data_ptr()
    if not storage.data_ptr() <= address <= address + x.nbytes <= storage.data_ptr() + storage.nbytes():
        raise ValueError(f"`{name}` must lie within its storage, which has {storage.nbytes()} bytes.")
    return address


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
        for name in ("ln1", "ln_x", "ffn_key.weight"):
            if name not in parameters or not parameters[name].dim():
                raise ValueError(f"There must be a tensor `{name}`.")
        self.width, self.inner = parameters["ln1"].shape[-1], parameters["ln_x"].shape[-1]
        key = parameters["ffn_key.weight"]
        sizes = self.width, self.inner, key.shape[0] * (STRIP if key.dtype == torch.uint8 else 1)
        self.dtype = parameters["ln1"].dtype
        self.stream_dtype = torch.float32 if self.dtype == torch.float16 else self.dtype
        self._check_sizes(found, heads, sizes)
        self._set_addresses(parameters, _shapes(kind, sizes, parameters), heads)
        common = self._struct.common
        common.dtype, common.stream = found.dtypes[self.dtype], found.dtypes[self.stream_dtype]
        common.largest = LARGEST if adds_exactly() else LARGEST // 2
        common.width, common.inner, common.middle = sizes
        common.heads, common.eps, common.eps_x = heads, eps, eps_x
        common.run = found.parallel
        self.state_shape = heads, self.inner // heads, self.inner // heads
        # Whether it reads the values of the first block of Goose.
        self._mixes = "mix.up" in parameters
        if kind == "wkv":
            self._struct.of_token = of_token

    def _check_sizes(self, found: Library, heads: int, sizes: tuple[int, int, int]) -> None:
        if self.dtype not in found.dtypes:
            raise ValueError(f"The library does not read {self.dtype}.")
        if any(not size or size % 16 for size in sizes):
            raise ValueError(f"The widths must be multiples of 16, got {list(sizes)}.")
        if heads < 1 or self.inner % heads or not found.fits_head(self.inner // heads):
            raise ValueError(f"There cannot be {heads} heads of {self.inner} channels.")

    def _set_addresses(
        self, parameters: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], heads: int
    ) -> None:
        """Notes the addresses of parameters of these shapes, which may have axes of length 1 in front."""
        left = dict(parameters)
        for name, shape in shapes.items():
            group, _, part = name.rpartition(".")
            target = getattr(self._struct, group) if group else self._struct
            if (x := left.pop(name, None)) is None:
                raise ValueError(f"There must be a tensor `{name}`.")
            if part == "weight" and x.dtype in _INTEGERS:
                if (scale := left.pop(f"{group}.scale", None)) is None:
                    raise ValueError(f"There must be a tensor `{group}.scale`.")
                target.bits, layout = _INTEGERS[x.dtype]
                if target.bits == 8 and shape[1] > MOST_INPUTS:
                    raise ValueError(f"`{name}` must have at most {MOST_INPUTS} inputs, got {shape[1]}.")
                stored, of_scale = layout(*shape)
                target.weight = _address(name, x, *stored)
                target.scale = _address(f"{group}.scale", scale, *of_scale)
            else:
                if len(shape) == 1:  # some are stored by heads, and some with axes for rows and tokens
                    by_heads = shape == (self.inner,) and x.shape == (heads, self.inner // heads)
                    shape = tuple(x.shape) if by_heads else (*(x.dim() - 1) * [1], *shape)
                owner = target if group or hasattr(target, part) else target.common
                setattr(owner, part, _address(name, x, shape, self.dtype))
            if part == "weight":
                target.outputs, target.inputs = shapes[name]
            elif part == "up":
                target.rank = x.shape[-2]
        if left:
            raise ValueError(f"Such a block has no {', '.join(f'`{name}`' for name in left)}.")

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
            v_first: the values of the first block of Goose, (B, 1, H * V); None in that block. All but x and state are
                in `dtype`, and all are contiguous.

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
            or not readable(self.stream_dtype, x)
            or not readable(torch.float32, state)
            or not readable(self.dtype, before, before_ffn, v_first)
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
