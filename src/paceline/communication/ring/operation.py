# SPDX-License-Identifier: Apache-2.0
"""An operation in flight: it follows its plan as pieces arrive and as the network takes others.

Two rules bound memory. Parts larger than `EAGER` are sent only to a worker that has begun the same operation and said
so (a grant). Smaller ones wait at a receiver that has not begun it, and at most `WINDOW` collectives of a sequence are
in flight; further ones begin when one of those completes.

A piece is copied to its place under a lock, never read straight into the tensor: once a wait has ended
with an error, nothing is written there any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from paceline.communication.ring.link import OutFrame
from paceline.communication.ring.op_sequence import OpSequence
from paceline.communication.ring.plans import OperationPlan, Piece
from paceline.communication.ring.wire import DATA, GRANT, RECEIVING, SENDING, Key, add, raw, signature
from paceline.core import runtime
from paceline.errors import MismatchError, PacelineError

OTHER_END = {RECEIVING: SENDING, SENDING: RECEIVING}


class Carrier(Protocol):
    """The connections, as an operation uses them.

    Attributes:
        timeout_s: an operation that has not moved for so long has failed.
    """

    timeout_s: float

    def post(self, rank: int, out: OutFrame, key: Key | None, here: bool) -> None:
        """Queue a frame to `rank`."""

    def finished(self, operation: Operation) -> None:
        """It is complete: another one may begin."""

    def late(self, operation: Operation) -> None:
        """It has not moved for the deadline."""

    def failure(self, operation: Operation) -> PacelineError:
        """The error for an operation that was ended, once its cause is known."""


class Operation:
    """One operation of this worker; a `Pending`.

    Args:
        carrier: the connections.
        sequence: the channel or subgroup.
        key: its key.
        name: for messages.
        likeness: what must be the same on all members.
        plan: its pieces.
        finish: called by the waiting thread when all pieces have arrived.

    Attributes:
        progress: when it last moved, on the monotonic clock.
    """

    def __init__(
        self,
        carrier: Carrier,
        sequence: OpSequence[Operation],
        key: Key,
        name: str,
        likeness: str,
        plan: OperationPlan,
        finish: Callable[[], None] | None,
    ) -> None:
        self.sequence, self.key, self.name = sequence, key, name
        self._carrier, self._plan, self._finish = carrier, plan, finish
        self._signature = signature(likeness)
        self._lock = runtime.Lock()
        self._placing = runtime.Lock()  # beside it, so that a sender does not wait for a sum
        self._live = True
        self._incoming, self._outgoing = dict(plan.incoming), dict(plan.outgoing)
        self._held: dict[int, list[Piece]] = {rank: [] for rank in plan.gated}
        self._seen: set[tuple[int, int, int]] = set()
        self._writing = 0
        self._begun = False  # the first pieces are queued
        self._over = runtime.Event()
        self.progress = runtime.monotonic()

    def begin(self, here: bool) -> None:
        """Send the grants and the first pieces.

        Args:
            here: send small frames in this thread, which may then have to wait for the network.
        """
        self.progress = runtime.monotonic()
        for rank in self._plan.grants:
            self._carrier.post(rank, OutFrame(GRANT, self._numbers), None, here)
        for piece in self._plan.first():
            self._send(piece, here)
        with self._lock:
            self._begun = True
            over = self._all_done()
        if over:
            self._end()

    def granted(self, rank: int, said: int) -> None:
        """Rank `rank` has begun it, with this signature."""
        self._compare(rank, said)
        with self._lock:
            pieces = self._held.pop(rank, [])
            self.progress = runtime.monotonic()
        for piece in pieces:
            self._send(piece, False)

    def arrived(self, rank: int, said: int, step: int, index: int, body: Tensor) -> None:
        """A piece has arrived; MismatchError if it does not belong here."""
        self._compare(rank, said)
        with self._placing:
            if not self._live:
                return
            place = self._plan.place(rank, step, index)
            if place is None or (rank, step, index) in self._seen or place.view.nbytes != body.nbytes:
                raise MismatchError(
                    f"piece {index} of step {step} of {body.nbytes} bytes does not belong to exchange "
                    f"{self.key.number} ({self.name}) here"
                )
            self._seen.add((rank, step, index))
            if place.adds:
                add(place.view, body.view(place.view.dtype))
            else:
                raw(place.view).copy_(body)
        further = self._plan.then(rank, step, index)
        if further is not None:
            self._send(further, False)
        with self._lock:
            self.progress = runtime.monotonic()
            self._incoming[rank] -= 1
            over = self._all_done()
        if over:
            self._end()

    def needs(self, rank: int) -> bool:
        """Whether pieces from or to rank `rank` are outstanding."""
        return self._incoming.get(rank, 0) > 0 or self._outgoing.get(rank, 0) > 0

    def kill(self) -> None:
        """End it without a result; nothing is written to its tensors from now on."""
        with self._placing, self._lock:
            self._live = False
        self._over.set()

    def wait(self) -> None:
        """Return once the result is there; `PeerLostError` after the deadline without progress, or for a lost peer."""
        begun = runtime.monotonic()
        while not self._over.is_set():
            left = max(begun, self.sequence.moved(self)) + self._carrier.timeout_s - runtime.monotonic()
            if left <= 0:
                self._carrier.late(self)
            else:
                self._over.wait(left)
        if not self._live:
            raise self._carrier.failure(self)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    @property
    def _numbers(self) -> tuple[int, ...]:
        role_there = OTHER_END.get(self.key.role, self.key.role)
        return self.key.sequence, self.key.number, role_there, self._signature

    def _compare(self, rank: int, said: int) -> None:
        if said != self._signature:
            raise MismatchError(
                f"at exchange {self.key.number} of {self.sequence.label} it does something else than {self.name}: "
                "another operation, size or dtype. The workers' programs must make the same calls in the same order"
            )

    def _send(self, piece: Piece, here: bool) -> None:
        with self._lock:
            if not self._live:
                return
            if piece.to in self._held:
                self._held[piece.to].append(piece)
                return
        out = OutFrame(DATA, (*self._numbers, piece.step, piece.nth), piece.body, None, self)
        self._carrier.post(piece.to, out, self.key, here)

    def sending(self, rank: int) -> None:
        """A piece is about to be written."""
        with self._lock:
            self._outgoing[rank] -= 1
            self._writing += 1

    def failed(self, rank: int) -> None:
        """It could not be written."""
        with self._lock:
            self._outgoing[rank] += 1
            self._writing -= 1

    def sent(self, rank: int) -> None:
        """It is written."""
        with self._lock:
            self._writing -= 1
            self.progress = runtime.monotonic()
            over = self._all_done()
        if over:
            self._end()

    def _all_done(self) -> bool:
        """Whether it is complete; under the lock, and True only once."""
        if not self._begun or not self._live or self._over.is_set():
            return False
        if self._writing or any(self._incoming.values()) or any(self._outgoing.values()):
            return False
        self._begun = False
        return True

    def _end(self) -> None:
        self._carrier.finished(self)
        self._over.set()
