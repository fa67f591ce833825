"""The memory that operations allocate, also for tensors without storage."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """
    Counts tensors that are made inside.

    Attributes:
        bytes: of those that live.
        peak: the most bytes that lived at one time.
    """

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        storages = [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        for address, storage in {x._cdata: x for x in storages}.items():
            if address not in given:
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return out

    def _free(self, size):
        self.bytes -= size
