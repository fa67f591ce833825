"""Avey-B's files, of the Hub and of the paper: recognised, refused where damaged, converted to what they compute."""

import json

import pytest
import torch
from byte_level_bpe import END, TEXT, write_byte_level_bpe
from format_cases import AVEY_B, load_whole, notes_of, perturbed, save
from golden_files import read_golden
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

import subquad
import subquad_cli as cli
from subquad import AveyBConfig
from subquad.models.avey_b.configuration_avey_b import LAYER_PATTERNS
from subquad_conversion import ConversionError, convert, recognise


SIZES = {
    "vocab_size": 101,
    "d_embed": 32,
    "n_layers": 4,
    "chunk_size": 16,
    "k": 2,
    "expansion_factor": 4,
    "context_proportion": 0.5,
    "layer_pattern": "interleaved",
    "compressor": True,
}
# What tells the two variants apart.
VARIANTS = {
    "hub": {"hidden_act": "gelu", "similarity_norm": "l1", "residual_gain": True, "final_norm": False},
    "paper": {"hidden_act": "relu2", "similarity_norm": "sum", "residual_gain": False, "final_norm": True},
}
# Published configurations of the paper's code bear the type of the causal model.
TYPES = {"hub": "avey-b", "paper": "avey"}

each_layout = pytest.mark.parametrize("layout", VARIANTS)


@pytest.fixture
def weights():
    return read_golden("avey_b_hub")[1]


def publish(directory, tensors, layout="hub", **config):
    """A directory as published, with code of its own; None takes a field away."""
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    auto_map = {"AutoConfig": "configuration_avey.AveyConfig", "AutoModelForMaskedLM": "modeling_avey.AveyForMaskedLM"}
    fields = read_golden(f"avey_b_{layout}")[2] | {"model_type": TYPES[layout], "architectures": ["AveyForMaskedLM"]}
    fields |= {"auto_map": auto_map, "hidden_size": 32, "max_position_embeddings": 2**32, "torch_dtype": "float32"}
    fields = {name: value for name, value in (fields | config).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "modeling_avey.py").write_text("raise RuntimeError('the directory ran its own code')\n")
    return directory


def tiny_model(auto_class="AutoModelForMaskedLM", **fields):
    return perturbed(getattr(subquad, subquad.ARCHITECTURES["avey-b"][2][auto_class])(AveyBConfig(**AVEY_B | fields)))


def state_dict(model):
    return {name: x.contiguous() for name, x in model.state_dict().items() if name != "lm_head.weight"}


def check_outputs(model, golden):
    with torch.no_grad():
        outputs = model(golden["input_ids"])
    if hasattr(outputs, "logits"):
        assert (outputs.logits - golden["logits"]).abs().max() < 1e-4
        outputs = model.base_model(golden["input_ids"])
    assert (outputs.last_hidden_state - golden["last_hidden_state"]).abs().max() < 1e-4


# --- from published files to what they compute ---


@each_layout
@pytest.mark.parametrize("source", ["published", "published without a type", "state dict"])
def test_outputs_equal_those_of_the_source(source, layout, tmp_path):
    golden, weights, _ = read_golden(f"avey_b_{layout}")
    config = None
    if source == "state dict":
        # In a state dict of ours the head is the embeddings once more.
        prefix, embeddings = {"hub": ("model.", "embed"), "paper": ("", "base_avey_model.embeddings")}[layout]
        whole = {prefix + name: x for name, x in weights.items()}
        whole["lm_head.weight"] = weights[f"{embeddings}.weight"].clone()
        path, config = save(tmp_path / "trained.pth", whole), tmp_path / "type.json"
        config.write_text(json.dumps({"model_type": TYPES[layout]}))
    else:
        path = publish(
            tmp_path / "source", weights, layout, model_type=TYPES[layout] if source == "published" else None
        )
    report = convert(path, tmp_path / "model", config=config, progress=False)
    assert report.recognised.format == f"avey-b-{layout}"
    assert report.files == ["config.json", "model.safetensors"]
    written = json.loads((tmp_path / "model/config.json").read_text())
    assert written.items() >= (SIZES | VARIANTS[layout] | {"architectures": ["AveyBForMaskedLM"]}).items()
    assert written["model_type"] == "avey-b" and "auto_map" not in written
    assert notes_of(report) == []
    assert "no tokenizer was written: none is known for avey-b and a vocabulary of 101" in report.notes
    if layout == "hub":
        assert load_file(tmp_path / "model/model.safetensors").keys() == weights.keys()
    check_outputs(load_whole(tmp_path / "model", "avey-b"), golden)
    check_outputs(AutoModel.from_pretrained(tmp_path / "model"), golden)


@pytest.mark.parametrize(
    "fields",
    [
        {**VARIANTS["paper"], "score_normalization": "max", "eps": 1e-6},
        {
            "residual_gain": False,
            "compressor_residual": False,
            "bidirectional_ranker": True,
            "classifier_dropout": 0.1,
        },
        {"final_norm": True, "tie_word_embeddings": False, "layer_pattern": "static-then-dynamic"},
        {"compressor": False, "k": 1},
        {"compressor": False, "layer_pattern": "all-dynamic"},
    ],
)
def test_what_we_save_ourselves(fields, tmp_path):
    model, ids = tiny_model(**fields), torch.arange(22).view(2, 11)
    model.save_pretrained(tmp_path / "saved")
    report = convert(tmp_path / "saved", tmp_path / "model", progress=False)
    assert notes_of(report) == []
    converted = load_whole(tmp_path / "model", "avey-b")
    assert converted.config.to_dict().items() >= (AVEY_B | fields).items()
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits)


# --- recognition ---


@pytest.mark.parametrize("pattern", LAYER_PATTERNS)
def test_the_pattern_of_the_layers(pattern, tmp_path):
    source = save(tmp_path / "trained.pth", state_dict(tiny_model(layer_pattern=pattern)))
    assert recognise(source).sizes["layer_pattern"] == pattern


def test_patterns_that_are_the_same_of_few_layers(tmp_path):
    source = save(tmp_path / "trained.pth", state_dict(tiny_model(n_layers=2)))
    assert recognise(source).sizes["layer_pattern"] == "interleaved"
    (tmp_path / "pattern.json").write_text(json.dumps({"layer_pattern": "single-dynamic-tail"}))
    report = convert(source, tmp_path / "model", config=tmp_path / "pattern.json", progress=False)
    assert report.config.layer_pattern == "single-dynamic-tail" and notes_of(report) == []


def test_a_pattern_that_the_tensors_contradict(weights, tmp_path):
    report = convert(
        publish(tmp_path / "source", weights, layer_pattern="all-static"), tmp_path / "model", progress=False
    )
    assert notes_of(report) == [
        "the configuration's `layer_pattern` of all-static was replaced by the tensors' interleaved"
    ]
    weights["layers.3.spatial_proj"] = weights.pop("layers.2.spatial_proj")
    with pytest.raises(ConversionError) as error:
        recognise(publish(tmp_path / "damaged", weights))
    assert str(error.value) == (
        "The tensors do not match the model type avey-b with the layer pattern interleaved; "
        "missing: layers.2.spatial_proj; unexpected: layers.3.spatial_proj."
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"k": 2}, (4, 2)),
        ({"chunk_size": 6}, (6, 1)),
        ({}, "has 12 rows; give `chunk_size` or `k` in a configuration file"),
        ({"chunk_size": 12}, "has 12 rows, which contradicts the configuration's `chunk_size` of 12"),
        ({"chunk_size": 3, "k": 2}, "has 12 rows, which contradicts .* `chunk_size` of 3 and `k` of 2"),
        ({"k": 2, "compressor": True}, r"missing: ranker\.down_proj\.$"),
    ],
)
@pytest.mark.parametrize("pattern", ["interleaved-dynamic-first", "all-dynamic"])
def test_windows_that_are_not_compressed(pattern, fields, expected, tmp_path):
    source = save(tmp_path / "trained.pth", state_dict(tiny_model(compressor=False, layer_pattern=pattern)))
    (tmp_path / "sizes.json").write_text(json.dumps({"compressor": False} | fields))

    def converted(name):
        return convert(source, tmp_path / name, config=tmp_path / "sizes.json", progress=False)

    if pattern == "all-dynamic" and "compressor" not in fields:
        if len(fields) < 2:
            expected = (
                r"^No tensor determines the rows of a window; give `chunk_size` and `k` in a configuration file\.$"
            )
        else:  # nothing contradicts them
            expected = (3, 2)
    if isinstance(expected, str):
        with pytest.raises(ConversionError, match=expected):
            converted("model")
    else:
        config = converted("model").config
        assert (config.chunk_size, config.k) == expected and not config.compressor


# --- refusal ---


def test_fields_that_only_the_configuration_tells(weights, tmp_path):
    told = {"hidden_act": "relu2", "similarity_norm": "sum", "score_normalization": "max", "eps": 1e-6}
    source = publish(tmp_path / "hub", weights, **told)
    assert convert(source, tmp_path / "model", progress=False).config.to_dict().items() >= told.items()
    other = {"hidden_act": "gelu", "similarity_norm": "l1"}
    source = publish(tmp_path / "paper", read_golden("avey_b_paper")[1], "paper", **other)
    assert convert(source, tmp_path / "other", progress=False).config.to_dict().items() >= other.items()
    source = publish(tmp_path / "wrong", weights, hidden_act="tanh")
    with pytest.raises(
        ConversionError, match="The configuration is not valid: .*`hidden_act` must be one of gelu, relu2"
    ):
        convert(source, tmp_path / "wrong model", progress=False)


def test_the_model_alone_of_the_paper(tmp_path):
    """Its norm belongs to the head, so that the configuration must tell that it is not there."""
    golden, weights, _ = read_golden("avey_b_paper")
    weights = {name.removeprefix("base_avey_model."): x for name, x in weights.items() if name != "ln_f.weight"}
    convert(publish(tmp_path / "source", weights, "paper", final_norm=False), tmp_path / "model", progress=False)
    check_outputs(AutoModel.from_pretrained(tmp_path / "model"), golden)


def test_a_classifier(tmp_path):
    """Only the masked language model is converted; what is left over is told."""
    tiny_model("AutoModelForTokenClassification").save_pretrained(tmp_path / "ours")
    left = r"unexpected: classifier\.0\.bias, classifier\.0\.weight, classifier\.3\.bias, classifier\.3\.weight\.$"
    with pytest.raises(ConversionError, match=left):
        recognise(tmp_path / "ours")
    weights = {f"avey_model.{name}": x for name, x in read_golden("avey_b_paper")[1].items()}
    weights |= {"classifier.weight": torch.zeros(2, 32), "classifier.bias": torch.zeros(2)}
    with pytest.raises(ConversionError, match=r"unexpected: classifier\.weight, classifier\.bias\.$"):
        recognise(save(tmp_path / "theirs.pth", weights))


# --- tokenizers ---


def test_the_tokenizer_beside_the_weights_is_copied(weights, tmp_path, capsys):
    source = publish(tmp_path / "source", weights, sep_token_id=77)
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | {"mask_token_id": None}))  # as we write it ourselves
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    tokenizer = write_byte_level_bpe(source, **special)
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.save(str(source / "tokenizer.json"))
    ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in special.items()}
    assert cli.main(["convert", str(source), str(tmp_path / "model")]) == 0
    text = capsys.readouterr().out
    assert "4 layers of 32, splits of 16, each read with 2 others, vocabulary 101." in text
    assert f"Tokenizer: copied from {source}." in text
    config = AutoConfig.from_pretrained(tmp_path / "model")
    # What the configuration tells itself is left as it is.
    expected = ids | {"sep_token_id": 77, "bos_token_id": tokenizer.token_to_id(END)}
    assert {name: getattr(config, name) for name in expected} == expected
    copied = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert copied(TEXT)["input_ids"] == tokenizer.encode(TEXT).ids
    assert copied.mask_token_id == ids["mask_token_id"]


def test_a_causal_model_gets_no_ids_that_it_does_not_know(tmp_path):
    config = subquad.AveyConfig(vocab_size=30, d_embed=8, n_blocks=1, chunk_size=4, k=2)
    subquad.AveyForCausalLM(config).save_pretrained(tmp_path / "source")
    write_byte_level_bpe(tmp_path / "source", cls_token=END)
    config = convert(tmp_path / "source", tmp_path / "model", progress=False).config
    assert config.eos_token_id == 0 and not hasattr(config, "cls_token_id")


# --- info ---


@each_layout
@pytest.mark.parametrize("source", ["directory", "file"])
def test_info(source, layout, tmp_path, capsys):
    weights = {name: x.bfloat16() for name, x in read_golden(f"avey_b_{layout}")[1].items()}
    path = save(tmp_path / "x.pth", weights) if source == "file" else publish(tmp_path / "source", weights, layout)
    assert cli.main(["info", str(path), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["model_type"], info["dtype"], info["num_hidden_layers"]) == ("avey-b", "bfloat16", 4)
    assert info["parameters"] == sum(x.numel() for x in weights.values()) == info["weight_bytes"] / 2
    # Compressor 48 rows to one; enricher d -> 4 d, fuser 3 d -> d; d channels of 16 rows, twice where dynamic; head.
    assert info["inference_flops"] == 2 * 48 * 32 + 4 * 2 * 7 * 32**2 + (2 + 2 * 2) * 2 * 16 * 32 + 2 * 101 * 32


def test_info_of_windows_that_are_not_compressed(tmp_path, capsys):
    tiny_model(compressor=False).save_pretrained(tmp_path)
    assert cli.main(["info", str(tmp_path), "--json"]) == 0
    # The three splits of a window, each of whose rows reads 12, for one.
    row = 4 * 2 * (16 * 8 + 12 * 8) + (2 + 2 * 2) * 2 * 12 * 4
    assert json.loads(capsys.readouterr().out)["inference_flops"] == 3 * row + 2 * 30 * 8
