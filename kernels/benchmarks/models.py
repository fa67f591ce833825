"""
Whole models: how long a prompt takes, and how long a token takes.

On the CPU, two comparisons on random weights, and the models that come with the package:
  - prefill through Finch (12 layers, width 512), parallel over time, against the same model stepping the recurrence;
  - prefill and `generate` through Eagle and Finch (12 layers, width 768) against the PyPI package `rwkv` (strategy
    "cpu fp32"), both on the same trainer checkpoint, which `subquad convert` converts;
  - prefill and `generate` through the zoo of ABC models, all of one size: trained weights, and text that they wrote.
Finch 1.6B and Raven 0.4B on a GPU, beside those of flash-linear-attention, are parts of wkv.py and raven.py, which
call `measure_models`.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import OURS, Results, median_milliseconds, wall_milliseconds, with_rate


os.environ["RWKV_JIT_ON"] = "0"


def median_seconds(function, repeats: int) -> float:
    return median_milliseconds(function, least=repeats, most=repeats) / 1e3


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


def trained(length: int, new_tokens: int, repeats: int) -> None:
    import transformers

    from subquad import lm_auto_class
    from subquad.cli import ABC_HEADER
    from subquad.info import EMBEDDED

    print(f"Models of ABC tunes: prefill of {length} bytes, and {new_tokens} bytes written behind them")
    for path in sorted(EMBEDDED.iterdir()):
        auto_class = lm_auto_class(transformers.AutoConfig.from_pretrained(path).model_type)
        is_encoder = auto_class == "AutoModelForMaskedLM"
        model = getattr(transformers, auto_class).from_pretrained(path, dtype=torch.float32).eval()
        ids = transformers.AutoTokenizer.from_pretrained(path)(ABC_HEADER, return_tensors="pt")["input_ids"]
        if is_encoder:
            ids, options = ids.repeat(1, -(-length // ids.shape[1]))[:, :length], {}
        else:
            options = {"do_sample": True, "eos_token_id": None, "use_cache": True}
            torch.manual_seed(0)
            ids = model.generate(ids, max_new_tokens=length - ids.shape[1], **options)
        kept = {} if is_encoder else {"logits_to_keep": 1}
        read = median_seconds(partial(model, ids, **kept), repeats)
        line = f"  {path.name}: read {length / read:,.0f} bytes/s"
        if not is_encoder:
            # A boundary that was written is no padding, which has its id.
            options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens}
            both = median_seconds(partial(model.generate, ids, **options), repeats)
            line += f", written {new_tokens / (both - read):,.0f} bytes/s"
        print(line)


def finches(quick: bool, with_fla: bool) -> dict[str, Callable[[], torch.nn.Module]]:
    """Functions that make a Finch of the same sizes, ours and that of flash-linear-attention."""
    from subquad import Rwkv6Config, Rwkv6ForCausalLM
    from subquad.presets import preset_config

    tiny = Rwkv6Config(hidden_size=128, num_hidden_layers=2, vocab_size=512)
    config = tiny if quick else preset_config("finch-1.6b")

    def fla():
        from fla.models.rwkv6 import RWKV6Config, RWKV6ForCausalLM

        sizes = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
        return RWKV6ForCausalLM(RWKV6Config(num_heads=config.num_attention_heads, expand_k=1.0, **sizes))

    return {OURS: lambda: Rwkv6ForCausalLM(config), **({"fla": fla} if with_fla else {})}


class CausalModel:
    """What is measured of a model; every method returns fields of a row."""

    def __init__(self, options):
        self.options, self.device = options, options.device
        self.dtype = options.dtype
        self.texts, self.logits = {}, None

    def make(self, make: Callable[[], torch.nn.Module]) -> dict[str, Any]:
        def build():
            torch.manual_seed(0)
            with torch.device(self.device):
                model = make()
            for weights in model.parameters():
                if weights.dim() == 2 and not weights.any():
                    # Some projections start at zero: their products are quicker, and every text is the same.
                    torch.nn.init.normal_(weights, std=weights.shape[-1] ** -0.5)
            # Some start orthogonal, which cannot be computed in bfloat16.
            self.model = model.to(self.dtype).eval()

        milliseconds = wall_milliseconds(build, self.device)
        self.parameters = sum(x.numel() for x in self.model.parameters())
        return {"milliseconds": milliseconds, "note": f"{self.parameters:,} parameters"}

    def ids(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randint(1, self.model.config.vocab_size, shape, generator=generator, device=self.device)

    @torch.no_grad()
    def prefill(self, batch: int, length: int) -> dict[str, Any]:
        ids, options = self.ids(batch, length), self.options

        def call():
            self.logits = self.model(input_ids=ids, logits_to_keep=1, use_cache=True).logits

        milliseconds = median_milliseconds(call, self.device, 2 * options.seconds, options.least)
        return with_rate(milliseconds, ids.numel(), 2 * self.parameters * ids.numel() / options.multiplied)

    def training(self, batch: int, length: int, optimize: bool) -> dict[str, Any]:
        """Forward, backward and a step of AdamW, or without; the memory is all that is held, weights included."""
        ids, options = self.ids(batch, length), self.options
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True) if optimize else None
        losses = []

        def step():
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            self.model.zero_grad()
            losses.append(loss.detach())

        self.model.train()
        try:
            if self.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            milliseconds = median_milliseconds(step, self.device, 4 * options.seconds, options.least)
        finally:
            self.model.eval().zero_grad()
        measured = with_rate(milliseconds, ids.numel(), 6 * self.parameters * ids.numel() / options.multiplied)
        if self.device != "cpu":
            measured["MiB"] = torch.cuda.max_memory_allocated() / 2**20
        then = f", then {losses[-1].item():.3f}" if optimize else ""
        return {**measured, "note": f"loss {losses[0].item():.3f}{then}"}

    def generate(self, batch: int, tokens: int, static: bool, first: bool = False) -> dict[str, Any]:
        """Greedy; `first` is the call that compiles, where the cache is static."""
        ids = self.ids(batch, 16)
        how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if static:
            how["cache_implementation"] = "static"

        def call(tokens=tokens):
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **how)
            self.texts[batch, static] = out[:, ids.shape[1] :]

        if first:
            torch.compiler.reset()  # or a second size of batch would be compiled for all sizes, without CUDA graphs
            return {"milliseconds": wall_milliseconds(call, self.device)}
        if not static:
            call(2)
        seconds = 10 * self.options.seconds
        milliseconds = median_milliseconds(call, self.device, seconds, least=1, most=5, warm_up=False)
        step = self.parameters * self.dtype.itemsize / self.options.copied
        measured = with_rate(milliseconds, batch * tokens, tokens * step)
        if self.texts.keys() >= {(batch, True), (batch, False)}:
            pair = self.texts[batch, True], self.texts[batch, False]
            common = min(32, *(text.shape[1] for text in pair))
            same = (pair[0][:, :common] == pair[1][:, :common]).sum().item()
            measured["note"] = f"{same} of {batch * common} tokens as compiled"
        return measured


def measure_models(
    results: Results,
    options,
    models: dict[str, Callable[[], torch.nn.Module]],
    batch: int,
    length: int,
    batches: tuple[int, ...],
    tokens: int,
    training: str = "",
) -> dict[str, torch.Tensor | None]:
    """
    Rows of `generate`, by size of batch, of prefill, and of training where that has a name, for models of several
    implementations; ours also compiles its steps where `options.compiles`. Returns the logits after the prefill, None
    where that failed.
    """
    found = {}
    for name, make in models.items():
        model = CausalModel(options)

        def measure(what, batch, length, function, name=name):
            row = {"part": "models", "what": what, "implementation": name, "batch": batch, "length": length}
            return results.measure({**row, "dtype": options.dtype_name}, function)

        if not measure("random weights", None, None, lambda model=model, make=make: model.make(make)):
            continue
        ways = [("generate", False)]
        if name == OURS:
            ways = [("generate", True)] * options.compiles + [("generate, not compiled", False)]
        for what, static in ways:
            for rows in batches:
                arguments = rows, tokens, static
                if static:
                    measure(f"first {what}", rows, tokens, lambda m=model, a=arguments: m.generate(*a, first=True))
                measure(what, rows, tokens, lambda m=model, a=arguments: m.generate(*a))
        measure("prefill", batch, length, lambda m=model: m.prefill(batch, length))
        if training:
            measure(training, batch, length, lambda m=model: m.training(batch, length, training == "training"))
        found[name] = model.logits
    return found


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
    trained(length, new_tokens, repeats)


if __name__ == "__main__":
    main()
