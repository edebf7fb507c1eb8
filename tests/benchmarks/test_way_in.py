# SPDX-License-Identifier: Apache-2.0
"""What `seeds/way_in.py` counts: the lines of a program that changed."""

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
def way_in() -> Iterator[ModuleType]:
    with imported("way_in") as found:
        yield found["way_in"]


def test_code_is_what_is_left_without_comments_and_docstrings(way_in: ModuleType) -> None:
    assert way_in.code(PLAIN) == [
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
def test_lines_changed(way_in: ModuleType, old: str, new: str, wanted: tuple[int, int]) -> None:
    assert way_in.changed(PLAIN, PLAIN.replace(old, new, 1)) == wanted


def test_every_way_has_its_program_and_zero_lines_are_zero(way_in: ModuleType) -> None:
    programs = {way.name: (way_in.PROGRAMS / way.program).read_text(encoding="utf-8") for way in way_in.WAYS}
    plain = (way_in.PROGRAMS / "plain.py").read_text(encoding="utf-8")
    unchanged = [name for name, text in programs.items() if not sum(way_in.changed(plain, text))]
    assert unchanged == ["paceline, zero lines"]
