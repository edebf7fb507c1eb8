# SPDX-License-Identifier: Apache-2.0
"""Who imports whom in a source tree: also imports inside functions, and those that only a type checker makes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Import:
    """One module imports another.

    Attributes:
        source: the dotted name of the module that imports.
        target: of the module that is imported; of a package, its `__init__.py`.
        line: in the file of `source`.
        how: "" where it happens when `source` is loaded, "late" inside a function, "type" under `TYPE_CHECKING`.
    """

    source: str
    target: str
    line: int
    how: str


def modules(package: Path) -> dict[str, Path]:
    """Dotted name, beginning with the package's -> file."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(files: Mapping[str, Path]) -> list[Import]:
    """All imports between these modules."""
    found = []
    for source, path in files.items():
        home = source if path.name == "__init__.py" else source.rpartition(".")[0]
        for node, how in _statements(ast.parse(path.read_text(encoding="utf-8")), ""):
            targets = {name for name in _names(node, home, files) if name in files and name != source}
            found += [Import(source, target, node.lineno, how) for target in sorted(targets)]
    return found


def _statements(node: ast.AST, how: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """The import statements below a node, and how each happens."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, how
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _statements(child, how or "late")
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for part in child.body:
                yield from _statements(ast.Module([part], []), "type")
            for part in child.orelse:
                yield from _statements(ast.Module([part], []), how)
        else:
            yield from _statements(child, how)


def _names(node: ast.Import | ast.ImportFrom, home: str, files: Mapping[str, Path]) -> list[str]:
    """Dotted names that a statement asks for; of `from a import b`, `a.b` where that is a module and else `a`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        above = home.split(".")[: len(home.split(".")) - node.level + 1]
        base = ".".join([*above, *([base] if base else [])])
    return [f"{base}.{alias.name}" if f"{base}.{alias.name}" in files else base for alias in node.names]


# -- rooms -------------------------------------------------------------------------------------------------------------


def room(module: str, files: Mapping[str, Path], depth: int | None = None) -> str:
    """The folder of a module, or of its first `depth` parts; a loose file of the root is a room of its own."""
    parts = module.split(".")
    folder = parts if files[module].name == "__init__.py" else parts[:-1]
    if len(folder) == 1:
        return module
    return ".".join(folder[: None if depth is None else depth + 1])


def between_modules(found: Iterable[Import]) -> Graph:
    """Module -> modules that it imports."""
    graph: Graph = {}
    for one in found:
        graph.setdefault(one.source, set()).add(one.target)
        graph.setdefault(one.target, set())
    return graph


def between_rooms(found: Iterable[Import], files: Mapping[str, Path], depth: int | None = None) -> Graph:
    """Room -> rooms that it imports; what an `__init__.py` shows of what lies below it does not count."""
    graph: Graph = {room(module, files, depth): set() for module in files}
    for one in found:
        shows = files[one.source].name == "__init__.py" and one.target.startswith(f"{one.source}.")
        source, target = room(one.source, files, depth), room(one.target, files, depth)
        if source != target and not shows:
            graph[source].add(target)
    return graph


# -- circles -----------------------------------------------------------------------------------------------------------


def circles(graph: Graph) -> list[list[str]]:
    """The shortest circle of each knot, a knot being names each of which leads to each other; ends where it begins."""
    return [min((_way(graph, knot, name) for name in sorted(knot)), key=len) for knot in knots(graph)]


def _way(graph: Graph, inside: set[str], name: str) -> list[str]:
    """The shortest way from a name back to itself."""
    ways, seen = [[name]], {name}
    for way in ways:  # grows while it is gone through
        for other in sorted(graph[way[-1]] & inside):
            if other == name:
                return [*way, name]
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    raise AssertionError(f"{name} is in no circle")


def knots(graph: Graph) -> list[set[str]]:
    """Strongly connected components of two names or more (Tarjan's algorithm, without recursion), largest first."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    open_, found = list[str](), list[set[str]]()
    for root in sorted(graph):
        waiting = [(root, iter(sorted(graph[root])))] if root not in number else []
        while waiting:
            name, others = waiting[-1]
            if name not in number:
                number[name] = low[name] = len(number)
                open_.append(name)
            for other in others:
                if other not in number:
                    waiting.append((other, iter(sorted(graph[other]))))
                    break
                if other in open_:
                    low[name] = min(low[name], number[other])
            else:
                waiting.pop()
                if waiting:
                    low[waiting[-1][0]] = min(low[waiting[-1][0]], low[name])
                if low[name] == number[name]:
                    begin = open_.index(name)
                    found.append(set(open_[begin:]))
                    del open_[begin:]
    return sorted((knot for knot in found if len(knot) > 1), key=lambda knot: (-len(knot), sorted(knot)))
