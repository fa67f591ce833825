"""Every way of generating, and what `generate` and pipelines return."""

import numpy as np
import pytest
import torch
from cases import (
    AVEY,
    CASES,
    DEEP_EMBED,
    DEVICE,
    EAGLE,
    FINCH,
    GECKO,
    GOOSE,
    GREEDY,
    RAVEN_BOTH,
    VISUAL,
    each,
    each_cache,
    each_case,
    each_causal,
    each_kind,
    each_kind_of_text,
    each_kind_of_text_model,
    each_with,
    each_with_side,
    half_padded,
    join,
    padded,
    pick,
    random_ids,
    tiny_model,
)
from transformers import (
    GenerationConfig,
    StoppingCriteriaList,
    generation,
    pipeline,
)

from subquad import RecurrentCache
from subquad_tokenizers import ByteTokenizer


@pytest.mark.fast
@each_case
def test_greedy_is_the_arg_max(case):
    model, text = case.model(), case.text(2, 6)
    out = model.generate(**text, max_new_tokens=12, **GREEDY)
    logits = []
    with torch.no_grad():
        for n in range(12):
            logits.append(model(**join(text, {"input_ids": out[:, 6 : 6 + n]})).logits[:, -1, : case.new_ids])
    assert out[:, 6:].T.tolist() == [x.argmax(-1).tolist() for x in logits]


@pytest.mark.fast
@each_kind
def test_sampling_follows_the_seed(case):
    model, text = case.model(), case.text(2, 5)
    options = {**GREEDY, "max_new_tokens": 7, "do_sample": True, "top_k": 0}
    outs = []
    for seed, use_cache in ((0, True), (0, True), (0, False), (1, True)):
        torch.manual_seed(seed)
        outs.append(model.generate(**text, use_cache=use_cache, **options).tolist())
    assert outs[0] == outs[1] == outs[2] != outs[3]


@pytest.mark.quick_cases("rwkv?", "visual-rwkv6", "avey", "raven", "gecko")
@each_cache
def test_beam_search(case):
    model, text = case.model(), case.text(2, 5)
    options = {"max_new_tokens": 10, "num_beams": 4, "num_return_sequences": 3, **GREEDY}
    assert torch.equal(model.generate(**text, **options), model.generate(**text, use_cache=False, **options))


@pytest.mark.quick_cases("rwkv7", "avey", "raven-both", "gecko", "visual-rwkv6")
@each_cache
def test_assisted_decoding(case):
    model, text, options = case.model(), join(*[case.text(1, 6)] * 3), {"max_new_tokens": 10, **GREEDY}
    expected = model.generate(**text, **options)
    lookup = model.generate(**text, prompt_lookup_num_tokens=4, **options)
    padded_lookup = model.generate(**padded([text], "left", more=5), prompt_lookup_num_tokens=4, **options)
    assert torch.equal(padded_lookup[:, 5:], lookup)
    assert torch.equal(lookup, expected)

    # An assistant that is nearly right, and one that knows nothing.
    nearly = case.model()
    with torch.no_grad():
        for parameter in nearly.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    for assistant in (nearly, case.model(seed=5)):
        assert torch.equal(model.generate(**text, assistant_model=assistant, **options), expected)


@pytest.mark.fast
@each_kind
def test_early_exit(case):
    model, text, options = case.model(), case.text(1, 6), {"max_new_tokens": 12, **GREEDY}
    assert torch.equal(model.generate(**text, assistant_early_exit=2, **options), model.generate(**text, **options))


@each(FINCH, AVEY, RAVEN_BOTH)
def test_sampling_with_an_assistant(case):
    model, text = case.model(), case.text(1, 6)
    options = {**GREEDY, "max_new_tokens": 7, "do_sample": True}
    torch.manual_seed(0)
    assert model.generate(**text, assistant_model=case.model(seed=5), **options).shape == (1, 13)
    # With one candidate token left there is nothing to choose.
    out = model.generate(**text, assistant_model=case.model(seed=5), **options, top_k=1)
    assert torch.equal(out, model.generate(**text, max_new_tokens=7, **GREEDY))


CACHES = [{}, {"cache_implementation": "static", "max_cache_len": 32}]


def until(row: torch.Tensor, token: int, start: int) -> torch.Tensor:
    """The ids of a row, up to the first such token from `start` on."""
    found = (row[start:] == token).nonzero().flatten().tolist()
    return row[: start + found[0] + 1] if found else row


@pytest.mark.fast
@pytest.mark.quick_cases("rwkv?-0", "avey-*", "raven*", "gecko*", "visual-rwkv6-0")
@each_with(
    "options",
    CACHES,
    (FINCH, AVEY, GECKO),
    CACHES[:1],
    (EAGLE, GOOSE, DEEP_EMBED, RAVEN_BOTH, VISUAL[1], CASES["gecko-many-bos"]),
)
def test_rows_that_end_early(case, options):
    """The state of a row that has ended stays that after its last token, and a second turn goes on from there."""
    model, options = case.model(), {**GREEDY, **options, "return_dict_in_generate": True}
    texts = [case.text(1, n, seed=n) for n in (7, 4, 6)]
    text = padded(texts, "left")
    free = model.generate(**text, max_new_tokens=8, **GREEDY)
    # The token that some row has early, and another late or not at all.
    end = max(free[:, 7:12].flatten().tolist(), key=lambda end: np.ptp([len(until(row, end, 7)) for row in free]))
    first = model.generate(**text, max_new_tokens=8, **{**options, "eos_token_id": end})
    rows = [until(row, end, 7) for row in first.sequences]
    lengths, width = torch.tensor([len(row) for row in rows], device=DEVICE), first.sequences.shape[1]
    assert width - lengths.min() >= 3
    mask = (torch.arange(width, device=DEVICE) < lengths[:, None]).long()
    mask[:, :7] = text["attention_mask"]

    # What was generated, alone, and a second turn.
    said = [join(alone, {"input_ids": row[None, 7:]}) for alone, row in zip(texts, rows, strict=True)]
    turn = case.ids(3, 2, seed=9)
    expected = []
    for row in range(3):
        ids = torch.cat((said[row]["input_ids"], turn[row : row + 1]), 1)
        alone = {**said[row], "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected.append(model.generate(**alone, max_new_tokens=5, **GREEDY)[0, -5:])
    text["input_ids"] = torch.cat((first.sequences, turn), 1)
    text["attention_mask"] = torch.cat((mask, torch.ones_like(turn)), 1)
    kept = first.cache.clone()
    second = model.generate(**text, cache=first.cache, max_new_tokens=5, **GREEDY)
    assert torch.equal(second[:, -5:], torch.stack(expected))
    new = {"attention_mask": text["attention_mask"], "cache": kept.clone()}
    rest = text["input_ids"][:, kept.get_seq_length() :]
    with torch.no_grad():
        logits = model(rest, **{**new, "cache": kept.clone()}).logits[:, -1]
    assert torch.equal(logits[:, : case.new_ids].argmax(-1), torch.stack(expected)[:, 0])

    # A mask of other tokens than were read.
    new["attention_mask"] = torch.ones_like(new["attention_mask"])
    with pytest.raises(ValueError, match=rf"`attention_mask`, row \d: 0 of the first {width - 1} tokens are marked"):
        model(rest, **new)
    new["attention_mask"] = text["attention_mask"][:, 1:]
    with pytest.raises(
        ValueError, match=f"`attention_mask` has {width + 1} columns, but `cache` has read {width - 1}"
    ):
        model(rest, **new)
    with pytest.raises(ValueError, match=f"`attention_mask` has {width + 2} columns, but the input has 3 tokens"):
        model(rest, attention_mask=text["attention_mask"])


@pytest.mark.quick_cases("rwkv6-*", "avey-anywhere", "raven-*", "gecko-*")
@each_with_side((FINCH, GECKO), (EAGLE, GOOSE, DEEP_EMBED, AVEY, RAVEN_BOTH, CASES["gecko-many-bos"]))
def test_chunked_prefill(case, side):
    # The short row is padding alone in several of the chunks. Without images, which no chunk may cut.
    model, rows = case.model(), [{"input_ids": case.ids(1, n, seed=n)} for n in (30, 5, 17)]
    options = {**padded(rows, side), "max_new_tokens": 6, **GREEDY}
    expected = model.generate(**options)
    for size in (7, 29):
        assert torch.equal(model.generate(**options, prefill_chunk_size=size), expected)


@pytest.mark.fast
@each_case
def test_static_cache_is_the_same_cache(case):
    torch.compiler.reset()  # compiled steps of other models, for which torch 2.11 would make this one's sizes symbols
    model, text = case.model(), case.text(2, 5)
    options = {"max_new_tokens": 6, **GREEDY}
    expected = model.generate(**text, **options)
    for name in ("static", "dynamic"):
        assert torch.equal(model.generate(**text, cache_implementation=name, **options), expected)
    with pytest.raises(ValueError, match="`cache_implementation` 'quantized'"):
        model.generate(**text, cache_implementation="quantized", **options)


@each_kind
def test_outputs_of_generate(case):
    model, text = case.model(), half_padded(case, 7, 3)
    asked = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    for options, returned, rows in (
        ({}, 2, 2),
        ({"do_sample": True, "num_return_sequences": 2}, 4, 4),
        ({"num_beams": 3}, 2, 6),
        ({"num_beams": 3, "do_sample": True, "num_return_sequences": 2}, 4, 6),
    ):
        sequences = []
        for cache in ("dynamic", "static", None):
            torch.manual_seed(0)
            given = {"cache_implementation": cache, "disable_compile": True} if cache else {"use_cache": False}
            given |= {**GREEDY, **options, **asked, "return_dict_in_generate": True, "max_new_tokens": 4}
            out = model.generate(**text, **given)
            sequences.append(out.sequences)
            assert out.sequences.shape == (returned, 11)
            assert [len(x) for x in (out.scores, out.logits, out.hidden_states)] == [4, 4, 4]
            assert {x.shape for x in (*out.scores, *out.logits)} == {(rows, case.vocabulary)}
            for step, states in enumerate(out.hidden_states):
                length = 1 if step and cache else 7 + (0 if cache else step)
                assert [x.shape for x in states] == [(rows, length, 48)] * (model.config.num_hidden_layers + 1)
            if cache is None:
                assert out.cache is None
            else:
                assert isinstance(out.cache, RecurrentCache)
                assert (out.cache.get_seq_length(), out.cache.batch_size) == (10, rows)
            if "num_beams" in options:
                scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
                torch.testing.assert_close(scores.sum(1) / 4, out.sequences_scores, atol=1e-4, rtol=1e-4)
        assert torch.equal(sequences[0], sequences[1]) and torch.equal(sequences[0], sequences[2])


@each_kind_of_text
def test_generation_without_a_prompt(case):
    model = case.model(bos_token_id=5)
    out = model.generate(max_new_tokens=4, **GREEDY)
    assert torch.equal(out, model.generate(torch.tensor([[5]]), max_new_tokens=4, **GREEDY))
    with pytest.raises(ValueError, match="`bos_token_id` has to be defined"):
        case.model(bos_token_id=None).generate(max_new_tokens=4, **GREEDY)


@each_kind
def test_where_generation_ends(case):
    model, text = case.model(), case.text(2, 5)
    whole = model.generate(**text, max_new_tokens=12, **GREEDY)
    assert torch.equal(model.generate(**text, max_length=9, **GREEDY), whole[:, :9])
    assert torch.equal(model.generate(**text, max_new_tokens=12, max_time=0.0, **GREEDY), whole[:, :6])
    stop = [lambda ids, scores, **kwargs: torch.full((len(ids),), ids.shape[1] == 8)]
    out = model.generate(**text, max_new_tokens=12, stopping_criteria=StoppingCriteriaList(stop), **GREEDY)
    assert torch.equal(out, whole[:, :8])

    # Rows that end at a token of their own, by every way of decoding.
    ends = [int(row[place]) for row, place in zip(whole, (8, 13), strict=True)]
    expected = []
    for row in whole:
        length = 6 + min(n for n, token in enumerate(row[5:].tolist()) if token in ends)
        expected.append(torch.nn.functional.pad(row[:length], (0, 17 - length)))
    longest = max(int((row != 0).nonzero().max()) + 1 for row in expected)
    options = {**GREEDY, "eos_token_id": ends, "max_new_tokens": 12}
    assert torch.equal(model.generate(**text, **options), torch.stack(expected)[:, :longest])
    for n, row_expected in enumerate(expected):
        length = int((row_expected != 0).nonzero().max()) + 1
        for way in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": case.model()}):
            assert torch.equal(model.generate(**pick(text, n), **options, **way)[0], row_expected[:length])
    assert model.generate(**text, **options, min_new_tokens=12).shape == (2, 17)


@each_kind_of_text
def test_guidance(case):
    model, ids, other = case.model(), random_ids(1, 5), random_ids(1, 4, seed=5)
    read, unwanted = ids, other
    with torch.no_grad():
        for _ in range(6):
            wanted, against = (model(x).logits[:, -1].log_softmax(-1) for x in (read, unwanted))
            token = (against + 1.7 * (wanted - against)).argmax(-1)[:, None]
            read, unwanted = torch.cat((read, token), 1), torch.cat((unwanted, token), 1)
    for use_cache in (True, False):
        options = {"guidance_scale": 1.7, "negative_prompt_ids": other, "use_cache": use_cache, "max_new_tokens": 6}
        assert torch.equal(model.generate(ids, **options, **GREEDY), read)


@each_kind
def test_generation_from_embeddings(case):
    model, text = case.model(), half_padded(case, 7, 2)
    embed = model.get_input_embeddings()
    ids, mask = text.pop("input_ids"), text["attention_mask"]
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 2}):
        inputs = {**text, "max_new_tokens": 7, **options, **GREEDY}
        expected = model.generate(ids, **inputs)[:, 7:]
        assert torch.equal(model.generate(inputs_embeds=embed(ids), **inputs), expected)
    # And on from there, with what was generated as embeddings too.
    expected = model.generate(ids, **text, max_new_tokens=7, **GREEDY)
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, **GREEDY}
    first = model.generate(inputs_embeds=embed(ids), **text, **options)
    read = torch.cat((ids, first.sequences), 1)
    text["attention_mask"] = torch.cat((mask, torch.ones_like(first.sequences)), 1)
    cache, options = first.cache, {**text, "max_new_tokens": 4, **GREEDY}
    out = model.generate(inputs_embeds=embed(read), cache=cache.clone(), **options)
    assert torch.equal(out, expected[:, 10:])
    assert torch.equal(model.generate(read, cache=cache, **options), expected)
    # Both: the ids are returned with the continuation, the embeddings are read.
    both = {**text, "attention_mask": mask, "max_new_tokens": 7, **GREEDY}
    assert torch.equal(model.generate(ids, inputs_embeds=embed(ids), **both), expected)


@pytest.mark.fast
@each_kind
def test_arguments_that_change_nothing(case):
    model, text = case.model(), half_padded(case, 6, 2)
    ids, mask = text.pop("input_ids"), text["attention_mask"]
    options = {**text, "max_new_tokens": 6, **GREEDY}
    expected = model.generate(ids, **options)
    for arguments in (
        {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)},
        {"position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)},
        {"logits_to_keep": 0},
        {"logits_to_keep": 3},
        {"cache": model.new_cache()},
        {"output_hidden_states": True},
    ):
        assert torch.equal(model.generate(ids, **options, **arguments), expected)
    prepared = model.prepare_inputs_for_generation(ids, attention_mask=mask, of_a_subclass=1)
    assert prepared["of_a_subclass"] == 1
    for error in (TypeError, ValueError):  # Python's for an unknown argument, and that of transformers' `generate`
        with pytest.raises(error, match="unexpected keyword argument `not_an_argument`"):
            model.generate(ids, **options, not_an_argument=1)


@each_causal
@pytest.mark.parametrize("implementation", [None, "static"])
def test_the_length_of_the_training_texts_is_no_limit(model_type, implementation, monkeypatch):
    warned = []
    monkeypatch.setattr(generation.stopping_criteria.logger, "warning_once", warned.append)
    model, ids = tiny_model(model_type), random_ids(1, 9)
    model.config.max_position_embeddings = 5
    options = {**GREEDY, "cache_implementation": implementation, "disable_compile": True}
    assert model.generate(ids, max_new_tokens=3, **options).shape[1] == 9 + 3
    assert model.generate(ids, **options).shape[1] == 9 + 20  # transformers' default
    assert not warned


@pytest.mark.fast
@each_case
def test_generation_config_is_saved(case, tmp_path):
    model = case.model()
    model.generation_config = GenerationConfig(max_new_tokens=3, **GREEDY)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    text = case.text(1, 5)
    assert torch.equal(loaded.generate(**text), model.generate(**text))


@each_kind_of_text_model
def test_pipelines(case):
    tokenizer, texts = ByteTokenizer(), ["X:1", "K:D major", "a"]
    names = ["contradiction", "neutral", "entailment"]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    fields = {"vocab_size": len(tokenizer), **labels}

    def read(model, *text):
        return model(torch.tensor([tokenizer(*text)["input_ids"]]))

    model = case.model("AutoModel", **fields)
    features = pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    for text, found in zip(texts, features(texts, return_tensors=True), strict=True):
        torch.testing.assert_close(found.to(DEVICE), read(model, text).last_hidden_state)
    model = case.model("AutoModelForSequenceClassification", **fields)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
    for text, found in zip(texts, classify(texts, batch_size=3), strict=True):
        scores = read(model, text).logits[0].softmax(-1).tolist()
        assert {x["label"]: x["score"] for x in found} == pytest.approx(
            {label: scores[n] for n, label in model.config.id2label.items()}, abs=1e-5
        )
    zero_shot = pipeline("zero-shot-classification", model=model, tokenizer=tokenizer)
    found = zero_shot("A tune.", candidate_labels=["jig", "a slow waltz"])
    logits = [read(model, "A tune.", f"This example is {label}.").logits[0, 2] for label in found["labels"]]
    assert found["scores"] == pytest.approx(torch.stack(logits).softmax(0).tolist(), abs=1e-5)
