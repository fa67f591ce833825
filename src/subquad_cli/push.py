"""`subquad push`"""

import os
import sys
from argparse import ArgumentParser, Namespace

from .arguments import add_model_directory
from .common import UsageError, find_directory, signals_raise


SUMMARY = "upload a model to the Hub"
DESCRIPTION = """\
Upload a model directory to the Hugging Face Hub.

The repository gets the weights, the configuration, the tokenizer, a model card and the modeling code, so that anybody
can load it with `from_pretrained(REPO_ID, trust_remote_code=True)`; with subquad installed, it loads without remote
code. Everything is one commit: an interrupted upload changes nothing. The model card is the README.md of MODEL_DIR; if
there is none, the repository keeps its card, and a new repository gets a new one.

Log in with `hf auth login` first, or set HF_TOKEN.

examples:
  subquad push ./my-finch my-finch --private
  subquad push ./my-finch my-team/my-finch --revision step-4000 --message "After 4000 steps"
  subquad push ./eagle-7b RWKV/v5-Eagle-7B-HF --create-pr
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_model_directory(parser)
    add = parser.add_argument
    add(
        "repo_id",
        metavar="REPO_ID",
        help="OWNER/NAME, or the NAME of a repository of your own; it is created if it does not exist",
    )
    add("--private", action="store_true", help="make a new repository private")
    add("--revision", metavar="BRANCH", help="branch to commit to, created if it does not exist (default: main)")
    add("--create-pr", action="store_true", help="open a pull request, which does not need write access")
    add("--message", metavar="TEXT", help="commit message (default: Upload model)")


def run(args: Namespace) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import disable_progress_bars

    from subquad.hub.push import push

    directory = find_directory(args.model_dir)
    if not os.path.isdir(directory):
        raise UsageError(f"{args.model_dir} is not a directory.")
    if args.create_pr and args.revision:
        raise UsageError("--create-pr opens a pull request against main: leave out --revision.")
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        with signals_raise():
            commit = push(
                directory,
                args.repo_id,
                private=args.private or None,
                revision=args.revision,
                create_pr=args.create_pr,
                commit_message=args.message,
            )
    except HFValidationError as error:
        raise UsageError(error) from error
    if commit.pr_url:
        print(f"Opened the pull request {commit.pr_url}.")
        return
    branch = f", revision={args.revision!r}" if args.revision else ""
    print(f"Pushed to {commit.repo_url}: {commit}")
    print(f"It loads with from_pretrained({commit.repo_url.repo_id!r}{branch}, trust_remote_code=True).")
