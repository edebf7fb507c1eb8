# SPDX-License-Identifier: Apache-2.0
"""The tables of a report: rows of names and texts, for a page or a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.observe.reports.elastic_events import ControlEvent, ElasticStatus, is_news
from paceline.observe.reports.events import Tuned
from paceline.observe.reports.log import RunLog
from paceline.observe.reports.notices import NAMED, Notices, control_notice
from paceline.observe.reports.summary import (
    UNKNOWN,
    bytes_text,
    count_text,
    delay_text,
    ranks_text,
    rate_text,
    seconds_text,
    share_text,
    value_text,
)
from paceline_plugins.report.totals import (
    Summary,
    delays,
    is_held_out,
    losses,
    rejected_counts,
    shares,
    summarize,
    with_role,
    worths_text,
)

TOLD_BY_CONTROL = frozenset({"lost", "generation", "gave", "paused"})
"""Kinds of events of workers that the control plane of an elastic run reports, too."""


def comparison(runs: Sequence[RunLog], *, pushes: bool = True) -> list[dict[str, str]]:
    """A row a run; with `pushes` also the columns of asynchronous runs."""
    rows = []
    summaries = [summarize(run) for run in runs]
    logs_data_wait = any(run.logs_data_wait for run in runs)
    alone = next((one.throughput for one in summaries if one.in_all == 1 and one.throughput[0]), None)
    for run, numbers in zip(runs, summaries, strict=True):
        part, (speed, unit) = numbers.shares, numbers.throughput
        row = {"run": run.label, "rule": run.rule, "workers": workers_text(numbers)}
        row |= {with_role(name): value_text(value) for name, value in numbers.values.items()}
        row["wall time"] = seconds_text(numbers.wall_s)
        row[unit] = rate_text(speed)
        if len(runs) > 1 and alone is not None and alone[1] == unit:
            row["times one worker's, measured"] = f"{speed / alone[0]:.2f}"
        row["efficiency"] = share_text(numbers.efficiency)
        if len(runs) == 1 and (worth := worths_text(run)):
            row["worth of the workers"] = worth
        row["computing / waiting / exchanging"] = (
            f"{100 * part.compute:.1f} / {100 * part.wait:.1f} / {share_text(part.exchange)}"
        )
        if logs_data_wait:
            row["waiting for data"] = share_text(part.data) if numbers.logs_data_wait else UNKNOWN
        row["sent per worker"] = bytes_text(numbers.bytes_per_worker)
        rows.append(row | asynchronous_facts(numbers) if pushes else row)
    return rows


def tiles(run: RunLog) -> dict[str, str]:
    """The five numbers of the first screen, by name: loss, throughput, efficiency, time, exchanges."""
    numbers = summarize(run)
    speed, unit = numbers.throughput
    names = [name for name in losses(run) if name in numbers.values]
    loss = next(filter(is_held_out, names), next(iter(names), ""))
    name, value = (f"{with_role(loss)}, at the end", value_text(numbers.values[loss])) if loss else (NO_LOSS, UNKNOWN)
    return {
        name: value,
        unit: rate_text(speed),
        "efficiency: time at work": share_text(numbers.efficiency),
        "wall time": seconds_text(numbers.wall_s),
        "exchanges": count_text(numbers.blocks),
    }


NO_LOSS = "loss: run.log(loss=...) logs it"


def facts(run: RunLog) -> dict[str, str]:
    """A run's numbers that are not on the first screen, by name."""
    numbers = summarize(run)
    shown = {with_role(name): value_text(value) for name, value in numbers.values.items()}
    shown["workers"] = workers_text(numbers)
    shown["minibatches"] = count_text(numbers.minibatches)
    if numbers.samples is not None:
        shown["samples"] = count_text(numbers.samples)
    shown["sent per worker"] = bytes_text(numbers.bytes_per_worker)
    if numbers.effective is not None:
        shown["effective workers"] = f"{numbers.effective:.1f}"
    if numbers.left_out:
        shown["contributions rejected"] = count_text(numbers.left_out)
    return shown | asynchronous_facts(numbers)


def asynchronous_facts(numbers: Summary) -> dict[str, str]:
    """Numbers of runs with pushes or lost workers; of others none."""
    shown = {}
    if numbers.delays is not None:
        shown["mean delay of a push"] = delay_text(numbers.delays.mean)
        shown["largest delay"] = count_text(numbers.delays.largest)
    if numbers.delays is not None or numbers.refused:
        shown["pushes rejected"] = count_text(numbers.refused)
    if numbers.lost:
        owners = sorted({rank for ranks in numbers.lost.values() for rank in ranks})
        shown["lost"] = ranks_text(numbers.lost)
        if numbers.delays is not None:
            shown["taken over by"] = ranks_text(owners) if owners else "no worker"
    return shown


def workers_text(numbers: Summary) -> str:
    """`4`, or of an elastic run `2 at most, 3 in all`."""
    most, every = count_text(numbers.workers), count_text(numbers.in_all)
    return most if numbers.in_all == numbers.workers else f"{most} at most, {every} in all"


def tuned_rows(run: RunLog) -> list[dict[str, str]]:
    """A row for each change of settings during the run, and for each refused request."""
    return [
        {
            "minibatch": UNKNOWN if line.refused else count_text(line.total_minibatches),
            "block": UNKNOWN if line.refused else count_text(line.block),
            "asked by worker": "all (measured)" if line.why else str(line.by),
            "what": f"refused: {line.refused}" if line.refused else _changes_text(line),
        }
        for line in run.tuned
    ]


def _changes_text(line: Tuned) -> str:
    text = ", ".join(f"{name} {before} → {after}" for name, (before, after) in line.changes.items())
    text = f"{text}: {line.why}" if line.why else text
    return f"undone: {text}" if line.revert else text


def event_rows(run: RunLog, most: int = 200) -> list[dict[str, str]]:
    """A row an event, the last `most`, without those that help only to debug paceline."""
    shown = Notices()
    for event in news_events(run.events):
        shown.add(control_notice(event, event.at_s))
    hidden = TOLD_BY_CONTROL if run.events else frozenset()
    for worker in run.workers:
        for one in worker.notices.newest(most):
            if one.kind not in hidden and one.kind in NAMED:
                shown.add(replace(one, at_s=worker.began_s + one.at_s))
    return [{"after": seconds_text(one.at_s), "event": one.kind, "what": one.text} for one in shown.newest(most)]


def worker_rows(run: RunLog, states: Mapping[int, str] | None = None) -> list[dict[str, str]]:
    """A row a worker; `states` of a run that still trains are what it does now."""
    lost, rejected = {line.rank for line in run.lost}, rejected_counts(run)
    elastic, logs_data_wait, pushes = run.elastic, run.logs_data_wait, bool(run.delays)
    rows = []
    for worker in run.workers:
        part, pushed = shares([worker]), delays(worker.delays)
        end = "lost" if worker.rank in lost else "closed" if worker.closed else "not closed"
        row = {
            "worker": str(worker.rank),
            "host": worker.host,
            "joined after": seconds_text(worker.began_s),
            "minibatches": count_text(worker.minibatches),
            "samples": count_text(worker.samples),
            "computing": share_text(part.compute),
            "waiting for data": share_text(part.data),
            "waiting": share_text(part.wait),
            "exchanging": share_text(part.exchange),
            "exchanges": count_text(worker.blocks),
            "sent": bytes_text(worker.bytes),
        }
        if not elastic:
            del row["joined after"]
        if not logs_data_wait:
            del row["waiting for data"]
        if pushes:
            row["mean delay"] = delay_text(pushed.mean) if pushed else UNKNOWN
        if rejected:
            row["rejected"] = count_text(rejected[worker.rank])
        rows.append(row | ({"end": end} if states is None else {"state": states.get(worker.rank, end)}))
    return rows


def news_events(events: Iterable[ControlEvent]) -> list[ControlEvent]:
    """The events to show to people."""
    status, shown = ElasticStatus(), []
    for event in events:
        if is_news(event.kind, event.facts, status):
            shown.append(event)
        status.add(event)
    return shown
