# SPDX-License-Identifier: Apache-2.0
"""The launcher of an elastic run: hosts the control plane or joins one, and replaces its own lost workers."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.launch.cluster import address_text
from paceline.cli.launch.signals import SignalListener
from paceline.cli.run import failure
from paceline.cli.run.output import Tails
from paceline.observe.event_file import EventFile
from paceline_plugins.sites import revocations, saved_plan
from paceline_plugins.sites.elastic_checks import reachable
from paceline_plugins.sites.process import OutputFiles
from paceline_plugins.sites.saved_plan import SavedPlan
from paceline_plugins.sites.supervisor import Death, Departure, Supervisor, WorkerCommand

if TYPE_CHECKING:
    from paceline.flow.control.server import ControlServer

LOOK_EVERY_S = 0.05
ASK_EVERY_S = 0.5  # the control plane's status
START_S = 60.0  # that the first workers wait at most for the expected ones
OVER = "the run is over"
"""In the error of a worker that joins after the end of the run."""
REVOKED = "its certificate was revoked"
"""In the error of a worker whose certificate is accepted no more."""
FOREIGN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PACELINE_CONTROL",
    "PACELINE_RELAY",
    "PACELINE_TLS",
)
"""Variables of a surrounding launcher, which our workers must not inherit."""


@dataclass
class Ending:
    """How an elastic run ended on this host.

    Attributes:
        left_behind: places whose workers did not end within the timeout after the first had.
    """

    well: bool = False  # a worker succeeded, here or elsewhere
    finished: int = 0  # workers of this host that succeeded
    deaths: list[Death] = field(default_factory=list)  # of workers, in order; most were replaced
    unfinished: list[int] = field(default_factory=list)
    stopped_by: int | None = None  # number of the signal that ended it, or None
    gone: str = ""  # address of a control plane that can no longer be reached
    why: str = ""  # the control plane's reason to end the run
    left: str = ""  # why the workers of this host left in order; "" if they did not


class Events:
    """Appends events to `control.jsonl`, from any thread.

    Args:
        path: the file.
        since: start of the run by the wall clock, in seconds; `at_s` counts from it, also after a restart.
    """

    def __init__(self, path: Path, since: float) -> None:
        self._file = EventFile(lambda: _appending(path), f"the control plane's log {path}")
        self._since, self._lock, self._closed = since, threading.Lock(), False
        self.news: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Write an event to the file before this returns, unless the disk is full."""
        line = json.dumps({"kind": kind, "at_s": round(time.time() - self._since, 3), **facts}, default=str)
        with self._lock:
            if not self._closed:
                self._file.add(line)
                self._file.flush()
        self.news.put((kind, dict(facts)))

    @property
    def removed(self) -> bool:
        """Whether the log directory was removed in the run, and with it what the workers have said there."""
        return self._file.removed

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._file.close()


def _appending(path: Path) -> tuple[int, Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), path


@contextlib.contextmanager
def control(plan: SavedPlan, directory: Path, events: Events) -> Iterator[tuple[SavedPlan, ControlServer | None]]:
    """Host the control plane, if this launcher leads; the plan gets its port."""
    if not plan.leads:
        yield plan, None
        return
    server = host(plan, directory / saved_plan.CONTROL, events.write)
    gc.freeze()  # a full collection would look at all that torch has made, and hold up a commit for 0.1 s
    try:
        server.start()
        yield SavedPlan(**{**vars(plan), "control": (plan.control[0], server.port)}), server
    finally:
        server.close()


def host(plan: SavedPlan, record: Path, on_event: Callable[[str, dict[str, Any]], None]) -> ControlServer:
    """The control plane of a run, from its record if one exists."""
    from paceline.communication.sockets.tls import TLS
    from paceline.flow.control.messages import Terms  # here, because torch loads for seconds and --help must not wait
    from paceline.flow.control.server import ControlServer

    terms = Terms(
        min_workers=plan.bounds[0],
        max_workers=plan.bounds[1],
        timeout_s=plan.timeout_s,
        grace_s=plan.grace_s,
        start_s=min(START_S, plan.timeout_s / 2) if plan.workers else 0.0,  # less than a joining worker waits
        expected=plan.workers,
    )
    tls = None if plan.tls is None else TLS.folder(plan.tls)
    return ControlServer(plan.control[0], plan.control[1], tls, terms, record, on_event)


def environment(plan: SavedPlan) -> dict[str, str]:
    """A worker's environment, except for its place."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_VARIABLES and not name.startswith("TORCHELASTIC")
    }
    added = {**plan.environment, "PACELINE_CONTROL": plan.address}
    if plan.relay is not None:
        added["PACELINE_RELAY"] = address_text(*plan.relay)
    return own | added | ({} if plan.tls is None else {"PACELINE_TLS": plan.tls})


def of_place(folder: str | None, place: int) -> dict[str, str]:
    """The variable that names the certificate of an elastic worker's place; none if all share one."""
    own = None if folder is None else Path(folder) / f"place-{place}"
    return {} if own is None or not own.is_dir() else {"PACELINE_TLS": str(own)}


def arrived_after_end(death: Death) -> bool:
    """Whether the worker joined after the end of the run, which is no failure."""
    return OVER in failure.error_lines(death.stderr, death.place)[0]


def was_revoked(death: Death) -> bool:
    """Whether the control plane keeps that worker's certificate out, and so its successors."""
    return REVOKED in failure.error_lines(death.stderr, death.place)[0]


class Launcher:
    """Supervises the workers of this host until the run ends.

    Args:
        plan: the options.
        directory: of the logs.
        events: the event log.
        server: the control plane, if this launcher hosts it.
        output: shows the workers' output.
    """

    def __init__(
        self, plan: SavedPlan, directory: Path, events: Events, server: ControlServer | None, output: Tails
    ) -> None:
        self.plan, self.directory, self.events, self.server, self.output = plan, directory, events, server, output
        own = partial(of_place, plan.tls)
        output_folder = directory / "output"
        command = WorkerCommand(plan.command, environment(plan), output_folder, plan.folder, own, was_revoked)
        on_event = lambda kind, facts: events.write(f"process {kind}", facts)  # noqa: E731
        self.workers = Supervisor(command, plan.workers, on_event, self._write)
        self._departure = Departure(self.workers, events.write, plan.timeout_s)
        self.status: dict[str, Any] = {}
        self._judged, self._over_elsewhere, self._warned = 0, False, False
        self._shown: dict[int, int] = {}  # place -> turn whose output is followed
        self._asked_at = self._over_at = self._gone_since = float("-inf")
        self._above_minimum_at = time.monotonic()

    def take_over(self, places: list[dict[str, Any]]) -> int:
        """Adopt the workers of an earlier launcher; returns how many still run."""
        running = self.workers.take_over(places)
        for number, turn, process in self.workers.running:
            self._shown[number] = turn
            self.output.follow(number, process.files.stdout, process.files.stderr, from_now=True)
        self._write()
        return running

    def follow(self, listener: SignalListener, look: Callable[[], None] = lambda: None) -> Ending:
        """Supervise until the run is over or a signal ends it; calls `look` meanwhile."""
        self._write()
        self._ask()
        while not self._departure.ends_launcher(listener.received) and not self._done():
            self._departure.look()
            self.workers.look(self._may_start)
            self._show()
            look()
            self._ask()
            time.sleep(LOOK_EVERY_S)
        ending = self._end(listener)
        self._show()
        look()
        self.output.finish(failed=not ending.well)
        return ending

    def _write(self) -> None:
        try:
            saved_plan.write(self.directory, self.plan, self.workers.state())
        except OSError as error:
            if not self._warned:
                self._warned = True
                self.events.write("launcher record", {"path": str(self.directory / saved_plan.NAME), "why": str(error)})

    def _may_start(self) -> bool:
        """A new worker needs a control plane that can be reached."""
        if self.server is not None or reachable(self.plan.control):
            self._gone_since = float("-inf")
            return True
        if self._gone_since == float("-inf"):
            self._gone_since = time.monotonic()
        return False

    def _ask(self) -> None:
        """Refresh the status of the run, every `ASK_EVERY_S`."""
        now = time.monotonic()
        if self.server is not None and now - self._asked_at >= ASK_EVERY_S:
            revocations.serve(self.directory, self.server.revoke)
            self._asked_at, self.status = now, self.server.status()
            self.workers.over = self.workers.over or bool(self.status.get("finished") or self.status.get("ended"))
        elif self.server is None and not self.workers.over and self._refused_as_over():
            self.workers.over = self._over_elsewhere = True
        if self.workers.over and self._over_at == float("-inf"):
            self._over_at = now
        if not (self.status.get("paused") and any(place.given_up for place in self.workers.places)):
            self._above_minimum_at = now

    def _refused_as_over(self) -> bool:
        """Whether the control plane elsewhere refused one of our workers because the run is over."""
        new, self._judged = self.workers.deaths[self._judged :], len(self.workers.deaths)
        return any(arrived_after_end(death) for death in new)

    @property
    def _control_lost(self) -> bool:
        """Whether the control plane has been unreachable for the timeout."""
        since = self._gone_since
        return since > float("-inf") and time.monotonic() - since > self.plan.timeout_s

    @property
    def _stalled(self) -> bool:
        """Whether the run has been below its minimum for the timeout, with a place here given up."""
        return time.monotonic() - self._above_minimum_at > self.plan.timeout_s

    def _done(self) -> bool:
        if self.workers.over:  # the remaining workers get the timeout to end
            waited = self._over_at > float("-inf") and time.monotonic() - self._over_at > self.plan.timeout_s
            return waited or not (self._working or self._other_hosts())
        if self.workers.running:
            return self._stalled
        if self.workers.waiting:
            return self._control_lost
        return not self._other_hosts() if self.plan.workers else False

    @property
    def _working(self) -> list[int]:
        """Places with a running worker; after the training only those that took part in it, or waited to be needed."""
        finished = bool(self.status.get("finished")) and not self.events.removed
        return [n for n, _, process in self.workers.running if not finished or process.files.exchanged.exists()]

    def _other_hosts(self) -> bool:
        """Whether workers of other hosts still need our control plane."""
        return self.server is not None and bool(self.status.get("members") or self.status.get("waiting"))

    def _end(self, listener: SignalListener) -> Ending:
        ending = Ending(left=self._departure.left)
        if listener.received and not ending.left:
            ending.stopped_by = listener.received[0]
        ending.well = bool(self.workers.finished or self.status.get("finished") or self._over_elsewhere)
        ending.why = str(self.status.get("ended", ""))
        if self._stalled and not ending.why:
            ending.why = f"a worker's place was given up, and the run waits without it: {self.status['paused']}"
        ending.unfinished = self._working
        if not ending.unfinished and self._control_lost:
            ending.gone = self.plan.address
        deaths = len(self.workers.deaths)
        self.output.mute_errors = bool(listener.received)  # no tracebacks of KeyboardInterrupt
        if listener.received:
            self.workers.over = True
            self.workers.stop(listener.received[0], lambda: len(listener.received) > 1)
        else:
            self.workers.stop(signal.SIGTERM)
        self.workers.look()
        self._write()
        ending.finished, ending.deaths = self.workers.finished, self.workers.deaths[:deaths]
        return ending

    def _show(self) -> None:
        """Show the output of all workers, also of new ones."""
        for number, place in enumerate(self.workers.places):
            if place.turn and self._shown.get(number) != place.turn:
                self.output.drop(number)
                self._shown[number] = place.turn
                files = OutputFiles.of(self.workers.command.output, number, place.turn)
                self.output.follow(number, files.stdout, files.stderr)
        self.output.read()
