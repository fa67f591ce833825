"""Tensor parallelism: models that two processes share do what they do in one."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from cases import ENCODERS, lm_class, random_ids, tiny_config, tiny_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module


pytestmark = pytest.mark.thorough

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tensor_parallel.py"
WRITE = ["--max-new-tokens", "25"]
PROCESSES = 2
REPOSITORY = "rwkv6"  # the case that is also loaded by a copy of the code

RAVEN = {
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "bias_rmm": True,
    "add_gumbel_noise": False,
    "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 9, "qkv_bias": True},
}
GECKO = {"num_heads": 4, "z_dim": 32, "num_rope_heads": None}
# Of these every process has some of the heads, ...
SPLIT = {
    "rwkv5": ("rwkv5", {"hidden_size": 64}),
    "rwkv6": ("rwkv6", {"hidden_size": 64}),
    "rwkv7b": ("rwkv7_deep_embed", {"hidden_size": 64}),
    "raven": ("raven", RAVEN),
    "raven-swa": ("raven", RAVEN | {"router": "swa"}),
    "gecko": ("gecko", GECKO),
}
# ... and of these a part of the linear layers alone.
WHOLE = {
    "avey": ("avey", {}),
    "avey-b": ("avey-b", {}),
    "rwkv5-odd": ("rwkv5", {}),
    "raven-mlp": ("raven", RAVEN | {"router_type": "mlp", "use_output_gate": False, "decay_type": "GLA"}),
    "gecko-mixed": ("gecko", GECKO | {"num_rope_heads": 3, "swiglu": False}),
}
CASES = SPLIT | WHOLE
each_case = pytest.mark.parametrize("name", CASES)


def tiny(name):
    model_type, fields = CASES[name]
    # 5.16 of transformers wants a vocabulary that the processes divide.
    return tiny_model(model_type, vocab_size=98, **fields)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x.detach()


def read(model):
    """The results of a model by name: logits, loss, gradients, and generated tokens."""
    ids, encoder = random_ids(2, 21), model.config.model_type in ENCODERS
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    out = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    out.loss.backward()
    found = {f"gradient of {name}": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    found |= {"loss": out.loss.detach(), "logits of training": out.logits.detach()}
    with torch.no_grad():
        out = model(ids, attention_mask=mask, **({} if encoder else {"use_cache": True}))
    found |= {"logits": out.logits, "state": 0}
    if not encoder:
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found["tokens"] = model.generate(ids, attention_mask=mask, **options)
        # With drafts: the state takes back the refused ones.
        found["tokens of drafts"] = model.generate(ids[1:], prompt_lookup_num_tokens=3, **options)
        found["state"] = out.cache.num_elements
    return found


def run_example():
    """What the example prints."""
    sys.argv = [str(EXAMPLE), *WRITE]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        sys.path.insert(0, str(EXAMPLE.parent))  # as Python does for a script
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def work(directory):
    """What each of the processes does."""
    torch.set_num_threads(1)
    rank, results, split = int(os.environ["RANK"]), {}, {}
    distributed = {"distributed_config": DistributedConfig(tp_size=PROCESSES)}
    for name, (model_type, _) in CASES.items():
        auto_class = getattr(transformers, lm_class(model_type))
        model = auto_class.from_pretrained(directory / name, **distributed)
        results[name] = read(model)
        parameters = model.named_parameters(remove_duplicate=False)
        split[name] = [name for name, p in parameters if isinstance(p, DTensor)]
        model.save_pretrained(directory / f"{name}-saved")
    for turn in range(PROCESSES):  # one after the other, as they write copies of the code
        if turn == rank:
            copy = get_class_from_dynamic_module("modeling_rwkv6.Rwkv6ForCausalLM", directory / REPOSITORY)
        torch.distributed.barrier()
    results["copy"] = read(copy.from_pretrained(directory / REPOSITORY, **distributed))
    results |= {"example": run_example(), "split": split}
    torch.save(results, directory / f"results-{rank}.pt")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The directory of the processes: models, saved copies, and results."""
    directory = tmp_path_factory.mktemp("tensor_parallel")
    for name in CASES:
        tiny(name).save_pretrained(directory / name, self_contained=name == REPOSITORY)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": str(directory / "modules")}
    run = subprocess.run([*torchrun, __file__, directory], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    # A rule of a plan that fits nothing.
    assert "match nothing" not in run.stderr and "not applied" not in run.stderr, run.stderr
    return directory


@pytest.fixture(scope="module")
def results(directory):
    return [torch.load(directory / f"results-{rank}.pt") for rank in range(PROCESSES)]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        if key != "state":
            torch.testing.assert_close(found[key], x, atol=1e-4, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


@each_case
def test_equals_one_process(name, results):
    model = tiny(name)
    expected = read(model)
    linear = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    for result in results:
        assert_equal(result[name], expected)
        assert linear <= {*result["split"][name], *(weight for weight in linear if re.search(r"r_proj\.\d", weight))}
        assert (result[name]["state"] < expected["state"]) == (name in SPLIT)


@each_case
def test_saves_whole_tensors(name, directory):
    model_type, _ = CASES[name]
    saved = getattr(transformers, lm_class(model_type)).from_pretrained(directory / f"{name}-saved")
    torch.testing.assert_close(saved.state_dict(), tiny(name).state_dict(), atol=0, rtol=0)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        *((model_type, {}) for model_type in ("rwkv5", "rwkv6", "rwkv7", "raven", "gecko")),
        ("raven", RAVEN | {"num_kv_heads": 1}),
        ("raven", RAVEN | {"attn": RAVEN["attn"] | {"num_kv_heads": 1}}),
        ("raven", RAVEN | {"use_output_gate": False}),
        ("raven", RAVEN | {"router_type": "mlp"}),
        ("gecko", GECKO | {"num_rope_heads": 3}),
    ],
)
def test_heads_that_cannot_be_split(model_type, fields):
    config = tiny_config(model_type, **fields)
    config.distributed_config = DistributedConfig(tp_size=PROCESSES)
    styles = set(config.base_model_tp_plan.values())
    assert {"colwise_gather_output", "rowwise_split_input"} < styles
    assert "replicated_with_grad_allreduce" not in styles


def test_copy_of_the_code(results):
    for result in results:
        assert_equal(result["copy"], result[REPOSITORY])


def test_example(results, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    text, alone = run_example().split("\n\n1 processes; ")
    assert text.startswith("X:1\nT:") and alone == "this one has 100% of the weights, on cpu.\n"
    printed = [result["example"] for result in results]
    # The recurrence has five heads, so the small matrices of its decay and its token shift are not split.
    assert printed == [f"{text}\n\n2 processes; this one has 55% of the weights, on cpu.\n", ""]


if __name__ == "__main__":
    work(Path(sys.argv[1]))
