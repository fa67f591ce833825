"""The cards of model repositories: metadata, facts, and code that runs as it is printed."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from byte_level_bpe import encoder_tokenizer
from cases import CASES, CAUSAL, ENCODERS, each_model, lm_class, tiny_model
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import Pipeline

import subquad
from subquad.hub import cards
from subquad.hub import export as hub
from subquad.hub.info import describe, labelled
from subquad_tokenizers import ByteTokenizer


# Runs the examples of cards and prints what each of them printed.
RUN = """
import contextlib, io, json, sys
for name in ("subquad", "subquad_kernels", "subquad_tokenizers", "subquad_conversion"):
    sys.modules[name] = None
printed = {}
for name, code in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, name, "exec"), {})
    printed[name] = out.getvalue()
print(json.dumps(printed))
"""
# Name of a repository to the type and the Auto class of its model; one has no tokenizer.
HEADS = {name: (name, lm_class(name)) for name in CAUSAL | ENCODERS}
HEADS |= {f"avey-b-{cards.TASKS[head]}": ("avey-b", head) for head in subquad.ARCHITECTURES["avey-b"][2]}
HEADS |= {
    "gecko-text-classification": ("gecko", "AutoModelForSequenceClassification"),
    "raven-feature-extraction": ("raven", "AutoModel"),
    "finch-without-tokenizer": ("rwkv6", "AutoModelForCausalLM"),
}


def save(path, model_type, auto_class=None, tokenizer=True):
    """A tiny model with a tokenizer: one with a mask for an encoder, one that needs code for the others."""
    tokenizer = (ByteTokenizer if CASES[model_type].causal else encoder_tokenizer)() if tokenizer else None
    model = tiny_model(model_type, auto_class, vocab_size=128 if tokenizer is None else len(tokenizer))
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    root = tmp_path_factory.mktemp("repositories")
    for name, (model_type, auto_class) in HEADS.items():
        save(root / "saved" / name, model_type, auto_class, tokenizer="without" not in name)
        hub.export(root / "saved" / name, root / name)
    return root


def examples(root) -> dict[str, str]:
    found = {}
    for name in HEADS:
        text = (root / name / "README.md").read_text(encoding="utf-8")
        (found[name],) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return found


def words_and_numbers(text: str) -> tuple[list[str], list[float]]:
    """What is between the decimal fractions of a text, and these."""
    number = r"\d+\.\d+(?:e-?\d+)?"
    return re.split(number, text), [float(found) for found in re.findall(number, text)]


@pytest.mark.thorough
def test_examples_run_as_printed_without_this_package(repositories, monkeypatch):
    codes = examples(repositories)
    environment = os.environ | {"HF_HOME": str(repositories / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(codes),
        env=environment,
        cwd=repositories,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "not supported" not in done.stderr  # what a pipeline says of a model that it does not know
    printed = json.loads(done.stdout)

    # With this package its classes load the same repositories, and what they print is the same.
    monkeypatch.chdir(repositories)
    for name, code in codes.items():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            scope = {}
            exec(compile(code, name, "exec"), scope)
        # Some products are computed by another library, which rounds differently.
        (words, numbers), (expected_words, expected) = (
            words_and_numbers(text) for text in (printed[name], out.getvalue())
        )
        assert words == expected_words and numbers == pytest.approx(expected, abs=1e-4)
        assert bool(out.getvalue()) == ("without" not in name)
        model_type, auto_class = HEADS[name]
        model_class = getattr(subquad, subquad.ARCHITECTURES[model_type][2][auto_class])
        pipelines = [value.model for value in scope.values() if isinstance(value, Pipeline)]
        assert any(type(value) is model_class for value in [*scope.values(), *pipelines])


@pytest.mark.parametrize("name", HEADS)
def test_metadata(name, repositories):
    path = repositories / name / "README.md"
    card = ModelCard.load(path)
    model_type, auto_class = HEADS[name]
    data = card.data.to_dict()
    assert data["pipeline_tag"] == cards.TASKS[auto_class]
    assert data["library_name"] == "transformers"
    assert {model_type.replace("-", ""), "subquad"} <= {tag.replace("-", "") for tag in data["tags"]}
    # Nothing of the weights is known: not what they were trained on or from, not their licence.
    assert data.keys() == {"library_name", "license", "pipeline_tag", "tags"} and data["license"] == "unknown"
    assert ModelCardData(**yaml.safe_load(card.data.to_yaml())).to_dict() == data
    assert str(card) == path.read_text(encoding="utf-8")
    assert "$" not in card.text and f"# {name}\n" in card.text


@pytest.mark.fast
@each_model
def test_layers_that_adapters_need(model_type, repositories):
    """Where this package is not imported, PEFT has to be told what it finds by itself otherwise."""
    peft = pytest.importorskip("peft")
    text = (repositories / model_type / "README.md").read_text(encoding="utf-8")
    targets = json.loads(re.search(r"LoraConfig\(target_modules=(\[.*\])\)", text)[1])
    adapted = [peft.get_peft_model(tiny_model(model_type), peft.LoraConfig(target_modules=x)) for x in (targets, None)]
    assert adapted[0].targeted_module_names == adapted[1].targeted_module_names != []


@pytest.mark.fast
@each_model
def test_sizes_are_those_of_the_model(model_type, tmp_path):
    model = save(tmp_path / "model", model_type, tokenizer=False)
    text = cards.model_card(tmp_path / "model").text
    assert f"| parameters | {model.num_parameters():,} (" in text
    assert f"| layers | {model.config.num_hidden_layers} |" in text
    assert f"| hidden size | {model.config.hidden_size} |" in text
    for label, value in labelled(describe(str(tmp_path / "model"))).items():
        assert f"| {label} | {value} |\n" in text
    assert ("a token of the text" in text) == CASES[model_type].growing


def test_what_is_known(repositories):
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="someone/tunes",
            dataset_name="Tunes",
            dataset_split="test",
            metric_type="bits_per_byte",
            metric_value=2.5,
        )
    ]
    card = cards.model_card(
        repositories / "raven",
        repo_id="someone/my-raven",
        license="mit",
        base_model="someone/raven",
        language="en",
        tags=["music", "raven"],
        eval_results=results,
    )
    data = ModelCard(str(card)).data
    assert (data.license, data.base_model, data.language) == ("mit", "someone/raven", "en")
    assert data.tags == ["raven", "subquad", "music"]
    assert data.model_name == "my-raven" and data.eval_results == results
    for text in ("# my-raven\n", 'path = "someone/my-raven"\n', "| Tunes | test | bits_per_byte | 2.5 |\n"):
        assert text in card.text
    assert "weights: mit." in card.text


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ("someone/finch", "someone/finch"),
        ("./finch", None),
        ("runs/finch", None),
        ("/data/someone/finch", None),
        ("out/runs/finch", None),
        ("finch", None),
        ("", None),
        (None, None),
    ],
)
def test_base_model(recorded, expected, repositories, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/finch").mkdir(parents=True)
    shutil.copytree(repositories / "rwkv6", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"_name_or_path": recorded}))
    (tmp_path / "model/README.md").unlink()
    assert cards.base_model(tmp_path / "model") == expected

    def base(directory, **known):
        return cards.model_card(directory, base_model=cards.base_model(directory), **known).data.base_model

    assert base(tmp_path / "model", repo_id="another/finch") == expected
    assert base(tmp_path / "model", repo_id="someone/finch") is None  # a model is not its own base
    # The configuration of an exported model names none, and its card does.
    hub.export(tmp_path / "model", tmp_path / "exported")
    assert base(tmp_path / "exported", repo_id="another/finch") == expected
    assert cards.is_own_card(tmp_path / "exported")


def test_readme_of_the_source_is_kept(tmp_path):
    save(tmp_path / "source", "gecko")
    readme = "---\nlicense: mit   # mine\n---\r\n# Mine\n"
    (tmp_path / "source/README.md").write_bytes(readme.encode())
    hub.export(tmp_path / "source", tmp_path / "repository")
    assert (tmp_path / "repository/README.md").read_bytes() == readme.encode()


def test_own_card_is_made_anew_for_another_name(tmp_path):
    save(tmp_path / "source", "gecko", tokenizer=False)
    hub.export(tmp_path / "source", tmp_path / "first")
    assert not cards.is_own_card(tmp_path / "source")  # it has none
    hub.export(tmp_path / "first", tmp_path / "second")
    assert (tmp_path / "second/README.md").read_text() == str(cards.model_card(tmp_path / "second"))
    (tmp_path / "second").rename(tmp_path / "third")
    assert cards.is_own_card(tmp_path / "third")
    ByteTokenizer().save_pretrained(tmp_path / "third")
    assert cards.is_own_card(tmp_path / "third")
    text = (tmp_path / "third/README.md").read_text()
    for changed in (
        text.replace("license: unknown", "license: mit"),
        text.replace("- subquad\n", "- subquad\n- music\n"),
        text + "One line.\n",
        text.replace("A Gecko", "My Gecko"),
        "",
    ):
        (tmp_path / "third/README.md").write_text(changed)
        assert not cards.is_own_card(tmp_path / "third")


@pytest.mark.parametrize("model_type", [None, "llama", "no-such"])
def test_refuses_what_is_no_model_of_ours(model_type, repositories, tmp_path):
    if model_type is not None:
        shutil.copy(repositories / "rwkv6/model.safetensors", tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match=model_type or re.escape(str(tmp_path))):
        cards.model_card(tmp_path)
