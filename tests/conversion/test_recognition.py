"""Which checkpoint is which, from names and shapes; what is refused, and how."""

import json
import pickle
import zipfile

import pytest
import rwkv7_files
import torch
from format_cases import save
from rwkv_files import hub_tensors, trainer_tensors, write_trainer_file
from safetensors.torch import save_file

from subquad_conversion import ConversionError, convert, recognise
from subquad_conversion.checkpoint import open_checkpoint


SIZES = {
    "vocab_size": 100,
    "hidden_size": 192,
    "attention_hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "head_size": 64,
}
RANKS = {"lora_rank_tokenshift": 7, "lora_rank_decay": 11}


@pytest.mark.parametrize("model_type", ["rwkv5", "rwkv6"])
@pytest.mark.parametrize("container", ["safetensors", "bin", "sharded safetensors", "sharded bin"])
def test_hub_directory(model_type, container, tmp_path):
    tensors = hub_tensors(model_type)
    stem, suffix = ("pytorch_model", ".bin") if "bin" in container else ("model", ".safetensors")
    write = save if "bin" in container else lambda path, content: save_file(content, path)
    if "sharded" in container:
        names = sorted(tensors)
        weight_map = {name: f"{stem}-0000{1 + i % 2}-of-00002{suffix}" for i, name in enumerate(names)}
        for shard in set(weight_map.values()):
            write(tmp_path / shard, {name: tensors[name] for name in names if weight_map[name] == shard})
        (tmp_path / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        write(tmp_path / f"{stem}{suffix}", tensors)
    # The quirk of published files: the size of a head under the name of their number.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "num_attention_heads": 64}))
    found = recognise(tmp_path)
    assert found.format == f"{model_type}-hub"
    assert found.sizes == (SIZES if model_type == "rwkv5" else SIZES | RANKS)


@pytest.mark.parametrize("model_type", ["rwkv5", "rwkv6"])
@pytest.mark.parametrize("form", ["flat", "rows", "columns", "3d"])
def test_vectors_in_every_shape_that_trainers_have_used(model_type, form, tmp_path):
    tensors = trainer_tensors(model_type)
    shapes = {"flat": (-1,), "rows": (3, 64), "columns": (3, 64, 1), "3d": (3, 1, 64)}
    for name, tensor in list(tensors.items()):
        leaf = name.rpartition(".")[2]
        if leaf in ("time_decay", "time_faaaa"):
            tensors[name] = tensor.reshape(shapes[form])
        elif leaf.startswith(("time_mix_", "time_maa_")) and not leaf.endswith(("w1", "w2")):
            tensors[name] = tensor.flatten()
    report = convert(save(tmp_path / "model.pth", tensors), tmp_path / "out", progress=False)
    assert report.recognised.sizes["num_attention_heads"] == 3
    assert any("size of a head" in note for note in report.notes) == (form == "flat")

    expected = tmp_path / "expected"
    convert(save(tmp_path / "usual.pth", trainer_tensors(model_type)), expected, progress=False)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def test_flat_vectors_with_a_head_size_from_the_configuration(tmp_path):
    tensors = trainer_tensors("rwkv5", heads=5, head_size=32)
    for name in tensors:
        if name.endswith(("time_decay", "time_faaaa")):
            tensors[name] = tensors[name].flatten()
    source = save(tmp_path / "model.pth", tensors)
    with pytest.raises(ConversionError, match=r"160 channels are not a multiple.*`head_size`"):
        recognise(source)
    (tmp_path / "config.json").write_text('{"head_size": 32}')
    report = convert(source, tmp_path / "out", config=tmp_path / "config.json", progress=False)
    assert (report.config.num_attention_heads, report.config.head_size) == (5, 32)


def version_4():
    tensors = trainer_tensors("rwkv5")
    for i in range(2):
        tensors[f"blocks.{i}.att.time_first"] = tensors.pop(f"blocks.{i}.att.time_faaaa").flatten()
        tensors[f"blocks.{i}.att.time_decay"] = tensors[f"blocks.{i}.att.time_decay"].flatten()
        for name in ("ln_x.weight", "ln_x.bias", "gate.weight", "time_mix_g"):
            del tensors[f"blocks.{i}.att.{name}"]
    return tensors


def version_5_0():
    tensors = trainer_tensors("rwkv5")
    for i in range(2):
        tensors[f"blocks.{i}.att.time_first"] = tensors.pop(f"blocks.{i}.att.time_faaaa")[:, 0]
        tensors[f"blocks.{i}.att.time_decay"] = tensors[f"blocks.{i}.att.time_decay"][:, 0]
        for name in ("gate.weight", "time_mix_g"):
            del tensors[f"blocks.{i}.att.{name}"]
    return tensors


def version_5_1():
    tensors = trainer_tensors("rwkv5")
    for i in range(2):
        for name in ("time_decay", "time_faaaa"):
            tensors[f"blocks.{i}.att.{name}"] = tensors[f"blocks.{i}.att.{name}"][:, :1]
    return tensors


def version_7():
    tensors = {"emb.weight": torch.zeros(10, 64), "head.weight": torch.zeros(10, 64)}
    return tensors | {f"blocks.0.att.{name}": torch.zeros(1, 1, 64) for name in ("k_k", "k_a", "x_r", "w0")}


def goose_with(*names, make=rwkv7_files.trainer_tensors):
    return lambda: make() | {name: torch.zeros(4, 4) for name in names}


# RWKV-7b has what RWKV-7a has, and the hybrid of RWKV-8 what RWKV-7b has.
SEVEN_B = ("blocks.0.ffn.s_emb.weight", "blocks.0.ffn.s_emb_x.weight", "blocks.0.qkv.qq.weight")
EIGHT = (*SEVEN_B, *(f"blocks.0.qkv.{name}" for name in ("kk.weight", "kkup", "ennk", "vv.weight", "vvup", "emm")))


def goose_in_another_model():
    tensors = {f"model.layers.0.self_attn.{name}": torch.zeros(1, 1, 64) for name in ("k_k", "k_a", "r_k")}
    return tensors | {"model.layers.0.mlp.gate_proj.weight": torch.zeros(4, 4)}


def visual_goose():
    return {f"rwkv.{name}": x for name, x in rwkv7_files.trainer_tensors().items()}


def version_4_hub():
    return {
        name.replace("blocks", "rwkv.blocks").replace(".att.", ".attention."): v for name, v in version_4().items()
    }


def visual():
    return {f"rwkv.{name}": v for name, v in trainer_tensors("rwkv6").items()} | {"vit.proj.weight": torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("make", "title"),
    [
        (version_4, "RWKV-4"),
        (version_4_hub, "RWKV-4"),
        (version_5_0, "RWKV-5.0"),
        (version_5_1, "RWKV-5.1"),
        (version_7, r"RWKV-7 \(Goose\) in a layout that is not known"),
        (goose_with("blocks.0.ffn.s_emb.weight"), "RWKV-7a or 7b with merged tables"),
        (goose_with(SEVEN_B[0], SEVEN_B[2]), "RWKV-7a or 7b with merged tables"),
        (lambda: {"s_emb.0": torch.zeros(4, 4), "k_emb.0": torch.zeros(4, 4)}, "RWKV-7a or 7b with merged tables"),
        (goose_with("blocks.0.qkv.qq.weight"), "RWKV-7b's attention without DeepEmbed"),
        (goose_with("blocks.0.ffn.enn.weight"), "an RWKV-8 preview"),
        (goose_with(*EIGHT), "an RWKV-8 preview"),
        (goose_with("blocks.0.qkv.emm"), "an RWKV-8 preview"),
        (
            goose_with("model.layers.1.attn.q_proj.weight", make=rwkv7_files.fla_tensors),
            r"a hybrid of RWKV-7 \(Goose\) and softmax attention",
        ),
        (goose_in_another_model, r"RWKV-7 \(Goose\) in the layers of another model"),
        (visual_goose, r"VisualRWKV-7 \(Goose\) with other towers or without its projection"),
        (visual, r"VisualRWKV \(names carry a `rwkv\.` or `vit\.` prefix\)"),
        (lambda: {"model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}, "no format that is known"),
    ],
)
def test_what_is_refused_by_name(make, title, tmp_path):
    source = save(tmp_path / "model.pth", tensors := make())
    with pytest.raises(ConversionError, match=title) as error:
        convert(source, tmp_path / "out", progress=False)
    assert "Supported are: Eagle (RWKV-5.2), trainer checkpoint; Finch (RWKV-6.0)" in str(error.value)
    assert min(tensors) in str(error.value)
    assert not (tmp_path / "out").exists()


class RunsCode:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("archive", ["zip", "legacy", "pickle"])
def test_code_in_a_file_is_not_run(archive, tmp_path):
    source, marker = tmp_path / "model.pth", tmp_path / "executed"
    content = trainer_tensors("rwkv5", heads=1) | {"extra": RunsCode(marker)}
    if archive == "pickle":
        source.write_bytes(pickle.dumps(content["extra"]))
    else:
        torch.save(content, source, _use_new_zipfile_serialization=archive == "zip")
    with pytest.raises(ConversionError, match="code in it is never run") as error:
        convert(source, tmp_path / "out", progress=False)
    assert "weights_only" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pth"]


def test_an_archive_that_cannot_be_mapped_is_read_whole(tmp_path):
    tensors = trainer_tensors("rwkv5")
    torch.save(tensors, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert recognise(tmp_path / "old.pth").sizes == SIZES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "found a list"),
        ({"model": {"emb.weight": 1}}, "found 'model': dict"),
        (
            {"optimizer": {"state": {}}, "model": {"emb.weight": torch.zeros(1)}},
            "found 'optimizer': dict. It is a training state: save its 'model' entry",
        ),
        (
            {"module.emb.weight": torch.zeros(1), "module.x": torch.zeros(1)},
            "tensors such as emb.weight, x: no format that is known here",
        ),
        ({"emb.weight": torch.zeros(3, 3).to_sparse()}, "dense tensors only"),
        ({"emb\x1b[31m.weight": torch.zeros(1)}, r"the name 'emb\\x1b\[31m\.weight'"),
        ({}, "holds no tensors"),
    ],
)
def test_a_file_of_something_else(content, message, tmp_path):
    with pytest.raises(ConversionError, match=message):
        recognise(save(tmp_path / "model.pth", content))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "no usable `weight_map`"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "the shard 'gone.safetensors', which is missing"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "not a .safetensors file in the same directory"),
        ('{"weight_map": {"a": ".."}}', "not a .safetensors file in the same directory"),
        ('{"weight_map": {"a": ""}}', "not a .safetensors file in the same directory"),
        ('{"weight_map": {"a": "..\\\\secret.safetensors"}}', "not a .safetensors file in the same directory"),
        (
            '{"weight_map": {"a": "\\u001b[31m.safetensors"}}',
            r"'\\x1b\[31m\.safetensors', which is not a .safetensors",
        ),
        ('{"weight_map": {"a": "there.safetensors"}}', "lacks tensors.*: 'a'"),
    ],
)
def test_a_damaged_index(index, message, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    for file in (directory / "there.safetensors", tmp_path / "secret.safetensors"):
        save_file({"b": torch.zeros(1)}, file)
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConversionError, match=message):
        recognise(directory)


def test_a_tensor_in_two_shards(tmp_path):
    """Which of them is meant is not ours to guess: transformers takes the last."""
    weight_map = {"a": "one.bin", "b": "two.bin"}
    save(tmp_path / "one.bin", {"a": torch.zeros(1)})
    save(tmp_path / "two.bin", {"a": torch.ones(1), "b": torch.zeros(1)})
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConversionError, match=r"the tensor a twice, the second time in two\.bin"):
        recognise(tmp_path)


def test_the_order_of_a_directory_is_that_of_transformers(tmp_path):
    """Each candidate is a checkpoint of its own; the one that is read is the first that is left."""
    for i, name in enumerate(("model.safetensors", "shard.safetensors"), start=1):
        save_file({"x": torch.full((i,), i)}, tmp_path / name)
    for i, name in enumerate(("pytorch_model.bin", "shard.bin"), start=3):
        save(tmp_path / name, {"x": torch.full((i,), i)})
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = {"weight_map": {"x": f"shard.{suffix}"}}
        (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    found = []
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):
        with open_checkpoint(tmp_path) as checkpoint:
            found.append(checkpoint.tensors["x"].elements)
        (tmp_path / name).unlink()
    assert found == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["model.pth", "pytorch_model.bin"])
def test_a_compressed_archive_is_refused(name, tmp_path):
    """PyTorch maps the members as they are: the compressed bytes would be read as weights."""
    stored = save(tmp_path / "stored.pth", trainer_tensors("rwkv5", heads=1))
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(tmp_path / name, "w") as new:
        for member in old.namelist():
            packed = member.endswith("/data/0")
            new.writestr(member, old.read(member), zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED)
    with pytest.raises(ConversionError, match="the compressed member 'stored/data/0'"):
        convert(tmp_path / name, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_places_without_a_checkpoint(tmp_path):
    with pytest.raises(ConversionError, match="does not exist"):
        recognise(tmp_path / "nowhere")
    write_trainer_file(tmp_path / "epoch-3.pth", "rwkv5", heads=1)
    with pytest.raises(ConversionError, match=r"has none of .* It holds epoch-3\.pth: name the file itself"):
        recognise(tmp_path)
