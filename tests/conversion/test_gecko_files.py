"""Gecko's files: recognised by their tensors, refused where damaged, converted to what the authors' code computes."""

import json

import pytest
import torch
from format_cases import GECKO, GECKO_UNTOLD, gecko_buffers, load_whole, notes_of, save, tiny_gecko
from golden_files import read_golden
from safetensors.torch import load_file

import subquad_cli as cli
from subquad import GeckoConfig
from subquad_conversion import ConversionError, convert, recognise


@pytest.fixture
def weights():
    return read_golden("gecko")[1]


def write_config(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps(fields))
    return path


def as_trained(model):
    """The state dict of such a model in the authors' code, buffers included."""
    weights = {name.removeprefix("model."): x for name, x in model.state_dict().items()}
    return weights | gecko_buffers(model.config)


def check_same(model, expected):
    ids = torch.arange(28).view(2, 14)  # one of which begins a document
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits)


# --- from the authors' files to what they compute ---


@pytest.mark.parametrize("variant", ["gecko", "gecko_documents"])
@pytest.mark.parametrize("source", [".pth", ".pt", ".bin", ".safetensors", "directory", "no buffers"])
def test_logits_equal_those_of_the_authors_code(source, variant, tmp_path, capsys):
    golden, weights, fields = read_golden(variant)
    expected = {
        name if name == "output.output.weight" else f"model.{name}": x
        for name, x in weights.items()
        if "prior_" not in name and name != "rope.freqs"
    }
    options = []
    if source == "directory":
        path = save(tmp_path / "model.safetensors", weights).parent
        write_config(path, **fields)
    else:
        if source == "no buffers":
            weights = {name: x for name, x in weights.items() if "prior_" not in name and name != "rope.freqs"}
        path = save(tmp_path / f"trained{source if source.startswith('.') else '.pth'}", weights)
        options = ["--config", str(write_config(tmp_path, **fields))]
    assert cli.main(["convert", str(path), str(tmp_path / "model"), *options]) == 0
    text = capsys.readouterr().out
    assert "Recognised Gecko, published model or training checkpoint: 3 layers of 32, 2 heads, chunks of 8, " in text
    assert [line for line in text.splitlines() if line.startswith("Note")] == [
        "Note: no tokenizer was written: none is known for gecko and a vocabulary of 53."
    ]
    written = json.loads((tmp_path / "model/config.json").read_text())
    dropped = {*GeckoConfig.ignored_fields, "output_size"}
    expected_fields = {name: value for name, value in fields.items() if name not in dropped}
    assert written.items() >= (expected_fields | {"model_type": "gecko", "num_rope_heads": 2}).items()
    assert not written.keys() & dropped
    found = load_file(tmp_path / "model/model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(x, expected[name]) for name, x in found.items())
    with torch.no_grad():
        logits = load_whole(tmp_path / "model")(golden["input_ids"]).logits
    assert (logits - golden["logits"]).abs().max() < 1e-4


VARIANTS = [
    {"swiglu": False, "two_hop_residual": True, "num_rope_heads": 1},
    {"rescale_nffn": True, "scale_emb": True, "layernorm_num_groups": 2, "rope_base": 100.0, "norm_eps": 1e-3},
    {"norm_affine": False, "num_rope_heads": 0, "document_boundaries": False},
    {"share_emb": True, "timenorm_beta1": 0.9, "timenorm_beta2": 0.95},
]


@pytest.mark.parametrize("fields", VARIANTS)
@pytest.mark.parametrize("told", [True, False])
def test_what_we_save_ourselves(fields, told, tmp_path):
    """Also with no more of its configuration than no tensor tells."""
    model = tiny_gecko(**fields)
    model.save_pretrained(tmp_path / "saved")
    config = None
    if not told:
        untold = {name: x for name, x in fields.items() if name not in ("swiglu", "rescale_nffn", "norm_affine")}
        config = write_config(tmp_path, **GECKO_UNTOLD | untold)
    report = convert(tmp_path / "saved", tmp_path / "model", config=config, progress=False)
    assert bool(notes_of(report)) is not told
    converted = load_whole(tmp_path / "model")
    assert converted.config.to_diff_dict() == model.config.to_diff_dict()
    check_same(converted, model)


# --- what the tensors tell, and what they do not ---


def test_sizes_that_the_tensors_replace(tmp_path):
    told = {name: size * 2 for name, size in GECKO.items() if name != "chunk_size"}
    told |= {"swiglu": False, "norm_affine": False, "rescale_nffn": False}
    replaced = GECKO | {"swiglu": True, "norm_affine": True, "rescale_nffn": True}
    model = tiny_gecko(rescale_nffn=True)
    source = save(tmp_path / "trained.pth", as_trained(model))
    config = write_config(tmp_path, **model.config.to_dict() | told)
    report = convert(source, tmp_path / "model", config=config, progress=False)
    assert set(notes_of(report)) == {
        f"the configuration's `{name}` of {value} was replaced by the tensors' {replaced[name]}"
        for name, value in told.items()
    }
    check_same(load_whole(tmp_path / "model"), model)


@pytest.mark.parametrize(
    ("buffers", "fields", "untold"),
    [
        (False, {}, "`num_heads`, nor `chunk_size`, nor `timenorm_num_groups`"),
        (False, {"chunk_size": 4, "timenorm_num_groups": None}, "`num_heads`, nor `timenorm_num_groups`"),
        (True, {}, "`chunk_size`"),
    ],
)
def test_what_a_configuration_must_tell(buffers, fields, untold, tmp_path):
    model = tiny_gecko()
    source = save(tmp_path / "trained.pth", as_trained(model) if buffers else model.state_dict())
    with pytest.raises(ConversionError) as error:
        convert(source, tmp_path / "model", config=write_config(tmp_path, **fields), progress=False)
    assert str(error.value) == f"No tensor determines {untold}; give it in a configuration file."
    assert not (tmp_path / "model").exists()


def test_what_is_assumed(tmp_path):
    model = tiny_gecko()
    source = save(tmp_path / "trained.pth", as_trained(model))
    config = write_config(tmp_path, chunk_size=4, norm_eps=1e-5, num_rope_heads=None)
    report = convert(source, tmp_path / "model", config=config, progress=False)
    assert notes_of(report) == [
        "values that are not stored in the source were assumed: `timenorm_beta1` 0.999, `timenorm_beta2` 0.9999, "
        "`layernorm_num_groups` 1, `two_hop_residual` False, `rope_base` 500000, `scale_emb` False, "
        "`document_boundaries` True"
    ]
    check_same(load_whole(tmp_path / "model"), model)


@pytest.mark.parametrize(
    ("name", "value", "held"),
    [
        ("layers.1.mega.timenorm.prior_count", torch.tensor(512), "512"),
        ("output.final_norm.prior_mean", torch.tensor([0.0, 0.0, -0.25, 1.0]), "-0.25"),
        ("layers.0.mega.timenorm.prior_var", torch.full((4,), torch.nan), "nan"),
    ],
)
def test_norms_that_do_not_begin_from_nothing(name, value, held, weights, tmp_path):
    source = save(tmp_path / "trained.pth", weights | {name: value})
    with pytest.raises(ConversionError) as error:
        convert(source, tmp_path / "model", config=write_config(tmp_path, **read_golden("gecko")[2]), progress=False)
    assert str(error.value) == f"{name} holds {held}; only zeros are supported there."
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("rope.freqs", (3,), r"^rope\.freqs has the shape \(3,\), which fits no heads of `z_dim` 16\.$"),
        ("rope.freqs", (128, 4), r"rope\.freqs has the shape \(128, 4\), which fits no heads"),
        ("rope.freqs", (0,), r"rope\.freqs has the shape \(0,\), which fits no heads"),
        ("output.final_norm.prior_mean", (8,), r"^Norms begin .* \(4,\), output\.final_norm\.prior_mean \(8,\)\.$"),
        ("layers.0.mega.timenorm.prior_var", (), r"^Norms begin .*, layers\.0\.mega\.timenorm\.prior_var \(\)"),
    ],
)
def test_buffers_that_tell_nothing(name, shape, message, weights, tmp_path):
    with pytest.raises(ConversionError, match=message):
        recognise(save(tmp_path / "trained.pth", weights | {name: torch.zeros(shape)}))


# --- refusal ---


def test_a_layer_of_which_only_buffers_are_left(weights, tmp_path):
    weights = {name: x for name, x in weights.items() if not name.startswith("layers.2.") or "prior_" in name}
    with pytest.raises(ConversionError, match=r"missing: .*model\.layers\.2\.mega\.timenorm\.weight, "):
        recognise(save(tmp_path / "trained.pth", weights))


def test_megalodon(weights, tmp_path):
    weights["layers.0.mega.cema.omega"] = torch.zeros(32, 1)
    with pytest.raises(ConversionError, match=r"this is Megalodon, which is not supported\. Supported .*; Gecko, "):
        recognise(save(tmp_path / "trained.pth", weights))


# --- info ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_info(dtype, tmp_path, capsys):
    model = tiny_gecko().to(dtype)
    model.save_pretrained(tmp_path)
    assert cli.main(["info", str(tmp_path), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["model_type"], info["dtype"]) == ("gecko", str(dtype).removeprefix("torch."))
    assert (info["num_hidden_layers"], info["hidden_size"]) == (3, 16)
    assert (info["num_attention_heads"], info["vocab_size"]) == (2, 30)
    assert info["parameters"] == sum(x.numel() for x in model.parameters()) == info["weight_bytes"] / dtype.itemsize
    # What is kept of a text that is longer than two chunks.
    with torch.no_grad():
        cache = model(torch.arange(4, 24)[None], use_cache=True).cache
    others = ("begins", "lengths", "output", "padding")
    states = [x for layer in cache.all_layers for name, x in layer.states.items() if name not in others]
    assert info["state_elements"] == sum(x.numel() for x in states)
    assert info["state_bytes"] == sum(x.nbytes for x in states)
    assert info["state_elements_per_token"] is info["state_bytes_per_token"] is None
    # z 16 -> 8, values and gate 16 -> 12, outputs 16 -> 16 and 12 -> 16, network.
    weights = 16 * 8 + 2 * 16 * 12 + 16 * 16 + 12 * 16 + 3 * 16 * 20
    # Two heads of 4 and 6 channels read 8 keys and values; their memories are read, and changed by a delta rule; CEMA.
    layer = 2 * weights + 2 * 8 * 2 * (4 + 6) + 2 * 3 * 2 * 4 * 6 + 12 * 16 * 3
    assert info["inference_flops"] == 3 * layer + 2 * 16 * 30
    assert info["training_flops"] == 3 * info["inference_flops"]


def test_info_of_a_file_needs_its_configuration(weights, tmp_path, capsys):
    source = save(tmp_path / "model.safetensors", weights)
    assert cli.main(["info", str(source)]) == 1
    assert "No tensor determines `chunk_size`; give it in a configuration file." in capsys.readouterr().err
    write_config(tmp_path, chunk_size=8)
    assert cli.main(["info", str(source), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["model_type"], info["num_attention_heads"]) == ("gecko", 2)
    assert info["state_elements"] == 3 * (3 * 4 + 2 * 32 * 4 + 16 * 25 + 16 * (2 * 16 + 48)) + 3 * 4
