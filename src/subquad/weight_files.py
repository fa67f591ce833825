"""What `from_pretrained` has to know about weight files before it loads them."""

import copy
import json
import os
import re
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedConfig
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME, find_adapter_config_file
from transformers.utils.hub import cached_file, has_file


# A file that is missing is None, not an error.
QUIET = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
# The layers that tell sizes, by their names in all layouts. In some models the first one lacks a tensor.
FIRST_BLOCKS = re.compile(r"(^|\.)(blocks|layers)\.[01]\.")
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


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


def unsafe_weights(path: str | os.PathLike, options: dict) -> list[Path]:
    """
    The weight files of a directory, or of a repository on the Hub, that has none in safetensors.

    Args:
        path: what `from_pretrained` was given.
        options: the keyword arguments of `from_pretrained`.
    """
    # transformers reads a file whatever `use_safetensors` says, and asks the Hub to convert others on the spot.
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
    except (OSError, ValueError):  # transformers says what is wrong
        return []


def read_weight_map(index: str | os.PathLike) -> dict[str, str]:
    """
    The names of the tensors that an index lists, and the file of each.

    Raises:
        ValueError: if the index is damaged, or if a name is not that of a safetensors file in the same directory.
    """
    try:
        weight_map = dict(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of weight files: it has no usable `weight_map`.") from error
    for name in weight_map.values():
        plain = isinstance(name, str) and Path(name).name == name and "\\" not in name
        if not plain or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r}, which is not a safetensors file in the same directory.")
    return weight_map


def check_weights(path: str | os.PathLike, options: dict) -> None:
    """
    Args:
        path, options: the arguments of `from_pretrained`.

    Raises:
        ValueError: if there are weights, but none in safetensors, or if an index leads to other files.
    """
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
    except (OSError, ValueError):  # transformers says what is wrong
        return None


def with_sizes(config_class: type[PreTrainedConfig], path: str | os.PathLike, options: dict) -> dict:
    """
    The keyword arguments of `from_pretrained`, with a configuration whose missing sizes were read from the
    checkpoint's tensors, if the configuration class can do that (`set_sizes_from_shapes`).
    """
    if not hasattr(config_class, "set_sizes_from_shapes"):
        return options
    options = dict(options)
    config = options.pop("config", None)
    hub = _hub_options(options)
    source = _adapted_model(os.fspath(path), hub)
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config)
    else:
        # The configuration would keep the dtype, and "auto" is not a dtype there.
        dtype = {name: options.pop(name) for name in ("dtype", "torch_dtype") if name in options}
        rest = {name: value for name, value in options.items() if name not in hub}
        config, rest = config_class.from_pretrained(config or source, return_unused_kwargs=True, **hub, **rest)
        options = {**hub, **dtype, **rest}
    complete_sizes(config, source, options.get("variant"), hub)
    return {**options, "config": config}


def complete_sizes(
    config: PreTrainedConfig, path: str | os.PathLike, variant: str | None = None, hub: dict | None = None
) -> None:
    """Takes sizes that published configurations lack from a checkpoint's tensors, if the configuration class can."""
    if hasattr(config, "set_sizes_from_shapes"):
        config.set_sizes_from_shapes(_checkpoint_shapes(os.fspath(path), variant, hub or {}))


def _adapted_model(path: str, hub: dict) -> str:
    """The model that the adapter in a directory was trained on; any other path unchanged."""
    adapter = find_adapter_config_file(
        path, **{name: value for name, value in hub.items() if name != "force_download"}
    )
    if adapter is None:
        return path
    with open(adapter, encoding="utf-8") as file:
        return json.load(file)["base_model_name_or_path"]


def _checkpoint_shapes(path: str, variant: str | None, hub: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of the first two blocks, from safetensors headers; empty if there is no such file."""
    hub, (single_name, index_name) = {**hub, **QUIET}, _file_names(variant)
    files = []
    if (single := cached_file(path, single_name, **hub)) is not None:
        files = [single]
    elif (index := cached_file(path, index_name, **hub)) is not None:
        shards = sorted({shard for name, shard in read_weight_map(index).items() if FIRST_BLOCKS.search(name)})
        files = [cached_file(path, shard, **hub) for shard in shards]
    shapes = {}
    for name in files:
        with safe_open(name, framework="pt") as file:
            for key in file.keys():
                if FIRST_BLOCKS.search(key):
                    shapes[key] = tuple(file.get_slice(key).get_shape())
    return shapes
