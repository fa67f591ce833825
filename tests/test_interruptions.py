"""
Interrupted at any point, by an exception as Ctrl-C raises one or by a signal that ends the process: nothing is
half-written, and the next call is right.
"""

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from cases import CASES, GREEDY, tiny_model
from limited import limited, only_on_linux
from peft import get_peft_model
from rwkv_files import write_trainer_file

from subquad import PrefixCache, StateTuningConfig, load_time_states, save_time_states
from subquad.hub.new_files import PARTIAL
from subquad_conversion import convert


POINTS = int(os.environ.get("SUBQUAD_DAMAGES", "12")) // 2  # at which each work is interrupted
FINCH = CASES["rwkv6"]
TORCH = os.path.dirname(torch.__file__)


class Interrupted(BaseException):
    """Like a KeyboardInterrupt, but nobody expects it."""


class Interruption:
    """
    Counts the calls of functions in a block; at the call of that number it is raised, or kills the process. Those of
    torch do not count: its context managers do not all survive an exception in their own code.
    """

    def __init__(self, number=None, kill=False):
        self.number, self.kill, self.calls = number, kill, 0

    def __enter__(self):
        sys.setprofile(self.count)
        return self

    def __exit__(self, kind, error, trace):
        sys.setprofile(None)
        return kind is Interrupted

    def count(self, frame, event, argument):
        if event != "call" or frame.f_code.co_filename.startswith(TORCH):
            return
        self.calls += 1
        if self.calls == self.number:
            sys.setprofile(None)
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Interrupted


class Generate:
    """Texts with and without a prefix cache, whose files may be there or not."""

    def __init__(self, path: Path):
        self.path, self.model, self.ids = path, FINCH.model(), FINCH.ids(1, 30)
        self.options = {"max_new_tokens": 4, **GREEDY}
        self.expected = self.model.generate(self.ids, **self.options)
        self.prefixes = PrefixCache(directory=path)

    def work(self):
        self.model.generate(self.ids, prefix_cache=self.prefixes, **self.options)
        self.prefixes.flush()
        self.prefixes.clear()

    def check(self):
        assert torch.equal(self.model.generate(self.ids, **self.options), self.expected)
        for prefixes in (self.prefixes, PrefixCache(directory=self.path)):
            assert torch.equal(self.model.generate(self.ids, prefix_cache=prefixes, **self.options), self.expected)


class Save:
    """A state that replaces another one."""

    def __init__(self, path: Path):
        self.path, self.model = path / "state", FINCH.model()
        with torch.no_grad():
            self.caches = [self.model(FINCH.ids(1, n), use_cache=True).cache for n in (9, 8)]
        self.caches[1].save(self.path)

    def work(self):
        self.caches[0].save(self.path)

    def check(self):
        cache = type(self.caches[0]).load(self.path, self.model.config)
        states = next(each for each in self.caches if each.get_seq_length() == cache.get_seq_length()).named_states()
        assert all(torch.equal(x, states[name]) for name, x in cache.named_states().items())
        self.work()


class SaveTuned:
    """Trained first states that replace others."""

    def __init__(self, path: Path):
        self.path = path / "states.pth"
        self.model = get_peft_model(tiny_model("rwkv7"), StateTuningConfig(task_type="CAUSAL_LM"))
        self.work()

    def work(self):
        save_time_states(self.model, self.path)

    def check(self):
        load_time_states(self.model, self.path)
        self.work()


class Convert:
    """A model that is not there before."""

    def __init__(self, path: Path, to: str = "directory"):
        self.source, self.path, self.to = path.parent / "source.pth", path / f"model.{to}", to
        write_trainer_file(self.source, "rwkv6", heads=1, head_size=16, intermediate=32, vocabulary=128)
        self.work()
        convert(self.path, path.parent / "expected", progress=False)
        self.expected = (path.parent / "expected" / "model.safetensors").read_bytes()
        self.check()

    def work(self):
        convert(self.source, self.path, to=self.to, progress=False)

    def check(self):
        if not self.path.exists():
            self.work()
        again = self.path.parent.parent / "again"
        convert(self.path, again, progress=False)
        assert (again / "model.safetensors").read_bytes() == self.expected
        shutil.rmtree(again)
        shutil.rmtree(self.path) if self.path.is_dir() else self.path.unlink()


class ConvertFile(Convert):
    """A file of weights."""

    def __init__(self, path: Path):
        super().__init__(path, "st")


@only_on_linux
@pytest.mark.parametrize(
    ("kind", "kill"),
    [
        *((kind, kill) for kind in (Generate, Save, Convert) for kill in (False, True)),
        (SaveTuned, False),
        (ConvertFile, True),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "signal" if x else "exception",
)
def test_interruptions(kind, kill, tmp_path):
    """What is left of a work that was interrupted is removed by the next one that writes there."""
    path = tmp_path / "work"
    path.mkdir()
    each, chance = kind(path), random.Random(kill)
    each.work()
    each.check()
    with Interruption() as counted:
        each.work()
    each.check()
    for _ in range(POINTS):
        number = chance.randrange(1, counted.calls + 1)

        def work(number=number):
            with Interruption(number, kill):
                each.work()

        if kill:
            with pytest.raises(AssertionError, match="ended by SIGKILL"):
                limited(work)
        else:
            work()
        each.check()
        each.work()
        assert not [file.name for file in path.rglob("*") if PARTIAL.fullmatch(file.name)], number
        each.check()
