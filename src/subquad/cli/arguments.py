"""Options that several commands have, and the types of options. Each type raises an error that argparse prints."""

from argparse import ArgumentParser, ArgumentTypeError


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
    """A number; NaN, which is in no range, if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
