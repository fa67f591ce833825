"""What a source format is, and how the tensors of a checkpoint are held against the model that they make."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

import subquad
from subquad.hub.foreign_files import TIME_STATE
from subquad.hub.loading import NameMap, name_pattern, name_replacement
from subquad.models import REGISTRY

from .checkpoint import Checkpoint, TensorInfo
from .errors import ConversionError
from .writer import OutputTensor


Tensors = Mapping[str, TensorInfo]
Shape = tuple[int, ...]
LISTED = 12  # names of each kind that an error lists
# A note about `TIME_STATE`, for which no model has a place.
STATE_LEFT_OUT = "the tuned initial state was left out; `subquad.load_time_states` reads it into an adapter"


# Takes a tensor of ours out of one of the source. None stands for the whole tensor as it is.
Extract = Callable[[torch.Tensor], torch.Tensor] | None


@dataclass(frozen=True)
class SourceTensor(TensorInfo):
    """
    A tensor that has a name of ours: its shape and dtype, the name of the source's tensor that holds it, and how it is
    taken out of that.
    """

    source: str
    take: Extract = None


@dataclass(frozen=True)
class PlannedTensor:
    """
    One tensor to write: its name here, the name of the source's tensor that holds it, its shape here (a reshape of
    what is taken), and how it is taken out.
    """

    target: str
    source: str
    shape: Shape
    take: Extract = None


@dataclass(frozen=True)
class Plan:
    """
    How a checkpoint becomes a model.

    Attributes:
        sizes: configuration fields that the tensors tell, and those of a variant that only the format tells; a
            dictionary if such a field is itself a configuration.
        tensors: what to write, in the order of the model's state dict.
        twins: pairs of source names of which only the first is written, because the configuration ties them. Whether
            they are equal has to be checked: a plan knows no values.
        notes: what had to be assumed, for the user to read.
        zeros: source names of tensors that are not written because they must be zero, which has to be checked too.
        tied: names of ours of the embeddings and the head, if the configuration ties them.
    """

    sizes: dict[str, Any]
    tensors: list[PlannedTensor]
    twins: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)
    tied: tuple[str, str] | None = None


@dataclass(frozen=True)
class InferredConfig:
    """
    What the shapes and names of a checkpoint's tensors tell about the model.

    Attributes:
        fields: configuration fields, for the model's configuration. Sizes that cannot be read have any value.
        structure: the fields that the names of the model's tensors depend on: number of layers and variants.
        places: size to the name of ours and the axis of the tensor that it is read from.
        shape_fields: fields for the model on the meta device only. No shape depends on their values, but the
            configuration is valid only with them.
        tied: names of ours of the embeddings and the head, if the configuration ties them.
        notes, zeros: as in [`Plan`].
        model: what errors call the model, if it is not the model type alone.
        finish: returns further fields, or raises `ConversionError`. It is called when the tensors are known to fit.
    """

    fields: dict[str, Any]
    structure: dict[str, Any]
    places: Mapping[str, tuple[str, int]]
    shape_fields: Mapping[str, Any] = field(default_factory=dict)
    tied: tuple[str, str] | None = None
    notes: list[str] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)
    model: str | None = None
    finish: Callable[[], Mapping[str, Any]] = dict


class Format:
    """
    A source format. A subclass says how to recognise it, which sizes the tensors show, and how their names become
    ours. Which tensors a model has, and of which shapes, comes from the model itself, made on the meta device.

    Attributes:
        name: short and stable, for programs.
        title: for people.
        model_type: the `model_type` of the configuration to write.
        config_types: values of `model_type` in published configurations of this format, in addition to the
            descriptor's `other_types`.
        name_map: how its names become ours; None if `parts` or `rename` says it.
        target: the name under which `subquad convert --to` writes it; None if it is only read.
    """

    name: str
    title: str
    model_type: str
    config_types: tuple[str, ...] = ()
    name_map: NameMap | None = None
    target: str | None = None

    # --- what a subclass says ---

    def matches(self, tensors: Tensors) -> bool:
        """Whether a checkpoint has this format, by the names and shapes of its tensors."""
        raise NotImplementedError

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        """
        What the tensors tell.

        Args:
            found: name of ours to the tensor of the source.
            given: the configuration fields that came with the checkpoint.

        Raises:
            ConversionError: if tensors and configuration contradict each other.
        """
        raise NotImplementedError

    def is_misused(self, name: str, value: Any, sizes: Mapping[str, Any]) -> bool:
        """Whether published configurations have a value in a field that is not the size of that name."""
        return False

    def rename(self, name: str) -> str:
        """Our name of a tensor of the source. Unknown names stay as they are."""
        return name

    def parts(self, name: str) -> dict[str, Extract]:
        """Our names of the tensors that one of the source holds, and how each is taken out of it."""
        return {self.rename(name): None} if self.name_map is None else self.name_map.read_name(name)

    def written_name(self, name: str) -> str:
        """Our name of a tensor of the model, which is the one in the published files."""
        return name

    def is_buffer(self, name: str) -> bool:
        """Whether the tensor with this name of ours is read but not written."""
        return False

    def fits(self, name: str, stored: Shape, shape: Shape, fields: Mapping[str, Any]) -> bool:
        """Whether a tensor of the shape `stored` has the elements of one of `shape` in the same order."""
        return stored == shape

    def shapes(self, fields: Mapping[str, Any]) -> dict[str, Shape]:
        """
        Name to shape of the tensors of a model with these configuration fields, in the order of its state dict.

        Raises:
            one of `INVALID`: if there is no such model.
        """
        with torch.device("meta"):
            model = self.model_class(self.config_class.from_dict(dict(fields)))
        return {self.written_name(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    # --- what only formats with a `target` say ---

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        """
        Notes about a model that is to be written in this format.

        Raises:
            ConversionError: if the format cannot hold it.
        """
        return []

    def unused(self, config: PreTrainedConfig) -> dict[str, Shape]:
        """Name to shape of tensors of the format that no runtime reads. They are written as zeros."""
        return {}

    def target_fields(self, config: PreTrainedConfig) -> dict[str, Any]:
        """The fields of the configuration that is written beside the weights or, in GGUF, into their file."""
        return config.to_diff_dict()

    def target_tensors(self, tensors: list[OutputTensor], config: PreTrainedConfig) -> list[OutputTensor]:
        """The tensors of a model, which have our names, under those of the format."""
        return [
            *from_ours(self.name_map, tensors),
            *(
                OutputTensor(name, shape, tensors[0].dtype, partial(torch.zeros, shape))
                for name, shape in self.unused(config).items()
            ),
        ]

    # --- what only formats with several parts say ---

    def gather(self, checkpoint: Checkpoint, stack: ExitStack, vision_tower: Path | None) -> Checkpoint | None:
        """
        The checkpoint with the tensors that belong to it and are in other files, which `stack` keeps open; None if
        this format has nothing to add. It is called before the format of the checkpoint is known.
        """
        return None

    def with_options(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """
        The configuration fields, with those that the user set.

        Raises:
            ConversionError: if the model type has no such field.
        """
        for name in options:
            if not hasattr(self.config_class, name):
                raise ConversionError(f"`{name}` does not apply to the model type {self.model_type}.")
        return {**given, **options}

    @property
    def text_type(self) -> str:
        """The `model_type` of the language model, which decides on the tokenizer."""
        return self.model_type

    def text_fields(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those configuration fields that are the language model's."""
        return fields

    def with_text_fields(self, fields: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration fields with others of the language model's."""
        return {**fields, **added}

    def save_processor(
        self, directory: Path, config: PreTrainedConfig, generation: GenerationConfig, vision_tower: Path | None
    ) -> None:
        """Saves what a model needs beside the tokenizer that is in `directory`, and may change `generation`."""

    # --- what all formats have in common ---

    @property
    def config_class(self) -> type[PreTrainedConfig]:
        return config_class(self.model_type)

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return getattr(subquad, self.architecture)

    @property
    def architecture(self) -> str:
        """Name of the class of the language model."""
        return subquad.ARCHITECTURES[self.model_type][2][subquad.lm_auto_class(self.model_type)]

    def check_type(self, given: Mapping[str, Any], source: Path) -> None:
        """
        Raises:
            ConversionError: if a configuration has a model type that tensors of this format do not have.
        """
        known = self.model_type, *self.config_types, *REGISTRY[self.model_type].other_types
        if given.get("model_type", self.model_type) not in known:
            raise ConversionError(
                f"{source} is for the model type {given['model_type']!r}, the tensors are {self.model_type!r} "
                f"({self.title}). Give the configuration that belongs to them as `config`."
            )

    def plan(self, tensors: Tensors, given: Mapping[str, Any]) -> Plan:
        """
        Maps the tensors of a checkpoint onto those of the model.

        Args:
            given: the configuration fields that came with the checkpoint.

        Raises:
            ConversionError: with a list of all that is missing, unexpected or of the wrong shape.
        """
        stateless = {name: info for name, info in tensors.items() if not TIME_STATE.fullmatch(name)}
        found = rename_all(stateless, self.parts)
        reading = self.read(found, given)
        weights = {name: tensor for name, tensor in found.items() if not self.is_buffer(name)}
        twins = []
        if reading.tied:
            embeddings, head = reading.tied
            twin = weights.pop(head, None)
            if twin and embeddings in weights:
                twins.append((weights[embeddings].source, twin.source))
        planned = self._plan_tensors(weights, reading)
        sizes = reading.fields | dict(reading.finish())
        notes = [*reading.notes, STATE_LEFT_OUT] if len(stateless) < len(tensors) else reading.notes
        return Plan(sizes, planned, twins, notes, reading.zeros, reading.tied)

    def _expected(
        self, weights: Mapping[str, SourceTensor], reading: InferredConfig
    ) -> tuple[dict[str, Shape], str | None]:
        """
        Name to shape of the model's tensors, and None; or, if the sizes make no model, those of one with the default
        sizes, of which only the names are expected, and the reason.
        """
        unread = [size for size, length in lengths_of(weights, reading.places).items() if not length]
        reason = f"no tensor tells {', '.join(unread)}."
        if not unread:
            try:
                return self.shapes(reading.fields | reading.shape_fields), None
            except INVALID as error:
                reason = one_line(error)
        try:
            return self.shapes(reading.structure), reason
        except INVALID as error:
            raise invalid_configuration(error) from error

    def _plan_tensors(self, weights: Mapping[str, SourceTensor], reading: InferredConfig) -> list[PlannedTensor]:
        shapes, reason = self._expected(weights, reading)
        if reading.tied:
            shapes.pop(reading.tied[1])
        missing = [name for name in shapes if name not in weights]
        unexpected = list(dict.fromkeys(tensor.source for name, tensor in weights.items() if name not in shapes))
        misshapen = []
        planned = []
        for name, shape in shapes.items():
            if (tensor := weights.get(name)) is None:
                continue
            axes = 1 + max((axis for place, axis in reading.places.values() if place == name), default=-1)
            if not isinstance(tensor.dtype, torch.dtype):
                misshapen.append(f"{tensor.source} (dtype {tensor.dtype}, expected a floating one)")
            elif reason is None and not self.fits(name, tensor.shape, shape, reading.fields):
                part = "" if tensor.take is None else f"{name} in "
                misshapen.append(f"{part}{tensor.source} (shape {tensor.shape}, expected {shape})")
            elif axes and (len(tensor.shape) < axes or 0 in tensor.shape):
                expected = f"{axes} or more axes, none of them empty"
                misshapen.append(f"{tensor.source} (shape {tensor.shape}, expected {expected})")
            else:
                planned.append(PlannedTensor(name, tensor.source, shape, tensor.take))
        faults = [
            f"{kind}: {', '.join(names[:LISTED])}{f' and {len(names) - LISTED} more' if len(names) > LISTED else ''}"
            for kind, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", misshapen))
            if names
        ]
        if faults:
            model = reading.model or self.model_type
            raise ConversionError(f"The tensors are not those of the model type {model}; {'; '.join(faults)}.")
        if reason is not None:
            read_from = dict.fromkeys(name for name, _ in reading.places.values() if name in weights)
            shown = ", ".join(f"{weights[name].source} {weights[name].shape}" for name in read_from)
            raise ConversionError(
                f"The sizes of the tensors do not fit together: {reason} They are read from {shown}."
            )
        return planned


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


# What a configuration class raises if its fields are not valid, and a model if they are too large for any tensor.
INVALID = (StrictDataclassError, TypeError, ValueError, RuntimeError, OverflowError)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def invalid_configuration(error: Exception) -> ConversionError:
    return ConversionError(f"The configuration is not valid: {one_line(error)}")


def config_class(model_type: str) -> type[PreTrainedConfig]:
    return getattr(subquad, subquad.ARCHITECTURES[model_type][1])


def rename_all(tensors: Tensors, parts: Callable[[str], Mapping[str, Extract]]) -> dict[str, SourceTensor]:
    """
    Name of ours to what is found under it.

    Args:
        parts: as [`Format.parts`].

    Raises:
        ConversionError: if two tensors of the source have one name of ours, or if one cannot be taken apart.
    """
    found: dict[str, SourceTensor] = {}
    for source, info in tensors.items():
        for name, take in parts(source).items():
            if name in found:
                raise ConversionError(f"{found[name].source} and {source} are the same tensor, {name}.")
            found[name] = SourceTensor(_shape_taken(source, info, take), info.dtype, source, take)
    return found


def _shape_taken(source: str, info: TensorInfo, take: Extract) -> Shape:
    if take is None:
        return info.shape
    try:
        return tuple(take(torch.empty(info.shape, device="meta")).shape)
    except (IndexError, RuntimeError) as error:
        raise ConversionError(f"{source} (shape {info.shape}) has another layout than expected.") from error


def lengths_of(found: Tensors, places: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """Sizes from the tensor and axis where each is read; 0 if there is no such axis, or a tensor without elements."""
    lengths = {}
    for size, (name, axis) in places.items():
        shape = found[name].shape if name in found else ()
        lengths[size] = shape[axis] if len(shape) > axis and 0 not in shape else 0
    return lengths


def count_blocks(names: Iterable[str], prefix: str) -> int:
    """Number of blocks whose tensors' names begin with `prefix`, a number and a dot."""
    names = list(names)
    numbers = [re.match(r"([0-9]{1,9})\.", name.removeprefix(prefix)) for name in names if name.startswith(prefix)]
    # A stray block number must not make the list of missing tensors endless.
    return min(max((int(number[1]) + 1 for number in numbers if number), default=0), len(names))


def from_ours(name_map: NameMap, tensors: Iterable[OutputTensor]) -> list[OutputTensor]:
    """Tensors with our names under those of another package: the inverse of [`NameMap.read_name`]."""
    ours = {tensor.name: tensor for tensor in tensors}
    ends = {end: (theirs, part) for theirs, part in name_map.parts.items() if part.join for end in part.takes}
    written = {}
    for name, tensor in ours.items():
        end = next((end for end in ends if name.endswith(end)), None)
        if end is None:
            written.setdefault(_their_name(name_map, name), tensor)
            continue
        start, (theirs, part) = name.removesuffix(end), ends[end]
        target = _their_name(name_map, start + theirs)
        if target not in written:
            written[target] = _joined(part.join, [ours[start + each] for each in part.takes])
    return [replace(tensor, name=name) for name, tensor in written.items()]


def _their_name(name_map: NameMap, name: str) -> str:
    for theirs, ours in reversed(name_map.names.items()):
        start, end = "^" * theirs.startswith("^"), "$" * theirs.endswith("$")
        name = name_pattern(f"{start}{ours}{end}").sub(name_replacement(theirs), name, count=1)
    return name


def _joined(join: Callable[..., torch.Tensor], tensors: list[OutputTensor]) -> OutputTensor:
    """One tensor that is made of several."""
    shape = join(*(torch.empty(tensor.shape, device="meta") for tensor in tensors)).shape
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))

    def fetch() -> torch.Tensor:
        return join(*(tensor.fetch().reshape(tensor.shape) for tensor in tensors))

    return OutputTensor(tensors[0].name, tuple(shape), dtype, fetch)


def object_in(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """
    A copy of the configuration in the field `name` of another, {} if there is none.

    Raises:
        ConversionError: if the field holds something else.
    """
    fields = given.get(name)
    if not isinstance(fields, dict | None):
        raise ConversionError(f"`{name}` must hold an object, found a {type(fields).__name__}.")
    return dict(fields or {})
