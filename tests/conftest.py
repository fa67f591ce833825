import functools
import gc
import importlib.util
import os
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch


# Tests never look for anything on a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Without a GPU the kernels are interpreted. Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # torch keeps every seed for a GPU that may come, with the stack of its caller, which takes milliseconds.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "conversion")]
sys.path += [str(ROOT), str(ROOT / "examples")]  # `examples.evaluation`, and the other examples
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from interpreter import repair

    repair()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the cases that `quick_cases` does not name as thorough."""
    for item in items:
        quick = item.get_closest_marker("quick_cases")
        if quick and not any(fnmatch(item.callspec.id, pattern) for pattern in quick.args):
            item.add_marker("thorough")


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage():
    """Python would search all that has been imported for garbage, again and again, half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def default_device():
    """The models' tests run on another device if SUBQUAD_TEST_DEVICE names one, for example "cuda"."""
    if "SUBQUAD_TEST_DEVICE" not in os.environ:
        yield
        return
    torch.set_default_device(os.environ["SUBQUAD_TEST_DEVICE"])
    yield
    torch.set_default_device(None)


@pytest.fixture
def any_peft(monkeypatch):
    """transformers 5.24 refuses every PEFT before 0.22, which was not released with it. The refusal is turned off."""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.20")


@pytest.fixture
def run_task(monkeypatch, tmp_path):
    """Calls a task of `examples/evaluation`: its name, and options."""
    from evaluation_cases import run

    return functools.partial(run, monkeypatch, tmp_path)


@pytest.fixture(autouse=True)
def gpu_works_afterwards(request):
    """Ends the process after a test that broke the GPU's context, in which every later test would fail too."""
    yield
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except torch.AcceleratorError as error:
            print(f"{request.node.nodeid}: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)


def pytest_unconfigure():
    """Frozen objects are not released at exit, and compiled modules would report them as leaked."""
    gc.unfreeze()
