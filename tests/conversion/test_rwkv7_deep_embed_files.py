"""Published files of RWKV-7a and 7b: their sizes, the package `rwkv`, merged tables, and files of another variant."""

import importlib
import json
import os
import sys

import pytest
import torch
from rwkv7_deep_embed_files import trainer_tensors
from rwkv7_files import trainer_tensors as goose_tensors
from transformers import AutoModelForCausalLM

import subquad
from subquad_conversion import ConversionError, convert, recognise
from subquad_conversion.checkpoint import Checkpoint, TensorInfo
from subquad_conversion.registry import find_format


IDS = [3, 14, 15, 92, 65, 35, 89, 79, 3, 3, 23, 84, 62, 64, 33, 83, 27, 9, 50, 2]
SMALL = {"layers": 2, "heads": 2, "head_size": 16, "vocabulary": 100, "intermediate": 96}


def write(path, **sizes):
    torch.save(trainer_tensors(**{**SMALL, **sizes}), path)
    return path


@pytest.mark.parametrize(
    ("attention", "number", "elements"), [(False, 462, 1_007_289_600), (True, 678, 1_825_421_568)], ids=["7a", "7b"]
)
def test_the_published_files_are_recognised(attention, number, elements, tmp_path):
    ranks = (64, 64, 32, 128)
    sizes = {"layers": 12, "heads": 12, "vocabulary": 65536, "intermediate": 3072, "rank": 32, "size": 256, "low": 32}
    with torch.device("meta"):
        drawn = trainer_tensors(
            attention=attention, **sizes, ranks=ranks, unused=True, dtype=torch.bfloat16, seed=None
        )
    # Some files have no axes of length 1.
    tensors = {name: TensorInfo(tuple(n for n in x.shape if n != 1), x.dtype) for name, x in drawn.items()}
    assert len(tensors) == number
    known = find_format(Checkpoint(tmp_path / "trained.pth", tensors))
    plan = known.plan(tensors, {})
    assert known.name == "rwkv7-deep-embed-trainer"
    assert sum(torch.Size(tensor.shape).numel() for tensor in plan.tensors) == elements
    preset = subquad.preset_config("rwkv7b-0.1b" if attention else "rwkv7a-0.1b")
    assert {name: getattr(preset, name) for name in plan.sizes} == plan.sizes
    assert plan.notes == ["`dea_soft_cap` is not stored in the source; 64 was assumed"] * attention


@pytest.fixture
def runtime(monkeypatch):
    """The class that runs `.pth` files of RWKV-7a in the PyPI package `rwkv`, on the CPU, compiling nothing."""
    for name, value in {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0", "RWKV_V7_ON": "1", "RWKV_DE_VERSION": "1"}.items():
        monkeypatch.setenv(name, value)
    flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    # It chooses the version when it is imported, and other tests run another one.
    monkeypatch.delitem(sys.modules, "rwkv.model", raising=False)
    yield importlib.import_module("rwkv.model").RWKV
    sys.modules.pop("rwkv.model")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = flags[:2]
    torch.backends.cuda.matmul.allow_tf32 = flags[2]


@torch.no_grad()
@pytest.mark.parametrize("merged", [False, True])
def test_logits_and_states_equal_those_of_the_runtime(merged, tmp_path, runtime):
    sizes = {"head_size": 64, "intermediate": 512, "rank": 32}
    source = write(tmp_path / "trained.pth", attention=False, **sizes, unused=True)
    convert(source, tmp_path / "model", tokenizer="none", merge_tables=merged, progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    expected, states = runtime(model=os.path.splitext(source)[0], strategy="cpu fp32").forward(
        IDS, None, full_output=True
    )
    out = model(torch.tensor([IDS]), use_cache=True)
    torch.testing.assert_close(out.logits[0], expected, atol=1e-4, rtol=0)
    for i in range(2):
        names = ("attention_shift", "wkv", "feed_forward_shift")
        for name, state in zip(names, states[3 * i : 3 * i + 3], strict=True):
            torch.testing.assert_close(out.cache.layers[i].states[name][0], state, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("attention", [False, True], ids=["7a", "7b"])
def test_tables_merged_by_convert(attention, tmp_path, capsys):
    source = write(tmp_path / "trained.pth", attention=attention)
    for name, merge in (("plain", False), ("merged", True)):
        report = convert(source, tmp_path / name, tokenizer="none", merge_tables=merge, progress=False)
        assert report.config.merged_tables == merge
    plain, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("plain", "merged"))
    assert report.parameters == merged.num_parameters()
    plain.merge_tables()
    expected = plain.state_dict()
    assert merged.state_dict().keys() == expected.keys()
    for name, x in merged.state_dict().items():
        torch.testing.assert_close(x, expected[name])
    # They stay merged, and nothing that needs them unmerged is made of them.
    assert recognise(tmp_path / "merged").sizes["merged_tables"]
    for options, message in (
        ({"to": "pth"}, "The tables are merged, and the trainer's files have tables that are not"),
        ({"merge_tables": True}, "the tables of the source are merged already"),
    ):
        with pytest.raises(ConversionError, match=message):
            convert(tmp_path / "merged", tmp_path / "out.pth", **options, progress=False)
    again = convert(tmp_path / "merged", tmp_path / "again", quantize="int8", tokenizer="none", progress=False)
    assert again.config.merged_tables
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "again")(torch.tensor([IDS])).logits
    logits = merged(torch.tensor([IDS])).logits
    assert (found - logits).norm() < 0.05 * logits.norm()


def test_options_that_do_not_apply(tmp_path):
    torch.save(goose_tensors(**SMALL), tmp_path / "goose.pth")
    with pytest.raises(ConversionError, match="`merge_tables` does not apply to the model type rwkv7"):
        convert(tmp_path / "goose.pth", tmp_path / "out", merge_tables=True, progress=False)
    source = write(tmp_path / "seven.pth", attention=True)
    with pytest.raises(ConversionError, match="`merge_tables` is for a directory of this package, not for pth"):
        convert(source, tmp_path / "out.pth", to="pth", merge_tables=True, progress=False)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.pth").exists()


def test_files_of_another_variant(tmp_path):
    """The tensors of one with the configuration of another are refused by name, before anything is written."""
    torch.save(goose_tensors(**SMALL), tmp_path / "7.pth")
    for name, attention in (("7a", False), ("7b", True)):
        write(tmp_path / f"{name}.pth", attention=attention)
    for name in ("7", "7a", "7b"):
        convert(tmp_path / f"{name}.pth", tmp_path / name, tokenizer="none", progress=False)
    for file, config, message in (
        ("7b", "7", "is for the model type 'rwkv7', the tensors are 'rwkv7_deep_embed'"),
        ("7a", "7", "is for the model type 'rwkv7', the tensors are 'rwkv7_deep_embed'"),
        ("7", "7b", "is for the model type 'rwkv7_deep_embed', the tensors are 'rwkv7'"),
        ("7b", "7a", "The tensors are those of RWKV-7b, but in the configuration `dea_size` is None"),
        ("7a", "7b", "The tensors are those of RWKV-7a, but in the configuration `dea_size` is 6"),
    ):
        with pytest.raises(ConversionError, match=message):
            convert(
                tmp_path / f"{file}.pth", tmp_path / "out", config=tmp_path / config / "config.json", progress=False
            )
    fields = json.loads((tmp_path / "7b/config.json").read_text()) | {"merged_tables": True}
    (tmp_path / "merged.json").write_text(json.dumps(fields))
    with pytest.raises(ConversionError, match="are not merged, but in the configuration `merged_tables` is True"):
        convert(tmp_path / "7b.pth", tmp_path / "out", config=tmp_path / "merged.json", progress=False)
    # Attention in some blocks alone.
    tensors = {name: x for name, x in trainer_tensors(**SMALL, attention=True).items() if ".1.qkv." not in name}
    torch.save(tensors, tmp_path / "some.pth")
    with pytest.raises(ConversionError, match=r"missing: rwkv7\.blocks\.1\.qkv\."):
        convert(tmp_path / "some.pth", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
