# SPDX-License-Identifier: Apache-2.0
"""Classes of a source tree as they are written: their methods, and how many arguments it takes to make one."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Class:
    """A class.

    Attributes:
        name: of the class.
        path, line: where it is defined.
        bases: last parts of the names of its bases.
        methods: names of what is defined in its body; a property and its setter are one.
        parameters: names that `__init__` takes besides self, and of a dataclass without one the fields for which the
            `__init__` that is made has a parameter, without those of its bases.
        made: whether that is a dataclass's (or a NamedTuple's) own.
        record: whether it is such a class and has no method but properties, class methods, static ones and those with
            two underscores: it only keeps what it was given.
    """

    name: str
    path: str
    line: int
    bases: tuple[str, ...]
    methods: frozenset[str]
    parameters: tuple[str, ...]
    made: bool
    record: bool

    @property
    def place(self) -> str:
        """Where it stands."""
        return f"{self.path}:{self.line}"


def classes(files: Mapping[str, Path], root: Path) -> list[Class]:
    """All classes, also those within functions and other classes."""
    found = []
    for path in files.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.append(_class(node, str(path.relative_to(root))))
    return found


def all_parameters(one: Class, known: Sequence[Class]) -> list[str]:
    """Those of `one`, and of the dataclasses that it inherits from; of several of a name, one of its file."""
    names, waiting = list[str](), [one]
    while waiting:
        here = waiting.pop()
        names = [*(name for name in here.parameters if name not in names), *names]
        for base in here.bases if here.made else ():
            named = [other for other in known if other.name == base and other != here]
            waiting += sorted(named, key=lambda other: other.path != here.path)[:1]
    return names


def descendants(name: str, known: Sequence[Class]) -> set[str]:
    """The class of this name and all that inherit from it, by name."""
    found, before = {name}, set[str]()
    while found != before:
        before = set(found)
        found |= {one.name for one in known if found & set(one.bases)}
    return found


def _class(node: ast.ClassDef, path: str) -> Class:
    functions = [child for child in node.body if isinstance(child, Function)]
    methods = frozenset(child.name for child in functions)
    bases = tuple(_last(base) for base in node.bases)
    made = "__init__" not in methods and (_is_dataclass(node) or "NamedTuple" in bases)
    init = next((child for child in functions if child.name == "__init__"), None)
    parameters = tuple(_fields(node)) if made else tuple(_arguments(init)) if init is not None else ()
    record = made and all(_only_shows(child) for child in functions)
    return Class(node.name, path, node.lineno, bases, methods, parameters, made, record)


def _last(node: ast.expr) -> str:
    """`B` of `a.B[c]`."""
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    if isinstance(node, ast.Call):
        return _last(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _decorators(node: ast.ClassDef | Function) -> set[str]:
    return {_last(one) for one in node.decorator_list}


def _is_dataclass(node: ast.ClassDef) -> bool:
    for one in node.decorator_list:
        if _last(one) == "dataclass":
            given = one.keywords if isinstance(one, ast.Call) else []
            return not any(word.arg == "init" and _is_false(word.value) for word in given)
    return False


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Annotated names of the body that `__init__` takes: not class variables, and not `field(init=False)`."""
    for child in node.body:
        if not isinstance(child, ast.AnnAssign) or not isinstance(child.target, ast.Name):
            continue
        value = child.value
        given = value.keywords if isinstance(value, ast.Call) and _last(value.func) == "field" else []
        apart = any(word.arg == "init" and _is_false(word.value) for word in given)
        if not apart and _last(child.annotation) != "ClassVar":
            yield child.target.id


def _arguments(function: Function) -> Iterator[str]:
    """All but self; `*args` and `**kwargs` are one each."""
    given = function.args
    yield from [one.arg for one in (*given.posonlyargs, *given.args)][1:]
    yield from (one.arg for one in given.kwonlyargs)
    yield from (one.arg for one in (given.vararg, given.kwarg) if one is not None)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _only_shows(function: Function) -> bool:
    dunder = function.name.startswith("__") and function.name.endswith("__")
    return dunder or bool(_decorators(function) & {"property", "cached_property", "classmethod", "staticmethod"})
