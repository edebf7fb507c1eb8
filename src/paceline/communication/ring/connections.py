# SPDX-License-Identifier: Apache-2.0
"""All connections of one worker to the same other workers: they deliver frames to operations, and fail together.

An operation in flight follows its plan as pieces arrive and as the network takes others. Two rules bound memory. Parts
larger than `EAGER` are sent only to a worker that has begun the same operation and has granted it. Smaller ones wait at
a receiver that has not begun it, and at most `WINDOW` collectives of a sequence are in flight; further ones begin when
one of those completes.

A piece is copied to its place under a lock, never read straight into the tensor: once a wait has ended with an error,
nothing is written there any more.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.communication.ring.failure_cause import Breakdown, BreakNotice, FailedOperation, find_cause
from paceline.communication.ring.link import SENT, UNSENT, WRITING, Link, OutFrame
from paceline.communication.ring.listener import LABEL, RingListener
from paceline.communication.ring.plans import OperationPlan, Piece
from paceline.communication.ring.wire import (
    BREAK,
    BYE,
    COLLECTIVE,
    DATA,
    EAGER,
    GRANT,
    HELLO,
    RECEIVING,
    SENDING,
    WINDOW,
    Address,
    Key,
    add,
    raw,
    sequence_id,
    signature,
)
from paceline.communication.sockets.channel import TLS, Channel, Late
from paceline.communication.sockets.frames import Frame
from paceline.communication.sockets.identity import refusal
from paceline.communication.sockets.rejected import turned_away
from paceline.core import runtime
from paceline.core.world import World
from paceline.errors import ClosedError, MismatchError, PacelineError, PeerLostError, UnsupportedError

UNMATCHED_BYTES = 1 << 24
"""Most bytes of unmatched pieces kept from one worker."""
UNMATCHED_COST = 512
"""Bytes that each of them counts in addition to its body, for the objects that keep it."""
GRANTS = 1 << 16
"""Most unmatched grants kept from one worker."""


class OpSequence:
    """A channel or subgroup.

    Attributes:
        label: the same on all members, and of no other sequence.
        ranks: its members, as ranks of the whole connection.
        in_flight: collectives that have begun.
        deferred: collectives that begin when one of those completes.
        closed: no operation may be started any more.
    """

    def __init__(self, label: str, ranks: list[int]) -> None:
        self.label, self.ranks, self.id = label, ranks, sequence_id(label)
        self.in_flight: set[Operation] = set()
        self.deferred: deque[Operation] = deque()
        self.closed = False
        self._begun = 0
        self._counts: Counter[tuple[int, int]] = Counter()

    def next_key(self, role: int, peer: int) -> Key:
        """The key of the next operation of that role."""
        self._counts[role, peer] += 1
        return Key(self.id, self._counts[role, peer], role, peer)

    def full(self) -> bool:
        """Whether another collective has to wait."""
        return len(self.in_flight) >= WINDOW or bool(self.deferred)

    def begins(self, operation: Operation) -> None:
        """The operation is no longer deferred."""
        if operation.key.role == COLLECTIVE:
            self.in_flight.add(operation)
            self._begun = operation.key.number

    def begun(self, role: int, peer: int) -> int:
        """The number of the last operation of that role that has begun."""
        return self._begun if role == COLLECTIVE else self._counts[role, peer]

    def moved(self, operation: Operation) -> float:
        """When `operation`, or one of those for which it has to wait, last moved."""
        if operation.key.role != COLLECTIVE or operation in self.in_flight:
            return operation.progress
        return max(one.progress for one in (operation, *tuple(self.in_flight)))

    def at(self) -> dict[str, int]:
        """Operations started, as `BreakNotice.at` has them."""
        counts = {}
        for (role, peer), count in list(self._counts.items()):
            place = self.label if role == COLLECTIVE else f"{self.label}{'<' if role == RECEIVING else '>'}{peer}"
            counts[place] = count
        return counts


class UnmatchedPiece(NamedTuple):
    """A small piece for an operation that has not begun here."""

    rank: int
    theirs: int
    step: int
    nth: int
    body: Tensor


class UnmatchedReceives:
    """Frames for operations that have not begun here; bounded for each sender. The owner's lock guards it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all of them."""
        self._pieces: defaultdict[Key, list[UnmatchedPiece]] = defaultdict(list)
        self._grants: defaultdict[Key, dict[int, int]] = defaultdict(dict)
        self._bytes: Counter[int] = Counter()
        self._granted: Counter[int] = Counter()

    def keep(self, key: Key, piece: UnmatchedPiece) -> None:
        """Copy a piece; MismatchError if no correct worker would have sent it."""
        rank, nbytes = piece.rank, piece.body.nbytes
        if key.role != COLLECTIVE or nbytes > EAGER:
            raise MismatchError(f"{nbytes} bytes of data come that no receive has asked for")
        if self._bytes[rank] + nbytes + UNMATCHED_COST > UNMATCHED_BYTES:
            raise MismatchError(f"more than {UNMATCHED_BYTES} bytes wait for exchanges that have not begun here")
        self._bytes[rank] += nbytes + UNMATCHED_COST
        self._pieces[key].append(piece._replace(body=piece.body.clone()))

    def grant(self, key: Key, rank: int, theirs: int) -> None:
        """Keep a grant of `rank`."""
        if self._granted[rank] >= GRANTS:
            raise MismatchError(f"it waits for more than {GRANTS} exchanges that have not begun here")
        self._granted[rank] += 1
        self._grants[key][rank] = theirs

    def take(self, key: Key) -> tuple[list[UnmatchedPiece], dict[int, int]]:
        """Remove and return the pieces and grants of an operation that begins."""
        pieces, grants = self._pieces.pop(key, []), self._grants.pop(key, {})
        for piece in pieces:
            self._bytes[piece.rank] -= piece.body.nbytes + UNMATCHED_COST
        for rank in grants:
            self._granted[rank] -= 1
        return pieces, grants


OTHER_END = {RECEIVING: SENDING, SENDING: RECEIVING}


class Operation:
    """One operation of this worker; a `Pending`.

    Args:
        likeness: what must be the same on all members.
        plan: its pieces.
        finish: called by the waiting thread when all pieces have arrived.

    Attributes:
        progress: when it last moved, on the monotonic clock.
    """

    def __init__(
        self,
        carrier: Connections,
        sequence: OpSequence,
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

    def granted(self, rank: int, theirs: int) -> None:
        """Rank `rank` has begun it, with this signature."""
        self._compare(rank, theirs)
        with self._lock:
            pieces = self._held.pop(rank, [])
            self.progress = runtime.monotonic()
        for piece in pieces:
            self._send(piece, False)

    def arrived(self, rank: int, theirs: int, step: int, index: int, body: Tensor) -> None:
        """A piece has arrived; MismatchError if it does not belong here."""
        self._compare(rank, theirs)
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

    def _compare(self, rank: int, theirs: int) -> None:
        if theirs != self._signature:
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
        out = OutFrame(DATA, (*self._numbers, piece.step, piece.nth), piece.body, None, self.writes)
        self._carrier.post(piece.to, out, self.key, here)

    def writes(self, rank: int, stage: int) -> None:
        """A piece is about to be written (WRITING), or is (SENT), or could not be (UNSENT)."""
        with self._lock:
            self._outgoing[rank] += {WRITING: -1, SENT: 0, UNSENT: 1}[stage]
            self._writing += 1 if stage == WRITING else -1
            over = False
            if stage == SENT:
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


DIAL_S = 5.0
"""Seconds of one attempt to connect; it is repeated."""
FLUSH_S = 0.5
"""Seconds that `close` waits until the network has the goodbye."""
LEFT = "{} has ended its run and closed the connection"


class Connections:
    """The connections, made in the background: each worker connects to the lower ranks.

    Args:
        listener: accepts those of the higher ranks.
        label: of this set of members, the same on all and never used before.
        world: this worker among them, with all hosts if they are known.
        addresses: address and port of every rank's listener, and whose certificate it has.
        timeout_s: an operation that has not moved for so long has failed.
        tls: certificates for the connections to lower ranks.

    Attributes:
        lost: ranks known to be lost so far.
    """

    def __init__(
        self,
        listener: RingListener,
        label: str,
        world: World,
        addresses: Sequence[tuple[str, int] | Address],
        timeout_s: float,
        tls: TLS | None,
    ) -> None:
        if len(addresses) != world.size or not 0 < len(label) <= LABEL:
            raise UnsupportedError(
                f"a connection needs one address for each of {world.size} workers, got {len(addresses)}, and a label "
                f"of 1 to {LABEL} characters, got {label!r}"
            )
        self.world, self.timeout_s = world, timeout_s
        self.lost: frozenset[int] = frozenset()
        self._listener, self._label, self._tls = listener, label, tls
        self._addresses = [Address(*one) for one in addresses]
        self._changed = runtime.Condition()
        self._over = runtime.Event()  # closed: stop dialling
        self._operations: dict[Key, Operation] = {}
        self._sequences: dict[int, OpSequence] = {}
        self._unmatched = UnmatchedReceives()
        self._notices: dict[int, BreakNotice] = {}
        self._broken: Breakdown | None = None
        others = [rank for rank in range(world.size) if rank != world.rank]
        self._links = {rank: Link(rank, timeout_s, self._deliver, self._gone) for rank in others}
        runtime.end_at_exit(self, Connections.cut)
        listener.register(label, self._take)
        for rank in range(world.rank):
            runtime.thread(self._dial, f"from-{rank}", (self._links[rank],)).start()

    # -- connections ------------------------------------------------------------------------------

    def _dial(self, link: Link) -> None:
        name, address = self.world.name(link.rank), self._addresses[link.rank]
        while not self._over.is_set():
            try:
                channel = self._listener.dial(address, name, DIAL_S, self._tls)
                problem = self._impostor(link.rank, channel)
                if problem:
                    channel.close()
                    link.end(problem)
                    return
                channel.send(HELLO, (self.world.rank, int(1000 * self.timeout_s)), None, self._label, DIAL_S)
            except Late:
                continue
            except PeerLostError:  # rejected, perhaps because too many connect at once
                self._over.wait(0.1)
                continue
            except (PacelineError, OSError) as error:
                link.end(str(error))
                return
            if link.attach(channel):
                link.read()
            else:
                channel.close()
            return

    def _take(self, rank: int, channel: Channel) -> bool:
        """A connection was accepted; returns whether it is one that this worker awaits."""
        if not self.world.rank < rank < self.world.size or self._over.is_set():
            return False
        problem = self._impostor(rank, channel)
        if problem:
            notice = BreakNotice(problem, (rank,), True, {}, (), None)
            with contextlib.suppress(PacelineError, ValueError):
                channel.send(BREAK, note=notice.note(), deadline_s=DIAL_S)
            turned_away(channel.peer, problem)
            return False
        channel.adjust(peer=self.world.name(rank))
        link = self._links[rank]
        if not link.attach(channel):
            return False
        runtime.thread(link.read, f"from-{rank}").start()
        return True

    def _impostor(self, rank: int, channel: Channel) -> str:
        """Why the other end is not that rank; empty if it is."""
        problem = refusal(channel.identity, self._addresses[rank].certificate, self.world.name(rank))
        return problem and self.world.sign(problem)

    def post(self, rank: int, out: OutFrame, key: Key | None, here: bool) -> None:
        """Queue a frame to `rank`."""
        self._links[rank].post(out, key, here)

    # -- operations -------------------------------------------------------------------------------

    def open(self, label: str, ranks: list[int]) -> OpSequence:
        """A new sequence of operations among `ranks`."""
        sequence: OpSequence = OpSequence(label, ranks)
        with self._changed:
            if sequence.id in self._sequences:
                raise ValueError(f"the sequence {label!r} was opened before")
            self._sequences[sequence.id] = sequence
        return sequence

    def start(
        self,
        sequence: OpSequence,
        name: str,
        likeness: str,
        plan: OperationPlan,
        finish: Callable[[], None] | None = None,
        role: int = COLLECTIVE,
        peer: int = -1,
    ) -> Operation:
        """Start the next operation of that role in `sequence`; see `Operation`."""
        with self._changed:
            broken = self._broken is not None
            if self._over.is_set() or sequence.closed:
                raise self._closed_error(name)
            if not broken:
                key = sequence.next_key(role, peer)
                operation = Operation(self, sequence, key, name, likeness, plan, finish)
                if role == COLLECTIVE and sequence.full():
                    sequence.deferred.append(operation)
                    return operation
                unmatched = self._enter(operation)
        if broken:
            raise self.failure(name)
        self._begin(operation, *unmatched, here=True)
        return operation

    def finished(self, operation: Operation) -> None:
        """It is complete: a deferred one may begin."""
        unmatched, sequence = None, operation.sequence
        with self._changed:
            self._operations.pop(operation.key, None)
            sequence.in_flight.discard(operation)
            if operation.key.role == COLLECTIVE and sequence.deferred and self._broken is None:
                further = sequence.deferred.popleft()
                unmatched = self._enter(further)
        if unmatched is not None:
            self._begin(further, *unmatched, here=False)

    def _enter(self, operation: Operation) -> tuple[list[UnmatchedPiece], dict[int, int]]:
        self._operations[operation.key] = operation
        operation.sequence.begins(operation)
        return self._unmatched.take(operation.key)

    def _begin(self, operation: Operation, pieces: list[UnmatchedPiece], grants: dict[int, int], here: bool) -> None:
        for rank in self._members(operation):
            link = self._links.get(rank)
            if link is not None and (link.lost or link.left):
                why = LEFT.format(self.world.name(rank)) if link.left else link.lost
                self.break_off(why, [rank], self._failed_operation(operation), True)
                return
        try:  # before anything is sent: a worker that has received all of it may say goodbye
            for rank, theirs in grants.items():
                operation.granted(rank, theirs)
            for piece in pieces:
                rank = piece.rank
                operation.arrived(*piece)
        except MismatchError as error:
            self.break_off(f"{self.world.name(rank)}: {error}", [rank], self._failed_operation(operation), True)
            return
        operation.begin(here)

    def _members(self, operation: Operation) -> list[int]:
        if operation.key.role == COLLECTIVE:
            return operation.sequence.ranks
        return [self.world.rank, operation.key.peer]

    # -- frames that arrive -----------------------------------------------------------------------

    def _deliver(self, link: Link, frame: Frame) -> None:
        if frame.kind in (DATA, GRANT):
            self._deliver_to_operation(link.rank, frame)
        elif frame.kind == BREAK:
            self._notified(link.rank, BreakNotice.read(frame.note, self.world.size))
        elif frame.kind == BYE:
            link.said_goodbye()
            self._gone(link, LEFT.format(self.world.name(link.rank)))
        else:
            raise MismatchError(f"a frame of kind {frame.kind}, which has no meaning here")

    def _deliver_to_operation(self, rank: int, frame: Frame) -> None:
        sequence, number, role, theirs, step, index = frame.numbers[:6]
        if role not in (COLLECTIVE, RECEIVING if frame.kind == DATA else SENDING):
            raise MismatchError(f"a frame of kind {frame.kind} for an operation of role {role}")
        if (frame.body is None) != (frame.kind == GRANT):
            raise MismatchError(f"a frame of kind {frame.kind} {'without' if frame.body is None else 'with'} data")
        key = Key(sequence, number, role, -1 if role == COLLECTIVE else rank)
        with self._changed:
            operation = self._operations.get(key)
            if operation is None:
                if self._broken is None and not self._over.is_set():
                    self._keep(key, rank, frame)
                return
        if frame.body is None:
            operation.granted(rank, theirs)
        else:
            operation.arrived(rank, theirs, step, index, frame.body)

    def _keep(self, key: Key, rank: int, frame: Frame) -> None:
        """Keep a frame for an operation that has not begun."""
        sequence = self._sequences.get(key.sequence)
        if key.number < 1 or (sequence is not None and key.number <= sequence.begun(key.role, key.peer)):
            raise MismatchError(f"a frame of kind {frame.kind} for exchange {key.number}, which is over")
        theirs, step, index = frame.numbers[3:6]
        if frame.body is None:
            self._unmatched.grant(key, rank, theirs)
        else:
            self._unmatched.keep(key, UnmatchedPiece(rank, theirs, step, index, frame.body))

    # -- failures ---------------------------------------------------------------------------------

    def late(self, operation: Operation) -> None:
        """It has not moved for the deadline."""
        why = f"nothing moved for {self.timeout_s:g} s"
        lost = [rank for rank, link in self._links.items() if link.lost and not link.left]
        self.break_off(why, lost, self._failed_operation(operation), bool(lost))

    def cancel(self, why: str) -> None:
        """End everything, with `why` as the error; no worker is blamed."""
        self.break_off(why, [], None, True)

    def break_off(self, why: str, lost: Iterable[int], case: FailedOperation | None, definite: bool) -> None:
        """End all operations, and notify the other workers.

        Args:
            why: for messages.
            lost: ranks known to be lost.
            case: the exchange that failed, if any.
            definite: the cause is known; no notices are awaited.
        """
        with self._changed:
            if self._over.is_set():
                return
            self.lost |= {rank for rank in lost if rank != self.world.rank}
            first = self._broken is None
            if self._broken is None:
                patience = min(5.0, max(1.0, self.timeout_s / 4))
                self._broken = Breakdown(why, case, definite, runtime.monotonic() + patience)
            elif definite:
                self._broken.definite = True
            ended = self._drop() if first else []
            waits = {one.sequence.label for one in ended if one.key.role == COLLECTIVE}
            notice = BreakNotice(why, tuple(sorted(self.lost)), definite, self._at(), tuple(sorted(waits)), case)
            self._changed.notify_all()
        for operation in ended:
            operation.kill()
        for link in self._links.values() if first else ():
            link.drop()
            link.post(OutFrame(BREAK, note=notice.note()))

    def _drop(self) -> list[Operation]:
        ended = [*self._operations.values(), *(one for each in self._sequences.values() for one in each.deferred)]
        self._operations.clear()
        self._unmatched.clear()
        for sequence in self._sequences.values():
            sequence.deferred.clear()
        return ended

    def _notified(self, rank: int, notice: BreakNotice) -> None:
        """Rank `rank` has broken off."""
        with self._changed:
            self._notices[rank] = notice
            self._changed.notify_all()
        why = notice.why
        if self.world.rank in notice.lost:
            why = f"{self.world.name(rank)} gave this worker up: {why}"
        elif notice.case is None:
            why = f"{self.world.name(rank)} broke off: {why}"
        self.break_off(why, notice.lost, notice.case, notice.definite or notice.case is None)

    def _gone(self, link: Link, reason: str) -> None:
        """A connection has ended, or the other worker has left in order."""
        with self._changed:
            if self._over.is_set():
                return
            needing = next((one for one in self._operations.values() if one.needs(link.rank)), None)
            if self._broken is not None and not link.left and link.rank not in self._notices:
                self.lost |= {link.rank}
            self._changed.notify_all()
        if needing is not None:
            self.break_off(reason, [link.rank], self._failed_operation(needing), True)

    def _failed_operation(self, one: Operation) -> FailedOperation:
        members = tuple(self._members(one))
        return FailedOperation(one.name, one.sequence.label, one.key.number, one.key.role, self.world.rank, members)

    def _at(self) -> dict[str, int]:
        return {place: count for sequence in self._sequences.values() for place, count in sequence.at().items()}

    def _closed_error(self, name: str) -> ClosedError:
        return ClosedError(self.world.sign(f"{name}: this connection was closed before"))

    def failure(self, operation: Operation | str) -> PacelineError:
        """The error for a waiting operation, once the cause is known."""
        with self._changed:
            broken = self._broken
            if broken is None:
                return self._closed_error(operation if isinstance(operation, str) else operation.name)
            while not broken.text:
                known = self.world, self.timeout_s, self._notices, self._at()
                broken.text, blamed, wait_s = find_cause(broken, *known, self.lost)
                self.lost |= blamed
                if wait_s:
                    self._changed.wait(wait_s)
            return PeerLostError(broken.text)

    # -- the end ----------------------------------------------------------------------------------

    def cut(self) -> None:
        """End all connections at once, without a goodbye."""
        with self._changed:
            self._over.set()
        for link in self._links.values():
            link.end("this program has ended")

    def close(self) -> None:
        """Say goodbye and release everything."""
        with self._changed:
            if self._over.is_set():
                return
            self._over.set()
            ended = self._drop()
            broken = self._broken is not None
        for operation in ended:
            operation.kill()
        for link in self._links.values():
            link.close()
        until = runtime.monotonic() + FLUSH_S
        for link in self._links.values():
            if not link.flushed(max(0.0, until - runtime.monotonic())) and broken:
                link.end("it was closed here")
        self._listener.unregister(self._label)
