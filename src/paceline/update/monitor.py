# SPDX-License-Identifier: Apache-2.0
"""A run's event log: where its time goes, what it sends, which contributions were rejected."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from paceline import extensions
from paceline.communication import Transport
from paceline.observe import processes
from paceline.observe.event_log import EventLog
from paceline.update.exchange.header import ExchangeSummary, Timing
from paceline.update.exchange.outliers import Rejections
from paceline.version import __version__

logger = logging.getLogger("paceline")

FOLD_S = 0.25
"""Exchanges less than this apart share one line of the log."""

LEAST_S = 0.001
"""A shorter wait for data has no line of its own at the end of a run."""


class LogLine:
    """The counts and times that the next line of the log sums up."""

    def __init__(self) -> None:
        self.exchanges, self.minibatches, self.samples = 0, 0, 0
        self.compute_s = self.wait_s = self.exchange_s = self.data_s = 0.0
        self.left_out: set[int] = set()
        self.met: tuple[int, float] | None = None  # an exchange, and when all workers had entered it
        self.delays: Counter[int] = Counter()
        self.refused = 0
        self.effective: float | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing has happened since the last line."""
        worked = self.exchanges or self.minibatches or self.delays or self.refused
        return not worked and self.data_s < LEAST_S

    def asynchronous(self) -> dict[str, Any]:
        """Further fields of a line where there are pushes; none in a synchronous run."""
        if not self.delays and not self.refused:
            return {}
        delays = {str(delay): count for delay, count in sorted(self.delays.items())}
        return {"delays": delays, "refused": self.refused}

    def meets(self, number: int, when: float) -> None:
        """Note that all workers had entered exchange `number` at `when`.

        A line keeps the exchange whose number is roundest in base 2: lines of different workers end at different
        exchanges, and most of them still name the same one.
        """
        if self.met is None or number & -number >= self.met[0] & -self.met[0]:
            self.met = number, when


class Monitor:
    """Times a run and writes its event log.

    The training thread waits for data (`waited`), waits for other workers, or exchanges (`end`); the rest of its time
    is computing.

    `pushed`, `refused`, `lost`, `takeover` and `note` may be called from any thread; `begin`, `sent`, `end` and
    `stepped` only from the training thread.

    Args:
        event_log: where events go.
        transport: whose bytes are counted.
        told: called with (block, minibatches) when a line is written.
    """

    def __init__(
        self, event_log: EventLog, transport: Transport, told: Callable[[int, int], None] = lambda block, steps: None
    ) -> None:
        self._event_log, self._transport = event_log, transport
        self._lock = threading.RLock()  # guards the event log and the counts of background threads
        self._line = LogLine()
        self._since = self._transport.now()  # end of the last exchange, or the beginning of the present one
        self._data_s = 0.0  # waited for data since then
        self._trainer: int | None = None  # the training thread
        self._sources: list[Any] = []  # logs of the shared data
        self._written_s, self._bytes = self._since, transport.bytes_sent
        self._steps, self._samples = 0, 0
        self._exchanges = self._block = 0
        self._goes_on = False  # whether exchanges overlap with computing
        self._told = told
        self.spent = [0.0, 0.0, 0.0]
        """Seconds of computing, of waiting for other workers, and of exchanging, since the run began."""
        self.data_s = 0.0
        """Seconds of waiting for data since the run began."""
        self.of_blocks = [0.0, 0.0]
        """Seconds of waiting for other workers in exchanges of blocks, and of these exchanges, since the run began."""
        self._rejections = Rejections(transport, self.note)
        transport.on_failure(lambda rows: self.note("waiting", workers=rows))

    def attached(self, rule: str, parameters: int, buffers: int) -> None:
        """Write the first line: the worker, its host, the rule."""
        world = self._transport.world
        self.note(
            "attach",
            size=world.size,
            host=world.host,
            rule=rule,
            transport=self._transport.name,
            parameters=parameters,
            buffers=buffers,
            version=__version__,
            unix_s=time.time(),
            cores=os.cpu_count(),
            **processes.this_process(),
        )

    def shared(self, data: Any) -> None:
        """Log the caches of a shared data set."""
        if self._event_log.path is not None:
            self._sources = self._sources or [log(self.note) for log in extensions.data_logs]
        for log in self._sources:
            log.add(data)

    def waited(self, seconds: float) -> None:
        """Count seconds of waiting for a batch; those of other threads (prefetching) do not count."""
        if self._trainer in (None, threading.get_ident()):
            self._data_s += seconds

    def begin(self) -> None:
        """Begin an exchange; the time before was computing, or waiting for data."""
        now = self._transport.now()
        self._line.compute_s += self._worked(now)
        self._since = now

    def _worked(self, now: float) -> float:
        """Seconds of computing since the last exchange; counts those of waiting for data."""
        span = now - self._since
        data_s = min(self._data_s, span)
        self._line.data_s += data_s
        self.data_s += data_s
        self._data_s = 0.0
        self.spent[0] += span - data_s
        return span - data_s

    def sent(self) -> None:
        """Note that the worker computes on during the exchange that it began at `begin`."""
        now = self._transport.now()
        self._line.exchange_s += now - self._since
        self.spent[2] += now - self._since
        self.of_blocks[1] += now - self._since  # only exchanges of blocks overlap
        self._since, self._goes_on = now, True

    def end(
        self,
        timing: Timing,
        summary: ExchangeSummary | None,
        *,
        block: int,
        warmup: bool,
        effective: float | None = None,
    ) -> None:
        """Note the end of an exchange."""
        line = self._line
        line.exchanges += 1
        line.effective = effective or line.effective
        line.wait_s += timing.wait_s
        line.exchange_s += timing.exchange_s
        self.spent[1] += timing.wait_s
        self.spent[2] += timing.exchange_s
        if block:
            self.of_blocks[0] += timing.wait_s
            self.of_blocks[1] += timing.exchange_s
        self._exchanges, self._block = self._exchanges + 1, block
        self._since = self._transport.now()
        if summary is not None:
            line.left_out |= set(summary.left_out)
            self._rejections.report(summary)
            self._note_arrival(summary, timing)
        if self._since - self._written_s >= FOLD_S or line.left_out:
            self._write(block, warmup)

    def _note_arrival(self, summary: ExchangeSummary, timing: Timing) -> None:
        """Note when this worker knew that all had entered: that aligns the clocks of different hosts."""
        if len(summary.headers) != self._transport.world.size:
            return  # of the workers of one host
        if not self._goes_on or timing.wait_s >= LEAST_S:  # else it ended while the worker was computing
            self._line.meets(summary.headers[0].sequence, self._since - timing.exchange_s)

    def stepped(self, steps: int, samples: int, new_samples: int) -> None:
        """Count a step of the optimizer."""
        self._line.minibatches += 1
        self._line.samples += new_samples
        self._steps, self._samples = steps, samples
        self._trainer = threading.get_ident()
        if self._transport.world.size == 1:
            self._alone()

    def _alone(self) -> None:
        """Write the progress of a single worker, which exchanges nothing, or by itself at the end of its blocks."""
        now = self._transport.now()
        if now - self._written_s >= FOLD_S:
            self._line.compute_s += self._worked(now)
            self._since = now
            self._write(self._block, False)

    def pushed(self, delay: int) -> None:
        """Count a push of this worker that was applied `delay` updates after the version that it was computed at."""
        with self._lock:
            self._line.delays[delay] += 1

    def refused(self, count: int = 1) -> None:
        """Count pushes of this worker that were refused because of inf or nan."""
        with self._lock:
            self._line.refused += count

    def lost(self, rank: int, why: str, taken_over: Sequence[int] = ()) -> None:
        """Report a lost worker; `taken_over`: the ranks that own its shards from now on."""
        name = self._transport.world.name
        owners = f"; its slices go to {', '.join(map(name, taken_over))}; the others go on" if taken_over else ""
        logger.warning("%s is lost: %s%s", name(rank), why, owners)
        self.note("lost", rank_lost=rank, why=why, taken_over=list(taken_over))

    def takeover(self, slice_of: int, version: int) -> None:
        """Report that this worker owns the shards of a lost one from now on.

        Args:
            slice_of: rank of the lost worker.
            version: of the replicas with which it goes on, in updates.
        """
        name, rank = self._transport.world.name, self._transport.world.rank
        logger.warning("%s takes over the slices of %s at version %d", name(rank), name(slice_of), version)
        self.note("takeover", slice_of=slice_of, version=version, **{"from": "replica"})

    def inexact(self, what: str, warns: bool = True) -> None:
        """Report that samples may not be in the model exactly once; `what` says which."""
        if warns:
            logger.warning("not exactly once: %s", what)
        self.note("inexact", what=what)

    def _write(self, block: int, warmup: bool) -> None:
        with self._lock:
            self._write_line(block, warmup)
        for log in self._sources:
            log.tell()

    def _write_line(self, block: int, warmup: bool) -> None:
        line, sent = self._line, self._transport.bytes_sent
        if line.refused:
            logger.warning(
                "%d push(es) of %s refused since the last line of the log: inf or nan in what they brought",
                line.refused,
                self._transport.world.name(self._transport.world.rank),
            )
        self._event_log.write(
            "exchange",
            block=block,
            exchanges=line.exchanges,
            minibatches=line.minibatches,
            total_minibatches=self._steps,
            samples=line.samples or None,
            total_samples=self._samples or None,
            compute_s=round(line.compute_s, 6),
            wait_s=round(line.wait_s, 6),
            exchange_s=round(line.exchange_s, 6),
            data_s=round(line.data_s, 6),
            bytes=sent - self._bytes,
            left_out=sorted(line.left_out),
            warmup=warmup,
            **({"effective_workers": round(line.effective, 3)} if line.effective else {}),
            **line.asynchronous(),
            **self._common_arrival(),
        )
        self._line, self._bytes, self._written_s = LogLine(), sent, self._transport.now()

        self._told(block, self._steps)

    def _common_arrival(self) -> dict[str, Any]:
        """The exchange that `met` names, and when all had entered it by the log's clock."""
        if self._line.met is None:
            return {}
        number, when = self._line.met
        return {"met": number, "met_s": round(self._event_log.at_s - (self._transport.now() - when), 6)}

    def totals(self, block: int) -> dict[str, float]:
        """This worker's totals since the run began."""
        computing_s, waiting_s, exchanging_s = self.spent
        counted = {"samples": float(self._samples)} if self._samples else {}
        return {
            "block": float(block),
            "exchanges": float(self._exchanges),
            "minibatches": float(self._steps),
            **counted,
            "bytes_sent": float(self._transport.bytes_sent),
            "computing_s": computing_s,
            "waiting_s": waiting_s,
            "exchanging_s": exchanging_s,
            "waiting_for_data_s": self.data_s,
            "left_out": float(self._rejections.total),
            "workers": float(self._transport.world.size),
        }

    def value(self, name: str, value: float) -> None:
        """Log a number of the user's."""
        self.note("value", name=name, value=value, total_minibatches=self._steps, total_samples=self._samples or None)

    def epoch(self, epoch: int, batches: int | None) -> None:
        """Log the beginning of a pass over a shared loader."""
        self.note("epoch", epoch=epoch, batches=batches)

    def damaged(self, why: str) -> None:
        """Report a damaged checkpoint step; the previous one is tried."""
        logger.warning("%s; the step before it is taken", why)
        self.note("damaged", why=why)

    def note(self, kind: str, **fields: Any) -> None:
        """Log an event."""
        with self._lock:
            self._event_log.write(kind, **fields)

    def close(self, blocks: int) -> None:
        """Write the last line and close the log."""
        worked = self._worked(self._transport.now())
        if not self._line.empty:
            self._line.compute_s += worked if not self._line.exchanges else 0.0
            self._write(blocks, False)
        for log in self._sources:
            log.tell(now=True)
        with self._lock:
            self._event_log.write("close", minibatches=self._steps, bytes=self._transport.bytes_sent)
            self._event_log.close()
