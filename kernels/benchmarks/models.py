"""
Whole models on the CPU: how long a prompt takes, and how long a token takes.

Two comparisons, on random weights:
  - prefill through Finch (12 layers, width 512), parallel over time, against the same model stepping the recurrence;
  - prefill and `generate` through Eagle and Finch (12 layers, width 768) against the PyPI package `rwkv` (strategy
    "cpu fp32"), both on the same trainer checkpoint, which `subquad convert` converts.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch


os.environ["RWKV_JIT_ON"] = "0"


def median_seconds(function, repeats: int) -> float:
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def against_stepping(length: int, repeats: int) -> None:
    from subquad import Rwkv6Config, Rwkv6ForCausalLM

    torch.manual_seed(0)
    model = Rwkv6ForCausalLM(Rwkv6Config(hidden_size=512, num_hidden_layers=12)).eval()
    ids = torch.randint(1, 65536, (1, length))

    def parallel():
        return model(ids, logits_to_keep=1).logits

    def stepping():
        cache = None
        for t in range(length):
            out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
        return out.logits

    fast = median_seconds(parallel, repeats)
    os.environ["SUBQUAD_BACKEND"] = "reference"
    start = time.perf_counter()
    expected = stepping()
    slow = time.perf_counter() - start
    del os.environ["SUBQUAD_BACKEND"]
    torch.testing.assert_close(parallel(), expected, atol=1e-4, rtol=1e-4)
    print(
        f"Finch 12 x 512, prefill of {length} tokens: {fast:.2f} s, stepping the recurrence {slow:.2f} s, "
        f"ratio {slow / fast:.1f}"
    )


def random_checkpoint(path: Path, version: int, layers: int, width: int, vocabulary: int) -> None:
    """A checkpoint with the trainer's names and random weights."""
    heads, ffn = width // 64, int(width * 3.5) // 32 * 32
    shapes = {"emb.weight": (vocabulary, width), "head.weight": (vocabulary, width)}
    norms = ["blocks.0.ln0", "ln_out"]
    for n in range(layers):
        att, ffn_name = f"blocks.{n}.att", f"blocks.{n}.ffn"
        norms += [f"blocks.{n}.ln1", f"blocks.{n}.ln2", f"{att}.ln_x"]
        for name in ("receptance", "key", "value", "gate", "output"):
            shapes[f"{att}.{name}.weight"] = (width, width)
        shapes[f"{att}.time_faaaa"] = (heads, 64)
        if version == 5:
            shapes[f"{att}.time_decay"] = (heads, 64)
            shapes.update({f"{att}.time_mix_{name}": (1, 1, width) for name in "kvrg"})
            shapes.update({f"{ffn_name}.time_mix_{name}": (1, 1, width) for name in "kr"})
        else:
            shapes[f"{att}.time_decay"] = (1, 1, width)
            shapes[f"{att}.time_decay_w1"], shapes[f"{att}.time_decay_w2"] = (width, 64), (64, width)
            shapes[f"{att}.time_maa_w1"], shapes[f"{att}.time_maa_w2"] = (width, 160), (5, 32, width)
            shapes.update({f"{att}.time_maa_{name}": (1, 1, width) for name in "xwkvrg"})
            shapes.update({f"{ffn_name}.time_maa_{name}": (1, 1, width) for name in "kr"})
        shapes[f"{ffn_name}.key.weight"] = (ffn, width)
        shapes[f"{ffn_name}.receptance.weight"] = (width, width)
        shapes[f"{ffn_name}.value.weight"] = (width, ffn)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        # Small enough that rounding does not grow from layer to layer, as in a trained model.
        scale = 0.3
        if name.endswith("weight"):
            scale = shape[-1] ** -0.5
        elif name.endswith(("_w1", "_w2")):
            scale = 0.3 * shape[-2] ** -0.5
        tensors[name] = torch.randn(shape, generator=generator) * scale
    for name in norms:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = torch.ones(width), torch.zeros(width)
    torch.save(tensors, path)


def against_rwkv(version: int, length: int, new_tokens: int, repeats: int) -> None:
    from rwkv.model import RWKV
    from transformers import AutoModelForCausalLM

    import subquad  # noqa: F401 (registers the architectures)
    import subquad_conversion

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "model.pth"), Path(folder, "converted")
        random_checkpoint(source, version, layers=12, width=768, vocabulary=65536)
        subquad_conversion.convert(source, target, tokenizer="none", progress=False)
        model = AutoModelForCausalLM.from_pretrained(target).eval()
        stdout, sys.stdout = sys.stdout, sys.stderr  # the package reports every tensor
        peer = RWKV(model=str(source.with_suffix("")), strategy="cpu fp32")
        sys.stdout = stdout

    ids = torch.randint(1, 65536, (1, length))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def peer_decode(tokens):
        logits, state = peer.forward(ids[0, :4].tolist(), None)
        for _ in range(tokens):
            logits, state = peer.forward([int(logits.argmax())], state)

    def decode(tokens):
        model.generate(ids[:, :4], max_new_tokens=tokens, **options)

    with torch.no_grad():
        # The two runtimes' logits after the prompt.
        error = (model(ids).logits[0, -1] - peer.forward(ids[0].tolist(), None)[0]).abs().max().item()
        rows = {
            f"prefill of {length} tokens": (
                length / median_seconds(lambda: model(ids, logits_to_keep=1), repeats),
                length / median_seconds(lambda: peer.forward(ids[0].tolist(), None), repeats),
            ),
            "decoding": (
                new_tokens / median_seconds(lambda: decode(new_tokens), repeats),
                new_tokens / median_seconds(lambda: peer_decode(new_tokens), repeats),
            ),
        }
    name = {5: "Eagle", 6: "Finch"}[version]
    print(f"{name} 12 x 768 against the package rwkv (largest difference of a logit {error:.1e}):")
    for what, (ours, theirs) in rows.items():
        print(f"  {what}: {ours:.1f} tokens/s, rwkv {theirs:.1f}, ratio {ours / theirs:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter prompts and fewer repeats")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch (default: all cores)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    repeats, length, new_tokens = (1, 128, 8) if arguments.quick else (5, 1024, 64)
    print(f"torch {torch.__version__}, {arguments.threads} threads, float32, medians of {repeats}")
    against_stepping(length, repeats)
    for version in (5, 6):
        against_rwkv(version, min(length, 512), new_tokens, repeats)


if __name__ == "__main__":
    main()
