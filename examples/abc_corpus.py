"""
Tunes to train on: the ABC collections in the PyPI package music21, cleaned and normalised.

    python examples/abc_corpus.py [--show 3]

Every tune becomes a header of five lines (X, T, M, L, K; L is always 1/8) and a melody of notes, rests, ties, tuplets,
broken rhythm, chords and bar lines, with four bars per line and notes grouped by the beat. Slurs, grace notes,
decorations, chord symbols, words and comments are removed. Tunes that abc_check.py rejects, tunes with several voices
and duplicates are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import random
import re
import unicodedata
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from abc_check import AbcError, Bar, Metre, Tune, check_bars, parse_bars, parse_metre, parse_tune, split_header


# Left out: josquin (polyphony), nottingham-dataset (two tunes), and essenFolksong, which is for non-commercial use
# only (`--folders` accepts it).
FOLDERS = ("airdsAirs", "miscFolk", "oneills1850", "ryansMammoth")
MAX_BYTES = 1023
VALIDATION_PERCENT = 5
UNIT = Fraction(1, 8)
BARS_A_LINE = 4

# Text in quotes, marks that every program reads differently, and line ends that old mail programs have changed.
_NOISE = re.compile(r'"[^"]*"|\[\|\]|![a-zA-Z]+!|[!kKUVy]|=20|=(?=\\?$)')
_MODES = {
    **dict.fromkeys(("", "maj", "ion"), ""),
    **dict.fromkeys(("m", "min", "aeo"), "m"),
    **{mode: mode for mode in ("dor", "phr", "lyd", "mix", "loc")},
}


class Corpus(NamedTuple):
    train: list[str]
    validation: list[str]
    statistics: dict[str, Counter]  # folder to counts: "found", "kept", and the reasons for leaving tunes out


def plain_title(text: str) -> str:
    """A title in ASCII: accents and the TeX-like escapes of ABC removed."""
    text = re.sub(r"\\[\"'`^~,=]?([A-Za-z])", r"\1", text).replace("ß", "ss").replace("æ", "ae").replace("ø", "o")
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    text = " ".join(re.sub(r"[^ -~]|[\\{}$]", " ", text).split()).strip(" .,;")
    if match := re.fullmatch(r"(.*), (The|A|An)", text):
        text = f"{match[2]} {match[1]}"
    return text[:60].strip()


def plain_key(text: str) -> str:
    """ "E Minor", "Emin" and "Em clef=treble" are all "Em"."""
    match = re.match(r"([A-G][#b]?)\s*([A-Za-z]*)", text)
    mode = _MODES.get(match[2].lower()[:3]) if match else None
    if mode is None or re.search(r"[\^_=][a-gA-G]|exp", text):
        raise AbcError("a key of its own")
    return match[1] + mode


def write_length(value: Fraction) -> str:
    above = "" if value.numerator == 1 else str(value.numerator)
    below = {1: "", 2: "/"}.get(value.denominator, f"/{value.denominator}")
    # "3/" is allowed too, but some programs misread it.
    return above + ("/2" if above and below == "/" else below)


def beat_of(metre: Metre) -> Fraction:
    """The length of the notes under one beam."""
    if metre.is_compound:
        return Fraction(3, metre.unit)
    return Fraction(1, 2) if metre.unit < 4 or metre == (4, 4) else Fraction(1, 4)


def write_bar(bar: Bar, metre: Metre) -> str:
    # An upbeat is counted from the end of its bar.
    onset = metre.time - bar.time if bar.time < metre.time and bar.left != "|" else Fraction(0)
    beat = beat_of(metre)
    parts: list[str] = []
    glue = True
    for event in bar.events:
        if not glue and onset % beat == 0:
            parts.append(" ")
        parts.append(event.before + event.pitch + write_length(event.written / UNIT) + event.after)
        glue = any(mark in event.after for mark in "<>")
        onset += event.time
    return "".join(parts)


def plain_line(left: str, right: str, last: bool) -> tuple[str, str]:
    """The bar line between two bars in this corpus's spelling: the end of the old bar, the start of the new one."""
    both = left + right
    closes, opens = ":|" in both or "::" in both, "|:" in both or "::" in both
    ending = re.search(r"[1-9]", both)
    if last:
        return (":|" if closes else "|]"), ""
    close = ":|" if closes else "||" if re.search(r"\|\||\|\]|\[\|", both) else "|"
    if ending:
        return (":|" if closes else "|") + ending[0], ""
    return ("" if close == "|" and opens else close), "|:" if opens else ""


def write_body(tune: Tune) -> str:
    lines, line, full_bars = [], "|:" if ":" in tune.bars[0].left else "", 0
    for index, bar in enumerate(tune.bars):
        last = index + 1 == len(tune.bars)
        following = "" if last else tune.bars[index + 1].left
        close, opening = plain_line(bar.right, "" if bar.right == following else following, last)
        # An opening repeat without a closing one before it still ends the bar.
        line += write_bar(bar, tune.metre) + (close or "|")
        full_bars += bar.time == tune.metre.time
        ends_section = close in (":|", "||", "|]") or bool(opening)
        if (ends_section or full_bars >= BARS_A_LINE) and not close[-1:].isdigit():
            lines.append(line)
            line, full_bars = "", 0
        line += opening
    return "\n".join([*lines, line] if line else lines)


def normalise(text: str) -> str:
    """
    One tune in the corpus's spelling.

    Raises:
        AbcError: if the corpus does not accept the text as a tune.
    """
    fields, lines = split_header(text)
    if "V" in fields:
        raise AbcError("several voices")
    metre = parse_metre(fields.get("M", "").replace(" ", ""))
    # The default length of the standard, for a tune without an L field.
    unit = parse_unit(fields["L"]) if fields.get("L") else Fraction(1, 16 if metre.time < Fraction(3, 4) else 8)
    bars = parse_bars([_NOISE.sub("", line) for line in lines], unit, metre, close_full_lines=True)
    header = {
        "X": "1",
        "T": plain_title(fields.get("T", "")),
        "M": fields["M"].replace(" ", ""),
        "L": f"{UNIT.numerator}/{UNIT.denominator}",
        "K": plain_key(fields.get("K", "")),
    }
    if not bars or not header["T"]:
        raise AbcError("no music or no title")
    tune = Tune(header, metre, bars)
    result = "".join(f"{letter}:{value}\n" for letter, value in header.items()) + write_body(tune) + "\n"
    if len(result) > MAX_BYTES:
        raise AbcError("too long")
    check_bars(parse_tune(result))
    return result


def parse_unit(text: str) -> Fraction:
    if not (match := re.fullmatch(r"1/(\d+)", text.replace(" ", ""))):
        raise AbcError("no note length")
    return Fraction(1, int(match[1]))


def read_folder(folder: str) -> list[str]:
    """The tunes of one of the package's folders, unchanged."""
    spec = importlib.util.find_spec("music21")  # only its path is needed, and importing it takes seconds
    if spec is None:
        raise SystemExit('The tunes are in music21: pip install "subquad[train]"')
    tunes = []
    for path in sorted((Path(spec.origin).parent / "corpus" / folder).glob("*.abc")):
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = raw.decode("latin-1")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        tunes += re.split(r"^(?=X:)", text, flags=re.MULTILINE)[1:]
    return tunes


_LETTERS = "CDEFGAB"
_FIFTHS = "FCGDAEB"
# Number of sharps by which each mode has fewer than major.
_FEWER_SHARPS = {"lyd": -1, "": 0, "mix": 1, "dor": 2, "m": 3, "phr": 4, "loc": 5}
# The usual keys of fiddle tunes by mode.
_KEYS = {
    "": ("C", "D", "F", "G", "A", "Bb"),
    "mix": ("A", "D", "E", "G"),
    "dor": ("A", "D", "E", "G"),
    "m": ("A", "B", "D", "E", "G"),
}
_LOWEST, _HIGHEST = -3, 16  # G, to e', counted in steps from middle C
_ACCIDENTALS = {"_": -1, "=": 0, "^": 1}
_NOTE = re.compile(r"([_^=]?)([A-Ga-g])([,']*)")
# A bar line; or the accidentals of a note, its letter, octave marks, length and tie.
_BAR_OR_NOTE = re.compile(r"\||([_^=]{0,2})([A-Ga-g])([,']*)[0-9/]*(-?)")


def _signature(tonic: str, mode: str) -> dict[str, int]:
    """The accidental of each letter in a key signature: 1 is a sharp, -1 a flat."""
    sharps = _FIFTHS.index(tonic[0]) - 1 + 7 * tonic.count("#") - 7 * tonic.count("b") - _FEWER_SHARPS[mode]
    return {x: (i < sharps) - (6 - i < -sharps) for i, x in enumerate(_FIFTHS)}


def _step(letter: str, marks: str) -> int:
    """The position of a note on the staff, counted in lines and spaces from middle C."""
    return _LETTERS.index(letter.upper()) + 7 * (letter.islower() + marks.count("'") - marks.count(","))


def _parts(tune: str) -> tuple[str, str, str, str]:
    """The tune up to its key, the tonic, the mode, and the music after the key with the end of line before it."""
    header, key, body = re.fullmatch(r"(.*?\nK:)(.*?)(\n.*)", tune, re.DOTALL).groups()
    return header, *re.fullmatch(r"([A-G][#b]?)(.*)", key).groups(), body


def alterations(tune: str) -> dict[int, int]:
    """
    The sound of each note of a tune of this corpus: the index of its letter to 0 (natural), 1 (sharp), -1 (flat), or
    twice as much. By the standard (ABC 2.1, sections 4.2 and 11.3), an accidental applies to its letter in all octaves
    up to the end of the bar, and a note that is tied over the bar line keeps it.
    """
    _, tonic, mode, body = _parts(tune)
    start, key = len(tune) - len(body), _signature(tonic, mode)
    found: dict[int, int] = {}
    bar: dict[str, int] = {}
    tied: dict[int, int] = {}  # the note before, if it has a tie
    for match in _BAR_OR_NOTE.finditer(body):
        accidentals, letter, marks, tie = match.groups()
        if letter is None:
            bar = {}
            continue
        step = _step(letter, marks)
        if accidentals:
            bar[letter.upper()] = sum(_ACCIDENTALS[sign] for sign in accidentals)
        sound = bar.get(letter.upper(), tied.get(step, key[letter.upper()]))
        found[start + match.start(2)] = sound
        tied = {step: sound} if tie else {}
    return found


def passages(tune: str, length: int = 24) -> set[tuple[int, ...]]:
    """The melody's passages of `length` intervals, which are the same in every key and rhythm."""
    steps = [_step(letter, marks) for _, letter, marks in _NOTE.findall(tune.split("\nK:", 1)[1].split("\n", 1)[1])]
    intervals = [b - a for a, b in itertools.pairwise(steps)]
    return {tuple(intervals[i : i + length]) for i in range(max(len(intervals) - length, 0) + 1)}


def transpose(tune: str, generator: random.Random) -> str:
    """
    The tune, transposed to a random usual key of its mode that keeps it within the range of the fiddle and does not
    need double accidentals. If there is no such key, the tune is not changed.
    """
    header, tonic, mode, body = _parts(tune)
    if mode not in _KEYS or "__" in body or "^^" in body:
        return tune
    before = _signature(tonic, mode)
    for target in generator.sample(_KEYS[mode], len(_KEYS[mode])):
        shift = (_LETTERS.index(target[0]) - _LETTERS.index(tonic[0]) + 3) % 7 - 3
        after = _signature(target, mode)
        notes = []
        for accidental, letter, marks in _NOTE.findall(body):
            step = _step(letter, marks) + shift
            octave, moved = step // 7, _LETTERS[step % 7]
            if accidental:
                # At the same distance from the new signature as from the old one.
                alteration = _ACCIDENTALS[accidental] - before[letter.upper()] + after[moved]
                accidental = next((sign for sign, value in _ACCIDENTALS.items() if value == alteration), None)
            if accidental is None or not _LOWEST <= step <= _HIGHEST:
                break
            notes.append(accidental + (moved.lower() if octave > 0 else moved) + "," * -octave + "'" * (octave - 1))
        else:
            rests = _NOTE.sub("\0", body).split("\0")
            return f"{header}{target}{mode}" + "".join(map(str.__add__, rests, [*notes, ""]))
    return tune


def load_corpus(folders: tuple[str, ...] = FOLDERS) -> Corpus:
    """
    Reads, cleans and splits the tunes. Whether a tune is held out depends only on its music, so it stays the same
    with other folders. Held-out tunes that share more than half of their passages with the training tunes, mostly
    variants of them, are left out.
    """
    corpus, seen = Corpus([], [], {}), set()
    for folder in folders:
        counts = corpus.statistics.setdefault(folder, Counter())
        for raw in read_folder(folder):
            counts["found"] += 1
            try:
                tune = normalise(raw)
            except AbcError as error:
                counts[re.sub(r"\d+|:.*|'.*", "", str(error)).strip()] += 1
                continue
            music = tune.split("\nK:", 1)[1]
            if music in seen:
                counts["occurs twice"] += 1
                continue
            seen.add(music)
            counts["kept"] += 1
            draw = int.from_bytes(hashlib.sha256(music.encode()).digest()[:4], "big") % 100
            (corpus.validation if draw < VALIDATION_PERCENT else corpus.train).append(tune)
    known = set().union(*map(passages, corpus.train))
    new = [tune for tune in corpus.validation if 2 * len(passages(tune) & known) <= len(passages(tune))]
    return corpus._replace(validation=new)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the tunes in music21.")
    parser.add_argument("--folders", nargs="+", default=list(FOLDERS), help="folders of music21's corpus")
    parser.add_argument("--show", type=int, default=0, help="number of validation tunes to print")
    arguments = parser.parse_args()
    corpus = load_corpus(tuple(arguments.folders))
    for folder, counts in corpus.statistics.items():
        print(f"{folder}: " + ", ".join(f"{count} {reason}" for reason, count in counts.most_common()))
    for name, tunes in (("train", corpus.train), ("validation", corpus.validation)):
        print(f"{name}: {len(tunes)} tunes, {sum(map(len, tunes))} bytes")
    print("\n".join(corpus.validation[: arguments.show]))


if __name__ == "__main__":
    main()
