"""A GPU for the benchmarks where there is none: tensors lie on the CPU, the rest of `torch.cuda` is made up."""

import contextlib
import gc
import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode


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
    def wait_stream(self, other):
        assert isinstance(other, Stream)


class Graph:
    """Replays what was called last while it was captured: nothing."""

    def replay(self):
        assert self.captured


@contextlib.contextmanager
def capture(graph):
    yield
    graph.captured = True


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
        **{"Event": Event, "Stream": Stream, "current_stream": Stream, "CUDAGraph": Graph, "graph": capture},
        **{"is_available": lambda: True, "get_device_name": lambda: "no GPU", "stream": contextlib.nullcontext},
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
