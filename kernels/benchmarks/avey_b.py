"""
Avey-B and its operators, measured beside the published algorithm, written plainly, and beside ModernBERT.

`plain` is that algorithm in ordinary torch: the ranker takes one split after the other, windows of all splits exist at
once and are compressed by one product, and a layer makes the similarities of all windows by `bmm`, multiplies them and
concatenates what the fuser reads. Compiled, the ranker's step and the stack of layers are one graph each, for any
length. ModernBERT is that of transformers, under torch's scaled dot product attention. All have random weights. On a
GPU all runs in bfloat16 (training: autocast), on a CPU in float32.

parts (each can be left out, --parts):
  check      the operators, in place too and with every gradient, against their references in float64 at small and at
             full sizes, the ranker as Avey-B calls it, and the model in both its variants, with padding too, against
             `plain` in float64. With TRITON_INTERPRET=1 the kernels on a CPU, in float32 at small sizes. If it fails,
             nothing is measured and the exit status is 1.
  operators  static and dynamic mixing: forward, ours in place, and forward and backward
  chain      a layer: norm, enricher, activation, mixing, fuser, residual; with the time of each kernel
  encode     a forward pass of the encoder by length, without a head: tokens/s, power laws and a plot (avey_b.png)
  train      a step of masked language modelling with AdamW, 8 x 2048 tokens (on a CPU 2 x 512, 4 layers of width 256)

Times are medians, between device events on a GPU; what takes seconds is timed once. A floor is the larger of two
times: to move inputs and outputs (of a model: its weights) once, and to make the products that cannot be saved (of the
similarities one half), at the rates that a large copy and a large matrix product reach in the same run. TFLOP/s and
GB/s count these only. MiB are the peak beyond what is held before the call; of training, and on a CPU, all that is
held. "graph" is a CUDA graph: without what Python takes between two kernels. A length at which something runs out of
memory is measured once more with a batch of one.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from avey import (
    COMPILED,
    MODEL_TOLERANCES,
    PLAIN,
    SCORE_TOLERANCES,
    TOLERANCES,
    embeddings,
    measure_steps_of_training,
    plain_scores,
    random_ids,
    ranking_errors,
    unit,
)
from measuring import (
    OURS,
    Check,
    Results,
    add_compile,
    add_options,
    captured,
    floor,
    measure_call,
    measure_ceilings,
    median_milliseconds,
    poisoned,
    relative_error,
    resident_mebibytes,
    run_afresh,
    sets_beyond_cache,
    settle,
    size_of,
    timings,
    versions,
    with_rate,
    write_atomically,
    write_report,
)
from torch import nn

from subquad_kernels import dynamic_mixing, static_mixing


PARTS = ("check", "operators", "chain", "encode", "train")
PRESETS = ("avey-b-base", "avey-b-large")
MODERNBERT, OURS_COMPILED, GRAPH = "ModernBERT", f"{OURS}, compiled", ", graph"
STATIC, KINDS = "static", ("static", "l1", "sum")
EPS = 1e-12
PAPER = {"hidden_act": "relu2", "similarity_norm": "sum", "residual_gain": False, "final_norm": True}
VARIANTS = {"as on the Hub": {}, "as in the paper": PAPER}
# Sizes of ModernBERT by the width of what it is compared with.
MODERNBERT_SIZES = {
    768: {},
    1024: {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16},
}
# Tokens a second, as a share of others', from a length on.
TARGETS = ((MODERNBERT, 1, 1.0), (MODERNBERT, 2**15, 3.4), (COMPILED, 1, 1.3))
PAPER_EXPONENTS = "the paper: Avey-B under torch.compile 0.44 and 0.68, ModernBERT with FlashAttention 0.77 and 1.17"
# A call that takes longer than so many milliseconds is its own median.
LONG = 1500


# The published algorithm.


def plain_static(features: torch.Tensor, v: torch.Tensor, width: int) -> torch.Tensor:
    x, gate, head = features.split((width, width, features.shape[-1] - 2 * width), -1)
    return torch.cat((gate * (v.to(x.dtype) @ x), head), -1)


def plain_dynamic(features: torch.Tensor, width: int, normalization: str, eps: float) -> torch.Tensor:
    x, gate, head = features.split((width, width, features.shape[-1] - 2 * width), -1)
    if normalization == "l1":
        y = F.normalize(x, dim=-1, eps=eps)
        similar = F.normalize(y @ y.mT, p=1, dim=-1, eps=eps)
    else:
        y = x / (x.square().sum(-1, keepdim=True) + eps).sqrt()
        similar = y @ y.mT
        similar = similar / (similar.sum(-1, keepdim=True) + eps)
    return torch.cat((gate * (similar @ x), head), -1)


class PlainLayer(nn.Module):
    def __init__(self, config, dynamic: bool):
        super().__init__()
        width, features = config.d_embed, config.expansion_factor * config.d_embed
        self.config, self.width = config, config.tail_size // 2
        self.norm = nn.RMSNorm(width, eps=config.eps)
        self.enricher = nn.Linear(width, features)
        self.spatial_proj = None if dynamic else nn.Parameter(torch.empty(2 * [config.chunk_size]))
        self.fuser = nn.Linear(features - self.width, width)
        self.alpha = nn.Parameter(torch.empty(())) if config.residual_gain else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.enricher(self.norm(x))
        features = F.gelu(features) if self.config.hidden_act == "gelu" else F.relu(features).square()
        if self.spatial_proj is None:
            features = plain_dynamic(features, self.width, self.config.similarity_norm, self.config.eps)
        else:
            features = plain_static(features, self.spatial_proj, self.width)
        out = self.fuser(features)
        return x + out if self.alpha is None else out + self.alpha * x


class PlainAveyB(nn.Module):
    """The encoder as its authors describe it, under the published names."""

    def __init__(self, config):
        super().__init__()
        size = config.chunk_size
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_embed)
        self.ranker = nn.ParameterDict({"down_proj": torch.empty(size, (config.k + 1) * size)})
        self.layers = nn.ModuleList(PlainLayer(config, dynamic) for dynamic in config.dynamic_layers)
        self.ln_f = nn.RMSNorm(config.d_embed, eps=config.eps) if config.final_norm else nn.Identity()

    def window(self, x: torch.Tensor, y: torch.Tensor, i: int) -> torch.Tensor:
        """Split i of x (B, M, S, D), behind those that it retrieves; y holds the unit vectors. (B, (k + 1) * S, D)."""
        rows = x[:, i]
        if retrieved := min(i, self.config.k):
            scores, index = plain_scores(y[:, i], y[:, :i]).topk(retrieved)
            weights = scores / (scores[:, -1:] + 1e-8)
            others = x[torch.arange(len(x), device=x.device)[:, None], index] * weights[..., None, None]
            rows = torch.cat((others.flatten(1, 2), rows), 1)
        return F.pad(rows, (0, 0, (self.config.k + 1) * self.config.chunk_size - rows.shape[1], 0))

    def process(self, windows: torch.Tensor) -> torch.Tensor:
        """Windows (W, (k + 1) * S, D), compressed and through the layers: (W, S, D)."""
        x = self.ranker["down_proj"] @ windows + windows[:, -self.config.chunk_size :]
        for layer in self.layers:
            x = layer(x)
        return x

    def hidden(
        self, ids: torch.Tensor, window: Callable | None = None, process: Callable | None = None
    ) -> torch.Tensor:
        """Of all tokens, (B, T, D)."""
        size = self.config.chunk_size
        x = F.pad(self.embed(ids), (0, 0, 0, -ids.shape[1] % size)).unflatten(1, (-1, size))
        y = unit(x)
        windows = torch.stack([(window or self.window)(x, y, i) for i in range(x.shape[1])], 1)
        x = (process or self.process)(windows.flatten(0, 1))
        return x.view(len(ids), -1, x.shape[-1])[:, : ids.shape[1]]

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.ln_f(self.hidden(ids)), self.embed.weight)

    def loss(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(ids).float().flatten(0, 1), labels.flatten())


def models(config, device: str, dtype: torch.dtype, share: bool = True) -> tuple[nn.Module, PlainAveyB]:
    """Ours and the plain one with the same random weights; the very same tensors, where they share them."""
    from subquad import AveyBForMaskedLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AveyBForMaskedLM(config).to(dtype)
        plain = PlainAveyB(config).to(dtype)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "norm" in name or "alpha" in name or "ln_f" in name:  # ones would hide that one is left out
                x.uniform_(0.5, 1.5)
    weights = {name.removeprefix("model."): x for name, x in model.state_dict().items() if "lm_head" not in name}
    plain.load_state_dict(weights, assign=share)
    return model.eval(), plain.eval()


def modernbert(config, length: int, device: str, dtype: torch.dtype) -> nn.Module:
    """Of the same width and vocabulary, for so many tokens."""
    from transformers import ModernBertConfig, ModernBertModel

    sizes = MODERNBERT_SIZES.get(config.d_embed)
    if sizes is None:  # of a quick run
        width = config.d_embed
        sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    theirs = ModernBertConfig(vocab_size=config.vocab_size, max_position_embeddings=length, **sizes)
    theirs._attn_implementation = "sdpa"
    if hasattr(theirs, "reference_compile"):  # older ones compile parts of themselves
        theirs.reference_compile = False
    torch.manual_seed(0)
    with torch.device(device):
        return ModernBertModel(theirs).to(dtype).eval()


# Floors.


def mixing(kind: str, rows: int, width: int) -> int:
    """Operations on a window: one product, and where the weights are similarities, one half of theirs."""
    return 2 * rows**2 * width + (0 if kind == STATIC else rows * (rows + 1) * width)


def layer_products(config, dynamic: bool, windows: int) -> int:
    """Operations of a layer on so many windows."""
    size, half = config.chunk_size, config.tail_size // 2
    weights = config.d_embed * (2 * config.expansion_factor * config.d_embed - half)
    return windows * (2 * weights * size + mixing(config.similarity_norm if dynamic else STATIC, size, half))


def products(config, length: int) -> tuple[int, int]:
    """
    Operations of a forward pass over a text that no implementation is spared, without a head, and those of the ranker
    among them. The rows behind the text fill its last split: what they turn into is mixed with the others.
    """
    size, width = config.chunk_size, config.d_embed
    splits = -(-length // size)
    layers = sum(layer_products(config, dynamic, splits) for dynamic in config.dynamic_layers)
    compressor = 2 * size**2 * width * sum(min(i, config.k) + 1 for i in range(splits))
    ranker = size**2 * width * splits * (splits - 1)
    return layers + compressor + ranker, ranker


# The check.


@dataclasses.dataclass(frozen=True)
class Windows:
    """Inputs of an operator."""

    windows: int
    rows: int
    features: int
    width: int
    dtype: torch.dtype
    device: str
    v_dtype: torch.dtype | None = None

    @property
    def row(self) -> dict[str, Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        return {"batch": self.windows, "length": self.rows, "size": self.width, "dtype": dtype}

    def inputs(self, kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
        """Features as the enricher's activation makes them, and the weights of a static layer."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator, device=self.device)

        features = random(self.windows, self.rows, self.features)
        features = features.relu().square() if kind == "sum" else F.gelu(features)
        inputs = {"features": features.to(self.dtype)}
        if kind == STATIC:
            v = random(self.rows, self.rows) / self.rows**0.5
            inputs["v"] = v.to(self.v_dtype or self.dtype)
        return inputs


def operator(kind: str, width: int, **how: Any) -> Callable[..., torch.Tensor]:
    """Ours, a function of [`Windows.inputs`]."""
    if kind == STATIC:
        return lambda features, v: static_mixing(features, v, width, **how)
    return lambda features: dynamic_mixing(features, width, normalization=kind, eps=EPS, **how)


def plain_operator(kind: str, width: int) -> Callable[..., torch.Tensor]:
    if kind == STATIC:
        return functools.partial(plain_static, width=width)
    return functools.partial(plain_dynamic, width=width, normalization=kind, eps=EPS)


def mixing_cases(options) -> Iterator[tuple[Windows, str]]:
    """Shapes, and what to compare with."""
    for dtype in options.check_dtypes:
        small = ((1, 1, 2, 1), (3, 40, 100, 40), (2, 33, 66, 33), (2, 72, 256, 64))
        for sizes in ((2, 9, 24, 8),) if options.quick else small:
            yield Windows(*sizes, dtype, options.device), "reference"
        if options.small_check:
            continue
        # Under autocast v stays as it is.
        yield Windows(1, 256, 3072, 768, dtype, options.device, torch.float32), "reference"
        if options.device != "cpu":
            yield Windows(2, 256, 4096, 1024, dtype, options.device), "reference"
            if dtype.itemsize == 2:  # as many rows as without a compressor
                yield Windows(2, 1024, 3072, 768, dtype, options.device), "reference"
            for windows, features in ((300, 3072), (160, 4096)):
                yield Windows(windows, 256, features, features // 4, dtype, options.device), PLAIN


def mixing_errors(kind: str, shape: Windows, compared: str, backend: str) -> dict[str, float]:
    inputs, width = shape.inputs(kind), shape.width
    torch.manual_seed(0)
    grad = torch.randn(*inputs["features"].shape[:2], shape.features - width, device=shape.device).to(shape.dtype)

    def run(inputs, function):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        out = function(**leaves)
        grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
        return {"out": out.detach(), **{f"d{name}": x for name, x in zip(leaves, grads, strict=True)}}

    exact = operator(kind, width, backend="reference") if compared == "reference" else plain_operator(kind, width)
    found = poisoned(lambda: run(inputs, operator(kind, width, backend=backend)))
    expected = run({name: x.double() for name, x in inputs.items()}, exact)
    errors = {name: relative_error(found[name], expected[name]) for name in found}

    held = {**inputs, "features": inputs["features"].clone()}
    with torch.no_grad():
        out = poisoned(lambda: operator(kind, width, inplace=True, backend=backend)(**held))
    errors["in place"] = relative_error(out, expected["out"])
    # What lies before the gate is not to be written, and the result is to be where the gate was.
    before, after = held["features"][..., :width], held["features"][..., width:]
    if not torch.equal(before, inputs["features"][..., :width]) or not torch.equal(after, out):
        errors["what lies in place"] = math.inf
    return errors


def related_ids(config, device: str, batch: int, length: int) -> torch.Tensor:
    """Ids of which many are those of an earlier split: the nearest splits are so by more than rounding."""
    ids = random_ids(config, device, batch, length)
    for splits, one_in in ((2, 2), (3, 3)):
        ids = ids.roll(splits * config.chunk_size, 1).where(
            random_ids(config, device, batch, length) % one_in == 0, ids
        )
    return ids


def model_errors(config, length: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Of logits, of padded ones too, and of gradients."""
    model, plain = models(config, device, dtype)
    exact = PlainAveyB(config).to(device).double()
    exact.load_state_dict(plain.state_dict())
    ids, short = related_ids(config, device, 2, length), length // 2 + 1
    with torch.no_grad():
        expected, expected_short = exact.logits(ids), exact.logits(ids[1:, :short])
        errors = {
            "logits": relative_error(model(ids).logits, expected),
            f"({PLAIN} itself)": relative_error(plain.logits(ids), expected),
        }
        for side in ("right", "left"):
            mask, padded = torch.ones_like(ids), ids.clone()
            mask[1, short:] = 0
            if side == "left":
                mask[1], padded[1] = mask[1].flip(0), ids[1].roll(length - short)
            logits = model(padded, attention_mask=mask).logits
            errors[f"logits beside {side} padding"] = relative_error(logits[0], expected[0])
            errors[f"logits, {side} padding"] = relative_error(logits[1][mask[1] != 0], expected_short[0])
    if dtype == torch.float32:
        grads = []
        labels = random_ids(config, device, 2, length)
        for loss, parameters in (
            (model(input_ids=ids, labels=labels).loss, dict(model.named_parameters())),
            (exact.loss(ids, labels), dict(exact.named_parameters())),
        ):
            found = torch.autograd.grad(loss, list(parameters.values()))
            names = (name.removeprefix("model.") for name in parameters)
            named = dict(zip(names, found, strict=True))
            # Of one number a small gradient may be the difference of two large ones: of all alphas together.
            alphas = [named.pop(name).flatten() for name in list(named) if name.endswith("alpha")]
            grads.append(named | ({"alpha": torch.cat(alphas)} if alphas else {}))
        errors["gradients"] = max(relative_error(grads[0][name], x) for name, x in grads[1].items())
    return errors


def check(results: Results, options) -> bool:
    """Whether every error is below its tolerance; one row a case."""
    cases, device, backend = Check(results), options.device, options.check_backend
    for (shape, compared), kind in itertools.product(mixing_cases(options), KINDS):
        what = f"static mixing, {shape.windows}" if kind == STATIC else f"dynamic mixing {kind}, {shape.windows}"
        errors = mixing_errors(kind, shape, compared, backend)
        cases.judge(what, shape.row, TOLERANCES[shape.dtype], errors)

    sizes = [(6, 8, 24, "reference")]
    if not options.small_check:
        # Of more tokens two may be equally near but for rounding: their gradients then differ.
        sizes += [(6, 64, 768, "reference"), (64 if device != "cpu" else 16, 256, 768, PLAIN)]
    for (splits, size, width, compared), dtype in itertools.product(sizes, options.check_dtypes):
        x = embeddings(splits, size, width, dtype, device)
        row = {"batch": 1, "length": splits * size, "size": width, "dtype": str(dtype).removeprefix("torch.")}
        errors = ranking_errors(x, x, compared, backend, k=4, order="score", normalization="min")
        cases.judge("split_ranker, the best first", row, SCORE_TOLERANCES[dtype], errors)

    for (variant, fields), (dtype, tolerance) in itertools.product(VARIANTS.items(), MODEL_TOLERANCES.items()):
        configs = [options.small_config] + ([options.config] if device != "cpu" and not options.quick else [])
        for config in configs:
            config, length = type(config)(**{**config.to_diff_dict(), **fields}), 7 * config.chunk_size - 3
            row = {"batch": 2, "length": length, "size": config.d_embed, "dtype": str(dtype).removeprefix("torch.")}
            errors = model_errors(config, length, dtype, device)
            cases.judge(f"{config.n_layers} layers {variant}", row, tolerance, errors)
    return cases.passed(f"{backend} against float64")


# The operators.


def measure_operators(results: Results, options) -> None:
    def measure(name, kind, shape, training):
        one = size_of(*shape.inputs(kind).values())
        inputs = [shape.inputs(kind, seed) for seed in range(sets_beyond_cache(one, options.device))]
        value = shape.windows * shape.rows * shape.dtype.itemsize
        features, out, tail = (n * value for n in (shape.features, shape.features - shape.width, 2 * shape.width))
        product = 2 * shape.windows * shape.rows**2 * shape.width
        operations, moved = shape.windows * mixing(kind, shape.rows, shape.width), 3 * shape.width * value
        if training:
            # Of a product two more, of the similarities, whose gradient is symmetric too, only one more.
            operations += 2 * product if kind == STATIC else 3 * product
            moved = features + out + out + tail + features
        how: dict[str, Any] = {"training": training}
        if name == OURS:
            # In place the gate shrinks, or grows, with every call.
            function = operator(kind, shape.width, inplace=not training)
            how["most"] = 200 if training else 20
        else:
            function = plain_operator(kind, shape.width)
        if name == COMPILED:
            torch.compiler.reset()
            function = torch.compile(function, fullgraph=True, dynamic=False)
        measured = measure_call(options, function, inputs, moved, operations, **how)
        rates = {"teraflops": operations / 1e9, "gigabytes_per_second": moved / 1e6}
        return measured | {field: x / measured["milliseconds"] for field, x in rates.items()}

    names = (OURS, PLAIN, *([COMPILED] if options.compiles else ()))
    for (features, width), windows, kind in itertools.product(options.widths, options.windows, KINDS[:2]):
        shape = Windows(windows, options.config.chunk_size, features, width, options.dtype, options.device)
        for training, name in itertools.product((False, True), names):
            what = f"{'static' if kind == STATIC else 'dynamic'} {width} {'fwd+bwd' if training else 'forward'}"
            row = {"part": "operators", "what": what, "implementation": name, **shape.row}
            results.measure(row, functools.partial(measure, name, kind, shape, training))


# A layer.


def profile(call: Callable[[], Any], device: str, calls: int = 5, most: int = 8) -> list[str]:
    """What each kernel (on a CPU, each operation) takes of a call, the longest first."""
    activity = torch.profiler.ProfilerActivity
    try:
        with torch.profiler.profile(activities=[activity.CPU if device == "cpu" else activity.CUDA]) as found:
            timings(call, device, calls)
        field = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
        times = [(getattr(event, field) / calls, event.count / calls, event.key) for event in found.key_averages()]
    except Exception as error:  # nothing else depends on it
        return [f"no profile: {type(error).__name__}: {error}"]
    whole = sum(time for time, *_ in times)
    if not whole:
        return ["no profile: no kernel was seen"]
    lines = [f"{whole / 1e3:.3f} ms in all"]
    for microseconds, count, name in sorted(times, reverse=True)[:most]:
        if microseconds >= whole / 100:
            lines.append(f"{microseconds / 1e3:8.3f} ms {microseconds / whole:4.0%} {count:3g} x {name[:75]}")
    return lines


@torch.no_grad()
def measure_chain(results: Results, options) -> list[str]:
    """Returns the profiles."""
    config, device = options.config, options.device
    size, width = config.chunk_size, config.d_embed
    config = type(config)(**{**config.to_diff_dict(), "n_layers": 2, "vocab_size": 8})
    model, plain = models(config, device, options.dtype)
    profiles = []

    def measure(layer, dynamic, windows, inputs, what):
        operations = layer_products(config, dynamic, windows)
        moved = 2 * size_of(inputs[0]) + size_of(*layer.parameters())
        if "compiled" in what:
            torch.compiler.reset()
            layer = torch.compile(layer, fullgraph=True, dynamic=False)
        measured = measure_call(options, layer, [{"x": x} for x in inputs], moved, operations)
        if windows == options.chain_windows[0]:
            layer(inputs[0])
            profiles.append(f"{what}, {windows} windows: " + "\n  ".join(profile(lambda: layer(inputs[0]), device)))
        return {**measured, "teraflops": operations / measured["milliseconds"] / 1e9}

    for windows, dynamic in itertools.product(options.chain_windows, (False, True)):
        ours, theirs = model.model.layers[dynamic], plain.layers[dynamic]
        shape = windows, size, width
        sets = sets_beyond_cache(math.prod(shape) * options.dtype.itemsize, device)
        inputs = [torch.randn(shape, device=device).to(options.dtype) for _ in range(sets)]
        what = f"{'dynamic' if dynamic else 'static'} layer {width}"
        layers = {OURS: ours, PLAIN: theirs}
        if options.compiles:
            layers |= {OURS_COMPILED: ours, COMPILED: theirs}
        for name, layer in layers.items():
            row = {"part": "chain", "what": what, "implementation": name, "batch": windows, "length": size}
            row |= {"size": width, "dtype": options.dtype_name}
            results.measure(row, functools.partial(measure, layer, dynamic, windows, inputs, f"{what}, {name}"))
    torch.compiler.reset()
    return profiles


# The encoder.


@torch.no_grad()
def measure_encoding(results: Results, options) -> None:
    config, device = options.config, options.device
    model, plain = models(config, device, options.dtype)
    encoder = model.model
    weights = size_of(*encoder.parameters())
    longest = max(options.lengths)
    calls = {OURS: lambda ids: encoder(ids).last_hidden_state}
    if options.compiles:
        torch.compiler.reset()
        compiled = [torch.compile(function, dynamic=True) for function in (plain.window, plain.process)]
        calls[COMPILED] = lambda ids: plain.hidden(ids, *compiled)
    calls[PLAIN] = plain.hidden
    calls[MODERNBERT] = modernbert(config, longest, device, options.dtype)
    # What the last call of each took, and how long its texts were.
    known: dict[tuple[str, int], tuple[float, int]] = {}

    def measure(name, batch, length, graph, once):
        ids = random_ids(config, device, batch, length)
        call = functools.partial(calls[name], ids)
        if graph and name == OURS:  # which looks at ids, as is not allowed while a graph is captured
            call = captured(lambda: encoder(inputs_embeds=encoder.embed(ids)))
        elif graph:
            call = captured(call)
        found = {}

        def timed():
            # What takes long is called once, or twice where its kernels may still have to be compiled.
            if not once:
                call()
            found["milliseconds"] = timings(call, device, 1)[0]
            if found["milliseconds"] < LONG:
                found["milliseconds"] = median_milliseconds(call, device, options.seconds, options.least)

        if device == "cpu":
            found["MiB"] = resident_mebibytes(timed)
        else:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            timed()
            if not graph:
                found["MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        known[name, batch] = found["milliseconds"], length
        moved = weights + ids.numel() * config.d_embed * options.dtype.itemsize
        least = floor(options, batch * products(config, length)[0], moved)
        return found | with_rate(found["milliseconds"], ids.numel(), least)

    def add(name, batch, length, graph=False) -> bool:
        """Whether there is room for it."""
        milliseconds, shorter = known.get((name, batch), (0.0, length))
        expected = milliseconds * (length / shorter) ** (2 if name == MODERNBERT else 1.2)
        row = {"part": "encode", "what": f"encoder {config.d_embed}", "implementation": name + GRAPH * graph}
        row |= {"batch": batch, "length": length, "size": config.d_embed, "dtype": options.dtype_name}
        if time.monotonic() + expected / 1e3 > results.deadline:
            results.skipped += 1
            return True
        once = expected > 4 * LONG
        done = results.measure(row, functools.partial(measure, name, batch, length, graph, once))
        return done or results.rows[-1].get("note") != "out of memory"

    batch = options.batch
    for length in options.lengths:
        short = [name for name in calls if not add(name, batch, length)]
        if short and batch > 1:
            for name in dict.fromkeys((OURS, *short)):
                add(name, 1, length)
    # A capture that fails may leave something behind.
    for length, name in itertools.product(options.graph_lengths, calls):
        if name != PLAIN:
            add(name, batch, length, graph=True)
    del calls[MODERNBERT]  # its weights are not to be counted
    for length in options.long_lengths:
        add(OURS, batch, length)
    torch.compiler.reset()


def points(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[int, dict[str, Any]]]:
    """What was measured of encoders, by implementation and batch, and by length."""
    found: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["part"] == "encode" and row.get("milliseconds"):
            found.setdefault((row["implementation"], row["batch"]), {})[row["length"]] = row
    return found


def exponent(lengths: list[int], values: list[float]) -> float:
    """Of the power of the length that is nearest to the values, by least squares of their logarithms."""
    x, y = (torch.tensor(numbers, dtype=torch.float64).log() for numbers in (lengths, values))
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def power_laws(rows: list[dict[str, Any]], batch: int) -> list[str]:
    """Throughput as N^-alpha and latency as N^beta: from the length with the highest throughput on, and over all."""
    lines = []
    for (name, size), by_length in points(rows).items():
        if size != batch or len(by_length) < 2 or name.endswith(GRAPH):
            continue
        lengths = sorted(by_length)
        rates, times = ([by_length[n][field] for n in lengths] for field in ("tokens_per_second", "milliseconds"))
        best = rates.index(max(rates))
        tail = "no longer one was measured"
        if best < len(lengths) - 1:
            alpha, beta = -exponent(lengths[best:], rates[best:]), exponent(lengths[best:], times[best:])
            tail = f"alpha {alpha:.2f}, beta {beta:.2f}"
        alpha, beta = -exponent(lengths, rates), exponent(lengths, times)
        lines.append(f"{name}: from {lengths[best]:,} tokens on {tail}; over all alpha {alpha:.2f}, beta {beta:.2f}")
    if lines:
        title = "power laws, tokens/s as N^-alpha, latency as N^beta (over the same lengths beta is alpha + 1);"
        lines.insert(0, f"{title}\n  {PAPER_EXPONENTS}")
    return lines


def targets(rows: list[dict[str, Any]], batch: int) -> list[str]:
    """At every length how many times the tokens/s of others, and whether that is enough; graphs beside graphs."""
    found = points(rows)
    lines = []
    for graph, length in itertools.product(("", GRAPH), sorted({n for by in found.values() for n in by})):
        cells = []
        for name in dict.fromkeys(name for name, *_ in TARGETS):
            least = max(ratio for other, start, ratio in TARGETS if other == name and length >= start)
            for size in dict.fromkeys((batch, 1)):
                pair = [found.get((one + graph, size), {}).get(length) for one in (OURS, name)]
                if all(pair):
                    ratio = pair[0]["tokens_per_second"] / pair[1]["tokens_per_second"]
                    said = "met" if ratio >= least and ratio != 1 else "missed"
                    alone = f" (batch {size})" * (size != batch)
                    cells.append(f"{ratio:.2f} times {name}{graph}{alone}, at least {least:g}: {said}")
                    break
            else:
                if not graph:
                    cells.append(f"no figure of {name}")
        if cells:
            lines.append(f"{length:,} tokens: " + "; ".join(cells))
    return ["targets", *lines] if lines else []


def plot(rows: list[dict[str, Any]], batch: int, path: Path, title: str) -> None:
    lines = {name: by_length for (name, size), by_length in points(rows).items() if size == batch}
    if not lines:
        return
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        print(f"no plot: {error}")
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    colours = list(dict.fromkeys(name.removesuffix(GRAPH) for name in lines))
    for axis, (field, label) in zip(axes, (("tokens_per_second", "tokens/s"), ("milliseconds", "ms")), strict=True):
        for name, by_length in lines.items():
            lengths = sorted(by_length)
            style = {"color": f"C{colours.index(name.removesuffix(GRAPH))}", "linestyle": "-"}
            if name.endswith(GRAPH):
                style["linestyle"] = "--"
            axis.plot(lengths, [by_length[n][field] for n in lengths], marker="o", label=name, **style)
        axis.set(yscale="log", xlabel="tokens of each text", ylabel=label)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    figure.set_layout_engine("constrained")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside center right", fontsize="small")
    figure.suptitle(f"batch {batch}; {title}", fontsize="small")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
    pyplot.close(figure)


# Training.


def masked_ids(config, device: str, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of which every fifth is masked, and the labels of these."""
    labels = random_ids(config, device, batch, length)
    masked = random_ids(config, device, batch, length) % 5 == 0
    return labels.masked_fill(masked, 0), labels.masked_fill(~masked, -100)


def measure_training(results: Results, options) -> None:
    config, (batch, length), device = options.train_config, options.train_shape, options.device

    def measure(name, compiled):
        torch.compiler.reset()  # what was compiled before holds on to its model
        model, plain = models(config, device, torch.float32, share=False)
        trained = model if name == OURS else plain
        del model, plain
        trained.train()
        loss_of = trained.loss if name == PLAIN else lambda ids, labels: trained(input_ids=ids, labels=labels).loss
        if compiled:
            loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False)
        operations, ranker = products(config, length)
        operations += 2 * length * config.d_embed * config.vocab_size
        work = batch * (3 * operations - 2 * ranker)
        inputs = masked_ids(config, device, batch, length)
        return measure_steps_of_training(options, trained, loss_of, batch * length, work / options.multiplied, inputs)

    for compiled in (False, True) if options.compiles else (False,):
        for name in (OURS, PLAIN):
            what = "training, compiled" if compiled else "training"
            row = {"part": "train", "what": what, "implementation": name, "batch": batch, "length": length}
            row |= {"size": config.d_embed, "dtype": options.dtype_name}
            results.measure(row, functools.partial(measure, name, compiled))
    torch.compiler.reset()


# The report.


def parse(arguments: list[str] | None) -> argparse.Namespace:
    from subquad import AveyBConfig
    from subquad.presets import preset_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    add_options(parser, "avey_b.csv (after every row), avey_b.json, avey_b.md and avey_b.png", minutes=8)
    add("--preset", choices=PRESETS, default=PRESETS[0], help=f"default: {PRESETS[0]}")
    add("--batch", type=int, help="texts that are encoded at a time; default: 8 on a GPU, 1 on a CPU")
    add("--lengths", type=int, nargs="+", help="tokens of the texts that are encoded")
    add_compile(parser)
    add("--plot", type=Path, metavar="JSON", help="measure nothing: make the plot of an avey_b.json, beside it")
    options = parser.parse_args(arguments)

    settle(options)
    on_gpu, quick = options.device == "cuda", options.quick

    tiny = AveyBConfig(vocab_size=64, d_embed=32, n_layers=2, chunk_size=8)
    small = AveyBConfig(vocab_size=4096, d_embed=256, n_layers=4)
    options.config = tiny if quick else preset_config(options.preset)
    options.small_config = tiny if quick else small
    options.train_config = tiny if quick else options.config if on_gpu else small
    options.train_shape = (2, 32) if quick else (8, 2048) if on_gpu else (2, 512)
    options.widths = [(64, 16)] if quick else [(3072, 768), (4096, 1024)]
    options.windows = [2] if quick else [64, 1024] if on_gpu else [4, 16]
    # As many as go through the layers at a time where no gradient is needed, then more.
    options.chain_windows = [2] if quick else [128, 1024] if on_gpu else [8]
    options.batch = options.batch or (2 if quick else 8 if on_gpu else 1)
    usual = [128, 256, 512, 1024, 2048]
    options.long_lengths = options.graph_lengths = []
    if not options.lengths:
        options.long_lengths = [96] if quick else [] if on_gpu else [98304]
        options.lengths = [8, 40] if quick else usual
        if on_gpu and not quick:
            options.lengths = [*usual, 4096, 8192, 16384, 32768, 65536, 98304]
    if on_gpu:
        # Of longer ones the kernels take longer than what lies between them.
        options.graph_lengths = [length for length in options.lengths if length <= 2048]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.plot is None:
        run_afresh(run, options)
        return
    report = json.loads(options.plot.read_text())
    batch = max((batch for _, batch in points(report["rows"])), default=1)
    plot(report["rows"], batch, options.plot.with_suffix(".png"), report["versions"])


def run(options: argparse.Namespace) -> None:
    title = versions(options.device)
    path = None if options.out is None else options.out / "avey_b.csv"
    results = Results(path, options.device, options.minutes * 60, title)
    print(title)
    if "check" in options.parts and not check(results, options):
        results.bar.close()
        raise SystemExit(1)

    rates, profiles = "", []
    if set(options.parts) - {"check"}:
        rates = measure_ceilings(options)
    if "train" in options.parts:
        measure_training(results, options)
    if "operators" in options.parts:
        measure_operators(results, options)
    if "chain" in options.parts:
        profiles = measure_chain(results, options)
    if "encode" in options.parts:
        measure_encoding(results, options)
        if options.out is not None:
            plot(results.rows, options.batch, options.out / "avey_b.png", title)
    results.bar.close()
    sections = [*profiles, results.table(), "\n  ".join(power_laws(results.rows, options.batch))]
    if options.device != "cpu":
        sections.append("\n  ".join(targets(results.rows, options.batch)))
    text = "\n".join(section for section in sections if section)
    print(text)
    write_report(results, options, "avey_b", title, rates, text)
    results.exit(options.minutes)


if __name__ == "__main__":
    main()
