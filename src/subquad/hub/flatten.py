"""
The code of a model repository: modules of this package as files in one flat directory, as transformers needs them,
without the definitions that the model does not use.
"""

import ast
import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from .. import __version__


# Packages whose modules are copied.
OWN = ("subquad", "subquad_kernels")
# Packages that may be missing where the code is loaded: transformers checks all imports but those in a `try`.
OPTIONAL = ("triton",)
# The digest is that of all files: transformers compares the first one to see whether it has loaded the others.
HEADER = "# Part of subquad {version} (Apache-2.0), flattened for a model repository: {digest}\n"
LINE_LENGTH = 119


def flat_name(module: str) -> str:
    """The name of a module in a repository, without `.py`."""
    last = module.rpartition(".")[2]
    own = last.startswith(("configuration_", "modeling_", "processing_"))
    return last if own else module.replace(".", "_")


class Module:
    """
    A module of ours, read by its syntax tree. A top-level statement is kept if it is `fixed`, or if it defines a name
    that a kept statement of some module uses.

    Args:
        name: its import path.
        whole: whether every statement is kept, as in the modules that a repository names.
    """

    def __init__(self, name: str, whole: bool):
        self.name, self.whole = name, whole
        self.path = Path(importlib.util.find_spec(name).origin)
        self.text = self.path.read_text(encoding="utf-8")
        self.lines = self.text.split("\n")
        self.body = ast.parse(self.text).body
        self.imports = [node for node in self.body if isinstance(node, ast.Import | ast.ImportFrom)]
        # Local name to the statements that define it, or only have a meaning together with it.
        self.defining: dict[str, list[ast.stmt]] = {}
        self.fixed: list[ast.stmt] = []
        for node in self.body:
            if node in self.imports:
                continue
            names = [] if whole else self._names_of(node)
            for each in names:
                self.defining.setdefault(each, []).append(node)
            if (not names and not _is_all(node)) or whole:
                self.fixed.append(node)
        self.kept: list[ast.stmt] = []
        self.used: set[str] = set()

    def _names_of(self, node: ast.stmt) -> list[str]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            # A function `_` exists for its decorator alone, which registers it with another function.
            return [node.name] if node.name != "_" else [_root(node.decorator_list[0])]
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            return [] if names == ["__all__"] else names
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            root = _root(node.value.func)
            return [root] if root in self.defining else []
        return []

    def target(self, node: ast.Import | ast.ImportFrom) -> str | None:
        """The module that a statement imports from, if it is one of ours."""
        if isinstance(node, ast.Import):
            if any(alias.name.split(".")[0] in OWN for alias in node.names):
                raise ValueError(f"{self.name}, line {node.lineno}: import names from a module, not the module.")
            return None
        name = node.module or ""
        if node.level:
            package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
            name = importlib.util.resolve_name("." * node.level + name, package)
        elif name.split(".")[0] == self.name.split(".")[0]:
            return None  # an absolute import of the own package means the one that is installed, if any
        return name if name.split(".")[0] in OWN else None

    def own_imports(self, nodes: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.alias]]:
        """The module and the name of everything that statements import from our packages."""
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (target := self.target(node)):
                for alias in node.names:
                    yield _home(target, alias.name), alias

    def keep(self, node: ast.stmt) -> Iterator[tuple[str, str]]:
        """Keeps a statement; yields module and name of what it uses."""
        if node in self.kept:
            return
        self.kept.append(node)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                self.used.add(inner.id)
            elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):  # maybe an annotation
                self.used.update(re.findall(r"\w+", inner.value) if len(inner.value) < LINE_LENGTH else ())
        yield from ((self.name, name) for name in self.used & self.defining.keys())
        yield from ((home, alias.name) for home, alias in self.own_imports(ast.walk(node)))
        for home, alias in self.own_imports(self.imports):
            if (alias.asname or alias.name) in self.used:
                yield home, alias.name

    def flatten(self) -> str:
        """The source of what is kept, with every import from our packages replaced by one from a file next to it."""
        edits: list[tuple[int, int, list[str]]] = []  # first line, last line, what replaces them
        for node in self.body:
            if node not in self.kept and node not in self.imports:
                edits.append((self._first_line(node), node.end_lineno, []))
        self._edit_imports(edits)
        for node in self.kept:
            nested = [each for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom)]
            for each in nested:
                if self.target(each):
                    indent = " " * each.col_offset
                    edits.append((each.lineno, each.end_lineno, _statements(self.own_imports([each]), indent)))
            edits += self._guards(nested)
        lines = list(self.lines)
        for first, last, replacement in sorted(edits, reverse=True):
            lines[first - 1 : last] = replacement
        text = re.sub(r"\n{3,}", "\n\n\n", "\n".join(lines))
        text = re.sub(r'\A("""(?:(?!""").)*""")\n{3}', r"\1\n\n", text, flags=re.DOTALL)  # if no import is left
        text = re.sub(r"\n{3}(?=(import|from) )", "\n\n", text)  # if nothing is left of a group of imports
        return text.rstrip("\n") + "\n"

    def _first_line(self, node: ast.stmt) -> int:
        """Where a statement begins, with its decorators and the comment above it."""
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        while first > 1 and self.lines[first - 2].startswith("#"):
            first -= 1
        return first

    def _edit_imports(self, edits: list[tuple[int, int, list[str]]]) -> None:
        own = [node for node in self.imports if self.target(node)]
        foreign = [node for node in self.imports if node not in own]
        for node in foreign:
            used = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] in self.used]
            if not self.whole and len(used) < len(node.names):
                node.names = used
                edits.append((node.lineno, node.end_lineno, [ast.unparse(node)] if used else []))
        edits += self._guards([node for node in foreign if node.names])
        if not own:
            return
        first, last = own[0].lineno, own[-1].end_lineno
        between = {line for line in range(first, last + 1) if self.lines[line - 1].strip()}
        if between - {line for node in own for line in range(node.lineno, node.end_lineno + 1)}:
            raise ValueError(f"{self.name}: there is something else between its imports from this package.")
        imported = self.own_imports(own)
        if not self.whole:
            imported = [(home, alias) for home, alias in imported if (alias.asname or alias.name) in self.used]
        edits.append((first, last, _statements(imported, "")))

    def _guards(self, nodes: list[ast.stmt]) -> list[tuple[int, int, list[str]]]:
        """Puts imports of packages that may be missing into a `try`, consecutive ones into the same."""
        runs: list[tuple[int, int]] = []
        for node in sorted(filter(_is_optional, nodes), key=lambda node: node.lineno):
            first = runs.pop()[0] if runs and runs[-1][1] == node.lineno - 1 else node.lineno
            runs.append((first, node.end_lineno))
        edits = []
        for first, last in runs:
            inside = self.lines[first - 1 : last]
            indent = inside[0][: len(inside[0]) - len(inside[0].lstrip())]
            guarded = [f"{indent}try:", *(f"    {line}" for line in inside), f"{indent}except ImportError:"]
            apart = ["", ""] if self.lines[first - 2].lstrip().startswith(("import ", "from ")) else []
            edits.append((first, last, [*apart, *guarded, f"{indent}    raise"]))
        return edits


def _root(node: ast.expr) -> str:
    """The name that an expression such as `name.attribute(...)` begins with."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and _root(node.targets[0]) == "__all__"


def _is_optional(node: ast.stmt) -> bool:
    names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return any(name and name.split(".")[0] in OPTIONAL for name in names)


@functools.cache
def _home(module: str, name: str) -> str:
    """The module that defines a name which `module`, maybe the `__init__.py` of a package, has or imports."""
    source = Module(module, whole=True)
    for node in source.imports if source.path.name == "__init__.py" else ():
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            target = source.target(node)
            if target == module:
                raise ValueError(f"{module}.{name} is a module: import names from it.")
            return _home(target, name)
    return module


def _order(alias: ast.alias) -> tuple[int, str]:
    """Constants, classes, functions."""
    name = alias.name
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name.lower()


def _statements(imported: Iterable[tuple[str, ast.alias]], indent: str) -> list[str]:
    """Import statements for files in the same directory."""
    by_file: dict[str, list[ast.alias]] = {}
    for home, alias in imported:
        by_file.setdefault(flat_name(home), []).append(alias)
    lines = []
    for file, aliases in sorted(by_file.items()):
        plain = [alias for alias in aliases if alias.asname is None]
        # An import under another name has a line of its own.
        for group in [[alias] for alias in aliases if alias.asname] + ([plain] if plain else []):
            names = [ast.unparse(alias) for alias in sorted(group, key=_order)]
            line = f"{indent}from .{file} import {', '.join(names)}"
            if len(line) > LINE_LENGTH:
                line = f"{line[: line.index(' import ')]} import (\n"
                line += "".join(f"{indent}    {name},\n" for name in names) + f"{indent})"
            lines.append(line)
    return lines


def repository_code(*modules: str) -> dict[str, str]:
    """
    The files that these modules need, by name: the modules themselves, and the used definitions of every module of
    ours that they import, directly or indirectly.

    Raises:
        ValueError: if two modules would have the same name.
    """
    reached: dict[str, Module] = {}
    waiting: list[tuple[str, str | None]] = [(module, None) for module in modules]
    while waiting:
        name, wanted = waiting.pop()
        if name not in reached:
            reached[name] = Module(name, whole=name in modules)
            for node in reached[name].fixed:
                waiting += reached[name].keep(node)
        for node in reached[name].defining.get(wanted, ()):
            waiting += reached[name].keep(node)

    files: dict[str, str] = {}
    for name, module in reached.items():
        file = f"{flat_name(name)}.py"
        if file in files:
            raise ValueError(f"{name} and another module would both be {file}.")
        files[file] = module.flatten()
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in sorted(files.items())).encode()).hexdigest()
    header = HEADER.format(version=__version__, digest=digest[:16])
    return {name: header + text for name, text in sorted(files.items())}


__all__ = ["flat_name", "repository_code"]
