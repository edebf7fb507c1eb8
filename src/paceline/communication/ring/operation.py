# SPDX-License-Identifier: Apache-2.0
"""An operation under way: it follows its plan, moved by what comes and by what the network has taken.

Two rules keep memory bounded. What is larger than `EAGER` is sent only to a worker who has come to the same operation
and said so (a grant). What is smaller waits there in the mail, and at most `WINDOW` collectives of a slot are under way
at once, the others begin when one of those is over.

What comes is copied to its place under the operation's lock, never read straight into the tensor: when a wait has
ended with an error, nothing is written there any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paceline.communication.ring.link import Out
from paceline.communication.ring.op_sequence import OpSequence
from paceline.communication.ring.plans import OperationPlan, Piece
from paceline.communication.ring.wire import DATA, GRANT, RECEIVING, SENDING, Key, add, raw, signature
from paceline.errors import MismatchError, PacelineError

OTHER_END = {RECEIVING: SENDING, SENDING: RECEIVING}


class Carrier(Protocol):
    """The connections, as an operation uses them.

    Attributes:
        timeout_s: an operation that has not moved for so long has failed.
    """

    timeout_s: float

    def post(self, rank: int, out: Out, key: Key | None, here: bool) -> None:
        """Hand a frame to the connection to `rank`."""

    def finished(self, operation: Operation) -> None:
        """It is over: another one may begin."""

    def late(self, operation: Operation) -> None:
        """It has not moved for the deadline."""

    def failure(self, operation: Operation) -> PacelineError:
        """The error for an operation that was ended, as soon as it is known who is to blame."""


class Operation:
    """One operation of this worker; a `Pending`.

    Args:
        carrier: the connections.
        slot: the channel or part.
        key: its name within this worker.
        name: for people.
        likeness: what must be the same on the others.
        plan: what goes where.
        finish: what is left to be done by the thread that waits, when all has come.

    Attributes:
        progress: when it last moved, in seconds of the monotonic clock.
    """

    def __init__(
        self,
        carrier: Carrier,
        slot: OpSequence[Operation],
        key: Key,
        name: str,
        likeness: str,
        plan: OperationPlan,
        finish: Callable[[], None] | None,
    ) -> None:
        self.slot, self.key, self.name = slot, key, name
        self._carrier, self._plan, self._finish = carrier, plan, finish
        self._signature = signature(likeness)
        self._lock = threading.Lock()
        self._live = True
        self._incoming, self._outgoing = dict(plan.incoming), dict(plan.outgoing)
        self._held: dict[int, list[Piece]] = {rank: [] for rank in plan.gated}
        self._seen: set[tuple[int, int, int]] = set()
        self._writing = 0
        self._first = False  # the first pieces are on their way
        self._over = threading.Event()
        self.progress = time.monotonic()

    def begin(self, here: bool) -> None:
        """Tell those who wait for it that this worker has come, and send what may be sent.

        Args:
            here: small frames in this thread, which may then have to wait for the network.
        """
        self.progress = time.monotonic()
        numbers = (self.key.slot, self.key.number, self._role_there, self._signature)
        for rank in self._plan.grants:
            self._carrier.post(rank, Out(GRANT, numbers), None, here)
        for piece in self._plan.first():
            self._send(piece, here)
        with self._lock:
            self._first = True
            over = self._all_done()
        if over:
            self._end()

    def granted(self, rank: int, said: int) -> None:
        """Rank `rank` has come, with this signature."""
        self._compare(rank, said)
        with self._lock:
            pieces = self._held.pop(rank, [])
            self.progress = time.monotonic()
        for piece in pieces:
            self._send(piece, False)

    def arrived(self, rank: int, said: int, step: int, index: int, body: Tensor) -> None:
        """A piece has come; MismatchError where it does not belong here."""
        self._compare(rank, said)
        with self._lock:
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
            self.progress = time.monotonic()
        further = self._plan.then(rank, step, index)
        if further is not None:
            self._send(further, False)
        with self._lock:
            self._incoming[rank] -= 1
            over = self._all_done()
        if over:
            self._end()

    def needs(self, rank: int) -> bool:
        """Whether rank `rank` must do something yet before this is over."""
        return self._incoming.get(rank, 0) > 0 or self._outgoing.get(rank, 0) > 0

    def awaited(self) -> list[int]:
        """Ranks that must do something yet."""
        return sorted(rank for rank in {*self._incoming, *self._outgoing} if self.needs(rank))

    def kill(self) -> None:
        """End it without a result; nothing is written to its tensors from now on."""
        with self._lock:
            self._live = False
        self._over.set()

    def wait(self) -> None:
        """Return when the result is there; `PeerLostError` where nothing moves so long, or somebody is lost."""
        begun = time.monotonic()
        while not self._over.is_set():
            left = max(begun, self.slot.moved(self)) + self._carrier.timeout_s - time.monotonic()
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
    def _role_there(self) -> int:
        return OTHER_END.get(self.key.role, self.key.role)

    def _compare(self, rank: int, said: int) -> None:
        if said != self._signature:
            raise MismatchError(
                f"at exchange {self.key.number} of {self.slot.label} it does something else than {self.name}: another "
                "operation, size or dtype. The workers' programs must make the same calls in the same order"
            )

    def _send(self, piece: Piece, here: bool) -> None:
        with self._lock:
            if not self._live:
                return
            if piece.to in self._held:
                self._held[piece.to].append(piece)
                return
        numbers = (self.key.slot, self.key.number, self._role_there, self._signature, piece.step, piece.nth)
        out = Out(DATA, numbers, piece.body, None, self)
        self._carrier.post(piece.to, out, self.key, here)

    def handing(self, rank: int) -> None:
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
            self.progress = time.monotonic()
            over = self._all_done()
        if over:
            self._end()

    def _all_done(self) -> bool:
        """Whether it is over; under the lock, and True only once."""
        if not self._first or not self._live or self._over.is_set():
            return False
        if self._writing or any(self._incoming.values()) or any(self._outgoing.values()):
            return False
        self._first = False
        return True

    def _end(self) -> None:
        self._carrier.finished(self)
        self._over.set()


def describe(operations: Sequence[Operation], name_of: Callable[[list[int]], str]) -> list[str]:
    """Operations as people read them: which, who is waited for, since when."""
    now = time.monotonic()
    return [
        f"{one.name}, from {name_of(one.awaited()) or 'nobody'} for {now - one.progress:.1f} s" for one in operations
    ]
