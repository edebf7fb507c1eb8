# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/house/house.py`: what it counts, on trees that are small enough to count by hand."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import paceline

ROOT = Path(paceline.__file__).parents[2]

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside the package", allow_module_level=True)


@pytest.fixture(scope="module")
def house() -> Iterator[ModuleType]:
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks" / "house"))
        yield importlib.import_module("house")
    for name in {"house", "imports"} & (set(sys.modules) - before):
        del sys.modules[name]


TREE = {
    "src/paceline/__init__.py": "from paceline.run.run import Run\n",
    "src/paceline/errors.py": "# why\n",
    "src/paceline/py.typed": "",
    "src/paceline/__pycache__/old.pyc": "",
    "src/paceline/run/__init__.py": "from .run import Run\n",
    "src/paceline/run/run.py": """
from __future__ import annotations
from typing import TYPE_CHECKING
from paceline import errors
if TYPE_CHECKING:
    from paceline.flow.engine import Engine
class Run:
    def __init__(self, a, /, b, *c, d=1, **e):
        self.place = a
    def step(self):
        \'\'\'Two
        lines.\'\'\'
        self.place = 1
""",
    "src/paceline/flow/__init__.py": "",
    "src/paceline/flow/engine.py": """
from typing import Protocol
from paceline.run import run
class Engine:
    def start(self, run, thread):
        run.place = 2  # what was found
        thread.daemon = True
class Steps(Protocol):
    def step(self): ...
class Starts(Protocol):
    def start(self): ...
class Ends(Protocol):
    def step(self): ...
    def close(self): ...
""",
    "packages/dual/src/paceline_dual/pair.py": "class Pair:\n    def step(self): ...\n" + "y = 1\n" * 20,
    "benchmarks/speed/a.py": "x = 1\n" * 7,
    "tests/test_a.py": "x = 1\n" * 9,
    "docs/guide/start.md": "three words here\n",
    "README.md": "twelve ä\n",
}


def grow(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return grow(tmp_path, TREE)


def figures(house: ModuleType, root: Path) -> dict[str, Any]:
    return {one.name: one for one in house.measure(root)}


def test_lines_are_those_of_the_core_by_room(house: ModuleType, tree: Path) -> None:
    now = figures(house, tree)
    core = {name: text for name, text in TREE.items() if name.startswith("src") and name.endswith(".py")}
    assert now["core_lines"].now == sum(text.count("\n") for text in core.values())
    assert now["room_flow"].now == core["src/paceline/flow/engine.py"].count("\n")
    assert now["room_root"].now == 2
    assert now["files"].now == len(core)
    assert (now["benchmark_lines"].now, now["test_lines"].now, now["guide_words"].now) == (7, 9, 3)
    assert now["readme_characters"].now == len("twelve ä\n")
    assert now["dialect_words"].now == 1


def test_a_protocol_with_one_implementation_is_named(house: ModuleType, tree: Path) -> None:
    single = figures(house, tree)["single_protocols"]
    assert [one.name for one in single.offenders] == ["Starts (Engine)", "Ends ()"]


def test_a_circle_through_type_checking_is_one(house: ModuleType, tree: Path) -> None:
    found = figures(house, tree)["circles"]
    assert [one.name for one in found.offenders] == [
        "paceline.flow -> paceline.run -> paceline.flow",
        "paceline.flow.engine -> paceline.run.run -> paceline.flow.engine",
    ]
    assert found.offenders[0].place == "paceline.flow.engine:3; paceline.run.run:6 (type)"


def test_late_and_relative_imports_are_counted_and_faces_are_not(house: ModuleType, tmp_path: Path) -> None:
    files = {
        "src/paceline/__init__.py": "",
        "src/paceline/data/__init__.py": "from .cache import store\nfrom paceline.data.split import cut\n",
        "src/paceline/data/split.py": "def cut():\n    from ..tree import walk\n",
        "src/paceline_plugins/data/cache/__init__.py": "",
        "src/paceline/data/cache/store.py": "from ..split import cut\n",
        "src/paceline/tree.py": "",
    }
    clean = figures(house, grow(tmp_path, files))
    assert (clean["circles"].now, clean["folder_circles"].now) == (0, 0)
    grow(tmp_path, {"src/paceline/tree.py": "def walk():\n    import paceline.data.split\n"})
    loose = figures(house, tmp_path)["circles"]
    assert [one.name for one in loose.offenders] == [
        "paceline.data -> paceline.tree -> paceline.data",
        "paceline.data.split -> paceline.tree -> paceline.data.split",
    ]
    assert loose.offenders[1].place == "paceline.data.split:2 (late); paceline.tree:2 (late)"
    grow(tmp_path, {"src/paceline/tree.py": "", "src/paceline/data/split.py": "from .cache import store\n"})
    deeper = figures(house, tmp_path)
    assert deeper["circles"].now == 1  # of modules; below one folder of the root, none of rooms
    assert deeper["folder_circles"].now == 1


def test_a_budget_may_only_fall(
    house: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = tree / "benchmarks" / "house" / "budget.txt"
    grow(tree, {"benchmarks/house/budget.txt": "# figure goal limit\ncircles 0 1\nfiles 9 20\n"})
    monkeypatch.setattr(sys, "argv", ["house.py", "--root", str(tree), "--check"])
    assert house.main() == 1
    assert "over its budget: circles is 2, at most 1" in capsys.readouterr().out
    (tree / "src/paceline/flow/engine.py").write_text("", encoding="utf-8")
    assert house.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["circles"] == 0
    monkeypatch.setattr(sys, "argv", ["house.py", "--root", str(tree), "--lower"])
    assert house.main() == 0
    assert budget.read_text("utf-8") == "# figure goal limit\ncircles 0 0\nfiles 9 9\n"


def test_the_documents_use_the_words_of_the_field(house: ModuleType) -> None:
    """Outside of code and of the targets of links: a reader of the guide meets no word of our own."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")]
    assert len(pages) > 15
    for page in pages:
        prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", page.read_text("utf-8"), flags=re.DOTALL)
        assert house.DIALECT.findall(prose) == [], page
