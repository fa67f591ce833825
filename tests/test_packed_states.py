"""States that are stored in 8 or 16 bits."""

import pytest
import torch
from cases import CASES, each_with

from subquad import PrefixCache
from subquad.states.packed_states import DTYPES, SCALE, pack, unpack, unpack_states


@pytest.mark.quick_cases("rwkv?-*", "avey-*", "raven-both-*", "gecko-*")
@each_with(
    "dtype",
    [torch.float32, torch.bfloat16],
    map(CASES.get, ("rwkv7", "avey", "raven-both", "gecko")),
    [torch.float32],
    map(CASES.get, ("rwkv5", "rwkv6", "rwkv7_deep_embed", "rwkv7_deep_embed-a", "raven-swa", "gecko-chunk-64")),
)
def test_rounding(case, dtype):
    """Each number is within half a step of its row; all else is exact, and packing again changes nothing."""
    model, ids = case.model().to(dtype), case.ids(1, 70)
    with torch.no_grad():
        cache = model(ids, use_cache=True).cache
    before = {name: x.clone() for name, x in cache.named_states().items()}
    for kind in DTYPES:
        packed = pack(cache, kind)
        restored = unpack(packed, model)
        found = restored.named_states()
        assert found.keys() == before.keys() and restored.get_seq_length() == 70
        large = [name for name in before if name.rpartition(".")[2] in cache.packed_names]
        size = sum(before[name].numel() for name in large if before[name].element_size() > DTYPES[kind].itemsize)
        assert large and packed.nbytes <= cache.nbytes - size * (0.7 if kind == "int8" else 1.9)
        for name, x in before.items():
            assert found[name].dtype == x.dtype and torch.equal(cache.named_states()[name], x)
            if name not in large:
                assert torch.equal(found[name], x), name
                continue
            error = (found[name].double() - x.double()).abs()
            most = x.double().abs()
            if kind == "int8":  # of a scale that has the precision of the state
                step = most.amax(-1, keepdim=True) / 127
                bound = step * 0.501 if x.dtype == torch.float32 else step * 1.5
            else:
                bound = most * torch.finfo(DTYPES[kind]).eps / 2 + torch.finfo(DTYPES[kind]).tiny
            assert (error <= bound).all(), (kind, name)
        again = unpack(pack(restored, kind), model).named_states()
        for name, x in found.items():
            loose = kind == "int8" and x.dtype != torch.float32
            torch.testing.assert_close(again[name], x, atol=1e-6, rtol=2e-2 if loose else 1e-5)


def test_extremes():
    model = CASES["rwkv6"].model()
    with torch.no_grad():
        cache = model(CASES["rwkv6"].ids(1, 5), use_cache=True).cache
    wkv = cache.layers[0].states["wkv"]
    wkv[0, 0, 0], wkv[0, 0, 1, 0], wkv[0, 0, 2] = 0, 1e30, 1e-42
    restored = unpack(pack(cache, "int8"), model).layers[0].states["wkv"]
    assert restored.isfinite().all() and not restored[0, 0, 0].any()
    assert restored[0, 0, 1, 0].item() == pytest.approx(1e30, rel=1e-6) and (restored[0, 0, 2] < 1e-38).all()
    with pytest.raises(ValueError, match="the state wkv has numbers that float16 cannot represent"):
        pack(cache, "float16")
    wkv[0, 0, 0, 0] = torch.nan
    for kind in DTYPES:
        with pytest.raises(ValueError, match=f"the state wkv has numbers that {kind} cannot represent"):
            pack(cache, kind)


def test_damaged_scales():
    x, scale = torch.ones(1, 2, 4, 4, dtype=torch.int8), torch.ones(1, 2, 4, 1)
    assert torch.equal(unpack_states({"a.wkv": x, f"a.wkv{SCALE}": scale}, ())["a.wkv"], torch.ones(1, 2, 4, 4))
    for states, message in (
        ({"a.wkv": x}, "a.wkv has no scales that fit"),
        ({"a.wkv": x, f"a.wkv{SCALE}": scale[..., 0]}, "a.wkv has no scales that fit"),
        ({"a.wkv": x, f"a.wkv{SCALE}": scale.long()}, "a.wkv has no scales that fit"),
        ({f"a.wkv{SCALE}": scale}, "belongs to no state in int8"),
        ({f"a.wkv{SCALE}": scale, "a.wkv": scale}, "belongs to no state in int8"),
    ):
        with pytest.raises(ValueError, match=message):
            unpack_states(states, ())


@pytest.mark.parametrize("kind", DTYPES)
def test_prefix_caches(kind, tmp_path, monkeypatch):
    """A text that is read now continues exactly; one that comes back is rounded, from memory as from a file."""
    case, warnings = CASES["rwkv7"], []
    model, ids, more = case.model(), case.ids(40), case.ids(1, 3, seed=2)
    with torch.no_grad():
        exact = model(ids[None], use_cache=True).cache
        expected = model(more, cache=exact.clone()).logits

    def ask(prefixes):
        cache = prefixes.read(model, ids)
        prefixes.flush()
        return cache.named_states(), cache

    prefixes = PrefixCache(directory=tmp_path, dtype=kind)
    first, cache = ask(prefixes)
    torch.testing.assert_close(first, exact.named_states(), atol=1e-6, rtol=1e-5)
    assert prefixes.nbytes < cache.nbytes * 0.7
    rounded = unpack(pack(cache, kind), model).named_states()
    assert not torch.equal(rounded["layers.0.wkv"], first["layers.0.wkv"])
    for again in (prefixes, PrefixCache(directory=tmp_path, dtype=kind)):
        for _ in range(2):  # from its file, and then from memory
            found, cache = ask(again)
            torch.testing.assert_close(found, rounded, atol=1e-6, rtol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(model(more, cache=cache).logits, expected, atol=0.1, rtol=0.1)
        assert again.tokens_asked - again.tokens_read >= 40
    for other in (
        PrefixCache(directory=tmp_path),
        PrefixCache(directory=tmp_path, dtype=next(iter({*DTYPES} - {kind}))),
    ):
        ask(other)
        assert other.tokens_read == 40  # what was rounded is not taken for exact
    if kind == "float16":
        monkeypatch.setattr("subquad.states.prefix_cache.logger.warning_once", warnings.append)
        exact.layers[0].states["wkv"][0, 0, 0, 0] = 1e6
        prefixes.put(torch.cat((ids, ids)), exact.copy_of_row(0, 80), prefixes.version)
        assert len(prefixes) == 1 and "A state is not kept: the state wkv has" in warnings[0]
    with pytest.raises(ValueError, match="`dtype` must be None or one of int8, float16, bfloat16, got 'int4'"):
        PrefixCache(dtype="int4")
