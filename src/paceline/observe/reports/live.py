# SPDX-License-Identifier: Apache-2.0
"""Follows the logs of a run that still trains, for progress lines.

`Live(directory).poll()` reads the lines that were appended since the last call and returns a `LiveSnapshot`.
`Live.workers` has the state of each worker, and `Live.notices` the events. Damaged files raise no errors: an incomplete
line is read when it is complete, and a line that is no event is skipped; the report counts it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.observe.event_log import is_gone
from paceline.observe.reports import elastic_events
from paceline.observe.reports.elastic_events import CONTROL_LOG, ElasticStatus
from paceline.observe.reports.events import ExchangeEvent
from paceline.observe.reports.log import WorkerLog
from paceline.observe.reports.notices import JsonLinesTail, Notices, control_notice, worker_notice
from paceline.observe.reports.read import LOG_NAME, add_event
from paceline.observe.reports.summary import Shares

# How much of a run is done, where the program reports its end: with `run.progress`, or through a framework's trainer.
#
# Of T turns of the outermost loop t are over, and the share p of the pass over the data within the present one, so that
# (t + p) / T of the run is done. The time left follows from the mean pace since the first turn.


class WholeRun:
    """Of one worker.

    Attributes:
        turns: turns over, and all of them; None where the program reports none.
    """

    def __init__(self) -> None:
        self.turns: tuple[int, int] | None = None
        self._first: tuple[float, float] | None = None  # time, and share that was done
        self._passes = 0  # over the data, that began within the present turn
        self._at_s = 0.0

    def add(self, event: WorkerLog) -> None:
        """A line of the log."""
        self._at_s = max(self._at_s, event.last_at_s)
        if event.turn is not None:
            self.turns, self._passes = event.turn, 0
            if self._first is None:
                self._first = event.last_at_s, event.turn[0] / event.turn[1]
        self._passes += len(event.epochs)

    def done(self, of_pass: float | None) -> float | None:
        """The share of the run that is done.

        Args:
            of_pass: the share of the present pass over the data; it counts if a turn has one.
        """
        if self.turns is None:
            return None
        turn, turns = self.turns
        return min(1.0, (turn + (of_pass or 0.0 if self._passes == 1 else 0.0)) / turns)

    def left_s(self, of_pass: float | None) -> float | None:
        """Seconds to the end; None where that is not known yet."""
        done = self.done(of_pass)
        if done is None or self._first is None or done <= self._first[1]:
            return None
        began_s, before = self._first
        return (1.0 - done) * (self._at_s - began_s) / (done - before)


def slowest(workers: Iterable[tuple[WholeRun, float | None]]) -> tuple[float | None, float | None]:
    """The least share that is done, and the most seconds that are left, of workers and their shares of a pass."""
    rows = [(one.done(of_pass), one.left_s(of_pass)) for one, of_pass in workers]
    done = min((one for one, _ in rows if one is not None), default=None)
    return done, max((left for _, left in rows if left is not None), default=None)


LAG_S = 2.0  # of a log behind its worker
DEAD_S = 5.0  # without growth of a log before its process is checked
POINTS = 512  # of a curve
WINDOW_S = 10.0  # of the log, for rates and shares


@dataclass(frozen=True)
class LiveSnapshot:
    """A run at one moment."""

    size: int = 0  # workers; 0 until the first has attached
    rule: str = ""
    minibatches: dict[int, int] = field(default_factory=dict)  # done so far, by rank
    minibatches_per_s: float = 0.0  # recent rate of all workers together
    epoch: int | None = None  # the furthest pass over the data that a worker has begun
    epoch_done: float | None = None  # finished share of that pass, where its length is known
    loss: float | None = None  # the latest value named `loss`, or another loss where none is so named
    exchange_share: float = 0.0  # share of the measured time in waiting and exchanging
    delay: float | None = None  # mean delay of recent pushes of all workers, in updates; None without pushes
    lost: tuple[int, ...] = ()  # ranks
    data_share: float = 0.0  # share of the measured time in waiting for data
    elastic_status: ElasticStatus | None = None  # None for other runs
    epoch_left_s: float | None = None  # to the end of the pass for the slowest worker, at its recent rate
    effective: float | None = None  # how many workers all are worth; None where exchanges do not say so
    # share of the run that is done, and seconds to its end; None where the program reports no end
    whole: tuple[float | None, float | None] = (None, None)

    @property
    def total(self) -> int:
        """Minibatches of all workers."""
        return sum(self.minibatches.values())


class Live:
    """Follows the logs of the newest run in a directory.

    Args:
        directory: of the logs.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.notices = Notices()
        self._number = 1
        self._followers: dict[int, Follower] = {}
        self._control = _Control(self.directory / CONTROL_LOG)

    def poll(self) -> LiveSnapshot:
        """Read new lines and sum up."""
        self._look_for_files()
        start_s = self._start_s()
        for follower in self._followers.values():
            follower.read(self.notices, start_s)
        self._control.read(self.notices, start_s)
        snapshot = _sum_up(self.workers, self._control.lost) if self._followers else LiveSnapshot()
        return replace(snapshot, elastic_status=self._control.elastic_status)

    def _start_s(self) -> float:
        """Start of an elastic run by the clock of its first worker's host; 0 for other runs."""
        known = [log.began_unix_s for log in self._followers.values() if log.began_unix_s]
        return min(known, default=0.0) if self._control.elastic_status is not None else 0.0

    @property
    def workers(self) -> list[Follower]:
        """Workers with logs at the last `poll`, in rank order."""
        return [self._followers[rank] for rank in sorted(self._followers)]

    @property
    def over(self) -> bool:
        """Whether every worker has closed the run, was lost, or is dead."""
        if self._control.finished:
            return True
        logs = self.workers
        lost = set().union(self._control.lost, *(log.lost for log in logs))
        ended = {log.rank for log in logs if log.closed or log.dead()} | lost
        if self._control.elastic_status is not None:  # further workers may still join, unless all have ended
            return bool(logs) and all(log.rank in ended for log in logs) and self._control.silent
        return bool(logs) and len(ended) >= max(log.size for log in logs)

    def _look_for_files(self) -> None:
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            match = LOG_NAME.fullmatch(path.name)
            if not match or not path.is_file():
                continue
            rank, number = int(match[1]), int(match[2] or 1)
            if self._control.path.exists():  # each worker that joins has a log of its own
                if rank not in self._followers or number > self._followers[rank].number:
                    self._followers[rank] = Follower(path, rank, number)
                continue
            if number > self._number:
                self._number, self._followers = number, {}
            if number == self._number and rank not in self._followers:
                self._followers[rank] = Follower(path, rank, number)


class _Control:
    """Follows the log of a control plane, where there is one.

    Attributes:
        elastic_status: of the run; None where there is no control plane.
        lost: workers that were lost.
        finished: the run has finished, or was given up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.elastic_status: ElasticStatus | None = None
        self.lost: set[int] = set()
        self.finished = False
        self._growing = JsonLinesTail(path)
        self._began_unix_s = 0.0

    @property
    def silent(self) -> bool:
        """Whether its log has not grown for `DEAD_S`."""
        try:
            return time.time() - self.path.stat().st_mtime > DEAD_S
        except OSError:
            return True

    def read(self, notices: Notices, start_s: float) -> None:
        """Read new lines."""
        if not self.path.is_file():
            return
        self.elastic_status = self.elastic_status or ElasticStatus()
        for event in elastic_events.valid_events(self._growing.read()):
            if event.kind == "began":
                self._began_unix_s = float(event.facts.get("unix_s") or 0.0)
            if elastic_events.is_news(event.kind, event.facts, self.elastic_status):
                ahead_s = self._began_unix_s - start_s if self._began_unix_s and start_s else 0.0
                notices.add(control_notice(event, event.at_s + ahead_s))
            self.lost |= {int(event.facts["worker"])} if event.kind == "lost" else set()
            self.finished = self.finished or event.kind in ("finished", "ended")
            self.elastic_status.add(event)


class Follower:
    """Follows one worker's log. It keeps sums, not events: a long run must not fill the launcher's memory."""

    def __init__(self, path: Path, rank: int, number: int = 1) -> None:
        self.path, self.rank, self.number = path, rank, number
        self.size, self.rule = 0, ""
        self.minibatches = 0
        self.busy_s = self.exchange_s = self.data_s = 0.0
        self.epoch: int | None = None
        self.epoch_batches: int | None = None
        self.epoch_start = 0
        self.losses: dict[str, tuple[float, float]] = {}  # name -> (at_s, value)
        self.track: deque[tuple[float, int]] = deque()  # (at_s, minibatches) in the last window
        self.pushes: deque[tuple[float, int, int]] = deque()  # (at_s, pushes, sum of their delays) in the last window
        self.lost: set[int] = set()
        self.host, self.samples, self.closed = "?", 0, False
        self.always_rejected: set[int] = set()  # ranks whose contributions all exchanges rejected
        self.failed, self.block, self.at_s = False, 0, 0.0
        self.touched_s = 0.0  # when the log last grew, wall clock
        self.left_out: Counter[int] = Counter()  # rank -> rejected contributions
        self.spent: deque[tuple[float, ExchangeEvent]] = deque()  # lines in the last window
        self.effective: float | None = None  # how many workers all are worth
        self.curve: list[float] = []  # the loss, thinned out
        self.began_unix_s = self.ahead_s = 0.0  # start of its log; seconds after the start of the run
        self.whole = WholeRun()
        self.inherited = 0  # minibatches that its count began with
        self._own = 0  # minibatches by the lines of exchanges
        self._about: dict[str, Any] = {}  # its process
        self._every, self._seen = 1, 0
        self._growing = JsonLinesTail(path)

    def dead(self, clock: Callable[[], float] = time.time) -> bool:
        """Whether its process ended without closing the run, as far as this host can tell."""
        return not self.closed and clock() - self.touched_s > DEAD_S and is_gone(self.host, self._about)

    def read(self, notices: Notices, start_s: float = 0.0) -> None:
        """Read new lines of a run that began at `start_s` of the wall clock, 0 where unknown."""
        with contextlib.suppress(OSError):
            self.touched_s = self.path.stat().st_mtime
        for line in self._growing.read():
            event = WorkerLog(path=self.path, rank=self.rank)
            try:
                add_event(event, line)
                self._add(event)
                self.ahead_s = self.began_unix_s - start_s if start_s and self.began_unix_s else 0.0
                notices.add(worker_notice(self.rank, line, _seconds(line) + self.ahead_s))
            except (ValueError, TypeError, KeyError, AttributeError):
                continue

    def _add(self, event: WorkerLog) -> None:
        if "chosen_rule" in event.attach:
            self.rule = str(event.attach["chosen_rule"])
        elif event.attach:
            self.size = int(event.attach.get("size", 0))
            self.rule, self.host = str(event.attach.get("rule", "")), event.host
            self.began_unix_s = float(event.attach.get("unix_s") or 0.0) - event.last_at_s
            self._about = event.attach
        self.at_s = max(self.at_s, event.last_at_s)
        self.whole.add(event)
        self.closed = self.closed or event.closed is not None
        self.always_rejected.update((event.closed or {}).get("always_rejected", ()))
        self.failed = self.failed or bool(event.errors)
        for start in event.epochs:
            self.epoch_start = self._start_of_next_epoch()
            self.epoch, self.epoch_batches = start.epoch, start.batches
        for line in event.exchanges:
            self.busy_s += line.measured_s
            self.data_s += line.data_s or 0.0
            self.exchange_s += line.wait_s + line.exchange_s
            self._count(line)
            self._advance(line.at_s, line.total_minibatches)
            self._push(line)
            self._spend(line)
        self.lost |= {line.rank for line in event.lost}
        for value in event.values:
            if "loss" in value.name.lower():
                self.losses[value.name] = (value.at_s, value.value)
                if value.name == "loss" or "loss" not in self.losses:
                    self._draw(value.value)
            self._advance(value.at_s, value.total_minibatches)

    def _count(self, line: ExchangeEvent) -> None:
        """Find the count that it began with, from a checkpoint or from the worker that sent it the state."""
        self._own += line.minibatches
        more = line.total_minibatches - self._own - self.inherited if line.minibatches else 0
        if more:
            self.inherited += more
            self.minibatches = max(0, self.minibatches - more)
            self.epoch_start = max(0, self.epoch_start - more)
            self.track.clear()

    def _start_of_next_epoch(self) -> int:
        """Minibatches done when a pass begins.

        The log lags: where little is missing to the end of the pass before, that pass was finished.
        """
        finished = self.epoch_start + (self.epoch_batches or 0)
        return finished if finished - self.minibatches <= LAG_S * self.rate else self.minibatches

    def _advance(self, at_s: float, minibatches: int) -> None:
        self.minibatches = max(self.minibatches, minibatches - self.inherited)
        self.track.append((at_s, self.minibatches))
        while self.track[0][0] < at_s - WINDOW_S and len(self.track) > 2:
            self.track.popleft()

    def _push(self, line: ExchangeEvent) -> None:
        """Keep the delays of the lines in the window."""
        if line.delays:
            delays = sum(delay * count for delay, count in line.delays.items())
            self.pushes.append((line.at_s, sum(line.delays.values()), delays))
        while self.pushes and self.pushes[0][0] < line.at_s - WINDOW_S:
            self.pushes.popleft()

    def _spend(self, line: ExchangeEvent) -> None:
        """Keep the lines in the window."""
        self.left_out.update(line.left_out)
        self.block = max(self.block, line.block)
        self.samples = max(self.samples, line.total_samples or 0)
        self.effective = line.effective_workers or self.effective
        self.spent.append((line.at_s, line))
        while self.spent[0][0] < line.at_s - WINDOW_S:
            self.spent.popleft()

    def _draw(self, value: float) -> None:
        """Keep every k-th value of the curve, so that its length is bounded."""
        self._seen += 1
        if self._seen % self._every == 0:
            self.curve.append(value)
        if len(self.curve) > POINTS:
            self.curve, self._every = self.curve[1::2], 2 * self._every

    @property
    def shares(self) -> Shares:
        """Shares of the time in the last window."""
        lines = [line for _, line in self.spent]
        parts = (
            sum(line.compute_s for line in lines),
            sum(line.wait_s for line in lines),
            sum(line.exchange_s for line in lines),
            sum(line.data_s or 0.0 for line in lines),
        )
        busy = sum(parts)
        return Shares(*(part / busy if busy else 0.0 for part in parts))

    @property
    def samples_per_s(self) -> float | None:
        """Samples a second over the window, estimated from minibatches; None where they are not counted."""
        return self.rate * self.samples / self.minibatches if self.samples and self.minibatches else None

    @property
    def rate(self) -> float:
        """Minibatches a second over the window."""
        if len(self.track) < 2:
            return 0.0
        (since, before), (now, after) = self.track[0], self.track[-1]
        return (after - before) / (now - since) if now > since else 0.0

    @property
    def epoch_done(self) -> float | None:
        """Finished share of the worker's pass."""
        if not self.epoch_batches:
            return None
        done = (self.minibatches - self.epoch_start) / self.epoch_batches
        return min(1.0, max(0.0, done))

    @property
    def epoch_left_s(self) -> float | None:
        """Seconds to the end of the worker's pass, at the rate of the window."""
        if self.epoch_done is None or not self.epoch_batches or not self.rate:
            return None
        return (1.0 - self.epoch_done) * self.epoch_batches / self.rate


def _seconds(event: dict[str, Any]) -> float:
    with contextlib.suppress(TypeError, ValueError):
        return float(event.get("at_s", 0.0))
    return 0.0


def _sum_up(logs: list[Follower], lost: set[int]) -> LiveSnapshot:
    busy = sum(log.busy_s for log in logs)
    lost = lost.union(*(log.lost for log in logs))
    at_work = [log for log in logs if log.rank not in lost]
    epochs = [log.epoch for log in logs if log.epoch is not None]
    epoch = max(epochs, default=None)
    done = [log.epoch_done for log in at_work if log.epoch == epoch and log.epoch_done is not None]
    here = [log for log in at_work if log.epoch == epoch and not log.closed]
    left = [log.epoch_left_s for log in here if log.epoch_left_s is not None]
    return LiveSnapshot(
        size=max(log.size for log in logs),
        rule=next((log.rule for log in logs if log.rule), ""),
        minibatches={log.rank: log.minibatches for log in logs},
        minibatches_per_s=sum(log.rate for log in at_work),
        epoch=epoch,
        epoch_done=sum(done) / len(done) if done else None,
        epoch_left_s=max(left, default=None),
        loss=_latest_loss(logs),
        exchange_share=sum(log.exchange_s for log in logs) / busy if busy else 0.0,
        delay=_mean_delay(at_work),
        lost=tuple(sorted(lost)),
        data_share=sum(log.data_s for log in logs) / busy if busy else 0.0,
        effective=max(at_work or logs, key=lambda log: log.at_s).effective,
        whole=slowest((log.whole, log.epoch_done) for log in at_work),
    )


def _mean_delay(logs: list[Follower]) -> float | None:
    lines = [line for log in logs for line in log.pushes]
    pushes = sum(count for _, count, _ in lines)
    return sum(delays for _, _, delays in lines) / pushes if pushes else None


def _latest_loss(logs: list[Follower]) -> float | None:
    reports = [(name != "loss", -at, value) for log in logs for name, (at, value) in log.losses.items()]
    return min(reports)[2] if reports else None
