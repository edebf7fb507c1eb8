# SPDX-License-Identifier: Apache-2.0
"""The walls of the house: imports go down only, equations do not know each other, nobody goes in circles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
REPOSITORY = ROOT.parent.parent

FLOORS = (
    *("errors", "version", "extensions", "core"),  # words
    *("communication.schedulers", "communication"),  # service 1
    "observe",  # what a run says of itself
    "rules",  # the five choices
    "tuning",  # service 5
    *("data", "checkpoint"),  # service 4
    *("update.exchange", "update.monitor", "update.few_blocks", "update.engine", "update.server"),  # service 3
    "flow",  # service 2
    "run",  # what the user holds
    *("forecast.sim", "testing", "doors.adapters", "cli"),  # ways in
    *("__init__", "__main__"),  # the roof: the names that a user imports
)
"""Every folder has a floor of its own, and imports from the floors before it only."""
DEEP = ("communication", "doors", "forecast", "update")
"""Folders of several floors."""
PLUGINS = ROOT.with_name("paceline_plugins")
FACE = {
    "paceline.core.lazy",
    "paceline.cli.console",
    "paceline.cli.workers",
    "paceline_plugins.report.page",
    "paceline_plugins.report.canvas",
}
"""What a distribution that adds commands may import beside `paceline` itself: docs/guide/plugins.md."""
EQUATIONS = ("schedule", "payload", "codec", "topology", "outer")
SHARED = (
    *("base", "__init__", "arrival", "layout", "two_sided", "bits", "groups"),
    *("select", "gain", "diversity", "growth", "probe", "whole", "restart"),
)
COMPOSED = {
    "rules.codec.named": "rules.codec",
    "rules.codec.warm": "rules.codec.dense",
    "rules.outer.frozen_adam": "rules.outer.average",
    "rules.schedule.paced": "rules.schedule.every_block",
}
"""What is made of equations: a list of names, a codec after a warm-up, a mean applied in another way, blocks whose
period follows measured times."""
UPWARD: dict[str, str] = {}
"""Modules of the core that name plugins."""
SIDEWAYS: set[tuple[str, str]] = set()
"""Plugins that name another one."""
KNOWN_CIRCLES: set[frozenset[str]] = set()
"""Files of one folder that name each other's types; none may be added."""


def modules() -> dict[str, Path]:
    """Dotted name within the package -> file."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        found[".".join(parts)] = path
    return found


MODULES = modules()


def imports(path: Path, *, anywhere: bool = True) -> set[str]:
    """Modules of this package that a file imports; without `anywhere`, only what is imported when it is loaded."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree)) if anywhere else _loaded(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(path, node)
            names = [source, *(f"{source}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name == "paceline":
                continue
            if name.startswith("paceline.") and name.removeprefix("paceline.") in MODULES:
                found.add(name.removeprefix("paceline."))
    return found


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    """The module that `from ... import` names, also where it is relative."""
    if node.level == 0:
        return str(node.module)
    parts = ["paceline", *path.relative_to(ROOT).parts[:-1]]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _loaded(tree: ast.Module) -> list[ast.AST]:
    """Statements that run at import: not inside functions, not under TYPE_CHECKING."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        found.append(node)
        waiting += list(ast.iter_child_nodes(node))
    return found


def floor(module: str) -> str:
    """The folder or file that it belongs to."""
    parts = module.split(".")
    deep = ".".join(parts[:2])
    return deep if parts[0] in DEEP and deep in FLOORS else parts[0]


def test_imports_go_down_only() -> None:
    """Types and late imports count, too."""
    heights = {name: height for height, name in enumerate(FLOORS)}
    assert {floor(module) for module in MODULES} - set(DEEP) <= set(FLOORS), "name the new folder's floor here"
    up = []
    for module, path in MODULES.items():
        if module in DEEP and module not in heights:
            assert imports(path) <= {"core", "core.lazy"}
            continue
        for other in imports(path) - set(DEEP) | imports(path) & set(FLOORS):
            if floor(other) != floor(module) and heights[floor(other)] > heights[floor(module)]:
                up.append(f"{module} imports {other}")
    assert not up, "these are above it"


def test_equations_do_not_know_each_other() -> None:
    for module, path in MODULES.items():
        _, place, name = [*module.split("."), "", ""][:3] if module.startswith("rules.") else ("", "", "")
        if place not in EQUATIONS or not name or name in SHARED:
            continue
        for other in imports(path):
            _, other_place, other_name = [*other.split("."), "", ""][:3] if other.startswith("rules.") else ("", "", "")
            if other.startswith(COMPOSED.get(module, "-")):
                continue
            if other_place in EQUATIONS and other_name not in ("", *SHARED):
                raise AssertionError(f"the equation {module} imports the equation {other}")


PACKAGES = sorted((REPOSITORY / "packages").glob("*/src/paceline_*"))


def imported(path: Path) -> set[str]:
    """All modules that a file imports by their whole names, and names from `paceline`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.skipif(not PACKAGES, reason="the packages are not beside the package")
def test_the_packages_use_the_public_face_only() -> None:
    """Neither other modules of paceline nor each other."""
    allowed = {"paceline", *(f"paceline.{name}" for name in paceline.__all__)}
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            for name in imported(path):
                inside = name.startswith(("paceline.", "paceline_")) and name.split(".")[0] != package.name
                face = any(f"{name}.".startswith(f"{module}.") for module in FACE)
                assert not inside or face or name in allowed, f"{path} imports {name}: see docs/guide/plugins.md"


def test_what_the_core_still_imports_of_plugins() -> None:
    """The table may only get shorter: what a plugin is for is found by its entry point, or handed to it."""
    upward = {
        (module, name.split(".")[1])
        for module, path in MODULES.items()
        for name in imported(path)
        if name.startswith("paceline_plugins.")
    }
    assert upward == {(module, plugin) for module, plugins in UPWARD.items() for plugin in plugins.split()}


def test_what_plugins_still_import_of_each_other() -> None:
    sideways = set()
    for path in PLUGINS.rglob("*.py"):
        own = path.relative_to(PLUGINS).parts[0]
        others = {name.split(".")[1] for name in imported(path) if name.startswith("paceline_plugins.")}
        sideways |= {(own, other) for other in others - {own}}
    assert sideways == SIDEWAYS


@pytest.mark.skipif(not PACKAGES, reason="the packages are not beside the package")
def test_no_circles_in_the_packages() -> None:
    for package in PACKAGES:
        places = {
            path: ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in package.rglob("*.py")
        }
        files = {name.removesuffix(".__init__"): path for path, name in places.items()}
        files.pop(package.name)  # shows what the others have
        graph = {
            module: {
                other
                for name in imported(path)
                for other in (name, name.rpartition(".")[0])
                if other in files and other != module and not module.startswith(f"{other}.")
            }
            for module, path in files.items()
        }
        assert any(graph.values()) and not circles(graph)


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which reaches all others of the group."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for other in graph[waiting.pop()] - found:
                found.add(other)
                waiting.append(other)
        return found

    reach = {module: reached(module) for module in graph}
    return {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }


def test_no_circles() -> None:
    """Neither at import nor in types."""
    graph = {module: imports(path) - {module} for module, path in MODULES.items() if module != "__init__"}
    for module in graph:  # importing a.b also loads a, whose own imports belong to the same folder
        graph[module] = {other for other in graph[module] if other in graph and not module.startswith(f"{other}.")}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}
    assert circles(graph) <= KNOWN_CIRCLES


def test_the_session_and_the_rule_know_no_method_by_name() -> None:
    """The code that runs a rule has no recipe's name in it, outside of documentation."""
    names = set(paceline.RECIPES) - {"sync", "averaging", "auto"}  # everyday words
    for module, path in MODULES.items():
        if not module.startswith(("rules.rule", "update.exchange", "update.engine.")):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        words |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not words & names, module


def test_every_file_names_its_licence_and_purpose() -> None:
    for folder in ("src", "packages", "tests", "examples", "benchmarks"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            line, _, rest = path.read_text(encoding="utf-8").partition("\n")
            assert line == "# SPDX-License-Identifier: Apache-2.0", path
            if "src" in path.relative_to(REPOSITORY).parts or path.name != "__init__.py":
                assert re.match(r'(#.*\n|\n)*r?"""', rest), f"{path} has no docstring"
