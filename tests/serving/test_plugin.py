"""What vLLM is told about the models, what is refused, and what an engine does besides answering."""

import json
import sys
from pathlib import Path

import pytest
import torch
from engine import VOCABULARY, engine, expected, make_requests, model_directory, outputs, serve
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import EngineArgs

import subquad
from subquad.hub import export as hub
from subquad.models import REGISTRY
from subquad_kernels.c import native
from subquad_tokenizers import ByteTokenizer
from subquad_vllm.configuration import DEFAULT_LENGTH


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "conversion"))
import rwkv7_files
import rwkv_files


pytestmark = pytest.mark.xdist_group("plugin")


def engine_config(model, **options):
    return EngineArgs(model=str(model), dtype="float32", enforce_eager=True, **options).create_engine_config()


def test_every_model_is_served_or_refused():
    assert all((each.vllm.path is None) == bool(each.vllm.refusal) for each in REGISTRY.values())


@pytest.mark.parametrize("model_type", [name for name, each in REGISTRY.items() if each.vllm.path is None])
def test_refused_models(model_type, tmp_path):
    config = AutoConfig.for_model(model_type)
    config.architectures = [REGISTRY[model_type].heads[REGISTRY[model_type].lm_auto_class]]
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=f"cannot serve a model of type '{model_type}': {REGISTRY[model_type].vllm.refusal[:20]}"
    ):
        engine_config(tmp_path, skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("speculative_config", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        ("pipeline_parallel_size", {"pipeline_parallel_size": 2}),
        ("quantization", {"quantization": "fp8"}),
    ],
)
def test_refused_settings(name, options):
    with pytest.raises(ValueError, match=f"`{name}`"):
        engine_config(subquad.embedded_model("finch-abc"), **options)


def test_attention_layers_of_several_sizes_are_refused(tmp_path):
    attn = [{"layers": [0], "num_heads": 2}, {"layers": [1], "num_heads": 4}]
    config = AutoConfig.for_model("raven", hidden_size=64, num_heads=4, num_hidden_layers=3, attn=attn)
    config.architectures = ["RavenForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`attn\['num_heads'\]` must be the same in all layers, got \[2, 4\]"):
        engine_config(tmp_path, skip_tokenizer_init=True)


def test_attention_whose_heads_cannot_be_split_is_refused(tmp_path):
    model = model_directory("raven-attention", tmp_path)
    with pytest.raises(ValueError, match="`tensor_parallel_size` must be 1, got 2"):
        engine_config(model, tensor_parallel_size=2, distributed_executor_backend="mp")


def test_lengths_have_no_limit():
    """`context_length` is that of the training."""
    model = subquad.embedded_model("finch-abc")
    trained = AutoConfig.from_pretrained(model).context_length
    assert engine_config(model).model_config.max_model_len == DEFAULT_LENGTH > trained
    assert engine_config(model, max_model_len=100 * trained).model_config.max_model_len == 100 * trained


@pytest.mark.parametrize("trust", [True, False])
def test_a_repository_with_its_code(trust, tmp_path):
    """It is served by the installed package, whether its own code is trusted or not."""
    hub.export(subquad.embedded_model("finch-abc"), tmp_path)
    requests = make_requests(4, VOCABULARY, longest=50, answer=8)
    with engine(tmp_path, trust_remote_code=trust) as llm:
        assert serve(llm, requests) == expected(subquad.embedded_model("finch-abc"), requests)


@pytest.mark.parametrize(
    ("make", "ranks", "fields"),
    [
        (rwkv_files.fla_tensors, (7, 11), {"model_type": "rwkv6", "num_heads": 3, "proj_low_rank_dim": 7}),
        (rwkv7_files.fla_tensors, (11, 7, 5, 13), {"model_type": "rwkv7"}),
    ],
    ids=["rwkv6", "rwkv7"],
)
def test_files_of_another_package(make, ranks, fields, tmp_path):
    """Finch and Goose are also published in the layout of flash-linear-attention."""
    tensors = make(layers=2, ranks=ranks, vocabulary=VOCABULARY)
    weights = {name: x.contiguous() for name, x in tensors.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    names = [f"{fields['model_type'].upper()}ForCausalLM"]
    fields = {**fields, "architectures": names, "hidden_size": 192, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ByteTokenizer().save_pretrained(tmp_path)
    requests = make_requests(4, VOCABULARY, longest=50, answer=8)
    with engine(tmp_path) as llm:
        assert serve(llm, requests) == expected(tmp_path, requests)


def quantised_layers(model):
    """Linear layers of sizes that vLLM's products of 4 bits take on a CPU, and their names. The head is none."""
    for name, module in model.named_modules():
        is_layer = isinstance(module, torch.nn.Linear) and name != model.lm_head_name
        if is_layer and module.in_features % 32 == module.out_features % 32 == 0:
            yield name, module


def save_quantised(path, tensors, **fields):
    """Replaces the tensors of a directory, and says in its configuration what they are."""
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": fields}))


def served_answer(path):
    """A text with an answer of a server in bfloat16, and the log probabilities of all tokens but the first."""
    prompt = make_requests(2, VOCABULARY, longest=100)[1][0]
    options = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with engine(path, dtype="bfloat16") as llm:  # some of vLLM's products take no float32
        [output] = llm.generate([TokensPrompt(prompt_token_ids=prompt)], options, use_tqdm=False)
    [answer] = output.outputs
    text, steps = [*prompt, *answer.token_ids], [*output.prompt_logprobs[1:], *answer.logprobs]
    found = [step[token].logprob for step, token in zip(steps, text[1:], strict=True)]
    return torch.tensor(text), torch.tensor(found)


def mean_error(model, text, found):
    """How far these log probabilities are from a model's, on average."""
    with torch.no_grad():
        logits = model(text[None]).logits[0, :-1].log_softmax(-1)
    return (found - logits.gather(1, text[1:, None])[:, 0]).abs().mean()


@pytest.mark.parametrize("name", ["rwkv6", "raven"])
def test_weights_of_eight_bits(name, tmp_path):
    """Files of compressed-tensors with 8 bits for weights and activations answer nearly as those they were made of."""
    path = model_directory(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tensors = load_file(path / "model.safetensors")
    for layer, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and layer != model.lm_head_name:
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            tensors[f"{layer}.weight"] = (module.weight.detach() / scale).round().to(torch.int8)
            tensors[f"{layer}.weight_scale"] = scale
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True},
    }
    save_quantised(
        path,
        tensors,
        quant_method="compressed-tensors",
        format="int-quantized",
        quantization_status="compressed",
        ignore=[model.lm_head_name],
        config_groups={"group_0": group},
    )
    assert 1e-3 < mean_error(model, *served_answer(path)) < 0.2  # not the weights of before, but close to them


def pack(x, dim, order=range(8)):
    """Numbers of 4 bits, eight along an axis in each int32, of which `order` names the lowest bits' first."""
    parts = x.to(torch.int64).movedim(dim, -1).unflatten(-1, (-1, 8))[..., list(order)]
    words = (parts << 4 * torch.arange(8)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32).movedim(-1, dim)


def by_gptq(weight, group):
    """The tensors of a weight (in, out) in files of GPTQ, with a scale for each group of inputs, and their values."""
    groups = weight.unflatten(0, (-1, group))
    scale = (groups.abs().amax(1, keepdim=True) / 7).half().float()
    numbers = (groups / scale).round().add(8).clamp(0, 15)
    tensors = {
        "qweight": pack(numbers.flatten(0, 1), 0),
        "qzeros": pack(torch.full_like(scale[:, 0], 7), 1),  # one less than what is taken away
        "scales": scale[:, 0].half(),
        "g_idx": torch.arange(len(weight), dtype=torch.int32) // group,
    }
    return tensors, ((numbers - 8) * scale).flatten(0, 1)


def by_awq(weight, group):
    """The same in files of AWQ, with a zero for each group."""
    groups, order = weight.unflatten(0, (-1, group)), (0, 2, 4, 6, 1, 3, 5, 7)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    numbers = (groups / scale).round().add(zero).clamp(0, 15)
    tensors = {
        "qweight": pack(numbers.flatten(0, 1), 1, order),
        "qzeros": pack(zero[:, 0], 1, order),
        "scales": scale[:, 0].half(),
    }
    return tensors, ((numbers - zero) * scale).flatten(0, 1)


FOUR_BITS = {
    "gptq": (by_gptq, {"desc_act": False, "sym": True}),
    "awq": (by_awq, {"zero_point": True, "version": "gemm", "modules_to_not_convert": ["head"]}),
}


@pytest.mark.parametrize(("name", "method"), [("rwkv6", "gptq"), ("raven", "gptq"), ("rwkv6", "awq")])
def test_weights_of_four_bits(name, method, tmp_path):
    """Files of GPTQ and AWQ answer as the weights that they stand for, not as those that they were made of."""
    path = model_directory(name, tmp_path)
    model, original = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    tensors, (convert, fields) = load_file(path / "model.safetensors"), FOUR_BITS[method]
    for layer, module in quantised_layers(model):
        own, weight = convert(module.weight.detach().T, 32)
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}.{name}": x for name, x in own.items()}
        module.weight.data = weight.T.contiguous()
    save_quantised(path, tensors, quant_method=method, bits=4, group_size=32, **fields)
    text, found = served_answer(path)
    assert 4 * mean_error(model, text, found) < mean_error(original, text, found)


def test_files_of_awq_that_name_no_layers(tmp_path):
    """vLLM would take layers for not quantised whose block has a parameter of its own."""
    path = model_directory("rwkv6", tmp_path)
    save_quantised(path, load_file(path / "model.safetensors"), quant_method="awq", bits=4, group_size=32)
    with pytest.raises(ValueError, match="`modules_to_not_convert`"):
        engine_config(path)


@pytest.fixture(scope="module")
def finch():
    """An engine for finch-abc, whose four blocks of memory are not enough for all requests at once."""
    with engine(subquad.embedded_model("finch-abc"), num_gpu_blocks_override=4) as llm:
        yield llm


def test_requests_wait_for_a_slot(finch):
    requests = make_requests(8, VOCABULARY, longest=100, answer=16)
    assert serve(finch, requests) == expected(subquad.embedded_model("finch-abc"), requests)


@pytest.mark.skipif(native.library() is None, reason="there is no C compiler")
def test_requests_that_decode_take_the_library(finch, monkeypatch):
    """Each token of an answer but the first is one row of a call in each of four blocks."""
    requests = make_requests(8, VOCABULARY, longest=100, answer=16)
    rows, step = [], native.Library.step

    def count(library, r, *rest):
        out = step(library, r, *rest)
        rows.append(0 if out is None else len(r))
        return out

    monkeypatch.setattr(native.Library, "step", count)
    serve(finch, requests)
    assert sum(rows) >= 4 * sum(new - 1 for _, new in requests)


def test_sampling(finch):
    """A seed, several samples, log probabilities and stop strings."""
    prompt = "X:1\nT:The Finch\nM:6/8\nL:1/8\nK:D\n"
    options = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=24, logprobs=2, stop=["|"])
    [first], [again] = (finch.generate([prompt], options, use_tqdm=False) for _ in range(2))
    texts = [sample.text for sample in first.outputs]
    assert texts == [sample.text for sample in again.outputs] and texts[0] != texts[1]
    for sample in first.outputs:
        assert "|" not in sample.text and (sample.finish_reason, sample.stop_reason) in (
            ("stop", "|"),
            ("length", None),
        )
        assert all(len(step) in (2, 3) for step in sample.logprobs)


def test_log_probabilities(finch):
    """Those of a prompt's tokens are the model's."""
    model = AutoModelForCausalLM.from_pretrained(subquad.embedded_model("finch-abc"), dtype=torch.float32)
    prompt = make_requests(2, VOCABULARY, longest=100)[1][0]
    options = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = finch.generate([TokensPrompt(prompt_token_ids=prompt)], options, use_tqdm=False)
    found = [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    wanted = logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=1e-4)


def test_a_request_that_ends_early_frees_its_slot(finch):
    """An aborted request's slot is used by the next ones."""
    for i in range(8):
        prompt = TokensPrompt(prompt_token_ids=[3] * 50)
        finch.llm_engine.add_request(f"aborted-{i}", prompt, SamplingParams(max_tokens=500, ignore_eos=True))
    finch.llm_engine.step()
    finch.llm_engine.abort_request([f"aborted-{i}" for i in range(8)])
    requests = make_requests(4, VOCABULARY, longest=50, answer=8)
    assert serve(finch, requests) == expected(subquad.embedded_model("finch-abc"), requests)


def test_a_preempted_request_goes_on(tmp_path):
    """Attention without a window takes memory as its text grows: there is too little of it for all requests."""
    model = model_directory("raven-attention", tmp_path)
    requests = make_requests(7, VOCABULARY, longest=60, answer=200)
    with engine(model, num_gpu_blocks_override=10, max_model_len=300, disable_log_stats=False) as llm:
        assert [list(output.outputs[0].token_ids) for output in outputs(llm, requests)] == expected(model, requests)
        preempted = next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert preempted > 0
