"""`subquad chat`"""

import os
import signal
import sys
import threading
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from subquad.hub.foreign_files import one_line, reading

from . import start
from .answers import ChatFormat, character_streamer
from .arguments import add_dtype_and_device, add_sampling, positive_int, sampling_options
from .common import (
    UsageError,
    check_new_file,
    find_auto_class,
    find_model,
    load_reader,
    read_image,
    read_session,
    signals_raise,
    usable_device,
)


if TYPE_CHECKING:
    from subquad.states.session import Session

SUMMARY = "talk to a model in a terminal"
DESCRIPTION = """\
Talk to a model that has a chat template. The conversation is kept as a state: no earlier turn is read again, and the
state can be saved, loaded and copied.

A message is a line. A line that ends in a backslash continues in the next one, and a message that begins with three
quotation marks continues until the next three. Ctrl-C stops an answer, Ctrl-D leaves. If the input is not a terminal,
each of its messages is answered. Only answers go to standard output.

commands:
  /save FILE [--force]   save the state of the conversation
  /load FILE             continue with a saved state
  /fork [N]              copy the conversation and continue in the copy; with N, go back to conversation N
  /undo                  take back the last message and its answer
  /reset                 start a new conversation
  /image FILE            put a picture before the next message
  /help, /quit

examples:
  subquad chat ./goose-0.4b --think
  subquad chat ./goose-0.4b --load monday.state
  subquad chat ./goose-0.4b --session diary.state
  echo "Why is the sky blue?" | subquad chat ./finch-1b6 --greedy
"""

COMMANDS = ("/save", "/load", "/fork", "/undo", "/reset", "/image", "/help", "/quit")
BARE_COMMANDS = ("/undo", "/reset", "/help", "/quit")
QUOTES = '"""'
# The states before the last messages are kept for /undo, up to this total size.
UNDO_BYTES = 2**30
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
THOUGHT, ANSWER = "<think", "</think>"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model directory, the name of an embedded model, or a model on the Hub")
    add("--system", metavar="TEXT", help="the beginning of the conversation, such as a role for the model")
    add("--load", metavar="FILE", help="continue with a saved state")
    add(
        "--session",
        metavar="FILE",
        help="keep the conversation in this file: it continues what is there, and is saved after every message",
    )
    add(
        "--prefix-cache",
        metavar="DIRECTORY",
        help="keep states of text beginnings in this directory, so that a long --system is read only once",
    )
    add(
        "--max-new-tokens",
        type=positive_int,
        default=1024,
        metavar="N",
        help="maximum number of tokens of an answer (default: 1024)",
    )
    add_sampling(parser)
    add(
        "--think",
        action=BooleanOptionalAction,
        help="for a model that can think before it answers: do so and show the thoughts too, or do not",
    )
    add_dtype_and_device(parser)


@dataclass
class Conversation:
    """A session and, for /undo, the sessions before the last messages."""

    session: "Session"
    earlier: "list[Session]" = field(default_factory=list)

    def remember(self) -> None:
        """Keeps the session as it is now."""
        self.earlier.append(self.session.copy())
        while len(self.earlier) > 1 and sum(each.cache.nbytes for each in self.earlier) > UNDO_BYTES:
            del self.earlier[0]

    def copy(self) -> "Conversation":
        # The earlier sessions are never changed, so they need no copies.
        return Conversation(self.session.copy(), list(self.earlier))


class Chat:
    """The state of `subquad chat`. Methods named like commands implement these."""

    def __init__(self, args: Namespace, model, reader, turns: ChatFormat, identity):
        self.args, self.model, self.turns, self.identity = args, model, turns, identity
        self.reads_images = reader is not turns.tokenizer
        self.options = sampling_options(args) | {"max_new_tokens": args.max_new_tokens}
        self.images: list[str] = []
        self.conversations = [self.new_conversation()]
        self.current = 0
        self.prefixes = None
        if args.prefix_cache is not None:
            from subquad.states.prefix_cache import PrefixCache

            self.prefixes = PrefixCache(directory=args.prefix_cache)

    @property
    def conversation(self) -> Conversation:
        return self.conversations[self.current]

    def new_conversation(self) -> Conversation:
        from subquad.states.session import Session

        return Conversation(Session(self.model.new_cache()))

    def save(self, argument: str) -> None:
        file, _, option = argument.partition(" --force")
        if not file or option:
            raise UsageError("/save needs the name of a file.")
        if os.path.exists(file) and file == argument:
            raise UsageError(f"{file} exists already; /save {file} --force replaces it.")
        session = self.conversation.session
        with signals_raise():
            session.save(file, self.identity)
        note(f"Saved {session.cache.get_seq_length():,} tokens to {file}.")

    def keep(self) -> None:
        """Saves the conversation as it is now, if there is a file for it."""
        if self.args.session is not None:
            with signals_raise():
                self.conversation.session.save(self.args.session, self.identity)

    def load(self, argument: str) -> None:
        from subquad.states.session import SavedSession

        if not argument:
            raise UsageError("/load needs the name of a file.")
        self.restore(SavedSession.read(argument, self.identity))

    def restore(self, saved) -> None:
        """Continues with a session from a file."""
        session = saved.restore(self.model)
        self.conversations[self.current] = Conversation(session)
        note(f"Loaded {saved.tokens:,} tokens, which end with {saved.text['end'][-60:]!r}.")
        if saved.dtype not in ("None", kind := str(self.model.dtype).removeprefix("torch.")):
            note(f"They were read by a model in {saved.dtype}, and this one is in {kind}: answers may differ.")

    def fork(self, argument: str) -> None:
        count = len(self.conversations)
        if not argument:
            self.conversations.append(self.conversation.copy())
            self.current = count
            note(f"This is conversation {count + 1} now, a copy. /fork {self.current} goes back to the other one.")
        elif argument.isdecimal() and 1 <= int(argument) <= count:
            self.current = int(argument) - 1
            note(f"This is conversation {argument} of {count}.")
        else:
            raise UsageError(f"/fork: there are conversations 1 to {count}, got {argument!r}.")

    def undo(self, argument: str) -> None:
        if not self.conversation.earlier:
            raise UsageError("/undo: there is no earlier message whose state was kept.")
        self.conversation.session = self.conversation.earlier.pop()
        note("Took back the last message and its answer.")

    def reset(self, argument: str) -> None:
        self.conversations[self.current] = self.new_conversation()
        note("This is a new conversation.")

    def image(self, argument: str) -> None:
        if not self.reads_images:
            raise UsageError(f"{self.args.model} does not read images.")
        read_image("/image", argument)
        self.images.append(argument)
        note("The picture goes with the next message.")

    def help(self, argument: str) -> None:
        note(DESCRIPTION.split("\n\n", 1)[1].split("examples:")[0].rstrip())

    def answer(self, message: str) -> None:
        """Prints the answer to a message."""
        session = self.conversation.session
        with reading(self.args.model, "the message"):
            after = self.turns.after(session.turns, session.rest, session.ended)
            inputs = self.turns.encode(message, self.images, after, self.args.system)
        ids = inputs.pop("input_ids")[0].tolist()
        options = self.options | {name: x.to(self.model.device) for name, x in inputs.items()}
        self.conversation.remember()
        tokenizer, stop = self.turns.tokenizer, threading.Event()
        streamer = AnswerStreamer(tokenizer, self.turns, sys.stdout.isatty())
        try:
            with interrupts(stop):
                if self.prefixes is not None and not session.cache.get_seq_length() and not self.images:
                    session.cache = self.prefixes.read(self.model, ids[:-1])
                    ids = ids[-1:]
                new = session.generate(
                    self.model, ids, streamer=streamer, stopping_criteria=[until(streamer, stop)], **options
                )
        except BaseException as error:  # the state has read a part of the message
            streamer.finish()
            self.conversation.session = self.conversation.earlier.pop()
            if not isinstance(error, KeyboardInterrupt):
                raise
            note("Stopped; the message and its answer are taken back.")
            return
        streamer.finish()
        answer = self.turns.shown(session.end_answer(tokenizer, new, self.turns.end))
        session.end = f"{message}\n{answer}"
        self.images = []
        if stop.is_set():
            note("Stopped.")


class AnswerStreamer:
    """Prints an answer as it is generated, with dimmed thoughts on a terminal."""

    def __init__(self, tokenizer, turns: ChatFormat, in_terminal: bool):
        self.thinks, self.in_terminal, self.held = False, in_terminal, ""
        self.inner = character_streamer(
            tokenizer, True, turns.opening, turns.end, completes=turns.completes, write=self.write
        )

    @property
    def ended(self) -> bool:
        return self.inner.ended

    def put(self, value) -> None:
        self.inner.put(value)

    def end(self) -> None:
        self.inner.end()

    def write(self, text: str) -> None:
        if not self.in_terminal:
            print(text, end="", flush=True)
            return
        text, self.held = self.held + text, ""
        while text:
            mark = ANSWER if self.thinks else THOUGHT
            before, found, text = text.partition(mark)
            if found:
                before += mark + PLAIN if self.thinks else DIM + mark
                self.thinks = not self.thinks
            else:  # the last characters may be the first ones of the mark
                begun = max(n for n in range(len(mark)) if before.endswith(mark[:n]))
                before, self.held = before[: len(before) - begun], before[len(before) - begun :]
            print(before, end="", flush=True)

    def finish(self) -> None:
        """Ends the line."""
        print(self.held + (PLAIN if self.thinks else ""), flush=True)


def until(streamer: AnswerStreamer, stop: threading.Event) -> Callable:
    """The stopping criterion of an answer: the text that ends a turn, or an interrupt."""
    import torch

    def criterion(input_ids, scores, **kwargs):
        done = streamer.ended or stop.is_set()
        return torch.full((len(input_ids),), done, device=input_ids.device, dtype=torch.bool)

    return criterion


@contextmanager
def interrupts(stop: threading.Event) -> Iterator[None]:
    """Lets the first Ctrl-C set `stop`, and the second raise KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return

    def handle(number, frame):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def note(text: str) -> None:
    """Prints a message that is not an answer."""
    print(text, file=sys.stderr, flush=True)


def read_message(in_terminal: bool) -> str | None:
    """The next message, or None at the end of the input."""
    lines, quoted = [], False
    while True:
        if in_terminal:
            try:
                line = input("… " if lines else "> ")
            except EOFError:
                print()
                return None
        else:
            line = sys.stdin.readline()
            if not line:
                return "\n".join(lines) or None
            line = line.removesuffix("\n")
        if not lines and line.startswith(QUOTES):
            quoted, line = True, line.removeprefix(QUOTES)
        if quoted and line.endswith(QUOTES):
            return "\n".join([*lines, line.removesuffix(QUOTES)])
        if not quoted and not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line if quoted else line.removesuffix("\\"))


def run(args: Namespace) -> None:
    sampling_options(args)  # its checks come first
    if args.load is not None and args.session is not None:
        raise UsageError("--load and --session both name a conversation to continue.")
    if args.session is not None:
        check_new_file("--session", args.session, force=True)
    path = find_model(args.model)
    start.begin(args, path)
    kept = args.session if args.session is not None and os.path.exists(args.session) else None
    identity, saved = read_session(args.model, path, args.load or kept, needed=True)

    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    auto_class = find_auto_class(args.model, path, images=False)
    images = auto_class == "AutoModelForImageTextToText"
    device = usable_device(args.device)
    reader = load_reader(transformers.AutoProcessor if images else transformers.AutoTokenizer, args.model, path)
    with reading(args.model, "the chat template"):
        turns = ChatFormat(reader, args.model, args.think)
    with reading(args.model, "the model"):
        model = getattr(transformers, auto_class).from_pretrained(path, dtype=args.dtype, trust_remote_code=False)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    chat = Chat(args, model.to(device).eval(), reader, turns, identity)
    start.ready(args)
    if saved is not None:
        chat.restore(saved)
        if args.system is not None and saved.text["turns"]:
            note("--system is for a new conversation: it is read after /reset.")
    in_terminal = sys.stdin.isatty()
    if in_terminal:
        with suppress(ImportError):  # not on Windows
            import readline  # noqa: F401, which lets `input` edit lines and remember them
        note(f"{args.model}: type a message, or /help.")
    while True:
        try:
            message = read_message(in_terminal)
            if message is None or message.strip() == "/quit":
                return
            command, _, argument = message.strip().partition(" ")
            if command in BARE_COMMANDS and argument.strip():
                raise UsageError(f"{command} is a command of one word, got {argument.strip()!r} after it.")
            if command in COMMANDS:
                getattr(chat, command[1:])(argument.strip())
                chat.keep()
            elif message.strip():
                chat.answer(message)
                chat.keep()
        except KeyboardInterrupt:
            if not in_terminal:
                raise
            note("")  # at the prompt: the line is dropped
        except Exception as error:  # one failed command must not end a conversation
            if not in_terminal or isinstance(error, BrokenPipeError):
                raise
            note(one_line(error))
