"""A GPU for the benchmarks where there is none: tensors lie on the CPU, the rest of `torch.cuda` is made up."""

import contextlib
import gc
import itertools
import threading
import time
import weakref
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def on_cpu(device):
    """What stands for a device."""
    return "cpu" if str(device).startswith("cuda") else device


class OnCPU(TorchFunctionMode):
    """Every tensor for the GPU is made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if function is torch.Tensor.to:
            args = tuple(on_cpu(x) if isinstance(x, (str, torch.device)) else x for x in args)
        return function(*args, **kwargs)


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return (end.time - self.time) * 1e3


class Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        assert isinstance(other, Stream)


STREAM = Stream()


class Graph:
    """
    Replays the operations that were called while it was captured, as a GPU does: with the memory that they had then,
    which must still be there.
    """

    def capture_begin(self, pool):
        self.memory = (0, id(self)) if pool is None else pool
        self.recording = Recording()

    def pool(self):
        return self.memory

    def replay(self):
        self.recording.replay()


def _address(x):
    return x.untyped_storage().data_ptr()


class Outside:
    """A tensor that was there before the capture. The graph does not keep it alive."""

    def __init__(self, x):
        self.tensor, self.address = weakref.ref(x), x.data_ptr()

    def find(self):
        x = self.tensor()
        assert x is not None and x.data_ptr() == self.address, "a graph reads memory that is gone"
        return x


class Recording(TorchDispatchMode):
    """Collects operations. What they have computed is not there until they are replayed."""

    # Operations that wait for the device, or copy numbers of Python to it.
    WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh", "aten::masked_select"}

    def __init__(self):
        super().__init__()
        # Operations, their arguments, and the numbers of their results; these by number if they have memory of their
        # own; the numbers of tensors, while they are recorded; the memory that was there before.
        self.calls, self.own, self.numbers, self.before = [], {}, {}, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in self.WAITS:
            raise RuntimeError(f"{function} is not permitted while a stream is captured")
        flat, spec = tree_flatten((args, kwargs or {}))
        given = [x for x in flat if isinstance(x, torch.Tensor)]
        for x in given if function._schema.is_mutable else ():
            self.before.setdefault(_address(x), (x.untyped_storage(), x.untyped_storage().clone()))
        places = [self.place(x) for x in flat]
        out = function(*args, **(kwargs or {}))
        held = {_address(x) for x in given}
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        for x in made:
            number = self.numbers.setdefault(id(x), (len(self.numbers), x))[0]
            if _address(x) not in held:
                self.own[number] = x
        self.calls.append((function, places, spec, [self.numbers[id(x)][0] for x in made]))
        return out

    def launch(self, run, *args, **named):
        """A Triton kernel, which the interpreter runs. It may write to all that it is given."""
        if not torch._C._len_torch_dispatch_stack():  # within an operator, which is recorded as a whole
            return run(*args, **named)
        flat, spec = tree_flatten((args, named))
        self.calls.append((run, [self.place(x) for x in flat], spec, []))
        with _disable_current_modes():
            for x in (x for x in flat if isinstance(x, torch.Tensor)):
                self.before.setdefault(_address(x), (x.untyped_storage(), x.untyped_storage().clone()))
            run(*args, **named)

    def place(self, x):
        """Where an argument is found at a replay."""
        if not isinstance(x, torch.Tensor):
            return x
        return Number(self.numbers[id(x)][0]) if id(x) in self.numbers else Outside(x)

    def __exit__(self, *error):
        super().__exit__(*error)
        for storage, before in self.before.values():
            storage.copy_(before)
        for x in self.own.values():
            if x.is_floating_point():
                x.fill_(torch.nan)
        self.numbers = self.before = None

    def replay(self):
        tensors = dict(self.own)
        for function, places, spec, numbers in self.calls:
            args, kwargs = tree_unflatten([self.find(place, tensors) for place in places], spec)
            made = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            for number, x in zip(numbers, made, strict=True):
                if number in self.own:
                    self.own[number].copy_(x)
                else:
                    tensors[number] = x

    @staticmethod
    def find(place, tensors):
        return tensors[place] if isinstance(place, Number) else place.find() if isinstance(place, Outside) else place


class Number(int):
    """The number of a tensor that was made while a graph was captured."""


@contextlib.contextmanager
def capture(graph, pool=None, stream=None, capture_error_mode="global"):
    graph.capture_begin(pool)
    thread, is_compiling = threading.get_ident(), torch.compiler.is_compiling
    with pytest.MonkeyPatch.context() as patch, graph.recording:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: threading.get_ident() == thread)
        # Tensors are on the CPU, so nobody asks about the stream. A compiler may not look at values either.
        patch.setattr(torch.compiler, "is_compiling", lambda: threading.get_ident() == thread or is_compiling())
        if find_spec("triton") is not None:
            from triton.runtime.interpreter import GridExecutor

            run, record = GridExecutor.__call__, graph.recording.launch
            patch.setattr(GridExecutor, "__call__", lambda *args, **named: record(run, *args, **named))
        yield


# What captures and replays.
GRAPHS = {
    **{"Stream": Stream, "current_stream": lambda device=None: STREAM, "stream": contextlib.nullcontext},
    **{"CUDAGraph": Graph, "graph": capture, "is_current_stream_capturing": lambda: False},
}


@contextlib.contextmanager
def fake_graphs():
    """Code inside finds CUDA graphs, also for tensors on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in GRAPHS.items():
            patch.setattr(torch.cuda, name, value)
        yield


@contextlib.contextmanager
def profile(activities):
    """One kernel."""
    events = [SimpleNamespace(key="kernel", count=3, self_device_time_total=1.0)]
    yield SimpleNamespace(key_averages=lambda: events)


class Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, on_cpu(device))


@contextlib.contextmanager
def fake_gpu():
    """Code inside finds a GPU. Nothing is compiled: that of torch for a CPU would say nothing about one."""
    allocated = itertools.count(2**20, 2**20)

    def autocast(device, *how, **named):
        return real_autocast(on_cpu(device), *how, **named)

    real_autocast = torch.autocast
    numbers = ("memory_allocated", "max_memory_allocated")
    cuda = {
        **{name: lambda: next(allocated) for name in numbers},
        **dict.fromkeys(("synchronize", "reset_peak_memory_stats", "empty_cache"), lambda: None),
        **GRAPHS,
        **{"Event": Event, "is_available": lambda: True, "get_device_name": lambda: "no GPU"},
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=2**10),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch, "autocast", autocast)
        patch.setattr(torch, "compile", lambda function, **how: function)
        patch.setattr(torch.profiler, "profile", profile)
        patch.setattr(gc, "collect", lambda: None)  # for memory of the GPU, a quarter of a second each
        with OnCPU():
            yield
