# SPDX-License-Identifier: Apache-2.0
"""Run a search, round by round.

::

    DIR/search.json                        the options, and the result of each group in each round
    DIR/round-01/group-00/                 a group's logs, as those of `paceline run`
    DIR/round-01/group-00/checkpoint/      its last checkpoint; kept for the last two rounds
    DIR/best/                              the best group's

A group starts from a checkpoint of the round before, its own or a better group's, which is only read. So a stopped
search continues with the groups that have no result yet.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.checkpoint.files import FROZEN
from paceline.checkpoint.store import DirectoryStore
from paceline.cli.console import err, error_panel, near, out, refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.launch import Outcome, side_by_side
from paceline.cli.launch.spawn import Command
from paceline.cli.run import certificates, failure, fixed
from paceline.cli.run.options import Security
from paceline.cli.run.program import find
from paceline.cli.run.start import environment
from paceline.errors import PacelineError
from paceline.observe.reports.read import has_run, read_run
from paceline.tuning import request_files
from paceline.tuning.names import OF_RULES
from paceline_plugins.search.population import (
    PopulationMember,
    Values,
    copies,
    drawn_near,
    first_round,
    next_round,
    ranking,
)
from paceline_plugins.search.search_rounds import Round
from paceline_plugins.search.space import Space, space
from paceline_plugins.search.tune_command import show


@dataclass(frozen=True)
class SearchPlan:
    """The options; see `paceline tune --search --help`."""

    program: list[str]
    search: list[str]
    groups: int
    workers: int
    rounds: int
    blocks: int
    measure: str
    maximize: bool
    together: int
    rule: str | None
    timeout_s: float
    seed: int

    @property
    def space(self) -> Space:
        return space(self.search)


def check(plan: SearchPlan) -> None:
    """Refuse invalid options before anything starts."""
    try:
        names = list(plan.space)
    except PacelineError as error:
        refuse(str(error))
    for name in names:
        if name in OF_RULES and plan.workers == 1:
            refuse(f"{name} has no effect on one worker, which exchanges nothing; give more --workers")


def exchanges(plan: SearchPlan, values: Values) -> int:
    """Exchanges of a group in a round: the same number of minibatches in groups of different periods."""
    if "period" not in values:
        return plan.blocks
    return max(1, round(plan.blocks * int(plan.space["period"].at(1.0)) / int(values["period"])))


def table(members: Sequence[PopulationMember], title: str, measure: str, busy: Collection[int]) -> Table:
    """One row a group: its values, its initial checkpoint, its result."""
    found = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("group", *members[0].values, "begins with"):
        found.add_column(name)
    found.add_column(measure, justify="right")
    for group, member in enumerate(members):
        values = [show(value) for value in member.values.values()]
        row = [str(group), *values, _begins(group, member), _result(member, group in busy)]
        found.add_row(*(Text(text) for text in row))
    return found


def _begins(group: int, member: PopulationMember) -> str:
    if member.source is None:
        return "nothing"
    return "its own" if member.source == group else f"group {member.source}'s"


def _result(member: PopulationMember, busy: bool) -> str:
    if member.failed:
        return f"failed: {member.failed}"
    if member.measure is not None:
        return show(float(member.measure))
    return "trains" if busy else "waits"


def best_text(member: PopulationMember, group: int, number: int, measure: str) -> str:
    """The best group and its values."""
    values = ", ".join(f"{name} {show(value)}" for name, value in member.values.items())
    result = "" if member.measure is None else f", {measure} {show(float(member.measure))}"
    return f"best of round {number}: group {group} with {values}{result}"


RECORD = "search.json"
FORMAT = 1
FAILED = 1


class _SearchStoppedError(Exception):
    """The search ends before its last round; the message says why."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


@dataclass
class Search:
    """A search."""

    directory: Path  # of all its files
    plan: SearchPlan  # the options
    rounds: list[list[PopulationMember]]  # of members, one a group; the last may miss results
    ended: str = ""  # why there are fewer rounds than planned
    _busy: set[int] = field(default_factory=set)

    @classmethod
    def load(cls, directory: Path) -> Search:
        """Read the record of a search."""
        path = directory / RECORD
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']!r}, and this paceline reads {FORMAT}")
            plan = SearchPlan(**record["plan"])
            rounds = [[PopulationMember(**one) for one in row] for row in record["rounds"]]
            search = cls(directory, plan, rounds, record["ended"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            refuse(f"{near(path)} is no record of a search ({type(error).__name__}: {error})")
        check(plan)
        return search

    def _write(self) -> None:
        rows = [[asdict(member) for member in row] for row in self.rounds]
        body = {"format": FORMAT, "plan": asdict(self.plan), "ended": self.ended, "rounds": rows}
        request_files.write(self.directory / RECORD, body)

    # -- rounds -----------------------------------------------------------------------------------

    def run(self) -> int:
        """Run all missing rounds; the exit code."""
        plan = self.plan
        if not self.rounds:
            self.rounds.append(first_round(plan.space, plan.groups, plan.seed))
        try:
            while not self.ended:
                self._round()
                if self.ended or len(self.rounds) == plan.rounds:
                    break
                self.rounds.append(self._next())
        except _SearchStoppedError as stop:
            err().print(error_panel("the search stopped", str(stop)))
            return stop.code
        return self._conclude()

    def _next(self) -> list[PopulationMember]:
        plan = self.plan
        generator = Random(f"paceline search {plan.seed} {len(self.rounds)}")
        return next_round(self.rounds[-1], plan.maximize, lambda winner: drawn_near(plan.space, winner, generator))

    def _round(self) -> None:
        """Train the groups without a result."""
        number, members = len(self.rounds), self.rounds[-1]
        missing = [group for group, one in enumerate(members) if one.measure is None and not one.failed]
        self._write()
        with self._shown():
            while missing and not self.ended:
                now, missing = missing[: self.plan.together], missing[self.plan.together :]
                self._train(now)
                self._write()
        if self.ended:
            if number == 1:
                self.ended = ""
                self._write()
                raise _SearchStoppedError(
                    f"the program ended before its first {self.plan.blocks} exchanges, without a checkpoint; give "
                    "fewer --blocks, let the program train longer, and iterate over its data with run.share, or call "
                    "run.checkpoint() at the top of its loop",
                    FAILED,
                )
            self.rounds.pop()
            self._write()
            return
        if not copies(members, self.plan.maximize):
            raise _SearchStoppedError(f"all groups failed in round {number}: {members[0].failed}", FAILED)
        for group in range(self.plan.groups):  # their initial checkpoints
            shutil.rmtree(self._place(number - 1, group) / "checkpoint", ignore_errors=True)

    def _train(self, groups: list[int]) -> None:
        """Train groups at the same time."""
        cluster = LaunchCluster(self.plan.workers, timeout_s=self.plan.timeout_s)
        commands = [self._command(group, cluster) for group in groups]
        self._busy = set(groups)
        outcomes = side_by_side(cluster, commands)
        self._busy = set()
        received = next((one.stopped_by for one in outcomes if one.stopped_by is not None), None)
        if received is not None:
            err().print(f"stopped by {failure.signal_name(received)}; continue with: {self._again}", markup=False)
            if any(one.stuck for one in outcomes):  # a thread waits inside torch and cannot be interrupted
                sys.stderr.flush()
                os._exit(128 + received)
            raise typer.Exit(128 + received)
        for group, outcome in zip(groups, outcomes, strict=True):
            self._record_result(group, outcome)

    @property
    def _again(self) -> str:
        return f"paceline tune --again {shlex.quote(near(self.directory))}"

    def _place(self, number: int, group: int) -> Path:
        return self.directory / f"round-{number:02d}" / f"group-{group:02d}"

    def _step(self, number: int, group: int) -> Path | None:
        """A group's last checkpoint of a round."""
        store = DirectoryStore(self._place(number, group) / "checkpoint")
        numbers = store.numbers()
        return store.path(numbers[-1]) if numbers else None

    def _command(self, group: int, cluster: LaunchCluster) -> Command:
        """The command of a group's workers in this round."""
        number, plan = len(self.rounds), self.plan
        member, place = self.rounds[-1][group], self._place(number, group)
        shutil.rmtree(place, ignore_errors=True)  # of a stopped round
        output = place / "output"
        output.mkdir(parents=True)
        added = environment(cluster, plan.rule, place)
        if "OMP_NUM_THREADS" in added:
            added["OMP_NUM_THREADS"] = str(max(1, int(added["OMP_NUM_THREADS"]) // min(plan.together, plan.groups)))
        added |= certificates.environment(cluster, None, False)
        added["PACELINE_ROUND"] = Round(str(place / "checkpoint"), exchanges(plan, member.values), member.tune).text()
        if member.source is not None:
            step = self._step(number - 1, member.source)
            if step is None:
                where = near(self._place(number - 1, member.source))
                raise _SearchStoppedError(
                    f"the checkpoint in {where} is missing, from which group {group} starts", FAILED
                )
            added["PACELINE_RESUME"] = str(step)
        script, *arguments = plan.program
        sign = fixed.signing(cluster, place, Security(), False)
        return Command(find(Path(script), ["--", *arguments]).command(), added, output, sign)

    def _record_result(self, group: int, outcome: Outcome) -> None:
        members, place = self.rounds[-1], self._place(len(self.rounds), group)
        failed = _why(outcome)
        if not failed and self._step(len(self.rounds), group) is None:
            self.ended = f"the program ended in round {len(self.rounds)}"
            return
        log = read_run(place) if has_run(place) else None
        measure = log.last(self.plan.measure) if log is not None else None
        if not failed and measure is None:
            names = ", ".join(log.value_names) if log is not None else ""
            raise _SearchStoppedError(
                f"the program logs no {self.plan.measure!r} ({f'it logs {names}' if names else 'it logs nothing'}): "
                f"call run.log({self.plan.measure}=...) in its loop, or name another --measure",
                FAILED,
            )
        members[group] = members[group].done(measure, failed)

    # -- messages ---------------------------------------------------------------------------------

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Show the round's table: on a terminal during the round, else at its end."""
        console = out()
        if console.is_terminal:
            with Live(get_renderable=self._table, console=console, refresh_per_second=4):
                yield
            return
        yield
        if not self.ended:
            console.print(self._table())

    def _table(self) -> Any:
        plan = self.plan
        return table(self.rounds[-1], f"round {len(self.rounds)} of {plan.rounds}", plan.measure, self._busy)

    def _conclude(self) -> int:
        """Copy the best group's checkpoint, and print it."""
        plan, number, members = self.plan, len(self.rounds), self.rounds[-1]
        best = ranking(members, plan.maximize)[0]
        step, target = self._step(number, best), self.directory / "best"
        if step is not None:
            partial = self.directory / "best.partial"
            for path in (partial, target):
                shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(step, partial)
            partial.rename(target)
            if (frozen := step.with_name(FROZEN)).is_dir():  # beside the step, here as there
                shutil.copytree(frozen, target.with_name(FROZEN), dirs_exist_ok=True)
        console = out()
        if self.ended:
            console.print(f"{self.ended}; the search ends with round {number}")
        console.print(best_text(members[best], best, number, plan.measure), markup=False, soft_wrap=True)
        rule = [] if plan.rule is None else ["--rule", plan.rule]
        command = ["paceline", "run", "--workers", str(plan.workers), *rule, *plan.program]
        where = f"PACELINE_RESUME={shlex.quote(near(target))}"
        console.print(f"continue from its checkpoint with: {where} {shlex.join(command)}", markup=False, soft_wrap=True)
        groups = f"{shlex.quote(near(self.directory / f'round-{number:02d}'))}/group-*"
        console.print(f"compare the groups with: paceline report {groups}", markup=False, soft_wrap=True)
        return 0


def _why(outcome: Outcome) -> str:
    """Why a group failed; "" if it did not."""
    if outcome.codes:
        files = {worker.rank: worker.stderr for worker in outcome.workers}
        rank = failure.culprit(outcome.codes, files)
        words, _ = failure.error_lines(files[rank], rank)
        return f"worker {rank}: {words or failure.exit_text(outcome.codes[rank])}"
    return "" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
