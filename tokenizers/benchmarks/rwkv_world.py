"""
Speed of the RWKV World tokenizers on several kinds of text, beside the reference trie of the `rwkv` package, in MB of
UTF-8 a second. The ids of every encoder are compared with the reference first.

columns:
  reference  the trie of the package rwkv
  cold       GreedyEncoder, which is behind `encode_bytes`, with an empty dictionary
  warm       the same with a filled one
  fast       RwkvWorldTokenizerFast on one string
  batch      RwkvWorldTokenizerFast on 64 strings at once, with RAYON_NUM_THREADS threads (default: one a core)
  rust       pyrwkv_tokenizer, if it is installed

examples:
  python tokenizers/benchmarks/rwkv_world.py --quick
  python tokenizers/benchmarks/rwkv_world.py --only code --kilobytes 5000
"""

import argparse
import inspect
import json
import os
import pydoc
import random
import re
import statistics
import time
from pathlib import Path

import rwkv
from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

from subquad_tokenizers import WORLD_VOCAB_FILE, GreedyEncoder, RwkvWorldTokenizerFast, read_vocabulary


# Article 1 of the Universal Declaration of Human Rights.
DECLARATION = """
Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de conscience.
Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt.
Todos los seres humanos nacen libres e iguales en dignidad y derechos, dotados como están de razón y conciencia.
Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью.
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.
يولد جميع الناس أحرارا متساوين في الكرامة والحقوق، وقد وهبوا عقلا وضميرا وعليهم أن يعامل بعضهم بعضا بروح الإخاء.
כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. כולם חוננו בתבונה ובמצפון.
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।
มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม
すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は、理性と良心とを授けられている。
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 이성과 양심을 부여받았다.
人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。
"""

# From the Dao De Jing.
CHINESE = """
道可道，非常道。名可名，非常名。无名天地之始；有名万物之母。故常无欲，以观其妙；常有欲，以观其徼。此两者，同出而异名，同谓之玄。
天下皆知美之为美，斯恶已。皆知善之为善，斯不善已。有无相生，难易相成，长短相形，高下相盈，音声相和，前后相随。
上善若水。水善利万物而不争，处众人之所恶，故几于道。居善地，心善渊，与善仁，言善信，政善治，事善能，动善时。
五色令人目盲；五音令人耳聋；五味令人口爽；驰骋畋猎，令人心发狂；难得之货，令人行妨。
知人者智，自知者明。胜人者有力，自胜者强。知足者富。强行者有志。不失其所者久。死而不亡者寿。
合抱之木，生于毫末；九层之台，起于累土；千里之行，始于足下。
"""


def make_texts(size: int) -> dict[str, bytes]:
    """About `size` bytes of each kind of text, made of Python's own files and the samples above."""
    rng = random.Random(0)

    def shuffled(parts):
        count = size // (sum(len(part.encode()) for part in parts) // len(parts)) + 1
        return "".join(rng.choices(parts, k=count))

    def repeated(text):
        return text * (size // max(len(text), 1) + 1)

    from pydoc_data.topics import topics

    # Documentation of the language without its markup and underlines.
    english = re.sub(r"[*`=-]{2,}|\n +", " ", "\n\n".join(topics.values()))
    library = Path(inspect.getfile(pydoc)).parent
    code = "\n".join((library / name).read_text() for name in ("argparse.py", "pydoc.py", "tarfile.py", "typing.py"))
    minified = re.sub(r"\s*\n\s*", ";", re.sub(r"\s*(#.*|[-+*/=(){}\[\]:,<>])\s*", r"\1", code))
    texts = {
        "English": repeated(english),
        "Chinese": shuffled(re.findall(r"\S+?[，。；]", CHINESE)),
        "Japanese, Thai, Hindi": shuffled(DECLARATION.strip().splitlines()[7:10]),
        "mixed scripts": shuffled(DECLARATION.strip().splitlines(keepends=True)),
        "code": repeated(code),
        "minified code": repeated(minified),
        "one letter": "a" * size,
        "random letters": "".join(rng.choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123456789", k=size)),
        "random Unicode": "".join(map(chr, rng.choices([*range(0xD800), *range(0xE000, 0x110000)], k=size // 4))),
    }
    texts = {name: text.encode()[:size].decode(errors="ignore").encode() for name, text in texts.items()}
    return {**texts, "random bytes": rng.randbytes(size)}


def speed(run, text, size: int, repeats: int, anew: bool) -> float:
    """Median MB/s of `run`, or with `anew` of the functions that it returns."""
    seconds = []
    for _ in range(repeats):
        function = run() if anew else run
        start = time.perf_counter()
        function(text)
        seconds.append(time.perf_counter() - start)
    return size / 1e6 / statistics.median(seconds)


def chunks(text: str, count: int = 64) -> list[str]:
    length = len(text) // count + 1
    return [text[start : start + length] for start in range(0, len(text), length)]


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--kilobytes", type=int, default=1000, help="size of each text (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs that the median is taken of (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="100 kilobytes and 3 runs: shows that everything runs")
    parser.add_argument("--only", metavar="TEXT", help="only the kinds of text whose name contains this")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the record, rwkv_world.json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.kilobytes, arguments.repeats = 100, 3

    reference = TRIE_TOKENIZER(os.path.join(os.path.dirname(rwkv.__file__), os.path.basename(WORLD_VOCAB_FILE)))
    tokens, fast = read_vocabulary(WORLD_VOCAB_FILE), RwkvWorldTokenizerFast()
    try:
        from pyrwkv_tokenizer import RWKVTokenizer

        rust = RWKVTokenizer()
    except ImportError:
        rust = None

    def new_encode():
        encoder = GreedyEncoder(tokens)
        encoder.encode_piece(b"a")  # builds the trie
        return encoder.encode

    columns = ("reference", "cold", "warm", "fast", "batch", "rust")
    print(f"{'MB/s':<24}" + "".join(f"{name:>11}" for name in columns))
    record: dict[str, dict[str, float]] = {}
    for name, data in make_texts(arguments.kilobytes * 1000).items():
        if arguments.only and arguments.only not in name:
            continue
        warm = new_encode()
        ids = reference.encodeBytes(data)
        assert warm(data) == ids
        # The state that a loop over a corpus reaches, also if the first pass did not fill the dictionary.
        for _ in range(4):
            warm(data)
        runs = {
            "reference": (reference.encodeBytes, data),
            "cold": (new_encode, data),
            "warm": (warm, data),
        }
        if name != "random bytes":
            text = data.decode()
            assert fast(text)["input_ids"] == ids
            runs |= {"fast": (fast, text), "batch": (fast, chunks(text))}
            if rust is not None:
                assert rust.encode(text) == ids
                runs["rust"] = (rust.encode, text)
        speeds = {
            column: speed(*runs[column], len(data), arguments.repeats, column == "cold")
            for column in columns
            if column in runs
        }
        cells = [f"{speeds[column]:>11.1f}" if column in speeds else f"{'-':>11}" for column in columns]
        print(f"{name:<24}" + "".join(cells), flush=True)
        record[name] = speeds
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "rwkv_world.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
