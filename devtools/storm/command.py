# SPDX-License-Identifier: Apache-2.0
"""`python -m devtools.storm`: simulated elastic runs under drawn faults, or under those of a recorded run."""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from paceline import __version__
from paceline.cli.console import err, out, refuse, refusing

if TYPE_CHECKING:
    from devtools.storm.elastic import Outcome, StormSettings
    from devtools.storm.seeds import Tally
    from devtools.storm.tape import Tape
    from devtools.storm.what_if import Changes

FAILED = 1
"""Exit code if a seed failed."""
MOST_SHOWN = 5
"""Failures that are shown whole."""
SEEDS, TAPE_SEEDS = 1000, 10
"""Without --seeds: how many, and how many of a recorded run."""


def command(
    ctx: typer.Context,
    seeds: Annotated[
        int | None, typer.Option(help="How many.", show_default=f"{SEEDS}, {TAPE_SEEDS} of a recorded run")
    ] = None,
    first: Annotated[int, typer.Option(help="The first one.")] = 0,
    over: Annotated[
        str,
        typer.Option(
            help="control: the control plane and its ledger. run: whole elastic runs with models. leaving: the same "
            "with workers that leave in order. server: asynchronous runs. steps: lockstep runs that are killed and "
            "resume from checkpoints."
        ),
    ] = "control",
    rule: Annotated[str, typer.Option(help="Of whole runs, without it each seed draws one; of a recorded run.")] = "",
    workers: Annotated[
        str,
        typer.Option(
            metavar="MIN:MAX", help="Workers with which a run begins.", show_default="2:4, 2:8 over the server"
        ),
    ] = "",
    faults: Annotated[str, typer.Option(help="Names of the faults to draw from, with commas; else all.")] = "",
    minutes: Annotated[float, typer.Option(help="Begin no more seeds after that.")] = 60.0,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    replay: Annotated[int | None, typer.Option(help="Show all that happens in this seed.")] = None,
    page: Annotated[Path | None, typer.Option(help="With --replay: write it as a page.")] = None,
    leave_out: Annotated[
        str, typer.Option(metavar="N,N,..", help="With --replay: numbers of drawn faults that do not happen.")
    ] = "",
    fewer: Annotated[int, typer.Option(help="With --replay: leave out so many of the first workers.")] = 0,
    tape: Annotated[
        Path | None,
        typer.Option("--replay-tape", metavar="RUN", help="Play a recorded elastic run: its log directory."),
    ] = None,
    alive: Annotated[
        list[int] | None,
        typer.Option("--without-death", metavar="WORKER", help="With --replay-tape: what if it had not been lost?"),
    ] = None,
    mbit: Annotated[float | None, typer.Option(help="With --replay-tape: what if links had so many Mbit/s?")] = None,
) -> None:
    """Run elastic runs in simulated worlds with kills, power failures, partitions and full disks.

    The seed decides all that happens, so a failure can be replayed. Every sample has to enter the model exactly
    once, all members must have the same model, and all must come to the end once the faults are over.

    A `TapedControlServer` records who came and died and how long all took; --replay-tape plays that.
    """
    count = (SEEDS if tape is None else TAPE_SEEDS) if seeds is None else seeds
    for name, value, least in (("--seeds", count, 1), ("--first", first, 0), ("--jobs", jobs, 1)):
        if value < least:
            refuse(f"{name} must be at least {least}, got {value}")
    if not 0 < minutes < math.inf:
        refuse(f"--minutes must be above 0, got {minutes:g}")
    if replay is not None and replay < 0:
        refuse(f"--replay is a seed, from 0 on, got {replay}")
    if page is not None and replay is None:
        refuse("--page shows one seed: give it with --replay SEED")
    for name, shown in (("--leave-out", leave_out), ("--fewer", fewer)):
        if shown and replay is None:
            refuse(f"{name} makes one seed smaller: give it with --replay SEED")
    if fewer < 0:
        refuse(f"--fewer is a number of workers, from 0 on, got {fewer}")
    without = _numbers(leave_out)
    if tape is None:
        for name, given in (("--without-death", alive), ("--mbit", mbit)):
            if given:
                refuse(f"{name} is asked of a recorded run: give it with --replay-tape RUN")
        with refusing():
            settings = replace(_settings(over, rule, workers, faults), fewer=fewer)
        command = "python -m devtools.storm" + _options(settings)
    else:
        for option in ("over", "workers", "faults", "leave_out", "fewer"):
            if (source := ctx.get_parameter_source(option)) is not None and source.name == "COMMANDLINE":
                name = f"--{option.replace('_', '-')}"
                refuse(f"{name} is of drawn runs, and --replay-tape plays a recorded one: give one of them")
        settings, command = _tape(tape, tuple(alive or ()), mbit, rule, None if replay is not None else first)
    if replay is not None:
        _replay(replay, settings, without, page, command)
    else:
        _storm(range(first, first + count), settings, jobs, 60 * minutes, command)


def _numbers(text: str) -> tuple[int, ...]:
    """Of faults."""
    names = [one.strip() for one in text.split(",")] if text else []
    if not all(one.isascii() and one.isdecimal() and len(one) < 5 for one in names):
        refuse(f"--leave-out is numbers of faults with commas between, got {text!r}")
    return tuple(int(one) for one in names)


def _tape(
    path: Path, alive: tuple[int, ...], mbit: float | None, rule: str, seed: int | None
) -> tuple[StormSettings, str]:
    """Settings and command of a recorded run; shows how it comes out with this seed."""
    from devtools.storm.elastic import StormSettings
    from devtools.storm.tape import read
    from devtools.storm.what_if import Changes, changed

    if mbit is not None and not 0 < mbit < math.inf:
        refuse(f"--mbit must be above 0, got {mbit:g}")
    changes = Changes(alive, mbit, rule)
    with refusing():
        recorded = read(path)
        settings = StormSettings("tape", played=changed(recorded, changes))
    if seed is not None:
        _compare(recorded, changes, seed)
    return settings, f"python -m devtools.storm --replay-tape {shlex.quote(str(path))}{changes.options}"


def _compare(tape: Tape, changes: Changes, seed: int) -> None:
    """Show the recorded run, its replay, and what comes of the changes."""
    from devtools.storm.tape import Played
    from devtools.storm.what_if import changed, replay, rows

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    names = ["recorded", "replayed", *(["changed"] if changes else [])]
    for name in names:
        table.add_column(name, justify="right")
    played = [Played(tape), *([changed(tape, changes)] if changes else [])]
    with _no_warnings():
        replays = [replay(seed, one) for one in played]
    for row in rows(tape, replays):
        table.add_row(*row)
    out().print(table)


def _settings(over: str, rule: str, workers: str, faults: str) -> StormSettings:
    from devtools.storm.elastic import StormSettings
    from devtools.storm.seeds import FAULTS, WORKERS
    from devtools.storm.server import countable
    from devtools.storm.steps import in_lockstep

    from paceline.flow.membership import check_rule
    from paceline.rules.recipes import rule_from_text

    if over not in FAULTS:
        refuse(f"--over is one of {', '.join(FAULTS)}, got {over!r}")
    if rule and over == "control":
        refuse("--rule is of whole runs: give it with --over run, server or steps")
    if rule:
        elastic = lambda text: check_rule(rule_from_text(text))  # noqa: E731
        {"run": elastic, "leaving": elastic, "server": countable, "steps": in_lockstep}[over](rule)
    names = tuple(one.strip() for one in faults.split(",") if one.strip())
    if faults and not names:
        refuse(f"--faults are names with commas between, got {faults!r}")
    unknown = [one for one in names if one not in FAULTS[over]]
    if unknown:
        refuse(f"there is no fault {unknown[0]!r} --over {over}; there are {', '.join(FAULTS[over])}")
    usual = WORKERS[over]
    low, _, high = (workers or f"{usual[0]}:{usual[1]}").partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= 64):
        refuse(f"--workers is MIN:MAX with 1 <= MIN <= MAX <= 64, got {workers!r}")
    return StormSettings(over, names, rule, (int(low), int(high)))


def _options(settings: StormSettings) -> str:
    """The options of a drawn run."""
    from devtools.storm.seeds import WORKERS

    options = f" --over {settings.kind}" + (f" --rule '{settings.rule}'" if settings.rule else "")
    options += f" --faults {','.join(settings.faults)}" if settings.faults else ""
    usual = settings.workers == WORKERS[settings.kind]
    return options + ("" if usual else f" --workers {settings.workers[0]}:{settings.workers[1]}")


def _storm(seeds: range, settings: StormSettings, jobs: int, seconds: float, command: str) -> None:
    from devtools.storm.seeds import storms

    began = time.monotonic()
    shown = [0]

    def told(tally: Tally) -> None:
        for outcome in tally.failed[: max(0, MOST_SHOWN - shown[0])]:
            shown[0] += 1
            _show_failure(outcome, command)

    total = storms(seeds, settings, jobs, seconds, told)
    if total.faults:
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


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Nothing is logged of what a faulty network makes the parts warn of."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _show_failure(outcome: Outcome, command: str) -> None:
    err().print(Text(f"seed {outcome.seed} failed (paceline {__version__}):", style="bold red"))
    for problem in outcome.problems[:MOST_SHOWN]:
        err().print(Text(f"  {problem[:500]}"), soft_wrap=True)
    err().print(Text(f"  {command} --replay {outcome.seed}"), soft_wrap=True)


def _replay(seed: int, settings: StormSettings, without: tuple[int, ...], page: Path | None, command: str) -> None:
    from devtools.storm.seeds import Shrunk, shrunk, storm

    with _no_warnings():
        found = Shrunk(storm(seed, settings, without), without, settings.fewer)
        drawn, began = found.outcome.drawn, found.outcome.workers
        smaller = bool(without or settings.fewer)
        if found.outcome.problems and not smaller and drawn:
            found = shrunk(found.outcome, settings)
            smaller = bool(found.without or found.fewer)
    outcome = found.outcome
    options = f" --leave-out {','.join(str(one) for one in found.without)}" if found.without else ""
    options += f" --fewer {found.fewer}" if found.fewer else ""
    repeat = f"{command} --replay {seed}{options}"
    if page is not None:
        from devtools.storm.timeline import write

        with refusing():
            write(page, outcome, repeat)
        out().print(f"wrote {page}", soft_wrap=True)
    else:
        for when, what in outcome.tape:
            out().print(Text(f"{when:9.3f}  {what}"), soft_wrap=True)
    if smaller:
        out().print(
            f"left out: {len(found.without)} of {drawn} faults, and {began - outcome.workers} of the first {began} "
            f"workers; repeat it with\n  {repeat}",
            soft_wrap=True,
            markup=False,
        )
    for problem in outcome.problems:
        err().print(Text(problem), soft_wrap=True)
    out().print(f"{outcome.exchanges} exchanges in {outcome.seconds:.1f} s of the world's time", soft_wrap=True)
    if outcome.problems:
        raise typer.Exit(FAILED)
