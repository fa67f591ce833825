"""Weights of 8 and 4 bits, on every architecture: what they stand for, files, and what is refused."""

import copy
import json

import pytest
import torch
from cases import GREEDY, each_model, each_model_case, lm_class, model_class, random_ids, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.trainer import Trainer

import subquad
import subquad_cli as cli
from subquad.quantization.quantized import Int4Linear, Int8Embedding, IntegerLayer
from subquad_kernels.int4_linear import unpack_groups


METHODS = pytest.mark.parametrize("method", [subquad.Int8Config, subquad.Int4Config])


def load(model, path, method=subquad.Int8Config, excluded=None, **options):
    """The model, saved and loaded with integers."""
    model.save_pretrained(path)
    return type(model).from_pretrained(path, quantization_config=method(excluded), **options)


def integer_layers(model) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, IntegerLayer)}


@torch.no_grad()
def in_float(quantized, source):
    """The source, with the numbers that the integers stand for."""
    source = copy.deepcopy(source)
    for name, module in integer_layers(quantized).items():
        if isinstance(module, Int4Linear):
            assert module.weight.dtype == torch.uint8 and module.weight_scale.dtype == torch.bfloat16
            weight = unpack_groups(module.weight, module.weight_scale)
        else:
            assert module.weight.dtype == torch.int8 and module.weight_scale.dtype == torch.float32
            weight = module.weight * module.weight_scale[:, None]
        source.get_submodule(name).weight.copy_(weight)
    return source


@pytest.mark.parametrize(("method", "tied"), [(subquad.Int8Config, True), (subquad.Int4Config, False)])
@each_model_case
def test_weights_and_files(case, method, tied, tmp_path):
    """The matrices are rounded, all else is as it was, and a file gives the same model and the same file again."""
    source = case.model(tie_word_embeddings=tied)
    model = load(source, tmp_path / "source", method)
    kept = set(subquad.models.REGISTRY[case.model_type].float_layers)
    matrices = {name for name, module in source.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    left = {name for name in matrices if kept & set(name.split("."))}
    layers = integer_layers(model)
    assert layers.keys() == matrices - left
    four_bits = {name for name, module in layers.items() if isinstance(module, Int4Linear)}
    embeddings = {model.get_input_embeddings(), model.get_output_embeddings()}
    assert four_bits == {
        name
        for name, module in layers.items()
        if method is subquad.Int4Config and module not in embeddings
        and not isinstance(module, Int8Embedding)
        and module.out_features % 16 == 0 and module.in_features % 32 == 0
    }  # fmt: skip
    rounded, before = in_float(model, source), dict(source.named_parameters())
    for name, parameter in rounded.named_parameters():
        module, error = name.rpartition(".")[0], parameter - before[name]
        if module in four_bits and not name.endswith("bias"):
            assert error.norm() <= 0.12 * before[name].norm(), name
        else:
            assert error.abs().max() <= before[name].abs().max() / 250, name
        if module not in layers or name.endswith("bias"):
            assert torch.equal(model.get_parameter(name), before[name]), name
    text = case.text(2, 12)
    logits, expected = model(**text).logits, rounded(**text).logits
    assert (logits - expected).norm() / expected.norm() < 0.15  # the activations are rounded too
    model.save_pretrained(tmp_path / "int8")
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"] == {
        "quant_method": "subquad_int4" if method is subquad.Int4Config else "subquad_int8",
        "modules_to_not_convert": [],
    }
    again = type(model).from_pretrained(tmp_path / "int8")
    assert torch.equal(again(**text).logits, logits)
    again.save_pretrained(tmp_path / "again")
    file = "model.safetensors"
    assert (tmp_path / "int8" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    assert again.num_parameters() == source.num_parameters()


@each_model
def test_bfloat16(model_type, tmp_path):
    """The other weights have the dtype that is asked for, the scales stay float32, also if the model is cast."""
    ids, model = random_ids(2, 9), load(tiny_model(model_type), tmp_path, subquad.Int4Config, dtype="bfloat16")
    assert model.dtype == model(ids).logits.dtype == torch.bfloat16
    cast = copy.deepcopy(model).to(torch.float32)
    assert cast.dtype == cast(ids).logits.dtype == torch.float32
    for name, layer in integer_layers(cast).items():
        assert layer.weight.dtype == (torch.uint8 if isinstance(layer, Int4Linear) else torch.int8)
        assert torch.equal(layer.weight_scale, model.get_submodule(name).weight_scale)


@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [(name, auto_class) for name in ("rwkv7", "avey-b") for auto_class in subquad.ARCHITECTURES[name][2]],
)
def test_heads(model_type, auto_class, tmp_path):
    """A head that is no language model's stays in floating point, and may be made anew."""
    source = tiny_model(model_type)
    source.save_pretrained(tmp_path)
    config, with_head = subquad.Int8Config(), model_class(model_type, auto_class)
    model = with_head.from_pretrained(tmp_path, quantization_config=config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith(model.base_model_prefix + "."):
            kept = subquad.models.REGISTRY[model_type].float_layers
            assert auto_class != lm_class(model_type) or set(name.split(".")) & set(kept)
    model.save_pretrained(tmp_path / "int8")
    again = with_head.from_pretrained(tmp_path / "int8")
    ids = random_ids(1, 8)
    for found, expected in zip(again(ids).to_tuple(), model(ids).to_tuple(), strict=True):
        if isinstance(found, torch.Tensor):
            torch.testing.assert_close(found, expected)


@pytest.mark.fast
def test_excluded_layers(tmp_path):
    source = tiny_model("rwkv6", tie_word_embeddings=True)
    model = load(source, tmp_path / "a", excluded=[r".*\.receptance", "rwkv.blocks.1", "head"])
    names = integer_layers(model)
    assert names and not [name for name in names if name.endswith("receptance") or ".1." in name]
    assert "head" not in names and "rwkv.embeddings" not in names  # the two are tied
    model.save_pretrained(tmp_path / "b")
    base = subquad.Rwkv6Model.from_pretrained(tmp_path / "b")
    assert {f"rwkv.{name}" for name in integer_layers(base)} == set(names)
    ids = random_ids(1, 8)
    assert torch.equal(base(ids).last_hidden_state, model.rwkv(ids).last_hidden_state)
    with pytest.raises(ValueError, match="`modules_to_not_convert` must be a list of strings, got 'head'"):
        subquad.Int8Config("head")
    with pytest.raises(ValueError, match=r"Rwkv6ForCausalLM has no layer 'heads'\. Did you mean `head`\?"):
        load(source, tmp_path / "c", excluded=["heads"])
    with pytest.raises(ValueError, match="subquad_int8 has no field 'bits'"):
        subquad.Int8Config(bits=4)


@pytest.mark.fast
def test_generation_and_compilation(tmp_path):
    """A row of a batch writes what it writes alone, and a compiled model computes the same."""
    model, ids = load(tiny_model("rwkv6", num_hidden_layers=1), tmp_path, subquad.Int4Config), random_ids(3, 9)
    assert len({*map(type, integer_layers(model).values())}) == 3  # layers of every kind
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    batch = model.generate(ids, attention_mask=mask, max_new_tokens=8, **GREEDY)
    for row, start in enumerate((4, 0, 0)):
        alone = model.generate(ids[row : row + 1, start:], max_new_tokens=8, **GREEDY)
        assert torch.equal(batch[row : row + 1, start:], alone)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits)


@pytest.mark.fast
def test_what_is_refused(tmp_path):
    source = tiny_model("rwkv6")
    model, ids = load(source, tmp_path / "source"), random_ids(1, 6)
    for place in ("cuda", {"": 0}, {"rwkv": "cpu", "head": "disk"}):
        with pytest.raises(ValueError, match="`device_map` must be left out or 'cpu', got .*computed on a CPU"):
            load(source, tmp_path / "source", device_map=place)
    with pytest.raises(ValueError, match=r"Int8Embedding computes on a CPU only, and cannot be moved to cuda"):
        model._apply(lambda tensor: _Elsewhere(tensor))
    with pytest.raises(RuntimeError, match="Weights of 8 and 4 bits are for inference: no gradient"):
        model(ids, labels=ids).loss.backward()
    with pytest.raises(ValueError, match="Target module Int8Linear.*is not supported"):
        get_peft_model(model, LoraConfig())
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        Trainer(model, TrainingArguments(tmp_path / "trainer", report_to=[]))
    with pytest.raises(ValueError, match="has weights in subquad_int8, which need the package subquad"):
        model.save_pretrained(tmp_path / "code", self_contained=True)
    assert not (tmp_path / "code").exists()
    model.save_pretrained(tmp_path / "int8")
    with pytest.raises(ValueError, match="has weights in subquad_int8, which need the package subquad"):
        subquad.hub.export.export(tmp_path / "int8", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    model.base_model.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="head.weight of Rwkv6ForCausalLM is not in the checkpoint, and subquad_int8"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    fields = json.loads((tmp_path / "source" / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "subquad_int8"}
    (tmp_path / "source" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"source: rwkv.*\.weight must hold the integers of subquad_int8, got F32"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "int8" / "model.safetensors")
    del tensors["rwkv.blocks.0.attention.key.weight_scale"]
    save_file(tensors, tmp_path / "int8" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="weight_scale of Rwkv6ForCausalLM is not in the checkpoint"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    with torch.no_grad():
        source.rwkv.blocks[0].attention.key.weight[0, 0] = torch.inf
    with pytest.raises(Exception, match="NaN or infinite"):
        load(source, tmp_path / "infinite")


@pytest.mark.parametrize(("method", "with_head"), [(subquad.Int8Config, True), (subquad.Int4Config, False)])
def test_directories_with_other_tensors(method, with_head, tmp_path):
    """C code reads integers and scales as they are: a file of other dtypes or shapes is refused when it is loaded."""
    model = load(tiny_model("rwkv7", hidden_size=64), tmp_path / "source", method)
    model.save_pretrained(tmp_path / "stored")
    file = tmp_path / "stored" / "model.safetensors"
    stored, cls = load_file(file), type(model) if with_head else type(model.base_model)
    scales = [name for name in stored if name.endswith("weight_scale")]
    blocks = [name for name in scales if ".blocks.0." in name]
    assert {stored[name.removesuffix("_scale")].dim() for name in blocks} == {3 if method is subquad.Int4Config else 2}
    for scale in (blocks[0], next(name for name in scales if "emb" in name)):
        weight = scale.removesuffix("_scale")
        for name, change in (
            *((scale, lambda x, dtype=dtype: x.to(dtype)) for dtype in (torch.int8, torch.int64, torch.bool)),
            *((weight, lambda x, dtype=dtype: x.to(dtype)) for dtype in (torch.float32, torch.float16, torch.int32)),
            (weight, lambda x: x.view(torch.int8 if x.dtype == torch.uint8 else torch.uint8)),
            *((name, lambda x: x.flatten()[:16].clone()) for name in (scale, weight)),
            *((name, lambda x: torch.cat((x, x))) for name in (scale, weight)),
        ):
            save_file({**stored, name: change(stored[name])}, file, {"format": "pt"})
            with pytest.raises((ValueError, RuntimeError), match=name.partition(".")[2].replace(".", r"\.")):
                cls.from_pretrained(tmp_path / "stored")
    save_file(stored, file, {"format": "pt"})
    cls.from_pretrained(tmp_path / "stored")


@METHODS
@pytest.mark.fast
def test_states_with_other_tensors(method, tmp_path):
    """`load_state_dict` refuses what torch would cast, or with `assign=True` take."""
    model = load(tiny_model("rwkv7", hidden_size=64), tmp_path, method)
    stored, ids = {name: x.clone() for name, x in model.state_dict().items()}, random_ids(1, 5)
    expected = model(ids).logits
    scale = next(name for name in stored if name.endswith("key.weight_scale"))
    weight = scale.removesuffix("_scale")
    for assign in (True, False):
        for name, x in (
            (scale, stored[scale].half()),
            (scale, stored[scale].to(torch.int8)),
            (scale, stored[scale][:1]),
            (weight, stored[weight].float()),
        ):
            with pytest.raises(RuntimeError, match=f"`{name}` must be .* and contiguous, got"):
                model.load_state_dict({**stored, name: x}, assign=assign)
        model.load_state_dict(stored, assign=assign)
        assert torch.equal(model(ids).logits, expected)
    tied = load(tiny_model("rwkv7", tie_word_embeddings=True), tmp_path / "tied", method)
    tied.load_state_dict(tied.state_dict())
    with pytest.raises(RuntimeError, match="`head.weight_scale` belongs to the embeddings, which `assign=True`"):
        tied.load_state_dict(tied.state_dict(), assign=True)


@METHODS
@pytest.mark.fast
def test_command_line(method, tmp_path, capsys):
    """`subquad convert --quantize` writes what loading with integers and saving does; other commands read it."""
    name = "int4" if method is subquad.Int4Config else "int8"
    path, out = str(subquad.embedded_model("finch-abc")), str(tmp_path / name)
    assert cli.main(["convert", path, out, "--quantize", name]) == 0
    assert "958,976 parameters" in (printed := capsys.readouterr().out) and f" in {name}, to" in printed
    loaded = AutoModelForCausalLM.from_pretrained(path, quantization_config=method())
    found, expected = AutoModelForCausalLM.from_pretrained(out).state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert cli.main(["info", out, "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["dtype"] == f"I{name[3:]}" and described["parameters"] == 958_976
    assert described["weight_bytes"] == sum(x.nbytes for x in expected.values())
    assert cli.main(["generate", "X:1", "--model", out, "--max-new-tokens", "4", "--greedy"]) == 0
    assert capsys.readouterr().out.startswith("X:1")
    for command, said in (("export", name), ("convert", f"{out} is quantised already")):
        assert cli.main([command, out, str(tmp_path / "out")]) == 1
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert cli.main(["convert", path, str(tmp_path / "out.gguf"), "--to", "gguf", "--quantize", name]) == 2
    assert "--quantize is for a directory of this package, not for gguf" in capsys.readouterr().err


class _Elsewhere:
    """What a tensor becomes that is moved to a GPU."""

    def __init__(self, tensor):
        self.device = torch.device("cuda", 0)
