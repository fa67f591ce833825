"""Raven's files: recognised by their tensors, refused where damaged, converted to what published models compute."""

import json

import pytest
import torch
from format_cases import RAVEN, WHOLE, WINDOW, load_whole, make_models_once, notes_of, save, tiny_raven
from golden_files import read_golden
from safetensors.torch import load_file, save_file

import subquad_cli as cli
from subquad_conversion import ConversionError, convert, recognise
from subquad_conversion.checkpoint import TensorInfo
from subquad_conversion.raven import FORMAT


VARIANTS = ("gated", "plain")
# Fields of published configurations that say nothing about what a model computes.
EXTRA = {
    "fuse_norm": True,
    "fuse_swiglu": True,
    "fuse_cross_entropy": True,
    "fuse_linear_cross_entropy": False,
    "use_l2warp": False,
    "elementwise_affine": True,
    "use_norm": True,
    "use_short_conv": False,
    "conv_size": 4,
    "clamp_min": None,
    "max_position_embeddings": 2048,
    "attnres_block_size": None,
}


@pytest.fixture
def weights():
    return read_golden("raven_gated")[1]


def publish(directory, weights, variant="gated", container="model.safetensors", **config):
    """A directory as published; None takes a field away."""
    directory.mkdir()
    if container == "pytorch_model.bin":
        torch.save(weights, directory / container)
    else:
        save_file(weights, directory / container, metadata={"format": "pt"})
    fields = read_golden(f"raven_{variant}")[2] | EXTRA
    fields |= {"model_type": "raven", "architectures": ["RavenForCausalLM"]}
    fields = {name: value for name, value in (fields | config).items() if value is not None or name not in config}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def save_tiny(directory, config=None, **fields):
    """A model of ours with other fields in its configuration; None takes one away."""
    model = tiny_raven(**fields)
    model.save_pretrained(directory)
    if config is not None:
        told = json.loads((directory / "config.json").read_text()) | config
        told = {name: value for name, value in told.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(told))
    return model


def check_logits(model, golden):
    with torch.no_grad():
        assert (model(golden["input_ids"]).logits - golden["logits"]).abs().max() < 2e-4


def check_same(model, expected):
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits)


# --- from published files to what they compute ---


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("source", ["safetensors", "bin", "misspelled", "without a type", "trained"])
def test_logits_equal_those_of_the_published_model(source, variant, tmp_path):
    golden, weights, fields = read_golden(f"raven_{variant}")
    config = None
    if source == "trained":
        path, config = save(tmp_path / "trained.pth", weights), tmp_path / "sizes.json"
        config.write_text(json.dumps({"topk": fields["topk"]}))
    else:
        container = "pytorch_model.bin" if source == "bin" else "model.safetensors"
        other = {"without a type": {"model_type": None}, "misspelled": dict.fromkeys(("expand_k", "expand_v"))}
        path = publish(tmp_path / "source", weights, variant, container, **other.get(source, {}))
        if source == "misspelled":
            told = json.loads((path / "config.json").read_text()) | {"exapnd_k": 1, "exapnd_v": 1.0}
            (path / "config.json").write_text(json.dumps(told))
    report = convert(path, tmp_path / "model", config=config, progress=False)
    assert report.recognised.format == "raven"
    assert notes_of(report) == []
    written = json.loads((tmp_path / "model/config.json").read_text())
    expected = {name: value for name, value in fields.items() if value is not None}
    expected |= {"num_kv_heads": 4, "intermediate_size": 256, "model_type": "raven"}
    assert written.items() >= expected.items()
    assert not {"exapnd_k", "exapnd_v", *EXTRA} & written.keys()
    found = load_file(tmp_path / "model/model.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(x, weights[name]) for name, x in found.items())
    check_logits(load_whole(tmp_path / "model"), golden)


@pytest.mark.parametrize(
    "fields",
    [
        {"decay_type": "GLA", "gate_logit_normalizer": 16, "router_score": "softmax", "feature_map": "relu"},
        {"router_type": "mlp", "bias_rmm": True, "use_output_gate": True, "router_scale": 4.0, "use_rope": True},
        {"expand_k": 0.5, "expand_v": 2, "use_output_gate": True, "tie_word_embeddings": True},
        {"expand_k": 0.75, "expand_v": 1.5, "num_heads": 3, "num_kv_heads": 1, "hidden_size": 24},
        {"router": "gsa", "decay_type": "GLA", "num_heads": 2},
        {"router": "swa", "use_output_gate": True, "num_slots": 4},
        {"attn": WINDOW},
        {"attn": [WINDOW, WHOLE], "decay_type": "GLA", "use_output_gate": True},
        {"attn": WHOLE | {"layers": [0, 2]}, "bias_rmm": True},
        {"attn": WHOLE | {"layers": []}},
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_what_we_save_ourselves(fields, told, tmp_path):
    """Also with no more of its configuration than no tensor tells."""
    model = tiny_raven(**fields)
    model.save_pretrained(tmp_path / "saved")
    config = None
    if not told:
        untold = {"topk", "num_slots", "attn", "tie_word_embeddings", "feature_map", "router_scale", "use_rope"}
        untold |= {"gate_logit_normalizer", "router_score"} | ({"router"} if model.config.router != "raven" else set())
        config = tmp_path / "untold.json"
        config.write_text(json.dumps({name: x for name, x in model.config.to_dict().items() if name in untold}))
    report = convert(tmp_path / "saved", tmp_path / "model", config=config, progress=False)
    assert notes_of(report) == []
    converted = load_whole(tmp_path / "model")
    assert converted.config.to_diff_dict() == model.config.to_diff_dict()
    check_same(converted, model)


# --- what the tensors tell, and what they do not ---


def test_sizes_that_the_tensors_replace(tmp_path):
    told = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_heads": 2,
        "num_kv_heads": 1,
        "num_slots": 8,
        "intermediate_size": 32,
        "vocab_size": 31,
        "expand_k": None,
        "exapnd_k": 0.5,
        "use_output_gate": False,
        "decay_type": "GLA",
        "router": "gsa",
        "router_type": "mlp",
        "attn": {**WINDOW, "num_kv_heads": 1, "qkv_bias": False},
    }
    model = save_tiny(tmp_path / "source", told, use_output_gate=True, bias_rmm=True, attn=WINDOW)
    report = convert(tmp_path / "source", tmp_path / "model", progress=False)
    replaced = {
        **RAVEN,
        "exapnd_k": 1.0,
        "use_output_gate": True,
        "decay_type": "Mamba2",
        "router": "raven",
        "router_type": "lin",
        "attn": model.config.attn,
    }
    assert set(notes_of(report)) == {
        f"the configuration's `{name}` of {value} was replaced by the tensors' {replaced[name]}"
        for name, value in told.items()
        if value is not None and name != "attn"
    } | {
        f"the configuration's `attn` of {told['attn']} was replaced by the tensors' "
        f"{told['attn'] | {'num_kv_heads': 2, 'qkv_bias': True}}"
    }
    check_same(load_whole(tmp_path / "model"), model)


def test_slots_that_are_as_many_as_a_head_is_wide(tmp_path):
    """Then published models write at most all of them."""
    model = save_tiny(tmp_path / "source", num_slots=4, topk=4)
    path = tmp_path / "source/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_slots": None, "topk": 32}))
    config = convert(tmp_path / "source", tmp_path / "model", progress=False).config
    assert (config.num_slots, config.topk) == (4, 4)
    check_same(load_whole(tmp_path / "model"), model)


@pytest.mark.parametrize(
    ("fields", "untold"),
    [
        ({}, "`topk`"),
        ({"router": "swa"}, "`num_slots`"),
        (
            {"attn": WHOLE | {"layers": [0, 2]}},
            "`topk`, nor the heads, window and rotary embeddings of softmax attention in the layers [0, 2] (`attn`)",
        ),
    ],
)
def test_without_a_configuration(fields, untold, tmp_path):
    model = tiny_raven(**fields)
    source = save(tmp_path / "trained.pth", model.state_dict())
    config = None
    if "router" in fields:  # of which the tensors tell nothing
        config = tmp_path / "router.json"
        config.write_text(json.dumps({"router": "swa", "topk": 2}))
    with pytest.raises(ConversionError) as error:
        convert(source, tmp_path / "model", config=config, progress=False)
    assert str(error.value) == f"No tensor determines {untold}; give it in a configuration file."
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("attn", "message"),
    [
        ({**WINDOW, "layers": [0]}, r"`attn` has the layers \[0\], the tensors have \[1\]"),
        ({**WINDOW, "layers": [1, 2]}, r"`attn` has the layers \[1, 2\], the tensors have \[1\]"),
        ({**WINDOW, "layers": [1, 3]}, r"`attn` has the layers \[1, 3\], the tensors have \[1\]"),
        ({**WINDOW, "layers": []}, r"`attn` has the layers \[\], the tensors have \[1\]"),
        ({**WINDOW, "layers": "1"}, r"`attn` must have `layers` and `num_heads`, got \{'layers': '1'"),
        ({**WINDOW, "num_heads": 0}, "`attn` must have `layers` and `num_heads`, got "),
        ("swa", "`attn` must have `layers` and `num_heads`, got swa"),
        ({**WINDOW, "num_heads": 3}, "Keys of 8 channels do not fill heads .* if `attn.'num_heads'.` is 3"),
        ({**WINDOW, "window_size": 0}, "The configuration is not valid: .*`attn.'window_size'.` must be at least 1"),
    ],
)
def test_attention_that_contradicts_the_tensors(attn, message, tmp_path):
    save_tiny(tmp_path / "source", {"attn": attn}, attn=WINDOW)
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "source", tmp_path / "model", progress=False)
    assert not (tmp_path / "model").exists()


# --- refusal ---


@pytest.mark.parametrize("fault", ["missing", "no axis", "one row"])
def test_every_tensor_matters_without_a_configuration(fault, monkeypatch):
    """The tensors that are left show the variants then, except for the router's bias."""
    make_models_once(FORMAT, monkeypatch)
    model = tiny_raven(attn=WINDOW, router_type="mlp", decay_type="GLA")
    whole = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in model.state_dict().items()}
    for name, info in whole.items():
        changed = dict(whole)
        if fault == "missing":
            del changed[name]
        else:
            changed[name] = TensorInfo(() if fault == "no axis" else (1, *info.shape[1:]), info.dtype)
        with pytest.raises(ConversionError) as error:
            FORMAT.plan(changed, {})
        assert "No tensor determines" not in str(error.value)
        assert fault == "one row" or name in str(error.value)


@pytest.mark.parametrize(
    "names",
    [
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
        ("q_proj", "k_proj", "v_proj", "f_proj", "g_norm", "o_proj"),
        ("r_proj", "k_proj", "v_proj", "g_proj", "g_norm", "o_proj"),
    ],
)
def test_other_models_with_some_of_the_names(names, tmp_path):
    tensors = {f"model.layers.0.attn.{name}.weight": torch.zeros(2, 2) for name in names}
    with pytest.raises(ConversionError, match=r"no format that is known here\. Supported .*; Raven, published"):
        recognise(save(tmp_path / "other.pth", tensors | {"model.embeddings.weight": torch.zeros(3, 2)}))


# --- info ---


@pytest.mark.parametrize("source", ["directory", "directory without a type"])
def test_info_of_a_hybrid(source, tmp_path, capsys):
    model = tiny_raven(attn=[WINDOW, WHOLE], use_output_gate=True).bfloat16()
    model.save_pretrained(tmp_path)
    if source != "directory":
        fields = json.loads((tmp_path / "config.json").read_text())
        del fields["model_type"]
        (tmp_path / "config.json").write_text(json.dumps(fields))
    assert cli.main(["info", str(tmp_path), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["model_type"], info["dtype"], info["num_hidden_layers"]) == ("raven", "bfloat16", 3)
    assert (info["hidden_size"], info["num_attention_heads"], info["vocab_size"]) == (16, 4, 30)
    assert info["parameters"] == sum(x.numel() for x in model.parameters()) == info["weight_bytes"] / 2
    # 6 slots of 4 heads, each a key and a value of 4; a window of 5, in which 2 heads of 4 have keys and values.
    slots, window = 4 * 6 * (4 + 4), 5 * 2 * 2 * 4
    assert (info["state_elements"], info["state_bytes"]) == (slots + window, 4 * slots + 2 * window)
    # Without a window 2 heads of 8 keep a key and a value of each token.
    assert (info["state_elements_per_token"], info["state_bytes_per_token"]) == (32, 64)
    # Queries, output and gate 16 -> 16, keys and values 16 -> 8, router 16 -> 12, decay 16 -> 2; 4 heads read 6 slots,
    # and write 2 of them.
    memory = 2 * 16 * (3 * 16 + 2 * 8 + 12 + 2) + 4 * (2 * 6 * 8 + 3 * 2 * 8)
    # Queries and output 16 -> 16, keys and values 16 -> 8 or 16; 4 heads read 5 keys and values.
    attention = 2 * 16 * (2 * 16 + 2 * 8) + 4 * 2 * 5 * (4 + 4) + 2 * 16 * (2 * 16 + 2 * 16)
    assert info["inference_flops"] == memory + attention + 3 * 2 * 3 * 16 * 24 + 2 * 16 * 30
    assert info["training_flops"] == 3 * info["inference_flops"]
    assert cli.main(["info", str(tmp_path)]) == 0
    assert "state         272 elements, 928 bytes and 32 elements, 64 bytes a token of the text" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("fields", "projections", "written"),
    [
        # Router 16 -> 16 -> 12, decay 16 -> 12.
        ({"router_type": "mlp", "decay_type": "GLA"}, 16 + 12 + 12, 2),
        ({"router": "gsa", "decay_type": "GLA"}, 12, 6),
        ({"router": "swa"}, 0, 1),
    ],
)
def test_info_of_routers(fields, projections, written, tmp_path, capsys):
    save_tiny(tmp_path, expand_v=2, **fields)
    assert cli.main(["info", str(tmp_path), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["state_elements"] == 3 * 4 * 6 * (4 + 8) == info["state_bytes"] / 4
    assert info["state_elements_per_token"] is info["state_bytes_per_token"] is None
    # Queries 16 -> 16, keys 16 -> 8, values 16 -> 16, output 32 -> 16; a key has 4 channels and a value 8.
    memory = 2 * 16 * (16 + 8 + 16 + 32 + projections) + 4 * (2 * 6 * 12 + 3 * written * 12)
    assert info["inference_flops"] == 3 * (memory + 2 * 3 * 16 * 24) + 2 * 16 * 30


def test_info_of_a_file_needs_its_configuration(weights, tmp_path, capsys):
    source = publish(tmp_path / "source", weights)
    assert cli.main(["info", str(source / "model.safetensors"), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["state_elements"] == 3 * 4 * 32 * (16 + 16)
    (source / "config.json").unlink()
    assert cli.main(["info", str(source)]) == 1
    assert "No tensor determines `topk`; give it in a configuration file." in capsys.readouterr().err
