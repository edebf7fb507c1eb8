# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/house.py`: what it counts, on trees that are small enough to count by hand."""

from __future__ import annotations

import importlib
import json
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
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("house")
    for name in {"house", "_house_classes", "_house_imports", "_quick"} & (set(sys.modules) - before):
        del sys.modules[name]


TREE = {
    "src/paceline/__init__.py": "from paceline.run.face import Run\n",
    "src/paceline/errors.py": "",
    "src/paceline/py.typed": "",
    "src/paceline/__pycache__/old.pyc": "",
    "src/paceline/rules/rule.py": """
class EveryBlock: ...
class Paced(EveryBlock): ...
class Delta: ...
def is_block(rule): return isinstance(rule, EveryBlock)
def check(rule): return is_block(rule)
""",
    "src/paceline/run/__init__.py": "from .face import Run\n",
    "src/paceline/run/face.py": """
from __future__ import annotations
from typing import TYPE_CHECKING
from paceline import errors
if TYPE_CHECKING:
    from paceline.flow.engine import Engine
class Run:
    def __init__(self, a, /, b, *c, d=1, **e): ...
    @property
    def x(self): ...
    @x.setter
    def x(self, value): ...
    @staticmethod
    def y(): ...
    def z(self):
        def inner(): ...
""",
    "src/paceline/flow/__init__.py": "",
    "src/paceline/flow/engine.py": """
from paceline.run import face
class Engine:
    def step(self, rule, transport):
        return is_block(rule) or isinstance(transport, (int, virtual.Virtual)) or isinstance(rule, Paced)
    def other(self, rule): return isinstance(rule, Delta)
""",
    "src/paceline/flow/transport.py": "class Transport: ...\nclass Virtual(Transport): ...\n",
    "wings/lightrnn/src/paceline_lightrnn/model.py": "import paceline\n" + "x = 1\n" * 10,
    "wings/dual/src/paceline_dual/pair.py": "y = 1\n" * 20,
    "README.md": "twelve ä\n",
    "Makefile": "test:\n\t@true\n",
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


def test_the_core_is_counted_without_the_wings(house: ModuleType, tree: Path) -> None:
    found = figures(house, tree)
    core = [text for name, text in TREE.items() if name.startswith("src") and name.endswith(".py")]
    assert found["core_lines"].now == sum(text.count("\n") for text in core)
    assert found["files"].now == len(core)
    assert found["root_entries"].now == 6  # no __pycache__
    assert found["largest_file"].now == 20
    assert found["largest_file"].offenders[0].name == "wings/dual/src/paceline_dual/pair.py"
    assert found["readme_characters"].now == len("twelve ä\n")


def test_methods_and_parameters_are_counted_as_written(house: ModuleType, tree: Path) -> None:
    found = figures(house, tree)
    methods, width = found["largest_class_methods"], found["widest_constructor"]
    assert (methods.now, methods.offenders[0].name) == (4, "Run")  # __init__, x, y, z
    assert methods.offenders[0].place == "src/paceline/run/face.py:7"
    assert (width.now, width.offenders[0].name) == (5, "Run")


def test_fields_of_dataclasses_are_parameters_and_plain_ones_are_records(house: ModuleType, tmp_path: Path) -> None:
    text = """
@dataclass(frozen=True)
class Base:
    a: int
    b: list = field(default_factory=list)
    c: int = field(init=False)
    d: ClassVar[int] = 3
    @property
    def e(self): ...
@dataclass
class Acts(Base):
    b: list
    f: int
    def act(self): ...
@dataclass(init=False)
class Other:
    a: int
    b: int
    c: int
    d: int
class Pair(NamedTuple):
    a: int
"""
    found = figures(house, grow(tmp_path, {"src/paceline/data/a.py": text}))
    assert [(one.count, one.name) for one in found["widest_record"].offenders] == [(2, "Base"), (1, "Pair")]
    assert [(one.count, one.name) for one in found["widest_constructor"].offenders] == [(3, "Acts"), (0, "Other")]


def test_a_circle_through_type_checking_is_one(house: ModuleType, tree: Path) -> None:
    found = figures(house, tree)["circles"]
    ways = [one.name for one in found.offenders]
    assert ways == [
        "paceline.flow -> paceline.run -> paceline.flow",
        "paceline.flow.engine -> paceline.run.face -> paceline.flow.engine",
    ]
    assert (found.now, found.broken) == (2, True)
    assert found.offenders[0].place == "paceline.flow.engine:2; paceline.run.face:6 (type)"


def test_late_and_relative_imports_are_counted_and_faces_are_not(house: ModuleType, tmp_path: Path) -> None:
    files = {
        "src/paceline/__init__.py": "",
        "src/paceline/data/__init__.py": "from .cache import store\nfrom paceline.data.split import cut\n",
        "src/paceline/data/split.py": "def cut():\n    from ..tree import walk\n",
        "src/paceline/data/cache/__init__.py": "",
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


def test_knots_are_told_by_a_shortest_circle(house: ModuleType) -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"b"}, "e": {"a", "f"}, "f": {"g"}, "g": {"f"}, "h": set()}
    found = sys.modules["_house_imports"]
    assert found.knots(graph) == [{"a", "b", "c", "d"}, {"f", "g"}]
    assert found.circles(graph) == [["b", "d", "b"], ["f", "g", "f"]]


def test_questions_for_a_family_are_counted_outside_of_the_rules(house: ModuleType, tree: Path) -> None:
    found = figures(house, tree)
    names = [one.name for one in found["is_family_calls"].offenders]
    assert names == ["is_block", "isinstance Paced", "isinstance Virtual"]
    assert [one.name for one in found["is_part_calls"].offenders] == ["isinstance Delta"]


def test_what_is_printed_and_the_exit_code(
    house: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["house.py", "--root", str(tree)])
    assert house.main() == 0
    told = capsys.readouterr().out
    last = json.loads(told.splitlines()[-1])
    assert last["is_family_calls"] == 3 and last["test_seconds"] is None and last["test_all_seconds"] is None
    assert "circles beyond 0: 2" in told and "src/paceline/flow/engine.py:5" in told
    monkeypatch.setattr(sys, "argv", ["house.py", "--root", str(tree), "--check"])
    assert house.main() == 1
    for name in ("src/paceline/flow/engine.py", "src/paceline/run/face.py"):
        (tree / name).write_text("", encoding="utf-8")
    assert house.main() == 0


@pytest.mark.processes
def test_the_tests_are_timed_where_there_are_some(house: ModuleType, tree: Path) -> None:
    found = house.timed(tree, "test", 360, run=True)
    assert 0 <= found.now < found.limit and str(found.offenders[0]) == "passed"
    assert house.timed(tree, "test", 360, run=False).now is None
    assert house.timed(tree, "test-all", 360, run=True).now is None  # the Makefile has none
