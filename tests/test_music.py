"""Tunes in ABC notation as MIDI and as a score: what is heard and drawn is what is written."""

import sys
import time
import xml.etree.ElementTree as ET
from fractions import Fraction
from itertools import pairwise

import pytest
from music21 import midi, pitch

import subquad_cli as cli
from subquad.tools import music
from subquad_cli import generate


SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"


def tune(body, metre="4/4", key="C"):
    return f"X:1\nT:Tune\nM:{metre}\nL:1/8\nK:{key}\n{body}\n"


def heard(data):
    """Onset and length in quarter notes and the MIDI number of each note of a file."""
    file = midi.MidiFile()
    file.readstr(data)
    notes = []
    for track in file.tracks:
        time, sounding = 0, {}
        for event in track.events:
            if event.isDeltaTime():
                time += event.time
            elif event.isNoteOn() and event.velocity:
                assert event.pitch not in sounding
                sounding[event.pitch] = time
            elif event.isNoteOff() or event.isNoteOn():
                start = sounding.pop(event.pitch)
                notes.append((start, time - start, event.pitch))
        assert not sounding
    ticks = file.ticksPerQuarterNote
    return sorted((Fraction(start, ticks), Fraction(length, ticks), number) for start, length, number in notes)


def expected(text):
    """The same of `D5:3/4 r:1 C4+E4:1/2`: pitches, or a rest, and their length in quarter notes."""
    time, notes = Fraction(0), []
    for part in text.split():
        names, _, length = part.partition(":")
        if names != "r":
            notes += [(time, Fraction(length), pitch.Pitch(name).midi) for name in names.split("+")]
        time += Fraction(length)
    return sorted(notes)


def drawn(text):
    """The picture of a tune, checked to depend on nothing outside of it."""
    svg = music.to_svg(music.read_tune(text))
    root = ET.fromstring(svg)
    assert "Music21" not in svg  # music21's default title
    assert all(element.get(HREF, "#").startswith("#") for element in root.iter())
    assert not any(word in svg for word in ("url(", "@import", "@font-face", "<image", 'href="http'))
    return root


def count(root, name):
    """How many signs of a kind are drawn: an accidental that the key implies is an empty group."""
    return sum(len(element) > 0 and name in element.get("class", "").split() for element in root.iter(f"{SVG}g"))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "notes"),
    [
        # lengths, octaves, chords and rests
        (tune("C,D/E3/2 z2c'|[CEG]4 [c/g/]a3/2 B2|"),
         "C3:1/2 D4:1/4 E4:3/4 r:1 C6:1/2 C4+E4+G4:2 C5+G5:1/4 A5:3/4 B4:1"),
        # broken rhythm; a tie there, as slurs are often written, ends neither it nor a note
        (tune("A>B c<d e>>f g2|A2>B2 A>-B c2|"),
         "A4:3/4 B4:1/4 C5:1/4 D5:3/4 E5:7/8 F5:1/8 G5:1 A4:3/2 B4:1/2 A4:3/4 B4:1/4 C5:1"),
        # tuplets, whose time depends on the metre
        (tune("(3ABc (3d2e2f2 (5ABcde|"),
         "A4:1/3 B4:1/3 C5:1/3 D5:2/3 E5:2/3 F5:2/3 A4:1/5 B4:1/5 C5:1/5 D5:1/5 E5:1/5"),
        (tune("(5ABcde f2g|a6|", metre="6/8"), "A4:3/10 B4:3/10 C5:3/10 D5:3/10 E5:3/10 F5:1 G5:1/2 A5:3"),
        # ties, also over a bar line; none between different pitches
        (tune("A2-A2 B2 c2-|c4 d2-e2|"), "A4:2 B4:1 C5:3 D5:1 E5:1"),
        (tune("|:A4|B4-:|B4|c4|"), "A4:2 B4:2 A4:2 B4:4 C5:2"),
        (tune("|:B4|1A4-:|2A4|c4|"), "B4:2 A4:2 B4:2 A4:2 C5:2"),
        # chord symbols and grace notes are not heard
        (tune('"Am"A2-"D7"A2 {g}B4|"G"{ab}c8|"a note"A2|'), "A4:2 B4:2 C5:4 A4:1"),
        # accidentals to the end of the bar
        (tune("^F=F_BB|F^c=cc|"), "F#4:1/2 F4:1/2 B-4:1/2 B-4:1/2 F4:1/2 C#5:1/2 C5:1/2 C5:1/2"),
        (tune("FBc=f|Ff^GG|", key="D"), "F#4:1/2 B4:1/2 C#5:1/2 F5:1/2 F#4:1/2 F#5:1/2 G#4:1/2 G#4:1/2"),
        # without an L field, an unmarked length depends on the metre
        ("X:1\nM:2/4\nK:C\nABcd|A4|\n", "A4:1/4 B4:1/4 C5:1/4 D5:1/4 A4:1"),
        # what surrounds the tune is not part of it
        ("A tune:\n\nX:7\nL:1/4\nM:C\nK:C\nAB|c2|\n\nThat was X:7.\nX:8\nK:C\nG|G|", "A4:1 B4:1 C5:2"),
        # cut off within the first bar
        (tune("A>B c"), "A4:3/4 B4:1/4 C5:1/2"),
    ],
)  # fmt: skip
def test_what_is_written_is_heard(text, notes):
    assert heard(music.to_midi(music.read_tune(text))) == expected(notes)


@pytest.mark.parametrize(
    ("key", "altered"),
    [("C", ""), ("Am", ""), ("G", "F#"), ("Edor", "F# C#"), ("Dmix", "F#"), ("Ador", "F#"), ("A", "F# C# G#"),
     ("Bphr", "F#"), ("Flyd", ""), ("Gm", "B- E-"), ("Bb", "B- E-"), ("F#m", "F# C# G#"), ("Ddor", "")],
)  # fmt: skip
def test_keys_and_modes(key, altered):
    names = {name[0]: name for name in altered.split()}
    scale = " ".join(f"{names.get(letter, letter)}4:1/2" for letter in "CDEFGAB")
    text = tune("CDEFGABz|z8|", key=key)
    assert heard(music.to_midi(music.read_tune(text))) == expected(scale)
    root = drawn(text)
    assert (count(root, "keyAccid"), count(root, "accid")) == (len(names), 0)


@pytest.mark.parametrize(
    ("body", "played"),
    [
        ("|:AB|cd:|ef|", "ABcd ABcd ef"),
        ("AB|cd:|ef|ga:|", "ABcd ABcd efga efga"),
        ("AB|cd||ef|ga:|", "ABcd efga efga"),
        ("|:AB||cd|ef:|ga|", "ABcdef ABcdef ga"),
        ("AB|:c|d::ef|ga:|", "AB cd cd efga efga"),
        ("|:AB|1cd:|2ef|ga||bc|", "AB cd AB efga bc"),
        ("|:AB|[1 cd|ef|fg:|[2 ga:|bc|", "AB cdeffg AB ga bc"),
        ("|:AB|1cd:|2ef|ga|:bc|de:|", "AB cd AB efga bcde bcde"),
        ("A|:Bc|1de:|2fg:|:ab|1AB:|2cd|]", "A Bc de Bc fg ab AB ab cd"),
        ("A|Bcde|fg:|B|cdef|g2:|", "ABcdefg ABcdefg Bcdefg Bcdefg"),
        ("AB|1cd:|ef||ga:|", "ABcd ABef ga ga"),  # a second ending that is not marked
        ("|:AB|cd|", "ABcd"),
        ("AB|2cd|", "ABcd"),
    ],
)
def test_repeats_and_endings_are_played(body, played):
    notes = heard(music.to_midi(music.read_tune(tune(body))))
    written = [
        pitch.Pitch(letter.upper() + ("5" if letter.islower() else "4")).midi for letter in body if letter.isalpha()
    ]
    by_letter = dict(zip(filter(str.isalpha, body), written, strict=True))
    assert [number for *_, number in notes] == [by_letter[letter] for letter in played if letter != " "]
    assert all(start + length == following for (start, length, _), (following, *_) in pairwise(notes))


@pytest.mark.fast
@pytest.mark.parametrize(
    "text",
    ["", "Once upon a time", "X:1\nABc|def|", "K:C\nABc|def|", "X:1\nK:C\n", tune("z8|z8|"), tune("[ABc d|e|"),
     "X:1\nM:fast\nK:C\nABc|def|", "X:1\n\nK:C\nABc|def|"],
)  # fmt: skip
def test_what_is_no_tune(text, tmp_path):
    with pytest.raises(ValueError, match=r"tune"):
        music.write(text, tmp_path / "tune.mid", tmp_path / "tune.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ("L:1/8\nQ:0\nK:C\nCDEF|", r"the tempo \(Q:\) of the tune is 0"),
        ("L:1/8\nQ:1/4=0\nK:C\nCDEF|", r"the tempo \(Q:\) of the tune is 0"),
        ("L:1/8\nQ:1/4=9999999\nK:C\nCDEF|", r"the tempo \(Q:\) must be from 1 to 1000"),
        ("L:1/8\nM:4/4\nK:C\nC1000000000 D|", "the tune is too long"),
        ("L:1/8\nM:1/100000\nK:C\nC100D100", "the tune is too long"),
        ("L:100000/1\nK:C\nCDEF|", "the tune is too long"),
        ("L:1/8\nK:C\n" + "CDEF GABc|" * 2000, "the tune has .* characters; at most"),
        ("L:1/8\nK:C\n[" + "C" * 3000 + "]4|", "has a chord or grace notes of more than"),
    ],
)
def test_tunes_without_end(tune, message):
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        music.read_tune(f"X:1\nT:a\n{tune}\n")
    assert time.process_time() - start < 1


def test_a_tune_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="is not a tune in ABC notation: "):
        music.write("X:1\nL:1/8\nK:C\nC/1000000000 D|\n", score=tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())


def test_no_file_appears_before_all_are_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(music, "to_svg", lambda score: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        music.write(tune("ABcd|efga|"), tmp_path / "tune.mid", tmp_path / "tune.svg")
    assert not list(tmp_path.iterdir())


# --- the command ---


def test_generate_writes_the_tune_that_it_prints(tmp_path, capsys):
    files = tmp_path / "x.mid", tmp_path / "x.svg"
    files[0].write_bytes(b"old")
    assert cli.main(["generate", "--seed", "2", "--midi", str(files[0]), "--score", str(files[1]), "--force"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(generate.ABC_HEADER)
    assert captured.err.endswith(f"Wrote {files[0]} and {files[1]}.\n")
    assert sorted(tmp_path.iterdir()) == sorted(files)
    score = music.read_tune(captured.out)
    assert heard(files[0].read_bytes()) == heard(music.to_midi(score))
    written = sum(len(note.pitches) for note in score.recurse().notes)
    assert count(ET.fromstring(files[1].read_bytes()), "note") >= written > 16


def test_generate_prints_what_is_no_tune(tmp_path, capsys):
    path = tmp_path / "x.mid"
    assert cli.main(["generate", "no tune", "--greedy", "--max-new-tokens", "3", "--midi", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("no tune")
    assert captured.err.splitlines()[-1] == (
        "subquad generate: error: the text is not a tune in ABC notation: it does not have the fields X: and K:."
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--midi", "x.wav"], 2, "x.wav must end in .mid or .midi."),
        (["--score", "x.png"], 2, "x.png must end in .svg."),
        (["--score", "nowhere/x.svg"], 2, "nowhere is not a directory."),
        (["--midi", "there.mid"], 2, "there.mid exists already; --force replaces it."),
        (["--score", "folder.svg", "--force"], 2, "folder.svg is a directory."),
        (["--midi", "x.mid", "--model", "without verovio"], 1, '`pip install "subquad[music]"`'),
    ],
)
def test_generate_refuses_files_before_any_work(arguments, code, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.mid").touch()
    (tmp_path / "folder.svg").mkdir()
    monkeypatch.setattr(generate, "find_model", lambda name: pytest.fail("looked for the model"))
    if "without verovio" in arguments:
        monkeypatch.setitem(sys.modules, "verovio", None)
    assert cli.main(["generate", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert (tmp_path / "there.mid").read_bytes() == b""
