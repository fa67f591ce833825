"""`torch.compile` of training and of decoding."""

import pytest
import torch
from cases import (
    AVEY,
    AVEY_B,
    DEEP_EMBED,
    DEVICE,
    EAGLE,
    FINCH,
    GECKO,
    GOOSE,
    RAVEN,
    RAVEN_BOTH,
    TOLERANCE,
    VISUAL,
    assert_all_close,
    each,
    gradients,
    join,
    padded,
    texts,
)


@pytest.fixture
def graphs():
    """A list that a test's own compiler adds graphs to."""
    torch.compiler.reset()
    yield []
    torch.compiler.reset()


@pytest.mark.quick_cases("rwkv6", "avey-b")
@each(FINCH, DEEP_EMBED, AVEY, GECKO, RAVEN_BOTH, AVEY_B, VISUAL[1])
def test_compiled_training(case, graphs):
    model = case.model(num_hidden_layers=max(case.layer_kinds, 1 + case.images)).train()
    inputs = padded(texts(case, 61, 70), "anywhere")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def grads(model):
        model.zero_grad()
        torch.manual_seed(0)
        model(**inputs, labels=inputs["input_ids"]).loss.backward()

    grads(compiled)
    found = gradients(case, model)
    grads(model)
    assert_all_close(found, gradients(case, model), **TOLERANCE)


@pytest.mark.thorough
@each(FINCH, AVEY, GECKO, AVEY_B)
def test_compiled_packed_documents(case, graphs):
    """Positions that restart are read between two graphs, and are an error where there must be one."""
    model = case.model(num_hidden_layers=case.layer_kinds)
    compiled = torch.compile(model, backend="eager")

    def grads(call, ids, positions):
        model.zero_grad()
        call(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
        return gradients(case, model)

    for lengths in ((5, 1, 9), (15,), (3, 4, 6, 2)) if case is FINCH else ((5, 1, 9), (3, 4, 6, 2)):
        ids = case.ids(1, 15, seed=len(lengths))
        positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])[None]
        expected = grads(model, ids, positions)
        assert_all_close(grads(compiled, ids, positions), expected, **TOLERANCE)
    with pytest.raises(Exception, match="a graph cannot read where: pass `cu_seqlens` instead"):
        torch.compile(model, backend="eager", fullgraph=True)(input_ids=ids, position_ids=positions)
    with pytest.raises(ValueError, match="compiled models read packed documents in one"):
        compiled(input_ids=case.ids(2, 15), position_ids=positions)


@pytest.mark.quick_cases("rwkv6")
@each(FINCH, DEEP_EMBED, AVEY, GECKO, RAVEN_BOTH, VISUAL[1])
def test_compiled_decode_step(case, graphs):
    model, text = case.model(num_hidden_layers=case.layer_kinds), case.text(2, 10)
    ids = case.ids(2, 10)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        cache = model(**text).cache
        logits = [compiled(ids[:, t : t + 1], cache=cache, use_cache=True).logits for t in range(10)]
        expected = [model(**join(text, {"input_ids": ids[:, : t + 1]})).logits[:, -1:] for t in range(10)]
        torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert len(graphs) <= case.decode_graphs


@pytest.mark.thorough
@each(EAGLE, GOOSE, AVEY, RAVEN, GECKO, AVEY_B)
def test_compiled_with_a_default_device(case, graphs):
    """It is a mode of torch, under which Dynamo traces also those methods of tensors that are written in Python."""
    model, text = case.model(num_hidden_layers=case.layer_kinds), case.text(2, 10)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.device(DEVICE), torch.no_grad():
        found, expected = compiled(**text), model(**text)
        torch.testing.assert_close(found.logits, expected.logits, **TOLERANCE)
        if case.causal:
            found = compiled(case.ids(2, 1), past_key_values=found.past_key_values).logits
            expected = model(case.ids(2, 1), past_key_values=expected.past_key_values).logits
            torch.testing.assert_close(found, expected, **TOLERANCE)
