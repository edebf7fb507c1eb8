# SPDX-License-Identifier: Apache-2.0
"""One clock for the workers of an elastic run, which join one after another.

Each log counts from its own beginning. Two logs are aligned by exchanges in which both workers took part, or else by a
generation of which both were members, or else by the clocks of their hosts. The run begins with its first worker's log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from paceline.observe.reports.elastic_events import ControlEvent
from paceline.observe.reports.log import RunLog, WorkerLog

Marks = dict[tuple[int, int], float]
"""(generation, number of an exchange in it; 0 for the beginning) -> when it was."""


def align_logs(run: RunLog) -> None:
    """Set `began_s` of the workers of an elastic run, and the times of its events; other workers begin together."""
    elastic = sorted((worker for worker in run.workers if worker.generations), key=_joining_order)
    if not elastic:
        return
    known: Marks = {}
    first = elastic[0]
    for worker in elastic:
        worker.began_s = _began(worker, _marks(worker), known, first)
        for key, at_s in _marks(worker).items():
            known.setdefault(key, worker.began_s + at_s)
    start = min(worker.began_s for worker in elastic)
    for worker in elastic:
        worker.began_s -= start
    begun = {generation: at_s - start for (generation, exchange), at_s in known.items() if not exchange}
    run.events = _shifted(run.events, begun)


def _joining_order(worker: WorkerLog) -> tuple[int, float]:
    return worker.generations[0].number, float(worker.attach.get("unix_s", 0.0))


def _marks(worker: WorkerLog) -> Marks:
    marks = {(one.number, 0): one.at_s for one in worker.generations}
    met = ((line.generation, line.met, line.met_s) for line in worker.exchanges)
    return marks | {(number, met): at_s for number, met, at_s in met if number and met and at_s is not None}


def _began(worker: WorkerLog, own: Marks, known: Mapping[tuple[int, int], float], first: WorkerLog) -> float:
    if worker is first:
        return 0.0
    shared = own.keys() & known.keys()
    offsets = [known[key] - own[key] for key in shared if key[1]] or [known[key] - own[key] for key in shared]
    return median(offsets) if offsets else worker.log_start_unix_s - first.log_start_unix_s


def _shifted(events: Iterable[ControlEvent], begun: Mapping[int, float]) -> list[ControlEvent]:
    """The control plane's events on the workers' clock."""
    events = list(events)
    ahead = [
        begun[number] - event.at_s
        for event in events
        if event.kind == "generation" and (number := int(event.facts["number"])) in begun
    ]
    return [replace(event, at_s=event.at_s + median(ahead)) for event in events] if ahead else events
