"""Packed documents equal the documents run apart."""

import itertools

import pytest
import torch
from cases import (
    DEVICE,
    TOLERANCE,
    assert_all_close,
    assert_same_states,
    batch,
    cut,
    each_case,
    each_case_and_reader,
    each_case_and_variant,
    each_model,
    gradients,
    join,
    random_ids,
    summed_loss,
    texts,
    tiny_model,
)


@pytest.mark.fast
@each_case_and_reader
def test_packed_documents(case):
    model, lengths = case.model(), (3, 70, 1, 12)
    documents = texts(case, *lengths)
    packed = join(*documents)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        expected = torch.cat([model(**document).logits for document in documents], 1)
        last = model(**documents[-1]).cache
        ways = ({"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds}, {"position_ids": positions})
        for way in ways:
            out = model(**packed, **way)
            torch.testing.assert_close(out.logits, expected, **TOLERANCE)
            assert_same_states(out.cache, last)
        base = model.base_model
        torch.testing.assert_close(
            base(**packed, cu_seq_lens_q=bounds).last_hidden_state,
            base(**packed, cu_seqlens=bounds).last_hidden_state,
        )
        whole = model(**packed).logits
        assert not torch.allclose(whole, expected, **TOLERANCE)
        # Positions that do not restart are one document, wherever they begin.
        for start in (0, 5):
            one = model(**packed, position_ids=torch.arange(start, start + sum(lengths))[None]).logits
            torch.testing.assert_close(one, whole)


@each_case_and_reader
def test_packed_documents_in_several_rows(case):
    model = case.model()
    rows = [join(*texts(case, 6, 14)), case.text(1, 20)]
    text = batch(rows)
    positions = torch.stack((torch.cat((torch.arange(6), torch.arange(14))), torch.arange(20)))
    with torch.no_grad():
        cache = model(case.ids(2, 4)).cache
        out = model(**text, position_ids=positions, cache=cache.clone())
        # The first document of a row continues the cache; the others start anew.
        first, second = cache.clone(), cache.clone()
        first.batch_select_indices(torch.tensor([0]))
        second.batch_select_indices(torch.tensor([1]))
        begin, rest = cut(rows[0], 0, 6), cut(rows[0], 6)
        torch.testing.assert_close(out.logits[:1, :6], model(**begin, cache=first).logits, **TOLERANCE)
        torch.testing.assert_close(out.logits[:1, 6:], model(**rest).logits, **TOLERANCE)
        torch.testing.assert_close(out.logits[1:], model(**rows[1], cache=second).logits, **TOLERANCE)
        out.cache.batch_select_indices(torch.tensor([0]))
        assert_same_states(out.cache, model(**rest).cache)


@each_case
@torch.no_grad()
def test_loss_of_packed_documents(case):
    """The first token of a document has none, however the boundaries are given."""
    model, lengths = case.model(), (5, 1, 19, 8)
    documents = texts(case, *lengths)
    alone = [summed_loss(model, document) for document in documents]
    total, items = (sum(x) for x in zip(*alone, strict=True))
    packed = join(*documents)
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])[None]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    for way in ({"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds.int()}, {"position_ids": positions}):
        loss = model(**packed, **way, labels=packed["input_ids"]).loss
        assert loss.item() * items == pytest.approx(total, rel=1e-4)
    rows = batch([join(*documents[:3]), case.text(1, 25)])  # two rows, one of them packed
    positions = torch.stack((positions[0, :25], torch.arange(25, device=DEVICE)))
    loss = model(**rows, position_ids=positions, labels=rows["input_ids"], num_items_in_batch=1).loss
    expected = sum(loss for loss, _ in alone[:3]) + summed_loss(model, case.text(1, 25))[0]
    assert loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.quick_cases("*rwkv*", "avey", "raven", "raven-both", "gecko", "gecko-many-bos")
@pytest.mark.fast
@each_case_and_variant
def test_gradients_of_packed_documents(case):
    model, documents = case.model().double(), texts(case, 5, 66)

    def grads(**inputs):
        model.zero_grad()
        model(**inputs).logits.square().sum().backward()
        return gradients(case, model)

    alone = [grads(**document) for document in documents]
    packed = grads(**join(*documents), cu_seqlens=torch.tensor([0, 5, 71]))
    expected = {name: sum(grads[name] for grads in alone) for name in packed}
    assert_all_close(packed, expected, atol=1e-5, rtol=1e-6)


@each_model
def test_classifier_refuses_packed_documents(model_type):
    model = tiny_model(model_type, "AutoModelForSequenceClassification")
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        with pytest.raises(ValueError, match="`cu_seqlens`: a classifier"):
            model(random_ids(1, 6), **{name: torch.tensor([0, 6])})
