import copy
import itertools
import pickle
import random
import re
import shutil
import subprocess
import sys

import pytest
from transformers.utils import logging

from subquad_native.compiling import FLAGS, CompiledLibrary
from subquad_tokenizers import WORLD_VOCAB_FILE, GreedyEncoder, greedy, read_vocabulary


COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
needs_library = pytest.mark.skipif(not COMPILER, reason="there is no C compiler")
TOKENS = read_vocabulary(WORLD_VOCAB_FILE)
BYTES = [bytes([byte]) for byte in range(256)]


def make(tokens, how):
    """An encoder in C, or in Python, which is how all others are where there is no compiler."""
    encoder = GreedyEncoder(tokens)
    if how == "Python":
        encoder.functions = None
    else:
        assert encoder.functions, greedy._COMPILED.explain()
    return encoder


@pytest.fixture(scope="module", params=[pytest.param("C", marks=needs_library), "Python"])
def how(request):
    return request.param


@pytest.fixture(scope="module")
def encoder(how):
    return make(TOKENS, how)


def test_equals_the_reference(encoder, reference, text):
    data = text.encode()
    expected = reference.encodeBytes(data)
    assert encoder.encode(data) == expected
    if encoder.functions:
        assert encoder.functions.encode_text(text) == expected


def test_random_bytes(encoder, reference):
    rng = random.Random(2)
    for length in [*range(1, 40), 1000, 2047, 2048, 2049, 100_000]:
        data = rng.randbytes(length)
        assert encoder.encode(data) == reference.encodeBytes(data)


def test_random_tokens_in_a_row(encoder, reference):
    """Text as hard as it gets: ends of tokens, where the longest match is seldom the one that was put there."""
    rng = random.Random(3)
    data = b"".join(rng.choices(TOKENS, k=30_000))
    assert encoder.encode(data) == reference.encodeBytes(data)
    data = b"".join(token[: rng.randrange(1, len(token) + 1)] for token in rng.choices(TOKENS, k=30_000))
    assert encoder.encode(data) == reference.encodeBytes(data)


def test_any_vocabulary(how):
    """Also where what is left of a token has to be cut several times."""
    rng = random.Random(4)
    letters = b"ab (\n\xe4\xb8"
    for longest in (3, 6, 30):
        for _ in range(15):
            words = {
                bytes(rng.choices(letters[: rng.randrange(1, 8)], k=rng.randrange(2, longest))) for _ in range(40)
            }
            tokens = rng.sample([*BYTES, *words], 256 + len(words))
            encoder = make(tokens, how)
            longest_first = re.compile(b"|".join(map(re.escape, sorted(tokens, key=len, reverse=True))), re.DOTALL)
            data = bytes(rng.choices(letters, k=1000)) + b"".join(word[:-1] for word in words)
            assert encoder.encode(data) == [tokens.index(token) + 1 for token in longest_first.findall(data)]


@needs_library
def test_offsets(text):
    functions = GreedyEncoder(TOKENS).functions
    starts = [0]  # of characters, in bytes
    for char in text:
        starts.append(starts[-1] + len(char.encode()))
    character = [index for index, char in enumerate(text) for _ in char.encode()]
    ids, offsets = functions.encode_with_offsets(text)
    assert ids == functions.encode_text(text)
    expected, place = [], 0
    for index in ids:
        stop = place + len(TOKENS[index - 1])
        expected.append((character[place], character[stop - 1] + 1))
        place = stop
    assert offsets == expected and place == starts[-1]


@needs_library
def test_arguments_of_other_types():
    encode_bytes, *of_texts = GreedyEncoder(TOKENS).functions
    for call, wrong in ((encode_bytes, "a"), (encode_bytes, None), *itertools.product(of_texts, (b"a", 3))):
        with pytest.raises(TypeError):
            call(wrong)
    for encode in of_texts:
        with pytest.raises(UnicodeEncodeError):
            encode("\ud800")
    before = sys.getrefcount(encode_bytes(b" the")[0])
    for _ in range(100):
        encode_bytes(b" the")
    after = sys.getrefcount(encode_bytes(b" the")[0])
    assert before == after


@pytest.mark.parametrize("tokens", [[*BYTES, b"ab", b""], [*BYTES, b"ab", b"ab"], BYTES[1:], []])
def test_what_is_no_vocabulary(tokens, how):
    with pytest.raises(ValueError, match="token"):
        make(tokens, how).encode(b"ab")


# Texts in which a search that begins anew after each token reads most bytes many times.
HARD = [b"a" * 63, b" " * 127, b"=" * 40 + b"-", b"ab" * 30]
HARD_TOKENS = [
    *BYTES,
    *(b"a" * n for n in range(2, 8)),
    b"a" * 64,
    b" " * 128,
    b"=" * 41,
    b"ab" * 31 + b"a",
    b"ab" * 9,
]


@needs_library
@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("gcov")), reason="counts with gcov")
def test_time_is_linear_in_c(tmp_path):
    """Counted by the compiler: how often the lines of the search run for each byte."""
    source, library = greedy._COMPILED.sources[0], tmp_path / "greedy.so"
    subprocess.run(["gcc", *FLAGS, "-O0", "--coverage", source, "-o", library], check=True, cwd=tmp_path)
    code = f"""
import ctypes, sys
make = ctypes.PyDLL({str(library)!r}).subquad_greedy
make.argtypes, make.restype = [ctypes.py_object], ctypes.py_object
make({HARD_TOKENS!r})[0](({HARD!r})[int(sys.argv[1])] * int(sys.argv[2]))
"""

    def lines_run(text, times):
        for counts in tmp_path.glob("*.gcda"):
            counts.unlink()
        subprocess.run([sys.executable, "-c", code, str(text), str(times)], check=True, cwd=tmp_path)
        options = ["--stdout", "--object-directory", tmp_path]
        [notes] = tmp_path.glob("*.gcno")
        report = subprocess.run(["gcov", *options, notes], check=True, cwd=tmp_path, capture_output=True, text=True)
        lines = report.stdout.splitlines()
        first = next(n for n, line in enumerate(lines) if "static ssize encode(" in line)
        last = next(n for n, line in enumerate(lines) if n > first and line.rstrip().endswith(":}"))
        counts = [re.match(r" *(\d+)\*?:", line) for line in lines[first:last]]
        return sum(int(count[1]) for count in counts if count)

    for text in range(len(HARD)):
        few, many = lines_run(text, 10), lines_run(text, 40)
        size = len(HARD[text])
        assert 0 < (many - few) / (30 * size) < 20, (text, few, many)


def test_time_is_linear_in_python():
    encoder = make(HARD_TOKENS, "Python")
    encoder.encode(b"a")  # builds the trie
    code = GreedyEncoder.encode.__code__

    def lines_run(data):
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            count += event == "line"
            return trace if frame.f_code is code else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            encoder.encode(data)
        finally:
            sys.settrace(before)
        return count

    for text in HARD:
        assert 0 < lines_run(text * 40) - lines_run(text * 10) < 11 * 30 * len(text)


# Without a compiler


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a process that has not asked for the library, with an empty cache."""
    monkeypatch.setattr(greedy, "_COMPILED", CompiledLibrary("greedy", greedy._COMPILED.sources, greedy._load))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    logging.get_logger(greedy.__name__).warning_once.cache_clear()
    return tmp_path


@pytest.mark.parametrize(
    "why", ["SUBQUAD_NATIVE=0", "no C compiler", "compiler failed with 1: an error", "undefined symbol"]
)
def test_without_the_library(why, fresh, monkeypatch, caplog):
    """The same ids, and one line with the reason."""
    if why == "SUBQUAD_NATIVE=0":
        monkeypatch.setenv("SUBQUAD_NATIVE", "0")
    elif why == "no C compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        (fresh / "any.c").write_text("int subquad_greedy(void);" if why == "undefined symbol" else "")
        script = "echo an error >&2; exit 1"
        if why == "undefined symbol":  # as of a Python that lacks a function
            if not shutil.which("gcc"):
                pytest.skip("needs gcc")
            (fresh / "any.c").write_text("void no_such(void); void subquad_greedy(void) { no_such(); }")
            script = f'for to; do :; done; exec gcc -shared -fPIC {fresh}/any.c -o "$to"'
        (fresh / "compiler").write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\n{script}\n')
        (fresh / "compiler").chmod(0o700)
        monkeypatch.setenv("CC", str(fresh / "compiler"))
    with caplog.at_level(logging.WARNING):
        encoders = [GreedyEncoder([*BYTES, b"ab"]) for _ in range(2)]
    assert [encoder.encode(b"abba") for encoder in encoders] == [[257, 99, 98]] * 2
    [record] = [each for each in caplog.records if "without its C library" in each.getMessage()]
    assert why in record.getMessage() and "\n" not in record.getMessage()


@needs_library
def test_a_damaged_library_is_made_again(fresh):
    assert GreedyEncoder(BYTES).functions
    [file] = (fresh / "cache" / "subquad").iterdir()
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole[: len(whole) // 2])
    file.chmod(0o700)
    greedy._COMPILED._found = None
    assert GreedyEncoder(BYTES).encode(b"ab") == [98, 99]
    [again] = file.parent.iterdir()
    assert again.read_bytes() != whole[: len(whole) // 2]


def test_copies(encoder):
    assert copy.deepcopy(encoder) is encoder
    before = pickle.dumps(encoder)
    encoder.encode(b"a few more words")
    assert pickle.dumps(encoder) == before and len(before) < 2_000_000
    assert pickle.loads(before).encode(b"a few more words") == encoder.encode(b"a few more words")
