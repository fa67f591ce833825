"""State tuning: every text begins with the trained state, however it is read."""

import copy
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from cases import BASE, CASES, model_class, random_ids, tiny_model
from golden_files import read_golden
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from subquad import StateTuningConfig, embedded_model, load_time_states, save_time_states
from subquad.models import REGISTRY
from subquad_conversion import convert


GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
each_case = pytest.mark.parametrize(
    ("model_type", "fields"), [(case.name, fields) for case in BASE for fields in case.tunable]
)


def adapted_model(model_type, fields, seed=1, **options):
    """A tiny model with states that are about as large as trained ones."""
    model = get_peft_model(tiny_model(model_type, **fields), StateTuningConfig(task_type="CAUSAL_LM", **options))
    return fill(model, seed)


def fill(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for state in states(model).values():
            square = state.shape[-1] == state.shape[-2]
            state.normal_(std=5 / REGISTRY[model.config.model_type].tunable_state.scale if square else 1.0)
    return model.eval()


def states(model):
    return {name: p for name, p in model.named_parameters() if "state_tuning_" in name}


def read_behind_the_states(model, ids):
    """The logits of the model without the adapter, from a cache that holds the states."""
    rows, length = ids.shape
    mask = torch.ones(rows, length + 1)
    mask[:, 0] = 0  # padding alone leaves the states of a cache at zero
    cache = model(input_ids=ids[:, :1], attention_mask=mask[:, :1]).cache
    for name, state in states(model).items():
        layer = int(re.search(r"\.(\d+)\.", name)[1])
        tunable = REGISTRY[model.config.model_type].tunable_state
        assert not cache.layers[layer].states[tunable.name].any()
        cache.layers[layer].states[tunable.name] = (tunable.scale * state).expand(rows, *state.shape)
    return read(model, ids, attention_mask=mask, cache=cache)


def read(model, ids, **inputs):
    return model(input_ids=ids, **inputs).logits


@each_case
def test_a_text_begins_with_the_state(model_type, fields, tmp_path):
    model, ids = adapted_model(model_type, fields), random_ids(2, 19)
    found = read(model, ids)
    with model.disable_adapter():
        expected = read_behind_the_states(model, ids)
        without = read(model, ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(without, tiny_model(model_type, **fields)(ids).logits)
    assert (found - without).abs().max() > 0.1

    def check(logits, expected=found, rows=slice(None)):
        torch.testing.assert_close(logits, expected[rows], atol=1e-4, rtol=1e-4)

    check(read(model, ids, use_cache=False))
    first = model(input_ids=ids[:, :1])
    check(torch.cat((first.logits, read(model, ids[:, 1:], cache=first.cache)), 1))
    # Packed documents, also behind a text that has begun.
    check(read(model, ids.view(1, -1), cu_seqlens=torch.tensor([0, 19, 38])).view_as(found))
    packed = torch.cat((ids[:1, 5:], ids[1:]), 1)
    places = torch.cat((torch.arange(5, 19), torch.arange(19)))[None]
    cache = model(input_ids=ids[:1, :5]).cache
    logits = read(model, packed, position_ids=places, cache=cache)
    check(logits, torch.cat((found[:1, 5:], found[1:]), 1))
    # Padding, and a row that is padding alone in the first call.
    padded, mask = torch.nn.functional.pad(ids, (7, 0)), torch.ones(2, 26, dtype=torch.long)
    mask[:, :7] = 0
    check(read(model, padded, attention_mask=mask)[:, 7:])
    cache = model(input_ids=padded[:, :7], attention_mask=mask[:, :7]).cache
    check(read(model, padded[:, 7:], attention_mask=mask, cache=cache))
    right = torch.nn.functional.pad(ids, (0, 7))
    check(read(model, right, attention_mask=mask.flip(1))[:, :19])
    # A row that was reset, also in a cache that was joined since.
    cache = model(input_ids=ids[:, :5]).cache
    cache.reset_rows(torch.tensor([True, False]))
    alone = type(cache).join([model(input_ids=ids[1:, :5]).cache, *cache.split()[:1]])
    check(read(model, ids[:, 5:], cache=cache.clone())[1:], found[1:, 5:])
    check(read(model, ids, cache=cache)[:1], found[:1])
    check(read(model, ids, cache=alone)[1:], found[1:])
    # What was read is taken back, to nothing.
    cache = model.get_base_model().new_cache()
    cache.activate_past_recording()
    model(input_ids=ids, cache=cache)
    cache.crop(-19)
    check(read(model, ids, cache=cache))
    with torch.no_grad():
        cache = model.get_base_model().new_cache(static=True)
        model(input_ids=ids.flip(1), cache=cache)
        cache.reset()
        cache.save(tmp_path / "cache")  # before any token is read
        check(read(model, ids, cache=cache))
        cache = type(cache).load(tmp_path / "cache", model.config, static=True)
        check(read(model, ids, cache=cache))
        kept = copy.deepcopy(states(model))
        check(read(model, ids[:1]), rows=slice(1))  # one row has no copies of the state
    for name, state in states(model).items():
        assert torch.equal(state, kept[name])


@pytest.mark.fast
@each_case
def test_generate(model_type, fields):
    model, ids = adapted_model(model_type, fields), random_ids(1, 5).repeat(1, 2)
    expected = ids
    for _ in range(6):
        expected = torch.cat((expected, read(model, expected)[:, -1:].argmax(-1)), 1)
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(model.generate(input_ids=ids, **GREEDY, **options), expected), options
    chunks = {"prefill_chunk_size": 3, "cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(input_ids=ids, **GREEDY, **chunks), expected)
    beams = model.generate(input_ids=ids, num_beams=3, **GREEDY)
    assert torch.equal(beams, model.generate(input_ids=ids, num_beams=3, use_cache=False, **GREEDY))
    with model.disable_adapter():
        assert not torch.equal(model.generate(input_ids=ids, **GREEDY), expected)


@each_case
def test_training(model_type, fields):
    fields = {**fields, **CASES[model_type].quiet}
    model, ids = adapted_model(model_type, fields).double(), random_ids(2, 19)

    def gradients(labels, **inputs):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(read(model, **inputs)[:, :-1].mT, labels[:, 1:])
        loss.backward()
        return loss, {name: state.grad for name, state in states(model).items()}

    loss, expected = gradients(labels=ids, ids=ids)
    assert all(grad.abs().sum() > 0 for grad in expected.values())
    assert all(p.grad is None for name, p in model.named_parameters() if name not in expected)
    # The slope along all gradients, by a difference of losses.
    step = 1e-6
    with torch.no_grad():
        for name, state in states(model).items():
            state += step * expected[name]
        ahead = torch.nn.functional.cross_entropy(read(model, ids)[:, :-1].mT, ids[:, 1:])
        for name, state in states(model).items():
            state -= step * expected[name]
    slope = sum(grad.square().sum() for grad in expected.values())
    assert ((ahead - loss) / step / slope - 1).abs() < 1e-3

    borders = torch.tensor([0, 19, 38])
    labels = ids.clone()
    labels[:, 0] = -100  # the last token of the document before does not predict it
    packed = {"ids": ids.view(1, -1), "labels": labels.view(1, -1), "cu_seqlens": borders}
    model.train()
    model.enable_input_require_grads()
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    for inputs in ({"ids": ids, "labels": ids}, packed):
        found = gradients(**inputs)
        torch.testing.assert_close(found, (loss, expected))


def test_compiled():
    model, ids = adapted_model("rwkv6", {"num_hidden_layers": 1}), random_ids(2, 19)
    compiled = torch.compile(model.get_base_model(), fullgraph=True, backend="aot_eager")
    inputs = {"input_ids": ids.view(1, -1), "cu_seqlens": torch.tensor([0, 19, 38]), "use_cache": False}
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=1e-4)


@each_case
def test_adapters_are_swapped(model_type, fields, tmp_path):
    ids = random_ids(2, 9)
    expected = {}
    for name, seed in (("one", 1), ("two", 2)):
        model = adapted_model(model_type, fields, seed)
        expected[name] = read(model, ids)
        model.save_pretrained(tmp_path / name)
    size = (tmp_path / "one" / "adapter_model.safetensors").stat().st_size
    assert size < 4 * sum(p.numel() for p in states(model).values()) + 1000

    model = PeftModel.from_pretrained(tiny_model(model_type, **fields), tmp_path / "one", adapter_name="one").eval()
    model.load_adapter(tmp_path / "two", adapter_name="two")
    for name in ("two", "one"):
        model.set_adapter(name)
        torch.testing.assert_close(read(model, ids), expected[name])
    with pytest.raises(ValueError, match="cannot be active together"):
        model.base_model.set_adapter(["one", "two"])
    with pytest.raises(ValueError, match="the state of one adapter"):
        read(model, ids, adapter_names=["one", "two"])
    with pytest.raises(ValueError, match="cannot be merged"):
        model.merge_and_unload()
    with pytest.raises(ValueError, match="cannot be merged"):
        model.merge_adapter()
    torch.testing.assert_close(read(model.unload(), ids), tiny_model(model_type, **fields)(ids).logits)

    # As transformers loads adapters, and as a model.
    model = tiny_model(model_type, **fields)
    model.load_adapter(tmp_path / "two")
    torch.testing.assert_close(read(model, ids), expected["two"])
    tiny_model(model_type, **fields).save_pretrained(tmp_path / "model")
    loaded = PeftModel.from_pretrained(model_class(model_type).from_pretrained(tmp_path / "model"), tmp_path / "one")
    torch.testing.assert_close(read(loaded.eval(), ids), expected["one"])


@each_case
def test_a_classifier(model_type, fields, tmp_path):
    classifier = "AutoModelForSequenceClassification"
    model = tiny_model(model_type, classifier, **fields)
    model = get_peft_model(
        model, StateTuningConfig(task_type="SEQ_CLS", exclude_modules=["0.attention", "0.attn", "0.att"])
    )
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("score" in name for name in trained) and not any(".0." in name for name in trained)
    logits = read(fill(model, 1), random_ids(2, 9))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(model_type, classifier, **fields), tmp_path).eval()
    torch.testing.assert_close(read(loaded, random_ids(2, 9)), logits)


@each_case
def test_low_precision(model_type, fields):
    model, ids = get_peft_model(tiny_model(model_type, **fields).bfloat16(), StateTuningConfig()), random_ids(2, 9)
    assert {state.dtype for state in states(model).values()} == {torch.float32}
    with model.disable_adapter():
        expected = read(model, ids)
    assert torch.equal(read(model, ids), expected)  # states begin at zero
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(state.grad.abs().sum() > 0 for state in states(model).values())
    model.bfloat16()
    assert torch.isfinite(read(fill(model, 1), ids)).all()


@pytest.mark.fast
@pytest.mark.parametrize("model_type", [case.name for case in BASE if not case.tunable])
def test_models_without_such_a_state(model_type):
    with pytest.raises(
        ValueError, match=f"State tuning: {type(tiny_model(model_type)).__name__} does not have a state"
    ):
        get_peft_model(tiny_model(model_type), StateTuningConfig())


@pytest.mark.thorough
def test_adapters_load_where_nothing_else_is_imported():
    code = "import subquad, peft; print(peft.PEFT_TYPE_TO_CONFIG_MAPPING['STATE_TUNING'].__name__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split()[-1] == "StateTuningConfig"


def test_wrong_targets():
    for targets, message in ((["key"], "is a Linear, without a state to train"), (["nothing"], "not found")):
        with pytest.raises(ValueError, match=message):
            get_peft_model(tiny_model("rwkv6"), StateTuningConfig(target_modules=targets))


TUNE = "X:1\nT:Test {}\nM:6/8\nL:1/8\nK:G\nD|GAG GAB|ded dBG|BAB AFD|EFE E2D|\n"


@pytest.mark.thorough
def test_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    example = importlib.import_module("state_tuning")
    tunes = [TUNE.format(n) for n in range(12)]
    monkeypatch.setattr(example, "load_corpus", lambda: SimpleNamespace(train=tunes[:8], validation=tunes[8:]))
    losses = {}
    for method in ("state", "prompt"):
        arguments = ["--output", tmp_path / method, "--method", method, "--steps", 12, "--threads", 1]
        monkeypatch.setattr(sys, "argv", ["state_tuning.py", *map(str, arguments)])
        example.main()
        out = capsys.readouterr().out
        size, *losses[method] = re.search(r": ([\d,]+) numbers, held-out loss (\S+) before, (\S+) after", out).groups()
        assert size == "16,384"  # as many, so that the two can be compared
    assert losses["state"][0] == losses["prompt"][0]
    before, state, prompt = (float(x) for x in (losses["state"][0], losses["state"][1], losses["prompt"][1]))
    assert state < 0.8 * before and state < prompt
    path = embedded_model("finch-abc")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(path)(example.spaced(tunes[8]), return_tensors="pt")
    model = PeftModel.from_pretrained(model, tmp_path / "state").eval()
    assert abs(model(**inputs, labels=inputs["input_ids"]).loss.item() - state) < 0.3  # which counts the end, too


# Files of others.


@pytest.mark.parametrize("merged", [False, True], ids=["alone", "among weights"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_of_states(suffix, merged, tmp_path):
    """What the runtime of the authors computes from it."""
    tensors, weights, _ = read_golden("rwkv7_trainer")
    states_of = {f"blocks.{i}.att.time_state": tensors[f"initial.{i}.wkv"] for i in range(3)}
    content, path = (weights if merged else {}) | states_of, tmp_path / f"states{suffix}"
    save_file(content, path) if suffix == ".safetensors" else torch.save(content, path)

    torch.save(weights | (states_of if merged else {}), tmp_path / "trained.pth")
    report = convert(tmp_path / "trained.pth", tmp_path / "model", dtype="float32", progress=False)
    assert any("`subquad.load_time_states`" in note for note in report.notes) == merged
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    model = get_peft_model(model, StateTuningConfig(task_type="CAUSAL_LM"))
    load_time_states(model, path)
    with torch.no_grad():
        logits = read(model, tensors["input_ids"])
    torch.testing.assert_close(logits, tensors["logits_from_initial"], atol=1e-4, rtol=0)

    again = tmp_path / f"again{suffix}"
    save_time_states(model, again)
    written = load_file(again) if suffix == ".safetensors" else torch.load(again, weights_only=True)
    assert written.keys() == states_of.keys()
    assert all(torch.equal(written[name], x) for name, x in states_of.items())


@pytest.mark.parametrize("model_type", ["rwkv5", "rwkv6"])
def test_older_files_hold_the_transpose(model_type, tmp_path):
    model = adapted_model(model_type, {})
    save_time_states(model, tmp_path / "states.pth")
    written = torch.load(tmp_path / "states.pth", weights_only=True)
    first = next(iter(states(model).values()))
    torch.testing.assert_close(written["blocks.0.att.time_state"].mT, 1000 * first.detach())
    other = adapted_model(model_type, {}, seed=2)
    load_time_states(other, tmp_path / "states.pth")
    for name, state in states(model).items():
        torch.testing.assert_close(dict(states(other))[name], state)


@pytest.mark.parametrize("model_type", ["rwkv5", "rwkv6", "rwkv7"])
def test_files_of_web_rwkv_hold_the_transpose_of_the_others(model_type, tmp_path):
    model = adapted_model(model_type, {})
    for name in ("states.pth", "states.st"):
        save_time_states(model, tmp_path / name)
    trained = torch.load(tmp_path / "states.pth", weights_only=True)
    web = load_file(tmp_path / "states.st")
    assert web.keys() == trained.keys()
    for name, state in trained.items():
        assert web[name].dtype == torch.float16 and not torch.equal(state, state.mT)
        assert torch.equal(web[name].mT, state.half())
    other = adapted_model(model_type, {}, seed=2)
    load_time_states(other, tmp_path / "states.st")
    save_time_states(other, tmp_path / "again.pth")
    again = torch.load(tmp_path / "again.pth", weights_only=True)
    for name, state in trained.items():
        torch.testing.assert_close(again[name], state.half().float())


def test_states_that_float16_cannot_represent(tmp_path):
    model = adapted_model("rwkv6", {})
    with torch.no_grad():
        next(iter(states(model).values())).fill_(70.0)  # times a scale of 1000
    with pytest.raises(
        ValueError, match=r"states\.st: the state of layer 0 has numbers that float16 cannot represent"
    ):
        save_time_states(model, tmp_path / "states.st")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"emb.weight": torch.zeros(2)}, "holds no tensor with a name like blocks.0.att.time_state"),
        (
            {"blocks.0.att.time_state": torch.zeros(3, 16, 16)},
            "holds states of 0, and the model has the layers 0, 1, 2",
        ),
        ({f"blocks.{i}.att.time_state": torch.zeros(3, 8, 16) for i in range(3)}, r"layer 0 is \(3, 8, 16\), the"),
        ([1], "must hold a dictionary of tensors, found a list"),
        (b"nothing", "is not a PyTorch file, or is damaged"),
        (b"\x80\x02h\x05.", "is not a PyTorch file, or is damaged"),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_that_do_not_fit(content, message, tmp_path):
    path = tmp_path / "states.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    model = adapted_model("rwkv7", {})
    before = {name: state.clone() for name, state in states(model).items()}
    with pytest.raises(ValueError, match=message):
        load_time_states(model, path)
    assert all(torch.equal(state, before[name]) for name, state in states(model).items())


def test_models_without_files_of_states(tmp_path):
    with pytest.raises(ValueError, match="there are no files of `time_state` for this architecture"):
        save_time_states(adapted_model("raven", {}), tmp_path / "states.pth")
    with pytest.raises(ValueError, match="`model` is a Rwkv7ForCausalLM without the adapter"):
        save_time_states(tiny_model("rwkv7"), tmp_path / "states.pth")


def test_only_known_suffixes_are_written(tmp_path):
    with pytest.raises(ValueError, match=r"`path` must end with .pth or .safetensors or .st, got '.*states.bin'"):
        save_time_states(adapted_model("rwkv7", {}), tmp_path / "states.bin")
    assert not list(tmp_path.iterdir())


def test_compressed_files_are_refused(tmp_path):
    """A small one could hold states of any size."""
    model = adapted_model("rwkv7", {})
    save_time_states(model, tmp_path / "states.pth")
    with ZipFile(tmp_path / "states.pth") as whole, ZipFile(tmp_path / "small.pth", "w", ZIP_DEFLATED) as small:
        for member in whole.infolist():
            small.writestr(member.filename, whole.read(member))
    with pytest.raises(ValueError, match=r"small\.pth has the compressed member"):
        load_time_states(model, tmp_path / "small.pth")
