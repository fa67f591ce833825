"""What depends on the version of transformers: the names of the cache, unknown arguments, and the check of itself."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch
import transformers
from cases import BASE, CASES, GENERATING, GREEDY, VISUAL, each, model_class, random_ids, tiny_config, tiny_model
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from subquad.modeling import self_check, versions


NAMES = versions.CACHE_NAMES
# Each with a cache of another kind.
each_kind = each(*(CASES[name] for name in ("rwkv6", "rwkv7_deep_embed", "avey", "raven", "gecko", "visual-rwkv6")))


# The two names of the cache.


@pytest.mark.fast
@each(*GENERATING)
def test_the_cache_has_two_names(case):
    model, ids = case.model(), case.ids(2, 9)
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
        for name in NAMES:
            out = model(ids[:, :-1])
            assert isinstance(out, ModelOutput) and out.cache is out.past_key_values is not None
            base = model.base_model(ids[:, :-1])
            assert base.cache is base.past_key_values is not None
            torch.testing.assert_close(model(ids[:, -1:], **{name: out.cache}).logits, expected, atol=1e-4, rtol=1e-4)
            one = model.base_model(ids[:, -1:], **{name: base.cache}).last_hidden_state
            whole = model.base_model(ids).last_hidden_state[:, -1:]
            torch.testing.assert_close(one, whole, atol=1e-4, rtol=1e-4)
            assert name in inspect.signature(model.forward).parameters
        assert model(ids, use_cache=False).cache is None
    both = dict.fromkeys(NAMES, model.new_cache())
    for call in (model, model.base_model, model.generate):
        with pytest.raises(TypeError, match="`cache` and `past_key_values` are two names of the same argument"):
            call(ids, **both)
    assert model(ids, cache=None, past_key_values=model.new_cache()).cache.get_seq_length() == 9


@pytest.mark.fast
@each_kind
def test_generate_takes_and_returns_either_name(case):
    model, ids = case.model(), case.ids(1, 12)
    whole = model.generate(ids, max_new_tokens=6, **GREEDY)
    assert torch.equal(whole, model.generate(ids, max_new_tokens=6, use_cache=False, **GREEDY))
    for name in NAMES:
        first = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, **GREEDY)
        assert first.cache is first.past_key_values
        again = model.generate(first.sequences, **{name: first.cache}, max_new_tokens=3, **GREEDY)
        assert torch.equal(again, whole)
        cache = model.new_cache()
        inputs = model.prepare_inputs_for_generation(ids, attention_mask=torch.ones_like(ids), **{name: cache})
        assert [value for key, value in inputs.items() if key in NAMES] == [cache]
        assert inputs["cache"] is inputs["past_key_values"] is inputs.get("cache") is inputs.get("past_key_values")
        assert inputs.get("invented", 3) == 3


@pytest.mark.fast
@each(*(case for case in BASE if case.causal))
def test_classifiers_give_the_cache_under_both_names(case):
    out = case.model("AutoModelForSequenceClassification")(case.ids(2, 5), use_cache=True)
    assert out.cache is out.past_key_values is not None


def test_a_new_name_of_the_cache_is_noticed(monkeypatch):
    monkeypatch.setattr(versions, "CACHE_NAMES", ("memory",))
    with pytest.raises(ImportError, match=r"has another name for the cache than memory; its outputs have last_hidden"):
        versions._name_of_cache()


# What transformers does with a cache during `generate`.


class _Event:
    """An event of a device that has finished."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass


@each_kind
def test_a_stop_that_is_noticed_one_step_late(case, monkeypatch):
    """transformers 5.23 reads whether to stop a step late on some devices, and takes the last step back."""
    check = getattr(transformers.generation.utils, "DeferredStopCheck", None)
    if check is None:
        assert versions.CACHE_NAME == "past_key_values"  # an older version, without that class
        return
    model, ids = case.model(), case.ids(2, 10)
    options = {"return_dict_in_generate": True, "output_logits": True, **GREEDY}
    eos = model.generate(ids, max_new_tokens=12, **GREEDY)[:, 13].tolist()  # the rows end after four tokens or earlier
    for more in ({"max_new_tokens": 12, "eos_token_id": eos}, {"max_new_tokens": 5}):
        more = options | more
        expected = model.generate(ids, **more)
        with monkeypatch.context() as patch:
            patch.setattr(check, "is_supported", staticmethod(lambda *args, **kwargs: True))
            patch.setattr(torch, "Event", _Event)
            found = model.generate(ids, **more)
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(found.logits, expected.logits)
        assert found.cache.get_seq_length() == expected.cache.get_seq_length() == expected.sequences.shape[1] - 1
        assert not found.cache.records_past
        with torch.no_grad():
            after = [model(ids[:, :3], cache=out.cache).logits for out in (found, expected)]
        torch.testing.assert_close(*after, atol=1e-4, rtol=1e-4)


@each_kind
def test_a_text_is_not_read_again_into_its_cache(case):
    model, ids = case.model(), case.ids(1, 12)
    options = {"max_new_tokens": 4, **GREEDY}
    expected = model.generate(ids, **options)

    def cache():
        with torch.no_grad():
            return model(ids[:, :8]).cache

    assert torch.equal(model.generate(ids, cache=cache(), **options), expected)
    with pytest.raises(ValueError, match="`cache` was given, but `use_cache` is False"):
        model.generate(ids, cache=cache(), use_cache=False, **options)
    assisted = (
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": model},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=3)},
    )
    for how in assisted:
        with pytest.raises(ValueError, match="assisted decoding reads all tokens of the text, but `cache` has read 8"):
            model.generate(ids, cache=cache(), **how, **options)
    mask, read = torch.ones_like(ids), cache()
    read.activate_past_recording()
    out = model.generate(ids[:, 8:], attention_mask=mask, cache=read, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(out, expected[:, 8:])
    if versions.CHUNKS_FROM_THE_BEGINNING:
        with pytest.raises(ValueError, match="`prefill_chunk_size`: transformers before 5.23"):
            model.generate(ids, cache=cache(), prefill_chunk_size=3, **options)
    else:
        assert torch.equal(model.generate(ids, cache=cache(), prefill_chunk_size=3, **options), expected)


# Arguments that nobody reads.


@pytest.mark.fast
@each(*BASE, *VISUAL)
def test_unknown_arguments_of_every_class(case):
    for auto_class in case.auto_classes:
        model, ids = case.model(auto_class), case.ids(2, 5)
        name = type(model).__name__
        for call in (model, model.base_model):
            with pytest.raises(TypeError, match=r"\.forward\(\) got an unexpected keyword argument `invented`\."):
                call(ids, invented=1)
        with pytest.raises(TypeError, match=rf"{name}\.forward\(\) got .*`atention_mask`\. Did you mean `attention_"):
            model(ids, atention_mask=torch.ones_like(ids))
        for common in ({"num_items_in_batch": None}, {"invented": None}, {"output_attentions": False}):
            model(ids, **common)
    if case.causal:
        model = case.model()
        for wrong, meant in (("max_new_tokns", "max_new_tokens"), ("past_key_value", "past_key_values")):
            with pytest.raises(TypeError, match=rf"generate\(\) got .*`{wrong}`\. Did you mean .*`{meant}`"):
                model.generate(case.ids(1, 4), **{wrong: 1})


@pytest.mark.fast
@each(*BASE)
def test_documents_that_are_only_numbered(case):
    model, ids = case.model(case.lm_class), case.ids(1, 6)
    bounds = torch.tensor([0, 3, 6])
    repeated = {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]]), "cu_seq_lens_k": bounds, "max_length_q": 3}
    for name, value in repeated.items():
        with pytest.raises(ValueError, match=f"`{name}` alone marks no documents: give `cu_seqlens`"):
            model(ids, **{name: value})
    with pytest.raises(TypeError, match="`cu_seqlens` and `cu_seq_lens_q` are two names of the same argument"):
        model(ids, cu_seqlens=bounds, cu_seq_lens_q=bounds)
    expected = model(ids, cu_seqlens=bounds)[0]
    assert not torch.allclose(expected, model(ids)[0])
    for marked in ({"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds}, {"position_ids": torch.arange(6)[None] % 3}):
        torch.testing.assert_close(model(ids, **marked, **repeated)[0], expected)


@each(CASES["rwkv6"], CASES["visual-rwkv6"])
def test_a_cache_that_gets_a_third_name_is_an_error(case, monkeypatch):
    """Without the two names, what wrote garbage silently is an error."""
    model, ids = case.model(), case.ids(1, 8)
    original = type(model).prepare_inputs_for_generation

    def prepare(self, *args, **kwargs):
        inputs = original(self, *args, **kwargs)
        return {"memory" if name in NAMES else name: value for name, value in inputs.items()}

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", prepare)
    with pytest.raises(TypeError, match=r"forward\(\) got an unexpected keyword argument `memory`"):
        model.generate(ids, max_new_tokens=4, **GREEDY)


# The check of itself.


@pytest.fixture
def newer(monkeypatch):
    """A transformers that is newer than those that were tested."""
    monkeypatch.setattr(versions.transformers, "__version__", "5.99.1")
    monkeypatch.setattr(self_check, "_checked", set())


@each_kind
def test_the_check_passes(case, newer, caplog):
    model, ids = case.model(), case.ids(1, 5)
    random = torch.get_rng_state()
    settings = model.generation_config
    model.generate(ids, max_new_tokens=2, **GREEDY)
    assert torch.equal(torch.get_rng_state(), random) and model.generation_config is settings
    assert self_check._checked == {type(model)}
    for dtype in (torch.bfloat16, torch.float16):
        assert self_check.difference_of_cache(case.model().to(dtype)) < self_check.TOLERANCE


def test_the_check_leaves_the_model_alone(newer):
    """Also if threads generate with it, or its weights are offloaded."""
    model, ids = tiny_model("rwkv6"), random_ids(1, 6)
    settings = model.generation_config
    settings.max_new_tokens = 3
    with ThreadPoolExecutor(4) as pool:
        lengths = list(pool.map(lambda _: model.generate(ids, **GREEDY).shape[1], range(4)))
    assert lengths == [9] * 4 and model.generation_config is settings and settings.max_new_tokens == 3
    self_check._checked.clear()
    expected = model.generate(ids, **GREEDY)
    self_check._checked.clear()
    offloaded = accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(offloaded.generate(ids, **GREEDY), expected)


def test_the_arguments_of_a_subclass_are_known():
    class Subclass(model_class("rwkv6")):
        def forward(self, input_ids=None, of_subclass=None, **kwargs):
            assert of_subclass == 3
            return super().forward(input_ids, **kwargs)

        def prepare_inputs_for_generation(self, *args, of_preparation=None, **kwargs):
            assert of_preparation == 4
            return super().prepare_inputs_for_generation(*args, **kwargs)

    model, ids = Subclass(tiny_config("rwkv6")), random_ids(1, 6)
    out = model.generate(ids, max_new_tokens=2, of_subclass=3, of_preparation=4, **GREEDY)
    assert out.shape == (1, 8)


def test_the_check_fails(newer, monkeypatch):
    """A cache that is lost on the way to the model, as when its argument was renamed."""
    model = tiny_model("rwkv6")
    original = type(model).prepare_inputs_for_generation

    def prepare(self, *args, **kwargs):
        inputs = original(self, *args, **kwargs)
        return {name: value for name, value in inputs.items() if name not in NAMES}

    ids = random_ids(1, 6)
    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", prepare)
    for _ in range(2):  # not only the first time
        with pytest.raises(RuntimeError, match=r"transformers 5\.99\.1: newer than what was tested\. Tested with"):
            model.generate(ids, max_new_tokens=3, **GREEDY)
    monkeypatch.setenv("SUBQUAD_SELF_CHECK", "no")
    with pytest.raises(ValueError, match="SUBQUAD_SELF_CHECK must be 0 or 1, got 'no'"):
        model.generate(ids, max_new_tokens=3, **GREEDY)
    monkeypatch.setenv("SUBQUAD_SELF_CHECK", "0")
    assert model.generate(ids, max_new_tokens=3, **GREEDY).shape == (1, 9)
    monkeypatch.delenv("SUBQUAD_SELF_CHECK")
    monkeypatch.setattr(versions.transformers, "__version__", "5.24.7")
    if versions.newer_than_tested() == []:  # nothing to check
        assert model.generate(ids, max_new_tokens=3, **GREEDY).shape == (1, 9)


def test_versions_are_compared_by_their_minor_numbers(monkeypatch):
    for version, newer in (
        ("5.16.1", False),
        ("5.24.9", False),
        ("5.24.0.dev0", False),
        ("5.25.0", True),
        ("6.0", True),
    ):
        monkeypatch.setattr(versions.transformers, "__version__", version)
        assert any(x.startswith("transformers") for x in versions.newer_than_tested()) == newer
