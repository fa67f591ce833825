"""The one exception of this package."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConversionError(ValueError):
    """A checkpoint, configuration or tokenizer that cannot be converted; the message says what was found and where."""


@contextmanager
def as_conversion_error() -> Iterator[None]:
    """What the checks of `subquad` refuse is an error of the conversion."""
    try:
        yield
    except ConversionError:
        raise
    except ValueError as error:
        raise ConversionError(str(error)) from error
