"""Errors for arguments that nothing reads or that have a wrong type, and one name for arguments with two."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

from torch import Tensor, nn

from .versions import CACHE_NAMES


# Other names of arguments, and ours. transformers' collators use the other names for document boundaries.
ALIASES = {CACHE_NAMES[1]: CACHE_NAMES[0], "cu_seq_lens_q": "cu_seqlens"}
# Arguments of a forward pass that are tensors.
TENSORS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cu_seqlens", "labels", "shift_labels")
# Arguments that mark packed documents.
MARKERS = ("cu_seqlens", "position_ids")
# Redundant arguments of transformers' collators, and their users.
REPEATED = {
    "cu_seq_lens_k": "attention, for its keys",
    "max_length_q": "kernels of attention",
    "max_length_k": "kernels of attention",
    "seq_idx": "convolutions",
}
# Arguments that libraries pass to every model: what reads each of them, or why it can be ignored.
COMMON_ARGUMENTS = {
    "return_dict": "transformers' decorators read it",
    "output_hidden_states": "transformers' hooks read it",
    "output_attentions": "transformers' hooks read it; it is an error if there are no weights to return",
    "logits_to_keep": "a head gives it to the model below, which may then compute fewer tokens",
    "num_items_in_batch": "Trainer: the loss reads it",
    "ignore_index": "the loss reads it",
    "shift_labels": "the loss reads it; Trainer gives it where labels are shifted already",
}
# The arguments of `save_pretrained` that are for an upload.
PUSH_ARGUMENTS = (
    "repo_id",
    "token",
    "private",
    "commit_message",
    "commit_description",
    "create_pr",
    "revision",
    "tags",
)


# The similarity, from 0 to 1, at which a name in a file is taken for a misspelling. Other configurations have names
# that are as long and almost as similar: `bos_token` is 0.86 of `bos_token_id`.
ALIKE = 0.87


class UnknownArgument(TypeError, ValueError):
    """An argument that nothing reads. Python raises a TypeError for it, transformers' `generate` a ValueError."""


def with_own_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """
    Renames arguments to our names.

    Raises:
        TypeError: if one is given under both of its names.
    """
    for other, own in ALIASES.items():
        if other not in arguments:
            continue
        arguments = dict(arguments)
        value = arguments.pop(other)
        if value is not None:
            if arguments.get(own) is not None:
                raise TypeError(f"`{own}` and `{other}` are two names of the same argument: give one of them.")
            arguments[own] = value
    return arguments


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """
    Names in `known` that resemble `name`, as the end of an error message; empty if there are none.

    Args:
        alike: minimum similarity, from 0 to 1.
    """
    found = difflib.get_close_matches(name, sorted(known), n=3, cutoff=alike)
    return f" Did you mean {' or '.join(f'`{each}`' for each in found)}?" if found else ""


def refuse_unknown(arguments: dict[str, Any], known: Iterable[str], of: str) -> None:
    """
    Raises:
        UnknownArgument: if an argument other than None is unknown. The message lists known names that resemble it.
    """
    for name, value in arguments.items():
        if value is not None and name not in known:
            raise UnknownArgument(f"{of} got an unexpected keyword argument `{name}`.{nearest(name, known)}")


def check_tensor_types(arguments: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: if one of [`TENSORS`] is given that is none.
    """
    for name in TENSORS:
        if (value := arguments.get(name)) is not None and not isinstance(value, Tensor):
            raise ValueError(f"`{name}` must be a tensor, got {value!r:.80}.")


def check_strings(**texts: Any) -> None:
    """
    Raises:
        ValueError: if a text is not a string. None or a list would be read as it is printed.
    """
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"`{name}` must be a string, got {text!r:.80}.")


def check_counts(least: int = 1, /, **numbers: Any) -> None:
    """
    Raises:
        ValueError: if a number is not whole, or less than `least`.
    """
    for name, number in numbers.items():
        if not isinstance(number, Integral) or isinstance(number, bool) or number < least:
            raise ValueError(f"`{name}` must be a whole number of at least {least}, got {number!r}.")


@functools.cache
def parameter_names(*functions: Callable) -> frozenset[str]:
    """The parameter names of all the functions."""
    parameters = [each for function in functions for each in inspect.signature(function).parameters.values()]
    own = (each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL))
    return frozenset(own) - {"self", "cls"}


def known_arguments(model: nn.Module) -> frozenset[str]:
    """The arguments that the forward pass of a model or its base model reads, and the common ones."""
    classes = [*type(model).__mro__, *type(model.base_model).__mro__]
    forwards = [vars(each)["forward"] for each in classes if _is_ours(vars(each).get("forward"))]
    return parameter_names(*forwards) | COMMON_ARGUMENTS.keys() | REPEATED.keys()


def _is_ours(forward: Callable | None) -> bool:
    return getattr(forward, "checks_arguments", False)


def _check_attentions(model: nn.Module) -> None:
    """
    Raises:
        ValueError: if the model does not compute attention weights.
    """
    kind = (model.base_model._can_record_outputs or {}).get("attentions", ())
    if not any(isinstance(module, kind) for module in model.modules()):
        raise ValueError(f"`output_attentions`: {type(model).__name__} has no attention weights to return.")
    if (implementation := model.config._attn_implementation) != "eager":
        raise ValueError(f'`output_attentions` needs `attn_implementation="eager"`, got {implementation!r}.')


def checks_arguments(forward: Callable) -> Callable:
    """
    Decorates the `forward` of a model or of a mixin for models. Arguments may have their other names. An argument that
    nothing reads, or that must be a tensor and is none, is an error, raised before any work.
    """
    signature = inspect.signature(forward)
    positional = [*signature.parameters][1:]

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        kwargs = with_own_names(kwargs)
        refuse_unknown(kwargs, self.known_arguments, f"{type(self).__name__}.forward()")
        check_tensor_types({**dict(zip(positional, args, strict=False)), **kwargs})
        if kwargs.get("output_attentions") or self.config.output_attentions:
            _check_attentions(self)
        repeated = [name for name in REPEATED if kwargs.get(name) is not None]
        marked = [name for name in MARKERS if kwargs.get(name) is not None or name in positional[: len(args)]]
        if repeated and not marked:
            raise ValueError(f"`{repeated[0]}` alone marks no documents: give `cu_seqlens`.")
        return forward(self, *args, **kwargs)

    parameters = list(signature.parameters.values())
    if CACHE_NAMES[0] in signature.parameters:  # other libraries look for either name
        parameters.insert(-1, inspect.Parameter(CACHE_NAMES[1], inspect.Parameter.KEYWORD_ONLY, default=None))
    wrapper.__signature__ = signature.replace(parameters=parameters)
    wrapper.checks_arguments = True
    return wrapper
