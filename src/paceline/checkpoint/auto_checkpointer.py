# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of their own accord: when one is due, where it is taken, and how it is written behind the training.

A step falls due inside `optimizer.step()`, when the workers have exchanged K more times. It is taken at the next place
where a whole iteration of the user's loop is over, which the session tells: only there have schedulers and the like
been stepped too. Every worker comes to that place between the same two exchanges, so what all of them copy fits
together. A worker that comes to its end first takes it there; from the exchange on in which the others hear that
somebody has come to its end, no more are taken.

The training stops for the copy into host memory. A thread does the rest: over a connection of its own it tells the
others what it has (a number that must be the same for all), writes, and hears whether all have written. What cannot be
written is a warning on every worker, and training goes on. Of every step that falls due each worker says one word, in
order: so nobody waits for a word that will not come.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.checkpoint.agreement import Directly, WithBeats
from paceline.checkpoint.files import Content
from paceline.checkpoint.snapshot import Snapshot
from paceline.checkpoint.source import Moment, Source
from paceline.checkpoint.store import StepStore
from paceline.communication import Transport
from paceline.communication.virtual.transport import VirtualTransport
from paceline.core.state_tree import flatten
from paceline.errors import CheckpointError, ClosedError, MismatchError, PacelineError, PeerLostError

logger = logging.getLogger("paceline")

MOST_BEAT_S = 5.0
BUSY = "the last one was still being written"
CURE = "call run.checkpoint() at the top of your loop, or go through your data with run.share"


@dataclass
class _Word:
    """What this worker has to say of a step that fell due; `none` says why it has nothing."""

    count: int
    about: dict[str, Any]
    content: Content | None = None
    none: str = ""
    stopped_s: float = 0.0


class AutoCheckpointer:
    """Takes and keeps the steps of a run.

    Args:
        store: where they lie.
        every: K, exchanges from one to the next.
        keep: M, how many are kept.
        transport: the run's connection; every worker makes its keeper at the same place.
        source: what is kept.
        note: writes an event into the log.
        run: the name of this run, as its first worker says it.

    Raises:
        MismatchError: workers want different things.
        CheckpointError: the place cannot be read or written, or another run writes there.
    """

    def __init__(
        self,
        store: StepStore,
        every: int,
        keep: int,
        transport: Transport,
        source: Source,
        note: Callable[..., None],
        run: str,
    ) -> None:
        self._store, self._every, self._keep = store, every, keep
        self._source, self._note = source, note
        self._transport = transport.part([list(range(transport.world.size))])
        self._background = may_work_behind(transport)
        timeout_s = float(getattr(transport, "timeout_s", 600.0))
        self._working = WithBeats(min(MOST_BEAT_S, timeout_s / 4)) if self._background else Directly()
        self._snapshot = Snapshot()
        self._words: queue.SimpleQueue[_Word | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._free = threading.Event()  # nothing is being written, and the memory of the last copy may be used
        self._free.set()
        self._mark = self._base = 0
        self._anew = False
        self._due: Moment | None = None
        self._seen = self._warned = self._told = self._over = False
        self._damaged: list[int] = []
        self._claim = store.claim(self._transport.gather_json(run)[0])
        self._lost = ""
        self._refusal = self._look()

    def _look(self) -> str:
        """Why nothing may be written here before `resumed` was told; nothing where nothing speaks against it."""
        problem, numbers = "", list[int]()
        try:
            if self._may_make:
                self._claim.take()
            numbers = self._store.numbers()
        except (OSError, CheckpointError) as error:
            problem = str(error)
        world = self._transport.world
        told = self._transport.gather_json([problem, numbers, [self._every, self._keep]])
        if any(one[2] != told[0][2] for one in told):
            raise MismatchError(world.sign("the workers were given different every_blocks or keep; give all the same"))
        said = [f"{world.name(rank)}: {one[0]}" for rank, one in enumerate(told) if one[0]]
        if said:
            self._claim.release()
            raise CheckpointError(world.sign(f"{self._store.shown} cannot be used: {'; '.join(said)}"))
        there = [number for one in told for number in one[1]]
        return self._why_not(max(there)) if there else ""

    def _why_not(self, newest: int) -> str:
        return (
            f"{self._store.name(newest)} is of an earlier run; call run.resume() before the training loop to go on "
            "from there, or give checkpoint= another place, or move the steps away that shall not be gone on from"
        )

    # -- when ---------------------------------------------------------------------------------------------------------

    def resumed(self, number: int, damaged: list[int], there: list[int]) -> None:
        """The run goes on from step `number` of this place (-1: there is none); these newer ones are damaged."""
        newer = [one for one in there if one > number and one not in damaged]
        self._refusal = self._why_not(max(newer)) if newer else ""
        self._damaged = sorted(damaged)
        if self._anew:
            self._base = self._source.moment().count
        self._mark, self._due = self._marks(self._source.moment()), None

    def demand(self, why: str) -> None:
        """Nothing goes on before `resumed` was told, and exchanges are counted from there."""
        self._refusal, self._anew = self._refusal or why, True

    def _marks(self, moment: Moment) -> int:
        """How many steps have fallen due."""
        return (moment.count - self._base) // self._every

    def stepped(self) -> None:
        """The optimizer made a step.

        Raises:
            CheckpointError: another run's steps lie here, and this run does not go on from them.
        """
        if self._refusal:
            raise CheckpointError(self._transport.world.sign(self._refusal))
        self._complain()
        if self._over:
            return
        moment = self._source.moment()
        mark = self._marks(moment)
        if mark > self._mark:
            if self._due is not None:
                self._missed(self._due)
            self._due = moment
        self._mark = mark

    def follow(self) -> None:
        """The optimizer made a step, and another worker keeps the steps of the run."""
        self._mark, self._due, self._refusal = self._marks(self._source.moment()), None, ""

    def now(self) -> None:
        """Take one as things stand, because the run cannot go on; from any thread, while the training stands still."""
        if not self._over and not self._refusal:
            self._due, self._seen = self._source.moment(), True
            take = self.at_iteration_end()
            if take is not None:
                take()

    def _missed(self, due: Moment) -> None:
        """Another one falls due, and no place has come for the last."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s",
                self._transport.world.sign(
                    f"no checkpoint was taken: one was due after exchange {due.count}, and the top of your loop was "
                    f"not seen before the next was due; {CURE}, or give a larger every_blocks"
                ),
            )
        if self._seen:
            self._say(_Word(due.count, self._source.about(), none="its loop had no place for it"))

    # -- where --------------------------------------------------------------------------------------------------------

    def at_iteration_end(self, last: bool = False) -> Callable[[], None] | None:
        """A whole iteration of the user's loop is over; what is returned, if anything, takes the step as things stand.

        Args:
            last: the program has come to its end.
        """
        if not last:
            self._seen = True
        if self._due is None or self._over:
            return None
        if not last and self._source.moment().better_later:
            return None
        began = time.perf_counter()
        word = self._prepare(self._due)
        left = self._source.moment().left  # known by now: the state holds everything that has begun
        if left is not None and left <= self._due.sequence:
            self._over, self._due = True, None
            return None
        stopped_s = time.perf_counter() - began
        return lambda: self._take(word, stopped_s)

    def _prepare(self, due: Moment) -> _Word:
        """What this worker has to say, its tensors still where they are."""
        if not self._free.is_set():
            return _Word(due.count, self._source.about(), none=BUSY)
        state, model = self._source.kept()
        word = _Word(self._source.moment().count, self._source.about())
        tensors: dict[str, Tensor] = {}
        try:
            word.content = Content(flatten(state, tensors, ""), tensors, {} if model is None else model)
        except CheckpointError as error:
            word.none = str(error)
            return word
        if model is None and self._may_make:
            word.content.model = {name: tensors[f".model.{name}"] for name in state["model"]}
        elif not self._may_make:
            word.content.model = {}
        return word

    @property
    def _may_make(self) -> bool:
        """Whether this worker may be the one that writes the global model: the first of each host."""
        world = self._transport.world
        return world.rank == 0 or world.local_rank == 0

    def _take(self, word: _Word, stopped_s: float) -> None:
        """Copy, and let the rest be done."""
        began = time.perf_counter()
        self._due = None
        content = word.content
        if content is not None:
            own = {f"rank{name}": tensor for name, tensor in content.tensors.items()}
            held = {id(tensor): name for name, tensor in own.items()}
            more = {f"model {n}": tensor for n, tensor in content.model.items() if id(tensor) not in held}
            copies = self._snapshot.take(own | more)
            model = {n: copies[held.get(id(tensor), f"model {n}")] for n, tensor in content.model.items()}
            tensors = {name: copies[f"rank{name}"] for name in content.tensors}
            word.content = Content(content.rest, tensors, model)
            self._free.clear()
        word.stopped_s = stopped_s + time.perf_counter() - began
        self._say(word)

    # -- behind the training ------------------------------------------------------------------------------------------

    def _say(self, word: _Word) -> None:
        if not self._background:
            self._carry_out(word)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="paceline-checkpoint", daemon=True)
            self._thread.start()
        self._words.put(word)

    def _work(self) -> None:
        while (word := self._words.get()) is not None:
            try:
                self._carry_out(word)
            except (PeerLostError, ClosedError) as error:  # the training hears of it by itself
                self._over = True
                logger.warning("%s: the checkpoint after exchange %d was not finished", error, word.count)
                return
            except Exception as error:
                self._over = True
                logger.exception("no more checkpoints are taken: %s", error)
                return

    def _carry_out(self, word: _Word) -> None:
        """Agree on a step, write it, and remove what is too old."""
        try:
            self._settle(word)
        finally:
            if word.content is not None:
                self._free.set()

    def _settle(self, word: _Word) -> None:
        began, world = time.perf_counter(), self._transport.world
        told = self._transport.gather_json([word.count, word.none, word.about["minibatches"]])
        said = [f"{world.name(rank)}: {one[1]}" for rank, one in enumerate(told) if one[1]]
        if not said and len({one[0] for one in told}) > 1:
            said = [f"workers stood behind different exchanges ({sorted({one[0] for one in told})}); {CURE}"]
        if said:
            self._skipped(f"no checkpoint after exchange {word.count}: {'; '.join(said)}")
            return
        assert word.content is not None
        if self._may_make and not self._has_place():
            return
        number, content = max(one[2] for one in told), word.content
        about = {**word.about, "minibatches": number}
        name = self._store.name(number)
        try:
            self._put_aside()
            nbytes, maker = self._store.write(number, self._transport, about, lambda: content, self._working)
        except CheckpointError as error:
            self._failed(name, str(error))
            return
        written_s = round(time.perf_counter() - began, 6)
        stopped_s = round(word.stopped_s, 6)
        self._note("save", path=name, minibatches=number, stopped_s=stopped_s, written_s=written_s, bytes=nbytes)
        if maker:
            self._tidied(lambda: self._store.tidy(self._keep))

    def _has_place(self) -> bool:
        """Whether this run has the place still; if not, it ends with an error, and writes nothing more."""
        try:
            self._claim.check()
        except CheckpointError as error:
            self._over, self._lost = True, str(error)
        return not self._lost

    def _complain(self) -> None:
        """Raise what makes steps impossible from now on."""
        lost, self._lost = self._lost, ""
        if lost:
            raise CheckpointError(self._transport.world.sign(lost))

    def _put_aside(self) -> None:
        """What was found damaged is not to be found again, and its numbers will be needed."""
        damaged, self._damaged = self._damaged, []
        if damaged:
            if self._may_make:
                self._tidied(lambda: self._store.set_aside(damaged))
            self._transport.barrier()

    def _tidied(self, action: Callable[[], None]) -> None:
        """What fails here costs room on the disk, and nothing else."""
        try:
            action()
        except (OSError, PacelineError) as error:
            self._failed(self._store.shown, f"old checkpoints could not be put away: {error}")

    def _skipped(self, why: str) -> None:
        """Said aloud once, because it may come again and again; the log has each."""
        if not self._told:
            logger.warning("%s; training goes on (said once, the event log has all; see every_blocks)", why)
        self._told = True
        self._note("save_skipped", why=why)

    def _failed(self, path: str, why: str) -> None:
        logger.warning("%s; training goes on", why)
        self._note("save_failed", path=path, why=why)

    # -- the end ------------------------------------------------------------------------------------------------------

    def leave(self, shared: bool) -> None:
        """The program has come to its end, before the workers part; takes what is due.

        Args:
            shared: whether it went through shared data, so that places were to come.
        """
        if self._due is not None:
            self._free.wait()  # the end can wait; every wait in the thread has a deadline
        if self._seen or shared:
            take = self.at_iteration_end(last=True)
            if take is not None:
                take()
        self._over = True

    def finish(self, complain: bool = False) -> None:
        """Return when everything is written; after the workers have parted."""
        if self._thread is not None:
            self._words.put(None)
            self._thread.join()
            self._thread = None
        if complain:
            self._complain()

    def close(self) -> None:
        """Nothing more is taken, and nobody waits for what is being written."""
        self._over = True
        self._words.put(None)
        self._store.close()
        self._claim.release()


def may_work_behind(transport: Transport) -> bool:
    """Whether a thread may talk to the others while training does.

    NCCL may not; where there is gloo beside it, what lies in host memory goes over gloo.
    """
    if isinstance(transport, VirtualTransport):
        return False
    return transport.world.size == 1 or transport.background or "gloo" in transport.name
