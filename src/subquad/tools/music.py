"""
Converts tunes in ABC notation, which the embedded models write, to MIDI and to a picture of the score.

music21 reads the notation and writes MIDI, verovio draws the score; `pip install "subquad[music]"` installs both.
"""

import copy
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

from ..hub.new_files import replacing


MIDI_SUFFIXES = (".mid", ".midi")
SCORE_SUFFIXES = (".svg",)

# A tune ends at an empty line or at the end of the text.
_TUNE = re.compile(r"^X:.*?(?=\n[ \t\r]*\n|\Z)", re.MULTILINE | re.DOTALL)
_KEY = re.compile(r"^K:", re.MULTILINE)
# Limits of a tune that is read: one line of text can be a very long tune that takes music21 hours.
_CHARACTERS, _QUARTERS, _BARS, _TOGETHER = 6000, 5000, 1000, 100
_TEMPOS = (1, 1000)  # quarter notes a minute
_NO_TEMPO = re.compile(r"Q:(?:[^\n\]]*=)?[ \t]*0+(?:\.0*)?[ \t]*(?=$|\])", re.MULTILINE)
_TOGETHER_NOTES = re.compile(r"\[[^\]\n]*|\{[^}\n]*")  # a chord, or grace notes
_TIE_AT_BROKEN_RHYTHM = re.compile(r"-(?=[<>])|(?<=[<>])-")


def require_music() -> None:
    """
    Raises:
        ImportError: if music21 or verovio is not installed; the message names the command.
    """
    try:
        import music21  # noqa: F401
        import verovio  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f'MIDI and scores need music21 and verovio, `pip install "subquad[music]"` ({error})'
        ) from error


def check_files(
    midi: str | os.PathLike | None = None, score: str | os.PathLike | None = None, force: bool = False
) -> None:
    """
    Raises:
        ValueError: if [`write`] could not write these files, or a file exists and `force` is false.
    """
    for path, suffixes in ((midi, MIDI_SUFFIXES), (score, SCORE_SUFFIXES)):
        if path is None:
            continue
        path = Path(path)
        if path.suffix.lower() not in suffixes:
            raise ValueError(f"{path} must end in {' or '.join(suffixes)}.")
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent} is not a directory.")
        if path.is_dir():
            raise ValueError(f"{path} is a directory.")
        if not force and path.exists():
            raise ValueError(f"{path} exists already; `force=True` replaces it.")


def write(
    text: str, midi: str | os.PathLike | None = None, score: str | os.PathLike | None = None, force: bool = False
) -> None:
    """
    Writes the first tune of a text to files, which appear only when all are complete.

    Args:
        text: see [`read_tune`].
        midi: `.mid` file, see [`to_midi`].
        score: `.svg` file, see [`to_svg`].
        force: whether to replace files.

    Raises:
        ImportError: if music21 or verovio is not installed.
        ValueError: if the text does not contain a tune, a file cannot be written, or it exists and `force` is false.
    """
    require_music()
    check_files(midi, score, force)
    tune = read_tune(text)
    contents = {}
    if midi is not None:
        contents[Path(midi)] = to_midi(tune)
    if score is not None:
        contents[Path(score)] = to_svg(tune).encode()
    for path, content in contents.items():
        with replacing(path) as file:
            file.write_bytes(content)


def read_tune(text: str):
    """
    The first tune of a text as a `music21.stream.Score`. Bars are as long as written, even if that contradicts the
    metre. Only the first metre is shown: if the metre changes within the tune, the bars change without a sign.

    Args:
        text: ABC notation, version 2.1. A tune goes from a line that begins with `X:` to an empty line and has a `K:`
            field.

    Raises:
        ValueError: if there is no such tune in the text, music21 cannot read it, or it has no end.
    """
    from music21 import abcFormat

    match = _TUNE.search(text)
    if match is None or not _KEY.search(match[0]):
        raise ValueError("the text is not a tune in ABC notation: it does not have the fields X: and K:.")
    if len(match[0]) > _CHARACTERS:
        raise ValueError(f"the tune has {len(match[0])} characters; at most {_CHARACTERS} are read.")
    if any(len(notes) > _TOGETHER for notes in _TOGETHER_NOTES.findall(match[0])):
        raise ValueError(f"the tune has a chord or grace notes of more than {_TOGETHER} characters.")
    if _NO_TEMPO.search(match[0]):
        raise ValueError("the tempo (Q:) of the tune is 0.")
    # music21 misreads a tie next to the `<` or `>` of a broken rhythm. Most of these ties are really slurs.
    tune = _TIE_AT_BROKEN_RHYTHM.sub("", match[0])
    with _understood():
        # Without a version, music21 reads a tune by the standard of 1999, where an accidental does not last until
        # the end of the bar.
        handler = abcFormat.ABCFile().readstr(f"%abc-2.1\n{tune}\n")
        # music21 cuts bars that are longer than the metre in two, unless the metre is unknown.
        metres = [token for token in handler.tokens if isinstance(token, abcFormat.ABCMetadata) and token.isMeter()]
        handler.tokens = [token for token in handler.tokens if not any(token is metre for metre in metres)]
        score = abcFormat.translate.abcToStreamScore(handler)
    _check_extent(score, metres)
    with _understood():
        for part in score.parts:
            metre = metres[0].getTimeSignatureObject() if metres else None
            if metre is not None:
                (part.getElementsByClass("Measure").first() or part).insert(0, metre)
            if not part.hasMeasures():
                part.makeMeasures(inPlace=True)
            _mark_endings(part)
            _mend_ties(part)
    if not score.recurse().notes:
        raise ValueError("the tune has no notes.")
    return score


@contextmanager
def _understood() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # music21's exceptions have no common base
        raise ValueError(f"the text is not a tune in ABC notation: {type(error).__name__}: {error}") from error


def _check_extent(score, metres: list) -> None:
    """
    Raises:
        ValueError: if a tune is too long to be written, or has no tempo.
    """
    length = max((part.duration.quarterLength for part in score.parts), default=0)
    bars = [metre.getTimeSignatureObject() for metre in metres]
    shortest = min((bar.barDuration.quarterLength for bar in bars if bar is not None), default=1)
    if length > _QUARTERS or length > _BARS * shortest:
        raise ValueError(f"the tune is too long: {float(length):g} quarter notes.")
    for mark in score.recurse().getElementsByClass("MetronomeMark"):
        if not _TEMPOS[0] <= (mark.getQuarterBPM() or 0) <= _TEMPOS[1]:
            raise ValueError(f"the tempo (Q:) must be from {_TEMPOS[0]} to {_TEMPOS[1]} quarter notes a minute.")


def to_midi(score) -> bytes:
    """
    A tune as a standard MIDI file: as it is played, with repeats and both endings, without grace notes and chord
    symbols. It has 120 quarter notes a minute unless a `Q:` field gives another tempo.

    Args:
        score: what [`read_tune`] returns.
    """
    from music21 import stream
    from music21.midi.translate import music21ObjectToMidiFile

    played = stream.Score()
    for part in score.parts:
        sequence = stream.Part()
        for measure in _play_order(part):
            measure = copy.deepcopy(measure)
            measure.leftBarline = measure.rightBarline = None
            # Grace notes and chord symbols have a length of zero; they would start to sound and never end.
            measure.remove([note for note in measure.notes if not note.quarterLength])
            sequence.append(measure)
        _mend_ties(sequence)
        played.insert(0, sequence)
    with _understood():
        return music21ObjectToMidiFile(played).writestr()


def to_svg(score) -> str:
    """
    A tune as an SVG picture: one page, as it is written, with all musical signs drawn as paths.

    Args:
        score: what [`read_tune`] returns.
    """
    import verovio
    from music21.musicxml.m21ToXml import ScoreExporter

    score.metadata.title = score.metadata.title or ""  # without a title music21 writes one of its own
    # This exporter keeps the bars; the usual one fills them up to the metre, or moves notes to the next bar.
    exporter = ScoreExporter(score)
    with _understood():
        exporter.parse()
    toolkit = verovio.toolkit()
    toolkit.setOptions(
        {
            "pageHeight": 60000,
            "adjustPageHeight": True,
            "footer": "none",
            "svgCss": "g.mNum {display: none}",  # no numbers of bars: upbeats would be counted too
            "svgFormatRaw": True,  # with white space some viewers do not show the title
            "svgViewBox": True,
        }
    )
    toolkit.loadData(exporter.asBytes().decode())
    return toolkit.renderToSVG(1)


def _mark_endings(part) -> None:
    """Extends endings to the next bar line that is not a plain one; music21 only stores where they begin or end."""
    from music21 import spanner

    found = list(part.getElementsByClass("RepeatBracket"))
    numbers = {id(bracket.getFirst()): bracket.number for bracket in found}
    part.remove(found)
    bracket = None
    for measure in part.getElementsByClass("Measure"):
        if measure.leftBarline is not None:
            bracket = None
        if id(measure) in numbers:
            bracket = spanner.RepeatBracket(number=numbers[id(measure)])
            part.insert(0, bracket)
        if bracket is not None:
            bracket.addSpannedElements(measure)
            if measure.rightBarline is not None:
                bracket = None


def _mend_ties(part) -> None:
    """Removes ties between notes of different pitch: many tunes use ties where they mean slurs."""
    from music21 import tie

    notes = [note for note in part.recurse().notesAndRests if note.quarterLength]  # neither graces nor chord symbols
    tied = False
    for note, following in zip_longest(notes, notes[1:]):
        holds = note.tie is not None and note.tie.type != "stop" and following is not None
        holds = holds and [pitch.ps for pitch in note.pitches] == [pitch.ps for pitch in following.pitches]
        note.tie = tie.Tie("continue" if tied else "start") if holds else tie.Tie("stop") if tied else None
        tied = holds


def _play_order(part) -> list:
    """
    The bars in the order in which they are played, as in section 4.8 of the ABC standard: without a `|:` before it,
    `:|` goes back to the latest double bar or end of a repeat, or to the beginning.
    """
    measures = list(part.getElementsByClass("Measure"))
    brackets = part.getElementsByClass("RepeatBracket")
    endings = {id(measure): int(bracket.number) for bracket in brackets for measure in bracket.getSpannedElements()}
    endings = [endings.get(id(measure)) for measure in measures] + [None]

    order = []
    start = index = 0
    opened = again = False  # whether the section began with `|:`, and is played for the second time
    while index < len(measures):
        measure, ending = measures[index], endings[index]
        if getattr(measure.leftBarline, "direction", None) == "start":
            again = again and start == index
            start, opened = index, True
        if not (again and ending == 1):
            order.append(measure)
        index += 1
        right = measure.rightBarline
        if getattr(right, "direction", None) == "end":
            if not again:
                index, again = start, True
            elif endings[index] != 2:
                start, opened, again = index, False, False
        elif right is not None and (not opened or ending == 2):
            start, opened, again = index, False, False
    return order
