# SPDX-License-Identifier: Apache-2.0
"""The server between processes: sockets, and threads that serve while the worker computes.

Every worker listens, and has a line to each other worker. Over a line go its questions, in order; at the other end one
thread answers them. A piece's answer leaves while the next piece comes, so both directions of a link are busy.

Whoever is silent too long, or whose connection ends, is lost: that is told to all, the next worker in rank order takes
its pieces over, and what was asked of it is asked there again. A worker that the others have given up learns it and
stops. Nothing that arrives is executed; how the workers find each other is in :mod:`.meeting`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.asynchronous.later import Later, Once
from paceline.asynchronous.leases import Desk
from paceline.asynchronous.lines import (
    ANSWER,
    BYE,
    CLOCKS,
    FINISH,
    LEDGER,
    OUT,
    PULL,
    PUSH,
    REPLICA,
    REST,
    SETTINGS,
    STILL_HERE,
    Line,
    OwnLine,
    fresh,
)
from paceline.asynchronous.meeting import meet
from paceline.asynchronous.members import LOOK_EVERY_S, Members, Pulse
from paceline.asynchronous.piece import KEEPING, NOBODY
from paceline.asynchronous.server import Server
from paceline.asynchronous.service import Ask, Ticket
from paceline.asynchronous.ways import Arriving, Settings
from paceline.data.book import Mark
from paceline.data.ledger import Ledger
from paceline.data.supply import Leases
from paceline.errors import MismatchError, PacelineError, PeerLostError
from paceline.transport import Transport
from paceline.transport.channel import TLS, Channel, Frame, Header

OUT_S = 0.25
"""How long the word that this worker was given up may be on its way beside a connection that has ended."""
GOODBYE_S = 2.0
"""How long a goodbye may be on its way when the connection beside it has ended already."""
REPLICATE_EVERY = 16
"""A piece goes to the neighbour after so many updates of each worker."""


class _Spaces:
    """Buffers of one thread, kept and touched: the first write to new memory costs more than the network."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype, str], Tensor] = {}

    def like(self, anchor: Tensor, use: str) -> Tensor:
        key = (anchor.numel(), anchor.dtype, use)
        if key not in self._kept:
            self._kept[key] = torch.zeros_like(anchor)
        return self._kept[key]


class ThreadedService:
    """A worker's connection to the owners, and its own serving.

    Args:
        transport: the connection over which workers found each other; used to begin and to end, not between.
        server: what this worker owns.
        owners: piece -> rank.
        data: the ledger, what gives the places that this worker holds, and whether others wait for its clock.
        timeout_s: deadline of every wait for another worker, seconds.
        tls: certificates, where the network is not trusted.
        on_lost: called with (rank, why, successors) when a worker is lost.
        on_takeover: called with (rank, version, source) when this worker takes over pieces.
    """

    def __init__(
        self,
        transport: Transport,
        server: Server,
        owners: dict[int, int],
        data: tuple[Ledger, Callable[[], list[Mark]], bool],
        timeout_s: float,
        tls: TLS | None,
        on_lost: Callable[[int, str, list[int]], None],
        on_takeover: Callable[[int, int, str], None],
    ) -> None:
        self._transport, self._server, self._timeout_s = transport, server, timeout_s
        self._on_lost, self._on_takeover = on_lost, on_takeover
        world = transport.world
        self.members = Members(world.rank, world.size, owners)
        self._changed = threading.Condition(threading.RLock())
        self._tickets: dict[int, Ticket] = {}
        self._replicate_at: dict[int, int] = {}  # piece -> version at which the neighbour gets it
        self._seen = 0  # how many were lost when the final model was pulled
        self._clocks: dict[int, int] = {}  # piece -> to which this worker has come with its last push of it
        self._failure: BaseException | None = None
        self._closing = False
        self._over = threading.Event()  # of `_closing`, for the thread that looks out
        self._pulse = Pulse(timeout_s)
        self._later = Later()
        self._threads: list[threading.Thread] = []
        self._lines: dict[int, Line] = {}
        self.desk = Desk(self, *data)
        outgoing, self._incoming = meet(transport, timeout_s, tls)
        try:
            self._begin(outgoing)
        except BaseException:
            self.close()
            raise

    # -- the threads ------------------------------------------------------------------------------

    def _begin(self, outgoing: dict[int, Channel]) -> None:
        """Start the threads; they are all there before the first question."""
        self._lines = {rank: Line(self, rank, channel) for rank, channel in outgoing.items()}
        self._lines[self.members.rank] = OwnLine(self, self.members.rank)
        bodies: dict[str, Callable[[], None]] = {}
        for rank, channel in self._incoming.items():
            bodies[f"serve-{rank}"] = partial(self._serve, rank, channel)
        bodies |= {f"line-{line.rank}": line.run for line in self._lines.values()}
        threads = torch.get_num_threads()
        ready = threading.Barrier(1 + len(bodies))
        for name, body in bodies.items():
            self._thread(_single(ready, body), name)
        ready.wait(self._timeout_s)
        self._thread(self._look_out, "look-out")
        self._thread(self._later.run, "later")
        torch.set_num_threads(threads)  # those of the program; the threads here keep to one each

    def _thread(self, body: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                body()
            except BaseException as error:  # a thread that ends without a word would leave the others waiting
                self._fail(error)

        thread = threading.Thread(target=guarded, name=f"paceline-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    # -- serving ----------------------------------------------------------------------------------

    def _serve(self, rank: int, channel: Channel) -> None:
        """Answer one worker until it leaves."""
        spaces, settings = _Spaces(), dict[int, Settings]()

        def place(header: Header) -> Tensor:
            if header.kind != PUSH:
                return fresh(header)
            return spaces.like(self._anchor(header.numbers[0]), "in")

        try:
            while not self._closing:
                frame = channel.receive(place)
                self.members.heard[rank] = time.monotonic()
                if rank in self.members.lost:  # what it says no longer counts
                    return
                self._handle(rank, channel, frame, spaces, settings)
        except PeerLostError as error:
            self.cut_off(rank, str(error))

    def _anchor(self, piece: int) -> Tensor:
        if piece not in self._server.pieces:
            raise MismatchError(
                self._transport.world.sign(f"was asked for piece {piece}, which belongs to another worker")
            )
        return self._server.pieces[piece].anchor

    def _handle(
        self, rank: int, channel: Channel, frame: Frame, spaces: _Spaces, settings: dict[int, Settings]
    ) -> None:
        numbers = frame.numbers
        if frame.kind == SETTINGS:
            settings[numbers[0]] = frame.note
        elif frame.kind == PUSH:
            piece, clock, version, minibatches, ticket, span, answered_with_values = numbers[:7]
            assert frame.body is not None
            arriving = Arriving(rank, clock, version, minibatches, settings.get(span, {}), frame.note or ())
            out = spaces.like(frame.body, "out") if answered_with_values else None
            still_here = partial(self.send, channel, STILL_HERE, (piece,))
            delay = self._push(piece, frame.body, arriving, out, still_here)
            answered = self._server.read(piece, rank, out, after_push=True)
            self.send(channel, ANSWER, (piece, answered, delay, ticket), out, self._server.news(piece, rank))
            self._replicate(piece)
        elif frame.kind == PULL:
            piece, ticket, looks = numbers[:3]
            out = spaces.like(self._anchor(piece), "out")
            answered = self._server.read(piece, NOBODY if looks else rank, out, after_push=False)
            self.send(channel, ANSWER, (piece, answered, 0, ticket), out, self._server.news(piece, rank))
        elif frame.kind == REPLICA:
            assert frame.body is not None
            self._server.keep_replica(frame.note, frame.body)
        elif frame.kind == CLOCKS:
            with self._changed:
                self._server.tick(rank, frame.note)
                self._changed.notify_all()
        elif frame.kind == OUT:
            self.told(numbers[0], str(frame.note))
        elif frame.kind in LEDGER:
            self.desk.handle(rank, channel, frame)
        elif frame.kind == REST:
            self.rests(rank)
        elif frame.kind in (FINISH, BYE):
            with self._changed:
                self._leaves(rank, frame.kind, numbers[0])

    def rests(self, rank: int) -> None:
        """Worker `rank` has nothing to do for now."""
        with self._changed:
            self._server.rest(rank)
            self._changed.notify_all()

    def _push(
        self, piece: int, values: Tensor, arriving: Arriving, out: Tensor | None, still_here: Callable[[], None]
    ) -> int:
        """Apply a push; return when its sender may go on."""
        answer = self._server.push(piece, values, arriving, out)
        with self._changed:
            self._changed.notify_all()
        if not answer.may_start:
            self._hold_back(piece, arriving.sender, still_here)
        return answer.delay

    def _hold_back(self, piece: int, rank: int, still_here: Callable[[], None]) -> None:
        """Wait until the slowest have caught up; who makes no push for too long is given up."""
        said = time.monotonic()
        while True:
            with self._changed:
                if self._closing or rank in self.members.lost or self._server.may_start(piece, rank):
                    return
                self._changed.wait(LOOK_EVERY_S)
                slow = self._server.pieces[piece].clocks.holding_up(rank)
            self.give_up_silent(slow, "made no step", 0.0)
            if time.monotonic() - said > self._timeout_s / 4:
                still_here()
                said = time.monotonic()

    def give_up_silent(self, ranks: list[int], what: str, since: float) -> None:
        """Give up who has said nothing since the deadline; the wait for it began at `since`."""
        for rank in ranks:
            if rank != self.members.rank and self._pulse.overdue(max(since, self.members.heard[rank])):
                self.lost(rank, f"{what} for {self._timeout_s:g} s")

    def _look_out(self) -> None:
        """Give up those who owe an answer for too long, whatever the training thread does meanwhile."""
        while not self._over.wait(LOOK_EVERY_S):
            self._pulse.beat()
            for rank in self.members.live:
                since = self._lines[rank].waiting_since
                if rank != self.members.rank and since is not None and self._pulse.overdue(since):
                    self.lost(rank, f"did not answer within {self._timeout_s:g} s")

    def _replicate(self, piece: int) -> None:
        """Now and then, and at once where nobody has one, send a piece to the neighbour who would take it over."""
        with self._changed:
            heir, live = self.members.successor(self.members.rank), len(self.members.live)
            version, every = self._server.pieces[piece].version, REPLICATE_EVERY * live
            # not all at the same time: the first comes after one to `every` updates
            due = self._replicate_at.setdefault(piece, version + 1 + piece % every)
            if live == 1 or version < due:
                return
            self._replicate_at[piece] = version + every
        about, row = self._server.pieces[piece].snapshot()
        self._lines[heir].say(REPLICA, (piece,), row, about)

    def send(
        self,
        channel: Channel,
        kind: int,
        numbers: tuple[int, ...],
        body: Tensor | None = None,
        note: Any = None,
        deadline_s: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Send a frame, and count it; by the user's deadline where no other is given."""
        before = channel.bytes_sent
        channel.send(kind, numbers, body, note, deadline_s or self._timeout_s, meanwhile)
        self._transport.sent(channel.bytes_sent - before)

    # -- asking -----------------------------------------------------------------------------------

    def computed(self, step: int) -> None:
        """Real time has passed by itself."""

    def now(self) -> float:
        """Real time."""
        return time.monotonic()

    def exchange_later(self, ticket: Ticket, after_s: float) -> Once:
        """Hand it to the lines in so many seconds, or when it is needed."""
        once = Once(lambda: self._ask(ticket))
        if after_s > 0:
            self._later.put(after_s, once)
        else:
            once()
        return once

    def exchange(self, ticket: Ticket) -> None:
        """Hand every part to the line of its owner; called by the training thread alone."""
        self._ask(ticket)
        self.desk.report()  # behind the push, whose places this worker no longer holds

    def _ask(self, ticket: Ticket) -> None:
        self._raise_failure()
        with self._changed:
            ticket.asked_at = self.now()
            self._tickets[ticket.number] = ticket
            for ask in ticket.asks:
                if ask.values is not None:
                    self._clocks[ask.piece] = ticket.clock
                self._lines[self.members.owners[ask.piece]].ask(ticket, ask)
            self._remind()

    def _remind(self) -> None:
        """A word to those who are asked nothing because they own nothing: else they would take this worker for lost."""
        for rank in self.members.live:
            if rank != self.members.rank and self._pulse.beat() - self._lines[rank].said_at > self._timeout_s / 4:
                self._lines[rank].say(STILL_HERE, ())

    def ticket(self, number: int) -> Ticket | None:
        """The exchange of that number, while it is under way."""
        return self._tickets.get(number)

    def answer(self, number: int, piece: int, version: int, delay: int, news: Any, rank: int) -> None:
        """An answer of worker `rank` is in its place.

        What a lost one had still sent counts for nothing: its heir was asked the same, and what the heir tells of the
        ledger with its first answer, which is the whole of it, must not go by.
        """
        with self._changed:
            ticket = self._tickets.get(number)
            if ticket is None or rank in self.members.lost:
                return
            ticket.answered(piece, version, delay, news)
            if ticket.done:
                ticket.answered_at = self.now()
                del self._tickets[number]
                self._changed.notify_all()

    def done(self, ticket: Ticket) -> bool:
        """Whether it is answered."""
        self._raise_failure()
        return ticket.done

    def wait(self, ticket: Ticket) -> None:
        """Wait for the answers; owners that are silent too long are given up meanwhile."""
        self.wait_until(lambda: ticket.done)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for what another thread does; raises what has broken the cluster."""
        while not ready():
            self._raise_failure()
            with self._changed:
                if not ready():
                    self._changed.wait(LOOK_EVERY_S)
                self._remind()

    def pause(self, seconds: float) -> None:
        """Wait a little for news of others."""
        self._raise_failure()
        with self._changed:
            self._changed.wait(seconds)
            self._remind()

    # -- who is lost ------------------------------------------------------------------------------

    def cut_off(self, rank: int, why: str) -> None:
        """A connection has ended. Its other end may have said more over the other one, where it waits to be read.

        Who is done may have said goodbye there, or that this worker was given up.
        """
        members = self.members
        with self._changed:
            patience = GOODBYE_S if rank in members.finished else OUT_S
            self._changed.wait_for(lambda: self._closing or self._failure or members.done_with(rank), patience)
            if members.done_with(rank):
                return
        stood_s = self._pulse.stood_still()
        if stood_s:
            self._given_up(f"this process stood still for {stood_s:.0f} s")
        self.lost(rank, why)

    def lost(self, rank: int, why: str) -> None:
        """Go on without a worker: its pieces and what was asked of it go to its successor."""
        members = self.members
        with self._changed:
            if self._closing or self._failure or rank in members.lost or rank == members.rank:
                return  # who has failed decides nothing about others
            if rank == members.successor(members.rank):  # the replicas are gone with it
                self._replicate_at = dict.fromkeys(self._server.pieces, 0)
            members.lost[rank] = why
            self._server.leave(rank)
            moved = [piece for piece, owner in members.owners.items() if owner == rank]
            kept = KEEPING in moved
            heir = members.successor(rank)
            for piece in moved:
                members.owners[piece] = heir
            self._on_lost(rank, why, [heir] if moved else [])
            if heir == members.rank:
                self._take_over(rank, moved)
            for other in members.live:
                if other != members.rank:
                    self._lines[other].say(OUT, (rank,), note=why)
            self._dismiss(rank, why)
            self._ask_again(heir, set(moved))
            self.desk.lost(rank, kept)
            self._changed.notify_all()

    def _ask_again(self, heir: int, moved: set[int]) -> None:
        """Ask the new owner what the lost one has not answered, and tell it how far this worker is.

        The lost one knew that, and its replica is older: without it the new owner would hold the others back for a
        worker that is ahead of them, and waits for them.
        """
        waiting = [(t, ask) for t in self._tickets.values() for ask in t.waiting if ask.piece in moved]
        for ticket, ask in waiting:
            self._lines[heir].ask(ticket, ask)
        pushed = {ask.piece for _, ask in waiting if ask.values is not None}
        clocks = [[piece, self._clocks[piece]] for piece in sorted(moved - pushed) if piece in self._clocks]
        if heir == self.members.rank:
            self._server.tick(heir, clocks)
        elif clocks:
            self._lines[heir].say(CLOCKS, (), note=clocks)

    def _dismiss(self, rank: int, why: str) -> None:
        """Tell a lost worker so, over whichever connection takes it, and hear no more of it."""
        for channel in (self._lines[rank].channel, self._incoming[rank]):
            with contextlib.suppress(PacelineError, OSError):
                self.send(channel, OUT, (rank,), note=why, deadline_s=0.1)
        self._lines[rank].close()
        self._incoming[rank].close()

    def _take_over(self, rank: int, pieces: list[int]) -> None:
        made = [self._server.adopt(piece) for piece in pieces]
        self._replicate_at |= dict.fromkeys(pieces, 0)
        for source in sorted({source for _, source in made}):
            self._on_takeover(rank, max(version for version, what in made if what == source), source)

    def told(self, rank: int, why: str) -> None:
        """Another worker has given somebody up."""
        if rank == self.members.rank:
            self._given_up(why)
        else:
            self.lost(rank, why)

    def _given_up(self, why: str) -> None:
        self._fail(
            PeerLostError(
                self._transport.world.sign(
                    f"the other workers went on without this one ({why}); its last steps are not in the model. "
                    "Start it again, or give a longer timeout_s"
                )
            )
        )

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if not self._closing and self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- the end ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everybody is here, with nothing under way."""
        if self.members.lost:
            raise PeerLostError(
                self._transport.world.sign(
                    f"{self._transport.world.names(sorted(self.members.lost))} left, and workers can no longer come "
                    "to one point together, which a checkpoint needs; start again from the last one"
                )
            )
        self._transport.barrier()

    def _leaves(self, rank: int, kind: int, seen: int) -> None:
        if kind == FINISH:
            self.members.finished.add(rank)
        else:
            self.members.parted[rank] = seen
        self._server.leave(rank)
        self.desk.finished(rank)
        self._changed.notify_all()

    def finish(self) -> None:
        """Say that this worker is done, and wait for the others."""
        self._take_leave(FINISH)
        self._wait_for(lambda rank: rank in self.members.finished, "made no step")
        self._seen = len(self.members.lost)

    def part(self) -> bool:
        """Say that this worker has the final model, and wait until all have.

        False: somebody was lost meanwhile, and what this worker has pulled from it may not be what others pull from the
        new owner; it has to pull again.
        """
        if len(self.members.lost) == self._seen:
            self._take_leave(BYE)
            self._wait_for(self._has_parted, "took no leave")
        if len(self.members.lost) != self._seen:
            self._seen = len(self.members.lost)
            return False
        for rank in self.members.live:
            self._lines[rank].flush(GOODBYE_S)
        return True

    def _has_parted(self, rank: int) -> bool:
        """Whether nobody has to wait for `rank`; nor for anybody once there is somebody new to be mourned."""
        return len(self.members.lost) != self._seen or self.members.parted.get(rank) == self._seen

    def _take_leave(self, kind: int) -> None:
        with self._changed:
            self._leaves(self.members.rank, kind, self._seen)
            self.say_all(kind, (self._seen,))

    def say_all(self, kind: int, numbers: tuple[int, ...]) -> None:
        """A word to all others that live."""
        with self._changed:
            for rank in self.members.live:
                if rank != self.members.rank:
                    self._lines[rank].say(kind, numbers)

    def _wait_for(self, ready: Callable[[int], bool], what: str) -> None:
        """Wait until all who take part are ready; who is silent too long is given up."""
        began = time.monotonic()
        while True:
            self._raise_failure()
            with self._changed:
                missing = [rank for rank in self.members.live if not ready(rank)]
                if not missing:
                    return
                self._changed.wait(LOOK_EVERY_S)
            self.give_up_silent(missing, what, began)

    def close(self) -> None:
        """Close every connection; the threads end with them."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._over.set()
            self._later.close()
            self._changed.notify_all()
        for line in self._lines.values():
            line.close()
        for channel in self._incoming.values():
            channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)

    def state(self) -> dict[str, Any]:
        """Nothing: real time goes on."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing was kept."""

    # -- what lines need --------------------------------------------------------------------------

    @property
    def leases(self) -> Leases:
        """The way to the ledger of the data."""
        return self.desk

    @property
    def lines(self) -> dict[int, Line]:
        """To each worker."""
        return self._lines

    @property
    def changed(self) -> threading.Condition:
        """What guards who lives and what is asked; told when something of it changes."""
        return self._changed

    def taking(self) -> AbstractContextManager[object]:
        """Inside, nobody is given up: what was pulled and what is known of the ledger belong together."""
        return self._changed

    @property
    def closing(self) -> bool:
        """Whether the connection is being let go."""
        return self._closing

    def serve_own(self, ticket: Ticket, ask: Ask) -> None:
        """Answer this worker's own question."""
        rank = self.members.rank
        if ask.values is not None:
            settings = ticket.settings.get(ask.span, {})
            arriving = Arriving(rank, ticket.clock, ask.version, ticket.minibatches, settings, ticket.marks)
            delay = self._push(ask.piece, ask.values, arriving, ask.out, lambda: None)
        else:
            delay = 0
        reader = NOBODY if ticket.looks else rank
        version = self._server.read(ask.piece, reader, ask.out, after_push=ask.values is not None)
        self.answer(ticket.number, ask.piece, version, delay, None, rank)
        if ask.values is not None:
            self._replicate(ask.piece)


def _single(ready: threading.Barrier, body: Callable[[], None]) -> Callable[[], None]:
    """`body` in a thread whose torch keeps to one core: pieces are small, and the other cores compute."""

    def run() -> None:
        torch.set_num_threads(1)
        ready.wait()
        body()

    return run
