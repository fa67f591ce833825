"""The operators as a kernel repository for the Hub: what is built, and what loads it."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import DEVICE, assert_same_results, triton
from torch import nn

import subquad_kernels
from subquad_kernels import layers, wkv


ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "kernels" / "torch-ext" / "subquad_kernels"
LOADER = SOURCE.with_name("subquad_native")
BUILD = ROOT / "kernels" / "build_repository.py"
VARIANTS = ("torch-cpu", "torch-cuda", "torch-rocm")


def build(directory):
    subprocess.run([sys.executable, BUILD, directory], check=True)
    return directory


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return build(tmp_path_factory.mktemp("kernels") / "repository")


def files_of(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def code_of(directory):
    return {name: content for name, content in files_of(directory).items() if name.endswith((".py", ".c", ".h"))}


def test_every_variant_is_the_package(repository, tmp_path):
    sources = code_of(SOURCE) | {f"subquad_native/{name}": code for name, code in code_of(LOADER).items()}
    assert {"c/products.c", "c/vectors.h", "subquad_native/compiling.py"} < sources.keys()
    absolute, relative = b"from subquad_native.", b"from ..subquad_native."
    sources["c/native.py"] = sources["c/native.py"].replace(absolute, relative)
    assert relative in sources["c/native.py"] and not any(absolute in code for code in sources.values())
    ids = []
    for name in VARIANTS:
        files = files_of(repository / "build" / name)
        metadata = json.loads(files.pop("metadata.json"))
        assert files == sources
        assert metadata["backend"] == {"type": name.removeprefix("torch-")}
        assert metadata["digest"]["files"].keys() == sources.keys()
        ids.append(metadata["id"])
    assert len(set(ids)) == 3 and all(re.fullmatch(r"_subquad_kernels_(cpu|cuda|rocm)_[0-9a-f]{7}", x) for x in ids)
    assert sorted(path.name for path in repository.iterdir()) == [
        "LICENSE",
        "NOTICE",
        "README.md",
        "build",
        "build.toml",
    ]
    assert sorted(path.name for path in (repository / "build").iterdir()) == sorted(VARIANTS)
    assert files_of(build(tmp_path / "again")) == files_of(repository)


def test_it_writes_over_nothing(repository):
    before = files_of(repository)
    done = subprocess.run([sys.executable, BUILD, repository], capture_output=True, text=True)
    assert done.returncode != 0 and "FileExistsError" in done.stderr
    assert files_of(repository) == before


def test_layers():
    """`kernels` takes a layer whose forward has the signature of what it replaces, and that has no state."""
    for name in subquad_kernels.__all__:
        layer, operator = getattr(layers, name), getattr(subquad_kernels, name)
        assert layer.__name__ == name and layer.__init__ is nn.Module.__init__ and layer is getattr(layers, name)
        parameters = list(inspect.signature(layer.forward).parameters.values())
        assert parameters[1:] == list(inspect.signature(operator).parameters.values())
    with pytest.raises(AttributeError, match="nothing"):
        layers.nothing


# --- with the package `kernels` ---


@pytest.fixture
def loaded(repository):
    # Not the folder of this name in the root of the source tree.
    return pytest.importorskip("kernels.load").get_local_kernel(repository)


def wkv_inputs():
    torch.manual_seed(0)
    r, k, v = torch.randn(3, 2, 20, 2, 8)
    inputs = {"r": r, "k": k, "v": v, "log_w": -torch.rand(2, 20, 2, 8), "u": torch.randn(2, 8)}
    return {name: x.to(DEVICE).requires_grad_() for name, x in inputs.items()}


def test_kernels_accepts_the_files(repository):
    rust = pytest.importorskip("kernels._rust")
    backends = {str(backend).lower() for backend in rust.Build.open(repository).general.backends}
    assert {f"torch-{backend}" for backend in backends} == set(VARIANTS)
    for name in VARIANTS:
        variant = repository / "build" / name
        digest = rust.Metadata.read_from_file(variant / "metadata.json").digest
        digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant))


@pytest.mark.parametrize("backend", ["eager", triton])
def test_an_operator_of_the_repository(backend, loaded):
    """It is one of its own in torch, beside that of the package, and gives the same."""
    variant = "cuda" if torch.version.cuda else "rocm" if torch.version.hip else "cpu"
    assert loaded.__name__.startswith(f"_subquad_kernels_{variant}_")
    assert hasattr(getattr(torch.ops, loaded.__name__), "wkv") and hasattr(torch.ops.subquad_kernels, "wkv")
    inputs, expected = wkv_inputs(), wkv_inputs()
    found = loaded.wkv(**inputs, backend=backend)
    result = wkv(**expected, backend=backend)
    assert_same_results(found, inputs, result, expected, 1e-6)


def test_the_readme_runs_as_printed(repository, loaded, tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "kernels" / "README.md").read_text(), re.DOTALL)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "kernels").symlink_to(repository)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    assert names["out"].shape == (1, 100, 4, 64)


# The functions of a model become replaceable when they are imported.
USE_KERNELS = """
import functools
import sys
from pathlib import Path

import torch
import transformers.utils.import_utils
from kernels import LocalLayerRepository, get_local_kernel, register_kernel_mapping

# The version of `kernels` that a new release of transformers asks for may not be out yet.
transformers.utils.import_utils.is_kernels_available.__wrapped__.__defaults__ = ("0.17", "1")

import subquad
from cases import CAUSAL, ENCODERS, lm_class, random_ids, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

called = set()


def counted(operator):
    @functools.wraps(operator)
    def call(*args, **kwargs):
        called.add(operator.__name__)
        return operator(*args, **kwargs)

    return call


device = "cuda" if torch.cuda.is_available() else "cpu"
repository = Path(sys.argv[1])
loaded = get_local_kernel(repository)
for name in loaded.__all__:
    setattr(loaded, name, counted(getattr(loaded, name)))
layers = {name: {device: LocalLayerRepository(repository, layer_name=name)} for name in loaded.__all__}
ids = random_ids(2, 40).to(device)
expected = {}
for model_type in CAUSAL | ENCODERS:
    tiny_model(model_type).save_pretrained(repository.parent / model_type)
    auto_class = getattr(transformers, lm_class(model_type))
    load = functools.partial(auto_class.from_pretrained, repository.parent / model_type, device_map=device)
    expected[load] = model_type, load()(ids).logits
assert not called
# From here on, because the operators are replaced for all models that share a modeling file.
register_kernel_mapping(layers)
for load, (model_type, logits) in expected.items():
    model = load(use_kernels=True)
    torch.testing.assert_close(model(ids).logits, logits)
    functions = [function for x in model.modules() for function in getattr(x, "_kernel_funcs", {}).values()]
    assert model.use_kernels and called == {function.kernel_layer_name for function in functions}
    model(ids).logits.sum().backward()
    if model_type in CAUSAL:
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    print(model_type, *sorted(called))
    called.clear()
"""


@pytest.mark.thorough
def test_models_take_operators_from_it(repository):
    pytest.importorskip("kernels.load")
    command = [sys.executable, "-c", USE_KERNELS, repository]
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "raven slot_memory slot_routing" in done.stdout
