"""
Watches what kernels do with memory in Triton's interpreter.

`traced()` notes, while its block runs:

- accesses outside of the tensors that a launch was given. Tensors without storage (on the meta device) have addresses,
  too: they can be larger than memory, so that numbers of 32 bits overflow;
- grids that are larger than a GPU allows;
- addresses that one program writes and another one writes or reads in the same launch;
- loads of what the same program has stored without a barrier in between: another thread may have stored it.
"""

import contextlib
import functools
import inspect
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


MOST = (2**31 - 1, 65535, 65535)  # programs along the axes of a grid
APART = 1 << 44  # between the addresses of tensors without storage
Grid = tuple[int, ...]


@dataclass
class Range:
    """The memory of an argument."""

    name: str
    begin: int
    end: int
    is_real: bool


@dataclass
class Trace:
    """What was found, and how often: "operator.kernel, what, argument"."""

    found: Counter = field(default_factory=Counter)
    kernels: set[str] = field(default_factory=set)
    places: dict[int, tuple[int, torch.UntypedStorage]] = field(default_factory=dict)
    # Of the launch that runs.
    kernel: str = ""
    ranges: list[Range] = field(default_factory=list)
    reads: list[tuple[int, np.ndarray]] = field(default_factory=list)
    writes: list[tuple[int, np.ndarray]] = field(default_factory=list)
    program: int = 0
    stored: list[np.ndarray] = field(default_factory=list)  # since the last barrier

    def note(self, what: str, address: int) -> None:
        near = min(self.ranges, key=lambda range: max(range.begin - address, address - range.end + 1))
        self.found[f"{self.kernel}, {what}, {near.name}"] += 1

    def range_of(self, name: str, x: torch.Tensor) -> Range:
        storage = x.untyped_storage()
        if x.device.type != "meta":
            return Range(name, storage.data_ptr(), storage.data_ptr() + storage.nbytes(), True)
        begin, _ = self.places.setdefault(storage._cdata, (APART * (len(self.places) + 1), storage))
        return Range(name, begin, begin + storage.nbytes(), False)

    def accessible(self, addresses: np.ndarray, width: int, what: str) -> Range | None:
        """The range that all addresses are in; None if there is not one, and then why is noted."""
        low, high = int(addresses.min()), int(addresses.max()) + width
        for range in self.ranges:
            if range.begin <= low and high <= range.end:
                return range
        outside = np.ones(addresses.shape, bool)
        for range in self.ranges:
            outside &= ~((addresses >= range.begin) & (addresses <= range.end - width))
        if outside.any():
            self.note(f"{what} out of bounds", int(addresses[outside][0]))
        return None

    def load(self, addresses: np.ndarray) -> None:
        for stored in self.stored:
            if stored[0] <= addresses[-1] and addresses[0] <= stored[-1]:
                both = np.intersect1d(addresses, stored, assume_unique=True)
                if both.size:
                    self.note("loaded after a store without a barrier", int(both[0]))
        self.reads.append((self.program, addresses))

    def store(self, addresses: np.ndarray) -> None:
        self.stored.append(addresses)
        self.writes.append((self.program, addresses))

    def compare_programs(self) -> None:
        """Finds what two programs wrote, and what one wrote and another one read."""

        def joined(accesses):
            """Addresses and their programs, each pair once."""
            numbers = [(addresses - lowest) * np.uint64(count) + np.uint64(program) for program, addresses in accesses]
            pairs = np.unique(np.concatenate(numbers))
            return pairs // np.uint64(count) + lowest, pairs % np.uint64(count)

        if not self.writes or self.program == 0:
            return
        lowest = np.uint64(min(addresses[0] for _, addresses in (*self.writes, *self.reads)))
        count = self.program + 1
        addresses, programs = joined(self.writes)
        twice = addresses[1:][addresses[1:] == addresses[:-1]]
        if twice.size:
            self.note("two programs write", int(twice[0]))
        if self.reads:
            read, readers = joined(self.reads)
            places = np.searchsorted(addresses, read).clip(max=len(addresses) - 1)
            other = read[(addresses[places] == read) & (programs[places] != readers)]
            if other.size:
                self.note("one program reads what another one writes", int(other[0]))


def corners(grid: Grid) -> list[Grid]:
    """The first and the last program, and one of the others."""
    between = random.Random(0)
    return sorted({tuple(0 for _ in grid), tuple(n - 1 for n in grid), tuple(between.randrange(n) for n in grid)})


def every(grid: Grid) -> Iterator[Grid]:
    return itertools.product(*map(range, grid))


def _values(x) -> tuple[int, bool]:
    """A bound of a loop, and whether it has 64 bits."""
    if isinstance(x, tl.tensor):
        return int(x.handle.data.reshape(-1)[0]), x.handle.data.dtype.itemsize == 8
    return int(getattr(x, "value", x)), False


def _range(*bounds, few: bool = False, **options):
    """
    The variable of a loop has as many bits as on a GPU; a number of Python would have 64. Of the steps of a loop a
    `few` are the first two, one in the middle, and the last two.
    """
    bounds, wide = zip(*map(_values, bounds), strict=True)
    dtype, kind = (np.int64, tl.int64) if any(wide) else (np.int32, tl.int32)
    steps = range(*bounds)
    if few and len(steps) > 5:
        steps = [steps[n] for n in (0, 1, len(steps) // 2, -2, -1)]
    for n in steps:
        yield tl.tensor(interpreter.TensorHandle(np.array([n], dtype=dtype), kind), kind)


@contextlib.contextmanager
def traced(package: str, programs: Callable[[Grid], Iterator[Grid]] = every) -> Iterator[Trace]:
    """
    Traces the launches of a package of kernels.

    Args:
        package: whose loops count as on a GPU.
        programs: those of a grid that run. If these are not all, few steps of their loops run, too.
    """
    trace = Trace()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    whole, patch = programs is every, interpreter._patch_lang
    steps, usual = functools.partial(_range, few=not whole), tl.range
    load, store, barrier, call = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.create_barrier,
        executor.__call__,
    )

    def patch_lang(function):
        """The interpreter replaces the language again and again, or once for every module of a kernel."""
        nonlocal usual
        scope = patch(function)
        if tl.range is not steps:
            tl.range, usual = steps, tl.range
        return scope

    def width_of(pointers):
        return np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize

    def masked(pointers, mask):
        return pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)]

    def masked_load(self, pointers, mask, other, *options):  # how to cache differs between versions
        addresses, range = masked(pointers, mask), None
        if addresses.size:
            range = trace.accessible(addresses, width_of(pointers), "load")
            if whole:
                trace.load(np.unique(addresses))
        if range is not None and range.is_real:
            return load(self, pointers, mask, other, *options)
        kind = pointers.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        data = np.zeros(pointers.data.shape, dtype)
        if other is not None:
            data = np.where(mask.data.astype(bool), data, other.data).astype(dtype)
        return interpreter.TensorHandle(data, kind)

    def masked_store(self, pointers, value, mask, *options):
        addresses = masked(pointers, mask)
        if not addresses.size:
            return
        range = trace.accessible(addresses, width_of(pointers), "store")
        if whole:
            trace.store(np.unique(addresses))
        if range is not None and range.is_real:
            store(self, pointers, value, mask, *options)

    def run(self, *args, **options):
        names = inspect.getfullargspec(self.fn)
        options = {name: x for name, x in options.items() if name in (*names.args, *names.kwonlyargs)}
        trace.kernel = ".".join([*self.fn.__module__.split(".")[1:2], self.fn.__name__])
        trace.kernels.add(trace.kernel)
        trace.ranges, trace.reads, trace.writes = [], [], []
        arguments = {}
        for name, x in inspect.getcallargs(self.fn, *args, **options).items():
            if isinstance(x, torch.Tensor):
                range = trace.range_of(name, x)
                trace.ranges.append(range)
                address = range.begin + x.storage_offset() * x.element_size()
                kind = tl.pointer_type(tl.int1 if x.dtype == torch.bool else getattr(tl, str(x.dtype)[6:]))
                handle = interpreter.TensorHandle(np.array([address], dtype=np.uint64), kind)
                arguments[name] = tl.tensor(handle, kind)
            else:
                arguments[name] = x if name in self.constexprs else interpreter._implicit_cvt(x)
        grid = (*self.grid, 1, 1)[:3]
        if any(n > most for n, most in zip(grid, MOST, strict=True)):
            trace.found[f"{trace.kernel}, grid {grid} is too large"] += 1
        modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == package]
        patched = interpreter._patch_lang(self.fn)
        for module in modules:
            module.range = steps
        try:
            interpreter.interpreter_builder.set_grid_dim(*grid)
            for trace.program, place in enumerate(programs(grid)):
                trace.stored = []
                interpreter.interpreter_builder.set_grid_idx(*place)
                self.fn(**arguments)
        finally:
            for module in modules:
                del module.range
            if patched is not None:  # Triton 3.4 replaces the language for good
                patched.restore()
        if whole:
            trace.compare_programs()

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    builder.create_barrier = lambda self: trace.stored.clear()
    executor.__call__, interpreter._patch_lang = run, patch_lang
    try:
        yield trace
    finally:
        builder.create_masked_load, builder.create_masked_store, builder.create_barrier = load, store, barrier
        executor.__call__, interpreter._patch_lang = call, patch
        if tl.range is steps:
            tl.range = usual
