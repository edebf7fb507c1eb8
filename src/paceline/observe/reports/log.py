# SPDX-License-Identifier: Apache-2.0
"""The event logs of a run as plain objects: `RunLog` holds one `WorkerLog` a worker.

Totals are properties, computed from the events on each access. The reader is :mod:`.read`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.observe.reports.elastic_events import ControlEvent
from paceline.observe.reports.events import (
    EpochEvent,
    ExchangeEvent,
    GenerationEvent,
    LeftOut,
    Lost,
    Takeover,
    Tuned,
    Value,
)
from paceline.observe.reports.notices import Notices


@dataclass
class WorkerLog:
    """Everything that one worker wrote during one run."""

    path: Path
    rank: int
    attach: dict[str, Any] = field(default_factory=dict)
    epochs: list[EpochEvent] = field(default_factory=list)
    exchanges: list[ExchangeEvent] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    takeovers: list[Takeover] = field(default_factory=list)
    tuned: list[Tuned] = field(default_factory=list)
    notices: Notices = field(default_factory=Notices)  # its events for people, in seconds as `last_at_s`
    generations: list[GenerationEvent] = field(default_factory=list)  # of an elastic run
    began_s: float = 0.0  # when this log began, on the clock of the run
    errors: list[str] = field(default_factory=list)
    turn: tuple[int, int] | None = None  # of the outermost loop: turns over, and all
    saves: int = 0
    resumes: int = 0
    closed: dict[str, Any] | None = None
    truncated: int = 0  # a cut-off last line that was skipped
    damaged: list[int] = field(default_factory=list)  # numbers of the first other lines that are no events
    damaged_lines: int = 0  # number of all such lines
    gaps: int = 0  # events that the writer dropped because its disk was full
    last_at_s: float = 0.0

    @property
    def host(self) -> str:
        """Name of the worker's host, or `?` where the log does not say."""
        return str(self.attach.get("host", "?"))

    @property
    def log_start_unix_s(self) -> float:
        """Start of the log by the wall clock of its host."""
        return float(self.attach.get("unix_s", 0.0)) - float(self.attach.get("at_s", 0.0))

    @property
    def _latest(self) -> list[ExchangeEvent | Value]:
        return [*self.exchanges[-1:], *self.values[-1:]]

    @property
    def inherited(self) -> int:
        """Minibatches that its count began with, from a checkpoint or from the worker that sent it the state."""
        last = self.exchanges[-1].total_minibatches if self.exchanges else 0
        return max(0, last - sum(line.minibatches for line in self.exchanges))

    @property
    def inherited_samples(self) -> int:
        """Samples that its count began with."""
        last = self.exchanges[-1].total_samples if self.exchanges else None
        return 0 if last is None else max(0, last - sum(line.samples or 0 for line in self.exchanges))

    @property
    def minibatches(self) -> int:
        """Minibatches that this worker did itself, by its latest event that counts them."""
        counts = [line.total_minibatches for line in self._latest]
        counts.append(int((self.closed or {}).get("minibatches") or 0))
        return max(0, max(counts) - self.inherited)

    @property
    def samples(self) -> int | None:
        """Samples that this worker did itself, or None where they were not counted."""
        counts = [line.total_samples for line in self._latest]
        known = [count for count in counts if count is not None]
        return max(0, max(known) - self.inherited_samples) if known else None

    @property
    def ended_s(self) -> float:
        """Time of its last event, on the clock of the run."""
        return self.began_s + self.last_at_s

    @property
    def blocks(self) -> int:
        """Exchanges that this worker took part in."""
        return sum(line.exchanges for line in self.exchanges)

    @property
    def bytes(self) -> int:
        """Bytes sent by this worker."""
        sent = sum(line.bytes for line in self.exchanges)
        return max(sent, int((self.closed or {}).get("bytes") or 0))

    @property
    def compute_s(self) -> float:
        """Seconds spent on the worker's own minibatches."""
        return sum(line.compute_s for line in self.exchanges)

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for slower workers at exchanges."""
        return sum(line.wait_s for line in self.exchanges)

    @property
    def exchange_s(self) -> float:
        """Seconds spent on exchanges after all workers had arrived."""
        return sum(line.exchange_s for line in self.exchanges)

    @property
    def data_s(self) -> float:
        """Seconds spent waiting for batches; 0 in logs that count it as computing."""
        return sum(line.data_s or 0.0 for line in self.exchanges)

    @property
    def logs_data_wait(self) -> bool:
        """Whether the log separates waiting for batches from computing."""
        return any(line.data_s is not None for line in self.exchanges)

    @property
    def delays(self) -> Counter[int]:
        """Delay in updates -> pushes of this worker that had it; empty in a synchronous run."""
        return _added(line.delays for line in self.exchanges)

    @property
    def refused(self) -> int:
        """Pushes of this worker that were not finite."""
        return sum(line.refused for line in self.exchanges)


@dataclass
class RunLog:
    """One run: the logs of its workers, in rank order."""

    directory: Path
    number: int  # 1 for a program's first `attach`, 2 for its second
    workers: list[WorkerLog]
    label: str = ""
    events: list[ControlEvent] = field(default_factory=list)  # of an elastic run's control plane

    def _attached(self, key: str, default: Any) -> Any:
        values = (worker.attach[key] for worker in self.workers if key in worker.attach)
        return next(values, default)

    @property
    def size(self) -> int:
        """Workers of the run, whether or not each of them left a log; of an elastic one the most at any time."""
        if self.elastic:
            return max(one.size for worker in self.workers for one in worker.generations)
        return max(int(self._attached("size", 0)), *(w.rank + 1 for w in self.workers))

    @property
    def elastic(self) -> bool:
        """Whether workers could join and leave."""
        return any(worker.generations for worker in self.workers)

    @property
    def numbers(self) -> list[int]:
        """Numbers of all workers that ever took part, in order."""
        if not self.elastic:
            return list(range(self.size))
        joined = {int(event.facts["worker"]) for event in self.events if event.kind == "joined"}
        return sorted(joined | {worker.rank for worker in self.workers})

    @property
    def rule(self) -> str:
        """The rule's text; under `auto` that of the rule that was chosen."""
        named = (event.facts["rule"] for event in self.events if event.kind == "program" and "rule" in event.facts)
        return str(self._attached("chosen_rule", self._attached("rule", next(named, "unknown rule"))))

    @property
    def why(self) -> str:
        """Why measured times chose the rule; empty where they did not."""
        return str(self._attached("why", ""))

    @property
    def transport(self) -> str:
        """The transport between the workers."""
        return str(self._attached("transport", "unknown"))

    @property
    def parameters(self) -> int | None:
        """Number of parameters that the run trained."""
        count = self._attached("parameters", None)
        return None if count is None else int(count)

    @property
    def version(self) -> str:
        """Version of paceline that wrote the logs."""
        return str(self._attached("version", "unknown"))

    @property
    def hosts(self) -> list[str]:
        """Hosts in the order of their first rank."""
        return list(dict.fromkeys(worker.host for worker in self.workers))

    @property
    def wall_s(self) -> float:
        """Seconds from the first worker's attach to the last event of any worker, or of a run that never trained."""
        if self.never_trained:
            return max(event.at_s for event in self.events)
        return max((worker.ended_s for worker in self.workers), default=0.0)

    @property
    def never_trained(self) -> bool:
        """Whether this is an elastic run that always had fewer workers than its minimum."""
        return bool(self.events) and not self.elastic and all(one.kind != "generation" for one in self.events)

    @property
    def missing(self) -> list[int]:
        """Ranks that left no log."""
        present = {worker.rank for worker in self.workers}
        return [rank for rank in self.numbers if rank not in present]

    @property
    def value_names(self) -> list[str]:
        """Names of the reported values, in the order of their first appearance."""
        return list(dict.fromkeys(v.name for worker in self.workers for v in worker.values))

    @property
    def delays(self) -> Counter[int]:
        """Delay in updates -> pushes of all workers that had it; empty in a synchronous run."""
        return _added(worker.delays for worker in self.workers)

    @property
    def logs_data_wait(self) -> bool:
        """Whether any log separates waiting for batches from computing."""
        return any(worker.logs_data_wait for worker in self.workers)

    @property
    def lost(self) -> list[Lost]:
        """Lost workers in rank order, each by the event of the first worker that noticed."""
        losses: dict[int, Lost] = {}
        for line in sorted((line for w in self.workers for line in w.lost), key=lambda line: line.at_s):
            losses.setdefault(line.rank, line)
        for event in self.events:
            if event.kind == "lost":
                rank = int(event.facts["worker"])
                losses.setdefault(rank, Lost(event.at_s, rank, str(event.facts.get("why", "")), ()))
        return [losses[rank] for rank in sorted(losses)]

    @property
    def tuned(self) -> list[Tuned]:
        """Changes of settings during the run, as rank 0 logged them, and refused requests of all workers."""
        logged = next((worker.tuned for worker in self.workers if worker.tuned), [])
        refused = [line for worker in self.workers for line in worker.tuned if line.refused]
        return sorted([line for line in logged if not line.refused] + refused, key=lambda line: line.at_s)

    def last(self, name: str) -> float | None:
        """Final value: the mean over the workers that were not lost, each the mean of its last twentieth of reports.

        So a loss that is reported at each minibatch does not depend on the last one; of few reports the last counts.
        """
        final: list[float] = []
        gone = {line.rank for line in self.lost}
        for worker in [worker for worker in self.workers if worker.rank not in gone] or self.workers:
            own = [value.value for value in worker.values if value.name == name]
            latest = own[-max(1, len(own) // 20) :]
            final += [sum(latest) / len(latest)] if latest else []
        final = [value for value in final if math.isfinite(value)] or final  # a broken worker's was rejected
        return sum(final) / len(final) if final else None


def _added(counts: Iterable[Mapping[int, int]]) -> Counter[int]:
    """The sum of several counts, sorted by key."""
    total: Counter[int] = Counter()
    for count in filter(None, counts):
        total.update(count)
    return Counter(dict(sorted(total.items())))
