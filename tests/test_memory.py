"""Memory does not grow with the number of calls of `generate`, whatever their lengths."""

import random

import pytest
import torch
from resident_memory import resident_memory
from transformers import AutoModelForCausalLM

import subquad


NAMES = ("avey-abc", "eagle-abc", "finch-abc", "gecko-abc", "goose-abc", "raven-abc")


def growth(name: str, settling: int, calls: int, longest: int) -> int:
    """By how many bytes the process grows in `calls` calls of random lengths, after some others."""
    torch.manual_seed(0)
    generator = random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(subquad.embedded_model(name)).eval()
    for call in range(settling + calls):
        if call == settling:
            before = resident_memory()
        ids = torch.randint(1, 127, (generator.choice((1, 1, 2)), generator.randint(1, longest)))
        new = generator.randint(1, 8)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return resident_memory() - before


def test_memory_settles():
    assert growth("finch-abc", settling=40, calls=40, longest=400) < 25e6


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_memory_stays_flat(name):
    grown = growth(name, settling=200, calls=1800, longest=1000)
    print(f"{name}: {grown / 1e6:.1f} MB in 1,800 calls after the first 200")
    assert grown < 30e6
