"""Other people's checkpoints, recognised by their tensor names and converted to models of this package."""

from .converter import Report, convert, recognise
from .errors import ConversionError
from .formats import Recognised
from .registry import FORMATS


__all__ = ["FORMATS", "ConversionError", "Recognised", "Report", "convert", "recognise"]
