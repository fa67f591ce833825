"""The choice of the backend, and the launch of kernels."""

import pytest
import torch
from kernel_cases import DEVICE

from subquad_kernels.backend import without_autocast


@pytest.mark.fast
def test_autocast_is_turned_off_in_a_graph(monkeypatch):
    """Some versions of torch cannot trace the question whether a device has autocast."""
    monkeypatch.setattr(torch.amp, "is_autocast_available", torch.compiler.disable(torch.amp.is_autocast_available))

    @torch.compile(fullgraph=True, backend="eager")
    def product(x):
        with without_autocast(x):
            return x @ x

    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert product(torch.ones(2, 2, device=DEVICE)).dtype == torch.float32
    assert product(torch.ones(2, 2, device="meta")).device.type == "meta"
