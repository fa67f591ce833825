"""
A keyword that nobody reads is an error, which names the keywords that look like it. The classes are those that the
package exports, so a new one is tested as well.
"""

import dataclasses
import inspect
import json
import logging
import warnings

import pytest
import torch
import transformers
from cases import each_model_case, tiny_model
from conversion.test_published_repositories import LOADED, publish
from golden_files import read_golden
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, ProcessorMixin
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.quantization_config import QuantizationConfigMixin

import subquad
import subquad_cli as cli
import subquad_tokenizers
from subquad.hub.cards import model_card
from subquad.hub.info import EMBEDDED as FOLDER
from subquad.hub.info import embedded_model
from subquad.modeling.configuration_checks import CheckedConfig
from subquad.models import REGISTRY


def exported(*kinds):
    """Everything public that is, or belongs to, one of these classes."""
    found = []
    for package in (subquad, subquad_tokenizers):
        values = [getattr(package, name) for name in package.__all__]
        found += [value for value in values if isinstance(value, type) and issubclass(value, kinds)]
    assert found
    return found


def each_class(*kinds):
    return pytest.mark.parametrize("cls", exported(*kinds), ids=lambda cls: cls.__name__)


def misspelled(name):
    """A name with its third letter twice."""
    return name[:3] + name[2:]


def own_fields(cls):
    """The fields of a configuration whose names are long enough to be misspelled."""
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return [field.name for field in dataclasses.fields(cls) if field.name not in base and len(field.name) > 3]


class Warned(logging.Handler):
    """The messages that transformers' logger and `warnings` give in a block."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        self.loggers = [logging.getLogger(name) for name in ("transformers", "subquad", "subquad_tokenizers")]
        for logger in self.loggers:
            logger.addHandler(self)
        transformers.utils.logging.warning_once.cache_clear()
        self.caught = warnings.catch_warnings(record=True)
        self.others = self.caught.__enter__()
        warnings.simplefilter("always")
        return self.texts

    def __exit__(self, *error):
        self.caught.__exit__(*error)
        self.texts += [str(each.message) for each in self.others]
        for logger in self.loggers:
            logger.removeHandler(self)


# Configurations.


@each_class(PreTrainedConfig)
def test_a_keyword_of_a_configuration(cls):
    assert issubclass(cls, CheckedConfig)
    for name in own_fields(cls):
        wrong = misspelled(name)
        with pytest.raises(TypeError, match=rf"^{cls.__name__}\(\) got .* keyword argument `{wrong}`\."):
            cls(**{wrong: 1})
    name = max(own_fields(cls), key=len)
    with pytest.raises(TypeError, match=f"Did you mean .*`{name}`"):
        cls(**{misspelled(name): 1})
    with pytest.raises(TypeError, match="`qzqzqz`. The fields are "):
        cls(qzqzqz=None)


@each_class(PreTrainedConfig)
def test_a_field_of_a_file(cls, tmp_path):
    """One that looks like a field is refused, another is kept, and warned of once."""
    name = max(own_fields(cls), key=len)
    with pytest.raises(ValueError, match=rf"^`{misspelled(name)}` \(1\) is not a field of .* `{name}`"):
        cls.from_dict({misspelled(name): 1})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": cls.model_type, "qzqzqz": [1, 2]}))
    with Warned() as texts:
        for load in (cls, AutoConfig, cls):
            assert load.from_pretrained(tmp_path).qzqzqz == [1, 2]
        assert cls.from_json_file(tmp_path / "config.json").qzqzqz == [1, 2]
    assert texts == [f"`qzqzqz` ([1, 2]) is not a field of {cls.__name__} and is ignored."]


@each_model_case
def test_keywords_of_loading(case, tmp_path):
    case.model().save_pretrained(tmp_path)
    config_class = REGISTRY[case.model_type].config_class
    name = max(own_fields(config_class), key=len)
    wrong = {misspelled(name): 1}
    for load in (config_class, AutoConfig):
        with pytest.raises(TypeError, match=f"`{misspelled(name)}` is not a field .* `{name}`"):
            load.from_pretrained(tmp_path, **wrong)
        config, unused = load.from_pretrained(tmp_path, return_unused_kwargs=True, **wrong)
        assert unused == wrong and type(config) is config_class
        # The keywords of a tokenizer come here, too.
        assert load.from_pretrained(tmp_path, bos_token="<s>", padding_side="left").model_type == case.model_type
    for auto_class in REGISTRY[case.model_type].heads:
        with pytest.raises(TypeError, match=misspelled(name)):
            getattr(transformers, auto_class).from_pretrained(tmp_path, **wrong)


@each_model_case
def test_an_attribute_that_is_set_later(case, tmp_path):
    config = case.config()
    config.some_new_attribute = 3
    config.save_pretrained(tmp_path)
    assert type(config).from_pretrained(tmp_path).some_new_attribute == 3
    name = max(own_fields(type(config)), key=len)
    setattr(config, misspelled(name), 1)
    with pytest.raises(Exception, match=f"`{misspelled(name)}` is not a field of .* `{name}`"):
        config.save_pretrained(tmp_path)


@each_model_case
def test_fields_that_follow_from_others(case):
    config = case.config()
    cls, fields = type(config), config.to_dict()
    read_only = [name for name, value in inspect.getmembers(cls, lambda x: isinstance(x, property) and not x.fset)]
    for name in read_only:
        for make in (cls.from_dict, lambda fields: cls(**fields)):
            assert make(fields | {name: None}).to_dict() == fields
    for name in {"layer_types"} & {*read_only}:
        assert cls.from_dict(fields | {name: getattr(config, name)}).to_dict() == fields
        with pytest.raises(ValueError, match=f"`{name}` must be .*, which follows from other fields, got"):
            cls.from_dict(fields | {name: ["full_attention", "sliding_attention"]})


@each_model_case
def test_fields_of_other_implementations(case):
    config = case.config()
    cls, fields = type(config), config.to_dict()
    assert all(name not in own_fields(cls) for name in (*cls.ignored_fields, *config.only_values))
    with Warned() as texts:
        assert cls.from_dict(fields | dict.fromkeys(cls.ignored_fields, "any")).to_dict() == fields
        for name, (values, _) in config.only_values.items():
            for value in (None, *values):
                assert cls.from_dict(fields | {name: value}).to_dict() == fields
                assert cls(**fields | {name: value}).to_dict() == fields
    assert texts == []
    for name in config.only_values:
        for make in (cls.from_dict, lambda fields: cls(**fields)):
            with pytest.raises(Exception, match=f"`{name}` must be .*, got 'other': "):
                make(fields | {name: "other"})


@each_model_case
def test_settings_of_generation(case):
    """transformers drops them, so they are warned of where no file has them."""
    with Warned() as texts:
        config = case.config(temperature=0.4, top_p=1.0, num_beams=None)
    assert texts == ["`temperature` (0.4) is ignored: it belongs to the `generation_config` of a model."]
    assert not hasattr(config, "temperature")


def test_a_rotary_embedding_that_nobody_scales():
    for cls in exported(PreTrainedConfig):
        for name in ("rope_scaling", "rope_parameters"):
            with pytest.raises(Exception, match=f"`{name}` must be None, got "):
                cls(**{name: {"rope_type": "linear", "factor": 2.0}})


def test_parts_of_a_configuration():
    for part in ("text_config", "vision_config"):
        fields = {part: {"hiden_size": 64}}
        with pytest.raises(TypeError, match="`hiden_size`. Did you mean .*`hidden_size`"):
            subquad.VisualRwkvConfig(**fields)
        with pytest.raises(ValueError, match=r"`hiden_size` \(64\) is not a field"):
            subquad.VisualRwkvConfig.from_dict(fields)
        with Warned() as texts:
            subquad.VisualRwkvConfig.from_dict({part: {"qzqzqz": 1}})
        assert len(texts) == 1 and texts[0].startswith("`qzqzqz` (1) is not a field of ")


# No warning where nothing is wrong.


def round_trip(config, directory):
    config.save_pretrained(directory)
    for load in (type(config), AutoConfig):
        loaded = load.from_pretrained(directory)
        assert {**loaded.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}
    assert type(config)(**config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize("preset", subquad.PRESETS)
def test_presets_go_round_without_a_warning(preset, tmp_path):
    with Warned() as texts:
        round_trip(subquad.preset_config(preset), tmp_path)
    assert texts == []


@each_model_case
def test_models_go_round_without_a_warning(case, tmp_path):
    with Warned() as texts:
        model = case.model()
        model.config.update({"id2label": {0: "a", 1: "b", 2: "c"}, "problem_type": "regression"})
        model.config.pad_token_id, model.config._private = 0, 1
        model.save_pretrained(tmp_path)
        round_trip(AutoModel.from_pretrained(tmp_path).config, tmp_path / "again")
    assert [text for text in texts if "is not a field" in text or "is ignored" in text] == []


EMBEDDED = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_models_load_without_a_warning(name, tmp_path):
    with Warned() as texts:
        path = embedded_model(name)
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(tmp_path)("X:1", return_tensors="pt")
        round_trip(AutoConfig.from_pretrained(path), tmp_path)
    assert texts == []


@pytest.mark.parametrize("name", LOADED)
def test_published_repositories_load_without_a_warning(name, tmp_path):
    publish(tmp_path, name)
    with Warned() as texts:
        AutoConfig.from_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(tmp_path)
    assert texts == []


@pytest.mark.parametrize("name", ["rwkv7_hub", "gecko", "gecko_documents"])
def test_other_published_fields_load_without_a_warning(name):
    fields = read_golden(name)[2]
    cls = REGISTRY[fields.get("model_type", name.partition("_")[0])].config_class
    with Warned() as texts:
        config = cls.from_dict(fields | {"_name_or_path": "x", "torch_dtype": "float32", "use_cache": False})
    assert texts == [] and config.dtype is torch.float32


# Models.


@each_model_case
def test_keywords_of_saving(case, tmp_path):
    model = case.model()
    with pytest.raises(TypeError, match=r"save_pretrained\(\) got .* `self_containd`. Did you mean `self_contained`"):
        model.save_pretrained(tmp_path, self_containd=True)
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path, safe_serialization=True, token=None)


# Tokenizers.


@each_class(PreTrainedTokenizerBase)
def test_keywords_of_a_tokenizer(cls, tmp_path):
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\(\) got .* `add_bos`. Did you mean `add_bos_token`"):
        cls(add_bos=True)
    with pytest.raises(TypeError, match="`add_prefix_space`"):
        cls(add_prefix_space=True)
    tokenizer = cls(add_prefix_space=False, my_own_token="<mine>", model_max_length=5)
    assert tokenizer.my_own_token == "<mine>"
    for call in (tokenizer, tokenizer.encode):
        with pytest.raises(TypeError, match="keyword argument `paddding`. Did you mean `padding`"):
            call("a", paddding=True)
        with pytest.raises(TypeError, match="`add_special_token`. Did you mean `add_special_tokens`"):
            call("a", add_special_token=False)
    with pytest.raises(TypeError, match="`paddding`"):
        tokenizer(["a", "b"], tokenizer_kwargs={"paddding": True})
    for call, ids in ((tokenizer.decode, [65]), (tokenizer.decode, [[65], [66]]), (tokenizer.batch_decode, [[65]])):
        with pytest.raises(TypeError, match="`skip_special_token`. Did you mean `skip_special_tokens`"):
            call(ids, skip_special_token=True)
    with pytest.raises(TypeError, match="`qzqzqz`"):
        tokenizer.tokenize("a", qzqzqz=1)
    with pytest.raises(TypeError, match=r"save_pretrained\(\) got .* `self_containd`. Did you mean `self_contained`"):
        tokenizer.save_pretrained(tmp_path, self_containd=True)
    # What other tokenizers read, and asks for nothing.
    tokenizer.decode([65], spaces_between_special_tokens=False, clean_up_tokenization_spaces=False)
    tokenizer(["a", "bc"], padding=True, return_offsets_mapping=False, split_special_tokens=True, verbose=False)
    template = "{{ messages[0].content }}{{ anything }}"
    chat = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, anything="b") == "ab"


@each_class(PreTrainedTokenizerBase)
def test_settings_in_the_files_of_a_tokenizer(cls, tmp_path):
    cls().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    usual = {"use_fast": False, "add_prefix_space": False, "auto_map": {}, "processor_class": None, "max_length": 5}
    path.write_text(json.dumps(fields | usual))
    with Warned() as texts:
        cls.from_pretrained(tmp_path)
    assert texts == []
    path.write_text(json.dumps(fields | {"add_bos": True}))
    with Warned() as texts:
        cls.from_pretrained(tmp_path)
        cls.from_pretrained(tmp_path)
    (text,) = texts
    assert text.startswith(f"`add_bos` (True) is not a setting of {cls.__name__} and is ignored. Did you mean")


# Processors, pipelines and what else takes keywords.


@each_class(ProcessorMixin)
def test_keywords_of_a_processor(cls, tmp_path):
    def make(**options):
        images = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=8)
        return cls(images, subquad_tokenizers.ByteTokenizer(), image_seq_length=2, **options)

    with pytest.raises(TypeError, match="`image_tokn`. Did you mean `image_token`"):
        make(image_tokn="<picture>")
    processor = make()
    for options in ({"paddding": True}, {"text_kwargs": {"paddding": True}}, {"images_kwargs": {"do_resze": True}}):
        with pytest.raises(TypeError, match="paddding|do_resze"):
            processor(text=["a"], **options)
    with pytest.raises(TypeError, match="Did you mean .*`padding`"):
        processor(text=["a"], paddding=True)
    processor(text=["a", "bc"], padding=True, return_tensors="pt", add_special_tokens=False, do_resize=True)
    for call in (processor.decode, lambda ids, **options: processor.post_process_image_text_to_text([ids], **options)):
        with pytest.raises(TypeError, match="`clean_up_tokenisation_spaces`"):
            call([65], clean_up_tokenisation_spaces=True)
    with pytest.raises(TypeError, match=r"save_pretrained\(\) got .* `self_containd`. Did you mean `self_contained`"):
        processor.save_pretrained(tmp_path, self_containd=True)
    processor.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="`image_seq_lenght`. Did you mean `image_seq_length`"):
        cls.from_pretrained(tmp_path, image_seq_lenght=3)
    assert cls.from_pretrained(tmp_path, image_seq_length=3).image_seq_length == 3


def test_keywords_of_a_pipeline():
    model = tiny_model("avey-b", "AutoModelForQuestionAnswering", vocab_size=128)
    tokenizer = subquad_tokenizers.ByteTokenizer()
    answer = transformers.pipeline("question-answering", model=model, tokenizer=tokenizer)
    texts = {"question": "Who?", "context": "She did."}
    with pytest.raises(TypeError, match="`max_answer_length`. Did you mean `max_answer_len`"):
        answer(**texts, max_answer_length=3)
    with pytest.raises(TypeError, match="`topk`. Did you mean `top_k`"):
        transformers.pipeline("question-answering", model=model, tokenizer=tokenizer, topk=3)
    assert answer(**texts, max_answer_len=3, batch_size=1)["answer"]


@each_class(QuantizationConfigMixin)
def test_keywords_of_a_quantisation(cls):
    with pytest.raises(ValueError, match="has no field 'modules_to_convert'. Did you mean `modules_to_not_convert`"):
        cls(modules_to_convert=["head"])


def test_fields_of_a_card():
    with pytest.raises(TypeError, match="no field `licence`. Did you mean `license`"):
        model_card(embedded_model("finch-abc"), licence="mit")


# The command line.


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_options_of_a_command(command, capsys):
    """No option has another name, and an unknown one is an error that names those that look like it."""
    parser = next(action for action in cli.build_parser()._actions if action.dest == "command").choices[command]
    if command == "run":  # what follows belongs to another command
        return
    needed = [action for action in parser._actions if action.required]
    given = [part for action in needed for part in (*action.option_strings[:1], "x")]
    for option in (option for action in parser._actions for option in action.option_strings if len(option) > 4):
        for wrong in (option[:-1], misspelled(option)):
            with pytest.raises(SystemExit) as exit_status:
                cli.main([command, *given, wrong])
            assert exit_status.value.code == 2
            error = capsys.readouterr().err.splitlines()[-1]
            assert f"unrecognized arguments: {wrong}. Did you mean " in error and f"`{option}`" in error


def test_fields_of_transformers_4():
    """Files of that time have them, with values that change nothing."""
    fields = {"tie_encoder_decoder": False, "cross_attention_hidden_size": None, "add_cross_attention": False}
    fields |= {"is_decoder": False, "finetuning_task": None, "torchscript": False, "pruned_heads": {}}
    for architecture in REGISTRY.values():
        config_class = getattr(subquad, architecture.config)
        assert type(config_class.from_dict(dict(fields))) is config_class
        assert type(config_class(**fields)) is config_class


def test_a_rotary_embedding_that_is_not_scaled():
    """vLLM sets it after the configuration was made."""
    default = {"rope_type": "default", "rope_theta": 10000.0}
    for architecture in REGISTRY.values():
        config = getattr(subquad, architecture.config)(rope_parameters=default)
        config.rope_parameters = {**default, "rope_theta": getattr(config, "rope_theta", 10000.0)}
        config.validate_names()
        config.rope_parameters = {"rope_type": "linear", "factor": 2.0}
        with pytest.raises(ValueError, match="`rope_parameters` must be None, got .*linear"):
            config.validate_names()
