"""
Directories of Goose as other packages write them: rwkv7-hf, and rwkv-rs's fork of transformers. `import subquad` makes
them load without their code, with the logits that the trainer's weights have.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from golden_files import read_golden
from rwkv7_files import PROJECTIONS, UNUSED, _fla, _rs, trainer_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import subquad
from subquad_conversion import ConversionError, convert
from subquad_tokenizers import WORLD_VOCAB_FILE, RwkvWorldTokenizerFast


GOLDEN, WEIGHTS, _ = read_golden("rwkv7_trainer")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 512,
    "decay_low_rank_dim": 24,
    "a_low_rank_dim": 16,
    "v_low_rank_dim": 8,
    "gate_low_rank_dim": 40,
}
RWKV7_HF = SIZES | {
    "model_type": "rwkv7_native",
    "architectures": ["RWKV7ForCausalLM"],
    "attention_hidden_size": 128,
    "attn_mode": "chunk",
    "bos_token_id": 1,
    "eos_token_id": 0,
    "fuse_norm": False,
    "head_dim": 64,
    "hidden_ratio": 4.0,
    "layer_types": None,
    "native_mm4_group_policy": "all",
    "native_mm8_min_params": 8_000_000,
    "num_attention_heads": 2,
    "num_heads": 2,
    "pad_token_id": 0,
    "rwkv7_hf_adapter_layout": "thin",
    "rwkv7_hf_runtime_version": "0.8.1",
    "use_native_mm4": False,
    "use_native_mm8": False,
    "value_dim": [128, 128, 128],
}
# Later versions have the type and fields of flash-linear-attention.
FIELDS = {
    "thin": {},
    "bundled": {"architectures": ["NativeRWKV7ForCausalLM"], "rwkv7_hf_adapter_layout": "bundled"},
    "adapter": {"model_type": "rwkv7_hf_adapter"},
    "later": {"model_type": "rwkv7", "initializer_range": 0.02, "norm_bias": True, "norm_eps": 1e-5},
}
RWKV_RS = SIZES | {
    "model_type": "rwkv",
    "architecture_version": "rwkv7",
    "architectures": ["RwkvForCausalLM"],
    "context_length": 16,
    "head_size": 64,
    "num_attention_heads": 2,
    "layer_norm_epsilon": 1e-5,
    "group_norm_epsilon": 64e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "embedding_layer_norm_fused": False,
    "wkv_state_dtype": "float32",
    "number_of_conv_states": 2,
}
CODE = ("configuration_rwkv7", "modeling_rwkv7", "native_model", "tokenization_rwkv7")


def write(directory, tensors, fields, dtype=torch.float32, **files):
    """A directory with weights, a configuration and other JSON files."""
    directory.mkdir(exist_ok=True)
    tensors = {name: x.to(dtype).contiguous() for name, x in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in (files | {"config": fields}).items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def rwkv7_hf(directory, fields=None, weights=WEIGHTS, again=False, **options):
    """
    What the converter of rwkv7-hf writes.

    Args:
        again: whether its models and tokenizers saved the files.
    """
    fields = RWKV7_HF | (fields or {})
    auto_map = {"AutoConfig": "configuration_rwkv7.RWKV7Config", "AutoModelForCausalLM": "modeling_rwkv7.RWKV7Model"}
    generation = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    settings = {
        "tokenizer_class": "RWKV7Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_rwkv7.RWKV7Tokenizer", None]},
        "pad_token": "<|padding|>",
        "eos_token": "<|endoftext|>",
    }
    files = {"generation_config": generation, "tokenizer_config": settings}
    if again:
        ids = {"<|endoftext|>": 65530, "<|padding|>": 65531}
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
        settings["added_tokens_decoder"] = {str(i): {"content": token, **flags} for token, i in ids.items()}
        settings |= {"bos_token": None, "unk_token": None, "backend": "custom", "model_max_length": 10**30}
        files["added_tokens"] = ids
    else:
        settings |= {"errors": "replace", "model_vocab_size": fields["vocab_size"]}
        files["special_tokens_map"] = {"pad_token": "<|padding|>", "eos_token": "<|endoftext|>"}
    tensors = dict(_fla(name, x) for name, x in weights.items() if name not in UNUSED)
    write(directory, tensors, fields | {"auto_map": auto_map}, **files, **options)
    (directory / "rwkv_vocab_v20230424.txt").write_bytes(Path(WORLD_VOCAB_FILE).read_bytes())
    for name in CODE:
        (directory / f"{name}.py").write_text("raise RuntimeError('the directory ran its own code')\n")
    return directory


TRIE = {"version": "1.0", "added_tokens": [], "model": {"type": "RwkvTrie", "vocab": {}}}


def rwkv_rs(directory, layout="blocks", fields=None, weights=WEIGHTS):
    """A directory of rwkv-rs's fork of transformers; `linear_attn` is an older layout."""
    if layout == "blocks":
        tensors = {name if name == "head.weight" else f"model.{name}": x for name, x in weights.items()}
    else:
        tensors = dict(_rs(name, x) for name, x in weights.items() if name not in UNUSED)
    settings = {"tokenizer_class": "RwkvTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    return write(directory, tensors, RWKV_RS | (fields or {}), tokenizer=TRIE, tokenizer_config=settings)


def check_logits(model, atol=1e-4):
    with torch.no_grad():
        logits = model.float().eval()(GOLDEN["input_ids"]).logits
    torch.testing.assert_close(logits, GOLDEN["logits"], atol=atol, rtol=0)


def check_world(tokenizer):
    assert type(tokenizer) is RwkvWorldTokenizerFast and len(tokenizer) == 65530
    assert tokenizer("Hello world\n\nUser: a").input_ids == [33155, 40213, 261, 24281, 59, 332]
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} == {0}


def check_converted(source, directory):
    convert(source, directory, progress=False)
    config = json.loads((directory / "config.json").read_text())
    assert config.keys() <= {*subquad.Rwkv7Config().to_dict(), "architectures", "dtype"}
    assert (config["model_type"], config["bos_token_id"]) == ("rwkv7", 0)
    assert json.loads((directory / "generation_config.json").read_text())["bos_token_id"] == 0
    check_logits(AutoModelForCausalLM.from_pretrained(directory))


@pytest.mark.parametrize(("form", "again"), [("thin", False), ("bundled", True), ("adapter", False), ("later", True)])
def test_a_directory_of_rwkv7_hf(form, again, tmp_path):
    dtype = torch.float16 if form in ("bundled", "later") else torch.float32
    source = rwkv7_hf(tmp_path / "source", FIELDS[form], dtype=dtype, again=again)
    for load in (AutoModelForCausalLM, subquad.Rwkv7ForCausalLM):
        model, info = load.from_pretrained(source, output_loading_info=True)
        assert type(model) is subquad.Rwkv7ForCausalLM and not any(info.values()), info
        assert {model.config.bos_token_id, model.generation_config.bos_token_id} == {0}
        check_logits(model)
    check_world(AutoTokenizer.from_pretrained(source))
    check_converted(source, tmp_path / "converted")
    model.save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config.keys() <= {*subquad.Rwkv7Config().to_dict(), "architectures", "dtype", "auto_map"}
    assert (config["model_type"], config["bos_token_id"]) == ("rwkv7", 0)
    check_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    check_world(AutoTokenizer.from_pretrained(tmp_path / "saved"))


def test_a_generation_configuration_that_is_given(tmp_path):
    given = transformers.GenerationConfig(bos_token_id=5)
    model = AutoModelForCausalLM.from_pretrained(rwkv7_hf(tmp_path / "source"), generation_config=given)
    assert model.generation_config.bos_token_id == 5


def test_a_token_that_was_added_to_the_tokenizer_of_rwkv7_hf(tmp_path):
    source = rwkv7_hf(tmp_path / "source", again=True)
    path = source / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["added_tokens_decoder"]["65532"] = {"content": "<image>", "special": True}
    path.write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(source)
    assert tokenizer("a<image>").input_ids == [98, 65530]  # an id that the model has no row for would be the next one


def packed(name, bits):
    """The names of the tensors that rwkv7-hf makes of a layer's weight."""
    parts = ("w_u8", "mx", "rx", "my", "ry") if bits == 8 else ("packed", "mx", "rx_s", "my", "ry_s")
    return [name.replace("weight", part) for part in parts]


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_weights_of_rwkv7_hf_are_refused(bits, tmp_path):
    field = f"use_native_mm{bits}"
    source = rwkv7_hf(tmp_path / "source", {field: True})
    for load in (AutoConfig, AutoModelForCausalLM, subquad.Rwkv7ForCausalLM):
        with pytest.raises(Exception, match=f"`{field}` must be False, got True: rwkv7-hf's 8-bit and 4-bit weights"):
            load.from_pretrained(source)
    with pytest.raises(ConversionError, match=f"`{field}` must be False"):
        convert(source, tmp_path / "converted", progress=False)

    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if any(f".{word[0]}_proj." in name for word in PROJECTIONS)]:
        weight = tensors.pop(name)
        tensors |= {part: weight[:1].clone() for part in packed(name, bits)}
    source = write(tmp_path / "packed", tensors, RWKV7_HF)
    for load in (AutoModelForCausalLM, subquad.Rwkv7ForCausalLM):
        with pytest.raises(
            ValueError, match="weights that rwkv7-hf packed to 8 or 4 bits, not of the model type rwkv7"
        ):
            load.from_pretrained(source)
    with pytest.raises(ConversionError, match="weights that rwkv7-hf packed to 8 or 4 bits"):
        convert(source, tmp_path / "converted", progress=False)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize(("layout", "axes"), [("blocks", 4), ("linear_attn", 2)])
def test_a_directory_of_rwkv_rs(layout, axes, tmp_path):
    """Also with `r_k` of shape (1, 1, heads, head_dim)."""
    weights = {
        name: x.expand(1, 1, -1, -1) if axes == 4 and name.endswith("r_k") else x for name, x in WEIGHTS.items()
    }
    source = rwkv_rs(tmp_path / "source", layout, weights=weights)
    for load in (AutoModelForCausalLM, subquad.Rwkv7ForCausalLM):
        model, info = load.from_pretrained(source, output_loading_info=True)
        assert type(model) is subquad.Rwkv7ForCausalLM and not any(info.values()), info
        check_logits(model)
    check_world(AutoTokenizer.from_pretrained(source))
    check_converted(source, tmp_path / "converted")
    assert type(AutoConfig.from_pretrained(source)) is subquad.Rwkv7Config


def test_keywords_that_belong_to_another_model(tmp_path):
    source = rwkv_rs(tmp_path / "source")
    for load in (AutoConfig, subquad.Rwkv7Config, AutoModelForCausalLM, subquad.Rwkv7ForCausalLM):
        with pytest.raises(ValueError, match="`architecture_version` must be 'rwkv7', got 'rwkv4': this is another"):
            load.from_pretrained(source, architecture_version="rwkv4")
        load.from_pretrained(source, architecture_version="rwkv7", wkv_state_dtype="float32")


def test_sizes_that_a_directory_of_rwkv_rs_lacks(tmp_path):
    lacking = dict.fromkeys(("intermediate_size", "decay_low_rank_dim", "a_low_rank_dim", "gate_low_rank_dim"))
    for layout in ("blocks", "linear_attn"):
        check_logits(AutoModelForCausalLM.from_pretrained(rwkv_rs(tmp_path / layout, layout, lacking)))


def test_rwkv_4_stays_that_of_transformers(tmp_path):
    config = transformers.RwkvConfig(vocab_size=10, hidden_size=8, num_hidden_layers=2, attention_hidden_size=8)
    transformers.RwkvForCausalLM(config).save_pretrained(tmp_path)
    for fields in ({}, {"architecture_version": "rwkv4"}):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert type(model) is transformers.RwkvForCausalLM and not info["missing_keys"]
        assert type(AutoConfig.from_pretrained(tmp_path)) is transformers.RwkvConfig


@pytest.mark.parametrize(("write_source", "options"), [(rwkv7_hf, {}), (rwkv7_hf, {"again": True}), (rwkv_rs, {})])
def test_the_tokenizer_is_replaced_by_world(write_source, options, tmp_path):
    weights = trainer_tensors(heads=1, head_size=4, vocabulary=65536, intermediate=8)
    sizes = {"vocab_size": 65536, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 1}
    sizes |= {"num_heads": 1, "head_dim": 4} if write_source is rwkv7_hf else {"head_size": 4}
    sizes |= dict.fromkeys(("attention_hidden_size", "value_dim", "group_norm_epsilon"))
    source = write_source(tmp_path / "source", fields=sizes, weights=weights, **options)
    report = convert(source, tmp_path / "converted", progress=False)
    assert report.tokenizer == "RWKV World" and any("the tokenizer replaces the source's" in x for x in report.notes)
    check_world(AutoTokenizer.from_pretrained(tmp_path / "converted"))
    if write_source is rwkv_rs:
        assert any(
            "which has a model RwkvTrie in tokenizer.json, which the package tokenizers" in note
            for note in report.notes
        )
        (source / "tokenizer_config.json").unlink()
        check_world(AutoTokenizer.from_pretrained(source))
        with pytest.raises(ConversionError, match="has a model RwkvTrie in tokenizer.json, .* it is not copied"):
            convert(source, tmp_path / "again", tokenizer=source, progress=False)


def test_a_file_is_not_a_directory(tmp_path):
    torch.save(WEIGHTS, tmp_path / "trained.pth")
    source = rwkv7_hf(tmp_path / "source")
    for path in (tmp_path / "trained.pth", source / "model.safetensors"):
        for load in (AutoModelForCausalLM, transformers.AutoModel, subquad.Rwkv7ForCausalLM):
            for arguments in ({}, {"dtype": "auto"}):
                with pytest.raises(ValueError) as raised:
                    load.from_pretrained(pretrained_model_name_or_path=str(path), **arguments)
                assert f"`subquad convert {path} OUT`" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("layout", ["trainer", "hub"])
def test_the_bonus_with_axes_of_length_1(layout, tmp_path):
    prefix = "" if layout == "trainer" else "rwkv7."
    tensors = {name if name == "head.weight" else prefix + name: x for name, x in WEIGHTS.items()}
    tensors = {name: x[None, None] if name.endswith("r_k") else x for name, x in tensors.items()}
    torch.save({f"_orig_mod.{name}": x for name, x in tensors.items()}, tmp_path / "trained.pth")
    check_converted(tmp_path / "trained.pth", tmp_path / "converted")


def test_a_directory_with_the_tensors_of_another_model(tmp_path):
    fields = subquad.Rwkv6Config(vocab_size=97, hidden_size=128, num_hidden_layers=3, intermediate_size=512).to_dict()
    source = write(tmp_path / "source", dict(_fla(*item) for item in WEIGHTS.items() if item[0] not in UNUSED), fields)
    with pytest.raises(ValueError, match=r"missing: .*The model type is rwkv6, the files have .*k_k"):
        AutoModelForCausalLM.from_pretrained(source)
    with pytest.raises(ConversionError, match="is for the model type 'rwkv6', the tensors are 'rwkv7'"):
        convert(source, tmp_path / "converted", progress=False)
    convert(source, tmp_path / "converted", config=rwkv7_hf(tmp_path / "other") / "config.json", progress=False)
    check_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "converted"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, r"`num_attention_heads` is 2, but `num_heads`, which means the same, is 3"),
        ({"num_attention_heads": 3}, r"`num_attention_heads` is 3, but `num_heads`, which means the same, is 2"),
        (
            {"num_heads": 4, "num_attention_heads": 4},
            r"`num_heads` \(4\) times `head_dim` \(64\) must be `hidden_size` \(128\): heads that are not",
        ),
        ({"num_heads": None, "num_attention_heads": 1}, r"`num_heads` \(1\) times `head_dim` \(64\)"),
        ({"head_size": 32}, "`head_size` is 32, but `head_dim`, which means the same, is 64"),
        ({"attention_hidden_size": 64}, "`attention_hidden_size` must be 128, got 64: heads that are not"),
        ({"value_dim": [128, 64, 128]}, "`value_dim` must be 128, got .*heads that are not"),
        ({"wkv_state_dtype": "float16"}, "`wkv_state_dtype` must be 'float32', got 'float16': states are"),
        ({"number_of_conv_states": 1}, "`number_of_conv_states` must be 2, got 1"),
        ({"architecture_version": "rwkv4"}, "`architecture_version` must be 'rwkv7', got 'rwkv4'"),
    ],
)
def test_fields_of_another_model(fields, message, tmp_path):
    source = rwkv7_hf(tmp_path / "source", fields)
    for load in (AutoConfig, AutoModelForCausalLM, subquad.Rwkv7ForCausalLM):
        with pytest.raises(Exception, match=message):
            load.from_pretrained(source)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_heads": 32, "num_attention_heads": None},  # as flash-linear-attention writes for any size
        {"num_heads": 32, "num_attention_heads": 2},
        {"head_dim": None},
        {"rescale_every": 6, "wkv_backend": "auto"},
    ],
)
def test_fields_that_change_nothing(fields, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(rwkv7_hf(tmp_path / "source", fields))
    assert (model.config.num_heads, model.config.head_dim) == (2, 64)
    check_logits(model)


def test_a_number_of_heads_that_is_given():
    with pytest.raises(Exception, match=r"`num_heads` \(32\) times `head_dim` \(64\) must be `hidden_size` \(128\)"):
        subquad.Rwkv7Config(hidden_size=128, head_dim=64, num_heads=32)


def test_heads_that_are_narrower_than_the_model(tmp_path):
    """The trainer has an option for them, and no code that runs: only the shape of `r_k` follows it."""
    torch.save({name: x[:1] if name.endswith("r_k") else x for name, x in WEIGHTS.items()}, tmp_path / "trained.pth")
    with pytest.raises(ConversionError, match=r"`num_heads` \(1\) times `head_dim` \(64\) must be `hidden_size`"):
        convert(tmp_path / "trained.pth", tmp_path / "converted", progress=False)


def test_a_number_of_heads_beside_the_tensors(tmp_path):
    torch.save(WEIGHTS, tmp_path / "trained.pth")
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 5, "num_attention_heads": 4}))
    report = convert(tmp_path / "trained.pth", tmp_path / "model", config=tmp_path / "config.json", progress=False)
    for name, value in (("num_heads", 5), ("num_attention_heads", 4)):
        assert f"the configuration's `{name}` of {value} was replaced by the tensors' 2" in report.notes
