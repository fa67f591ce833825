"""Published files of Goose: their sizes, and what the runtime that they were written for computes."""

import importlib
import json
import os
import sys

import pytest
import torch
from rwkv7_files import UNUSED, fla_tensors, hub_tensors, old_rs_tensors, rs_tensors, trainer_tensors
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import subquad
from subquad_conversion import ConversionError, convert, recognise
from subquad_conversion.checkpoint import Checkpoint, TensorInfo
from subquad_conversion.registry import find_format


IDS = [3, 14, 15, 92, 65, 35, 89, 79, 3, 3, 23, 84, 62, 64, 33, 83, 27, 9, 50, 2]
# Layers, width, ranks, vocabulary; and the parameters of a file with and without the tensors that nothing reads.
PUBLISHED = {
    "0.1b": (12, 768, (64, 64, 32, 128), 65536, 191_084_544, 191_034_624),
    "0.4b": (24, 1024, (64, 64, 32, 128), 65536, 450_834_432, 450_767_872),
    "1.5b": (24, 2048, (96, 96, 64, 256), 65536, 1_527_668_736, 1_527_404_544),
    "2.9b": (32, 2560, (96, 96, 64, 320), 65536, 2_948_065_280, 2_947_735_040),
    "7.2b": (32, 4096, (128, 128, 96, 480), 65536, 7_199_932_416, 7_199_141_888),
    "13.3b": (61, 4096, (192, 192, 128, 384), 65536, 13_270_298_624, 13_269_245_952),
    "pile": (12, 768, (64, 64, 32, 128), 50304, None, 167_638_272),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_file_of_every_published_size_is_recognised(size, tmp_path, monkeypatch):
    layers, width, ranks, vocabulary, with_unused, read = PUBLISHED[size]
    sizes = {"layers": layers, "heads": width // 64, "vocabulary": vocabulary, "intermediate": 4 * width}
    with torch.device("meta"):
        drawn = trainer_tensors(**sizes, ranks=ranks, unused=with_unused is not None, dtype=torch.bfloat16, seed=None)
    tensors = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in drawn.items()}
    assert len(tensors) == 33 * layers + (6 if with_unused else 3)
    known = find_format(Checkpoint(tmp_path / "trained.pth", tensors))
    assert known.name == "rwkv7-trainer"
    assert sum(x.elements for x in tensors.values()) == (with_unused or read)
    plan = known.plan(tensors, {})
    assert sum(torch.Size(tensor.shape).numel() for tensor in plan.tensors) == read
    assert plan.notes == []
    names = ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
    assert plan.sizes == {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_heads": width // 64,
        "head_dim": 64,
        **dict(zip(names, ranks, strict=True)),
    }


@pytest.mark.parametrize("name", ["rwkv7-g1h_preview4673-2.9b-20260701-ctx8192", "rwkv7-g1h-7.2b-20260710-ctx10240"])
def test_the_newest_files_chat(name, tmp_path):
    """Whatever the name says of data and lengths: the World tokenizer, the official prompts and what ends answers."""
    tensors = trainer_tensors(heads=1, head_size=16, vocabulary=65536, intermediate=8, unused=True)
    torch.save(tensors, tmp_path / f"{name}.pth")
    report = convert(tmp_path / f"{name}.pth", tmp_path / "model", progress=False)
    assert report.recognised.format == "rwkv7-trainer" and report.tokenizer == "RWKV World"
    assert report.notes == ["the tokenizer was chosen by the vocabulary of 65536"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why? (think a bit)"}]
    for thinking, end in ((None, ""), (True, " <think"), (False, " <think></think")):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, thinking=thinking)
        assert text == f"System: Be brief.\n\nUser: Why? (think a bit)\n\nAssistant:{end}"
    generation = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert generation["eos_token_id"] == 0 and generation["chat_stops"]["answer"] == [5585, 41693, 59]  # `Assistant:`


@pytest.fixture(scope="module")
def runtime():
    """The class that runs `.pth` files of RWKV-7 in the PyPI package `rwkv`, on the CPU, compiling nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RWKV_JIT_ON", "0")
        patch.setenv("RWKV_CUDA_ON", "0")
        patch.setenv("RWKV_V7_ON", "1")
        flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        # It chooses the version when it is imported, and other tests run another one.
        patch.delitem(sys.modules, "rwkv.model", raising=False)
        model_class = importlib.import_module("rwkv.model").RWKV
        sys.modules.pop("rwkv.model")
        yield model_class
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = flags[:2]
        torch.backends.cuda.matmul.allow_tf32 = flags[2]


def both(runtime, tmp_path, **sizes):
    """The runtime on the `.pth` file that is made of our model, and our model, made of a `.pth` file."""
    source, written = tmp_path / "trained.pth", tmp_path / "written.pth"
    tensors = trainer_tensors(unused=True, **sizes)
    torch.save(tensors, source)
    convert(source, tmp_path / "model", tokenizer="none", progress=False)
    convert(tmp_path / "model", written, to="pth", progress=False)
    stored = torch.load(written, weights_only=True)
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(x, stored[name]) or name in UNUSED for name, x in tensors.items())
    peer = runtime(model=os.path.splitext(written)[0], strategy="cpu fp32")
    return peer, AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()


@pytest.mark.parametrize(("layers", "heads"), [(2, 3), (1, 1), (3, 2)])
def test_logits_and_states_equal_those_of_the_runtime(layers, heads, tmp_path, runtime):
    peer, model = both(runtime, tmp_path, layers=layers, heads=heads, intermediate=heads * 256, seed=heads)
    expected, states = peer.forward(IDS, None, full_output=True)
    with torch.no_grad():
        out = model(torch.tensor([IDS]), use_cache=True)
    torch.testing.assert_close(out.logits[0], expected, atol=1e-4, rtol=0)
    for i in range(layers):
        shift, wkv, ffn_shift = states[3 * i : 3 * i + 3]
        ours = out.cache.layers[i].states
        torch.testing.assert_close(ours["wkv"][0], wkv, atol=1e-4, rtol=0)
        torch.testing.assert_close(ours["attention_shift"][0], shift, atol=1e-4, rtol=0)
        torch.testing.assert_close(ours["feed_forward_shift"][0], ffn_shift, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_hundred_greedy_tokens_equal_those_of_the_runtime(tmp_path, runtime):
    """At the size of the smallest published model."""
    sizes = {"layers": 12, "heads": 12, "intermediate": 3072, "ranks": (64, 64, 32, 128), "vocabulary": 65536}
    peer, model = both(runtime, tmp_path, **sizes, dtype=torch.bfloat16)
    ids = model.generate(torch.tensor([IDS]), max_new_tokens=100, do_sample=False, eos_token_id=None)[0].tolist()
    out, state = peer.forward(IDS, None)
    expected = []
    for _ in range(100):
        expected.append(int(out.argmax()))
        out, state = peer.forward([expected[-1]], state)
    assert ids == IDS + expected


@pytest.mark.parametrize("layout", ["hub", "fla", "rs", "old_rs"])
def test_layouts_that_load_as_they_are(layout, tmp_path):
    """What the page about Goose promises of `from_pretrained`, and `subquad convert` reads the others too."""
    expected = hub_tensors()
    tensors = {"hub": expected, "fla": fla_tensors(), "rs": rs_tensors(), "old_rs": old_rs_tensors()}[layout]
    source = tmp_path / "source"
    source.mkdir()
    save_file({name: x.contiguous() for name, x in tensors.items()}, source / "model.safetensors")
    convert(source, tmp_path / "model", tokenizer="none", progress=False)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config))
    for path in (tmp_path / "model", source):
        model = AutoModelForCausalLM.from_pretrained(path)
        assert type(model) is subquad.Rwkv7ForCausalLM
        for name, x in model.state_dict().items():
            torch.testing.assert_close(x, expected[name].view_as(x))


def test_the_tensors_that_nothing_reads_are_left_out(tmp_path):
    tensors = trainer_tensors(unused=True)
    torch.save(tensors, tmp_path / "trained.pth")
    report = convert(tmp_path / "trained.pth", tmp_path / "model", progress=False)
    unused = sum(tensors[name].numel() for name in UNUSED)
    assert report.recognised.parameters == sum(x.numel() for x in tensors.values())
    assert report.parameters == report.recognised.parameters - unused


def test_a_model_of_one_layer_mixes_no_values(tmp_path):
    torch.save(trainer_tensors(layers=1), tmp_path / "trained.pth")
    assert "v_low_rank_dim" not in recognise(tmp_path / "trained.pth").sizes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_norm_epsilon": 1e-5}, "`group_norm_epsilon` must be 0.00064, got 1e-05"),
        ({"attn": {"layers": [0]}}, "`attn` must be None, got .*softmax attention is not supported"),
    ],
)
def test_configurations_that_do_not_fit(fields, message, tmp_path):
    torch.save(trainer_tensors(), tmp_path / "trained.pth")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "trained.pth", tmp_path / "model", config=tmp_path / "config.json", progress=False)
    assert not (tmp_path / "model").exists()
