"""Python does not wait for a GPU between the layers of a model, nor in decoding."""

import pytest
import torch
from cases import DEVICE, EAGLE, FINCH, GECKO, RAVEN, random_ids
from kernel_cases import Waits

import subquad.layers
import subquad.padding


# On a CPU Gecko looks at the values of a token, where nothing has to be waited for. Avey looks up how many splits are
# before a token: so many others are read with its own.
CASES = [EAGLE, FINCH, RAVEN] + [GECKO] * (DEVICE == "cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_waits(case, monkeypatch):
    for module in (subquad.padding, subquad.layers):  # as on a GPU
        monkeypatch.setattr(module, "should_check", lambda x: x.shape[1] > 1)
    model, ids = case.model().eval(), random_ids(2, 12).to(DEVICE)
    with torch.no_grad():
        with Waits() as reading:
            cache = model(ids, attention_mask=torch.ones_like(ids)).past_key_values
        for _ in range(2):
            with Waits() as decoding:
                model(ids[:, :1], past_key_values=cache)
            assert decoding.found == []
    assert len(reading.found) <= 2, reading.found  # for the ids and for the mask, before any work
