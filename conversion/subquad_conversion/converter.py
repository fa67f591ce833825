"""Conversion of a checkpoint in any known format to a model directory, or to another program's files."""

import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

import subquad
import subquad.quantization.quantized
from subquad.hub.foreign_files import check_links
from subquad.hub.loading import NameMap
from subquad.hub.weight_files import check_finite
from subquad.models import REGISTRY
from subquad.quantization.methods import METHODS, SCALE

from .adapter_files import SETTINGS, Change, is_adapter_directory, merge, open_adapter
from .checkpoint import Checkpoint, open_checkpoint, read_json
from .errors import ConversionError, as_conversion_error
from .formats import (
    INVALID,
    Format,
    Plan,
    PlannedTensor,
    Recognised,
    config_class,
    invalid_configuration,
    object_in,
    one_line,
)
from .registry import find_format, find_target, needs_base, open_source, trainer_layout
from .targets import (
    FILES,
    WEIGHTS_ONLY,
    Model,
    check_target,
    for_target,
    main_dtype,
    write_directory,
    write_file,
    write_gguf,
)
from .tokenizer_files import choose_tokenizer, has_tokenizer, lost_tokenizer
from .writer import OutputTensor, parse_size


SHARD_SIZE = "5GB"
OUTPUT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Fields of a source's configuration that do not apply to the written model.
DROPPED_FIELDS = ("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version")
# Fields of a generation configuration that have no effect without `do_sample`.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)


@dataclass(frozen=True)
class Report:
    """
    The result of [`convert`].

    Attributes:
        recognised: the recognised source.
        config: the configuration that was written.
        directory: the directory of the model.
        files: names of all files written there.
        parameters: number of elements written.
        bytes: size of the weights.
        dtype: the dtype of most elements, or the type of linear layers' weights in a GGUF file.
        tokenizer: title of the tokenizer, None if none was written.
        notes: assumptions and omissions.
    """

    recognised: Recognised
    config: PreTrainedConfig
    directory: Path
    files: list[str]
    parameters: int
    bytes: int
    dtype: str
    tokenizer: str | None
    notes: list[str]


def recognise(source: str | os.PathLike) -> Recognised:
    """
    Recognises a checkpoint from names and shapes alone.

    Args:
        source: a `.pth`, `.bin`, `.safetensors`, `.st` or `.gguf` file, or a directory with `model.safetensors` or
            `pytorch_model.bin`, sharded or not. A file with one of these two names is read with the `config.json`
            beside it. For the two files `<name>_rwkv.pth` and `<name>_visual.pth` of a VisualRWKV, give either one.

    Raises:
        ConversionError: if it is damaged, its version is not supported, or its tensors do not fit together.
    """
    with as_conversion_error(), open_source(source) as checkpoint:
        known = find_format(checkpoint)
        given = known.with_options(checkpoint.settings | checkpoint.lists, {})
        return _recognised(checkpoint, known, known.plan(checkpoint.tensors, given))


def convert(
    source: str | os.PathLike,
    dest: str | os.PathLike,
    *,
    to: str = "directory",
    gguf_type: str | None = None,
    config: str | os.PathLike | None = None,
    tokenizer: str | os.PathLike = "auto",
    dtype: str = "keep",
    quantize: str | None = None,
    merge_tables: bool = False,
    head_size_divisor: int | None = None,
    vision_tower: str | os.PathLike | None = None,
    grid_size: int | None = None,
    base: str | os.PathLike | None = None,
    lora_alpha: float | None = None,
    pissa_init: str | os.PathLike | None = None,
    max_shard_size: int | str | None = None,
    progress: bool = True,
) -> Report:
    """
    Converts a checkpoint into a directory that `from_pretrained` loads, or into the files of another program.

    The directory or file appears complete or not at all; a directory that exists is filled at the end. Tensors are
    read and written one by one, so that memory use stays far below the size of a shard. Only a `.pth` file needs as
    much memory as its size, if its dtype differs from the source's.

    Args:
        source: as for [`recognise`].
        dest: directory to create, which must not exist or be empty; or file to create, which must not exist and must
            have the suffix of its format.
        to: the format to write.
            `directory`: a directory of this package.
            `pth`: a file with the names of RWKV's trainers.
            `st`: a file for web-rwkv and Ai00, in float16.
            `gguf`: a file for llama.cpp, with the tokenizer if it is a greedy one.
            `fla`: a directory for flash-linear-attention.
            `hub`: a directory as the RWKV organisation publishes them.
            `docs/how-to/formats.md` lists the formats of each model type.
        gguf_type: type of the weights of linear layers in a GGUF file, such as `F16` or `Q8_0`; by default the dtype
            of the source.
        config: a `config.json` that replaces the one beside the source. Sizes are always taken from the tensors.
        tokenizer: `auto`, `rwkv-world`, `bytes`, `none`, or a directory whose tokenizer files are copied. `auto`
            copies a Hub model's files, and otherwise chooses by model type and vocabulary size.
        dtype: `keep`, `float32`, `bfloat16` or `float16`, for every tensor, including decays.
        quantize: `int8` rounds the weights of linear layers and embeddings to 8 bits, see [`subquad.Int8Config`];
            `int4` rounds linear layers to 4 bits, see [`subquad.Int4Config`]. The other tensors are then float32,
            unless `dtype` is given.
        merge_tables: whether the tables of an RWKV-7a or 7b are merged, for inference; they cannot be split again.
        head_size_divisor: sets that field of Eagle's or Finch's configuration, not stored in tensors; 8 by default.
        vision_tower: directory of the CLIP model whose vision tower a VisualRWKV with Eagle or Finch was trained with,
            if the source has none; its files also define how images are prepared.
        grid_size: sets that field of VisualRWKV's configuration, not stored in tensors; by default -1, all patches.
            With Goose it is the square root of the trainer's `num_token_per_image`.
        base: the base model of `source`, an adapter, in any format of a source. They are merged. An adapter
            is a file of RWKV-PEFT (LoRA, PiSSA, Bone, DiSHA) or a directory of PEFT (LoRA, MiSS). Or the embedding
            model of `source`, a reranker of EmbeddingRWKV: both become one model.
        lora_alpha: alpha of a LoRA in a file of RWKV-PEFT, which is not stored there: W + alpha / rank * B A.
        pissa_init: the file `init_pissa.pth` that RWKV-PEFT wrote when it began to train a PiSSA adapter.
        max_shard_size: largest size of a weight file in bytes, as a number or like `5GB`, the default.
        progress: whether to show a progress bar on stderr.

    Raises:
        ConversionError: if the source, the configuration or the tokenizer is not usable, or `dest` cannot be made.
    """
    destination = Path(dest).resolve()
    vision_tower = None if vision_tower is None else Path(vision_tower)
    if dtype != "keep" and dtype not in OUTPUT_DTYPES:
        raise ConversionError(f"`dtype` must be one of keep, {', '.join(OUTPUT_DTYPES)}; got {dtype!r}.")
    if quantize is not None and quantize not in METHODS:
        raise ConversionError(f"`quantize` must be one of {', '.join(METHODS)}; got {quantize!r}.")
    if quantize is not None and to != "directory":
        raise ConversionError(f"`quantize` is for a directory of this package, not for {to}.")
    if merge_tables and to != "directory":
        raise ConversionError(f"`merge_tables` is for a directory of this package, not for {to}.")
    if quantize is not None and dtype == "keep":
        dtype = "float32"
    if head_size_divisor is not None and head_size_divisor < 1:
        raise ConversionError(f"`head_size_divisor` must be at least 1, got {head_size_divisor}.")
    shard_size = parse_size(SHARD_SIZE if max_shard_size is None else max_shard_size)
    if to in FILES and max_shard_size is not None:
        raise ConversionError(f"`max_shard_size` does not apply to {to}, which is one file.")
    check_target(destination, to, gguf_type, dtype, tokenizer)
    for argument, value in (("lora_alpha", lora_alpha), ("pissa_init", pissa_init)):
        if value is not None and base is None:
            raise ConversionError(f"`{argument}` needs `base`, the model that the adapter {source} was trained on.")
    if lora_alpha is not None and not 0 < lora_alpha < inf:
        raise ConversionError(f"`lora_alpha` must be a positive number, got {lora_alpha!r}.")

    with as_conversion_error(), ExitStack() as stack:
        is_part = base is not None and not is_adapter_directory(Path(source)) and needs_base(source)
        for argument, value in (("lora_alpha", lora_alpha), ("pissa_init", pissa_init)):
            if is_part and value is not None:
                raise ConversionError(f"`{argument}` is for an adapter, and {source} is none.")
        is_adapter = base is not None and not is_part
        rest = Path(base) if is_part else None
        checkpoint = stack.enter_context(open_source(base if is_adapter else source, vision_tower, rest))
        adapter = stack.enter_context(open_adapter(Path(source))) if is_adapter else None
        known = find_format(checkpoint)
        target = None if to == "directory" else find_target(known.model_type, to)
        given = checkpoint.settings
        if given.get("quantization_config"):
            raise ConversionError(
                f"{checkpoint.path} is quantised already. Convert the checkpoint that it was made from."
            )
        if config is not None:
            given = read_json(Path(config))
        known.check_type(given, Path(config or checkpoint.path))
        options = {"vision_tower": vision_tower, "head_size_divisor": head_size_divisor, "grid_size": grid_size}
        given = known.with_options(
            given | checkpoint.lists, {name: value for name, value in options.items() if value is not None}
        )

        plan = known.plan(checkpoint.tensors, given)
        _check_twins(checkpoint, plan.twins)
        _check_zeros(checkpoint, plan.zeros)
        for directory in (checkpoint.directory, vision_tower):
            if directory is not None and directory.is_dir():
                check_links(directory)
        notes = plan.notes + _contradictions(known, given, plan.sizes)
        beside, stored, changes = checkpoint.directory, checkpoint.vocabulary, {}
        if adapter is not None:
            initial = None if pissa_init is None else stack.enter_context(open_checkpoint(pissa_init))
            rename = partial(_renamed, trainer_layout(known.model_type))
            changes, adapter_notes = merge(adapter, plan, known, rename, lora_alpha, initial)
            notes += adapter_notes
            if has_tokenizer(Path(source)):
                beside, stored = Path(source), None
        elif beside is not None and (beside / SETTINGS).is_file():
            notes.append(f"the adapter in {beside} was left out")
        choose = partial(
            choose_tokenizer,
            source=beside,
            model_type=known.text_type,
            vocab_size=known.text_fields(plan.sizes)["vocab_size"],
            stored=stored,
        )
        if to in WEIGHTS_ONLY:
            if tokenizer == "auto" and (stored or (beside and has_tokenizer(beside))):
                notes += lost_tokenizer(partial(choose, "auto"), beside)
            tokenizer = "none"
        chosen = choose(tokenizer if isinstance(tokenizer, str) else Path(tokenizer))
        if chosen.note:
            notes.append(chosen.note)

        outputs = [
            OutputTensor(
                tensor.target,
                tensor.shape,
                OUTPUT_DTYPES.get("float16" if to == "st" else dtype, checkpoint.tensors[tensor.source].dtype),
                partial(_fetch, checkpoint, tensor, changes.get(tensor.target)),
            )
            for tensor in plan.tensors
        ]
        dtype = main_dtype(outputs)
        told, text_class = known.text_fields(given), config_class(known.text_type)
        untold = [name for name in chosen.token_ids if told.get(name) is None and hasattr(text_class, name)]
        given = known.with_text_fields(given, {name: chosen.token_ids[name] for name in untold})
        model_config = _build_config(known, given, plan.sizes, dtype)
        if merge_tables:
            outputs = known.merge_tables(outputs, model_config)
        parameters = sum(output.elements for output in outputs)
        if quantize is not None:
            outputs = _quantized(outputs, model_config, quantize)
        generation_config = None
        if to not in WEIGHTS_ONLY and REGISTRY[known.model_type].generates:
            generation_config, generation_notes = _build_generation_config(checkpoint, model_config)
            if not hasattr(generation_config, "chat_stops") and (stops := chosen.chat_stops()) is not None:
                generation_config.chat_stops = stops
                generation_config._from_model_config = False  # otherwise only transformers' fields are read again
            if to not in FILES:
                notes += generation_notes

        model = Model(
            model_config,
            outputs,
            chosen,
            generation_config,
            lambda directory: known.save_processor(directory, model_config, generation_config, vision_tower),
        )
        if target is not None:
            model, target_notes = for_target(model, target, plan.tied)
            notes += target_notes
        if to == "gguf":
            written = write_gguf(model, target, destination, gguf_type, progress)
        elif to in FILES:
            written = write_file(model, destination, to, progress)
        else:
            fields = None if target is None else target.target_fields(model_config)
            written = write_directory(model, destination, shard_size, progress, fields)
        return Report(
            recognised=_recognised(checkpoint, known, plan),
            config=model_config,
            directory=written.directory,
            files=written.files,
            parameters=parameters,
            bytes=written.bytes,
            dtype=written.dtype or quantize or dtype,
            tokenizer=written.tokenizer,
            notes=notes + written.notes,
        )


def _quantized(outputs: list[OutputTensor], config: PreTrainedConfig, method: str) -> list[OutputTensor]:
    """The tensors of a model with integer weights. Marks the configuration as quantised."""
    quantization = {"int8": subquad.Int8Config, "int4": subquad.Int4Config}[method]()
    layers = subquad.quantization.quantized.quantized_layers(config, quantization)
    config.quantization_config = quantization.to_dict()

    def part(output: OutputTensor, number: int) -> torch.Tensor:
        weight = output.fetch()
        check_finite(output.name, weight)
        return layers[output.name].quantize(weight.reshape(output.shape))[number]

    quantized = []
    for output in outputs:
        if output.name not in layers:
            quantized.append(output)
            continue
        names = output.name, f"{output.name.removesuffix('weight')}{SCALE}"
        for number, (shape, dtype) in enumerate(layers[output.name].stored(*output.shape)):
            quantized.append(OutputTensor(names[number], shape, dtype, partial(part, output, number)))
    return quantized


def _fetch(checkpoint: Checkpoint, tensor: PlannedTensor, change: Change | None) -> torch.Tensor:
    stored = checkpoint.read(tensor.source)
    if tensor.take is not None:
        stored = tensor.take(stored)
    return stored if change is None else change(stored.reshape(tensor.shape))


def _renamed(name_map: NameMap, name: str) -> str:
    return next(iter(name_map.read_name(name)))


def _recognised(checkpoint: Checkpoint, known: Format, plan: Plan) -> Recognised:
    tensors = checkpoint.tensors.values()
    return Recognised(
        format=known.name,
        title=known.title,
        model_type=known.model_type,
        sizes=plan.sizes,
        parameters=sum(tensor.elements for tensor in tensors),
        dtype=main_dtype(tensors),
    )


def _check_twins(checkpoint: Checkpoint, twins: list[tuple[str, str]]) -> None:
    """Checks that tensors which the configuration ties are equal in the file."""
    for pair in twins:
        # Shapes and dtypes first: tensors of two dtypes cannot be compared.
        infos = {checkpoint.tensors[name] for name in pair}
        if len(infos) > 1 or not torch.equal(*map(checkpoint.read, pair)):
            raise ConversionError(f"`tie_word_embeddings` is set, but {' and '.join(pair)} differ.")


def _check_zeros(checkpoint: Checkpoint, zeros: list[str]) -> None:
    for name in zeros:
        values = checkpoint.read(name).flatten()
        if len(others := values[values != 0]):
            raise ConversionError(f"{name} holds {others[0].item():g}; only zeros are supported there.")


def _contradictions(known: Format, given: Mapping[str, Any], sizes: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Sizes that differ in the configuration, except in fields that published files misuse."""
    notes = []
    for name, size in sizes.items():
        if _is_config(size):
            notes += _contradictions(known, object_in(given, name), size, f"{name}.")
            continue
        aliases = (alias for alias, field in known.config_class.attribute_map.items() if field == name)
        for told in (name, *aliases):
            value = given.get(told)
            if value not in (None, size) and not known.is_misused(told, value, sizes):
                notes.append(f"the configuration's `{prefix}{told}` of {value} was replaced by the tensors' {size}")
    return notes


def _build_config(known: Format, given: Mapping[str, Any], sizes: Mapping[str, Any], dtype: str) -> PreTrainedConfig:
    # Another name of a field, such as `hidden_size` for `d_embed`, would replace the size that was read.
    aliases = known.config_class.attribute_map
    fields = _merged(given, sizes, {*DROPPED_FIELDS, *(alias for alias, name in aliases.items() if name in sizes)})
    try:
        return known.config_class.from_dict(fields | {"architectures": [known.architecture], "dtype": dtype})
    except INVALID as error:
        raise invalid_configuration(error) from error


def _merged(given: Mapping[str, Any], sizes: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """The fields to write: the given fields except `dropped`, and the sizes."""
    fields = {name: value for name, value in given.items() if name not in dropped and not name.startswith("_")}
    for name, size in sizes.items():
        fields[name] = _merged(object_in(given, name), size, DROPPED_FIELDS) if _is_config(size) else size
    return fields


def _is_config(size: Any) -> bool:
    return isinstance(size, dict) and "model_type" in size


def _build_generation_config(checkpoint: Checkpoint, config: PreTrainedConfig) -> tuple[GenerationConfig, list[str]]:
    """The Hub model's generation configuration if it has one, else one from its configuration; and notes."""
    file = checkpoint.directory and checkpoint.directory / "generation_config.json"
    fields = read_json(file) if file and file.is_file() else None
    try:
        if fields is None:
            generation = GenerationConfig.from_model_config(config)
        else:
            fields.pop("transformers_version", None)
            generation = GenerationConfig.from_dict(fields)
            if fields.get("_from_model_config"):  # ours may differ from the source's
                generation.bos_token_id = config.get_text_config(decoder=True).bos_token_id
        notes = _mend_sampling(generation)
        generation.to_json_string()
    except Exception as error:  # a file may hold anything, so any part of the reader may fail
        raise ConversionError(f"The generation configuration is not valid: {one_line(error)}") from error
    return generation, notes


def _mend_sampling(generation: GenerationConfig) -> list[str]:
    """Published files set fields of sampling without `do_sample`, which transformers reads but refuses to write."""
    try:
        generation.validate(strict=True)
    except ValueError:
        sampling = [name for name in SAMPLING_FIELDS if getattr(generation, name, None) is not None]
        if generation.do_sample is True or not sampling:
            raise
        generation.do_sample = True
        generation.validate(strict=True)
        return [f"`do_sample` was set in the generation configuration, because it has {', '.join(sampling)}"]
    return []
