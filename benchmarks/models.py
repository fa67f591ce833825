"""
Whole models: the time and memory to read a prompt, to write a token and to train.

It measures models with random weights (--models eagle finch goose avey avey-b raven gecko; of a published size on a
GPU, smaller on a CPU, or any preset by --preset), and the embedded models (eagle-abc, ...). On the same inputs, they
are compared with the published algorithm in ordinary torch (`plain`: Avey, Avey-B), ModernBERT of transformers
(Avey-B), flash-linear-attention (Finch, Goose, Raven; on a GPU) and a Llama of transformers with as many parameters
(Finch, Goose, Raven). cpu.py has llama.cpp and the package rwkv.

parts (--parts):
  check     the logits (in one call, with a cache, padded) and the gradients against the published algorithm in
  float64,
            If a case is wrong, nothing else is measured and the exit status is 1.
  read      the first token after a prompt, and the hidden states of all tokens, by length; with the exponents of
            throughput and latency, N^-alpha and N^beta
  decode    one more token by length of the context: the step that `generate` takes (on a GPU captured in a CUDA
            graph), and one with a static cache (on a GPU compiled); the note has the step and the size of the state
  generate  `generate`, plain and (on a GPU) with compiled steps; "first" is the call that compiles
  train     a step with AdamW by length: without and with gradient checkpointing, and compiled
  long      a text of --tokens tokens, read in pieces (only if it is named in --parts)

examples:
  python benchmarks/models.py --quick
  python benchmarks/models.py --models avey --preset avey-0.1b --device cpu --parts read decode --lengths 512 8192
  python benchmarks/models.py --models raven --parts generate --out build/bench
  python benchmarks/models.py --models finch --parts read decode generate train --brief --no-compile
  python benchmarks/models.py --models gecko --parts long --tokens 4000000
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn


# For measuring as in the operators' benchmarks.
sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels" / "benchmarks"))

from measuring import (
    COMPILED,
    FLA,
    GRAPH,
    OURS,
    PLAIN,
    Check,
    Results,
    Targets,
    captured,
    floor,
    judged_targets,
    make_parser,
    measure_ceilings,
    median_milliseconds,
    relative_error,
    resident_mebibytes,
    run_benchmark,
    settle,
    size_of,
    timings,
    wall_milliseconds,
    with_rate,
)
from peers import LLAMA, MODERNBERT, PEERS, PRODUCTS, Transformers, TransformersCausal

import subquad
from subquad.hub.info import EMBEDDED
from subquad.hub.presets import preset_config


PARTS = ("check", "read", "decode", "generate", "train", "long")
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
# A call that takes longer than this, in milliseconds, is its own median.
LONG = 1500


@dataclasses.dataclass(frozen=True)
class Sizes:
    """
    Attributes:
        model_type: the configuration's model type.
        preset: the size for a GPU.
        cpu: fields of the configuration for measurements on a CPU, and for the check.
        quick: fields of a tiny configuration.
        variants: fields of further configurations to check.
        graphs: whether short texts are also read in a CUDA graph.
        targets: performance targets on a GPU.
    """

    model_type: str
    preset: str
    cpu: dict[str, Any]
    quick: dict[str, Any]
    variants: tuple[dict[str, Any], ...] = ()
    graphs: bool = False
    targets: Targets = ()


SMALL_RWKV = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
MODELS = {
    "eagle": Sizes("rwkv5", "eagle-1.5b", {"hidden_size": 768, "num_hidden_layers": 12}, SMALL_RWKV),
    "finch": Sizes("rwkv6", "finch-1.6b", {"hidden_size": 768, "num_hidden_layers": 12}, SMALL_RWKV),
    "goose": Sizes("rwkv7", "goose-1.5b", {"hidden_size": 768, "num_hidden_layers": 12}, SMALL_RWKV),
    "avey": Sizes(
        "avey",
        "avey-0.1b",
        {"vocab_size": 4096, "d_embed": 256, "n_blocks": 4},
        {"vocab_size": 64, "d_embed": 32, "n_blocks": 2, "chunk_size": 8, "k": 4},
    ),
    "avey-b": Sizes(
        "avey-b",
        "avey-b-base",
        {"vocab_size": 4096, "d_embed": 256, "n_layers": 4},
        {"vocab_size": 64, "d_embed": 32, "n_layers": 2, "chunk_size": 8},
        # As in the paper.
        variants=({"hidden_act": "relu2", "similarity_norm": "sum", "residual_gain": False, "final_norm": True},),
        graphs=True,
        targets=(
            ("avey-b all tokens", MODERNBERT, 1, 1.0),
            ("avey-b all tokens", MODERNBERT, 2**15, 3.4),
            ("avey-b all tokens", COMPILED, 1, 1.3),
        ),
    ),
    "raven": Sizes(
        "raven",
        "raven-0.4b",
        {"hidden_size": 512, "num_hidden_layers": 8, "num_slots": 128, "topk": 16, "use_output_gate": True},
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "num_slots": 12, "topk": 5},
        targets=(("raven generate", FLA, 1, 10.0),),
    ),
    "gecko": Sizes(
        "gecko",
        "gecko-1b",
        {
            **{"model_dim": 512, "num_layers": 8, "chunk_size": 256, "z_dim": 256, "value_dim": 1024},
            **{"ffn_hidden_dim": 1024, "num_heads": 2, "timenorm_num_groups": 8},
        },
        {
            **{"model_dim": 16, "num_layers": 2, "chunk_size": 8, "z_dim": 8, "value_dim": 32, "vocab_size": 64},
            **{"ffn_hidden_dim": 32, "num_heads": 2, "timenorm_num_groups": 8},
        },
    ),
}
# By measurement: lengths of prompts, batches, contexts, rows and generated tokens, rows and lengths of training,
# steps, and tokens of a piece of the long text.
SIZES = {
    "quick": {
        **{"prompts": (16, 40), "batches": (2,), "contexts": (16, 40), "texts": (2,), "new": 8},
        **{"rows": 2, "train": (32,), "steps": 2, "piece": 64},
    },
    "cpu": {
        **{"prompts": (128, 512, 2048), "batches": (1,), "contexts": (512, 8192), "texts": (1,), "new": 64},
        **{"rows": 1, "train": (512, 2048), "steps": 16, "piece": 4096},
    },
    "cuda": {
        **{"prompts": (128, 512, 2048, 8192, 32768, 98304), "batches": (1, 8), "contexts": (2048, 16384, 65536)},
        **{"texts": (1, 32), "new": 128, "rows": 8, "train": (512, 2048), "steps": 64, "piece": 32768},
    },
    # A step with AdamW fits an H100, whichever model it is.
    "brief": {
        **{"prompts": (2048, 8192), "batches": (1, 4), "contexts": (2048,), "texts": (1, 32), "new": 64},
        **{"rows": 2, "train": (2048,), "steps": 64, "piece": 32768},
    },
    # Several processes compile at a time, and tests run beside them.
    "compile": {
        **{"prompts": (2048,), "batches": (1,), "contexts": (256,), "texts": (1, 32), "new": 4},
        **{"rows": 1, "train": (2048,), "steps": 2, "piece": 8192},
    },
}


# Models.


class Ours(TransformersCausal):
    """One of our models, with its name and configuration."""

    def __init__(self, name: str, model: nn.Module, options: argparse.Namespace):
        super().__init__(model.eval())
        self.name, self.device, self.options, self.config = name, options.device, options, model.config
        self.parameters = sum(x.numel() for x in model.parameters())
        special = {getattr(self.config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")}
        # A BOS token would begin a document.
        self.vocabulary = torch.tensor([n for n in range(1, self.config.vocab_size) if n not in special])
        self.causal = model.can_generate()
        # Rows that are computed together, if there are any.
        self.chunk = getattr(self.config, "chunk_size", 64)

    def ids(self, *shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(len(self.vocabulary), shape, generator=generator)
        return self.vocabulary[index].to(self.device)

    def all_tokens(self, ids: Tensor) -> Tensor:
        return super().all_tokens(ids) if self.causal else Transformers.all_tokens(self, ids)

    def logits(self, ids: Tensor, **how: Any) -> Tensor:
        return self.model(input_ids=ids, **how).logits

    def operations(self, length: int, last_only: bool) -> int:
        """Operations to read a text, for all tokens or only the logits after the last."""
        if self.config.model_type in PRODUCTS:
            return PRODUCTS[self.config.model_type](self.config, length, last_only)[0]
        return 2 * self.parameters * length

    def training_operations(self, length: int) -> int:
        if self.config.model_type in PRODUCTS:
            whole, ranker = PRODUCTS[self.config.model_type](self.config, length)
            return 3 * whole - 2 * ranker
        return 6 * self.parameters * length

    def targets(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Ids and labels; for an encoder every fifth token is masked and labelled."""
        ids = self.ids(batch, length)
        if self.causal:
            return ids, ids
        masked = self.ids(batch, length, seed=1) % 5 == 0
        return ids.masked_fill(masked, 0), ids.masked_fill(~masked, -100)


def config_of(sizes: Sizes, options: argparse.Namespace) -> Any:
    preset = options.preset or (sizes.preset if options.sizes == "cuda" else None)
    if preset is not None:
        config = preset_config(preset)
        if options.share:  # more layers have the same kernels
            config.num_hidden_layers = 2
        return config
    return transformers.AutoConfig.for_model(sizes.model_type, **(sizes.quick if options.quick else sizes.cpu))


def from_config(config: Any, device: str, dtype: torch.dtype) -> nn.Module:
    """A model with the head of a language model and random weights, none of which is zero or one alone."""
    torch.manual_seed(0)
    auto = getattr(transformers, subquad.lm_auto_class(config.model_type))
    with torch.device(device):
        model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() == 2 and not weights.any():
                # Products with zeros are quicker, and every text would be the same.
                weights.normal_(std=weights.shape[-1] ** -0.5)
            elif weights.dim() < 2 and bool((weights == 1).all()):
                weights.uniform_(0.5, 1.5)
    # Some weights start orthogonal, which cannot be computed in bfloat16.
    return model.to(dtype).eval()


def make_ours(name: str, options: argparse.Namespace) -> Ours:
    if name in MODELS:
        model = from_config(config_of(MODELS[name], options), options.device, options.dtype)
    else:
        path = EMBEDDED / name
        auto = getattr(transformers, subquad.lm_auto_class(transformers.AutoConfig.from_pretrained(path).model_type))
        model = auto.from_pretrained(path, dtype=options.dtype).to(options.device)
    return Ours(name, model, options)


def peers_of(ours: Ours) -> dict[str, Any]:
    """Available peers, by name."""
    makers = PEERS.get(ours.config.model_type, {}) if ours.name in MODELS else {}
    if ours.options.share:
        makers = {name: make for name, make in makers.items() if name != LLAMA}  # whose kernels are in torch
    made = {name: make(ours.model) for name, make in makers.items()}
    return {name: peer for name, peer in made.items() if peer is not None}


# The check.


def related_ids(ours: Ours, batch: int, length: int) -> Tensor:
    """Ids with tokens repeated from an earlier split, so that rounding does not decide which splits are nearest."""
    ids = ours.ids(batch, length)
    for distance in (2, 3):
        taken = ours.ids(batch, length, seed=distance) % distance == 0
        ids = ids.roll(distance * ours.chunk, 1).where(taken, ids)
    return ids


def gradients(loss: Tensor, module: nn.Module) -> dict[str, Tensor]:
    named = {name.removeprefix("model."): x for name, x in module.named_parameters() if "lm_head" not in name}
    found = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    # A small gradient of a number may be the difference of two large ones, so all numbers are compared together.
    numbers = [found.pop(name).flatten() for name in list(found) if named[name].numel() == 1]
    return found | ({"numbers": torch.cat(numbers)} if numbers else {})


def errors_beside_plain(ours: Ours, peer: Any, length: int) -> dict[str, float]:
    """Errors of the logits in one call, after a prompt, with a cache and padded, and of the gradients."""
    exact = type(peer)(ours.config).to(ours.device).double()
    exact.load_state_dict(peer.state_dict())
    ids, short = related_ids(ours, 2, length), length // 2 + 1
    with torch.no_grad():
        expected, expected_short = exact.logits(ids), exact.logits(ids[1:, :short])
        errors = {"logits": relative_error(ours.logits(ids), expected)}
        if ours.causal:
            steps = min(5, length // 2)
            out = ours.model(ids[:, :-steps], logits_to_keep=1)
            for token in ids[:, -steps:].split(1, 1):
                out = ours.model(token, cache=out.cache)
            errors["last logits"] = relative_error(ours.first_token(ids), expected[:, -1:])
            errors["logits with a cache"] = relative_error(out.logits, expected[:, -1:])
        for side in ("right", "left"):
            mask, padded = torch.ones_like(ids), ids.clone()
            mask[1, short:] = 0
            if side == "left":
                mask[1], padded[1] = mask[1].flip(0), ids[1].roll(length - short)
            logits = ours.logits(padded, attention_mask=mask)
            errors[f"logits beside {side} padding"] = relative_error(logits[0], expected[0])
            errors[f"logits, {side} padding"] = relative_error(logits[1][mask[1] != 0], expected_short[0])
    if ours.model.dtype == torch.float32:
        batch = ids, ours.ids(2, length, seed=4)
        found, wanted = gradients(ours.loss(*batch), ours.model), gradients(exact.loss(*batch), exact)
        errors["gradients"] = max(relative_error(found[name], x) for name, x in wanted.items())
    return errors


def check(results: Results, models: list[str], options: argparse.Namespace) -> None:
    judged = Check(results)
    for name in models:
        if name not in MODELS or MODELS[name].model_type not in PEERS:
            continue
        sizes = MODELS[name]
        configs = [
            transformers.AutoConfig.for_model(sizes.model_type, **(sizes.quick if options.quick else sizes.cpu))
        ]
        if options.sizes == "cuda":
            configs.append(config_of(sizes, options))
        kind = type(configs[0])
        configs += [kind(**{**config.to_diff_dict(), **fields}) for config in configs for fields in sizes.variants]
        for config, (dtype, allowed) in itertools.product(configs, TOLERANCES.items()):
            ours = Ours(name, from_config(config, options.device, dtype), options)
            length = 7 * ours.chunk - 3
            errors: dict[str, tuple[float, float | None]] = {}
            for peer_name, peer in peers_of(ours).items():
                if peer_name == PLAIN:
                    found = errors_beside_plain(ours, peer, length)
                    errors |= {what: (error, allowed) for what, error in found.items()}
            if errors:
                row = {"batch": 2, "length": length, "size": config.hidden_size}
                judged.judge(name, {**row, "dtype": str(dtype).removeprefix("torch.")}, errors)
    judged.finish("models against what is published")


# The parts, each of which makes rows: what, implementation, batch, length, and a function that measures.


Rows = Iterator[tuple[str, str, int, int, Callable[[], dict[str, Any]]]]


def steady_milliseconds(call: Callable[[], Any], options: argparse.Namespace) -> float:
    """The median, or a single call if that takes long; on a GPU not the first one, which compiles."""
    (milliseconds,) = timings(call, options.device, 1)
    if milliseconds > LONG and options.device != "cpu":
        (milliseconds,) = timings(call, options.device, 1)
    if milliseconds > LONG or options.quick:
        return milliseconds
    return median_milliseconds(call, options.device, options.seconds, options.least, warm_up=False)


def with_memory(function: Callable[[], dict[str, Any]], device: str) -> dict[str, Any]:
    """The result of a function, and its peak memory: torch's on a GPU, the process's on a CPU."""
    measured: dict[str, Any] = {}
    if device == "cpu":
        held = resident_mebibytes(lambda: measured.update(function()))
    else:
        torch.cuda.reset_peak_memory_stats()
        measured.update(function())
        held = torch.cuda.max_memory_allocated() / 2**20
    return {**measured, "MiB": held}


def read_rows(ours: Ours, peers: dict[str, Any], options: argparse.Namespace) -> Rows:
    config, weights = ours.config, size_of(*ours.model.parameters())
    skipped = options.brief and ours.causal  # all tokens, which take as long as the first one

    @torch.no_grad()
    def measure(call, batch, length, last_only, graph=False):
        ids = ours.ids(batch, length)
        function = functools.partial(call, ids)
        if graph:
            # The values of ids are checked, which cannot be captured.
            embedded = ours.model.get_input_embeddings()(ids)
            mine = call == ours.all_tokens
            function = captured(lambda: ours.model.base_model(inputs_embeds=embedded) if mine else call(ids))
        operations = ours.operations(length, last_only)
        if not last_only:  # without the head
            operations -= 2 * length * config.hidden_size * config.vocab_size
        moved = weights + ids.numel() * config.hidden_size * options.dtype.itemsize
        return with_rate(
            steady_milliseconds(function, options), ids.numel(), floor(options, batch * operations, moved)
        )

    for batch, length in itertools.product(options.batches, options.prompts):
        for what, method in (("first token", "first_token"), ("all tokens", "all_tokens")):
            if (method == "first_token" and not ours.causal) or (method == "all_tokens" and skipped):
                continue
            for name, runner in {OURS: ours, **peers}.items():
                if not hasattr(runner, method):
                    continue
                call, last_only = getattr(runner, method), method == "first_token"
                yield what, name, batch, length, functools.partial(measure, call, batch, length, last_only)
    if options.device != "cpu" and ours.name in MODELS and MODELS[ours.name].graphs:
        short = [length for length in options.prompts if length <= 2048]
        for batch, length in itertools.product(options.batches, short):
            for name, runner in {OURS: ours, **peers}.items():
                call = functools.partial(measure, runner.all_tokens, batch, length, False, graph=True)
                yield "all tokens" + GRAPH, name, batch, length, call
    if options.compiles and PLAIN in peers:
        torch.compiler.reset()
        plain = PEERS[config.model_type][PLAIN](ours.model).compiled()
        method = "first_token" if ours.causal else "all_tokens"
        for batch, length in itertools.product(options.batches, options.prompts):
            call = functools.partial(measure, getattr(plain, method), batch, length, ours.causal)
            yield method.replace("_", " "), COMPILED, batch, length, call


@torch.no_grad()
def read(ours: Ours, cache: Any, batch: int, tokens: int, seed: int = 0) -> Tensor:
    """Reads random tokens, of each row in pieces; returns the logits after the last."""
    piece = max(ours.options.piece // batch, 1)
    for start in range(0, tokens, piece):
        ids = ours.ids(batch, min(piece, tokens - start), seed=seed + start)
        logits = ours.model(input_ids=ids, cache=cache, logits_to_keep=1).logits
    return logits


def state_note(cache: Any) -> dict[str, str]:
    layers = getattr(cache, "all_layers", cache.layers)
    size = size_of(*itertools.chain(*(layer.states.values() for layer in layers)))
    return {"note": f"state {size / 2**20:.2f} MiB"}


def decode_rows(ours: Ours, peers: dict[str, Any], options: argparse.Namespace) -> Rows:
    warm_up = 4 if options.device != "cpu" else 1
    total = warm_up + options.steps

    def timed(step, batch):
        turns = itertools.count()
        timings(lambda: step(next(turns)), options.device, warm_up)  # compiles, and captures a graph
        milliseconds = statistics.median(timings(lambda: step(next(turns)), options.device, options.steps))
        return with_rate(milliseconds, batch, ours.parameters * options.dtype.itemsize / options.copied)

    @torch.no_grad()
    def of_ours(batch, length, static):
        start = max(length - total, 1)
        cache, token = ours.model.new_cache(static, length), ours.ids(batch, 1)
        read(ours, cache, batch, start)
        step = ours.model.decoding_step(cache)
        compiled = static and options.compiles
        if compiled:  # as `generate(cache_implementation="static")` does it
            torch.compiler.reset()
            model = torch.compile(ours.model, mode="reduce-overhead", fullgraph=True, dynamic=False)

        def call(t):
            if not compiled:
                return step(token)
            torch.compiler.cudagraph_mark_step_begin()
            return model(input_ids=token, cache=cache, logits_to_keep=1).logits

        how = "compiled" if compiled else step.kind
        return timed(call, batch) | {"note": f"{how} step, {state_note(cache)['note']}"}

    @torch.no_grad()
    def of_peer(peer, batch, length):
        start = max(length - total, 1)
        step = peer.stepper(ours.ids(batch, start + total), start)

        def call(t):
            torch.compiler.cudagraph_mark_step_begin()
            return step(t)

        return timed(call, batch)

    if not ours.causal:
        return
    for batch, length in itertools.product(options.texts, options.contexts):
        # On a GPU a static cache only helps a compiled step.
        for static in (False, True) if options.compiles or options.device == "cpu" else (False,):
            what = "one more token" + ", static cache" * static
            yield what, OURS, batch, length, functools.partial(of_ours, batch, length, static)
        for name, peer in peers.items():
            if hasattr(peer, "stepper"):
                yield "one more token", name, batch, length, functools.partial(of_peer, peer, batch, length)


def generate_rows(ours: Ours, peers: dict[str, Any], options: argparse.Namespace) -> Rows:
    texts: dict[tuple[int, bool], Tensor] = {}

    @torch.no_grad()
    def measure(runner, batch, static=False, first=False):
        ids, how = ours.ids(batch, 16), {"cache_implementation": "static"} if static else {}

        def call():
            out = runner.generate(ids, options.new, **how)
            if runner is ours:
                texts[batch, static] = out

        if first:
            torch.compiler.reset()  # a second batch size would be compiled for all sizes, without CUDA graphs
            return {"milliseconds": wall_milliseconds(call, options.device)}
        if not static:
            runner.generate(ids, 2)
        seconds = 10 * options.seconds
        milliseconds = median_milliseconds(call, options.device, seconds, least=1, most=5, warm_up=False)
        step = ours.parameters * options.dtype.itemsize / options.copied
        measured = with_rate(milliseconds, batch * options.new, options.new * step)
        if {(batch, True), (batch, False)} <= texts.keys():
            same = (texts[batch, True][:, :32] == texts[batch, False][:, :32]).sum().item()
            measured["note"] = f"{same} of {batch * min(options.new, 32)} tokens as compiled"
        return measured

    if not ours.causal:
        return
    for batch in options.texts:
        for what, static, first in (("first generate", True, True), ("generate", True, False)):
            if options.compiles:
                yield what, OURS, batch, options.new, functools.partial(measure, ours, batch, static, first)
        what = "generate" + ", not compiled" * options.compiles
        yield what, OURS, batch, options.new, functools.partial(measure, ours, batch)
        for name, peer in peers.items():
            if hasattr(peer, "generate"):
                yield "generate", name, batch, options.new, functools.partial(measure, peer, batch)


def train_rows(ours: Ours, peers: dict[str, Any], options: argparse.Namespace) -> Rows:
    """Every measurement starts from the same weights, in float32 and under autocast on a GPU."""

    def measure(name, length, checkpointed, compiled):
        torch.compiler.reset()  # earlier compiled code keeps its model in memory
        runner = Ours(ours.name, copy.deepcopy(ours.model).float(), options)
        if name != OURS:
            runner = PEERS[ours.config.model_type][name](runner.model)
        module = runner if isinstance(runner, nn.Module) else runner.model
        module.train()
        if checkpointed:
            module.gradient_checkpointing_enable()
        loss_of = torch.compile(runner.loss, fullgraph=True, dynamic=False) if compiled else runner.loss
        batch, losses = ours.targets(options.rows, length), []
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
        on_gpu = options.device != "cpu"

        def step():
            with torch.autocast(options.device, torch.bfloat16) if on_gpu else contextlib.nullcontext():
                loss = loss_of(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        first = wall_milliseconds(step, options.device) / 1e3
        milliseconds = median_milliseconds(step, options.device, 8 * options.seconds, options.least, warm_up=False)
        work = options.rows * ours.training_operations(length)
        note = f"first step {first:.1f} s, loss {losses[0].item():.3f}, then {losses[-1].item():.3f}"
        return with_rate(milliseconds, options.rows * length, work / options.multiplied) | {"note": note}

    if ours.name not in MODELS:
        return
    names = [OURS, *(name for name, peer in peers.items() if hasattr(peer, "loss"))]
    for length, (what, how) in itertools.product(
        options.train,
        (
            ("training", (False, False)),
            *([("training, checkpointed", (True, False))] if not options.brief else []),
            ("training, compiled", (False, True)),
        ),
    ):
        for name in names:
            if (how[1] and not (options.compiles and name in (OURS, PLAIN))) or (how[0] and name != OURS):
                continue
            yield what, name, options.rows, length, functools.partial(measure, name, length, *how)


def long_rows(ours: Ours, peers: dict[str, Any], options: argparse.Namespace) -> Rows:
    """Stretches of a text, read one after the other with the same cache."""
    if not ours.causal:
        return
    cache, ends = ours.model.new_cache(), {options.tokens * n // 8 for n in range(1, 9)}

    def measure(start, end):
        logits = []
        milliseconds = wall_milliseconds(
            lambda: logits.append(read(ours, cache, 1, end - start, seed=start)), options.device
        )
        if cache.get_seq_length() != end or not logits[0].isfinite().all():
            raise ValueError(f"{cache.get_seq_length()} of {end} tokens were read, or logits are not finite")
        least = 2 * ours.parameters * (end - start) / options.multiplied
        return with_rate(milliseconds, end - start, least) | state_note(cache)

    for start, end in itertools.pairwise((0, *sorted(ends | {min(8 * options.piece, options.tokens)}))):
        yield "long text, up to", OURS, 1, end, functools.partial(measure, start, end)


ROWS = {
    "read": read_rows,
    "decode": decode_rows,
    "generate": generate_rows,
    "train": train_rows,
    "long": long_rows,
}


# The report.


def exponent(lengths: list[int], values: list[float]) -> float:
    """The exponent of the power law closest to the values, by least squares of their logarithms."""
    x, y = (torch.tensor(numbers, dtype=torch.float64).log() for numbers in (lengths, values))
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def power_laws(rows: list[dict[str, Any]]) -> list[str]:
    """Power laws of reading, throughput N^-alpha, latency N^beta: from the best throughput on, and overall."""
    found: dict[tuple, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["part"] == "read" and row.get("tokens_per_second") and not row["what"].endswith(GRAPH):
            found.setdefault((row["what"], row["implementation"], row["batch"]), {})[row["length"]] = row
    lines = []
    for (what, name, batch), by_length in found.items():
        if len(by_length) < 2:
            continue
        lengths = sorted(by_length)
        rates, times = ([by_length[n][field] for n in lengths] for field in ("tokens_per_second", "milliseconds"))
        best = rates.index(max(rates))
        tail = "no longer one was measured"
        if best < len(lengths) - 1:
            alpha, beta = -exponent(lengths[best:], rates[best:]), exponent(lengths[best:], times[best:])
            tail = f"alpha {alpha:.2f}, beta {beta:.2f}"
        alpha, beta = -exponent(lengths, rates), exponent(lengths, times)
        text = f"from {lengths[best]:,} tokens on {tail}; over all alpha {alpha:.2f}, beta {beta:.2f}"
        lines.append(f"{what}, {name}, batch {batch}: {text}")
    return ["tokens/s as N^-alpha, latency as N^beta", *lines] if lines else []


def parse(arguments: list[str] | None) -> argparse.Namespace:
    trained = sorted(path.name for path in EMBEDDED.iterdir())
    parser = make_parser(__doc__, PARTS, minutes=8 if torch.cuda.is_available() else 30)
    add = parser.add_argument
    add(
        "--models", nargs="+", choices=(*MODELS, *trained), metavar="MODEL", help="default: all, on a GPU without -abc"
    )
    add("--preset", help="the size of the models of random weights, one of `subquad.hub.presets`")
    add("--lengths", type=int, nargs="+", help="tokens of prompts and contexts")
    add("--tokens", type=int, default=4_000_000, help="of the long text (default: 4,000,000)")
    options = parser.parse_args(arguments)
    settle(options)
    options.parts = options.parts or PARTS[:-1]
    options.models = options.models or ([*MODELS] if options.sizes == "cuda" else [*MODELS, *trained])
    few = "compile" if options.share else "brief" if options.brief else options.sizes
    vars(options).update(SIZES["quick" if options.quick else few])
    if options.lengths:
        options.prompts = options.contexts = options.lengths
    options.tokens = min(options.tokens, 512) if options.quick else options.tokens
    return options


def measure_model(results: Results, model: str, with_peers: bool, options: argparse.Namespace) -> None:
    """Adds the rows of one of our models; with its peers, the missing ones."""
    row = {"part": "made", "what": model + ", with peers" * with_peers, "implementation": OURS}
    made: list[Any] = []

    def make():
        start = time.perf_counter()
        made.append(ours := make_ours(model, options))
        made.append(peers_of(ours) if with_peers else {})
        return {"milliseconds": 1e3 * (time.perf_counter() - start), "note": f"{ours.parameters:,} parameters"}

    gc.unfreeze()
    gc.collect()  # the model before
    results.measure({**row, "dtype": options.dtype_name}, make)
    if len(made) < 2 or (with_peers and not made[1]):
        return
    gc.freeze()  # otherwise garbage collection would search all imported modules for every row, half a second each
    for part in (part for part in ROWS if part in options.parts):
        for what, name, batch, length, function in ROWS[part](*made, options):
            if name == OURS and with_peers:
                continue
            shape = {"batch": batch, "length": length, "size": made[0].config.hidden_size}
            row = {"part": part, "what": f"{model} {what}", "implementation": name, "dtype": options.dtype_name}
            results.measure(row | shape, functools.partial(with_memory, function, options.device))
    torch.compiler.reset()


def measure(results: Results, options: argparse.Namespace) -> list[str]:
    results.forget("made")
    if "check" in options.parts:
        results.forget("check")
        check(results, options.models, options)
    if not set(options.parts) - {"check"}:
        return []
    lines = [measure_ceilings(options)]
    for ours, model in itertools.product(options.passes, options.models):
        measure_model(results, model, not ours, options)
    lines += power_laws(results.rows)
    if options.device != "cpu":
        lines += judged_targets(results.rows, tuple(itertools.chain(*(sizes.targets for sizes in MODELS.values()))))
    return lines


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    run_benchmark("models", options, measure)


if __name__ == "__main__":
    main()
