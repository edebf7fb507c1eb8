# SPDX-License-Identifier: Apache-2.0
"""The page of one seed: all that happened in its world, in order."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.reports import page
from paceline.testing.storm.elastic import Outcome


def write(path: Path, outcome: Outcome) -> None:
    """Write the page."""
    facts = {
        "seed": str(outcome.seed),
        "faults": str(sum(outcome.faults.values())),
        "exchanges": str(outcome.exchanges),
        "the world's time": f"{outcome.seconds:.1f} s",
    }
    body = [page.heading(f"Seed {outcome.seed}"), page.cards(facts)]
    if outcome.problems:
        body.append(page.warning_box(outcome.problems))
    rows = [{"second": f"{when:.3f}", "what happened": what} for when, what in outcome.tape]
    path.write_text(page.whole_page(f"Seed {outcome.seed}", [*body, page.table(rows)]), encoding="utf-8")
