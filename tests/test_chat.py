"""Conversations and texts that go on from a saved state, on the command line."""

import io
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from types import SimpleNamespace

import pytest
import torch
from cases import CASES, each
from chat_cases import END, save_model
from PIL import Image
from visual_cases import save_visual

import subquad
import subquad_cli as cli
from subquad.modeling.state_file import read_state_file, write_state_file
from subquad_cli.chat import Chat


GREEDY = ("--greedy", "--max-new-tokens", 12)


@pytest.fixture(scope="module")
def finch(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "finch")


def run(capsys, *arguments, code=0):
    capsys.readouterr()
    assert cli.main([*map(str, arguments)]) == code
    return capsys.readouterr()


def generate(capsys, *arguments):
    return run(capsys, "generate", *arguments).out


def talk(capsys, monkeypatch, path, *lines, options=GREEDY, code=0):
    """A conversation through a pipe: what it prints, and its notes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    captured = run(capsys, "chat", path, *options, code=code)
    return captured.out, captured.err


# generate --state-in --state-out


@each(*map(CASES.get, ("rwkv6", "rwkv7_deep_embed", "avey")))  # states of one size, those that grow, and embeddings
def test_a_text_in_two_runs_is_that_of_one(case, tmp_path, capsys):
    path, state = save_model(tmp_path / "model", case), tmp_path / "state"
    arguments = ["--model", path, "--greedy", "--max-new-tokens"]
    whole = generate(capsys, "Once, ", *arguments, 20)
    first = generate(capsys, "Once, ", *arguments, 9, "--state-out", state)
    second = generate(capsys, *arguments, 11, "--state-in", state, "--state-out", tmp_path / "next")
    assert first.removesuffix("\n") + second == whole
    # A prompt follows the text.
    new = generate(capsys, " and", *arguments, 5, "--state-in", state)
    assert new == generate(capsys, first.removesuffix("\n") + " and", *arguments, 5).removeprefix(first[:-1])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "next", "state"]


def test_states_are_refused_before_any_work(finch, tmp_path, capsys, monkeypatch):
    state = tmp_path / "state"
    generate(capsys, "abc", "--model", finch, *GREEDY, "--state-out", state)
    other = save_model(tmp_path / "other", seed=1)
    arguments = ["generate", "abc", *GREEDY, "--model"]
    monkeypatch.setattr(subquad.Rwkv6ForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    line = run(capsys, *arguments, other, "--state-in", state, code=1).err
    assert re.search(r"state is a state of the model finch \(\w{12}\), but other \(\w{12}\) is loaded", line)
    assert "exists already; --force" in run(capsys, *arguments, finch, "--state-out", state, code=2).err
    line = run(capsys, *arguments, finch, "--state-out", tmp_path / "no" / "state", code=2).err
    assert "no is not a directory" in line
    content = state.read_bytes()
    changed = content[:-1] + b"\0"
    for damaged, message in ((content[:-1], "cannot be read"), (b"", "is empty"), (changed, "was changed")):
        state.write_bytes(damaged)
        assert message in run(capsys, *arguments, finch, "--state-in", state, code=1).err
    # A state of the library need not know where its text ends.
    model = CASES["rwkv6"].model(vocab_size=128)
    with torch.no_grad():
        cache = model(torch.tensor([[3, 4], [5, 6]])).cache
    for rows, message in ((cache, "holds the states of several texts"), (cache.split()[0], "where its text ends")):
        rows.save(state, subquad.identify(finch))
        assert message in run(capsys, *arguments, finch, "--state-in", state, code=1).err


# chat


def test_a_conversation_is_that_of_one_text(finch, tmp_path, capsys, monkeypatch):
    """The state has read what the template makes of the conversation, and nothing of it twice."""
    out, _ = talk(capsys, monkeypatch, finch, "Hi", "And?")
    first = generate(capsys, "Hi", "--chat", "--model", finch, *GREEDY)
    assert out.startswith(first)
    answer = first.removesuffix("\n")
    text = f"u: Hi|a:{answer}{END}u: And?|a:"
    assert out.removeprefix(first) == generate(capsys, text, "--model", finch, *GREEDY).removeprefix(text)
    # In two runs of `generate`.
    state = tmp_path / "state"
    generate(capsys, "Hi", "--chat", "--model", finch, *GREEDY, "--state-out", state)
    second = generate(capsys, "And?", "--chat", "--model", finch, *GREEDY, "--state-in", state)
    assert first + second == out


def test_an_answer_that_ends_by_itself(finch, tmp_path, capsys, monkeypatch):
    """The end of an answer may have been read, in part; what is still to be read goes on from there."""
    answer = generate(capsys, "Hi", "--chat", "--model", finch, *GREEDY)[:-1]
    for length in (1, 2, 4):
        end = answer[5 : 5 + length]  # some of its tokens are read before the last one comes
        begin = answer[: answer.index(end)]
        path = save_model(tmp_path / str(length), end=end)
        out, _ = talk(capsys, monkeypatch, path, "Hi", "And?")
        text = f"u: Hi|a:{begin}{end}u: And?|a:"
        expected = generate(capsys, text, "--model", path, *GREEDY).removeprefix(text)[:-1]
        assert out == f"{begin}\n{expected.partition(end)[0]}\n"


def test_penalties_of_every_turn(finch, capsys, monkeypatch):
    """They count the tokens of one answer."""
    options = (*GREEDY, "--presence-penalty", 9, "--penalty-decay", 0.9)
    answers = talk(capsys, monkeypatch, finch, "Hi", "/reset", "Hi", options=options)[0].splitlines()
    assert answers[0] == answers[1] != talk(capsys, monkeypatch, finch, "Hi")[0].strip()


def test_commands(finch, tmp_path, capsys, monkeypatch):
    state = tmp_path / "state"
    first, second = talk(capsys, monkeypatch, finch, "Hi", "And?")[0].splitlines()
    out, notes = talk(
        capsys, monkeypatch, finch,
        *("Hi", f"/save {state}", "/fork", "And?", "/undo", "And?", "/fork 1", "And?", "/reset", "Hi"),
        *(f"/load {state}", "And?", "/help", "/quit", "never read"),
    )  # fmt: skip
    assert out.splitlines() == [first, *[second] * 3, first, second]
    assert "This is conversation 2 now, a copy." in notes and "This is conversation 1 of 2." in notes
    assert re.search(r"Saved \d+ tokens to .*state", notes) and "which end with" in notes and "/undo  " in notes
    assert talk(capsys, monkeypatch, finch, "And?", options=(*GREEDY, "--load", state))[0] == second + "\n"
    for command, message in (
        ("/undo", "there is no earlier message"),
        ("/fork 2", "there are conversations 1 to 1, got '2'"),
        ("/save", "/save needs the name of a file"),
        (f"/save {state}", "exists already; /save"),
        ("/load", "/load needs the name of a file"),
        (f"/load {tmp_path}/no", "no cannot be read"),
        ("/image x.png", "does not read images"),
    ):
        out, notes = talk(capsys, monkeypatch, finch, command, "Hi", code=2 if "/no" not in command else 1)
        assert message in notes and out == ""
    assert talk(capsys, monkeypatch, finch, f"/save {state} --force", "Hi")[0] == first + "\n"


def test_a_conversation_in_a_file(finch, tmp_path, capsys, monkeypatch):
    """It goes on after every end of the program, from what the last command has left."""
    file = tmp_path / "diary.state"
    whole = talk(capsys, monkeypatch, finch, "Hi", "And?", "Why?")[0].splitlines()
    options = (*GREEDY, "--session", file)
    assert talk(capsys, monkeypatch, finch, "Hi", options=options)[0].splitlines() == whole[:1]
    out, notes = talk(capsys, monkeypatch, finch, "And?", "No", "/undo", options=options)
    assert out.splitlines()[0] == whole[1] and "Loaded" in notes
    assert talk(capsys, monkeypatch, finch, "Why?", options=options)[0].splitlines() == whole[2:]
    talk(capsys, monkeypatch, finch, "/reset", options=options)
    assert talk(capsys, monkeypatch, finch, "Hi", options=options)[0].splitlines() == whole[:1]
    notes = talk(capsys, monkeypatch, finch, "Hi", options=(*options, "--load", file), code=2)[1]
    assert "--load and --session both name a conversation" in notes
    out, notes = talk(capsys, monkeypatch, finch, "Hi", options=("--session", tmp_path / "no" / "diary.state"), code=2)
    assert not out and f"--session: {tmp_path / 'no'} is not a directory." in notes  # before an answer would be lost
    file.write_bytes(file.read_bytes()[:-1])
    assert "cannot be read" in talk(capsys, monkeypatch, finch, "Hi", options=options, code=1)[1]


def test_messages_of_several_lines(finch, capsys, monkeypatch):
    expected = generate(capsys, "a\nb", "--chat", "--model", finch, *GREEDY)
    for lines in (["a\\", "b"], ['"""a', 'b"""'], ['"""a\nb"""'], ["a\\", "b", "", "  "]):
        assert talk(capsys, monkeypatch, finch, *lines)[0] == expected


def test_what_a_conversation_begins_with(finch, capsys, monkeypatch):
    options = (*GREEDY, "--system", "Be good.")
    text = "s: Be good.|u: Hi|a:"
    expected = generate(capsys, text, "--model", finch, *GREEDY).removeprefix(text)
    assert talk(capsys, monkeypatch, finch, "Hi", options=options)[0] == expected


def test_a_conversation_goes_on_after_what_fails(finch, tmp_path, capsys, monkeypatch):
    """In a terminal: a message says what it was. A file may hold anything."""
    state = tmp_path / "state"
    talk(capsys, monkeypatch, finch, "Hi", f"/save {state}")
    expected = talk(capsys, monkeypatch, finch, "Hi", "And?")[0].splitlines()
    held, about = read_state_file(state)
    for name, known in (
        ("long", about | {"seen_tokens": 3 * 10**8}),
        ("bare", {name: value for name, value in about.items() if name != "dtype"}),
        ("more", about | {"text": about["text"] | {"x": 1}}),
    ):
        write_state_file(tmp_path / name, held, known)
    monkeypatch.setattr(Chat, "fork", lambda *_: {}["fork"])
    lines = iter([f"/load {tmp_path / name}" for name in ("long", "bare", "more")] + ["/fork", "Hi", "And?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    captured = run(capsys, "chat", finch, *GREEDY)
    assert captured.out.splitlines() == expected
    for message in (
        "long is the state of a text of 300,000,000 tokens",
        "bare does not hold a cache that this version can read",
        "more does not store where its text ends",
        "KeyError: 'fork'",
    ):
        assert message in captured.err


def test_models_that_do_not_chat(capsys, monkeypatch):
    assert "finch-abc does not have a chat template" in talk(capsys, monkeypatch, "finch-abc", "Hi", code=2)[1]
    assert "an encoder" in talk(capsys, monkeypatch, "avey-b-abc", "Hi", code=2)[1]


def test_pictures(tmp_path, capsys, monkeypatch):
    """A picture is read once; the next turns go on from the state."""
    model, processor = save_visual(tmp_path / "model")
    colours = {name: tmp_path / f"{name}.png" for name in ("red", "blue")}
    for name, file in colours.items():
        Image.new("RGB", (40, 30), name).save(file)
    images = [Image.open(file) for file in colours.values()]
    lines = [f"/image {colours['red']}", "What?", f"/image {colours['blue']}", "And?", "Sure?"]
    out, notes = talk(capsys, monkeypatch, tmp_path / "model", *lines)
    assert notes.count("The picture goes with the next message.") == 2
    text, answers = "", []
    for message, count in (("<image>\nWhat?", 1), ("<image>\nAnd?", 2), ("Sure?", 2)):
        text += f"User: {message}\n\nAssistant:"
        inputs = processor(images=images[:count], text=text, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.decode(tokens))
        text += f"{answers[-1]}\n\n"
    assert out == "".join(f"{answer}\n" for answer in answers)


# In a terminal.


class Terminal:
    """`subquad chat` in a pseudo-terminal, in a fork of this process, where all is imported."""

    def __init__(self, *arguments):
        self.process, self.read_end = pty.fork()
        if self.process == 0:
            code = 1
            try:
                settings = termios.tcgetattr(0)
                settings[3] &= ~termios.ECHO  # what is typed is not shown again
                termios.tcsetattr(0, termios.TCSANOW, settings)
                sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
                os.environ["TERM"] = "dumb"
                torch.set_num_threads(1)  # threads do not survive a fork
                sys.argv = ["subquad", "chat", *map(str, arguments)]
                code = cli.main()
                sys.stdout.flush()
            finally:
                os._exit(code)
        self.seen = ""
        self.wait_for("type a message")  # other packages print warnings before that
        self.wait_for("> ")

    def type(self, text):
        os.write(self.read_end, text.encode())

    def wait_for(self, text, seconds=120):
        """What is printed up to that text."""
        limit = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < limit, f"{text!r} was not printed, but {self.seen!r}"
            if select.select([self.read_end], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.read_end, 4096).decode(errors="replace")
                except OSError:  # it has ended
                    assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before.replace("\r\n", "\n")

    def end(self):
        self.type("\x04")
        _, status = os.waitpid(self.process, 0)
        os.close(self.read_end)
        return os.waitstatus_to_exitcode(status)


def ask(terminal, *messages):
    """The answers to messages, each when the next prompt is there."""
    answers = []
    for message in messages:
        terminal.type(f"{message}\n")
        answers.append(terminal.wait_for("> ").split(message)[-1].strip("\r\n"))
    return answers


@pytest.mark.thorough
def test_a_session_in_a_terminal(finch, tmp_path):
    """Type, save, quit, load and go on: the text is that of a session without interruption."""
    state = tmp_path / "state"
    first = Terminal(finch, *GREEDY)
    whole = ask(first, "Hi", "And?", "Why?")
    assert all(whole)
    ask(first, "/reset")
    assert ask(first, "Hi") == whole[:1]
    assert "Saved" in ask(first, f"/save {state}")[0]
    assert first.end() == 0

    second = Terminal(finch, *GREEDY)
    assert "No such file" in ask(second, "/load nowhere")[0]  # which does not end it
    assert "Loaded" in ask(second, f"/load {state}")[0]
    assert ask(second, "And?", "Why?") == whole[1:]
    assert second.end() == 0


def test_control_c_stops_the_answer_and_not_the_program(tmp_path):
    path = save_model(tmp_path / "model")
    terminal = Terminal(path, "--greedy", "--max-new-tokens", 10**6, "--think")
    terminal.type("Hi\n")
    assert terminal.wait_for("<think").endswith("\x1b[2m")  # thoughts are dimmed
    os.killpg(terminal.process, signal.SIGINT)
    assert "\x1b[0m" in terminal.wait_for("Stopped.")
    terminal.wait_for("> ")
    assert "Took back" in ask(terminal, "/undo")[0]
    assert terminal.end() == 0
