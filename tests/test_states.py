"""States that travel: forked, joined, split, moved, saved and loaded. And what refuses to load."""

import json
import struct
from dataclasses import replace
from random import Random

import pytest
import torch
from cases import (
    CASES,
    DEVICE,
    GREEDY,
    TOLERANCE,
    VARIANTS,
    each_cache,
    each_case,
    padded,
)
from safetensors.torch import save_file

import subquad
from subquad.modeling.state_file import ABOUT, ModelIdentity, read_state_file, write_state_file


OWNER = ModelIdentity("tiny", "0123456789abcdef")


@torch.no_grad()
def read(model, text, cache=None):
    return model(**text, cache=cache, use_cache=True)


def decode(model, cache, ids):
    """The logits of single steps, which change the cache."""
    return [read(model, {"input_ids": ids[:, n : n + 1]}, cache).logits for n in range(ids.shape[1])]


@pytest.mark.fast
@each_cache
def test_copies_continue_bit_by_bit(case, tmp_path):
    """
    A fork, a saved and loaded state and a state that was split off give the very numbers of the original. A loaded
    cache of Avey first computes again what does not depend on the text, together with the text.
    """
    model, more = case.model(), case.ids(1, 5, seed=3)
    cache = read(model, case.text(1, 37)).cache
    cache.save(tmp_path / "state", OWNER)
    loaded = type(cache).load(tmp_path / "state", model.config, DEVICE, model=OWNER)
    copies = [*cache.fork(2), *cache.split(), loaded]
    expected = decode(model, cache, more)
    for copy in copies:
        rounding = 1e-5 if copy is loaded and case.growing else 0.0
        torch.testing.assert_close(decode(model, copy, more), expected, atol=rounding, rtol=rounding)


@pytest.mark.fast
@each_cache
def test_join_and_split(case):
    """Texts of different lengths go on as one batch, and alone again."""
    model, lengths = case.model(), (3, 70, 21)
    texts = [case.text(1, n, seed=n) for n in lengths]
    more, last = case.ids(3, 7), case.ids(3, 2, seed=5)
    caches = [read(model, text).cache for text in texts]
    joined = type(caches[0]).join(caches)
    assert joined.batch_size == 3 and joined.get_seq_length() == 70
    assert [cache.get_seq_length() for cache in caches] == [3, 70, 21]
    together = read(model, {"input_ids": more}, joined).logits
    apart = joined.split()
    for n, cache in enumerate(caches):
        alone = read(model, {"input_ids": more[n : n + 1]}, cache).logits
        torch.testing.assert_close(together[n : n + 1], alone, **TOLERANCE)
        row = {"input_ids": last[n : n + 1]}
        torch.testing.assert_close(read(model, row, apart[n]).logits, read(model, row, cache).logits, **TOLERANCE)


@each_case
def test_generating_from_joined_states(case):
    model, texts = case.model(), [case.text(1, n, seed=n) for n in (4, 30)]
    caches = [read(model, text).cache for text in texts]
    rows = padded([{"input_ids": case.ids(1, n, seed=9)} for n in (3, 6)], "left")
    read_before = torch.ones(2, 30, dtype=torch.long)
    options = {"max_new_tokens": 6, **GREEDY}
    out = model.generate(
        rows["input_ids"],
        attention_mask=torch.cat((read_before, rows["attention_mask"]), 1),
        cache=type(caches[0]).join(caches),
        **options,
    )[:, 6:]
    for n, cache in enumerate(caches):
        ids = rows["input_ids"][n : n + 1, 6 - (3, 6)[n] :]
        mask = torch.ones(1, cache.get_seq_length() + ids.shape[1], dtype=torch.long)
        alone = model.generate(ids, attention_mask=mask, cache=cache, **options)[:, ids.shape[1] :]
        assert torch.equal(out[n : n + 1], alone)


@pytest.mark.fast
@each_case
def test_masks_of_other_caches(case, tmp_path):
    """Rows that were joined to longer ones, however often, and old files have no count of padding to compare with."""
    model, text = case.model(), padded([case.text(1, n, seed=n) for n in (9, 6)], "right")
    with torch.no_grad():
        cache = model(**text).cache
    more = {"input_ids": case.ids(2, 3), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    with pytest.raises(ValueError, match="row 1: 0 of the first 9 tokens are marked as padding, but .*, 3 were"):
        model.generate(**more, cache=cache.clone(), max_new_tokens=2, **GREEDY)
    row = cache.split()[1]
    for n in (12, 20, 30, 40):
        row = type(row).join([row, read(model, case.text(1, n)).cache]).split()[0]
        mask = torch.ones(1, n + 3, dtype=torch.long)
        model(more["input_ids"][:1], attention_mask=mask, cache=row.clone())
    del cache.after_blocks.states["padding"]
    cache.save(tmp_path / "old.state")
    old = type(cache).load(tmp_path / "old.state", model.config)
    for mask in (more["attention_mask"], torch.cat((text["attention_mask"], torch.ones(2, 3, dtype=torch.long)), 1)):
        model(more["input_ids"], attention_mask=mask, cache=old.clone())


@pytest.mark.fast
@each_case
def test_another_dtype(case):
    """A state goes on in a model of another dtype, with the dtypes that the model itself gives its states."""
    model, text, more = case.model(), case.text(1, 40), {"input_ids": case.ids(1, 3)}
    low = case.model().to(torch.bfloat16)
    cache = read(model, text).cache
    own = read(low, text).cache
    assert (cache.dtype, own.dtype) == (torch.float32, torch.bfloat16)
    moved = cache.clone().to(dtype=torch.bfloat16)
    assert {k: x.dtype for k, x in moved.named_states().items()} == {k: x.dtype for k, x in own.named_states().items()}
    assert read(low, more, moved).logits.isfinite().all()
    back = own.to(dtype=torch.float32)
    assert {x.dtype for x in back.named_states().values()} <= {torch.float32, torch.int64}
    assert read(model, more, back).logits.isfinite().all()
    recording = model.new_cache()
    recording.activate_past_recording()
    read(model, more, recording)
    with pytest.raises(ValueError, match="`dtype` cannot change while the past is recorded"):
        recording.to(dtype=torch.bfloat16)


@pytest.mark.fast
def test_states_that_cannot_be_joined():
    goose, finch = CASES["rwkv7"].model(), CASES["rwkv6"].model()
    cache, other = (read(model, CASES["rwkv6"].text(1, 4)).cache for model in (goose, finch))
    join = type(cache).join
    for wrong, message in (
        ([], "`caches` is empty"),
        ([cache, None], r"`caches\[1\]` must be a RecurrentCache, got NoneType"),
        ([cache, other], r"`caches\[1\]` is the cache of another model: `model_type` 'rwkv6', not 'rwkv7'"),
        ([cache, goose.new_cache()], r"`caches\[1\]` has not read a token"),
        ([cache, goose.new_cache(static=True)], r"`caches\[1\]` is static"),
        ([cache, cache.clone().to(dtype=torch.bfloat16)], r"`caches\[1\]` has states of torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            join(wrong)
    for call, message in (
        (lambda: cache.fork(0), "`n` must be a whole number of at least 1, got 0"),
        (lambda: cache.fork("2"), "`n` must be a whole number of at least 1, got '2'"),
        (lambda: cache.to(dtype="bfloat16"), "`dtype` must be a torch.dtype, got 'bfloat16'"),
        (lambda: cache.save("x.state", "finch"), "`model` must be what `subquad.identify` returns, got 'finch'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# Files.


@pytest.fixture(scope="module")
def finch():
    return CASES["rwkv6"].model()


@pytest.fixture(scope="module")
def content(finch, tmp_path_factory):
    """A state file, as bytes."""
    path = tmp_path_factory.mktemp("states") / "state"
    read(finch, CASES["rwkv6"].text(1, 9)).cache.save(path, OWNER, {"unread": [3]})
    return path.read_bytes()


def load(path, model):
    return type(model.new_cache()).load(path, model.config, model=OWNER)


def test_every_truncated_or_changed_file_is_refused(finch, content, tmp_path):
    path, chance = tmp_path / "state", Random(0)
    path.write_bytes(content)
    load(path, finch)
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for length in (0, 5, 8, header - 1, header, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"state(: the states cannot be read| is damaged| is empty)"):
            load(path, finch)
    spaces = set(range(header - 8, header))  # the padding of the header
    for place in (*range(8), *(chance.randrange(len(content)) for _ in range(60)), len(content) - 1):
        if place in spaces:
            continue
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"state(: the states cannot be read| is damaged| does not hold a cache)"):
            load(path, finch)
    path.write_bytes(content + b"x")
    with pytest.raises(ValueError, match="state: the states cannot be read"):
        load(path, finch)


def test_foreign_states(finch, content, tmp_path):
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is a state of the model tiny \(0123456789ab\), but tiny \(fedcba98\)"):
        type(finch.new_cache()).load(path, finch.config, model=replace(OWNER, digest="fedcba98"))
    finch.new_cache().save(path)
    with pytest.raises(ValueError, match="does not name the model that it belongs to; tiny"):
        load(path, finch)
    with pytest.raises(ValueError, match="nowhere cannot be read"):
        load(tmp_path / "nowhere", finch)
    with pytest.raises(OSError, match="cannot be written"):
        finch.new_cache().save(tmp_path / "nowhere" / "state")
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


# What is wrong with a file whose checksum is right: a change of what is known about the states, and of the states.
FORGERIES = {
    "tokens": ({"seen_tokens": -1}, {}, "does not hold a cache"),
    "many tokens": ({"seen_tokens": 2**62}, {}, "does not hold a cache"),
    "no dtype": ({"dtype": None}, {}, "does not hold a cache"),
    "sizes": ({"sizes": {"hidden_size": 8}}, {}, "is the cache of another model"),
    "unknown": ({}, {"layers.0.x": torch.zeros(1, 48)}, "'layers.0.x' is unknown"),
    "layer": ({}, {"layers.99.wkv": torch.zeros(1, 3, 16, 16)}, "'layers.99.wkv' is unknown"),
    "missing": ({}, {"layers.1.wkv": None}, "'layers.1.wkv' is missing"),
    "rows": ({}, {"layers.1.wkv": torch.zeros(2, 3, 16, 16)}, "has the shape"),
    "shape": ({}, {"layers.1.wkv": torch.zeros(1, 3, 16, 8)}, r"\(1, 3, 16, 8\), not \(1, 3, 16, 16\)"),
    "scalar": ({}, {"layers.1.wkv": torch.zeros(())}, "has the shape"),
    "dtype": ({}, {"layers.1.attention_shift": torch.zeros(1, 48, dtype=torch.int8)}, "is torch.int8"),
    "narrow": ({}, {"layers.1.wkv": torch.zeros(1, 3, 16, 16).half()}, "is torch.float16"),
    "nan": ({}, {"after_blocks.output": torch.full((1, 48), torch.nan)}, "NaN or infinite"),
    "padding": ({}, {"after_blocks.padding": torch.tensor([10])}, "is 10 after 9 tokens"),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", FORGERIES)
def test_forged_states_are_refused(name, finch, content, tmp_path):
    about, states, message = FORGERIES[name]
    path = tmp_path / "state"
    path.write_bytes(content)
    held, known = read_state_file(path)
    write_state_file(path, {k: x for k, x in (held | states).items() if x is not None}, known | about)
    with pytest.raises(ValueError, match=rf"state .*{message}"):
        load(path, finch)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "states", "about"),
    [
        ("avey", {"after_blocks.lengths": torch.tensor([-1])}, {}),
        ("avey", {"after_blocks.lengths": torch.tensor([10**15])}, {}),
        ("avey", {}, {"seen_tokens": 3 * 10**8}),
        ("avey", {"after_blocks.sums": torch.zeros(1, 40)}, {}),
        ("raven-full", {}, {"seen_tokens": 3 * 10**8}),
        ("raven-full", {"layers.1.keys": torch.zeros(1, 128, 1, 16)}, {}),
        ("gecko", {"layers.0.keys": torch.zeros(1, 3, 2, 8)}, {}),
        ("gecko", {"layers.0.keys": torch.zeros(1, 3, 200, 8)}, {}),
    ],
)
def test_forged_sizes_of_texts_are_refused(name, states, about, tmp_path):
    """Where states have room for tokens, there is room for as many as were read, and no more is made for others."""
    case = next(case for case in (*CASES.values(), *VARIANTS) if case.name == name)
    model = case.model()
    read(model, case.text(1, 9)).cache.save(tmp_path / "state", OWNER)
    held, known = read_state_file(tmp_path / "state")
    assert {*states} <= {*held}
    write_state_file(tmp_path / "state", held | states, known | about)
    with pytest.raises(ValueError, match="does not hold the states of such a model"):
        load(tmp_path / "state", model)


def test_what_a_file_may_hold_has_limits(finch, content, tmp_path):
    path = tmp_path / "state"
    path.write_bytes(content)
    held, known = read_state_file(path)
    with pytest.raises(ValueError, match="has [0-9,]+ characters, and may have 8,388,608"):
        write_state_file(path, held, known | {"text": "x" * 2**23})
    save_file({f"x{n}": torch.zeros(1) for n in range(2**14 + 1)}, path, {ABOUT: json.dumps(known)})
    with pytest.raises(ValueError, match="has 16,385 states, more than any model"):
        load(path, finch)


# Identities.


def test_identity(tmp_path):
    """It stays if the files are divided otherwise, and changes with one number of the weights."""
    model = CASES["rwkv6"].model()
    model.save_pretrained(tmp_path / "one")
    one = subquad.identify(tmp_path / "one")
    assert one.name == "one" and one == subquad.identify(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert subquad.identify(tmp_path / "many").digest == one.digest
    with torch.no_grad():
        model.head.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "other")
    assert subquad.identify(tmp_path / "other").digest != one.digest
    model.config.layer_norm_epsilon *= 2
    model.config.save_pretrained(tmp_path / "one")
    assert subquad.identify(tmp_path / "one").digest != one.digest
    (tmp_path / "one" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="one has no weights in safetensors"):
        subquad.identify(tmp_path / "one")
    (tmp_path / "one" / "config.json").unlink()
    with pytest.raises(ValueError, match="one has no config.json"):
        subquad.identify(tmp_path / "one")
