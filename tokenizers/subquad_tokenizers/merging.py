"""
The code of a repository on the Hub: modules of this distribution, merged into a few files that a person can read.
Models and tokenizers both need this, so it stands below them.

A repository names modules. It gets them whole, and the definitions that they use from our other modules, directly or
indirectly. Modules follow one another in the order of their imports, each under a heading. Imports from our packages
become imports from a neighbouring file, unless the name is in the same file. A private name or constant that several
modules define gets the module's name as a prefix.
"""

import ast
import builtins
import functools
import hashlib
import importlib.util
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


# Packages whose modules are merged.
OWN = ("subquad", "subquad_kernels", "subquad_tokenizers")
# Packages that may be missing where the code is loaded: transformers checks all imports outside a `try`.
OPTIONAL = ("triton",)
# The digest covers all files: transformers compares only the first file to decide whether to reload the others.
HEADER = "# Part of subquad{version} (Apache-2.0), merged for a model repository: {digest}\n"
LINE_LENGTH = 119
# The comment above a statement that is left out of repositories.
MARK = "# package only"


class Name(NamedTuple):
    """A name at the top of a module of ours."""

    module: str
    name: str


class Foreign(NamedTuple):
    """One name that is imported from elsewhere. `name` is None for `import module`."""

    module: str
    name: str | None
    alias: str | None

    @property
    def bound(self) -> str:
        return self.alias or self.name or self.module.partition(".")[0]

    @property
    def optional(self) -> bool:
        return self.module.partition(".")[0] in OPTIONAL


class Statement:
    """
    A statement at the top of a module, other than an import.

    Attributes:
        defines: the names that it defines or belongs to: the name of a decorator that registers a function `_`, or of
            an object whose method it calls.
        uses: the names of our packages that it uses, each with its local name.
        lazy: the names of our packages that it imports inside.
        foreign: the names that it uses from other imports of its module.
    """

    def __init__(self, module: "Module", node: ast.stmt, defines: list[str]):
        self.module, self.node, self.defines = module, node, defines
        self.imports = [each for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom)]

    @functools.cached_property
    def lazy(self) -> list[Name]:
        return [_home(name) for each in self.imports for _, name in self.module.own_names(each)]

    @functools.cached_property
    def names(self) -> list[ast.Name]:
        return [each for each in ast.walk(self.node) if isinstance(each, ast.Name)]

    @functools.cached_property
    def quoted(self) -> list[ast.Constant]:
        """Annotations in quotation marks."""
        places = [getattr(each, field, None) for each in ast.walk(self.node) for field in ("annotation", "returns")]
        inside = (each for place in places if place is not None for each in ast.walk(place))
        return [each for each in inside if isinstance(each, ast.Constant) and isinstance(each.value, str)]

    @functools.cached_property
    def used(self) -> set[str]:
        quoted = {word for each in self.quoted for word in re.findall(r"\w+", each.value)}
        return {*self.defines, *quoted, *(each.id for each in self.names)}

    @functools.cached_property
    def uses(self) -> list[tuple[str, Name]]:
        module, found = self.module, []
        for name in sorted(self.used):
            if name in module.defining:
                found.append((name, Name(module.name, name)))
            # A statement may rebind an imported name to something made from it.
            if isinstance(home := module.imported.get(name), Name) and module.defining.get(name, [self]) == [self]:
                found.append((name, _home(home)))
        return found

    @functools.cached_property
    def foreign(self) -> list[Foreign]:
        found = (self.module.imported.get(name) for name in sorted(self.used))
        return [each for each in found if isinstance(each, Foreign)]

    def needs(self) -> Iterator["Statement"]:
        """The statements that it depends on."""
        for home, name in [*(each for _, each in self.uses), *self.lazy]:
            module = load(home)
            if name not in module.defining:
                raise ValueError(f"{self.module.name}, line {self.node.lineno}: {home} does not define {name}.")
            yield from (*module.fixed, *module.defining[name])

    @functools.cached_property
    def rebinds(self) -> set[str]:
        """The module's names that a function in it rebinds."""
        return {name for each in ast.walk(self.node) if isinstance(each, ast.Global) for name in each.names}

    @functools.cached_property
    def bound_inside(self) -> set[str]:
        """The names that functions and classes in it bind, which would hide global names."""
        found = {each.arg for each in ast.walk(self.node) if isinstance(each, ast.arg)}
        for each in ast.walk(self.node):
            if isinstance(each, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
                found |= {each.name} if each is not self.node else set()
        inside = self.names if isinstance(self.node, ast.FunctionDef | ast.ClassDef) else ()
        stored = {each.id for each in inside if not isinstance(each.ctx, ast.Load)}
        return found | (stored - self.rebinds)

    @property
    def first_line(self) -> int:
        """Its first line, including decorators and the comment above it."""
        first = min([self.node.lineno, *(each.lineno for each in getattr(self.node, "decorator_list", ()))])
        while self.module.lines[first - 2].startswith("#"):
            first -= 1
        return first


class Module:
    """
    A module of ours, read by its syntax tree.

    Attributes:
        imported: local name to the origin of its import.
        defining: name to the statements that define it or belong to it.
        fixed: the statements that are kept with any other.
    """

    def __init__(self, name: str):
        self.name = name
        self.path = Path(importlib.util.find_spec(name).origin)
        text = _without_marked(name, self.path.read_text(encoding="utf-8"))
        self.lines, tree = text.split("\n"), ast.parse(text)
        self.doc = ast.get_docstring(tree) or ""
        body = tree.body[1:] if self.doc else tree.body
        self.imported: dict[str, Name | Foreign] = {}
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imported.update(self.own_names(node) or _foreign_names(node))
        self.defining: dict[str, list[Statement]] = {}
        self.statements: list[Statement] = []
        for node in body:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                statement = Statement(self, node, self._defined(node))
                self.statements.append(statement)
                for each in statement.defines:
                    self.defining.setdefault(each, []).append(statement)
        self.fixed = [each for each in self.statements if not each.defines]

    @functools.cached_property
    def optional(self) -> bool:
        """Whether importing it needs a package that may be missing."""
        imported = [each for each in self.imported.values() if each.module != self.name]
        return any(each.optional if isinstance(each, Foreign) else load(each.module).optional for each in imported)

    def _defined(self, node: ast.stmt) -> list[str]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            # A function `_` exists only for its decorator, which registers it with another function.
            return [node.name] if node.name != "_" else [_root(node.decorator_list[0])]
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return [root] if (root := _root(node.value.func)) in self.defining else []
        return []

    def own_names(self, node: ast.Import | ast.ImportFrom) -> list[tuple[str, Name]]:
        """The imports of a statement from our packages, each with its local name."""
        if isinstance(node, ast.Import):
            if any(alias.name.split(".")[0] in OWN for alias in node.names):
                raise ValueError(f"{self.name}, line {node.lineno}: import names from a module, not the module.")
            return []
        target = node.module or ""
        if node.level:
            package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
            target = importlib.util.resolve_name("." * node.level + target, package)
        elif target.split(".")[0] == self.name.split(".")[0]:
            return []  # an absolute import of our package means the installed one, if any
        if target.split(".")[0] not in OWN:
            return []
        return [(alias.asname or alias.name, Name(target, alias.name)) for alias in node.names]


load = functools.cache(Module)


def _without_marked(name: str, text: str) -> str:
    """The source of the module `name` without marked statements, their comments, and the blank lines above."""
    if MARK not in text:
        return text
    lines, cut = text.split("\n"), []

    def visit(node):
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.stmt):
                first = min([each.lineno, *(line.lineno for line in getattr(each, "decorator_list", ()))]) - 1
                if lines[first - 1].strip() == MARK:
                    if getattr(each, "orelse", None):
                        raise ValueError(f"{name}, line {each.lineno}: a statement that is left out has an `else`.")
                    while lines[first - 1].strip()[:1] in ("", "#"):
                        first -= 1
                    cut.append((first, each.end_lineno))
                    continue
            visit(each)

    visit(ast.parse(text))
    for first, end in reversed(cut):
        del lines[first:end]
    return "\n".join(lines)


def _home(name: Name) -> Name:
    """The definition of a name that a module (possibly a package's `__init__.py`) has or imports."""
    source = load(name.module)
    while source.path.name == "__init__.py" and name.name not in source.defining:
        found = source.imported.get(name.name)
        if not isinstance(found, Name) or found.module == source.name:
            raise ValueError(f"{name.module}.{name.name} is a module, or not there: import names that we define.")
        name, source = found, load(found.module)
    return name


def _root(node: ast.expr) -> str:
    """The name that an expression such as `name.attribute(...)` begins with."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _foreign_names(node: ast.Import | ast.ImportFrom) -> list[tuple[str, Foreign]]:
    if isinstance(node, ast.Import):
        found = [Foreign(alias.name, None, alias.asname) for alias in node.names]
    else:
        found = [Foreign(node.module, alias.name, alias.asname) for alias in node.names]
    return [(each.bound, each) for each in found]


def _reach(
    statements: Iterable[Statement], through: Callable[[Statement], bool] = lambda each: True
) -> set[Statement]:
    """These statements and all their dependencies, without following those not passed through."""
    found, waiting = set(), list(statements)
    while waiting:
        statement = waiting.pop()
        if statement not in found:
            found.add(statement)
            if through(statement):
                waiting += statement.needs()
    return found


def _ordered(names: list[str], kept: set[Statement]) -> list[Module]:
    """The modules of the kept statements, each after its imports."""
    there, order = {each.module.name for each in kept}, {}

    def visit(module):
        statements = [each for each in module.statements if each in kept]
        used = {local for each in statements for local, _ in each.uses}
        imported = [_home(each) for local, each in module.imported.items() if isinstance(each, Name) and local in used]
        lazy = [name for each in statements for name in each.lazy]
        for name, _ in (*imported, *lazy):
            if name in there and name not in order and name != module.name:
                visit(load(name))
        order[module.name] = module

    for name in names:
        visit(load(name))
    return list(order.values())


class Names:
    """Maps top-level names of modules to their names in the files."""

    def __init__(self, modules: list[Module], kept: set[Statement], entries: set[Module]):
        self.final: dict[Name, str] = {}
        # Statements that another module has too, mapped to the names there.
        self.twins: dict[Statement, Name] = {}
        foreign: dict[str, set[Foreign]] = {}
        for each in kept:
            for name in each.foreign:
                foreign.setdefault(name.bound, set()).add(name)
        defining: dict[str, list[Module]] = {}
        for module in modules:
            for name, statements in module.defining.items():
                if kept.intersection(statements) and not isinstance(module.imported.get(name), Name):
                    defining.setdefault(name, []).append(module)
        for name, meanings in foreign.items():
            if len(meanings) > 1:
                raise ValueError(f"`{name}` is imported in more than one way: {sorted(map(_import_line, meanings))}.")
        taken = {*defining, *foreign, *dir(builtins)}
        for name, places in defining.items():
            first, *others = [module.defining[name] for module in places]
            if name == "__all__" or (not others and name not in foreign and not hasattr(builtins, name)):
                continue
            if others and name not in foreign and all(_same(first, statements) for statements in others):
                self.twins |= {statements[0]: Name(places[0].name, name) for statements in others}
                self.final |= {Name(module.name, name): name for module in places}
            elif not name.startswith("_") and (not name.isupper() or entries.intersection(places)):
                where = ", ".join(module.name for module in places)
                raise ValueError(
                    f"`{name}` has several meanings in one repository, one of them in {where}: rename it."
                )
            else:
                for module in places:
                    new = next(each for each in _longer_names(name, module) if each not in taken)
                    taken.add(new)
                    self.final[Name(module.name, name)] = new

    def __getitem__(self, name: Name) -> str:
        return self.final.get(name, name.name)


def _same(one: list[Statement], other: list[Statement]) -> bool:
    """Whether both are single assignments with the same meaning in any module."""
    (a, *more), (b, *others) = one, other
    plain = not more and not others and len(a.uses) == len(b.uses) == 1 and a.foreign == b.foreign
    return plain and isinstance(a.node, ast.Assign) and ast.dump(a.node) == ast.dump(b.node)


def _longer_names(name: str, module: Module) -> Iterator[str]:
    """`_check` of subquad_kernels.wkv as `_wkv_check`, `_Plan` as `_WkvPlan`, `BACKENDS` as `WKV_BACKENDS`."""
    parts = module.name.split(".")
    parts = parts[-1:] if parts[0] == "subquad" else parts[1:]
    bare = name.lstrip("_")
    mark = name[: len(name) - len(bare)]
    for prefix in (parts[0], "_".join(parts), "_".join((*parts, module.name.partition(".")[0]))):
        if bare.isupper():
            yield f"{mark}{prefix.upper()}_{bare}"
        else:
            yield f"{mark}{prefix.title().replace('_', '')}{bare}" if bare[0].isupper() else f"{mark}{prefix}_{bare}"


class File:
    """
    One file of a repository.

    Args:
        parts: the kept statements of each of its modules.
        entry: the module that the repository names, if any; then `doc` is its docstring.
    """

    def __init__(self, name: str, parts: list[tuple[Module, list[Statement]]], entry: str | None, doc: str):
        self.name, self.parts, self.entry, self.doc = name, parts, entry, doc

    def text(self, names: Names, file_of: Callable[[Name], str]) -> str:
        sections = []
        for module, statements in self.parts:
            lines = [] if module.name == self.entry else _heading(module, len(statements) == len(module.statements))
            previous = None
            for each in statements:
                lines += [""] * _blank_lines(previous, each) + self._lines_of(each, names, file_of)
                previous = each
            sections.append("\n".join(lines).strip("\n"))
        statements = [each for _, part in self.parts for each in part]
        foreign = {name for each in statements for name in each.foreign}
        self._check_bound_again(statements)
        own = {name for each in statements for _, name in each.uses if file_of(name) != self.name}
        if moved := sorted(name for name in own if any(name.name in x.rebinds for x in load(name.module).statements)):
            raise ValueError(f"{self.name} would not see when these names are bound again: {moved}.")
        own = [Foreign(f".{file_of(name)}", names[name], None) for name in own]
        optional = sorted(name for name in foreign if name.optional)
        blocks = _import_blocks([*(foreign - {*optional}), *own])
        doc = f'"""\n{self.doc}\n"""' if "\n" in self.doc else f'"""{self.doc}"""'
        head = f"{doc}\n\n" + "\n\n".join(blocks)
        guarded = [_guard(_import_block(optional))] if optional else []
        return "\n\n\n".join([head, *guarded, *sections]) + "\n"

    def _check_bound_again(self, statements: list[Statement]) -> None:
        """Checks names that a module imports and rebinds: the whole file would see the new value."""
        for one in statements:
            again = [_home(home) for name in one.defines if isinstance(home := one.module.imported.get(name), Name)]
            for other in statements:
                if again and other is not one and any(name in again for _, name in other.uses):
                    where = f"{other.module.name}, line {other.node.lineno}"
                    raise ValueError(f"{where}: {one.module.name} binds a name again that this uses.")

    def _lines_of(self, statement: Statement, names: Names, file_of: Callable[[Name], str]) -> list[str]:
        """The lines of a statement, with its names in the files, and its imports."""
        module, first = statement.module, statement.first_line
        lines = module.lines[first - 1 : statement.node.end_lineno]
        renamed = {local: names[name] for local, name in statement.uses if names[name] != local}
        if renamed:
            if clash := statement.bound_inside & renamed.keys():
                raise ValueError(f"{module.name}, line {first}: other names hide the module's {sorted(clash)}.")
            _rename(statement, renamed, lines, first)
        for node in sorted(statement.imports, key=lambda each: each.lineno, reverse=True):
            indent = " " * node.col_offset
            if own := module.own_names(node):
                if any(local != names[_home(name)] for local, name in own):
                    raise ValueError(f"{module.name}, line {node.lineno}: a name of ours is imported as another.")
                homes = [(file_of(_home(name)), local) for local, name in own]
                block = _import_block(Foreign(f".{file}", name, None) for file, name in homes if file != self.name)
            elif any(each.optional for _, each in _foreign_names(node)):
                block = _guard(ast.unparse(node))
            else:
                continue
            start, stop = node.lineno - first, node.end_lineno - first + 1
            if not block and not lines[stop]:
                stop += 1
            lines[start:stop] = textwrap.indent(block, indent).splitlines()
        return lines


def _rename(statement: Statement, renamed: dict[str, str], lines: list[str], first: int) -> None:
    """Renames in the lines of a statement, starting at line `first`."""
    places = [(each.lineno, each.col_offset, each.id) for each in statement.names if each.id in renamed]
    for line, offset, name in sorted(places, reverse=True):  # offsets are in bytes
        text = lines[line - first].encode()
        if text[offset : offset + len(name)] != name.encode():
            raise ValueError(f"{statement.module.name}, line {line}: `{name}` is not where Python finds it.")
        lines[line - first] = (text[:offset] + renamed[name].encode() + text[offset + len(name) :]).decode()
    words = f"(?:{'|'.join(sorted(renamed))})"

    def replace(pattern, line):
        lines[line] = re.sub(pattern.replace("NAME", words), lambda found: renamed[found[0]], lines[line])

    replace(r"(?<=^def )NAME\b|(?<=^class )NAME\b", statement.node.lineno - first)
    for each in ast.walk(statement.node):
        if isinstance(each, ast.Global):
            replace(r"\bNAME\b", each.lineno - first)
    for each in statement.quoted:
        replace(r"\bNAME\b", each.lineno - first)
    for line in range(len(lines)):  # in comments and docstrings
        replace(r"(?<=`)NAME(?=`)", line)


def _heading(module: Module, whole: bool) -> list[str]:
    """A comment: the module, and the first sentence about it, if the file has the whole of it."""
    if not whole:
        return [f"# From {module.name}.", ""]
    sentence = re.match(r".*?\.(?=\s|$)|.*", " ".join(module.doc.split("\n\n")[0].split()))[0]
    return [*textwrap.wrap(f"{module.name}: {sentence}", LINE_LENGTH, initial_indent="# ", subsequent_indent="# "), ""]


def _blank_lines(previous: Statement | None, statement: Statement) -> int:
    """The number of empty lines above a statement."""
    definition = isinstance(statement.node, ast.FunctionDef | ast.ClassDef)
    if previous is None:
        return 1 if definition else 0
    if definition or isinstance(previous.node, ast.FunctionDef | ast.ClassDef):
        return 2
    above = statement.module.lines[: statement.first_line - 1]
    return min(2, next((n for n, line in enumerate(reversed(above)) if line), 0))


def _guard(block: str) -> str:
    return f"try:\n{textwrap.indent(block, '    ')}\nexcept ImportError:\n    raise"


def _import_blocks(names: Iterable[Foreign]) -> list[str]:
    """Import statements: standard library, other packages, neighbouring files."""
    groups: dict[int, list[Foreign]] = {}
    for each in names:
        package = each.module.partition(".")[0]
        groups.setdefault(2 if not package else 0 if package in sys.stdlib_module_names else 1, []).append(each)
    return [_import_block(group) for _, group in sorted(groups.items())]


def _import_block(names: Iterable[Foreign]) -> str:
    lines: dict[tuple, list[str]] = {}
    for each in names:
        alone = f"{each.name}" if each.alias else ""
        key = each.name is not None, each.module.lower(), each.module, alone, each.alias or ""
        lines.setdefault(key, []).append(each.name or each.module)
    return "\n".join(_import_line_of(key, found) for key, found in sorted(lines.items()))


def _import_line(name: Foreign) -> str:
    return _import_block([name])


def _import_line_of(key: tuple, names: list[str]) -> str:
    is_from, _, module, _, alias = key
    names = [f"{name} as {alias}" if alias else name for name in sorted(set(names), key=_order)]
    if not is_from:
        return f"import {names[0]}"
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _order(name: str) -> tuple[int, str, str]:
    """Constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name.lower(), name


def merge(
    modules: Iterable[str], packages: dict[str, list[tuple[str, str]]] | None = None, version: str = ""
) -> dict[str, str]:
    """
    Merges modules with the definitions that they use.

    Args:
        modules: import paths. Each becomes a file of its own, with its dependencies; shared ones are in the first file
            by name.
        packages: package to two files for the definitions used from it, as names and docstrings: for modules that do
            not need packages which may be missing, and for modules that do.
        version: for the first line of every file.

    Returns:
        the text of each file, by its name.

    Raises:
        ValueError: if the code cannot be merged as written. The message names the module and the remedy.
    """
    packages = {package: tuple(files) for package, files in (packages or {}).items()}
    return dict(_merge(tuple(sorted(set(modules))), tuple(packages.items()), version))


@functools.cache
def _merge(modules: tuple[str, ...], packages: tuple[tuple[str, tuple], ...], version: str) -> dict[str, str]:
    packages = dict(packages)
    reached = {module: _reach(load(module).statements) for module in modules}
    kept = set().union(*reached.values())
    everywhere = _reach(
        [each for module in modules for each in load(module).statements], through=lambda each: not each.module.optional
    )
    order = _ordered(modules, kept)
    names = Names(order, kept, {load(module) for module in modules})

    def place(statement: Statement) -> str:
        if files := packages.get(statement.module.name.partition(".")[0]):
            return files[0 if statement in everywhere and not statement.module.optional else 1][0]
        entry = next(module for module in modules if statement in reached[module])
        return entry.rpartition(".")[2]

    def file_of(name: Name) -> str:
        statement = load(name.module).defining[name.name][0]
        return file_of(names.twins[statement]) if statement in names.twins else place(statement)

    parts: dict[str, dict[str, list[Statement]]] = {}
    for module in order:
        for each in module.statements:
            if each in kept and each not in names.twins:
                parts.setdefault(place(each), {}).setdefault(module.name, []).append(each)
    entries = {module.rpartition(".")[2]: module for module in modules}
    docs = {name: load(module).doc for name, module in entries.items()}
    docs |= {name: doc for files in packages.values() for name, doc in files}
    files = {}
    for name, found in sorted(parts.items()):
        file = File(name, [(load(module), part) for module, part in found.items()], entries.get(name), docs[name])
        files[f"{name}.py"] = file.text(names, file_of)
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in files.items()).encode()).hexdigest()
    header = HEADER.format(version=version and f" {version}", digest=digest[:16])
    return {name: header + text for name, text in files.items()}


__all__ = ["merge"]
