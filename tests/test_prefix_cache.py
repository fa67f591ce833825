"""Beginnings that many texts share are read once, and the answers stay the same."""

import asyncio
import random
import threading
import time

import pytest
import torch
from cases import CASES, GREEDY, TEXT, VARIANTS, each, each_with, padded
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import GenerationConfig

import subquad
from subquad import PrefixCache
from subquad.decoding.generation import RecurrentGenerationMixin
from subquad.states.prefix_texts import SortedTexts, shared_among, text_key
from subquad_cli.run import _keep_states


FINCH = CASES["rwkv6"]


class Counted:
    """How many tokens a model reads."""

    def __init__(self, model):
        self.tokens = 0
        model.base_model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, args, kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        self.tokens += ids.shape[1]

    def take(self):
        tokens, self.tokens = self.tokens, 0
        return tokens


def few_shot(case, questions, shared=50):
    """Texts that begin alike."""
    return [torch.cat((case.ids(1, shared), case.ids(1, 9 + n, seed=n + 1)), 1) for n in range(questions)]


@pytest.mark.quick_cases("rwkv?", "avey", "raven", "gecko")
@pytest.mark.fast
@each(*TEXT, CASES["raven-both"])
def test_answers_are_the_same(case):
    model, options = case.model(), {"max_new_tokens": 5, **GREEDY}
    texts = few_shot(case, 4)
    expected = [model.generate(ids, **options) for ids in texts]
    counted, prefixes = Counted(model), PrefixCache()
    for ids, answer in zip(texts, expected, strict=True):
        assert torch.equal(model.generate(ids, prefix_cache=prefixes, **options), answer)
    # The first text is read, and the second, where the place is found; the others are read from there.
    same = [next(n for n, (a, b) in enumerate(zip(ids[0], texts[0][0], strict=False)) if a != b) for ids in texts[1:]]
    saved = sum(same[0] for _ in texts[2:])
    assert min(same) == max(same) >= 50
    assert counted.take() == sum(ids.shape[1] + 4 for ids in texts) - saved
    assert prefixes.tokens_asked - prefixes.tokens_read == saved
    # A conversation goes on where the answer ended; nothing of it is read again.
    longer = torch.cat((expected[0], case.ids(1, 6, seed=9)), 1)
    options["attention_mask"] = torch.ones_like(longer)  # the id of padding may have been generated, too
    answer = model.generate(longer, **options)
    counted.take()
    assert torch.equal(model.generate(longer, prefix_cache=prefixes, **options), answer)
    assert counted.take() == 1 + 6 + 4


def test_every_way_of_generating():
    model, ids = FINCH.model(), FINCH.ids(1, 40)
    prefixes = PrefixCache()
    for options in (
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"return_dict_in_generate": True},
    ):
        options = {"max_new_tokens": 8, **GREEDY, **options}
        found, expected = (model.generate(ids, **more, **options) for more in ({"prefix_cache": prefixes}, {}))
        if options.get("return_dict_in_generate"):
            found, expected = found.sequences, expected.sequences
        assert torch.equal(found, expected)
    torch.manual_seed(0)
    options = {"max_new_tokens": 8, **GREEDY, "do_sample": True, "num_return_sequences": 3}
    expected = model.generate(ids, **options)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, prefix_cache=prefixes, **options), expected)


def test_room():
    """The states that were used longest ago go first, by their size."""
    model = FINCH.model()
    prefixes = PrefixCache()
    one = prefixes.read(model, FINCH.ids(20)).nbytes
    prefixes = PrefixCache(max_bytes=2 * one)
    texts = [FINCH.ids(20, seed=seed) for seed in range(3)]
    prefixes.read(model, texts[0])
    prefixes.read(model, texts[1])
    prefixes.read(model, texts[0])
    assert (prefixes.tokens_asked, prefixes.tokens_read, len(prefixes), prefixes.nbytes) == (60, 40, 2, 2 * one)
    prefixes.read(model, texts[2])  # in place of the second
    prefixes.read(model, texts[0])
    assert prefixes.tokens_read == 60 and prefixes.nbytes == 2 * one
    prefixes.read(model, texts[1])
    assert prefixes.tokens_read == 80
    prefixes.read(model, FINCH.ids(9))  # too short for a state
    assert len(prefixes) == 2
    small = PrefixCache(max_entries=2)
    for text in texts:
        small.read(model, text)
    assert len(small) == 2
    prefixes.clear()
    assert len(prefixes) == 0


def unread(texts, shortest):
    """The tokens of a batch that must be read, if equal beginnings of at least `shortest` tokens are read once."""
    tokens, seen = 0, set()
    for text in texts:
        text = tuple(text.tolist())
        shared = max((n for n in range(len(text) + 1) if text[:n] in seen), default=0)
        tokens += len(text) - (shared if shared >= shortest else 0)
        seen |= {text[:n] for n in range(len(text) + 1)}
    return tokens


@pytest.mark.quick_cases("rwkv?-*", "avey-*", "raven-both-*", "gecko-*")
@each_with(
    "side",
    ["left", "anywhere"],
    [FINCH, CASES["avey"]],
    ["anywhere"],
    [case for case in (*TEXT, *VARIANTS) if case.name not in ("rwkv6", "avey")],
)
def test_batches(case, side):
    """Each row continues from its longest beginning, with any padding, as if it were alone."""
    model, shared = case.model().double(), case.ids(1, 50)
    texts = [torch.cat((shared, case.ids(1, 20 + 4 * n, seed=n + 1)), 1) for n in range(3)]
    texts += [torch.cat((texts[1], case.ids(1, 30, seed=8)), 1), texts[0].clone(), case.ids(1, 33, seed=7)]
    texts += [case.ids(1, 1), case.ids(1, 2, seed=6)]
    prefixes, options = PrefixCache(), {"max_new_tokens": 4, **GREEDY}
    inputs = padded([{"input_ids": ids} for ids in texts], side, more=3)
    expected = model.generate(**inputs, **options)
    for asked in range(2):
        assert torch.equal(model.generate(**inputs, prefix_cache=prefixes, **options), expected)
        known = inputs["attention_mask"][:, :-1].bool()
        read = [ids[mask] for ids, mask in zip(inputs["input_ids"][:, :-1], known, strict=True)]
        again = asked * sum(len(ids) for ids in read if len(ids) < 16)
        assert prefixes.tokens_read == unread(read, 16) + again
        assert prefixes.tokens_asked == (asked + 1) * sum(map(len, read))
    # The conversations go on, and others are like them only at first.
    more = [case.ids(1, 1 + n, seed=20 + n) for n in range(len(texts))]
    longer = [torch.cat((ids, out[None, -4:], new), 1) for ids, out, new in zip(texts, expected, more, strict=True)]
    longer[2] = torch.cat((texts[2], case.ids(1, 20, seed=40)), 1)
    inputs = padded([{"input_ids": ids} for ids in longer], side, more=1)
    before = prefixes.tokens_read
    cache = prefixes.read(model, **inputs)
    # The last generated token and what is new; of the third, all behind its prompt; and the texts that are too short.
    assert prefixes.tokens_read - before == sum((1 + 1, 1 + 2, 1 + 20, 1 + 4, 1 + 5, 1 + 6, 12, 14))
    with torch.no_grad():
        found = model(case.ids(len(texts), 3), cache=cache).logits
        for row, ids in enumerate(longer):
            wanted = model(torch.cat((ids, case.ids(len(texts), 3)[row : row + 1]), 1)).logits[0, -3:]
            torch.testing.assert_close(found[row], wanted, atol=1e-8, rtol=1e-8)
        with pytest.raises(ValueError, match="row 0: .* marked as padding"):  # the mask is still compared
            wrong = torch.cat((inputs["attention_mask"], torch.ones(len(texts), 1, dtype=torch.long)), 1)
            wrong[0] = 1 - wrong[0]
            model(case.ids(len(texts), 1), cache=prefixes.read(model, **inputs), attention_mask=wrong)


def test_rows_that_end_early():
    """What a row has read ends before its padding."""
    model, texts = FINCH.model(), [FINCH.ids(1, 30, seed=n) for n in range(3)]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    alone = [model.generate(ids, **options | {"eos_token_id": None})[0, 30:].tolist() for ids in texts]
    end = alone[0][2]
    prefixes, inputs = PrefixCache(), padded([{"input_ids": ids} for ids in texts], "left", more=2)
    out = model.generate(**inputs, prefix_cache=prefixes, eos_token_id=end, **options)
    assert out[0, 35:].tolist() == [0, 0, 0] and any(0 not in row for row in out[:, 32:].tolist())
    before = prefixes.tokens_read
    for ids, answer in zip(texts, alone, strict=True):
        answer = answer[: answer.index(end) + 1] if end in answer[:-1] else answer[:-1]
        ids = torch.cat((ids[0], torch.tensor(answer)))
        cache = prefixes.read(model, ids)
        with torch.no_grad():
            states = [x.named_states() for x in (cache, model(ids[None], use_cache=True).cache)]
        torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)
    assert prefixes.tokens_read == before


def test_checkpoints():
    """States of long texts are kept at chosen distances, and after chosen ids."""
    model, ids = FINCH.model(), FINCH.ids(150)
    ids[ids == 96] = 1
    ids[[3, 40, 44, 90]] = 96
    for options, stops in (
        ({"every": 60}, [60, 120, 150]),
        ({"after": [96, 1000]}, [41, 91, 150]),
        ({"every": 50, "after": [96], "shortest": 10}, [41, 100, 150]),
        ({"every": 200}, [150]),
    ):
        options = {"shortest": 20, **options}
        if "every" in options and "after" in options:
            stops = [41, 91, 150] if options["shortest"] > 9 else stops
        for rows in (1, 2):
            prefixes = PrefixCache(**options)
            prefixes.read(model, ids.repeat(rows, 1))
            assert sorted(prefixes.known(ids[:n]) for n in range(1, 151) if prefixes.known(ids[:n]) == n) == stops
            assert prefixes.tokens_read == 150 and len(prefixes) == len(stops)


def test_texts_in_order():
    """As by comparing with each of them."""
    chance = random.Random(0)
    for _ in range(200):
        draw = lambda: text_key([chance.randrange(2) for _ in range(chance.randrange(1, 9))])  # noqa: E731
        texts, held = SortedTexts(), {draw() for _ in range(chance.randrange(12))}
        for key in sorted(held, key=lambda key: chance.random()):
            texts.add(key)
        for key in chance.sample(sorted(held), len(held) // 3):
            texts.remove(key)
            held.remove(key)
        key = draw()
        sizes = [max(n for n in range(0, min(len(key), len(x)) + 1, 4) if key[:n] == x[:n]) for x in held]
        assert texts.longest_shared(key) == max(sizes, default=0)
        assert texts.longest_beginning(key) == max((x for x in held if key.startswith(x)), key=len, default=None)
        for one, found in shared_among(held).items():
            pairs = [(one, x) for x in held if x != one]
            assert found == {max(n for n in range(0, min(len(a), len(b)) + 1, 4) if a[:n] == b[:n]) for a, b in pairs}


@pytest.mark.parametrize("in_files", [False, True])
def test_threads(in_files, tmp_path):
    """Several threads read, and drop what others are about to use."""
    model, errors = FINCH.model(), []
    texts = [torch.cat((FINCH.ids(30), FINCH.ids(4 + n, seed=n))) for n in range(1, 7)]
    with torch.no_grad():
        expected = [model(text[None], use_cache=True).cache.named_states() for text in texts]
    size = PrefixCache().read(model, texts[0]).nbytes
    prefixes = PrefixCache(max_bytes=3 * size, directory=tmp_path if in_files else None)

    def work(seed):
        chance = random.Random(seed)
        try:
            for _ in range(15):
                rows = chance.sample(range(len(texts)), chance.randrange(1, 4))
                inputs = padded([{"input_ids": texts[row][None]} for row in rows], "left")
                caches = prefixes.read(model, **inputs).split()
                for row, cache in zip(rows, caches, strict=True):
                    found = cache.named_states()
                    found["after_blocks.padding"] = expected[row]["after_blocks.padding"]
                    torch.testing.assert_close(found, expected[row], atol=1e-4, rtol=1e-4)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prefixes.flush()
    assert errors == [] and prefixes.nbytes <= 3 * size
    assert prefixes.tokens_read < prefixes.tokens_asked / 2


def test_a_state_in_a_file_is_read_once(tmp_path, monkeypatch):
    model, ids, calls = FINCH.model(), FINCH.ids(30), []
    prefixes = PrefixCache(directory=tmp_path)
    prefixes.read(model, ids)
    prefixes.flush()
    prefixes, load = PrefixCache(directory=tmp_path), prefixes.directory.load
    waits = threading.Barrier(3, timeout=30)
    monkeypatch.setattr(prefixes.directory, "load", lambda *job: (calls.append(job), time.sleep(0.2), load(*job))[-1])

    def work():
        waits.wait()
        prefixes.read(model, ids)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and prefixes.tokens_read == 0 and prefixes.tokens_asked == 90


def adapted(config, *others):
    """A model with adapters, "0" active, "1", ..., as if they had been trained."""
    model = get_peft_model(FINCH.model(), config, adapter_name="0")
    for n, other in enumerate(others, 1):
        model.add_adapter(str(n), other)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "state_tuning" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(FINCH.ids(1, 9), labels=FINCH.ids(1, 9)).loss.backward()
    optimizer.step()


@torch.no_grad()
def write(model, through_data):
    """Changes weights, also so that torch does not count it."""
    for parameter in model.parameters():
        (parameter.data if through_data else parameter).mul_(1.1)


def load(model, assign):
    model.load_state_dict(FINCH.model(seed=1).state_dict(), assign=assign)


def steer(model):
    model.base_model.blocks[0].register_forward_hook(lambda module, inputs, output: output.flip(-1))


def scale(model):
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scale_layer(0.5)


LORA = LoraConfig(task_type="CAUSAL_LM")
TUNED = subquad.StateTuningConfig(task_type="CAUSAL_LM")
# What makes a model, and what changes it.
CHANGES = {
    "training": (FINCH.model, train),
    "weights": (FINCH.model, lambda model: write(model, False)),
    "data": (FINCH.model, lambda model: write(model, True)),
    "load": (FINCH.model, lambda model: load(model, False)),
    "assign": (FINCH.model, lambda model: load(model, True)),
    "hook": (FINCH.model, steer),
    "new-adapter": (FINCH.model, lambda model: model.add_adapter(LoraConfig(init_lora_weights=False))),
    "adapter": (lambda: adapted(LORA, LORA), lambda model: model.set_adapter("1")),
    "disabled": (lambda: adapted(LORA), lambda model: model.base_model.disable_adapter_layers()),
    "scaling": (lambda: adapted(LORA), scale),
    "state": (lambda: adapted(TUNED, TUNED), lambda model: model.set_adapter("1")),
    "tuning": (lambda: adapted(TUNED), lambda model: write(model, False)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_reads_anew(name, any_peft):
    make, change = CHANGES[name]
    model, ids, options = make(), FINCH.ids(1, 30), {"max_new_tokens": 5, **GREEDY}
    prefixes, ids = PrefixCache(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def answer():
        before = prefixes.tokens_read
        out = model.generate(**ids, prefix_cache=prefixes, output_logits=True, return_dict_in_generate=True, **options)
        return torch.stack(out.logits), prefixes.tokens_read - before

    first, read = answer()
    same, again = answer()
    assert (read, again) == (29, 0)
    torch.testing.assert_close(same, first)
    change(model)
    changed, read = answer()
    expected = model.generate(**ids, output_logits=True, return_dict_in_generate=True, **options).logits
    assert read == 29
    torch.testing.assert_close(changed, torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(changed, first, atol=1e-2)
    assert answer()[1] == 0


def test_weights_made_in_inference_mode():
    """Their changes are not counted."""
    with torch.inference_mode():
        model = FINCH.model()
        prefixes = PrefixCache()
        prefixes.read(model, FINCH.ids(20))
        write(model, False)
        prefixes.read(model, FINCH.ids(20))
        prefixes.read(model, FINCH.ids(20))
    assert prefixes.tokens_read == 40


def test_a_state_of_a_changed_model_is_not_kept():
    model, ids = adapted(LORA, LORA), FINCH.ids(1, 30)
    base, prefixes = model.get_base_model(), PrefixCache()
    first, version = prefixes.read(base, ids[0, :20]), prefixes.version
    model.set_adapter("1")
    with torch.no_grad():
        changed = base(ids, use_cache=True).cache
    prefixes.put(ids[0], changed, prefixes.version)
    prefixes.put(ids[0, :20], first, prefixes.version)  # nor one of the model as it was
    model.set_adapter("0")
    prefixes.read(base, ids[0])
    assert prefixes.tokens_read == 30
    model.set_adapter("1")
    prefixes.read(base, ids[0, :20])
    assert prefixes.tokens_read == 50
    prefixes.put(ids[0, :20], first, version)  # of an earlier version
    prefixes.put(ids[0], changed, None)
    assert len(prefixes) == 1
    prefixes.put(ids[0], changed, prefixes.version)
    prefixes.read(base, ids[0])
    assert prefixes.tokens_read == 50


def test_refusals():
    model, ids = FINCH.model(), FINCH.ids(1, 20)
    prefixes = PrefixCache()
    prefixes.read(model, ids[0])
    with pytest.raises(ValueError, match="holds the states of another model"):
        prefixes.read(FINCH.model(), ids[0])
    for options, message in (
        ({"input_ids": FINCH.ids(2, 5)}, "needs an `attention_mask` for `input_ids` with 2 rows"),
        ({"input_ids": ids, "attention_mask": torch.ones(1, 21)}, r"`attention_mask` must be \(1, 20\) if"),
        ({"input_ids": ids, "cache": model.new_cache()}, "`cache` cannot be given together"),
        ({}, "`prefix_cache` needs `input_ids`"),
        ({"input_ids": ids, "prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens` cannot be given together"),
        ({"input_ids": ids, "assistant_model": model}, "`assistant_model` cannot be given together"),
        ({"input_ids": ids, "cache_implementation": "static"}, "`cache_implementation` cannot be given together"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(**options, prefix_cache=prefixes, **GREEDY)
    with pytest.raises(ValueError, match=r"`prefix_cache` must be a PrefixCache, got \{\}"):
        model.generate(ids, prefix_cache={}, **GREEDY)
    model.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(ValueError, match="`prompt_lookup_num_tokens` cannot be given together"):
        model.generate(ids, prefix_cache=prefixes, **GREEDY)
    with torch.no_grad():
        cache = model(FINCH.ids(2, 20)).cache
    with pytest.raises(ValueError, match="`cache` must have a row for each text, 1, got 2"):
        prefixes.put(ids[0], cache, prefixes.version)
    with pytest.raises(ValueError, match="`cache` has read 20 tokens of a text of 4"):
        prefixes.put_rows([ids[0], ids[0, :4]], cache, prefixes.version)
    for wrong in (ids[None], ids[0] / 2, ids[0] - 99, ids[0] + 2**32):  # none of them is cut, rounded or wrapped
        with pytest.raises(ValueError, match="A text must be a sequence of ids, got "):
            prefixes.read(model, wrong)
    with pytest.raises(ValueError, match=r"`attention_mask` must be \(1, 20\), as `input_ids`, got \(1, 4\)"):
        prefixes.read(model, ids, torch.ones(1, 4))
    with pytest.raises(RuntimeError, match="before all texts were read"):
        prefixes.begin(model, [FINCH.ids(9, seed=5)]).cache(9)
    for name, value in {
        "max_bytes": 0,
        "max_disk_bytes": "1GB",
        "shortest": 2.5,
        "every": True,
        "max_entries": None,
    }.items():
        with pytest.raises(ValueError, match=f"`{name}` must be a whole number of at least 1, got {value!r}"):
            PrefixCache(**{name: value})
    with pytest.raises(ValueError, match="`after` must be a whole number of at least 0, got 'a'"):
        PrefixCache(after=["a"])


class _Prompt:
    """What the server's non-streaming answer needs of a tokenizer."""

    def decode(self, ids, **kwargs):
        return ids.tolist()


def test_transformers_serve_goes_on_from_earlier_turns(monkeypatch):
    """Its own generation, with what `subquad run transformers serve` sets: it reads what is new in a conversation."""
    utils = pytest.importorskip("transformers.cli.serving.utils")
    monkeypatch.setattr(RecurrentGenerationMixin, "make_prefix_cache", None)
    _keep_states()
    model, config = FINCH.model(), GenerationConfig(max_new_tokens=8, **GREEDY)
    manager, counted = utils.GenerateManager(), Counted(model)

    def answer(ids):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        request = manager.generate_non_streaming(model, _Prompt(), inputs, config, "request")
        return torch.tensor([asyncio.run(request)[0]]), counted.take()

    ids = FINCH.ids(1, 40)
    first, read = answer(ids)
    assert read == 40 + 7
    ids = torch.cat((ids, first, FINCH.ids(1, 5, seed=2)), 1)
    second, read = answer(ids)
    assert read == 1 + 5 + 7
    other = FINCH.model()
    assert torch.equal(torch.cat((ids, second), 1), other.generate(ids, generation_config=config, prefix_cache=None))
    assert other.own_prefix_cache is not model.own_prefix_cache


@pytest.mark.parametrize(
    "setting",
    [{"use_cache": False}, {"prompt_lookup_num_tokens": 3}, {"cache_implementation": "static"}, "prompt"],
    ids=str,
)
def test_no_cache_is_made_where_none_can_be_used(setting, monkeypatch):
    """Nobody gave one, so there is nothing to refuse."""
    model, inputs = FINCH.model(), {"input_ids": FINCH.ids(1, 20)}
    if setting == "prompt":
        model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    else:
        for name, value in setting.items():
            setattr(model.generation_config, name, value)
    expected = model.generate(**inputs, max_new_tokens=3, **GREEDY)
    monkeypatch.setattr(RecurrentGenerationMixin, "make_prefix_cache", None)
    _keep_states()
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, **GREEDY), expected)
    assert not hasattr(model, "own_prefix_cache")
