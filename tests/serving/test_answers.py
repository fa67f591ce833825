"""Every request is answered as `generate` answers it alone, in float32 and greedily, whatever else is served."""

import pytest
from engine import TINY, VOCABULARY, engine, expected, make_requests, model_directory, outputs, serve

from subquad_vllm.states import StepMetadataBuilder


EMBEDDED = ("eagle-abc", "finch-abc", "goose-abc", "raven-abc", "gecko-abc")


@pytest.mark.parametrize("name", [*EMBEDDED, *TINY])
def test_answers_of_many_requests(name, tmp_path):
    """With seven slots, prompts that are read in pieces, and slots that others have used."""
    model = model_directory(name, tmp_path)
    requests = make_requests(20, VOCABULARY)
    answers = expected(model, requests)
    with engine(model) as llm:
        assert serve(llm, requests) == answers
        assert serve(llm, requests) == answers


@pytest.mark.parametrize("name", ["eagle-abc", "finch-abc", "goose-abc", "raven-abc", "raven-window", "gecko-abc"])
def test_answers_with_prefix_caching(name, tmp_path):
    """A second pass begins with the states after the beginnings of the first one's prompts."""
    model = model_directory(name, tmp_path)
    requests = make_requests(20, VOCABULARY)
    answers = expected(model, requests)
    with engine(model, enable_prefix_caching=True, block_size=32) as llm:
        assert serve(llm, requests) == answers
        again = outputs(llm, requests)
    assert [list(output.outputs[0].token_ids) for output in again] == answers
    assert sum(output.num_cached_tokens for output in again) > 500


@pytest.mark.parametrize("name", ["finch-abc", "rwkv5", "rwkv7", "raven", "raven-window", "gecko"])
def test_answers_of_a_compiled_step(name, tmp_path):
    """vLLM compiles the step, except for Gecko's."""
    model = model_directory(name, tmp_path)
    requests = make_requests(8, VOCABULARY, longest=100, answer=16)
    with engine(model, enforce_eager=False) as llm:
        assert serve(llm, requests) == expected(model, requests)


@pytest.mark.slow
@pytest.mark.parametrize("name", EMBEDDED)
def test_answers_of_many_long_requests(name, tmp_path):
    """Two hundred, with prefix caching and without, and with fewer blocks of memory than slots."""
    model = model_directory(name, tmp_path)
    requests = make_requests(200, VOCABULARY, longest=2000, answer=40)
    answers = expected(model, requests)
    options = {"max_model_len": 2048, "max_num_batched_tokens": 512}
    for more in ({}, {"enable_prefix_caching": True, "block_size": 128}, {"num_gpu_blocks_override": 4}):
        with engine(model, **options, **more) as llm:
            assert serve(llm, requests) == answers


@pytest.mark.parametrize("name", ["finch-abc"])
def test_a_request_needs_an_empty_slot(name, tmp_path, monkeypatch):
    """These comparisons notice it when a request goes on from what another left in its slot."""
    model = model_directory(name, tmp_path)
    requests = make_requests(20, VOCABULARY)
    monkeypatch.setattr(StepMetadataBuilder, "clear", lambda self, slots: None)
    with engine(model) as llm:
        assert serve(llm, requests) != expected(model, requests)
