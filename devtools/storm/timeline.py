# SPDX-License-Identifier: Apache-2.0
"""The page of one seed: all that happened in its world, in order."""

from __future__ import annotations

from pathlib import Path

from devtools.storm.elastic import Outcome

from paceline_plugins.report import page


def write(path: Path, outcome: Outcome, command: str) -> None:
    """Write the page.

    Args:
        path: of the file.
        outcome: of the seed.
        command: that repeats it.
    """
    facts = {
        "seed": str(outcome.seed),
        "workers at first": str(outcome.workers),
        "faults": str(sum(outcome.faults.values())),
        "exchanges": str(outcome.exchanges),
        "the world's time": f"{outcome.seconds:.1f} s",
    }
    title = f"Seed {outcome.seed}: {'failed' if outcome.problems else 'passed'}"
    body = [page.title(title, command), page.cards(facts)]
    if outcome.problems:
        body.append(page.warning_box(outcome.problems))
    rows = [_row(when, what, set(outcome.faults)) for when, what in outcome.tape]
    path.write_text(page.whole_page(title, [*body, page.heading("What happened"), page.table(rows)]), encoding="utf-8")


def _row(when: float, what: str, faults: set[str]) -> dict[str, str]:
    kind, _, whom = what.partition(": ")
    shown = f"\u25b6 fault: {kind.replace('_', ' ')}: {whom}" if kind in faults else what
    return {"second": f"{when:.3f}", "what happened": shown}
