"""
Needle in a haystack, by depth and length: can a model find a number that occurs once anywhere in a text, even if the
text is many times as long as in training?

This is the test of figures 1, 4, 6 and 7 of "Don't Pay Attention" (Avey, arXiv:2506.11305), table 2 of "Raven" and
figure 5 of "Gecko", in the two variants of RULER (arXiv:2404.06654) that they share, S-NIAH-1 and S-NIAH-2:

    passkey  here we stay . the pass key is 4 8 1 5 2 . the rain is cold . ...
             what is the pass key ? the pass key is _ _ _ _ _
    number   a carpet is near the old river . the special magic number for lantern is 4 8 1 5 2 . ...
             what is the special magic number for lantern ? the special magic number for lantern is _ _ _ _ _

The passkey is among five sentences that repeat, the number among sentences that vary. The papers test English language
models of 150M to 7B parameters. Here models of about 0.13M learn only this task, from scratch, with a vocabulary of
words and digits. They learn both variants together from rows that never repeat, with the needle anywhere; only the
answer has a loss. The longest rows grow from --shortest to --train-length tokens as a model learns, because with long
rows from the beginning it learns nothing for a long time. If another recipe is better for an architecture, it is used
(recipes.py); the section on trials has the numbers.

The test works like an application: `generate` reads a text and writes the digits one by one with the cache. The answer
is right if every digit is. All models get the same texts. The weights are kept in OUT/needle-ARCHITECTURE-RECIPE-SEED,
so a later run, for example with more --lengths, does not train again. With several --seeds, the numbers are means,
with the least and the greatest.

A training row contains its answer, and Avey's ranker reads the whole last split, so it also learns to find the needle
by its digits. In the test the digits are missing, and the accuracy is lower than in training, especially if the digits
are in another split than the words before them.
"""

from __future__ import annotations

import argparse
import random
from itertools import chain, takewhile
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import trange
from transformers import AutoModelForCausalLM, PreTrainedModel

from subquad import AveyConfig
from subquad_kernels import split_ranker

from .baselines import without
from .figures import line_of, new_figure, short
from .models import CAUSAL, NAMES, make_config, make_cycle, make_model, make_optimizer, take_step
from .recipes import COMMON, Recipe, begin, chosen, find, names_of_recipes, recipes_of
from .runs import keep_model
from .spread import Spread, by, draw_spreads


TITLE = "Needle in a haystack"
ARCHITECTURES = CAUSAL
SEEDS = (0,)
SHARED = ("architecture", "recipe", "seed")  # cells with the same values of these share a training
VARIANTS = ("passkey", "number")
DEPTHS = range(0, 101, 10)  # in percent
CALL = 32768  # tokens that are read in one call
LEARNED = 0.5  # accuracy above which rows become longer, and a model counts as having learned the task
KEPT = 0.9  # a length counts as reached with at least this share of the accuracy at the training's length
# The results of the papers for the passkey, and the multiple of a setting up to which models find it.
PAPERS = {
    "avey": ("97.8% at 128 times the length of the training (figure 6)", "train_length", 128),
    "raven": ("91.4% at 16 times the length of the training (table 2)", "train_length", 16),
    "gecko": ("nearly all up to 8 chunks, 4 times what it attends to (figure 5)", "window", 8),
    "transformer": ("100% up to the length of the training, 0% beyond (Raven's table 2)", "train_length", 1),
}
OWN_RATES = {"transformer": "transformer_lr"}  # architecture to the option with its learning rate
BOUNDARY = 0  # the id that begins a text
TEST_SEED = 0  # for the test's texts, the same for all models
DIGITS = "0123456789"
NEEDLES = {"passkey": "the pass key is", "number": "the special magic number for NOUN is"}
SENTENCES = {
    "passkey": (
        "the rain is cold .",
        "the road is long .",
        "the moon is pale .",
        "here we stay .",
        "out and home again .",
    ),
    "number": (
        "the ADJECTIVE NOUN VERB the NOUN .",
        "a NOUN is PLACE the ADJECTIVE NOUN .",
        "the NOUN VERB a ADJECTIVE NOUN PLACE the NOUN .",
        "PLACE the NOUN is a NOUN .",
        "every NOUN VERB the ADJECTIVE NOUN again .",
    ),
}
CLASSES = {
    name: words.split()
    for name, words in {
        "ADJECTIVE": "old small quiet bright heavy broken green distant gentle famous",
        "NOUN": "lantern river teacher garden engine letter window farmer castle market doctor bridge forest painter "
        "harbour village kitchen miller ladder sailor orchard carpet baker chimney",
        "PLACE": "near behind under above beyond",
        "VERB": "finds paints follows sells hides carries cleans watches repairs remembers",
    }.items()
}
TEXTS = [*DIGITS, "what ?", *NEEDLES.values(), *chain(*SENTENCES.values(), *CLASSES.values())]
WORDS = sorted({word for text in TEXTS for word in text.split()} - {*CLASSES})
IDS = {word: number for number, word in enumerate(WORDS, start=BOUNDARY + 1)}
DIGIT_IDS = {IDS[digit] for digit in DIGITS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=names_of_recipes(),
        help="recipes of the training, if an architecture has them (default: the one chosen in recipes.py)",
    )
    add_settings(parser)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The options of texts, models and trainings."""
    add = parser.add_argument
    lengths = [512, 1024, 2048, 4096, 8192]
    add("--lengths", type=int, nargs="+", default=lengths, help="tokens of the test texts; on a GPU up to 32768")
    add("--texts", type=int, default=8, help="test texts per variant, length and depth; on a GPU 100")
    add("--train-length", type=int, default=512, help="tokens of the longest training rows")
    add("--shortest", type=int, default=40, help="tokens of the shortest training rows")
    add("--digits", type=int, default=5, help="digits of the needle, all different")
    add("--width", type=int, default=64, help="width of the models; on a GPU 128")
    add("--layers", type=int, default=2, help="layers of the models; on a GPU 4")
    add("--window", type=int, default=64, help="tokens of a chunk of Gecko, or of two splits of Avey")
    add("--steps", type=int, default=5000, help="training steps; on a GPU 20000")
    add("--tokens", type=int, default=2048, help="tokens per step; on a GPU 32768")
    add("--lr", type=float, default=3e-3, help="largest learning rate")
    add(
        "--transformer-lr",
        type=float,
        default=1e-3,
        help="largest learning rate of the transformer, which learns less at 3e-3",
    )
    add("--weight-decay", type=float, default=0.1, help="weight decay of the matrices")
    add(
        "--answers",
        choices=("whole", "digit", "mixed", "late"),
        default="whole",
        help="what a training row ends with: the whole answer, or the digits before one, which alone has a loss; "
        "mixed: one or the other; late: digit in the second half of the training",
    )


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = (
        "texts train_length shortest digits width layers window steps tokens lr transformer_lr weight_decay answers"
    )
    return {name: getattr(arguments, name) for name in names.split()}


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {"architecture": architecture, "recipe": name, "seed": seed, "variant": variant, "length": length}
        for architecture in arguments.architectures
        for name in arguments.recipes or [chosen(architecture)]
        if name in recipes_of(architecture)
        for seed in arguments.seeds
        for variant in VARIANTS
        for length in arguments.lengths
    ]


def make_text(variant: str, length: int, depth: float, digits: int, generator: random.Random) -> list[int]:
    """
    The ids of a text: haystack with needle, question and answer. The beginning of the haystack is cut, so that the
    length is right.

    Args:
        variant: one of `VARIANTS`.
        length: number of ids.
        depth: position of the needle, from 0 (before the haystack) to 1 (after it), moved to the nearest end of a
            sentence.
        digits: number of digits of the answer, at most 10.

    Raises:
        ValueError: if the length leaves no room for a haystack.
    """
    key = generator.choice(CLASSES["NOUN"])
    needle = [key if word == "NOUN" else word for word in NEEDLES[variant].split()]
    answer = generator.sample(DIGITS, digits)
    question = ["what", "is", *needle[:-1], "?", *needle]
    room = length - len([BOUNDARY, *needle, *answer, ".", *question, *answer])
    if room < 1:
        raise ValueError(f"A text of {length} tokens has no room for a {variant} of {digits} digits and a haystack.")
    haystack: list[str] = []
    while len(haystack) < room:
        sentence = generator.choice(SENTENCES[variant]).split()
        haystack += [generator.choice(CLASSES[word]) if word in CLASSES else word for word in sentence]
    haystack = haystack[-room:]
    ends = [0, *(end for end, word in enumerate(haystack, start=1) if word == ".")]
    end = min(ends, key=lambda end: abs(end - depth * room))
    text = [*haystack[:end], *needle, *answer, ".", *haystack[end:], *question, *answer]
    return [BOUNDARY, *(IDS[word] for word in text)]


def are_whole(answers: str, progress: float, generator: random.Random) -> bool:
    """Whether the rows of a training step end with the whole answer. The progress is from 0 to 1."""
    if answers == "mixed":
        return generator.random() < 0.5
    return answers == "whole" or (answers == "late" and progress < 0.5)


def with_options(arguments: argparse.Namespace, recipe: Recipe) -> argparse.Namespace:
    """The arguments with the options of a recipe."""
    return argparse.Namespace(**{**vars(arguments), **recipe.options})


def train(arguments: argparse.Namespace, architecture: str, recipe: Recipe, seed: int) -> PreTrainedModel:
    arguments = with_options(arguments, recipe)
    torch.manual_seed(seed)
    ids = {"bos_token_id": BOUNDARY, "eos_token_id": None, "pad_token_id": None}
    lr = getattr(arguments, OWN_RATES.get(architecture, "lr"))
    sizes = {name: getattr(arguments, name) for name in ("width", "layers", "window")}
    others = {**ids, **recipe.config}
    config = make_config(
        architecture, vocabulary=len(IDS) + 1, context=arguments.train_length, lr=lr, **sizes, **others
    )
    model = without(recipe.without, make_model(config)).to(arguments.device).train()
    begin(model, recipe)
    optimizer = make_optimizer(model, lr, weight_decay=arguments.weight_decay)
    schedule = make_cycle(optimizer, arguments.steps, rise=0.02)
    generator = random.Random(f"{seed} training")
    digits, longest, learned = arguments.digits, float(arguments.shortest), 0.0
    bar = trange(arguments.steps, desc=architecture, unit="step", leave=False)
    for step in bar:
        length = generator.randint(arguments.shortest, int(longest))
        rows = [
            make_text(generator.choice(VARIANTS), length, generator.random(), digits, generator)
            for _ in range(max(arguments.tokens // length, 1))
        ]
        batch = torch.tensor(rows, device=arguments.device)
        whole = are_whole(arguments.answers, step / arguments.steps, generator)
        end = length if whole else length - generator.randint(0, digits - 1)
        read, answers = (batch, batch[:, -digits:]) if whole else (batch[:, : end - 1], batch[:, end - 1 : end])
        with torch.autocast(batch.device.type, torch.bfloat16):
            logits = model(input_ids=read, use_cache=False, logits_to_keep=digits + 1).logits.float()
        logits = logits[:, -digits - 1 : -1] if whole else logits[:, -1:]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        take_step(loss, model, optimizer, schedule)
        learned = 0.9 * learned + 0.1 * (logits.argmax(-1) == answers).all(1).float().mean().item()
        if learned > LEARNED:
            longest = min(1.02 * longest, arguments.train_length)
        bar.set_postfix_str(f"up to {int(longest)} tokens, {learned:.2f} right", refresh=False)
    return model


def obtain(arguments: argparse.Namespace, architecture: str, name: str, seed: int) -> tuple[PreTrainedModel, float]:
    """A model trained by a recipe, and the seconds of its training; an earlier run's if nothing has changed."""
    models = vars(arguments).setdefault("models", {})  # models of this run
    key = f"{architecture}-{name}-{seed}"
    if key not in models:
        directory, recipe = arguments.out / f"needle-{key}", find(architecture, name)
        wanted = {**settings(arguments), "recipe": [*recipe[1:]]}
        seconds = keep_model(directory, wanted, lambda: train(arguments, architecture, recipe, seed), arguments.fresh)
        model = without(recipe.without, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
        models[key] = model.to(arguments.device), seconds
    return models[key]


def are_right(model: PreTrainedModel, texts: torch.Tensor, digits: int) -> torch.Tensor:
    """Whether greedy decoding gives the last digits of each text (texts, length): bool (texts)."""
    right = []
    for batch in texts.split(max(CALL // texts.shape[1], 1)):
        batch = batch.to(model.device)
        written = model.generate(batch[:, :-digits], max_new_tokens=digits, do_sample=False)
        right.append((written == batch).all(1).cpu())
    return torch.cat(right)


@torch.no_grad()
def are_retrieved(model: PreTrainedModel, texts: torch.Tensor, digits: int) -> torch.Tensor | None:
    """
    Whether Avey sees the first digit of the needle when it begins to write the last digits of each text (texts,
    length): bool (texts). The ranker has retrieved the digit's split, or it is the last one. None for other models.
    """
    if not isinstance(model.config, AveyConfig):
        return None
    size, found = model.config.chunk_size, []
    for batch in texts.split(max(CALL // texts.shape[1], 1)):
        read = batch[:, :-digits].to(model.device)
        x = F.pad(model.get_input_embeddings()(read), (0, 0, 0, -read.shape[1] % size)).unflatten(1, (-1, size))
        last = torch.full((len(x), 1), x.shape[1] - 1, device=x.device)
        index, _, _ = split_ranker(
            x[:, -1:], x, k=model.config.k, number=last, normalization=model.config.score_normalization
        )
        digit = torch.isin(read, torch.tensor([*DIGIT_IDS], device=x.device)).int().argmax(1, keepdim=True)
        seen = torch.cat((index[:, 0], last), dim=1)
        found.append((seen == digit // size).any(1).cpu())
    return torch.cat(found)


def measure(
    arguments: argparse.Namespace, architecture: str, recipe: str, seed: int, variant: str, length: int
) -> dict[str, Any]:
    model, seconds = obtain(arguments, architecture, recipe, seed)
    arguments = with_options(arguments, find(architecture, recipe))
    digits = arguments.digits
    texts = texts_of_test(variant, length, arguments.texts, digits)
    right = are_right(model, torch.tensor(texts), digits)
    split = getattr(model.config, "chunk_size", arguments.window // 2)
    shares = shares_of(right, texts, variant, digits, split)
    retrieved = are_retrieved(model, torch.tensor(texts), digits)
    if retrieved is not None:
        shares["retrieved"] = retrieved.double().mean().item()
        parts = {"right_if_retrieved": right[retrieved], "right_if_not": right[~retrieved]}
        shares |= {name: part.double().mean().item() for name, part in parts.items() if len(part)}
    return {**shares, "parameters": model.num_parameters(), "training_seconds": seconds}


def texts_of_test(variant: str, length: int, number: int, digits: int) -> list[list[int]]:
    """The texts of the test, `number` for each depth, the same for all models."""
    generator = random.Random(f"{TEST_SEED} test {variant} {length}")
    return [make_text(variant, length, depth / 100, digits, generator) for depth in DEPTHS for _ in range(number)]


def shares_of(right: torch.Tensor, texts: list[list[int]], variant: str, digits: int, split: int) -> dict[str, Any]:
    """The shares of right answers, (texts) bool: of all, by depth, and of needles that are cut or whole."""
    right, cut = right.double(), torch.tensor([is_cut(text, variant, digits, split) for text in texts])
    shares = {"accuracy": right.mean().item(), "by_depth": right.view(len(DEPTHS), -1).mean(1).tolist()}
    parts = {name: right[which].mean().item() for name, which in (("whole", ~cut), ("cut", cut)) if which.any()}
    return {**shares, **parts}


def is_cut(text: list[int], variant: str, digits: int, split: int) -> bool:
    """Whether the needle of a text, words and digits, lies in more than one split of `split` tokens."""
    first = next(place for place, token in enumerate(text) if token in DIGIT_IDS)
    begin = first - len(NEEDLES[variant].split())
    return begin // split != (first + digits - 1) // split


def in_order(row: dict[str, Any]) -> tuple[int, int, int]:
    return ARCHITECTURES.index(row["architecture"]), VARIANTS.index(row["variant"]), row["length"]


def recipes_in(record: dict[str, Any]) -> dict[str, list[str]]:
    """The recipes of each architecture, the one in figures and table first: the chosen one if it was measured."""
    found: dict[str, list[str]] = {}
    for architecture, name in by(sorted(record["rows"], key=in_order), "architecture", "recipe"):
        found.setdefault(architecture, []).append(name)
    for architecture, names in found.items():
        names.sort(key=lambda name: (name != chosen(architecture), name != COMMON))
    return found


def shown(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one recipe for each architecture, in order."""
    names = recipes_in(record)
    return [row for row in sorted(record["rows"], key=in_order) if row["recipe"] == names[row["architecture"]][0]]


def others(record: dict[str, Any]) -> list[str]:
    """Findings about recipes that are not in figures and table."""
    said = []
    for architecture, (first, *rest) in recipes_in(record).items():
        if first != chosen(architecture):
            said.append(
                f"{NAMES[architecture]}: the numbers are those of the recipe {first}. recipes.py chooses "
                f"{chosen(architecture)} since, which is not measured yet with rows of "
                f"{record['settings']['train_length']:,} tokens."
            )
        for name in rest:
            rows = [row for row in record["rows"] if (row["architecture"], row["recipe"]) == (architecture, name)]
            for variant, alike in zip(VARIANTS, (by(rows, "variant").get((v,), []) for v in VARIANTS), strict=True):
                lengths = by(sorted(alike, key=lambda row: row["length"]), "length")
                spreads = {length: Spread.of(row["accuracy"] for row in same) for (length,), same in lengths.items()}
                answers = ", ".join(f"{spread.text('.1%')} at {length:,}" for length, spread in spreads.items())
                text = f"{NAMES[architecture]} with the recipe {name}, {variant}: {answers}."
                last = [row for row in alike if "cut" in row and "whole" in row]
                if last:
                    cut, whole = (sum(row[part] for row in last) / len(last) for part in ("cut", "whole"))
                    text += (
                        f" Over all lengths {cut:.1%} if the needle crosses a boundary of splits, {whole:.1%} if not."
                    )
                said.append(text)
    return said


def lines_of(record: dict[str, Any]) -> dict[str, dict[str, dict[int, dict[str, Any]]]]:
    """The means over the seeds by architecture, variant and length, in this order, with the spread of the accuracy."""
    lines: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for (architecture, variant, length), alike in by(shown(record), "architecture", "variant", "length").items():
        spread = Spread.of(row["accuracy"] for row in alike)
        depths = zip(*(row["by_depth"] for row in alike), strict=True)
        mean = {"accuracy": spread.mean, "spread": spread, "by_depth": [sum(depth) / len(alike) for depth in depths]}
        for part in ("whole", "cut"):  # older rows do not have them
            if shares := [row[part] for row in alike if part in row]:
                mean[part] = sum(shares) / len(shares)
        lines.setdefault(architecture, {}).setdefault(variant, {})[length] = mean
    return lines


def draw(record: dict[str, Any]) -> dict[str, Any]:
    lines, trained = lines_of(record), record["settings"]["train_length"]
    lengths = sorted({row["length"] for row in record["rows"]})
    ticks = [short(length) for length in lengths]
    boundary = sum(length <= trained for length in lengths) - 0.5  # in columns of a heat map

    maps, grid = new_figure(len(VARIANTS), len(lines), height=4.4, sharex=True, sharey=True, squeeze=False)
    for column, (architecture, variants) in zip(grid.T, lines.items(), strict=True):
        for axes, variant in zip(column, VARIANTS, strict=True):
            nothing = {"by_depth": [float("nan")] * len(DEPTHS)}
            columns = [variants.get(variant, {}).get(length, nothing)["by_depth"] for length in lengths]
            image = axes.imshow(list(zip(*columns, strict=True)), vmin=0, vmax=1, aspect="auto")
            axes.axvline(boundary, color="white", linewidth=2.5)
            axes.axvline(boundary, color="#D55E00", linewidth=1.2)
            axes.set_xticks(range(len(lengths)), ticks, rotation=90)
            axes.set_yticks(range(0, len(DEPTHS), 5), DEPTHS[::5])
            axes.grid(visible=False)
        column[0].set_title(NAMES[architecture].replace(" (", "\n("))
    for axes, variant in zip(grid[:, 0], VARIANTS, strict=True):
        axes.set_ylabel(f"{variant}: depth (%)")
    for axes in grid[-1]:
        axes.set_xlabel("tokens")  # the columns are narrow
    maps.colorbar(image, ax=grid, label="right answers (share)")

    curves, grid = new_figure(1, len(VARIANTS), sharey=True)
    for axes, variant in zip(grid, VARIANTS, strict=True):
        for architecture, variants in lines.items():
            points = {length: row["spread"] for length, row in variants.get(variant, {}).items()}
            draw_spreads(axes, points, **line_of(architecture))
        axes.axvline(trained, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, ticks)
        axes.set(title=variant, xlabel="length (tokens)", ylim=(-0.03, 1.03))
    grid[0].set_ylabel("right answers (share)")
    curves.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return {"needle_depth": maps, "needle_length": curves}


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["model", "variant", "length (tokens)", "seeds", "right answers", "worst depth (%)", "right there"]
    rows = []
    for architecture, variants in lines_of(record).items():
        for variant, lengths in variants.items():
            for length, row in lengths.items():
                worst = min(row["by_depth"])
                what = [NAMES[architecture], variant, f"{length:,}", str(row["spread"].count), row["spread"].text()]
                rows.append([*what, str(DEPTHS[row["by_depth"].index(worst)]), f"{worst:.3f}"])
    return header, rows


def reach_of(rows: dict[int, dict[str, Any]], trained: int) -> tuple[int, int]:
    """
    The longest tested length that training also had (or the shortest one), and the length up to which a model keeps
    its accuracy there; 0 if it has not learned the task.
    """
    base = max((length for length in rows if length <= trained), default=min(rows))
    least = max(KEPT * rows[base]["accuracy"], LEARNED)
    longer = (length for length in rows if length >= base)
    return base, max(takewhile(lambda length: rows[length]["accuracy"] >= least, longer), default=0)


def describe(architecture: str, variant: str, rows: dict[int, dict[str, Any]], trained: int) -> str:
    """All accuracies, and the accuracies in both halves of the text at the first length that is too long."""
    answers = ", ".join(f"{row['spread'].text('.1%')} at {length:,}" for length, row in rows.items())
    text = f"{NAMES[architecture]}, {variant}, right answers by length in tokens: {answers}."
    base, reach = reach_of(rows, trained)
    if beyond := [length for length in rows if length >= base and length > reach]:
        by_depth, half = rows[beyond[0]]["by_depth"], len(DEPTHS) // 2
        first, second = (sum(part) / half for part in (by_depth[:half], by_depth[-half:]))
        text += f" At {beyond[0]:,} {first:.1%} in the first half of the text, {second:.1%} in the second."
    length, row = [*rows.items()][-1]
    if "cut" in row and "whole" in row:
        text += (
            f" At {length:,} {row['cut']:.1%} if the needle crosses a boundary of splits, {row['whole']:.1%} if not."
        )
    return text


def compare(architecture: str, rows: dict[int, dict[str, Any]], settings: dict[str, Any]) -> str:
    """The result of the paper for the passkey, and whether it appears here."""
    claim, name, times = PAPERS[architecture]
    promised, last = times * settings[name], max(rows)
    base, reach = reach_of(rows, settings["train_length"])
    text = f"{NAMES[architecture]} in the papers, passkey: {claim}. "
    if not reach:
        return text + f"It has not learned the task here: {rows[base]['accuracy']:.1%} at {base:,} tokens."
    if reach >= promised:
        verdict = "as far as there" if reach == promised else "farther than there"
    else:
        verdict = "as far as was tested" if reach == last else "less far than there"
    kept = f"at least {KEPT:.0%} of its accuracy at {base:,} tokens up to {reach:,}"
    return text + f"Here it keeps {kept}, {reach / settings['train_length']:g} times the training's: {verdict}."


def findings(record: dict[str, Any]) -> list[str]:
    lines, settings = lines_of(record), record["settings"]
    said = [
        describe(architecture, variant, rows, settings["train_length"])
        for architecture, variants in lines.items()
        for variant, rows in variants.items()
    ]
    said += others(record)
    for variant in VARIANTS:
        rows = {name: variants[variant] for name, variants in lines.items() if variant in variants}
        longest = max((length for row in rows.values() for length in row), default=0)
        last = {name: row[longest]["accuracy"] for name, row in rows.items() if longest in row}
        ranked = ", ".join(f"{NAMES[name]} {last[name]:.1%}" for name in sorted(last, key=last.get, reverse=True))
        said.append(
            f"{variant} at {longest:,} tokens, {longest / settings['train_length']:g} times the training's: {ranked}."
        )
    for architecture, variants in lines.items():
        if architecture in PAPERS and "passkey" in variants:
            said.append(compare(architecture, variants["passkey"], settings))
    return said
