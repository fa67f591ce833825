"""
State tracking, by length: can a model follow a state that every token changes, even in a text many times as long as in
training?

Every token is an element of a group, and the model predicts the product of all elements so far. The group is
parity (two elements), S3 (the six permutations of three things), or A5 (the sixty even permutations of five):

    parity   token    1 0 1 1 0 1        S3   token    (1 2) (1 2 3) (2 3) ...
             product  1 1 0 1 1 0             product  what the permutations so far make of three things

"RWKV-7 Goose" (arXiv:2503.14456) claims that RWKV-7 tracks states that its predecessors and transformers cannot. With
a constant number of layers, a transformer, Eagle or Finch can only compute such a product for texts up to some length,
because their states are sums, which mostly ignore order. Goose multiplies its state with a matrix that depends on the
token, and products of matrices can follow a group.

Which groups they can follow depends on their eigenvalues. To swap two things means to multiply a direction of the
state by -1. With the published formula, diag(w) - k (a * k)^T with a key k of length 1, decays w above 0.545 and rates
a below 1, no eigenvalue is below w - 1 > -0.455. So a swap also shrinks the direction by more than half: after ten
swaps less than a thousandth of it is left. "Goose, eigenvalues from -1" is a Goose whose rates are 1 + w times as
large. All its eigenvalues are between -1 and 1, and it is otherwise the same, so the difference between the two is the
effect of the range of eigenvalues. "Unlocking State-Tracking in Linear RNNs" (arXiv:2411.12537) has this
result for other models. The lowest eigenvalue of the trained models is part of the measurements.

The models read new rows at every step. All tokens are equally likely, and every product has a loss. Rows have two
tokens at first and grow evenly to --train-length in the first half of the steps. Training ends when 99% of the
products are right in rows of that length, or after the last step; with the default number of steps S3 is not learned
to the end. The test rows are the same for all models; one pass over the longest length has the accuracy of every
shorter one, because the models are causal. There is one model per layer count and seed. "Reach" is the number of
tokens up to which at least 90% of the products are right.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import trange
from transformers import PreTrainedModel

from subquad.models.rwkv7.modeling_rwkv7 import Rwkv7TimeMixing

from .baselines import BASES, change_sequences, make_baseline
from .figures import NAMES, line_of, new_figure, short
from .models import make_config, make_model, make_optimizer, make_schedule, take_step


TITLE = "State tracking"
ARCHITECTURES = ("goose", "wide-goose", "finch", "eagle", "transformer")
# Problem to the permutations that are its tokens.
GROUPS = {
    "parity": list(itertools.permutations(range(2))),
    "S3": list(itertools.permutations(range(3))),
    "A5": [
        p for p in itertools.permutations(range(5)) if sum(a > b for a, b in itertools.combinations(p, 2)) % 2 == 0
    ],
}
SEEDS = (0, 1)
OWN_RATES = {"transformer": "transformer_lr"}  # architecture to the option with its learning rate
ENOUGH = 0.99  # accuracy in training that ends it
KEPT = 0.9  # accuracy up to which a model follows the state
BIN = 4  # tokens that are averaged
BOUNDARY = 0  # the id that begins a row
TEST_SEED = 1  # for the test rows, the same for all models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--problems",
        nargs="+",
        choices=GROUPS,
        default=["parity", "S3"],
        help="groups to multiply in; on a GPU also A5",
    )
    add("--layers", type=int, nargs="+", default=[1, 2], help="numbers of layers; on a GPU also 4")
    add("--train-length", type=int, default=32, help="tokens of the longest training rows")
    add("--length", type=int, default=256, help=f"tokens of the test rows, a multiple of {BIN}")
    add("--width", type=int, default=64, help="width of the models")
    add("--steps", type=int, default=1000, help="maximum number of training steps; on a GPU 10000")
    add("--rows", type=int, default=32, help="rows per step; on a GPU 1024")
    add("--test-rows", type=int, default=128, help="rows of the test")
    add("--lr", type=float, default=3e-3, help="largest learning rate")
    add("--transformer-lr", type=float, default=1e-3, help="largest learning rate of the transformer")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("train_length", "length", "width", "steps", "rows", "test_rows", "lr", "transformer_lr")
    return {name: getattr(arguments, name) for name in names}


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if arguments.train_length < 2:
        raise ValueError(f"--train-length must be at least 2, got {arguments.train_length}.")
    if arguments.length < arguments.train_length or arguments.length % BIN:
        raise ValueError(
            f"--length must be a multiple of {BIN} and at least --train-length ({arguments.train_length}), got "
            f"{arguments.length}."
        )
    names = ("problem", "layers", "architecture", "seed")
    axes = (arguments.problems, arguments.layers, arguments.architectures, arguments.seeds)
    return [dict(zip(names, cell, strict=True)) for cell in itertools.product(*axes)]


def multiplication_table(problem: str) -> torch.Tensor:
    """The indices of the products of all elements of a group: [first, then] is `first` followed by `then`."""
    elements = GROUPS[problem]
    index = {element: number for number, element in enumerate(elements)}
    return torch.tensor([[index[tuple(first[i] for i in then)] for then in elements] for first in elements])


def make_rows(problem: str, rows: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Ids (rows, length + 1), a boundary and random elements, whose ids begin at 1, and the products (rows, length) of
    the elements so far, as indices.
    """
    table = multiplication_table(problem)
    elements = torch.randint(len(table), (rows, length), generator=generator)
    products = [elements[:, 0]]
    for element in elements[:, 1:].unbind(1):
        products.append(table[products[-1], element])
    return F.pad(elements + 1, (1, 0), value=BOUNDARY), torch.stack(products, dim=1)


def make(arguments: argparse.Namespace, problem: str, layers: int, architecture: str, lr: float) -> PreTrainedModel:
    name = BASES.get(architecture, architecture)
    config = make_config(
        name,
        vocabulary=len(GROUPS[problem]) + 1,
        width=arguments.width,
        layers=layers,
        context=arguments.train_length,
        lr=lr,
    )
    return make_baseline(architecture, config) if architecture in BASES else make_model(config)


def train(arguments: argparse.Namespace, problem: str, layers: int, architecture: str, seed: int):
    """A trained model, and the number of its steps."""
    torch.manual_seed(seed)
    lr = getattr(arguments, OWN_RATES.get(architecture, "lr"))
    model = make(arguments, problem, layers, architecture, lr).to(arguments.device).train()
    optimizer = make_optimizer(model, lr, weight_decay=0.0)
    schedule = make_schedule(optimizer, arguments.steps)
    generator = torch.Generator().manual_seed(2 * seed)  # the test's is odd
    accuracy = 0.0
    bar = trange(1, arguments.steps + 1, desc=f"{architecture} {problem}", unit="step", leave=False)
    for step in bar:
        grown = min(2 * (step - 1) / arguments.steps, 1.0)
        length = int(2 + grown * (arguments.train_length - 2))
        ids, products = (x.to(model.device) for x in make_rows(problem, arguments.rows, length, generator))
        logits = model(input_ids=ids, use_cache=False).logits[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), products.flatten())
        take_step(loss, model, optimizer, schedule)
        accuracy = 0.9 * accuracy + 0.1 * (logits.argmax(-1) == products).float().mean().item()
        bar.set_postfix_str(f"{length} tokens, {accuracy:.3f} right", refresh=False)
        if length == arguments.train_length and accuracy >= ENOUGH:
            bar.close()
            break
    return model.eval(), step


@torch.no_grad()
def accuracies(model: PreTrainedModel, ids: torch.Tensor, products: torch.Tensor, rows: int) -> list[float]:
    """The share of right products in every `BIN` tokens, over all rows, of which `rows` are read in a call."""
    right = [
        model(input_ids=part.to(model.device), use_cache=False).logits[:, 1:].argmax(-1).cpu() == wanted
        for part, wanted in zip(ids.split(rows), products.split(rows), strict=True)
    ]
    return torch.cat(right).float().mean(0).view(-1, BIN).mean(1).tolist()


@torch.no_grad()
def lowest_eigenvalue(model: PreTrainedModel, ids: torch.Tensor) -> float | None:
    """The lowest eigenvalue of a Goose's transition matrices; None for models without such matrices."""
    found: list[float] = []

    def look(sequences):
        # diag(w) - kappa (a * kappa)ᵀ has the eigenvalues of a symmetric matrix.
        w, key = sequences["log_w"].exp(), sequences["kappa"] * sequences["a"].sqrt()
        found.append(torch.linalg.eigvalsh(w.diag_embed() - key.unsqueeze(-1) * key.unsqueeze(-2)).min().item())
        return sequences

    mixings = [module for module in model.modules() if isinstance(module, Rwkv7TimeMixing)]
    hooks = [change_sequences(mixing, look) for mixing in mixings]
    model(input_ids=ids.to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(found, default=None)


def measure(arguments: argparse.Namespace, problem: str, layers: int, architecture: str, seed: int) -> dict[str, Any]:
    model, steps = train(arguments, problem, layers, architecture, seed)
    generator = torch.Generator().manual_seed(TEST_SEED)
    ids, products = make_rows(problem, arguments.test_rows, arguments.length, generator)
    shares = accuracies(model, ids, products, rows=max(arguments.rows * arguments.train_length // arguments.length, 1))
    return {
        "by_position": [round(share, 3) for share in shares],
        "lowest_eigenvalue": lowest_eigenvalue(model, ids[:4, : arguments.train_length + 1]),
        "steps": steps,
        "parameters": model.num_parameters(),
    }


def reach(row: dict[str, Any]) -> int:
    """The number of tokens up to which the share of right products is at least `KEPT`."""
    return BIN * sum(1 for _ in takewhile(lambda share: share >= KEPT, row["by_position"]))


def ends(row: dict[str, Any], trained: int) -> tuple[float, float]:
    """The shares of right products at the end of the training's length, and of the test's."""
    return row["by_position"][max(trained // BIN, 1) - 1], row["by_position"][-1]


def lines_of(record: dict[str, Any]) -> dict[tuple[str, int], dict[str, list[dict[str, Any]]]]:
    """The rows by problem and layers, and then by architecture, all in order."""
    lines: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for row in sorted(record["rows"], key=in_order):
        lines.setdefault((row["problem"], row["layers"]), {}).setdefault(row["architecture"], []).append(row)
    return lines


def in_order(row: dict[str, Any]) -> tuple[int, int, int, int]:
    problem, architecture = [*GROUPS].index(row["problem"]), ARCHITECTURES.index(row["architecture"])
    return problem, row["layers"], architecture, row["seed"]


def title_of(problem: str, layers: int) -> str:
    return f"{problem}, {layers} layer{'s' if layers > 1 else ''}"


def draw(record: dict[str, Any]) -> dict[str, Any]:
    lines, settings = lines_of(record), record["settings"]
    problems, counts = ([*dict.fromkeys(names)] for names in zip(*lines, strict=True))
    figure, grid = new_figure(
        len(counts), len(problems), height=1.4 + 1.8 * len(counts), sharex=True, sharey=True, squeeze=False
    )
    lengths = range(BIN, settings["length"] + 1, BIN)
    ticks = [length for length in lengths if length & (length - 1) == 0]
    for (problem, layers), models in lines.items():
        axes = grid[counts.index(layers), problems.index(problem)]
        for architecture, rows in models.items():
            shares = torch.tensor([row["by_position"] for row in rows])
            line = line_of(architecture)
            axes.plot(lengths, shares.mean(0), markevery=[lengths.index(tick) for tick in ticks], **line)
            axes.fill_between(lengths, shares.amin(0), shares.amax(0), color=line["color"], alpha=0.15, linewidth=0)
        axes.axvline(settings["train_length"], color="#999999", linewidth=0.8, linestyle=":")
        axes.axhline(1 / len(GROUPS[problem]), color="#999999", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [*map(short, ticks)])
        axes.set(title=title_of(problem, layers), ylim=(-0.03, 1.03))
    for axes in grid[-1]:
        axes.set_xlabel("tokens so far")
    for axes in grid[:, 0]:
        axes.set_ylabel("right products (share)")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return {"tracking": figure}


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    trained, length = record["settings"]["train_length"], record["settings"]["length"]
    header = ["model", "problem", "layers", "seed", "reach (tokens)", f"right at {trained}", f"right at {length}"]
    header += ["lowest eigenvalue", "steps", "parameters"]
    rows = []
    for (problem, layers), models in lines_of(record).items():
        for architecture, repeats in models.items():
            for row in repeats:
                lowest = row["lowest_eigenvalue"]
                what = [NAMES[architecture], problem, str(layers), str(row["seed"]), str(reach(row))]
                what += [f"{share:.3f}" for share in ends(row, trained)]
                what += ["–" if lowest is None else f"{lowest:.3f}", f"{row['steps']:,}", f"{row['parameters']:,}"]
                rows.append(what)
    return header, rows


def listed(numbers: Iterable[Any]) -> str:
    return " and ".join(dict.fromkeys(map(str, numbers)))


def compare(lines: dict[tuple[str, int], dict[str, list[dict[str, Any]]]], mine: str, other: str) -> list[str]:
    """The number of tasks in which one architecture's mean reach is longer than another's."""
    means = [
        [sum(map(reach, models[name])) / len(models[name]) for name in (mine, other)]
        for models in lines.values()
        if {mine, other} <= models.keys()
    ]
    if not means:
        return []
    longer, shorter = sum(a > b for a, b in means), sum(a < b for a, b in means)
    return [
        f"{NAMES[mine]} beside {NAMES[other]}: it follows the product farther in {longer} of {len(means)} tasks, and "
        f"less far in {shorter}."
    ]


def findings(record: dict[str, Any]) -> list[str]:
    settings, lines, said = record["settings"], lines_of(record), []
    trained, length = settings["train_length"], settings["length"]
    for (problem, layers), models in lines.items():
        parts = []
        for architecture, rows in models.items():
            shares = zip(*(ends(row, trained) for row in rows), strict=True)
            early, late = (listed(f"{share:.0%}" for share in at) for at in shares)
            parts.append(f"{NAMES[architecture]} {listed(map(reach, rows))} ({early}; {late})")
        said.append(
            f"{title_of(problem, layers)}: tokens up to which {KEPT:.0%} of the products are right, and in brackets "
            f"the share of right products after {trained} and after {length} tokens: {', '.join(parts)}. A guess is "
            f"right in {1 / len(GROUPS[problem]):.0%}."
        )
    for other in ("finch", "eagle", "transformer", "wide-goose"):
        said += compare(lines, "goose", other)
    for architecture in ("goose", "wide-goose"):
        rows = [row for models in lines.values() for row in models.get(architecture, [])]
        if lowest := [row["lowest_eigenvalue"] for row in rows]:
            said.append(f"The lowest eigenvalue of a trained {NAMES[architecture]} is {min(lowest):.3f}.")
    return said
