"""Every request is answered as `generate` answers it alone, in float32 and greedily, whatever else is served."""

import pytest
import torch
from engine import TINY, VOCABULARY, engine, expected, make_requests, model_directory, outputs, serve
from transformers import AutoModelForCausalLM
from vllm import SamplingParams, TokensPrompt

from subquad_kernels import state_pool
from subquad_vllm.states import StepMetadataBuilder


EMBEDDED = ("eagle-abc", "finch-abc", "goose-abc", "raven-abc", "gecko-abc")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in EMBEDDED]


@pytest.mark.parametrize("name", [*TINY, *SLOW])
def test_answers_of_many_requests(name, tmp_path):
    """With seven slots, prompts that are read in pieces, and slots that others have used."""
    model = model_directory(name, tmp_path)
    requests = make_requests(12, VOCABULARY)
    answers = expected(model, requests)
    with engine(model) as llm:
        assert serve(llm, requests) == answers
        assert serve(llm, requests) == answers


@pytest.mark.parametrize("name", ["rwkv5", "rwkv6", "rwkv7", "raven", "raven-window", "gecko", *SLOW])
def test_answers_with_prefix_caching(name, tmp_path):
    """A second pass begins with the states after the beginnings of the first one's prompts."""
    model = model_directory(name, tmp_path)
    requests = make_requests(12, VOCABULARY)
    answers = expected(model, requests)
    with engine(model, enable_prefix_caching=True, block_size=32) as llm:
        assert serve(llm, requests) == answers
        again = outputs(llm, requests)
    assert [list(output.outputs[0].token_ids) for output in again] == answers
    assert sum(output.num_cached_tokens for output in again) > 500


@pytest.mark.parametrize("name", ["rwkv6", "raven", "gecko-wide"])
def test_answers_from_large_states(name, tmp_path, monkeypatch):
    """Plain torch computes with one large state after the other, where it is."""
    monkeypatch.setattr(state_pool, "LARGE", 1)
    model = model_directory(name, tmp_path)
    requests = make_requests(12, VOCABULARY)
    with engine(model) as llm:
        assert serve(llm, requests) == expected(model, requests)


COMPILED = [pytest.param(name, marks=pytest.mark.slow) for name in ("rwkv5", "raven")]


@pytest.mark.parametrize("name", ["finch-abc", "rwkv7", "raven-window", "gecko", *COMPILED])
def test_answers_of_a_compiled_step(name, tmp_path):
    """vLLM compiles the step, except for Gecko's."""
    model = model_directory(name, tmp_path)
    requests = make_requests(8, VOCABULARY, longest=100, answer=16)
    with engine(model, enforce_eager=False) as llm:
        assert serve(llm, requests) == expected(model, requests)


def assert_close_log_probabilities(llm, model, atol):
    """Those of prompts, read in pieces, and of answers are close to the model's in float32."""
    requests = make_requests(6, VOCABULARY, longest=150, answer=24)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in requests]
    options = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    for output in llm.generate(prompts, options, use_tqdm=False):
        [answer] = output.outputs
        text = torch.tensor([*output.prompt_token_ids, *answer.token_ids])
        steps = [*output.prompt_logprobs[1:], *answer.logprobs]
        own = [step[token].logprob for step, token in zip(steps, text[1:].tolist(), strict=True)]
        with torch.no_grad():
            logits = model(text[None]).logits[0, :-1].log_softmax(-1)
        wanted = logits.gather(1, text[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(own), wanted, atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["rwkv5", "rwkv6", "rwkv7", "raven-window", "gecko"])
def test_log_probabilities_in_bfloat16(name, tmp_path):
    path = model_directory(name, tmp_path)
    # Weights are rounded in both.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float()
    with engine(path, dtype="bfloat16") as llm:
        assert_close_log_probabilities(llm, model, 0.2)


@pytest.mark.parametrize(("name", "eager"), [("rwkv5", True), ("rwkv6", True), ("rwkv7", False)])
def test_stream_beyond_float16(name, eager, tmp_path):
    """The residual stream is larger than the largest number of float16, and so is what some layers put out."""
    path = model_directory(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter, x in model.named_parameters():
            if parameter.endswith(("output.weight", "ffn.value.weight", "feed_forward.value.weight")):
                x *= 2**14
            x.copy_(x.half())
    model.save_pretrained(path)
    stream = model(torch.arange(3, 100)[None], output_hidden_states=True).hidden_states[:-1]
    assert max(x.abs().max() for x in stream) > 2 * 65504
    with engine(path, dtype="float16", enforce_eager=eager) as llm:
        assert_close_log_probabilities(llm, model, 0.2)


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
    requests = make_requests(12, VOCABULARY)
    monkeypatch.setattr(StepMetadataBuilder, "clear", lambda self, slots: None)
    with engine(model) as llm:
        assert serve(llm, requests) != expected(model, requests)
