"""The router of Raven against its own formula in float64."""

import pytest
import torch
from kernel_cases import DEVICE, TRITON, assert_same_results, triton, without_compiler

import subquad_kernels.backend
from subquad_kernels import slot_routing
from subquad_kernels.slot_routing import SCORES, _slot_routing


BACKENDS = ("eager", triton)
EACH = pytest.mark.parametrize("backend", BACKENDS)
EVERY = pytest.mark.parametrize("backend", ["reference", *BACKENDS])
SIZES = [(1, 1), (5, 1), (5, 4), (16, 5), (16, 16), (40, 13), (256, 32), (256, 255)]


def make(slots=16, length=7, heads=3, per_slot=False, bias=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    inputs = {
        "logits": 2 * randn(2, length, heads, slots),
        "log_decay": -randn(2, length, heads, *([slots] if per_slot else [])).exp(),
    }
    if bias:
        inputs["bias"] = randn(heads, slots)
    return {name: x.to(dtype) for name, x in inputs.items()}


def leaves(inputs, dtype=None):
    """Copies, those of the tensors that have a gradient also by themselves."""
    inputs = {name: x.detach().to(dtype).clone() for name, x in inputs.items()}
    return inputs, {name: inputs[name].requires_grad_() for name in ("logits", "log_decay")}


def assert_close_to_reference(inputs, topk, tolerance=1e-5, call=slot_routing, **options):
    inputs, own = leaves(inputs)
    expected_inputs, expected_own = leaves(inputs, torch.float64)
    found = call(**inputs, topk=topk, **options)
    options["backend"] = "reference"
    expected = slot_routing(**expected_inputs, topk=topk, **options)
    assert found.dtype == torch.promote_types(torch.float32, next(iter(inputs.values())).dtype)
    assert found.shape == inputs["logits"].shape
    assert torch.equal(found == 0, expected == 0)
    assert ((found != 0).sum(-1) == topk).all()
    if topk == 1 and options.get("score") != "softmax":
        # One slot has the whole decay whatever its logit.
        (grad,) = torch.autograd.grad(found.sum(), own.pop("logits"), retain_graph=True)
        assert grad.abs().max() < 1e-6
        del expected_own["logits"]
    assert_same_results((found,), own, (expected,), expected_own, tolerance)


@EACH
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("per_slot", [False, True])
@pytest.mark.parametrize(("score", "scale"), [("sigmoid", 1.0), ("sigmoid", 4.0), ("softmax", 1.0), ("softmax", 4.0)])
def test_forward_and_gradients(score, scale, per_slot, bias, backend):
    inputs = make(per_slot=per_slot, bias=bias)
    assert_close_to_reference(inputs, 5, score=score, scale=scale, backend=backend)


@EACH
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("slots", "topk"), SIZES)
def test_sizes(slots, topk, score, backend):
    inputs = make(slots, length=2, per_slot=slots == 40, bias=slots % 8 == 0)
    assert_close_to_reference(inputs, topk, score=score, backend=backend)


@EACH
def test_many_slots(backend):
    assert_close_to_reference(make(1000, length=1, heads=1), 100, backend=backend)


@EACH
def test_every_number_of_chosen(backend):
    for topk in range(1, 9):
        assert_close_to_reference(make(8, length=2), topk, backend=backend)


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_dtypes(bias, dtype, backend):
    if (dtype, backend) == (torch.float64, "triton"):
        return
    inputs = make(64, bias=bias, dtype=dtype)
    tolerance = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-12}[dtype]
    assert_close_to_reference(inputs, 20, tolerance, backend=backend)
    found = slot_routing(**inputs, topk=20, backend=backend)
    expected = slot_routing(**{name: x.double() for name, x in inputs.items()}, topk=20, backend="reference")
    # What enters is rounded, nothing afterwards.
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    if dtype != torch.float64:
        inputs["log_decay"] = inputs["log_decay"].float()
        assert_close_to_reference(inputs, 20, tolerance, backend=backend)


def test_one_float64_input_is_enough():
    inputs = make(bias=True)
    for name in inputs:
        found = slot_routing(**{**inputs, name: inputs[name].double()}, topk=5)
        assert found.dtype == torch.float64


def first_largest(ranked, topk):
    """The places of the largest numbers of a row, of equal ones the first, by Python's stable sort."""
    rows = ranked.flatten(0, -2).tolist()
    chosen = [sorted(range(len(row)), key=lambda i: -row[i])[:topk] for row in rows]
    mask = torch.zeros(len(rows), len(rows[0]), dtype=torch.bool)
    for row, places in enumerate(chosen):
        mask[row, places] = True
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
        inputs, own = leaves(make(per_slot=per_slot, bias=bias))
        found = slot_routing(**inputs, topk=5, backend=backend)
        grads = torch.autograd.grad(found.sin().sum(), list(own.values()))
        for grad in grads[: 1 + per_slot]:
            assert torch.equal(grad != 0, found != 0)


@EACH
def test_a_bias_has_no_gradient(backend):
    inputs = make(bias=True)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    slot_routing(**inputs, topk=5, backend=backend).sum().backward()
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
def test_strides(backend):
    inputs = make(bias=True)
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    both = []
    for given, one in ((strided, backend), (inputs, "reference")):
        own = {name: given[name].requires_grad_() for name in ("logits", "log_decay")}
        found = slot_routing(**given, topk=5, backend=one)
        # The gradient of a sum is one number, expanded.
        both.append((found, *torch.autograd.grad(found.sum(), list(own.values()))))
    torch.testing.assert_close(*both)


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype, backend):
    inputs, own = leaves(make(bias=True))
    expected = slot_routing(**inputs, topk=5, backend=backend)
    with torch.autocast(DEVICE, dtype=dtype):
        found = slot_routing(**inputs, topk=5, backend=backend)
        reference = slot_routing(**inputs, topk=5, backend="reference")
    assert torch.equal(found, expected)
    torch.testing.assert_close(reference, expected)
    grads = [torch.autograd.grad(x.sum(), list(own.values())) for x in (found, expected)]
    assert all(map(torch.equal, *grads))


@EACH
def test_opcheck(backend):
    for per_slot, bias, dtype in ((False, True, torch.float32), (True, False, torch.bfloat16)):
        inputs, _ = leaves(make(length=3, per_slot=per_slot, bias=bias, dtype=dtype))
        arguments = (inputs["logits"], inputs["log_decay"], 5, inputs.get("bias"), "sigmoid", 1.0, backend)
        torch.library.opcheck(_slot_routing, arguments)


@EACH
def test_compile(backend):
    torch.compiler.reset()
    compiled = torch.compile(slot_routing, fullgraph=True, backend="aot_eager")
    for length in (1, 5):
        for score in SCORES:
            inputs = make(length=length, bias=True)
            assert_close_to_reference(inputs, 5, call=compiled, score=score, backend=backend)


@EACH
def test_meta_tensors(backend):
    inputs = {name: x.to("meta").requires_grad_() for name, x in make(dtype=torch.bfloat16).items()}
    found = slot_routing(**inputs, topk=5, backend=backend)
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float32, inputs["logits"].shape)
    grads = torch.autograd.grad(found.sum(), list(inputs.values()))
    assert [(x.dtype, x.shape) for x in grads] == [(x.dtype, x.shape) for x in inputs.values()]


@EACH
def test_no_tokens(backend):
    inputs, own = leaves(make(length=0))
    found = slot_routing(**inputs, topk=5, backend=backend)
    assert found.shape == (2, 0, 3, 16)
    assert [x.numel() for x in torch.autograd.grad(found.sum(), list(own.values()))] == [0, 0]


@TRITON
def test_eager_takes_over(monkeypatch):
    from subquad_kernels.slot_routing import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    inputs = make()
    arguments = (*inputs.values(), 5, None, "sigmoid", 1.0)
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        _slot_routing(*arguments, "triton")
    with pytest.warns(RuntimeWarning, match="no compiler"):
        found = _slot_routing(*arguments, "auto")
    torch.testing.assert_close(found, slot_routing(**inputs, topk=5, backend="reference"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logits": torch.zeros(2, 7, 48)},
            r"`logits` must be \(batch, length, heads, slots >= 1\), got \(2, 7, 48\)",
        ),
        ({"logits": torch.zeros(2, 7, 3, 0)}, "`logits` must be"),
        ({"logits": torch.zeros(2, 7, 3, 16, dtype=torch.int64)}, "`logits` must be floating point, got torch.int64"),
        ({"log_decay": torch.zeros(2, 7, 3, 1)}, r"`log_decay` must have shape \(2, 7, 3\) or \(2, 7, 3, 16\), got"),
        ({"log_decay": torch.zeros(2, 7, 3, dtype=torch.int64)}, "`log_decay` must be floating point"),
        ({"bias": torch.zeros(16)}, r"`bias` must have shape \(3, 16\), got \(16,\)"),
        ({"bias": torch.zeros(3, 16, device="meta")}, "`bias` is on meta, `logits` on "),
        ({"topk": 0}, "`topk` must be from 1 to 16, the number of slots, got 0"),
        ({"topk": 17}, "`topk` must be from 1 to 16, the number of slots, got 17"),
        ({"topk": 1.5}, "`topk` must be from 1 to 16, the number of slots, got 1.5"),
        ({"score": "tanh"}, "`score` must be one of .*, got 'tanh'"),
        ({"scale": 0.0}, "`scale` must be above 0 and finite, got 0.0"),
        ({"backend": "cuda"}, "backend='cuda': `slot_routing` has eager, reference, triton"),
    ],
)
def test_wrong_arguments(change, message):
    change = {
        k: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for k, x in change.items()
    }
    with pytest.raises(ValueError, match=message):
        slot_routing(**{**make(), "topk": 5, **change})


@TRITON
def test_triton_is_refused_for_float64():
    inputs = make()
    with pytest.raises(ValueError, match="`slot_routing` computes in float32, got float64"):
        slot_routing(inputs["logits"], inputs["log_decay"].double(), 5, backend="triton")
