"""finch-abc, the model that comes with the package, is what its card says."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import subquad


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from abc_check import find_fault  # noqa: E402
from abc_corpus import load_corpus  # noqa: E402


PATH = subquad.embedded_model("finch-abc")


@pytest.fixture(scope="module")
def card():
    return (PATH / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(PATH)


def test_size():
    weights = PATH / "model.safetensors"
    assert weights.stat().st_size <= 4_000_000
    assert AutoModelForCausalLM.from_pretrained(PATH).dtype == torch.bfloat16


def test_loss_is_the_one_on_the_card(model, tokenizer, card):
    """Over every fourth validation tune, each by itself, with the byte that ends it."""
    stated = float(re.search(r"validation loss \| ([\d.]+) bits a byte", card)[1])
    tunes = load_corpus().validation[::4]
    nats = count = 0
    with torch.no_grad():
        for tune in tunes:
            ids = torch.tensor([tokenizer(tune)["input_ids"] + [0]])
            nats += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    assert nats / count / math.log(2) == pytest.approx(stated, rel=0.05)


def test_most_headers_become_tunes(model, tokenizer, card):
    valid, seeds = map(int, re.search(r"headers continued to a valid tune \| (\d+) of (\d+)", card).groups())
    assert valid > seeds / 2
    header = "X:1\nT:The Finch\nM:{}\nL:1/8\nK:{}\n"
    headers = [header.format(metre, key) for metre in ("6/8", "4/4", "C|") for key in ("D", "G", "Am", "Em")]
    inputs = tokenizer(headers, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    faults = [find_fault(text) for text in tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)]
    assert faults.count(None) >= len(headers) // 3, faults


def test_the_code_on_the_card_runs(card):
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    exec(compile(code, "card", "exec"), {})


def test_pipeline():
    generate = pipeline("text-generation", str(PATH))
    text = generate("X:1\nT:The Finch\nM:6/8\nL:1/8\nK:D\n", max_new_tokens=20)[0]["generated_text"]
    assert text.startswith("X:1\nT:The Finch")
