"""
What stored states lose in fewer bits: the share of right answers, and the bits per answer's token.

    python benchmarks/stored_states.py                 # all tasks; small models learn two of them first
    python benchmarks/stored_states.py repeats

repeats   Embedded models read 1,024 bytes of held-out tunes. A byte of the second half counts if it and the 8 bytes
          before it also occur in the first half. The state is stored between the halves.
recall    8 pairs of a key and a value, and then the keys again; the state is stored behind the pairs.
tracking  The parity of all tokens so far; the state is stored after half of them.

The last two tasks are those of `examples.evaluation`. A state is stored and restored once, after every 16 tokens, or
after every token of short texts.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple


sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "examples")]

import torch
import torch.nn.functional as F
from examples.evaluation import mqar, tracking
from examples.evaluation.__main__ import parse_arguments as options_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from subquad.hub.info import EMBEDDED
from subquad.modeling.cache import RecurrentCache
from subquad.states.packed_states import DTYPES, pack, unpack


MODELS = ("eagle-abc", "finch-abc", "goose-abc", "raven-abc")
LENGTH = 64  # tokens of a row of pairs
EVERY = (16, 1)  # tokens after which a state is stored again
MOST = 64  # times that it is stored
SIZE = 512  # bytes before and after the state
PASSAGE = 8  # bytes by which a repeated passage is recognised
TEXTS = 12  # texts of tunes
Store = Callable[[PreTrainedModel, RecurrentCache], RecurrentCache]


class Case(NamedTuple):
    """
    Texts that a model reads, and what it should predict.

    Attributes:
        ids: (texts, tokens).
        labels: what the model should predict behind each token, -100 if it does not matter; as `ids`.
        stored: the number of tokens after which the state is stored.
    """

    name: str
    model: PreTrainedModel
    ids: torch.Tensor
    labels: torch.Tensor
    stored: int


def repeats() -> Iterator[Case]:
    from abc_corpus import load_corpus

    joined = "\0".join(load_corpus().validation).encode("ascii")  # the id 0 is between two tunes
    rows = torch.tensor([*joined[: TEXTS * (2 * SIZE + 1)]]).view(TEXTS, -1)
    labels = torch.full_like(rows[:, 1:], -100)
    for row, ids in enumerate(rows.tolist()):
        seen = {tuple(ids[end - PASSAGE : end + 1]) for end in range(PASSAGE, SIZE)}
        for end in range(SIZE + PASSAGE + 1, len(ids)):
            if tuple(ids[end - PASSAGE : end + 1]) in seen:
                labels[row, end - 1] = ids[end]
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED / name).eval()
        yield Case(name, model, rows[:, :-1], labels, SIZE)


def recall() -> Iterator[Case]:
    arguments = options_of(["mqar", "--tokens", "1024"])
    for architecture in ("finch", "goose"):
        model, _ = mqar.train(arguments, architecture, LENGTH, 64, 3e-3, seed=0)
        pairs, generator = LENGTH // arguments.tokens_per_pair, torch.Generator().manual_seed(tracking.TEST_SEED)
        rows = arguments.test_rows, LENGTH, pairs, arguments.words, arguments.power
        yield Case(mqar.NAMES[architecture], model.eval(), *mqar.make_rows(*rows, generator), 2 * pairs)


def products() -> Iterator[Case]:
    for architecture, length in (("goose", 32), ("wide-goose", 64)):
        arguments = options_of(["tracking", "--train-length", str(length)])
        model, _ = tracking.train(arguments, "parity", 2, architecture, 0)
        generator = torch.Generator().manual_seed(tracking.TEST_SEED)
        ids, labels = tracking.make_rows("parity", arguments.test_rows, length, generator)
        labels = F.pad(labels, (1, 0), value=-100)
        labels[:, : length // 2] = -100
        yield Case(tracking.NAMES[architecture], model, ids, labels, length // 2)


TASKS = {"repeats": repeats, "recall": recall, "tracking": products}


def stored_in(dtype: str) -> Store:
    return lambda model, cache: unpack(pack(cache, dtype), model)


STORES: dict[str, Store] = {"float32": lambda model, cache: cache} | {dtype: stored_in(dtype) for dtype in DTYPES}


@torch.no_grad()
def measure(case: Case, stops: list[int], store: Store) -> tuple[float, float]:
    """The share of right answers, and bits per label, if the state is stored after these numbers of tokens."""
    cache, parts, length = case.model.new_cache(), [], case.ids.shape[1]
    for begin, end in pairwise([0, *stops, length]):
        out = case.model(case.ids[:, begin:end], cache=cache, use_cache=True)
        parts.append(out.logits)
        cache = store(case.model, out.cache) if end < length else None
    logits, wanted = torch.cat(parts, 1), case.labels != -100
    right = (logits.argmax(-1) == case.labels)[wanted]
    bits = F.cross_entropy(logits.transpose(1, 2).double(), case.labels) / torch.tensor(2).log()
    return right.double().mean().item(), bits.item()


def rows_of(case: Case, stores: dict[str, Store]) -> Iterator[str]:
    """A line of the table for each way to store a state."""
    ways = {"once": [case.stored]}
    ways |= {f"every {n}": [*range(n, case.ids.shape[1], n)] for n in EVERY if case.ids.shape[1] - 1 <= n * MOST}
    for way, stops in ways.items():
        found = [measure(case, stops, store) for store in stores.values()]
        cells = [f"{right:.1%} ({bits - found[0][1]:+.5f})" for right, bits in found]
        cells[0] = f"{found[0][0]:.1%} ({found[0][1]:.5f})"
        yield " | ".join(["", case.name, way, *cells, ""]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"some of {', '.join(TASKS)} (default: all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.tasks) - TASKS.keys():
        parser.error(f"unknown tasks: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    header = ["", "stored", *STORES]
    print(f"| {' | '.join(header)} |\n{'| --- ' * len(header)}|")
    for case in chain.from_iterable(TASKS[name]() for name in arguments.tasks or TASKS):
        for row in rows_of(case, STORES):
            print(row, flush=True)


if __name__ == "__main__":
    main()
