"""Python waits for a GPU once before the layers of a model, not between them, and not in decoding."""

import pytest
import torch
from cases import AVEY, AVEY_B, DEVICE, EAGLE, FINCH, GECKO, GREEDY, RAVEN, VISUAL, each, random_ids
from kernel_cases import Waits

import subquad.decoding.generation
import subquad.modeling.cache
import subquad.modeling.padding
import subquad.models.visual_rwkv.modeling_visual_rwkv


# On a CPU Gecko looks whether there is a BOS token, where nothing has to be waited for.
GECKO_FIELDS = {} if DEVICE == "cuda" else {"document_boundaries": False}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    for module in (subquad.modeling.padding, subquad.modeling.cache, subquad.models.visual_rwkv.modeling_visual_rwkv):
        monkeypatch.setattr(module, "should_check", lambda x: x.shape[1] > 1)
    monkeypatch.setattr(subquad.decoding.generation._EndedRows, "may_pad", lambda rows: rows.padding is not None)


@pytest.fixture(params=["whole", "padding", "documents"])
def read(request):
    """The arguments of a call of two rows of 12 tokens."""
    mask = torch.ones(2, 12, dtype=torch.long, device=DEVICE)
    positions = torch.arange(12, device=DEVICE).expand(2, -1)
    if request.param == "padding":
        mask[0, :5] = 0
    if request.param == "documents":
        return {"position_ids": positions % 5}
    return {"attention_mask": mask, "position_ids": positions}


def found(waits: Waits) -> list:
    """The waits of the models. Those of the operators have their own test; on a CPU their eager forms may wait."""
    return [wait for wait in waits.found if "/subquad/" in wait[1]]


@pytest.mark.quick_cases("whole-*")
@each(EAGLE, FINCH, RAVEN, GECKO, AVEY, *VISUAL)
def test_reading_and_decoding(case, read):
    model, ids = case.model(**(GECKO_FIELDS if case is GECKO else {})), random_ids(2, 12).to(DEVICE)
    with torch.no_grad():
        with Waits() as reading:
            cache = model(ids, **read).cache
        for _ in range(6):
            with Waits() as decoding:
                model(ids[:, :1], cache=cache)
            assert found(decoding) == []
    assert len(found(reading)) <= 1, found(reading)


@each(AVEY_B)
def test_reading(case, read):
    model, ids = case.model(), random_ids(2, 12).to(DEVICE)
    with torch.no_grad(), Waits() as reading:
        model(ids, **read)
    assert len(found(reading)) <= 1, found(reading)


@each(*VISUAL)
def test_reading_images(case):
    model, text = case.model(), case.text(2, 20)
    with torch.no_grad(), Waits() as reading:
        model(**text, attention_mask=torch.ones_like(text["input_ids"]))
    assert len(found(reading)) <= 1, found(reading)


@pytest.mark.quick_cases("rwkv5", "gecko")
@each(EAGLE, RAVEN, GECKO, AVEY)
def test_generate(case):
    """One wait for a padded prompt, none for a generated token."""
    model, ids = case.model(**(GECKO_FIELDS if case is GECKO else {})), random_ids(2, 12).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with Waits() as waits:
        free = model.generate(ids, attention_mask=mask, **GREEDY, max_new_tokens=8)
    assert len(found(waits)) <= 1, found(waits)
    # A row may end early. Then Avey asks at every token how long the texts are.
    with Waits() as waits:
        model.generate(ids, attention_mask=mask, **{**GREEDY, "eos_token_id": int(free[0, 14])}, max_new_tokens=8)
    assert len(found(waits)) <= (8 if case is AVEY else 1), found(waits)
