"""What the C library computes for single tokens: equal to float64, for every instruction set."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from kernel_cases.slot_memory import make as make_slot_memory
from test_native import DTYPES, library, needs_library  # noqa: F401 (a fixture)

from subquad_kernels import delta_keys, delta_wkv, group_norm_gate, low_rank, slot_memory, token_shift, wkv
from subquad_kernels.c import native


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
pytestmark = needs_library


@pytest.fixture(autouse=True)
def used(library, monkeypatch):  # noqa: F811
    """The functions of the library that are called. It takes tensors of any width."""
    names, source = [], library

    class Counted:
        dtypes = source.dtypes
        fits_head, fits_slots = staticmethod(source.fits_head), staticmethod(source.fits_slots)

        def __getattr__(self, name):
            names.append(name)
            return getattr(source, name)

    monkeypatch.setattr(native, "library", Counted)
    monkeypatch.setattr(native, "WORTHWHILE_CHANNELS", 1)
    return names


def read_dtype(dtype):
    if dtype not in native.library().dtypes:
        pytest.skip("needs conversions of float16")
    torch.manual_seed(0)
    return TOLERANCES[dtype]


def close(found, expected, tolerance):
    scale = expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * max(scale, 1e-30))


def doubled(*tensors):
    return [x.double() if isinstance(x, torch.Tensor) else x for x in tensors]


def heads_of(dtype, batch, heads, keys, values, decay=1.0):
    """r, k, v, log_w, kappa, a and the bonus u."""
    r, k, kappa = (torch.randn(batch, 1, heads, keys) for _ in range(3))
    tokens = r, k, torch.randn(batch, 1, heads, values), F.normalize(kappa, dim=-1), torch.rand_like(k)
    r, k, v, kappa, a, u = (x.to(dtype) for x in (*tokens, torch.randn(heads, keys)))
    return r, k, v, -decay * torch.rand(batch, 1, heads, keys), kappa, a, u


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 2, 64, 64), (3, 2, 64, 128), (2, 3, 48, 80), (1, 1, 256, 256), (2, 2, 16, 16)])
def test_recurrences(dtype, sizes, used):
    tolerance = read_dtype(dtype)
    batch, heads, keys, values = sizes
    for decay, first in itertools.product((1e-4, 1.0, 200.0), (True, False)):
        r, k, v, log_w, kappa, a, u = heads_of(dtype, *sizes, decay)
        state = None if first else torch.randn(batch, heads, keys, values)
        for w, bonus in ((log_w, u), (log_w[0, 0], u.float())):
            tokens = r, k, v, w, bonus, state
            with torch.no_grad():
                out, after = wkv(*tokens)
            expected, state_after = wkv(*doubled(*tokens), backend="reference")
            assert out.dtype == dtype
            close(out, expected, tolerance)
            close(after, state_after, 1e-5)
        if decay > 5:  # more than the operator of Goose takes
            continue
        state = None if first else torch.randn(batch, heads, values, keys)
        tokens = r, k, v, log_w, kappa, a, state
        with torch.no_grad():
            out, after = delta_wkv(*tokens, out_dtype=torch.float32)
        expected, state_after = delta_wkv(*doubled(*tokens), backend="reference")
        assert out.dtype == torch.float32
        close(out, expected, 1e-5)
        close(after, state_after, 1e-5)
    assert used == ["step"] * (6 * 2 + 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size"), [(2, 64), (3, 80), (1, 256), (5, 16)])
def test_group_norm_gate(dtype, heads, size, used):
    tolerance, width = read_dtype(dtype), heads * size
    x, added, gate = (torch.randn(3, 2, heads, size), torch.randn(3, 2, heads, size), torch.randn(3, 2, width))
    x = (3 + x) * torch.randn(3, 2, heads, 1).exp()
    weight, bias, gate = torch.randn(width), torch.randn(width), gate.to(dtype)
    cases = itertools.product((None, added), ("silu", None), (torch.float32, dtype))
    for more, activation, of_weights in cases:
        arguments = x, gate, weight.to(of_weights), bias.to(of_weights), 6.4e-4, more
        with torch.no_grad():
            out = group_norm_gate(*arguments, activation=activation)
        assert out.dtype == dtype
        expected = group_norm_gate(*doubled(*arguments), activation=activation, backend="reference")
        close(out, expected, tolerance)
    assert used == ["group_norm_gate"] * 8


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays(value, used):
    """As in torch, also where it is multiplied by a state of zeros, which is not read."""
    torch.manual_seed(0)
    tokens = heads_of(torch.float32, 1, 3, 64, 64)
    for operator, order in ((delta_wkv, range(6)), (wkv, (0, 1, 2, 3, 6))):
        for number, index in enumerate(order):
            changed = [tokens[each].clone() for each in order]
            place = changed[number].view(3, 64)  # of the head in the middle
            place[1, 5] = -value if index == 3 else value
            with torch.no_grad():
                found = operator(*changed)
            expected = operator(*doubled(*changed), backend="reference")
            for x, y in zip(found, expected, strict=True):
                assert torch.equal(x.isfinite(), y.isfinite()), (operator, index)
    assert used == ["step"] * 11


@pytest.mark.parametrize("sizes", [(2, 2, 24, 16), (2, 2, 16, 24), (1, 1, 272, 16), (1, 1, 16, 272)])
def test_sizes_that_it_does_not_take(sizes, used):
    torch.manual_seed(0)
    *tokens, _ = heads_of(torch.float32, *sizes)
    with torch.no_grad():
        out, _ = delta_wkv(*tokens)
    close(out, delta_wkv(*doubled(*tokens), backend="reference")[0], 1e-5)
    assert not used


SLOT_SIZES = [(1, 2, 64, 64, 64), (3, 2, 64, 128, 20), (2, 3, 48, 80, 1), (1, 1, 256, 256, 256), (2, 1, 16, 16, 1000)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "decay"),
    [
        *((SLOT_SIZES[1], decay) for decay in ("routed", "dense", "window", "extreme", "none", "weak")),
        *((sizes, "routed") for sizes in SLOT_SIZES if sizes is not SLOT_SIZES[1]),
    ],
)
def test_slot_memory(dtype, sizes, decay, used):
    tolerance, names = read_dtype(dtype), ("batch", "heads", "key", "value", "slots")
    sizes = {**dict(zip(names, sizes, strict=True)), "length": 1, "decay": decay, "dtype": dtype}
    inputs = make_slot_memory(**sizes, float32=("log_f", "initial_state"))
    inputs = {name: x.cpu() for name, x in inputs.items()}
    untouched = (inputs["log_f"][:, 0] == 0).unsqueeze(-1).expand_as(inputs["initial_state"])
    # Of float16 the second one is too small, where tokens write next to nothing.
    cases = (False,) if (dtype, decay) == (torch.float16, "weak") else (False, True)
    for first in cases:
        if first:
            del inputs["initial_state"]
        with torch.no_grad():
            out, after = slot_memory(**inputs)
        expected, state = slot_memory(**{name: x.double() for name, x in inputs.items()}, backend="reference")
        assert (out.dtype, after.dtype) == (dtype, torch.float32)
        close(out, expected, tolerance)
        close(after, state, 1e-6)
        before = torch.zeros_like(after) if first else inputs["initial_state"]
        assert after[untouched].equal(before[untouched])
    assert used == ["slot_step"] * len(cases)


@pytest.mark.parametrize("change", [{"key": 24}, {"value": 24}, {"key": 272}, {"slots": 1025}])
def test_slots_that_it_does_not_take(change, used):
    inputs = make_slot_memory(**{"key": 16, "value": 16, "length": 1, **change})
    inputs = {name: x.cpu() for name, x in inputs.items()}
    with torch.no_grad():
        out, _ = slot_memory(**inputs)
    close(out, slot_memory(**{name: x.double() for name, x in inputs.items()}, backend="reference")[0], 1e-5)
    assert not used


def run_slot_memory(*state, **where):
    tokens = make_slot_memory(batch=3, length=1, key=16, value=32, slots=24, state=False)
    return slot_memory(**{name: x.cpu() for name, x in tokens.items()}, initial_state=state[0], **where)


@pytest.mark.parametrize("operator", ["wkv", "delta_wkv", "slot_memory"])
def test_where_the_state_is(operator, used):
    """New, in place, or in a pool."""
    torch.manual_seed(0)
    r, k, v, log_w, kappa, a, u = heads_of(torch.float32, 3, 2, 32, 16)
    if operator == "slot_memory":
        shape, run = (2, 24, 48), run_slot_memory
    elif operator == "delta_wkv":
        shape, run = (2, 16, 32), functools.partial(delta_wkv, r, k, v, log_w, kappa, a)
    else:
        shape, run = (2, 32, 16), functools.partial(wkv, r, k, v, log_w, u)
    state = torch.randn(3, *shape)
    before = state.clone()
    with torch.no_grad():
        out, after = run(state)
        assert state.equal(before) and not after.equal(before)
        again, same = run(state, inplace=True)
        assert same is state and state.equal(after) and again.equal(out)
        # Five states with others between them.
        memory = torch.randn(5, 2, *shape)
        kept, pool, indices = memory.clone(), memory[:, 1], torch.tensor([4, 0, 3])
        pool[indices] = before
        again, same = run(pool, indices=indices)
        assert same is pool and again.equal(out) and pool[indices].equal(after)
        assert pool[[1, 2]].equal(kept[[1, 2], 1]) and memory[:, 0].equal(kept[:, 0])
        assert used == ["slot_step" if operator == "slot_memory" else "step"] * 3
        for wrong in (5, -1):
            now = memory.clone()
            with pytest.raises(IndexError):
                run(pool, indices=torch.tensor([4, 0, wrong]))
            assert memory.equal(now)


def test_threads(used, monkeypatch):
    monkeypatch.setattr(native, "_FOR_THREADS", 1)
    torch.manual_seed(0)
    tokens, state = heads_of(torch.float32, 7, 3, 64, 64)[:6], torch.randn(7, 3, 64, 64)
    slots = {name: x.cpu() for name, x in make_slot_memory(batch=7, length=1, heads=3, key=16, value=16).items()}
    threads = torch.get_num_threads()
    with torch.no_grad():
        expected = *delta_wkv(*tokens, state), *slot_memory(**slots)
        torch.set_num_threads(4)
        found = *delta_wkv(*tokens, state), *slot_memory(**slots)
        torch.set_num_threads(threads)
    assert used == ["step", "slot_step"] * 2
    assert all(x.equal(y) for x, y in zip(found, expected, strict=True))


def test_what_torch_must_see(used):
    *tokens, _ = heads_of(torch.float32, 1, 2, 16, 16)
    tokens[2].requires_grad_()
    x = torch.randn(1, 1, 32, requires_grad=True)
    delta_wkv(*tokens)
    group_norm_gate(tokens[2], *torch.ones(3, 1, 1, 32).unbind()[:1], *torch.ones(2, 32), 1e-5)
    token_shift(x, None, torch.randn(2, 32)).sum().backward()
    low_rank(x, torch.randn(32, 4), torch.randn(4, 32)).sum().backward()
    with torch.no_grad():
        torch.func.vmap(lambda x: low_rank(x, torch.randn(32, 4), torch.randn(4, 32)), randomness="same")(x)
        delta_wkv(*(y.double() for y in tokens))
    assert not used


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 70, 129])
def test_token_shift(dtype, width, used):
    tolerance = read_dtype(dtype)
    x, state = torch.randn(2, 1, width).to(dtype), torch.randn(2, width).to(dtype)
    mu, offset = torch.rand(3, width), torch.randn(3, 2, 1, width).to(dtype)
    for before, added, mixed in itertools.product((None, state), (None, offset), (mu, mu.to(dtype))):
        with torch.no_grad():
            out = token_shift(x, before, mixed, added)
        assert out.dtype == dtype
        close(out, token_shift(*doubled(x, before, mixed, added), backend="reference"), tolerance)
    assert used == ["token_shift"] * 8
    with torch.no_grad():  # a document begins, or there are several tokens
        token_shift(x, state, mu, starts=torch.ones(2, 1, dtype=torch.bool))
        token_shift(x.expand(2, 3, width), state, mu)
    assert len(used) == 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rank", "outputs"), [(1, 1, 1), (33, 5, 31), (64, 16, 160), (130, 40, 300)])
def test_low_rank(dtype, width, rank, outputs, used):
    tolerance, functions = read_dtype(dtype), (None, "tanh", "sigmoid", "exp")
    x, base = torch.randn(3, 1, width).to(dtype), torch.randn(1, 1, outputs).to(dtype)
    count = 0
    for inner, outer, maps in itertools.product(functions[:3], functions, (None, 4)):
        down = torch.randn(width, rank * (maps or 1)).div(width**0.5).to(dtype)
        up = torch.randn(*([] if maps is None else [maps]), rank, outputs).div(rank**0.5).to(dtype)
        for wide, added in ((True, base), (False, None)):
            options = {"inner": inner, "outer": outer, "scale": -0.5}
            with torch.no_grad():
                out = low_rank(x, down, up, base=added, wide=wide, **options)
            expected = low_rank(*doubled(x, down, up), base=None if added is None else added.double(), **options)
            assert out.dtype == (torch.float32 if wide else dtype)
            close(out, expected, tolerance)
            count += 1
    assert used == ["low_rank"] * count
    with pytest.raises(ValueError, match="'inner' must be|`inner` must be .* got 'relu'"):
        low_rank(x, down, up, "relu")
    with torch.no_grad():
        low_rank(x.expand(3, 5, width), down, up)
    assert len(used) == count


@pytest.mark.parametrize("function", ["exp", "tanh", "sigmoid"])
def test_functions(function, used):
    """From very small to very large numbers, also those that are none."""
    x = torch.cat((torch.linspace(-87, 87, 20001), torch.logspace(-30, 0, 301), -torch.logspace(-30, 0, 301)))
    edges = torch.tensor([-1e30, -200, -88, 88, 200, 1e30, float("inf"), -float("inf"), float("nan"), 0.0])

    def run(base):
        with torch.no_grad():
            return low_rank(
                torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, len(base)), base=base, outer=function
            )[0]

    exact = getattr(torch, function)
    torch.testing.assert_close(run(x).double(), exact(x.double()), rtol=4e-7, atol=0)
    found, expected = run(edges), exact(edges)
    assert found.isnan().equal(expected.isnan()) and used == ["low_rank"] * 2
    large = expected > 1e38  # as large as numbers become here
    assert (found[large] > 1e38).all()
    torch.testing.assert_close(found[~large], expected[~large], rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 64, 80, 256])
def test_keys_of_goose(dtype, size, used):
    tolerance = read_dtype(dtype)
    k, a = torch.randn(2, 1, 3, size).to(dtype), torch.rand(2, 1, 3, size).to(dtype)
    k_k, k_a = torch.randn(3, size).to(dtype), torch.randn(3, size).to(dtype)
    k[0, 0, 0] = 0
    with torch.no_grad():
        found = delta_keys(k, a, k_k, k_a)
    k, a, k_k, k_a = doubled(k, a, k_k, k_a)
    close(found[0], F.normalize(k * k_k, dim=-1), tolerance)
    close(found[1], k * (1 + (a - 1) * k_a), tolerance)
    assert used == ["delta_keys"] and not found[0][0, 0, 0].any()
