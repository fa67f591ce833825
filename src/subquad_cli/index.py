"""`subquad index`"""

import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from .arguments import add_dtype_and_device, positive_int
from .common import UsageError, find_model, naming_options, signals_raise, usable_device


SUMMARY = "read documents once and save their embeddings and states"
DESCRIPTION = """\
Read documents with an EmbeddingRWKV, and save their embeddings and the states after them, for `subquad rank`.

DOCS are text files (.md, .rst, .txt), directories of them, or .jsonl files whose lines have an `id` and a `text`.
Text files are split into passages at empty lines. The id of a passage is its file's path, `#` and a number.

An index that exists is brought up to date: passages that are there already are not read again, changed ones are
replaced, and those that a file or directory in DOCS no longer has are removed. So the same command goes on after an
interruption.

examples:
  subquad index docs --model ./embedding-0.1b --out docs.index
  subquad index notes.jsonl --model ./embedding-0.1b --out notes.index --state-dtype int8
"""
SUFFIXES = (".md", ".rst", ".txt")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("docs", metavar="DOCS", nargs="+", help="text files, directories of them, or .jsonl files")
    add("--model", required=True, metavar="MODEL", help="directory of an embedding model, or of a reranker with it")
    add("--out", required=True, metavar="DIR", help="directory of the index")
    add(
        "--state-dtype",
        choices=("float32", "float16", "int8"),
        help="of a new index: dtype of its states (default: float16)",
    )
    add(
        "--passage",
        type=positive_int,
        default=1500,
        metavar="N",
        help="end a passage before the paragraph that makes it longer than N characters (default: 1500)",
    )
    add("--batch-size", type=positive_int, default=8, metavar="N", help="passages to read together (default: 8)")
    add_dtype_and_device(parser)


def run(args: Namespace) -> None:
    model = find_model(args.model)
    documents = read_documents(args.docs, args.passage)
    if not documents:
        raise UsageError(f"{' '.join(args.docs)}: there is no document.")
    device = usable_device(args.device)

    from subquad.hub.info import format_bytes
    from subquad.states.state_index import INDEX, StateIndex

    with signals_raise(), naming_options("state_dtype", "batch_size"):
        if (Path(args.out) / INDEX).is_file():
            index = StateIndex.load(args.out, model, dtype=args.dtype)
            if args.state_dtype not in (None, index.state_dtype):
                raise UsageError(f"--state-dtype: {args.out} has states in {index.state_dtype}.")
        else:
            kind = args.state_dtype or "float16"
            index = StateIndex.create(args.out, model, state_dtype=kind, dtype=args.dtype)
        gone = [name for name in index.ids if name not in documents and is_of(name, args.docs)]
        read = index.to(device).add(documents, batch_size=args.batch_size, progress=sys.stderr.isatty())
        index.remove(gone)
    print(
        f"{read:,} read, {len(documents) - read:,} unchanged, {len(gone):,} removed; {args.out} has {len(index):,} "
        f"documents, {format_bytes(index.nbytes)} in {index.state_dtype}."
    )


def is_of(name: str, paths: list[str]) -> bool:
    """Whether the name is that of a passage of a text file that is given, or that is or was in a given directory."""
    file = Path(name.rpartition("#")[0])
    given = any(file == path or (path.is_dir() and file.is_relative_to(path)) for path in map(Path, paths))
    return given and file.suffix in SUFFIXES


def read_documents(paths: list[str], length: int) -> dict[str, str]:
    """
    The texts of passages by their ids.

    Raises:
        UsageError: if a path is no such file, or an id occurs twice.
        ValueError: if a file cannot be read.
    """
    documents: dict[str, str] = {}
    for given in map(Path, paths):
        if not given.exists():
            raise UsageError(f"{given} does not exist.")
        inside = sorted(path for path in given.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        for file in inside if given.is_dir() else [given]:
            if file.suffix not in (*SUFFIXES, ".jsonl"):
                raise UsageError(f"{file} is none of {', '.join(SUFFIXES)}, .jsonl.")
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{file} cannot be read: {error}") from error
            for name, passage in read_lines(file, text) if file.suffix == ".jsonl" else passages(file, text, length):
                if name in documents:
                    raise UsageError(f"{file}: the id {name!r} occurs twice.")
                documents[name] = passage
    return documents


def read_lines(file: Path, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            name, passage = entry["id"], entry["text"]
            if not (isinstance(name, str) and isinstance(passage, str) and name and passage.strip()):
                raise ValueError("they must be strings that are not empty")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {number}: it must be an object with `id` and `text` ({error}).") from error
        yield name, passage


def passages(file: Path, text: str, length: int) -> Iterator[tuple[str, str]]:
    """Paragraphs, of which those together are a passage that do not exceed the length. A longer one is alone."""
    number, waiting = 0, ""
    for paragraph in [*filter(None, map(str.strip, re.split(r"\n\s*\n", text))), None]:
        if waiting and (paragraph is None or len(waiting) + 2 + len(paragraph) > length):
            number += 1
            yield f"{file.as_posix()}#{number}", waiting
            waiting = ""
        if paragraph is not None:
            waiting = f"{waiting}\n\n{paragraph}" if waiting else paragraph
