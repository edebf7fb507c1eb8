# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at regular intervals: when a step falls due, and where in the program it is taken.

A step falls due inside `optimizer.step()`, after K more exchanges. It is taken when an iteration of the user's loop is
over: only then have schedulers and the like been stepped, too. Every worker gets there between the same two exchanges,
so their copies are consistent. A worker whose program ends first takes the step at its end. After the exchange in which
the other workers learn that one has ended, no more steps are taken.

Training stops for the copy into host memory only; a thread writes it (:mod:`.step_writer`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.checkpoint.files import Content
from paceline.checkpoint.snapshot import Snapshot
from paceline.checkpoint.step_writer import CURE, StepReport, StepWriter, writes_model
from paceline.checkpoint.store import StepStore
from paceline.communication import Transport
from paceline.core import runtime
from paceline.core.bits import memory
from paceline.core.state_tree import flatten
from paceline.errors import CheckpointError, MismatchError


@dataclass(frozen=True)
class ExchangePosition:
    """Position in the exchanges of a run; the same on all workers between two exchanges.

    Attributes:
        count: exchanges begun, as `every_blocks` counts them.
        sequence: number of the last exchange of any kind.
        left: number of the first exchange to which a worker contributed nothing more; None while all train.
        better_later: whether a pending result will have arrived before the next exchange begins.
        awaited: whether other workers are at the end of the pass already; they come to this place after it.
    """

    count: int
    sequence: int = 0
    left: int | None = None
    better_later: bool = False
    awaited: bool = False


@dataclass(frozen=True)
class Kept:
    """What a step holds of a worker.

    Attributes:
        state: its own.
        model: the global model, name -> tensor.
        frozen: key -> (name, values) of the tensors that the state names; neither it nor the model has them.
    """

    state: dict[str, Any]
    model: dict[str, Tensor]
    frozen: dict[str, tuple[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSource:
    """The state of a run, to save.

    Attributes:
        exchange_position: gives the position in the exchanges.
        about: gives the manifest's fields besides the sums, `minibatches` among them.
        kept: gives what a step holds of this worker; tensors are not copied.
    """

    exchange_position: Callable[[], ExchangePosition]
    about: Callable[[], dict[str, Any]]
    kept: Callable[[], Kept]


logger = logging.getLogger("paceline")

BUSY = "the last one was still being written"


class AutoCheckpointer:
    """Takes and keeps the steps of a run.

    Args:
        store: for the steps.
        every: K, exchanges from one step to the next.
        keep: how many steps are kept.
        transport: the run's connection; every worker constructs its checkpointer at the same place.
        source: the state to save.
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
        """The optimizer made a step.

        Raises:
            CheckpointError: the store has steps of another run, and this run did not resume from them.
        """
        writer = self._writer
        if self._refusal:
            raise CheckpointError(self._world.sign(self._refusal))
        if writer.lost:
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
            logger.warning(
                "%s",
                self._world.sign(
                    f"no checkpoint was taken: one was due after exchange {due.count}, and the top of your loop was "
                    f"not seen before the next was due; {CURE}, or give a larger every_blocks"
                ),
            )
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
        if position.awaited:
            self._postponed = True
        if position.awaited or (position.better_later and not last):
            return None
        began = runtime.monotonic()
        report = self._report(self._due)
        left = self._source.exchange_position().left  # known now: the state includes all exchanges that have begun
        if left is not None and left <= self._due.sequence:
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

    def leave(self, shared: bool) -> None:
        """The program has ended, and the workers have not parted: take the step that is due.

        Args:
            shared: whether it iterated over shared data, which ends iterations.
        """
        if self._due is not None:
            self._writer.free.wait()  # every wait in that thread has a deadline
        if self._place_seen or shared:
            take = self.at_iteration_end(last=True)
            if take is not None:
                take()
        if not (self._marks or self._has_steps) and self._world.rank == 0:  # the one sign that there is no way back
            made = self._source.exchange_position().count - self._base
            logger.warning(
                "%s",
                self._world.sign(
                    f"no checkpoint was written: one is due every {self._every} exchanges, and the run made {made}; "
                    "give attach a smaller every_blocks, or save the model at the program's end"
                ),
            )
        self._ended = not self._writer.stopped
        self._writer.stopped = True

    def finish(self, complain: bool = False) -> None:
        """Return when everything is written; called after the workers have parted."""
        self._writer.finish(complain)

    def close(self) -> None:
        """Take no more steps; do not wait for the one that is being written."""
        self._writer.close()
