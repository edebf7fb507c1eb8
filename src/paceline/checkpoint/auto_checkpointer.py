# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at regular intervals: when a step falls due, and where in the program it is taken.

A step falls due inside `optimizer.step()`, after K more exchanges. It is taken when an iteration of the user's loop is
over: only then have schedulers and the like been stepped, too. Every worker gets there between the same two exchanges,
so their copies are consistent. A worker whose program ends first takes the step at its end. After the exchange in which
the other workers learn that one has ended, no more steps are taken.

Training stops for the copy into host memory only. A thread writes it while training continues: over a connection of
its own it tells the other workers what this worker has (a count that must be equal on all), writes, and learns whether
all have written. A failure is a warning on every worker; training continues. Every worker reports every step that falls
due, in the same order, so no worker waits for a report that is never made.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.claim import InUseError
from paceline.checkpoint.files import Content, with_beats, without_beats
from paceline.checkpoint.store import StepStore
from paceline.communication import Transport
from paceline.core import runtime
from paceline.core.bits import memory
from paceline.core.state_tree import flatten
from paceline.core.world import World
from paceline.errors import CheckpointError, ClosedError, MismatchError, PacelineError, PeerLostError

logger = logging.getLogger("paceline")

BUSY = "the last one was still being written"
CURE = "call run.checkpoint() at the top of your loop, or go through your data with run.share"
MOST_BEAT_S = 5.0


@dataclass(frozen=True)
class ExchangePosition:
    """Position in the exchanges of a run; the same on all workers between two exchanges."""

    count: int  # exchanges begun, as `every_blocks` counts them
    sequence: int = 0  # number of the last exchange of any kind
    left: int | None = None  # of the first exchange to which a worker contributed nothing more; None while all train
    better_later: bool = False  # whether a pending result will have arrived before the next exchange begins
    awaited: bool = False  # whether other workers are at the end of the pass already; they come to this place after it


@dataclass(frozen=True)
class Kept:
    """What a step holds of a worker."""

    state: dict[str, Any]  # its own
    model: dict[str, Tensor]  # the global model
    frozen: dict[str, tuple[str, Tensor]] = field(default_factory=dict)
    """key -> (name, values) of the tensors that the state names; neither it nor the model has them."""


@dataclass(frozen=True)
class CheckpointSource:
    """The state of a run, to save."""

    exchange_position: Callable[[], ExchangePosition]
    about: Callable[[], dict[str, Any]]  # the manifest's fields besides the sums, `minibatches` among them
    kept: Callable[[], Kept]  # tensors are not copied


# -- the thread that writes --------------------------------------------------------------------------


@dataclass
class StepReport:
    """This worker's part of a step that fell due."""

    count: int  # exchanges begun
    about: dict[str, Any]  # the manifest's fields
    content: Content | None = None  # to write
    missing: str = ""  # why there is no content
    stopped_s: float = 0.0  # how long the training stopped for it


class StepWriter:
    """Writes reported steps, all workers together; takes the arguments of :class:`AutoCheckpointer`."""

    def __init__(self, store: StepStore, keep: int, transport: Transport, run: str, note: Callable[..., None]) -> None:
        self._store, self._keep, self._note = store, keep, note
        self.transport = transport.part([list(range(transport.world.size))])  # the writer's own connection
        self._background = transport.serves_threads
        timeout_s = float(getattr(transport, "timeout_s", 600.0))
        self._working = with_beats(min(MOST_BEAT_S, timeout_s / 4)) if self._background else without_beats
        self._reports: queue.SimpleQueue[StepReport | None] = runtime.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.free = runtime.Event()  # set while nothing is written, so that the memory of the last copy may be used
        self.free.set()
        self.stopped = self._skip_said = False  # whether no more steps can be written; whether one was skipped
        self.lost = ""  # why this run must not write any more, until it is raised
        self.damaged: list[int] = []  # steps to be set aside with the next one
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


class Snapshot:
    """Host memory for one copy; the next copy overwrites it.

    For CUDA tensors it is pinned, so that copies run concurrently at the bus's full rate.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies under the same names, contiguous, each in memory of its own; valid until the next call."""
        taken = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        devices = set()
        for name, tensor in tensors.items():
            taken[name].copy_(tensor.detach(), non_blocking=True)
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self._buffers = taken
        return dict(taken)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        pinned = like.device.type == "cuda"
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype or buffer.is_pinned() != pinned:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
        return buffer


# -- when and where a step is taken ---------------------------------------------------------------------------------


class AutoCheckpointer:
    """Takes and keeps the steps of a run.

    Args:
        store: for the steps, of which it holds the newest `keep`.
        every: K, exchanges from one step to the next.
        transport: the run's connection; every worker constructs its checkpointer at the same place.
        note: writes an event into the log.
        run: the run's name, from its first worker.

    Raises:
        MismatchError: the workers were given different settings.
        CheckpointError: the store cannot be read or written, or another run uses it.
    """

    def __init__(
        self,
        store: StepStore,
        every: int,
        keep: int,
        transport: Transport,
        source: CheckpointSource,
        note: Callable[..., None],
        run: str,
    ) -> None:
        self._store, self._every, self._keep = store, every, keep
        self._source, self._writer = source, StepWriter(store, keep, transport, run, note)
        self._world = self._writer.transport.world
        self._snapshot = Snapshot()
        self._marks = self._base = 0  # steps that have fallen due; exchanges before the first counted one
        self._count_anew = self._place_seen = self._warned = self._has_steps = self._postponed = False
        self._ended = False  # the program has, and nothing else keeps steps from being written
        self._due: ExchangePosition | None = None
        self._refusal = self._open_store()

    def _open_store(self) -> str:
        """Claim the store; the reason why nothing may be written before `resumed`, or ""."""
        problem, numbers = "", list[int]()
        try:
            if writes_model(self._world):
                self._writer.claim.take()
            numbers = self._store.numbers()
        except (OSError, CheckpointError) as error:
            problem = str(error)
        world = self._world
        answers = self._writer.transport.gather_json([problem, numbers, [self._every, self._keep]])
        if any(one[2] != answers[0][2] for one in answers):
            raise MismatchError(world.sign("the workers were given different every_blocks or keep; give all the same"))
        problems = [f"{world.name(rank)}: {one[0]}" for rank, one in enumerate(answers) if one[0]]
        if problems:
            self._writer.claim.release()
            raise CheckpointError(world.sign(f"{self._store.shown} cannot be used: {'; '.join(problems)}"))
        there = [number for one in answers for number in one[1]]
        self._has_steps = bool(there)
        return self._why_not(max(there)) if there else ""

    def _why_not(self, newest: int) -> str:
        return (
            f"{self._store.name(newest)} is of an earlier run; call run.resume() before the training loop to go on "
            "from there, or give checkpoint= another place, or move the steps away that shall not be gone on from"
        )

    # -- when ---------------------------------------------------------------------------------------------------------

    def resumed(self, number: int, damaged: list[int], there: list[int]) -> None:
        """The run resumed from step `number` of this store (-1: none); these newer ones are damaged."""
        newer = [one for one in there if one > number and one not in damaged]
        self._refusal = self._why_not(max(newer)) if newer else ""
        self._writer.damaged = sorted(damaged)
        if self._count_anew:
            self._base = self._source.exchange_position().count
        self._marks, self._due = self._fallen_due(self._source.exchange_position()), None

    def require_resume(self, why: str) -> None:
        """Take no step before `resumed` is called, and count exchanges from there."""
        self._refusal, self._count_anew = self._refusal or why, True

    def _fallen_due(self, position: ExchangePosition) -> int:
        """How many steps have fallen due."""
        return (position.count - self._base) // self._every

    def stepped(self) -> None:
        """The optimizer made a step; CheckpointError if the run did not resume from the steps in its store."""
        writer = self._writer
        if self._refusal:
            raise CheckpointError(self._world.sign(self._refusal))
        writer.raise_lost()
        if writer.stopped:
            return
        position = self._source.exchange_position()
        marks = self._fallen_due(position)
        if marks > self._marks:
            if self._due is not None and not self._postponed:
                self._missed(self._due)
            self._due, self._postponed = position, False
        self._marks = marks

    def passed(self) -> None:
        """A pass is over: this worker has joined the others' exchanges, and all come to the next place together."""
        self._postponed = True
        self.stepped()

    def follow(self) -> None:
        """The optimizer made a step, and another worker takes the run's steps."""
        self._marks, self._due, self._refusal = self._fallen_due(self._source.exchange_position()), None, ""

    def now(self, wait: bool = False) -> None:
        """Take a step now, because the run cannot continue; from any thread, while training is stopped.

        Args:
            wait: for a step that is being written, and for this one; also after the program has ended.
        """
        if wait:
            self._writer.free.wait()  # every wait in that thread has a deadline
            self._writer.stopped = self._writer.stopped and not self._ended
        if not self._writer.stopped and not self._refusal:
            self._due, self._place_seen = self._source.exchange_position(), True
            take = self.at_iteration_end()
            if take is not None:
                take()
        if wait:
            self._writer.free.wait()

    def _missed(self, due: ExchangePosition) -> None:
        """Another step falls due, and the last one was never taken."""
        if not self._warned:
            self._warned = True
            text = f"no checkpoint was taken: one was due after exchange {due.count}, and the top of your loop was not"
            more = f"seen before the next was due; {CURE}, or give a larger every_blocks"
            logger.warning("%s", self._world.sign(f"{text} {more}"))
        if self._place_seen:
            self._writer.submit(StepReport(due.count, self._source.about(), missing="its loop had no place for it"))

    # -- where --------------------------------------------------------------------------------------------------------

    def at_iteration_end(self, last: bool = False) -> Callable[[], None] | None:
        """An iteration of the user's loop is over; returns a function that takes the due step, or None.

        Args:
            last: the program has ended.
        """
        if not last:
            self._place_seen = True
        if self._due is None or self._writer.stopped:
            return None
        position = self._source.exchange_position()
        self._postponed |= position.awaited
        if position.awaited or (position.better_later and not last):
            return None
        began = runtime.monotonic()
        report = self._report(self._due)
        position = self._source.exchange_position()  # known now: the state includes all exchanges that have begun
        if position.awaited:
            self._postponed = True
            return None
        if position.left is not None and position.left <= self._due.sequence:
            self._writer.stopped, self._due = True, None
            return None
        stopped_s = runtime.monotonic() - began
        return lambda: self._take(report, stopped_s)

    def _report(self, due: ExchangePosition) -> StepReport:
        """This worker's part of the step; its tensors are not copied yet."""
        if not self._writer.free.is_set():
            return StepReport(due.count, self._source.about(), missing=BUSY)
        kept = self._source.kept()
        report = StepReport(self._source.exchange_position().count, self._source.about())
        tensors: dict[str, Tensor] = {}
        try:
            model = kept.model if writes_model(self._world) else {}
            report.content = Content(flatten(kept.state, tensors, ""), tensors, model, kept.frozen)
        except CheckpointError as error:
            report.missing = str(error)
        return report

    def _take(self, report: StepReport, stopped_s: float) -> None:
        """Copy, and hand the copy to the writer."""
        began = runtime.monotonic()
        self._due = None
        content = report.content
        if content is not None:
            own = {f"rank{name}": tensor for name, tensor in content.tensors.items()}
            held = {memory(tensor): name for name, tensor in own.items()}
            more = {f"model {n}": tensor for n, tensor in content.model.items() if memory(tensor) not in held}
            copies = self._snapshot.take(own | more)
            model = {n: copies[held.get(memory(tensor), f"model {n}")] for n, tensor in content.model.items()}
            tensors = {name: copies[f"rank{name}"] for name in content.tensors}
            report.content = Content(content.rest, tensors, model, content.frozen)
            self._writer.free.clear()
        report.stopped_s = stopped_s + runtime.monotonic() - began
        self._writer.submit(report)

    # -- the end ------------------------------------------------------------------------------------------------------

    def leave(self, shared: bool, final: bool = False) -> None:
        """The program has ended, and the workers have not parted: take the step that is due.

        Args:
            shared: whether it iterated over shared data, which ends iterations.
            final: whether a step is due now, unless one was at this exchange.
        """
        if final and not self._due and (self._source.exchange_position().count - self._base) % self._every:
            self._due = self._source.exchange_position()
        if self._due is not None:
            self._writer.free.wait()  # every wait in that thread has a deadline
        if self._place_seen or shared:
            take = self.at_iteration_end(last=True)
            if take is not None:
                take()
        # the one sign that there is no way back
        if not (self._marks or self._has_steps or final) and self._world.rank == 0:
            made = self._source.exchange_position().count - self._base
            text = (
                f"no checkpoint was written: one is due every {self._every} exchanges, and the run made {made}; give a"
            )
            more = "smaller every_blocks (--checkpoint-every), or save the model at the program's end"
            logger.warning("%s", self._world.sign(f"{text} {more}"))
        self._ended = not self._writer.stopped
        self._writer.stopped = True

    def finish(self, complain: bool = False) -> None:
        """Return when everything is written; called after the workers have parted."""
        self._writer.finish(complain)

    def close(self) -> None:
        """Take no more steps; do not wait for the one that is being written."""
        self._writer.close()
