"""Configurations, weights and files, of every class of every architecture."""

import copy
import inspect
import json
import pickle
import re

import accelerate
import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from cases import (
    DEVICE,
    GREEDY,
    each_class,
    each_kind_of_model,
    each_kind_of_text_model,
    each_model_case,
    each_text_model_case,
    random_ids,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer


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


@each_kind_of_text_model
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
        tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
        assert embeddings in tables
        assert model.num_parameters(exclude_embeddings=True) == numbers - sum(x.weight.numel() for x in tables)
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


@pytest.mark.fast
@each_kind_of_model
def test_copies(case):
    model, text = case.model(tie_word_embeddings=True), case.text(2, 9)
    expected = model(**text)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(**text)[0], expected, atol=0, rtol=0)
        assert len(list(other.parameters())) == len(list(model.parameters()))  # what was tied is
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
    torch.testing.assert_close(model(**text)[0], expected, atol=0, rtol=0)


@pytest.fixture
def seeded(monkeypatch):
    """Every module begins with the same numbers, whichever were initialised before it."""
    original = PreTrainedModel._initialize_weights

    def initialize(*args, **kwargs):
        torch.manual_seed(42)
        return original(*args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "_initialize_weights", initialize)


@pytest.mark.quick_cases("rwkv6", "rwkv7", "avey*", "raven", "gecko")
@each_model_case
def test_initialisation_from_meta(case, seeded):
    for auto_class in case.auto_classes:
        made, config = case.model_class(auto_class), case.config()
        expected = made(config)
        with torch.device("meta"):
            from_meta = made(config)
            if auto_class == case.lm_class and not case.images:
                assert from_meta(torch.zeros(1, 3, dtype=torch.long))[0].shape[0] == 1
        from_meta.to_empty(device=DEVICE)
        with torch.no_grad():
            for parameter in from_meta.parameters():
                parameter.fill_(torch.nan)
        from_meta.init_weights()
        from_nothing, info = made.from_pretrained(None, config=config, state_dict={}, output_loading_info=True)
        assert info["missing_keys"] == reported(expected, expected.state_dict())
        for model in (from_meta, from_nothing):
            torch.testing.assert_close(model.state_dict(), expected.state_dict(), atol=0, rtol=0)
            torch.testing.assert_close(dict(model.named_buffers()), dict(expected.named_buffers()), atol=0, rtol=0)
            model.train(False)(**case.text(1, 5))  # fails if a tensor is still on meta


def reported(model, names):
    """Those of missing weights that are reported."""
    return {name for name in names if not any(re.search(x, name) for x in model._keys_to_ignore_on_load_missing or ())}


@each_kind_of_model
def test_what_a_file_lacks_is_initialised(case):
    for auto_class, model in each_class(case, tie_word_embeddings=False):
        states, fresh = model.state_dict(), type(model)(model.config).state_dict()
        names, prefix = list(states), f"{model.base_model_prefix}."
        parts = (
            [names[::2], names[1::2]] if auto_class == case.lm_class else [[x for x in names if x.startswith(prefix)]]
        )
        for part in parts:
            kept = {name: states[name] for name in part}
            loaded, info = type(model).from_pretrained(
                None, config=model.config, state_dict=kept, output_loading_info=True
            )
            assert info["missing_keys"] == reported(model, set(states) - set(kept))
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
    with pytest.raises(ValueError, match="Sequence parallelism does not support attention layers of type"):
        accelerate.big_modeling._refuse_recurrent_layers_under_sequence_parallelism(model)


@each_model_case
def test_servers_do_not_take_it_for_attention_with_pages(case):
    assert not any(case.model_class(auto_class).is_backend_compatible() for auto_class in case.auto_classes)


@each_kind_of_model
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


@each_kind_of_model
def test_missing_weights_are_an_error(case, tmp_path):
    for auto_class in (case.lm_class, "AutoModel"):
        model = case.model(auto_class, tie_word_embeddings=False)
        model.save_pretrained(tmp_path / auto_class)
        file = tmp_path / auto_class / "model.safetensors"
        states, load = load_file(file), getattr(transformers, auto_class).from_pretrained
        prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        body = [name for name in states if name.startswith(prefix)]
        name = body[-1] if prefix else body[0]
        save_file({key: x for key, x in states.items() if key != name}, file, {"format": "pt"})
        with pytest.raises(ValueError, match=rf"{type(model).__name__} are missing: .*\.$"):
            load(tmp_path / auto_class)
        # A head that is to be trained is initialised.
        save_file({name: states[name] for name in body}, file, {"format": "pt"})
        _, info = load(tmp_path / auto_class, output_loading_info=True)
        assert len(info["missing_keys"]) == len(states) - len(body)


@each_kind_of_text_model
def test_mismatched_sizes(case, tmp_path):
    model = case.model("AutoModelForSequenceClassification", num_labels=3)
    model.save_pretrained(tmp_path)
    for made, fields in ((type(model), {"num_labels": 7}), (AutoModel, {"vocab_size": 10})):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            made.from_pretrained(tmp_path, **fields)
        other, info = made.from_pretrained(tmp_path, **fields, ignore_mismatched_sizes=True, output_loading_info=True)
        changed = {name for name, *_ in info["mismatched_keys"]}
        states = (model if made is type(model) else model.base_model).state_dict()
        for name, state in other.state_dict().items():
            assert torch.isfinite(state).all() if name in changed else torch.equal(state, states[name]), name
        assert other(random_ids(2, 4) % 10)[0].shape[-1] == fields.get("num_labels", 48)


@each_kind_of_model
def test_a_language_model_loads_into_every_class(case, tmp_path):
    text = case.text(1, 9)
    for source_class, source in each_class(case, tie_word_embeddings=False):
        prefix = f"{source.base_model_prefix}."
        head = {name for name in source.state_dict() if name.startswith(prefix)} and {
            name for name in source.state_dict() if not name.startswith(prefix)
        }
        source.save_pretrained(tmp_path / source_class)
        targets = {case.lm_class: case.auto_classes, "AutoModel": [case.lm_class]}
        for auto_class in targets.get(source_class, ["AutoModel"]):
            target, info = getattr(transformers, auto_class).from_pretrained(
                tmp_path / source_class, output_loading_info=True
            )
            same = auto_class in (source_class, "AutoModel")
            assert info["missing_keys"] == {n for n in target.state_dict() if not same and not n.startswith(prefix)}
            assert info["unexpected_keys"] == (set() if auto_class == source_class else head)
            torch.testing.assert_close(target.base_model(**text)[0], source.base_model(**text)[0])


@each_kind_of_model
def test_saving_and_loading(case, tmp_path):
    model = case.model()
    auto_model, path = getattr(transformers, case.lm_class), tmp_path
    half = copy.deepcopy(model).half()
    half.save_pretrained(path / "sub", variant="low", max_shard_size="20KB", state_dict=half.state_dict())
    for asked, dtype in (
        ({}, torch.float16),
        ({"dtype": "auto"}, torch.float16),
        ({"dtype": "float32"}, torch.float32),
        ({"torch_dtype": torch.bfloat16}, torch.bfloat16),
    ):
        loaded = auto_model.from_pretrained(path, subfolder="sub", variant="low", **asked)
        assert loaded.dtype == loaded.config.dtype == dtype
        for (name, p), q in zip(half.named_parameters(), loaded.parameters(), strict=True):
            assert q.is_contiguous(), name
            assert torch.equal(q, p.to(dtype)), name
        assert loaded(**case.text(1, 9))[0].dtype == dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        fresh = auto_model.from_config(case.config(), dtype=dtype).eval()
        assert {p.dtype for p in fresh.parameters()} == {dtype} == {fresh.config.dtype}
        assert torch.isfinite(fresh(**case.text(1, 9))[0]).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="the offloaded parts are computed on the CPU")
@pytest.mark.quick_cases("rwkv6", "avey", "avey-b", "gecko")
@each_kind_of_model
def test_offload(case, tmp_path):
    text, options = case.text(2, 9), {"max_new_tokens": 4, **GREEDY}
    model, path = case.model(), tmp_path
    expected = model(**text)[0]
    model.save_pretrained(path)
    room = {"cpu": model.get_memory_footprint() * 2 // 3}
    loaded = type(model).from_pretrained(path, device_map="auto", max_memory=room, offload_folder=path / "parts")
    assert set(loaded.hf_device_map.values()) == {"cpu", "disk"}
    torch.testing.assert_close(loaded(**text)[0], expected)
    loaded.save_pretrained(path / "again")
    files = [load_file(folder / "model.safetensors") for folder in (path, path / "again")]
    torch.testing.assert_close(*files, atol=0, rtol=0)
    if model.can_generate():
        assert torch.equal(loaded.generate(**text, **options), model.generate(**text, **options))
    # One module at a time, each when it is called.
    for other in (
        cpu_offload(copy.deepcopy(model), torch.device("cpu")),
        disk_offload(copy.deepcopy(model), path / "modules", torch.device("cpu")),
    ):
        assert {p.device.type for p in other.parameters()} == {"meta"}
        torch.testing.assert_close(other(**text)[0], expected)


@pytest.mark.fast
@each_kind_of_model
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
        # Some of transformers' towers have other names in files.
        assert len(file.keys()) == len(model.state_dict()) - 1 and target not in file.keys()
    loaded, info = type(model).from_pretrained(tmp_path / "tied", output_loading_info=True)
    assert tied(loaded) and not any(info.values())
    loaded.resize_token_embeddings(case.vocabulary + 3)
    assert tied(loaded)
    with torch.device("meta"):
        other = type(model)(model.config)
    other.to_empty(device=DEVICE).tie_weights()
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


@each_kind_of_model
def test_resizing(case):
    text, vocabulary = case.text(2, 5), case.vocabulary
    for auto_class in (case.lm_class, "AutoModel"):
        model = case.model(auto_class, tie_word_embeddings=False)
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
        model.resize_token_embeddings(vocabulary)
        torch.testing.assert_close(model(**text)[0], expected, atol=1e-4, rtol=1e-4)


@each_kind_of_text_model
def test_resizing_of_fewer_ids_than_an_embedding_has_numbers(case):
    model = case.model_class()(case.config(vocab_size=4)).eval()
    model.resize_token_embeddings(14)
    assert model(random_ids(2, 5) % 14).logits.shape[-1] == 14
