"""
Each operator as a layer without parameters, under the same name: the `kernels` library replaces functions of a model
with such layers.
"""

import functools
import inspect
import sys
from collections.abc import Callable

from torch import nn


def _layer(operator: Callable) -> type[nn.Module]:
    def forward(self, *args, **kwargs):
        return operator(*args, **kwargs)

    # `kernels` compares the signatures of a layer and of the function that it replaces.
    signature = inspect.signature(operator)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])
    members = {"forward": forward, "can_torch_compile": True, "__module__": __name__, "__doc__": operator.__doc__}
    return type(operator.__name__, (nn.Module,), members)


@functools.cache
def __getattr__(name: str) -> type[nn.Module]:
    package = sys.modules[__package__]
    if name not in package.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _layer(getattr(package, name))
