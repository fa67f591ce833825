"""The code of a model repository: few files that hold what the model uses, and nothing else."""

import ast
import json
import subprocess
import sys
import textwrap

import pytest
from test_walls import BUILT_ON

from subquad.hub.export import repository_code
from subquad.models import REGISTRY
from subquad_tokenizers import merging
from subquad_tokenizers.merging import merge


KINDS = ("configuration", "modeling", "processing")
# The maximum number of lines of Python in a repository, without those of its tokenizer.
LIMITS = {
    "rwkv5": 5950,
    "rwkv6": 6150,
    "rwkv7": 6350,
    "rwkv7_deep_embed": 7100,
    "avey": 5400,
    "avey-b": 3700,
    "raven": 6800,
    "gecko": 8550,
    "visual_rwkv": 8850,
    "rwkv7_embedding": 5850,
    "rwkv7_reranker": 6050,
}
each_architecture = pytest.mark.parametrize("architecture", REGISTRY.values(), ids=list(REGISTRY))


def modules_of(architecture) -> list[str]:
    kinds = KINDS if architecture.processor else KINDS[:2]
    return [f"{architecture.package}.{kind}_{architecture.folder}" for kind in kinds]


def code_of(architecture) -> dict[str, str]:
    return repository_code(*modules_of(architecture))


@pytest.mark.fast
@each_architecture
def test_six_files_at_most(architecture):
    kinds = [*(KINDS if architecture.processor else KINDS[:2]), "kernels", "triton"]
    files = code_of(architecture)
    assert sorted(files) == sorted(f"{kind}_{architecture.folder}.py" for kind in kinds)
    for name in ("tokenization_rwkv_world", "tokenization_bytes"):
        tokenizer = merge([f"subquad_tokenizers.{name}"])
        assert list(tokenizer) == [f"{name}.py"]
        assert len({**files, **tokenizer}) <= 6


READ = {ast.Name: "id", ast.alias: "name", ast.Constant: "value"}


@pytest.mark.fast
@each_architecture
def test_every_definition_is_used(architecture):
    """Other than those of the modules that the repository names, which are kept whole."""
    whole = {name for module in modules_of(architecture) for name in merging.load(module).defining}
    places = [(file, node) for file, text in code_of(architecture).items() for node in ast.parse(text).body]
    used: dict[str, set] = {}
    for file, node in places:
        # Of names, imports and annotations in quotation marks.
        found = (getattr(each, field) for each in ast.walk(node) if (field := READ.get(type(each))))
        names = {name for name in found if isinstance(name, str)}
        for name in names:
            used.setdefault(name, set()).add((file, node))
    for file, node in places:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in whole and node.name != "_":
            assert used.get(node.name, set()) - {(file, node)}, f"{file}: nothing uses {node.name}"


@pytest.mark.fast
@each_architecture
def test_nothing_of_another_architecture(architecture):
    built_on = BUILT_ON.get(architecture.folder, set())
    text = "".join(code_of(architecture).values())
    for other in {other.folder for other in REGISTRY.values()} - {architecture.folder} - built_on:
        assert f"# subquad.models.{other}." not in text


@each_architecture
def test_the_files_are_complete(architecture, tmp_path):
    """No name is undefined, no import is unused or finds nothing, nothing is defined twice."""
    code = code_of(architecture)
    trees = {file.removesuffix(".py"): ast.parse(text) for file, text in code.items()}
    defined = {
        file: {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        | {
            name.id
            for each in tree.body
            if isinstance(each, ast.Assign | ast.AnnAssign)
            for name in ast.walk(each)
            if isinstance(name, ast.Name)
        }
        for file, tree in trees.items()
    }
    for file, text in code.items():
        (tmp_path / file).write_text(text)
        for node in ast.walk(trees[file.removesuffix(".py")]):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert {alias.name for alias in node.names} <= defined[node.module], file
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "--quiet", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_same_each_time():
    """Byte by byte, also in a process with another seed of hashes, and whatever has been merged before."""
    lists = [modules_of(REGISTRY[name]) for name in ("raven", "visual_rwkv")]
    packages = {"subquad_kernels": [("kernels_x", "The operators."), ("triton_x", "The kernels.")]}
    script = (
        "import json; from subquad_tokenizers.merging import merge;"
        f"print(json.dumps([merge(modules, {packages}) for modules in {lists}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert json.loads(done.stdout) == [merge(modules, packages) for modules in lists]


@each_architecture
def test_lines_of_a_repository(architecture):
    lines = sum(len(text.splitlines()) for text in code_of(architecture).values())
    assert lines <= LIMITS[architecture.model_type]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package of these files, of which it returns the name: each test has one of its own."""

    def make(**files: str) -> str:
        name = f"package_{tmp_path.name}"
        (tmp_path / name).mkdir()
        for file, text in {"__init__": "", **files}.items():
            (tmp_path / name / f"{file}.py").write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(merging, "OWN", (name,))
        return name

    return make


FIRST = """
    '''The first one. More about it.'''

    import math

    LIMIT = 3
    _kept: "dict[int, _Plan]" = {}
    logger = print("logger")


    # Counts, see `_check`.
    class _Plan:
        def go(self, x: "_Plan | None" = None):
            self._check = 1
            return f"{_check(x)} {self._check}", dict(_check=2), "é", _check(math.pi)  # trailing


    # Everything.
    # package only
    def everything():
        return unused()


    def _check(x):
        global _kept
        # package only
        if x == 2:
            return "nothing"
        _kept = {**_kept, x: LIMIT}
        return x


    def unused():
        pass
"""
MODEL = """
    '''The model.'''

    from .first import _Plan as Plan


    def _check(x):
        return Plan().go(x)


    def model(x):
        from .first import LIMIT

        return _check(x), LIMIT
"""


@pytest.mark.fast
def test_names_that_two_modules_define(package):
    name = package(first=FIRST, modeling_x=MODEL)
    [text] = merge([f"{name}.modeling_x"]).values()
    values = {}
    exec(compile(text, "x", "exec"), values)
    assert values["model"](2) == (("2 1", {"_check": 2}, "é", 3.141592653589793), 3)
    assert values["_kept"] == {2: 3, 3.141592653589793: 3}
    assert "# Counts, see `_first_check`.\nclass _Plan:" in text
    assert f"# From {name}.first.\n" in text
    assert "unused" not in text and "More" not in text and "import LIMIT" not in text
    assert "package only" not in text and "Everything" not in text


@pytest.mark.fast
@pytest.mark.parametrize(
    ("first", "model", "message"),
    [
        ("def check(): pass", "from .first import check as c\ndef check(): c()", "`check` has several meanings"),
        ("def _f(): _g()\ndef _g(_g=1): _f()", "from .first import _f\ndef _g(): _f()", "hide .*_g"),
        ("from math import pi as x", "from math import e as x\nfrom . import first\nfirst.x", "import names"),
        ("import math as x\ny = x", "import re as x\nfrom .first import y\nz = x, y", "more than one way"),
        ("def sum(): pass", "from .first import sum\nx = sum()", "`sum` has several meanings"),
        ("", "from .first import gone\nx = gone", "does not define gone"),
        ("", "# package only\nif print:\n    x = 1\nelse:\n    x = 2\ny = x", "has an `else`"),
        ("def f(): pass\ndef g(): f()", "from .first import f, g\nf = print(f)\nx = g", "binds a name again"),
    ],
)
def test_what_cannot_be_merged(first, model, message, package):
    name = package(first=first, modeling_x=model)
    with pytest.raises(ValueError, match=message):
        merge([f"{name}.modeling_x"])
