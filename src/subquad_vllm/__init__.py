"""
The plug-in that serves subquad's models in vLLM.

If subquad is installed next to vLLM, vLLM calls [`register`] in each of its processes. Nothing else imports it.
"""


def register() -> None:
    """Registers the models with vLLM. It may be called more than once in a process."""
    from .plugin import register

    register()
