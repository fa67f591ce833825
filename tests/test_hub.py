"""Repositories that load without this package."""

import ast
import json
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cases import CAUSAL, ENCODERS, each_model, random_ids, small_world, tiny_model
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from visual_cases import save_visual

import subquad
from subquad.hub import export as hub
from subquad_cli import main
from subquad_tokenizers import ByteTokenizer


OURS = ("subquad", "subquad_kernels", "subquad_tokenizers", "subquad_conversion")

# Runs in an environment with torch, transformers and their dependencies alone.
ELSEWHERE = """
import sys
from importlib.util import find_spec

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer, StaticCache,
    pipeline,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

for name in ("subquad", "subquad_kernels", "subquad_tokenizers", "peft", "accelerate", "kernels"):
    assert not find_spec(name), name
results, ids = {}, load_file(sys.argv[1] + "/ids.safetensors")["ids"]
for name in sys.argv[2:]:
    path = f"{sys.argv[1]}/{name}"
    encoder = name in ENCODERS
    auto_class = AutoModelForMaskedLM if encoder else AutoModelForCausalLM
    model = auto_class.from_pretrained(path, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    with torch.no_grad():
        results[f"{name}.logits"] = model(ids).logits
    if not encoder:
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        results[f"{name}.tokens"] = model.generate(ids, **options)
        assert isinstance(model.new_cache(static=True, max_cache_len=32), StaticCache)
        assert pipeline("text-generation", model, tokenizer=tokenizer)("A", max_new_tokens=2)
        assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # by which Trainer knows it
    classifier = AutoModelForSequenceClassification.from_pretrained(f"{path}-classifier", trust_remote_code=True)
    results[f"{name}.classes"] = classifier.eval()(ids).logits.detach()
    results[f"{name}.encoded"] = torch.tensor(tokenizer("Hello 12").input_ids)
    model.save_pretrained(f"{path}-again")  # and what is saved there loads again
    with torch.no_grad():
        again = auto_class.from_pretrained(f"{path}-again", trust_remote_code=True).eval()
        assert torch.equal(again(ids).logits, results[f"{name}.logits"])
save_file(results, sys.argv[1] + "/results.safetensors")
"""


def saved(model_type, path, auto_class=None):
    """A tiny model, saved with its tokenizer."""
    model = tiny_model(model_type, auto_class)
    model.save_pretrained(path)
    (small_world(path) if model_type == "rwkv6" else ByteTokenizer()).save_pretrained(path)
    return model


def needed(*packages):
    """The installed packages that these need, themselves included."""
    found, waiting = {}, list(packages)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # a dependency of torch on machines with a GPU
            continue
        requirements = (Requirement(text) for text in found[name].requires or ())
        waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found.values()


@pytest.fixture(scope="module")
def python_elsewhere(tmp_path_factory):
    """The interpreter of a new environment that has torch, transformers and Pillow alone, and what they need."""
    path = tmp_path_factory.mktemp("environment")
    venv.create(path, with_pip=False)
    inside = Path(sysconfig.get_path("purelib", vars={"base": str(path), "platbase": str(path)}))
    for package in needed("torch", "transformers", "pillow"):
        for name in {file.parts[0] for file in package.files if file.parts[0] not in ("..", "__pycache__")}:
            if not (inside / name).exists():
                (inside / name).symlink_to(package.locate_file(name))
    return path / "bin" / "python"


def run(python, directory, script, *arguments):
    """What a script prints, with an empty cache and no network."""
    environment = {"HF_HOME": str(directory / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [python, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_where_nothing_of_ours_is_installed(tmp_path, python_elsewhere):
    names = [*CAUSAL, *ENCODERS]
    ids, expected = random_ids(2, 20), {}
    for name in names:
        model = saved(name, tmp_path / f"{name}-source")
        hub.export(tmp_path / f"{name}-source", tmp_path / name)
        classifier = saved(name, tmp_path / f"{name}-head", "AutoModelForSequenceClassification")
        hub.export(tmp_path / f"{name}-head", tmp_path / f"{name}-classifier")
        with torch.no_grad():
            expected[f"{name}.logits"] = model(ids).logits
            expected[f"{name}.classes"] = classifier(ids).logits
        if name in CAUSAL:
            options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            expected[f"{name}.tokens"] = model.generate(ids, **options)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        expected[f"{name}.encoded"] = torch.tensor(tokenizer("Hello 12").input_ids)
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    script = f"ENCODERS = {list(ENCODERS)}\n{ELSEWHERE}"
    run(python_elsewhere, tmp_path, script, tmp_path, *names)
    torch.testing.assert_close(load_file(tmp_path / "results.safetensors"), expected, atol=1e-4, rtol=1e-4)


IMAGES_ELSEWHERE = """
from importlib.util import find_spec
from PIL import Image
from transformers import pipeline

assert not find_spec("subquad") and not find_spec("subquad_tokenizers")
content = [{"type": "image", "image": Image.new("RGB", (40, 30), (200, 30, 30))}, {"type": "text", "text": "What?"}]
options = {"max_new_tokens": 6, "do_sample": False}
chat = [{"role": "user", "content": content}]
for name in ("repository", "again", "saved"):
    pipe = pipeline("image-text-to-text", name, trust_remote_code=True)
    print(repr(pipe(chat, return_full_text=False, generate_kwargs=options)[0]["generated_text"]))
    if name == "repository":  # and what is saved there loads again
        pipe.save_pretrained("again")
        pipe.processor.save_pretrained("again")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("generation", ["rwkv6", "rwkv7"])
def test_images_where_nothing_of_ours_is_installed(generation, tmp_path, python_elsewhere):
    model, processor = save_visual(tmp_path / "source", generation)
    hub.export(tmp_path / "source", tmp_path / "repository")
    model.save_pretrained(tmp_path / "saved", self_contained=True)
    processor.save_pretrained(tmp_path / "saved")
    answers = run(python_elsewhere, tmp_path, IMAGES_ELSEWHERE).splitlines()
    pipe = pipeline("image-text-to-text", str(tmp_path / "repository"))
    assert type(pipe.model) is type(model)
    content = [
        {"type": "image", "image": Image.new("RGB", (40, 30), (200, 30, 30))},
        {"type": "text", "text": "What?"},
    ]
    options = {"max_new_tokens": 6, "do_sample": False}
    here = pipe([{"role": "user", "content": content}], return_full_text=False, generate_kwargs=options)
    assert answers == [repr(here[0]["generated_text"])] * 3


@pytest.mark.quick_cases("rwkv6", "avey-b")
@each_model
def test_installed_classes_load_a_repository(model_type, tmp_path, monkeypatch):
    model, ids = saved(model_type, tmp_path / "source"), random_ids(2, 9)
    hub.export(tmp_path / "source", tmp_path / "repository")
    for trust in (None, False, True):
        loaded = AutoModel.from_pretrained(tmp_path / "repository", trust_remote_code=trust)
        assert type(loaded) is type(model.base_model)
        torch.testing.assert_close(loaded(ids).last_hidden_state, model.base_model(ids).last_hidden_state)
        head = AutoModelForSequenceClassification.from_pretrained(tmp_path / "repository", trust_remote_code=trust)
        assert type(head).__module__.startswith("subquad.")
        if not trust:  # otherwise transformers takes the repository's tokenizer although it knows the class
            tokenizer = AutoTokenizer.from_pretrained(tmp_path / "repository", trust_remote_code=trust)
            assert type(tokenizer).__module__.startswith("subquad_tokenizers.")
    # The two live side by side: a copy of the code, loaded by name, changes nothing about the package's operators.
    config = AutoConfig.from_pretrained(tmp_path / "repository")
    reference = config.auto_map["AutoModel"]
    copy = get_class_from_dynamic_module(reference, tmp_path / "repository").from_pretrained(tmp_path / "repository")
    assert not type(copy).__module__.startswith("subquad")
    for one in (copy, loaded, copy):
        torch.testing.assert_close(one.eval()(ids).last_hidden_state, model.base_model(ids).last_hidden_state)
        one.train()(ids).last_hidden_state.sum().backward()
    if find_spec("triton"):  # the copy has its own kernels
        monkeypatch.setenv("SUBQUAD_BACKEND", "triton")
        kernels = f"{type(copy).__module__.rpartition('.')[0]}.triton_{reference.partition('.')[0].partition('_')[2]}"
        sys.modules.pop(kernels, None)
        hidden = copy.eval()(ids).last_hidden_state
        torch.testing.assert_close(hidden, model.base_model(ids).last_hidden_state, atol=1e-4, rtol=1e-4)
        hidden.sum().backward()
        assert kernels in sys.modules


@pytest.mark.parametrize("model_type", ["rwkv7", "visual_rwkv"])
def test_label_smoothing_of_a_repository(model_type, tmp_path, monkeypatch):
    """The Trainer shifts the labels of a model whose code is in a repository, and of a subclass."""
    if model_type == "visual_rwkv":
        model, _ = save_visual(tmp_path / "source")
    else:
        model = saved(model_type, tmp_path / "source")
    name = type(model).__name__
    hub.export(tmp_path / "source", tmp_path / "repository")
    reference = next(x for x in AutoConfig.from_pretrained(tmp_path / "repository").auto_map.values() if name in x)
    # As if nobody had imported this package.
    for key in [key for key, value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if value == name]:
        monkeypatch.delitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, key)
    copy = get_class_from_dynamic_module(reference, tmp_path / "repository")
    batch = {"input_ids": random_ids(2, 9), "labels": random_ids(2, 9)}
    arguments = {"label_smoothing_factor": 1e-9, "use_cpu": True, "report_to": []}
    for cls in (copy, type("Mine", (copy,), {})):
        model = cls.from_pretrained(tmp_path / "repository")
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **arguments))
        found = trainer.compute_loss(model, dict(batch))
        torch.testing.assert_close(found, model(**batch).loss)


@pytest.mark.fast
@each_model
def test_code_of_a_repository(model_type):
    folder = subquad.ARCHITECTURES[model_type][0]
    name = folder.rpartition(".")[2]
    modules = f"{folder}.configuration_{name}", f"{folder}.modeling_{name}"
    files = hub.repository_code(*modules)
    assert files == hub.repository_code(*reversed(modules))
    for text in files.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert f"{node.module}.py" in files
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imported = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                inside_try = imported[0] in ("subquad.hub.push", "subquad.hub.weight_files")
                assert inside_try or imported[0].split(".")[0] not in OURS


def test_the_page_about_sharing_runs_as_printed(tmp_path, python_elsewhere, monkeypatch, capsys):
    page = (Path(__file__).parent.parent / "docs/how-to/share.md").read_text()
    [command] = re.findall(r"^subquad export .*$", page, re.MULTILINE)
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    assert "Wrote ./finch-abc-repository:" in capsys.readouterr().out
    assert run(python_elsewhere, tmp_path, code).startswith("X:1")


def test_what_goes_along(tmp_path):
    saved("rwkv6", tmp_path / "source")
    (tmp_path / "source" / "modeling_old.py").write_text("raise SystemExit")
    (tmp_path / "source" / "optimizer.pt").write_bytes(b"pickled")
    (tmp_path / "source" / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    written = hub.export(tmp_path / "source", tmp_path / "repository")
    files = {path.name: path.read_bytes() for path in (tmp_path / "repository").iterdir()}
    assert sorted(files) == written
    code = {name for name in files if name.endswith(".py")}
    assert code == {
        "configuration_rwkv6.py",
        "kernels_rwkv6.py",
        "modeling_rwkv6.py",
        "tokenization_rwkv_world.py",
        "triton_rwkv6.py",
    }
    assert set(files) - code == {
        "LICENSE",
        "NOTICE",
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "rwkv_vocab_v20230424.txt",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert "modeling_old.py" not in code
    assert b"# Mine" in files["README.md"]
    assert b"Apache License" in files["LICENSE"]
    assert json.loads(files["config.json"])["auto_map"] == {
        "AutoConfig": "configuration_rwkv6.Rwkv6Config",
        "AutoModel": "modeling_rwkv6.Rwkv6Model",
        "AutoModelForCausalLM": "modeling_rwkv6.Rwkv6ForCausalLM",
        "AutoModelForSequenceClassification": "modeling_rwkv6.Rwkv6ForSequenceClassification",
    }
    # Twice the same, also from what was written.
    for source, name in (("source", "again"), ("repository", "from-it")):
        hub.export(tmp_path / source, tmp_path / name)
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == files


@pytest.mark.quick_cases("rwkv6", "avey-b", "gecko")
@each_model
def test_saving_with_the_code(model_type, tmp_path):
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "plain")
    assert not list((tmp_path / "plain").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    model.save_pretrained(tmp_path / "saved", self_contained=True)
    small_world(tmp_path).save_pretrained(tmp_path / "saved", self_contained=True)
    hub.export(tmp_path / "saved", tmp_path / "exported")
    for path in (tmp_path / "exported").iterdir():  # the same both ways
        if path.suffix == ".py" or path.name == "config.json":
            assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()
    # What was loaded from such a directory is saved as one.
    AutoModel.from_pretrained(tmp_path / "exported").save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(tmp_path / "exported").save_pretrained(tmp_path / "again")
    code = {path.name for path in (tmp_path / "exported").glob("*.py")}
    assert {path.name for path in (tmp_path / "again").glob("*.py")} == code


@pytest.mark.fast
def test_refusals(tmp_path, monkeypatch):
    source = tmp_path / "source"
    saved("rwkv5", source)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text('{"model_type": "rwkv5"}')
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    (tmp_path / "pickled" / "rng_state.pth").touch()
    for name, text in (("broken", "{"), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    tiny_model("rwkv5").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    next((tmp_path / "sharded").glob("model-00002*")).unlink()
    for directory, destination, message in (
        (tmp_path / "nowhere", "new", "nowhere has no `config.json`"),
        (tmp_path / "llama", "new", "`model_type` is 'llama'; known are avey, .*rwkv5, rwkv6"),
        (tmp_path / "pickled", "new", "no weights in safetensors; `subquad convert` reads pytorch_model.bin"),
        (tmp_path / "broken", "new", "config.json is not valid JSON: "),
        (tmp_path / "adapter", "new", r"adapter holds an adapter, not a model.*`merge_and_unload\(\)`"),
        (tmp_path / "list", "new", "config.json must hold a JSON object"),
        (tmp_path / "sharded", "new", "index.json names files that are not there: model-00002-of"),
        (source, "taken", "taken exists already and is not an empty directory"),
    ):
        with pytest.raises(ValueError, match=message):
            hub.export(directory, tmp_path / destination)
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(hub, "_copy_tokenizer", lambda source, destination: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hub.export(source, tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "shard", ["weights.bin", "../model.safetensors", "/model.safetensors", "a\\\\b.safetensors", 7]
)
def test_an_index_leads_to_safetensors_beside_it(shard, tmp_path):
    tiny_model("rwkv6").save_pretrained(tmp_path / "source", max_shard_size="20KB")
    index = tmp_path / "source" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = shard
    index.write_text(json.dumps(content))
    message = r"which is not a \.safetensors file in the same directory"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=message):
        hub.export(tmp_path / "source", tmp_path / "new")
    index.write_text('{"weight_map": []}')
    with pytest.raises(ValueError, match="has no usable `weight_map`"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "source")


def test_code_of_others_stays_behind(tmp_path):
    """That of a tokenizer which is no class of this package, and of pipelines; the name of a directory may be any."""
    tiny_model("gecko").save_pretrained(tmp_path / "source")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=ByteTokenizer().backend_tokenizer)
    tokenizer.save_pretrained(tmp_path / "source")
    for name, field in (("tokenizer_config", "auto_map"), ("config", "custom_pipelines")):
        path = tmp_path / "source" / f"{name}.json"
        value = {"AutoTokenizer": ["tokenization_x.X", None]} if field == "auto_map" else {"x": {"impl": "x.X"}}
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    (tmp_path / "source" / "tokenization_x.py").write_text("raise SystemExit")
    hub.export(tmp_path / "source", tmp_path / "modèle")
    assert not (tmp_path / "modèle" / "tokenization_x.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "modèle" / "tokenizer_config.json").read_text())
    assert "custom_pipelines" not in json.loads((tmp_path / "modèle" / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(tmp_path / "modèle", trust_remote_code=True)("a").input_ids == [97]
    reference = json.loads((tmp_path / "modèle" / "config.json").read_text())["auto_map"]["AutoModel"]
    copy = get_class_from_dynamic_module(reference, tmp_path / "modèle")
    assert copy.from_pretrained(tmp_path / "modèle")(random_ids(1, 3)).last_hidden_state.shape == (1, 3, 48)


def test_other_processes_save_nothing_more(tmp_path):
    saved("rwkv6", tmp_path / "source")
    hub.export(tmp_path / "source", tmp_path / "repository")
    model = AutoModel.from_pretrained(tmp_path / "repository")
    model.save_pretrained(tmp_path / "second", is_main_process=False)
    assert not list((tmp_path / "second").glob("*.py"))
