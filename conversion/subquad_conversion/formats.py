"""What a source format is, and what is known of a checkpoint once a format has claimed it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .checkpoint import TensorInfo


Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to write: its name here, its name in the source, and its shape here (a reshape of the source's)."""

    target: str
    source: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """
    How a checkpoint becomes a model.

    Attributes:
        sizes: configuration fields that the tensors themselves settle, and those of a variant that only the format
            tells; a dictionary where such a field is a configuration.
        tensors: what to write, in order.
        twins: pairs of source names of which only the first is written, because the configuration calls them one
            tensor. Whether they are equal is not in a plan's power to know.
        notes: what had to be assumed, for the user to read.
        zeros: source names of what is not written because it is zero. Whether it is, a plan cannot know either.
    """

    sizes: dict[str, Any]
    tensors: list[PlannedTensor]
    twins: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Format:
    """
    A source format.

    Attributes:
        name: short and stable, for programs.
        title: for people.
        model_type: the `model_type` of the configuration to write.
        matches: tells from names and shapes whether a checkpoint has this format.
        plan: maps the tensors onto the model's names. Takes the tensors and the configuration fields that came with
            the checkpoint, raises `ConversionError` with a list of all that does not fit.
        config_types: other values of `model_type` that published configurations of this format have.
        text_type: of a model that reads images, the `model_type` of the language model in it, whose fields are in
            `text_config`.
    """

    name: str
    title: str
    model_type: str
    matches: Callable[[Tensors], bool]
    plan: Callable[[Tensors, Mapping[str, Any]], Plan]
    config_types: tuple[str, ...] = ()
    text_type: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A format that is known and not supported: its title and how to tell it."""

    title: str
    matches: Callable[[Tensors], bool]


@dataclass(frozen=True)
class Recognised:
    """
    What a checkpoint is.

    Attributes:
        format: the format's short name, `rwkv6-trainer` for instance.
        title: the same for people.
        model_type: `model_type` of the model it becomes.
        sizes: configuration fields read from the tensors and, of a variant, known from the format.
        parameters: number of elements in all tensors.
        dtype: the dtype that most elements are stored in.
    """

    format: str
    title: str
    model_type: str
    sizes: dict[str, Any]
    parameters: int
    dtype: str
