"""
Recipes of the needle's training: changes to the common settings of a training and a model.

They are data. `RECIPES` has the recipes that were tried, each with its changes and their reason, and `CHOSEN` the one
used by the needle in a haystack. `python -m examples.evaluation trials` measures them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel


class Recipe(NamedTuple):
    """
    Args:
        why: the change, and the reason.
        config: fields of the configuration.
        options: options of `python -m examples.evaluation needle`, such as `{"weight_decay": 0.0}`. Options of the
            texts, such as `digits`, also apply to the test.
        without: the part of `baselines.PARTS` that the model lacks.
        start: last part of parameters' names to their initial value.
    """

    why: str
    config: dict[str, Any] = {}
    options: dict[str, Any] = {}
    without: str = ""
    start: dict[str, float] = {}


COMMON = "common"
PLAIN = Recipe("the settings that all architectures have in common")
UNTIED = {"tie_word_embeddings": False}
QUICK = {"dt_bias": -1.0, "A_log": 1.4}
RECIPES: dict[str, dict[str, Recipe]] = {
    "raven": {
        COMMON: PLAIN,
        "sparse": Recipe("a token is written to 4 of 32 slots, as few as in the paper, not to 16", {"topk": 4}),
        "no-decay": Recipe("no weight decay: the paper mentions none", options={"weight_decay": 0.0}),
        "slots": Recipe("128 slots, of which 16 are written", {"num_slots": 128}),
        "silent": Recipe("no noise in the router", {"add_gumbel_noise": False}),
        "slow": Recipe("a third of the learning rate", options={"lr": 1e-3}),
        "mlp": Recipe("a router of two layers", {"router_type": "mlp"}),
        "half-sparse": Recipe("a token is written to 8 of 32 slots", {"topk": 8}),
        "brisk": Recipe(
            "decays begin ten times as fast, so that slots fill up within a row; a head of small A is still slow",
            start={"dt_bias": -1.0},
        ),
        "quick": Recipe("decays begin faster in all heads: dt_bias at -1, A at 4", start=QUICK),
        "brisk-long": Recipe("quick, and 5,000 steps, twice as many", {}, {"steps": 5000}, start=QUICK),
        "fast": Recipe("three times the learning rate", options={"lr": 1e-2}),
        "long": Recipe("twice as many steps", options={"steps": 5000}),
    },
    "avey": {
        COMMON: PLAIN,
        "digit": Recipe(
            "rows end before the digit to predict, so the ranker cannot see it", options={"answers": "digit"}
        ),
        "mixed": Recipe("half of the rows end before the digit to predict", options={"answers": "mixed"}),
        "untied": Recipe("the head does not share the embeddings, which the ranker compares", UNTIED),
        "untied-mixed": Recipe("untied and mixed", UNTIED, {"answers": "mixed"}),
        "untied-late": Recipe("untied, and rows end before the digit in the second half", UNTIED, {"answers": "late"}),
        "untied-k8": Recipe("untied, 7 splits are retrieved", UNTIED | {"k": 8}),
        "untied-wide": Recipe(
            "untied, splits of 64 tokens, in which a needle is cut less often", UNTIED | {"chunk_size": 64}
        ),
        "untied-short": Recipe(
            "untied, and an answer of 1 digit, which a boundary of splits parts from its words in 3%, not 16%",
            UNTIED,
            {"digits": 1},
        ),
        "untied-short-wide": Recipe(
            "untied-short, splits of 64 tokens as in the paper, rows of 512 tokens, twice as many steps",
            UNTIED | {"chunk_size": 64},
            {"digits": 1, "train_length": 512, "steps": 5000},
        ),
        "max": Recipe("scores are divided by the largest, as in the paper", {"score_normalization": "max"}),
        "k8": Recipe("7 splits are retrieved, as in the paper, not 3", {"k": 8}),
    },
}
CHOSEN = {"raven": "brisk-long"}  # architecture to the recipe of its needle, if not the common one
# Architecture to the name of a part, and the recipe of a model without it.
ABLATIONS: dict[str, tuple[str, Recipe]] = {
    "avey": ("ranker", Recipe("one split of 128 tokens, and no other is retrieved", {"k": 1, "chunk_size": 128})),
    "raven": ("router", Recipe("every token is written to all slots", {"router": "gsa", "decay_type": "GLA"})),
    "gecko": ("working memory", Recipe("nothing is read from the memory", without="working memory")),
    "finch": ("changing decay", Recipe("the decays are parameters, as Eagle's", without="changing decay")),
}
WITHOUT = "without"  # the name of an ablation's recipe


def chosen(architecture: str) -> str:
    """The name of the recipe that an architecture's needle is trained with."""
    return CHOSEN.get(architecture, COMMON)


def recipes_of(architecture: str) -> dict[str, Recipe]:
    """The recipes that an architecture can be trained with."""
    return RECIPES.get(architecture, {COMMON: PLAIN})


def names_of_recipes() -> list[str]:
    return list(dict.fromkeys(name for recipes in RECIPES.values() for name in recipes))


def begin(model: PreTrainedModel, recipe: Recipe) -> None:
    """Sets parameters of a new model to their initial values in a recipe."""
    for name, parameter in model.named_parameters():
        if (value := recipe.start.get(name.rpartition(".")[2])) is not None:
            torch.nn.init.constant_(parameter, value)


def find(architecture: str, name: str) -> Recipe:
    """
    Raises:
        ValueError: if the architecture does not have a recipe of this name.
    """
    recipes = recipes_of(architecture)
    if architecture in ABLATIONS:
        recipes = {**recipes, WITHOUT: ABLATIONS[architecture][1]}
    if name not in recipes:
        raise ValueError(f"The recipes of {architecture} are {', '.join(recipes)}, got {name!r}.")
    return recipes[name]
