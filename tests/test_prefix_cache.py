"""Beginnings that many texts share are read once, and the answers stay the same."""

import asyncio
import gc
import os

import pytest
import torch
from cases import CASES, GREEDY, TEXT, TRAINED_GENERATING, VARIANTS, each, padded
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from transformers import GenerationConfig

import subquad
from subquad import PrefixCache
from subquad.decoding.generation import RecurrentGenerationMixin
from subquad.modeling.state_file import ModelIdentity, read_state_file, write_state_file
from subquad_cli.run import _keep_states


FINCH = CASES["rwkv6"]
OWNER = ModelIdentity("tiny", "0123456789abcdef")


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
@each(*TEXT, *VARIANTS, *TRAINED_GENERATING)
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


@pytest.mark.parametrize("name", ["rwkv6", "avey", "raven", "gecko"])
def test_files(name, tmp_path):
    case = CASES[name]
    model, texts = case.model(), few_shot(case, 3)
    for ids in texts:
        PrefixCache(directory=tmp_path, model=OWNER).read(model, ids[0])  # each in a process of its own
    prefixes = PrefixCache(directory=tmp_path, model=OWNER)
    found = prefixes.read(model, texts[2][0])
    assert prefixes.tokens_read == 0 and len(list(tmp_path.iterdir())) == 4
    with torch.no_grad():
        expected = model(texts[2], use_cache=True).cache
        logits = [model(case.ids(1, 1), cache=cache).logits for cache in (found, expected)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    # Those of another model, of another dtype, and damaged ones do not count.
    other = PrefixCache(directory=tmp_path, model=ModelIdentity("other", "abc"))
    other.read(model, texts[0][0, :40])
    assert other.tokens_read == 40
    low = PrefixCache(directory=tmp_path, model=OWNER)
    low.read(case.model().to(torch.bfloat16), texts[0][0])
    assert low.tokens_read == texts[0].shape[1]
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    damaged = PrefixCache(directory=tmp_path, model=OWNER)
    damaged.read(model, texts[0][0])
    assert damaged.tokens_read == texts[0].shape[1]


@pytest.mark.fast
def test_files_only_help(tmp_path):
    """Whatever a directory holds, and whatever its disk is like, texts are read, with one warning."""
    model, ids, options = FINCH.model(), FINCH.ids(1, 30), {"max_new_tokens": 5, **GREEDY}
    expected = model.generate(ids, **options)
    PrefixCache(directory=tmp_path, model=OWNER).read(model, ids[0, :-1])
    (file,) = tmp_path.iterdir()
    content, (states, about) = file.read_bytes(), read_state_file(file)
    known = about["text"]["ids"]
    for forged in (
        {"seen_tokens": 28},
        {"seen_tokens": 3 * 10**8},
        {"text": {"ids": [10**30] * 29}},
        {"text": {"ids": [0.5] * 29}},
        {"text": {"ids": [[]] * 29}},
        {"text": {"ids": [*known[:-1], -1]}},
        {"text": {"ids": []}, "seen_tokens": 0},
        {"sizes": {}},
        {"model": 3},
        {"dtype": 3},
        {"layers.0.wkv": torch.zeros(1)},
        {"after_blocks.output": None},
        {"layers.0.wkv": torch.full((1, 3, 16, 16), torch.nan)},
        {"x": torch.zeros(())},
    ):
        changed = states | {name: x for name, x in forged.items() if name not in about}
        changed = {name: x for name, x in changed.items() if x is not None}
        write_state_file(file, changed, about | {name: x for name, x in forged.items() if name in about})
        prefixes = PrefixCache(directory=tmp_path, model=OWNER)
        assert torch.equal(model.generate(ids, prefix_cache=prefixes, **options), expected), forged
        assert prefixes.tokens_read == 29, forged
        for path in tmp_path.iterdir():
            path.unlink()
    (tmp_path / "directory.state").mkdir()
    os.mkfifo(tmp_path / "pipe.state")
    (tmp_path / "bytes.state").write_bytes(content[:100])
    (tmp_path / "not-a-directory").write_bytes(b"")
    for directory in (tmp_path, tmp_path / "not-a-directory", tmp_path / "not-a-directory" / "below"):
        prefixes = PrefixCache(directory=directory, model=OWNER)
        for _ in range(2):
            assert torch.equal(model.generate(ids, prefix_cache=prefixes, **options), expected)
        assert prefixes.tokens_read == 29 and prefixes.tokens_asked == 58


def test_a_file_that_is_damaged_later_is_written_again(tmp_path):
    model, ids = FINCH.model(), FINCH.ids(20)
    PrefixCache(directory=tmp_path, model=OWNER).read(model, ids)
    (file,) = tmp_path.iterdir()
    prefixes = PrefixCache(directory=tmp_path, model=OWNER)
    prefixes.read(model, FINCH.ids(17, seed=3))
    file.write_bytes(file.read_bytes()[:-1])
    prefixes.read(model, ids)
    assert prefixes.tokens_read == 37
    again = PrefixCache(directory=tmp_path, model=OWNER)
    again.read(model, ids)
    assert again.tokens_read == 0


def test_a_full_disk_loses_no_answer(tmp_path, monkeypatch):
    model, ids, options = FINCH.model(), FINCH.ids(1, 30), {"max_new_tokens": 5, **GREEDY}
    expected, warnings = model.generate(ids, **options), []
    monkeypatch.setattr("subquad.states.prefix_cache.logger.warning_once", warnings.append)

    def save_file(tensors, path, metadata):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("subquad.modeling.state_file.save_file", save_file)
    prefixes = PrefixCache(directory=tmp_path, model=OWNER)
    assert torch.equal(model.generate(ids, prefix_cache=prefixes, **options), expected)
    assert torch.equal(model.generate(ids, prefix_cache=prefixes, **options), expected)
    assert prefixes.tokens_read == 29 and not list(tmp_path.iterdir())
    assert len({*warnings}) == 1 and "No space left on device" in warnings[0]


def test_files_have_a_limit(tmp_path):
    model = FINCH.model()
    size = PrefixCache().read(model, FINCH.ids(20)).nbytes
    prefixes = PrefixCache(max_bytes=1, directory=tmp_path, max_disk_bytes=2 * size, model=OWNER)
    for seed in range(4):
        prefixes.read(model, FINCH.ids(20, seed=seed))
    assert len(list(tmp_path.iterdir())) == 2 and prefixes.nbytes == size
    prefixes.read(model, FINCH.ids(20, seed=2))  # from its file
    assert prefixes.tokens_read == 80
    prefixes.clear()
    assert list(tmp_path.iterdir()) == []


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


def test_files_of_a_model_that_changes(tmp_path):
    """They belong to the model as it was."""
    model, ids = adapted(LORA), FINCH.ids(20)
    base, prefixes = model.get_base_model(), PrefixCache(directory=tmp_path, model=OWNER)
    prefixes.read(base, ids)
    with model.disable_adapter():
        prefixes.read(base, ids)
        prefixes.read(base, FINCH.ids(25, seed=1))
    assert prefixes.tokens_read == 20 + 20 + 25
    assert len(list(tmp_path.iterdir())) == 1
    prefixes.read(base, ids)
    assert prefixes.tokens_read == 65
    model.merge_adapter()
    prefixes.read(base, ids)
    assert prefixes.tokens_read == 85


def test_cleared_after_a_change(tmp_path):
    """The files still belong to the model as it was. Without files, another model may come."""
    model, ids = FINCH.model(), FINCH.ids(20)
    prefixes = PrefixCache(directory=tmp_path, model=OWNER)
    prefixes.read(model, ids)
    write(model, False)
    prefixes.clear()
    prefixes.read(model, ids)
    assert prefixes.tokens_read == 40 and list(tmp_path.iterdir()) == []
    prefixes.clear()
    del model
    gc.collect()
    prefixes.clear()
    prefixes.read(FINCH.model(), ids)
    assert len(list(tmp_path.iterdir())) == 1
    prefixes = PrefixCache()
    models = FINCH.model(), FINCH.model(seed=1)
    for model in models:
        prefixes.read(model, ids)
        prefixes.clear()


def test_a_state_of_a_changed_model_is_not_kept():
    model, ids = adapted(LORA, LORA), FINCH.ids(1, 30)
    base, prefixes = model.get_base_model(), PrefixCache()
    first = prefixes.read(base, ids[0, :20])
    model.set_adapter("1")
    with torch.no_grad():
        changed = base(ids, use_cache=True).cache
    prefixes.put(ids[0], changed)
    prefixes.put(ids[0, :20], first)  # nor one of the model as it was
    model.set_adapter("0")
    prefixes.read(base, ids[0])
    assert prefixes.tokens_read == 30
    model.set_adapter("1")
    prefixes.read(base, ids[0, :20])
    assert prefixes.tokens_read == 50
    prefixes.put(ids[0], changed)
    prefixes.read(base, ids[0])
    assert prefixes.tokens_read == 50


def test_refusals(tmp_path):
    model, ids = FINCH.model(), FINCH.ids(1, 20)
    prefixes = PrefixCache()
    prefixes.read(model, ids[0])
    with pytest.raises(ValueError, match="holds the states of another model"):
        prefixes.read(FINCH.model(), ids[0])
    for options, message in (
        ({"input_ids": FINCH.ids(2, 5)}, r"`input_ids` with one row, got \(2, 5\)"),
        (padded([{"input_ids": ids}], "left", more=2), "`attention_mask` must not have zeros"),
        ({"input_ids": ids, "cache": model.new_cache()}, "`cache` cannot be given together"),
        ({}, "`input_ids` with one row, got None"),
        ({"input_ids": ids, "prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens` cannot be given together"),
        ({"input_ids": ids, "assistant_model": model}, "`assistant_model` cannot be given together"),
        ({"input_ids": ids, "cache_implementation": "static"}, "`cache_implementation` cannot be given together"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(**options, prefix_cache=prefixes, **GREEDY)
    model.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(ValueError, match="`prompt_lookup_num_tokens` cannot be given together"):
        model.generate(ids, prefix_cache=prefixes, **GREEDY)
    with torch.no_grad():
        cache = model(FINCH.ids(2, 20)).cache
    with pytest.raises(ValueError, match="`cache` must hold one sequence, got 2"):
        prefixes.put(ids[0], cache)
    with pytest.raises(ValueError, match="has read 20 tokens, but `ids` has 4"):
        prefixes.put(ids[0, :4], cache.split()[0])
    with pytest.raises(ValueError, match="`max_bytes` must be at least 1, got 0"):
        PrefixCache(max_bytes=0)
    with pytest.raises(ValueError, match="`directory` needs `model`"):
        PrefixCache(directory=tmp_path)


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
