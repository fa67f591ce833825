"""Losses and gradients, with every backend and in every number format."""

import re
import warnings
from importlib.util import find_spec

import pytest
import torch
from cases import (
    AVEY,
    DEEP_EMBED,
    DEVICE,
    EAGLE,
    FINCH,
    GECKO,
    GOOSE,
    GREEDY,
    KINDS,
    RAVEN,
    RAVEN_BOTH,
    TOLERANCE,
    VISUAL,
    assert_all_close,
    assert_same_states,
    cut,
    each_case,
    each_class,
    each_kind,
    each_kind_of_model,
    each_kind_of_text_model,
    each_model,
    each_text_model_case,
    each_with,
    gradients,
    join,
    labels_of,
    padded,
    pick,
    random_ids,
    split,
    texts,
    tiny_model,
)
from kernel_cases import triton
from torch.nn.functional import mse_loss
from transformers import (
    Trainer,
    TrainingArguments,
)
from transformers.modeling_layers import GradientCheckpointingLayer


@each_case
def test_labels_of_another_shape(case):
    model, ids = case.model(), case.ids(2, 9)
    for labels in ({"labels": ids[:, 1:]}, {"labels": ids, "shift_labels": ids[:1]}):
        name, given = labels.copy().popitem()
        with pytest.raises(
            ValueError, match=re.escape(f"`{name}` must be (2, 9), as the logits, got {tuple(given.shape)}")
        ):
            model(ids, **labels)
    with pytest.raises(ValueError, match=re.escape("`labels` must be (2, 4), as the logits, got (2, 9)")):
        model(ids, labels=ids, logits_to_keep=4)
    with torch.no_grad():
        logits = model(ids, labels=ids[:, -4:], logits_to_keep=4)
        expected = torch.nn.functional.cross_entropy(logits.logits[:, :-1].flatten(0, 1), ids[:, -3:].flatten())
        torch.testing.assert_close(logits.loss, expected)


@pytest.mark.fast
@each_kind
def test_no_label_counts(case):
    """The loss of a batch without labels is 0, and so are its gradients."""
    ids, labels = random_ids(2, 6), torch.full((2, 6), -100)
    for auto_class, model in each_class(case):
        if auto_class == "AutoModel":
            continue
        ignored = {"labels": labels[:, 0] if auto_class == "AutoModelForSequenceClassification" else labels}
        if auto_class == "AutoModelForQuestionAnswering":
            ignored = {"start_positions": torch.tensor([6, 6]), "end_positions": torch.tensor([6, 9])}
        given = [ignored, ignored | {"num_items_in_batch": torch.tensor(0)}]
        if auto_class == case.lm_class and case.causal:  # the first label is that of no token
            given += [{"labels": labels.index_fill(1, torch.tensor([0]), 3)}, {"labels": ids, "shift_labels": labels}]
        for arguments in given:
            model.zero_grad()
            loss = model(ids, **arguments).loss
            loss.backward()
            assert loss == 0
            assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.fast
@each_model
@pytest.mark.parametrize(
    ("problem", "labels", "expected"),
    [
        (None, torch.tensor([0, 2]), torch.nn.functional.cross_entropy),
        ("regression", torch.rand(2, 3), torch.nn.functional.mse_loss),
        (
            "multi_label_classification",
            torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]),
            torch.nn.functional.binary_cross_entropy_with_logits,
        ),
    ],
)
def test_classification_losses(model_type, problem, labels, expected):
    labels = labels.to(DEVICE)
    model = tiny_model(model_type, "AutoModelForSequenceClassification", num_labels=3, problem_type=problem)
    out = model(random_ids(2, 9), labels=labels)
    torch.testing.assert_close(out.loss, expected(out.logits, labels))


@each_kind_of_text_model
def test_one_label_is_a_regression(case):
    ids, targets = random_ids(2, 9), torch.tensor([0.5, -1.0])
    model = case.model("AutoModelForSequenceClassification", num_labels=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # raised if shapes are broadcast
        out = model(ids, labels=targets)
    torch.testing.assert_close(out.loss, mse_loss(out.logits[:, 0], targets))


@each_kind_of_model
def test_predictions_are_logits_alone(case, tmp_path):
    text = case.text(2, 9)
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=DEVICE == "cpu")
    for auto_class, model in each_class(case):
        if labels := labels_of(model, auto_class, text["input_ids"]):
            trainer, expected = Trainer(model, arguments), model(**text, **labels)
            loss, logits, _ = trainer.prediction_step(model, {**text, **labels}, prediction_loss_only=False)
            torch.testing.assert_close(loss, expected.loss)
            logits = [logits] if isinstance(logits, torch.Tensor) else list(logits)
            torch.testing.assert_close(logits, [x for name, x in expected.items() if name.endswith("logits")])


@each_kind_of_text_model
def test_gradients_of_every_class(case):
    ids = random_ids(2, 20)

    def grads(model, labels):
        model.zero_grad()
        torch.manual_seed(0)  # of what noise a router has in training
        out = model(ids, output_hidden_states=True, **labels)
        states = out.hidden_states[0], out.hidden_states[-1]
        for state in states:
            state.retain_grad()
        (out.loss if labels else out[0].square().mean()).backward()
        assert all(state.grad.any() for state in states)
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    for auto_class, model in each_class(case, num_hidden_layers=2):
        labels, calls = labels_of(model.train(), auto_class, ids), []
        block = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
        next(block.children()).register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        expected = grads(model, labels)
        assert [name for name, grad in expected.items() if not grad.any()] == []
        assert len(calls) == 1 and not model.is_gradient_checkpointing
        model.gradient_checkpointing_enable({"use_reentrant": auto_class == case.lm_class})
        model.enable_input_require_grads()
        torch.testing.assert_close(grads(model, labels), expected)
        assert len(calls) == 3 and model.is_gradient_checkpointing
        model.gradient_checkpointing_disable()
        torch.testing.assert_close(grads(model, labels), expected)
        assert len(calls) == 4 and not model.is_gradient_checkpointing
        model.config.gradient_checkpointing = True
        assert type(model)(model.config).is_gradient_checkpointing


@pytest.mark.quick_cases("rwkv?-*", "avey-*", "raven-both-1", "gecko-*", "visual-rwkv6-1")
@each_with("detached", [False, True], KINDS, [True], (EAGLE, DEEP_EMBED, VISUAL[1], RAVEN_BOTH))
def test_gradient_checkpointing_in_pieces(case, detached):
    """A text in pieces: gradients go back through the states, or end where they are detached."""
    model = case.model(**case.quiet).train()
    text = padded([{"input_ids": case.ids(1, n, seed=n)} for n in (70, 22)], "anywhere")

    def read():
        model.zero_grad()
        cache, total = None, 0
        for start, stop in split(text, (40, 1, 29)):
            piece = {name: x[:, start:stop] for name, x in text.items()}
            out = model(**piece, labels=piece["input_ids"], num_items_in_batch=9, cache=cache, use_cache=True)
            cache, total = out.cache, total + out.loss
            if detached:
                assert cache.detach() is cache
                assert not any(state.requires_grad for state in cache.named_states().values())
                with torch.no_grad():  # which writes over no state that the gradients need
                    model(case.ids(2, 1), cache=cache)
        total.backward()
        return cache, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    block = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)][-1]
    next(block.children()).register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    runs = []
    cache, expected = read()
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        runs = []
        again, found = read()
        assert sum(runs) == 3 * (2 - use_reentrant)  # with gradients; the block has computed each piece twice
        assert_same_states(again, cache)
        assert_all_close(found, expected, atol=1e-4, rtol=1e-4)
        model.gradient_checkpointing_disable()


@pytest.mark.fast
@each_case
def test_gradient_checkpointing_and_caches(case):
    model, text = case.model(), case.text(1, 8)
    cache = model(**text).cache
    cache.activate_past_recording()
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="`cache` records the past"):
        model(**text, cache=cache)
    assert cache.get_seq_length() == 8
    assert model(**text).cache is None
    assert model.eval()(**text, cache=cache).cache.get_seq_length() == 16


@pytest.mark.quick_cases("eager-*", "triton-*-raven", "triton-*-avey-b")
@each_text_model_case
@pytest.mark.parametrize(
    ("backend", "way"),
    [("eager", "packed"), pytest.param(*triton.values, "padded", marks=triton.marks)],
)
def test_backends_agree(case, backend, way, monkeypatch):
    layers = 1 if backend == "triton" else 2  # the interpreter is slow
    model = case.model(num_hidden_layers=layers)
    if way == "padded":
        inputs = padded(texts(case, 20, 7), "anywhere", more=2)
    else:
        inputs = {**join(*texts(case, 7, 1, 20)), "cu_seqlens": torch.tensor([0, 7, 8, 28])}
    results = []
    for one in (backend, "reference"):
        monkeypatch.setenv("SUBQUAD_BACKEND", one)
        model.zero_grad()
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        results.append({"loss": loss.detach(), **gradients(case, model)})
    assert_all_close(*results, **TOLERANCE)


@pytest.mark.quick_cases("rwkv7-0", "avey-0", "raven-0")
@each_with("cache", ["dynamic", "static"], (FINCH, RAVEN), ["dynamic"], (EAGLE, GOOSE, DEEP_EMBED, AVEY, GECKO))
def test_generation_of_every_backend(case, cache, monkeypatch):
    # The interpreter is slow; a chunk of 8 ends all the same while tokens are generated.
    model, results = case.model(num_hidden_layers=2), []
    inputs = padded(texts(case, 14, 5), "anywhere", more=2)
    backends = ["reference", "eager"] + ["triton"] * (find_spec("triton") is not None)
    for backend in backends:
        monkeypatch.setenv("SUBQUAD_BACKEND", backend)
        options = {"max_new_tokens": 4, "cache_implementation": cache, "disable_compile": True, **GREEDY}
        results.append(model.generate(**inputs, **options))
    assert all(torch.equal(x, results[0]) for x in results)


DTYPES = [torch.bfloat16, torch.float16]


@each_with("dtype", DTYPES, (AVEY, RAVEN, GECKO), DTYPES[:1], (EAGLE, FINCH, GOOSE, DEEP_EMBED, *VISUAL[1:]))
def test_low_precision(case, dtype, tmp_path):
    model, text = case.model(), case.text(2, 20)
    model.save_pretrained(tmp_path)
    low = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert low.dtype == dtype
    with torch.no_grad():
        expected, out = model(**text), low(**text)
    assert out.logits.dtype == dtype
    error = (out.logits.float() - expected.logits).norm() / expected.logits.norm()
    assert error < (0.1 if dtype == torch.bfloat16 else 0.02)
    for name in case.float32_states:
        states = [layer.states[name] for layer in out.cache.all_layers if name in layer.states]
        assert {state.dtype for state in states} == {torch.float32}
    rows = pick(text, 0), pick(text, 1)
    left = padded([cut(rows[0], 0, 13), rows[1]], "left")
    alone = low(**cut(rows[0], 0, 13)).logits
    torch.testing.assert_close(low(**left).logits[:1, 7:], alone, atol=0.1, rtol=0.1)
    assert low.generate(**text, max_new_tokens=3, **GREEDY).shape == (2, 23)
    low.train()(**text, labels=text["input_ids"]).loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(case, low).values())


@each_text_model_case
def test_autocast(case):
    model, ids = case.model().train(), random_ids(2, 20)
    expected = model(ids, labels=ids).loss
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=0.1, rtol=0.05)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@each_model
def test_mixed_dtypes_under_autocast(model_type):
    """On a GPU, autocast computes layer norms in float32, whatever the dtype of the weights."""
    model, ids = tiny_model(model_type).to(torch.bfloat16), random_ids(1, 9)
    expected = model(ids).logits
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_pre_hook(lambda _m, inputs: (inputs[0].to(torch.bfloat16),))
            module.register_forward_hook(lambda _m, _i, out: out.float())
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = model(ids).logits
    assert (out - expected).norm() / expected.norm() < 0.05
