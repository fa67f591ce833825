"""Models as programs of `torch.export`: the forward pass, reading a prompt, going on token by token; ONNX."""

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CASES, GREEDY, each_model, random_ids, tiny_model
from transformers import AutoTokenizer, GenerationConfig

import subquad
import subquad_kernels  # noqa: F401 (a program that is loaded may name its operators)
from subquad.modeling import versions
from subquad.modeling.cache import PADDING
from subquad.tools.torch_export import export_program, initial_states, inline_operators, save_onnx


onnxruntime = importlib.import_module("onnxruntime") if find_spec("onnxruntime") else None
ONNX = pytest.mark.skipif(not (onnxruntime and find_spec("onnxscript")), reason="needs onnxruntime and onnxscript")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ROOM = 64
# So many layers that there is one of each kind.
INLINED = {"rwkv6": 1, "raven": 2, "avey": 1, "gecko": 1}


def operators(program):
    """The operators of this package that a program calls."""
    return {str(node.target) for node in program.graph.nodes if "subquad" in str(node.target)}


def generate(prefill, decode, states, ids, mask, new_tokens):
    logits, states = prefill(ids, states, mask)
    tokens = [logits.argmax(-1, keepdim=True)]
    while len(tokens) < new_tokens:
        logits, states = decode(tokens[-1], states)
        tokens.append(logits.argmax(-1, keepdim=True))
    return torch.cat(tokens, 1)


# The forward pass.


@pytest.mark.quick_cases("gecko", "avey-b")
@each_model
@torch.no_grad()
def test_forward_of_any_size(model_type):
    """The length is dynamic; the batch is for Avey and Avey-B, whose layout Python computes from the length."""
    model, case = tiny_model(model_type), CASES[model_type]
    bos = getattr(model.config, "boundary_token_id", None)

    def inputs(rows, length, side="right"):
        ids = random_ids(rows, length, seed=length)
        if bos is not None:
            ids[:, 3] = bos
        if not case.causal:
            mask = torch.ones_like(ids)
            for row, padding in enumerate((0, 27, 31)[:rows]):
                mask[row, slice(padding) if side == "left" else slice(length - padding, None)] = 0
            return {"input_ids": ids, "attention_mask": mask}
        return {"input_ids": ids, "use_cache": False}

    if case.splits:
        example, sizes = inputs(2, 40, "left"), {0: torch.export.Dim.DYNAMIC}
        others = [inputs(rows, 40) for rows in (1, 2, 3)]
    else:
        example, sizes = inputs(1, 12), {1: torch.export.Dim("length", min=case.export_least, max=1024)}
        others = [inputs(1, length) for length in (5, 9, 40, 100)]
    shapes = {name: sizes if isinstance(x, torch.Tensor) else None for name, x in example.items()}
    program = torch.export.export(model, (), example, dynamic_shapes=shapes).module()
    for kwargs in others:
        torch.testing.assert_close(program(**kwargs)[0], model(**kwargs)[0], atol=1e-4, rtol=1e-4)


# Programs that generate.


@pytest.mark.quick_cases("rwkv6")
@pytest.mark.parametrize("model_type", ["rwkv6", "rwkv7_deep_embed", "avey", "raven", "gecko"])
@torch.no_grad()
def test_programs_generate(model_type, tmp_path):
    # Layers of every kind.
    model = tiny_model(model_type, num_hidden_layers=CASES[model_type].layer_kinds)
    states, sizes = initial_states(model, 2, ROOM), {"batch_size": 2, "max_cache_len": ROOM}
    assert not any(state.any() for state in states.values())
    programs = []
    for length in (None, 1):
        torch.export.save(export_program(model, length, **sizes), tmp_path / "program.pt2")
        programs.append(torch.export.load(tmp_path / "program.pt2").module())

    for length in (3, 20):
        ids, mask = random_ids(2, length, seed=length), torch.ones(2, length, dtype=torch.long)
        mask[0, : length // 2] = 0
        expected = model.generate(ids, attention_mask=mask, **GREEDY, max_new_tokens=6)[:, length:]
        assert torch.equal(generate(*programs, states, ids, mask, 6), expected)
        # Padding may as well come last or between tokens, and a prompt in pieces.
        for other in (mask.flip(1), mask[:, torch.randperm(length, generator=torch.Generator().manual_seed(0))]):
            moved = ids.masked_scatter(other == 1, ids[mask == 1])
            assert torch.equal(generate(*programs, states, moved, other, 6), expected)
        _, later = programs[0](ids[:, :3], states, mask[:, :3])
        if length >= 6:
            assert torch.equal(generate(*programs, later, ids[:, 3:], mask[:, 3:], 6), expected)
    # What was given is as it was, and a cache has the same states under the same names.
    assert not any(state.any() for state in states.values())
    cache = model.new_cache(static=True, max_cache_len=ROOM)
    model(ids, attention_mask=mask, cache=cache)
    _, after = programs[0](ids, states, mask)
    held = {name: state for name, state in cache.named_states().items() if name != PADDING}
    assert list(after) == list(states) == sorted(held)
    torch.testing.assert_close(after, held, atol=1e-4, rtol=1e-4)


ALONE = """
import json, sys, torch
for name in ("subquad", "subquad_kernels", "transformers", "triton"):
    sys.modules[name] = None
torch.set_num_threads(1)

def load(path):
    program = torch.export.load(path)
    return program.module(), program.example_inputs[0]

found = {}
with torch.no_grad():
    for model in sys.argv[1:]:
        decode, (token, states) = load(f"{model}-1.pt2")
        tokens = list(range(1, 11))
        for token in tokens:
            logits, states = decode(torch.tensor([[token]]), states)
        for _ in range(8):
            tokens.append(int(logits.argmax()))
            logits, states = decode(torch.tensor([tokens[-1:]]), states)
        found[model] = tokens
    prefill, (ids, states, mask) = load("rwkv6-2.pt2")
    for piece in torch.arange(1, 11)[None].split(2, 1):
        logits, states = prefill(piece, states, mask)
    found["prefill"] = int(logits.argmax())
try:
    torch.export.load("operators.pt2")
except Exception:
    found["without operators"] = "fails"
print(json.dumps(found))
"""


@pytest.mark.thorough
@torch.no_grad()
def test_inlined_programs_need_torch_alone(tmp_path):
    expected, ids = {"without operators": "fails"}, torch.arange(1, 11)[None]
    for model_type, layers in INLINED.items():
        model = tiny_model(model_type, num_hidden_layers=layers)
        for length in (2, 1) if model_type == "rwkv6" else (1,):
            program = export_program(model, length, max_cache_len=ROOM)
            inlined = inline_operators(program)
            assert not operators(inlined)
            torch.export.save(inlined, tmp_path / f"{model_type}-{length}.pt2")
        expected[model_type] = model.generate(ids, **GREEDY, max_new_tokens=8)[0].tolist()
    assert operators(program)
    torch.export.save(program, tmp_path / "operators.pt2")
    expected["prefill"] = expected["rwkv6"][10]
    done = subprocess.run([sys.executable, "-c", ALONE, *INLINED], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


@torch.no_grad()
def assert_onnx_reads(model, path, pieces):
    """
    Compares the logits of `prefill.onnx` and `decode.onnx` with those of the model; of each piece of a text, the
    number of tokens and how many of them are real.
    """
    ids, begin = random_ids(1, 12), 0
    expected = model(ids).logits[0]
    held = {f"past.{name}": state.numpy() for name, state in initial_states(model).items()}
    for length, real in pieces:
        name = "decode.onnx" if length == 1 else "prefill.onnx"
        session = onnxruntime.InferenceSession(path / name, providers=["CPUExecutionProvider"])
        inputs = {"input_ids": ids[:, begin : begin + length].numpy(), **held}
        if length > 1:
            inputs["attention_mask"] = (np.arange(length) < real)[None].astype(np.int64)
        assert {x.name for x in session.get_inputs()} == inputs.keys()
        names = [x.name.replace("present.", "past.") for x in session.get_outputs()]
        assert names == ["logits", *held]
        logits, *new = session.run(None, inputs)
        held, begin = dict(zip(held, new, strict=True)), begin + real
        torch.testing.assert_close(torch.from_numpy(logits)[0], expected[begin - 1], atol=1e-4, rtol=1e-4)


@pytest.mark.fast
@ONNX
def test_onnx(tmp_path):
    model = tiny_model("rwkv5", num_hidden_layers=1)
    save_onnx(inline_operators(export_program(model, 1)), tmp_path / "decode.onnx")
    assert_onnx_reads(model, tmp_path, [(1, 1)] * 6)


@pytest.mark.thorough
@ONNX
def test_onnx_of_goose(tmp_path):
    """The plain form of its recurrence solves equations, which ONNX cannot."""
    model = tiny_model("rwkv7", num_hidden_layers=1)
    for name, length in (("prefill", 5), ("decode", 1)):
        save_onnx(inline_operators(export_program(model, length)), tmp_path / f"{name}.onnx")
    assert_onnx_reads(model, tmp_path, [(5, 5), (5, 3), (1, 1)])


@pytest.mark.fast
def test_wrong_use():
    model = tiny_model("rwkv6", num_hidden_layers=1)
    for other, auto_class, name in (
        ("avey-b", "AutoModelForMaskedLM", "AveyBForMaskedLM"),
        ("rwkv6", "AutoModelForSequenceClassification", "Rwkv6ForSequenceClassification"),
    ):
        with pytest.raises(ValueError, match=f"model of this package, got {name}. For a model with adapters"):
            export_program(tiny_model(other, auto_class, num_hidden_layers=1), 1)
    with pytest.raises(ValueError, match="got Rwkv6Model"):
        initial_states(model.base_model)
    with pytest.raises(ValueError, match="`length` must be a whole number of at least 1, got 0"):
        export_program(model, 0)
    with pytest.raises(ValueError, match="training mode"):
        export_program(model.train(), 1)
    for grows in (tiny_model("avey"), tiny_model("raven", attn={"layers": [1], "num_heads": 3, "window_size": None})):
        with pytest.raises(ValueError, match="`max_cache_len` must be given: the cache of (Avey|Raven)ForCausalLM"):
            export_program(grows, 1)
    with pytest.raises(ValueError, match="`program` must have fixed sizes"):
        inline_operators(export_program(model.eval()))


# Other tools.


@pytest.mark.parametrize(("model_type", "dynamic"), [("rwkv6", True), ("avey", False)])
def test_exporter_of_transformers(model_type, dynamic):
    """It passes our caches themselves, which must be static: of a number that changes there would be many programs."""
    pytest.importorskip("transformers.exporters")
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

    model, ids = tiny_model(model_type, num_hidden_layers=1), random_ids(2, 9)
    expected = model.generate(ids, **GREEDY, max_new_tokens=8)[:, 9:]
    config = GenerationConfig(cache_implementation="static", max_cache_len=ROOM, **GREEDY)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    exporter, options = DynamoExporter(), DynamoConfig(dynamic=dynamic)
    exported = exporter.export_for_generation(model, inputs, options, generation_config=config)
    runners = exported.runners

    def call(name, ids, cache, begin):
        places = torch.arange(begin, begin + ids.shape[1]).expand(ids.shape)
        inputs = {"input_ids": ids, "position_ids": places, versions.CACHE_NAME: cache}
        return runners[name](**inputs)

    out = call("prefill", ids, model.new_cache(static=True, max_cache_len=ROOM), 0)
    tokens = [out.logits[:, -1:].argmax(-1)]
    while len(tokens) < 8:
        out = call("decode", tokens[-1], out.cache, 8 + len(tokens))
        tokens.append(out.logits[:, -1:].argmax(-1))
    assert torch.equal(torch.cat(tokens, 1), expected)


@pytest.mark.thorough
@pytest.mark.parametrize(("format", "chunk"), [("pt2", 0), pytest.param("onnx", 2, marks=ONNX)])
def test_example(format, chunk, tmp_path, capsys, monkeypatch):
    AutoTokenizer.from_pretrained(subquad.embedded_model("finch-abc")).save_pretrained(tmp_path / "model")
    model = tiny_model("rwkv6", num_hidden_layers=1, vocab_size=128)
    model.save_pretrained(tmp_path / "model")
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(*arguments):
        paths = [f"--model={tmp_path / 'model'}", f"--output={tmp_path / 'out'}"]
        monkeypatch.setattr(sys, "argv", ["export_program", *paths, "--new-tokens=9", *arguments])
        importlib.import_module("export_program").main()
        return capsys.readouterr().out

    out = run(f"--format={format}", f"--chunk={chunk}")
    assert "the same 9 tokens:\n\nX:1\nT:The Exported Jig" in out and "tokens/s" in out
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {f"prefill.{format}", f"decode.{format}", "states.safetensors"}
    if format == "onnx":
        assert_onnx_reads(model, tmp_path / "out", [(2, 2), (2, 2), (2, 1), (1, 1), (1, 1)])
    for chunk, error in ((0, "a fixed number of tokens"), (1, "must be 0 or at least 2")):
        with pytest.raises(SystemExit):
            run("--format=onnx", f"--chunk={chunk}")
        assert error in capsys.readouterr().err
