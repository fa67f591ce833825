"""
What the common test suites of transformers ask of every configuration, model and `generate`, and the contract and
`test_common.py` do not: of every class of every architecture.
"""

import copy
import inspect
import json
import pickle
import re
import warnings

import accelerate
import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from cases import (
    BASE,
    GENERATING,
    GREEDY,
    IMAGE_ID,
    VARIANTS,
    VISUAL,
    each,
    each_case,
    each_model_case,
    each_text_case,
    each_text_model_case,
    padded,
    pick,
    random_ids,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModel,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing

from subquad import RecurrentCache
from subquad_tokenizers import ByteTokenizer


# The others of the family are alike.
pytestmark = pytest.mark.quick_cases("*rwkv6", "rwkv7", "avey*", "raven*", "gecko*")


def each_class(case, **fields):
    """The Auto class and a tiny model of every class of an architecture."""
    for auto_class in case.auto_classes:
        yield auto_class, case.model(auto_class, **fields)


def labels_of(model, auto_class, ids):
    """Labels for any head, none for a base model."""
    if auto_class == "AutoModel":
        return {}
    if auto_class == "AutoModelForQuestionAnswering":
        return {"start_positions": torch.full((len(ids),), 1), "end_positions": torch.full((len(ids),), 3)}
    if auto_class == "AutoModelForSequenceClassification":
        return {"labels": torch.arange(len(ids)) % model.config.num_labels}
    if auto_class == "AutoModelForTokenClassification":
        return {"labels": ids % model.config.num_labels}
    return {"labels": ids.masked_fill(ids == IMAGE_ID, -100)}


def half_padded(case, length, padding):
    """Two rows; the first begins with padding."""
    return padded([case.text(1, length - padding), case.text(1, length, seed=1)], "left")


@pytest.fixture
def seeded(monkeypatch):
    """Every module begins with the same numbers, whichever were initialised before it."""
    original = PreTrainedModel._initialize_weights

    def initialize(*args, **kwargs):
        torch.manual_seed(42)
        return original(*args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "_initialize_weights", initialize)


# Configurations.


@pytest.mark.fast
@each_text_model_case
def test_configurations(case, tmp_path):
    config = case.config(num_labels=5)
    config.unknown_field = "kept"
    config_class, names = type(config), ["hidden_size", "num_hidden_layers", "vocab_size"]
    if case.heads:
        names += ["num_attention_heads", "intermediate_size"]
    for size, name in enumerate(names):
        other, own_name = copy.deepcopy(config), config.attribute_map.get(name, name)
        setattr(other, name, size)
        assert getattr(other, name) == getattr(other, own_name) == other.to_dict()[own_name] == size
        assert own_name == name or name not in other.to_dict()
    assert config_class().hidden_size != 192 == config_class(hidden_size=192).hidden_size

    fields = config.to_dict()
    assert json.loads(config.to_json_string(use_diff=False)) == json.loads(json.dumps(fields))
    config.to_json_file(tmp_path / "file.json")
    config.save_pretrained(tmp_path / "sub")
    for other in (
        config_class.from_dict(fields),
        config_class.from_dict(config.to_diff_dict()),
        config_class.from_json_file(tmp_path / "file.json"),
        config_class.from_pretrained(tmp_path, subfolder="sub"),
        AutoConfig.from_pretrained(tmp_path / "sub"),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
    ):
        assert type(other) is config_class
        assert {**other.to_dict(), "_name_or_path": ""} == {**fields, "_name_or_path": ""}
        assert other.unknown_field == "kept"
    other, unused = config_class.from_pretrained(
        tmp_path / "sub", vocab_size=20, num_hidden_layers=2, not_a_field=1, return_unused_kwargs=True
    )
    assert (other.vocab_size, other.num_hidden_layers, unused) == (20, 2, {"not_a_field": 1})

    assert len(config.id2label) == len(config.label2id) == 5
    config.num_labels = 3
    assert len(config.id2label) == len(config.label2id) == 3
    given = {
        "return_dict": False,
        "output_hidden_states": True,
        "output_attentions": True,
        "tie_word_embeddings": False,
        "chunk_size_feed_forward": 5,
        "architectures": ["AnyModel"],
        "id2label": {0: "good"},
        "label2id": {"good": 0},
        "problem_type": "regression",
        "bos_token_id": 6,
        "eos_token_id": 8,
        "pad_token_id": 7,
        "dtype": torch.float16,
    }
    config = config_class(**given)
    assert {name: getattr(config, name) for name in given} == given


# The attributes of classes.


@each_text_model_case
def test_attributes(case):
    for auto_class, model in each_class(case):
        assert next(iter(inspect.signature(model.forward).parameters)) == model.main_input_name == "input_ids"
        assert model.input_modalities in ("text", ("text",))
        base = getattr(model, model.base_model_prefix, model)
        assert model.base_model is model.get_decoder() is base
        assert (base is model) == (auto_class == "AutoModel")
        blocks = {type(m).__name__ for m in model.modules() if isinstance(m, GradientCheckpointingLayer)}
        assert blocks == set(model._no_split_modules)
        assert model.can_generate() == hasattr(model, "generate") == (auto_class == "AutoModelForCausalLM")
        if model.can_generate():
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                assert getattr(model.generation_config, name) == getattr(model.config, name)

        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert (head is not None) == (auto_class == case.lm_class)
        numbers = sum(p.numel() for p in model.parameters())
        assert model.num_parameters() == numbers
        assert model.num_parameters(exclude_embeddings=True) == numbers - embeddings.weight.numel()
        assert model.get_memory_footprint() == 4 * numbers
        assert len(model(model.dummy_inputs["input_ids"])[0]) == len(model.dummy_inputs["input_ids"])

        replacement = torch.nn.Embedding(10, 48)
        model.set_input_embeddings(replacement)
        assert model.get_input_embeddings() is model.base_model.get_input_embeddings() is replacement
        if head is not None:
            replacement = torch.nn.Linear(48, 10)
            model.set_output_embeddings(replacement)
            assert model.get_output_embeddings() is replacement
            assert all(module is not head for module in model.modules())


@each_text_model_case
def test_attention_implementations(case):
    ids = random_ids(2, 20)
    for auto_class, model in each_class(case):
        expected = model(ids)[0]
        known = case.attention
        for name in known:
            made = getattr(transformers, auto_class).from_config(model.config, attn_implementation=name)
            assert made.config._attn_implementation == name
            model.set_attn_implementation(name)
            assert model.config._attn_implementation == model.base_model.config._attn_implementation == name
            torch.testing.assert_close(model(ids)[0], expected, atol=1e-4, rtol=1e-4)
        others, message = {"flex_attention"}, f"{type(model).__name__} does not support an attention"
        if known == ("eager",):
            others = {"sdpa", "flex_attention", "flash_attention_2", "kernels-community/flash-attn2"}
            message = f"`attn_implementation` must be left out or 'eager', got 'NAME': {type(model).__name__}"
        for name in others.difference(known):
            refused = message.replace("NAME", name)
            with pytest.raises(ValueError, match=refused):
                model.set_attn_implementation(name)
            with pytest.raises(ValueError, match=refused):
                getattr(transformers, auto_class).from_config(model.config, attn_implementation=name)


@each_text_model_case
def test_attention_weights(case):
    """Of the layers that are softmax attention; others have none."""
    ids = random_ids(2, 20)
    for _, model in each_class(case):
        assert model(ids).attentions is None
        if case.window is None:
            message = f"`output_attentions`: {type(model).__name__} has no attention weights"
            with pytest.raises(ValueError, match=message):
                model(ids, output_attentions=True)
            continue
        with pytest.raises(ValueError, match="`output_attentions` needs `attn_implementation=\"eager\"`, got 'sdpa'"):
            model(ids, output_attentions=True)
        model.set_attn_implementation("eager")
        attentions = model(ids, output_attentions=True).attentions
        (weights,) = attentions
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 20))
        window = torch.ones(20, 20, dtype=torch.bool).tril().triu(1 - case.window)
        assert torch.equal(weights > 0, window.expand(2, 3, -1, -1))
        model.config.output_attentions = True
        torch.testing.assert_close(model(ids).attentions, attentions)
        if model.can_generate():
            options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_attentions": True, **GREEDY}
            shapes = [[x.shape for x in step] for step in model.generate(ids, **options).attentions]
            assert shapes == [[(2, 3, 20, 20)], [(2, 3, 1, case.window)], [(2, 3, 1, case.window)]]


@pytest.mark.fast
@each_model_case
def test_copies(case):
    text = case.text(2, 9)
    for _, model in each_class(case, tie_word_embeddings=True):
        expected = model(**text)[0]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(other(**text)[0], expected, atol=0, rtol=0)
            assert len(list(other.parameters())) == len(list(model.parameters()))  # what was tied is
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
        torch.testing.assert_close(model(**text)[0], expected, atol=0, rtol=0)


# How weights begin, and how they are loaded.


@each_model_case
def test_initialisation_from_meta(case, seeded):
    for auto_class in case.auto_classes:
        made, config = case.model_class(auto_class), case.config()
        expected = made(config)
        with torch.device("meta"):
            from_meta = made(config)
        from_meta.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in from_meta.parameters():
                parameter.fill_(torch.nan)
        from_meta.init_weights()
        from_nothing, info = made.from_pretrained(None, config=config, state_dict={}, output_loading_info=True)
        assert info["missing_keys"] == set(expected.state_dict())
        for model in (from_meta, from_nothing):
            torch.testing.assert_close(model.state_dict(), expected.state_dict(), atol=0, rtol=0)
            torch.testing.assert_close(dict(model.named_buffers()), dict(expected.named_buffers()), atol=0, rtol=0)
            model.train(False)(**case.text(1, 5))  # fails if a tensor is still on meta


@each_model_case
def test_what_a_file_lacks_is_initialised(case):
    for _, model in each_class(case, tie_word_embeddings=False):
        states, fresh = model.state_dict(), type(model)(model.config).state_dict()
        for part in range(2):
            kept = dict(list(states.items())[part::2])
            loaded, info = type(model).from_pretrained(
                None, config=model.config, state_dict=kept, output_loading_info=True
            )
            assert info["missing_keys"] == set(states) - set(kept)
            for name, state in loaded.state_dict().items():
                if name in kept:
                    assert torch.equal(state, kept[name]), name
                    continue
                (low, high), (low_fresh, high_fresh) = torch.aminmax(state), torch.aminmax(fresh[name])
                spread = high_fresh - low_fresh
                if spread == 0 or state.numel() >= 16:  # numbers of the same range, as far apart
                    assert (low - low_fresh).abs() <= spread and (high - high_fresh).abs() <= spread, name
                    assert high - low >= spread / 4, name


@pytest.mark.skipif(not hasattr(PreTrainedModel, "supports_context_parallel"), reason="new in transformers 5.17")
@each_model_case
def test_context_parallelism_is_refused(case):
    model = case.model()
    assert not model.supports_context_parallel
    with pytest.raises(ValueError, match="Context parallelism does not support attention layers of type"):
        accelerate.big_modeling._attach_context_parallel_hooks(model)


@each_model_case
def test_servers_do_not_take_it_for_attention_with_pages(case):
    assert not any(case.model_class(auto_class).is_backend_compatible() for auto_class in case.auto_classes)


@pytest.mark.fast
@each(*BASE, *VISUAL, *VARIANTS)
def test_layer_types(case):
    config = case.config()
    text = config.get_text_config()
    assert len(text.layer_types) == text.num_hidden_layers
    text.validate_layer_type()
    if case.causal:  # a cache of transformers can be made, although no model takes it
        assert len(DynamicCache(config=config)) == len(StaticCache(config, max_cache_len=4)) == text.num_hidden_layers
    assert "layer_types" not in config.to_dict()
    setattr(text, text.attribute_map.get("num_hidden_layers", "num_hidden_layers"), 0)
    assert text.layer_types is None


@each(*GENERATING, *VARIANTS)
def test_a_cache_has_the_layers_that_transformers_expects(case):
    model, text = case.model(), case.text(2, 20)
    types = model.config.get_text_config().layer_types
    for static in (False, True):
        cache = model.new_cache(static, max_cache_len=32)
        assert isinstance(cache, StaticCache) == cache.is_compileable == static
        assert len(cache) == len(cache.layers) == len(types)
        assert not any(cache.is_linear)  # or `generate` would not ask how many tokens it has read
        assert not any(cache.is_sliding)
        for tokens, count in ((None, 0), (text, 20)):
            if tokens is not None:
                with torch.no_grad():
                    model(**tokens, cache=cache)
            assert cache.get_seq_length() == count
            for number, (layer, kind) in enumerate(zip(cache.layers, types, strict=True)):
                if kind == "linear_attention":
                    assert cache.has_previous_state(number) == bool(count) >= bool(layer.states)
                    found = [state for state in layer.recurrent_states.values() if state is not None]
                    assert bool(found) == bool(layer.states.keys() & {*case.float32_states} - {"sums"})
                    assert any(layer.is_recurrent_states_initialized.values()) == bool(found)
                    assert all(state.dim() == 3 for state in layer.conv_states.values() if state is not None)
                elif kind == "full_attention" and count:
                    assert layer.keys.shape == layer.values.shape == (2, 1, layer.keys.shape[2], 16)
                    assert layer.keys[:, :, 20:].any() == False < layer.keys[:, :, :20].any()  # noqa: E712
                else:
                    assert layer.keys is None is layer.values
        for other in (cache.clone(), copy.deepcopy(cache)):
            assert type(other) is type(cache)
            if static:
                other.activate_past_recording()
                assert not isinstance(other, StaticCache)
                assert not other.is_compileable
        cache.reset()
        if "linear_attention" in types:
            assert not cache.has_previous_state(types.index("linear_attention"))


@pytest.mark.fast
@each_case
def test_what_a_cache_has_read_is_not_read_again(case):
    model, text = case.model(), case.text(2, 9)
    options = {**GREEDY, "return_dict_in_generate": True}
    for cache in (None, "static"):
        out = model.generate(**text, **options, max_new_tokens=5, cache_implementation=cache, max_cache_len=32)
        whole, read = out.sequences, out.cache
        for ids in (text["input_ids"], whole[:, -1:], whole[:, :13]):
            wrong = rf"`cache` has read 13 tokens, but the text has {ids.shape[1]}\. Give the whole text"
            with pytest.raises(ValueError, match=wrong):
                model.generate(ids, **options, cache=read.clone(), max_new_tokens=3)
        expected = model.generate(**text, **options, max_new_tokens=8).sequences
        on = model.generate(whole, **options, cache=read.clone(), max_new_tokens=3)
        assert torch.equal(on.sequences, expected)
        mask = torch.ones_like(whole)
        on = model.generate(whole[:, -1:], **options, attention_mask=mask, cache=read, max_new_tokens=3)
        assert torch.equal(on.sequences, expected[:, 13:])


@each_model_case
def test_some_hidden_states(case):
    if not hasattr(output_capturing, "selected_hidden_states"):
        pytest.skip("older versions of transformers number the blocks, not the hidden states")
    model, text = case.model(), case.text(2, 9)
    with torch.no_grad():
        every = model(**text, output_hidden_states=True).hidden_states
        some = model(**text, output_hidden_states=[1, -1]).hidden_states
    assert [state is not None for state in some] == [False, True, *[False] * (len(every) - 3), True]
    assert torch.equal(some[1], every[1]) and torch.equal(some[-1], every[-1])


@each_model_case
@pytest.mark.parametrize("tied", [False, True])
def test_plans_match_modules(case, tied):
    for auto_class in case.auto_classes:
        with torch.device("meta"):
            model = case.model_class(auto_class)(case.config(tie_word_embeddings=tied))
        names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
        for plan in (model.tp_plan, model._fsdp_plan, model.pp_plan):
            for entry in plan:
                if entry.startswith(("vit.", "model.vit.")):  # transformers' own
                    continue
                pattern = re.compile(re.escape(entry).replace(r"\*", r"\d+") + "$")
                assert any(pattern.match(name) for name in names), f"{auto_class}: {entry}"


@each_model_case
def test_missing_weights_are_an_error(case, tmp_path):
    for auto_class, model in each_class(case, tie_word_embeddings=False):
        model.save_pretrained(tmp_path / auto_class)
        file = tmp_path / auto_class / "model.safetensors"
        states, load = load_file(file), getattr(transformers, auto_class).from_pretrained
        prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        body = [name for name in states if name.startswith(prefix)]
        for name in (body[0], body[-1]):
            save_file({key: x for key, x in states.items() if key != name}, file, {"format": "pt"})
            with pytest.raises(ValueError, match=rf"{type(model).__name__} are missing: .*\.$"):
                load(tmp_path / auto_class)
        # A head that is to be trained is initialised.
        save_file({name: states[name] for name in body}, file, {"format": "pt"})
        _, info = load(tmp_path / auto_class, output_loading_info=True)
        assert len(info["missing_keys"]) == len(states) - len(body)


@each_text_model_case
def test_mismatched_sizes(case, tmp_path):
    for auto_class, model in each_class(case, num_labels=3):
        if not auto_class.endswith("Classification"):
            continue
        model.save_pretrained(tmp_path)
        for made, fields in ((type(model), {"num_labels": 7}), (AutoModel, {"vocab_size": 10})):
            with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
                made.from_pretrained(tmp_path, **fields)
            other, info = made.from_pretrained(
                tmp_path, **fields, ignore_mismatched_sizes=True, output_loading_info=True
            )
            changed = {name for name, *_ in info["mismatched_keys"]}
            states = (model if made is type(model) else model.base_model).state_dict()
            for name, state in other.state_dict().items():
                assert torch.isfinite(state).all() if name in changed else torch.equal(state, states[name]), name
            assert other(random_ids(2, 4) % 10)[0].shape[-1] == fields.get("num_labels", 48)


@each_model_case
def test_a_language_model_loads_into_every_class(case, tmp_path):
    text = case.text(1, 9)
    for source_class, source in each_class(case, tie_word_embeddings=False):
        prefix = f"{source.base_model_prefix}."
        head = {name for name in source.state_dict() if name.startswith(prefix)} and {
            name for name in source.state_dict() if not name.startswith(prefix)
        }
        source.save_pretrained(tmp_path / source_class)
        for auto_class in case.auto_classes if source_class == case.lm_class else ["AutoModel"]:
            target, info = getattr(transformers, auto_class).from_pretrained(
                tmp_path / source_class, output_loading_info=True
            )
            same = auto_class in (source_class, "AutoModel")
            assert info["missing_keys"] == {n for n in target.state_dict() if not same and not n.startswith(prefix)}
            assert info["unexpected_keys"] == (set() if auto_class == source_class else head)
            torch.testing.assert_close(target.base_model(**text)[0], source.base_model(**text)[0])


@each_model_case
def test_saving_and_loading(case, tmp_path):
    for auto_class, model in each_class(case):
        load, path = getattr(transformers, auto_class).from_pretrained, tmp_path / auto_class
        half = copy.deepcopy(model).half()
        half.save_pretrained(path / "sub", variant="low", max_shard_size="20KB", state_dict=half.state_dict())
        for asked, dtype in (
            ({}, torch.float16),
            ({"dtype": "auto"}, torch.float16),
            ({"dtype": "float32"}, torch.float32),
            ({"torch_dtype": torch.bfloat16}, torch.bfloat16),
        ):
            loaded = load(path, subfolder="sub", variant="low", **asked)
            assert loaded.dtype == loaded.config.dtype == dtype
            for (name, p), q in zip(half.named_parameters(), loaded.parameters(), strict=True):
                assert q.is_contiguous(), name
                assert torch.equal(q, p.to(dtype)), name
            assert loaded(**case.text(1, 9))[0].dtype == dtype
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            fresh = getattr(transformers, auto_class).from_config(case.config(), dtype=dtype).eval()
            assert {p.dtype for p in fresh.parameters()} == {dtype} == {fresh.config.dtype}
            assert torch.isfinite(fresh(**case.text(1, 9))[0]).all()


@each_model_case
def test_offload(case, tmp_path):
    text, options = case.text(2, 9), {"max_new_tokens": 4, **GREEDY}
    for auto_class, model in each_class(case):
        expected, path = model(**text)[0], tmp_path / auto_class
        model.save_pretrained(path)
        room = {"cpu": model.get_memory_footprint() * 2 // 3}
        loaded = type(model).from_pretrained(path, device_map="auto", max_memory=room, offload_folder=path / "parts")
        assert set(loaded.hf_device_map.values()) == {"cpu", "disk"}
        torch.testing.assert_close(loaded(**text)[0], expected)
        if model.can_generate():
            tokens = model.generate(**text, **options)
            assert torch.equal(loaded.generate(**text, **options), tokens)
        # One module at a time, each when it is called.
        for other in (
            cpu_offload(copy.deepcopy(model), torch.device("cpu")),
            disk_offload(copy.deepcopy(model), path / "modules", torch.device("cpu")),
        ):
            assert {p.device.type for p in other.parameters()} == {"meta"}
            torch.testing.assert_close(other(**text)[0], expected)


@pytest.mark.fast
@each_model_case
def test_ties(case, tmp_path):
    text = case.text(1, 9)
    model = case.model(tie_word_embeddings=True)

    def tied(model):
        return model.get_input_embeddings().weight is model.get_output_embeddings().weight

    (target,) = model._tied_weights_keys
    assert tied(model) and model.all_tied_weights_keys == model._tied_weights_keys
    assert model.get_parameter(model._tied_weights_keys[target]) is model.get_parameter(target)
    model.save_pretrained(tmp_path / "tied")
    with safe_open(tmp_path / "tied" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(model.state_dict()) - {target}
    loaded, info = type(model).from_pretrained(tmp_path / "tied", output_loading_info=True)
    assert tied(loaded) and not any(info.values())
    loaded.resize_token_embeddings(case.vocabulary + 3)
    assert tied(loaded)
    with torch.device("meta"):
        other = type(model)(model.config)
    other.to_empty(device="cpu").tie_weights()
    assert tied(other)
    other.load_state_dict(model.state_dict())
    for buffer, source in zip(other.buffers(), model.buffers(), strict=True):
        buffer.copy_(source)  # no file has them
    torch.testing.assert_close(other.eval()(**text).logits, model(**text).logits)

    untied, info = type(model).from_pretrained(tmp_path / "tied", tie_word_embeddings=False, output_loading_info=True)
    assert not tied(untied) and not untied.all_tied_weights_keys and info["missing_keys"] == {target}
    untied.save_pretrained(tmp_path / "untied")
    again, info = type(model).from_pretrained(tmp_path / "untied", output_loading_info=True)
    assert not tied(again) and not any(info.values())
    torch.testing.assert_close(again.state_dict(), untied.state_dict(), atol=0, rtol=0)


@each_model_case
def test_resizing(case):
    text, vocabulary = case.text(2, 5), case.vocabulary
    for _, model in each_class(case, tie_word_embeddings=False):
        before, expected = model.get_input_embeddings().weight.detach().clone(), model(**text)[0]
        assert model.resize_token_embeddings() is model.get_input_embeddings()
        for options, size in (
            ({"new_num_tokens": vocabulary + 10, "mean_resizing": True}, vocabulary + 10),
            ({"pad_to_multiple_of": 64}, 128),
            ({"new_num_tokens": 129, "pad_to_multiple_of": 64, "mean_resizing": False}, 192),
        ):
            embeddings, head = model.resize_token_embeddings(**options), model.get_output_embeddings()
            assert embeddings is model.get_input_embeddings() and type(embeddings) is torch.nn.Embedding
            assert (
                len(embeddings.weight)
                == embeddings.num_embeddings
                == model.config.get_text_config().vocab_size
                == size
            )
            assert torch.equal(embeddings.weight[:vocabulary], before)
            if size < 128:
                torch.testing.assert_close(embeddings.weight[vocabulary:].mean(0), before.mean(0), atol=1e-2, rtol=0)
            if head is not None:
                assert len(head.weight) == head.out_features == size
            out = model(**text)[0]
            torch.testing.assert_close(out[..., : expected.shape[-1]], expected, atol=1e-4, rtol=1e-4)
        assert model(torch.full((2, 5), 191))[0].isfinite().all()
        with pytest.raises(ValueError, match="1.3"):
            model.resize_token_embeddings(vocabulary, pad_to_multiple_of=1.3)


@each_text_model_case
def test_resizing_of_fewer_ids_than_an_embedding_has_numbers(case):
    model = case.model_class()(case.config(vocab_size=4)).eval()
    model.resize_token_embeddings(14)
    assert model(random_ids(2, 5) % 14).logits.shape[-1] == 14


# Outputs, losses and gradients.


@pytest.mark.fast
@each_model_case
def test_tuples(case):
    text = case.text(2, 9)

    def tensors(out):
        return [x for x in tree_leaves(tuple(out)) if isinstance(x, torch.Tensor)]

    for auto_class, model in each_class(case):
        for labels in ({}, labels_of(model, auto_class, text["input_ids"])):
            inputs = {**text, "output_hidden_states": True, **labels}
            expected = model(**inputs)
            results = [model(**inputs, return_dict=False)]
            model.config.return_dict = False
            results.append(model(**inputs))
            assert type(model(**inputs, return_dict=True)) is type(expected)
            for result in results:
                assert type(result) is tuple and len(result) == len(expected.to_tuple())
                torch.testing.assert_close(tensors(result), tensors(expected.to_tuple()))
            if model.can_generate():
                assert model.generate(**text, max_new_tokens=2, **GREEDY).shape == (2, 11)
            model.config.return_dict = True


@each_model_case
def test_embeddings_in_place_of_ids(case):
    left, right = (padded([case.text(1, 13), case.text(1, 20, seed=1)], side) for side in ("left", "right"))
    for _, model in each_class(case):
        for text in (left, right, case.text(2, 20)):
            given = {**text, "inputs_embeds": model.get_input_embeddings()(text["input_ids"])}
            del given["input_ids"]
            torch.testing.assert_close(model(**given)[0], model(**text)[0])


@each_text_model_case
def test_gradients_of_every_class(case):
    ids = random_ids(2, 20)

    def grads(model, labels):
        model.zero_grad()
        torch.manual_seed(0)  # of what noise a router has in training
        out = model(ids, output_hidden_states=True, **labels)
        states = out.hidden_states[0], out.hidden_states[-1]
        for state in states:
            state.retain_grad()
        (out.loss if labels else out[0].square().mean()).backward()
        assert all(state.grad.any() for state in states)
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    for auto_class, model in each_class(case, num_hidden_layers=2):
        labels, calls = labels_of(model.train(), auto_class, ids), []
        block = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
        next(block.children()).register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        expected = grads(model, labels)
        assert [name for name, grad in expected.items() if not grad.any()] == []
        assert len(calls) == 1 and not model.is_gradient_checkpointing
        model.gradient_checkpointing_enable()
        torch.testing.assert_close(grads(model, labels), expected)
        assert len(calls) == 3 and model.is_gradient_checkpointing
        model.gradient_checkpointing_disable()
        torch.testing.assert_close(grads(model, labels), expected)
        assert len(calls) == 4 and not model.is_gradient_checkpointing
        model.config.gradient_checkpointing = True
        assert type(model)(model.config).is_gradient_checkpointing


@each_text_model_case
def test_one_label_is_a_regression(case):
    ids, targets = random_ids(2, 9), torch.tensor([0.5, -1.0])
    model = case.model("AutoModelForSequenceClassification", num_labels=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # raised if shapes are broadcast
        out = model(ids, labels=targets)
    torch.testing.assert_close(out.loss, mse_loss(out.logits[:, 0], targets))


@each_model_case
def test_predictions_are_logits_alone(case, tmp_path):
    text = case.text(2, 9)
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    for auto_class, model in each_class(case):
        if labels := labels_of(model, auto_class, text["input_ids"]):
            trainer, expected = Trainer(model, arguments), model(**text, **labels)
            loss, logits, _ = trainer.prediction_step(model, {**text, **labels}, prediction_loss_only=False)
            torch.testing.assert_close(loss, expected.loss)
            logits = [logits] if isinstance(logits, torch.Tensor) else list(logits)
            torch.testing.assert_close(logits, [x for name, x in expected.items() if name.endswith("logits")])


@pytest.mark.fast
@each_case
def test_no_label_counts(case):
    """The loss of a batch without labels is 0, and so are its gradients."""
    ids, labels = random_ids(2, 6), torch.full((2, 6), -100)
    for auto_class, model in each_class(case):
        if auto_class == "AutoModel":
            continue
        ignored = {"labels": labels[:, 0] if auto_class == "AutoModelForSequenceClassification" else labels}
        if auto_class == "AutoModelForQuestionAnswering":
            ignored = {"start_positions": torch.tensor([6, 6]), "end_positions": torch.tensor([6, 9])}
        given = [ignored, ignored | {"num_items_in_batch": torch.tensor(0)}]
        if auto_class == case.lm_class and case.causal:  # the first label is that of no token
            given += [{"labels": labels.index_fill(1, torch.tensor([0]), 3)}, {"labels": ids, "shift_labels": labels}]
        for arguments in given:
            model.zero_grad()
            loss = model(ids, **arguments).loss
            loss.backward()
            assert loss == 0
            assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


# `generate`.


@each_case
def test_outputs_of_generate(case):
    model, text = case.model(), half_padded(case, 7, 3)
    asked = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    for options, returned, rows in (
        ({}, 2, 2),
        ({"do_sample": True, "num_return_sequences": 2}, 4, 4),
        ({"num_beams": 3}, 2, 6),
        ({"num_beams": 3, "do_sample": True, "num_return_sequences": 2}, 4, 6),
    ):
        sequences = []
        for cache in ("dynamic", "static", None):
            torch.manual_seed(0)
            given = {"cache_implementation": cache, "disable_compile": True} if cache else {"use_cache": False}
            given |= {**GREEDY, **options, **asked, "return_dict_in_generate": True, "max_new_tokens": 4}
            out = model.generate(**text, **given)
            sequences.append(out.sequences)
            assert out.sequences.shape == (returned, 11)
            assert [len(x) for x in (out.scores, out.logits, out.hidden_states)] == [4, 4, 4]
            assert {x.shape for x in (*out.scores, *out.logits)} == {(rows, case.vocabulary)}
            for step, states in enumerate(out.hidden_states):
                length = 1 if step and cache else 7 + (0 if cache else step)
                assert [x.shape for x in states] == [(rows, length, 48)] * (model.config.num_hidden_layers + 1)
            if cache is None:
                assert out.cache is None
            else:
                assert isinstance(out.cache, RecurrentCache)
                assert (out.cache.get_seq_length(), out.cache.batch_size) == (10, rows)
            if "num_beams" in options:
                scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
                torch.testing.assert_close(scores.sum(1) / 4, out.sequences_scores, atol=1e-4, rtol=1e-4)
        assert torch.equal(sequences[0], sequences[1]) and torch.equal(sequences[0], sequences[2])


@each_text_case
def test_generation_without_a_prompt(case):
    model = case.model(bos_token_id=5)
    out = model.generate(max_new_tokens=4, **GREEDY)
    assert torch.equal(out, model.generate(torch.tensor([[5]]), max_new_tokens=4, **GREEDY))
    with pytest.raises(ValueError, match="`bos_token_id` has to be defined"):
        case.model(bos_token_id=None).generate(max_new_tokens=4, **GREEDY)


@each_case
def test_where_generation_ends(case):
    model, text = case.model(), case.text(2, 5)
    whole = model.generate(**text, max_new_tokens=12, **GREEDY)
    assert torch.equal(model.generate(**text, max_length=9, **GREEDY), whole[:, :9])
    assert torch.equal(model.generate(**text, max_new_tokens=12, max_time=0.0, **GREEDY), whole[:, :6])
    stop = [lambda ids, scores, **kwargs: torch.full((len(ids),), ids.shape[1] == 8)]
    out = model.generate(**text, max_new_tokens=12, stopping_criteria=StoppingCriteriaList(stop), **GREEDY)
    assert torch.equal(out, whole[:, :8])

    # Rows that end at a token of their own, by every way of decoding.
    ends = [int(row[place]) for row, place in zip(whole, (8, 13), strict=True)]
    expected = []
    for row in whole:
        length = 6 + min(n for n, token in enumerate(row[5:].tolist()) if token in ends)
        expected.append(torch.nn.functional.pad(row[:length], (0, 17 - length)))
    longest = max(int((row != 0).nonzero().max()) + 1 for row in expected)
    options = {**GREEDY, "eos_token_id": ends, "max_new_tokens": 12}
    assert torch.equal(model.generate(**text, **options), torch.stack(expected)[:, :longest])
    for n, row_expected in enumerate(expected):
        length = int((row_expected != 0).nonzero().max()) + 1
        for way in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": case.model()}):
            assert torch.equal(model.generate(**pick(text, n), **options, **way)[0], row_expected[:length])
    assert model.generate(**text, **options, min_new_tokens=12).shape == (2, 17)


@each_text_case
def test_guidance(case):
    model, ids, other = case.model(), random_ids(1, 5), random_ids(1, 4, seed=5)
    read, unwanted = ids, other
    with torch.no_grad():
        for _ in range(6):
            wanted, against = (model(x).logits[:, -1].log_softmax(-1) for x in (read, unwanted))
            token = (against + 1.7 * (wanted - against)).argmax(-1)[:, None]
            read, unwanted = torch.cat((read, token), 1), torch.cat((unwanted, token), 1)
    for use_cache in (True, False):
        options = {"guidance_scale": 1.7, "negative_prompt_ids": other, "use_cache": use_cache, "max_new_tokens": 6}
        assert torch.equal(model.generate(ids, **options, **GREEDY), read)


@each_case
def test_generation_from_embeddings(case):
    model, text = case.model(), half_padded(case, 7, 2)
    embed = model.get_input_embeddings()
    ids, mask = text.pop("input_ids"), text["attention_mask"]
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 2}):
        inputs = {**text, "max_new_tokens": 7, **options, **GREEDY}
        expected = model.generate(ids, **inputs)[:, 7:]
        assert torch.equal(model.generate(inputs_embeds=embed(ids), **inputs), expected)
    # And on from there, with what was generated as embeddings too.
    expected = model.generate(ids, **text, max_new_tokens=7, **GREEDY)
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, **GREEDY}
    first = model.generate(inputs_embeds=embed(ids), **text, **options)
    read = torch.cat((ids, first.sequences), 1)
    text["attention_mask"] = torch.cat((mask, torch.ones_like(first.sequences)), 1)
    cache, options = first.cache, {**text, "max_new_tokens": 4, **GREEDY}
    out = model.generate(inputs_embeds=embed(read), cache=cache.clone(), **options)
    assert torch.equal(out, expected[:, 10:])
    assert torch.equal(model.generate(read, cache=cache, **options), expected)


@pytest.mark.fast
@each_case
def test_arguments_that_change_nothing(case):
    model, text = case.model(), half_padded(case, 6, 2)
    ids, mask = text.pop("input_ids"), text["attention_mask"]
    options = {**text, "max_new_tokens": 6, **GREEDY}
    expected = model.generate(ids, **options)
    for arguments in (
        {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)},
        {"position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)},
        {"logits_to_keep": 0},
        {"logits_to_keep": 3},
        {"cache": model.new_cache()},
        {"output_hidden_states": True},
    ):
        assert torch.equal(model.generate(ids, **options, **arguments), expected)
    prepared = model.prepare_inputs_for_generation(ids, attention_mask=mask, of_a_subclass=1)
    assert prepared["of_a_subclass"] == 1
    for error in (TypeError, ValueError):  # Python's for an unknown argument, and that of transformers' `generate`
        with pytest.raises(error, match="unexpected keyword argument `not_an_argument`"):
            model.generate(ids, **options, not_an_argument=1)


# Pipelines, with padding on the tokenizer's side.


@each_text_model_case
def test_pipelines(case):
    tokenizer, texts = ByteTokenizer(), ["X:1", "K:D major", "a"]
    names = ["contradiction", "neutral", "entailment"]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    fields = {"vocab_size": len(tokenizer), **labels}

    def read(model, *text):
        return model(torch.tensor([tokenizer(*text)["input_ids"]]))

    model = case.model("AutoModel", **fields)
    features = pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    for text, found in zip(texts, features(texts, return_tensors=True), strict=True):
        torch.testing.assert_close(found, read(model, text).last_hidden_state)
    model = case.model("AutoModelForSequenceClassification", **fields)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
    for text, found in zip(texts, classify(texts, batch_size=3), strict=True):
        scores = read(model, text).logits[0].softmax(-1).tolist()
        assert {x["label"]: x["score"] for x in found} == pytest.approx(
            {label: scores[n] for n, label in model.config.id2label.items()}, abs=1e-5
        )
    zero_shot = pipeline("zero-shot-classification", model=model, tokenizer=tokenizer)
    found = zero_shot("A tune.", candidate_labels=["jig", "a slow waltz"])
    logits = [read(model, "A tune.", f"This example is {label}.").logits[0, 2] for label in found["labels"]]
    assert found["scores"] == pytest.approx(torch.stack(logits).softmax(0).tolist(), abs=1e-5)
    if case.causal:
        model = case.model(**fields)
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
        options = {"max_new_tokens": 4, "do_sample": False}
        batched = [out[0]["generated_text"] for out in generate(texts, batch_size=3, **options)]
        assert batched == [generate(text, **options)[0]["generated_text"] for text in texts]
