"""`subquad info`"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import positive_int
from .common import UsageError


if TYPE_CHECKING:
    from subquad.hub.info import ModelInfo


SUMMARY = "show the sizes and costs of a model"
DESCRIPTION = """\
Print the sizes of a model and the cost of a token. The weights are not loaded. Without NAME, list the embedded models
and the presets.

NAME is a model directory, a preset, an embedded model, or a checkpoint that `subquad convert` reads. FLOPs are counted
as in appendix E of the paper "Eagle and Finch" (arXiv:2404.05892). They cover, for Avey, the matrix products of a full
window; for Avey-B, a token in a full split; for Raven and Gecko, the matrix products, full attention windows, and the
memories.

examples:
  subquad info finch-1.6b
  subquad info finch-1.6b --length 100000
  subquad info ./eagle-7b --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="preset, embedded model or path (default: list names)")
    parser.add_argument(
        "--length",
        type=positive_int,
        metavar="N",
        help="also show the size of the state after N tokens, and the keys and values of a transformer with as many "
        "layers of the same width",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> None:
    import json
    from dataclasses import asdict

    from subquad.hub.info import UnknownModelError, known_names, labelled

    if args.name is None:
        if args.length is not None:
            raise UsageError("--length needs NAME.")
        names = known_names()
        if args.json:
            print(json.dumps(names))
        else:
            print("\n".join(f"{kind}: {', '.join(found)}" for kind, found in names.items()))
        return
    try:
        info = _describe(args.name)
    except UnknownModelError as error:
        raise UsageError(error) from error
    if args.length is not None and (info.state_bytes_after(1) is None or info.transformer_bytes_after(1) is None):
        raise UsageError(f"--length: {args.name} keeps no state from token to token.")
    if args.json:
        numbers = asdict(info)
        if args.length is not None:
            numbers["length"] = args.length
            numbers["state_bytes_at_length"] = info.state_bytes_after(args.length)
            numbers["transformer_bytes_at_length"] = info.transformer_bytes_after(args.length)
        print(json.dumps(numbers))
        return
    print(info.name)
    for label, text in labelled(info, args.length).items():
        print(f"  {label:<13} {text}")


def _describe(name: str) -> "ModelInfo":
    """The numbers of a model or of a convertible checkpoint, such as a single file."""
    from subquad.hub.foreign_files import naming
    from subquad.hub.info import describe

    path = Path(name)
    if not path.exists():
        return describe(name)
    from subquad_conversion.adapter_files import is_adapter_directory

    if path.is_file() or is_adapter_directory(path):  # the error describes the adapter
        with naming(path):
            return _describe_checkpoint(name)
    try:
        return describe(name)
    except ValueError as error:
        try:
            return _describe_checkpoint(name)
        except ValueError as refusal:
            raise ValueError(f"{error} {refusal}") from refusal


def _describe_checkpoint(name: str) -> "ModelInfo":
    from transformers import AutoConfig

    from subquad.hub.info import make_info
    from subquad_conversion import recognise

    found = recognise(Path(name))
    config = AutoConfig.for_model(found.model_type, **found.sizes)
    return make_info(name, str(Path(name)), config, found.parameters, found.dtype)
