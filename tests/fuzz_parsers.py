"""
Coverage-guided fuzzing of our own parsers, with atheris: every input is read, or refused with a ValueError that names
the file. An input that fails is written to the working directory, and the exit code is not 0.

    python tests/fuzz_parsers.py PARSER SECONDS    where PARSER is vocabulary or gguf
"""

import struct
import sys
import tempfile
from pathlib import Path


try:
    import atheris
except ImportError:
    sys.exit(0)  # `make fuzz` says so


def read_vocabulary(path: Path) -> None:
    vocabulary.read_vocabulary(path)


def read_gguf(path: Path) -> None:
    tensors, _, tokenizer = gguf_files.open_gguf(path)
    for name, (_, _, read) in tensors.items():
        read(name)
    tokenizer()


def strings(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


# Small files to begin with.
VOCABULARY = b"".join(b"%d b'\\x%02x' 1\n" % (byte + 1, byte) for byte in range(256)) + "257 'é' 2\n".encode()
TOKENS = strings(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + strings(b"", b"a", rb"\x00")
KINDS = strings(b"tokenizer.ggml.token_type") + struct.pack("<IIQiii", 9, 5, 3, 3, 1, 1)
MODEL = strings(b"tokenizer.ggml.model") + struct.pack("<I", 8) + strings(b"rwkv")
TENSOR = strings(b"x") + struct.pack("<IQIQ", 1, 4, 0, 0)
GGUF = b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + TOKENS + KINDS + MODEL + TENSOR
PARSERS = {
    "vocabulary": (read_vocabulary, VOCABULARY),
    "gguf": (read_gguf, GGUF + bytes(-len(GGUF) % 32) + bytes(16)),
}


if __name__ == "__main__":
    name, seconds = sys.argv[1:3]
    with atheris.instrument_imports(include=["subquad_tokenizers", "subquad_conversion", "gguf"]):
        from subquad_conversion import gguf_files
        from subquad_tokenizers import vocabulary
    parser, sound = PARSERS[name]
    with tempfile.TemporaryDirectory() as folder:
        path, corpus = Path(folder, "file"), Path(folder, "corpus")
        corpus.mkdir()
        (corpus / "sound").write_bytes(sound)
        path.write_bytes(sound)
        parser(path)

        def read(data: bytes) -> None:
            path.write_bytes(data)
            try:
                parser(path)
            except ValueError as error:
                assert path.name in str(error)

        options = [f"-max_total_time={seconds}", "-rss_limit_mb=2048", "-timeout=10", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], read)
        atheris.Fuzz()
