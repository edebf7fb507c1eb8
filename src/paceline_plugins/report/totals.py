# SPDX-License-Identifier: Apache-2.0
"""A run in numbers: totals, shares of time, and warnings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

from paceline.observe.reports.events import LeftOut, Takeover
from paceline.observe.reports.log import RunLog, WorkerLog
from paceline.observe.reports.summary import Shares, ranks_text, seconds_text, share_text

BROKEN = 3
"""Rejections in a row after which a worker is probably broken."""
MUCH_WAIT = 0.05
"""Share of the time from which on waiting for data gives a warning."""
LITTLE_WAIT, UNEVEN = 0.01, 1.5
"""A worker is named whose share of waiting for data is at least this, and this many times the mean."""


@dataclass(frozen=True)
class Delays:
    """Staleness of asynchronous pushes, in updates."""

    pushes: int
    mean: float
    largest: int


@dataclass(frozen=True)
class Summary:
    """One run in numbers, over all workers unless the name says otherwise."""

    workers: int
    minibatches: int
    samples: int | None
    wall_s: float
    minibatches_per_s: float
    samples_per_s: float | None
    shares: Shares
    blocks: int  # exchanges of the worker that took part in most
    bytes_per_worker: float
    bytes_per_block: float  # sent by one worker
    left_out: int  # contributions that were not finite, or far larger than usual
    values: dict[str, float]  # name -> last value
    delays: Delays | None = None  # None where nothing was pushed, as in every synchronous run
    refused: int = 0  # pushes that were not finite
    lost: dict[int, list[int]] = field(default_factory=dict)  # lost worker -> new owners of its shards
    logs_data_wait: bool = False  # whether the log separates waiting for data from computing
    effective: float | None = None  # how many workers all were worth in the end; None where exchanges did not tell
    in_all: int = 0  # workers that ever took part; `workers` are the most at any time


def summarize(run: RunLog) -> Summary:
    """Add up a run's logs."""
    minibatches = sum(worker.minibatches for worker in run.workers)
    counts = [worker.samples for worker in run.workers]
    samples = sum(c for c in counts if c is not None) if None not in counts else None
    blocks = sum(worker.blocks for worker in run.workers)
    sent = sum(worker.bytes for worker in run.workers)
    last = {name: run.last(name) for name in run.value_names}
    return Summary(
        workers=run.size,
        minibatches=minibatches,
        samples=samples,
        wall_s=run.wall_s,
        minibatches_per_s=_ratio(minibatches, run.wall_s),
        samples_per_s=None if samples is None else _ratio(samples, run.wall_s),
        shares=shares(run.workers),
        blocks=max((worker.blocks for worker in run.workers), default=0),
        bytes_per_worker=_ratio(sent, len(run.workers)),
        bytes_per_block=_ratio(sent, blocks),
        left_out=rejected_counts(run).total(),
        values={name: value for name, value in last.items() if value is not None},
        delays=delays(run.delays),
        refused=sum(worker.refused for worker in run.workers),
        lost={line.rank: list(new_owners(run, line.rank)) for line in run.lost},
        logs_data_wait=run.logs_data_wait,
        effective=effective_workers(run),
        in_all=len(run.numbers),
    )


def effective_workers(run: RunLog) -> float | None:
    """How many workers all were worth in the last block that tells, by the log with most lines."""
    lines = max((worker.exchanges for worker in run.workers), key=len, default=[])
    return next((line.effective_workers for line in reversed(lines) if line.effective_workers is not None), None)


def delays(counts: Counter[int]) -> Delays | None:
    """Mean and largest delay of some pushes; None where there are none."""
    pushes = sum(counts.values())
    if not pushes:
        return None
    return Delays(pushes, sum(delay * count for delay, count in counts.items()) / pushes, max(counts))


def shares(workers: list[WorkerLog]) -> Shares:
    """Shares of the measured time of some workers."""
    names = ("compute_s", "wait_s", "exchange_s", "data_s")
    parts = [sum(getattr(worker, name) for worker in workers) for name in names]
    return Shares(*(_ratio(part, sum(parts)) for part in parts))


def data_wait_sentence(run: RunLog) -> str:
    """The workers' share of waiting for data, with advice where it is large; empty where unknown."""
    if not run.logs_data_wait:
        return ""
    part = shares(run.workers).data
    each = {worker.rank: shares([worker]).data for worker in run.workers}
    most = max(each, key=each.__getitem__)
    text = f"Workers waited {share_text(part)} of the time for data"
    if each[most] >= max(UNEVEN * part, LITTLE_WAIT):
        text += f" (worker {most}: {share_text(each[most])})"
    if not waits_long_for_data(run):
        return f"{text}."
    return (
        f"{text}: give the loader more processes (num_workers); where that does not help, the storage or the network "
        "is too slow."
    )


def waits_long_for_data(run: RunLog) -> bool:
    """Whether all workers, or one of them, wait for data enough for a warning; virtual ones wait for each other."""
    groups = (run.workers, *([worker] for worker in run.workers))
    return run.transport != "virtual" and any(shares(workers).data >= MUCH_WAIT for workers in groups)


def rejected_counts(run: RunLog) -> Counter[int]:
    """Rejected contributions by worker."""
    return _fullest_log(run)[0]


def _fullest_log(run: RunLog) -> tuple[Counter[int], list[LeftOut]]:
    """Rejected contributions by worker, and their events: all logs have all of them, so the one with most is used."""
    logged = [(Counter(r for line in w.exchanges for r in line.left_out), w.left_out) for w in run.workers]
    return max(logged, key=lambda pair: pair[0].total(), default=(Counter[int](), []))


def warnings(run: RunLog, at_work: bool = False) -> list[str]:
    """What a reader of the report has to know about its numbers; `at_work` while the run trains."""
    texts = [f"Worker {w.rank} on {w.host}: {text}" for w in run.workers for text in w.errors]
    if run.missing:
        texts.append(f"No log of {ranks_text(run.missing, 8)}: the totals lack their part.")
    cut = [worker.rank for worker in run.workers if worker.truncated]
    if cut and not at_work:
        texts.append(f"The log of {ranks_text(cut, 8)} ends in the middle of a line: the worker was cut off.")
    texts += _never_trained(run, at_work) + _unread(run) + _losses(run)
    gone = {line.rank for line in run.lost}
    still = [worker.rank for worker in run.workers if worker.closed is None and worker.rank not in gone]
    if still and not at_work:
        texts.append(f"{ranks_text(still, 8).capitalize()} never closed the run: killed, or still at work.")
    texts += _rejected(run)
    refusing = [worker.rank for worker in run.workers if worker.refused]
    if refusing:
        count = sum(worker.refused for worker in run.workers)
        texts.append(f"Rejected because not finite: {count} push(es) of {ranks_text(refusing, 8)}.")
    if waits_long_for_data(run):
        texts.append(data_wait_sentence(run))
    return texts + _disagreement(run) + _slower_than_one(run) + _crowding(run)


def _never_trained(run: RunLog, at_work: bool) -> list[str]:
    """A sentence on an elastic run that never had enough workers at once, with what to do."""
    fewest = next((event.facts["fewest"] for event in run.events if "fewest" in event.facts), None)
    if fewest is None or not run.never_trained:
        return []
    change = {"joined": 1, "lost": -1, "left": -1, "left early": -1}
    there = list(accumulate((change.get(event.kind, 0) for event in run.events), initial=0))
    start = f"start more workers, or give --elastic a smaller minimum than {fewest}"
    if at_work:
        return [f"The run has not begun to train: {there[-1]} of at least {fewest} workers are there; {start}."]
    return [
        f"The run never trained: it waited {seconds_text(run.wall_s)} for at least {fewest} workers, and at most "
        f"{max(there)} were there at once; {start}."
    ]


def _unread(run: RunLog) -> list[str]:
    """A sentence on each log with lines that are no events, or with dropped events."""
    texts = []
    for worker in run.workers:
        if worker.damaged:
            where = ", ".join(str(number) for number in worker.damaged)
            more = ", ..." if worker.damaged_lines > len(worker.damaged) else ""
            texts.append(
                f"{worker.damaged_lines} line(s) in the log of worker {worker.rank} are no events and were skipped "
                f"({worker.path.name}, line {where}{more}): its totals may be too low."
            )
        if worker.gaps:
            texts.append(
                f"The log of worker {worker.rank} lacks {worker.gaps} events, because its disk was full: sums over its "
                "lines are too low."
            )
    return texts


def _losses(run: RunLog) -> list[str]:
    """A sentence on each lost worker, and one on each new owner of its shards."""
    texts = []
    for line in run.lost:
        text = f"Worker {line.rank} was lost after {seconds_text(line.at_s)}: {line.why.rstrip('.')}."
        for owner, event in new_owners(run, line.rank).items():
            start = f", from version {event.version} ({event.source})" if event else ""
            text += f" Worker {owner} took over its shards{start}."
        texts.append(text)
    return texts


def _rejected(run: RunLog) -> list[str]:
    """A sentence on each reason for a rejection, and one on each worker that is probably broken."""
    texts = []
    rejected, lines = _fullest_log(run)
    large = Counter(line.rank for line in lines if line.finite)
    reasons = {"not finite": rejected - large, "far larger than usual": large}
    for why, counts in reasons.items():
        if counts:
            who = ranks_text(sorted(counts), 8)
            texts.append(f"Rejected because {why}: {counts.total()} contribution(s) of {who}.")
    lines = [line for worker in run.workers for line in worker.left_out]
    for rank in sorted({line.rank for line in lines if line.in_a_row >= BROKEN}):
        times = max(line.in_a_row for line in lines if line.rank == rank)
        texts.append(
            f"Contributions of worker {rank} were rejected {times} times in a row, so it is probably broken: check its "
            "memory and its part of the data, or use another host."
        )
    return texts


def _disagreement(run: RunLog) -> list[str]:
    rules = {str(w.attach["rule"]) for w in run.workers if "rule" in w.attach}
    return [f"Workers name different rules: {'; '.join(sorted(rules))}."] if len(rules) > 1 else []


def _slower_than_one(run: RunLog) -> list[str]:
    """A sentence where exchanges keep all workers together below what one of them does alone."""
    part = shares(run.workers)
    busy = part.compute + part.data
    if run.size == 1 or run.elastic or run.missing or not 0 < run.size * busy < 1:
        return []
    return [
        f"Each of the {run.size} workers computed for {share_text(busy)} of the time, all together "
        f"{run.size * busy:.2g} times as much as one that exchanges nothing: one worker alone is faster. Give a "
        "minibatch more to compute, or take a longer period."
    ]


def _crowding(run: RunLog) -> list[str]:
    """A sentence on each host with more workers than cores."""
    texts = []
    for host in run.hosts:
        here = [worker for worker in run.workers if worker.host == host]
        cores = here[0].attach.get("cores")
        if cores and len(here) > int(cores) and run.transport in ("gloo", "virtual"):
            texts.append(
                f"{len(here)} workers shared the {cores} cores of {host}: "
                "times and throughput say little about a cluster."
            )
    return texts


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def new_owners(run: RunLog, rank: int) -> dict[int, Takeover | None]:
    """The new owners of a lost worker's shards: rank -> its takeover event, if it logged one."""
    owners: dict[int, Takeover | None] = {}
    for line in (line for w in run.workers for line in w.lost if line.rank == rank):
        owners |= dict.fromkeys(line.taken_over)
    for worker in run.workers:
        taken = [line for line in worker.takeovers if line.slice_of == rank]
        if taken:
            owners[worker.rank] = taken[-1]
    return dict(sorted(owners.items()))
