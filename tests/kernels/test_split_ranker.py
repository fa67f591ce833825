"""The ranker against its own formula in float64."""

import pytest
import torch
from kernel_cases import DEVICE, TRITON, assert_same_results, triton, without_compiler
from torch.utils._python_dispatch import TorchDispatchMode

import subquad_kernels.backend
from subquad_kernels import maxsim, split_ranker
from subquad_kernels.split_ranker import _maxsim, eager


BACKENDS = ("eager", triton)
NORMALIZATIONS = ("first", "max", "min")
ORDERS = ("sequence", "score")


def make(batch=2, current=5, per_query=3, total=6, per_split=4, size=7, dtype=torch.float32, seed=0):
    """Vectors that are more alike than not, so that no score is near zero."""
    generator = torch.Generator().manual_seed(seed)

    def vectors(*shape):
        return (0.5 + torch.randn(*shape, size, generator=generator)).to(DEVICE, dtype)

    return {
        "queries": vectors(batch, current, per_query),
        "splits": vectors(batch, total, per_split),
        "number": torch.randint(0, total + 1, (batch, current), generator=generator).to(DEVICE),
    }


def exact(inputs):
    return {name: x.detach().double() if x.is_floating_point() else x for name, x in inputs.items()}


def differentiable(inputs):
    return {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}


def leaves(inputs):
    return {name: inputs[name] for name in ("queries", "splits")}


def assert_close_to_reference(inputs, backend, tolerance=1e-6):
    scores = maxsim(**inputs, backend=backend)
    expected = maxsim(**exact(inputs), backend="reference")
    assert scores.dtype == torch.promote_types(inputs["queries"].dtype, torch.float32)
    # The error of a mean of cosines, whether it is near zero or not.
    size = inputs["queries"].shape[2]
    torch.testing.assert_close(scores.double() / size, expected / size, rtol=0, atol=tolerance)
    return scores


def assert_ranks_like_reference(call, inputs, k, tolerance=1e-5, **options):
    """The same choice, and the same weights with the same gradients."""
    inputs, expected_inputs = differentiable(inputs), differentiable(exact(inputs))
    index, weights, scores = call(**inputs, k=k, **options)
    expected_index, expected_weights, _ = split_ranker(**expected_inputs, k=k, **options, backend="reference")
    assert index.dtype == torch.int64
    assert weights.dtype == scores.dtype == torch.promote_types(inputs["queries"].dtype, torch.float32)
    assert torch.equal(index, expected_index)
    assert_same_results((weights,), leaves(inputs), (expected_weights,), leaves(expected_inputs), tolerance)
    with torch.no_grad():
        again = split_ranker(**inputs, k=k, scores=scores, **options)
    torch.testing.assert_close(again, (index, weights.detach(), scores))


def with_backend(backend):
    return lambda **inputs: split_ranker(**inputs, backend=backend)


@pytest.mark.parametrize("per_split", [1, 3, 8, 17, 64])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_of_splits(backend, one, per_split):
    for total, size in ((1, 100), (2, 17), (9, 1), (6, 64)):
        inputs = make(current=3, per_query=1 if one else per_split, total=total, per_split=per_split, size=size)
        assert_close_to_reference(inputs, backend)


@pytest.mark.parametrize(("per_query", "per_split"), [(2, 130), (1, 130), (5, 1), (16, 3), (17, 8), (70, 64)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_of_another_size(backend, per_query, per_split):
    assert_close_to_reference(make(current=2, per_query=per_query, total=3, per_split=per_split), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("per_query", [1, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision(backend, per_query, dtype):
    inputs = make(per_query=per_query, per_split=8, size=100, dtype=dtype)
    assert_close_to_reference(inputs, backend)
    assert_ranks_like_reference(with_backend(backend), inputs, k=4, tolerance=8e-3)


def test_float64():
    assert_close_to_reference(make(dtype=torch.float64), "eager", tolerance=1e-14)
    assert_ranks_like_reference(split_ranker, make(dtype=torch.float64), k=4, tolerance=1e-12)


@pytest.mark.parametrize("per_query", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_documents(backend, per_query):
    inputs = make(current=6, per_query=per_query)
    inputs["number"] = torch.arange(6, device=DEVICE)[None]
    scores = assert_close_to_reference(inputs, backend)
    inputs["first"] = torch.tensor([[0, 0, 0, 3, 3, 5], [0, 1, 1, 1, 1, 1]], device=DEVICE)
    assert torch.equal(scores.isfinite()[0].sum(-1), inputs["number"][0])
    for first in (inputs["first"], inputs["first"][:1], inputs["first"].T.contiguous().T):
        inputs["first"] = first
        scores = assert_close_to_reference(inputs, backend)
        assert torch.equal(scores.isfinite()[0].sum(-1), torch.tensor([0, 1, 2, 0, 1, 0], device=DEVICE))
        assert_ranks_like_reference(with_backend(backend), inputs, k=3)


@pytest.mark.parametrize("per_query", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend, per_query):
    inputs = make(per_query=per_query)
    expected = maxsim(**inputs, backend=backend)
    room = torch.full((2, 200, 7), torch.nan, device=DEVICE)
    for name in ("queries", "splits"):
        x = inputs[name]
        room[:, : x[0, ..., 0].numel()] = x.flatten(1, 2)
        inputs[name] = room[:, : x[0, ..., 0].numel()].unflatten(1, x.shape[1:3])
        assert not inputs[name].is_contiguous()
        torch.testing.assert_close(maxsim(**inputs, backend=backend), expected)
        inputs[name] = x.transpose(0, -1).contiguous().transpose(0, -1)
        torch.testing.assert_close(maxsim(**inputs, backend=backend), expected)
        inputs[name] = x


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # by the interpreter
@pytest.mark.parametrize("per_query", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_candidates_matter(backend, per_query):
    inputs = make(per_query=per_query, total=9)
    inputs["number"].clamp_(max=5)
    expected = maxsim(**inputs, backend=backend)
    inputs["splits"][:, 5:] = torch.nan
    assert torch.equal(maxsim(**inputs, backend=backend), expected)


@pytest.mark.parametrize("per_query", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_compare(backend, per_query):
    inputs = make(per_query=per_query)
    inputs["number"].zero_()
    index, weights, scores = split_ranker(**inputs, k=3, backend=backend)
    assert (index == -1).all() and not weights.any() and (scores == -torch.inf).all()
    for empty in (make(batch=0), make(current=0), make(total=1)):
        empty["splits"] = empty["splits"][:, :0]
        index, weights, scores = split_ranker(**differentiable(empty), k=3, backend=backend)
        assert index.shape == weights.shape == (*empty["number"].shape, 2)
        assert (index == -1).all() and not weights.any() and scores.shape == (*empty["number"].shape, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_after_the_other(backend, dtype):
    inputs = make(current=4, per_query=9, per_split=9, dtype=dtype)
    expected = maxsim(**inputs, backend=backend)
    sums = 0
    for token in inputs["queries"].split(1, dim=2):
        sums = sums + maxsim(**{**inputs, "queries": token}, backend=backend)
    torch.testing.assert_close(sums, expected)
    found = split_ranker(**inputs, k=3, scores=sums, backend=backend)
    torch.testing.assert_close(found, split_ranker(**inputs, k=3, backend=backend))
    assert found[2] is sums


@pytest.mark.parametrize("tokens", [1, 5, 12, 20])
def test_eager_chunks(tokens, monkeypatch):
    monkeypatch.setattr(eager, "TOKENS", tokens)
    for per_query, per_split in ((1, 4), (3, 4), (4, 1)):
        inputs = make(batch=3, per_query=per_query, per_split=per_split)
        assert_close_to_reference(inputs, "eager")
        assert_close_to_reference({**inputs, "first": torch.full_like(inputs["number"], 2)}, "eager")


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_eager_memory_is_bounded():
    # The mode sees nothing of what is inside a custom operator.
    x, number = torch.randn(4, 64, 64, 8), torch.arange(64)[None]
    with Largest() as mode:
        eager.maxsim_eager(x[:1], x[:1], number, None)
    assert x[0].numel() < mode.elements <= eager.TOKENS**2 < 4096**2
    with Largest() as mode:
        eager.maxsim_eager(x[:, :8], x[:, :8], number[:, :8], None)
    assert mode.elements <= eager.TOKENS**2


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("k", [3, 4, 7, 12])
@pytest.mark.parametrize("backend", BACKENDS)
def test_choice_weights_and_gradients(backend, k, normalization):
    for inputs in (make(current=7), make(per_query=1, total=2)):
        inputs["number"][0] = torch.arange(inputs["number"].shape[1])
        for order in ORDERS:
            options = {"normalization": normalization, "order": order}
            assert_ranks_like_reference(with_backend(backend), inputs, k, **options)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_split_is_all_there_is(backend, normalization):
    for k, inputs in ((2, make()), (5, make(total=1))):
        inputs = differentiable(inputs)
        index, weights, _ = split_ranker(**inputs, k=k, normalization=normalization, backend=backend)
        assert torch.equal(index, split_ranker(**exact(inputs), k=k, backend="reference")[0])
        assert torch.equal((index >= 0).any(-1), inputs["number"] > 0)
        torch.testing.assert_close(weights, (index >= 0).float())
        for grad in torch.autograd.grad(weights.sum(), list(leaves(inputs).values())):
            assert grad.abs().max() < 1e-6


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_with_given_scores(backend, normalization):
    inputs = make()
    inputs["scores"] = maxsim(**inputs)
    leaf = differentiable(inputs)
    leaf["scores"] = inputs["scores"]
    _, weights, _ = split_ranker(**leaf, k=4, normalization=normalization, backend=backend)
    found = torch.autograd.grad(weights.square().sum(), list(leaves(leaf).values()))
    del leaf["scores"]
    _, weights, _ = split_ranker(**leaf, k=4, normalization=normalization, backend=backend)
    torch.testing.assert_close(found, torch.autograd.grad(weights.square().sum(), list(leaves(leaf).values())))


def test_values_by_hand():
    scores = torch.tensor([[[4.0, 1.0, 3.0, 2.0, -torch.inf], [-torch.inf, -2.0, -4.0, -torch.inf, -torch.inf]]])
    inputs = {name: x.to(DEVICE) for name, x in make(batch=1, current=2, total=5).items()} | {
        "scores": scores.to(DEVICE)
    }
    index, weights, _ = split_ranker(**inputs, k=4)
    assert index.tolist() == [[[0, 2, 3], [-1, 1, 2]]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[[1.0, 0.75, 0.5], [0.0, 1.0, 2.0]]]))
    index, weights, _ = split_ranker(**inputs, k=3, normalization="max")
    assert index.tolist() == [[[0, 2], [1, 2]]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[[1.0, 0.75], [1.0, 2.0]]]))
    index, weights, _ = split_ranker(**inputs, k=4, normalization="min", order="score")
    assert index.tolist() == [[[0, 2, 3], [-1, 1, 2]]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[[2.0, 1.5, 1.0], [0.0, 0.5, 1.0]]]))
    inputs["scores"] = inputs["scores"].flip(-1)
    index, weights, _ = split_ranker(**inputs, k=4, normalization="first", order="score")
    assert index.tolist() == [[[4, 2, 1], [-1, 3, 2]]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[[2.0, 1.5, 1.0], [0.0, 0.5, 1.0]]]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_equals(backend):
    inputs = make(current=2, total=40, per_split=1)
    inputs["splits"] = inputs["splits"][:, :1].expand(-1, 40, -1, -1)
    inputs["number"] = torch.tensor([[40, 3]], device=DEVICE)
    index, weights, scores = split_ranker(**inputs, k=5, backend=backend)
    assert index.tolist() == 2 * [[[0, 1, 2, 3], [-1, 0, 1, 2]]]
    torch.testing.assert_close(weights, (index >= 0).float())
    scores[:, 0, 30] += 1.0
    assert split_ranker(**inputs, k=5, scores=scores)[0][:, 0].tolist() == 2 * [[0, 1, 2, 30]]


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_alone(backend):
    inputs = differentiable(make())
    index, weights, scores = split_ranker(**inputs, k=1, backend=backend)
    assert index.shape == weights.shape == (2, 5, 0)
    torch.testing.assert_close(scores, maxsim(**inputs))
    assert not scores.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros(backend, normalization, dtype):
    inputs = make(total=6, dtype=dtype)
    inputs["number"] = torch.tensor([[0, 1, 2, 3, 6]], device=DEVICE)
    inputs["queries"][0, :, 1:] = 0
    inputs["splits"][:, 0] = 0
    inputs["splits"][1] = 0
    scores = assert_close_to_reference(inputs, backend)
    assert not scores[:, 1:, 0].any() and not scores[1, 4].any()

    expected = split_ranker(**exact(inputs), k=4, normalization=normalization, backend="reference")
    inputs = differentiable(inputs)
    index, weights, _ = split_ranker(**inputs, k=4, normalization=normalization, backend=backend)
    assert torch.equal(index, expected[0])
    torch.testing.assert_close(weights.double(), expected[1], rtol=1e-5, atol=0)
    assert not weights[1].any()
    assert weights[0].any() == (normalization != "first" or index[0, 4, 0] > 0)
    leaf = list(leaves(inputs).values())
    for x, grad in zip(leaf, torch.autograd.grad(weights.sum(), leaf), strict=True):
        assert grad.isfinite().all()
        assert not grad[(x == 0).all(-1)].any()


def test_a_divisor_that_comes_to_nothing():
    inputs = make()
    scores = torch.full((2, 5, 6), -1e-8, device=DEVICE)
    for normalization in NORMALIZATIONS:
        assert not split_ranker(**inputs, k=4, normalization=normalization, scores=scores)[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend):
    inputs = differentiable(make())
    expected = split_ranker(**inputs, k=4, backend=backend)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = split_ranker(**inputs, k=4, backend=backend)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("backend", "normalization"),
    [("eager", "first"), ("eager", "max"), pytest.param("triton", "min", marks=TRITON)],
)
def test_compile(backend, normalization):
    torch.compiler.reset()
    compiled = torch.compile(with_backend(backend), fullgraph=True, backend="aot_eager")
    for current in (1, 5, 7):
        inputs = make(current=current)
        assert_ranks_like_reference(compiled, inputs, k=4, normalization=normalization)
        with torch.no_grad():
            found = compiled(**inputs, k=4, normalization=normalization)
            expected = split_ranker(**inputs, k=4, normalization=normalization, backend=backend)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_meta(normalization, k):
    inputs = {name: x.to("meta") for name, x in make(dtype=torch.bfloat16).items()}
    assert maxsim(**inputs, first=inputs["number"]).shape == (2, 5, 6)
    for case in (inputs, {**inputs, "queries": inputs["queries"].requires_grad_()}):
        index, weights, scores = split_ranker(**case, k=k, normalization=normalization)
        assert index.device.type == weights.device.type == scores.device.type == "meta"
        assert index.shape == weights.shape == (2, 5, k - 1)
        assert (index.dtype, weights.dtype, scores.dtype) == (torch.int64, torch.float32, torch.float32)


@TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    inputs = make(dtype=dtype)
    for first in (None, inputs["number"] // 2):
        for backend in ("eager", "triton"):
            torch.library.opcheck(_maxsim, (*inputs.values(), first, backend))


@TRITON
def test_eager_takes_over(monkeypatch):
    from subquad_kernels.split_ranker import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    inputs = make()
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        _maxsim(*inputs.values(), None, "triton")
    with pytest.warns(RuntimeWarning, match="no compiler"):
        found = _maxsim(*inputs.values(), None, "auto")
    torch.testing.assert_close(found, maxsim(**inputs, backend="eager"))


INT = torch.int64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.zeros(2, 5, 7)}, r"`queries` must be \(B, T, Q, D\), .*, got \(2, 5, 7\)"),
        ({"queries": torch.zeros(2, 5, 0, 7)}, r"the last two at least 1, got \(2, 5, 0, 7\)"),
        ({"queries": torch.zeros(2, 5, 3, 7, dtype=INT)}, "`queries` must be floating point, got torch.int64"),
        ({"splits": torch.zeros(2, 24, 7)}, r"`splits` must be \(B, M, S, D\), .*, got \(2, 24, 7\)"),
        ({"splits": torch.zeros(2, 6, 0, 7)}, r"the last two at least 1, got \(2, 6, 0, 7\)"),
        ({"splits": torch.zeros(2, 6, 4, 8)}, r"`splits` must have shape \(2, M, S, 7\), got \(2, 6, 4, 8\)"),
        ({"splits": torch.zeros(1, 6, 4, 7)}, r"`splits` must have shape \(2, M, S, 7\), got \(1, 6, 4, 7\)"),
        (
            {"splits": torch.zeros(2, 6, 4, 7).half()},
            "`splits` must be torch.float32 as `queries` are, got torch.float16",
        ),
        ({"splits": torch.zeros(2, 6, 4, 7, device="meta")}, "`splits` is on meta, `queries` on "),
        ({"number": torch.zeros(5, dtype=INT)}, r"`number` must have shape \(2, 5\) or \(1, 5\), got \(5,\)"),
        ({"number": torch.zeros(2, 5)}, "`number` must be int64, got torch.float32"),
        ({"first": torch.zeros(2, 6, dtype=INT)}, r"`first` must have shape \(2, 5\) or \(1, 5\), got \(2, 6\)"),
        ({"first": torch.zeros(2, 5, dtype=INT, device="meta")}, "`first` is on meta, `queries` on "),
        ({"k": 0}, "`k` must be at least 1, got 0"),
        ({"normalization": "sum"}, "`normalization` must be one of first, max, min, got 'sum'"),
        ({"order": "place"}, "`order` must be one of sequence, score, got 'place'"),
        ({"scores": torch.zeros(2, 5, 5)}, r"`scores` must have shape \(2, 5, 6\), got \(2, 5, 5\)"),
        ({"scores": torch.zeros(2, 5, 6).half()}, "`scores` must be torch.float32, got torch.float16"),
        ({"scores": torch.zeros(2, 5, 6, device="meta")}, "`scores` is on meta, `queries` on "),
        ({"backend": "cuda"}, "backend='cuda': `split_ranker` has eager, reference, triton"),
    ],
)
def test_wrong_arguments(change, message):
    change = {
        k: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for k, x in change.items()
    }
    with pytest.raises(ValueError, match=message):
        split_ranker(**{**make(), "k": 4, **change})
    if not {"k", "normalization", "order", "scores", "backend"} & change.keys():
        with pytest.raises(ValueError, match=message):
            maxsim(**{**make(), **change})
