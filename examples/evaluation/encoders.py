"""
Encoders: Avey-B beside BERT and ModernBERT of the same width, depth and about the same size, all from scratch.

"Avey-B" (section 5 and table 2) compares encoders that are trained on masked language modelling and then fine-tuned,
and has Avey-B above BERT in all tasks, most clearly where tokens are classified and where texts are retrieved.
Appendix M has needles in texts of up to 96k tokens, 48 times as long as in training. Three comparisons are
similar, but small enough to train on one core in minutes:

  masked     Masked language modelling of folk tunes in ABC. A fifth of the bytes are masked, as in the paper. Numbers:
             bits per masked byte, and the share of masked bytes that are predicted right, in the held-out tunes.
  tokens     Classification of every byte, fine-tuned from the model of `masked`: not a note, or a note that sounds
             natural, sharp or flat. The letter of a note is not enough: the key is in the header, up to 200 bytes
             before it, and accidentals are valid up to the end of their bar. Avey-B sees the header if its
             ranker retrieves the split with it. Numbers: the mean of the three F1 scores of notes, and the share of
             notes that are right. A guess that knows which bytes are notes, but not the key, gives every letter its
             most frequent label.
  retrieval  The number in a haystack of `needle`, in one call: mask tokens take the place of the answer, and the
             answer is right if every digit is. Models learn it from scratch from rows that never repeat, whose length
             grows to --train-length as a model learns, and are also tested with longer texts. In the paper the
             answer is a span of the text. Rows are whole splits of Avey-B, as in the paper.

All models read the same rows with the same masks for the same number of steps, without dropout. The learning rate
rises in the first tenth of the steps, as in appendix B; its peak and Adam's settings are specific to each
architecture. Only the lengths of retrieval's rows depend on how fast a model learns. A split of Avey-B has an eighth
of a training row, as in the paper (256 of 2,048 tokens), and so has ModernBERT's local attention. Avey-B's layers are
half as large as the transformers', so it has twice as many.

BERT has a table of positions, one for each token of its training rows, and cannot read longer texts. ModernBERT can,
because its positions are rotary. Avey-B knows positions only within a split. A needle takes a small part of a split of
256 tokens, and a large part of one of 32. So the number has two digits, and retrieval also has the accuracies of
needles that a boundary of splits cuts, and of whole ones. A guess of two digits is right in 1 of 90 texts.

The weights are kept in OUT/encoders-ARCHITECTURE-PROBLEM-SEED, so `tokens` does not train the model of `masked` again.

    python -m examples.evaluation encoders --problems masked tokens --architectures avey-b bert --seeds 0
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from abc_corpus import alterations
from tqdm import trange
from train_abc import BOUNDARY, losses_of, pack, predict, single_tunes, transposed
from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel

from . import needle
from .figures import NAMES, line_of, new_figure, short
from .models import ENCODERS, PEERS, make_config, make_cycle, make_model, make_optimizer, most_tokens, take_step
from .positions import corpus
from .runs import keep_model
from .spread import Spread, bars_of, by, draw_spreads


TITLE = "Encoders"
ARCHITECTURES = (*ENCODERS, *PEERS)
MINE = "avey-b"
PROBLEMS = ("masked", "tokens", "retrieval")
SEEDS = (0, 1)
SHARED = ("problem", "architecture", "seed")  # cells with the same values of these share a training
OWN_RATES = {"bert": "bert_lr", "modernbert": "modernbert_lr"}  # architecture to the option with its learning rate
VARIANT = "number"  # variant of the needle's texts
WARMUP = 0.1  # share of the steps in which the learning rate rises
TEST_SEED = 0  # for the test's masks and keys, the same for all models
LABELS = ("not a note", "natural", "sharp", "flat")
IGNORED = -100  # the label of boundaries and of empty places, which have no loss
BYTES = 128  # number of ids of tunes
NEEDLE_MASK = len(needle.IDS) + 1  # the id after the words' ids
# Measurements by problem: the field of a row, its name, its format, and whether more is better.
MEASURES = {
    "masked": (("bits", "bits per masked byte", ".3f", False), ("accuracy", "masked bytes right", ".1%", True)),
    "tokens": (("f1", "mean F1 of notes", ".3f", True), ("accuracy", "notes right", ".1%", True)),
    "retrieval": (("accuracy", "right answers", ".1%", True),),
}
# Table 2 of the paper, base sizes of Avey-B and of each peer. The table has no losses of masked tokens.
PAPER = {
    "tokens": ("token classification, F1", {"avey-b": 93.59, "bert": 89.82, "modernbert": 92.78}),
    "retrieval": ("information retrieval, NDCG@10", {"avey-b": 78.53, "bert": 73.08, "modernbert": 72.54}),
}
# Table 15, base size: accuracies at 1k and at 96k tokens, and the ratio of that to the training's rows.
PAPER_NEEDLE = (78.29, 71.86, 48)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="what to measure")
    add("--width", type=int, default=64, help="width of the models")
    add("--layers", type=int, default=4, help="layers of the transformers; Avey-B has twice as many, half as large")
    add("--context", type=int, default=256, help="bytes of a row of packed tunes; longer tunes are left out")
    add("--rows", type=int, default=8, help="rows per step of tunes")
    add("--steps", type=int, default=2500, help="training steps of masked language modelling")
    add("--tuning-steps", type=int, default=500, help="training steps of the classification of tokens")
    add("--train-length", type=int, default=256, help="tokens of the longest training rows of retrieval")
    add("--shortest", type=int, default=64, help="tokens of the shortest training rows of retrieval")
    add("--lengths", type=int, nargs="+", default=[256, 1024, 4096], help="tokens of the test texts of retrieval")
    add("--texts", type=int, default=16, help="test texts of retrieval per length and depth")
    add("--digits", type=int, default=2, help="digits of the needle, all different")
    add("--tokens", type=int, default=2048, help="tokens per step of retrieval")
    add("--retrieval-steps", type=int, default=2500, help="training steps of retrieval")
    add("--lr", type=float, default=3e-3, help="largest learning rate of Avey-B")
    add("--bert-lr", type=float, default=1e-3, help="largest learning rate of BERT")
    add("--modernbert-lr", type=float, default=3e-3, help="largest learning rate of ModernBERT")
    add(
        "--weight-decay",
        type=float,
        default=0.01,
        help="weight decay of the matrices, as in the papers of Avey-B and BERT",
    )


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = "width layers context rows steps tuning_steps train_length shortest texts digits tokens retrieval_steps"
    names += " lr bert_lr modernbert_lr weight_decay"
    chosen = {name: getattr(arguments, name) for name in names.split()}
    return {**chosen, "music21": importlib.metadata.version("music21")}


def split_of(arguments: argparse.Namespace) -> int:
    """The tokens of Avey-B's splits in retrieval."""
    return arguments.train_length // 8


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    split = split_of(arguments)
    for name in ("train_length", "context"):
        if (value := getattr(arguments, name)) < 8 or value % 8:
            raise ValueError(f"--{name.replace('_', '-')} must be a multiple of 8, got {value}.")
    if arguments.shortest % split or not split <= arguments.shortest <= arguments.train_length:
        raise ValueError(
            f"--shortest must be a multiple of a split, of {split} tokens, and at most --train-length "
            f"({arguments.train_length}), got {arguments.shortest}."
        )
    if wrong := [length for length in arguments.lengths if length % split]:
        raise ValueError(f"--lengths must be multiples of a split, of {split} tokens, got {wrong[0]}.")
    return [
        {"problem": problem, "architecture": architecture, "seed": seed, "length": length}
        for seed in arguments.seeds
        for problem in arguments.problems
        for architecture in arguments.architectures
        for length in (arguments.lengths if problem == "retrieval" else [None])
    ]


def config_of(arguments: argparse.Namespace, problem: str, architecture: str) -> PreTrainedConfig:
    retrieval = problem == "retrieval"
    length = arguments.train_length if retrieval else arguments.context
    return make_config(
        architecture,
        vocabulary=NEEDLE_MASK + 1 if retrieval else BYTES,
        width=arguments.width,
        layers=arguments.layers,
        context=length,
        window=length // 4,
        bos_token_id=BOUNDARY,
        eos_token_id=None,
        pad_token_id=None,
        num_labels=len(LABELS),
    )


def tunes_of(arguments: argparse.Namespace, held_out: bool = False) -> list[str]:
    """The tunes for training, or the held-out ones, that fit in a row with the boundary at their end."""
    tunes = corpus().validation if held_out else corpus().train
    return [tune for tune in tunes if len(tune) < arguments.context]


def batches_of(arguments: argparse.Namespace, seed: int) -> Iterator[torch.Tensor]:
    """Rows of packed tunes, (rows, context), -1 where a row is empty: epoch after epoch, in other keys every time."""
    tunes = tunes_of(arguments)
    for epoch in itertools.count():
        yield from pack(tunes, arguments.context, random.Random(f"{seed} {epoch}")).split(arguments.rows)


def precision(arguments: argparse.Namespace) -> torch.autocast:
    return torch.autocast(torch.device(arguments.device).type, torch.bfloat16)


def masked_losses(arguments: argparse.Namespace, model: PreTrainedModel, seed: int) -> Iterator[torch.Tensor]:
    """The losses of the steps of masked language modelling."""
    for step, rows in enumerate(batches_of(arguments, seed)):
        generator = torch.Generator().manual_seed(seed * 2**32 + step)
        with precision(arguments):
            loss = losses_of(model, rows.to(model.device), generator).mean()
        yield loss


def labels_of(row: list[int]) -> list[int]:
    """The label of each byte of a row of tunes. Boundaries and empty places have the label `IGNORED`."""
    labels: list[int] = []
    for tune in bytes(max(token, BOUNDARY) for token in row).split(bytes([BOUNDARY])):
        sounds = alterations(tune.decode("ascii")) if tune else {}
        kinds = {0: LABELS.index("natural"), 1: LABELS.index("sharp"), -1: LABELS.index("flat")}
        labels += [kinds[(sounds[i] > 0) - (sounds[i] < 0)] if i in sounds else 0 for i in range(len(tune))]
        labels.append(IGNORED)  # the boundary after it
    return labels[:-1]


def classify(model: PreTrainedModel, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (rows, length, labels) of the bytes of the rows, and their labels (rows, length)."""
    labels = torch.tensor([labels_of(row) for row in rows.tolist()], device=model.device)
    rows = rows.to(model.device)
    logits = model(input_ids=rows.clamp(min=BOUNDARY), attention_mask=(rows >= 0).long()).logits
    return logits.float(), labels


def tuning_losses(arguments: argparse.Namespace, model: PreTrainedModel, seed: int) -> Iterator[torch.Tensor]:
    """The losses of the steps of the classification of tokens."""
    for rows in batches_of(arguments, seed):
        with precision(arguments):
            logits, labels = classify(model, rows)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        yield loss


def answers_of(model: PreTrainedModel, texts: torch.Tensor, digits: int) -> torch.Tensor:
    """Logits (texts, digits, vocabulary) of the last digits of each text (texts, length), which are hidden."""
    hidden = texts.clone()
    hidden[:, -digits:] = NEEDLE_MASK
    return model(input_ids=hidden).logits[:, -digits:].float()


def retrieval_losses(arguments: argparse.Namespace, model: PreTrainedModel, seed: int) -> Iterator[torch.Tensor]:
    """The losses of the steps of retrieval. Rows become longer where the model finds most numbers."""
    generator = random.Random(f"{seed} training")
    digits, longest, learned = arguments.digits, float(arguments.shortest), 0.0
    split = split_of(arguments)
    while True:
        length = split * generator.randint(arguments.shortest // split, int(longest) // split)
        rows = [
            needle.make_text(VARIANT, length, generator.random(), digits, generator)
            for _ in range(max(arguments.tokens // length, 1))
        ]
        texts = torch.tensor(rows, device=arguments.device)
        with precision(arguments):
            logits = answers_of(model, texts, digits)
        answers = texts[:, -digits:]
        learned = 0.9 * learned + 0.1 * (logits.argmax(-1) == answers).all(1).float().mean().item()
        if learned > needle.LEARNED:
            longest = min(1.02 * longest, arguments.train_length)
        yield F.cross_entropy(logits.flatten(0, 1), answers.flatten())


# Problem to the option with its number of steps, and to their losses.
TRAININGS: dict[str, tuple[str, Callable[..., Iterator[torch.Tensor]]]] = {
    "masked": ("steps", masked_losses),
    "tokens": ("tuning_steps", tuning_losses),
    "retrieval": ("retrieval_steps", retrieval_losses),
}


def train(arguments: argparse.Namespace, problem: str, architecture: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config, (steps, losses_of_steps) = config_of(arguments, problem, architecture), TRAININGS[problem]
    if problem == "tokens":
        base, _ = obtain(arguments, "masked", architecture, seed)
        model = AutoModelForTokenClassification.from_config(config)
        model.base_model.load_state_dict(base.base_model.state_dict())
    else:
        model = make_model(config)
    model.to(arguments.device).train()
    lr, steps = getattr(arguments, OWN_RATES.get(architecture, "lr")), getattr(arguments, steps)
    optimizer = make_optimizer(model, lr, weight_decay=arguments.weight_decay)
    schedule = make_cycle(optimizer, steps, rise=WARMUP)
    losses = losses_of_steps(arguments, model, seed)
    bar = trange(steps, desc=f"{architecture} {problem}", unit="step", leave=False)
    for _, loss in zip(bar, losses, strict=False):
        take_step(loss, model, optimizer, schedule)
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    return model


def obtain(arguments: argparse.Namespace, problem: str, architecture: str, seed: int) -> tuple[PreTrainedModel, float]:
    """A trained model, and the seconds of its training; an earlier run's if nothing has changed."""
    models = vars(arguments).setdefault("models", {})  # models of this run
    key = f"{architecture}-{problem}-{seed}"
    if key not in models:
        directory = arguments.out / f"encoders-{key}"
        new = partial(train, arguments, problem, architecture, seed)
        seconds = keep_model(directory, settings(arguments), new, arguments.fresh)
        auto = AutoModelForTokenClassification if problem == "tokens" else AutoModelForMaskedLM
        model = auto.from_pretrained(directory, dtype=torch.float32).to(arguments.device).eval()
        models[key] = model, seconds
    return models[key]


def measure_masked(arguments: argparse.Namespace, model: PreTrainedModel) -> dict[str, float]:
    """Bits per masked byte of the held-out tunes, each read alone, and the share of masked bytes that are right."""
    generator = torch.Generator().manual_seed(TEST_SEED)
    batches = single_tunes(tunes_of(arguments, held_out=True))
    parts = [predict(model, batch.to(model.device), generator) for batch in batches]
    logits, targets = (torch.cat(part) for part in zip(*parts, strict=True))
    bits = F.cross_entropy(logits.float(), targets).item() / math.log(2)
    return {"bits": bits, "accuracy": (logits.argmax(-1) == targets).float().mean().item()}


def scores(found: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """
    Mean of the F1 scores of the labels of notes, if they occur, and the share of notes with the right label.
    """
    notes, f1 = labels > 0, []
    for label in range(1, len(LABELS)):
        said, true = found == label, labels == label
        if true.any():
            f1.append(2 * (said & true).sum().item() / (said.sum() + true.sum()).item())
    return {"f1": sum(f1) / len(f1), "accuracy": (found == labels)[notes].float().mean().item()}


def guesses(tunes: list[str]) -> dict[int, int]:
    """The most frequent label of each letter of a note in any octave, by byte, and without any key."""
    counts: dict[str, Counter] = {}
    for tune in tunes:
        row = tune.encode("ascii")
        for byte, label in zip(row, labels_of([*row]), strict=True):
            if label > 0:
                counts.setdefault(chr(byte).upper(), Counter())[label] += 1
    most = {letter: count.most_common(1)[0][0] for letter, count in counts.items()}
    return {ord(case): label for letter, label in most.items() for case in (letter, letter.lower())}


def measure_tokens(arguments: argparse.Namespace, model: PreTrainedModel) -> dict[str, float]:
    """The scores of the held-out tunes in random keys, each read alone, and the scores of the guess."""
    generator = random.Random(f"{TEST_SEED} keys")
    tunes, trained = (
        [transposed(tune, arguments.context, generator) for tune in tunes_of(arguments, held_out)]
        for held_out in (True, False)
    )
    label = guesses(trained)
    found, guessed, right = [], [], []
    for rows in single_tunes(tunes):
        logits, labels = classify(model, rows)
        there = labels >= 0
        found.append(logits.argmax(-1)[there])
        right.append(labels[there])
        # The guess knows which bytes are notes.
        there = there.cpu()
        guessed.append(torch.tensor([label.get(byte, 0) for byte in rows[there].tolist()]) * (labels.cpu()[there] > 0))
    found, guessed, right = (torch.cat(part).cpu() for part in (found, guessed, right))
    guess = {f"guess_{name}": score for name, score in scores(guessed, right).items()}
    return {**scores(found, right), **guess}


def measure_retrieval(arguments: argparse.Namespace, model: PreTrainedModel, length: int) -> dict[str, Any]:
    """The shares of right answers at a length, as for the needle in a haystack."""
    texts = needle.texts_of_test(VARIANT, length, arguments.texts, arguments.digits)
    right = []
    for batch in torch.tensor(texts).split(max(needle.CALL // length, 1)):
        found = answers_of(model, batch.to(model.device), arguments.digits).argmax(-1)
        right.append((found.cpu() == batch[:, -arguments.digits :]).all(1))
    return needle.shares_of(torch.cat(right), texts, VARIANT, arguments.digits, split_of(arguments))


@torch.no_grad()
def measure(
    arguments: argparse.Namespace, problem: str, architecture: str, seed: int, length: int | None
) -> dict[str, Any]:
    with torch.enable_grad():
        model, seconds = obtain(arguments, problem, architecture, seed)
    numbers = {"parameters": model.num_parameters(), "training_seconds": seconds}
    if problem == "masked":
        return {**measure_masked(arguments, model), **numbers}
    if problem == "tokens":
        return {**measure_tokens(arguments, model), **numbers}
    most = most_tokens(model.config)
    if most is not None and length > most:
        return {"accuracy": None, "by_depth": None, **numbers, "note": f"cannot read more than {most:,} tokens"}
    return {**measure_retrieval(arguments, model, length), **numbers}


def in_order(row: dict[str, Any]) -> tuple[int, int, int]:
    return PROBLEMS.index(row["problem"]), row["length"] or 0, ARCHITECTURES.index(row["architecture"])


def groups_of(record: dict[str, Any]) -> dict[tuple[str, int | None], dict[str, list[dict[str, Any]]]]:
    """The rows of all seeds by problem and length, and then by architecture, all in order."""
    groups: dict[tuple[str, int | None], dict[str, list[dict[str, Any]]]] = {}
    rows = by(sorted(record["rows"], key=in_order), "problem", "length", "architecture")
    for (problem, length, architecture), alike in rows.items():
        groups.setdefault((problem, length), {})[architecture] = alike
    return groups


def spread_of(rows: list[dict[str, Any]], field: str) -> Spread | None:
    """The spread of a field over the seeds; None without numbers, for example if a model cannot read a text."""
    values = [row[field] for row in rows if row.get(field) is not None]
    return Spread.of(values) if values else None


def spreads_of(models: dict[str, list[dict[str, Any]]], field: str) -> dict[str, Spread]:
    """The spreads of a field by architecture, if there are any."""
    spreads = {architecture: spread_of(rows, field) for architecture, rows in models.items()}
    return {architecture: spread for architecture, spread in spreads.items() if spread is not None}


def draw(record: dict[str, Any]) -> dict[str, Any]:
    groups, trained = groups_of(record), record["settings"]["train_length"]
    figure, grid = new_figure(1, 3, height=3.8)
    for axes, problem, field, label in zip(
        grid, PROBLEMS, ("accuracy", "f1"), ("right bytes (share)", "mean F1 of notes"), strict=False
    ):
        models = groups.get((problem, None), {})
        spreads = spreads_of(models, field)
        for place, (architecture, spread) in enumerate(spreads.items()):
            style = {"color": line_of(architecture)["color"], "capsize": 2.5}
            axes.bar(place, spread.mean, yerr=bars_of([spread]), error_kw={"elinewidth": 1.0}, **style)
        for guess in list(spreads_of(models, "guess_f1").values())[:1]:
            axes.axhline(guess.mean, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(spreads)), [NAMES[name] for name in spreads], rotation=30)
        axes.set(title=problem, ylabel=label, ylim=(0, 1.03))
    axes = grid[-1]
    lengths = sorted({length for problem, length in groups if problem == "retrieval"})
    for architecture in ARCHITECTURES:
        found = {length: spreads_of(groups["retrieval", length], "accuracy").get(architecture) for length in lengths}
        if points := {length: spread for length, spread in found.items() if spread is not None}:
            draw_spreads(axes, points, **line_of(architecture))
    axes.axvline(trained, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short(length) for length in lengths])
    axes.set(title="retrieval", xlabel="length (tokens)", ylabel="right answers (share)", ylim=(-0.03, 1.03))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return {"encoders": figure}


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["problem", "length (tokens)", "measured", "model", "seeds", "value", "parameters"]
    rows = []
    for (problem, length), models in groups_of(record).items():
        parts = [("whole", "right, needle in one split", ".1%"), ("cut", "right, needle cut", ".1%")]
        for field, what, style in [*(measure[:3] for measure in MEASURES[problem]), *parts]:
            for architecture, alike in models.items():
                spread = spread_of(alike, field)
                if spread is None and field not in alike[0]:
                    continue
                said = "cannot read" if spread is None else spread.text(style)
                where = [problem, "–" if length is None else f"{length:,}", what]
                seeds, parameters = str(len(alike)), f"{alike[0]['parameters']:,}"
                rows.append([*where, NAMES[architecture], seeds, said, parameters])
        for field, what, style, _ in MEASURES[problem] if problem == "tokens" else ():
            guess = spread_of([row for alike in models.values() for row in alike], f"guess_{field}")
            rows.append([problem, "–", what, "guess without key", "–", format(guess.mean, style), "–"])
    return header, rows


def verdict(mine: Spread, other: Spread, more: bool) -> str:
    """Whether a model is better or worse than another with every seed; `more` says whether more is better."""
    if mine.least <= other.greatest and other.least <= mine.greatest:
        return "not apart"
    return "better" if (mine.mean > other.mean) == more else "worse"


VERDICTS = {
    "better": "the worst {mine} is better than the best {other}",
    "worse": "the best {mine} is worse than the worst {other}",
    "not apart": "{mine} and {other} differ by no more than their seeds do",
}


def compare(problem: str, models: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Avey-B beside each peer in the first measure of a problem, and whether the paper has the same order."""
    field, what, _, more = MEASURES[problem][0]
    spreads, said = spreads_of(models, field), []
    for peer in PEERS:
        if not {MINE, peer} <= spreads.keys():
            continue
        found = verdict(spreads[MINE], spreads[peer], more)
        seeds = ", of one seed each" if max(spreads[name].count for name in (MINE, peer)) == 1 else ""
        text = f"{problem}, {what}: {VERDICTS[found].format(mine=NAMES[MINE], other=NAMES[peer])}{seeds}."
        if problem in PAPER:
            name, claims = PAPER[problem]
            alike = {"better": "Here it is better too.", "worse": "Here it is the other way round."}
            text += (
                f" In the paper Avey-B is better in {name}: {claims[MINE]} beside {claims[peer]} (table 2, base). "
                + alike.get(found, "Here it is undecided.")
            )
        said.append(text)
    return said


def kept(architecture: str, lines: dict[int, Spread], trained: int) -> str:
    """The share of its accuracy at the training's length that a model keeps in the longest texts."""
    name, last = NAMES[architecture], max(lines)
    if lines[trained].least < needle.LEARNED:
        which = " with every seed" if lines[trained].greatest >= needle.LEARNED else ""
        return f"{name} has not learned retrieval{which}: {lines[trained].text('.1%')} at {trained:,} tokens."
    times, share = last / trained, lines[last].mean / lines[trained].mean
    return f"{name} keeps {share:.0%} of its accuracy at {trained:,} tokens in texts {times:g} times as long."


def findings(record: dict[str, Any]) -> list[str]:
    groups, trained, said = groups_of(record), record["settings"]["train_length"], []
    for (problem, length), models in groups.items():
        for field, what, style, _ in MEASURES[problem]:
            at = "" if length is None else f" at {length:,} tokens"
            numbers = [f"{NAMES[name]} {spread.text(style)}" for name, spread in spreads_of(models, field).items()]
            if guess := spread_of([row for rows in models.values() for row in rows], f"guess_{field}"):
                numbers.append(f"a guess that knows no key {format(guess.mean, style)}")
            if numbers:
                said.append(f"{problem}, {what}{at}: {', '.join(numbers)}.")
        if length in (None, trained):
            said += compare(problem, models)
    lines: dict[str, dict[int, Spread]] = {}
    for (problem, length), models in groups.items():
        for architecture, spread in spreads_of(models, "accuracy").items() if problem == "retrieval" else ():
            lines.setdefault(architecture, {})[length] = spread
    for architecture, line in lines.items():
        if trained in line and max(line) > trained:
            said.append(kept(architecture, line, trained))
    if MINE in lines and trained in lines[MINE]:
        first, last, times = PAPER_NEEDLE
        said.append(
            f"In the paper's needle (table 15, base) Avey-B keeps {last / first:.0%} of its accuracy in texts {times} "
            f"times as long as the training's rows: {last} of {first}."
        )
    for (problem, length), models in groups.items():
        parts = {part: spreads_of({MINE: models.get(MINE, [])}, part).get(MINE) for part in ("cut", "whole")}
        if problem == "retrieval" and all(parts.values()):
            said.append(
                f"{NAMES[MINE]} at {length:,} tokens: {parts['cut'].mean:.1%} if the needle crosses a boundary of "
                f"splits, {parts['whole'].mean:.1%} if not."
            )
    notes = {(row["architecture"], row["note"]) for row in record["rows"] if row.get("note")}
    said += [f"{NAMES[architecture]} {note}." for architecture, note in sorted(notes)]
    missing = [f"{problem} of {NAMES[name]}" for problem in PROBLEMS for name in ARCHITECTURES]
    measured = {f"{row['problem']} of {NAMES[row['architecture']]}" for row in record["rows"]}
    missing = [name for name in missing if name not in measured]
    return said + ([f"Not measured yet: {', '.join(missing)}."] if missing else [])
