"""Limits of time and memory for chat templates, which are programs that come with a model."""

import contextlib
import functools
import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


# Limits for rendering one prompt. Whole conversations take a few milliseconds.
SECONDS = 10
MEMORY = 2**28  # bytes
TOO_LARGE = f"The chat template takes more than {MEMORY >> 20} MiB of memory."


def limit_templates() -> None:
    """
    Makes transformers render chat templates in separate processes, which may take [`SECONDS`] of CPU time and
    [`MEMORY`] bytes more than this process. Without fork (Windows), nothing is limited; memory is limited on Linux
    only.
    """
    from transformers import processing_utils, tokenization_utils_base

    if not hasattr(os, "fork"):
        return
    for module in (processing_utils, tokenization_utils_base):
        if not hasattr(module.render_jinja_template, "__wrapped__"):
            module.render_jinja_template = in_process_of_its_own(module.render_jinja_template)


def in_process_of_its_own(render: Callable) -> Callable:
    """
    Runs `render` in a fork of this process.

    Raises:
        ValueError: if it takes too much time or memory. Errors of templates are raised as by `render`, but exceptions
            other than TypeError also become a ValueError.
    """

    @functools.wraps(render)
    def limited(*args, **kwargs):
        end, begin = os.pipe()
        with warnings.catch_warnings():
            # The warning is about locks of other threads, which rendering does not need.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            os.close(end)
            _answer(begin, render, args, kwargs)
        os.close(begin)
        try:
            text = _read(end)
        finally:
            os.close(end)
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        if text is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
            raise ValueError(f"The chat template takes more than {SECONDS} seconds.")
        return _result(text)

    return limited


def _answer(to: int, render: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Renders, writes the result or the error to a pipe, and ends the process."""
    try:
        import resource

        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # without /proc
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
        try:
            answer = json.dumps(["", render(*args, **kwargs)])
        except Exception as error:
            if isinstance(error, MemoryError):
                error = ValueError(TOO_LARGE)
            kind = next((name for name, kind in _errors().items() if isinstance(error, kind)), "ValueError")
            answer = json.dumps([kind, str(error) or type(error).__name__])
        with open(to, "w") as file:
            file.write(answer)
    finally:
        os._exit(0)


def _read(end: int) -> bytes | None:
    """Everything written to a pipe; None if it takes too long."""
    text, until = b"", time.monotonic() + 6 * SECONDS  # this process may share its CPU
    while select.select([end], [], [], max(until - time.monotonic(), 0))[0]:
        part = os.read(end, 2**20)
        if not part:
            return text
        text += part
    return None


def _errors() -> dict[str, type[Exception]]:
    """The errors that are raised unchanged, by name."""
    from jinja2 import TemplateError

    return {"TemplateError": TemplateError, "TypeError": TypeError}


def _result(text: bytes) -> Any:
    if not text:
        raise ValueError(TOO_LARGE)
    kind, value = json.loads(text)
    if kind:
        raise _errors().get(kind, ValueError)(value)
    return tuple(value)
