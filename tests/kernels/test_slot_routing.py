"""What is special about the router of Raven."""

import pytest
import torch
from kernel_cases import DEVICE, EACH, PLAIN, differentiable, triton
from kernel_cases.slot_routing import OPERATOR, SCORES, make

from subquad_kernels import slot_routing


EVERY = pytest.mark.parametrize("backend", [*PLAIN, triton])


def test_one_float64_input_is_enough():
    inputs = make(bias=True)
    for name in ("logits", "log_decay", "bias"):
        assert slot_routing(**{**inputs, name: inputs[name].double()}).dtype == torch.float64


def first_largest(ranked, topk):
    """A mask of the largest numbers of each row, of equal ones the first, by Python's stable sort."""
    rows = ranked.flatten(0, -2).tolist()
    chosen = [sorted(range(len(row)), key=lambda i: -row[i])[:topk] for row in rows]
    mask = torch.zeros(len(rows), len(rows[0]), dtype=torch.bool)
    for row, columns in enumerate(chosen):
        mask[row, columns] = True
    return mask.view(ranked.shape)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_the_first_of_equal_ones(biased, dtype, backend):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-2, 3, (2, 3, 2, 40), generator=generator).to(dtype)
    logits[logits == 0] *= torch.randn(int((logits == 0).sum()), generator=generator).sign().to(dtype)
    assert logits[logits == 0].signbit().any()  # minus zero is zero
    logits = logits.to(DEVICE)
    bias = None
    ranked = logits
    if biased:  # far apart, so that roundings of the scores do not matter; scores of the same logit are equal
        bias = torch.randint(-1, 2, (2, 40), generator=generator).to(DEVICE, dtype)
        ranked = torch.sigmoid(logits.double()) + bias
    log_decay = torch.full(logits.shape[:3], -1.0, device=DEVICE)
    for topk in (1, 7, 20, 39):
        found = slot_routing(logits, log_decay, topk, bias=bias, backend=backend)
        assert torch.equal((found != 0).cpu(), first_largest(ranked.cpu(), topk))
        assert torch.equal(found, slot_routing(logits, log_decay, topk, bias=bias, backend=backend))


@EVERY
@pytest.mark.parametrize("score", SCORES)
def test_saturated_scores_do_not_tie(score, backend):
    logits = torch.tensor([50.0, 55.0, 60.0, 40.0, 58.0], device=DEVICE).view(1, 1, 1, 5)
    log_decay = torch.full((1, 1, 1), -1.0, device=DEVICE)
    found = slot_routing(logits, log_decay, 2, score=score, backend=backend)
    assert (found != 0).flatten().tolist() == [False, False, True, False, True]
    if score == "sigmoid":
        torch.testing.assert_close(found.flatten()[[2, 4]].tolist(), [-0.5, -0.5])


@EACH
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("biased", [False, True])
def test_masked_slots(biased, score, backend):
    logits = torch.linspace(-1, 1, 6, device=DEVICE).repeat(1, 3, 1, 1)
    logits[0, 1, 0, [0, 5]] = -torch.inf
    logits[0, 2] = -torch.inf
    masked = logits == -torch.inf
    log_decay = torch.full((1, 3, 1), -1.0, device=DEVICE)
    bias = torch.zeros(1, 6, device=DEVICE) if biased else None
    for topk in (3, 5, 6):
        inputs = {"logits": logits.clone().requires_grad_(), "log_decay": log_decay.clone().requires_grad_()}
        found = slot_routing(**inputs, topk=topk, bias=bias, score=score, backend=backend)
        grad, grad_decay = torch.autograd.grad(found.sin().sum(), list(inputs.values()))
        assert not found[masked].any()
        assert not grad[masked].any()
        assert not grad_decay[0, 2].any()
        assert (found != 0).sum(-1).flatten().tolist() == [topk, min(topk, 4), 0]
        assert grad.isfinite().all()
        expected = slot_routing(logits[:, :2], log_decay[:, :2], topk, bias=bias, score=score, backend="reference")
        torch.testing.assert_close(found[:, :2], expected)


@EACH
def test_a_slot_not_chosen_has_no_gradient(backend):
    for per_slot, bias in ((False, False), (True, True)):
        inputs, own = differentiable(OPERATOR, make(per_slot=per_slot, bias=bias))
        found = slot_routing(**inputs, backend=backend)
        grads = torch.autograd.grad(found.sin().sum(), list(own.values()))
        for grad in grads[: 1 + per_slot]:
            assert torch.equal(grad != 0, found != 0)


@EACH
def test_a_bias_has_no_gradient(backend):
    inputs = make(bias=True, per_slot=True)
    for name in ("logits", "log_decay", "bias"):
        inputs[name].requires_grad_()
    slot_routing(**inputs, backend=backend).sum().backward()
    assert inputs["bias"].grad is None
    assert inputs["logits"].grad.any()


@EACH
def test_small_weights(backend):
    # Scores that underflow in float32 and a sum beside which 1e-9 is large.
    logits = torch.tensor([-15.0, -20.0, -200.0, -300.0], device=DEVICE).view(1, 1, 1, 4).requires_grad_()
    log_decay = torch.full((1, 1, 1), -1.0, device=DEVICE)
    grads = []
    for x in (logits, logits.detach().double().requires_grad_()):
        found = slot_routing(x, log_decay, 3, backend=backend if x is logits else "reference")
        grads.append([found.float(), torch.autograd.grad(found[..., :2].sum(), x)[0].float()])
    torch.testing.assert_close(*grads)


@EACH
def test_no_tokens(backend):
    inputs, own = differentiable(OPERATOR, make(length=0))
    found = slot_routing(**inputs, backend=backend)
    assert found.shape == (2, 0, 3, 16)
    assert [x.numel() for x in torch.autograd.grad(found.sum(), list(own.values()))] == [0, 0]
