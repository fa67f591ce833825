"""What the tests of serving share: models, requests, and an engine that ends with its test."""

import contextlib
import gc
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.distributed import cleanup_dist_env_and_memory

import subquad
from subquad_tokenizers import ByteTokenizer


Request = tuple[list[int], int]
VOCABULARY = 128
RWKV = {"hidden_size": 64, "head_size": 16, "num_hidden_layers": 3}
RAVEN = {"model_type": "raven", "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 4, "num_slots": 16, "topk": 4}
WINDOW = {"layers": [1], "num_heads": 2, "window_size": 24}
GECKO = {"model_type": "gecko", "model_dim": 64, "num_layers": 3, "num_heads": 2, "z_dim": 32, "value_dim": 64}
GECKO |= {"ffn_hidden_dim": 96, "cema_ndim": 4, "chunk_size": 16, "timenorm_num_groups": 8}
# Name to the fields of a small model with random weights.
TINY = {
    "rwkv5": {"model_type": "rwkv5", **RWKV},
    "rwkv6": {"model_type": "rwkv6", "lora_rank_tokenshift": 4, "lora_rank_decay": 8, **RWKV},
    "rwkv6-tied": {"model_type": "rwkv6", "tie_word_embeddings": True, **RWKV},
    "rwkv7": {"model_type": "rwkv7", "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 3},
    "raven": {**RAVEN, "num_kv_heads": 2, "use_rope": True, "use_output_gate": True},
    "raven-swa": {**RAVEN, "router": "swa"},
    "raven-gla": {**RAVEN, "decay_type": "GLA", "router_type": "mlp", "bias_rmm": True},
    "raven-window": {**RAVEN, "attn": WINDOW},
    "raven-attention": {**RAVEN, "attn": {**WINDOW, "window_size": None, "num_kv_heads": 1, "qkv_bias": True}},
    "raven-split": {**RAVEN, "attn": WINDOW, "use_output_gate": True},
    "gecko": GECKO,
    "gecko-wide": {**GECKO, "chunk_size": 64},
    "gecko-one-document": {**GECKO, "document_boundaries": False, "num_rope_heads": 0, "share_emb": True},
}


def model_directory(name: str, directory: Path) -> Path:
    """An embedded model, or one of `TINY`, which is made."""
    if name not in TINY:
        return subquad.embedded_model(name)
    fields = dict(TINY[name])
    config = AutoConfig.for_model(fields.pop("model_type"), vocab_size=VOCABULARY, **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # of a new model of some architectures every block puts out zeros
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory / name)
    ByteTokenizer().save_pretrained(directory / name)
    return directory / name


def make_requests(number: int, vocabulary: int, longest: int = 237, answer: int = 40, seed: int = 0) -> list[Request]:
    """Prompts of 1 to `longest` tokens, one of them of one token, and the number of tokens to be generated."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, size=1):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    lengths = [1, *integers(1, longest + 1, number - 1)]
    return [(integers(3, vocabulary, n), integers(min(10, answer), answer + 1)[0]) for n in lengths]


@contextlib.contextmanager
def engine(model: Path, **options):
    """An engine for few requests at a time, in steps that are shorter than the prompts."""
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 7,
        **options,
    }
    llm = LLM(model=str(model), **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def serve(llm: LLM, requests: list[Request]) -> list[list[int]]:
    """The greedy answers of an engine."""
    return [list(output.outputs[0].token_ids) for output in outputs(llm, requests)]


def outputs(llm: LLM, requests: list[Request]) -> list[RequestOutput]:
    """What an engine puts out for each request."""
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in requests]
    options = [SamplingParams(temperature=0, max_tokens=new, ignore_eos=True) for _, new in requests]
    return llm.generate(prompts, options, use_tqdm=False)


def expected(model: Path, requests: list[Request]) -> list[list[int]]:
    """What `generate` answers to one request after the other."""
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    for prompt, new in requests:
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        answers.append(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())
    return answers
