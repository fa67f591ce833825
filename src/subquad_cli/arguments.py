"""Options that several commands have, and the types of options. Each type raises an error that argparse prints."""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from .common import UsageError


DTYPES = ("float32", "bfloat16", "float16")


def add_model_directory(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model_dir",
        metavar="MODEL_DIR",
        help="directory that `save_pretrained` or `subquad convert` wrote, with safetensors weights, or the name of "
        "an embedded model",
    )


def add_dtype_and_device(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="dtype of the weights (default: as configured)"
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")


def add_sampling(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--greedy", action="store_true", help="always take the most likely token instead of sampling")
    add("--temperature", type=temperature, metavar="T", help="below 1 more predictable, above 1 more varied")
    add("--top-p", type=probability, metavar="P", help="sample from the most likely tokens that sum to P")
    add("--top-k", type=positive_int, metavar="K", help="sample from the K most likely tokens")
    add("--presence-penalty", type=penalty, metavar="X", help="lower the scores of generated tokens by X (RWKV: 0.3)")
    add("--frequency-penalty", type=penalty, metavar="X", help="the same, by X for each occurrence (RWKV: 0.3)")
    add("--penalty-decay", type=fraction, metavar="X", help="multiply earlier counts by X after each token (0.996)")
    add("--seed", type=seed, metavar="N", help="seed of the sampling, which makes it repeatable")


def sampling_options(args: Namespace) -> dict[str, Any]:
    """
    The options of [`subquad.states.session.Session.generate`] for the arguments of [`add_sampling`].

    Raises:
        UsageError: if they contradict each other.
    """
    given = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    given = {name: value for name, value in given.items() if value is not None}
    if args.greedy and (given or args.seed is not None):
        raise UsageError("--greedy does not sample: leave out --temperature, --top-p, --top-k and --seed.")
    given["do_sample"] = not args.greedy
    penalties = {"presence": args.presence_penalty, "frequency": args.frequency_penalty}
    if any(value is not None for value in penalties.values()):
        given["penalties"] = {name: value or 0.0 for name, value in penalties.items()}
        if args.penalty_decay is not None:
            given["penalties"]["decay"] = args.penalty_decay
    elif args.penalty_decay is not None:
        raise UsageError("--penalty-decay needs --presence-penalty or --frequency-penalty.")
    return given


def positive_int(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def seed(text: str) -> int:
    # The random generators take 32 bits.
    if not text.isdecimal() or int(text) >= 2**32:
        raise ArgumentTypeError(f"must be a whole number from 0 to {2**32 - 1}, got {text!r}")
    return int(text)


def numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ArgumentTypeError(f"must be whole numbers, separated by commas and at least 0, got {text!r}")
    return [int(part) for part in parts]


def numbers_or_all(text: str) -> list[int] | str:
    return text if text == "all" else numbers(text)


def temperature(text: str) -> float:
    if not 0 < _float(text) < float("inf"):
        raise ArgumentTypeError(f"must be a number above 0, got {text!r} (--greedy takes the most likely token)")
    return float(text)


def probability(text: str) -> float:
    if not 0 < _float(text) <= 1:
        raise ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")
    return float(text)


def penalty(text: str) -> float:
    if not math.isfinite(_float(text)):
        raise ArgumentTypeError(f"must be a number, got {text!r}")
    return float(text)


def fraction(text: str) -> float:
    if not 0 <= _float(text) <= 1:
        raise ArgumentTypeError(f"must be from 0 to 1, got {text!r}")
    return float(text)


def majority(text: str) -> float:
    if not 0.5 < _float(text) <= 1:
        raise ArgumentTypeError(f"must be above 0.5 and at most 1, got {text!r}")
    return float(text)


def size(text: str) -> int:
    from subquad_conversion.writer import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def _float(text: str) -> float:
    """A number; NaN, which fails every range check, if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
