# SPDX-License-Identifier: Apache-2.0
"""`paceline storm`: simulated elastic runs under faults that a seed decides."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from paceline import __version__
from paceline.cli.console import err, out, refuse, refusing

if TYPE_CHECKING:
    from paceline.testing.storm.elastic import Outcome, StormSettings
    from paceline.testing.storm.seeds import Tally

FAILED = 1
"""Exit code if a seed failed."""
MOST_SHOWN = 5
"""Failures that are shown whole."""


def command(
    seeds: Annotated[int, typer.Option(help="How many.")] = 1000,
    first: Annotated[int, typer.Option(help="The first one.")] = 0,
    over: Annotated[
        str, typer.Option(help="control: the control plane and its ledger. run: whole elastic runs with models.")
    ] = "control",
    rule: Annotated[str, typer.Option(help="Of whole runs; without it each seed draws one.")] = "",
    workers: Annotated[str, typer.Option(metavar="MIN:MAX", help="Workers with which a run begins.")] = "2:4",
    faults: Annotated[str, typer.Option(help="Names of the faults to draw from, with commas; else all.")] = "",
    minutes: Annotated[float, typer.Option(help="Begin no more seeds after that.")] = 60.0,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    replay: Annotated[int | None, typer.Option(help="Show all that happens in this seed.")] = None,
    page: Annotated[Path | None, typer.Option(help="With --replay: write it as a page.")] = None,
) -> None:
    """Run elastic runs in simulated worlds with kills, power failures, partitions and full disks.

    The seed decides all that happens, so a failure can be replayed. Every sample has to enter the model exactly
    once, all members must have the same model, and all must come to the end once the faults are over.
    """
    with refusing():
        settings = _settings(over, rule, workers, faults)
    for name, value, least in (("--seeds", seeds, 1), ("--first", first, 0), ("--jobs", jobs, 1)):
        if value < least:
            refuse(f"{name} must be at least {least}, got {value}")
    if not minutes > 0:
        refuse(f"--minutes must be above 0, got {minutes:g}")
    if page is not None and replay is None:
        refuse("--page shows one seed: give it with --replay SEED")
    if replay is not None:
        _replay(replay, settings, page)
    else:
        _storm(range(first, first + seeds), settings, jobs, 60 * minutes)


def _settings(over: str, rule: str, workers: str, faults: str) -> StormSettings:
    from paceline.rules.recipes import rule_from_text
    from paceline.testing.storm.elastic import StormSettings
    from paceline.testing.storm.faults import KINDS as FAULTS
    from paceline.testing.storm.seeds import KINDS

    if over not in KINDS:
        refuse(f"--over is one of {', '.join(KINDS)}, got {over!r}")
    if rule and over == "control":
        refuse("--rule is of whole runs: give it with --over run")
    if rule:
        rule_from_text(rule)
    names = tuple(one for one in faults.split(",") if one)
    unknown = [one for one in names if one not in FAULTS]
    if unknown:
        refuse(f"there is no fault {unknown[0]!r}; there are {', '.join(FAULTS)}")
    low, _, high = workers.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= 64):
        refuse(f"--workers is MIN:MAX with 1 <= MIN <= MAX <= 64, got {workers!r}")
    return StormSettings(over, names, rule, (int(low), int(high)))


def _storm(seeds: range, settings: StormSettings, jobs: int, seconds: float) -> None:
    from paceline.testing.storm.seeds import storms

    began = time.monotonic()
    shown = [0]

    def told(tally: Tally) -> None:
        for outcome in tally.failed[: max(0, MOST_SHOWN - shown[0])]:
            shown[0] += 1
            _show_failure(outcome, settings)

    total = storms(seeds, settings, jobs, seconds, told)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("fault")
    table.add_column("happened", justify="right")
    for kind, number in sorted(total.faults.items()):
        table.add_row(kind, str(number))
    out().print(table)
    took = time.monotonic() - began
    out().print(
        f"{total.seeds} seeds in {took:.0f} s, {total.exchanges} exchanges, {len(total.failed)} failed", soft_wrap=True
    )
    if total.failed:
        raise typer.Exit(FAILED)


def _show_failure(outcome: Outcome, settings: StormSettings) -> None:
    err().print(Text(f"seed {outcome.seed} failed (paceline {__version__}):", style="bold red"))
    for problem in outcome.problems[:MOST_SHOWN]:
        err().print(Text(f"  {problem[:500]}"), soft_wrap=True)
    options = f" --over {settings.kind}" + (f" --rule '{settings.rule}'" if settings.rule else "")
    options += f" --faults {','.join(settings.faults)}" if settings.faults else ""
    options += "" if settings.workers == (2, 4) else f" --workers {settings.workers[0]}:{settings.workers[1]}"
    err().print(f"  paceline storm --replay {outcome.seed}{options}", soft_wrap=True)


def _replay(seed: int, settings: StormSettings, page: Path | None) -> None:
    import logging

    from paceline.testing.storm.seeds import shrunk, storm

    logging.disable(logging.CRITICAL)
    outcome, without = storm(seed, settings), list[int]()
    if outcome.problems:
        outcome, without = shrunk(outcome, settings)
    if page is not None:
        from paceline.testing.storm.timeline import write

        with refusing():
            write(page, outcome)
        out().print(f"wrote {page}", soft_wrap=True)
    else:
        for when, what in outcome.tape:
            out().print(Text(f"{when:9.3f}  {what}"), soft_wrap=True)
    if without:
        out().print(f"the same failure without {len(without)} of {outcome.drawn} faults, which are left out here")
    for problem in outcome.problems:
        err().print(Text(problem), soft_wrap=True)
    out().print(f"{outcome.exchanges} exchanges in {outcome.seconds:.1f} s of the world's time", soft_wrap=True)
    if outcome.problems:
        raise typer.Exit(FAILED)
