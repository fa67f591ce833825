"""Files appear complete or not at all, whoever writes them, and however that ends."""

import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from cases import CASES, tiny_model
from peft import get_peft_model
from rwkv_files import write_trainer_file
from safetensors.torch import load_file

from subquad import StateTuningConfig, load_time_states, save_time_states
from subquad.hub.new_files import replacing
from subquad_conversion import ConversionError, convert


FINCH = CASES["rwkv6"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "finch.pth"
    write_trainer_file(path, "rwkv6", heads=1, head_size=16, intermediate=32, vocabulary=128)
    return path


@pytest.fixture(scope="module")
def cache():
    model = FINCH.model()
    with torch.no_grad():
        return model(FINCH.ids(1, 9), use_cache=True).cache


@pytest.fixture(scope="module")
def tuned():
    return get_peft_model(tiny_model("rwkv7"), StateTuningConfig(task_type="CAUSAL_LM"))


@contextmanager
def full_disk():
    """Files of at most 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(KeyError), replacing(path) as temporary:
        temporary.write_text("new")
        raise KeyError
    with replacing(path) as temporary:
        assert temporary.name == "file.txt"
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.fast
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on files is one of POSIX")
@pytest.mark.parametrize("kind", ["state", "states.pth", "states.safetensors", "model.pth", "model.st", "directory"])
def test_a_full_disk_is_an_os_error(kind, source, cache, tuned, tmp_path):
    path = tmp_path / kind
    with full_disk(), pytest.raises(OSError, match=r"cannot be written|File too large"):
        if kind == "state":
            cache.save(path)
        elif kind.startswith("states"):
            save_time_states(tuned, path)
        else:
            convert(source, path, to="directory" if kind == "directory" else path.suffix[1:], progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["state", "states.pth", "states.st", "model.pth"])
def test_threads_that_write_one_file(kind, source, cache, tuned, tmp_path):
    """Each writes a whole file, and a reader finds one of them. A converter replaces nothing."""
    path = tmp_path / kind
    converts = kind == "model.pth"

    def write(number):
        try:
            if kind == "state":
                cache.save(path)
                type(cache).load(path, FINCH.model().config)
            elif not converts:
                save_time_states(tuned, path)
                load_file(path) if path.suffix == ".st" else torch.load(path, weights_only=True)
            else:
                convert(source, path, to="pth", progress=False)
        except ConversionError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        errors = {error for error in threads.map(write, range(4 if converts else 40)) if error is not None}
    assert errors <= ({f"{path} exists already."} if converts else set())
    assert list(tmp_path.iterdir()) == [path]
    if converts:
        assert torch.load(path, weights_only=True).keys() == torch.load(source, weights_only=True).keys()


@pytest.mark.skipif(sys.platform != "linux", reason="needs locks of directories")
def test_the_next_one_removes_what_a_killed_process_left(tmp_path):
    path = tmp_path / "file"
    code = f"""
import os
from subquad.hub.new_files import replacing
with replacing({str(path)!r}) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert ended.returncode == -signal.SIGKILL
    assert not path.exists() and len(list(tmp_path.iterdir())) == 1
    with replacing(path) as temporary:
        temporary.write_text("whole")
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]


def test_states_that_cannot_be_loaded_change_nothing(tuned, tmp_path):
    """The last layer is the one that is wrong."""
    save_time_states(tuned, tmp_path / "sound.pth")
    sound = torch.load(tmp_path / "sound.pth", weights_only=True)
    last = max(sound)
    before = {name: x.clone() for name, x in tuned.named_parameters() if "state_tuning" in name}
    for wrong, message in (
        (torch.full_like(sound[last], float("nan")), "holds NaN or infinite numbers"),
        (torch.full_like(sound[last], float("inf")), "holds NaN or infinite numbers"),
        (sound[last].to("meta"), "is not a tensor of floating point numbers"),
        (sound[last].to(torch.complex64), "is not a tensor of floating point numbers"),
        (sound[last].to_sparse(), "is not a tensor of floating point numbers"),
        (3, "is not a tensor of floating point numbers"),
    ):
        torch.save({name: torch.ones_like(x) for name, x in sound.items()} | {last: wrong}, tmp_path / "wrong.pth")
        with pytest.raises(ValueError, match=message):
            load_time_states(tuned, tmp_path / "wrong.pth")
        assert all(torch.equal(x, before[name]) for name, x in tuned.named_parameters() if name in before)
    torch.save(sound | {f"model.{last}": sound[last]}, tmp_path / "wrong.pth")
    with pytest.raises(ValueError, match="has two states of layer"):
        load_time_states(tuned, tmp_path / "wrong.pth")
