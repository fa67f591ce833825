"""What every source format promises: to be recognised, converted exactly, and refused with reasons if damaged."""

import json
import re

import pytest
import torch
from byte_level_bpe import TEXT, write_byte_level_bpe
from format_cases import (
    CASES,
    EMBEDDING_CASES,
    each_case,
    each_type,
    each_type_with_head,
    load_whole,
    make_models_once,
    notes_of,
)
from safetensors.torch import load_file
from transformers import AutoTokenizer

import subquad
from subquad_cli import main
from subquad_conversion import FORMATS, ConversionError, convert, recognise
from subquad_conversion.checkpoint import TensorInfo
from subquad_conversion.registry import find_format, open_source


# Shapes that a tensor does not have, from the one that it has. Vectors with axes of length 1 may have these anywhere.
RESHAPED = {
    "no axis": lambda shape: (),
    "one row": lambda shape: (1, *shape[1:]) if shape else shape,
    "no row": lambda shape: (0, *shape[1:]) if shape else shape,
    "too many rows": lambda shape: (2**62, *shape[1:]) if shape else shape,
    "transposed": lambda shape: shape[::-1] if len(shape) == 2 else shape,
}


def each_case_with(name, first, second):
    """Every second case has the second value."""
    values = [(case, (first, second)[n % 2]) for n, case in enumerate(CASES.values())]
    return pytest.mark.parametrize(("case", name), values, ids=list(CASES))


def infos(case):
    return {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in case.tensors.items()}


def known_format(case):
    return next(known for known in FORMATS if known.name == case.format)


# --- recognition ---


@pytest.mark.fast
@each_case_with("container", ".pth", ".safetensors")
def test_recognised_by_its_tensors(case, container, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(case.fields))
    half = {name: x.bfloat16() if x.is_floating_point() else x for name, x in case.tensors.items()}
    path = "model.safetensors" if container == ".safetensors" else "pytorch_model.bin"
    found = recognise(case.write_file(tmp_path / path, half))
    assert (found.format, found.model_type, found.dtype) == (case.format, case.model_type, "bfloat16")
    assert found.sizes.items() >= case.sizes.items()
    assert found.parameters == sum(x.numel() for x in case.tensors.values())


@each_case
def test_no_other_format_claims_it(case):
    assert [known.name for known in FORMATS if known.matches(infos(case))] == [case.format]


@each_case_with("wrapper", "_orig_mod.", "_orig_mod.module.")
def test_wrapped_names(case, wrapper, tmp_path):
    """As data parallel and compiled models are saved, and those of which parts are compiled."""
    prefix, last = case.block
    part = f"{prefix}{last}."
    wrapped = {wrapper + name.replace(part, f"{part}_orig_mod.", 1): x for name, x in case.tensors.items()}
    with open_source(case.write_file(tmp_path / "trained.pth", wrapped)) as checkpoint:
        assert find_format(checkpoint).name == case.format
        assert checkpoint.tensors.keys() == case.tensors.keys()
        assert all(torch.equal(checkpoint.read(name), x) for name, x in case.tensors.items())


@each_type
def test_a_training_state(case, tmp_path):
    torch.save({"model": case.tensors, "step": 1}, tmp_path / "state.pt")
    with pytest.raises(ConversionError, match="It is a training state: save its 'model' entry to a file of its own"):
        recognise(tmp_path / "state.pt")


# --- conversion ---


@each_case_with("dtype", "keep", "bfloat16")
def test_round_trip(case, dtype, tmp_path):
    """Every tensor is written under our name, the model loads whole, and what is written converts to itself."""
    (tmp_path / "config.json").write_text(json.dumps(case.fields))
    source = case.write_file(tmp_path / "trained.pth")
    report = convert(source, tmp_path / "model", config=tmp_path / "config.json", dtype=dtype, progress=False)
    assert not any("replaced" in note for note in report.notes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model", "trained.pth"]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == report.files
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["model_type"] == case.model_type
    assert config["dtype"] == report.dtype == ("bfloat16" if dtype == "bfloat16" else "float32")

    written = load_file(tmp_path / "model/model.safetensors")
    expected = {name: x.bfloat16() if dtype == "bfloat16" else x for name, x in case.written.items()}
    assert written.keys() == expected.keys()
    for name, x in expected.items():
        assert written[name].dtype == x.dtype and torch.equal(written[name], x), name
    assert report.parameters == sum(x.numel() for x in expected.values())
    assert report.bytes == sum(x.nbytes for x in expected.values())
    loaded = load_whole(tmp_path / "model", case.model_type)
    assert config["architectures"] == [type(loaded).__name__]

    if case.again is None:
        return
    again = convert(tmp_path / "model", tmp_path / "again", progress=False)
    assert again.recognised.format == case.again and notes_of(again) == []
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


@each_case
def test_a_source_directory(case, tmp_path, capsys):
    """Its configuration and, if it is a language model, its tokenizer come along; the command says what was found."""
    copied = case.text is None and case not in EMBEDDING_CASES
    source = case.write_directory(tmp_path / "source", auto_map={"AutoModel": "modeling.Model"})
    (source / "modeling.py").write_text("raise SystemExit\n")
    expected = write_byte_level_bpe(source).encode(TEXT).ids
    options = [] if copied else ["--tokenizer", "none"]
    assert main(["convert", str(source), str(tmp_path / "model"), *options]) == 0
    text = capsys.readouterr().out
    assert f"Recognised {case.described}" in text
    assert "auto_map" not in json.loads((tmp_path / "model/config.json").read_text())
    assert not (tmp_path / "model/modeling.py").exists()
    if not copied:
        assert "Tokenizer: none." in text
        return
    assert f"Tokenizer: copied from {source}." in text
    assert AutoTokenizer.from_pretrained(tmp_path / "model")(TEXT)["input_ids"] == expected


@each_type_with_head
def test_tied_heads(case, tmp_path):
    """A head that the configuration ties is not written, and must be equal to the embeddings if it is there."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(case.fields | {"tie_word_embeddings": True}))
    head = case.head or "lm_head.weight"
    tensors = case.tensors
    tensors[head] = tensors[case.embeddings].clone()
    source = case.write_file(tmp_path / "trained.pth", tensors)
    convert(source, tmp_path / "both", config=config, progress=False)
    del tensors[head]
    convert(case.write_file(source, tensors), tmp_path / "one", config=config, progress=False)
    for name in ("both", "one"):
        written = load_file(tmp_path / name / "model.safetensors")
        assert not any(name.endswith(("head.weight", "output.output.weight")) for name in written)
        model = load_whole(tmp_path / name, case.model_type)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    tensors[head] = tensors[case.embeddings] + 1
    with pytest.raises(ConversionError) as error:
        convert(case.write_file(source, tensors), tmp_path / "model", config=config, progress=False)
    assert str(error.value) == f"`tie_word_embeddings` is set, but {case.embeddings} and {head} differ."
    assert not (tmp_path / "model").exists()

    config.write_text(json.dumps(case.fields | {"tie_word_embeddings": False}))
    convert(source, tmp_path / "model", config=config, progress=False)
    model = load_whole(tmp_path / "model", case.model_type)
    assert torch.equal(model.get_output_embeddings().weight, tensors[head])
    del tensors[head]
    with pytest.raises(ConversionError, match=rf"{case.model_type}; missing: {case.ours.get(head, head)}\.$"):
        convert(case.write_file(source, tensors), tmp_path / "headless", config=config, progress=False)


# --- configurations that do not fit ---


@each_type
def test_sizes_that_the_tensors_replace(case, tmp_path):
    """All that contradict nothing else; the source's own sizes are in the notes."""
    sizes = case.sizes[case.text] if case.text else case.sizes
    layers = next(name for name in ("num_hidden_layers", "n_layers", "n_blocks", "num_layers") if name in sizes)
    told = {"vocab_size": 77, layers: 9}
    source = case.write_directory(tmp_path / "source", **case.with_text(**told))
    report = convert(source, tmp_path / "model", progress=False)
    prefix = f"{case.text}." if case.text else ""
    assert {note for note in report.notes if "replaced" in note} == {
        f"the configuration's `{prefix}{name}` of {value} was replaced by the tensors' {sizes[name]}"
        for name, value in told.items()
    }
    config = report.config.get_text_config()
    assert {name: getattr(config, name) for name in told} == {name: sizes[name] for name in told}


@each_type
def test_a_configuration_of_another_model(case, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mega"}))
    source = case.write_file(tmp_path / "trained.pth")
    with pytest.raises(
        ConversionError, match=f"config.json is for the model type 'mega', the tensors are '{case.model_type}'"
    ):
        convert(source, tmp_path / "model", config=tmp_path / "config.json", progress=False)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("option", ["head_size_divisor", "grid_size"])
@each_type
def test_options_of_other_architectures(case, option, tmp_path):
    text_type = case.sizes[case.text]["model_type"] if case.text else case.model_type
    classes = [getattr(subquad, subquad.ARCHITECTURES[name][1]) for name in (case.model_type, text_type)]
    source = case.write_directory(tmp_path / "source")
    if any(hasattr(config_class, option) for config_class in classes):
        report = convert(source, tmp_path / "model", progress=False, **{option: 2})
        written = report.config if hasattr(report.config, option) else report.config.get_text_config()
        assert getattr(written, option) == 2
        return
    with pytest.raises(ConversionError, match=f"^`{option}` does not apply to the model type {text_type}"):
        convert(source, tmp_path / "model", progress=False, **{option: 2})
    assert not (tmp_path / "model").exists()


# --- tensors that do not fit ---


@pytest.mark.quick_cases("*-missing", "*-one row", "*-dtype")
@pytest.mark.parametrize("fault", ["missing", "dtype", *RESHAPED])
@each_case
def test_every_tensor_matters(case, fault, monkeypatch):
    """Without one of them, or with one of another shape or dtype, a checkpoint is refused by its name."""
    known, whole = known_format(case), infos(case)
    make_models_once(known, monkeypatch)
    assert known.plan(whole, case.fields).tensors
    for name in case.ours:
        info, changed = whole[name], dict(whole)
        following = re.sub(r"\.(\d+)\.", lambda number: f".{int(number[1]) + 1}.", name, count=1)
        if fault != "missing" and following in whole:  # of blocks that are alike, the last one is enough
            continue
        if fault == "missing":
            del changed[name]
        elif fault == "dtype":
            changed[name] = TensorInfo(info.shape, "I8")
        else:
            changed[name] = TensorInfo(RESHAPED[fault](info.shape), info.dtype)
        if changed == whole:
            continue
        if (name, fault, case.head) == (case.embeddings, "one row", None):  # a vocabulary of 1 is one
            assert known.plan(changed, case.fields).sizes["vocab_size"] == 1
            continue
        with pytest.raises(ConversionError) as error:
            known.plan(changed, case.fields)
        message = str(error.value)
        if fault == "missing":
            assert message.startswith(f"The tensors do not match the model type {case.model_type}")
            assert case.ours[name] in message.partition("; missing: ")[2]
        elif fault == "dtype":
            assert f"{name} (dtype I8, expected a floating one)" in message
        else:
            # A matrix with another length may tell another size: then the others do not fit.
            others = [name] if fault == "no axis" else case.ours
            found = (f"{other} {start}" for other in others for start in ("(shape", changed[other].shape, "has "))
            assert any(text in message for text in found) or any(case.ours[other] in message for other in others)


@pytest.mark.fast
@each_case
def test_one_error_lists_all_that_does_not_fit(case, tmp_path):
    tensors, ours = case.tensors, case.ours
    block = [name for name in ours if name.startswith(case.last_block)]
    lost, narrow = [name for name in block if tensors[name].dim() == 1][:2]
    whole = [name for name in block if known_format(case).parts(name) == {ours[name]: None}]
    same = [name for name in whole if case.written[ours[name]].shape == tensors[name].shape]
    wide = next(name for name in same if tensors[name].dim() == 2)
    rows, columns = tensors[wide].shape
    del tensors[lost]
    tensors[f"{case.last_block}stray"] = torch.zeros(3)
    tensors[wide] = torch.zeros(rows, columns + 1)
    tensors[narrow] = torch.zeros(tensors[narrow].shape, dtype=torch.int8)
    (tmp_path / "config.json").write_text(json.dumps(case.fields))
    with pytest.raises(ConversionError) as error:
        recognise(case.write_file(tmp_path / "pytorch_model.bin", tensors))
    faults = [
        f"{wide} (shape ({rows}, {columns + 1}), expected ({rows}, {columns}))",
        f"{narrow} (dtype int8, expected a floating one)",
    ]
    head = f"The tensors do not match the model type {case.model_type}; missing: {ours[lost]}; "
    head += f"unexpected: {case.last_block}stray; of the wrong shape: "
    assert str(error.value) in [f"{head}{', '.join(order)}." for order in (faults, faults[::-1])]


@each_type
def test_a_stray_block_does_not_ask_for_millions_of_tensors(case, tmp_path):
    tensors = case.tensors | {f"{case.block[0]}99999999.stray.weight": torch.zeros(3)}
    (tmp_path / "config.json").write_text(json.dumps(case.fields))
    with pytest.raises(ConversionError, match=r"missing: .* and \d+ more") as error:
        recognise(case.write_file(tmp_path / "pytorch_model.bin", tensors))
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.twice], ids=lambda case: case.format)
def test_one_name_twice(case, tmp_path):
    first, second = case.twice
    tensors = case.tensors | {second: case.tensors[first].clone()}
    with pytest.raises(ConversionError, match=f"{first} and {second} are the same tensor, {case.ours[first]}"):
        recognise(case.write_file(tmp_path / "trained.pth", tensors))


# --- files that do not fit, and failures ---


@pytest.mark.parametrize("container", [".pth", ".safetensors"])
def test_a_truncated_file(container, tmp_path):
    case = CASES["visual-rwkv6"]
    source = case.write_file(tmp_path / f"trained{container}")
    whole = source.read_bytes()
    for kept in (0, 8, len(whole) // 2, len(whole) - 9):
        source.write_bytes(whole[:kept])
        with pytest.raises(ConversionError, match=source.name):
            convert(source, tmp_path / "model", progress=False)
        assert [path.name for path in tmp_path.iterdir()] == [source.name]
