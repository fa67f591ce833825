"""The one exception of this package."""


class ConversionError(ValueError):
    """A checkpoint, configuration or tokenizer that cannot be converted; the message says what was found and where."""
