"""Source formats, and the matching of a checkpoint's tensors with the model's parameters."""

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
# A note about `TIME_STATE`, which no model has.
STATE_LEFT_OUT = "the tuned initial state was left out; `subquad.load_time_states` reads it into an adapter"


# Extracts one of our tensors from a source tensor. None means the whole tensor unchanged.
Extract = Callable[[torch.Tensor], torch.Tensor] | None


@dataclass(frozen=True)
class SourceTensor(TensorInfo):
    """
    A tensor under our name: its shape and dtype, the name of the source's tensor that holds it, and the function that
    extracts it.
    """

    source: str
    take: Extract = None


@dataclass(frozen=True)
class PlannedTensor:
    """
    One tensor to write: its name here, the name of the source's tensor that holds it, its shape here (a reshape of the
    extracted tensor), and the function that extracts it.
    """

    target: str
    source: str
    shape: Shape
    take: Extract = None


@dataclass(frozen=True)
class Plan:
    """
    A plan for converting a checkpoint to a model.

    Attributes:
        sizes: configuration fields from the tensors, and a variant's fields that only the format determines; a
            dictionary if such a field is itself a configuration.
        tensors: the tensors to write, in the order of the model's state dict.
        twins: pairs of source names of which only the first is written, because the configuration ties them. Equality
            must be checked separately: a plan does not read values.
        notes: assumptions, for the user to read.
        zeros: source names of tensors that are not written because they must be zero, to be checked separately.
        tied: our names of the embeddings and the head, if the configuration ties them.
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
    A model's configuration as inferred from a checkpoint's tensor names and shapes.

    Attributes:
        fields: configuration fields, for the model's configuration. Sizes that cannot be read have arbitrary values.
        structure: the fields that the names of the model's tensors depend on: number of layers and variants.
        places: size to our name and the axis of the tensor that it is read from.
        shape_fields: fields for the model on the meta device only, needed for a valid configuration. No shape depends
            on their values.
        tied: our names of the embeddings and the head, if the configuration ties them.
        notes, zeros: as in [`Plan`].
        model: the model's name in errors, if not just the model type.
        finish: returns further fields, or raises `ConversionError`. Called once the tensors are known to fit.
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
    A source format. A subclass defines how to recognise it, how to read sizes from tensors, and how to rename tensors.
    The model itself, made on the meta device, defines the tensors and their shapes.

    Attributes:
        name: short and stable, for programs.
        title: display name.
        model_type: the `model_type` of the configuration to write.
        config_types: values of `model_type` in published configurations of this format, in addition to the
            descriptor's `other_types`.
        name_map: map from its names to ours; None if `parts` or `rename` does it.
        target: the name under which `subquad convert --to` writes it; None if it is only read.
    """

    name: str
    title: str
    model_type: str
    config_types: tuple[str, ...] = ()
    name_map: NameMap | None = None
    target: str | None = None

    # --- for subclasses ---

    def matches(self, tensors: Tensors) -> bool:
        """Whether a checkpoint has this format, by the names and shapes of its tensors."""
        raise NotImplementedError

    def read(self, found: Mapping[str, SourceTensor], given: Mapping[str, Any]) -> InferredConfig:
        """
        Infers the configuration from the tensors.

        Args:
            found: our names to the source's tensors.
            given: the checkpoint's configuration fields.

        Raises:
            ConversionError: if tensors and configuration contradict each other.
        """
        raise NotImplementedError

    def is_misused(self, name: str, value: Any, sizes: Mapping[str, Any]) -> bool:
        """Whether a value is a known misuse of the field in published configurations, instead of its size."""
        return False

    def rename(self, name: str) -> str:
        """Our name of a tensor of the source. Unknown names stay as they are."""
        return name

    def parts(self, name: str) -> dict[str, Extract]:
        """Our names of the tensors in a source tensor, each with the function that extracts it."""
        return {self.rename(name): None} if self.name_map is None else self.name_map.read_name(name)

    def written_name(self, name: str) -> str:
        """The name of one of the model's tensors in published files with our names."""
        return name

    def is_buffer(self, name: str) -> bool:
        """Whether the tensor with this name (ours) is read but not written."""
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

    def merge_tables(self, outputs: list[OutputTensor], config: PreTrainedConfig) -> list[OutputTensor]:
        """
        The tensors to write, with tables merged for inference. Changes the configuration.

        Raises:
            ConversionError: if the model has no tables, or they are merged already.
        """
        raise ConversionError(f"`merge_tables` does not apply to the model type {self.model_type}.")

    # --- for formats with a `target` ---

    def check_target(self, config: PreTrainedConfig) -> list[str]:
        """
        Notes on writing a model in this format.

        Raises:
            ConversionError: if the format cannot hold it.
        """
        return []

    def unused(self, config: PreTrainedConfig) -> dict[str, Shape]:
        """Name to shape of tensors of the format that no runtime reads, written as zeros."""
        return {}

    def target_fields(self, config: PreTrainedConfig) -> dict[str, Any]:
        """The fields of the configuration that is written beside the weights or, in GGUF, into their file."""
        return config.to_diff_dict()

    def target_tensors(self, tensors: list[OutputTensor], config: PreTrainedConfig) -> list[OutputTensor]:
        """Renames a model's tensors from our names to the format's."""
        return [
            *from_ours(self.name_map, tensors),
            *(
                OutputTensor(name, shape, tensors[0].dtype, partial(torch.zeros, shape))
                for name, shape in self.unused(config).items()
            ),
        ]

    # --- for formats with several files ---

    def needs_base(self, tensors: Tensors) -> bool:
        """Whether a checkpoint is a part of a model of this format, to be read together with another one."""
        return False

    def gather(
        self, checkpoint: Checkpoint, stack: ExitStack, vision_tower: Path | None, base: Path | None
    ) -> Checkpoint | None:
        """
        The checkpoint together with its tensors in other files, which `stack` keeps open; None if this format has
        nothing to add. Called before the format of the checkpoint is known.
        """
        return None

    def with_options(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """
        The configuration fields, with the user's settings.

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
        """The language model's configuration fields."""
        return fields

    def with_text_fields(self, fields: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration fields with the language model's fields added."""
        return {**fields, **added}

    def save_processor(
        self, directory: Path, config: PreTrainedConfig, generation: GenerationConfig, vision_tower: Path | None
    ) -> None:
        """Saves the files that a model needs besides the tokenizer in `directory`, and may change `generation`."""

    # --- for all formats ---

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
            ConversionError: if the configuration's model type does not match this format.
        """
        known = self.model_type, *self.config_types, *REGISTRY[self.model_type].other_types
        if given.get("model_type", self.model_type) not in known:
            raise ConversionError(
                f"{source} is for the model type {given['model_type']!r}, the tensors are {self.model_type!r} "
                f"({self.title}). Give the configuration that belongs to them as `config`."
            )

    def plan(self, tensors: Tensors, given: Mapping[str, Any]) -> Plan:
        """
        Maps the tensors of a checkpoint to the model's.

        Args:
            given: the checkpoint's configuration fields.

        Raises:
            ConversionError: with a list of all tensors that are missing, unexpected or of the wrong shape.
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
        Name to shape of the model's tensors, and None. If the sizes are invalid, the tensors of a model with default
        sizes, of which only the names matter, and the reason.
        """
        unread = [size for size, length in lengths_of(weights, reading.places).items() if not length]
        reason = f"no tensor determines {', '.join(unread)}."
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
            raise ConversionError(f"The tensors do not match the model type {model}; {'; '.join(faults)}.")
        if reason is not None:
            read_from = dict.fromkeys(name for name, _ in reading.places.values() if name in weights)
            shown = ", ".join(f"{weights[name].source} {weights[name].shape}" for name in read_from)
            raise ConversionError(
                f"The sizes of the tensors do not fit together: {reason} They are read from {shown}."
            )
        return planned


@dataclass(frozen=True)
class Refusal:
    """A format that is known but not supported: its title, and how to recognise it."""

    title: str
    matches: Callable[[Tensors], bool]


@dataclass(frozen=True)
class Recognised:
    """
    A recognised checkpoint.

    Attributes:
        format: the format's short name, `rwkv6-trainer` for instance.
        title: display name of the format.
        model_type: `model_type` of the converted model.
        sizes: configuration fields from the tensors and, for a variant, from the format.
        parameters: number of elements in all tensors.
        dtype: the dtype of most elements.
    """

    format: str
    title: str
    model_type: str
    sizes: dict[str, Any]
    parameters: int
    dtype: str


# Errors of configuration classes for invalid fields, and of models for fields too large for any tensor.
INVALID = (StrictDataclassError, TypeError, ValueError, RuntimeError, OverflowError)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def invalid_configuration(error: Exception) -> ConversionError:
    return ConversionError(f"The configuration is not valid: {one_line(error)}")


def config_class(model_type: str) -> type[PreTrainedConfig]:
    return getattr(subquad, subquad.ARCHITECTURES[model_type][1])


def rename_all(tensors: Tensors, parts: Callable[[str], Mapping[str, Extract]]) -> dict[str, SourceTensor]:
    """
    Our names to the source's tensors.

    Args:
        parts: as [`Format.parts`].

    Raises:
        ConversionError: if two source tensors map to the same name, or if one cannot be split.
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
    """Sizes, each from a tensor and axis; 0 if the axis is missing or the tensor is empty."""
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
    """Renames tensors from our names to another package's: the inverse of [`NameMap.read_name`]."""
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
    """One tensor joined from several."""
    shape = join(*(torch.empty(tensor.shape, device="meta") for tensor in tensors)).shape
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))

    def fetch() -> torch.Tensor:
        return join(*(tensor.fetch().reshape(tensor.shape) for tensor in tensors))

    return OutputTensor(tensors[0].name, tuple(shape), dtype, fetch)


def object_in(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """
    A copy of the configuration in another configuration's field `name`, {} if there is none.

    Raises:
        ConversionError: if the field holds something else.
    """
    fields = given.get(name)
    if not isinstance(fields, dict | None):
        raise ConversionError(f"`{name}` must hold an object, found a {type(fields).__name__}.")
    return dict(fields or {})
