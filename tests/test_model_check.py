"""What is refused before a model is loaded, converted or published, and what the refusals say."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from cases import each_model, lm_class, tiny_model
from peft import LoraConfig, get_peft_model
from rwkv_files import trainer_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import subquad
import subquad_cli as cli
from subquad.hub import export as hub
from subquad.hub.directories import DirectoryError, check_free, new_directory
from subquad.hub.foreign_files import check_links, read_json
from subquad.hub.model_check import check_model
from subquad_conversion import ConversionError, convert
from subquad_tokenizers import ByteTokenizer


SIZES = {"heads": 1, "head_size": 16, "intermediate": 32, "vocabulary": 128}


def edit(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change(directory: Path, name: str, tensor) -> None:
    states = load_file(directory / "model.safetensors")
    states[name] = tensor(states[name])
    save_file(
        {key: x for key, x in states.items() if x is not None}, directory / "model.safetensors", {"format": "pt"}
    )


@pytest.fixture
def finch(tmp_path):
    tiny_model("rwkv6", vocab_size=128).save_pretrained(tmp_path / "finch")
    ByteTokenizer().save_pretrained(tmp_path / "finch")
    return tmp_path / "finch"


# --- what is published ---


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("rwkv.blocks.1.attention.key.weight", lambda x: None, r"Rwkv6ForCausalLM; missing: rwkv\.blocks\.1\.att"),
        ("head.weight", lambda x: None, "missing: head.weight"),
        (
            "rwkv.ln_out.bias",
            lambda x: x[:3],
            r"of the wrong shape: rwkv.ln_out.bias \(shape \(3,\), expected \(48,\)",
        ),
        ("head.weight", lambda x: x.to(torch.int8), r"not floating point: head.weight \(dtype I8\)"),
        ("rwkv.embeddings.weight", lambda x: x.index_fill(0, torch.tensor(3), float("nan")), "holds NaN or infinite"),
        (
            "head.weight",
            lambda x: x.index_fill(1, torch.tensor(3), -float("inf")),
            "head.weight holds NaN or infinite",
        ),
    ],
)
def test_what_does_not_load_is_not_exported(name, tensor, message, finch, tmp_path, capsys):
    change(finch, name, tensor)
    with pytest.raises(ValueError, match=f"{finch}.*{message}"):
        hub.export(finch, tmp_path / "out")
    assert cli.main(["export", str(finch), str(tmp_path / "out")]) == 1
    assert "It loads" not in capsys.readouterr().out and not (tmp_path / "out").exists()


@each_model
def test_a_sound_model_passes(model_type, tmp_path):
    """With tied weights, in pieces, with another head, and quantised."""
    for auto_class in (None, "AutoModelForSequenceClassification", "AutoModel"):
        path = tmp_path / str(auto_class)
        tiny_model(model_type, auto_class).save_pretrained(path, max_shard_size="50KB")
        assert check_model(path).model_type == model_type
    tiny_model(model_type, tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    check_model(tmp_path / "tied")
    edit(tmp_path / "tied" / "config.json", quantization_config={"quant_method": "torchao"})
    (tmp_path / "tied" / "model.safetensors").unlink()
    save_file({"packed": torch.zeros(3, dtype=torch.uint8)}, tmp_path / "tied" / "model.safetensors")
    check_model(tmp_path / "tied")


def test_a_configuration_of_a_type_alone(finch, tmp_path):
    (finch / "config.json").write_text('{"model_type": "rwkv6"}')
    with pytest.raises(ValueError, match=f"{finch}: the tensors do not match Rwkv6ForCausalLM; missing: "):
        hub.export(finch, tmp_path / "out")


def test_fields_that_nothing_reads_are_listed(finch, tmp_path, caplog):
    edit(finch / "config.json", hf_token="hf_secret", wandb={"key": 1})
    assert cli.main(["export", str(finch), str(tmp_path / "out")]) == 0
    assert "but others will: hf_token, wandb." in caplog.text
    caplog.clear()
    assert cli.main(["export", str(subquad.embedded_model("finch-abc")), str(tmp_path / "trained")]) == 0
    assert "but others will" not in caplog.text


def test_the_name_of_a_directory_is_one_line_of_its_card(finch, tmp_path):
    hub.export(finch, tmp_path / "a\n# b\x1b[2J")
    card = (tmp_path / "a\n# b\x1b[2J" / "README.md").read_text()
    assert "# a_# b_[2J\n" in card and "\x1b" not in card and "\n# b" not in card


def test_links_to_other_places(finch, tmp_path):
    (tmp_path / "secret").write_text("{}")
    for name in ("README.md", "chat_template.jinja", "tokenizer.json", "model.safetensors"):
        kept = finch / name
        if kept.exists():
            kept.rename(tmp_path / name)
        kept.symlink_to(tmp_path / ("secret" if not (tmp_path / name).exists() else name))
        with pytest.raises(ValueError, match=f"{kept} is a link to {tmp_path}"):
            hub.export(finch, tmp_path / "out")
        with pytest.raises(ConversionError, match=f"{kept} is a link to {tmp_path}"):
            convert(finch, tmp_path / "out", progress=False)
        kept.unlink()
        if (tmp_path / name).exists():
            (tmp_path / name).rename(kept)
    (finch / "here").write_text("text")
    (finch / "README.md").symlink_to(finch / "here")
    check_links(finch)
    assert (tmp_path / "secret").exists()
    save_file(trainer_tensors("rwkv6", **SIZES), tmp_path / "trained.safetensors")
    (finch / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ConversionError, match=r"vocab\.txt is a link to"):
        convert(tmp_path / "trained.safetensors", tmp_path / "out", tokenizer=finch, progress=False)


def test_links_of_the_cache_of_the_hub(finch, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in finch.iterdir():
        shutil.copyfile(path, blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    hub.export(snapshot, tmp_path / "out")
    (snapshot / "README.md").symlink_to("../../../finch/config.json")
    with pytest.raises(ValueError, match="is a link to"):
        hub.export(snapshot, tmp_path / "again")


# --- what is loaded ---


def test_weights_of_other_files(finch):
    """A configuration, or an adapter, names no file that would be unpickled."""
    (finch / "adapter_model.bin").write_bytes(b"pickled")
    edit(finch / "config.json", transformers_weights="adapter_model.bin")
    with pytest.raises(ValueError, match="`transformers_weights` is not supported, got 'adapter_model.bin'"):
        subquad.Rwkv6ForCausalLM.from_pretrained(finch)


@each_model
def test_the_base_of_an_adapter(model_type, tmp_path):
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "base")
    states = load_file(tmp_path / "base" / "model.safetensors")
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(base_model_name_or_path=str(tmp_path / "base")))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    auto_class = getattr(transformers, lm_class(model_type))
    auto_class.from_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    for load in (auto_class.from_pretrained, model.load_adapter):
        with pytest.raises(ValueError, match="adapter has no adapter_model.safetensors"):
            load(tmp_path / "adapter")
    name = next(name for name in states if name.startswith(f"{model.base_model_prefix}."))
    change(tmp_path / "base", name, lambda x: None)
    with pytest.raises(ValueError, match=rf"{tmp_path / 'base'}: these weights of .* are missing: "):
        auto_class.from_pretrained(tmp_path / "adapter")


def test_whole_numbers_are_no_weights(finch):
    change(finch, "rwkv.ln_out.weight", lambda x: x.to(torch.int8))
    with pytest.raises(ValueError, match=rf"{finch}: rwkv.ln_out.weight is not floating point, but I8"):
        AutoModelForCausalLM.from_pretrained(finch)


def test_another_shape_names_the_file(finch):
    change(finch, "head.weight", lambda x: x[:7].clone())
    with pytest.raises(RuntimeError, match=rf"{finch}: head.weight has the shape \(7, 48\).*ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(finch)


def test_sizes_without_measure(finch, capsys):
    """A file of a few bytes takes neither memory nor time."""
    start = time.process_time()
    for fields, message in (
        ({"num_hidden_layers": 10**12}, "`num_hidden_layers` must be at most 4096"),
        ({"hidden_size": 10**12, "attention_hidden_size": 10**12}, "`hidden_size` must be at most"),
        ({"vocab_size": 2 * 10**9}, "describes a model with .* weights, but the files hold"),
    ):
        sound = (finch / "config.json").read_text()
        edit(finch / "config.json", **fields)
        with pytest.raises(ValueError, match=message):
            subquad.Rwkv6ForCausalLM.from_pretrained(finch)
        if "must be" in message:
            assert cli.main(["info", str(finch)]) in (0, 1)
        assert cli.main(["generate", "x", "--model", str(finch)]) == 1
        assert str(finch) in capsys.readouterr().err
        (finch / "config.json").write_text(sound)
    assert time.process_time() - start < 20


@each_model
def test_epsilons_are_finite(model_type):
    config = tiny_model(model_type).config
    names = [name for name in vars(config) if name.endswith(("eps", "epsilon"))]
    assert names
    for name in names:
        for value in (float("nan"), float("inf"), 0.0):
            with pytest.raises(Exception, match=f"`{name}` must be "):
                type(config)(**{name: value})


# --- what is converted ---


def test_a_small_file_makes_no_large_model(tmp_path):
    tensors = trainer_tensors("rwkv6", **SIZES)
    tensors["emb.weight"] = torch.zeros(1, 16).expand(10**6, 16)
    tensors["head.weight"] = torch.zeros(1, 16).expand(10**6, 16)
    torch.save(tensors, tmp_path / "trained.pth")
    with pytest.raises(ConversionError, match=r"trained.pth has .* bytes, and tensors of 128,.*: they overlap"):
        convert(tmp_path / "trained.pth", tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"Not found", "is not a PyTorch file, or is damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "is a pointer of git-lfs"),
    ],
)
def test_what_is_no_checkpoint(content, message, tmp_path):
    for name in ("model.pth", "model.safetensors"):
        (tmp_path / name).write_bytes(content)
        expected = message if name == "model.pth" or "PyTorch" not in message else "is not a valid safetensors file"
        with pytest.raises(ConversionError, match=f"{name} {expected}"):
            convert(tmp_path / name, tmp_path / "out", progress=False)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(
        ValueError, match=f"config.json {message if 'PyTorch' not in message else 'is not valid JSON'}"
    ):
        read_json(tmp_path / "config.json")


# --- directories ---

KILLED = """
import os, signal, sys
from pathlib import Path
from subquad.hub.directories import new_directory

with new_directory(Path(sys.argv[1]), 0) as directory:
    (directory / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("exists", [False, True])
def test_what_a_killed_process_left_is_removed(exists, tmp_path):
    destination = tmp_path / "new"
    if exists:
        destination.mkdir()
    done = subprocess.run([sys.executable, "-c", KILLED, destination], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    place = destination if exists else tmp_path
    assert len(list(place.glob(".subquad-*.partial"))) == 1
    check_free(destination)
    with new_directory(destination, 0) as directory:
        (directory / "file").write_text("whole")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["new", "new/file"]


def test_what_another_process_writes_stays(tmp_path):
    destination = tmp_path / "new"
    destination.mkdir()
    with new_directory(destination, 0) as directory:
        (directory / "file").touch()
        with pytest.raises(DirectoryError, match=rf"new holds {directory.name}, which another process writes to"):
            check_free(destination)
        with new_directory(tmp_path / "other", 0) as other, new_directory(tmp_path / "third", 0):
            assert other.is_dir()
    assert (destination / "file").is_file() and (tmp_path / "other").is_dir()


def test_standard_input_may_be_closed(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert cli.main(["generate", "-"]) == 2
    assert "standard input is closed" in capsys.readouterr().err
