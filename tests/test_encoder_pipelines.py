"""Avey-B in the pipelines of transformers, in that for question answering, and in sentence-transformers."""

import itertools
import math
import string

import numpy as np
import pytest
import torch
from byte_level_bpe import TEXT, encoder_tokenizer, write_byte_level_bpe
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForQuestionAnswering,
    ByT5Tokenizer,
    ModernBertConfig,
    ModernBertForQuestionAnswering,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForQuestionAnswering,
    pipeline,
)
from transformers import pipelines as transformers_pipelines

import subquad
from subquad import QuestionAnsweringPipeline
from subquad.hub import auto_classes


LABELS = {"id2label": {0: "O", 1: "B-X", 2: "I-X"}, "label2id": {"O": 0, "B-X": 1, "I-X": 2}}
TEXTS = [
    "The Eiffel tower is in Paris",
    "in",
    "and the Atomium is in Brussels; neither is in L'Aquila or in 東京. " * 3,
    "Once upon a time there was an Atomium, then another one.",
    "\n  Brussels",
]
QUESTION = "Where is the Atomium?"
SIDES = ("left", "right")


def tiny(head: str, tokenizer, chunk_size: int = 16, **fields):
    torch.manual_seed(0)
    config = subquad.AveyBConfig(
        vocab_size=len(tokenizer), d_embed=32, n_layers=4, chunk_size=chunk_size, k=2, eps=1e-6, **fields
    )
    model = getattr(subquad, f"AveyB{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return encoder_tokenizer()


@pytest.fixture
def load(tokenizer, tmp_path):
    """A pipeline that reads its model and its tokenizer from a directory, as a user's would; and the model."""

    def load(task, head, **options):
        model = tiny(head, tokenizer, **(LABELS if "Classification" in head else {}))
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        pipe = pipeline(task, model=str(tmp_path), device="cpu", **options)
        assert type(pipe.model) is type(model) and pipe.tokenizer.is_fast
        return pipe, model

    return load


def close(a, b, tolerance=1e-5):
    """Whether two results are the same up to rounding."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return all(close(a[key], b[key], tolerance) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    return abs(a - b) <= tolerance if isinstance(a, float | np.floating) else a == b


@torch.no_grad()
def run(model, tokenizer, *text):
    return model(**tokenizer(*text, return_tensors="pt"))


@pytest.mark.fast
def test_fill_mask(load, tokenizer):
    pipe, model = load("fill-mask", "ForMaskedLM")
    texts = ["The Eiffel tower is in [MASK], and", "[MASK] upon", TEXT * 2 + "The Eiffel [MASK]"]
    single = [pipe(text, top_k=4) for text in texts]
    for pipe.tokenizer.padding_side in SIDES:
        assert close(pipe(texts, top_k=4, batch_size=2), single)
    for text, guesses in zip(texts, single, strict=True):
        ids = tokenizer(text)["input_ids"]
        probabilities = run(model, tokenizer, text).logits[0, ids.index(tokenizer.mask_token_id)].softmax(-1)
        scores, best = probabilities.topk(4)
        assert [guess["token"] for guess in guesses] == best.tolist()
        assert [guess["score"] for guess in guesses] == pytest.approx(scores.tolist(), abs=1e-6)
    two = pipe("The [MASK] tower is in [MASK].", top_k=2)
    assert [len(guesses) for guesses in two] == [2, 2]
    (only,) = pipe(texts[0], targets=[" in"])
    # The space before a mask belongs to the masked word.
    assert only["token_str"] == " in" and only["sequence"] == "The Eiffel tower is in in, and"


def test_token_classification(load, tokenizer):
    pipe, model = load("token-classification", "ForTokenClassification", ignore_labels=[])

    def classify(*arguments, **options):
        results = pipe(*arguments, **options)
        for entity in itertools.chain(*results) if isinstance(arguments[0], list) else results:
            del entity["index"]  # transformers counts the padding before a text, too
        return results

    single = [classify(text) for text in TEXTS]
    for pipe.tokenizer.padding_side in SIDES:
        assert close(classify(TEXTS, batch_size=2), single)
    for text, result in zip(TEXTS, single, strict=True):
        encoding = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        assert [(entity["start"], entity["end"]) for entity in result] == encoding["offset_mapping"]
        scores, labels = run(model, tokenizer, text).logits[0, 1:-1].softmax(-1).max(-1)
        assert [entity["entity"] for entity in result] == [LABELS["id2label"][i] for i in labels.tolist()]
        assert [entity["score"] for entity in result] == pytest.approx(scores.tolist(), abs=1e-6)
    assert len({entity["entity"] for entity in itertools.chain(*single)}) == 3


# Question answering.


def word_piece(limit: int | None = None) -> PreTrainedTokenizerFast:
    """BERT's kind of tokenizer, over letters: lower case and no accents, so that offsets are not those it reads."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = [*names, *letters, *("##" + letter for letter in letters), "the", "##er", "is"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **({} if limit is None else {"model_max_length": limit}),
    )


def transformer(kind: str = "bert", limit: int = 48, **options):
    config_class, model_class = {
        "bert": (BertConfig, BertForQuestionAnswering),
        "roberta": (RobertaConfig, RobertaForQuestionAnswering),
        "modernbert": (ModernBertConfig, ModernBertForQuestionAnswering),
    }[kind]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=1.0,
        max_position_embeddings=limit,
        **{"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, **options},
    )
    return model_class(config).eval()


def candidates(model, tokenizer, question, context, max_answer_len, **cutting):
    """
    Every answer that is allowed, by its characters, with its largest logit over the pieces; and the logit of "no
    answer". The pieces are the tokenizer's own.
    """
    if cutting:
        cutting |= {"truncation": "only_second", "return_overflowing_tokens": True}
    encoding = tokenizer([question], [context], return_offsets_mapping=True, return_attention_mask=True, **cutting)
    offsets = encoding.pop("offset_mapping")
    encoding.pop("overflow_to_sample_mapping", None)
    answers, empty = {}, math.inf
    for piece in range(len(offsets)):
        with torch.no_grad():
            outputs = model(**{name: torch.tensor([values[piece]]) for name, values in encoding.items()})
        start, end = outputs.start_logits[0].tolist(), outputs.end_logits[0].tolist()
        ids = encoding["input_ids"][piece]
        place = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
        empty = min(empty, start[place] + end[place])
        # Tokens with their characters, without white space.
        tokens = {}
        for i, (begin, stop) in enumerate(offsets[piece]):
            text = context[begin:stop]
            if encoding.sequence_ids(piece)[i] == 1 and text.strip():
                tokens[i] = begin + len(text) - len(text.lstrip()), stop - len(text) + len(text.rstrip())
        # Of tokens that spell one character together, the first begins and the last ends an answer.
        first = {begin: i for i, (begin, _) in reversed(tokens.items())}
        last = {stop: i for i, (_, stop) in tokens.items()}
        for (begin, i), stop in itertools.product(first.items(), last):
            if 0 <= last[stop] - i < max_answer_len:
                logit = start[i] + end[last[stop]]
                answers[begin, stop] = max(answers.get((begin, stop), -math.inf), logit)
    return answers, empty


def assert_exact(results, answers, empty=None):
    """Whether `results` are the best of `answers` in order, with the probabilities of a softmax over all."""
    logits = dict(answers) if empty is None else {**answers, (0, 0): empty}
    highest = max(logits.values())
    total = sum(math.exp(logit - highest) for logit in logits.values())
    expected = {span: math.exp(logit - highest) / total for span, logit in logits.items()}
    ranking = sorted(expected.values(), reverse=True)[: len(results)]
    assert [result["score"] for result in results] == pytest.approx(ranking, rel=1e-3, abs=1e-9)
    for result in results:
        assert expected[result["start"], result["end"]] == pytest.approx(result["score"], rel=1e-3, abs=1e-9)
    assert len({(result["start"], result["end"]) for result in results}) == len(results)


def watch(model, lengths: list[int], rows: list[dict] | None = None):
    """Collects the length of every row that the model reads, and the rows."""

    def look(module, arguments, inputs):
        lengths.append(inputs["input_ids"].shape[1])
        if rows is not None:
            rows.append(inputs)

    return model.register_forward_pre_hook(look, with_kwargs=True)


@pytest.fixture(scope="module")
def qa(tokenizer):
    model = tiny("ForQuestionAnswering", tokenizer)
    return pipeline("question-answering", model=model, tokenizer=tokenizer, device="cpu")


@pytest.mark.parametrize(("max_answer_len", "impossible"), [(1, True), (4, False), (15, True), (1000, False)])
def test_answers_are_those_of_a_search_through_all(qa, max_answer_len, impossible):
    options = {"max_answer_len": max_answer_len, "handle_impossible_answer": impossible}
    for context in (TEXT, *TEXTS):
        answers, empty = candidates(qa.model, qa.tokenizer, QUESTION, context, max_answer_len)
        results = qa(question=QUESTION, context=context, top_k=100_000, **options)
        assert_exact(results, answers, empty if impossible else None)
        assert len(results) == len(answers) + impossible
        assert sum(result["score"] for result in results) == pytest.approx(1, abs=1e-5)
        for result in results:
            assert result["answer"] == context[result["start"] : result["end"]] == result["answer"].strip()
        assert ("" in [result["answer"] for result in results]) == impossible
        assert close(qa(question=QUESTION, context=context, top_k=3, **options), results[:3])
        assert close(qa(question=QUESTION, context=context, **options), results[0])


def test_a_long_passage_is_read_at_once(qa, monkeypatch):
    lengths = []
    monkeypatch.setattr(qa.tokenizer, "model_max_length", 512)  # the tokenizer was made for another model
    hook = watch(qa.model, lengths)
    context = " ".join(TEXTS) * 25
    results = qa(question=QUESTION, context=context, top_k=20)
    hook.remove()
    assert lengths == [len(qa.tokenizer(QUESTION, context)["input_ids"])] and lengths[0] > 3000
    assert_exact(results, candidates(qa.model, qa.tokenizer, QUESTION, context, 15)[0])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("padding_side", "cutting"),
    [
        ("left", {}),
        ("right", {"max_seq_len": 60, "doc_stride": 5}),
        ("left", {"max_seq_len": 60, "padding": "max_length"}),
    ],
)
def test_answers_of_a_batch(qa, monkeypatch, padding_side, cutting):
    monkeypatch.setattr(qa.tokenizer, "padding_side", padding_side)
    questions = [QUESTION, "Is it?", "What is in 東京 and in Paris, and upon what?", "a", QUESTION]
    options = {"top_k": 3, "handle_impossible_answer": True, **cutting}
    unpadded = {name: value for name, value in options.items() if name != "padding"}
    single = [qa(question=a, context=b, **unpadded) for a, b in zip(questions, TEXTS, strict=True)]
    for size in (1, 2, 7):
        assert close(qa(question=questions, context=TEXTS, batch_size=size, **options), single)
    pairs = [{"question": a, "context": b, "id": 0} for a, b in zip(questions, TEXTS, strict=True)]
    assert close(qa(pairs, batch_size=2, **options), single)
    assert close(qa(tuple(pairs), batch_size=2, **options), single)
    assert close(list(qa((p for p in pairs), batch_size=2, **options)), single)
    assert close(qa(pairs[0], **options), single[0])


def test_one_question_for_several_passages(qa):
    expected = [qa(question=QUESTION, context=context) for context in TEXTS[:2]]
    assert qa(question=QUESTION, context=TEXTS[:2]) == expected
    assert qa({"question": QUESTION, "context": TEXTS[:2]}) == expected
    assert qa(question=[QUESTION, "Is it?"], context=TEXTS[0])[0] == expected[0]
    assert qa([{"question": QUESTION, "context": TEXTS[0]}]) == expected[:1]
    assert qa([]) == []
    # If more than one answer is allowed, the result is a list, also with only one answer.
    assert [a["answer"] for a in qa(question=QUESTION, context=" a", top_k=9)] == ["a"]


CONTEXT = "The Ätomium, after all, is in Brüssels; thé Eiffel Tower is ELSEWHERE, and neither is hére or there."


@pytest.mark.parametrize(
    ("kind", "max_seq_len", "doc_stride", "impossible"),
    [("bert", 40, 0, True), ("bert", 25, 6, False), ("modernbert", 40, 0, False), ("modernbert", 25, 6, True)],
)
def test_other_models_read_pieces(kind, max_seq_len, doc_stride, impossible):
    model, tokenizer = transformer(kind), word_piece()
    if kind == "modernbert":
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    qa = pipeline("question-answering", model=model, tokenizer=tokenizer, device="cpu")
    answers, empty = candidates(
        model, tokenizer, "Where is it?", CONTEXT, 9, max_length=max_seq_len, stride=doc_stride
    )
    options = {"max_seq_len": max_seq_len, "doc_stride": doc_stride, "handle_impossible_answer": impossible}
    for batch_size, padding in ((1, False), (3, False), (2, "max_length")):
        more = {"batch_size": batch_size, "padding": padding, "max_answer_len": 9}
        results = qa(question="Where is it?", context=CONTEXT, top_k=100_000, **options, **more)
        assert_exact(results, answers, empty if impossible else None)
        assert len(results) == len(answers) + impossible
        assert all(result["answer"] == CONTEXT[result["start"] : result["end"]] for result in results)


@pytest.mark.parametrize(
    ("kind", "positions", "tokenizer_limit", "expected"),
    [
        ("bert", 48, None, 48),
        ("bert", 48, 40, 40),
        ("bert", 40, 48, 40),
        ("roberta", 48, None, 47),  # its first position is the one that follows the padding's
    ],
)
def test_pieces_never_overrun(kind, positions, tokenizer_limit, expected):
    tokenizer, lengths = word_piece(tokenizer_limit), []
    model = transformer(kind, limit=positions, type_vocab_size=2)
    watch(model, lengths)
    qa = pipeline("question-answering", model=model, tokenizer=tokenizer, device="cpu")
    assert qa(question="Where?", context=CONTEXT)["answer"] in CONTEXT
    assert max(lengths) == expected and len(lengths) > 2
    with pytest.raises(ValueError, match="`max_seq_len` is 49, the model has"):
        qa(question="Where?", context=CONTEXT, max_seq_len=49)
    # In every case half of the room is read twice.
    room = expected - len(tokenizer("Where?", "")["input_ids"])
    tokens = len(tokenizer(CONTEXT, add_special_tokens=False)["input_ids"])
    assert len(lengths) == 1 + -(-(tokens - room) // (room - room // 2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"question": "", "context": TEXT}, ValueError, "`question` is empty"),
        ({"question": QUESTION, "context": " \n"}, ValueError, "`context` is empty"),
        ({"question": QUESTION}, ValueError, "`context` is missing"),
        ({}, ValueError, "`question` is missing"),
        ({"inputs": [{"context": TEXT}]}, ValueError, "`question` is missing"),
        ({"question": 3, "context": TEXT}, TypeError, "`question` must be a string, got int"),
        ({"question": [QUESTION, None], "context": TEXT}, ValueError, "`question` is missing"),
        ({"question": [QUESTION] * 3, "context": [TEXT] * 2}, ValueError, "`question` has 3 entries, `context` has 2"),
        ({"inputs": QUESTION}, TypeError, "`inputs` must hold dictionaries"),
        ({"inputs": 3}, TypeError, "`inputs` must hold dictionaries"),
        ({"inputs": [QUESTION]}, TypeError, "`inputs` must hold dictionaries"),
        ({"inputs": {}, "question": QUESTION, "context": TEXT}, ValueError, "not both"),
        ({"top_k": 0}, ValueError, "`top_k` must be a whole number of at least 1, got 0"),
        ({"max_answer_len": 1.5}, ValueError, "`max_answer_len` must be a whole number"),
        ({"max_seq_len": True}, ValueError, "`max_seq_len` must be a whole number"),
        ({"doc_stride": -1}, ValueError, "`doc_stride` must be a whole number of at least 0"),
        ({"max_seq_len": 40, "doc_stride": 39}, ValueError, "`doc_stride` must be less than"),
        ({"max_seq_len": 5}, ValueError, "`question` is too long"),
        ({"padding": "left"}, ValueError, "`padding` must be True, False, 'longest' or 'max_length', got 'left'"),
        ({"padding": "max_length"}, ValueError, "`padding` 'max_length' needs `max_seq_len`"),
        ({"context": "東", "max_answer_len": 1}, ValueError, "`max_answer_len` 1 is too small"),
        ({"tok_k": 3}, TypeError, "tok_k"),
    ],
)
def test_errors(qa, arguments, error, message):
    if arguments and not {"question", "inputs"} & set(arguments):
        arguments = {"question": QUESTION, "context": TEXT, **arguments}
    with pytest.raises(error, match=message):
        qa(**arguments)


def test_what_the_tokenizer_cannot_read():
    qa = pipeline("question-answering", model=transformer(), tokenizer=word_piece(), device="cpu")
    for arguments in ({"question": "\x01", "context": CONTEXT}, {"question": "Where?", "context": "\x01"}):
        name = "question" if arguments["question"] == "\x01" else "context"
        with pytest.raises(ValueError, match=f"`{name}` has nothing that the tokenizer can read"):
            qa(**arguments)


def test_wrong_models_and_tokenizers(tokenizer, tmp_path):
    qa = QuestionAnsweringPipeline(model=tiny("Model", tokenizer), tokenizer=tokenizer, device="cpu")
    with pytest.raises(ValueError, match="`model` must have a question answering head.*AveyBModel"):
        qa(question=QUESTION, context=TEXT)
    model = tiny("ForQuestionAnswering", tokenizer)
    torch.nn.init.constant_(model.qa_outputs.bias, float("nan"))
    qa = QuestionAnsweringPipeline(model=model, tokenizer=tokenizer, device="cpu")
    with pytest.raises(ValueError, match="`model` gave logits that are not numbers"):
        qa(question=QUESTION, context=TEXT)
    with pytest.raises(ValueError, match="`tokenizer` must be a fast tokenizer.*got none"):
        QuestionAnsweringPipeline(model=model)
    with pytest.raises(ValueError, match="`tokenizer` must be a fast tokenizer.*got ByT5Tokenizer"):
        QuestionAnsweringPipeline(model=model, tokenizer=ByT5Tokenizer())


def test_no_answer_where_there_is_no_cls_token_or_elsewhere(tmp_path):
    model = tiny("ForQuestionAnswering", encoder_tokenizer())
    write_byte_level_bpe(tmp_path)
    bare, last = AutoTokenizer.from_pretrained(tmp_path), encoder_tokenizer()
    last.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP] [CLS]", pair="$A [SEP] $B [SEP] [CLS]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    for tokenizer in (bare, last):
        qa = pipeline("question-answering", model=model, tokenizer=tokenizer, device="cpu")
        answers, empty = candidates(model, tokenizer, QUESTION, TEXT, 15)
        results = qa(question=QUESTION, context=TEXT, top_k=100_000, handle_impossible_answer=True)
        assert_exact(results, answers, empty)
        assert len(results) == len(answers) + 1


def test_the_task_is_as_those_of_transformers(qa, tmp_path):
    qa.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py")) and "custom_pipelines" not in (tmp_path / "config.json").read_text()
    loaded = pipeline("question-answering", model=str(tmp_path), device="cpu", top_k=2)
    assert close(loaded(question=QUESTION, context=TEXT), qa(question=QUESTION, context=TEXT, top_k=2))
    with pytest.raises(ValueError, match="default"):
        pipeline("question-answering")


def test_a_task_of_transformers_stays(monkeypatch):
    tasks = {"question-answering": "theirs"}
    monkeypatch.setattr(transformers_pipelines.PIPELINE_REGISTRY, "supported_tasks", tasks)
    auto_classes._register_pipelines(transformers_pipelines)
    assert tasks == {"question-answering": "theirs"}
    tasks.clear()
    monkeypatch.setattr(transformers_pipelines, "REMOVED_TASKS", {"question-answering": "", "vqa": ""}, raising=False)
    auto_classes._register_pipelines(transformers_pipelines)
    assert tasks["question-answering"]["impl"] is QuestionAnsweringPipeline
    assert transformers_pipelines.REMOVED_TASKS == {"vqa": ""}


# sentence-transformers.


def test_sentence_transformers(tokenizer, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    model = tiny("ForMaskedLM", tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    by_hand = SentenceTransformer(modules=[Transformer(str(tmp_path)), Pooling(32, "mean")], device="cpu")
    by_path = SentenceTransformer(str(tmp_path), device="cpu")
    expected = torch.cat([run(model.model, tokenizer, text).last_hidden_state.mean(1) for text in TEXTS])
    for encoder, side in zip((by_hand, by_path), SIDES, strict=True):
        encoder.tokenizer.padding_side = side
        batched = encoder.encode(TEXTS, batch_size=3, convert_to_tensor=True)
        torch.testing.assert_close(batched, expected, atol=1e-5, rtol=1e-5)
    by_hand.save(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    torch.testing.assert_close(again.encode(TEXTS, convert_to_tensor=True), expected, atol=1e-5, rtol=1e-5)
