"""Chunk attention against its formula in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, assert_same_results, relative_error

from subquad_kernels import chunk_attention, chunk_attention_step
from subquad_kernels.backend import choose_backend
from subquad_kernels.chunk_attention import _chunk_attention


CHUNK = 16
# Tokens of a call, and of the calls before it.
SIZES = [(1, 0), (1, 2 * CHUNK), (7, 0), (CHUNK, 0), (CHUNK, CHUNK), (33, 2 * CHUNK), (201, 0), (201, 2 * CHUNK)]


def make(batch, length, before=0, heads=2, key=5, value=7, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for name, tokens, size in (("q", length, key), ("k", before + length, key), ("v", before + length, value)):
        x = torch.randn(batch, heads, tokens, size, generator=generator, dtype=torch.float64)
        inputs[name] = x.to(DEVICE, dtype)
    return inputs


def make_first(batch, length, before=0, chunk_size=CHUNK, kind="aligned"):
    """The first keys that tokens see, and whether that is `aligned`."""
    token = before + torch.arange(length).repeat(batch, 1)
    aligned = kind in ("aligned", "documents")
    if kind == "sliding":  # as far as any token may see
        first = token - 2 * chunk_size + 1
    elif kind == "rows":  # the chunks of every row begin elsewhere, as those of left-padded rows do
        offset = 3 + 5 * torch.arange(batch)[:, None]
        first = (token + offset) // chunk_size * chunk_size - chunk_size - offset
    else:
        first = (token - before) // chunk_size * chunk_size - chunk_size + before
    if kind == "documents":
        borders = before + torch.tensor([0, 3, 4, CHUNK, 3 * CHUNK + 1])
        document = torch.searchsorted(borders, token, right=True) - 1
        first = torch.where(document < 0, first, torch.maximum(first, borders[document]))
    return {"first": first.clamp(min=0).to(DEVICE), "aligned": aligned}


def assert_equal_to_reference(inputs, tolerance, first, aligned, chunk_size=CHUNK):
    """The output and every gradient."""
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    double = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    out = chunk_attention(**inputs, first=first, chunk_size=chunk_size, aligned=aligned)
    assert out.dtype == inputs["v"].dtype
    expected = chunk_attention(**double, first=first, chunk_size=chunk_size, backend="reference")
    assert_same_results([out], inputs, [expected], double, tolerance)


@pytest.mark.parametrize("kind", ["aligned", "sliding", "rows", "documents"])
@pytest.mark.parametrize(("length", "before"), SIZES)
def test_forward_and_gradients(length, before, kind):
    assert_equal_to_reference(make(2, length, before), 1e-12, **make_first(2, length, before, kind=kind))


@pytest.mark.parametrize("kind", ["sliding", "rows"])
def test_keys_of_no_whole_chunks_before(kind):
    for length, before in ((1, 3), (5, 2 * CHUNK + 5), (90, CHUNK - 1)):
        assert_equal_to_reference(make(2, length, before), 1e-12, **make_first(2, length, before, kind=kind))


@pytest.mark.parametrize("kind", ["aligned", "rows"])
def test_chunks_longer_than_blocks(kind):
    # Blocks are of 75 tokens on a CPU, of 512 on a GPU.
    inputs = make(1, 1100, heads=1)
    assert_equal_to_reference(inputs, 1e-12, **make_first(1, 1100, 0, 300, kind), chunk_size=300)


@pytest.mark.parametrize("kind", ["aligned", "sliding"])
def test_work_is_bounded(kind):
    """Keys that no token of a block may see are not read."""
    before = 2 * CHUNK
    inputs, given = make(1, 1030, before), make_first(1, 1030, before, kind=kind)
    oldest = int(given["first"][0, 1024])  # where a block begins, on a CPU as on a GPU
    for x in (inputs["k"], inputs["v"]):
        x[:, :, :oldest] = torch.nan
    out = chunk_attention(**inputs, **given, chunk_size=CHUNK)
    assert out[:, :, 1024:].isfinite().all()


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_short_chunks(chunk_size):
    inputs = make(2, 70, before=2 * chunk_size)
    assert_equal_to_reference(inputs, 1e-12, **make_first(2, 70, 2 * chunk_size, chunk_size), chunk_size=chunk_size)


@pytest.mark.parametrize("kind", ["aligned", "sliding"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)]
)
def test_dtypes(dtype, tolerance, kind):
    inputs = make(2, 150, 2 * CHUNK, key=8, value=32, dtype=dtype)
    assert_equal_to_reference(inputs, tolerance, **make_first(2, 150, 2 * CHUNK, kind=kind))


def test_sums_over_blocks_are_float32():
    """A key of which many blocks find a gradient, all alike."""
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
    """The reference against torch's own."""
    for kind in ("aligned", "documents"):
        inputs, given = make(2, 40, CHUNK), make_first(2, 40, CHUNK, kind=kind)
        key, token = torch.arange(CHUNK + 40, device=DEVICE), CHUNK + torch.arange(40, device=DEVICE)
        mask = (key >= given["first"][..., None]) & (key <= token[:, None])
        expected = F.scaled_dot_product_attention(*inputs.values(), attn_mask=mask[:, None], scale=1.0)
        found = chunk_attention(**inputs, **given, chunk_size=CHUNK, backend="reference")
        torch.testing.assert_close(found, expected)


def test_numerical_gradient():
    for length, before, kind in ((7, 0, "aligned"), (5, 6, "rows")):
        inputs = [x.requires_grad_() for x in make(2, length, before, heads=1, key=2, value=3).values()]
        given = make_first(2, length, before, 3, kind)
        torch.autograd.gradcheck(lambda q, k, v, given=given: chunk_attention(q, k, v, chunk_size=3, **given), inputs)


def test_one_row_of_first_serves_all():
    inputs, given = make(3, 90), make_first(1, 90)
    out = chunk_attention(**inputs, **given, chunk_size=CHUNK)
    given["first"] = given["first"].expand(3, -1)
    torch.testing.assert_close(out, chunk_attention(**inputs, **given, chunk_size=CHUNK), rtol=0, atol=0)


def test_layout_of_the_inputs_does_not_matter():
    inputs, given = make(2, 90), make_first(2, 90)
    expected = chunk_attention(**inputs, **given, chunk_size=CHUNK)
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs.values()]
    out = chunk_attention(*leaves, **given, chunk_size=CHUNK)
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.sum(), leaves)  # the gradient of a sum has no strides
    leaves = [x.requires_grad_() for x in inputs.values()]
    expected = torch.autograd.grad(chunk_attention(*leaves, **given, chunk_size=CHUNK), leaves, torch.ones_like(out))
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_dropout(backend):
    inputs = {name: x.expand(3000, -1, -1, -1) for name, x in make(1, 6, heads=1, key=2, value=2).items()}
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
    # A weight is 0 or 1 / 0.8 of what it was: the first token has one.
    ratios = (found[:, :, 0] / expected[:, :, 0]).unique()
    torch.testing.assert_close(ratios, torch.tensor([0, 1.25], dtype=torch.float64, device=DEVICE))
    deviation = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - expected[0]).abs() < 5 * deviation).all()


@pytest.mark.parametrize("kind", ["aligned", "rows"])
def test_gradients_with_dropout(kind):
    inputs = {name: x.requires_grad_() for name, x in make(2, 90, CHUNK).items()}
    run = functools.partial(chunk_attention, **inputs, **make_first(2, 90, CHUNK, kind=kind), chunk_size=CHUNK)
    # So rare that nothing is dropped.
    outs = run(), run(dropout_p=1e-14)
    torch.testing.assert_close(*outs)
    grads = [torch.autograd.grad(out.sin().sum(), list(inputs.values())) for out in outs]
    torch.testing.assert_close(*grads)

    def seeded(*inputs):
        torch.manual_seed(0)
        return chunk_attention(*inputs, **make_first(2, 7, 0, 3, kind), chunk_size=3, dropout_p=0.5)

    inputs = [x.requires_grad_() for x in make(2, 7, heads=1, key=2, value=2).values()]
    torch.autograd.gradcheck(seeded, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_autocast_changes_nothing(dropout_p, dtype):
    inputs = {name: x.requires_grad_() for name, x in make(2, 90, dtype=torch.float32).items()}
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


def all_seen(inputs):
    return torch.ones(1, inputs["k"].shape[2], dtype=torch.bool, device=DEVICE)


@pytest.mark.parametrize("dropout_p", [0.0, 1e-14])
def test_dtype_is_that_of_the_values(dropout_p):
    """As under autocast, where rotated queries and keys may be float32, and the values are not."""
    leaves = [x.requires_grad_() for x in make(2, 40, dtype=torch.float32).values()]
    leaves[2] = leaves[2].detach().bfloat16().requires_grad_()
    run = functools.partial(chunk_attention, **make_first(2, 40), chunk_size=CHUNK, dropout_p=dropout_p)
    out = run(*leaves)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, run(leaves[0].bfloat16(), leaves[1].bfloat16(), leaves[2]))
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("lengths", "dropout_p"), [((9, 90), 0.0), ((90,), 1e-14)])
def test_compiles_without_graph_breaks(lengths, dropout_p):
    torch.compiler.reset()

    def loss(q, k, v, first, aligned):
        out = chunk_attention(q, k, v, first, CHUNK, aligned=aligned, dropout_p=dropout_p)
        return out.square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for length in lengths:
        leaves, given = [x.requires_grad_() for x in make(2, length).values()], make_first(2, length)
        found = torch.autograd.grad(compiled(*leaves, **given), leaves)
        torch.testing.assert_close(found, torch.autograd.grad(loss(*leaves, **given), leaves))


def test_operator_registration():
    for batch, length, before, kind in ((1, 5, 0, "aligned"), (2, 5, 4, "rows")):
        leaves = [x.requires_grad_() for x in make(batch, length, before).values()]
        first, aligned = make_first(batch, length, before, 2, kind).values()
        torch.library.opcheck(_chunk_attention, (*leaves, first, 2, aligned))


def test_shapes_on_meta():
    inputs = {name: x.to("meta") for name, x in make(2, 9, 4, dtype=torch.bfloat16).items()}
    first = torch.empty(1, 9, dtype=torch.int64, device="meta")
    for dropout_p in (0.0, 0.1):
        out = chunk_attention(**inputs, first=first, chunk_size=2, dropout_p=dropout_p)
        assert (out.shape, out.dtype, out.device.type) == ((2, 2, 9, 7), torch.bfloat16, "meta")


def test_environment_chooses_the_backend(monkeypatch):
    """A choice of Triton for all operators leaves one without kernels its plain torch."""
    x = torch.zeros(1, device=DEVICE)
    for value, chosen in (("triton", "eager"), ("eager", "eager"), ("reference", "reference")):
        monkeypatch.setenv("SUBQUAD_BACKEND", value)
        assert choose_backend("operator", "auto", ("eager", "reference"), x) == chosen
    run = functools.partial(chunk_attention, **make(1, 5), **make_first(1, 5), chunk_size=CHUNK)
    monkeypatch.setenv("SUBQUAD_BACKEND", "triton")
    torch.testing.assert_close(run(), run(backend="reference"))
    with pytest.raises(ValueError, match="^backend='triton': `chunk_attention` has eager, reference"):
        run(backend="triton")
    monkeypatch.setenv("SUBQUAD_BACKEND", "nothing")
    with pytest.raises(ValueError, match="^SUBQUAD_BACKEND='nothing'"):
        run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 5, 5)}, r"`q` must be \(batch, heads, length >= 1, size\)"),
        ({"q": torch.zeros(2, 2, 0, 5)}, "`q` must be"),
        ({"q": torch.zeros(2, 2, 10, 5), "first": torch.zeros(1, 10, dtype=torch.int64)}, "`k` must have a key"),
        ({"q": torch.zeros(2, 2, 5, 5, dtype=torch.int64)}, "`q` must be floating point"),
        ({"k": torch.zeros(2, 2, 9, 6)}, r"`k` must have shape \(2, 2, 9, 5\), got \(2, 2, 9, 6\)"),
        ({"v": torch.zeros(2, 2, 8, 7)}, r"`v` must have shape \(2, 2, 9, 7\)"),
        ({"v": torch.zeros(2, 1, 9, 7)}, "`v` must have shape"),
        ({"v": torch.zeros(2, 2, 9, 7, device="meta")}, "`v` is on meta"),
        ({"first": torch.zeros(5, dtype=torch.int64)}, "`first` must be"),
        ({"first": torch.zeros(3, 5, dtype=torch.int64)}, r"`first` must be torch.int64 of shape \(2, 5\)"),
        ({"first": torch.zeros(2, 9, dtype=torch.int64)}, "`first` must be"),
        ({"first": torch.zeros(2, 5)}, "`first` must be torch.int64 of shape .* got torch.float32"),
        ({"first": torch.zeros(1, 5, dtype=torch.int64, device="meta")}, "`first` is on meta"),
        ({"chunk_size": 0}, "`chunk_size` must be at least 1, got 0"),
        ({"aligned": True, "chunk_size": 3}, "`aligned` needs whole chunks of 3 keys before the queries, got 4 keys"),
        ({"dropout_p": 1.5}, "`dropout_p` must be between 0 and 1, got 1.5"),
        ({"backend": "cuda"}, "backend='cuda'"),
    ],
)
def test_errors_name_the_argument(change, message):
    given = {**make(2, 5, 4), **make_first(2, 5, 4, 4), "chunk_size": 4, **_to_device(change)}
    with pytest.raises(ValueError, match=message):
        chunk_attention(**given)


def _to_device(change):
    return {
        name: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
        for name, x in change.items()
    }


@pytest.mark.skipif(DEVICE == "cuda", reason="an assertion that fails on a GPU ends the process")
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_first_keys_out_of_reach(dropout_p):
    run = functools.partial(chunk_attention, **make(2, 70, CHUNK), chunk_size=CHUNK, dropout_p=dropout_p)
    for kind in ("aligned", "sliding"):
        given = make_first(2, 70, CHUNK, kind=kind)
        for token, change in ((40, -1), (0, -20), (69, 40)):
            first = given["first"].clone()
            first[1, token] += change
            with pytest.raises(RuntimeError, match="`first` must be a key up to the token"):
                run(first=first, aligned=given["aligned"])


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)],
)
def test_step(dtype, tolerance):
    """A single token finds in a shuffled buffer what it finds in order."""
    inputs = {name: x.requires_grad_() for name, x in make(2, 1, 2 * CHUNK - 1, value=32, dtype=dtype).items()}
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


def test_step_compiles_without_graph_breaks():
    torch.compiler.reset()
    inputs = make(2, 1, 20)
    mask = torch.arange(21, device=DEVICE)[None] % 3 > 0
    compiled = torch.compile(chunk_attention_step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs, mask=mask), chunk_attention_step(**inputs, mask=mask))


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
    inputs = make(2, 1, 8)
    with pytest.raises(ValueError, match=message):
        chunk_attention_step(**{**inputs, "mask": all_seen(inputs), **_to_device(change)})
