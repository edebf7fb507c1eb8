# SPDX-License-Identifier: Apache-2.0
"""Points to draw: a run's logs as arrays of x and y.

Samples are counted over all workers. A worker logs only its own count, so the counts of other workers at the time of a
value are interpolated between their own events. The time of a run begins with its first worker; a worker that joins
later begins later, with a count of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.observe.reports.events import ExchangeEvent, Value
from paceline.observe.reports.log import RunLog, WorkerLog

Points = npt.NDArray[np.float64]

PARTS = ("compute", "wait", "exchange", "data")
SPANS = 60  # of a curve of shares
MANY_POINTS = 60  # a curve with more points is drawn with its running mean


@dataclass(frozen=True)
class Curve:
    """One line of a figure, in the order of x."""

    name: str
    unit: str  # of x: "samples", "minibatches" or "seconds"
    x: Points  # (points,)
    y: Points  # (points,)

    @property
    def noisy(self) -> bool:
        """Whether to draw a running mean instead of markers."""
        return len(self.x) > MANY_POINTS


def by_time(run: RunLog, name: str) -> Curve:
    """A value over seconds since attach."""
    values, at_s = _reports(run, name)
    return _curve(name, "seconds", at_s, values, run.elastic)


def counts_samples(run: RunLog) -> bool:
    """Whether every worker of the run counted its samples."""
    return all(worker.samples is not None for worker in run.workers)


def by_samples(run: RunLog, name: str, counted: bool = True) -> Curve:
    """A value over the samples done by all workers, or over minibatches where not `counted`."""
    values, at_s = _reports(run, name)
    total = np.zeros(len(values))
    for worker in run.workers:
        times, counts = _progress(worker, counted)
        total += np.interp(at_s, times, counts)
    return _curve(name, "samples" if counted else "minibatches", total, values, run.elastic)


def _reports(run: RunLog, name: str) -> tuple[list[Value], Points]:
    """All workers' reports of a value, and their times on the clock of the run."""
    found = [(value, worker.began_s + value.at_s) for worker in run.workers for value in worker.values]
    found = [(value, at_s) for value, at_s in found if value.name == name]
    return [value for value, _ in found], np.array([at_s for _, at_s in found])


def bytes_by_time(run: RunLog) -> Curve:
    """Bytes sent by all workers together, over seconds since attach."""
    lines = sorted((w.began_s + line.at_s, line.bytes) for w in run.workers for line in w.exchanges)
    x = np.array([0.0, *(at_s for at_s, _ in lines)])
    y = np.cumsum([0.0, *(float(sent) for _, sent in lines)])
    return Curve("bytes", "seconds", x, y)


def effective_by_time(run: RunLog) -> Curve:
    """How many workers all are worth, over seconds since attach; by the worker with most lines."""
    told = [
        [(worker.began_s + line.at_s, line.effective_workers) for line in worker.exchanges if line.effective_workers]
        for worker in run.workers
    ]
    points = np.array(max(told, key=len, default=[]), dtype=np.float64).reshape(-1, 2)
    return Curve("effective workers", "seconds", points[:, 0], points[:, 1])


@dataclass(frozen=True)
class SharesByTime:
    """Shares of the measured time of some workers, in equal spans of the time."""

    at_s: Points  # (spans,): their middles, without spans in which nothing was measured
    part: dict[str, Points]  # "compute", "wait", "exchange", "data" -> (spans,); they add up to 1


def data_by_time(workers: Sequence[WorkerLog], name: str, end_s: float) -> Curve:
    """Share of the time in which some workers waited for data, in percent, over seconds since attach."""
    shares = shares_by_time([worker for worker in workers if worker.logs_data_wait], end_s)
    return Curve(name, "seconds", shares.at_s, 100 * shares.part["data"])


def shares_by_time(workers: Sequence[WorkerLog], end_s: float) -> SharesByTime:
    """Shares of the time of some workers together.

    Each point is the middle of an equal span of the time up to `end_s`. The times in a line of the log are spread
    evenly over the time since the line before.
    """
    edges = _edges(workers, end_s)
    spent = sum((_spent(worker, edges) for worker in workers), np.zeros((len(PARTS), len(edges) - 1)))
    busy = spent.sum(axis=0)
    shown = busy > 0
    part = {name: row[shown] / busy[shown] for name, row in zip(PARTS, spent, strict=True)}
    return SharesByTime(_middles(edges)[shown], part)


def exchange_s_by_time(run: RunLog, *parts: str) -> Curve:
    """Seconds that an exchange keeps a worker, in the given parts of its time, over seconds since attach."""
    edges = _edges(run.workers, run.wall_s)
    kept, count = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for worker in run.workers:
        kept += sum(row for name, row in zip(PARTS, _spent(worker, edges), strict=True) if name in parts)
        at_s = worker.began_s + np.array([0.0, *(line.at_s for line in worker.exchanges)])
        sums = np.cumsum([0, *(line.exchanges for line in worker.exchanges)])
        count += np.diff(np.interp(edges, at_s, sums))
    made = count > 0
    return Curve("exchange", "seconds", _middles(edges)[made], kept[made] / count[made])


def throughput_by_time(run: RunLog, counted: bool = True) -> Curve:
    """Samples that all workers do in a second, or minibatches where not `counted`, over seconds since attach."""
    edges = _edges(run.workers, run.wall_s)
    done = np.zeros(len(edges) - 1)
    for worker in run.workers:
        done += np.diff(np.interp(edges, *_progress(worker, counted)))
    end = int(np.flatnonzero(done).max(initial=-1)) + 1  # after it all have finished
    return Curve("throughput", "seconds", _middles(edges)[:end], (done / np.diff(edges))[:end])


def _edges(workers: Sequence[WorkerLog], end_s: float) -> Points:
    """Borders of equal spans of the time, at most as many spans as a worker has lines."""
    most = max((len(worker.exchanges) for worker in workers), default=0)
    return np.linspace(0.0, end_s or 1.0, max(1, min(SPANS, most)) + 1)


def _middles(edges: Points) -> Points:
    return np.asarray((edges[:-1] + edges[1:]) / 2)


def _spent(worker: WorkerLog, edges: Points) -> Points:
    """Seconds of a worker in each part of its time (rows) and each span (columns)."""
    at_s = worker.began_s + np.array([0.0, *(line.at_s for line in worker.exchanges)])
    rows = [(line.compute_s, line.wait_s, line.exchange_s, line.data_s or 0.0) for line in worker.exchanges]
    sums = np.cumsum(np.array([(0.0,) * len(PARTS), *rows]), axis=0)
    return np.array([np.diff(np.interp(edges, at_s, sums[:, part])) for part in range(len(PARTS))])


def delays_of_pushes(run: RunLog) -> Curve:
    """Share of the pushes of all workers, in percent, by delay."""
    counts = run.delays
    x = np.arange(max(counts, default=-1) + 1)
    y = np.array([counts[int(delay)] for delay in x], dtype=np.float64)
    return Curve("pushes", "updates", x.astype(np.float64), 100 * y / max(1.0, float(y.sum())))


def smooth(curve: Curve, share: float = 0.04) -> Curve:
    """Running mean over a window of `share` of the points.

    At the start the window is centred and narrow, which keeps a steep fall; at the end it still reaches backwards, so
    that the last value is a mean.
    """
    finite = np.isfinite(curve.y)
    x, y = curve.x[finite], curve.y[finite]
    place = np.arange(len(y))
    half = max(1, int(len(y) * share / 2))
    back = np.minimum(half, place)
    ahead = np.minimum(back, len(y) - 1 - place)
    sums = np.concatenate([[0.0], np.cumsum(y)])
    means = (sums[place + ahead + 1] - sums[place - back]) / (back + ahead + 1)
    return Curve(curve.name, curve.unit, x, means)


def thin(curve: Curve, most: int = 400) -> Curve:
    """At most `most` points, each a mean of neighbours; a short curve is unchanged."""
    if len(curve.x) <= most:
        return curve
    starts = np.arange(most) * len(curve.x) // most
    lengths = np.diff([*starts, len(curve.x)])
    x = np.add.reduceat(curve.x, starts) / lengths
    y = np.add.reduceat(curve.y, starts) / lengths
    return Curve(curve.name, curve.unit, x, y)


def _progress(worker: WorkerLog, samples: bool) -> tuple[list[float], list[float]]:
    """Times of one worker's events, and the samples or minibatches that it had done by then."""
    before = worker.inherited_samples if samples else worker.inherited
    seen: dict[float, float] = {worker.began_s: 0.0}
    lines: list[ExchangeEvent | Value] = [*worker.exchanges, *worker.values]
    for line in lines:
        done = line.total_samples if samples else line.total_minibatches
        if done is not None:
            at_s = worker.began_s + line.at_s
            seen[at_s] = max(seen.get(at_s, 0.0), float(done - before))
    times = sorted(seen)
    return times, [seen[at_s] for at_s in times]


def _curve(name: str, unit: str, x: Points, values: list[Value], elastic: bool = False) -> Curve:
    """Merge reports of different workers at the same minibatch into the mean of the finite ones.

    Where most reports have no partner, the workers are asynchronous, and each report stays a point. Workers of an
    elastic run are always merged, since their number varies.
    """
    y = np.array([value.value for value in values])
    keys = np.array([value.total_minibatches for value in values])
    _, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    if elastic or len(np.unique(sizes)) <= 2:  # the full groups, and perhaps those after one worker died
        x = np.bincount(group, weights=x) / sizes
        known = np.isfinite(y)
        count = np.bincount(group, weights=known)
        y = np.divide(
            np.bincount(group, weights=np.where(known, y, 0.0)), count, out=np.full(len(count), np.nan), where=count > 0
        )
    order = np.argsort(x, kind="stable")
    return Curve(name, unit, x[order], y[order])
