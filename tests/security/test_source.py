# SPDX-License-Identifier: Apache-2.0
"""What the source never does: run what it reads, unpickle, trust whoever has a certificate of anybody's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
import paceline_plugins
from paceline.errors import WorkerFailedError
from paceline.run import launch

ROOT = Path(paceline.__file__).parent
PLUGINS = Path(paceline_plugins.__file__).parent
RUNNERS = (ROOT / "forecast" / "sim" / "simulate.py", PLUGINS / "zero" / "program.py")
"""They run the user's script."""
COMPILER = ROOT / "cli" / "run" / "program.py"
"""It compiles the user's script to see whether it can be run, and runs nothing."""
OWN = ROOT / "run" / "launch.py"
"""It loads what its own run has written into a folder that nobody else may enter: see the test below."""
FILES = sorted(path for root in (ROOT, PLUGINS) for path in root.rglob("*.py") if path not in (*RUNNERS, OWN))
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "system", "popen"}
ATTRIBUTES = {
    *("CERT_NONE", "CERT_OPTIONAL", "_create_unverified_context"),
    *("all_gather_object", "broadcast_object_list", "gather_object"),
    *("recv_object_list", "scatter_object_list", "send_object_list"),
}
"""Attributes that are never named: certificates that nobody checks, and collectives that unpickle what arrives."""


def offences(tree: ast.AST) -> Iterator[str]:
    """What a file does that it should not."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name.partition(".")[0] for alias in node.names if isinstance(node, ast.Import)}
            names |= {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()
            yield from (f"imports {name}" for name in names & MODULES)
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield f"names {node.attr}"
        elif isinstance(node, ast.Call):
            yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if called in CALLS or called in ("os.system", "os.popen", "torch.load"):
        yield f"calls {called}"
    if keywords.get("shell", "False") != "False" or keywords.get("allow_pickle", "False") != "False":
        yield f"calls {called} with shell or allow_pickle"
    if called in ("np.load", "numpy.load") and keywords.get("allow_pickle") is None:
        yield f"calls {called} without a word about pickle"


def test_nothing_is_run_or_unpickled() -> None:
    assert all(path.is_file() for path in (*RUNNERS, OWN)), "an exception names a file that is gone"
    found = {str(path.relative_to(ROOT.parent)): list(offences(ast.parse(path.read_text("utf-8")))) for path in FILES}
    assert {name: what for name, what in found.items() if what} == {
        str(COMPILER.relative_to(ROOT.parent)): ["calls compile"]
    }


def test_only_the_user_may_enter_the_folder_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def run(command: list[str]) -> int:
        seen.append(Path(command[command.index(launch.MODULE) + 1]))
        assert seen[0].stat().st_mode & 0o777 == 0o700 and (seen[0] / launch.CALL).exists()
        return 1

    monkeypatch.setattr(launch, "_run", run)
    with pytest.raises(WorkerFailedError):
        launch.launch(print, 1)
    assert seen and not seen[0].exists()
    loads = [line for line in OWN.read_text("utf-8").splitlines() if "loads(" in line]
    assert len(loads) == 3, "each of them has to read a file of that folder"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml.constructor",
        "eval(x)",
        "torch.load(x, weights_only=True)",
        "dist.broadcast_object_list(x)",
        "context.verify_mode = ssl.CERT_NONE",
        "subprocess.run(x, shell=True)",
        "np.load(x)",
        "np.load(x, allow_pickle=True)",
        "os.system(x)",
    ],
)
def test_it_would_be_seen(text: str) -> None:
    assert list(offences(ast.parse(text)))
