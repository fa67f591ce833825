"""
The command `subquad`. Each command is a module with its `SUMMARY`, its `DESCRIPTION`, `add_arguments` and `run`.

A module that takes long to import is imported inside the function that needs it, so `--help` is fast.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence

from subquad import __version__
from subquad.hub.foreign_files import one_line

from . import chat, convert, doctor, export, generate, index, info, inspect_memory, push, rank, run
from .common import UsageError


# In the order of the help.
COMMANDS = {
    "generate": generate,
    "chat": chat,
    "convert": convert,
    "info": info,
    "export": export,
    "push": push,
    "run": run,
    "index": index,
    "rank": rank,
    "inspect-memory": inspect_memory,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs the command line.

    Args:
        argv: the arguments; by default the process's arguments; the process then runs only this command.

    Returns:
        0; 1 if the command failed, or found a problem; 2 if the arguments are wrong; 130 after Ctrl-C; 141 if
        the reader of the output closed it.
    """
    args = parse(argv)
    args.own_process = argv is None
    debug = args.debug or os.environ.get("SUBQUAD_DEBUG", "0") not in ("", "0")
    try:
        status = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return status or 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes stdout again at exit, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if debug:
            raise
        print(f"subquad {args.command}: error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. Exits with status 2 if one is unknown, and names similar options."""
    args, unknown = build_parser().parse_known_args(argv)
    if not unknown:
        return args
    from subquad.modeling.arguments import nearest

    options = set(re.findall(r"--[a-z][a-z-]*", args.parser.format_help()))
    args.parser.error(f"unrecognized arguments: {' '.join(unknown)}.{nearest(unknown[0].partition('=')[0], options)}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="subquad",
        description="Sub-quadratic language models: run them, convert them and see what they cost.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(parser=command)
        command.add_argument(
            "--debug", action="store_true", help="show the traceback of an error (also SUBQUAD_DEBUG=1)"
        )
        module.add_arguments(command)
    return parser
