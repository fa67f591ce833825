"""
Quantises a model by every method that runs on this machine, and prints loss, size and speed of each.

    python examples/quantize.py
    python examples/quantize.py --model my-raven --text my.txt --methods bfloat16 int8 nf4 --dtype bfloat16

The weights of the linear layers below the head are quantised. Embeddings, head, norms, decays and states stay
unchanged. In a program, it takes one argument:

    config = TorchAoConfig(Int8WeightOnlyConfig())  # from transformers, from torchao.quantization
    model = AutoModelForCausalLM.from_pretrained("my-raven", quantization_config=config)

subquad-int8  8 bits per weight and per activation, embeddings and head too, for inference on a CPU (of this package).
subquad-int4  4 bits per weight, a scale for 32 of them, and 8 bits for activations, embeddings and head; as above.
int8          8 bits per weight, a scale for each output of a layer (torchao). LoRA trains on it.
int8-dynamic  the same, and 8 bits per activation, a scale for each token (torchao). For inference only: gradients do
              not pass through it.
int4          4 bits per weight, a scale for every 32 weights (torchao). On a GPU, where it needs the package mslk, two
              weights share a byte. On a CPU each weight has a byte of its own, so only the loss is informative.
llm-int8      8 bits, and 16 for outliers among the activations (bitsandbytes). LoRA trains on it.
nf4           4 bits per weight, for weights with a normal distribution, a scale for every 64 (bitsandbytes). QLoRA
              trains on it. On a CPU the inputs of layers must be multiples of 64, unlike finch-abc's.

`modules_to_not_convert` of TorchAoConfig (`llm_int8_skip_modules` of BitsAndBytesConfig) excludes more layers. For
example, [r".*\\.(r_proj|a_proj|f_proj)"] are the layers that decide where Raven writes and how fast it forgets.

The loss is measured on held-out tunes (`pip install "subquad[train]" torchao bitsandbytes`) or on --text, the size on
the saved weights. The speeds are the best of several runs, in tokens per second.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import tempfile
import time
from pathlib import Path

import torch
from abc_corpus import load_corpus
from shared import model_directory, require
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig
from transformers.utils import logging as transformers_logging

import subquad


require("torchao", extra="tools")

from torchao import quantization as ao  # noqa: E402


DTYPES = ("float32", "bfloat16")
METHODS = {
    "subquad-int8": lambda dtype, device: subquad.Int8Config(),
    "subquad-int4": lambda dtype, device: subquad.Int4Config(),
    "int8": lambda dtype, device: TorchAoConfig(ao.Int8WeightOnlyConfig()),
    "int8-dynamic": lambda dtype, device: TorchAoConfig(ao.Int8DynamicActivationInt8WeightConfig()),
    "int4": lambda dtype, device: TorchAoConfig(
        ao.Int4WeightOnlyConfig(32) if device != "cpu" else ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32))
    ),
    "llm-int8": lambda dtype, device: BitsAndBytesConfig(load_in_8bit=True),
    "nf4": lambda dtype, device: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="finch-abc", help="directory of a causal model and its tokenizer (default: finch-abc)")
    add(
        "--methods",
        nargs="+",
        choices=(*DTYPES, *METHODS),
        default=(*DTYPES, *METHODS),
        help="methods to try (default: all)",
    )
    add("--dtype", choices=DTYPES, default="float32", help="dtype of the other weights (default: float32)")
    add("--text", type=Path, help="a UTF-8 text, with blank lines between its parts (default: held-out tunes)")
    add("--parts", type=int, help="maximum number of tunes or parts to read")
    add("--prompt", type=int, default=512, help="tokens to read for the timing (default: 512)")
    add("--new-tokens", type=int, default=64, help="tokens to generate for the timing (default: 64)")
    add("--repeats", type=int, default=5, help="runs of each timing (default: 5)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    return parser.parse_args()


def load(path: str, method: str, dtype: str, device: str) -> torch.nn.Module:
    """The model, quantised while it is loaded."""
    dtype, config = (method, None) if method in DTYPES else (dtype, METHODS[method](dtype, device))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device, quantization_config=config)
    widths = {module.in_features for module in model.base_model.modules() if hasattr(module, "in_features")}
    if method == "nf4" and device == "cpu" and any(width % 64 for width in widths):
        raise ValueError(f"on a CPU the widths of layers must be multiples of 64, got {sorted(widths)}")
    return model


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, tokenizer, texts: list[str], rows: int = 16) -> float:
    """
    Bits per byte of the texts, each read alone. The end token counts as a byte; the first token is not predicted.
    """
    ids = [torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in sorted(texts, key=len)]
    nats = 0.0
    for start in range(0, len(ids), rows):
        labels = torch.nn.utils.rnn.pad_sequence(ids[start : start + rows], batch_first=True, padding_value=-100)
        mask = (labels := labels.to(model.device)) != -100
        loss = model(input_ids=labels * mask, attention_mask=mask, labels=labels, use_cache=False).loss
        nats += loss.item() * mask[:, 1:].sum().item()
    return nats / math.log(2) / sum(len(text.encode()) + 1 for text in texts)


def megabytes(model: torch.nn.Module) -> float:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 1e6


def speeds(model: torch.nn.Module, length: int, count: int, repeats: int) -> list[float]:
    """Tokens per second of reading a prompt and of writing: the best of several runs, after a first one."""
    prompt = torch.randint(1, model.config.vocab_size, (1, length), device=model.device)
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        model(prompt, logits_to_keep=1).logits.sum().item()  # waits for a GPU
        middle = time.perf_counter()
        model.generate(prompt[:, :1], **options).sum().item()
        times.append((middle - begin, time.perf_counter() - middle))
    return [
        tokens / min(seconds) for tokens, seconds in zip((length, count), zip(*times[1:], strict=True), strict=True)
    ]


@torch.no_grad()
def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    path = model_directory(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = re.split(r"\n\s*\n", arguments.text.read_text().strip()) if arguments.text else load_corpus().validation
    texts, first = texts[: arguments.parts], None
    print(f"{'':12} {'bits/byte':>9} {'change':>7} {'MB':>8} {'read/s':>8} {'write/s':>8}")
    for method in arguments.methods:
        try:
            model = load(path, method, arguments.dtype, arguments.device)
            loss = bits_per_byte(model, tokenizer, texts)
        except (ImportError, RuntimeError, ValueError) as error:
            print(f"{method:12} does not run here: {str(error).splitlines()[0]}")
            continue
        first, size = first or loss, megabytes(model)
        read, write = speeds(model, arguments.prompt, arguments.new_tokens, arguments.repeats)
        print(f"{method:12} {loss:9.4f} {loss / first - 1:+7.2%} {size:8.2f} {read:8,.0f} {write:8.1f}", flush=True)


if __name__ == "__main__":
    main()
