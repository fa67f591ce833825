"""Uploads of model repositories that load without this package, each as one commit."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__


if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi
    from transformers import PreTrainedModel

CARD = "README.md"
# The weight files that `from_pretrained` looks for, and the code files of earlier versions, one per module.
# Old ones are deleted if the new ones have other names.
REPLACED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|subquad_\w+\.py|configuration_checks\.py")
# Part of the card that transformers writes if a tokenizer is pushed first; it does not describe the model.
PLACEHOLDER = "# Model Card for Model ID"


class PushError(OSError):
    """The Hub refuses an upload or cannot be reached; the message gives the reason."""


def push(
    source: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
) -> "CommitInfo":
    """
    Uploads a model directory in the form that [`subquad.hub.export.export`] writes, in one commit. Other files of the
    repository stay, except for the weights of another model. The card is the model directory's README.md if a person
    wrote it, otherwise the repository's, otherwise a new one.

    Args:
        source: a directory that `save_pretrained` or `subquad convert` wrote, with safetensors weights.
        repo_id: owner and name of the repository, or only the name of one of your own. It is created if it does not
            exist.
        private: whether a new repository is private; by default as in the owner's settings.
        token: token of a user who may write to the repository; by default from `hf auth login` or the variable
            HF_TOKEN.
        revision: branch to commit to, created if it does not exist; by default main.
        create_pr: open a pull request with the commit, which does not need write access.
        commit_message: by default "Upload model".

    Returns:
        the URL of the commit, with `repo_url`, `oid` and `pr_url` as attributes.

    Raises:
        ValueError: if the source cannot be exported, `repo_id` is not a valid name, a revision is given for a pull
            request, or `private` is true and the repository is public.
        PushError: if the token is missing, wrong or not allowed to write to the repository, or the connection fails.
    """
    from .export import export

    api = _api(token)
    with _explained(api, repo_id):
        repo_id = _target(api, repo_id, private=private, revision=revision, create_pr=create_pr)
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "repository"
        export(source, directory, link_weights=True)
        with _explained(api, repo_id):
            api.create_repo(repo_id, private=private, exist_ok=True)
            return _upload(
                api,
                Path(source),
                directory,
                repo_id,
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message,
            )


def save_model(
    model: "PreTrainedModel",
    save: Callable[..., None],
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    state_dict: dict | None = None,
    push_to_hub: bool = False,
    *args,
    self_contained: bool = False,
    **kwargs,
) -> None:
    """
    `save_pretrained` of the models. It calls transformers' own, `save`, and adds the model's code if `self_contained`,
    or if the model was loaded from a directory with its code.
    """
    from ..modeling.arguments import PUSH_ARGUMENTS
    from .export import add_model_code, check_portable

    if os.path.isfile(save_directory):  # transformers would log this, and save nothing
        raise NotADirectoryError(f"`save_directory` must be a directory, and {save_directory} is a file.")
    if self_contained:
        check_portable(model.config, "the model")
    hub = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
    save(save_directory, is_main_process, state_dict, False, *args, **kwargs)
    if not is_main_process:
        return
    if self_contained or getattr(model.config, "auto_map", None) is not None:
        add_model_code(save_directory)
    if push_to_hub:
        repo_id = hub.pop("repo_id", None) or os.path.basename(os.path.normpath(save_directory))
        model.push_to_hub(repo_id, source=save_directory, **hub)


def push_model(
    model: "PreTrainedModel",
    repo_id: str,
    *,
    source: str | os.PathLike | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str | None = "50GB",
    tags: str | list[str] | None = None,
) -> "CommitInfo":
    """
    `push_to_hub` of the models: as in transformers, but in the form that loads without this package.

    Args:
        source: a directory with the saved model and other files for [`push`]; by default the model is
            saved to a temporary directory, in files of at most `max_shard_size`.

    Raises:
        ValueError: as [`push`]. If the Hub refuses the upload, huggingface_hub's errors are raised.
    """
    from .export import export

    tags = [tags] if isinstance(tags, str) else tags or []
    api = _api(token)
    repo_id = _target(api, repo_id, private=private, revision=revision, create_pr=create_pr)
    with tempfile.TemporaryDirectory() as parent:
        if source is None:
            source = Path(parent) / "model"
            model.save_pretrained(source, max_shard_size=max_shard_size)
        directory = Path(parent) / "repository"
        export(source, directory, link_weights=True)
        api.create_repo(repo_id, private=private, exist_ok=True)
        return _upload(
            api,
            Path(source),
            directory,
            repo_id,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            commit_description=commit_description,
            tags=[*(model.model_tags or []), *tags],
        )


def _api(token: bool | str | None) -> "HfApi":
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="subquad", library_version=__version__)


def _target(api: "HfApi", repo_id: str, *, private: bool | None, revision: str | None, create_pr: bool) -> str:
    """The full name of the repository, after quick checks."""
    from huggingface_hub.utils import validate_repo_id

    if create_pr and revision not in (None, "main"):
        raise ValueError(f"a pull request is opened against main, not against {revision}.")
    validate_repo_id(repo_id)
    user = api.whoami()["name"]
    repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
    if private and api.repo_exists(repo_id) and not api.model_info(repo_id).private:
        raise ValueError(f"{repo_id} exists already and is public.")
    return repo_id


def _upload(
    api: "HfApi",
    source: Path,
    directory: Path,
    repo_id: str,
    *,
    revision: str | None,
    create_pr: bool,
    commit_message: str | None,
    commit_description: str | None = None,
    tags: list[str] | None = None,
) -> "CommitInfo":
    """
    Uploads all files of `directory`, which `source` was exported to, and a card, as one commit. (`upload_folder` of
    huggingface_hub may make several commits.)
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    from .cards import is_own_card

    if revision is not None and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    there = api.list_repo_files(repo_id, revision=revision)
    if not (source / CARD).is_file() or is_own_card(source):
        old = Path(api.hf_hub_download(repo_id, CARD, revision=revision)) if CARD in there else None
        if old is not None and PLACEHOLDER not in old.read_text(encoding="utf-8"):
            shutil.copyfile(old, directory / CARD)
        else:
            _new_card(source, directory, repo_id, there)
    if tags:
        _tag(directory / CARD, tags)
    here = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    replaced = [name for name in there if REPLACED.fullmatch(name) and name not in here]
    return api.create_commit(
        repo_id,
        [CommitOperationDelete(name) for name in replaced]
        + [CommitOperationAdd(name, path) for name, path in sorted(here.items())],
        commit_message=commit_message or "Upload model",
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )


def _new_card(source: Path, directory: Path, repo_id: str, there: list[str]) -> None:
    """Writes a new card. Its example uses a tokenizer if there is one in the directory or in the repository."""
    from .cards import TOKENIZER_FILES, base_model, model_card

    has_tokenizer = any(name in there or (directory / name).is_file() for name in TOKENIZER_FILES)
    card = model_card(directory, repo_id=repo_id, has_tokenizer=has_tokenizer, base_model=base_model(source))
    card.save(directory / CARD)


def _tag(path: Path, tags: list[str]) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard.load(path)
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
    card.save(path)


@contextmanager
def _explained(api: "HfApi", repo_id: str) -> Iterator[None]:
    """Turns the Hub's errors into ones with a remedy."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError

    try:
        yield
    except LocalTokenNotFoundError as error:
        raise PushError("the token is missing: log in with `hf auth login`, or set HF_TOKEN.") from error
    except HfHubHTTPError as error:
        if error.response.status_code == 401:
            message = "the Hub does not accept the token: log in with `hf auth login`, or set HF_TOKEN to a valid one."
        elif error.response.status_code == 403:
            said = f" ({error.server_message.rstrip('.')})" if error.server_message else ""
            message = f"the token may not write to {repo_id}{said}."
        else:
            raise
        raise PushError(message) from error
    except HTTPError as error:
        raise PushError(f"the connection to {api.endpoint} failed: {error}") from error
    except RuntimeError as error:  # from the threads that upload large files
        reason = error.__cause__ or error
        raise PushError(f"the upload to {repo_id} was interrupted and nothing was committed: {reason}") from error
