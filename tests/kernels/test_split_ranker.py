"""What is special about the ranker."""

import pytest
import torch
from kernel_cases import DEVICE, EACH, Made, assert_like_reference, on_device, triton
from kernel_cases.split_ranker import FIRST, NORMALIZATIONS, OPERATOR, make, vectors

from subquad_kernels import maxsim, split_ranker
from subquad_kernels.split_ranker import eager


def exact(inputs):
    return {
        n: x.detach().double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in inputs.items()
    }


def differentiable(inputs):
    return {
        n: x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x
        for n, x in inputs.items()
    }


def leaves(inputs):
    return [inputs["queries"], inputs["splits"]]


def assert_close_to_reference(inputs, backend, tolerance=1e-6):
    scores = maxsim(**vectors(inputs), backend=backend)
    expected = maxsim(**exact(vectors(inputs)), backend="reference")
    assert scores.dtype == torch.promote_types(inputs["queries"].dtype, torch.float32)
    # The error of a mean of cosines, whether it is near zero or not.
    size = inputs["queries"].shape[2]
    torch.testing.assert_close(scores.double() / size, expected / size, rtol=0, atol=tolerance)
    return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@EACH
def test_scores(backend, dtype):
    """The operator alone, also of half precision: what enters is rounded, nothing afterwards."""
    for per_query in (1, 8):
        assert_close_to_reference(make(per_query=per_query, per_split=8, size=100, dtype=dtype), backend)


def test_scores_of_float64():
    assert_close_to_reference(make(dtype=torch.float64), "eager", 1e-14)


@pytest.mark.parametrize("per_query", [1, 3])
@EACH
def test_documents(backend, per_query):
    inputs = make(current=6, per_query=per_query, number=(tuple(range(6)),))
    scores = maxsim(**vectors(inputs), backend=backend)
    assert torch.equal(scores.isfinite()[0].sum(-1), inputs["number"][0])
    first = torch.tensor(FIRST, device=DEVICE)
    for inputs["first"] in (first, first[:1], first.T.contiguous().T):
        scores = assert_close_to_reference(inputs, backend)
        assert torch.equal(scores.isfinite()[0].sum(-1), torch.tensor([0, 1, 2, 0, 1, 0], device=DEVICE))
    assert_like_reference(OPERATOR, {**inputs, "k": 3}, backend)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # by the interpreter
@pytest.mark.parametrize("per_query", [1, 4])
@EACH
def test_only_candidates_matter(backend, per_query):
    inputs = make(per_query=per_query, total=9)
    inputs["number"].clamp_(max=5)
    expected = maxsim(**vectors(inputs), backend=backend)
    inputs["splits"][:, 5:] = torch.nan
    assert torch.equal(maxsim(**vectors(inputs), backend=backend), expected)


@pytest.mark.parametrize("per_query", [1, 4])
@EACH
def test_nothing_to_compare(backend, per_query):
    inputs = make(per_query=per_query)
    inputs["number"].zero_()
    index, weights, scores = split_ranker(**{**inputs, "k": 3}, backend=backend)
    assert (index == -1).all() and not weights.any() and (scores == -torch.inf).all()
    for empty in (make(batch=0), make(current=0), make(total=1)):
        empty["splits"] = empty["splits"][:, :0]
        index, weights, scores = split_ranker(**{**differentiable(empty), "k": 3}, backend=backend)
        assert index.shape == weights.shape == (*empty["number"].shape, 2)
        assert (index == -1).all() and not weights.any() and scores.shape == (*empty["number"].shape, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EACH
def test_one_token_after_the_other(backend, dtype):
    inputs = make(current=4, per_query=9, per_split=9, dtype=dtype)
    expected = maxsim(**vectors(inputs), backend=backend)
    sums = 0
    for token in inputs["queries"].split(1, dim=2):
        sums = sums + maxsim(**{**vectors(inputs), "queries": token}, backend=backend)
    torch.testing.assert_close(sums, expected)
    found = split_ranker(**{**inputs, "k": 3}, scores=sums, backend=backend)
    torch.testing.assert_close(found, split_ranker(**{**inputs, "k": 3}, backend=backend))
    assert found[2] is sums


@pytest.mark.parametrize("tokens", [1, 5, 12, 20])
def test_eager_chunks(tokens, monkeypatch):
    monkeypatch.setattr(eager, "TOKENS", tokens)
    for per_query, per_split in ((1, 4), (3, 4), (4, 1)):
        inputs = make(batch=3, per_query=per_query, per_split=per_split)
        assert_close_to_reference(inputs, "eager")
        assert_close_to_reference({**inputs, "first": torch.full_like(inputs["number"], 2)}, "eager")


def test_eager_memory_is_bounded():
    # The mode sees nothing of what is inside a custom operator.
    x, number = torch.randn(4, 64, 64, 8), torch.arange(64)[None]
    with Made() as made:
        eager.maxsim_eager(x[:1], x[:1], number, None)
    assert x[0].numel() < max(made.elements) <= eager.TOKENS**2 < 4096**2
    with Made() as made:
        eager.maxsim_eager(x[:, :8], x[:, :8], number[:, :8], None)
    assert max(made.elements) <= eager.TOKENS**2


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@EACH
def test_one_split_is_all_there_is(backend, normalization):
    for k, inputs in ((2, make()), (5, make(total=1))):
        inputs = differentiable(inputs)
        index, weights, _ = split_ranker(**{**inputs, "k": k, "normalization": normalization}, backend=backend)
        assert torch.equal(index, split_ranker(**{**exact(inputs), "k": k}, backend="reference")[0])
        assert torch.equal((index >= 0).any(-1), inputs["number"] > 0)
        torch.testing.assert_close(weights, (index >= 0).float())
        for grad in torch.autograd.grad(weights.sum(), leaves(inputs)):
            assert grad.abs().max() < 1e-6


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@EACH
def test_gradients_with_given_scores(backend, normalization):
    inputs = make()
    inputs["scores"] = maxsim(**vectors(inputs))
    leaf = differentiable(inputs)
    leaf["scores"] = inputs["scores"]
    _, weights, _ = split_ranker(**{**leaf, "k": 4, "normalization": normalization}, backend=backend)
    found = torch.autograd.grad(weights.square().sum(), leaves(leaf))
    del leaf["scores"]
    _, weights, _ = split_ranker(**{**leaf, "k": 4, "normalization": normalization}, backend=backend)
    torch.testing.assert_close(found, torch.autograd.grad(weights.square().sum(), leaves(leaf)))


def test_values_by_hand():
    scores = torch.tensor([[[4.0, 1.0, 3.0, 2.0, -torch.inf], [-torch.inf, -2.0, -4.0, -torch.inf, -torch.inf]]])
    inputs = {**make(batch=1, current=2, total=5), "scores": scores.to(DEVICE)}
    index, weights, _ = split_ranker(**{**inputs, "k": 4})
    assert index.tolist() == [[[0, 2, 3], [-1, 1, 2]]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[[1.0, 0.75, 0.5], [0.0, 1.0, 2.0]]]))
    index, weights, _ = split_ranker(**{**inputs, "k": 3, "normalization": "max"})
    assert index.tolist() == [[[0, 2], [1, 2]]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[[1.0, 0.75], [1.0, 2.0]]]))
    index, weights, _ = split_ranker(**{**inputs, "k": 4, "normalization": "min", "order": "score"})
    assert index.tolist() == [[[0, 2, 3], [-1, 1, 2]]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[[2.0, 1.5, 1.0], [0.0, 0.5, 1.0]]]))
    inputs["scores"] = inputs["scores"].flip(-1)
    index, weights, _ = split_ranker(**{**inputs, "k": 4, "normalization": "first", "order": "score"})
    assert index.tolist() == [[[4, 2, 1], [-1, 3, 2]]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[[2.0, 1.5, 1.0], [0.0, 0.5, 1.0]]]))


@EACH
def test_the_first_of_equals(backend):
    inputs = make(current=2, total=40, per_split=1)
    inputs["splits"] = inputs["splits"][:, :1].expand(-1, 40, -1, -1)
    inputs["number"] = torch.tensor([[40, 3]], device=DEVICE)
    index, weights, scores = split_ranker(**{**inputs, "k": 5}, backend=backend)
    assert index.tolist() == 2 * [[[0, 1, 2, 3], [-1, 0, 1, 2]]]
    torch.testing.assert_close(weights, (index >= 0).float())
    scores[:, 0, 30] += 1.0
    assert split_ranker(**{**inputs, "k": 5}, scores=scores)[0][:, 0].tolist() == 2 * [[0, 1, 2, 30]]


@pytest.mark.parametrize("backend", ["reference", "eager", triton])
def test_alone(backend):
    inputs = differentiable(make())
    index, weights, scores = split_ranker(**{**inputs, "k": 1}, backend=backend)
    assert index.shape == weights.shape == (2, 5, 0)
    torch.testing.assert_close(scores, maxsim(**vectors(inputs)))
    assert not scores.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@EACH
def test_zeros(backend, normalization, dtype):
    inputs = make(total=6, dtype=dtype)
    inputs["number"] = torch.tensor([[0, 1, 2, 3, 6]], device=DEVICE)
    inputs["queries"][0, :, 1:] = 0
    inputs["splits"][:, 0] = 0
    inputs["splits"][1] = 0
    scores = assert_close_to_reference(inputs, backend)
    assert not scores[:, 1:, 0].any() and not scores[1, 4].any()

    expected = split_ranker(**{**exact(inputs), "k": 4, "normalization": normalization}, backend="reference")
    inputs = differentiable(inputs)
    index, weights, _ = split_ranker(**{**inputs, "k": 4, "normalization": normalization}, backend=backend)
    assert torch.equal(index, expected[0])
    torch.testing.assert_close(weights.double(), expected[1], rtol=1e-5, atol=0)
    assert not weights[1].any()
    assert weights[0].any() == (normalization != "first" or index[0, 4, 0] > 0)
    leaf = leaves(inputs)
    for x, grad in zip(leaf, torch.autograd.grad(weights.sum(), leaf), strict=True):
        assert grad.isfinite().all()
        assert not grad[(x == 0).all(-1)].any()


def test_a_divisor_that_comes_to_nothing():
    inputs = make()
    scores = torch.full((2, 5, 6), -1e-8, device=DEVICE)
    for normalization in NORMALIZATIONS:
        assert not split_ranker(**{**inputs, "k": 4, "normalization": normalization}, scores=scores)[1].any()


@pytest.mark.parametrize(("change", "message"), [x for x in OPERATOR.wrong if x[0].keys() <= vectors(x[0]).keys()])
def test_wrong_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        maxsim(**{**vectors(make()), **on_device(change)})
