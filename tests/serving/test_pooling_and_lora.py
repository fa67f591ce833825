"""Embeddings, classes, and adapters that requests name."""

import json

import pytest
import torch
from engine import VOCABULARY, engine, expected, make_requests, model_directory
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from vllm import PoolingParams, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest


PROMPTS = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in make_requests(6, VOCABULARY, longest=150)]


@pytest.mark.parametrize("name", ["rwkv6", "gecko"])
def test_embeddings(name, tmp_path):
    """The last token's hidden state, whatever pieces a text was read in."""
    path = model_directory(name, tmp_path)
    with engine(path, runner="pooling", convert="embed") as llm:
        found = llm.embed(PROMPTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    for prompt, output in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt["prompt_token_ids"]])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), wanted, atol=1e-4, rtol=1e-4)


def test_classes(tmp_path):
    """A classifier's probabilities."""
    path = model_directory("rwkv6", tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=3)
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(path)
    with engine(path) as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
    for prompt, output in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt["prompt_token_ids"]])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), wanted, atol=1e-4, rtol=1e-4)


def test_requests_with_and_without_an_adapter(tmp_path):
    """In the same steps."""
    path = model_directory("rwkv6", tmp_path)
    requests = make_requests(8, VOCABULARY, longest=100, answer=16)
    plain = expected(path, requests)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(1)
    tensors = {}
    with torch.no_grad():
        for name in ("attention.key", "attention.output", "feed_forward.value"):
            for block in range(len(model.rwkv.blocks)):
                layer = model.get_submodule(f"rwkv.blocks.{block}.{name}")
                a, b = torch.randn(4, layer.in_features), torch.randn(layer.out_features, 4) * 0.05
                layer.weight += b @ a  # alpha / r = 1
                key = f"base_model.model.rwkv.blocks.{block}.{name}"
                tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    model.save_pretrained(tmp_path / "merged")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    targets = ["attention.key", "attention.output", "feed_forward.value"]
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": targets, "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    adapted = expected(tmp_path / "merged", requests)
    assert adapted != plain
    # On a CPU, vLLM adds the last place for adapters to requests without one, so that place has to be free.
    with engine(path, enable_lora=True, max_lora_rank=8, max_loras=2) as llm:
        loras = [LoRARequest("adapter", 1, str(adapter)) if i % 2 else None for i in range(len(requests))]
        options = [SamplingParams(temperature=0, max_tokens=new, ignore_eos=True) for _, new in requests]
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in requests]
        found = llm.generate(prompts, options, lora_request=loras, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in found]
    assert answers == [(adapted if i % 2 else plain)[i] for i in range(len(requests))]
