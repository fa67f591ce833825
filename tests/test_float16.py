"""
Eagle, Finch and Goose in float16, with a residual stream that is larger than 65,504, the largest number of float16: it
is float32, and the results are those of the model in float32.
"""

import copy
import itertools
import re

import pytest
import torch
from cases import CASES, cut, each, pick, tiny_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import subquad
from subquad.modeling.layers import Linear


each_recurrent = each(*(CASES[name] for name in ("rwkv5", "rwkv6", "rwkv7", "visual-rwkv6")))
each_rwkv = pytest.mark.parametrize("model_type", ["rwkv5", "rwkv6", "rwkv7"])
# What a block adds to the stream.
ADDED = re.compile(r"(attention|att)\.output\.weight$|(feed_forward|ffn)\.value\.weight$")


def loud(name, **fields):
    """A model with weights that float16 can hold, and a loud stream."""
    model = tiny_model(name, **fields)
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.copy_((x * 2**14 if ADDED.search(name) else x).half())
    return model


@torch.no_grad()
def error(found, expected):
    return (found.float() - expected).norm() / expected.norm()


def assert_near(found, expected):
    assert error(found, expected) < 0.02  # the largest of 60 was 0.007


@torch.no_grad()
def read(model, text, stops, cache=None):
    """The logits of a text that is read in pieces, and the cache."""
    logits = []
    for start, stop in zip([0, *stops], [*stops, None], strict=True):
        out = model(**cut(text, start, stop), cache=cache, use_cache=True)
        cache = out.cache
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


@each_recurrent
@torch.no_grad()
def test_logits(case):
    model, text = loud(case.name), case.text(2, 24)
    half = copy.deepcopy(model).half()
    expected, out = (m(**text, output_hidden_states=True) for m in (model, half))
    stream = expected.hidden_states[:-1]
    assert max(x.abs().max() for x in stream) > 2 * 65504
    # Two layers add to the stream in a block: what one of them puts out is larger than 65,504 as well.
    assert max((y - x).abs().max() for x, y in itertools.pairwise(stream)) > 2 * 65504
    assert out.logits.dtype == torch.float16
    assert_near(out.logits, expected.logits)
    for found, x in zip(out.hidden_states, expected.hidden_states, strict=True):
        assert_near(found, x)
    assert_near(read(half, text, [20, 21, 22, 23])[0], expected.logits)
    left = pick(text, 0)
    left["input_ids"] = torch.nn.functional.pad(left["input_ids"], (3, 0))
    mask = torch.nn.functional.pad(torch.ones(1, 24, dtype=torch.long), (3, 0))
    assert_near(half(**left, attention_mask=mask).logits[:, 3:], expected.logits[:1])


@each_rwkv
@torch.no_grad()
def test_files_and_states(model_type, tmp_path):
    """A file has the weights themselves, and a state goes on in either dtype."""
    model, text = loud(model_type), CASES[model_type].text(2, 24)
    expected = model(**text).logits
    half = copy.deepcopy(model).half()
    half.save_pretrained(tmp_path)
    for dtype in (torch.float16, torch.float32):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for name, x in loaded.state_dict().items():
            assert torch.equal(x.float(), model.state_dict()[name]), name
        assert_near(loaded(**text).logits, expected)
    for first, second in ((half, model), (model, half)):
        _, cache = read(first, cut(text, 0, 15), [8])
        assert_near(read(second, cut(text, 15), [1], cache.to(dtype=second.dtype))[0], expected[:, 15:])


@pytest.mark.parametrize(
    ("model_type", "method"),
    [("rwkv5", subquad.Int8Config), ("rwkv6", subquad.Int4Config), ("rwkv7", subquad.Int8Config)],
)
@torch.no_grad()
def test_integers(model_type, method, tmp_path):
    """With weights of 8 and 4 bits, float16 adds little to the error of the integers."""
    model, text = loud(model_type, **CASES[model_type].wide), CASES[model_type].text(2, 12)
    model.save_pretrained(tmp_path)
    own, in_half = (
        error(
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=method(), dtype=dtype)(**text).logits,
            model(**text).logits,
        )
        for dtype in (torch.float32, torch.float16)
    )
    assert in_half < 1.3 * own


@each_rwkv
@torch.no_grad()
def test_adapters(model_type):
    """Also after they are merged."""
    text = CASES[model_type].text(2, 12)
    adapted = get_peft_model(loud(model_type), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    half = copy.deepcopy(adapted).half()
    expected = adapted(**text).logits
    assert_near(half(**text).logits, expected)
    assert_near(half.merge_and_unload()(**text).logits, expected)


@pytest.mark.parametrize(("model_type", "checkpointing"), [("rwkv5", False), ("rwkv6", True), ("rwkv7", False)])
def test_gradients(model_type, checkpointing):
    model, text = loud(model_type).train(), CASES[model_type].text(2, 12)
    half = copy.deepcopy(model).half()
    if checkpointing:
        half.gradient_checkpointing_enable()
    for m in (model, half):
        m(**text, labels=text["input_ids"]).loss.backward()
    for name, x in half.named_parameters():
        wanted = model.get_parameter(name).grad
        assert x.grad.isfinite().all(), name
        if x is half.get_input_embeddings().weight:
            assert error(x.grad, wanted) < 0.15


@pytest.mark.parametrize(
    ("size", "compiled"), [(1e4, False), (1, False), (1e-3, False), (1e-6, False), (1e4, True), (1e-6, True)]
)
def test_wide_products(size, compiled):
    """Neither large nor small inputs and gradients leave the range of float16 on the way."""
    torch.manual_seed(0)
    half = Linear(64, 48, bias=False, wide=True).half()
    layer = Linear(64, 48, bias=False)
    layer.load_state_dict(half.state_dict())
    # Tokens of one text differ as well. The gradients of a weight are sums of products of both.
    x = (torch.randn(2, 8, 64).clamp(-3, 3) * size * torch.tensor([1, 0.01]).view(2, 1, 1)).half()
    grad = torch.randn(2, 8, 48) * (3000 if size < 1e4 else 1e-2)
    multiply = torch.compile(half, backend="aot_eager", fullgraph=True) if compiled else half
    inputs = [x.clone().requires_grad_(), x.float().requires_grad_()]
    for product, given in zip((multiply, layer), inputs, strict=True):
        out = product(given)
        out.backward(grad)
        with torch.no_grad():
            for row, wanted in zip(product(given), layer(x.float()), strict=True):
                assert error(row, wanted) < 1e-3
            assert error(out, layer(x.float())) < 1e-3
    assert error(inputs[0].grad, inputs[1].grad) < 1e-3
    assert error(half.weight.grad, layer.weight.grad) < 1e-3
