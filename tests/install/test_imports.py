# SPDX-License-Identifier: Apache-2.0
"""What an import brings with it, and that what loads later is there all the same."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
WITH_TORCH = {"numpy", "safetensors"}
"""What a program with torch has anyway, and the format of checkpoints, which `attach` reads and writes."""
ONE_RUN_OF_MANY = {
    *("http.server", "paceline.cli", "paceline.observe.reports", "paceline.forecast.sim"),
    *("paceline.update.server.engine", "paceline.flow.engine", "paceline.flow.control.client"),
    *("paceline.communication.sockets.certificates", "paceline.communication.ring", "paceline_plugins.zero"),
    *("paceline_plugins.data.cache.cache", "paceline_plugins.data.parquet", "paceline_plugins.forecast.planner"),
}
"""Subsystems that a run loads when it has a use for them."""


def loaded(before: str, code: str) -> set[str]:
    """Modules that `code` loads in a fresh interpreter in which `before` has run."""
    told = (
        f"import sys\n{before}\nwere = set(sys.modules)\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
        "import json\nprint('\\n' + json.dumps(sorted(set(sys.modules) - were)))"
    )
    said = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, said.stderr
    return set(json.loads(said.stdout.splitlines()[-1]))


def others(modules: set[str]) -> set[str]:
    """The packages of others among them."""
    tops = {name.partition(".")[0] for name in modules}
    return tops - set(sys.stdlib_module_names) - {"paceline", "paceline_plugins"}


@pytest.mark.claim
@pytest.mark.processes
def test_the_import_alone_brings_nothing_of_others() -> None:
    modules = loaded("", "import paceline")
    assert not others(modules)
    assert {name for name in modules if name.startswith("paceline.")} == {
        "paceline.core",
        "paceline.core.lazy",
        "paceline.errors",
        "paceline.version",
    }


@pytest.mark.claim
@pytest.mark.processes
def test_attach_brings_what_a_run_needs() -> None:
    modules = loaded("import torch", "import paceline; paceline.attach")
    assert others(modules) <= WITH_TORCH
    assert not modules & ONE_RUN_OF_MANY


@pytest.mark.processes
@pytest.mark.parametrize("words", [("--help",), ("run", "--workers", "2", "--print", "train.py")])
def test_commands_that_compute_nothing_go_without_torch(words: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import paceline\n", encoding="utf-8")
    given = ["paceline", *(str(script) if word == script.name else word for word in words)]
    if "--print" in words:
        given[2:2] = ["--log", str(tmp_path / "log")]
    modules = loaded(f"sys.argv = {given!r}", "from paceline.cli import app; app()")
    assert "paceline.cli.main" in modules
    assert not others(modules) & {"torch", "numpy", "matplotlib", "cryptography", "safetensors"}
    assert not modules & {"http.server", "urllib.request"}  # for --notice and watch --web alone


def lazy_packages() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(ROOT.parent.rglob("__init__.py")):
        text = path.read_text(encoding="utf-8")
        if "lazily(" in text:
            found[".".join(path.relative_to(ROOT.parent).parts[:-1])] = ast.parse(text)
    return found


def table_of(tree: ast.Module) -> dict[str, str]:
    """What the package gives to `lazily`."""
    (call,) = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "lazily")
    given = ast.literal_eval(call.args[1])
    assert isinstance(given, dict)
    return given


def typed(package: str, tree: ast.Module) -> dict[str, str]:
    """What it imports for type checkers: name -> module within the package."""
    blocks = [n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    found = {}
    for node in (node for block in blocks for node in block.body):
        assert isinstance(node, ast.ImportFrom) and node.module
        module = node.module.removeprefix(f"{package}.")
        found |= {alias.name: module for alias in node.names}
    return found


@pytest.mark.parametrize("package", lazy_packages())
def test_what_loads_later_is_what_type_checkers_see(package: str) -> None:
    tree = lazy_packages()[package]
    table = table_of(tree)
    assert table == typed(package, tree)
    module = importlib.import_module(package)
    folder = Path(str(module.__file__)).parent
    assert set(table) <= set(getattr(module, "__all__", ())) <= set(dir(module))
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None
    # a module of the same name would take the name's place when it is loaded
    assert not {path.stem for path in folder.iterdir()} & set(table)


@pytest.mark.processes
def test_modules_are_found_without_an_import_of_their_own() -> None:
    modules = loaded(
        "import paceline", "import paceline_plugins.data; paceline_plugins.data.Files; paceline.forecast.sim.link"
    )
    assert {"paceline_plugins.data.cache.files", "paceline.forecast.sim.clock"} <= modules
