# SPDX-License-Identifier: Apache-2.0
"""The claims of five articles: the page shows our figures as they are, and a second script comes to the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.benchmarks.modules import FOLDER, imported

pytestmark = pytest.mark.plugins


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with imported("seeds", "recompute") as found:
        yield found


def test_the_page_is_what_the_records_say_and_a_second_script_agrees(modules: dict[str, ModuleType]) -> None:
    seeds = modules["seeds"]
    rows = [seeds.row_of(claim) for claim in seeds.CLAIMS]
    assert seeds.PAGE.read_text(encoding="utf-8") == seeds.page(rows), "python benchmarks/seeds/seeds.py --write"
    again = modules["recompute"].compared()
    assert (again["differ"], again["unmarked"], again["unfair"]) == ({}, [], [])
    assert seeds.counts(rows).items() <= again.items()


def test_what_is_not_reached_says_why(modules: dict[str, ModuleType]) -> None:
    rows = [modules["seeds"].row_of(claim) for claim in modules["seeds"].CLAIMS if claim["kind"] != "own"]
    assert [row["key"] for row in rows if not row["reached"] and not row.get("why") and not row["against"]] == []
    assert [row["key"] for row in rows if not (FOLDER.parent / "records" / row["record"] / "README.md").is_file()] == []


def test_a_figure_decides_what_is_reached_and_fewer_settings_defend_nothing(modules: dict[str, ModuleType]) -> None:
    reached, defended = modules["seeds"].reached, modules["seeds"].defended
    assert [reached({"at_least": 15}, figure) for figure in (14.9, 15.0, 15.1)] == [False, True, True]
    assert [reached({"at_most": 1.0}, figure) for figure in (0.9, 1.0, 1.1)] == [True, True, False]
    row = {"kind": "trained", "rates": [3, 1], "seeds": 3}
    changes = ({}, {"rates": [1, 2]}, {"seeds": 2}, {"contradicted": True})
    assert [defended({**row, **change}) for change in changes] == [True, False, False, False]
