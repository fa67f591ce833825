"""The slot memory against its own recurrence in float64."""

import functools
import itertools

import pytest
import torch
from kernel_cases import DEVICE, TRITON, assert_same_results, relative_error, triton, without_compiler

import subquad_kernels.backend
from subquad_kernels import slot_memory, slot_memory_state
from subquad_kernels.slot_memory import _slot_memory, _slot_memory_state, _slot_memory_step


EACH = pytest.mark.parametrize("backend", ["eager", triton])
# How much of a slot a step takes away: of the few chosen slots of Raven, of all, of the oldest everything (so that
# slots are a window), anything, nothing.
DECAYS = ("routed", "dense", "window", "extreme", "none")
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200)
# Triton's interpreter is slow.
CASES = [
    *(("eager", length, decay) for length in LENGTHS for decay in DECAYS),
    *(
        pytest.param("triton", length, decay, marks=TRITON)
        for length, decay in (
            (1, "routed"),
            (17, "dense"),
            (65, "window"),
            (65, "none"),
            (130, "routed"),
            (65, "extreme"),
        )
    ),
]


def make_log_f(shape, decay, generator):
    length, slots = shape[1], shape[-1]
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    if decay == "routed":
        chosen = torch.rand(shape, generator=generator).topk(max(slots // 4, 1)).indices
        values = -torch.nn.functional.softplus(noise.gather(-1, chosen)) / 3
        return torch.zeros_like(noise).scatter(-1, chosen, values)
    if decay == "dense":
        return torch.nn.functional.logsigmoid(noise) / 8
    if decay == "window":
        written = torch.arange(length)[:, None, None] % slots == torch.arange(slots)
        return torch.zeros_like(noise).masked_fill(written, -torch.inf)
    if decay == "extreme":
        return -1e-6 * (150e6 ** torch.rand(shape, generator=generator, dtype=torch.float64))
    return torch.zeros_like(noise)


def make(batch, length, heads=2, key=8, value=12, slots=12, decay="routed", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {
        "q": randn(batch, length, heads, key),
        "k": randn(batch, length, heads, key),
        "v": randn(batch, length, heads, value),
        "log_f": make_log_f((batch, length, heads, slots), decay, generator),
        "initial_state": randn(batch, heads, slots, key + value),
    }
    return {name: x.to(DEVICE, dtype) for name, x in inputs.items()}


def assert_equal_to_recurrence(inputs, tolerance, **kwargs):
    """Outputs, states and every gradient."""
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    double = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected = slot_memory(**double, cu_seqlens=kwargs.get("cu_seqlens"), backend="reference")
    assert_same_results(slot_memory(**inputs, **kwargs), inputs, expected, double, tolerance)


@pytest.mark.parametrize(("backend", "length", "decay"), CASES)
def test_forward_and_gradients(backend, length, decay):
    # The Triton kernels subtract sums of log decays, which are rounded where they are large.
    tolerance = 3e-5 if backend == "triton" and decay == "extreme" else 1e-5
    assert_equal_to_recurrence(make(2, length, decay=decay), tolerance, backend=backend)


@EACH
@pytest.mark.parametrize("decay", ["routed", "window", "extreme"])
def test_one_token_after_another(decay, backend):
    """The decoding step, in place."""
    inputs = make(2, 14, decay=decay)
    expected = slot_memory(**{name: x.double() for name, x in inputs.items()}, backend="reference")
    state, outs = inputs["initial_state"], []
    with torch.no_grad():
        for t in range(14):
            token = {name: inputs[name][:, t : t + 1] for name in ("q", "k", "v", "log_f")}
            out, after = slot_memory(**token, initial_state=state, inplace=True, backend=backend)
            assert after is state
            outs.append(out)
    assert relative_error(torch.cat(outs, 1), expected[0]) < 1e-5
    assert relative_error(state, expected[1]) < 1e-5


@TRITON
@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 70]])
def test_segments(bounds, monkeypatch):
    """What enters the segments of a sequence is found first."""
    from subquad_kernels.slot_memory import triton_kernels

    monkeypatch.setattr(triton_kernels, "MIN_SEGMENT", 32)
    inputs = make(1, 70, heads=1)
    if bounds:
        inputs["initial_state"] = make(3, 1, heads=1)["initial_state"]
        bounds = torch.tensor(bounds, device=DEVICE)
    assert_equal_to_recurrence(inputs, 1e-5, cu_seqlens=bounds, backend="triton")


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_total_decay(dtype, backend):
    inputs = make(2, 70, dtype=dtype, decay="dense")
    inputs["log_f"][:, 3::7, :, ::2] = -torch.inf
    inputs["log_f"][:, 50:, :, 1::2] = torch.finfo(dtype).min
    assert_equal_to_recurrence(inputs, 1e-5 if dtype == torch.float32 else 8e-3, backend=backend)


@EACH
def test_weak_decay(backend):
    # 1 - exp(-1e-6) in float32 would be off by 5%.
    torch.manual_seed(0)
    inputs = make(1, 40)
    inputs["log_f"] = -1e-6 * (1 + torch.rand_like(inputs["log_f"]))
    inputs["initial_state"].zero_()
    assert_equal_to_recurrence(inputs, 1e-5, backend=backend)
    del inputs["initial_state"]
    with torch.no_grad():
        token = {name: x[:, :1] for name, x in inputs.items()}
        expected = slot_memory(**{name: x.double() for name, x in token.items()}, backend="reference")[1]
        assert relative_error(slot_memory(**token, backend=backend)[1], expected) < 1e-5


@pytest.mark.parametrize("backend", ["eager", "reference", triton])
@pytest.mark.parametrize("length", [1, 5, 70])
def test_slots_not_written_keep_their_bits(length, backend):
    inputs = make(2, length, decay="dense")
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


@pytest.mark.parametrize("backend", ["eager", "reference", triton])
def test_replaced_slots_are_a_sliding_window(backend):
    slots, length = 12, 70
    inputs = make(2, length, slots=slots, decay="window", dtype=torch.float32)
    del inputs["initial_state"]
    out = slot_memory(**inputs, backend=backend)[0]
    q, k, v = (inputs[name].double().transpose(1, 2) for name in ("q", "k", "v"))
    age = torch.arange(length)[:, None] - torch.arange(length)
    mask = ((age >= 0) & (age < slots)).to(DEVICE)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).transpose(1, 2)
    assert relative_error(out[:, slots - 1 :], expected[:, slots - 1 :]) < 1e-5


@TRITON
@pytest.mark.parametrize(("length", "decay"), [(1, "routed"), (17, "extreme"), (65, "routed")])
def test_bfloat16(length, decay):
    inputs = make(2, length, decay=decay, dtype=torch.bfloat16)
    if decay == "routed":  # as the model has it
        inputs["log_f"] = make(2, length, decay=decay)["log_f"]
    inputs["initial_state"] = inputs["initial_state"].float()
    assert_equal_to_recurrence(inputs, 2e-2, backend="triton")


@TRITON
@pytest.mark.parametrize("length", [1, 65])
def test_float16(length):
    # The products are of numbers of 10 bits: in the interpreter, of 23.
    assert_equal_to_recurrence(make(2, length, dtype=torch.float16), 4e-3, backend="triton")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("length", [1, 65])
def test_dtypes(dtype, tolerance, length):
    inputs = make(2, length, dtype=dtype)
    double = {name: x.double() for name, x in inputs.items()}
    expected_out, expected_state = slot_memory(**double, backend="reference")
    for backend in ("eager", "reference"):
        out, state = slot_memory(**inputs, backend=backend)
        assert out.dtype == dtype
        assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert relative_error(out, expected_out) < tolerance
        # What enters is rounded, the accumulation is not.
        assert relative_error(state, expected_state) < (1e-12 if dtype == torch.float64 else 1e-6)
    if length > 1:
        assert_equal_to_recurrence(inputs, tolerance, backend="eager")


SIZES = [(1, 1, 1), (3, 5, 2), (24, 16, 40), (16, 32, 64), (8, 130, 17), (70, 8, 5), (16, 16, 512)]


@pytest.mark.parametrize(
    ("backend", "key", "value", "slots"),
    [
        *(("eager", *sizes) for sizes in (*SIZES, (512, 16, 16), (16, 512, 16), (256, 256, 256))),
        *(pytest.param("triton", *sizes, marks=TRITON) for sizes in SIZES),
    ],
)
def test_sizes(backend, key, value, slots):
    inputs = make(1, 40, heads=1, key=key, value=value, slots=slots)
    inputs["q"] *= min(1, 4 / key**0.5)
    assert_equal_to_recurrence(inputs, 1e-5, backend=backend)


@EACH
@pytest.mark.parametrize("pieces", [(1,) * 4, (3, 1, 30, 1), (64, 6)])
def test_carried_state(pieces, backend):
    inputs = {name: x.requires_grad_() for name, x in make(2, sum(pieces)).items()}

    def in_pieces():
        state, start, outs = inputs["initial_state"], 0, []
        for piece in pieces:
            part = {name: inputs[name][:, start : start + piece] for name in ("q", "k", "v", "log_f")}
            out, state = slot_memory(**part, initial_state=state, backend=backend)
            outs.append(out)
            start += piece
        return torch.cat(outs, 1), state

    whole, found = slot_memory(**inputs), in_pieces()
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(in_pieces(), whole, atol=1e-5, rtol=1e-5)
    grads = [
        torch.autograd.grad(out.sin().sum() + state.cos().sum(), [*inputs.values()]) for out, state in (whole, found)
    ]
    torch.testing.assert_close(*grads, atol=2e-5, rtol=1e-5)


@EACH
@pytest.mark.parametrize("lengths", [(3, 0, 64, 1, 17), (0, 5), (7, 0)])
def test_packed_documents(lengths, backend):
    inputs = make(1, sum(lengths))
    inputs["initial_state"] = make(len(lengths), 1)["initial_state"]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    assert_equal_to_recurrence(inputs, 1e-5, cu_seqlens=bounds, backend=backend)
    without = {name: x.detach() for name, x in inputs.items() if name != "initial_state"}
    expected = slot_memory(**without, cu_seqlens=bounds, backend="reference")
    torch.testing.assert_close(
        slot_memory(**without, cu_seqlens=bounds, backend=backend), expected, atol=1e-5, rtol=1e-5
    )


@EACH
@pytest.mark.parametrize("length", [1, 40])
def test_without_initial_state(length, backend):
    inputs = make(2, length)
    inputs["initial_state"].zero_()
    expected = slot_memory(**inputs)
    del inputs["initial_state"]
    torch.testing.assert_close(slot_memory(**inputs, backend=backend), expected, atol=1e-5, rtol=1e-5)
    assert_equal_to_recurrence(inputs, 1e-5, backend=backend)


@EACH
def test_in_place(backend):
    for length in (1, 20):
        inputs = make(2, length)
        expected = slot_memory(**inputs)
        state = inputs["initial_state"]
        with torch.no_grad():
            out, after = slot_memory(**inputs, inplace=True, backend=backend)
        assert after is state
        torch.testing.assert_close((out, state), expected, atol=1e-5, rtol=1e-5)


@EACH
def test_the_given_state_is_not_changed(backend):
    for length in (1, 20):
        inputs = make(2, length)
        before = inputs["initial_state"].clone()
        slot_memory(**inputs, backend=backend)
        slot_memory_state(inputs["initial_state"], inputs["k"], inputs["v"], inputs["log_f"], backend=backend)
        assert torch.equal(inputs["initial_state"], before)


@EACH
@pytest.mark.parametrize("bounds", [None, [0, 3, 7]])
def test_operator_registration(bounds, backend):
    inputs = make(1, 7, heads=1)
    if bounds:
        inputs["initial_state"] = make(2, 1, heads=1)["initial_state"]
        bounds = torch.tensor(bounds, device=DEVICE)
    arguments = [x.requires_grad_() for x in inputs.values()]
    torch.library.opcheck(_slot_memory, (*arguments, bounds, backend))


@EACH
def test_registration_of_step_and_state(backend):
    inputs = make(1, 3, heads=1)
    state = inputs.pop("initial_state")
    token = [x[:, 0] for x in inputs.values()]
    for before in (None, state):
        torch.library.opcheck(_slot_memory_step, (*token, before, torch.ones_like(state), backend))
        torch.library.opcheck(_slot_memory_state, (before, inputs["k"], inputs["v"], inputs["log_f"], backend))


@TRITON
def test_eager_takes_over(monkeypatch):
    from subquad_kernels.slot_memory import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    inputs = {name: x.requires_grad_() for name, x in make(2, 20).items()}
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        slot_memory(**inputs, backend="triton")
    run = functools.partial(_slot_memory, *inputs.values(), None, "auto")
    with pytest.warns(RuntimeWarning, match="no compiler"):
        found = run()[:2]
    assert len(subquad_kernels.backend._failed) == 1  # for this dtype and size
    torch.testing.assert_close(found, slot_memory(**inputs))
    grads = [torch.autograd.grad(one[0].sin().sum(), list(inputs.values())) for one in (run(), slot_memory(**inputs))]
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        tokens = {name: x[:, :1] for name, x in inputs.items() if name != "initial_state"}
        state = inputs["initial_state"].clone()
        with pytest.warns(RuntimeWarning, match="`slot_memory_step` runs in plain torch"):
            out = _slot_memory_step(*(x[:, 0] for x in tokens.values()), None, state, "auto")
        expected = slot_memory(**tokens, initial_state=inputs["initial_state"])
        torch.testing.assert_close((out.unsqueeze(1), state), expected)
        with pytest.warns(RuntimeWarning, match="`slot_memory_state` runs in plain torch"):
            state = _slot_memory_state(inputs["initial_state"], tokens["k"], tokens["v"], tokens["log_f"], "auto")
        torch.testing.assert_close(state, expected[1])


@pytest.mark.parametrize("length", [1, 7])
@EACH
def test_autocast_changes_nothing(length, backend):
    inputs = {name: x.requires_grad_() for name, x in make(2, length).items()}

    def with_grads(out, state):
        return out, state, *torch.autograd.grad(out.sin().sum() + state.sin().sum(), list(inputs.values()))

    def run(backend):
        arguments = [inputs[name] for name in ("initial_state", "k", "v", "log_f")]
        with torch.no_grad():
            step, state = slot_memory(**inputs, backend=backend), slot_memory_state(*arguments, backend=backend)
        return slot_memory(**inputs, backend=backend), step, state

    expected, *expected_rest = run(backend)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found, *rest = run(backend)
        reference = slot_memory(**inputs, backend="reference")
    expected, found = with_grads(*expected), with_grads(*found)
    assert all(x.dtype == torch.float32 for x in found)
    torch.testing.assert_close((found, rest), (expected, expected_rest), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(reference, found[:2], atol=1e-5, rtol=1e-5)


@EACH
def test_compiles_without_graph_breaks(backend):
    torch.compiler.reset()

    def loss(**inputs):
        return slot_memory(**inputs, backend=backend)[0].square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for length in (1, 33):
        inputs = make(2, length)
        leaf = inputs["k"].requires_grad_()
        (grad,) = torch.autograd.grad(compiled(**inputs), leaf)
        (expected,) = torch.autograd.grad(slot_memory(**inputs)[0].square().mean(), leaf)
        torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-4)
        with torch.no_grad():
            state = inputs["initial_state"].clone()
            step = torch.compile(functools.partial(slot_memory, inplace=True, backend=backend), fullgraph=True)
            found = step(**{**inputs, "initial_state": state})
            torch.testing.assert_close(found, slot_memory(**inputs), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(state, found[1])


@pytest.mark.parametrize("length", [1, 20])
def test_meta_device(length):
    inputs = make(2, length, dtype=torch.bfloat16)
    expected = slot_memory(**inputs)
    found = slot_memory(**{name: x.to("meta") for name, x in inputs.items()})
    state = slot_memory_state(None, *(inputs[name].to("meta") for name in ("k", "v", "log_f")))
    for x, y in zip((*found, state), (*expected, expected[1]), strict=True):
        assert (x.device.type, x.shape, x.dtype) == ("meta", y.shape, y.dtype)


@pytest.mark.parametrize("bounds", [None, [0, 1, 5]])
def test_gradcheck(bounds):
    inputs = make(1, 5, heads=1, key=2, value=3, slots=3, decay="dense", dtype=torch.float64)
    inputs["initial_state"] = make(2 if bounds else 1, 1, 1, 2, 3, 3, dtype=torch.float64)["initial_state"]
    bounds = torch.tensor(bounds, device=DEVICE) if bounds else None
    arguments = [x.requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradcheck(lambda *x: slot_memory(*x, cu_seqlens=bounds, backend="eager"), arguments)


@pytest.mark.parametrize("backend", ["eager", "reference", triton])
@pytest.mark.parametrize("length", [1, 21])
def test_state_alone(length, backend):
    inputs = make(2, length)
    for state in (inputs["initial_state"], None):
        arguments = state, *(inputs[name].clone().requires_grad_() for name in ("k", "v", "log_f"))
        expected = slot_memory(inputs["q"], *arguments[1:], state)[1]
        found = slot_memory_state(*arguments, backend=backend)
        with torch.no_grad():
            without_graph = slot_memory_state(*arguments, backend=backend)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(without_graph, expected.detach(), atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(x.sin().sum(), arguments[1:]) for x in (found, expected)]
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 5, 2, 7)}, r"`q` must have shape \(2, 5, 2, 8\), got \(2, 5, 2, 7\)"),
        ({"k": torch.zeros(2, 0, 2, 8)}, "`k` must be"),
        ({"v": torch.zeros(2, 4, 2, 12)}, "`v` must have shape"),
        ({"v": torch.tensor(1.0)}, "`v` must be"),
        ({"log_f": torch.zeros(2, 12)}, "`log_f` must be"),
        ({"log_f": torch.zeros(2, 5, 1, 12)}, "`log_f` must have shape"),
        ({"log_f": torch.zeros(2, 5, 2, 11)}, r"`initial_state` must have shape \(2, 2, 11, 20\)"),
        ({"initial_state": torch.zeros(3, 2, 12, 20)}, "`initial_state` must have shape"),
        ({"q": torch.zeros(2, 5, 2, 8, dtype=torch.int64)}, "`q` must be floating point, got torch.int64"),
        ({"log_f": torch.zeros(2, 5, 2, 12, device="meta")}, "`log_f` is on meta"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "batch of 2"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "`cu_seqlens` must be int32 or int64"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"inplace": True, "initial_state": None}, "`inplace` needs a float32"),
        (
            {"inplace": True, "initial_state": torch.zeros(2, 2, 12, 20, dtype=torch.float64)},
            "`inplace` needs a float32",
        ),
        ({"inplace": True, "initial_state": torch.zeros(2, 2, 20, 12).mT}, "`inplace` needs a float32, contiguous"),
        ({"inplace": True, "q": torch.zeros(2, 5, 2, 8, requires_grad=True)}, "`inplace` overwrites a state"),
    ],
)
def test_errors_name_the_argument(change, message):
    movable = {name: x for name, x in change.items() if isinstance(x, torch.Tensor) and x.device.type != "meta"}
    with pytest.raises(ValueError, match=message):
        slot_memory(**{**make(2, 5), **change, **{name: x.to(DEVICE) for name, x in movable.items()}})


def test_errors_of_the_state_alone():
    inputs = make(2, 5)
    with pytest.raises(ValueError, match="`initial_state` must have shape"):
        slot_memory_state(inputs["initial_state"][:1], inputs["k"], inputs["v"], inputs["log_f"])
    with pytest.raises(ValueError, match="backend='cuda'"):
        slot_memory_state(None, inputs["k"], inputs["v"], inputs["log_f"], backend="cuda")


@pytest.mark.parametrize("backend", ["eager", "reference", triton])
@pytest.mark.parametrize("bounds", [[0, 3], [1, 5], [0, 4, 2, 5]])
def test_wrong_document_borders(bounds, backend):
    if (backend, DEVICE) == ("triton", "cuda"):
        return  # an assertion on the device, after which it could run no other test
    error = RuntimeError if backend == "triton" else ValueError
    with pytest.raises(error, match="`cu_seqlens` must rise from 0 to 5"):
        bounds = torch.tensor(bounds, device=DEVICE)
        slot_memory(**{**make(1, 5), "initial_state": None}, cu_seqlens=bounds, backend=backend)


@TRITON
def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    with pytest.raises(ValueError, match="computes in float32, got float64"):
        slot_memory(**make(1, 5, dtype=torch.float64), backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    inputs = {name: x.cpu() for name, x in make(1, 5).items()}
    with pytest.raises(ValueError, match="the tensors are on cpu"):
        slot_memory(**inputs, backend="triton")


def test_environment_chooses_the_backend(monkeypatch):
    inputs = make(1, 5)
    state = [inputs[name] for name in ("initial_state", "k", "v", "log_f")]
    monkeypatch.setenv("SUBQUAD_BACKEND", "reference")
    torch.testing.assert_close(slot_memory(**inputs), slot_memory(**inputs, backend="eager"))
    torch.testing.assert_close(slot_memory_state(*state), slot_memory_state(*state, backend="eager"))
    monkeypatch.setenv("SUBQUAD_BACKEND", "nothing")
    for run in (lambda: slot_memory(**inputs), lambda: slot_memory_state(*state)):
        with pytest.raises(ValueError, match="SUBQUAD_BACKEND='nothing'"):
            run()
