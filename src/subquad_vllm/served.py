"""Definitions that do not import vLLM: the tested version, and the names of classes there."""

# The minor version of vLLM that the tests run on. Its interfaces change from one to the next.
TESTED = "0.32"


def hybrid_name(name: str) -> str:
    """The name in vLLM of a class of models with softmax attention in some blocks."""
    return name if "HybridFor" in name else name.replace("For", "HybridFor", 1)
