"""Functions that run in a process of their own, which may neither crash nor take much time and memory."""

import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from resident_memory import mapped_memory, resident_memory


# Bytes that a function may add to what the process has mapped, and seconds of one core that it may take.
MEMORY, SECONDS = 2**30, 10
only_on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is one of Linux")


def limited(function: Callable[[], Any], memory: int = MEMORY, seconds: int = SECONDS) -> tuple[Any, int]:
    """
    What a function returns, from a fork of this process, and the bytes of memory that it took at most.

    Raises:
        AssertionError: if it raises anything, takes too much, or ends by a signal; the message says which.
    """
    with tempfile.TemporaryFile() as file:
        if (child := os.fork()) == 0:
            code = 1
            try:
                torch.set_num_threads(1)  # threads do not survive a fork
                resource.setrlimit(resource.RLIMIT_AS, (mapped_memory() + memory,) * 2)
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
                signal.alarm(20 * seconds)  # it may wait for what never comes
                before = resident_memory()
                result = function()
                after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                pickle.dump((result, max(after - before, 0)), file)
                code = 0
            except BaseException:
                file.write(traceback.format_exc().encode(errors="replace"))
            finally:
                file.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        if os.WIFSIGNALED(status):
            raise AssertionError(f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}")
        if status:
            raise AssertionError(file.read().decode())
        return pickle.load(file)
