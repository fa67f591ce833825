"""The one exception of this package."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConversionError(ValueError):
    """A checkpoint, configuration or tokenizer that cannot be converted; the message gives the fault and its place."""


@contextmanager
def as_conversion_error() -> Iterator[None]:
    """Turns errors of `subquad`'s checks into conversion errors."""
    try:
        yield
    except ConversionError:
        raise
    except ValueError as error:
        raise ConversionError(str(error)) from error
