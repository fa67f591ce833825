"""Needles, in examples/evaluation: what the texts hold, how answers are judged, and runs of a few steps."""

import itertools
import random
import re

import pytest
import torch
from evaluation_cases import perturbed
from examples.evaluation import needle
from examples.evaluation.models import make_config, make_model


DIGITS = r"((?: \d){%d})"
STATEMENTS = {"passkey": "the pass key is", "number": "the special magic number for (?P<key>[a-z]+) is"}
PLAIN = {
    "passkey": r"the (rain is cold|road is long|moon is pale)|here we stay|out and home again",
    "number": r"the \w+ \w+ \w+ the \w+|a \w+ is \w+ the \w+ \w+|the \w+ \w+ a \w+ \w+ \w+ the \w+|"
    r"\w+ the \w+ is a \w+|every \w+ \w+ the \w+ \w+ again",
}


def read(ids: list[int]) -> list[str]:
    assert ids[0] == needle.BOUNDARY and needle.BOUNDARY not in ids[1:]
    return [needle.WORDS[number - 1] for number in ids[1:]]


@pytest.mark.parametrize(("variant", "digits"), [*itertools.product(needle.VARIANTS, (2, 5))])
def test_a_text_has_one_needle_and_asks_for_it(variant, digits):
    generator = random.Random(0)
    answers, keys = set(), set()
    for depth, length in itertools.product((-0.02, 0.0, 0.37, 1.0, 1.02), (40, 64, 65, 300)):
        words = read(needle.make_text(variant, length, depth, digits, generator))
        assert len(words) == length - 1
        text, statement = " ".join(words), STATEMENTS[variant]
        there = statement + DIGITS % digits
        asked = re.search(
            f"(?:^| )what is {statement.removesuffix(' is')} \\? {there.replace('?P<key>', '?:')}$", text
        )
        told = re.search(f"(?:^|[.] )(?P<needle>{there} \\.)", text)
        question = text[asked.start() :]
        before, behind = text[: told.start("needle")].split(), text[told.end("needle") : asked.start()].split()
        # The answer is what the needle says, of the same noun, and no digit stands anywhere else.
        answer = told["needle"].split()[-1 - digits : -1]
        assert words[-digits:] == answer and len(set(answer)) == digits
        assert sum(word.isdigit() for word in words) == 2 * digits
        if variant == "number":
            key = told["key"]
            assert question.split().count(key) == 2
            keys.add(key)
        # Between sentences, next to the depth: sentences have at most 10 words.
        room = len(before) + len(behind)
        assert abs(len(before) - min(max(depth, 0), 1) * room) <= 10
        assert (not before) if depth <= 0 else (not behind or before or depth < 0.5)
        first, *sentences = " ".join([*before, *behind]).split(" .")
        assert all(re.fullmatch(PLAIN[variant], sentence.strip()) for sentence in sentences if sentence.strip(" ."))
        assert len(first.split()) <= 10
        answers.add(tuple(answer))
    assert len(answers) > 10 and (variant == "passkey" or len(keys) > 5)


def test_a_text_without_room_is_refused():
    with pytest.raises(ValueError, match="30 tokens has no room for a number of 5 digits"):
        needle.make_text("number", 30, 0.5, 5, random.Random(0))


@pytest.mark.parametrize("variant", needle.VARIANTS)
def test_a_needle_is_cut_where_a_split_ends_in_it(variant):
    words = len(needle.NEEDLES[variant].split()) + 3
    text = needle.make_text(variant, 100, 0.4, 3, random.Random(0))
    told = next(place for place, word in enumerate(read(text), start=1) if word.isdigit())
    begin, end = told - words + 3, told + 2
    for split in range(1, 100):
        crossed = any(begin < boundary <= end for boundary in range(0, 100, split))
        assert needle.is_cut(text, variant, 3, split) == crossed


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    return perturbed(
        make_model(make_config("finch", vocabulary=len(needle.WORDS) + 1, width=32, layers=1, **ids)), 0.3
    )


@torch.no_grad()
def test_an_answer_is_right_where_each_digit_is_what_the_model_writes(model, monkeypatch):
    monkeypatch.setattr(needle, "CALL", 3 * 20)  # three texts a call
    texts = torch.randint(1, len(needle.WORDS) + 1, (7, 20), generator=torch.Generator().manual_seed(0))
    for place in range(17, 20):  # what it would write, by plain calls
        texts[:, place] = model(input_ids=texts[:, :place], use_cache=False).logits[:, -1].argmax(-1)
    texts[4, -1] += 1 if texts[4, -1] == 1 else -1
    texts[5, -3] += 1 if texts[5, -3] == 1 else -1
    assert needle.are_right(model, texts, 3).tolist() == [True, True, True, True, False, False, True]


def test_models_are_trained_once_and_repeat(run_task, monkeypatch, tmp_path):
    """One model for both variants and all lengths; the same seed makes the same model and the same numbers."""
    trained, train = [], needle.train
    monkeypatch.setattr(
        needle, "train", lambda arguments, name, *which: trained.append(name) or train(arguments, name, *which)
    )

    def run(*options):
        rows = run_task("needle", *options)["rows"]
        return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]

    def weights(seed=0):
        return (tmp_path / f"needle-finch-common-{seed}" / "model.safetensors").read_bytes()

    rows, first = run(), weights()
    assert trained == ["finch", "transformer"] and [len(row["by_depth"]) for row in rows] == 4 * [11]
    assert run("--lengths", "48", "96")[:4] == rows and len(trained) == 2
    assert run("--fresh") == rows and trained[2:] == trained[:2] and weights() == first
    run("--architectures", "finch", "--seeds", "1")
    assert trained[4:] == ["finch"] and weights(1) != first == weights()
