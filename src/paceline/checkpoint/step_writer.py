# SPDX-License-Identifier: Apache-2.0
"""Writes the steps that fall due, in a thread, while training continues.

Over a connection of its own the thread tells the other workers what this worker has (a count that must be equal on
all), writes, and learns whether all have written. A failure is a warning on every worker; training continues. Every
worker reports every step that falls due, in the same order, so no worker waits for a report that is never made.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.claim import InUseError
from paceline.checkpoint.files import Content, with_beats, without_beats
from paceline.checkpoint.store import StepStore
from paceline.communication import Transport
from paceline.core import runtime
from paceline.core.world import World
from paceline.errors import CheckpointError, ClosedError, PacelineError, PeerLostError

logger = logging.getLogger("paceline")

MOST_BEAT_S = 5.0
CURE = "call run.checkpoint() at the top of your loop, or go through your data with run.share"


@dataclass
class StepReport:
    """This worker's part of a step that fell due.

    Attributes:
        count: exchanges begun.
        about: the manifest's fields.
        content: to write, or None.
        missing: why there is no content.
        stopped_s: how long the training stopped for it, seconds.
    """

    count: int
    about: dict[str, Any]
    content: Content | None = None
    missing: str = ""
    stopped_s: float = 0.0


class StepWriter:
    """Writes reported steps, all workers together.

    Args:
        store: where the steps lie.
        keep: how many are kept.
        transport: the run's connection; every worker constructs its writer at the same place.
        run: the run's name, from its first worker.
        note: writes an event into the log.

    Attributes:
        transport: a connection of the writer's own.
        claim: this run's claim to the store.
        free: set while nothing is being written, so that the memory of the last copy may be used.
        stopped: whether no more steps can be written.
        lost: why this run must not write any more, until it is raised.
        damaged: damaged steps, to be set aside with the next one.
    """

    def __init__(self, store: StepStore, keep: int, transport: Transport, run: str, note: Callable[..., None]) -> None:
        self._store, self._keep, self._note = store, keep, note
        self.transport = transport.part([list(range(transport.world.size))])
        self._background = transport.serves_threads
        timeout_s = float(getattr(transport, "timeout_s", 600.0))
        self._working = with_beats(min(MOST_BEAT_S, timeout_s / 4)) if self._background else without_beats
        self._reports: queue.SimpleQueue[StepReport | None] = runtime.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.free = runtime.Event()
        self.free.set()
        self.stopped = self._skip_said = False
        self.lost = ""
        self.damaged: list[int] = []
        self.claim = store.claim(self.transport.gather_json(run)[0])

    def submit(self, report: StepReport) -> None:
        """Write the step of this report; in the background if the transport allows it."""
        if not self._background:
            self._carry_out(report)
            return
        if self._thread is None:
            self._thread = runtime.thread(self._work, "paceline-checkpoint")
            self._thread.start()
        self._reports.put(report)

    def _work(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                self._carry_out(report)
            except (PeerLostError, ClosedError) as error:  # the training raises it, too
                self.stopped = True
                logger.warning("%s: the checkpoint after exchange %d was not finished", error, report.count)
                return
            except Exception as error:
                self.stopped = True
                logger.exception("no more checkpoints are taken: %s", error)
                return

    def _carry_out(self, report: StepReport) -> None:
        """Agree on a step, write it, and remove old ones."""
        try:
            self._agree_and_write(report)
        finally:
            if report.content is not None:
                self.free.set()

    def _agree_and_write(self, report: StepReport) -> None:
        began, world = runtime.monotonic(), self.transport.world
        missing = report.missing or self._claim_problem()
        answers = self.transport.gather_json([report.count, missing, report.about["minibatches"]])
        problems = [f"{world.name(rank)}: {one[1]}" for rank, one in enumerate(answers) if one[1]]
        if not problems and len({one[0] for one in answers}) > 1:
            problems = [f"workers stood after different exchanges ({sorted({one[0] for one in answers})}); {CURE}"]
        if self.lost:
            return
        if problems:
            self._skipped(f"no checkpoint after exchange {report.count}: {'; '.join(problems)}")
            return
        assert report.content is not None
        number, content = max(one[2] for one in answers), report.content
        about = {**report.about, "minibatches": number}
        name = self._store.name(number)
        try:
            self._set_damaged_aside()
            nbytes, maker = self._store.write(number, self.transport, about, lambda: content, self._working)
        except CheckpointError as error:
            self._failed(name, str(error))
            return
        written_s = round(runtime.monotonic() - began, 6)
        stopped_s = round(report.stopped_s, 6)
        self._note("save", path=name, minibatches=number, stopped_s=stopped_s, written_s=written_s, bytes=nbytes)
        if maker:
            self._try_to_tidy(lambda: self._store.tidy(self._keep))

    def _claim_problem(self) -> str:
        """Why it is unknown whether the store is still this run's, or "".

        If it is another run's by now, this run ends with an error and writes nothing more.
        """
        if not writes_model(self.transport.world):
            return ""
        try:
            self.claim.check()
        except InUseError as error:
            self.stopped, self.lost = True, str(error)
        except CheckpointError as error:
            return str(error)
        return ""

    def raise_lost(self) -> None:
        """Raise the error that makes further steps impossible."""
        lost, self.lost = self.lost, ""
        if lost:
            raise CheckpointError(self.transport.world.sign(lost))

    def _set_damaged_aside(self) -> None:
        """Rename damaged steps: they must not be taken again, and their numbers will be reused."""
        damaged, self.damaged = self.damaged, []
        if damaged:
            if writes_model(self.transport.world):
                self._try_to_tidy(lambda: self._store.set_aside(damaged))
            self.transport.barrier()

    def _try_to_tidy(self, action: Callable[[], None]) -> None:
        """A failure here costs disk space only."""
        try:
            action()
        except (OSError, PacelineError) as error:
            self._failed(self._store.shown, f"old checkpoints could not be put away: {error}")

    def _skipped(self, why: str) -> None:
        """Warn once, since it may recur; the event log has each."""
        if not self._skip_said:
            logger.warning("%s; training goes on (logged once, the event log has all; see every_blocks)", why)
        self._skip_said = True
        self._note("save_skipped", why=why)

    def _failed(self, path: str, why: str) -> None:
        logger.warning("%s; training goes on", why)
        self._note("save_failed", path=path, why=why)

    def finish(self, complain: bool = False) -> None:
        """Return when everything is written; called after the workers have parted."""
        if self._thread is not None:
            self._reports.put(None)
            self._thread.join()
            self._thread = None
        if complain:
            self.raise_lost()

    def close(self) -> None:
        """Write nothing more; do not wait for the step that is being written."""
        self.stopped = True
        self._reports.put(None)
        self._store.close()
        self.claim.release()


def writes_model(world: World) -> bool:
    """Whether this worker may have to write the global model: the first of each host."""
    return world.rank == 0 or world.local_rank == 0
