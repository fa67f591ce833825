"""
Checks whether files contain valid tunes in ABC notation.

    python examples/abc_check.py tune.abc [...]

A tune is valid if music21's ABC parser reads it *and* it looks like music: it has a header with X, M, L
and K, a body of known tokens only, at least 4 full bars and 16 notes, and bars as long as the metre requires. The
parser alone is lenient: it skips unknown characters and accepts bars of any length.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import NamedTuple


MIN_BARS = 4
MIN_NOTES = 16
MIN_EXACT_SHARE = 0.9

_LENGTH = r"\d*(?:/+\d*)?"
_PITCH = r"(?:\^\^|__|[\^_=])?[A-Ga-g][,']*"
_TOKEN = re.compile(
    rf"""
    (?P<bar>(?:\[\||\|+\]?:*|:+\|+\]?:*|::+)(?:\ ?\[?[1-9](?:[,-][1-9])*)?|\[[1-9](?:[,-][1-9])*)
  | (?P<note>(?P<pitch>{_PITCH}|[zx])(?P<length>{_LENGTH}))
  | (?P<chord>\[(?P<chord_notes>(?:{_PITCH}{_LENGTH})+)\](?P<chord_length>{_LENGTH}))
  | (?P<tuplet>\([2-9](?::\d?){{0,2}})
  | (?P<broken><{{1,3}}|>{{1,3}})
  | (?P<tie>-)
  | (?P<newline>\n)
  | (?P<field>\[[A-Za-z]:[^\]\n]*\])
  | (?P<ornament>[ `\t()]|\{{[^}}\n]*\}}|"[^"\n]*"|![^!\n]*!|\+[^+\n]*\+|[.~uvHLMOPSTRJ])
    """,
    re.VERBOSE,
)
# A bar between two of these bar lines must be full: plain ones, and ones before an ending. All others end a section.
_INNER_LINE = re.compile(r"\|(?: ?\[?[1-9].*)?|\[[1-9].*")
_CHORD_NOTE = re.compile(rf"({_PITCH})({_LENGTH})")
# In the body, letters that are notes do not begin a field: "A:|" is the end of a repeat.
_BODY_FIELD = re.compile(r"[H-WYh-wy]:")
_TUPLET_TIME = {2: 3, 3: 2, 4: 3, 6: 2, 8: 3}


class AbcError(ValueError):
    """A text that is not a valid tune; the message gives the reason."""


class Metre(NamedTuple):
    beats: int
    unit: int

    @property
    def time(self) -> Fraction:
        return Fraction(self.beats, self.unit)

    @property
    def is_compound(self) -> bool:
        return self.beats % 3 == 0 and (self.beats > 3 or self.unit > 4)


@dataclass
class Event:
    """A note, chord or rest: its written length and its sounding length, in whole notes."""

    pitch: str
    written: Fraction
    time: Fraction
    before: str = ""  # a tuplet mark
    after: str = ""  # a tie or a broken-rhythm mark


@dataclass
class Bar:
    """
    The events between two bar lines. The lines are spelled as in the text; "" is the beginning or end of the body.
    """

    left: str
    right: str = ""
    events: list[Event] = field(default_factory=list)

    @property
    def time(self) -> Fraction:
        return sum((event.time for event in self.events), Fraction(0))

    @property
    def is_inner(self) -> bool:
        """Sections may begin with an upbeat and end early; every other bar must be full."""
        return bool(_INNER_LINE.fullmatch(self.left) and _INNER_LINE.fullmatch(self.right))


@dataclass
class Tune:
    fields: dict[str, str]
    metre: Metre
    bars: list[Bar]


@cache
def parse_length(text: str) -> Fraction:
    """The factor of a note's suffix: "" is 1, "3/2" is 3/2, "/" is 1/2, "//" is 1/4."""
    number, slashes, divisor = re.fullmatch(r"(\d*)(/*)(\d*)", text).groups()
    below = int(divisor) if divisor else 2 ** len(slashes)
    above = int(number) if number else 1
    if not below or not above or (divisor and len(slashes) > 1):
        raise AbcError(f"impossible length {text!r}")
    return Fraction(above, below)


def parse_metre(text: str) -> Metre:
    text = {"C": "4/4", "C|": "2/2"}.get(text, text)
    if not (match := re.fullmatch(r"([1-9]\d?)/(1|2|4|8|16)", text)):
        raise AbcError(f"not a metre: M:{text}")
    return Metre(int(match[1]), int(match[2]))


def split_header(text: str) -> tuple[dict[str, str], list[str]]:
    """The fields of the header (the first one of each letter) and the lines of music, without comments."""
    fields: dict[str, str] = {}
    body: list[str] = []
    for line in text.split("\n"):
        line = line.split("%", 1)[0].rstrip()
        if "K" not in fields:
            if re.match(r"[A-Za-z]:", line):
                fields.setdefault(line[0], line[2:].strip())
            elif line.strip():
                raise AbcError("music before the header's K field" if fields else "no header")
        elif _BODY_FIELD.match(line):
            if line[0] in "KLMVX":
                raise AbcError(f"changes {line[0]} within the tune")
        elif line:
            body.append(line)
    return fields, body


def parse_bars(lines: list[str], unit: Fraction, metre: Metre, close_full_lines: bool = False) -> list[Bar]:
    """
    The bars of a body.

    Args:
        unit: length of an unmarked note, the L field.
        close_full_lines: add the missing bar line if a line of text ends with a full bar.
    """
    # A backslash continues the line, so the newline after it is ignored.
    text = re.sub(r"\\\s*\n", " ", "\n".join(lines) + "\n").replace("\\", "")
    bars = [Bar("")]
    in_tuplet, tuplet_factor, tuplet_mark = 0, Fraction(1), ""
    broken = Fraction(1)  # factor on the length of the event after "<" or ">"
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise AbcError(f"unknown token {text[position : position + 8]!r}")
        position = match.end()
        kind, token, events = match.lastgroup, match[0], bars[-1].events
        # Named groups are nested, so `lastgroup` is not always the kind of the token.
        if match["note"] or match["chord"]:
            if match["note"]:
                pitch, written = match["pitch"].replace("x", "z"), parse_length(match["length"])
            else:
                chord = _CHORD_NOTE.findall(match["chord_notes"])
                pitch = "[" + "".join(name for name, _ in chord) + "]"
                written = parse_length(chord[0][1]) * parse_length(match["chord_length"])
            written *= unit
            time = written * broken
            if in_tuplet:
                in_tuplet -= 1
                time *= tuplet_factor
            events.append(Event(pitch, written, time, before=tuplet_mark))
            tuplet_mark, broken = "", Fraction(1)
        elif match["bar"]:
            if broken != 1:
                raise AbcError("broken rhythm across a bar line")
            bars[-1].right = token
            bars.append(Bar(token))
        elif kind == "newline":
            if close_full_lines and events and bars[-1].time == metre.time:
                bars[-1].right = "|"
                bars.append(Bar("|"))
        elif kind == "tuplet":
            numbers = [int(number) if number else 0 for number in token[1:].split(":")] + [0, 0]
            notes, in_time_of, covers = numbers[:3]
            in_time_of = in_time_of or _TUPLET_TIME.get(notes, 3 if metre.is_compound else 2)
            in_tuplet, tuplet_factor, tuplet_mark = covers or notes, Fraction(in_time_of, notes), token
        elif kind == "broken":
            if not events or broken != 1 or set(events[-1].after) & set("<>"):
                raise AbcError("broken rhythm without a note before it")
            short = Fraction(1, 2 ** len(token))
            events[-1].after += token
            events[-1].time *= 2 - short if token[0] == ">" else short
            broken = short if token[0] == ">" else 2 - short
        elif kind == "tie":
            # The note before a tie may be before the bar line.
            if events:
                events[-1].after += token
        elif kind == "field" and token[1] in "KLMVX":
            raise AbcError(f"changes {token[1]} within the tune")
    if broken != 1:
        raise AbcError("broken rhythm without a note after it")
    return [bar for bar in bars if bar.events]


def parse_tune(text: str) -> Tune:
    """
    Raises:
        AbcError: if the text is not a tune with one voice and one metre.
    """
    fields, body = split_header(text)
    for letter in "XMLK":
        if not fields.get(letter):
            raise AbcError(f"no {letter} field")
    metre = parse_metre(fields["M"])
    if not (match := re.fullmatch(r"1/(1|2|4|8|16|32)", fields["L"])):
        raise AbcError(f"no note length: L:{fields['L']}")
    bars = parse_bars(body, Fraction(1, int(match[1])), metre)
    if not bars:
        raise AbcError("no music after the header")
    return Tune(fields, metre, bars)


def check_bars(tune: Tune) -> None:
    """
    Raises:
        AbcError: if the tune is too short or its bars do not fit the metre.
    """
    notes = sum(event.pitch != "z" for bar in tune.bars for event in bar.events)
    if notes < MIN_NOTES:
        raise AbcError(f"{notes} notes, fewer than {MIN_NOTES}")
    full = sum(bar.time == tune.metre.time for bar in tune.bars)
    if full < MIN_BARS:
        raise AbcError(f"{full} full bars, fewer than {MIN_BARS}")
    inner = [bar for bar in tune.bars if bar.is_inner]
    exact = sum(bar.time == tune.metre.time for bar in inner)
    if exact < MIN_EXACT_SHARE * len(inner):
        raise AbcError(f"only {exact} of {len(inner)} inner bars have the length of the metre")
    if any(bar.time > tune.metre.time for bar in tune.bars if not bar.is_inner):
        raise AbcError("a section begins or ends with a bar longer than the metre")


def check_with_music21(text: str, tune: Tune) -> None:
    """
    Raises:
        AbcError: if music21 rejects the text, or counts another length.
    """
    from music21 import converter

    try:
        score = converter.parse(text, format="abc")
        heard = [note for note in score.recurse().notesAndRests if not note.duration.isGrace]
        length = sum((Fraction(note.quarterLength) for note in heard), Fraction(0)) / 4
    except Exception as error:  # the parser's exceptions have no common base
        raise AbcError(f"music21: {error!r}") from error
    # The parser may write one note as two tied ones, so lengths are compared, not counts.
    if length != sum(bar.time for bar in tune.bars):
        raise AbcError("music21 hears another length than is written")


def find_fault(text: str, music21: bool = True) -> str | None:
    """
    The reason why a text is not a valid tune; None if it is valid.

    Args:
        music21: whether to run music21's parser too, which takes about ten milliseconds per tune.
    """
    try:
        tune = parse_tune(text)
        check_bars(tune)
        if music21:
            check_with_music21(text, tune)
    except AbcError as error:
        return str(error)
    return None


def is_valid_tune(text: str) -> bool:
    return find_fault(text) is None


def main() -> None:
    parser = argparse.ArgumentParser(description="Check whether each file contains a valid tune in ABC notation.")
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        print(f"{path}: {find_fault(path.read_text(encoding='utf-8')) or 'valid'}")


if __name__ == "__main__":
    main()
