"""The models that come with the package, the zoo of ABC models, are what their cards say."""

import math
import re

import pytest
import torch
from abc_check import find_fault
from abc_corpus import load_corpus
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, pipeline

import subquad


CAUSAL = ["avey-abc", "eagle-abc", "finch-abc", "gecko-abc", "goose-abc", "raven-abc"]
ZOO = sorted([*CAUSAL, "avey-b-abc"])
HEADER = "X:1\nT:The Finch\nM:{}\nL:1/8\nK:{}\n"


@pytest.fixture(scope="module")
def tunes():
    """Every eighth validation tune."""
    return load_corpus().validation[::8]


def load(name, auto_class=AutoModelForCausalLM):
    path = subquad.embedded_model(name)
    return auto_class.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


def card_of(name):
    return (subquad.embedded_model(name) / "README.md").read_text(encoding="utf-8")


def stated(name, what):
    """The number that a card's table has for what was measured."""
    return float(re.search(rf"^\| {what} \| ([\d.]+)", card_of(name), re.MULTILINE)[1])


@pytest.mark.quick_cases("finch-abc")
@pytest.mark.parametrize("name", CAUSAL)
def test_loss_is_the_one_on_the_card(name, tunes):
    """Each tune by itself, with the byte that ends it."""
    model, tokenizer = load(name)
    nats = count = 0
    with torch.no_grad():
        for tune in tunes:
            ids = torch.tensor([tokenizer(tune)["input_ids"] + [0]])
            nats += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    assert nats / count / math.log(2) == pytest.approx(stated(name, "validation loss"), rel=0.05)


def test_masked_bytes_are_predicted_as_the_card_says(tunes):
    model, tokenizer = load("avey-b-abc", AutoModelForMaskedLM)
    generator, right = torch.Generator().manual_seed(1), []
    with torch.no_grad():
        for tune in tunes:
            ids = tokenizer(tune, return_tensors="pt")["input_ids"]
            hidden = torch.rand(ids.shape, generator=generator) < 0.2
            logits = model(ids.masked_fill(hidden, tokenizer.mask_token_id)).logits
            right.append(logits.argmax(-1)[hidden] == ids[hidden])
    accuracy = torch.cat(right).float().mean().item()
    assert 100 * accuracy == pytest.approx(stated("avey-b-abc", "masked bytes predicted correctly"), abs=5)


@pytest.mark.quick_cases("finch-abc")
@pytest.mark.parametrize("name", ["finch-abc", "gecko-abc"])
def test_headers_become_tunes_as_often_as_the_card_says(name):
    share = stated(name, "headers continued to a valid tune") / 100
    model, tokenizer = load(name)
    headers = [HEADER.format(metre, key) for metre in ("6/8", "4/4", "C", "3/4") for key in ("D", "G", "Am", "Em")]
    inputs = tokenizer(headers, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    texts = tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=320), skip_special_tokens=True)
    faults = [find_fault(text) for text in texts]
    assert faults.count(None) >= share * len(headers) / 2, faults


@pytest.mark.parametrize("name", ZOO)
def test_the_code_on_the_card_runs(name, capsys):
    code = re.search(r"```python\n(.*?)```", card_of(name), re.DOTALL)[1]
    exec(compile(code, "card", "exec"), {})
    assert "T:The Finch" in capsys.readouterr().out


@pytest.mark.fast
def test_pipeline():
    generate = pipeline("text-generation", str(subquad.embedded_model("finch-abc")))
    text = generate(HEADER.format("6/8", "D"), max_new_tokens=20)[0]["generated_text"]
    assert text.startswith("X:1\nT:The Finch")
