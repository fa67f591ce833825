"""
What weights of 8 and of 4 bits cost the embedded models: bits per byte on held-out tunes, beside float32 and bfloat16.

"7-bit inputs" is what CPUs without VNNI compute, whose products add in 16 bits. The tunes are those of the package
music21. `python benchmarks/cpu.py --ours` measures the speed.

examples:
  python benchmarks/quantised.py --out build/bench
  python benchmarks/quantised.py --models finch-abc --tunes 20
"""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path


# The benchmarks of the operators measure in the same way, and the example reads the tunes.
sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels" / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from measuring import OURS, Results, cpu_name, make_parser, megabytes, run_benchmark, settle
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import subquad
from subquad.info import EMBEDDED
from subquad.models import REGISTRY
from subquad_kernels import quantize_rows


WAYS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization_config": subquad.Int8Config()},
    "int4": {"dtype": "float32", "quantization_config": subquad.Int4Config()},
    "int8, 7-bit inputs": {"dtype": "float32", "quantization_config": subquad.Int8Config()},
}


@contextlib.contextmanager
def inputs_of_7_bits() -> Iterator[None]:
    """Lets int8 products be computed as on a CPU that adds in 16 bits."""
    module = importlib.import_module(quantize_rows.__module__)
    before, module.adds_exactly = module.adds_exactly, lambda: False
    try:
        yield
    finally:
        module.adds_exactly = before


def causal_models() -> list[str]:
    types = {path.name: AutoConfig.from_pretrained(path).model_type for path in sorted(EMBEDDED.iterdir())}
    return [name for name, model_type in types.items() if not REGISTRY[model_type].is_encoder]


def measure(results: Results, options: argparse.Namespace) -> list[str]:
    try:
        from abc_corpus import load_corpus
        from quantize import bits_per_byte

        texts = load_corpus().validation[: options.tunes]
    except (ImportError, SystemExit) as error:
        return [f"nothing is measured: {error}"]
    lines = [f"{len(texts)} tunes, {cpu_name()}", f"| bits per byte (change), MB | {' | '.join(WAYS)} |"]
    lines.append("| --- " * (1 + len(WAYS)) + "|")
    for name in options.models:
        tokenizer, first, cells = AutoTokenizer.from_pretrained(EMBEDDED / name), None, [name]
        for way, how in WAYS.items():
            model = AutoModelForCausalLM.from_pretrained(EMBEDDED / name, **how).eval()
            with inputs_of_7_bits() if "7-bit" in way else contextlib.nullcontext():
                loss = bits_per_byte(model, tokenizer, texts)
            first = first or loss
            note = f"{loss:.4f} ({loss / first - 1:+.2%}), {megabytes(model):.2f} MB"
            cells.append(note)
            results.add({"part": "loss", "what": name, "implementation": OURS, "dtype": way, "note": note})
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse(arguments: list[str] | None) -> argparse.Namespace:
    models = causal_models()
    parser = make_parser(__doc__, ("loss",), minutes=30)
    add = parser.add_argument
    add("--models", nargs="+", choices=models, default=models, metavar="MODEL", help="default: all that write text")
    add("--tunes", type=int, default=60, help="held-out tunes (default: 60)")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    settle(options)
    options.tunes = 2 if options.quick else options.tunes
    return options


def main(arguments: list[str] | None = None) -> None:
    run_benchmark("quantised", parse(arguments), measure)


if __name__ == "__main__":
    main()
