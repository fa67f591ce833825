"""
Faster implementations than torch's on a CPU: a library of C files, compiled on this machine, for few tokens, and
products by the fastest library of torch. Operators use them as shortcuts.
"""

from . import products as products
from . import steps as steps
