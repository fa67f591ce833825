"""
Model repositories that load without this package: `from_pretrained(..., trust_remote_code=True)` finds the code next
to the weights, at most six files merged from the package's own.
"""

import importlib.metadata
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from subquad_tokenizers.merging import merge

from .. import __version__
from ..models import REGISTRY
from ..models.architecture import Architecture
from ..quantization.methods import METHODS
from .directories import check_free, new_directory
from .foreign_files import check_links, listed, read_json, reading
from .model_check import check_model, model_type_of, unknown_fields, weights_of
from .new_files import writing


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

logger = logging.get_logger(__name__)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    _write(path, json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def check_portable(config: "PreTrainedConfig", name: str | os.PathLike) -> None:
    """
    Raises:
        ValueError: if only the installed package, not its code in a repository, can compute with the weights.
    """
    method = getattr(config, "quantization_config", None) or {}
    method = method if isinstance(method, dict) else method.to_dict()
    if (own := method.get("quant_method")) in METHODS.values():
        raise ValueError(
            f"{name} has weights in {own}, which need the package subquad: there is no repository of them that loads "
            "without it. Export the model that they were made from; `from_pretrained(..., quantization_config=...)` "
            "rounds it while it loads."
        )


def add_model_code(directory: str | os.PathLike) -> None:
    """
    Makes a saved model load without this package: adds the code that it needs, with its licence, and names it in
    `config.json` for the Auto classes.

    Raises:
        ValueError: if the directory does not hold a model of this package.
    """
    directory = Path(directory)
    architecture = REGISTRY[model_type_of(directory)]
    package, name = architecture.package, architecture.folder
    _write_code(directory, f"{package}.configuration_{name}", f"{package}.modeling_{name}")
    auto_map = {"AutoConfig": f"configuration_{name}.{architecture.config}"}
    auto_map |= {auto_class: f"modeling_{name}.{head}" for auto_class, head in architecture.heads.items()}
    if architecture.processor:
        auto_map |= _add_processor_code(directory, architecture)
    for file in ("LICENSE", "NOTICE"):
        if not (directory / file).exists():
            _write(directory / file, _legal(file))
    fields = read_json(directory / "config.json") | {"auto_map": auto_map}
    fields.pop("custom_pipelines", None)  # their code is not part of the repository
    _write_json(directory / "config.json", fields)


def add_processor_code(processor: "ProcessorMixin", directory: str | os.PathLike, self_contained: bool) -> None:
    """
    Makes a saved processor load without this package: adds the code of processor and tokenizer. This happens if
    `self_contained`, or if the processor was loaded from, or is saved to, a directory with its code.
    """
    directory = Path(directory)
    if not (self_contained or hasattr(processor, "auto_map") or _names_processor(directory / "config.json")):
        return
    names = [each.__name__ for each in type(processor).__mro__]
    _add_processor_code(directory, next(each for each in REGISTRY.values() if each.processor in names))

    from subquad_tokenizers.tokenization_base import SelfContainedMixin

    if isinstance(processor.tokenizer, SelfContainedMixin):
        processor.tokenizer.save_pretrained(directory, self_contained=True)


def _names_processor(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return "AutoProcessor" in read_json(path).get("auto_map", ())
    return False


def _add_processor_code(directory: Path, architecture: Architecture) -> dict[str, str]:
    """Adds a processor's code, and names it in `processor_config.json`, if present, for `AutoProcessor`."""
    module = f"processing_{architecture.folder}"
    _write_code(directory, f"{architecture.package}.{module}")
    auto_map = {"AutoProcessor": f"{module}.{architecture.processor}"}
    if (path := directory / "processor_config.json").is_file():  # transformers then looks nowhere else
        _write_json(path, read_json(path) | {"auto_map": auto_map})
    return auto_map


def repository_code(*modules: str) -> dict[str, str]:
    """
    The files that these modules of one architecture need, by name: a file for each module, `kernels_NAME.py` with the
    operators in plain torch, and `triton_NAME.py` with the same operators as GPU kernels.
    """
    name = modules[0].rpartition(".")[2].partition("_")[2]
    kernels = (f"kernels_{name}", f"The operators of `modeling_{name}.py`, in plain torch.")
    triton = (f"triton_{name}", f"The operators of `kernels_{name}.py` as Triton kernels, for a GPU.")
    return merge(modules, packages={"subquad_kernels": [kernels, triton]}, version=__version__)


def _write_code(directory: Path, *modules: str) -> None:
    """
    Writes the code of modules. Modules of the same architecture that are already in the directory are written again,
    because shared files must contain what all of them use.
    """
    packages = {module.rpartition(".")[0] for module in modules}
    kinds = ("configuration", "modeling", "processing")
    there = (
        f"{architecture.package}.{kind}_{architecture.folder}"
        for architecture in REGISTRY.values()
        for kind in kinds
        if architecture.package in packages and (directory / f"{kind}_{architecture.folder}.py").exists()
    )
    for file, text in repository_code(*dict.fromkeys((*modules, *there))).items():
        _write(directory / file, text)


def export(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    link_weights: bool = False,
) -> list[str]:
    """
    Makes a repository from a model directory, after checking that the model is complete: weights, configuration,
    tokenizer, a card, and the code that they need. It loads with only transformers and torch, given
    `trust_remote_code=True`. Where this package is installed, its classes are used instead. Code in the model
    directory is

    Args:
        source: a directory written by `save_pretrained` or `subquad convert`, with safetensors weights.
        destination: the directory to create; it must be empty or not exist. It appears complete or not at all.
        link_weights: link the weights instead of copying them, if the system allows symbolic links.

    Returns:
        The names of the files.

    Raises:
        ValueError: if the source is not a model of this package, if its safetensors weights are missing, do not match
            the configuration or are not finite, if a file is a link to a place outside, or if the destination is
            occupied.
    """
    from .cards import base_model, is_own_card, model_card

    source, destination = Path(source).resolve(), Path(destination).resolve()
    check_free(destination)
    if source.is_dir():
        check_links(source)
    config = check_model(source)
    patterns = ("generation_config.json", "processor_config.json", *REGISTRY[config.model_type].files)
    others = [path for pattern in patterns for path in sorted(source.glob(pattern)) if path.is_file()]
    check_links(source, *{path.parent for path in others})
    check_portable(config, source)
    weights = weights_of(source)
    size = 0 if link_weights else sum(path.stat().st_size for path in weights)
    with new_directory(destination, size) as partial:
        for path in weights:
            (_link if link_weights else shutil.copyfile)(path, partial / path.name)
        config.save_pretrained(partial)  # with all sizes: code in a repository does not inspect the tensors
        for path in others:
            (copy := partial / path.relative_to(source)).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        add_model_code(partial)
        _copy_tokenizer(source, partial)
        if (source / "README.md").is_file() and not is_own_card(source):
            shutil.copyfile(source / "README.md", partial / "README.md")
        else:
            card = model_card(partial, repo_id=destination.name, base_model=base_model(source))
            card.save(partial / "README.md")
        check_model(partial, values=False)
        if unknown := unknown_fields(partial):
            logger.warning("Nothing reads these fields of config.json, but others will: %s.", listed(unknown, 40))
    return sorted(path.relative_to(destination).as_posix() for path in destination.rglob("*") if path.is_file())


def _link(source: Path, destination: Path) -> None:
    try:
        destination.symlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, destination)


def _copy_tokenizer(source: Path, destination: Path) -> None:
    """Saves the tokenizer of a model directory, if there is one, with its code if it is one of ours."""
    if not any((source / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        return
    from transformers import AutoTokenizer

    from subquad_tokenizers.tokenization_base import SelfContainedMixin

    with reading(source, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    ours = isinstance(tokenizer, SelfContainedMixin)
    with writing(destination):
        tokenizer.save_pretrained(destination, **({"self_contained": True} if ours else {}))
    path = destination / "tokenizer_config.json"
    fields = read_json(path)
    if not ours and fields.pop("auto_map", None):  # their code is not part of the repository
        _write_json(path, fields)


def _legal(name: str) -> str:
    """LICENSE or NOTICE: next to the metadata of the installed package, or at the root of the clone."""
    found = [Path(__file__).parents[3] / name]
    with suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.distribution("subquad").files or ()
        found = [*(Path(file.locate()) for file in files if file.name == name), *found]
    return next(path for path in found if path.is_file()).read_text(encoding="utf-8")


__all__ = ["add_model_code", "add_processor_code", "export", "repository_code"]
