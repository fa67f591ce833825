"""What a conversion writes, and that it writes all of it or nothing."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from rwkv_files import hub_tensors, trainer_tensors, write_trainer_file
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from subquad_conversion import ConversionError, convert
from subquad_conversion.writer import PIECE, _flat


@pytest.fixture
def source(tmp_path):
    write_trainer_file(tmp_path / "trained.pth", "rwkv6")
    return tmp_path / "trained.pth"


def hub_directory(path, model_type="rwkv6", config=None, **sizes):
    path.mkdir()
    tensors = hub_tensors(model_type, **sizes)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return tensors


def test_shards(source, tmp_path):
    convert(source, tmp_path / "one", progress=False)
    report = convert(source, tmp_path / "new/many", max_shard_size="700KB", progress=False)
    shards = sorted((tmp_path / "new/many").glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    index = json.loads((tmp_path / "new/many/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": report.bytes, "total_parameters": report.parameters}
    for shard in shards:
        tensors = load_file(shard)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 700_000
        assert set(tensors) == {name for name, file in index["weight_map"].items() if file == shard.name}

    ids = torch.arange(8)[None]
    with torch.no_grad():
        one, many = (AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits for name in ("one", "new/many"))
    assert torch.equal(one, many)


def test_stored_dtypes_are_kept_and_aligned(tmp_path):
    tensors = trainer_tensors("rwkv5", vocabulary=101)
    narrow = {name: tensor.bfloat16() if "ffn" in name else tensor for name, tensor in tensors.items()}
    narrow["emb.weight"] = narrow["emb.weight"].half()
    narrow["ln_out.weight"] = narrow["ln_out.weight"].double()
    torch.save(narrow, tmp_path / "trained.pth")
    convert(tmp_path / "trained.pth", tmp_path / "model", progress=False)
    written = load_file(tmp_path / "model/model.safetensors")
    assert torch.equal(written["rwkv.embeddings.weight"], narrow["emb.weight"])
    assert torch.equal(written["rwkv.ln_out.weight"], narrow["ln_out.weight"])
    assert written["rwkv.blocks.0.feed_forward.key.weight"].dtype == torch.bfloat16
    assert written["head.weight"].dtype == torch.float32
    header = (tmp_path / "model/model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    widths = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
    for name, entry in json.loads(header[8 : 8 + length]).items():
        if name != "__metadata__":
            assert (8 + length + entry["data_offsets"][0]) % widths[entry["dtype"]] == 0


def test_a_value_that_a_dtype_cannot_hold(tmp_path):
    tensors = trainer_tensors("rwkv5")
    tensors["blocks.1.ffn.value.weight"][3, 4] = -70000
    torch.save(tensors, tmp_path / "trained.pth")
    with pytest.raises(ConversionError, match=r"rwkv\.blocks\.1\.feed_forward\.value\.weight holds 70000"):
        convert(tmp_path / "trained.pth", tmp_path / "model", dtype="float16", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["trained.pth"]
    convert(tmp_path / "trained.pth", tmp_path / "model", dtype="bfloat16", progress=False)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3 * PIECE).reshape(3, PIECE).T,
        torch.arange(2 * PIECE + 6).reshape(2, -1).T,
        torch.arange(4 * PIECE)[::2],
        torch.arange(6 * PIECE).reshape(2, 3, PIECE).transpose(0, 1)[:, :, ::2],
        torch.arange(8 * PIECE).reshape(-1, 2, 2).permute(2, 1, 0)[:1],
        torch.arange(24).reshape(4, 6).T,
        torch.zeros(0, 3).T,
    ],
)
def test_tensors_that_are_not_contiguous_are_read_by_rows(tensor, monkeypatch):
    reshape, copied = torch.Tensor.reshape, []

    def spy(self, *shape):
        copied.append(self.numel())
        return reshape(self, *shape)

    monkeypatch.setattr(torch.Tensor, "reshape", spy)
    pieces = list(_flat(tensor))
    monkeypatch.undo()
    assert max(copied) <= PIECE and max(map(len, pieces)) <= PIECE
    assert torch.equal(torch.cat(pieces), tensor.reshape(-1))


@pytest.mark.parametrize("model_type", ["rwkv5", "rwkv6"])
def test_a_hub_model_keeps_its_configuration_except_the_sizes(model_type, tmp_path):
    config = {
        "model_type": model_type,
        "architectures": ["RwkvForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_rwkv.RwkvConfig"},
        "num_attention_heads": 64,
        "hidden_size": 192,
        "attention_hidden_size": None,
        "intermediate_size": None,
        "num_hidden_layers": 5,
        "vocab_size": 100,
        "head_size_divisor": 2,
        "layer_norm_epsilon": 1e-3,
        "context_length": 777,
        "eos_token_id": 7,
        "torch_dtype": "bfloat16",
        "model_version": "x",
        "_private": 1,
        "_name_or_path": "someone/else",
    }
    hub_directory(tmp_path / "hub", model_type, config)
    (tmp_path / "hub/generation_config.json").write_text('{"eos_token_id": 9, "top_p": 0.4, "do_sample": true}')
    report = convert(tmp_path / "hub", tmp_path / "model", progress=False)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "model").config
    assert (written.num_attention_heads, written.head_size, written.intermediate_size) == (3, 64, 320)
    assert (written.head_size_divisor, written.layer_norm_epsilon, written.context_length) == (2, 1e-3, 777)
    assert (written.eos_token_id, written.num_hidden_layers, written.dtype) == (7, 2, torch.float32)
    assert not hasattr(written, "auto_map")
    assert not {"_private", "_name_or_path"} & json.loads((tmp_path / "model/config.json").read_text()).keys()
    assert [note for note in report.notes if "tokenizer" not in note] == [
        "the configuration's `num_hidden_layers` of 5 was replaced by the tensors' 2"
    ]
    generation = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (generation.eos_token_id, generation.top_p) == (9, 0.4)


@pytest.mark.parametrize("container", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_of_a_hub_model_counts_as_its_directory(container, tmp_path):
    tensors = hub_directory(tmp_path / "hub", config={"head_size_divisor": 2, "context_length": 777})
    write_tokenizer(tmp_path / "hub")
    (tmp_path / "hub/generation_config.json").write_text('{"max_new_tokens": 5}')
    if container == "pytorch_model.bin":
        torch.save(tensors, tmp_path / "hub" / container)
    report = convert(tmp_path / "hub" / container, tmp_path / "model", progress=False)
    assert (report.config.head_size_divisor, report.config.context_length) == (2, 777)
    assert "the tokenizer was found beside the weights" in report.notes
    assert GenerationConfig.from_pretrained(tmp_path / "model").max_new_tokens == 5
    (tmp_path / "hub" / container).rename(tmp_path / "hub" / f"other-{container}")
    report = convert(tmp_path / "hub" / f"other-{container}", tmp_path / "other", progress=False)
    assert report.config.head_size_divisor == 8 and report.tokenizer is None


def test_sampling_without_do_sample_is_mended(tmp_path):
    hub_directory(tmp_path / "hub", config={})
    (tmp_path / "hub/generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.4}')
    report = convert(tmp_path / "hub", tmp_path / "model", progress=False)
    assert "`do_sample` was set in the generation configuration, because it has temperature, top_p" in report.notes
    generation = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (generation.do_sample, generation.temperature, generation.top_p) == (True, 0.7, 0.4)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": -3},
        {"num_return_sequences": 3},
        {"max_new_tokens": "many"},
        {"watermarking_config": 3},
        {"compile_config": 3},
    ],
)
def test_a_bad_generation_configuration_is_refused_before_any_weight_is_read(fields, tmp_path, monkeypatch):
    hub_directory(tmp_path / "hub", config={})
    (tmp_path / "hub/generation_config.json").write_text(json.dumps(fields))
    monkeypatch.setattr("subquad_conversion.checkpoint.Checkpoint.read", lambda *_: pytest.fail("read"))
    with pytest.raises(ConversionError, match="The generation configuration is not valid: "):
        convert(tmp_path / "hub", tmp_path / "model", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


def test_a_configuration_from_elsewhere(source, tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "rwkv6", "head_size_divisor": 4, "context_length": 8}')
    report = convert(source, tmp_path / "a", config=file, progress=False)
    assert (report.config.head_size_divisor, report.config.context_length) == (4, 8)
    report = convert(source, tmp_path / "b", config=file, head_size_divisor=1, progress=False)
    assert (report.config.head_size_divisor, report.config.context_length) == (1, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{nonsense", "not valid JSON"),
        ("3", "must hold a JSON object"),
        ('{"model_type": "rwkv5"}', "for the model type 'rwkv5', the tensors are 'rwkv6'"),
        ('{"layer_norm_epsilon": "small"}', "layer_norm_epsilon"),
        ('{"head_size_divisor": 0}', "`head_size_divisor` must be at least 1, got 0"),
    ],
)
def test_a_bad_configuration(text, message, source, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConversionError, match=message):
        convert(source, tmp_path / "model", config=file, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "trained.pth"]


def test_a_tensor_that_two_names_share_is_written_under_both(tmp_path):
    """If the configuration does not tie them."""
    shared = trainer_tensors("rwkv6")
    shared["head.weight"] = shared["emb.weight"]
    torch.save(shared, tmp_path / "shared.pth")
    convert(tmp_path / "shared.pth", tmp_path / "two", progress=False)
    written = load_file(tmp_path / "two/model.safetensors")
    assert torch.equal(written["head.weight"], written["rwkv.embeddings.weight"])


def test_an_occupied_destination_is_refused_before_any_work(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/precious").write_text("mine")
    (tmp_path / "file").write_text("mine")
    occupied, below = "exists already", r"cannot be made, because .*file is a file"
    for name, message in (("model", occupied), ("file", occupied), ("file/deep/model", below)):
        with pytest.raises(ConversionError, match=message):
            convert(tmp_path / "no such source", tmp_path / name, progress=False)
    assert (tmp_path / "model/precious").read_text() == "mine"


def test_an_empty_destination_is_filled(source, tmp_path, monkeypatch):
    """And stays the directory that it is: it may be a mount point, or where somebody works."""
    (tmp_path / "model").mkdir(mode=0o750)
    before = (tmp_path / "model").stat()
    renamed, rename = [], Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: renamed.append(to.name) or rename(self, to))
    monkeypatch.chdir(tmp_path / "model")
    report = convert(source, ".", progress=False)
    after = (tmp_path / "model").stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert sorted(path.name for path in Path.cwd().iterdir()) == report.files == sorted(renamed)
    assert renamed[-1] == "config.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "trained.pth"]


def test_a_failure_while_a_destination_is_filled_leaves_it_empty(source, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    rename = Path.rename

    def fail(self, to):
        if to == tmp_path / "model/config.json":
            assert (tmp_path / "model/model.safetensors").exists()
            raise OSError("no")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"):
        convert(source, tmp_path / "model", progress=False)
    assert list((tmp_path / "model").iterdir()) == []


def test_what_came_into_a_destination_meanwhile_is_kept(source, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(
        "subquad_conversion.targets.write_shards", lambda *_: (tmp_path / "model/theirs").write_text("")
    )
    with pytest.raises(ConversionError, match="Something else was written"):
        convert(source, tmp_path / "model", progress=False)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["theirs"]


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_midway_leaves_nothing(error, exists, source, tmp_path, monkeypatch):
    calls = []

    def fail(self, name):
        calls.append(name)
        if len(calls) == 20:
            raise error
        return read(self, name)

    from subquad_conversion.checkpoint import Checkpoint

    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", fail)
    if exists:
        (tmp_path / "deep/er/model").mkdir(parents=True)
    with pytest.raises(type(error)):
        convert(source, tmp_path / "deep/er/model", progress=False)
    if exists:
        (tmp_path / "deep/er/model").rmdir()  # raises where it is not empty
    assert (tmp_path / "deep").exists() == exists
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_a_full_disk_is_noticed_before_writing(source, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(ConversionError, match=r"need 3,075,072 bytes; .* has 10 free"):
        convert(source, tmp_path / "model", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["trained.pth"]
    (tmp_path / "model").mkdir()
    with pytest.raises(ConversionError, match=r"bytes; .*/model has 10 free"):
        convert(source, tmp_path / "model", progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "`dtype` must be one of keep, float32, bfloat16, float16; got 'int8'"),
        ({"head_size_divisor": 0}, "`head_size_divisor` must be at least 1, got 0"),
        ({"max_shard_size": "5 pounds"}, "got '5 pounds'"),
        ({"max_shard_size": 0}, "at least one byte, got 0"),
        ({"tokenizer": "sentencepiece"}, "rwkv-world, bytes, none or a directory; got 'sentencepiece'"),
        ({"tokenizer": "rwkv-world"}, "RWKV World tokenizer has .* ids, the model a vocabulary of 100"),
    ],
)
def test_wrong_arguments(arguments, message, source, tmp_path):
    with pytest.raises(ConversionError, match=message):
        convert(source, tmp_path / "model", progress=False, **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["trained.pth"]


# --- tokenizers ---


@pytest.mark.parametrize("vocabulary", [65530, 65536])
@pytest.mark.parametrize("choice", ["auto", "rwkv-world"])
def test_the_world_tokenizer(vocabulary, choice, tmp_path):
    write_trainer_file(tmp_path / "a.pth", "rwkv6", layers=1, heads=1, head_size=8, vocabulary=vocabulary)
    report = convert(tmp_path / "a.pth", tmp_path / "model", tokenizer=choice, progress=False)
    assert {"tokenizer.json", "tokenizer_config.json", "rwkv_vocab_v20230424.txt"} <= set(report.files)
    assert report.tokenizer == "RWKV World"
    assert any("chosen by the vocabulary" in note for note in report.notes) == (choice == "auto")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("Hällo, wörld")["input_ids"]) == "Hällo, wörld"
    assert report.config.eos_token_id == tokenizer.eos_token_id == 0


def test_the_byte_tokenizer(tmp_path):
    write_trainer_file(tmp_path / "a.pth", "rwkv5", layers=1, heads=1, head_size=8, vocabulary=128)
    report = convert(tmp_path / "a.pth", tmp_path / "model", progress=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert report.tokenizer == "bytes"
    assert tokenizer.decode(tokenizer("X:1\nK:D\n")["input_ids"], skip_special_tokens=True) == "X:1\nK:D\n"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(tokenizer, name) is not None:
            assert getattr(report.config, name) == getattr(tokenizer, name)


def write_tokenizer(directory, **config):
    from tokenizers import Tokenizer, models

    directory.mkdir(exist_ok=True)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(directory / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("vocabulary", "title"), [(65536, "RWKV World"), (100, None)])
def test_a_tokenizer_that_is_code_is_not_copied(vocabulary, title, tmp_path):
    hub_directory(tmp_path / "hub", config={}, layers=1, heads=1, head_size=8, vocabulary=vocabulary)
    write_tokenizer(tmp_path / "hub", auto_map={"AutoTokenizer": ["hf_rwkv_tokenizer.Rwkv6Tokenizer", None]})
    report = convert(tmp_path / "hub", tmp_path / "model", progress=False)
    assert report.tokenizer == title
    assert any("code of its own" in note for note in report.notes)
    if title:
        assert "auto_map" not in json.loads((tmp_path / "model/tokenizer_config.json").read_text())


def test_a_tokenizer_that_is_code_is_refused_where_it_is_named(source, tmp_path):
    write_tokenizer(tmp_path / "elsewhere", auto_map={"AutoTokenizer": ["code.Tokenizer", None]})
    with pytest.raises(ConversionError, match=r"elsewhere needs code of its own"):
        convert(source, tmp_path / "model", tokenizer=tmp_path / "elsewhere", progress=False)
    assert not (tmp_path / "model").exists()


def test_a_tokenizer_from_a_directory(source, tmp_path):
    write_tokenizer(tmp_path / "elsewhere")
    convert(source, tmp_path / "model", tokenizer=str(tmp_path / "elsewhere"), progress=False)
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("b")["input_ids"] == [1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConversionError, match="holds no tokenizer"):
        convert(source, tmp_path / "other", tokenizer=tmp_path / "empty", progress=False)


# --- memory ---

MEASURE = dedent(
    """
    import json, sys, threading, time
    from subquad_conversion import convert, recognise

    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    def watch():
        global peak
        while running:
            peak = max(peak, anonymous())
            time.sleep(0.001)

    for source, dest, dtype in json.load(sys.stdin):
        recognise(source)  # so that everything is imported
        before = anonymous()
        peak, running = before, True
        thread = threading.Thread(target=watch)
        thread.start()
        convert(source, dest, dtype=dtype, max_shard_size="40MB", progress=False, tokenizer="none")
        running = False
        thread.join()
        print(peak - before)
    """
)


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of the process's memory")
def test_memory_stays_below_a_shard(tmp_path):
    """Beyond the mapped source; embeddings and head have 32 MB each, so that holding a tensor would show."""
    sizes = {"layers": 1, "heads": 4, "vocabulary": 32768}
    write_trainer_file(trained := tmp_path / "model.pth", "rwkv6", **sizes)
    hub_directory(hub := tmp_path / "hub", **sizes)
    runs = [
        (str(source), str(tmp_path / f"{source.name}-{dtype}"), dtype)
        for source, dtype in ((trained, "keep"), (trained, "bfloat16"), (hub, "keep"), (hub, "float16"))
    ]
    process = subprocess.run(
        [sys.executable, "-c", MEASURE], input=json.dumps(runs), capture_output=True, text=True, check=True
    )
    for (source, dest, dtype), peak in zip(runs, process.stdout.split(), strict=True):
        largest = max(file.stat().st_size for file in Path(dest).glob("*.safetensors"))
        print(f"{Path(source).name} {dtype}: peak {int(peak) / 1e6:.1f} MB, largest shard {largest / 1e6:.1f} MB")
        assert largest > 30e6
        assert int(peak) < largest / 2
