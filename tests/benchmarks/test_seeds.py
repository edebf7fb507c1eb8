# SPDX-License-Identifier: Apache-2.0
"""The claims of five articles: each of our figures can be read, and the page shows them as they are."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.benchmarks.modules import FOLDER, imported

pytestmark = pytest.mark.plugins


@pytest.fixture
def seeds() -> Iterator[ModuleType]:
    with imported("seeds") as found:
        yield found["seeds"]


def test_the_page_is_what_the_records_say(seeds: ModuleType) -> None:
    rows = [seeds.row_of(claim) for claim in seeds.CLAIMS]
    assert seeds.PAGE.read_text(encoding="utf-8") == seeds.page(rows), "python benchmarks/seeds/seeds.py --write"


def test_what_is_not_reached_says_why(seeds: ModuleType) -> None:
    rows = [seeds.row_of(claim) for claim in seeds.CLAIMS]
    assert [row["says"] for row in rows if not row["reached"] and not row["why"]] == []
    assert [
        row["says"] for row in rows if not (FOLDER.parent / "records" / row["record"] / "README.md").is_file()
    ] == []


def test_a_figure_decides_whether_a_claim_is_reached(seeds: ModuleType) -> None:
    claim = next(claim for claim in seeds.CLAIMS if claim.get("at_least") == 15)
    assert [seeds.reached(claim, figure) for figure in (14.9, 15.0, 15.1)] == [False, True, True]
    assert [seeds.reached({"at_most": 1.0}, figure) for figure in (0.9, 1.0, 1.1)] == [True, True, False]
    assert seeds.row_of({**claim, "figure": "None"})["reached"] is False
