"""What a model is called with, and what it returns; wrong input is refused by name, before any work."""

import pytest
import torch
import transformers
from cases import (
    BASE,
    CASES,
    GREEDY,
    VISUAL,
    each_causal,
    each_class,
    each_head,
    each_kind_of_model,
    each_kind_of_text_model,
    each_model_case,
    labels_of,
    padded,
    random_ids,
    tiny_model,
)
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch.utils._pytree import tree_leaves
from transformers.utils import output_capturing


WRONG_INPUTS = [
    ({}, "Exactly one of `input_ids` and `inputs_embeds`"),
    ({"input_ids": [[1, 2]], "inputs_embeds": [[[0.0] * 48]]}, "Exactly one of"),
    ({"input_ids": [[]]}, "`input_ids` must be"),
    ({"input_ids": [1, 2]}, "`input_ids` must be"),
    ({"input_ids": [[1, 98]]}, "`input_ids` holds 98, but `vocab_size` is {}"),
    ({"input_ids": [[1, -1]]}, "`input_ids` holds -1"),
    (
        {"input_ids": [[1, 2, 3, 4]], "attention_mask": [[1, 0, 0, 1]], "position_ids": [[0, 1, 1, 0]]},
        "`position_ids` restart inside a row with padding",
    ),
    (
        {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]], "cu_seqlens": [0, 1, 3]},
        "`cu_seqlens` describes one row without padding",
    ),
    ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}, "`attention_mask` must be"),
    ({"input_ids": [[1, 2, 3]], "attention_mask": [[[[1, 1, 1]]]]}, "`attention_mask` must be"),
    ({"input_ids": [[1, 2, 3]], "position_ids": [[0, 1]]}, "`position_ids` must be"),
    ({"input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 2]] * 2}, "`position_ids` must be"),
    (
        {"input_ids": [[1, 2, 3]], "attention_mask": [[0, 1, 1]], "position_ids": [[0, 1, 0]]},
        "`position_ids` restart inside a row with padding",
    ),
    ({"input_ids": [[1, 2], [3, 4]], "cu_seqlens": [0, 2]}, "`cu_seqlens` describes one row"),
    ({"input_ids": [[1, 2, 3]], "cu_seqlens": [0, 30]}, r"`cu_seqlens` must increase from 0 to 3.*got \[0, 30\]"),
    ({"input_ids": [[1, 2, 3]], "cu_seqlens": [0, 3, 3]}, "`cu_seqlens` must increase"),
    ({"input_ids": [[1, 2, 3]], "cu_seqlens": [[0, 3]]}, "`cu_seqlens` must be int32 or int64"),
    ({"inputs_embeds": [[[0.0] * 47]]}, r"`inputs_embeds` must be \(batch, length, 48\)"),
]
NO_EMBEDDINGS = "`inputs_embeds`: .* looks up rows of tables by token ids in every block"


@each_model_case
def test_wrong_input(case):
    model = case.model()
    with pytest.raises(ValueError, match=r"`input_ids` must be int64 or int32, got torch.float32"):
        model(torch.ones(1, 2))
    for fields, message in WRONG_INPUTS:
        inputs = {
            name: torch.tensor(value, dtype=torch.float32 if name == "inputs_embeds" else torch.long)
            for name, value in fields.items()
        }
        if not case.embeddings and fields.keys() == {"inputs_embeds"}:
            message = NO_EMBEDDINGS
        with pytest.raises(ValueError, match=message.replace("{}", str(case.vocabulary))):
            model(**inputs)
    ids = torch.ones(1, 2, dtype=torch.long)
    for fields in ({"input_ids": [[1, 2]]}, {"input_ids": ids, "attention_mask": "ones"}):
        with pytest.raises(ValueError, match=rf"`{list(fields)[-1]}` must be a tensor, got (\[\[1, 2\]\]|'ones')\."):
            model(**fields)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        pytest.param(case, fields, message, id=f"{case.name}-{next(iter(fields))}-{next(iter(fields.values()))}")
        for case in (*BASE, *VISUAL)
        for fields, message in (
            ({"vocab_size": 0}, "`vocab_size` must be at least 1, got 0"),
            ({"num_labels": -1}, "`num_labels` must be (at least )?1"),
            *case.wrong,
        )
    ],
)
def test_wrong_configuration(case, fields, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        case.config(**fields)


@each_kind_of_model
def test_embeddings_in_place_of_ids(case):
    left, right = (padded([case.text(1, 13), case.text(1, 20, seed=1)], side) for side in ("left", "right"))
    for _, model in each_class(case):
        for text in (left, right, case.text(2, 20)):
            given = {**text, "inputs_embeds": model.get_input_embeddings()(text["input_ids"])}
            del given["input_ids"]
            if not case.embeddings:
                with pytest.raises(ValueError, match=NO_EMBEDDINGS):
                    model(**given)
                continue
            torch.testing.assert_close(model(**given)[0], model(**text)[0])


@pytest.mark.fast
@each_head
def test_outputs(model_type, auto_class):
    model, ids = tiny_model(model_type, auto_class), random_ids(2, 9)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert {state.shape for state in out.hidden_states} == {(2, 9, model.config.hidden_size)}
    if CASES[model_type].causal:
        assert out.cache is not None
        assert model(ids, use_cache=False).cache is None
        assert model.train()(ids).cache is None
    model.config.output_hidden_states = True
    assert model(ids).hidden_states is not None


@pytest.mark.fast
@each_kind_of_model
def test_tuples(case):
    text = case.text(2, 9)

    def tensors(out):
        return [x for x in tree_leaves(tuple(out)) if isinstance(x, torch.Tensor)]

    for auto_class, model in each_class(case):
        for labels in ({}, labels_of(model, auto_class, text["input_ids"])):
            inputs = {**text, "output_hidden_states": True, **labels}
            expected = model(**inputs)
            results = [model(**inputs, return_dict=False)]
            model.config.return_dict = False
            results.append(model(**inputs))
            assert type(model(**inputs, return_dict=True)) is type(expected)
            for result in results:
                assert type(result) is tuple and len(result) == len(expected.to_tuple())
                torch.testing.assert_close(tensors(result), tensors(expected.to_tuple()))
            if model.can_generate():
                assert model.generate(**text, max_new_tokens=2, **GREEDY).shape == (2, 11)
            model.config.return_dict = True


@each_kind_of_model
def test_some_hidden_states(case):
    if not hasattr(output_capturing, "selected_hidden_states"):
        pytest.skip("older versions of transformers number the blocks, not the hidden states")
    model, text = case.model(), case.text(2, 9)
    with torch.no_grad():
        every = model(**text, output_hidden_states=True).hidden_states
        some = model(**text, output_hidden_states=[1, -1]).hidden_states
    assert [state is not None for state in some] == [False, True, *[False] * (len(every) - 3), True]
    assert torch.equal(some[1], every[1]) and torch.equal(some[-1], every[-1])


@each_causal
def test_logits_to_keep(model_type):
    model, ids = tiny_model(model_type), random_ids(2, 9)
    logits = model(ids).logits
    for kept in (0, 1, 4, torch.tensor([0, 5, 8])):
        expected = logits[:, kept] if isinstance(kept, torch.Tensor) else logits[:, -kept:]
        # Another number of tokens is multiplied in another order.
        torch.testing.assert_close(model(ids, logits_to_keep=kept).logits, expected, atol=1e-4, rtol=1e-4)


@each_kind_of_text_model
def test_attention_implementations(case):
    ids = random_ids(2, 20)
    for auto_class, model in each_class(case):
        expected = model(ids)[0]
        known = case.attention
        for name in known:
            made = getattr(transformers, auto_class).from_config(model.config, attn_implementation=name)
            assert made.config._attn_implementation == name
            model.set_attn_implementation(name)
            assert model.config._attn_implementation == model.base_model.config._attn_implementation == name
            torch.testing.assert_close(model(ids)[0], expected, atol=1e-4, rtol=1e-4)
        others, message = {"flex_attention"}, f"{type(model).__name__} does not support an attention"
        if known == ("eager",):
            others = {"sdpa", "flex_attention", "flash_attention_2", "kernels-community/flash-attn2"}
            message = f"`attn_implementation` must be left out or 'eager', got 'NAME': {type(model).__name__}"
        for name in others.difference(known):
            refused = message.replace("NAME", name)
            with pytest.raises(ValueError, match=refused):
                model.set_attn_implementation(name)
            with pytest.raises(ValueError, match=refused):
                getattr(transformers, auto_class).from_config(model.config, attn_implementation=name)


@each_kind_of_text_model
def test_attention_weights(case):
    """Of the layers that are softmax attention; others have none."""
    ids = random_ids(2, 20)
    for _, model in each_class(case):
        assert model(ids).attentions is None
        if case.window is None:
            message = f"`output_attentions`: {type(model).__name__} has no attention weights"
            with pytest.raises(ValueError, match=message):
                model(ids, output_attentions=True)
            continue
        with pytest.raises(ValueError, match="`output_attentions` needs `attn_implementation=\"eager\"`, got 'sdpa'"):
            model(ids, output_attentions=True)
        model.set_attn_implementation("eager")
        attentions = model(ids, output_attentions=True).attentions
        (weights,) = attentions
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 20))
        window = torch.ones(20, 20, dtype=torch.bool).tril().triu(1 - case.window)
        assert torch.equal(weights > 0, window.expand(2, 3, -1, -1))
        model.config.output_attentions = True
        torch.testing.assert_close(model(ids).attentions, attentions)
        if model.can_generate():
            options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_attentions": True, **GREEDY}
            shapes = [[x.shape for x in step] for step in model.generate(ids, **options).attentions]
            assert shapes == [[(2, 3, 20, 20)], [(2, 3, 1, case.window)], [(2, 3, 1, case.window)]]
