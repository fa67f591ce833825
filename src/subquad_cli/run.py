"""`subquad run`"""

import argparse
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .common import UsageError
from .templates import limit_templates


SUMMARY = "run another package's command with subquad's models"
DESCRIPTION = """\
Run the command of another installed package after importing subquad.

Such a command loads models by their configuration, in a process without subquad. With `subquad run`, it loads
subquad's architectures like transformers' own. (This does not extend to processes that the command starts: a script
for torchrun or accelerate must import subquad itself.)

`transformers serve` answers requests together, in continuous batches, if the state of the model has a constant size.
With --no-continuous-batching or --compile, it answers them one after the other. It keeps the states of texts, so that
a conversation is not read again; with --prefix-cache DIRECTORY also in files there, for other servers and after a
restart.

examples:
  subquad run transformers serve ./finch-1b6
  subquad run transformers serve ./finch-1b6 --prefix-cache ./states
  subquad run lm_eval --model hf --model_args pretrained=./finch-1b6 --tasks lambada_openai
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="COMMAND", help="name of the command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(args: argparse.Namespace) -> None:
    from importlib.metadata import entry_points

    scripts = entry_points(group="console_scripts", name=args.name)
    if not scripts:
        raise UsageError(f"no installed package has the command {args.name!r}.")
    _put_classes_into_transformers()
    if args.name == "transformers" and args.arguments[:1] == ["serve"]:
        _keep_states(_take_option(args.arguments, "--prefix-cache"))
        _batch_continuously(args.arguments)
        _name_thoughts()
        limit_templates()
    sys.argv = [args.name, *args.arguments]
    try:
        status = next(iter(scripts)).load()()
    except Exception:
        traceback.print_exc()  # the errors of another package are shown in full
        status = 1
    sys.exit(status)


def _put_classes_into_transformers() -> None:
    """`transformers serve` looks up the `architectures` of a configuration there instead of in the Auto classes."""
    # This import replaces the module `transformers`, so it must come before `setattr`.
    import transformers.processing_utils

    from subquad.models import REGISTRY

    for architecture in REGISTRY.values():
        for head in architecture.heads.values():
            setattr(transformers, head, architecture.load(head))


def _take_option(arguments: list[str], name: str) -> str | None:
    """Takes our own option, `name VALUE` or `name=VALUE`, out of another command's arguments. Returns the value."""
    value = None
    for place in reversed(range(len(arguments))):
        option, equals, given = arguments[place].partition("=")
        if option != name:
            continue
        if not equals and place + 1 == len(arguments):
            raise UsageError(f"{name} needs a value.")
        if value is not None:
            raise UsageError(f"{name} was given twice.")
        value = given if equals else arguments.pop(place + 1)
        del arguments[place]
    return value


def _keep_states(directory: str | None = None) -> None:
    """The server passes whole conversations to `generate`, which then continues from states of their beginnings."""
    from subquad.decoding.generation import RecurrentGenerationMixin
    from subquad.states.prefix_cache import PrefixCache

    RecurrentGenerationMixin.make_prefix_cache = lambda model: PrefixCache(directory=directory)


def _batch_continuously(arguments: list[str]) -> None:
    """Lets the server answer requests together, each with its own options and its own seed."""
    from transformers.cli.serving import utils

    from subquad.decoding.continuous_batching import SERVED

    if not {"--continuous-batching", "--no-continuous-batching", "--compile"} & set(arguments):
        arguments.append("--continuous-batching")
    set_torch_seed, seed_of_request = utils.set_torch_seed, ContextVar("seed", default=None)

    def set_seed(seed: int) -> None:
        set_torch_seed(seed)  # for models without continuous batching
        seed_of_request.set(seed)

    @contextmanager
    def served(tokenizer: Any, generation_config: Any) -> Iterator[None]:
        seed = seed_of_request.get()
        before = SERVED.set({"tokenizer": tokenizer, "generation_config": generation_config, "seed": seed})
        try:
            yield
        finally:
            SERVED.reset(before)

    class GenerateManager(utils.CBGenerateManager):
        """Transformers' own takes the options of the first request for all of them."""

        def generate_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
            with served(processor, gen_config):
                return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

        async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
            with served(processor, gen_config):
                return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    utils.set_torch_seed, utils.CBGenerateManager = set_seed, GenerateManager


def _name_thoughts() -> None:
    """Older versions of the server look for thoughts in a field `thinking` alone, and drop any other."""
    from transformers.cli.serving import utils

    if hasattr(utils, "_REASONING_FIELDS"):
        return
    get_response_template = utils.get_response_template

    def get_template(*args: Any) -> dict[str, Any] | None:
        template = get_response_template(*args)
        fields = (template or {}).get("fields", {})
        if "reasoning_content" not in fields:
            return template
        renamed = {"thinking" if name == "reasoning_content" else name: fields[name] for name in fields}
        return {**template, "fields": renamed}

    utils.get_response_template = get_template
