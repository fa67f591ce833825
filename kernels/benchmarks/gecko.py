"""
The operators of Gecko and the model around them, measured beside plain torch.

On a GPU all runs in bfloat16: the Triton kernels, `eager` (the same operators parallel over time in torch) and
`plain`, what one would write first: cumulative sums for the norm, a convolution by FFT for CEMA, a product a chunk for
the memory, scaled_dot_product_attention with a mask over each chunk and the one before; the same compiled, and
flex_attention. On a CPU, where `subquad` is the form parallel over time, all runs in float32.

parts (each can be left out, --parts):
  check      every operator (outputs, states, every gradient, the step in place) and its plain form against the
             recurrence in float64. With TRITON_INTERPRET=1 the kernels on a CPU, in float32 at small sizes. If it
             fails, nothing else is measured and the exit status is 1.
  operator   forward, and forward and backward, by length, at the sizes of Gecko 7B (on a CPU smaller ones). What puts
             out something else than ours is not measured; what has to be compiled comes last.
  step       one token: as a call, and replayed from a CUDA graph; `plain` is the recurrence as the paper writes it,
             of attention scaled_dot_product_attention
  train      a step of training Gecko 1B (on a CPU 4 layers of width 256) by length
  decode     one token of Gecko 1B (on a CPU 8 layers of width 512) by the length of the text before, with a cache that
             grows to its full size and with a static one (on a GPU with compiled steps). Once in a chunk the memory
             absorbs another, which takes longer: see `memory step, absorbs`.
  long       a text of --tokens tokens, read in pieces by Gecko 1B (on a CPU 4 layers of width 96)

Times are medians, between device events on a GPU; inputs alternate, so that none is still in the cache. A floor is the
time to multiply, or to move inputs and outputs once (of a model: to multiply, or to read the weights), at the rates
that a large matrix product and a large copy reach in the same run. Memory of an operator is the peak beyond its
inputs; of a model all that is held, on a CPU by the process.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gecko_operators import ATTENTION, MEMORY, OPERATORS, PLAIN_FORMS, STATES, Sizes, flex, ours
from measuring import (
    OURS,
    Check,
    Results,
    add_compile,
    add_options,
    measure_call,
    measure_ceilings,
    poisoned,
    relative_error,
    resident_mebibytes,
    run_afresh,
    sets_beyond_cache,
    settle,
    size_of,
    timings,
    versions,
    wall_milliseconds,
    with_rate,
    write_report,
)
from models import CausalModel
from raven import within
from torch import Tensor


PARTS = ("check", "operator", "step", "train", "decode", "long")
EAGER, PLAIN, COMPILED, FLEX = "eager", "plain", "plain, compiled", "flex_attention"
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def implementation(name: str, operator: str, sizes: Sizes, options) -> Callable[..., Tensor]:
    if name in (OURS, EAGER) or sizes.length == 1:
        backend = {OURS: options.backend, EAGER: "eager", PLAIN: "reference"}[name]
        return lambda **inputs: ours(operator, sizes, backend, **inputs)[0]
    plain = functools.partial(PLAIN_FORMS[operator], sizes)
    if name == PLAIN:
        return plain
    torch.compiler.reset()
    return flex(sizes) if name == FLEX else torch.compile(plain, fullgraph=True, dynamic=False)


# The check.


def cases(options) -> Iterator[tuple[Sizes, str]]:
    """Sizes, and the operator that is checked at these."""
    dtypes, sizes = options.check_dtypes, (128, 16, 4, 2, 32, 96, 16)
    every = [(Sizes(2, 1, *sizes, dtype, options.device), (1, 65, 200), OPERATORS) for dtype in dtypes]
    if options.small_check:
        every = [(Sizes(1, 1, 8, 2, 2, 2, 4, 6, 4, torch.float32, options.device), (1, 19), OPERATORS)]
    elif options.device != "cpu":
        published = dataclasses.replace(options.sizes[0], batch=1)
        every.append((dataclasses.replace(published, chunk=64), (1, 300), OPERATORS))
        every.append((published, (6149,), (ATTENTION, MEMORY)))
    for sizes, lengths, operators in every:
        for length, operator in itertools.product(lengths, operators):
            for absorbs in (False, True) if length == 1 and operator == MEMORY else (False,):
                yield dataclasses.replace(sizes, length=length, absorbs=absorbs), operator


def outcome(function: Callable[..., Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """
    By name, the output of a function, and its states and the gradients of its inputs where these are weighed so; or,
    of one token, the states in place.
    """
    states = {name: inputs[name].clone() for name in STATES if name in inputs}
    if states or inputs["q" if "q" in inputs else "x"].shape[-2] == 1:
        with torch.no_grad():
            out, *_ = function(**{**inputs, **states})
        return {"out": out, **states}
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    results = function(**leaves)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(0)
    weights = [torch.randn(x.shape, device=x.device).to(x.dtype) for x in results]
    grads = torch.autograd.grad(results, list(leaves.values()), weights, materialize_grads=True)
    found = dict(zip(("out", "state", "normalizer"), (x.detach() for x in results), strict=False))
    return found | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}


def check(results: Results, options) -> bool:
    """Whether every error is below its tolerance; one row a case."""
    judged, backend = Check(results), options.check_backend
    for sizes, operator in cases(options):
        inputs = sizes.inputs(operator)
        exact = {name: x if name in STATES else x.double() for name, x in inputs.items()}
        of_ours = functools.partial(ours, operator, sizes)
        forms = {operator: (functools.partial(of_ours, backend), functools.partial(of_ours, "reference"))}
        if sizes.length > 1:
            plain = functools.partial(PLAIN_FORMS[operator], sizes)
            forms[f"{operator}, plain"] = plain, lambda of_ours=of_ours, **inputs: of_ours("reference", **inputs)[0]
        for what, (function, reference) in forms.items():
            found, expected = poisoned(functools.partial(outcome, function, inputs)), outcome(reference, exact)
            errors = {name: relative_error(found[name], x) for name, x in expected.items()}
            what += " step" * (sizes.length == 1) + ", absorbs" * sizes.absorbs
            judged.judge(what, sizes.row, TOLERANCES[sizes.dtype], errors)
    return judged.passed(f"{backend} and plain against the recurrences in float64")


# The operators, and one token.


def measure_operator(name: str, operator: str, sizes: Sizes, how: dict[str, bool], options) -> dict[str, Any]:
    function, one = implementation(name, operator, sizes, options), sizes.inputs(operator)
    if name != OURS and sizes.length > 1:
        with torch.no_grad():
            error = relative_error(function(**one), implementation(OURS, operator, sizes, options)(**one).double())
        if not error < TOLERANCES[sizes.dtype]:
            raise ValueError(f"the output differs from ours by {error:.1e}")
    moved, operations = sizes.work(operator, one, how.get("training", False))
    sets = min(sets_beyond_cache(size_of(*one.values()), sizes.device), 64)
    inputs = [one, *(sizes.inputs(operator, seed) for seed in range(1, sets))]
    return measure_call(options, function, inputs, moved, operations, **how)


def measure(results: Results, part: str, operator: str, sizes: Sizes, names: tuple[str, ...], options, **how) -> None:
    what = "step" + ", absorbs" * sizes.absorbs + ", graph" * how.get("graph", False)
    if part == "operator":
        what = "forward+backward" if how["training"] else "forward"
    for name in names:
        if name == (EAGER if operator == ATTENTION else FLEX):
            continue  # ours is eager there
        if how.get("graph") and (operator, name) == (MEMORY, PLAIN):
            continue  # the recurrence looks at where chunks begin
        row = {"part": part, "what": f"{operator} {what}", "implementation": name, **sizes.row}
        results.measure(row, functools.partial(measure_operator, name, operator, sizes, how, options))


def measure_operators(results: Results, options) -> None:
    for names in ((OURS, *options.eager, PLAIN), (COMPILED, FLEX) if options.compiles else ()):
        for operator, sizes, training in itertools.product(OPERATORS, options.sizes, (False, True)):
            if operator != MEMORY or sizes.length > 2 * sizes.chunk:  # or nothing is absorbed
                measure(results, "operator", operator, sizes, names, options, training=training)


def measure_steps(results: Results, options) -> None:
    graphs, ways = (False, True) if options.device != "cpu" else (False,), [(name, False) for name in OPERATORS]
    for (operator, absorbs), batch, graph in itertools.product([*ways, (MEMORY, True)], options.batches, graphs):
        sizes = dataclasses.replace(options.sizes[0], batch=batch, length=1, absorbs=absorbs)
        measure(results, "step", operator, sizes, (OURS, *options.eager, PLAIN), options, graph=graph)


# The model.


def with_memory(function: Callable[[], dict[str, Any]], device: str) -> dict[str, Any]:
    """What a function measures, and the most that is held meanwhile, on a CPU by the process."""
    measured = {}
    if device == "cpu":
        held = resident_mebibytes(lambda: measured.update(function()))
    else:
        torch.cuda.reset_peak_memory_stats()
        measured.update(function())
        held = torch.cuda.max_memory_allocated() / 2**20
    return {**measured, "MiB": held}


@torch.no_grad()
def read(model: CausalModel, cache: Any, batch: int, tokens: int, piece: int, seed: int = 0) -> Tensor:
    """So many random tokens of each row, in pieces of so many of all rows; the logits after the last."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for start in range(0, tokens, piece // batch):
        shape = batch, min(piece // batch, tokens - start)
        ids = torch.randint(1, model.model.config.vocab_size, shape, generator=generator, device=model.device)
        logits = model.model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
    return logits


def with_state(measured: dict[str, Any], cache: Any) -> dict[str, Any]:
    states = (layer.states.values() for layer in (*cache.layers, cache.after_blocks))
    return {**measured, "note": f"state {size_of(*itertools.chain(*states)) / 2**20:.2f} MiB"}


@torch.no_grad()
def decode(model: CausalModel, batch: int, length: int, static: bool, options) -> dict[str, Any]:
    cache, ids, step = model.model.new_cache(static), model.ids(batch, 1), model.model
    read(model, cache, batch, length, options.piece)
    compiled = static and options.compiles
    if compiled:  # as `generate(cache_implementation="static")` does it
        torch.compiler.reset()
        step = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def call():
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        return step(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits

    timings(call, options.device, 4)  # compiles, and captures a graph
    milliseconds = statistics.median(timings(call, options.device, options.steps))
    floor = model.parameters * options.dtype.itemsize / options.copied
    return with_state(with_rate(milliseconds, batch, floor), cache)


def read_on(model: CausalModel, cache: Any, start: int, end: int, options) -> dict[str, Any]:
    logits = []
    milliseconds = wall_milliseconds(
        lambda: logits.append(read(model, cache, 1, end - start, options.piece, seed=start)), options.device
    )
    if cache.get_seq_length() != end or not logits[0].isfinite().all():
        raise ValueError(f"{cache.get_seq_length()} of {end} tokens were read, or logits are not finite")
    floor = 2 * model.parameters * (end - start) / options.multiplied
    return with_state(with_rate(milliseconds, end - start, floor), cache)


Rows = Iterator[tuple[str, int, int, Callable[[], dict[str, Any]]]]


def train_rows(model: CausalModel, options) -> Rows:
    for length, checkpointed in itertools.product(options.train_lengths, (True, False)):

        def train(length=length, checkpointed=checkpointed):
            getattr(model.model, f"gradient_checkpointing_{'enable' if checkpointed else 'disable'}")()
            return model.training(1, length, optimize=True)

        yield f"training{', checkpointed' * checkpointed}", 1, length, train


def decode_rows(model: CausalModel, options) -> Rows:
    for static, *shape in itertools.product((False, True), options.batches, options.contexts):
        what = f"one more token{', static cache' * static}"
        yield what, *shape, functools.partial(decode, model, *shape, static, options)


def long_rows(model: CausalModel, options) -> Rows:
    cache, ends = model.model.new_cache(), {options.tokens * n // 8 for n in range(1, 9)}
    for start, end in itertools.pairwise((0, *sorted(ends | {min(8 * options.piece, options.tokens)}))):
        yield "long text, up to", 1, end, functools.partial(read_on, model, cache, start, end, options)


def measure_model(results: Results, part: str, rows: Callable[..., Rows], options) -> None:
    from subquad import GeckoForCausalLM

    model, config = CausalModel(options), options.configs[part]
    row = {"part": part, "implementation": OURS, "dtype": options.dtype_name}
    made = functools.partial(model.make, lambda: GeckoForCausalLM(config))
    if results.measure({**row, "what": f"{part}: random weights"}, made):
        for what, batch, length, function in rows(model, options):
            shape = {"what": what, "batch": batch, "length": length}
            results.measure({**row, **shape}, functools.partial(with_memory, function, options.device))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    from subquad import GeckoConfig
    from subquad.presets import preset_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    add("--tokens", type=int, default=4_000_000, help="of the long text (default: 4,000,000)")
    minutes = 8 if torch.cuda.is_available() else 20
    add_options(parser, "gecko.csv (after every row), gecko.json and gecko.md", minutes=minutes)
    add_compile(parser)
    options = parser.parse_args(arguments)

    settle(options)
    on_gpu, quick = options.device == "cuda", options.quick
    if quick:
        sizes, lengths = (16, 4, 2, 2, 4, 6, 8), [(2, 12), (1, 40)]
    elif on_gpu:
        sizes, lengths = (4096, 16, 64, 4, 256, 2048, 2048), [(8, 4096), (2, 16384), (1, 32768)]
    else:
        sizes, lengths = (1024, 16, 16, 4, 64, 512, 256), [(1, 1024), (1, 4096)]
    options.sizes = [Sizes(*shape, *sizes, options.dtype, options.device) for shape in lengths]
    options.eager = (EAGER,) if on_gpu else ()
    options.batches = (2,) if quick else (1, 32) if on_gpu else (1,)

    def small(width, layers, chunk, vocabulary):
        sizes = {"model_dim": width, "num_layers": layers, "chunk_size": chunk, "vocab_size": vocabulary}
        sizes |= {"z_dim": width // 2, "value_dim": 2 * width, "ffn_hidden_dim": 2 * width, "num_heads": 2}
        return GeckoConfig(**sizes, timenorm_num_groups=8)

    if on_gpu or quick:
        configs = [small(16, 2, 8, 64) if quick else preset_config("gecko-1b")] * 3
    else:
        configs = [small(256, 4, 256, 4096), small(512, 8, 256, 32000), small(96, 4, 128, 256)]
    for config in configs:
        config.bos_token_id = 0  # which is not among random tokens: a text is one document
    options.configs = dict(zip(PARTS[3:], configs, strict=True))
    options.train_lengths = (16, 32) if quick else [2**n for n in (range(12, 17) if on_gpu else (9, 11, 13))]
    options.contexts = (8, 40) if quick else (2048, 16384, 65536) if on_gpu else (256, 4096, 32768)
    options.steps = 2 if quick else 64 if on_gpu else 32
    options.piece = 32 if quick else 32768 if on_gpu else 4096
    options.tokens = min(options.tokens, 512) if quick else options.tokens
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.device == "cpu":
        run_afresh(run, options)
        return
    with within(60 * (options.minutes + 1)):
        run_afresh(run, options)


def run(options: argparse.Namespace) -> None:
    title, sizes = versions(options.device), options.sizes[0]
    path = None if options.out is None else options.out / "gecko.csv"
    results = Results(path, options.device, options.minutes * 60, title)
    print(f"{title}\nwidth {sizes.width}, CEMA of {sizes.states}, {sizes.groups} groups, {options.dtype_name}")
    print(f"{sizes.heads} heads of {sizes.key} keys and {sizes.value} values, chunks of {sizes.chunk}")
    if "check" in options.parts and not check(results, options):
        results.bar.close()
        raise SystemExit(1)
    rates = measure_ceilings(options) if set(options.parts) - {"check"} else ""
    if "operator" in options.parts:
        measure_operators(results, options)
    if "step" in options.parts:
        measure_steps(results, options)
    for part, rows in (("train", train_rows), ("decode", decode_rows), ("long", long_rows)):
        if part in options.parts:
            measure_model(results, part, rows, options)
    results.bar.close()
    text = results.table()
    print(text)
    write_report(results, options, "gecko", title, rates, text)
    results.exit(options.minutes)


if __name__ == "__main__":
    main()
