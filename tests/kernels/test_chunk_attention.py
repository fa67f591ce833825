"""What is special about the attention in chunks."""

import functools

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, EACH, TRITON, assert_same_results, on_device, relative_error
from kernel_cases.chunk_attention import CHUNK, make_first, make_inputs

from subquad_kernels import chunk_attention, chunk_attention_step


def all_seen(inputs):
    return torch.ones(1, inputs["k"].shape[2], dtype=torch.bool, device=DEVICE)


@pytest.mark.parametrize("kind", ["aligned", "sliding"])
def test_work_is_bounded(kind):
    """Keys that no token of a block may see are not read."""
    before = 2 * CHUNK
    inputs, given = make_inputs(1, 1030, before), make_first(1, 1030, before, kind=kind)
    oldest = int(given["first"][0, 1024])  # where a block begins, on a CPU as on a GPU
    for x in (inputs["k"], inputs["v"]):
        x[:, :, :oldest] = torch.nan
    out = chunk_attention(**inputs, **given, chunk_size=CHUNK)
    assert out[:, :, 1024:].isfinite().all()


def test_sums_over_blocks_are_float32():
    """A key that gets a gradient from many blocks."""
    length, chunk_size = 4096, 2048
    q = torch.zeros(1, 1, length, 1, dtype=torch.bfloat16, device=DEVICE)
    v = q.clone().requires_grad_()
    first = torch.zeros(1, length, dtype=torch.int64, device=DEVICE)
    out = chunk_attention(q, q, v, first, chunk_size)
    (grad,) = torch.autograd.grad(out.sum(), v)
    # The key at j is one of t + 1 that the tokens t >= j see.
    expected = (1 / torch.arange(1, length + 1, dtype=torch.float64, device=DEVICE)).flip(0).cumsum(0).flip(0)
    assert relative_error(grad[0, 0, :, 0], expected) < 2.5e-3


def test_masked_attention():
    """The reference computes the attention of torch."""
    for kind in ("aligned", "documents"):
        inputs, given = make_inputs(2, 40, CHUNK), make_first(2, 40, CHUNK, kind=kind)
        key, token = torch.arange(CHUNK + 40, device=DEVICE), CHUNK + torch.arange(40, device=DEVICE)
        mask = (key >= given["first"][..., None]) & (key <= token[:, None])
        expected = F.scaled_dot_product_attention(*inputs.values(), attn_mask=mask[:, None], scale=1.0)
        found = chunk_attention(**inputs, **given, chunk_size=CHUNK, backend="reference")
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_dropout(backend):
    inputs = {name: x.expand(3000, -1, -1, -1) for name, x in make_inputs(1, 6, heads=1, key=2, value=2).items()}
    run = functools.partial(chunk_attention, **inputs, **make_first(1, 6, 0, 2), chunk_size=2)
    if backend == "reference":
        inputs.update({name: x[:300] for name, x in inputs.items()})
        run = functools.partial(run, **inputs, backend="reference")
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(run(dropout_p=0.2))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    found, expected = outs[0], run()
    # The first token has one weight, which becomes 0 or 1 / 0.8 of what it was.
    ratios = (found[:, :, 0] / expected[:, :, 0]).unique()
    torch.testing.assert_close(ratios, torch.tensor([0, 1.25], dtype=torch.float64, device=DEVICE))
    deviation = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - expected[0]).abs() < 5 * deviation).all()


@pytest.mark.parametrize("kind", ["aligned", "rows"])
def test_gradients_with_dropout(kind):
    inputs = {name: x.requires_grad_() for name, x in make_inputs(2, 90, CHUNK).items()}
    run = functools.partial(chunk_attention, **inputs, **make_first(2, 90, CHUNK, kind=kind), chunk_size=CHUNK)
    # So rare that nothing is dropped.
    outs = run(), run(dropout_p=1e-14)
    torch.testing.assert_close(*outs)
    grads = [torch.autograd.grad(out.sin().sum(), list(inputs.values())) for out in outs]
    torch.testing.assert_close(*grads)

    def seeded(*inputs):
        torch.manual_seed(0)
        return chunk_attention(*inputs, **make_first(2, 7, 0, 3, kind), chunk_size=3, dropout_p=0.5)

    inputs = [x.requires_grad_() for x in make_inputs(2, 7, heads=1, key=2, value=2).values()]
    torch.autograd.gradcheck(seeded, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_autocast_changes_neither_dropout_nor_the_step(dropout_p, dtype):
    inputs = {name: x.requires_grad_() for name, x in make_inputs(2, 90, dtype=torch.float32).items()}
    leaves = list(inputs.values())

    run = functools.partial(chunk_attention, **inputs, **make_first(2, 90), chunk_size=CHUNK)
    step = functools.partial(chunk_attention_step, inputs["q"][:, :, :1], inputs["k"], inputs["v"], all_seen(inputs))

    def outputs():
        torch.manual_seed(0)
        return run(dropout_p=dropout_p), run(backend="reference"), step()

    expected = outputs()
    with torch.autocast(DEVICE, dtype=dtype):
        found = outputs()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    grads = [torch.autograd.grad(out[0].sin().sum(), leaves) for out in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("dropout_p", [0.0, 1e-14])
def test_dtype_is_that_of_the_values(dropout_p):
    """As under autocast, where rotated queries and keys may be float32, and the values are not."""
    leaves = [x.requires_grad_() for x in make_inputs(2, 40, dtype=torch.float32).values()]
    leaves[2] = leaves[2].detach().bfloat16().requires_grad_()
    run = functools.partial(chunk_attention, **make_first(2, 40), chunk_size=CHUNK, dropout_p=dropout_p)
    out = run(*leaves)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, run(leaves[0].bfloat16(), leaves[1].bfloat16(), leaves[2]))
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32, torch.bfloat16]


def test_dropout_compiles_without_graph_breaks():
    torch.compiler.reset()

    def loss(q, k, v, first, aligned):
        out = chunk_attention(q, k, v, first, CHUNK, aligned=aligned, dropout_p=1e-14)
        return out.square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaves, given = [x.requires_grad_() for x in make_inputs(2, 90).values()], make_first(2, 90)
    found = torch.autograd.grad(compiled(*leaves, **given), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(loss(*leaves, **given), leaves))


@pytest.mark.skipif(DEVICE == "cuda", reason="an assertion that fails on a GPU ends the process")
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_first_keys_out_of_reach(dropout_p):
    run = functools.partial(chunk_attention, **make_inputs(2, 70, CHUNK), chunk_size=CHUNK, dropout_p=dropout_p)
    for kind in ("aligned", "sliding"):
        given = make_first(2, 70, CHUNK, kind=kind)
        for token, change in ((40, -1), (0, -20), (69, 40)):
            first = given["first"].clone()
            first[1, token] += change
            with pytest.raises(RuntimeError, match="`first` must be a key up to the token"):
                run(first=first, aligned=given["aligned"])


DTYPES = (torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_step(dtype, tolerance):
    """A single token finds in a shuffled buffer what it finds in order."""
    inputs = {name: x.requires_grad_() for name, x in make_inputs(2, 1, 2 * CHUNK - 1, value=32, dtype=dtype).items()}
    double = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    first = torch.tensor([[0], [2 * CHUNK - 3]], device=DEVICE)
    expected = chunk_attention(**double, first=first, chunk_size=CHUNK, backend="reference")
    order = torch.randperm(2 * CHUNK, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    k, v = (inputs[name][:, :, order] for name in ("k", "v"))
    out = chunk_attention_step(inputs["q"], k, v, order >= first)
    assert out.dtype == dtype
    assert_same_results([out], inputs, [expected], double, tolerance)
    # One mask for both rows.
    (out,) = chunk_attention_step(inputs["q"], k, v, (order >= first)[1:])[1:]
    assert relative_error(out, expected[1]) < tolerance


@TRITON
@pytest.mark.quick_cases("*-1-dtype0-*", "*-3-dtype1-*", "40-*-dtype2-*")
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES[1:])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("keys", "key", "value"), [(1, 1, 1), (40, 20, 70), (300, 130, 64), (2100, 4, 65)])
def test_kernels_of_the_step(keys, key, value, batch, dtype, tolerance):
    inputs = make_inputs(batch, 1, keys - 1, key=key, value=value, dtype=dtype)
    mask = torch.arange(batch * keys, device=DEVICE).view(batch, keys) % 3 != 1
    mask[:, 0] = True
    for masks in (mask, mask[:1]):
        expected = chunk_attention_step(**{name: x.double() for name, x in inputs.items()}, mask=masks)
        out = chunk_attention_step(**inputs, mask=masks, backend="triton")
        assert (out.dtype, out.shape) == (dtype, expected.shape)
        assert relative_error(out, expected) < tolerance


@TRITON
def test_the_step_copies_no_keys_and_values(monkeypatch):
    """Whose heads may lie next to their features."""
    from subquad_kernels.chunk_attention import triton_kernels

    launched = []
    monkeypatch.setattr(triton_kernels, "launch", lambda kernel, grid, *arguments, **_: launched.append(arguments))
    inputs = make_inputs(2, 1, 7, dtype=torch.bfloat16)
    inputs = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    chunk_attention_step(**inputs, mask=all_seen(inputs), backend="triton")
    found = {x.data_ptr() for arguments in launched for x in arguments if isinstance(x, torch.Tensor)}
    assert {x.data_ptr() for x in inputs.values()} < found


@TRITON
def test_a_step_that_needs_a_gradient_is_plain_torch():
    inputs = {name: x.requires_grad_() for name, x in make_inputs(2, 1, 7, dtype=torch.float32).items()}
    outs = [chunk_attention_step(**inputs, mask=all_seen(inputs), backend=name) for name in ("eager", "triton")]
    grads = [torch.autograd.grad(out.sin().sum(), list(inputs.values())) for out in outs]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@EACH
def test_step_compiles_without_graph_breaks(backend):
    torch.compiler.reset()
    inputs = make_inputs(2, 1, 20, dtype=torch.float32)
    mask = torch.arange(21, device=DEVICE)[None] % 3 > 0
    step = functools.partial(chunk_attention_step, backend=backend)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs, mask=mask), step(**inputs, mask=mask))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 2, 2, 5)}, "`q` must be of a single token"),
        ({"k": torch.zeros(2, 2, 9, 4)}, "`k` must have shape"),
        ({"mask": torch.zeros(2, 9)}, r"`mask` must be torch.bool of shape \(2, 9\) or \(1, 9\), got torch.float32"),
        ({"mask": torch.zeros(2, 8, dtype=torch.bool)}, "`mask` must be"),
    ],
)
def test_errors_of_the_step(change, message):
    inputs = make_inputs(2, 1, 8)
    with pytest.raises(ValueError, match=message):
        chunk_attention_step(**{**inputs, "mask": all_seen(inputs), **on_device(change)})
