"""Encoders, in examples/evaluation: labels of notes, rows and masks, BERT's positions, and runs of a few steps."""

import argparse
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from abc_corpus import Corpus, alterations, transpose
from evaluation_cases import TINY
from examples.evaluation import encoders, needle
from train_abc import MASK


HEADER = "X:1\nT:Cabbage and Beef\nM:4/4\nL:1/8\nK:"
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
    arguments = parser.parse_args([*TINY["encoders"].removesuffix(" --seeds 0").split(), *options])
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


def test_a_run_trains_each_model_once(run_task, tunes, monkeypatch, capsys):
    trained, train = [], encoders.train
    monkeypatch.setattr(encoders, "train", lambda arguments, *which: trained.append(which) or train(arguments, *which))
    rows, names = run_task("encoders")["rows"], encoders.ARCHITECTURES
    expected = [(problem, name, None) for problem in ("masked", "tokens") for name in names]
    expected += [("retrieval", name, length) for name in names for length in (64, 128)]
    assert [(row["problem"], row["architecture"], row["length"]) for row in rows] == expected
    # One training for both lengths, and the model of `masked` is not trained again for `tokens`.
    assert trained == [(problem, name, 0) for problem in encoders.PROBLEMS for name in names]
    for row in rows:
        if (row["architecture"], row["length"]) == ("bert", 128):
            assert row["accuracy"] is None and row["note"] == "cannot read more than 64 tokens"
        else:
            assert 0 <= row["accuracy"] <= 1 and (row["problem"] == "retrieval") == ("by_depth" in row)
    said = capsys.readouterr().out
    assert "BERT cannot read more than 64 tokens." in said and "a guess that knows no key" in said
    # A longer text needs no training, and another seed does.
    run_task("encoders", "--problems", "retrieval", "--lengths", "256", "--architectures", "avey-b")
    assert len(trained) == 9
    run_task("encoders", "--seeds", "1", "--problems", "tokens", "--architectures", "bert")
    assert trained[9:] == [("tokens", "bert", 1), ("masked", "bert", 1)]


def test_a_model_learns_labels(tunes, tmp_path):
    """From the model of `masked`, whose weights it begins with, and better than without training."""
    options = ("--steps", "1", "--tuning-steps", "60", "--lr", "1e-2", "--rows", "4")
    arguments = parse(tmp_path, *options)
    row = encoders.measure(arguments, "tokens", "avey-b", 0, None)
    before = encoders.measure(parse(tmp_path / "new", "--tuning-steps", "1"), "tokens", "avey-b", 0, None)
    assert row["accuracy"] > 0.6 and row["accuracy"] > before["accuracy"] + 0.1
