"""
Model repositories that load without this package: `from_pretrained(..., trust_remote_code=True)` finds the code beside
the weights. It is the package's own, made flat by [`repository_code`].
"""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import __version__
from .directories import check_free, new_directory
from .models import REGISTRY


# Packages whose modules go along.
OWN = ("subquad", "subquad_kernels")
# What may be missing where the code is loaded: transformers looks for all imports of a file except those in a `try`.
OPTIONAL = ("triton",)
# The digest is that of all files: by the first one transformers tells whether it has loaded the others.
HEADER = "# Part of subquad {version} (Apache-2.0), written there and made flat for a model repository: {digest}\n"
LINE_LENGTH = 119


def flat_name(module: str) -> str:
    """The name in a repository, where all modules lie beside one another."""
    last = module.rpartition(".")[2]
    own = last.startswith(("configuration_", "modeling_", "processing_"))
    return last if own else module.replace(".", "_")


@functools.cache
def _source(module: str) -> tuple[Path, str, ast.Module]:
    path = Path(importlib.util.find_spec(module).origin)
    text = path.read_text(encoding="utf-8")
    return path, text, ast.parse(text)


def _target(node: ast.ImportFrom, module: str) -> str | None:
    """The module that a statement in `module` imports from, if it is one of ours."""
    name = node.module or ""
    if node.level:
        package = module if _source(module)[0].name == "__init__.py" else module.rpartition(".")[0]
        name = importlib.util.resolve_name("." * node.level + name, package)
    elif name.split(".")[0] == module.split(".")[0]:
        return None  # a package that names itself means the one that is installed, if any
    return name if name.split(".")[0] in OWN else None


def _home(module: str, name: str) -> str:
    """The module that has `name` where `module` has it from another, as the `__init__.py` of a package does."""
    path, _, tree = _source(module)
    for node in tree.body if path.name == "__init__.py" else ():
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            target = _target(node, module)
            if target == module:
                raise ValueError(f"{module}.{name} is a module: import from it what is needed.")
            return _home(target, name)
    return module


def _order(alias: ast.alias) -> tuple[int, str]:
    """Constants, classes, functions."""
    name = alias.name
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name.lower()


def _statements(imported: dict[str, list[ast.alias]], indent: str) -> list[str]:
    lines = []
    for target, aliases in sorted(imported.items(), key=lambda item: flat_name(item[0])):
        plain = [alias for alias in aliases if alias.asname is None]
        # An import under another name has a line of its own.
        for group in [[alias] for alias in aliases if alias.asname] + ([plain] if plain else []):
            names = [ast.unparse(alias) for alias in sorted(group, key=_order)]
            line = f"{indent}from .{flat_name(target)} import {', '.join(names)}"
            if len(line) > LINE_LENGTH:
                line = f"{line[: line.index(' import ')]} import (\n"
                line += "".join(f"{indent}    {name},\n" for name in names) + f"{indent})"
            lines.append(line)
    return lines


def _imported(node: ast.ImportFrom, module: str) -> dict[str, list[ast.alias]]:
    imported: dict[str, list[ast.alias]] = {}
    for alias in node.names:
        imported.setdefault(_home(_target(node, module), alias.name), []).append(alias)
    return imported


def _is_optional(node: ast.stmt) -> bool:
    names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return any(name and name.split(".")[0] in OPTIONAL for name in names)


def _guards(nodes: list[ast.stmt], lines: list[str]) -> list[tuple[int, int, list[str]]]:
    """Puts the imports of what may be missing into a `try`, those that follow one another into one."""
    runs: list[tuple[int, int]] = []
    for node in sorted(filter(_is_optional, nodes), key=lambda node: node.lineno):
        first = runs.pop()[0] if runs and runs[-1][1] == node.lineno - 1 else node.lineno
        runs.append((first, node.end_lineno))
    edits = []
    for first, last in runs:
        inside = lines[first - 1 : last]
        indent = inside[0][: len(inside[0]) - len(inside[0].lstrip())]
        guarded = [f"{indent}try:", *(f"    {line}" for line in inside), f"{indent}except ImportError:"]
        apart = ["", ""] if lines[first - 2].lstrip().startswith(("import ", "from ")) else []
        edits.append((first, last, [*apart, *guarded, f"{indent}    raise"]))
    return edits


def flatten(module: str) -> tuple[str, set[str]]:
    """The source of a module with every import of another of ours as of one beside it, and what it imports."""
    _, text, tree = _source(module)
    lines, found = text.split("\n"), set()
    own = [node for node in tree.body if isinstance(node, ast.ImportFrom) and _target(node, module)]
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    edits: list[tuple[int, int, list[str]]] = []  # first line, last line, what takes their place
    for node in nodes:
        indent = " " * node.col_offset
        if isinstance(node, ast.ImportFrom) and _target(node, module):
            imported = _imported(node, module)
            found |= imported.keys()
            if node not in own:
                edits.append((node.lineno, node.end_lineno, _statements(imported, indent)))
        elif isinstance(node, ast.Import) and any(alias.name.split(".")[0] in OWN for alias in node.names):
            raise ValueError(f"{module}, line {node.lineno}: import from a module what is needed.")
    edits += _guards(nodes, lines)
    if own:
        together: dict[str, list[ast.alias]] = {}
        for node in own:
            for target, aliases in _imported(node, module).items():
                together.setdefault(target, []).extend(aliases)
        first, last = own[0].lineno, own[-1].end_lineno
        between = [line for line in range(first, last + 1) if lines[line - 1].strip()]
        if {*between} - {line for node in own for line in range(node.lineno, node.end_lineno + 1)}:
            raise ValueError(f"{module}: between its imports from this package there is something else.")
        edits.append((first, last, _statements(together, "")))
    for first, last, replacement in sorted(edits, reverse=True):
        lines[first - 1 : last] = replacement
    return "\n".join(lines), found


def repository_code(*modules: str) -> dict[str, str]:
    """
    The files that these modules need, by name: themselves and everything of ours that they import, however far.

    Raises:
        ValueError: where two modules would have one name.
    """
    files: dict[str, str] = {}
    origin: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        name = f"{flat_name(module)}.py"
        if origin.setdefault(name, module) != module:
            raise ValueError(f"{module} and {origin[name]} would both be {name}.")
        if name not in files:
            files[name], found = flatten(module)
            waiting += found
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in sorted(files.items())).encode()).hexdigest()
    header = HEADER.format(version=__version__, digest=digest[:16])
    return {name: header + text for name, text in sorted(files.items())}


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return fields


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    _write(path, json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def add_model_code(directory: str | os.PathLike) -> None:
    """
    Makes a saved model load where this package is not installed: adds the code that it needs, with its licence, and to
    `config.json` where the Auto classes find it.

    Raises:
        ValueError: where the directory holds no model of an architecture of this package.
    """
    directory = Path(directory)
    model_type = _model_type(directory)
    architecture = REGISTRY[model_type]
    package, name = architecture.package, architecture.folder
    modules = [f"{package}.configuration_{name}", f"{package}.modeling_{name}"]
    auto_map = {"AutoConfig": f"configuration_{name}.{architecture.config}"}
    auto_map |= {auto_class: f"modeling_{name}.{head}" for auto_class, head in architecture.heads.items()}
    if architecture.processor:
        modules.append(f"{package}.processing_{name}")
        auto_map["AutoProcessor"] = f"processing_{name}.{architecture.processor}"
        if (path := directory / "processor_config.json").is_file():  # the one place where transformers then looks
            _write_json(path, _read_json(path) | {"auto_map": {"AutoProcessor": auto_map["AutoProcessor"]}})
    for file, text in repository_code(*modules).items():
        _write(directory / file, text)
    for file in ("LICENSE", "NOTICE"):
        if not (directory / file).exists():
            _write(directory / file, _legal(file))
    fields = _read_json(directory / "config.json") | {"auto_map": auto_map}
    fields.pop("custom_pipelines", None)  # of code that does not go along
    _write_json(directory / "config.json", fields)


def _model_type(directory: Path) -> str:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no `config.json`: it is no model directory.")
    model_type = _read_json(path).get("model_type")
    if model_type not in REGISTRY:
        raise ValueError(f"{path}: `model_type` is {model_type!r}; known are {', '.join(REGISTRY)}.")
    return model_type


def _weights(directory: Path) -> list[Path]:
    """The files of a model's weights, all of them there."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        from .weight_files import pickled_weights

        pickled = pickled_weights(directory)
        hint = f"; `subquad convert` reads {pickled[0].name}" if pickled else ""
        raise ValueError(f"{directory} has no weights in safetensors{hint}.")
    shards = sorted({*_read_json(index).get("weight_map", {}).values()})
    missing = [name for name in shards if Path(name).name != name or not (directory / name).is_file()]
    if missing or not shards:
        raise ValueError(f"{index} names files that are not there: {', '.join(missing) or 'none at all'}.")
    return [index, *(directory / name for name in shards)]


def export(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    link_weights: bool = False,
) -> list[str]:
    """
    Makes a repository of a model directory that loads with transformers and torch alone, `trust_remote_code=True`
    given: weights, configuration, tokenizer and a card, and the code that they need. With this package installed, its
    own classes load it. No code that lies in the model directory goes along.

    Args:
        source: a directory that `save_pretrained` or `subquad convert` wrote, with safetensors weights.
        destination: directory to make; it must not exist or be empty. It appears complete or not at all.
        link_weights: makes symbolic links to the weights, where the system allows them, and no copies.

    Returns:
        The names of the files.

    Raises:
        ValueError: where the source is no model of this package or has no safetensors weights, or the destination is
            occupied.
    """
    source, destination = Path(source).resolve(), Path(destination).resolve()
    _model_type(source)
    weights = _weights(source)
    check_free(destination)

    from transformers import AutoConfig

    from .cards import base_model, is_own_card, model_card

    size = 0 if link_weights else sum(path.stat().st_size for path in weights)
    with new_directory(destination, size) as partial:
        for path in weights:
            (_link if link_weights else shutil.copyfile)(path, partial / path.name)
        AutoConfig.from_pretrained(source, trust_remote_code=False).save_pretrained(partial)
        for name in ("generation_config.json", "processor_config.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        add_model_code(partial)
        _copy_tokenizer(source, partial)
        if (source / "README.md").is_file() and not is_own_card(source):
            shutil.copyfile(source / "README.md", partial / "README.md")
        else:
            card = model_card(partial, repo_id=destination.name, base_model=base_model(source))
            card.save(partial / "README.md")
    return sorted(path.relative_to(destination).as_posix() for path in destination.rglob("*") if path.is_file())


def _link(source: Path, destination: Path) -> None:
    try:
        destination.symlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, destination)


def _copy_tokenizer(source: Path, destination: Path) -> None:
    """The tokenizer of a model directory, if it has one, as the installed classes save it; with its code, if ours."""
    if not any((source / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        return
    from transformers import AutoTokenizer

    from subquad_tokenizers.tokenization_base import SelfContainedMixin

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    ours = isinstance(tokenizer, SelfContainedMixin)
    tokenizer.save_pretrained(destination, **({"self_contained": True} if ours else {}))
    path = destination / "tokenizer_config.json"
    fields = _read_json(path)
    if not ours and fields.pop("auto_map", None):  # of code that does not go along
        _write_json(path, fields)


def _legal(name: str) -> str:
    """LICENSE or NOTICE of this package: of an installed one beside its metadata, else at the root of the clone."""
    found = [Path(__file__).parents[2] / name]
    with suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.distribution("subquad").files or ()
        found = [*(Path(file.locate()) for file in files if file.name == name), *found]
    return next(path for path in found if path.is_file()).read_text(encoding="utf-8")


__all__ = ["add_model_code", "export", "repository_code"]
