# SPDX-License-Identifier: Apache-2.0
"""`paceline run --elastic`, `--join` and `--again`: from the wishes to the exit code."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.console import err, refuse
from paceline.cli.launch import saved_plan
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.saved_plan import SavedPlan
from paceline.cli.launch.signals import SignalListener
from paceline.cli.run import certificates as doors
from paceline.cli.run import dry_run, elastic_checks, elastic_messages, output
from paceline.cli.run.disk_full import Room
from paceline.cli.run.elastic_launcher import Ending, Events, Launcher, control
from paceline.errors import PacelineError
from paceline.observe.reports.elastic_events import ControlEvent, ElasticStatus

Shown = Callable[[Path, int], contextlib.AbstractContextManager[output.Show]]


@dataclass(frozen=True)
class ElasticOptions:
    """What the command line said of an elastic run.

    Attributes:
        elastic: MIN:MAX, where this launcher hosts the control plane.
        join: HOST:PORT, where it is elsewhere.
        listen: HOST:PORT of the control plane that is hosted here, or None for a free port of this host alone.
        workers: of this host.
        rule: of `--rule`, or None.
        timeout_s: after so long somebody who does not answer is lost.
        grace_s: of stragglers, or None.
    """

    elastic: str | None
    join: str | None
    listen: str | None
    workers: int
    rule: str | None
    timeout_s: float
    grace_s: float | None

    def where(self) -> tuple[str, int]:
        """The control plane's host and port (0: any), though nobody may listen there yet; refuses what cannot be."""
        bounds = self._bounds()
        elastic_checks.workers(self.workers, None if bounds is None else bounds[1])
        if self.join is not None:
            return elastic_checks.address("--join", self.join)
        return ("127.0.0.1", 0) if self.listen is None else elastic_checks.address("--listen", self.listen)

    def place(self) -> tuple[tuple[int, int], tuple[str, int]]:
        """Bounds and control plane, where that can be; refuses what cannot be."""
        bounds = self._bounds()
        elastic_checks.workers(self.workers, None if bounds is None else bounds[1])
        if bounds is not None:
            return bounds, elastic_checks.listen(self.listen)
        assert self.join is not None
        return (0, 0), elastic_checks.join(self.join, self.timeout_s)

    def _bounds(self) -> tuple[int, int] | None:
        """Fewest and most workers; None where another launcher knows them."""
        if (self.elastic is None) == (self.join is None):
            refuse("--elastic hosts a run and --join takes part in one: give one of them")
        elastic_checks.seconds(self.timeout_s, self.grace_s)
        elastic_checks.rule(self.rule)
        if self.elastic is not None:
            return elastic_checks.bounds(self.elastic)
        for name, value in (("--listen", self.listen), ("--grace", self.grace_s)):
            if value is not None:
                refuse(f"{name} belongs to the launcher that is joined, beside its --elastic")
        return None


def show(
    asked: ElasticOptions,
    command: list[str],
    environment: Callable[[LaunchCluster, str | None, Path], dict[str, str]],
    log: Path | None,
    door: tuple[Path | None, Path | None, bool],
) -> None:
    """`--print`: the workers of this host, and what to type on the others."""
    where = asked.where()
    check_secret(asked, door)
    place = dry_run.directory(log)
    cluster = LaunchCluster(max(1, asked.workers), timeout_s=asked.timeout_s)
    added = environment(cluster, asked.rule, place)
    tls = door[0] or _ambient()
    if tls is None and not door[2]:
        tls = place / "door" / f"host-{0 if asked.join is None else 1}"
    if tls is not None:
        added["PACELINE_TLS"] = str(tls.absolute())
    secret = "--open" if door[2] else f"--tls {door[0]}" if door[0] else "--job FILE"
    leads, port = asked.elastic is not None, where[1] or dry_run.FREE
    dry_run.elastic(leads, f"{where[0]}:{port}", asked.workers, command, added, place, secret)


def check_secret(asked: ElasticOptions, door: tuple[Path | None, Path | None, bool]) -> None:
    """Who joins has to be let in."""
    if asked.join is not None and not any(door) and _ambient() is None:
        refuse(
            "--join needs the job's secret: --job FILE, a copy of door/job.pem in the log directory where the run "
            "began; where that was begun with --open, say so here as well"
        )


def _ambient() -> Path | None:
    """Certificates that the environment names."""
    return Path(os.environ["PACELINE_TLS"]) if os.environ.get("PACELINE_TLS") else None


def certificates(
    asked: ElasticOptions, directory: Path, tls: Path | None, job: Path | None, in_the_clear: bool, quiet: bool
) -> Path | None:
    """The folder of this host's certificate; None where all is in the clear.

    Args:
        asked: what the command line said.
        directory: of the logs, where certificates are made.
        tls: folder of those that are there already.
        job: the job's secret.
        in_the_clear: no certificates are wanted.
        quiet: whether people need not hear of the job's file.
    """
    if in_the_clear:
        if not quiet:
            doors.say_open()
        return None
    named = tls or _ambient()
    if named is not None:
        return named
    cluster = LaunchCluster(max(1, asked.workers), 2, 0 if asked.join is None else 1, timeout_s=asked.timeout_s)
    return doors.certificates(cluster, directory, job, asked.listen is not None, not quiet and asked.listen is not None)


def begin(
    asked: ElasticOptions,
    place: tuple[tuple[int, int], tuple[str, int]],
    command: list[str],
    environment: dict[str, str],
    tls: Path | None,
    directory: Path,
    shown: Shown,
    quiet: bool,
) -> int:
    """Run until the end; the exit code."""
    plan = SavedPlan(
        command=command if asked.workers else [],
        environment=environment,
        folder=os.getcwd(),
        workers=asked.workers,
        control=place[1],
        leads=asked.elastic is not None,
        bounds=place[0],
        timeout_s=asked.timeout_s,
        grace_s=asked.grace_s,
        tls=None if tls is None else str(tls.resolve()),
        unix_s=time.time(),
    )
    return _run(plan, directory, None, shown, quiet)


def again(directory: Path, shown: Shown, quiet: bool) -> int:
    """Go on where a launcher was killed; the exit code."""
    try:
        plan, places = saved_plan.read(directory)
    except PacelineError as error:
        refuse(f"--again: {error}")
    return _run(plan, directory, places, shown, quiet)


def _run(plan: SavedPlan, directory: Path, places: list[dict[str, Any]] | None, shown: Shown, quiet: bool) -> int:
    (directory / "output").mkdir(exist_ok=True)
    started = time.monotonic()
    try:
        with _locked(directory), _events(plan, directory) as events, control(plan, directory, events) as (plan, server):
            with shown(directory, plan.workers) as show:
                launcher = Launcher(plan, directory, events, server, output.Tails(show))
                _begin(launcher, places, quiet)
                news = _News(events, launcher, show, quiet)
                with SignalListener() as listener:
                    ending: Ending = launcher.follow(listener, news.tell)
    except PacelineError as error:
        refuse(str(error))
    return elastic_messages.conclude(ending, plan.workers, time.monotonic() - started, quiet)


def _begin(launcher: Launcher, places: list[dict[str, Any]] | None, quiet: bool) -> None:
    """The first words, and what an earlier launcher left."""
    plan, told = launcher.plan, launcher.events.write
    told(
        "began",
        {
            "fewest": plan.bounds[0],
            "most": plan.bounds[1],
            "control": plan.address,
            "again": places is not None,
            "unix_s": plan.unix_s,
        },
    )
    if places is not None:
        running = launcher.take_over(places)
        if not quiet:
            err().print(f"taken up again: {running} of {plan.workers} workers still run", markup=False)
    if plan.leads and not quiet:
        err().print(_how_to_join(plan), markup=False, soft_wrap=True)


def _how_to_join(plan: SavedPlan) -> str:
    """What a launcher elsewhere has to say; where no secret was made for other hosts, this one's certificate serves."""
    secret = plan.tls is not None and (Path(plan.tls).parent / "job.pem").exists()
    here = plan.control[0] in ("127.0.0.1", "::1", "localhost") and not secret
    secure = " --open" if plan.tls is None else f" --tls {shlex.quote(plan.tls)}" if here else " --job FILE"
    who = "others on this host join" if here else "other hosts join"
    join = f"paceline run --join {plan.address} --workers N{secure} PROGRAM"
    beyond = "; for other hosts begin with --listen" if here else ""
    return f"the control plane listens at {plan.address}; {who} with: {join}{beyond}"


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = saved_plan.Lock(directory)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _events(plan: SavedPlan, directory: Path) -> Iterator[Events]:
    events = Events(directory / saved_plan.EVENTS, plan.unix_s)
    try:
        yield events
    finally:
        events.close()


class _News:
    """Tells people what happens, among the lines of the workers."""

    def __init__(self, events: Events, launcher: Launcher, show: output.Show, quiet: bool) -> None:
        self.events, self.launcher, self.show, self.quiet = events, launcher, show, quiet
        self.elastic_status, self.room = ElasticStatus(), Room(launcher.directory)
        self._told: set[str] = set()  # what is said once

    def tell(self) -> None:
        """All that is new; called by the main thread, which has the terminal."""
        self.room.look()
        while not self.events.news.empty():
            kind, facts = self.events.news.get()
            line = elastic_messages.of_process(kind, facts, self.launcher.workers.over)
            if line:
                self.show(int(facts["place"]), line, True)
            self.elastic_status.add(ControlEvent(0.0, kind, facts))
            said = "" if self.quiet else elastic_messages.of_control(kind, facts, self.elastic_status)
            if kind in elastic_messages.ONCE and kind in self._told:
                continue
            self._told.add(kind)
            if said:
                err().print(said, markup=False, soft_wrap=True)
