# SPDX-License-Identifier: Apache-2.0
"""A run's steps, and its event log: where its time goes, what it sends, which contributions were rejected."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from paceline.communication import Transport
from paceline.core.optimizer_state import Named
from paceline.errors import UnsupportedError
from paceline.observe.event_log import EventLog, this_process
from paceline.rules.schedule import Schedule
from paceline.update.exchange.exchanger import ExchangeSummary, Timing
from paceline.version import __version__

logger = logging.getLogger("paceline")

FOLD_S = 0.25
"""Exchanges less than this apart share one line of the log."""
LEAST_S = 0.001
"""A shorter wait for data has no line of its own at the end of a run."""
BROKEN = 3
"""After so many rejections in a row a worker is reported as probably broken."""
LOOK_AT = "it is probably broken: look at its part of the data and its memory (dmesg), or start it on another host"


class StderrMessages(logging.Handler):
    """Writes messages to stderr, a line each, as the launcher recognises, counts and logs them."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`; without a log directory Python's own handlers are enough."""
        if os.environ.get("PACELINE_LOG"):
            kind = "warning: " if record.levelno >= logging.WARNING else ""
            print(f"paceline: {kind}{' '.join(record.getMessage().split())}", file=sys.stderr, flush=True)


def write_messages() -> None:
    """Write paceline's messages to stderr from now on."""
    if not any(isinstance(one, StderrMessages) for one in logger.handlers):
        logger.addHandler(StderrMessages())


def is_sampled(exchange: int) -> bool:
    """Whether parameters are compared after an exchange where that takes time: the first 8, and each eighth."""
    return exchange <= 8 or exchange % 8 == 0


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


def warn_of_steps(optimizers: Sequence[Optimizer], mark: str, text: str) -> None:
    """Warn once if one of the optimizers steps after its run was closed, unless it was attached again."""
    handles: list[Any] = []

    def step(optimizer: Optimizer, *_: Any) -> None:
        if handles and getattr(optimizer, mark, None) is None:
            logger.warning("%s", text)
        while handles:
            handles.pop().remove()

    handles += [one.register_step_pre_hook(step) for one in optimizers]


def skipped(optimizer: Optimizer) -> bool:
    """Whether the last step did nothing: fused optimizers skip inside, and report it in `found_inf`."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item() if hasattr(found, "item") else found)


class TrainingProgress:
    """Counts one worker's steps; `lockstep`: gradients are exchanged before the next one, always or during the warm-
    up."""

    def __init__(self, schedule: Schedule, owned: Sequence[tuple[Optimizer, Named]] = ()) -> None:
        self.schedule = schedule
        self._known = {id(optimizer): {id(parameter) for _, parameter in named} for optimizer, named in owned}
        self.restore(0, False)

    def end_warmup(self) -> None:
        """The warm-up is over; a worker that left during it learns this from its peers."""
        self.restore(self.steps, True)

    def follow_schedule(self, schedule: Schedule, blocks: bool) -> None:
        """Continue under another schedule; `blocks`: whether it has blocks now."""
        self.schedule = schedule
        self.restore(self.steps, self.warm and blocks)

    def restore(self, steps: int, warm: bool) -> None:
        self.steps, self.warm, self.lockstep = steps, warm, self.schedule.is_lockstep(warm)

    @property
    def exchanges(self) -> int:
        """Exchanges that a single worker would have made by now."""
        return self.schedule.exchanges_after(self.steps)

    def follow(self, steps: int) -> None:
        """Continue after `steps` steps, as the other workers do."""
        self.steps = steps

    def stepped(self) -> bool:
        self.steps += 1
        return self.lockstep and self.schedule.ends_warmup(self.steps)

    def check_unchanged(self, optimizer: Optimizer) -> None:
        """Refuse parameters that were added to the optimizer that steps, or removed from it, after attach.

        Those of others may be frozen meanwhile: a generator steps while its critic is.
        """
        known = self._known[id(optimizer)]
        now = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if now != known:
            raise UnsupportedError(
                f"{type(optimizer).__name__} had {len(known)} trainable parameters at attach and has {len(now)} now "
                f"({len(now - known)} new, {len(known - now)} gone or frozen); after such a change close the run "
                "and attach again; a program that does not attach itself has to make a new optimizer then"
            )


class Monitor:
    """Times a run and writes its event log.

    The training thread waits for data (`waited`), waits for other workers, or exchanges (`end`); the rest of its time
    is computing.

    `pushed`, `refused`, `lost`, `takeover` and `note` may be called from any thread; `begin`, `sent`, `end` and
    `stepped` only from the training thread. `told` is called with (block, minibatches) when a line is written.
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
        self._written_s, self._bytes = self._since, transport.bytes_sent
        self._steps, self._samples = 0, 0
        self._exchanges = self._block = 0
        self._goes_on = False  # whether exchanges overlap with computing
        self._told = told
        # seconds since the run began: computing, waiting for other workers, exchanging; waiting for data; waiting in
        # exchanges of blocks, exchanging in these, and what these took, part of it while the worker computed
        self.spent, self.data_s, self.of_blocks = [0.0, 0.0, 0.0], 0.0, [0.0, 0.0, 0.0]
        self._in_a_row: Counter[int] = Counter()  # of each rank
        self._rejected, self._why, self._never = Counter[int](), dict[int, str](), set[int]()  # of ranks; never taken
        self._refused = self._pushed = 0
        transport.on_failure(lambda rows: self.note("waiting", workers=rows))

    def attached(self, rule: str, parameters: int, buffers: int) -> None:
        """Write the first line: the worker, its host, the rule."""
        world = self._transport.world
        with self._lock:
            self._event_log.write(
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
                **this_process(),
            )

    def waited(self, seconds: float) -> None:
        """Count seconds of waiting for a batch; those of other threads (prefetching) do not count."""
        if self._trainer in (None, threading.get_ident()):
            self._data_s += seconds

    def begin(self) -> None:
        """Begin an exchange; the time before was computing, or waiting for data."""
        self._line.compute_s += self._worked()

    def _worked(self) -> float:
        """Seconds of computing since the last exchange, up to now; counts those of waiting for data."""
        now = self._transport.now()
        span, self._since = now - self._since, now
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
        self, timing: Timing, summary: ExchangeSummary | None, block: int, warmup: bool, effective: float | None = None
    ) -> None:
        line, now = self._line, self._transport.now()
        exchange_s = max(0.0, now - self._since - timing.wait_s)
        line.exchanges += 1
        line.effective = effective or line.effective
        line.wait_s += timing.wait_s
        line.exchange_s += exchange_s
        self.spent[1] += timing.wait_s
        self.spent[2] += exchange_s
        if block:
            self.of_blocks[0] += timing.wait_s
            self.of_blocks[1] += exchange_s
            self.of_blocks[2] += timing.took_s or exchange_s
        self._exchanges, self._block, self._since = self._exchanges + 1, block, now
        if summary is not None:
            line.left_out |= set(summary.left_out)
            if summary.left_out or any(self._in_a_row.values()):
                self._note_rejected(summary)
            number = summary.headers[0].sequence
            everybody = len(summary.headers) == self._transport.world.size  # and not the workers of one host
            waited = not self._goes_on or timing.wait_s >= LEAST_S  # else it ended while the worker was computing
            # This aligns the clocks of different hosts. Lines of different workers end at different exchanges; the one
            # that is roundest in base 2 is most often in all of them.
            rounder = line.met is None or number & -number >= line.met[0] & -line.met[0]
            if everybody and waited and rounder and timing.met_at is not None:
                line.met = number, timing.met_at
        if now - self._written_s >= FOLD_S or line.left_out:
            self._write(block, warmup)

    def _note_rejected(self, summary: ExchangeSummary) -> None:
        """Warn of contributions that an exchange rejected, and log them."""
        for rank, header in enumerate(summary.headers):
            if rank not in summary.left_out:
                if header.brings:
                    self._in_a_row[rank] = 0
                    self._never.discard(rank)
                continue
            self._in_a_row[rank] += 1
            self._rejected[rank] += 1
            self._never |= {rank} if self._rejected[rank] == header.sequence == 1 else set()
            times, between = self._in_a_row[rank], summary.between
            why = f"norm {header.norm:.3g}" if header.finite else "inf or NaN in its contribution"
            if header.finite and between is not None:
                why += f" where {between[0]:.3g} to {between[1]:.3g} is usual"
            self._why[rank] = why
            if self._rejected[rank] == 1:
                self._warn_rejected(rank, f"in exchange {header.sequence} ({why}); it continues from the global model")
            elif times == BROKEN:
                self._warn_rejected(rank, f"{times} times in a row ({why}): {LOOK_AT}")
            self.note(
                "left_out",
                rank_left_out=rank,
                exchange=header.sequence,
                why=why,
                finite=header.finite,
                norm=header.norm if header.finite else None,
                in_a_row=times,
            )

    def _warn_rejected(self, rank: int, how: str) -> None:
        worker = self._transport.world.name(rank).replace("rank", "worker")
        logger.warning("the contribution of %s was rejected %s", worker, how)

    def stepped(self, steps: int, samples: int, new_samples: int) -> None:
        self._line.minibatches += 1
        self._line.samples += new_samples
        self._steps, self._samples = steps, samples
        self._trainer = threading.get_ident()
        if self._transport.world.size == 1 and self._transport.now() - self._written_s >= FOLD_S:
            self.begin()  # a single worker exchanges nothing, or by itself at the end of its blocks
            self._write(self._block, False)

    def pushed(self, delay: int) -> None:
        """Count a push of this worker that was applied `delay` updates after the version that it was computed at."""
        with self._lock:
            self._line.delays[delay] += 1
            self._pushed += 1

    def refused(self, count: int = 1) -> None:
        """Count pushes of this worker that were refused because of inf or nan."""
        with self._lock:
            self._line.refused += count
            self._refused += count

    def lost(self, rank: int, why: str, taken_over: Sequence[int] = ()) -> None:
        """Report a lost worker; `taken_over`: the ranks that own its shards from now on."""
        name = self._transport.world.name
        owners = f"; its slices go to {', '.join(map(name, taken_over))}; the others go on" if taken_over else ""
        logger.warning("%s is lost: %s%s", name(rank), why, owners)
        self.note("lost", rank_lost=rank, why=why, taken_over=list(taken_over))

    def takeover(self, slice_of: int, version: int) -> None:
        """Report that this worker owns the shards of a lost one from now on, with replicas of this version."""
        name, rank = self._transport.world.name, self._transport.world.rank
        logger.warning("%s takes over the slices of %s at version %d", name(rank), name(slice_of), version)
        self.note("takeover", slice_of=slice_of, version=version, **{"from": "replica"})

    def inexact(self, what: str, warns: bool = True) -> None:
        """Report that samples may not be in the model exactly once; `what` says which."""
        if warns:
            logger.warning("not exactly once: %s", what)
        self.note("inexact", what=what)

    def _write(self, block: int, warmup: bool) -> None:
        """Write a line, and begin the next one."""
        with self._lock:
            line, sent = self._line, self._transport.bytes_sent
            fields: dict[str, Any] = {"block": block, "exchanges": line.exchanges, "minibatches": line.minibatches}
            fields |= {"total_minibatches": self._steps, "samples": line.samples or None}
            fields |= {"total_samples": self._samples or None}
            times = ("compute_s", "wait_s", "exchange_s", "data_s")
            fields |= {name: round(getattr(line, name), 6) for name in times}
            fields |= {"bytes": sent - self._bytes, "left_out": sorted(line.left_out), "warmup": warmup}
            if line.effective:
                fields["effective_workers"] = round(line.effective, 3)
            if line.delays or line.refused:  # pushes
                fields["delays"] = {str(delay): count for delay, count in sorted(line.delays.items())}
                fields["refused"] = line.refused
            if line.met is not None:  # an exchange, and when all had entered it by the log's clock
                number, when = line.met
                fields |= {"met": number, "met_s": round(self._event_log.at_s - (self._transport.now() - when), 6)}
            self._event_log.write("exchange", **fields)
            self._line, self._bytes, self._written_s = LogLine(), sent, self._transport.now()
            self._told(block, self._steps)

    def totals(self, block: int) -> dict[str, float]:
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
            "left_out": float(self._rejected.total()),
            "workers": float(self._transport.world.size),
        }

    def value(self, name: str, value: float) -> None:
        self.note("value", name=name, value=value, total_minibatches=self._steps, total_samples=self._samples or None)

    def epoch(self, epoch: int, batches: int | None) -> None:
        """Log the beginning of a pass over a shared loader."""
        self.note("epoch", epoch=epoch, batches=batches)

    def damaged(self, why: str) -> None:
        """Report a damaged checkpoint step; the previous one is tried."""
        logger.warning("%s; using the previous step instead", why)
        self.note("damaged", why=why)

    def note(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._event_log.write(kind, **fields)

    def close(self, blocks: int) -> None:
        worked, line = self._worked(), self._line
        if line.exchanges or line.minibatches or line.delays or line.refused or line.data_s >= LEAST_S:
            line.compute_s += worked if not line.exchanges else 0.0
            self._write(blocks, False)
        with self._lock:
            for rank, times in sorted((rank, times) for rank, times in self._rejected.items() if times > 1):
                more = f": {LOOK_AT}" if times >= BROKEN else ""
                self._warn_rejected(rank, f"in {times} of {self._exchanges} exchanges ({self._why[rank]}){more}")
            if self._refused:
                rank, of = self._transport.world.rank, self._refused + self._pushed
                self._warn_rejected(rank, f"in {self._refused} of {of} pushes (inf or NaN in its contribution)")
                self._never |= set() if self._pushed else {rank}
            facts = {"always_rejected": sorted(self._never)} if self._never else {}
            self._event_log.write("close", minibatches=self._steps, bytes=self._transport.bytes_sent, **facts)
            self._event_log.close()
