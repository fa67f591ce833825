"""The data of abc.yaml, and the check of a model's tunes."""

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
    The held-out tunes, one per row: the whole `tune`, its `header`, its `beginning` (header and first line of music),
    `lines` to choose the next line from, and the index `right` of the correct one. The other lines are from other
    tunes.
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
    """The data of every task. `--metadata '{"folders": ["miscFolk"]}'` uses fewer collections of tunes."""
    return {"test": held_out(tuple(folders))}


def judge(row: dict, results: list[str]) -> dict[str, float]:
    """1 if the header and the model's continuation are a valid tune."""
    return {"valid": float(is_valid_tune(row["header"] + results[0]))}
