"""
Avey and its operators, measured beside the published algorithm, written plainly, on the same inputs.

`plain` is that algorithm in ordinary torch: all rows of every window go through all blocks, the contextualizer makes
tensors of windows x rows x rows, the ranker takes one split after the other, and a token that is generated is ranked
and contextualised without a cache. On a GPU all runs in bfloat16 (training: autocast), on a CPU in float32.

parts (each can be left out, --parts):
  check      the operators, with every gradient, against float64 at small and at full sizes, and the model against
             `plain` in float64. With TRITON_INTERPRET=1 the kernels on a CPU, in float32 at small sizes. If it
             fails, nothing is measured and the exit status is 1.
  operators  contextualizer: forward, and forward and backward, and the sizes of a decoding step; maxsim: of all splits
             of a text, of its last split, of one token
  train      32 x 512 tokens with AdamW, the 153M model (on a CPU 2 x 512 tokens, 4 blocks of width 256)
  decode     one more token by length of the context, the 153M model, batch 1
  ttft       the first token by length of the prompt; a forward pass over all of it, and the ranker's share of that

Times are medians, between device events on a GPU; inputs alternate, so that none is still in the cache. A floor is the
larger of two times: to move inputs and outputs (weights, embeddings) once, and to make the products that cannot be
saved (those on and below the diagonal, and of rows that differ), at the rates that a large copy and a large matrix
product reach in the same run. MiB are the peak beyond what is held before the call; of training, and on a CPU, all
that is held. TFLOP/s count these products only.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measuring import (
    OURS,
    Check,
    Results,
    add_compile,
    add_options,
    extra_mebibytes,
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
    write_report,
)
from torch import nn

from subquad_kernels import contextualizer, maxsim, split_ranker


PARTS = ("check", "operators", "train", "decode", "ttft")
PLAIN, COMPILED = "plain", "plain, compiled"
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
# Products of bfloat16 are exact in float32, in which they are added up.
SCORE_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-4}
MODEL_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


# The published algorithm.


def plain_contextualizer(z: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """For all rows of z (W, C, H); of the result, those that have a gate."""
    y = z / (z.square().sum(-1, keepdim=True) + 1e-8).sqrt()
    mixed = (v.tril() * (y @ y.mT)).to(z.dtype) @ z
    return mixed[:, -gate.shape[1] :] * gate


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


def plain_scores(queries: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """MaxSim of unit vectors, (B, Q, D) and (B, M, S, D): (B, M)."""
    return torch.einsum("bqd,bmsd->bqms", queries, candidates).amax(-1).sum(1)


class PlainBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, features = config.d_embed, config.expansion_factor * config.d_embed
        self.sizes = [config.tail_size // 2, config.tail_size // 2, features - config.tail_size]
        self.rms_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.ctxt = nn.ModuleDict(
            {
                "enricher": nn.Linear(width, features),
                "contextualizer": nn.ParameterDict({"spatial_proj": torch.empty(2 * [config.extended_len])}),
                "fuser": nn.Linear(features - self.sizes[0], width),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tail, gate, head = F.relu(self.ctxt["enricher"](self.rms_norm(x))).square().split(self.sizes, -1)
        mixed = plain_contextualizer(tail, self.ctxt["contextualizer"]["spatial_proj"], gate)
        return x + self.ctxt["fuser"](torch.cat((mixed, head), -1))


class PlainAvey(nn.Module):
    """The model as its authors describe it, under the published names."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.d_embed)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.n_blocks))
        self.ln_f = nn.RMSNorm(config.d_embed, eps=config.rms_norm_eps)

    def splits(self, ids: torch.Tensor) -> torch.Tensor:
        size = self.config.chunk_size
        return F.pad(self.wte(ids), (0, 0, 0, -ids.shape[1] % size)).unflatten(1, (-1, size))

    def window(self, x: torch.Tensor, y: torch.Tensor, i: int) -> torch.Tensor:
        """Split i of x (B, M, S, D), behind those that it retrieves; y holds the unit vectors. (B, C, D)."""
        rows = x[:, i]
        if retrieved := min(i, self.config.k - 1):
            scores = plain_scores(y[:, i], y[:, :i])
            index = scores.topk(retrieved).indices.sort().values
            weights = scores.gather(1, index)
            weights = weights / (weights[:, :1] + 1e-8)
            others = x[torch.arange(len(x), device=x.device)[:, None], index] * weights[..., None, None]
            rows = torch.cat((others.flatten(1, 2), rows), 1)
        return F.pad(rows, (0, 0, self.config.extended_len - rows.shape[1], 0))

    def process(self, windows: torch.Tensor) -> torch.Tensor:
        """The blocks on windows (W, C, D): the rows of their current splits, (W, S, D)."""
        for block in self.blocks:
            windows = block(windows)
        return self.ln_f(windows[:, -self.config.chunk_size :])

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Of all tokens, (B, T, D)."""
        x = self.splits(ids)
        y = unit(x)
        windows = torch.stack([self.window(x, y, i) for i in range(x.shape[1])], 1)
        return self.process(windows.flatten(0, 1)).view(len(ids), -1, x.shape[-1])[:, : ids.shape[1]]

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        logits = F.linear(self.hidden(ids), self.wte.weight)[:, :-1]
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def next_token(self, ids: torch.Tensor, process: Callable | None = None) -> torch.Tensor:
        """Logits (B, 1, vocabulary) after the last token: only the last split is ranked and contextualised."""
        x = self.splits(ids)
        rows = (process or self.process)(self.window(x, unit(x), x.shape[1] - 1))
        return F.linear(rows[:, (ids.shape[1] - 1) % self.config.chunk_size, None], self.wte.weight)


def models(config, device: str, dtype: torch.dtype, share: bool = True) -> tuple[nn.Module, PlainAvey]:
    """Ours and the plain one with the same random weights; the very same tensors, where they share them."""
    from subquad import AveyForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AveyForCausalLM(config).to(dtype)
        plain = PlainAvey(config).to(dtype)
    weights = {name.removeprefix("model."): x for name, x in model.state_dict().items() if "lm_head" not in name}
    plain.load_state_dict(weights, assign=share)
    return model.eval(), plain.eval()


def random_ids(config, device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(1, config.vocab_size, shape, generator=generator, device=device)


# Floors.


def products(config, length: int, last_only: bool = False) -> tuple[int, int]:
    """
    Operations of a forward pass over so many tokens that no implementation is spared, and those of the ranker among
    them. Rows for missing splits are the same in every window.
    """
    size, most, width = config.chunk_size, config.k - 1, config.d_embed
    splits = -(-length // size)
    chosen = [splits - 1] if last_only else range(splits)
    kept = 1 if last_only else length
    rows, places = 0, 0
    for i in chosen:
        ends = (length - 1) % size + 1 if i == splits - 1 else size
        own = min(i, most) * size + ends
        end = most * size + ends
        rows += own
        places += (end * (end + 1) - (end - own) * (end - own + 1)) // 2
    half = config.tail_size // 2
    weights = width * (2 * config.expansion_factor * width - half)
    blocks = 2 * weights * ((config.n_blocks - 1) * rows + kept) + 4 * half * config.n_blocks * places
    ranker = 2 * width * size**2 * sum(chosen)
    return blocks + ranker + 2 * kept * width * config.vocab_size, ranker


def mixing(context: int, queries: int, width: int) -> int:
    """Operations of the contextualizer on a window: the two products, on and below the diagonal."""
    return 2 * width * (context * (context + 1) - (context - queries) * (context - queries + 1))


# The check.


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Inputs of the contextualizer."""

    windows: int
    context: int
    rows: int
    queries: int
    width: int
    dtype: torch.dtype
    device: str
    v_dtype: torch.dtype | None = None

    @property
    def row(self) -> dict[str, Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        return {"batch": self.windows, "length": self.rows, "size": self.width, "dtype": dtype}

    def inputs(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """z and the gate are parts of wider rows, as in a model, where they come out of relu(x)²."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator, device=self.device)

        tail = random(self.windows, self.rows, 2 * self.width).relu().square().to(self.dtype)
        z, gate = tail.split(self.width, -1)
        v = random(self.context, self.context) / self.context**0.5
        inputs = {"z": z, "v": v.to(self.v_dtype or self.dtype)}
        inputs["gate"] = gate[:, -self.queries :]
        if self.rows < self.context:
            inputs["prefix"] = random(self.context - self.rows, self.width).to(self.dtype)
        return inputs


def mixing_cases(options):
    """Shapes, and what to compare with."""
    for dtype in options.check_dtypes:
        for sizes in ((1, 1, 1, 1, 8), (3, 80, 80, 80, 40), (3, 80, 33, 33, 40), (2, 72, 50, 7, 64)):
            yield Mixing(*sizes, dtype, options.device), "reference"
        if options.small_check:
            continue
        for rows, queries in ((512, 512), (128, 128), (512, 1)):
            # Under autocast v stays as it is.
            yield Mixing(1, 512, rows, queries, 768, dtype, options.device, torch.float32), "reference"
        if options.device != "cpu":
            yield Mixing(1, 512, 512, 512, 2048, dtype, options.device), "reference"
            for windows, width in ((256, 768), (40, 2048)):
                yield Mixing(windows, 512, 512, 512, width, dtype, options.device), PLAIN


def mixing_errors(shape: Mixing, compared: str, backend: str) -> dict[str, float]:
    inputs = shape.inputs()
    torch.manual_seed(0)
    grad = torch.randn(inputs["gate"].shape, device=shape.device).to(shape.dtype)

    def run(inputs, function):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        out = function(**leaves)
        grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
        return {"out": out.detach(), **{f"d{name}": x for name, x in zip(leaves, grads, strict=True)}}

    def exact(**inputs):
        if compared == PLAIN:
            return plain_contextualizer(**inputs)
        return contextualizer(**inputs, queries=shape.queries, backend="reference")

    ours = functools.partial(contextualizer, queries=shape.queries, backend=backend)
    found = poisoned(lambda: run(inputs, ours))
    expected = run({name: x.double() for name, x in inputs.items()}, exact)
    return {name: relative_error(found[name], expected[name]) for name in found}


def embeddings(splits: int, size: int, width: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """(1, splits, size, width), in which neighbouring splits have something in common."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = 1, splits, size, width
    x, topics = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return (x + 0.5 * topics[:, :, :1].cumsum(1) / splits**0.5).to(dtype)


def ranking_errors(
    splits: torch.Tensor, queries: torch.Tensor, compared: str, backend: str, k: int = 8, **how: str
) -> dict[str, float]:
    """
    Of scores, weights and, of the weights, gradients; infinite where other splits are chosen. In `how`: order and
    normalization.
    """
    count = splits.shape[1]
    last = queries.shape[1] == 1
    number = torch.arange(count, device=splits.device)[-queries.shape[1] :][None]
    scores = poisoned(lambda: maxsim(queries, splits, number, backend=backend))
    if compared == PLAIN:
        exact = whole_scores(queries.double(), splits.double(), number)
    else:
        exact = maxsim(queries.double(), splits.double(), number, backend="reference")
    candidate = exact.isfinite()
    errors = {"scores": relative_error(scores[candidate], exact[candidate])}
    if not torch.equal(scores.isneginf(), ~candidate):
        errors["candidates"] = math.inf
    if compared == PLAIN or last:
        return errors

    k = min(k, count)
    torch.manual_seed(0)
    grad = torch.randn(1, count, k - 1, device=splits.device)

    def run(splits, backend):
        leaf = splits.detach().requires_grad_()
        given = scores.to(torch.promote_types(splits.dtype, torch.float32))
        index, weights, _ = split_ranker(leaf, leaf, k, number, scores=given, backend=backend, **how)
        return index, weights.detach(), *torch.autograd.grad(weights, leaf, grad.to(weights))

    (index, *found), (expected_index, *expected) = run(splits, backend), run(splits.double(), "reference")
    if not torch.equal(index, expected_index):
        errors["choice"] = math.inf
    for name, x, y in zip(("weights", "gradient"), found, expected, strict=True):
        errors[name] = relative_error(x, y)
    # They are sums of few products, but are put out in the dtype of the embeddings.
    errors["gradient"] *= SCORE_TOLERANCES[splits.dtype] / TOLERANCES[splits.dtype]
    return errors


def model_errors(config, length: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Of logits, at once and with a cache, and of gradients."""
    model, plain = models(config, device, dtype)
    exact = PlainAvey(config).to(device).double()
    exact.load_state_dict(plain.state_dict())
    ids = random_ids(config, device, 2, length)
    steps = min(5, length // 2)
    with torch.no_grad():
        expected = F.linear(exact.hidden(ids), exact.wte.weight)
        out = model(ids[:, :-steps], logits_to_keep=1)
        for t in range(length - steps, length):
            out = model(ids[:, t : t + 1], past_key_values=out.past_key_values)
        errors = {
            "logits": relative_error(model(ids).logits, expected),
            "last logits": relative_error(model(ids, logits_to_keep=1).logits, expected[:, -1:]),
            "logits with a cache": relative_error(out.logits, expected[:, -1:]),
            f"({PLAIN} itself)": relative_error(F.linear(plain.hidden(ids), plain.wte.weight), expected),
        }
    if dtype == torch.float32:
        grads = []
        for loss, parameters in (
            (model(input_ids=ids, labels=ids).loss, dict(model.model.named_parameters())),
            (exact.loss(ids), dict(exact.named_parameters())),
        ):
            found = torch.autograd.grad(loss, list(parameters.values()))
            grads.append(dict(zip(parameters, found, strict=True)))
        errors["gradients"] = max(relative_error(grads[0][name], x) for name, x in grads[1].items())
    return errors


def check(results: Results, options) -> bool:
    """Whether every error is below its tolerance; one row a case."""
    cases, device = Check(results), options.device
    for shape, compared in mixing_cases(options):
        what = f"contextualizer, {shape.queries} of {shape.context} rows"
        cases.judge(what, shape.row, TOLERANCES[shape.dtype], mixing_errors(shape, compared, options.check_backend))

    sizes = [(5, 8, 24, "reference")]
    if not options.small_check:
        sizes += [(16, 64, 768, "reference"), (256 if device != "cpu" else 32, 64, 768, PLAIN)]
    for (splits, size, width, compared), dtype in itertools.product(sizes, options.check_dtypes):
        x = embeddings(splits, size, width, dtype, device)
        row = {"batch": 1, "length": splits * size, "size": width, "dtype": str(dtype).removeprefix("torch.")}
        for what, queries in (("all splits", x), ("last split", x[:, -1:]), ("one token", x[:, -1:, -1:])):
            errors = ranking_errors(x, queries, compared, options.check_backend)
            cases.judge(f"split_ranker, {what}", row, SCORE_TOLERANCES[dtype], errors)

    for dtype, tolerance in MODEL_TOLERANCES.items():
        config, length = options.small_config, 11 * options.small_config.chunk_size - 3
        row = {"batch": 2, "length": length, "size": config.d_embed, "dtype": str(dtype).removeprefix("torch.")}
        errors = model_errors(config, length, dtype, device)
        cases.judge(f"model of {config.n_blocks} blocks", row, tolerance, errors)
        if device != "cpu" and not options.quick:
            config = options.config
            row["size"] = config.d_embed
            errors = model_errors(config, length, dtype, device)
            cases.judge(f"model of {config.n_blocks} blocks", row, tolerance, errors)
    return cases.passed(f"{options.check_backend} against float64")


# The operators.


def measure_contextualizer(results: Results, options) -> None:
    def rows_of(shape: Mixing, what: str, names: tuple[str, ...], **how: bool) -> None:
        def measure(name):
            one, out = (size_of(*x) for x in (shape.inputs().values(), [shape.inputs()["gate"]]))
            inputs = [shape.inputs(seed) for seed in range(sets_beyond_cache(one, options.device))]
            operations = shape.windows * mixing(shape.context, shape.queries, shape.width)
            moved = one + out
            if how.get("training"):
                operations, moved = 3 * operations, 3 * one + 2 * out
            function = plain_contextualizer
            if name == OURS:
                function = functools.partial(contextualizer, queries=shape.queries)
            elif name == COMPILED:
                torch.compiler.reset()
                function = torch.compile(function, fullgraph=True, dynamic=False)
            measured = measure_call(options, function, inputs, moved, operations, **how)
            return {**measured, "teraflops": operations / measured["milliseconds"] / 1e9}

        for name in names:
            row = {"part": "operators", "what": what, "implementation": name, **shape.row}
            results.measure(row, functools.partial(measure, name))

    context, on_gpu = options.context, options.device != "cpu"
    for windows, width in options.mixings:
        shape = Mixing(windows, context, context, context, width, options.dtype, options.device)
        for training in (False, True):
            what = f"contextualizer {width} {'fwd+bwd' if training else 'forward'}"
            rows_of(shape, what, (OURS, PLAIN, *([COMPILED] if on_gpu else ())), training=training)
    for width, queries in itertools.product(sorted({width for _, width in options.mixings}), options.queries):
        shape = Mixing(1, context, context, queries, width, options.dtype, options.device)
        for graph in (False, True) if on_gpu else (False,):
            what = f"contextualizer {width} last {queries}{', graph' * graph}"
            rows_of(shape, what, (OURS, PLAIN), graph=graph)


def loop_scores(queries: torch.Tensor, splits: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """As published: each split of queries, all of those there are, with the ones before it."""
    splits = unit(splits)
    scores = torch.full((*queries.shape[:2], splits.shape[1]), -torch.inf, dtype=splits.dtype, device=splits.device)
    for i in range(1, splits.shape[1]):
        scores[:, i, :i] = plain_scores(splits[:, i], splits[:, :i])
    return scores


def last_scores(queries: torch.Tensor, splits: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Of one split, the last."""
    return plain_scores(unit(queries[:, 0]), unit(splits))


def whole_scores(queries: torch.Tensor, splits: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Every token with every token."""
    similar = unit(queries).flatten(1, 2) @ unit(splits).flatten(1, 2).mT
    similar = similar.view(*queries.shape[:3], *splits.shape[1:3])
    scores = similar.amax(-1).sum(2)
    split = torch.arange(splits.shape[1], device=splits.device)
    return scores.masked_fill(split >= number[..., None], -torch.inf)


def measure_maxsim(results: Results, options) -> None:
    size, width, device = options.config.chunk_size, options.config.d_embed, options.device
    itemsize = options.dtype.itemsize

    def measure(function, length, queries, tokens, **how):
        """Of so many tokens of the last `queries` splits."""
        count = length // size
        inputs = []
        for seed in range(sets_beyond_cache(length * width * itemsize, device)):
            x = embeddings(count, size, width, options.dtype, device, seed)
            number = torch.arange(count - queries, count, device=device)[None]
            inputs.append({"queries": x[:, -queries:, size - tokens :], "splits": x, "number": number})
        candidates = sum(range(count - queries, count))
        moved = length * width * itemsize + 4 * queries * count
        return measure_call(options, function, inputs, moved, 2 * tokens * candidates * size * width, **how)

    for length in options.rank_lengths:
        count = length // size
        ways = [
            ("all splits", count, size, {OURS: maxsim, "plain loop": loop_scores}, {"once": length > options.long})
        ]
        if length**2 * itemsize <= options.most_bytes:
            ways[0][3]["plain whole"] = whole_scores
        for graph in (False, True) if device != "cpu" else (False,):
            for what, tokens in (("last split", size), ("one token", 1)):
                functions = {OURS: maxsim, PLAIN: last_scores}
                ways.append((f"{what}{', graph' * graph}", 1, tokens, functions, {"graph": graph}))
        for what, queries, tokens, functions, how in ways:
            row = {"part": "operators", "what": f"maxsim {what}", "batch": 1, "length": length, "size": width}
            for name, function in functions.items():
                named = {**row, "implementation": name, "dtype": options.dtype_name}
                results.measure(named, functools.partial(measure, function, length, queries, tokens, **how))


# The model.


def measure_steps_of_training(
    options, model: nn.Module, loss_of: Callable, tokens: int, floor: float, batch: tuple[torch.Tensor, ...]
) -> dict[str, Any]:
    """Fields of a row for steps of AdamW on so many tokens, whose loss is loss_of(*batch)."""
    device, losses = options.device, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    autocast = torch.autocast(device, torch.bfloat16) if device != "cpu" else contextlib.nullcontext()

    def step():
        with autocast:
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    start = time.perf_counter()
    step()
    losses[0].item()
    first = time.perf_counter() - start
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    milliseconds = median_milliseconds(step, device, 8 * options.seconds, options.least)
    measured = with_rate(milliseconds, tokens, floor)
    if device != "cpu":
        measured["MiB"] = torch.cuda.max_memory_allocated() / 2**20
    note = f"first step {first:.1f} s, loss {losses[0].item():.3f}, then {losses[-1].item():.3f}"
    return {**measured, "note": note}


def measure_training(results: Results, options) -> None:
    config, (batch, length), device = options.train_config, options.train_shape, options.device

    def measure(name, compiled):
        torch.compiler.reset()  # what was compiled before holds on to its model
        model, plain = models(config, device, torch.float32, share=False)
        trained = model if name == OURS else plain
        del model, plain
        trained.train()
        loss_of = (lambda ids: trained(input_ids=ids, labels=ids).loss) if name == OURS else trained.loss
        if compiled:
            loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False)
        ids = random_ids(config, device, batch, length)
        work = 3 * batch * products(config, length)[0] - 2 * batch * products(config, length)[1]
        return measure_steps_of_training(options, trained, loss_of, ids.numel(), work / options.multiplied, (ids,))

    for compiled in (False, True) if options.compiles else (False,):
        for name in (OURS, PLAIN):
            what = "training, compiled" if compiled else "training"
            row = {"part": "train", "what": what, "implementation": name, "batch": batch, "length": length}
            row |= {"size": config.d_embed, "dtype": options.dtype_name}
            results.measure(row, functools.partial(measure, name, compiled))


def steps_of_ours(model: nn.Module, ids: torch.Tensor, start: int, compiled: bool) -> Callable[[int], Any]:
    """Reads the prompt; then a function that reads one token more at every call."""
    cache = model.new_cache(static=compiled, max_cache_len=ids.shape[1])
    model(ids[:, :start], past_key_values=cache, logits_to_keep=1)
    tokens = [token.clone() for token in ids[:, start:].split(1, 1)]
    step = model
    if compiled:  # as `generate(cache_implementation="static")` does it
        step = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def call(t):
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        return step(tokens[t], past_key_values=cache, logits_to_keep=1).logits

    return call


def steps_of_plain(plain: PlainAvey, ids: torch.Tensor, start: int, process: Callable | None) -> Callable[[int], Any]:
    def call(t):
        if process is not None:
            torch.compiler.cudagraph_mark_step_begin()
        return plain.next_token(ids[:, : start + t + 1], process)

    return call


@torch.no_grad()
def measure_decoding(results: Results, options) -> None:
    config, device, size = options.config, options.device, options.config.chunk_size
    model, plain = models(config, device, options.dtype)
    weights = sum(x.numel() for x in model.parameters())
    steps = size if device != "cpu" else min(options.steps, size)
    warm_up = 4 if device != "cpu" else 1

    def measure(name, length, compiled):
        # The middle of the last split: a window of ours holds as many rows as are there.
        start = length - size // 2 - steps // 2 - warm_up
        ids = random_ids(config, device, 1, start + warm_up + steps)
        if name == OURS:
            step = steps_of_ours(model, ids, start, compiled)
        else:
            step = steps_of_plain(plain, ids, start, compiled_process if compiled else None)
        begin = time.perf_counter()
        step(0).sum().item()
        first = time.perf_counter() - begin
        for t in range(1, warm_up):
            step(t)
        times = itertools.count(warm_up)
        milliseconds = statistics.median(timings(lambda: step(next(times)), device, steps))
        operations, ranker = products(config, length - size // 2, last_only=True)
        operations -= ranker - ranker // size
        least = floor(options, operations, (weights + length * config.d_embed) * options.dtype.itemsize)
        return {
            "milliseconds": milliseconds,
            "floor_milliseconds": least,
            **({"note": f"first step {first:.1f} s"} if compiled else {}),
        }

    ways = [("one more token", False, name) for name in (OURS, PLAIN)]
    if options.compiles:
        torch.compiler.reset()
        compiled_process = torch.compile(plain.process, mode="reduce-overhead", fullgraph=True, dynamic=False)
        ways += [("one more token, compiled", True, name) for name in (PLAIN, OURS)]
    for what, compiled, name in ways:
        for length in options.contexts:
            row = {"part": "decode", "what": what, "implementation": name, "batch": 1, "length": length}
            row |= {"size": config.d_embed, "dtype": options.dtype_name}
            results.measure(row, functools.partial(measure, name, length, compiled))
    torch.compiler.reset()


@torch.no_grad()
def measure_prompts(results: Results, options) -> None:
    config, device = options.config, options.device
    model, plain = models(config, device, options.dtype)
    weights = sum(x.numel() for x in model.parameters())
    shares: list[str] = []

    def measure(call, length, operations, once=False, read=weights):
        moved = (read + length * config.d_embed) * options.dtype.itemsize
        measured = {"floor_milliseconds": floor(options, operations, moved)}
        how = (0, 1, 1) if once else (options.seconds, options.least)

        def timed():
            measured["milliseconds"] = median_milliseconds(call, device, *how, warm_up=not once)

        if device != "cpu":
            timed()
            return {**measured, "MiB": extra_mebibytes(call, device)}
        held = resident_mebibytes(timed)
        return {**measured, "MiB": held}

    def add(what, name, length, *arguments, **how) -> float | None:
        row = {"part": "ttft", "what": what, "implementation": name, "batch": 1, "length": length}
        row |= {"size": config.d_embed, "dtype": options.dtype_name}
        done = results.measure(row, functools.partial(measure, *arguments, **how))
        return results.rows[-1]["milliseconds"] if done else None

    for length in options.prompts:
        ids = random_ids(config, device, 1, length)
        operations = products(config, length, last_only=True)[0]
        ours = functools.partial(model, ids, logits_to_keep=1, use_cache=True)
        add("first token", OURS, length, ours, length, operations)
        add("first token", PLAIN, length, functools.partial(plain.next_token, ids), length, operations)
    for length in options.prompts:
        ids = random_ids(config, device, 1, length)
        operations, ranker = products(config, length)
        operations -= 2 * length * config.d_embed * config.vocab_size
        whole = None
        if length <= options.whole:
            what, once = "all tokens, without head", device == "cpu"
            ours = functools.partial(model.model, ids, use_cache=False)
            whole = add(what, OURS, length, ours, length, operations, once=once)
            add(what, PLAIN, length, functools.partial(plain.hidden, ids), length, operations, once=once)
        splits = plain.splits(ids)
        number = torch.arange(splits.shape[1], device=device)[None]
        ours = functools.partial(split_ranker, splits, splits, config.k, number)
        how = {"once": length > options.long, "read": 0}
        alone = add("ranking of all splits", OURS, length, ours, length, ranker, **how)
        if whole and alone:
            shares.append(f"{length:,} tokens {alone / whole:.1%}")
    if shares:
        results.bar.clear()
        print(f"the ranker's share of a forward pass over all tokens: {', '.join(shares)}")


# The report.


def parse(arguments: list[str] | None) -> argparse.Namespace:
    from subquad import AveyConfig
    from subquad.presets import preset_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    add_options(parser, "avey.csv (after every row), avey.json and avey.md", minutes=8)
    add("--lengths", type=int, nargs="+", help="tokens of contexts and prompts")
    add_compile(parser)
    options = parser.parse_args(arguments)

    settle(options)
    on_gpu, quick = options.device == "cuda", options.quick

    tiny = AveyConfig(vocab_size=64, d_embed=32, n_blocks=2, chunk_size=8, k=4)
    small = AveyConfig(vocab_size=4096, d_embed=256, n_blocks=4)
    options.config = tiny if quick else preset_config("avey-0.1b")
    options.small_config = tiny if quick else small
    options.train_config = tiny if quick else options.config if on_gpu else small
    options.train_shape = (2, 32) if quick else (32, 512) if on_gpu else (2, 512)
    options.context = options.config.extended_len
    options.mixings = [(2, 16)] if quick else list(itertools.product((32, 256) if on_gpu else (4, 16), (768, 2048)))
    options.queries = (1, options.config.chunk_size)
    options.steps = 4
    if quick:
        options.contexts, options.prompts, options.rank_lengths = [[64]] * 3
    elif on_gpu:
        options.contexts = [512, 8192, 65536]
        options.prompts = [512, 2048, 8192, 16384, 32768, 65536, 131072]
        options.rank_lengths = [4096, 16384, 65536, 131072]
    else:
        options.contexts, options.prompts = [512, 8192, 65536], [512, 1024, 8192, 65536]
        options.rank_lengths = [4096, 16384]
    if options.lengths:
        options.contexts = options.prompts = options.rank_lengths = options.lengths
    # Longer ones are measured once, or not as a whole, where that would take too long or too much memory.
    options.long = 2**30 if on_gpu else 8192
    options.whole = 2**30 if on_gpu else 1024
    options.most_bytes = 48 * 2**30 if on_gpu else 2**31
    return options


def main(arguments: list[str] | None = None) -> None:
    run_afresh(run, parse(arguments))


def run(options: argparse.Namespace) -> None:
    title = versions(options.device)
    path = None if options.out is None else options.out / "avey.csv"
    results = Results(path, options.device, options.minutes * 60, title)
    print(title)
    if "check" in options.parts and not check(results, options):
        results.bar.close()
        raise SystemExit(1)

    rates = ""
    if set(options.parts) - {"check"}:
        rates = measure_ceilings(options)
    # The short ones first.
    for part, measure in (
        ("ttft", measure_prompts),
        ("train", measure_training),
        ("operators", lambda *a: (measure_maxsim(*a), measure_contextualizer(*a))),
        ("decode", measure_decoding),
    ):
        if part in options.parts:
            measure(results, options)
    results.bar.close()
    table = results.table()
    print(table)
    write_report(results, options, "avey", title, rates, table)
    results.exit(options.minutes)


if __name__ == "__main__":
    main()
