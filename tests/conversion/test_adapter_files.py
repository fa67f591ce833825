"""Adapters, and tuned states: what they are called, and what the model is with them."""

import json
import shutil

import peft
import pytest
import rwkv7_files
import torch
from format_cases import CASES, save
from rwkv_files import trainer_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from subquad_cli import main
from subquad_conversion import ConversionError, convert, recognise
from subquad_tokenizers import RwkvWorldTokenizerFast


SIZES = {"layers": 2, "heads": 2, "head_size": 8, "vocabulary": 20, "intermediate": 56}
MAKE = {
    "rwkv5": lambda: trainer_tensors("rwkv5", **SIZES),
    "rwkv6": lambda: trainer_tensors("rwkv6", **SIZES, ranks=(2, 5)),
    "rwkv7": lambda: rwkv7_files.trainer_tensors(**SIZES, ranks=(5, 2, 3, 7)),
}
LAYERS = ("att.key", "ffn.key", "ffn.value")  # of 16 x 16, 56 x 16 and 16 x 56
each_type = pytest.mark.parametrize("model_type", MAKE)


def weights(model_type="rwkv7"):
    """The trainer's names of the weights that the adapters here change, with the weights."""
    return {f"blocks.1.{layer}": MAKE[model_type]()[f"blocks.1.{layer}.weight"] for layer in LAYERS}


def lora(model_type="rwkv7", rank=3, prefix="", seed=0):
    torch.manual_seed(seed)
    made = {}
    for layer, weight in weights(model_type).items():
        made[f"{layer}.{prefix}lora_A"] = torch.randn(rank, weight.shape[1])
        made[f"{layer}.{prefix}lora_B"] = torch.randn(weight.shape[0], rank)
    return made


def base(tmp_path, model_type="rwkv7"):
    path = tmp_path / "base"
    if not path.exists():
        convert(save(tmp_path / "base.pth", MAKE[model_type]()), path, progress=False)
    return path


def merged(tmp_path, adapter, model_type="rwkv7", **options):
    """What becomes of the tensors of the trainer's names; and the notes."""
    source = save(tmp_path / "adapter.pth", adapter) if isinstance(adapter, dict) else adapter
    report = convert(source, tmp_path / "merged", base=base(tmp_path, model_type), progress=False, **options)
    convert(tmp_path / "merged", tmp_path / "merged.pth", to="pth", progress=False)
    return torch.load(tmp_path / "merged.pth", weights_only=True), report.notes


def assert_merged(found, expected, model_type="rwkv7"):
    """The layers of `expected` have these weights, and all other tensors are those of before."""
    before = MAKE[model_type]()
    for name, x in before.items():
        new = expected.get(name.removesuffix(".weight"), x)
        assert (new is x) == torch.equal(found[name], x), name
        torch.testing.assert_close(found[name], new, atol=1e-6, rtol=1e-6, msg=name)


# --- files of RWKV-PEFT ---


@pytest.mark.parametrize("prefix", ["", "model."])
@each_type
def test_lora(model_type, prefix, tmp_path):
    adapter = lora(model_type)
    named = {prefix + name: x.bfloat16().float() for name, x in adapter.items()}
    found, notes = merged(tmp_path, named, model_type, lora_alpha=6)
    adapter = {name.removeprefix(prefix): x for name, x in named.items()}
    expected = {n: w + 2 * adapter[f"{n}.lora_B"] @ adapter[f"{n}.lora_A"] for n, w in weights(model_type).items()}
    assert_merged(found, expected, model_type)
    assert "the adapter was merged into 3 weights: LoRA with an alpha of 6, rank 3" in notes


def test_lora_for_bases_in_every_layout(tmp_path):
    """The names in an adapter are the trainer's, whatever the base's are."""
    adapter = save(tmp_path / "adapter.pth", lora())
    expected, _ = merged(tmp_path, adapter, lora_alpha=3)
    for layout in ("trainer", "hub", "fla", "rs"):
        case = CASES[f"rwkv7-{layout}"]
        tensors = getattr(rwkv7_files, f"{layout}_tensors")(**SIZES, ranks=(5, 2, 3, 7))
        source = case.write_file(tmp_path / f"{layout}.safetensors", tensors)
        convert(adapter, tmp_path / f"{layout}.pth", to="pth", base=source, lora_alpha=3, progress=False)
        found = torch.load(tmp_path / f"{layout}.pth", weights_only=True)
        assert found.keys() == expected.keys() and all(torch.equal(found[n], x) for n, x in expected.items())


def test_pissa(tmp_path):
    """The model was trained without the product that the adapter was at first, and without a scale."""
    adapter, first = lora(), lora(prefix="init_", seed=1)
    save(tmp_path / "init.pth", {f"model.{name}": x for name, x in first.items()})
    found, notes = merged(tmp_path, adapter, pissa_init=tmp_path / "init.pth")
    expected = {}
    for n, w in weights().items():
        expected[n] = w - first[f"{n}.init_lora_B"] @ first[f"{n}.init_lora_A"]
        expected[n] = expected[n] + adapter[f"{n}.lora_B"] @ adapter[f"{n}.lora_A"]
    assert_merged(found, expected)
    assert "the adapter was merged into 3 weights: PiSSA, rank 3" in notes


def blockwise(weight, block, r):
    """Block by block, in plain loops."""
    new = weight.clone()
    for i in range(0, len(weight), r):
        for j in range(0, weight.shape[1], r):
            old, x = weight[i : i + r, j : j + r], block(i // r, j // r)
            new[i : i + r, j : j + r] = old + old @ x + x
    return new


@pytest.mark.parametrize("form", ["bone inputs", "bone outputs", "bone flat", "disha inputs", "disha shared"])
def test_blocks(form, tmp_path):
    torch.manual_seed(0)
    part, kind = form.split()
    adapter, expected, r = {}, {}, 8
    for name, w in weights().items():
        if kind == "shared":
            shared = torch.randn(6, len(w))  # 6 divides neither 16 nor 56
            expected[name] = torch.stack([w[:, j] + shared[j % 6] for j in range(w.shape[1])], dim=1)
            adapter[f"{name}.{part}"] = shared
            continue
        blocks = torch.randn(w.shape[kind == "inputs"] // r, r, r)
        expected[name] = blockwise(w, lambda i, j, x=blocks: x[j if kind == "inputs" else i], r)
        adapter[f"{name}.{part}"] = blocks.flatten(0, 1) if kind == "flat" else blocks
    found, notes = merged(tmp_path, adapter)
    assert_merged(found, expected)
    assert any("merged into 3 weights: " in note for note in notes)


def test_weights_that_were_trained_as_a_whole(tmp_path):
    adapter = lora("rwkv6") | {
        "blocks.0.att.time_decay": torch.ones(2, 8),
        "blocks.1.ln1.bias": torch.ones(16),
    }
    adapter["blocks.0.att.time_state"] = torch.zeros(2, 8, 8)
    found, notes = merged(tmp_path, adapter, "rwkv6", lora_alpha=6)
    assert (found["blocks.0.att.time_decay"] == 1).all() and (found["blocks.1.ln1.bias"] == 1).all()
    assert any("2 tensors of the adapter, such as blocks.0.att.time_decay, replace" in note for note in notes)
    assert any("`subquad.load_time_states` reads it" in note for note in notes)


def without(tensors, *names):
    return {name: x for name, x in tensors.items() if name not in names}


KEY = "blocks.1.att.key"


@pytest.mark.parametrize(
    ("adapter", "options", "message"),
    [
        (lora(), {}, "LoRA or of PiSSA, whose tensors have the same names. For LoRA give `lora_alpha`"),
        (lora(), {"lora_alpha": 0.0}, "`lora_alpha` must be a positive number, got 0.0"),
        (lora(), {"lora_alpha": 1, "base": None}, "`lora_alpha` needs `base`"),
        (lora(), {"pissa_init": lora()}, f"`pissa_init`: .*init.pth has no init_lora_A and init_lora_B of {KEY}"),
        (lora(), {"lora_alpha": 1, "pissa_init": lora(prefix="init_")}, "For LoRA give `lora_alpha`"),
        ({f"{KEY}.bone": torch.zeros(2, 8, 8)}, {}, "blocks of square weights only"),
        ({f"{KEY}.bone": torch.zeros(2, 4, 4)}, {}, rf"{KEY}.bone has the shape \(2, 4, 4\).*weight \(16, 16\)"),
        ({f"{KEY}.bone": torch.zeros(0, 8, 8)}, {}, r"the shape \(0, 8, 8\)"),
        ({f"{KEY}.disha": torch.zeros(4, 16)}, {"lora_alpha": 1}, "`lora_alpha` does not apply to .*called disha"),
        (without(lora(), f"{KEY}.lora_B"), {"lora_alpha": 1}, "every layer has lora_A and lora_B, or all have one of"),
        (lora() | {f"{KEY}.lora_M": torch.zeros(1, 16)}, {"lora_alpha": 1}, f"no weight for {KEY}.lora_M"),
        (lora() | {f"{KEY}.lora_A": torch.zeros(3, 8)}, {"lora_alpha": 1}, r"the shapes \(3, 8\) and \(16, 3\)"),
        (lora() | {f"{KEY}.weight": torch.zeros(16, 16)}, {"lora_alpha": 1}, f"weights of layers .*: {KEY}.weight"),
        (lora() | {"blocks.0.ln1.bias": torch.zeros(8)}, {"lora_alpha": 1}, r"ln1.bias has the shape \(8,\)"),
        ({"blocks.9.att.key.lora_A": torch.zeros(3, 16)}, {"lora_alpha": 1}, "no weight for blocks.9.att.key.lora_A"),
        (rwkv7_files.trainer_tensors(**SIZES), {}, "`base` is for an adapter, and .*adapter.pth is none"),
    ],
)
def test_what_cannot_be_merged(adapter, options, message, tmp_path):
    source, options = save(tmp_path / "adapter.pth", adapter), {"base": base(tmp_path), **options}
    if "pissa_init" in options:
        options["pissa_init"] = save(tmp_path / "init.pth", options["pissa_init"])
    with pytest.raises(ConversionError, match=message):
        convert(source, tmp_path / "out", progress=False, **options)
    assert not (tmp_path / "out").exists()


# --- directories of PEFT ---


def adapted(tmp_path, config):
    """A model with an adapter of PEFT whose numbers are random, and the directory of the adapter."""
    torch.manual_seed(0)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base(tmp_path)), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) / 4)
    model.save_pretrained(tmp_path / "adapter")
    return model.eval(), tmp_path / "adapter"


TARGETS = {"target_modules": ["key", "value", "receptance"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=4, lora_alpha=6, rank_pattern={"blocks.1.ffn.key": 2}, **TARGETS),
        peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, modules_to_save=["head"], **TARGETS),
        peft.MissConfig(r=6, **TARGETS),
    ],
    ids=["lora", "rslora", "miss"],
)
def test_directories_of_peft(config, tmp_path):
    """The merged model computes what PEFT does; the tokenizer beside the adapter comes along."""
    model, adapter = adapted(tmp_path, config)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        expected = model(ids).logits
    assert (expected - model.base_model.model.from_pretrained(base(tmp_path))(ids).logits).abs().max() > 0.1
    report = convert(adapter, tmp_path / "merged", base=base(tmp_path), progress=False)
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert any("the adapter was merged into" in note for note in report.notes)


def test_a_directory_of_peft_with_the_names_of_the_trainer(tmp_path):
    """RWKV-PEFT uses PEFT on its own model."""
    expected, _ = merged(tmp_path, lora(), lora_alpha=6)
    (tmp_path / "adapter").mkdir()
    names = {f"base_model.model.{name}.weight": x for name, x in lora().items()}
    save_file(names, tmp_path / "adapter/adapter_model.safetensors")
    settings = peft.LoraConfig(r=3, lora_alpha=6).to_dict() | {"target_modules": ["key"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    out = tmp_path / "again.pth"
    convert(tmp_path / "adapter", out, to="pth", base=base(tmp_path), progress=False)
    found = torch.load(out, weights_only=True)
    assert all(torch.equal(found[name], x) for name, x in expected.items())

    for changed, message in (
        ({"use_dora": True}, "with `use_dora` True is not merged here"),
        ({"alpha_pattern": {"key": 2}}, "`alpha_pattern`"),
        ({"init_lora_weights": "pissa"}, "with `init_lora_weights` 'pissa' is not merged here"),
        ({"of_tomorrow": [1]}, r"with `of_tomorrow` \[1\] is not merged here"),
        ({"lora_alpha": None}, "`lora_alpha` in its adapter_config.json must be a number, got None"),
        ({"peft_type": "VERA"}, r"an adapter of PEFT \(VERA\), not a model. If it can be merged, `PeftModel.from"),
        ({"peft_type": "STATE_TUNING"}, "`subquad.save_time_states` writes it"),
    ):
        (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings | changed))
        with pytest.raises(ConversionError, match=message):
            convert(tmp_path / "adapter", tmp_path / "out.pth", to="pth", base=base(tmp_path), progress=False)
    assert not (tmp_path / "out.pth").exists()


def test_the_tokenizer_beside_an_adapter(tmp_path):
    _, adapter = adapted(tmp_path, peft.LoraConfig(r=4, **TARGETS))
    RwkvWorldTokenizerFast(eos_token="<|im_end|>").save_pretrained(adapter)
    report = convert(adapter, tmp_path / "merged", base=base(tmp_path), progress=False)
    assert report.tokenizer == f"copied from {adapter}"
    assert (tmp_path / "merged/tokenizer.json").read_bytes() == (adapter / "tokenizer.json").read_bytes()


# --- what an adapter and a state are called ---


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lora(), r"this is an adapter, not a model. Give the model .* as `base`"),
        (lora("rwkv6") | {"blocks.0.att.time_maa_x": torch.zeros(1, 1, 16)}, "this is an adapter, not a model"),
        ({f"{KEY}.bone": torch.zeros(2, 8, 8)}, "this is an adapter, not a model"),
        (lora(prefix="init_"), "what PiSSA took out of a model. .*`pissa_init`"),
        ({"blk.0.time_mix_key.weight.lora_a": torch.zeros(2)}, "an adapter of llama.cpp"),
        (
            {f"blocks.{i}.att.time_state": torch.zeros(2, 8, 8) for i in range(2)},
            "this is a tuned initial state, not a model. `subquad.load_time_states` reads it",
        ),
    ],
)
def test_files_without_a_model(tensors, message, tmp_path, capsys):
    source = save(tmp_path / "tuned.pth", tensors)
    with pytest.raises(ConversionError, match=message):
        convert(source, tmp_path / "out", progress=False)
    assert main(["info", str(source)]) == 1
    assert message.split(".")[0].partition("this is ")[2] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_directories_without_a_model(tmp_path, capsys):
    _, adapter = adapted(tmp_path, peft.LoraConfig(r=4, **TARGETS))
    what = f"{adapter} holds an adapter of PEFT (LORA) for {base(tmp_path)}, not a model. Give the model as `base`"
    what = what.replace("Give the model as", "Give the model that it was trained on as")
    with pytest.raises(ConversionError) as error:
        recognise(adapter)
    assert what in str(error.value)
    for code, *command in ((1, "info", str(adapter)), (2, "convert", str(adapter), str(tmp_path / "out"))):
        assert main(command) == code
        assert what in capsys.readouterr().err.replace("--base", "`base`")
    shutil.copy(base(tmp_path) / "config.json", adapter)  # some trainers put it there
    assert main(["info", str(adapter)]) == 1
    assert what in capsys.readouterr().err
    shutil.copy(base(tmp_path) / "model.safetensors", adapter)
    notes = convert(adapter, tmp_path / "out", progress=False).notes
    assert f"the adapter in {adapter} was left out" in notes


def test_the_command(tmp_path, capsys):
    source = save(tmp_path / "adapter.pth", lora())
    command = ["convert", str(source), str(tmp_path / "out"), "--base", str(base(tmp_path))]
    assert main(command) == 1
    assert "For LoRA give `lora_alpha` (--lora-alpha)" in capsys.readouterr().err
    assert main([*command, "--lora-alpha", "6"]) == 0
    text = capsys.readouterr().out
    assert "Recognised Goose (RWKV-7), Hub model" in text
    assert "Note: the adapter was merged into 3 weights: LoRA with an alpha of 6, rank 3." in text
    expected, _ = merged(tmp_path, lora(), lora_alpha=6)
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[f"rwkv7.{KEY}.weight"], expected[f"{KEY}.weight"])


# --- tuned states among the weights ---


@pytest.mark.parametrize("name", ["rwkv5-trainer", "rwkv6-trainer", "rwkv7-trainer", "rwkv6-web", "visual-rwkv6"])
def test_a_model_with_a_tuned_state(name, tmp_path):
    case = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(case.fields))
    prefix = "rwkv." if name.startswith("visual") else ""
    states = {f"{prefix}blocks.{i}.att.time_state": torch.ones(3, 4, 4) for i in range(2)}
    source = case.write_file(tmp_path / "trained.pth", case.tensors | states)
    assert recognise(source).format == name
    report = convert(source, tmp_path / "model", config=tmp_path / "config.json", tokenizer="none", progress=False)
    assert "the tuned initial state was left out; `subquad.load_time_states` reads it into an adapter" in report.notes
    assert load_file(tmp_path / "model/model.safetensors").keys() == case.written.keys()
