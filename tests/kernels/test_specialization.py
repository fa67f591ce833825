"""No kernel of Eagle, Finch, Goose and Raven is compiled again because a text is longer or shorter."""

import inspect

import pytest
import torch
from kernel_cases import TRITON, unspecialized


BATCH, HEADS, SIZE = 2, 4, 64
WIDTH = HEADS * SIZE


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def run_wkv(kernels, length):
    from subquad_kernels.wkv.masks import masks_for

    x, u, state = empty(BATCH, length, HEADS, SIZE), empty(HEADS, SIZE), empty(BATCH, HEADS, SIZE, SIZE)
    inputs = x, x, x, x, u, state, None, masks_for(x, x, x), torch.float32
    kernels.wkv_triton(*inputs)
    kernels.wkv_triton_backward(x, state, *inputs)


def run_delta_wkv(kernels, length):
    x, state = empty(BATCH, length, HEADS, SIZE), empty(BATCH, HEADS, SIZE, SIZE)
    inputs = x, x, x, x, x, x, state, None, torch.float32
    passed = kernels.delta_wkv_triton(*inputs)[2]
    kernels.delta_wkv_triton_backward(x, state, passed, *inputs)


def run_token_shift(kernels, length):
    x, state, mu, starts = empty(BATCH, length, WIDTH), empty(BATCH, WIDTH), empty(5, WIDTH), empty(BATCH, length)
    inputs = x, state, mu, empty(5, *x.shape), starts.bool()
    kernels.token_shift_triton(*inputs)
    kernels.token_shift_triton_backward(empty(5, *x.shape), *inputs)


def run_group_norm_gate(kernels, length):
    x, gate, weight = empty(BATCH, length, HEADS, SIZE), empty(BATCH, length, WIDTH), empty(WIDTH)
    inputs = x, gate, weight, weight, x, 1e-5, False
    kernels.group_norm_gate_triton(*inputs)
    kernels.group_norm_gate_triton_backward(gate, *inputs)


def run_slot_memory(kernels, length, documents=0):
    q, log_f = empty(1, length, 2, 16), empty(1, length, 2, 20, dtype=torch.float32)
    cu_seqlens = empty(documents + 1, dtype=torch.int64) if documents else None
    out, state, logits = kernels.slot_memory_triton(q, q, q, log_f, None, cu_seqlens)
    kernels.slot_memory_triton_backward(out, state, logits, q, q, q, log_f, None, cu_seqlens)
    kernels.slot_memory_triton_state(q, q, log_f, state, cu_seqlens)


def run_packed_slot_memory(kernels, length):
    run_slot_memory(kernels, length, 3)


def run_slot_routing(kernels, length):
    logits = empty(1, length, 2, 20)
    inputs = logits, logits[..., 0], 5, None, "sigmoid", 1.0
    kernels.slot_routing_triton(*inputs)
    kernels.slot_routing_triton_backward(logits, *inputs)


def variant(kernel, grid, *arguments, **constants):
    """What Triton compiles a kernel for: constants, dtypes, and special values of the numbers."""
    function = getattr(kernel, "fn", kernel)
    parameters = inspect.signature(function).parameters.values()
    found = [function.__name__, *sorted(constants.items())]
    for parameter, x in zip(parameters, arguments, strict=False):
        if isinstance(x, torch.Tensor):
            found.append(x.dtype)
        elif "constexpr" in str(parameter.annotation) or not isinstance(x, int):
            found.append(x)
        elif parameter.name not in unspecialized(kernel):
            found.append((x == 1, x % 16 == 0))
    return tuple(found)


# Lengths of sequences that are walked through, and that are cut into segments.
LENGTHS = range(1, 101), (1024, 1535, 2048, 4097, 10000)


@TRITON
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("operator", "run"),
    [
        ("delta_wkv", run_delta_wkv),
        ("wkv", run_wkv),
        ("token_shift", run_token_shift),
        ("group_norm_gate", run_group_norm_gate),
        ("slot_memory", run_slot_memory),
        ("slot_memory", run_packed_slot_memory),
        ("slot_routing", run_slot_routing),
    ],
)
def test_a_length_compiles_nothing(operator, run, lengths, monkeypatch):
    kernels = pytest.importorskip(f"subquad_kernels.{operator}.triton_kernels")
    variants = set()
    monkeypatch.setattr(kernels, "launch", lambda *given, **constants: variants.add(variant(*given, **constants)))
    monkeypatch.setattr(kernels, "multiprocessors", lambda x: 132, raising=False)
    run(kernels, lengths[0])
    first = set(variants)
    for length in lengths:
        run(kernels, length)
    assert variants == first
