"""
Speed of the RWKV World tokenizer on one thread, beside other packages, in MB of UTF-8 per second of CPU time: for
several kinds of text, cut into texts of some lengths, one long text, and batches. All columns take turns, and a cell
is the median. The ids are compared with the trie's first.

columns:
  trie          a plain trie in Python, the package rwkv
  BPE           a byte-level BPE of GPT-2's size in the package tokenizers, made from Python's own files
  rust          pyrwkv_tokenizer
  encode_bytes  `tokenizer.encode_bytes(text.encode())`, which knows no added tokens, as the packages above
  encode        `tokenizer.encode(text)`
  call          `tokenizer(text)`; of batches, `tokenizer(texts)`
  offsets       `tokenizer(text, return_offsets_mapping=True)`
  decode        `tokenizer.decode(ids)`

examples:
  python tokenizers/benchmarks/rwkv_world.py --quick
  python tokenizers/benchmarks/rwkv_world.py --only code --kilobytes 5000
"""

import os


os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}

import argparse
import inspect
import itertools
import json
import pydoc
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import rwkv
from rwkv.rwkv_tokenizer import TRIE_TOKENIZER
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from subquad_tokenizers import WORLD_VOCAB_FILE, RwkvWorldTokenizerFast, greedy


try:
    import pyrwkv_tokenizer
except ImportError:
    pyrwkv_tokenizer = None

BATCH, BATCH_CHARACTERS = 1000, 500
COLUMNS = ("trie", "BPE", "rust", "encode_bytes", "encode", "call", "offsets", "decode")
# The time from an import to the first ids, in a process of its own.
FIRST = {
    "trie": "from rwkv.rwkv_tokenizer import TRIE_TOKENIZER as make; call = make({file!r}).encode",
    "rust": "from pyrwkv_tokenizer import RWKVTokenizer as make; call = make().encode",
    "encode_bytes": "from subquad_tokenizers import *; "
    "e = GreedyEncoder(read_vocabulary(WORLD_VOCAB_FILE)); call = lambda text: e.encode(text.encode())",
    "call": "from subquad_tokenizers import RwkvWorldTokenizerFast as make; call = make()",
}

# From the Dao De Jing.
CHINESE = """
道可道，非常道。名可名，非常名。无名天地之始；有名万物之母。故常无欲，以观其妙；常有欲，以观其徼。此两者，同出而异名，同谓之玄。
天下皆知美之为美，斯恶已。皆知善之为善，斯不善已。有无相生，难易相成，长短相形，高下相盈，音声相和，前后相随。
上善若水。水善利万物而不争，处众人之所恶，故几于道。居善地，心善渊，与善仁，言善信，政善治，事善能，动善时。
五色令人目盲；五音令人耳聋；五味令人口爽；驰骋畋猎，令人心发狂；难得之货，令人行妨。
知人者智，自知者明。胜人者有力，自胜者强。知足者富。强行者有志。不失其所者久。死而不亡者寿。
合抱之木，生于毫末；九层之台，起于累土；千里之行，始于足下。
"""


def make_texts(size: int) -> dict[str, str]:
    """About `size` bytes of each kind of text, made of Python's own files and the sample above."""
    rng = random.Random(0)

    def repeated(text):
        return text * (size // len(text.encode()) + 1)

    from pydoc_data.topics import topics

    # Documentation of the language without its markup and underlines.
    english = re.sub(r"[*`=-]{2,}|\n +", " ", "\n\n".join(topics.values())).encode("ascii", "ignore").decode()
    library = Path(inspect.getfile(pydoc)).parent
    code = "\n".join((library / name).read_text() for name in ("argparse.py", "pydoc.py", "tarfile.py", "typing.py"))
    clauses = re.findall(r"\S+?[，。；]", CHINESE)
    emoji = [chr(point) for point in (*range(0x1F300, 0x1F650), *range(0x1F680, 0x1F6D0), *range(0x1F900, 0x1FA00))]
    joined = [f"{a}\u200d{b}" for a, b in itertools.pairwise(emoji)]
    texts = {
        "ASCII": repeated(english),
        "Chinese": "".join(rng.choices(clauses, k=size // 20)),
        "code": repeated(code),
        "emoji": "".join(rng.choices([*emoji, *joined, " "], k=size // 4)),
        "random Unicode": "".join(map(chr, rng.choices([*range(0xD800), *range(0xE000, 0x110000)], k=size // 3))),
    }
    return {name: text.encode()[:size].decode(errors="ignore") for name, text in texts.items()}


def make_bpe() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = [*stdlib.glob("*.py"), *stdlib.glob("*/*.py"), *stdlib.glob("*/test_*/*.py")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=50257, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator((path.read_text(errors="ignore") for path in sorted(files)), trainer)
    return backend


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def call_each(function: Callable, arguments: list) -> Callable[[], None]:
    """A function that calls another one and keeps no results, in which the garbage collector would search."""

    def run():
        for argument in arguments:
            function(argument)

    return run


def runs(tokenizer, trie, bpe, texts: list[str], batched: bool) -> dict[str, Callable[[], object]]:
    """A function for each column."""
    ids = [tokenizer.encode(text) for text in texts]
    batches = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)] if batched else texts
    found = {
        "trie": call_each(trie.encode, texts),
        "BPE": call_each(bpe.encode_batch if batched else bpe.encode, batches),
        "encode_bytes": call_each(lambda text: tokenizer.encode_bytes(text.encode()), texts),
        "encode": call_each(tokenizer.encode, texts),
        "call": call_each(tokenizer, batches),
        "offsets": call_each(lambda batch: tokenizer(batch, return_offsets_mapping=True), batches),
        "decode": call_each(tokenizer.decode, [ids] if batched else ids),
    }
    if pyrwkv_tokenizer is not None:
        found["rust"] = call_each(pyrwkv_tokenizer.RWKVTokenizer().encode, texts)
    return {name: found[name] for name in COLUMNS if name in found}


def measure(functions: dict[str, Callable[[], object]], size: int, repeats: int) -> dict[str, float]:
    """Median MB/s of each function. Those in Python run once on long texts."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats):
        for name, function in functions.items():
            if turn == 0 or size < 2e6 or name not in ("trie", "BPE"):
                times[name].append(seconds(function))
    return {name: size / 1e6 / statistics.median(each) for name, each in times.items()}


def first_ids(repeats: int) -> dict[str, float]:
    """Median milliseconds of CPU time until a new process has the first ids, after imports; the library is there."""
    found = {}
    file = os.path.join(os.path.dirname(rwkv.__file__), os.path.basename(WORLD_VOCAB_FILE))
    for name, code in FIRST.items():
        if name == "rust" and pyrwkv_tokenizer is None:
            continue
        imports, make = code.format(file=file).split("; ", 1)
        program = f"import time\n{imports}\nimport transformers.tokenization_utils_tokenizers"
        program += f"\nstart = time.process_time()\n{make}\ncall('some words')\nprint(time.process_time() - start)"
        outputs = [subprocess.check_output([sys.executable, "-c", program], text=True) for _ in range(repeats)]
        found[name] = 1000 * statistics.median(map(float, outputs))
    return found


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--kilobytes", type=int, default=400, help="size of short texts together (default: %(default)s)"
    )
    parser.add_argument("--megabytes", type=float, default=10, help="size of a long text (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs that the median is taken of (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="20 kilobytes and 1 run: shows that everything runs")
    parser.add_argument("--only", metavar="TEXT", help="only the kinds of text whose name contains this")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the record, rwkv_world.json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.kilobytes, arguments.megabytes, arguments.repeats = 20, 0.1, 1

    trie = TRIE_TOKENIZER(os.path.join(os.path.dirname(rwkv.__file__), os.path.basename(WORLD_VOCAB_FILE)))
    tokenizer, bpe = RwkvWorldTokenizerFast(), make_bpe()
    print(f"World tokenizer: {greedy.explain()[1]}; BPE of {bpe.get_vocab_size():,} tokens")
    print(f"{'MB/s':<36}" + "".join(f"{name:>14}" for name in COLUMNS))
    record: dict[str, dict[str, float]] = {}
    short, long = (make_texts(int(size)) for size in (1000 * arguments.kilobytes, 1e6 * arguments.megabytes))
    for kind, text in short.items():
        if arguments.only and arguments.only not in kind:
            continue
        assert tokenizer.encode(text) == tokenizer.encode_bytes(text.encode()) == trie.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text

        def cut(length, text=text):
            return [text[start : start + length] for start in range(0, len(text), length)]

        shapes = {f"{length:,} characters": (cut(length), False) for length in (20, 500, 4000)}
        shapes[f"batches of {BATCH:,}"] = cut(BATCH_CHARACTERS), True
        shapes[f"{arguments.megabytes:g} MB"] = [long[kind]], False
        for shape, (texts, batched) in shapes.items():
            size = sum(len(each.encode()) for each in texts)
            speeds = measure(runs(tokenizer, trie, bpe, texts, batched), size, arguments.repeats)
            record[f"{kind}, {shape}"] = speeds
            cells = [f"{speeds[name]:>14.1f}" if name in speeds else f"{'-':>14}" for name in COLUMNS]
            print(f"{kind + ', ' + shape:<36}" + "".join(cells), flush=True)
    record["milliseconds to the first ids"] = first_ids(arguments.repeats)
    for name, value in record["milliseconds to the first ids"].items():
        print(f"first ids, {name}: {value:.0f} ms")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "rwkv_world.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
