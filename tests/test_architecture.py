# SPDX-License-Identifier: Apache-2.0
"""The walls of the house: imports go down only, equations do not know each other, nobody goes in circles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
REPOSITORY = ROOT.parent.parent

FLOORS: dict[str, int] = {
    # 0 words
    "errors": 0,
    "world": 0,
    "fragments": 0,
    "tree": 0,
    "calls": 0,
    "randomness": 0,
    "gain": 0,
    "journal": 0,
    "event_file": 0,
    "processes": 0,
    "visible": 0,
    "standard_streams": 0,
    "version": 0,
    "lazy": 0,
    "extras": 0,
    "schedulers": 0,
    # 1 communication
    "transport": 1,
    # 2 equations
    "optimizers": 2,
    "schedule": 2,
    "payload": 2,
    "codec": 2,
    "topology": 2,
    "outer": 2,
    # 3 the rule
    "rule": 3,
    "recipes": 3,
    # 4 services
    "flow": 4,
    "guards": 4,
    "asynchronous": 4,
    "elastic": 4,
    "rounds": 4,
    "driver": 4,
    "pipeline": 4,
    "engine": 4,
    "messages": 4,
    "mistakes": 4,
    "together": 4,
    "carriers": 4,
    "backward": 4,
    "flat_gradient": 4,
    "blocks": 4,
    "exchange": 4,
    "lanes": 4,
    "update": 4,
    "gradient_update": 4,
    "data": 4,
    "amp": 4,
    "buffers": 4,
    "footer": 4,
    "starting": 4,
    "checks": 4,
    "checkpoint": 4,
    "regroup": 4,
    "ending": 4,
    "export": 4,
    "watch": 4,
    "tuning": 4,
    "settings": 4,
    "sinks": 4,
    "control": 4,
    "session": 4,
    "attaching": 4,
    "attached": 4,
    # 5 edges, and the wings, which use the public face only
    "lightrnn": 5,
    "dual": 5,
    "observe": 5,
    "sim": 5,
    "doctor": 5,
    "planner": 5,
    "zero": 5,
    "cli": 5,
    "adapters": 5,
    "testing": 5,
    # the roof: the names that a user imports
    "__init__": 6,
    "__main__": 6,
}
WINGS = ("lightrnn", "dual")
EQUATIONS = ("schedule", "payload", "codec", "topology", "outer")
SHARED = ("base", "__init__", "arrival", "layout", "two_sided", "bits", "groups", "select")
COMPOSED = {
    "codec.named": "codec",
    "codec.warm": "codec.dense",
    "outer.frozen_adam": "outer.average",
    "schedule.paced": "schedule.every_block",
}
"""What is made of equations: a list of names, a codec after a warm-up, a mean applied in another way, blocks whose
period follows measured times."""


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


def room(module: str) -> str:
    return module.split(".")[0]


def test_every_room_has_a_floor() -> None:
    assert {room(m) for m in MODULES} <= set(FLOORS), "name the new module's floor here and in docs"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    for other in imports(MODULES[module]):
        assert FLOORS[room(other)] <= FLOORS[room(module)], f"{module} imports {other}, which is above it"


def test_equations_do_not_know_each_other() -> None:
    for module, path in MODULES.items():
        place, _, name = module.partition(".")
        if place not in EQUATIONS or not name or name in SHARED:
            continue
        for other in imports(path):
            other_place, _, other_name = other.partition(".")
            if other.startswith(COMPOSED.get(module, "-")):
                continue
            if other_place in EQUATIONS and other_name not in ("", *SHARED):
                raise AssertionError(f"the equation {module} imports the equation {other}")


def test_the_wings_use_the_public_face_only() -> None:
    for module, path in MODULES.items():
        if room(module) in WINGS:
            strangers = {other for other in imports(path) if room(other) != room(module)}
            assert not strangers, (
                f"{module} imports {strangers}: a wing takes what `import paceline` gives to everybody"
            )


def test_no_circles() -> None:
    graph = {
        module: imports(path, anywhere=False) - {module} for module, path in MODULES.items() if module != "__init__"
    }
    for module in graph:  # importing a.b also loads a, whose own imports belong to the same room
        graph[module] = {other for other in graph[module] if other in graph and not module.startswith(f"{other}.")}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module in done:
            return
        for other in sorted(graph[module]):
            visit(other, (*path, module))
        done.add(module)

    for module in graph:
        visit(module, ())
    assert len(done) == len(graph)


def test_the_session_and_the_rule_know_no_method_by_name() -> None:
    """The code that runs a rule has no recipe's name in it, outside of documentation."""
    names = set(paceline.RECIPES) - {"sync", "averaging"}  # everyday words
    for module in ("rule", "flow", "exchange", "lanes", "update", "gradient_update", "export"):
        tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
        words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        words |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not words & names, module


@pytest.mark.parametrize("folder", ["src", "tests", "examples", "benchmarks"])
def test_every_file_names_its_licence_and_purpose(folder: str) -> None:
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
        if folder == "src" or path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_no_pickle_and_no_eval() -> None:
    for module, path in MODULES.items():
        if module in ("sim.simulate", "zero.program"):
            continue  # they run the user's own script
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), module
            if isinstance(node, ast.Import):
                assert not {a.name for a in node.names} & {"pickle", "marshal", "dill"}, module
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr != "load", module
