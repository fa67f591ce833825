"""Avey's files: recognised by their tensors, refused where damaged, converted to what the released model computes."""

import json

import pytest
import torch
from byte_level_bpe import write_byte_level_bpe
from format_cases import save
from golden_files import read_golden
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import subquad_cli as cli
from subquad import AveyConfig, AveyForCausalLM
from subquad_conversion import ConversionError, convert


GOLDEN, WEIGHTS, CONFIG = read_golden("avey_released")
SIZES = CONFIG | {"extended_len": 32}


@pytest.fixture
def weights():
    return dict(WEIGHTS)


def publish(directory, weights, **config):
    """A directory as published, with code of its own; None takes a field away."""
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    auto_map = {"AutoConfig": "configuration_avey.AveyConfig", "AutoModelForCausalLM": "modeling_avey.Avey"}
    fields = SIZES | {"model_type": "avey", "architectures": ["Avey"], "auto_map": auto_map, "torch_dtype": "float32"}
    fields = {name: value for name, value in (fields | config).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "modeling_avey.py").write_text("raise RuntimeError('the directory ran its own code')\n")
    return directory


def random_weights(**fields):
    """Of another size, under the published names."""
    torch.manual_seed(0)
    config = AveyConfig(**{"vocab_size": 30, "d_embed": 16, "n_blocks": 2, "chunk_size": 64, "k": 2} | fields)
    return AveyForCausalLM(config).model.state_dict()


def check_logits(model):
    with torch.no_grad():
        assert (model(GOLDEN["input_ids"]).logits - GOLDEN["logits"]).abs().max() < 1e-4


@pytest.mark.parametrize("source", ["published", "published without a type", "nested", "trained", "state dict"])
def test_logits_equal_those_of_the_released_model(source, weights, tmp_path):
    config = None
    nested = {f"model.{name}": x for name, x in weights.items()}
    if source in ("published", "published without a type"):
        path = publish(tmp_path / "source", weights, model_type="avey" if source == "published" else None)
    elif source == "nested":
        path = publish(tmp_path / "source", nested)
    else:
        # The head of a state dict is the embeddings once more.
        whole = weights if source == "trained" else nested | {"lm_head.weight": weights["wte.weight"].clone()}
        path, config = save(tmp_path / "trained.pth", whole), tmp_path / "sizes.json"
        config.write_text(json.dumps({"chunk_size": 8}))
    report = convert(path, tmp_path / "model", config=config, progress=False)
    assert report.recognised.sizes == SIZES
    assert load_file(tmp_path / "model/model.safetensors").keys() == weights.keys()
    written = json.loads((tmp_path / "model/config.json").read_text())
    assert written.items() >= (SIZES | {"model_type": "avey", "architectures": ["AveyForCausalLM"]}).items()
    assert not {"auto_map", "head_size_divisor"} & written.keys()
    assert [note for note in report.notes if "tokenizer" not in note] == []

    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading.values()), loading
    check_logits(model)


def test_sizes_that_the_tensors_do_not_tell(tmp_path):
    weights = random_weights()
    source = save(tmp_path / "trained.pth", weights)
    report = convert(source, tmp_path / "assumed", progress=False)
    assert "neither `chunk_size` nor `k` is stored in the source; a `chunk_size` of 64 was assumed" in report.notes
    assert (report.config.chunk_size, report.config.k) == (64, 2)
    for i, (fields, expected) in enumerate([({"k": 4}, (32, 4)), ({"chunk_size": 16}, (16, 8))]):
        (tmp_path / "sizes.json").write_text(json.dumps(fields))
        report = convert(source, tmp_path / f"model-{i}", config=tmp_path / "sizes.json", progress=False)
        assert (report.config.chunk_size, report.config.k) == expected
        assert [note for note in report.notes if "tokenizer" not in note] == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "32 rows, which is not a multiple of a split of 64; give `chunk_size` in a configuration file"),
        ({"chunk_size": 12}, "32 rows, which contradicts the configuration's `chunk_size` of 12"),
        ({"k": 64}, "32 rows, which contradicts the configuration's `k` of 64"),
        ({"chunk_size": 8, "k": 8}, "32 rows, which contradicts the configuration's `chunk_size` of 8 and `k` of 8"),
    ],
)
def test_sizes_that_contradict_the_tensors(fields, message, weights, tmp_path):
    (tmp_path / "sizes.json").write_text(json.dumps(fields))
    source = save(tmp_path / "trained.pth", weights)
    with pytest.raises(ConversionError, match=rf"^blocks\.0\.ctxt\.contextualizer\.spatial_proj has {message}"):
        convert(source, tmp_path / "model", config=tmp_path / "sizes.json", progress=False)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("share", [0.3, 0.33, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("told", [False, True])
def test_any_share_of_features_in_the_tail(share, told, tmp_path):
    weights = random_weights(context_proportion=share, d_embed=10, expansion_factor=3)
    source = publish(tmp_path / "source", weights, chunk_size=64, context_proportion=share if told else None, k=2)
    report = convert(source, tmp_path / "model", progress=False)
    assert not any("context_proportion" in note for note in report.notes)
    if told:
        assert report.config.context_proportion == share
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading.values()), loading
    assert all(torch.equal(x, weights[name]) for name, x in model.model.state_dict().items())


# --- tokenizers ---


@pytest.mark.parametrize("foreign", [False, True])
def test_no_world_tokenizer_is_guessed(foreign, tmp_path):
    source = publish(tmp_path / "source", random_weights(vocab_size=65536), chunk_size=64, k=2)
    if foreign:
        write_byte_level_bpe(source, auto_map={"AutoTokenizer": ["code.Tokenizer", None]})
    report = convert(source, tmp_path / "model", progress=False)
    assert report.tokenizer is None and not any("tok" in file or "vocab" in file for file in report.files)
    why = "the source's needs code of its own" if foreign else "none is known for avey and a vocabulary of 65536"
    assert f"no tokenizer was written: {why}" in report.notes


# --- info ---


@pytest.mark.parametrize("source", ["directory", "directory without a type", "file"])
def test_info(source, tmp_path, capsys):
    weights = {name: x.bfloat16() for name, x in random_weights().items()}
    if source == "file":
        path = save(tmp_path / "trained.pth", weights)
    else:
        sizes = {"vocab_size": 30, "d_embed": 16, "n_blocks": 2, "chunk_size": 64, "k": 2, "extended_len": 128}
        path = publish(tmp_path / "model", weights, **sizes, model_type=None if " " in source else "avey")
    assert cli.main(["info", str(path), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["model_type"], info["dtype"], info["vocab_size"]) == ("avey", "bfloat16", 30)
    assert info["parameters"] == sum(x.numel() for x in weights.values()) == info["weight_bytes"] / 2
    # A directory of our type is loaded in the dtype of its configuration, float32.
    assert (info["state_elements_per_token"], info["state_bytes_per_token"]) == (
        16,
        64 if source == "directory" else 32,
    )
    assert info["inference_flops"] == 2 * (128 * 2 * 7 * 16**2 + 2 * 128 * 129 * 16) + 2 * 30 * 16
