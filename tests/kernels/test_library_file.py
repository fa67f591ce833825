"""How the C library is made, where it is kept, and what is not loaded."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_native import needs_library

from subquad_kernels import linear
from subquad_kernels.c import native
from subquad_native import compiling


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a process that has not asked for the library, with an empty cache, which this is the folder of."""
    monkeypatch.setattr(native._COMPILED, "_found", None)
    monkeypatch.setattr(compiling, "_kept", [])
    monkeypatch.delenv("SUBQUAD_NATIVE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SUBQUAD_NATIVE_FLAGS", "-O0")  # compiles in a fraction of the time
    monkeypatch.setattr(compiling, "_PATIENCE", 1000)
    return tmp_path / "cache" / "subquad"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A compiled library."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("SUBQUAD_NATIVE_FLAGS", "-O0")
        patch.setattr(compiling, "_PATIENCE", 1000)
        assert native._COMPILED.compile()
    return next(folder.glob("subquad/*.so"))


@pytest.fixture
def quick(made, fresh, tmp_path, monkeypatch):
    """As `fresh`, with a compiler that copies what another one has made."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\nfor to; do :; done\ncp {made} "$to"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    return fresh


@needs_library
def test_it_is_compiled_once_and_when_it_is_needed(fresh, monkeypatch):
    compiled, run = [], compiling._run
    monkeypatch.setattr(compiling, "_run", lambda command, *to: compiled.append("-o" in command) or run(command, *to))
    x, weight = torch.randn(1, 128), torch.randn(256, 128)
    with torch.no_grad():
        linear(x, weight[:64])
        assert native._COMPILED._found is None
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    with ThreadPoolExecutor(2) as threads:
        assert all(found[0] for found in threads.map(lambda _: native.explain(), range(2)))
    (file,) = fresh.iterdir()
    assert file.name.startswith("steps-") and file.suffix == ".so"
    # Another process finds it, unless its CPU is another one.
    native._COMPILED._found = None
    assert native.library() and compiled == [False, True, False]
    monkeypatch.setattr(compiling, "_cpu", lambda: "another")
    native._COMPILED._found = None
    assert native.library() and len(list(fresh.iterdir())) == 2


@needs_library
def test_a_cache_that_cannot_be_written(quick, tmp_path, monkeypatch):
    quick.parent.write_text("a file")
    monkeypatch.setattr(compiling.tempfile, "tempdir", str(tmp_path))
    assert native.library()
    (folder,) = compiling._kept
    folder.cleanup()
    assert set(tmp_path.iterdir()) == {quick.parent, tmp_path / "compiler"}


@needs_library
@pytest.mark.parametrize("damage", ["shortened", "empty", "changed"])
def test_a_damaged_library_is_made_again(damage, quick):
    """Reading what a shortened file does not hold would end the process."""
    assert native.library()
    (file,) = quick.iterdir()
    whole = file.read_bytes()
    file.unlink()  # the library of this process stays as it is
    middle = len(whole) // 2
    changed = {
        "shortened": whole[:middle],
        "empty": b"",
        "changed": whole[:middle] + b"\0" * 99 + whole[middle + 99 :],
    }
    file.write_bytes(changed[damage])
    file.chmod(0o700)
    native._COMPILED._found = None
    assert native.library()
    (file,) = quick.iterdir()
    assert file.read_bytes() == whole


@needs_library
@pytest.mark.parametrize("who", ["another user", "everyone"])
def test_a_folder_that_others_write_to(who, quick, tmp_path, monkeypatch):
    """What is there is not run, and nothing is put there."""
    assert native.library()
    native._COMPILED._found = None
    monkeypatch.setattr(compiling.tempfile, "tempdir", str(tmp_path))
    before, user = list(quick.iterdir()), os.geteuid()
    if who == "everyone":
        quick.chmod(0o777)
    elif user == 0:
        os.chown(quick, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    if who == "everyone" or user == 0:
        loaded, why = native.explain()
        assert loaded and f"not kept: {quick}" in why and list(Path(compiling._kept[0].name).iterdir())
    else:  # nor can this process be another user elsewhere
        assert "belongs to another user" in native.explain()[1]
    assert list(quick.iterdir()) == before


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="sends a signal to a group of processes")
def test_a_signal_while_it_is_compiled(quick, tmp_path):
    """The next process makes it, and removes what was left when it is old."""
    compiler = tmp_path / "slow"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\ntouch {tmp_path}/began\nsleep 60\n')
    compiler.chmod(0o700)
    code = "from subquad_kernels.c import native; native.library()"
    environment = os.environ | {"CC": str(compiler), "PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)
    while not (tmp_path / "began").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    (left,) = quick.iterdir()
    assert native.library() and left in quick.iterdir()  # it may be the work of a process that is alive
    os.utime(left, (0, 0))
    (quick / "tmpabc.tmp").write_bytes(b"of a former version")
    os.utime(quick / "tmpabc.tmp", (0, 0))
    native._COMPILED._found = None
    assert native.library()
    (file,) = quick.iterdir()
    assert file.suffix == ".so"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 0", "no folder for it can be used: .*cannot open shared object file"),
        ('for last; do :; done; echo > "$last"', "no folder for it can be used: .*file too short"),
        ("echo warning >&2; echo 'an error: no such thing' >&2; exit 3", "compiler failed with 3: an error: no such"),
        ("exec sleep 60", "compiler took more than 0.2 seconds"),
    ],
)
def test_a_compiler_that_does_not_work(script, why, fresh, tmp_path, monkeypatch, recwarn):
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\n{script}\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    run = compiling._run
    monkeypatch.setattr(compiling, "_PATIENCE", 0.2 if "sleep" in script else 1000)
    monkeypatch.setattr(compiling, "_run", lambda command, *to: "1" if "--version" in command else run(command, *to))
    x, weight = torch.randn(1, 128), torch.randn(256, 128)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    library, found = native.explain()
    assert library is None and re.search(why, found), found
    assert not list(fresh.iterdir())
    waited = [each for each in recwarn if "SUBQUAD_NATIVE=0 saves the time" in str(each.message)]
    assert len(waited) == ("sleep" in script)


def test_it_can_be_turned_off(fresh, monkeypatch):
    monkeypatch.setenv("SUBQUAD_NATIVE", "0")
    assert native.explain() == (None, "SUBQUAD_NATIVE=0")


def test_a_wrong_setting_is_an_error(fresh, monkeypatch):
    monkeypatch.setenv("SUBQUAD_NATIVE", "off")
    with pytest.raises(ValueError, match="SUBQUAD_NATIVE must be 0 or 1, got 'off'"):
        native.library()


def test_no_compiler(fresh, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native.library() is None and "there is no C compiler" in native.explain()[1]


def test_code_without_the_source(fresh, monkeypatch, tmp_path):
    """As in a model repository, which has Python files only."""
    monkeypatch.setattr(native._COMPILED, "sources", (tmp_path / "steps.c",))
    assert native.explain() == (None, "its source is not part of this copy of the code")
