"""What abc.yaml measures on, and how a tune that a model wrote is judged."""

import functools
import random
import sys
from pathlib import Path

from datasets import Dataset


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from abc_check import is_valid_tune
from abc_corpus import FOLDERS, load_corpus


CHOICES = 4
FIELDS = 5  # lines of a header


@functools.cache
def held_out(folders: tuple[str, ...]) -> Dataset:
    """
    The held-out tunes, a row each: the whole `tune`, its `header`, its `beginning` up to the second line of music,
    `lines` that may follow, and which of them is `right`. The others are lines of other tunes.
    """
    generator = random.Random(0)
    tunes = [tune.splitlines(keepends=True) for tune in load_corpus(folders).validation]
    tunes = [lines for lines in tunes if len(lines) > FIELDS + 1]
    rows = []
    for lines in tunes:
        *beginning, line = lines[: FIELDS + 2]
        others = sorted({other[FIELDS + 1] for other in tunes} - {line})
        choices = [line, *generator.sample(others, min(CHOICES - 1, len(others)))]
        generator.shuffle(choices)
        row = {"tune": "".join(lines), "header": "".join(lines[:FIELDS]), "beginning": "".join(beginning)}
        rows.append(row | {"lines": choices, "right": choices.index(line)})
    return Dataset.from_list(rows)


def load_tunes(folders: list[str] = FOLDERS, **metadata) -> dict[str, Dataset]:
    """The data of every task. `--metadata '{"folders": ["miscFolk"]}'` takes fewer collections of tunes."""
    return {"test": held_out(tuple(folders))}


def judge(row: dict, results: list[str]) -> dict[str, float]:
    """1 where what the model wrote after the header makes a valid tune."""
    return {"valid": float(is_valid_tune(row["header"] + results[0]))}
