"""Targets of a conversion: a directory of this package, or the files of another program."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedConfig

from subquad.hub.directories import check_free, check_new_file, new_directory, new_file
from subquad.hub.new_files import writing

from . import gguf_files
from .checkpoint import TensorInfo
from .errors import ConversionError, as_conversion_error
from .formats import Format
from .tokenizer_files import TokenizerChoice
from .vocabularies import Vocabulary
from .writer import OutputTensor, plan_shards, write_safetensors, write_shards, write_torch


WEIGHTS_ONLY = ("pth", "st")
FILES = (*WEIGHTS_ONLY, "gguf")  # the targets that are one file, with its suffix
TARGETS = ("directory", "fla", "hub", *FILES)


@dataclass(frozen=True)
class Model:
    """
    A model to write.

    Attributes:
        config: its configuration.
        tensors: its tensors, under our names until [`for_target`].
        tokenizer: its tokenizer.
        generation: its generation configuration, None if it has none.
        save_processor: writes the files it needs besides the tokenizer into a directory.
    """

    config: PreTrainedConfig
    tensors: list[OutputTensor]
    tokenizer: TokenizerChoice
    generation: GenerationConfig | None
    save_processor: Callable[[Path], object]


@dataclass(frozen=True)
class Written:
    """The written files, as in [`subquad_conversion.Report`]; `dtype` is None if it is the tensors' dtype."""

    directory: Path
    files: list[str]
    bytes: int
    dtype: str | None = None
    tokenizer: str | None = None
    notes: list[str] = field(default_factory=list)


def check_target(destination: Path, to: str, gguf_type: str | None, dtype: str, tokenizer: Any) -> None:
    """
    Raises:
        ConversionError: if the arguments of `convert` contradict each other, or `destination` cannot be made.
    """
    if to not in TARGETS:
        raise ConversionError(f"`to` must be one of {', '.join(TARGETS)}; got {to!r}.")
    if gguf_type is not None:
        if to != "gguf":
            raise ConversionError(f"`gguf_type` does not apply to {to}; it is for gguf.")
        gguf_files.check_type(gguf_type)
    if to == "gguf" and dtype != "keep":
        raise ConversionError(f"`dtype` does not apply to gguf, got {dtype!r}; give `gguf_type`.")
    if to == "st" and dtype not in ("keep", "float16"):
        raise ConversionError(f"`dtype` must be float16 for st, got {dtype!r}: web-rwkv reads no other.")
    if to in WEIGHTS_ONLY and tokenizer not in ("auto", "none"):
        raise ConversionError(f"`tokenizer` does not apply to {to}, whose files hold weights only.")
    if to in FILES and destination.suffix != f".{to}":
        raise ConversionError(f"{destination} must have a name that ends in .{to}.")
    with as_conversion_error():
        (check_new_file if to in FILES else check_free)(destination)


def for_target(model: Model, target: Format, tied: tuple[str, str] | None) -> tuple[Model, list[str]]:
    """
    The model with its tensors converted to another format, and notes.

    Args:
        tied: our names of the embeddings and the head, if the head is not a separate tensor.

    Raises:
        ConversionError: if the format cannot hold it.
    """
    notes, tensors = target.check_target(model.config), model.tensors
    if tied:
        (embeddings,) = (tensor for tensor in tensors if tensor.name == tied[0])
        tensors = [*tensors, replace(embeddings, name=tied[1])]
        model.config.tie_word_embeddings = False
        notes = [*notes, "the head, which is tied to the embeddings, was written as a tensor of its own"]
    return replace(model, tensors=target.target_tensors(tensors, model.config)), notes


def write_directory(
    model: Model, destination: Path, shard_size: int, progress: bool, fields: Mapping[str, Any] | None
) -> Written:
    """
    Args:
        fields: fields of the configuration to write, if it is not the model's.
    """
    size, tokenizer = sum(tensor.bytes for tensor in model.tensors), model.tokenizer
    with new_directory(destination, size) as directory:
        # Weights last: they take longest, and everything else that can fail should fail first.
        if fields is None:
            model.config.save_pretrained(directory)
        else:
            text = json.dumps(fields, indent=2, sort_keys=True)
            (directory / "config.json").write_text(f"{text}\n", encoding="utf-8")
        with writing(destination):
            tokenizer.save(directory)
            if tokenizer.title:
                model.save_processor(directory)
        if model.generation is not None:
            model.generation.save_pretrained(directory)
        with _bar(size, progress) as bar:
            write_shards(plan_shards(model.tensors, shard_size), directory, bar.update)
        files = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return Written(destination, files, size, tokenizer=tokenizer.title)


def write_file(model: Model, destination: Path, to: str, progress: bool) -> Written:
    """A file of weights alone."""
    size = sum(tensor.bytes for tensor in model.tensors)
    write = write_torch if to == "pth" else write_safetensors
    with new_file(destination, size) as path, _bar(size, progress) as bar:
        write(path, model.tensors, bar.update)
    return Written(destination.parent, [destination.name], size)


def write_gguf(model: Model, target: Format, destination: Path, gguf_type: str | None, progress: bool) -> Written:
    """A file for llama.cpp."""
    main = gguf_type or gguf_files.type_for(main_dtype(model.tensors))
    kinds = {tensor.name: gguf_files.type_of(tensor, main) for tensor in model.tensors}
    wider = [name for name, kind in kinds.items() if kind not in (main, "F32")]
    notes = []
    if wider:
        notes.append(f"{len(wider)} tensors, such as {wider[0]}, are F16: {main} does not divide their rows")
    tokenizer, vocab_size, ends = model.tokenizer, model.config.vocab_size, {}
    vocabulary = tokenizer.vocabulary and tokenizer.vocabulary()
    if vocabulary is None:
        notes.append("the file has no tokenizer: llama.cpp takes and gives ids")
    else:
        gguf_files.token_texts(vocabulary, vocab_size)  # raises an error before anything is written
        stops, stop_notes = _stops(model, vocabulary)
        notes += stop_notes
        ends = gguf_files.find_ends(vocabulary, stops, vocab_size)
    size = sum(gguf_files.size_of(tensor, kinds[tensor.name]) for tensor in model.tensors)
    write = partial(
        gguf_files.write_gguf,
        kinds=kinds,
        main=main,
        architecture=model.config.model_type,
        fields=target.target_fields(model.config),
        vocabulary=vocabulary,
        ends=ends,
    )
    with new_file(destination, size) as path, _bar(size, progress) as bar:
        write(path, model.tensors, bar.update)
    title = tokenizer.title if vocabulary else None
    return Written(destination.parent, [destination.name], size, main, title, notes)


def _stops(model: Model, vocabulary: Vocabulary) -> tuple[list[int], list[str]]:
    """The ids at which `generate` ends an answer, and notes on what a GGUF file cannot store."""
    generation, notes = model.generation, []
    told = {"the generation configuration": generation and generation.eos_token_id}
    told |= {"the configuration": model.config.eos_token_id, "the tokenizer": vocabulary.ids.get("eos")}
    told = {who: ids if isinstance(ids, list) else [ids] for who, ids in told.items() if ids is not None}
    (who, stops), *others = told.items() if told else [("", [])]
    if differ := [f"{other} has {', '.join(map(str, ids))}" for other, ids in others if not {*ids} <= {*stops}]:
        notes.append(f"an answer ends at {', '.join(map(str, stops))}, as in {who}; {' and '.join(differ)}")
    if strings := generation and generation.stop_strings:
        notes.append(f"GGUF cannot store the `stop_strings` {strings!r}: give them to llama.cpp")
    if vocabulary.around:
        names = " and ".join(name.upper() for name in vocabulary.around)
        notes.append(f"the tokenizer puts {names} around every text; llama.cpp's greedy one does not")
    return stops, notes


def main_dtype(tensors: Iterable[OutputTensor | TensorInfo]) -> str:
    """The dtype of most elements."""
    counts = Counter()
    for tensor in tensors:
        counts[str(tensor.dtype).removeprefix("torch.")] += tensor.elements
    return counts.most_common(1)[0][0]


def _bar(size: int, progress: bool) -> tqdm:
    return tqdm(total=size, unit="B", unit_scale=True, desc="Writing", disable=not progress)
