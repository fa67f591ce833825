import filecmp
from pathlib import Path

import pytest

from subquad_tokenizers import WORLD_VOCAB_FILE, read_vocabulary, write_vocabulary
from subquad_tokenizers.vocabulary import bytes_to_token, token_to_bytes


LINES = [f"{byte + 1} {bytes([byte])!r} 1" for byte in range(256)]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_packaged_table_is_the_published_one(reference, reference_file):
    assert filecmp.cmp(WORLD_VOCAB_FILE, reference_file, shallow=False)
    assert dict(enumerate(read_vocabulary(WORLD_VOCAB_FILE), 1)) == reference.idx2token


def test_write_then_read(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += ["é".encode(), b"\xc3\x28", b"' \"\\\n", b"  ", "\u2028\x85x".encode(), "🎉".encode()]
    write_vocabulary(tokens, tmp_path / "vocabulary.txt")
    assert read_vocabulary(tmp_path / "vocabulary.txt") == tokens


def test_lines_may_come_in_any_order_and_end_in_crlf(tmp_path):
    path = tmp_path / "vocabulary.txt"
    path.write_bytes("".join(line + "\r\n" for line in reversed(LINES)).encode())
    assert read_vocabulary(path) == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(
    "line, message",
    [
        ("257 'ab' 3", "'ab' has 2 bytes, but the line says 3"),
        ("257 'é' 1", "'é' has 2 bytes, but the line says 1"),
        ("257 'ab", "expected `id literal length`"),
        ("", "expected `id literal length`"),
        ("x 'ab' 2", "expected `id literal length`"),
        ("-257 'ab' 2", "expected `id literal length`"),
        ("257 'ab 2", "is not the literal of a token"),
        ("257 ab 2", "is not the literal of a token"),
        ("257 {{}} 2", "is not the literal of a token"),
        (f"257 [{'0,' * 2**13}] 2", "the literal has 16,386 characters, and may have 16,384"),
        (f"257 'ab' {'2' * 5000}", "expected `id literal length`"),
        (f"{'2' * 5000} 'ab' 2", "expected `id literal length`"),
        ("257 __import__('os').getcwd() 2", "is not the literal of a token"),
        ("257 '\\ud800' 3", "is not the literal of a token"),
        ("257 12 2", "12 is a int, expected str or bytes"),
        ("257 '' 0", "the token is empty"),
        ("256 'ab' 2", "id 256 occurs twice"),
        ("257 'A' 1", "token b'A' occurs twice, first on line 66"),
    ],
)
def test_malformed_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "vocabulary.txt", [*LINES, line, "258 'cd' 2"])
    with pytest.raises(ValueError) as error:
        read_vocabulary(path)
    assert f"{path}, line 257: " in str(error.value)
    assert message in str(error.value)


def test_ids_count_up_from_one(tmp_path):
    for lines, missing in (([*LINES, "258 'ab' 2"], 257), (["0 'ab' 2", *LINES[1:]], 1)):
        with pytest.raises(ValueError, match=f"none with id {missing}"):
            read_vocabulary(write(tmp_path / "vocabulary.txt", lines))


def test_every_byte_is_needed(tmp_path):
    path = write(tmp_path / "vocabulary.txt", [*LINES[:254], "255 'ab' 2", LINES[255]])
    with pytest.raises(ValueError, match=r"vocabulary.txt: no token for the single bytes \[254\]"):
        read_vocabulary(path)


def test_byte_alphabet():
    from tokenizers.pre_tokenizers import ByteLevel

    everything = bytes(range(256))
    token = bytes_to_token(everything)
    assert set(token) == set(ByteLevel.alphabet()) and len(token) == 256
    assert bytes_to_token(b" \n!\xff") == "ĠĊ!ÿ"
    assert token_to_bytes(token) == everything
    assert token_to_bytes("中") == "中".encode()
