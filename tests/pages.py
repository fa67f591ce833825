"""
Runs the code of a page as a reader would paste it: a page in an interpreter of its own, and each command in another.

The interpreters are forks of one that has imported what takes longest, and nothing of ours.
"""

import gc
import importlib
import multiprocessing
import os
import shlex
import sys
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path


CONTEXT = multiprocessing.get_context("forkserver")
# There is one such interpreter for all tests: test_distributed.py needs the last three.
CONTEXT.set_forkserver_preload(
    [
        *("peft", "transformers.generation.utils", "transformers.models.auto.modeling_auto"),
        *("transformers.trainer", "accelerate.accelerator", "deepspeed"),
    ]
)


def run_page(page: str, blocks: list[tuple[str, str]], names: list[str], directory: Path, output: Path) -> str | None:
    """
    Runs blocks of Python and of commands, and looks up the names that the text has besides.

    Returns:
        what was printed, if anything failed.
    """
    process = _start(_run_blocks, directory, output, page, blocks, names, directory, output)
    return None if process.exitcode == 0 else output.read_text()


def _start(function, directory: Path, output: Path, *arguments) -> BaseProcess:
    process = CONTEXT.Process(target=_run, args=(function, directory, output, *arguments))
    process.start()
    process.join()
    return process


def _run(function, directory: Path, output: Path, *arguments) -> None:
    gc.freeze()  # what was imported is not searched for garbage
    os.chdir(directory)
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            function(*arguments)
        except Exception:
            traceback.print_exc()
            sys.exit(1)


def _run_blocks(page: str, blocks: list[tuple[str, str]], names: list[str], directory: Path, output: Path) -> None:
    namespace = {"__name__": "__main__"}
    for language, code in blocks:
        if language == "python":
            exec(compile(code, page, "exec"), namespace)
            continue
        for command, *arguments in filter(None, (shlex.split(line, comments=True) for line in code.splitlines())):
            assert command == "subquad", f"{page} runs {command}: say why not, in a comment"
            assert _start(_run_command, directory, output, arguments).exitcode == 0, arguments
    for name in names:
        package, *attributes = name.split(".")
        value = namespace.get(package) or importlib.import_module(package)
        for attribute in attributes:
            value = getattr(value, attribute)


def _run_command(arguments: list[str]) -> None:
    from subquad_cli import main

    sys.exit(main(arguments))
