# SPDX-License-Identifier: Apache-2.0
"""A run in numbers: totals, shares of time, and warnings."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

from paceline.observe.reports.events import LeftOut, Takeover
from paceline.observe.reports.log import RunLog, WorkerLog
from paceline.observe.reports.summary import Shares, ranks_text, seconds_text, share_text
from paceline.update import few_blocks

BROKEN = 3
"""Rejections in a row after which a worker is probably broken."""
MUCH_WAIT = 0.05
"""Share of the time from which on waiting for data gives a warning."""
LITTLE_SLOWER = 0.9  # of the fastest
LITTLE_WORK = 0.7
"""Efficiency below which exchanges cost too much."""
HELD_OUT = re.compile(r"(?<![a-z])(held[ _-]?out|held|valid\w*|val|eval\w*|test|dev)(?![a-z])")
"""In the name of a value of data that the model does not train on."""
QUICK_S = 0.005
"""A minibatch that is ready so soon, as of data in memory, would come no sooner from another process."""
UNEVEN = 1.5
"""A worker is named whose share of waiting for data is this many times the mean."""


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
    left_out: int  # contributions that were not finite, or far larger than usual
    values: dict[str, float]  # name -> last value
    delays: Delays | None = None  # None where nothing was pushed, as in every synchronous run
    refused: int = 0  # pushes that were not finite
    lost: dict[int, list[int]] = field(default_factory=dict)  # lost worker -> new owners of its shards
    logs_data_wait: bool = False  # whether the log separates waiting for data from computing
    effective: float | None = None  # how many workers all were worth in the end; None where exchanges did not tell
    in_all: int = 0  # workers that ever took part; `workers` are the most at any time

    @property
    def efficiency(self) -> float:
        """Share of the measured time in which workers neither waited for each other nor exchanged."""
        return self.shares.compute + self.shares.data

    @property
    def throughput(self) -> tuple[float, str]:
        """Samples in a second, or minibatches where samples were not counted, of all workers; and its unit."""
        if self.samples_per_s is None:
            return self.minibatches_per_s, "minibatches per second"
        return self.samples_per_s, "samples per second"


def summarize(run: RunLog) -> Summary:
    """Add up a run's logs."""
    minibatches = sum(worker.minibatches for worker in run.workers)
    counts = [worker.samples for worker in run.workers]
    samples = sum(c for c in counts if c is not None) if None not in counts else None
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
        left_out=rejected_counts(run).total(),
        values={name: value for name, value in last.items() if value is not None},
        delays=delays(run.delays),
        refused=sum(worker.refused for worker in run.workers),
        lost={line.rank: list(new_owners(run, line.rank)) for line in run.lost},
        logs_data_wait=run.logs_data_wait,
        effective=effective_workers(run),
        in_all=len(run.numbers),
    )


def losses(run: RunLog) -> list[str]:
    """Names of losses, those of training first; all names where there are none."""
    names = run.value_names
    found = [name for name in names if "loss" in name.lower() or HELD_OUT.fullmatch(name.lower())]
    return sorted(found, key=is_held_out) or names


def is_held_out(name: str) -> bool:
    """Whether a value's name says that it is of data that the model does not train on."""
    return HELD_OUT.search(name.lower()) is not None


def with_role(name: str) -> str:
    """A value's name; a loss says whether it is of training or of validation."""
    low = name.lower()
    if "train" in low or "valid" in low:
        return name
    if is_held_out(name):
        return f"{name} (validation)"
    return f"{name} (training)" if "loss" in low else name


def effective_workers(run: RunLog) -> float | None:
    """How many workers all were worth in the last block that tells, by the log with most lines."""
    lines = max((worker.exchanges for worker in run.workers), key=len, default=[])
    return next((line.effective_workers for line in reversed(lines) if line.effective_workers is not None), None)


def worths(run: RunLog) -> dict[int, float]:
    """Rank -> the speed of a worker over the fastest one's, without its waits for others; empty where none is a tenth
    slower."""
    seconds = {w.rank: (w.compute_s + w.data_s) / w.minibatches for w in run.workers if w.minibatches and w.compute_s}
    found = {rank: min(seconds.values()) / own for rank, own in seconds.items()}
    return found if found and min(found.values()) < LITTLE_SLOWER else {}


def worths_text(run: RunLog) -> str:
    """For people; empty where no worker is a tenth slower."""
    found = worths(run)
    slow = [rank for rank, one in sorted(found.items(), key=lambda pair: pair[1]) if one < LITTLE_SLOWER][:3]
    hosts = {worker.rank: worker.host for worker in run.workers}
    each = ", ".join(f"worker {rank} on {hosts[rank]} {found[rank]:.2g}" for rank in slow)
    without = sum(one for rank, one in found.items() if rank not in slow)
    return f"{sum(found.values()):.2g} of the fastest ({each}; {without:.2g} without)" if slow else ""


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
    """The share of waiting for data, with advice; empty where it is small, or where workers wait for shared cores."""
    each = {worker.rank: shares([worker]).data for worker in run.workers}
    most, part = max(each, key=each.__getitem__), shares(run.workers).data
    quick = all(worker.data_s < QUICK_S * worker.minibatches for worker in run.workers)
    if each[most] < MUCH_WAIT or quick or run.transport == "virtual" or crowded(run):
        return ""
    worst = f" (worker {most}: {share_text(each[most])})" if each[most] >= UNEVEN * part else ""
    return (
        f"Workers waited {share_text(part)} of the time for data{worst}: give a loader of files more processes "
        "(num_workers), and data in memory larger minibatches; else the storage or the network is too slow."
    )


def rejected_counts(run: RunLog) -> Counter[int]:
    """Rejected contributions by worker."""
    return _fullest_log(run)[0]


def _fullest_log(run: RunLog) -> tuple[Counter[int], list[LeftOut]]:
    """Rejected contributions by worker, and their events: all logs have all of them, so the one with most is used."""
    logged = [(Counter(r for line in w.exchanges for r in line.left_out), w.left_out) for w in run.workers]
    return max(logged, key=lambda pair: pair[0].total(), default=(Counter[int](), []))


def warnings(run: RunLog, at_work: bool = False) -> list[str]:
    """What is wrong with a run and what to do, the most important sentence first; `at_work` while the run trains."""
    texts = _failed(run) + _never_trained(run, at_work) + _rejected(run) + _losses(run)
    refusing = [worker.rank for worker in run.workers if worker.refused]
    if refusing:
        count = sum(worker.refused for worker in run.workers)
        texts.append(f"Rejected because not finite: {count} push(es) of {ranks_text(refusing, 8)}; lower its rate.")
    if not at_work:
        texts += [*_cut_off(run), too_few_blocks(run)]
    if run.missing:
        texts.append(f"No log of {ranks_text(run.missing, 8)}: the totals lack their part.")
    texts += _unread(run) + _disagreement(run) + _slow(run)
    texts += [data_wait_sentence(run), *_crowding(run)]
    return sorted(filter(None, texts), key=lambda text: text.endswith(_HARMLESS))


def _failed(run: RunLog) -> list[str]:
    """A sentence on each error that ended a worker, with all workers that had it."""
    ranks: dict[str, list[int]] = {}
    for worker in sorted(run.workers, key=lambda one: one.ended_s):  # the others fail because of the first
        for text in worker.errors:
            ranks.setdefault(" ".join(text.split()), []).append(worker.rank)
    return [
        f"{ranks_text(who, 8).capitalize()} failed: {text[:300].rstrip('.')}. Correct the cause and run again; what "
        f"the workers printed is in {run.directory.name}/output."
        for text, who in ranks.items()
    ]


def too_few_blocks(run: RunLog) -> str:
    """A sentence with what to do where the workers merged too rarely to learn together; empty otherwise."""
    if run.elastic or run.delays:  # workers that come and go, or that push each by itself
        return ""
    last = max(
        (line for worker in run.workers for line in worker.exchanges[-1:]), key=lambda one: one.block, default=None
    )
    if last is None or not last.block:  # gradients are exchanged each step
        return ""
    return few_blocks.after(run.rule, run.size, last.total_minibatches, last.block)


def _cut_off(run: RunLog) -> list[str]:
    """Sentences on logs without an end."""
    texts, gone = [], {line.rank for line in run.lost}
    still = [worker.rank for worker in run.workers if worker.closed is None and worker.rank not in gone]
    if still and not any(worker.errors for worker in run.workers):
        who = ranks_text(still, 8).capitalize()
        texts.append(f"{who} never closed the run: killed, or still at work. Wait, or start it again.")
    cut = [worker.rank for worker in run.workers if worker.truncated]
    if cut:
        texts.append(f"The log of {ranks_text(cut, 8)} ends in the middle of a line: the worker was cut off.")
    return texts


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
        text += f" What worker {line.rank} printed is in {run.directory.name}/output."
        texts.append(text)
    return texts


def _rejected(run: RunLog) -> list[str]:
    """A sentence on each worker whose contributions were rejected."""
    rejected, lines = _fullest_log(run)
    large = Counter(line.rank for line in lines if line.finite)
    broken = {line.rank for worker in run.workers for line in worker.left_out if line.in_a_row >= BROKEN}
    total, texts = max(worker.blocks for worker in run.workers), []
    for rank, count in sorted(rejected.items()):
        why = " and ".join(["NaN or infinite"] * (count > large[rank]) + ["far larger than usual"] * (large[rank] > 0))
        texts.append(
            f"Worker {rank}'s contribution was rejected in {count} of {total} exchanges ({why}): "
            + (_HARMLESS if rank not in broken and count < total else _BROKEN)
        )
    return texts


_HARMLESS = "once in a while this is harmless."
_BROKEN = "check its data, its memory and the learning rate, or use another host."


def _disagreement(run: RunLog) -> list[str]:
    rules = {str(w.attach["rule"]) for w in run.workers if "rule" in w.attach}
    return [f"Workers name different rules: {'; '.join(sorted(rules))}."] if len(rules) > 1 else []


def _slow(run: RunLog) -> list[str]:
    """A sentence where exchanges cost much of the time of several workers of their own processes."""
    part = shares(run.workers)
    busy = part.compute + part.data
    if run.size == 1 or run.elastic or run.missing or not 0 < busy < LITTLE_WORK or crowded(run):
        return []
    text = f"{share_text(part.exchange)} of the time went into exchanges and {share_text(part.wait)} into waiting"
    if run.size * busy < 1:
        text = f"{run.size} workers did only {run.size * busy:.2g} times as much as one that exchanges nothing: {text}"
    advice = "Take a longer period, overlap or a codec"
    if part.wait > part.exchange:
        advice = "Look for the slowest worker"
        if worth := worths_text(run):
            advice = f"The workers are worth {worth}; auto, or even=False, gives each its share"
    return [f"{text}. {advice}."]


def crowded(run: RunLog) -> list[tuple[str, int, int]]:
    """Hosts with more workers than cores: name, workers, cores."""
    here = [(host, [worker for worker in run.workers if worker.host == host]) for host in run.hosts]
    if run.transport not in ("gloo", "virtual"):
        return []
    cores = [(host, len(workers), int(workers[0].attach.get("cores") or 0)) for host, workers in here]
    return [one for one in cores if 0 < one[2] < one[1]]


def _crowding(run: RunLog) -> list[str]:
    """A sentence on each host with more workers than cores."""
    kind = "virtual " if run.transport == "virtual" else ""
    return [
        f"{workers} {kind}workers shared the {cores} cores of {host}: times and throughput say little about a cluster. "
        + ("paceline plan forecasts them." if kind else f"Take {cores} workers here, or more machines.")
        for host, workers, cores in crowded(run)
    ]


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
