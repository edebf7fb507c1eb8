# SPDX-License-Identifier: Apache-2.0
"""What `seeds/front_doors.py` makes of programs and figures: lines that changed, spreads, losses, commands."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.benchmarks.modules import FOLDER, imported

if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not beside the package", allow_module_level=True)

PLAIN = '''"""Train."""

import torch


def main():
    """It does."""
    model = torch.nn.Linear(2, 1)  # small
    text = """two
lines"""
    print(model, text)
'''


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Modules of the benchmark, which go out of sight again."""
    with imported("_doors", "_doors_starts", "_doors_table") as found:
        yield found


def test_code_is_what_is_left_without_comments_and_docstrings(modules: dict[str, ModuleType]) -> None:
    assert modules["_doors_table"].code(PLAIN) == [
        "import torch",
        "def main():",
        "    model = torch.nn.Linear(2, 1)  # small",
        '    text = """two',
        'lines"""',
        "    print(model, text)",
    ]


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("", "", (0, 0)),
        ("import torch\n", "import torch\nimport paceline\n\n# a comment\n", (1, 0)),
        ("    print(model, text)\n", "    if True:\n        print(model, text)\n", (2, 1)),
        ('"""Train."""', '"""Train, with others."""', (0, 0)),
        ("    print(model, text)\n", "", (0, 1)),
    ],
)
def test_lines_changed(modules: dict[str, ModuleType], old: str, new: str, wanted: tuple[int, int]) -> None:
    assert modules["_doors_table"].changed(PLAIN, PLAIN.replace(old, new, 1)) == wanted


def test_figures_are_medians_with_ranges_and_ratios_within_a_repetition(modules: dict[str, ModuleType]) -> None:
    rows = [{"repetition": 0, "first": 30.0}, {"repetition": 2, "first": 50.0}, {"repetition": 1, "first": 20.0}]
    found = modules["_doors_table"].figures(rows, "first", {0: 10.0, 1: 5.0, 2: 10.0})
    assert found == {
        "seconds": {"median": 30.0, "least": 20.0, "largest": 50.0},
        "ratio": {"median": 4.0, "least": 3.0, "largest": 5.0},
    }


def test_the_last_loss_is_taken(modules: dict[str, ModuleType]) -> None:
    text = "epoch 1: held-out loss 2.5000\n[0] epoch 2: held-out loss 2.2500\nbye"
    assert modules["_doors_starts"].last_loss(text) == 2.25
    with pytest.raises(modules["_doors_starts"].NotStarted, match="no held-out loss"):
        modules["_doors_starts"].last_loss("bye")


def test_every_door_has_its_program_which_its_commands_start(modules: dict[str, ModuleType]) -> None:
    doors = modules["_doors"]
    for door in (doors.ALONE, *doors.DOORS):
        assert (doors.PROGRAMS / door.program).is_file()
        assert all(door.program in command for command in door.workers(4)), door.name


def test_zero_lines_are_zero(modules: dict[str, ModuleType]) -> None:
    doors, table = modules["_doors"], modules["_doors_table"]
    plain = (doors.PROGRAMS / doors.PLAIN).read_text(encoding="utf-8")
    sums = {
        door.name: sum(table.changed(plain, (doors.PROGRAMS / door.program).read_text(encoding="utf-8")))
        for door in doors.DOORS
    }
    assert [name for name, lines in sums.items() if lines == 0] == ["paceline, zero lines"]
