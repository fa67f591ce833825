"""Checks of weight files before they are loaded, converted or published."""

import copy
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    CONFIG_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    find_adapter_config_file,
)
from transformers.utils.hub import cached_file, has_file

from .foreign_files import GGUF, check_file, one_line, read_json, reading


if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A missing file is None, not an error.
QUIET = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
# The layers that sizes are read from, by their names in all name maps. In some models the first one lacks a tensor.
FIRST_BLOCKS = re.compile(r"(^|\.)(blocks|layers)\.[01]\.")
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
# The dtypes of weights, by their names in safetensors files.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
FLOATING = (*DTYPES, "F8_E4M3", "F8_E5M2")  # transformers casts these
# Suffixes of weight files, all of which `subquad convert` reads.
WEIGHT_SUFFIXES = (".bin", ".gguf", ".pth", ".pt", ".safetensors", ".st")
PIECE = 1 << 22  # elements of a tensor that are checked at a time
# Tensors of a PyTorch file may share memory, as tied weights do. Together they may have this many times its size.
MOST_SHARED = 4

# Shape and name of the dtype, as a safetensors file has them.
Header = tuple[tuple[int, ...], str]


def _file_names(variant: str | None) -> tuple[str, str]:
    """The names of the weights in one file, and of the index of weights in several files."""
    infix = f".{variant}" if variant else ""
    return f"model{infix}.safetensors", f"model.safetensors.index{infix}.json"


def _hub_options(options: dict) -> dict:
    return {name: options[name] for name in HUB_ARGUMENTS if options.get(name) is not None}


def pickled_weights(directory: str | os.PathLike) -> list[Path]:
    """The weight files in a directory that are not safetensors, except for the files of a Trainer."""
    files = (file for pattern in ("pytorch_model*.bin", "*.pth") for file in Path(directory).glob(pattern))
    return sorted(file for file in files if not file.name.startswith("rng_state"))


def check_directory(path: str | os.PathLike | None) -> None:
    """
    Raises:
        ValueError: if `from_pretrained` was given a file of weights.
    """
    if path is not None and os.path.splitext(path)[1] in WEIGHT_SUFFIXES and os.path.isfile(path):
        raise ValueError(
            f"{path} is a file of weights, and models are loaded from directories: `subquad convert {path} OUT` makes "
            "one of the file."
        )


def unsafe_weights(path: str | os.PathLike, options: dict) -> list[Path]:
    """
    The weight files of a directory or Hub repository, if none is in safetensors.

    Args:
        path, options: as for [`check_weights`].
    """
    # transformers reads a given file regardless of `use_safetensors`, and asks the Hub to convert others on the spot.
    if os.path.isfile(path):
        return [] if os.fspath(path).endswith(".safetensors") else [Path(path)]
    subfolder = options.get("subfolder") or ""
    if os.path.isdir(path):
        directory = Path(path) / subfolder
        return [] if any(directory.glob("*.safetensors*")) else pickled_weights(directory)
    names = ("revision", "token", "cache_dir", "local_files_only")
    hub = {name: options[name] for name in names if options.get(name) is not None}

    def exists(name):
        return has_file(path, f"{subfolder}/{name}" if subfolder else name, **hub)

    try:
        if any(exists(name) for name in _file_names(options.get("variant"))):
            return []
        return [Path("DIRECTORY") / name for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if exists(name)]
    except (OSError, ValueError):  # transformers reports the fault
        return []


def read_weight_map(index: str | os.PathLike, suffix: str = ".safetensors") -> dict[str, str]:
    """
    The names of the tensors that an index lists, and the file of each.

    Args:
        suffix: how the names of the files end.

    Raises:
        ValueError: if the index is damaged, or names anything but such a file in the same directory.
    """
    content = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(content.get("metadata", {}), dict):
        raise ValueError(f"{index} is not an index of weight files: its `metadata` is not an object.")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} is not an index of weight files: it has no usable `weight_map`.")
    for name in weight_map.values():
        # An index is data from elsewhere: it must not lead out of its directory.
        plain = isinstance(name, str) and Path(name).name == name and "\\" not in name and name.isprintable()
        if not plain or not name.endswith(suffix):
            raise ValueError(f"{index} names {name!r}, which is not a {suffix} file in the same directory.")
    return weight_map


def read_headers(files: Iterable[str | os.PathLike]) -> dict[str, Header]:
    """
    The names of the tensors in safetensors files, each with its shape and the name of its dtype.

    Raises:
        ValueError: if a file is damaged.
    """
    headers = {}
    for path in files:
        with open_weights(path) as file:
            for name in file.keys():
                view = file.get_slice(name)
                headers[name] = tuple(view.get_shape()), view.get_dtype()
    return headers


def open_weights(path: str | os.PathLike) -> safe_open:
    """
    An open safetensors file.

    Raises:
        ValueError: if it is damaged.
    """
    check_file(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a valid safetensors file: {one_line(error).rstrip('.')}.") from error


def open_pytorch(path: str | os.PathLike) -> dict[Any, Any]:
    """
    The dictionary in a PyTorch file. The tensors of a zip file stay in the mapped file. Only tensors and
    plain objects are unpickled.

    Raises:
        ValueError: if the file is damaged or compressed, wants to run code, holds something else, or if its tensors
            have many times the bytes of the file.
    """
    check_file(path)
    with open(path, "rb") as handle:
        # Archives from before PyTorch 1.6 are not zip files and cannot be mapped.
        mappable = handle.read(4) == b"PK\x03\x04"
    try:
        if mappable:
            _refuse_compression(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols, which the user cannot change
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    except pickle.UnpicklingError as error:
        # PyTorch's message recommends to switch the protection off.
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"wants to call {wanted[1]}" if wanted else "is not a PyTorch file, or is damaged"
        raise ValueError(
            f"{path} {reason}. Only tensors are read from such a file; code in it is never run."
        ) from None
    except Exception as error:  # a damaged pickle may raise anything
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        reason = one_line(error).rstrip(".")
        raise ValueError(f"{path} is not a PyTorch file, or is damaged: {reason}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary of tensors, found a {type(content).__name__}.")
    tensors = [x for x in content.values() if isinstance(x, torch.Tensor) and is_dense(x)]
    check_shared(path, sum(tensor.nbytes for tensor in tensors), MOST_SHARED)
    return content


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a PyTorch file is stored element by element in the memory of the CPU."""
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


def _refuse_compression(path: str | os.PathLike) -> None:
    """PyTorch maps the bytes of a member as they are, so that compressed bytes would become weights."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{path} has the compressed member {member.filename!r}; save it with PyTorch.")


def check_shared(path: str | os.PathLike, claimed: int, most: int = 1) -> None:
    """
    Args:
        claimed: the bytes of all tensors of a file, each as it is stored.
        most: largest allowed multiple of the size of the file.

    Raises:
        ValueError: if they exceed it.
    """
    if claimed > most * (size := os.path.getsize(path)):
        raise ValueError(f"{path} has {size:,} bytes, and tensors of {claimed:,}: they overlap, as in no model.")


def check_weights(path: str | os.PathLike, options: dict) -> None:
    """
    Args:
        path: the first argument of `from_pretrained`; for an adapter, its base model.
        options: the keyword arguments of `from_pretrained`.

    Raises:
        ValueError: if there are weights but none in safetensors, or if an index names other files.
    """
    if (gguf_file := options.get("gguf_file")) is not None:
        raise ValueError(GGUF.format(file=gguf_file))
    if (index := _index_file(path, options)) is not None:
        read_weight_map(index)
    if not (files := unsafe_weights(path, options)):
        return
    names = ", ".join(sorted(file.name for file in files))
    source = files[0] if len(files) == 1 else files[0].parent
    raise ValueError(
        f"{path}: the weights are in {names}, and only safetensors files are loaded, because unpickling others may "
        f"run code. `subquad convert {source} OUT` makes a directory that loads."
    )


def _index_file(path: str | os.PathLike, options: dict) -> str | None:
    """The index of a model whose weights are in several files."""
    try:
        return cached_file(os.fspath(path), _file_names(options.get("variant"))[1], **_hub_options(options), **QUIET)
    except (OSError, ValueError):  # transformers reports the fault
        return None


def check_room(model: "PreTrainedModel", files: Iterable[str | os.PathLike], packed: bool = False) -> None:
    """
    Args:
        model: a model on the meta device.
        files: its weight files.
        packed: whether one number may hold several weights.

    Raises:
        ValueError: before memory is allocated, if the model is much larger than its files or they hold weights that
            are not floating point.
    """
    headers = read_headers(files)
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        _, dtype = headers.get(name, ((), "F32"))
        if parameter.is_floating_point() and dtype not in FLOATING:
            raise ValueError(f"{model.config.name_or_path}: {name} is not floating point, but {dtype}.")
    wanted = sum(parameter.numel() for parameter in model.base_model.parameters())
    stored = sum(torch.Size(shape).numel() for shape, _ in headers.values())
    if not packed and wanted > 2 * stored + PIECE:
        raise ValueError(
            f"{model.config.name_or_path}: the configuration describes a model with {wanted:,} weights, but the "
            f"files hold {stored:,}: one of the two belongs to another model."
        )


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """
    Raises:
        ValueError: if a tensor holds NaN or infinity.
    """
    for piece in tensor.detach().reshape(-1).split(PIECE):
        # If any element is not finite, so are the extremes, which take no memory.
        if piece.numel() and not all(x.isfinite() for x in piece.aminmax()):
            raise ValueError(f"{name} holds NaN or infinite numbers: the model that it was saved from had diverged.")


def with_sizes(config_class: type[PreTrainedConfig], path: str | os.PathLike, options: dict) -> dict:
    """
    The keyword arguments of `from_pretrained`, with missing sizes of the configuration read from the checkpoint's
    tensors, if the configuration class supports that (`set_sizes_from_shapes`).

    Raises:
        ValueError: if a directory's configuration is not valid.
    """
    if os.path.isdir(path) and not isinstance(options.get("config"), PreTrainedConfig):
        with reading(os.path.join(path, CONFIG_NAME)):
            config_class.from_pretrained(path, **_hub_options(options))
    if not hasattr(config_class, "set_sizes_from_shapes"):
        return options
    options = dict(options)
    config = options.pop("config", None)
    hub = _hub_options(options)
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config)
    else:
        # The configuration would keep the dtype, and "auto" is not a dtype there.
        dtype = {name: options.pop(name) for name in ("dtype", "torch_dtype") if name in options}
        rest = {name: value for name, value in options.items() if name not in hub}
        config, rest = config_class.from_pretrained(config or path, return_unused_kwargs=True, **hub, **rest)
        options = {**hub, **dtype, **rest}
    complete_sizes(config, path, options.get("variant"), hub)
    return {**options, "config": config}


def complete_sizes(
    config: PreTrainedConfig, path: str | os.PathLike, variant: str | None = None, hub: dict | None = None
) -> None:
    """Reads sizes that published configurations lack from a checkpoint's tensors, if the class supports that."""
    if hasattr(config, "set_sizes_from_shapes"):
        headers = read_headers(find_weights(path, FIRST_BLOCKS, variant, **hub or {}))
        config.set_sizes_from_shapes({name: x for name, (x, _) in headers.items() if FIRST_BLOCKS.search(name)})


def adapted_model(path: str | os.PathLike, options: dict) -> str:
    """
    The base model of an adapter; the path itself if it is not an adapter alone.

    Args:
        path, options: the arguments of `from_pretrained`.

    Raises:
        ValueError: if the adapter is damaged.
    """
    path, hub = os.fspath(path), {**_hub_options(options), "force_download": False}
    adapter = None if os.path.isfile(path) else find_adapter_config_file(path, **hub)
    if adapter is None or os.path.isfile(os.path.join(path, CONFIG_NAME)):
        return path
    base = read_json(adapter).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise ValueError(f"{adapter}: `base_model_name_or_path` does not name a model, got {base!r}.")
    return base


def check_adapter(path: str | os.PathLike) -> None:
    """
    Raises:
        ValueError: if a directory has no adapter in safetensors.
    """
    if not os.path.isfile(os.path.join(path, ADAPTER_SAFE_WEIGHTS_NAME)):
        raise ValueError(f"{path} has no {ADAPTER_SAFE_WEIGHTS_NAME}; adapters are loaded from no other file.")


def find_weights(
    path: str | os.PathLike, wanted: re.Pattern | None = None, variant: str | None = None, **hub: Any
) -> list[str]:
    """
    The safetensors files with the weights of a model directory, or of a model on the Hub; [] if there are none. Of
    several files, those that have tensors with `wanted` in their names.
    """
    path, (single_name, index_name) = os.fspath(path), _file_names(variant)
    if (single := cached_file(path, single_name, **hub, **QUIET)) is not None:
        return [single]
    if (index := cached_file(path, index_name, **hub, **QUIET)) is None:
        return []
    weight_map = read_weight_map(index).items()
    shards = sorted({shard for name, shard in weight_map if wanted is None or wanted.search(name)})
    return [cached_file(path, shard, **hub) for shard in shards]
