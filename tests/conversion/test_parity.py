"""Converted checkpoints compute what the runtime that they were written for computes."""

import importlib
import os

import pytest
import torch
from peft import get_peft_model
from rwkv_files import reference_logits, write_trainer_file
from transformers import AutoModelForCausalLM

from subquad import StateTuningConfig, load_time_states
from subquad_cli import main
from subquad_conversion import convert


IDS = [3, 14, 15, 92, 65, 35, 89, 79, 3, 3, 23, 84, 62, 64, 33, 83, 27, 9, 50, 2]
# Heads, size of a head, divisor: three heads as in no published model; 160 channels are not a multiple of 64.
SHAPES = [(3, 64, 8), (1, 64, 8), (5, 32, 8), (3, 64, 1), (5, 32, 1)]


@pytest.fixture(scope="module")
def runtime():
    """The class that runs `.pth` files in the PyPI package `rwkv`, on the CPU and without compiling anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RWKV_JIT_ON", "0")
        patch.setenv("RWKV_CUDA_ON", "0")
        patch.delenv("RWKV_V7_ON", raising=False)
        flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        model_class = importlib.import_module("rwkv.model").RWKV
        yield model_class
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = flags[:2]
        torch.backends.cuda.matmul.allow_tf32 = flags[2]


@pytest.mark.parametrize("model_type", ["rwkv5", "rwkv6"])
@pytest.mark.parametrize(("heads", "head_size", "divisor"), SHAPES)
def test_logits_equal_those_of_the_source(model_type, heads, head_size, divisor, tmp_path, runtime, monkeypatch):
    source = tmp_path / "trained.pth"
    # With divisor 1 the group norm magnifies rounding wherever a head's output nearly vanishes, in the reference run
    # in float32 as well; under these seeds no head's does.
    tensors = write_trainer_file(source, model_type, heads=heads, head_size=head_size, seed=head_size + divisor)
    arguments = [] if divisor == 8 else ["--head-size-divisor", str(divisor)]
    assert main(["convert", str(source), str(tmp_path / "model"), *arguments]) == 0

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert model.config.head_size_divisor == divisor
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]

    reference = reference_logits(tensors, model_type, IDS, divisor)
    assert (logits - reference).abs().max() < 1e-4
    if divisor != 8:
        assert (reference - reference_logits(tensors, model_type, IDS, 8)).abs().max() > 1e-3

    # The runtime has divisor 8 written into its calls.
    group_norm = torch.nn.functional.group_norm
    monkeypatch.setattr(
        torch.nn.functional,
        "group_norm",
        lambda *args, eps, **kwargs: group_norm(*args, eps=eps * divisor**2 / 64, **kwargs),
    )
    # It runs the file that is written, which holds what the source does.
    written = tmp_path / "written.pth"
    assert main(["convert", str(tmp_path / "model"), str(written), "--to", "pth"]) == 0
    stored = torch.load(written, weights_only=True)
    assert stored.keys() == tensors.keys() and all(torch.equal(stored[name], x) for name, x in tensors.items())
    peer = runtime(model=os.path.splitext(written)[0], strategy="cpu fp32", verbose=False)
    expected, _ = peer.forward(IDS, None, full_output=True)
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("model_type", ["rwkv5", "rwkv6"])
def test_a_tuned_state_is_that_of_the_source(model_type, tmp_path, runtime):
    tensors = write_trainer_file(tmp_path / "trained.pth", model_type, heads=2)
    torch.manual_seed(0)
    states = {f"blocks.{i}.att.time_state": 5 * torch.randn(2, 64, 64) for i in range(2)}
    torch.save(tensors | states, tmp_path / "tuned.pth")
    peer = runtime(model=str(tmp_path / "tuned"), strategy="cpu fp32", verbose=False)
    expected, _ = peer.forward(IDS, None, full_output=True)

    convert(tmp_path / "trained.pth", tmp_path / "model", progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = get_peft_model(model, StateTuningConfig(task_type="CAUSAL_LM")).eval()
    with torch.no_grad():
        untuned = model(torch.tensor([IDS])).logits[0]
        load_time_states(model, tmp_path / "tuned.pth")
        logits = model(torch.tensor([IDS])).logits[0]
    assert (untuned - expected).abs().max() > 0.1
    assert (logits - expected).abs().max() < 1e-4
