"""What is special about the working memory."""

import pytest
import torch
from kernel_cases import DEVICE, EACH, TRITON, assert_same_results
from kernel_cases.working_memory import STATES, STEPS, make, make_rows

from subquad_kernels import working_memory


@EACH
def test_empty_memory(backend):
    places = make_rows([[1, 5, 9]], [[0, -1, 3]], [[-1, 1, 1, 1, 1, 2, 2, 3, 3]])
    inputs = {**make(1, 9, keys=17, heads=1), **places}
    nothing = {**inputs, **dict.fromkeys(STATES)}
    # A document begins in the first chunk that leaves, so that the states before do not matter.
    expected = working_memory(**inputs, backend="reference")
    torch.testing.assert_close(working_memory(**nothing, backend="reference"), expected)
    for places in (make_rows([[]], [[]], [[0] * 4 + [-1] * 5]), make_rows([[-1]], [[0]], [[-1] * 9])):
        _, *found = working_memory(**{**nothing, **places}, backend=backend)
        for x, name in zip(found, STATES, strict=True):
            assert torch.equal(x, torch.zeros_like(inputs[name]))


@EACH
def test_what_does_not_count_is_not_looked_at(backend):
    inputs = {**make(2, 2, keys=11, heads=1), **make_rows([[1, 5], [-1, 5]], [[2, -1], [0, 3]], [[1, 2], [0, 2]])}
    expected = working_memory(**inputs, backend="reference")
    counted = torch.zeros(2, 11, dtype=torch.bool, device=DEVICE)
    counted[0, 3:9] = counted[1, 8] = True
    for name in ("k", "v"):
        inputs[name] = inputs[name].masked_fill(~counted[:, None, :, None], torch.nan).requires_grad_()
    found = working_memory(**inputs, backend=backend)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    dk, dv = torch.autograd.grad(found[1].square().sum(), [inputs["k"], inputs["v"]])
    assert torch.equal((dv != 0).any(-1).any(1), counted)
    assert torch.equal((dk[0] != 0).any(-1).any(0), counted[0])
    # The softmax over one token is 1 whatever its key is. Products of a GPU leave a rounding error of that.
    assert not dk[1, :, ~counted[1]].any() and dk[1].abs().max() < 1e-5


def plan(start, stop, chunk_size, document):
    """
    The arguments for the tokens start ... stop - 1 of a sequence whose second document begins at token `document`: the
    first key that is still needed, which chunks leave, where a document begins in them, and which are read. A token
    reads the chunks before the previous one.
    """

    def absorbed(t):
        return max(t // chunk_size - 1, 0)

    done = absorbed(max(start - 1, 0))
    leaving = [chunk * chunk_size for chunk in range(done, absorbed(stop - 1))]
    begins = [document - at if 0 <= document - at < chunk_size else 0 if at == 0 else -1 for at in leaving]
    reads = [absorbed(t) - done if absorbed(t) else -1 for t in range(start, stop)]
    first = done * chunk_size
    return first, [at - first for at in leaving], begins, reads


@pytest.mark.parametrize(
    ("backend", "pieces"),
    [
        ("eager", (3, 1, 9, 12, 1)),
        ("eager", (1,) * 17),
        pytest.param("triton", (9, 1, 3, 1), marks=TRITON),
    ],
)
def test_carried_state(pieces, backend):
    length, chunk_size = sum(pieces), 4
    tensors = make(2, length, keys=length, heads=1)
    inputs = {name: tensors[name].requires_grad_() for name in ("q", "k", "v")}
    double = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}

    def run(q, k, v, pieces, backend):
        states, start, outs = (None, None), 0, []
        for piece in pieces:
            (first, *row), (_, *other) = (plan(start, start + piece, chunk_size, document) for document in (5, 8))
            places = make_rows(*zip(row, other, strict=True), chunk_size)
            part = q[:, :, start : start + piece], *(x[:, :, first : start + piece] for x in (k, v))
            out, *states = working_memory(*part, *states, **places, backend=backend)
            outs.append(out)
            start += piece
        return torch.cat(outs, 2), *states

    found = run(**inputs, pieces=pieces, backend=backend)
    with torch.no_grad():
        without_graph = run(**inputs, pieces=pieces, backend=backend)
    torch.testing.assert_close(without_graph, found, atol=1e-5, rtol=1e-5)
    assert_same_results(found, inputs, run(**double, pieces=(length,), backend="reference"), double, 1e-5)


@EACH
@pytest.mark.parametrize("rows", STEPS)
def test_a_step_keeps_the_rows_in_which_no_chunk_leaves(rows, backend):
    for inplace in (False, True):
        inputs = make(rows=rows, keys=6)
        before, kept = [inputs[name].clone() for name in STATES], inputs["leaving"][:, 0] < 0
        with torch.no_grad():
            _, *states = working_memory(**inputs, inplace=inplace, backend=backend)
        for state, x in zip(states, before, strict=True):
            assert torch.equal(state[kept], x[kept])


def test_a_step_works_for_the_rows_that_absorb(monkeypatch):
    from subquad_kernels.working_memory import eager

    absorb, rows = eager._absorb, []
    monkeypatch.setattr(eager, "_absorb", lambda memory, *rest: rows.append(len(memory)) or absorb(memory, *rest))
    for step in STEPS:
        working_memory(**make(rows=step, keys=6), backend="eager")
    assert rows == [2, 3]


@TRITON
def test_nothing_has_changed_if_a_kernel_of_a_step_fails(monkeypatch):
    from subquad_kernels.backend import KernelError
    from subquad_kernels.working_memory import triton_kernels

    launch, launched = triton_kernels.launch, []
    inputs = make(rows=STEPS[1], keys=6)

    def fail(kernel, *arguments, **constants):
        launched.append(kernel)
        if len(launched) == number:
            raise KernelError("refused")
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(triton_kernels, "launch", fail)
    for number in (1, 2, 3):
        launched.clear()
        given = {**inputs, **{name: inputs[name].clone() for name in STATES}}
        with torch.no_grad():
            if number == 3:  # there are two
                working_memory(**given, inplace=True, backend="triton")
                assert len(launched) == 2
                break
            with pytest.raises(KernelError):
                working_memory(**given, inplace=True, backend="triton")
        assert all(torch.equal(given[name], inputs[name]) for name in STATES)


@TRITON
def test_few_rows_are_multiplied_by_four_warps(monkeypatch):
    """In bfloat16 eight warps would share the columns of 64 rows, and on sm_90 Triton misreads what is too narrow."""
    from subquad_kernels.working_memory import triton_kernels

    warps = {}

    def launch(kernel, *_, num_warps=4, **sizes):
        warps.setdefault(kernel, []).append(num_warps)

    monkeypatch.setattr(triton_kernels, "launch", launch)
    inputs = make(length=64, chunks=2, chunk_size=64, key=64, value=64, dtype=torch.bfloat16, float32=STATES)
    grads = torch.zeros_like(inputs["q"]), inputs["memory"], inputs["normalizer"]
    triton_kernels.working_memory_triton_backward(*grads, **inputs)
    inputs = make(rows=STEPS[0], keys=70, key=64, value=64, chunk_size=64, dtype=torch.bfloat16, float32=STATES)
    triton_kernels.working_memory_triton_step(**inputs, indices=None)
    multiply = "product", "rows", "absorb", "absorb_gradient", "prepare_step", "absorb_step"
    for name in multiply:
        assert set(warps[getattr(triton_kernels, f"_{name}_kernel")]) == {4}


@EACH
def test_layers_share_the_checks_of_their_places(backend, monkeypatch):
    checks, check = [], torch._assert_async
    monkeypatch.setattr(torch, "_assert_async", lambda *arguments: checks.append(check(*arguments)))
    inputs = make(length=5, chunks=2)
    for _ in range(3):  # each layer has other tensors, but these
        working_memory(**{**inputs, "q": inputs["q"].clone()}, backend=backend)
        assert len(checks) == 3
    for name in ("leaving", "reads"):
        inputs[name].add_(0)  # it may have changed
        working_memory(**inputs, backend=backend)
        inputs[name] = inputs[name].clone()
        working_memory(**inputs, backend=backend)
    assert len(checks) == 15
    if DEVICE == "cpu":  # where a failure does not end the process
        inputs["leaving"].fill_(99)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="`leaving` must be"):
                working_memory(**inputs, backend=backend)
