"""
Exports a causal language model as programs that generate text without transformers and subquad.

    python examples/export_program.py --output finch-abc-pt2
    python examples/export_program.py --output finch-abc-onnx --format onnx
    python examples/export_program.py --model DIRECTORY --output programs --chunk 0 --max-cache-len 2048

It writes two programs and the initial states (states.safetensors). `prefill` reads `--chunk` tokens of a prompt in one
call, padding included, and `decode` reads a single token. Both take the states and return new ones, so a runtime keeps
a few tensors of constant size instead of a cache. Then the example loads the programs again, generates a text with
them, and checks that the tokens are the same as with transformers' `generate`.

A .pt2 file is for torch: `torch.export.load`, see `load_pt2` below. It only has torch's own operators, except with
`--chunk 0`: then prefill reads any number of tokens, and needs `import subquad_kernels` first. For C++ without Python,
compile it by `torch._inductor.aoti_compile_and_package(torch.export.load(path), package_path=...)`. An .onnx file is
for ONNX Runtime (`pip install "subquad[tools]"`), and takes about a minute to make. Each program has all the weights.

The states of Avey, and of Raven with attention to the whole text, have room for `--max-cache-len` tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from shared import model_directory, require
from transformers import AutoModelForCausalLM, AutoTokenizer

from subquad.tools.torch_export import SHORTEST, export_program, initial_states, inline_operators, save_onnx


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=model_directory, default="finch-abc", help="directory or embedded model (default: finch-abc)")
    add("--output", type=Path, required=True, help="directory for the programs")
    add("--format", choices=("pt2", "onnx"), default="pt2", help="pt2 for torch (default), or onnx for ONNX Runtime")
    add("--chunk", type=int, default=64, help="tokens that prefill reads in a call; 0 for any number (default: 64)")
    add("--max-cache-len", type=int, default=1024, help="maximum number of tokens, if states grow (default: 1024)")
    add("--prompt", default="X:1\nT:The Exported Jig\nM:6/8\n", help="the text to continue")
    add("--new-tokens", type=int, default=40, help="number of new tokens (default: 40)")
    arguments = parser.parse_args()
    if arguments.chunk < 0 or arguments.chunk == 1:
        parser.error("--chunk must be 0 or at least 2")
    if arguments.format == "onnx" and arguments.chunk == 0:
        parser.error("--chunk 0: an ONNX model reads a fixed number of tokens in a call")
    if arguments.format == "onnx":
        require("onnxscript", "onnxruntime", extra="tools")
    return arguments


def write_programs(model, directory: Path, format: str, chunk: int, max_cache_len: int) -> None:
    """Writes `prefill`, `decode` and the initial states. Old files are replaced when all new ones are complete."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        save_file(initial_states(model, max_cache_len=max_cache_len), f"{temporary}/states.safetensors")
        for name, length in (("prefill", chunk or None), ("decode", 1)):
            program = export_program(model, length, max_cache_len=max_cache_len)
            if chunk:
                program = inline_operators(program)
            save = save_onnx if format == "onnx" else torch.export.save
            save(program, f"{temporary}/{name}.{format}")
        for file in os.listdir(temporary):
            os.replace(f"{temporary}/{file}", directory / file)


def load_pt2(path: Path) -> Callable:
    """A function of `input_ids`, states and, for prefill, `attention_mask`. It returns logits and states."""
    return torch.no_grad()(torch.export.load(path).module())


def load_onnx(path: Path) -> Callable:
    """The same function for an ONNX model."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name.removeprefix("present.") for output in session.get_outputs()]

    def run(input_ids, states, *attention_mask):
        inputs = {f"past.{name}": state.numpy() for name, state in states.items()}
        inputs["input_ids"] = input_ids.numpy()
        if attention_mask:
            inputs["attention_mask"] = attention_mask[0].numpy()
        outputs = dict(zip(names, map(torch.from_numpy, session.run(None, inputs)), strict=True))
        return outputs.pop("logits"), outputs

    return run


def generate(prefill: Callable, decode: Callable, states, prompt: torch.Tensor, chunk: int, new_tokens: int):
    """The most likely tokens after a prompt (1, length), and the seconds for the prompt and for each new token."""
    start = time.perf_counter()
    real = torch.ones_like(prompt)
    missing = -prompt.shape[1] % chunk if chunk else max(SHORTEST - prompt.shape[1], 0)
    prompt, real = (torch.nn.functional.pad(x, (0, missing)) for x in (prompt, real))
    size = chunk or prompt.shape[1]
    for ids, mask in zip(prompt.split(size, dim=1), real.split(size, dim=1), strict=True):
        logits, states = prefill(ids, states, mask)
    tokens, read = [logits.argmax(-1, keepdim=True)], time.perf_counter()
    while len(tokens) < new_tokens:
        logits, states = decode(tokens[-1], states)
        tokens.append(logits.argmax(-1, keepdim=True))
    return torch.cat(tokens, 1), read - start, (time.perf_counter() - read) / max(new_tokens - 1, 1)


def main() -> None:
    arguments = parse_arguments()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    suffix, output = arguments.format, arguments.output
    start = time.perf_counter()
    write_programs(model, output, suffix, arguments.chunk, arguments.max_cache_len)
    print(f"exported in {time.perf_counter() - start:.1f} s:")
    for file in sorted(output.iterdir()):
        print(f"  {file.name:<20} {file.stat().st_size / 1e6:8.2f} MB")

    prompt = tokenizer(arguments.prompt, return_tensors="pt").input_ids
    options = {"max_new_tokens": arguments.new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(prompt, **options)  # the first call is slow, for programs too
    start = time.perf_counter()
    expected = model.generate(prompt, **options)[:, prompt.shape[1] :]
    print(f"transformers: {expected.shape[1] / (time.perf_counter() - start):.0f} tokens/s, prompt included")

    load = load_onnx if suffix == "onnx" else load_pt2
    programs = [load(output / f"{name}.{suffix}") for name in ("prefill", "decode")]
    inputs = load_file(output / "states.safetensors"), prompt, arguments.chunk, arguments.new_tokens
    generate(*programs, *inputs)
    tokens, reading, each = generate(*programs, *inputs)
    print(f"programs: prompt of {prompt.shape[1]} tokens in {1000 * reading:.0f} ms, then {1 / each:.0f} tokens/s")
    if not torch.equal(tokens, expected):
        raise SystemExit(f"The programs chose other tokens:\n{tokens.tolist()}\n{expected.tolist()}")
    print(f"the same {tokens.shape[1]} tokens:\n\n{tokenizer.decode(torch.cat((prompt, tokens), 1)[0])}")


if __name__ == "__main__":
    main()
