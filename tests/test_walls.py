"""What may import what: the walls of CONTRIBUTING.md, read from the syntax trees."""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from subquad.models import REGISTRY


ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "subquad": ROOT / "src",
    "subquad_cli": ROOT / "src",
    "subquad_vllm": ROOT / "src",
    "subquad_kernels": ROOT / "kernels" / "torch-ext",
    "subquad_native": ROOT / "kernels" / "torch-ext",
    "subquad_tokenizers": ROOT / "tokenizers",
    "subquad_conversion": ROOT / "conversion",
}
# Import package to the other packages that it may import, besides the standard library and itself.
WALLS = {
    "subquad_native": set(),
    "subquad_kernels": {"torch", "triton", "subquad_native"},
    "subquad_tokenizers": {"transformers", "tokenizers", "huggingface_hub", "numpy", "subquad_native"},
    "subquad_conversion": {
        *("torch", "safetensors", "transformers", "huggingface_hub", "tqdm", "gguf"),
        *("subquad", "subquad_tokenizers"),
    },
    "subquad_vllm": {"torch", "transformers", "vllm", "subquad", "subquad_kernels"},
}
# Room of `subquad` to the rooms whose modules it may import, from the lowest floor to the highest.
ROOMS = {
    "modeling": set(),
    "decoding": {"modeling"},
    "models": {"modeling", "decoding"},
    "training": {"modeling", "models"},
    "quantization": {"modeling", "models"},
    "hub": {"modeling", "decoding", "models", "training", "quantization"},
    "states": {"modeling", "models", "decoding", "training", "hub"},
    "tools": {"modeling", "models", "hub"},
}
# With what models are loaded and saved: they are below the models, although they stand in `hub` with others of a kind.
FILES_OF_MODELS = {
    f"subquad.hub.{name}" for name in ("foreign_files", "loading", "new_files", "processing", "saving", "weight_files")
}
# Architectures that are made of others.
BUILT_ON = {
    "rwkv6": {"rwkv5"},
    "rwkv7_deep_embed": {"rwkv7"},
    "rwkv7_embedding": {"rwkv7"},
    "rwkv7_reranker": {"rwkv7", "rwkv7_embedding"},
    "visual_rwkv": {"rwkv5", "rwkv6", "rwkv7"},
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the distribution, by its import path."""
    found = {}
    for package, source in SOURCES.items():
        for path in sorted((source / package).rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def statements(tree: ast.AST):
    """All nodes of a tree, without what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if not is_type_checking(node):
            yield node
            yield from statements(node)


@cache
def imports(module: str) -> frozenset[str]:
    """
    What a module imports, anywhere in it: modules of the distribution by their whole path, other packages by theirs.
    """
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.add(name if name in modules() else base)
    return frozenset(name if name.split(".")[0] in SOURCES else name.split(".")[0] for name in found)


def ours(module: str) -> set[str]:
    return {name for name in imports(module) if name.split(".")[0] in SOURCES}


@pytest.mark.fast
def test_every_import_exists():
    """The other tests see all edges of the graph."""
    for module in modules():
        for name in ours(module):
            assert name in modules(), f"{module} imports {name}"


@pytest.mark.fast
def test_there_is_no_circle_between_files():
    TopologicalSorter({module: ours(module) - {module} for module in modules()}).prepare()  # raises a CycleError


@pytest.mark.fast
@pytest.mark.parametrize("package", WALLS)
def test_walls_between_packages(package):
    for module in modules():
        if module.split(".")[0] == package:
            others = {name.split(".")[0] for name in imports(module)} - {package} - sys.stdlib_module_names
            assert others <= WALLS[package], module


@pytest.mark.fast
def test_nobody_imports_the_top_floor():
    """The command line and the plug-in; and models know nothing of conversion."""
    for module in modules():
        above = {"subquad_cli", "subquad_vllm", *(["subquad_conversion"] if module.split(".")[0] == "subquad" else [])}
        assert not {name.split(".")[0] for name in ours(module)} & above - {module.split(".")[0]}, module


@pytest.mark.fast
def test_walls_between_rooms():
    # A folder that has moved may be left behind with what Python has compiled.
    entries = (SOURCES["subquad"] / "subquad").iterdir()
    found = {path.name for path in entries if path.is_file() or any(path.glob("*.py"))}
    assert found == {*ROOMS, "__init__.py", "py.typed"}
    for module in modules():
        room = module.split(".")[1] if module.startswith("subquad.") else None
        for name in ours(module) - FILES_OF_MODELS if room else ():
            if name.startswith("subquad."):
                assert name.split(".")[1] in {room, *ROOMS[room]}, f"{module} imports {name}"


@pytest.mark.fast
def test_triton_is_imported_by_kernels_alone():
    """Nothing imports triton before a kernel runs, except for files that hold nothing but kernels, or launch them."""

    def is_kernels(module):
        return "triton.jit" in modules()[module].read_text() or module.endswith(".triton_kernels")

    for module, path in modules().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_top = {
            node.module if isinstance(node, ast.ImportFrom) else alias.name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        if module.endswith(".triton_kernels") or any((name or "").split(".")[0] == "triton" for name in at_top):
            users = [other for other in modules() if module in ours(other)]
            assert is_kernels(module)
            for other in (other for other in users if not is_kernels(other)):
                top = ast.parse(modules()[other].read_text(encoding="utf-8")).body
                names = {node.module for node in top if isinstance(node, ast.ImportFrom) and node.level}
                assert module.rpartition(".")[2] not in {(name or "").rpartition(".")[2] for name in names}, other


@pytest.mark.fast
@pytest.mark.parametrize("architecture", REGISTRY.values(), ids=list(REGISTRY))
def test_walls_around_an_architecture(architecture):
    """What a model repository carries imports nothing wider than it needs; a folder knows no other one."""
    folders = {"architecture", architecture.folder, *BUILT_ON.get(architecture.folder, ())}
    for module in modules():
        if not module.startswith(f"{architecture.package}."):
            continue
        for name in ours(module):
            if name.startswith("subquad.models."):
                assert name.split(".")[2] in folders, f"{module} imports {name}"
        carried = module.rpartition(".")[2].startswith(
            ("cache_", "configuration_", "layout_", "loading_", "modeling_", "processing_")
        )
        if carried:
            shared = ("subquad.modeling.", "subquad.decoding.", "subquad.models.", "subquad_", *FILES_OF_MODELS)
            assert all(name.startswith(shared) for name in ours(module)), module
            assert not any(name.endswith(".architecture") for name in ours(module)), module


@pytest.mark.fast
def test_no_tool_names_an_architecture():
    """What differs between architectures is a field of the descriptor, not a comparison with a model type."""
    for module, path in modules().items():
        if module.split(".")[0] not in ("subquad", "subquad_kernels") or module.startswith("subquad.models."):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare | ast.match_case | ast.Dict):
                constants = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                named = [name for name in constants if name in REGISTRY]
                assert not named, f"{module}, line {getattr(node, 'lineno', '?')}: {named}"


@pytest.mark.fast
@pytest.mark.parametrize("folder", ["kernels", "tokenizers", "conversion"])
def test_a_wing_hides_no_package(folder):
    """With the root of the repository on sys.path, `kernels/__init__.py` would hide the PyPI package `kernels`."""
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.fast
def test_dynamo_of_every_torch_reads_what_is_written():
    """What compiled code may not call: Dynamo of an older torch cannot trace it, or takes it for something else."""
    instead = {
        "Tensor.unflatten": "torch.unflatten",
        "torch.compiler.is_exporting": "subquad.modeling.padding.is_exporting",
    }
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            name = ast.unparse(node)
            if node.attr == "unflatten" and name != "torch.unflatten":
                name = "Tensor.unflatten"
            allowed = name not in instead or module == instead[name].rpartition(".")[0]
            assert allowed, f"{module}, line {node.lineno}: call {instead[name]}, not {name}"
