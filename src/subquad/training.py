"""
Parameter groups for an optimizer, by the papers' recipes: [`parameter_groups`].

What belongs to a recipe and not to a group, for `TrainingArguments`, is of pretraining:

| architecture | peak of the learning rate | warm-up | decay |
| --- | --- | --- | --- |
| Eagle, Finch | 4e-4 (0.4B), 3e-4 (1.5B), 2e-4 (3B), 1.5e-4 (7B) | 10 steps, from 20 % | cosine to 2e-5 ... 1e-5 |
| Avey | 1e-3 | none | cosine to a tenth |
| Avey-B | 5e-4 (base), 2.5e-4 (large) | a tenth of the steps | cosine to zero |
| Raven | 4e-4 | 1 of 15 billion tokens | cosine |
| Gecko | 4e-4 (1B), 3.5e-4 (7B) | 2,000 steps (1B), 2,500 (7B) | cosine |

Avey, Avey-B and Gecko clip gradients at a norm of 1, as `Trainer` does.
"""

import dataclasses

from torch import nn


@dataclasses.dataclass(frozen=True)
class Recipe:
    """
    What a paper tells of its optimizer.

    Attributes:
        weight_decay: of matrices: the weights of linear layers and of embeddings, and `matrices`. What else there is
            goes without: biases, norms, decays, mixing coefficients, moving averages.
        betas, eps: Adam's; None where the paper does not tell.
        matrices: names of parameters that are matrices, though not those of a linear layer.
        rates: names of parameters to the factor that their learning rate has.
    """

    weight_decay: float
    betas: tuple[float, float] | None = None
    eps: float | None = None
    matrices: tuple[str, ...] = ()
    rates: dict[str, float] = dataclasses.field(default_factory=dict)


# "Eagle and Finch", appendix G: decay on linear layers and embeddings only, twice the learning rate for `time_decay`.
_RWKV = Recipe(weight_decay=0.001, betas=(0.9, 0.99), rates={"time_decay": 2.0})
RECIPES = {
    "rwkv5": _RWKV,
    "rwkv6": _RWKV,
    "visual_rwkv": _RWKV,  # section 10.2 has none of its own; the tower is frozen
    # "Avey", appendix A.
    "avey": Recipe(weight_decay=0.1, betas=(0.9, 0.95), eps=1e-12, matrices=("spatial_proj",)),
    # "Avey-B", appendix B, which does not tell what decays; matrices, as in Avey.
    "avey-b": Recipe(weight_decay=0.01, betas=(0.95, 0.95), eps=1e-18, matrices=("spatial_proj", "down_proj")),
    # "Raven", appendix A.3.1: Adam, without a word of decay.
    "raven": Recipe(weight_decay=0.0),
    # "Gecko", section 4.1, of 7B (1B: 0.05), which does not tell what decays either.
    "gecko": Recipe(weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8),
}


def parameter_groups(model: nn.Module, lr: float, weight_decay: float | None = None) -> list[dict]:
    """
    The trainable parameters of a model in groups for an optimizer of the Adam family, each once, by the recipe of its
    architecture's paper.

    ```python
    groups = parameter_groups(model, lr=3e-4)
    trainer = Trainer(model, arguments, optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": groups}), ...)
    ```

    `Trainer(optimizers=(torch.optim.AdamW(groups), None))` does the same, but is refused with FSDP. What
    `TrainingArguments` say of learning rate, betas, epsilon and weight decay is then not read; its schedule multiplies
    the learning rate of each group, of which the first one's is logged.

    Args:
        model: of this package, with a head or without, alone or in a wrapper that has its `config`: PEFT's (which is
            put around it first), `torch.compile`'s.
        lr: peak of the learning rate. The papers' are those of pretraining.
        weight_decay: of the matrices; the paper's where None.

    Returns:
        dicts with `params`, `lr`, `weight_decay`, and the paper's `betas` and `eps` where it tells them.

    Raises:
        ValueError: where the model is of another architecture.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in RECIPES:
        raise ValueError(
            f"`model` is a {type(model).__name__} of model type {model_type!r}, and there are recipes for "
            f"{', '.join(RECIPES)}."
        )
    recipe = RECIPES[model_type]
    weight_decay = recipe.weight_decay if weight_decay is None else weight_decay
    adam = {name: value for name in ("betas", "eps") if (value := getattr(recipe, name)) is not None}
    groups = {}
    for name, parameter in model.named_parameters():  # what is tied has one name
        if not parameter.requires_grad:
            continue
        module, _, name = name.rpartition(".")
        is_weight = name == "weight" and isinstance(model.get_submodule(module), nn.Linear | nn.Embedding)
        decay = weight_decay if is_weight or name in recipe.matrices else 0.0
        rate = lr * recipe.rates.get(name, 1.0)
        # Optimizers do not update tensors of several processes together with others.
        key = rate, decay, getattr(parameter, "device_mesh", None)
        group = groups.setdefault(key, {"params": [], "lr": rate, "weight_decay": decay, **adam})
        group["params"].append(parameter)
    return list(groups.values())
