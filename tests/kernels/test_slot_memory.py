"""What is special about the slot memory."""

import pytest
import torch
from kernel_cases import (
    DEVICE,
    PLAIN,
    TRITON,
    assert_like_reference,
    relative_error,
    triton,
)
from kernel_cases.slot_memory import OPERATOR, make

from subquad_kernels import slot_memory, slot_memory_state


EVERY = pytest.mark.parametrize("backend", [*PLAIN, triton])


@EVERY
@pytest.mark.parametrize("length", [1, 5, 70])
def test_slots_not_written_keep_their_bits(length, backend):
    inputs = make(2, length, heads=1, decay="dense")
    kept = torch.tensor([1, 2, 5, 11], device=DEVICE)
    inputs["log_f"][..., kept] = 0
    before = inputs["initial_state"].clone()
    for inplace in (False, True):
        with torch.no_grad():
            state = slot_memory(**inputs, inplace=inplace, backend=backend)[1]
        assert torch.equal(state[:, :, kept], before[:, :, kept])
        assert not torch.equal(state, before)
    assert torch.equal(
        slot_memory_state(before, inputs["k"], inputs["v"], inputs["log_f"], backend=backend)[:, :, kept],
        before[:, :, kept],
    )


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU blocks have one token, as finding their size would wait for it")
@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("documents", [None, (250, 0, 64)])
def test_sizes_of_blocks_in_plain_torch(block, documents, monkeypatch):
    """The decays of each size of the smallest blocks come close to the limit, and pass it in blocks twice as long."""
    eager = OPERATOR.module("eager")
    found = []

    def noting(log_f, decays):
        found.append(decays.block)
        return writes(log_f, decays)

    writes = eager._Writes
    monkeypatch.setattr(eager, "_Writes", noting)
    inputs = make(2, 250, heads=1, decay="dense", documents=documents)
    inputs["log_f"] = inputs["log_f"].clamp_min(-0.1) * 0.1
    inputs["log_f"][:, 1::7, :, 3:5] = 0.95 * eager.LIMIT / block
    inputs["log_f"][:, :, :, 7] = 0.95 * eager.LIMIT / block
    assert_like_reference(OPERATOR, inputs, "eager")
    assert found == [block, block]


@EVERY
def test_replaced_slots_are_a_sliding_window(backend):
    slots, length = 12, 70
    inputs = make(1, length, slots=slots, decay="window")
    del inputs["initial_state"]
    out = slot_memory(**inputs, backend=backend)[0]
    q, k, v = (inputs[name].double().transpose(1, 2) for name in ("q", "k", "v"))
    age = torch.arange(length)[:, None] - torch.arange(length)
    mask = ((age >= 0) & (age < slots)).to(DEVICE)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).transpose(1, 2)
    assert relative_error(out[:, slots - 1 :], expected[:, slots - 1 :]) < 1e-5


@TRITON
@pytest.mark.parametrize(("slots", "size"), [(12, 8), (40, 64), (130, 16), (256, 256)])
def test_no_columns_are_shared_by_warps_that_are_too_narrow(slots, size, monkeypatch):
    """Eight warps share the columns of 64 rows of bfloat16 in halves, which must have 64 columns, see `pipeline`."""
    from subquad_kernels.slot_memory import triton_kernels

    columns = {"_walk_kernel": "BF", "_slots_kernel": "BM", "_features_kernel": "BF", "_decay_kernel": "BM"}
    seen = set()

    def check(kernel, grid, *arguments, num_warps=4, **constants):
        name = kernel.__name__
        seen.add(name)
        if name in columns:
            assert num_warps == 4 or constants[columns[name]] >= 128, name
            assert constants[columns[name]] >= 64 or name == "_walk_kernel", name  # ptxas 12.8 miscompiles fewer
            loops = {"_slots_kernel": ("SIZE", "BF"), "_features_kernel": ("M", "BM")}
            if name in loops:  # a loop of a single turn is unrolled to a chain of products
                size, block = loops[name]
                assert num_warps == 4 or constants[size] > constants[block], name
        elif name != "_softmax_kernel":  # whose products have 16 rows, and so other instructions
            assert num_warps == 4 or "DOT" not in constants, name

    monkeypatch.setattr(triton_kernels, "launch", check)
    q, log_f = torch.zeros(1, 70, 2, size, dtype=torch.bfloat16), torch.zeros(1, 70, 2, slots)
    out, state, logits = triton_kernels.slot_memory_triton(q, q, q, log_f, None, None)
    triton_kernels.slot_memory_triton_backward(out, state, logits, q, q, q, log_f, None, None)
    assert set(columns) < seen


def test_errors_of_the_state_alone():
    inputs = make(2, 5)
    with pytest.raises(ValueError, match="`initial_state` must have shape"):
        slot_memory_state(inputs["initial_state"][:1], inputs["k"], inputs["v"], inputs["log_f"])
    with pytest.raises(ValueError, match="backend='cuda'"):
        slot_memory_state(None, inputs["k"], inputs["v"], inputs["log_f"], backend="cuda")
