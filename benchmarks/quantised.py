"""
The cost of 8-bit and 4-bit weights for the embedded models: bits per byte on held-out tunes, compared with float32 and
bfloat16, and the source of the logits' error: the rounded inputs of layers, or the rounded weights.

"7-bit inputs" is the way of CPUs without VNNI, whose products add in 16 bits. "random" are models of the same sizes
with matrices of normally distributed numbers, which read random ids. An error is relative to the logits, with the
smallest cosine of a token's logits in brackets. The tunes come from the package music21.
`python benchmarks/cpu.py --ours` measures the speed.

examples:
  python benchmarks/quantised.py --out build/bench
  python benchmarks/quantised.py --models finch-abc --tunes 20
  python benchmarks/quantised.py --parts error --models goose-abc
"""

import argparse
import contextlib
import copy
import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


# For measuring as in the operators' benchmarks, and for reading tunes as in the example.
sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels" / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from measuring import OURS, Results, cpu_name, make_parser, megabytes, relative_error, run_benchmark, settle
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import subquad
from subquad.hub.info import EMBEDDED
from subquad.models import REGISTRY
from subquad.quantization.quantized import Int4Linear, IntegerLayer
from subquad_kernels import quantize_rows
from subquad_kernels.int4_linear import unpack_groups


PARTS = ("loss", "error")

WAYS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization_config": subquad.Int8Config()},
    "int4": {"dtype": "float32", "quantization_config": subquad.Int4Config()},
    "int8, 7-bit inputs": {"dtype": "float32", "quantization_config": subquad.Int8Config()},
}


@contextlib.contextmanager
def inputs_of_7_bits() -> Iterator[None]:
    """Computes int8 products as on a CPU that adds in 16 bits."""
    module = importlib.import_module(quantize_rows.__module__)
    before, module.adds_exactly = module.adds_exactly, lambda: False
    try:
        yield
    finally:
        module.adds_exactly = before


def causal_models() -> list[str]:
    types = {path.name: AutoConfig.from_pretrained(path).model_type for path in sorted(EMBEDDED.iterdir())}
    return [name for name, model_type in types.items() if not REGISTRY[model_type].is_encoder]


@torch.no_grad()
def rounded(model: nn.Module, quantised: nn.Module, weights: bool, inputs: bool) -> nn.Module:
    """The model in float32 with the rounded weights, or the rounded inputs of linear layers, of a quantised one."""
    model = copy.deepcopy(model)
    for name, layer in quantised.named_modules():
        if not isinstance(layer, IntegerLayer):
            continue
        plain, four = model.get_submodule(name), isinstance(layer, Int4Linear)
        if weights:
            integers, scale = layer.weight, layer.weight_scale
            plain.weight.copy_(unpack_groups(integers, scale) if four else integers * scale[:, None])
        if inputs and isinstance(plain, nn.Linear):
            plain.register_forward_pre_hook(_round_input)
    return model


def _round_input(layer: nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = arguments
    integers, scale = quantize_rows(x.flatten(0, -2))
    return ((integers * scale[:, None]).view_as(x),)


@torch.no_grad()
def with_random_weights(model: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


@torch.no_grad()
def measure_errors(results: Results, options: argparse.Namespace, texts: list[str]) -> list[str]:
    ways = {"inputs": (False, True), "weights": (True, False), "both": (True, True)}
    columns = [("int8", "inputs"), ("int8", "weights"), ("int8", "both"), ("int4", "weights"), ("int4", "both")]
    lines = [f"| error of the logits | {' | '.join(map(', '.join, columns))} |", "| --- " * (1 + len(columns)) + "|"]
    for name in options.models:
        trained = AutoModelForCausalLM.from_pretrained(EMBEDDED / name, **WAYS["float32"]).eval()
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / name)
        ids = torch.tensor(tokenizer(tokenizer.eos_token.join(texts))["input_ids"])
        inputs = {"trained": torch.stack(ids.split(200)[:-1]), "random": torch.randint(2, 127, (8, 64))}
        for kind, ids in inputs.items():
            model, cells = trained if kind == "trained" else with_random_weights(trained, seed=0), [f"{name}, {kind}"]
            expected = model(ids).logits.double()
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                quantised = {bits: type(model).from_pretrained(folder, **WAYS[bits]) for bits in ("int8", "int4")}
            for bits, way in columns:
                logits = rounded(model, quantised[bits], *ways[way])(ids).logits
                cosine = nn.functional.cosine_similarity(logits.double(), expected, dim=-1).min()
                note = f"{relative_error(logits, expected):.2%} ({cosine:.4f})"
                cells.append(note)
                row = {"part": "error", "what": f"{name}, {kind}", "implementation": OURS}
                results.add(row | {"dtype": f"{bits}, {way}", "note": note})
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def measure(results: Results, options: argparse.Namespace) -> list[str]:
    try:
        from abc_corpus import load_corpus

        texts = load_corpus().validation[: options.tunes]
    except (ImportError, SystemExit) as error:
        return [f"nothing is measured: {error}"]
    lines = [f"{len(texts)} tunes, {cpu_name()}"]
    for part, function in (("loss", measure_losses), ("error", measure_errors)):
        lines += function(results, options, texts) if part in options.parts else []
    return lines


def measure_losses(results: Results, options: argparse.Namespace, texts: list[str]) -> list[str]:
    from quantize import bits_per_byte

    lines = [f"| bits per byte (change), MB | {' | '.join(WAYS)} |"]
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
    parser = make_parser(__doc__, PARTS, minutes=30)
    add = parser.add_argument
    add("--models", nargs="+", choices=models, default=models, metavar="MODEL", help="default: all that write text")
    add("--tunes", type=int, default=60, help="held-out tunes (default: 60)")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    settle(options)
    options.parts, options.tunes = options.parts or PARTS, 2 if options.quick else options.tunes
    return options


def main(arguments: list[str] | None = None) -> None:
    run_benchmark("quantised", parse(arguments), measure)


if __name__ == "__main__":
    main()
