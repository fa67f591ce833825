"""
Parameter groups for an optimizer, by the papers' recipes: [`parameter_groups`].

The papers also give a learning rate, a warm-up and a decay for pretraining, which belong to a run and not to a group:
see `REGISTRY[model_type].recipe` and the documentation page about fine-tuning. Set them in `TrainingArguments`.

Avey, Avey-B and Gecko clip gradients at a norm of 1, as `Trainer` does. RWKV models have a loss of their own,
[`subquad.training.losses.l2wrap_loss`].
"""

from torch import nn

from ..models import REGISTRY


def parameter_groups(model: nn.Module, lr: float, weight_decay: float | None = None) -> list[dict]:
    """
    The trainable parameters of a model in groups for an optimizer of the Adam family, by the recipe of its
    architecture's paper. Each parameter is in one group.

    ```python
    groups = parameter_groups(model, lr=3e-4)
    trainer = Trainer(model, arguments, optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": groups}), ...)
    ```

    `Trainer(optimizers=(torch.optim.AdamW(groups), None))` does the same, but is refused with FSDP. `Trainer` then
    ignores the learning rate, betas, epsilon and weight decay of `TrainingArguments`. Its schedule multiplies the
    learning rate of each group, and it logs the first group's.

    Args:
        model: a model of this package, with or without a head, alone or in a wrapper that has its `config`: PEFT's
            (apply it first), `torch.compile`'s.
        lr: peak of the learning rate. The papers' values are for pretraining.
        weight_decay: for the matrices; the paper's if None.

    Returns:
        dicts with `params`, `lr`, `weight_decay`, and the paper's `betas` and `eps` if it gives them.

    Raises:
        ValueError: if the model has another architecture, or a number is negative or not finite.
    """
    for name, number in (("lr", lr), ("weight_decay", weight_decay or 0.0)):
        if not 0 <= number < float("inf"):
            raise ValueError(f"`{name}` must be at least 0 and finite, got {number}.")
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in REGISTRY:
        raise ValueError(
            f"`model` is a {type(model).__name__} of model type {model_type!r}, and there are recipes for "
            f"{', '.join(REGISTRY)}."
        )
    recipe = REGISTRY[model_type].recipe
    weight_decay = recipe.weight_decay if weight_decay is None else weight_decay
    adam = {name: value for name in ("betas", "eps") if (value := getattr(recipe, name)) is not None}
    groups = {}
    for name, parameter in model.named_parameters():  # yields a tied parameter once
        if not parameter.requires_grad:
            continue
        module, _, name = name.rpartition(".")
        is_weight = name == "weight" and isinstance(model.get_submodule(module), nn.Linear | nn.Embedding)
        decay = weight_decay if is_weight or name in recipe.matrices else 0.0
        rate = lr * recipe.rates.get(name, 1.0)
        # Optimizers do not update sharded and unsharded tensors together.
        key = rate, decay, getattr(parameter, "device_mesh", None)
        group = groups.setdefault(key, {"params": [], "lr": rate, "weight_decay": decay, **adam})
        group["params"].append(parameter)
    return list(groups.values())
