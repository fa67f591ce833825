"""Encoders, in examples/evaluation: labels of notes, rows and masks, BERT's positions, and runs of a few steps."""

import argparse
import csv
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.evaluation import TASKS, encoders, needle  # isort: skip; it finds the other examples
from abc_corpus import Corpus, alterations, transpose
from examples.evaluation.__main__ import main
from train_abc import MASK


HEADER = "X:1\nT:Cabbage and Beef\nM:4/4\nL:1/8\nK:"
TINY = "--width 32 --layers 2 --context 128 --rows 2 --steps 2 --tuning-steps 2 --train-length 64 --lengths 64 128"
TINY += " --shortest 48 --texts 1 --digits 3 --tokens 128 --retrieval-steps 2"
SIGNS = {2: "^^", 1: "^", 0: "=", -1: "_", -2: "__"}


@pytest.mark.parametrize(
    ("key", "music", "sounds"),
    [
        ("C", "CDEF GABc|", "========"),
        ("D", "CDEF GABc|", "^==^===^"),
        ("A", "f'g,|", "^^"),
        ("Bb", "bea|", "__="),
        ("Eb", "bea|", "___"),
        ("F#m", "fcgd|", "^^^="),
        ("Gm", "bef|", "__="),
        # D dorian, E phrygian, F lydian and B locrian have no accidentals.
        ("Ddor", "cfb|", "==="),
        ("Ephr", "cfb|", "==="),
        ("Flyd", "cfb|", "==="),
        ("Bloc", "cfb|", "==="),
        ("Amix", "fcg|", "^^="),
        # Accidentals are valid up to the end of the bar, in all octaves, and replace the key.
        ("G", "f=fF|f|", "^==^"),
        ("C", "^cc,C|c_B B|]", "^^^=__"),
        ("C", "^c=c c:|c|:^f f:|\n|:f|", "^===^^="),
        ("C", "^c\nc|\nc|1^d d|2d|", "^^=^^="),
        ("C", "^^c __d d|", ["^^", "__", "__"]),
        # A note that is tied over the bar line keeps its accidental, and no note after it.
        ("C", "^c2-|c c|", "^^="),
        ("C", "^c/2-|d c|", "^=="),
        ("C", "^c-|C c|", "^=="),
        ("D", "=c>B|c|c|", "==^^"),
        ("C", "z2 (3^ABc [^ceg] c z|", "^==^==^"),
    ],
)
def test_notes_sound_as_key_and_accidentals_say(key, music, sounds):
    tune = f"{HEADER}{key}\n{music}\n"
    found = alterations(tune)
    start = len(tune) - len(music) - 1
    letters = [start + place for place, letter in enumerate(music) if letter.lower() in "abcdefg"]
    assert [*found] == letters and [SIGNS[sound] for sound in found.values()] == [*sounds]


def test_labels_are_those_of_each_byte_of_a_row():
    tunes = [f"{HEADER}G\nfg|_b=f|]\n", f"{HEADER}F\nB^c|]\n"]
    row = [0, *tunes[0].encode(), 0, *tunes[1].encode(), 0, -1, -1]
    labels = encoders.labels_of(row)
    assert len(labels) == len(row)
    named = [(chr(byte), encoders.LABELS[label]) for byte, label in zip(row, labels, strict=True) if label > 0]
    kinds = ["sharp", "natural", "flat", "natural", "flat", "sharp"]
    assert named == list(zip("fgbfBc", kinds, strict=True))  # no letter of a title
    ignored = [byte for byte, label in zip(row, labels, strict=True) if label == encoders.IGNORED]
    assert ignored == [0, 0, 0, -1, -1] and labels.count(0) == len(row) - 11
    assert encoders.guesses(tunes) == {
        ord(letter): encoders.LABELS.index(label)
        for pair, label in (("fF", "sharp"), ("gG", "natural"), ("bB", "flat"), ("cC", "sharp"))
        for letter in pair
    }


def test_transposed_notes_sound_alike():
    """A tune in another key has as many semitones between its notes."""
    generator = random.Random(0)
    tune = f"{HEADER}D\nDFAd ^GBfe|=c2 cA G-|G ^AB2 d4|]\n"
    semitones = dict(zip("CDEFGAB", (0, 2, 4, 5, 7, 9, 11), strict=True))

    def pitches(tune):
        return [(semitones[tune[place].upper()] + sound) % 12 for place, sound in alterations(tune).items()]

    before, keys = pitches(tune), set()
    for _ in range(20):
        moved = transpose(tune, generator)
        keys.add(moved.split("\nK:")[1][:2])
        after = pitches(moved)
        assert {(b - a - after[0] + before[0]) % 12 for a, b in zip(before, after, strict=True)} == {0}
    assert len(keys) > 3


def test_scores_are_of_notes():
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    found = torch.tensor([0, 1, 1, 1, 2, 1, 0])
    numbers = encoders.scores(found, labels)
    assert numbers["accuracy"] == pytest.approx(3 / 5)
    assert numbers["f1"] == pytest.approx((2 * 2 / (4 + 2) + 2 * 1 / (1 + 2) + 0) / 3)
    assert encoders.scores(labels, labels) == {"f1": 1.0, "accuracy": 1.0}


@pytest.fixture
def tunes(monkeypatch):
    """A small corpus: two tunes are held out, and one of each part is too long for a row."""
    generator = random.Random(1)

    def tune(key, bars):
        music = "|".join("".join(generator.choice("CDEFGABcdefg") for _ in range(8)) for _ in range(bars))
        return f"{HEADER}{key}\n{music}|]\n"

    keys = ["G", "D", "F", "Bb", "Am", "Edor", "C", "A"]
    parts = Corpus([tune(key, 3) for key in keys] + [tune("G", 12)], [tune("D", 4), tune("F", 2), tune("G", 12)], {})
    monkeypatch.setattr(encoders, "corpus", lambda: parts)
    return parts


def parse(tmp_path, *options):
    parser = argparse.ArgumentParser()
    encoders.add_arguments(parser)
    arguments = parser.parse_args([*TINY.split(), *options])
    return argparse.Namespace(**vars(arguments), device="cpu", out=tmp_path, fresh=False)


class Spy(torch.nn.Module):
    """A model that keeps what it is called with, and whose outputs are zero."""

    def __init__(self, architecture, arguments, outputs):
        super().__init__()
        self.config, self.device = encoders.config_of(arguments, "masked", architecture), torch.device("cpu")
        self.outputs, self.calls = torch.nn.Parameter(torch.zeros(outputs)), []

    def forward(self, input_ids, attention_mask=None):
        self.calls.append((input_ids, attention_mask))
        return SimpleNamespace(logits=self.outputs.expand(*input_ids.shape, -1))


@pytest.mark.parametrize("problem", ["masked", "tokens"])
def test_all_models_read_the_same_rows_with_the_same_masks(tunes, tmp_path, problem):
    arguments, calls = parse(tmp_path), []
    for architecture in encoders.ARCHITECTURES:
        model = Spy(architecture, arguments, 4 if problem == "tokens" else encoders.BYTES)
        losses = encoders.TRAININGS[problem][1](arguments, model, 3)
        assert all(next(losses).isfinite() for _ in range(6))
        calls.append(model.calls)
    for same in zip(*calls, strict=True):
        (ids, mask), *others = same
        assert ids.shape == (2, 128) and mask.shape == ids.shape
        assert all(torch.equal(ids, other) and torch.equal(mask, there) for other, there in others)
        assert (ids[mask == 0] == encoders.BOUNDARY).all()
        hidden = (ids == MASK)[mask == 1].float().mean()
        assert (0.1 < hidden < 0.3) if problem == "masked" else hidden == 0
    assert not torch.equal(calls[0][0][0], calls[0][1][0])
    assert len(encoders.tunes_of(arguments)) == 8 and len(encoders.tunes_of(arguments, held_out=True)) == 2


def test_a_model_of_retrieval_does_not_see_the_answer(tmp_path):
    arguments, shown = parse(tmp_path, "--digits", "3"), []

    def model(input_ids):
        shown.append(input_ids)
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, encoders.NEEDLE_MASK + 1))

    model.device = "cpu"
    numbers = encoders.measure_retrieval(arguments, model, 64)
    texts = torch.tensor(needle.texts_of_test("number", 64, 1, 3))
    assert torch.cat(shown)[:, :-3].equal(texts[:, :-3]) and (torch.cat(shown)[:, -3:] == encoders.NEEDLE_MASK).all()
    assert numbers["accuracy"] == 0 and len(numbers["by_depth"]) == 11 and texts.max() < encoders.NEEDLE_MASK

    def knowing(input_ids):
        """Finds the needle by its digits."""
        answers = [[token for token in row if token in needle.DIGIT_IDS] for row in input_ids.tolist()]
        logits = F.one_hot(torch.tensor(answers), encoders.NEEDLE_MASK + 1).float()
        logits[0, 2] = 0  # one digit of one text is wrong
        return SimpleNamespace(logits=F.pad(logits, (0, 0, input_ids.shape[1] - 3, 0)))

    knowing.device = "cpu"
    assert encoders.measure_retrieval(arguments, knowing, 64)["accuracy"] == pytest.approx(10 / 11)


@pytest.fixture
def run(monkeypatch, tmp_path, tunes):
    """Calls the task with tiny models, and returns its record."""
    for name in TASKS.keys() - {"encoders"}:
        monkeypatch.delitem(TASKS, name)

    def call(*options):
        main(["encoders", "--out", str(tmp_path), "--threads", "1", *TINY.split(), *options])
        return json.loads((tmp_path / "encoders.json").read_text(encoding="utf-8"))

    return call


def test_a_run_measures_each_cell_once(run, monkeypatch, tmp_path, capsys):
    trained, train = [], encoders.train
    monkeypatch.setattr(encoders, "train", lambda arguments, *which: trained.append(which) or train(arguments, *which))
    record = run("--seeds", "0")
    cells = [(row["problem"], row["architecture"], row["length"]) for row in record["rows"]]
    names = encoders.ARCHITECTURES
    expected = [(problem, name, None) for problem in ("masked", "tokens") for name in names]
    assert cells == expected + [("retrieval", name, length) for name in names for length in (64, 128)]
    # One training for both lengths, and the model of `masked` is not trained again for `tokens`.
    assert trained == [(problem, name, 0) for problem in encoders.PROBLEMS for name in names]
    for row in record["rows"]:
        if row["problem"] == "tokens":
            assert all(0 <= row[name] <= 1 for name in ("f1", "accuracy", "guess_f1", "guess_accuracy"))
        elif (row["architecture"], row["length"]) == ("bert", 128):
            assert row["accuracy"] is None and row["note"] == "cannot read more than 64 tokens"
        else:
            assert 0 <= row["accuracy"] <= 1 and (row["problem"] == "retrieval") == ("by_depth" in row)
        assert row["problem"] != "masked" or 1 < row["bits"] < 20
    said = capsys.readouterr().out
    assert "BERT cannot read more than 64 tokens." in said and "a guess that knows no key" in said
    svg = (tmp_path / "encoders.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    labels = ("masked", "tokens", "retrieval", "right answers (share)", "Avey-B", "BERT", "ModernBERT")
    assert all(f"<!-- {text} -->" in svg for text in labels)
    with (tmp_path / "encoders.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(record["rows"])

    monkeypatch.setattr(encoders, "measure_masked", None)
    assert run("--seeds", "0") == record and len(trained) == 9
    # A longer text needs no training, and another seed does.
    more = run("--seeds", "0", "--problems", "retrieval", "--lengths", "256", "--architectures", "avey-b")
    assert len(trained) == 9 and more["rows"][-1]["length"] == 256
    run("--seeds", "1", "--problems", "tokens", "--architectures", "bert")
    assert trained[9:] == [("tokens", "bert", 1), ("masked", "bert", 1)]
    with pytest.raises(ValueError, match="was measured with steps = 2, not 3"):
        run("--steps", "3")


def test_a_model_learns_labels(tunes, tmp_path):
    """From the model of `masked`, whose weights it begins with, and better than without training."""
    options = ("--steps", "1", "--tuning-steps", "60", "--lr", "1e-2", "--rows", "4")
    arguments = parse(tmp_path, *options)
    row = encoders.measure(arguments, "tokens", "avey-b", 0, None)
    before = encoders.measure(parse(tmp_path / "new", "--tuning-steps", "1"), "tokens", "avey-b", 0, None)
    assert row["accuracy"] > 0.6 and row["accuracy"] > before["accuracy"] + 0.1
