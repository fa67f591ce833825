"""Quantised weights on every architecture: torchao's and bitsandbytes', inference, LoRA, files."""

import copy
import runpy
import sys
from pathlib import Path

import pytest
import torch
from cases import CASES, CAUSAL, ENCODERS, lm_class, model_class, random_ids, tiny_model
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup
from torchao.utils import TorchAOBaseTensor
from transformers import BitsAndBytesConfig, TorchAoConfig
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

import subquad


EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "quantize.py"

METHODS = {
    "int8": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
    "int8-dynamic": lambda: TorchAoConfig(Int8DynamicActivationInt8WeightConfig()),
    "int4": lambda: TorchAoConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(8))),
    "llm-int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}
TASKS = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
}
# Those that round the activations too, to 8 bits.
DYNAMIC = ("int8-dynamic", "llm-int8")


def model_of(model_type, auto_class=None):
    # On a CPU bitsandbytes reads 4-bit weights wrongly if the width of a layer's input is not a multiple of 64.
    return tiny_model(model_type, auto_class, **CASES[model_type].wide)


def load(model_type, path, method, auto_class=None, **options):
    model = model_class(model_type, auto_class).from_pretrained(path, quantization_config=METHODS[method](), **options)
    # For inference on some CPUs bitsandbytes packs 4-bit weights, which fails in layers with fewer than 32 outputs.
    return model.train(method == "nf4")


def is_quantized(weight) -> bool:
    return isinstance(weight, TorchAOBaseTensor) or weight.dtype in (torch.int8, torch.uint8)


@torch.no_grad()
def in_float(quantized, source):
    """The source with the numbers that the quantised weights stand for, and the names of their layers."""
    source, names = copy.deepcopy(source), set()
    for name, module in quantized.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and is_quantized(weight):
            names.add(name)
            torchao = isinstance(weight, TorchAOBaseTensor)
            values = weight.dequantize() if torchao else dequantize_bnb_weight(weight, getattr(module, "state", None))
            target = source.get_submodule(name).weight
            assert (values - target).norm() / target.norm() < 0.15
            target.copy_(values)
    return source, names


def linear_layers(model):
    prefix = f"{model.base_model_prefix}."
    return {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name.startswith(prefix)}


def products_saturate() -> bool:
    """Whether this CPU adds products of 8-bit numbers in 16 bits, as those without VNNI do."""
    x = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(x, x) != 64 * 127 * 127).any())


def assert_near(found, expected, tolerance):
    assert (found - expected).norm() / expected.norm() < tolerance


@pytest.mark.quick_cases("rwkv6-*", "raven-*", "avey-b-*")
@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        (name, method)
        for n, name in enumerate(CAUSAL | ENCODERS)
        for method in (list(METHODS)[n % 3], list(METHODS)[3 + n % 2])  # one of each package
    ],
)
def test_quantized(model_type, method, tmp_path):
    """Every linear layer below the head is quantised, nothing else is touched, and nothing else changes the result."""
    source, ids = model_of(model_type), random_ids(2, 20)
    source.save_pretrained(tmp_path / "source")
    model = load(model_type, tmp_path / "source", method)
    expected, names = in_float(model, source)
    assert names == linear_layers(source)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] not in names or name.endswith("bias"):
            assert torch.equal(parameter, source.get_parameter(name)), name
    logits = model(ids).logits
    tolerance = 0.25 if method in DYNAMIC else 1e-4  # random models are sensitive to rounded activations
    if method == "int8-dynamic" and products_saturate():
        tolerance = 0.6
    assert_near(logits, expected(ids).logits, tolerance)
    assert not torch.allclose(logits, source(ids).logits, atol=1e-3)
    if CASES[model_type].causal and method not in (*DYNAMIC, "nf4"):
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(model.generate(ids, **options), expected.generate(ids, **options))
    low = load(model_type, tmp_path / "source", method, dtype="bfloat16")(ids).logits
    assert low.dtype == torch.bfloat16
    assert_near(low.float(), expected(ids).logits, 0.6)
    model.save_pretrained(tmp_path / "quantized")
    again = type(model).from_pretrained(tmp_path / "quantized").train(model.training)
    assert torch.equal(again(ids).logits, logits)


# Every head of two architectures, and of the others the one for language.
HEADS = [
    (name, auto_class)
    for name in CAUSAL | ENCODERS
    for auto_class in subquad.ARCHITECTURES[name][2]
    if auto_class == lm_class(name) or name in ("rwkv6", "avey-b")
]


@pytest.mark.quick_cases("rwkv6-*", "raven-*", "avey-b-*")
@pytest.mark.parametrize(
    ("model_type", "auto_class", "method"), [(*head, ("int8", "nf4")[n % 2]) for n, head in enumerate(HEADS)]
)
def test_lora_on_quantized_weights(model_type, auto_class, method, tmp_path):
    """A head made anew stays in float and is trained along."""
    source, ids = model_of(model_type, auto_class), random_ids(2, 20)
    (source if auto_class == lm_class(model_type) else source.base_model).save_pretrained(tmp_path / "source")

    def base(seed):
        torch.manual_seed(seed)
        model = load(model_type, tmp_path / "source", method, auto_class)
        assert in_float(model.base_model, source.base_model)[1]
        return prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})

    def run(model):
        out = model(input_ids=ids)
        return torch.cat([x.float().flatten() for x in out.values() if isinstance(x, torch.Tensor)])

    model = base(0)
    layers = {name for name, module in model.named_modules() if is_quantized(getattr(module, "weight", ids))}
    assert layers
    task = TASKS.get(auto_class)
    model = get_peft_model(model, LoraConfig(task_type=task)).train()
    before = run(model)
    before.square().mean().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and "lora_A" not in name}
    assert not [name for name, p in trained.items() if not p.grad.any()]
    with torch.no_grad():
        for parameter in trained.values():
            parameter -= 1e-3 * parameter.grad / parameter.grad.norm()
    after = run(model)
    assert after.square().mean() < before.square().mean()
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(1), tmp_path / "adapter")
    torch.testing.assert_close(run(loaded.train()), after)


@pytest.mark.fast
@pytest.mark.parametrize("model_type", ["rwkv6", "raven", "avey-b"])
def test_merging_into_int8(model_type, tmp_path):
    """What is merged is quantised anew."""
    model_of(model_type).save_pretrained(tmp_path)
    model, ids = load(model_type, tmp_path, "int8"), random_ids(2, 20)
    adapted = get_peft_model(model, LoraConfig(init_lora_weights=False))
    expected = adapted.eval()(input_ids=ids).logits
    merged = adapted.merge_and_unload()
    assert_near(merged(ids).logits, expected, 0.1)
    assert all(is_quantized(merged.get_submodule(name).weight) for name in linear_layers(merged))


def test_example(tmp_path, monkeypatch, capsys):
    text = "X:1\nT:A Tune\nM:4/4\nL:1/8\nK:G\nGABc dBGB|cAFA G4|GABc dBGB|cAFA G4:|\n"
    (tmp_path / "text").write_text(f"{text}\n{text}\n{text}")
    command = f"quantize.py --text {tmp_path / 'text'} --parts 2 --methods float32 int8 int4 llm-int8 nf4 --device cpu"
    monkeypatch.setattr(sys, "argv", f"{command} --prompt 8 --new-tokens 2 --repeats 1 --threads 1".split())
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    head, *rows, last = capsys.readouterr().out.strip().splitlines()
    assert head.split() == ["bits/byte", "change", "MB", "read/s", "write/s"]
    assert last.startswith("nf4          does not run here: on a CPU the widths of layers must be multiples of 64")
    rows = {name: values for name, *values in map(str.split, rows)}
    assert list(rows) == ["float32", "int8", "int4", "llm-int8"]
    for name, (loss, change, size, read, write) in rows.items():
        assert abs(float(loss) / float(rows["float32"][0]) - 1 - float(change.rstrip("%")) / 100) < 1e-3
        assert 0.5 < float(loss) < 4 and float(read.replace(",", "")) > 0 and float(write) > 0
        assert (float(size) < 0.45 * float(rows["float32"][2])) == (name != "float32")
        assert abs(float(change.rstrip("%"))) < {"float32": 0.01, "int4": 5}.get(name, 1)
