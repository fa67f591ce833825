"""Helpers that several commands share."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.hub.foreign_files import one_line, reading

from .templates import limit_templates


if TYPE_CHECKING:
    import torch

    from subquad.modeling.state_file import ModelIdentity
    from subquad.states.session import SavedSession


class UsageError(ValueError):
    """Arguments that can be parsed but are wrong; exit code 2."""


def find_model(name: str) -> Path | str:
    """
    `name` if it is a directory or may be a model on the Hub, or the directory of the embedded model of that name. The
    user's own directory comes first.

    Raises:
        UsageError: if it cannot be any of these.
    """
    from subquad.hub.info import embedded_models
    from subquad.hub.presets import PRESETS

    if os.path.isdir(name):
        return name
    path = embedded_models().get(name)
    if path is None:
        if name in PRESETS:
            raise UsageError(f"{name} is a preset, which is sizes without weights; --model needs a trained model.")
        if os.path.isfile(name):
            raise UsageError(f"{name} is a file; `subquad convert` makes a model directory from it.")
        if "/" not in name:
            raise UsageError(
                f"{name!r} is not an embedded model, not a directory and not the OWNER/NAME of a model on the Hub."
            )
        _check_hub(name)
    return path or name


def _check_hub(name: str) -> None:
    """Asks the Hub once for a model that is not in its cache; loading would ask for every file, several times."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        HfApi().model_info(name, timeout=10)
    except HFValidationError as error:
        raise UsageError(f"{name} is not a directory, and cannot be the OWNER/NAME of a model on the Hub.") from error
    except RepositoryNotFoundError as error:
        raise UsageError(f"{name} is not a directory, and not a model on the Hub that you have access to.") from error
    except Exception as error:  # whatever the connection raises, which depends on the version
        raise ValueError(f"{name} is not a directory, and the Hub cannot be reached: {one_line(error)}") from error


def find_auto_class(name: str, path: Path | str, images: bool) -> str:
    """
    Name of the Auto class that loads a model which generates text.

    Args:
        name: the model's name as given by the user.
        path: the result of [`find_model`].
        images: whether it must read images.

    Raises:
        UsageError: if its type is unknown, if it is an encoder, or if it does not read images.
    """
    from subquad.models import REGISTRY

    model_type = _model_type(path)
    if model_type is None:  # loading the tokenizer or the model will report the fault
        return "AutoModelForCausalLM"
    if (architecture := REGISTRY.get(model_type)) is None:
        raise UsageError(f"{name} is of type {model_type}, which is none of {', '.join(REGISTRY)}.")
    if not architecture.generates:
        kind = "an encoder" if architecture.is_encoder else architecture.title
        raise UsageError(f"{name} is of type {model_type}, {kind}, which does not generate text.")
    if images and architecture.processor is None:
        raise UsageError(f"{name} is of type {model_type}, which does not read images; leave out --image.")
    return architecture.lm_auto_class


def _model_type(path) -> str | None:
    """The type of a model, or of an adapter's base model; None if the Hub has no information."""
    from transformers import PreTrainedConfig

    from subquad.hub.model_check import model_type_of
    from subquad.hub.weight_files import adapted_model

    path = adapted_model(path, {})
    if os.path.isdir(path):
        return model_type_of(Path(path))
    with suppress(OSError, ValueError):
        return PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    return None


def read_session(
    name: str, path: Path | str, file: str | None, needed: bool = False
) -> "tuple[ModelIdentity | None, SavedSession | None]":
    """
    The identity of a model, if a file is given or it is `needed`, and the session in the file.

    Args:
        name: the model's name as given by the user.
        path: the result of [`find_model`].

    Raises:
        ValueError: if the file is damaged, or the text belongs to another model.
    """
    if file is None and not needed:
        return None, None
    from subquad.states.identity import identify
    from subquad.states.session import SavedSession

    with reading(name, "the model"):
        identity = identify(path)
    return identity, file and SavedSession.read(file, identity)


def read_image(option: str, file: str) -> None:
    """
    Raises:
        ValueError: if a file is not a picture that can be read.
    """
    from PIL import Image

    if not os.path.isfile(file):
        raise UsageError(f"{option} {file} is not a file.")
    with reading(file, "the image"), Image.open(file) as image:
        image.load()


def check_new_file(option: str, file: str, force: bool) -> None:
    """
    Raises:
        UsageError: if a file cannot be written there, or exists and `force` is false.
    """
    path = Path(file)
    if not path.parent.is_dir():
        raise UsageError(f"{option}: {path.parent} is not a directory.")
    if path.is_dir():
        raise UsageError(f"{option}: {file} is a directory.")
    if path.exists() and not force:
        raise UsageError(f"{option}: {file} exists already; --force replaces it.")


def find_directory(name: str) -> str:
    """`name`, or the directory of the embedded model of that name. The user's own directory comes first."""
    from subquad.hub.info import embedded_models

    return name if os.path.exists(name) else str(embedded_models().get(name, name))


def load_reader(auto_class: type, name: str, path: Path | str) -> Any:
    """
    The tokenizer or processor of a model, depending on the Auto class. For an adapter without one, the base model's is
    used. Chat templates have limits from then on.

    Args:
        name: the model's name as given by the user.
        path: the result of [`find_model`].

    Raises:
        ValueError: if there is no tokenizer, or it cannot be read.
    """
    from transformers.utils.hub import cached_file

    from subquad.hub.weight_files import QUIET, adapted_model
    from subquad_conversion.tokenizer_files import VOCABULARIES

    limit_templates()

    def has_tokenizer(path):
        return any(cached_file(os.fspath(path), file, **QUIET) for file in ("tokenizer_config.json", *VOCABULARIES))

    with reading(name, "the tokenizer"):
        if not has_tokenizer(path) and not has_tokenizer(path := adapted_model(path, {})):
            raise ValueError(
                f"{name} has no tokenizer; `subquad convert {path} OUT --tokenizer CHOICE` makes a model directory "
                "with one, where CHOICE is rwkv-world, bytes or a directory that has a tokenizer."
            )
        return auto_class.from_pretrained(path, trust_remote_code=False)


@contextmanager
def naming_options(*names: str) -> Iterator[None]:
    """
    Makes errors of the library name options instead of arguments: --grid-size instead of `grid_size`, --force instead
    of `force=True`.

    Raises:
        UsageError: in place of an error that names one of these arguments.
    """
    try:
        yield
    except ValueError as error:
        message = str(error)
        for name in names:
            message = re.sub(f"`{name}(=True)?`", f"--{name.replace('_', '-')}", message)
        if message == str(error):
            raise
        raise UsageError(message) from error


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input if it is `-`."""
    try:
        if prompt == "-":
            if sys.stdin is None:
                raise UsageError("the prompt is -, but standard input is closed.")
            prompt = sys.stdin.read()
        prompt.encode()  # bytes of an argument that are not UTF-8 arrive as lone surrogates
    except UnicodeError as error:
        raise UsageError("the prompt is not UTF-8.") from error
    return prompt


def usable_device(name: str | None) -> "torch.device":
    """The device of that name, or the default one, after a test that it can hold a tensor."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).item()  # fails on `meta`, which stores no numbers
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"device {name!r} cannot be used: {one_line(error)}") from error
    return device


@contextmanager
def signals_raise() -> Iterator[None]:
    """
    Makes a signal that would end the process raise SystemExit, so that unfinished directories are removed.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        # A signal that is ignored stays ignored: nohup works that way.
        handlers = {number: signal.getsignal(number) for number in numbers}
        handlers = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}

    def stop(number, frame):
        for each in handlers:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        sys.exit(128 + number)

    for number in handlers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
