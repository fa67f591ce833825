"""The methods of PEFT on every architecture: what they adapt, training, merging, files, several adapters."""

import os
import subprocess
import sys

import peft
import pytest
import torch
import transformers
from cases import (
    CASES,
    CAUSAL,
    ENCODERS,
    GENERATING,
    GREEDY,
    IMAGE_ID,
    each_case_of_embeddings,
    each_head,
    each_model,
    lm_class,
    model_class,
    padded,
    random_ids,
    tiny_model,
)
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    MultitaskPromptTuningConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from peft.tuners.ia3 import IA3Layer
from peft.utils.hotswap import hotswap_adapter
from torch import nn

import subquad
from subquad.modeling.layers import Linear
from subquad.modeling.versions import CACHE_NAME, minor_version


TASKS = {
    "AutoModel": "FEATURE_EXTRACTION",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForMaskedLM": None,
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
}
METHODS = {
    "lora": (LoraConfig, {}),
    "dora": (LoraConfig, {"use_dora": True}),
    "adalora": (AdaLoraConfig, {"total_step": 10}),
    "vera": (VeraConfig, {}),
    "ia3": (IA3Config, {}),
    "ln_tuning": (LNTuningConfig, {}),
}
# What trains embeddings before a text, and what differs between the rows of two texts.
PROMPTS = {
    "prompt": (PromptTuningConfig, {}, {}),
    "p": (PromptEncoderConfig, {"encoder_hidden_size": 8}, {}),
    "multitask": (MultitaskPromptTuningConfig, {"num_tasks": 2}, {"task_ids": torch.tensor([1, 0])}),
}
# Not adapted unless asked for.
ROUTING = {"r_proj", "a_proj", "f_proj"}


def adapt(model, config_class=LoraConfig, **options):
    """With the task of the model's head."""
    heads = subquad.ARCHITECTURES[model.config.model_type][2]
    task = next(TASKS[auto_class] for auto_class, name in heads.items() if name == type(model).__name__)
    return get_peft_model(model, config_class(task_type=task, **options))


@torch.no_grad()
def disturb(adapted, seed=0):
    """As if it had been trained."""
    torch.manual_seed(seed)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return adapted.eval()


def without_gradient(adapted, ids):
    """What an adapter of LoRA, or what is trained beside it, would not learn of."""
    out = adapted.train()(input_ids=ids)
    sum(x.float().square().sum() for x in out.values() if isinstance(x, torch.Tensor)).backward()
    parts = ("lora_B", "lora_embedding_A", "modules_to_save", "trainable_tokens_delta")  # what begins as zero
    trained = {name: p for name, p in adapted.named_parameters() if any(part in name for part in parts)}
    assert trained
    return {name for name, parameter in trained.items() if parameter.grad is None or not parameter.grad.any()}


def linear_layers(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


# Runs first without the package, then with it.
WITHOUT_THE_PACKAGE = """
import os
import sys

import transformers.modeling_utils

if os.fork() == 0:
    import subquad

    assert "peft" not in sys.modules
    import peft.utils.constants
else:
    assert os.wait()[1] == 0
    for name in ("subquad", "subquad_kernels", "subquad_tokenizers"):
        sys.modules[name] = None
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN
    from transformers import AutoModel

    for path in sys.argv[1:]:
        model = AutoModel.from_pretrained(path, trust_remote_code=True)
        if model.config.model_type not in KNOWN:  # PEFT itself has an entry for `rwkv7`
            try:
                get_peft_model(model, LoraConfig())
            except ValueError as error:
                assert "target_modules" in str(error), error
            else:
                raise AssertionError(path)
        adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
        adapted(input_ids=torch.arange(1, 21)[None])[0].square().sum().backward()
        learns = {name: p.grad.any().item() for name, p in adapted.named_parameters() if "lora_B" in name}
        assert learns and all(learns.values()), (path, learns)
    for name in ("subquad", "subquad_kernels", "subquad_tokenizers"):
        del sys.modules[name]
    import subquad

from peft.utils import constants

for table in ("LORA_TARGET", "ADALORA_TARGET", "IA3_TARGET", "IA3_FEEDFORWARD", "LNTUNING_TARGET", "VERA_TARGET"):
    table = getattr(constants, f"TRANSFORMERS_MODELS_TO_{table}_MODULES_MAPPING")
    assert set(subquad.ARCHITECTURES) <= set(table), table
"""


@pytest.mark.thorough
def test_repositories_without_the_package_and_either_order_of_imports(tmp_path):
    """
    Where a repository brings its code and the package is missing, PEFT must be told what to adapt: every linear layer
    will do. Where it is not missing PEFT knows, whichever of the two was imported first.
    """
    paths = [str(tmp_path / model_type) for model_type in CAUSAL | ENCODERS]
    for model_type, path in zip(CAUSAL | ENCODERS, paths, strict=True):
        tiny_model(model_type, "AutoModel").save_pretrained(path, self_contained=True)
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.fast
@each_head
def test_lora_needs_no_target_modules(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    layers = linear_layers(model.base_model)
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    adapted = adapt(model)
    expected = {f"{prefix}{name}" for name in layers if name.rpartition(".")[2] not in ROUTING}
    assert set(adapted.base_model.targeted_module_names) == expected
    saved = {name for name, p in adapted.named_parameters() if p.requires_grad and "lora_" not in name}
    assert bool(saved) == (TASKS[auto_class] in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"))
    assert not without_gradient(adapted, random_ids(2, 20))


@each_model
def test_lora_on_every_linear_layer(model_type):
    """Every weight is used through its layer: otherwise an adapter would have no effect."""
    model = tiny_model(model_type)
    layers = linear_layers(model.base_model)
    adapted = adapt(model, target_modules="all-linear")
    assert len(adapted.base_model.targeted_module_names) == len(layers)
    assert not without_gradient(adapted, random_ids(2, 20))


@each_model
def test_targets_of_other_methods(model_type):
    model = tiny_model(model_type)
    norms = {name.removesuffix(".weight") for name, p in model.named_parameters() if p.dim() == 1 and "weight" in name}
    assert set(adapt(model, LNTuningConfig).base_model.targeted_module_names) == norms
    layers = [layer for layer in adapt(tiny_model(model_type), IA3Config).modules() if isinstance(layer, IA3Layer)]
    inputs = [layer for layer in layers if layer.is_feedforward]
    assert len(inputs) == model.config.num_hidden_layers < len(layers)


@pytest.mark.parametrize(("router", "layers"), [("lin", ["r_proj"]), ("mlp", ["r_proj.0", "r_proj.2"])])
def test_lora_on_the_router_of_raven(router, layers):
    ids, options = random_ids(2, 20), {"router_type": router, "decay_type": "GLA", "attn": None}
    adapted = adapt(tiny_model("raven", **options), target_modules=[*layers, "f_proj"])
    assert len(adapted.base_model.targeted_module_names) == 3 * (len(layers) + 1)
    assert not without_gradient(adapted, ids)
    assert not without_gradient(adapt(tiny_model("raven", **options)), ids)


@pytest.mark.parametrize(
    ("model_type", "parameters"),
    [
        ("rwkv6", ["time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"]),
        ("rwkv7", [f"att.{letter}{number}" for letter in "wavg" for number in (1, 2)]),
    ],
)
def test_lora_on_low_ranks(model_type, parameters):
    """They are parameters, not layers: they learn, are used token by token too, and are merged."""
    ids, model = random_ids(2, 12), tiny_model(model_type).double()  # rounding is another test's
    names = {name for name, p in model.named_parameters() if name.endswith(tuple(parameters))}
    base = model(ids).logits
    adapted = adapt(model, target_modules=[], target_parameters=parameters, r=2)
    assert set(adapted.base_model.targeted_parameter_names) == names
    assert not without_gradient(adapted, ids)
    expected = disturb(adapted)(ids).logits
    assert not torch.allclose(expected, base, atol=1e-2)
    cache, logits = None, []
    with torch.no_grad():
        for token in ids.split(1, dim=1):
            out = adapted(token, use_cache=True, **{CACHE_NAME: cache})
            logits.append(out.logits)
            cache = out[CACHE_NAME]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-8, rtol=1e-8)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, expected, atol=1e-8, rtol=1e-8)
    assert type(merged) is model_class(model_type) and {name for name, _ in merged.named_parameters()} >= names


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        (name, method)
        for name in CAUSAL | ENCODERS
        for method in METHODS
        if method in ("lora", "ln_tuning") or name in ("rwkv7", "avey-b")
    ],
)
def test_merging_is_exact(model_type, method):
    config_class, options = METHODS[method]
    ids, model = random_ids(2, 20), tiny_model(model_type)
    base = model(ids).logits
    before = {name: p.clone() for name, p in model.named_parameters()}
    layers = {name for name, module in model.named_modules() if type(module) is Linear}
    assert layers
    adapted = adapt(model, config_class, **options)
    with torch.no_grad():
        torch.testing.assert_close(
            adapted.eval()(input_ids=ids).logits, base, atol=1e-4, rtol=1e-4
        )  # nothing is learned yet
        expected = disturb(adapted)(input_ids=ids).logits
        assert not torch.allclose(expected, base, atol=1e-2)
        adapted.merge_adapter(safe_merge=True)
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected, atol=1e-3, rtol=1e-3)
        adapted.unmerge_adapter()
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected, atol=1e-3, rtol=1e-3)
        now = {name.replace(".base_layer", ""): p for name, p in adapted.get_base_model().named_parameters()}
        for name, parameter in before.items():
            torch.testing.assert_close(now[name], parameter, atol=1e-5, rtol=1e-5)
        merged = adapted.merge_and_unload(safe_merge=True)
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-3, rtol=1e-3)
    assert type(merged) is model_class(model_type)
    assert {name for name, module in merged.named_modules() if type(module) is Linear} == layers


@pytest.mark.quick_cases("rwkv6-*", "avey-*", "gecko-*")
@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [
        (name, head)
        for name in CAUSAL | ENCODERS
        for head in subquad.ARCHITECTURES[name][2]
        if head == "AutoModelForCausalLM" or name in ("rwkv6", "avey-b")
    ],
)
def test_files_of_an_adapter(model_type, auto_class, tmp_path):
    """What is trained beside an adapter is saved with it; every way to load it gives the same."""
    ids, source = random_ids(2, 20), tiny_model(model_type, auto_class)
    head = auto_class not in ("AutoModel", lm_class(model_type))  # made anew each time
    (source.base_model if head else source).save_pretrained(tmp_path / "base")

    def base(seed):
        torch.manual_seed(seed)
        return model_class(model_type, auto_class).from_pretrained(tmp_path / "base")

    adapted = disturb(adapt(base(0)))
    expected = adapted(input_ids=ids)[0]
    assert not torch.allclose(expected, base(0)(ids)[0], atol=1e-2)
    adapted.save_pretrained(tmp_path / "adapter")
    assert not any(file.name.startswith("model") for file in (tmp_path / "adapter").iterdir())
    loaded = PeftModel.from_pretrained(base(1), tmp_path / "adapter")
    torch.testing.assert_close(loaded.eval()(input_ids=ids)[0], expected)
    # Before 5.18, transformers does not find the head in the file, of any model, and reports that it is missing.
    if not head or minor_version(transformers.__version__) >= (5, 18):
        for found in (getattr(transformers, auto_class), model_class(model_type, auto_class)):
            torch.testing.assert_close(found.from_pretrained(tmp_path / "adapter")(ids)[0], expected)
        loaded = base(1)
        loaded.load_adapter(str(tmp_path / "adapter"))
        torch.testing.assert_close(loaded.eval()(ids)[0], expected)
    if TASKS[auto_class] is not None:
        kind = "ForFeatureExtraction" if auto_class == "AutoModel" else auto_class.removeprefix("AutoModel")
        loaded = getattr(peft, f"AutoPeftModel{kind}").from_pretrained(tmp_path / "adapter")
        torch.testing.assert_close(loaded.eval()(input_ids=ids)[0], expected)


@each_model
def test_adapters_of_transformers(model_type, tmp_path, any_peft):
    ids = random_ids(1, 9)
    tiny_model(model_type).save_pretrained(tmp_path / "model")
    load = getattr(transformers, lm_class(model_type)).from_pretrained
    model = load(tmp_path / "model")
    base = model(ids).logits
    model.add_adapter(LoraConfig(init_lora_weights=False))
    expected = model(ids).logits
    model.disable_adapters()
    torch.testing.assert_close(model(ids).logits, base)
    model.enable_adapters()
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    torch.testing.assert_close(load(tmp_path / "adapter")(ids).logits, expected)


@each_model
@torch.no_grad()
def test_several_adapters(model_type, tmp_path):
    ids, model = random_ids(2, 20), tiny_model(model_type)
    base = model(ids).logits
    adapted = adapt(model)
    adapted.add_adapter("other", LoraConfig(task_type=adapted.peft_config["default"].task_type, r=8))
    expected = {}
    for seed, name in enumerate(("default", "other")):
        adapted.set_adapter(name)
        expected[name] = disturb(adapted, seed)(input_ids=ids).logits
    assert not torch.allclose(expected["default"], expected["other"], atol=1e-2)
    adapted.set_adapter("default")
    torch.testing.assert_close(adapted(input_ids=ids).logits, expected["default"])
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(input_ids=ids).logits, base)

    adapted.save_pretrained(tmp_path)
    adapted.set_adapter("other")
    hotswap_adapter(adapted, tmp_path, adapter_name="other")
    torch.testing.assert_close(adapted(input_ids=ids).logits, expected["default"])

    # Another adapter for each row, if the layers' inputs have the rows of the batch.
    names = {"adapter_names": ["default", "__base__"]}
    if not CASES[model_type].rows_apart:
        with pytest.raises(ValueError, match="Length of `adapter_names`"):
            adapted(input_ids=ids, **names)
    else:
        mixed = torch.stack((expected["default"][0], base[1]))
        torch.testing.assert_close(adapted(input_ids=ids, **names).logits, mixed, atol=1e-4, rtol=1e-4)


@each_model
def test_gradient_checkpointing(model_type):
    """With the base model frozen, its embeddings must be made to need a gradient."""
    ids, gradients = random_ids(2, 20), []
    for reentrant in (None, False, True):
        model = tiny_model(model_type)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        adapted = disturb(adapt(model)).train()
        adapted(input_ids=ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in adapted.parameters() if p.requires_grad])
        assert all(gradient.any() for gradient in gradients[-1])
    for checkpointed in gradients[1:]:
        torch.testing.assert_close(checkpointed, gradients[0])


def with_prompt(model, config_class=PromptTuningConfig, **options):
    torch.manual_seed(0)
    return get_peft_model(model, config_class(task_type="CAUSAL_LM", num_virtual_tokens=4, **options)).eval()


@pytest.mark.parametrize(
    ("case", "method"),
    [
        pytest.param(case, method, id=f"{case.name}-{method}")
        for case in GENERATING
        for method in PROMPTS
        if case.embeddings and (method == "prompt" or case.name == "rwkv7")
    ],
)
def test_prompts(case, method):
    """Padding changes nothing, also between a learned prompt and the text."""
    config_class, options, rows = PROMPTS[method]
    adapted = with_prompt(case.model(), config_class, **options)
    texts = [case.text(1, n, seed=n) for n in (12, 7)]
    of_row = [{name: x[n : n + 1] for name, x in rows.items()} for n in range(2)]

    def run(inputs, mask, **more):
        adapted.zero_grad()
        out = adapted(**inputs, labels=inputs["input_ids"].where(mask, -100), **more)
        out.loss.backward()
        return out, [p.grad.clone() for p in adapted.parameters() if p.requires_grad]

    alone = [run(t, t["input_ids"] > 0, **more) for t, more in zip(texts, of_row, strict=True)]
    counts = [(t["input_ids"] != IMAGE_ID).sum() for t in texts]
    expected = [
        sum(n * x for n, x in zip(counts, each, strict=True)) / sum(counts)
        for each in zip(*([out.loss, *gradients] for out, gradients in alone), strict=True)
    ]
    for side in ("left", "right", "anywhere"):
        batch = padded(texts, side)
        mask = batch["attention_mask"].bool()
        out, gradients = run(batch, mask, **rows)
        for n, (single, _) in enumerate(alone):
            of_text = torch.nn.functional.pad(mask[n], (4, 0), value=True)
            torch.testing.assert_close(out.logits[n, of_text], single.logits[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close([out.loss, *gradients], expected, atol=1e-4, rtol=1e-4)

    options = {"max_new_tokens": 5, **GREEDY}
    generated = adapted.generate(**padded(texts, "left"), **rows, **options)
    for n, (text, more) in enumerate(zip(texts, of_row, strict=True)):
        for cached in (True, False):
            answer = adapted.generate(**text, **more, use_cache=cached, **options)
            assert torch.equal(generated[n, -5:], answer[0, -5:])
    # A row that ends before the other.
    end = int(generated[0, -4])
    ended = adapted.generate(**padded(texts, "left"), **rows, **{**options, "eos_token_id": end})
    start = generated.shape[1] - 5
    for row, free in zip(ended[:, start:], generated[:, start:], strict=True):
        seen = (free == end).cumsum(0).cumsum(0) <= 1
        assert torch.equal(row[: seen.sum()], free[seen][: len(row)])


@each_case_of_embeddings
def test_prompts_that_cannot_be(case):
    """What would read a text without its learned prompt, or needs what the models do not have, is refused."""
    instead = "`PromptTuningConfig`" if case.model_type in ("avey", "gecko") else "`subquad.StateTuningConfig`"
    with pytest.raises(ValueError, match=f"PREFIX_TUNING trains keys and values, .*{instead}"):
        with_prompt(case.model(), PrefixTuningConfig)
    adapted, text = with_prompt(case.model()), case.text(1, 12)
    out = adapted.generate(**text, max_new_tokens=2, return_dict_in_generate=True, **GREEDY)
    for name, value in (
        ("cache", out[CACHE_NAME]),
        ("prefix_cache", subquad.PrefixCache()),
        ("prefill_chunk_size", 6),
        ("prompt_lookup_num_tokens", 2),
    ):
        with pytest.raises(ValueError, match=f"`{name}`: after a prompt that PEFT has learned"):
            adapted.generate(**text, **{name: value}, max_new_tokens=2, **GREEDY)
    with adapted.disable_adapter():
        adapted.generate(**text, prompt_lookup_num_tokens=2, max_new_tokens=2, **GREEDY)


@each_model
def test_adapters_on_embeddings_and_head(model_type):
    ids, reference = random_ids(1, 9), tiny_model(model_type, tie_word_embeddings=False)
    names = {id(module): name for name, module in reference.named_modules()}
    embeddings, head = (
        names[id(module)] for module in (reference.get_input_embeddings(), reference.get_output_embeddings())
    )
    base = reference(ids).logits
    for options in (
        {"target_modules": [embeddings, head]},
        {"modules_to_save": [embeddings, head]},
        {"trainable_token_indices": [3, int(ids[0, 0])]},
    ):
        adapted = adapt(tiny_model(model_type, tie_word_embeddings=False), **options)
        torch.testing.assert_close(adapted.eval()(input_ids=ids).logits, base, atol=1e-4, rtol=1e-4)
        assert not without_gradient(adapted, ids)
        expected = disturb(adapted)(input_ids=ids).logits
        torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, expected, atol=1e-3, rtol=1e-3)
    # If they are tied, an adapter learns, but PEFT cannot merge it: there is one weight.
    tied = tiny_model(model_type, tie_word_embeddings=True)
    assert not without_gradient(adapt(tied, target_modules=[embeddings, head]), ids)
