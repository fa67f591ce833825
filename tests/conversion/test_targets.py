"""Models that go out again: into the formats of trainers, runtimes and other packages."""

import ast
import json
import os
import re
import struct
import subprocess
import tracemalloc
from pathlib import Path

import gguf
import pytest
import torch
from format_cases import CASES
from rwkv7_files import UNUSED, trainer_tensors
from rwkv_files import gguf_tensors, write_trainer_file
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import subquad
from subquad_cli import main
from subquad_conversion import FORMATS, ConversionError, convert, recognise
from subquad_conversion.gguf_files import LISTS, TOKENIZER, TYPES, open_gguf
from subquad_tokenizers import WORLD_CHAT_TEMPLATE, RwkvWorldTokenizerFast


TARGETS = {known.name: known.target for known in FORMATS if known.target}
FILES = ("pth", "st", "gguf")
each_target = pytest.mark.parametrize("case", [CASES[name] for name in TARGETS], ids=list(TARGETS))
SIZES = {"layers": 2, "heads": 2, "head_size": 64, "intermediate": 224}


def made(case, tmp_path, **options):
    """The directory of this package that the case's file becomes."""
    source = case.write_directory(tmp_path / "source")
    convert(source, tmp_path / "model", tokenizer="none", progress=False, **options)
    return tmp_path / "model"


def place(case, tmp_path):
    to = TARGETS[case.format]
    return tmp_path / (f"out.{to}" if to in FILES else "out")


def stored(path):
    """The tensors of what was written, as float32 if they are quantised."""
    if path.suffix == ".gguf":
        return {x.name: read_gguf(x) for x in gguf.GGUFReader(path).tensors}
    return torch.load(path, weights_only=True) if path.suffix == ".pth" else load_file(weights(path))


def weights(path):
    return path / "model.safetensors" if path.is_dir() else path


def read_gguf(tensor):
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    return values.reshape([int(length) for length in reversed(tensor.shape)])


def finch(tmp_path, vocabulary=65536, **sizes):
    """A Finch with the World vocabulary, in a directory of this package."""
    write_trainer_file(tmp_path / "finch.pth", "rwkv6", vocabulary=vocabulary, **SIZES | sizes)
    convert(tmp_path / "finch.pth", tmp_path / "finch", progress=False)
    return tmp_path / "finch"


def test_the_table_of_the_site_says_what_goes_out():
    page = (Path(__file__).parents[2] / "docs/how-to/formats.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.count("|") == 4]
    names = {"Eagle": "rwkv5", "Finch": "rwkv6", "Goose": "rwkv7", "RWKV-7a, 7b": "rwkv7_deep_embed"}
    for name, model_type in names.items():
        (out,) = (row[3] for row in rows if row[1].strip() == name)
        assert set(re.findall(r"`(\w+)`", out)) == {x.target for x in FORMATS if x.model_type == model_type} - {None}
    assert {known.model_type for known in FORMATS if known.target} == set(names.values())


# --- tensors ---


@pytest.mark.fast
@each_target
def test_the_tensors_are_those_of_the_format(case, tmp_path):
    """What others make is what is written, tensor by tensor; it is recognised, and converts back to what it was."""
    out = place(case, tmp_path)
    model = made(case, tmp_path)
    report = convert(model, out, to=TARGETS[case.format], progress=False)
    assert report.directory / report.files[-1] == (out / report.files[-1] if out.is_dir() else out)
    half = torch.float16 if out.suffix == ".st" else torch.float32
    written = stored(out)
    unused = {name: x for name, x in written.items() if name not in case.ours}
    assert not any(x.any() for x in unused.values())
    expected = {name: case.tensors[name] for name in case.ours}
    assert written.keys() - unused.keys() == expected.keys()
    for name, x in expected.items():
        assert written[name].dtype == half and torch.equal(written[name], x.to(half)), name
    assert recognise(out).format == case.format

    convert(out, tmp_path / "back", tokenizer="none", progress=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == case.written.keys()
    assert all(torch.equal(back[name], x.to(half)) for name, x in case.written.items())


@pytest.mark.parametrize("to", ["pth", "hub", "gguf"])
def test_the_first_block_of_goose_has_what_nothing_reads(to, tmp_path):
    case = CASES["rwkv7-gguf"]
    out = tmp_path / (f"out.{to}" if to in FILES else "out")
    convert(made(case, tmp_path), out, to=to, progress=False)
    names = [f"blk.0.time_mix_v{i}.weight" for i in range(3)]
    if to != "gguf":
        names = [name if to == "pth" else f"rwkv7.{name}" for name in UNUSED]
    # llama.cpp wants the rank of the in-context learning rate, 2.
    shapes = [(128,), (2, 128), (128, 2)] if to == "gguf" else [(1, 1, 128), (128, 3), (3, 128)]
    assert [tuple(stored(out)[name].shape) for name in names] == shapes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_trainers_file_has_the_dtype_of_the_model(dtype, tmp_path):
    case = CASES["rwkv6-trainer"]
    model = made(case, tmp_path, dtype=dtype)
    for name, options in (("kept", {}), ("cast", {"dtype": "float32"})):
        convert(model, tmp_path / f"{name}.pth", to="pth", progress=False, **options)
        written = torch.load(tmp_path / f"{name}.pth", weights_only=True)
        for key, x in case.tensors.items():
            x = x.to(getattr(torch, dtype))
            assert torch.equal(written[key], x.float() if options else x), key
        size = sum(x.nbytes for x in written.values())
        # Each tensor alone, not the mapped file that it is part of.
        assert size < os.path.getsize(tmp_path / f"{name}.pth") < size + 400 * len(written)


@pytest.mark.parametrize("target", ["rwkv6-trainer", "rwkv6-fla", "rwkv7-hub"])
def test_a_tied_head_is_written(target, tmp_path):
    case = CASES[target]
    tensors = case.tensors
    tensors[case.head] = tensors[case.embeddings].clone()
    source = case.write_directory(tmp_path / "source", tensors, tie_word_embeddings=True)
    convert(source, tmp_path / "model", tokenizer="none", progress=False)
    out = place(case, tmp_path)
    report = convert(tmp_path / "model", out, to=TARGETS[target], progress=False)
    assert "the head, which is tied to the embeddings, was written as a tensor of its own" in report.notes
    assert torch.equal(stored(out)[case.head], tensors[case.embeddings])
    if out.is_dir():
        assert AutoModelForCausalLM.from_pretrained(out).config.tie_word_embeddings is False


@pytest.mark.parametrize("target", ["rwkv6-fla", "rwkv7-fla", "rwkv5-hub", "rwkv7-hub"])
def test_a_directory_computes_the_same(target, tmp_path):
    case = CASES[target]
    ids = torch.arange(20)[None]
    logits = []
    convert(made(case, tmp_path), tmp_path / "out", to=TARGETS[target], progress=False)
    for directory in ("model", "out"):
        model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / directory, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["mismatched_keys"]
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(*logits)


def test_ranks_that_code_of_published_repositories_does_not_know(tmp_path):
    report = convert(finch(tmp_path, vocabulary=100), tmp_path / "out", to="hub", progress=False)
    assert any("takes the two low ranks for (32, 64) and cannot load (7, 11)" in note for note in report.notes)
    (tmp_path / "known").mkdir()
    known = finch(tmp_path / "known", vocabulary=100, ranks=(32, 64))
    assert not any("rank" in note for note in convert(known, tmp_path / "again", to="hub", progress=False).notes)


# --- GGUF ---


def test_the_header_of_a_gguf_file(tmp_path):
    report = convert(finch(tmp_path, heads=1), tmp_path / "finch.gguf", to="gguf", gguf_type="Q8_0", progress=False)
    assert (report.dtype, report.files) == ("Q8_0", ["finch.gguf"])
    reader = gguf.GGUFReader(tmp_path / "finch.gguf")
    entries = {name: field.contents() for name, field in reader.fields.items()}
    numbers = {
        "vocab_size": 65536,
        "context_length": 2**20,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 224,
        "attention.head_count": 0,
        "wkv.head_size": 64,
        "time_mix_extra_dim": 7,
        "time_decay_extra_dim": 11,
    }
    assert {name: entries[f"rwkv6.{name}"] for name in numbers} == numbers
    assert entries["rwkv6.attention.layer_norm_epsilon"] == pytest.approx(1e-5)
    assert "rwkv6.rescale_every_n_layers" not in entries
    assert entries["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0

    tokenizer, tokens = RwkvWorldTokenizerFast(), entries["tokenizer.ggml.tokens"]
    assert entries["tokenizer.ggml.model"] == "rwkv" and len(tokens) == 65536
    for index in (1, 11, 33, 257, 261, 40000, 65529):
        assert ast.literal_eval(f'b"""{tokens[index]}"""') == tokenizer.decode_bytes([index])
    kinds = entries["tokenizer.ggml.token_type"]
    assert (kinds[0], kinds[1], kinds[65529], kinds[65530]) == (3, 1, 1, 5)  # control, normal, unused
    special = {name: entries[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot")}
    assert special == {"bos": 0, "eos": 0, "eot": 261}
    assert entries["tokenizer.chat_template"] == WORLD_CHAT_TEMPLATE


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_weights(kind, tmp_path):
    """Linear layers and embeddings have the type, all else is float32; what comes back is within its rounding."""
    model = finch(tmp_path, vocabulary=100)
    convert(model, tmp_path / "out.gguf", to="gguf", gguf_type=kind, progress=False)
    for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors:
        matrix = len(tensor.shape) == 2 and not any(part in tensor.name for part in ("_w1", "_w2", "first"))
        assert tensor.tensor_type.name == (kind if matrix else "F32"), tensor.name
    report = convert(tmp_path / "out.gguf", tmp_path / "back", progress=False)
    back, ours = (load_file(path / "model.safetensors") for path in (tmp_path / "back", model))
    bits = {"F32": 24, "F16": 11, "BF16": 8, "Q8_0": 7.8, "Q5_1": 5, "Q5_0": 4, "Q4_1": 4, "Q4_0": 3}[kind]
    for name, x in ours.items():
        blocks = x.reshape(-1, 32 if kind.startswith("Q") else 1)
        error = (back[name].float() - x).reshape(blocks.shape).abs()
        if kind.endswith("_1"):  # a scale and the smallest number of 32
            bound = (blocks.amax(1) - blocks.amin(1)) / 2**bits
        else:
            bound = blocks.abs().amax(1) / 2**bits
        assert (error <= 1.02 * bound[:, None] + 1e-7).all(), name
    assert report.config.head_size_divisor == 8 and report.config.layer_norm_epsilon == 1e-5
    assert not any("assumed" in note for note in report.notes)


def test_rows_that_a_type_does_not_divide(tmp_path):
    report = convert(
        finch(tmp_path, vocabulary=100, intermediate=72),
        tmp_path / "out.gguf",
        to="gguf",
        gguf_type="Q8_0",
        progress=False,
    )
    assert (
        "2 tensors, such as blk.0.channel_mix_value.weight, are F16: Q8_0 does not divide their rows" in report.notes
    )


def test_a_file_of_llama_cpp_itself(tmp_path):
    """Its converter halves weights after every so many blocks, and older ones wrote the token shifts apart."""
    tensors = gguf_tensors(**SIZES, vocabulary=100, ranks=(7, 11))
    shifts = tensors.pop("blk.1.time_mix_lerp_fused.weight")
    tensors |= {f"blk.1.time_mix_lerp_{x}.weight": shift.flatten() for x, shift in zip("wkvrg", shifts, strict=True)}
    writer = gguf.GGUFWriter(tmp_path / "finch.gguf", "rwkv6")
    writer.add_rescale_every_n_layers(1)
    writer.add_uint32("rwkv6.wkv.head_size", 64)
    for name, x in tensors.items():
        halved = name in ("blk.1.time_mix_output.weight", "blk.1.channel_mix_value.weight")
        writer.add_tensor(name, (x / 2 if halved else x).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(tmp_path / "finch.gguf", tmp_path / "model", progress=False)
    found, expected = (
        load_file(path / "model.safetensors") for path in (tmp_path / "model", finch(tmp_path, vocabulary=100))
    )
    assert found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())


def test_damaged_gguf_files(tmp_path):
    convert(finch(tmp_path, vocabulary=100), tmp_path / "out.gguf", to="gguf", progress=False)
    whole = (tmp_path / "out.gguf").read_bytes()
    damaged = [whole[:kept] for kept in (0, 3, 20, 100, 1000, len(whole) // 2, len(whole) - 5000)]
    damaged.append(whole[:8] + (2**60).to_bytes(8, "little") + whole[16:])  # the number of tensors
    at = whole.index(b"tokenizer.ggml.model")
    # An entry that says to be a list of 2 ** 60 bytes.
    damaged.append(whole[: at + 20] + b"\x09\0\0\0\0\0\0\0" + (2**60).to_bytes(8, "little") + whole[at + 40 :])
    for number, data in enumerate(damaged):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data)
        with pytest.raises(ConversionError, match=path.name):
            convert(path, tmp_path / "model", progress=False)
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "rwkv6")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConversionError, match=r"is one of 3 parts; `llama-gguf-split --merge FIRST.gguf OUT.gguf`"):
        recognise(tmp_path / "part.gguf")


def header(fields=(), tensors=()):
    """The bytes of a GGUF file without data: names and what follows them."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(fields))]
    parts += [struct.pack("<Q", len(name)) + name + rest for name, rest in (*fields, *tensors)]
    return b"".join(parts)


@pytest.mark.parametrize(
    ("kind", "entry"),
    [(0, b"\x07"), (8, struct.pack("<Q", 0)), (8, struct.pack("<Q", 1) + b"x"), (12, b"\0" * 8)],
    ids=["bytes", "empty", "strings", "numbers"],
)
def test_lists_of_a_gguf_file_take_no_memory(kind, entry, tmp_path):
    """A list is skipped, not made into objects. One that is read has a limit."""
    path, number = tmp_path / "out.gguf", 2**17
    entries = struct.pack("<IIQ", 9, kind, number) + number * entry
    tensor = (b"x", struct.pack("<IQIQ", 1, 8, 0, 0))
    path.write_bytes(header([(b"a", entries), (b"b", entries)], [tensor]) + bytes(128))
    open_gguf(path)  # imports
    tracemalloc.start()
    tensors, fields, _ = open_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list(tensors) == ["x"] and not {"a", "b"} & {*fields}
    assert peak < 2**20


@pytest.mark.fast
def test_gguf_files_that_are_not_what_they_say(tmp_path):
    path = tmp_path / "out.gguf"
    text = struct.pack("<IQ", 8, 4) + b"rwkv"
    tokens = struct.pack("<IIQ", 9, 8, 2**18 + 1) + (2**18 + 1) * struct.pack("<Q", 0)
    vector = struct.pack("<IQIQ", 1, 1024, 0, 0)
    for content, message in (
        (header([(b"a", struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 0, 0))]), "it has a list of lists"),
        (header([(b"a", struct.pack("<IIQ", 9, 8, 2**60))]), "out.gguf is not a GGUF file, or is damaged"),
        (header([(b"a", struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 2**62))]), "it ends too early"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "it has 1,099,511,627,776 entries"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "it has 1,099,511,627,776 tensors"),
        (header([], [(b"%d" % n, vector) for n in range(40)]) + bytes(5000), "they overlap, as in no model"),
        (
            header([(TOKENIZER.encode(), text), (LISTS[0].encode(), tokens)]) + bytes(64),
            "is no list of at most 262,144",
        ),
        (header([(TOKENIZER.encode(), text), (LISTS[0].encode(), text)]) + bytes(64), "is no list of at most 262,144"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConversionError, match=message):
            open_gguf(path)[2]()


@pytest.mark.fast
def test_tensors_that_share_bytes(tmp_path):
    """safetensors refuses it by itself; a file of PyTorch may have tied weights, and no more."""
    path = tmp_path / "out.safetensors"
    text = json.dumps({n: {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]} for n in "abcdefgh"}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
    with pytest.raises(ConversionError, match=r"out\.safetensors is not a valid safetensors file"):
        recognise(path)
    x = torch.zeros(1000)
    torch.save({f"{n}": x for n in range(9)}, tmp_path / "out.pth")
    with pytest.raises(ConversionError, match="they overlap, as in no model"):
        recognise(tmp_path / "out.pth")


def test_loading_a_gguf_file_says_how(tmp_path):
    convert(subquad.embedded_model("finch-abc"), tmp_path / "out.gguf", to="gguf", progress=False)
    with pytest.raises(ValueError, match=r"`subquad convert out.gguf OUT` makes a directory that loads"):
        subquad.Rwkv6ForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf")
    with pytest.raises(ValueError, match=r"`subquad convert FILE.gguf OUT` makes a directory that loads"):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf")


def test_heads_of_another_size(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "out.gguf", "rwkv7")
    writer.add_wkv_head_size(32)
    for name, x in CASES["rwkv7-gguf"].tensors.items():
        writer.add_tensor(name, x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConversionError, match=r"`rwkv7.wkv.head_size` is 32; only 64 is supported"):
        recognise(tmp_path / "out.gguf")


LLAMA = os.environ.get("SUBQUAD_LLAMA_SIMPLE")


@pytest.mark.skipif(not LLAMA, reason="SUBQUAD_LLAMA_SIMPLE does not name llama.cpp's `llama-simple`")
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ["finch-abc", "finch", "goose"])
def test_llama_cpp_writes_the_same(name, kind, tmp_path):
    """64 greedy tokens. The rounding of random weights changes what comes next, so quantised ones only have to run."""
    prompt = "X:1\nT:Reel\nM:4/4\nK:D\n"
    if name == "finch-abc":
        path = subquad.embedded_model(name)
    elif name == "finch":
        path = finch(tmp_path, layers=7, heads=4)
    else:
        tensors = trainer_tensors(layers=7, heads=4, vocabulary=65536, intermediate=1024, ranks=(64, 64, 32, 128))
        torch.save(tensors, tmp_path / "goose.pth")
        path = tmp_path / "goose"
        convert(tmp_path / "goose.pth", path, progress=False)
    convert(path, tmp_path / "out.gguf", to="gguf", gguf_type=kind, progress=False)
    command = [LLAMA, "-m", str(tmp_path / "out.gguf"), "-n", "64", prompt]
    written = subprocess.run(command, capture_output=True, check=True, timeout=300).stdout.rstrip(b"\n")

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=64, do_sample=False)[0]
    assert len(out) == ids.shape[1] + 64
    text = tokenizer.decode(out).encode()
    if name != "finch-abc":
        text = RwkvWorldTokenizerFast().decode_bytes(out.tolist())
    if kind == "F32" or name == "finch-abc":
        assert written == text.rstrip(b"\n")
    else:
        assert written.startswith(prompt.encode()) and len(written) > len(prompt)


# --- what cannot be written ---


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        ({"to": "onnx"}, "out", "`to` must be one of directory, fla, hub, pth, st, gguf; got 'onnx'"),
        ({"to": "pth", "gguf_type": "F16"}, "out.pth", "`gguf_type` does not apply to pth; it is for gguf"),
        (
            {"to": "gguf", "gguf_type": "Q4_K"},
            "out.gguf",
            r"only llama.cpp makes: .*`llama-quantize IN.gguf OUT.gguf Q4_K`",
        ),
        ({"to": "gguf", "gguf_type": "Q4_K_M"}, "out.gguf", "`llama-quantize IN.gguf OUT.gguf Q4_K_M`"),
        (
            {"to": "gguf", "gguf_type": "q8"},
            "out.gguf",
            "`gguf_type` must be one of F32, F16, BF16, Q8_0, .*; got 'q8'",
        ),
        ({"to": "gguf", "dtype": "float16"}, "out.gguf", "`dtype` does not apply to gguf, got 'float16'"),
        ({"to": "st", "dtype": "float32"}, "out.st", "`dtype` must be float16 for st, got 'float32'"),
        ({"to": "st", "tokenizer": "bytes"}, "out.st", "`tokenizer` does not apply to st"),
        ({"to": "pth", "max_shard_size": 10}, "out.pth", "`max_shard_size` does not apply to pth, which is one file"),
        ({"to": "pth"}, "out.bin", r"out.bin must have a name that ends in \.pth"),
        ({"to": "pth"}, "there.pth", "there.pth exists already"),
        ({"to": "pth"}, "there.pth/out.pth", r"out.pth cannot be made, because .*there.pth is a file"),
    ],
)
def test_arguments_that_do_not_fit(options, name, message, tmp_path):
    (tmp_path / "there.pth").touch()
    with pytest.raises(ConversionError, match=message):
        convert(subquad.embedded_model("finch-abc"), tmp_path / name, progress=False, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["there.pth"]


@pytest.mark.parametrize(
    ("model", "to", "message"),
    [
        ("avey-abc", "pth", "a model of the type avey cannot be written so: only our own directory is possible"),
        ("raven-abc", "gguf", "a model of the type raven cannot be written so: only our own directory is possible"),
        ("eagle-abc", "gguf", "a model of the type rwkv5 cannot be written so: hub, pth, st are possible"),
    ],
)
def test_formats_that_an_architecture_does_not_have(model, to, message, tmp_path, capsys):
    assert main(["convert", str(subquad.embedded_model(model)), str(tmp_path / f"out.{to}"), "--to", to]) == 2
    assert f"--to is '{to}', but {message}." in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["gguf", "st", "pth"])
def test_an_epsilon_that_others_do_not_know(to, tmp_path):
    case = CASES["rwkv6-trainer"]
    model, out = made(case, tmp_path, head_size_divisor=1), tmp_path / f"out.{to}"
    if to == "pth":
        notes = convert(model, out, to=to, progress=False).notes
        assert notes == [
            "`head_size_divisor` is not stored in the tensors: readers of the file must know that it is 1"
        ]
        return
    with pytest.raises(ConversionError, match="`head_size_divisor` is 1; .* has 8 written into its code"):
        convert(model, out, to=to, progress=False)
    assert not out.exists()


def test_heads_that_others_do_not_know(tmp_path):
    case = CASES["rwkv7-trainer"]
    model = made(case, tmp_path)
    for to, runtime in (("st", "web-rwkv"), ("gguf", "llama.cpp")):
        with pytest.raises(ConversionError, match=f"`head_dim` is 4 and `norm_eps` 1e-05; {runtime} has an epsilon"):
            convert(model, tmp_path / f"out.{to}", to=to, progress=False)


def test_weights_that_float16_cannot_represent(tmp_path):
    case = CASES["rwkv6-trainer"]
    tensors = {name: x.clone() for name, x in case.tensors.items()}
    tensors["blocks.1.ffn.key.weight"][0, 0] = 7e4
    source = case.write_file(tmp_path / "trained.pth", tensors)
    for to, options in (("st", {}), ("gguf", {"gguf_type": "F16"})):
        with pytest.raises(ConversionError, match="channel_mix_key|ffn.key.weight holds 70000, which float16 cannot"):
            convert(source, tmp_path / f"out.{to}", to=to, progress=False, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["trained.pth"]


def test_diverged_weights_are_not_written(tmp_path):
    case = CASES["rwkv6-trainer"]
    tensors = {name: x.clone() for name, x in case.tensors.items()}
    tensors["blocks.1.ffn.key.weight"][0, 0] = torch.nan
    save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "trained.safetensors")
    for to in (*FILES, "directory"):
        with pytest.raises(ConversionError, match="holds NaN or infinite numbers"):
            convert(tmp_path / "trained.safetensors", tmp_path / f"out.{to}", to=to, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["trained.safetensors"]


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    path = subquad.embedded_model("finch-abc")
    assert main(["convert", str(path), str(tmp_path / "abc.gguf"), "--to", "gguf", "--gguf-type", "Q8_0"]) == 0
    text = capsys.readouterr().out
    assert "in Q8_0" in text and "  abc.gguf\n" in text and f"Tokenizer: copied from {path}." in text
    assert main(["convert", str(tmp_path / "abc.gguf"), str(tmp_path / "back")]) == 0
    assert "Recognised Finch (RWKV-6.0), GGUF: 4 layers of 128" in capsys.readouterr().out
    assert main(["convert", str(path), str(tmp_path / "x.gguf"), "--to", "gguf", "--gguf-type", "IQ3_S"]) == 2
    assert "--gguf-type IQ3_S is one of those that only llama.cpp makes" in capsys.readouterr().err
