"""Needles, in examples/evaluation: what the texts hold, how answers are judged, and runs of a few steps."""

import csv
import itertools
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.evaluation import TASKS, needle
from examples.evaluation.__main__ import main
from examples.evaluation.models import make_config, make_model


DIGITS = r"((?: \d){%d})"
STATEMENTS = {"passkey": "the pass key is", "number": "the special magic number for (?P<key>[a-z]+) is"}
PLAIN = {
    "passkey": r"the (rain is cold|road is long|moon is pale)|here we stay|out and home again",
    "number": r"the \w+ \w+ \w+ the \w+|a \w+ is \w+ the \w+ \w+|the \w+ \w+ a \w+ \w+ \w+ the \w+|"
    r"\w+ the \w+ is a \w+|every \w+ \w+ the \w+ \w+ again",
}
TINY = [
    "--width",
    "32",
    "--layers",
    "1",
    "--window",
    "32",
    "--train-length",
    "48",
    "--digits",
    "2",
    "--steps",
    "3",
    "--tokens",
    "96",
    "--texts",
    "1",
]


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
    model = make_model(make_config("finch", vocabulary=len(needle.WORDS) + 1, width=32, layers=1, **ids)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def test_an_answer_is_right_where_each_digit_is_what_the_model_writes(model, monkeypatch):
    monkeypatch.setattr(needle, "CALL", 3 * 20)  # three texts a call
    texts = torch.randint(1, len(needle.WORDS) + 1, (7, 20), generator=torch.Generator().manual_seed(0))
    for place in range(17, 20):  # what it would write, by plain calls
        texts[:, place] = model(input_ids=texts[:, :place], use_cache=False).logits[:, -1].argmax(-1)
    texts[4, -1] += 1 if texts[4, -1] == 1 else -1
    texts[5, -3] += 1 if texts[5, -3] == 1 else -1
    assert needle.are_right(model, texts, 3).tolist() == [True, True, True, True, False, False, True]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Calls the task with tiny models, and returns its record."""
    for name in TASKS.keys() - {"needle"}:
        monkeypatch.delitem(TASKS, name)

    def call(*options):
        main(["needle", "--out", str(tmp_path), "--lengths", "48", "--architectures", "finch", *TINY, *options])
        return json.loads((tmp_path / "needle.json").read_text(encoding="utf-8"))

    return call


def without_times(record):
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in record["rows"]]


def weights_of(tmp_path, seed=0):
    return (tmp_path / f"needle-finch-common-{seed}" / "model.safetensors").read_bytes()


def test_runs_go_on_and_repeat(run, monkeypatch, tmp_path):
    trained, train = [], needle.train
    monkeypatch.setattr(
        needle, "train", lambda arguments, name, *which: trained.append(name) or train(arguments, name, *which)
    )
    first = run()
    assert [(row["variant"], row["length"], len(row["by_depth"])) for row in first["rows"]] == [
        ("passkey", 48, 11),
        ("number", 48, 11),
    ]
    assert trained == ["finch"]  # one model for both
    assert run() == first and trained == ["finch"]
    weights = weights_of(tmp_path)
    more = run("--lengths", "48", "96", "--architectures", "finch", "transformer")
    assert more["rows"][:2] == first["rows"] and len(more["rows"]) == 8
    assert trained == ["finch", "transformer"] and weights_of(tmp_path) == weights
    with (tmp_path / "needle.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{name: str(value) for name, value in row.items()} for row in more["rows"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [
            "needle-finch-common-0",
            "needle-transformer-common-0",
            *(f"needle{end}" for end in ("_depth.svg", "_length.svg", ".csv", ".json")),
        ]
    )

    # The same seed makes the same model and the same numbers, another one others.
    again = run("--fresh", "--lengths", "48", "96", "--architectures", "finch", "transformer")
    assert trained == 2 * ["finch", "transformer"] and weights_of(tmp_path) == weights
    for row in without_times(again):  # in another order
        assert row in without_times(more)
    both = run("--seeds", "0", "1")["rows"]
    assert trained[4:] == ["finch"] and weights_of(tmp_path, 1) != weights == weights_of(tmp_path)
    assert [row["seed"] for row in both] == 8 * [0] + 2 * [1]
    (tmp_path / "needle.json").unlink()
    run("--seeds", "1", "--lr", "1e-3")
    assert trained[5:] == ["finch"]


def test_recipes_are_measured_where_an_architecture_has_them(run):
    record = run("--architectures", "raven", "finch", "--recipes", "common", "sparse", "--steps", "1")
    measured = [(row["architecture"], row["recipe"]) for row in record["rows"][::2]]
    assert measured == [("raven", "common"), ("raven", "sparse"), ("finch", "common")]
