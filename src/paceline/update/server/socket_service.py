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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.communication import Transport
from paceline.communication.sockets.channel import TLS, Channel
from paceline.data.ledger.assignment import Leases
from paceline.errors import PacelineError, PeerLostError
from paceline.update.server.durability import Safekeeping
from paceline.update.server.ledger_client import DataWays, Desk
from paceline.update.server.membership import LOOK_EVERY_S, Members, Pulse, silence
from paceline.update.server.owner import PULLED, Answer, Server
from paceline.update.server.peer import (
    BYE,
    CLOCKS,
    FINISH,
    HERE,
    OUT,
    STILL_HERE,
    Line,
    OwnLine,
)
from paceline.update.server.protocol import Ask, Ticket
from paceline.update.server.quorum import Quorum, identity, is_gone
from paceline.update.server.rendezvous import meet
from paceline.update.server.serving import Serving
from paceline.update.server.shard import KEEPING, NOBODY
from paceline.update.server.shard_updates import Arriving
from paceline.update.server.timers import Later, Once

OUT_S = 0.25
"""How long the word that this worker was given up may be on its way beside a connection that has ended."""
GOODBYE_S = 2.0
"""How long a goodbye may be on its way when the connection beside it has ended already."""


class Reports(Protocol):
    """Who is told what has become of workers."""

    def lost(self, rank: int, why: str, taken_over: Sequence[int]) -> None:
        """A worker is lost; who owns its slices from now on."""

    def takeover(self, slice_of: int, version: int, source: str) -> None:
        """This worker owns slices of a lost one, and what it made them of."""

    def inexact(self, what: str) -> None:
        """Some samples may not be in the model exactly once; which, as people read it."""


class ThreadedService:
    """A worker's connection to the owners, and its own serving.

    Args:
        transport: the connection over which workers found each other; used to begin and to end, not between.
        server: what this worker owns.
        owners: piece -> rank.
        data: where this worker's places of the data come from and go.
        timeout_s: deadline of every wait for another worker, seconds.
        tls: certificates, where the network is not trusted.
        reports: hears what becomes of workers; from any thread.
    """

    def __init__(
        self,
        transport: Transport,
        server: Server,
        owners: dict[int, int],
        data: DataWays,
        timeout_s: float,
        tls: TLS | None,
        reports: Reports,
    ) -> None:
        self._transport, self.server, self._timeout_s = transport, server, timeout_s
        self._reports = reports
        world = transport.world
        self.members = Members(world.rank, world.size, owners)
        self._quorum = Quorum(world.size, timeout_s)
        self._identities = transport.gather_json(identity())
        self.safekeeping = Safekeeping(self, owners, timeout_s)
        self._changed = threading.Condition(threading.RLock())
        self._tickets: dict[int, Ticket] = {}
        self._seen = 0  # how many were lost when the final model was pulled
        self._settled = 0  # how often all have waited for all
        self._parted = False
        self._clocks: dict[int, int] = {}  # piece -> to which this worker has come with its last push of it
        self._failure: BaseException | None = None
        self._closing = False
        self._over = threading.Event()  # of `_closing`, for the thread that looks out
        self._pulse = Pulse(timeout_s)
        self._later = Later()
        self._threads: list[threading.Thread] = []
        self._lines: dict[int, Line] = {}
        self.desk = Desk(self, data)
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
            bodies[f"serve-{rank}"] = Serving(self, rank, channel).run
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

    def rests(self, rank: int) -> None:
        """Worker `rank` has nothing to do for now."""
        with self._changed:
            self.server.rest(rank)
            self._changed.notify_all()

    def ticked(self, rank: int, clocks: Iterable[Sequence[int]]) -> None:
        """Worker `rank` says how far it is, of pieces whose owner was lost."""
        with self._changed:
            self.server.tick(rank, clocks)
            self._changed.notify_all()

    def push(self, piece: int, values: Tensor, arriving: Arriving, out: Tensor | None) -> Answer:
        """Apply a push to a piece of this worker."""
        answer = self.server.push(piece, values, arriving, out)
        repeated = self.server.repeated(piece)
        if repeated:
            self._reports.inexact(
                f"{repeated} samples are in slices of {self._transport.world.name(self.members.rank)} twice: after a "
                "loss they were pushed together with others"
            )
        with self._changed:
            self._changed.notify_all()
        return answer

    def held_back(self, piece: int, rank: int) -> bool:
        """Wait a little for the slowest; whether `rank` has to wait on. Whose program makes no step is given up."""
        with self._changed:
            if self._closing or rank in self.members.lost or self.server.may_start(piece, rank):
                return False
            self._changed.wait(LOOK_EVERY_S)
            slow = self.server.pieces[piece].clocks.holding_up(rank)
        self.give_up_silent(slow, "made no step", 0.0)
        return True

    def give_up_silent(self, ranks: list[int], what: str, since: float) -> None:
        """Give up whose program has done nothing since the deadline; the wait for it began at `since`."""
        for rank in ranks:
            if rank != self.members.rank and self._pulse.overdue(max(since, self.members.acted[rank])):
                self.lost(rank, f"{what} for {self._timeout_s:g} s", gone=True)  # it lives, and hears that it is out

    def _look_out(self) -> None:
        """Say that this process lives, and give up who does not say so, whatever the training thread does meanwhile."""
        quiet_s = silence(self._timeout_s)
        while not self._over.wait(min(LOOK_EVERY_S, quiet_s / 4)):
            now = self._pulse.beat()
            for rank in self.members.live:
                if rank == self.members.rank:
                    continue
                line = self._lines[rank]
                if now - line.spoke_at > quiet_s / 4:
                    line.beat()
                heard = max(self.members.heard[rank], line.channel.heard_at, self._incoming[rank].heard_at)
                since = line.waiting_since
                if self._pulse.silent(heard) and rank not in self.members.parted:
                    self.lost(rank, f"gave no sign of life for {quiet_s:g} s")
                elif since is not None and self._pulse.overdue(since):
                    self.lost(rank, f"did not answer within {self._timeout_s:g} s", gone=True)

    def names(self, ranks: list[int]) -> str:
        """Workers as people read them."""
        return self._transport.world.names(ranks)

    def sign(self, message: str) -> str:
        """A message with this worker's rank and host."""
        return self._transport.world.sign(message)

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
        if ticket.clock:
            self.desk.resting = False
            self.safekeeping.keep(ticket)
        self._ask(ticket)
        self.desk.report()  # behind the push, whose places this worker no longer holds

    def _ask(self, ticket: Ticket) -> None:
        self.check()
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
        self.check()
        return ticket.done

    def wait(self, ticket: Ticket) -> None:
        """Wait for the answers; owners that are silent too long are given up meanwhile."""
        self.wait_until(lambda: ticket.done)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for what another thread does; raises what has broken the cluster."""
        while not ready():
            self.check()
            with self._changed:
                if not ready():
                    self._changed.wait(LOOK_EVERY_S)
                self._remind()

    def pause(self, seconds: float) -> None:
        """Wait a little for news of others."""
        self.check()
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
        if stood_s and self._quorum.without(members.rank):
            self._given_up(f"this process stood still for {stood_s:.0f} s")
        if rank in members.lost or self._closing:
            return
        self.lost(rank, why, is_gone(self._identities[rank]))

    def lost(self, rank: int, why: str, gone: bool = False) -> None:
        """Go on without a worker: its pieces and what was asked of it go to its successor.

        Args:
            rank: of the worker.
            why: as people read it.
            gone: whether it is known not to go on by itself; else it may do so, on the other side of a cut.
        """
        members = self.members
        with self._changed:
            if self._closing or self._failure or rank in members.lost or rank == members.rank:
                return  # who has failed decides nothing about others
            if gone:
                self._quorum.gone(rank)
            elif not self._quorum.missed(rank, time.monotonic()):
                self._cut_from_most(rank, why)
                return
            was_heir = rank == members.heir
            members.lost[rank] = why
            self.server.leave(rank)
            moved = members.moved(rank)
            heir = members.successor(rank)
            self._reports.lost(rank, why, [heir] if moved else [])
            if heir == members.rank:
                self._take_over(rank, moved)
            for other in members.live:
                if other != members.rank:
                    self._lines[other].say(OUT, (rank, int(gone)), note=why)
            self._dismiss(rank, why)
            if was_heir:  # the replicas are gone with it
                self.safekeeping.renew(set(self.server.pieces) - set(moved if heir == members.rank else ()))
            self._ask_again(heir, set(moved))
            self.desk.lost(rank, KEEPING in moved)
            self._changed.notify_all()

    def _ask_again(self, heir: int, moved: set[int]) -> None:
        """Send the new owner what the lost one may not have left it, and tell it how far this worker is.

        The lost one knew that, and its replica is older: without it the new owner would hold the others back for a
        worker that is ahead of them, and waits for them.
        """
        waiting = {(t.number, ask.piece) for t in self._tickets.values() for ask in t.waiting}
        pushed = set()
        for ticket, ask in self.safekeeping.again(moved, waiting):
            self._lines[heir].ask(ticket, ask)
            pushed.add(ask.piece)
        for ticket in list(self._tickets.values()):
            for ask in ticket.waiting:
                if ask.piece in moved and ask.values is None:
                    self._lines[heir].ask(ticket, ask)
        clocks = [[piece, self._clocks[piece]] for piece in sorted(moved - pushed) if piece in self._clocks]
        if heir == self.members.rank:
            self.server.tick(heir, clocks)
        elif clocks:
            self._lines[heir].say(CLOCKS, (), note=clocks)
        self.desk.rest_again()

    def _dismiss(self, rank: int, why: str) -> None:
        """Tell a lost worker so, over whichever connection takes it, and hear no more of it."""
        for channel in (self._lines[rank].channel, self._incoming[rank]):
            with contextlib.suppress(PacelineError, OSError):
                self.send(channel, OUT, (rank,), note=why, deadline_s=0.1)
        self._lines[rank].close()
        self._incoming[rank].close()

    def _take_over(self, rank: int, pieces: list[int]) -> None:
        made = [self.server.adopt(piece) for piece in pieces]
        self.safekeeping.renew(pieces)
        for source in sorted({source for _, source in made}):
            self._reports.takeover(rank, max(version for version, what in made if what == source), source)
        world = self._transport.world
        if PULLED in {source for _, source in made}:
            self._reports.inexact(
                f"slices of {world.name(rank)} went with the worker that kept their replica: they go on from what "
                f"{world.name(world.rank)} pulled last, so that some of the newest updates of all workers are lost "
                "there, and others may be in them twice"
            )

    def told(self, rank: int, why: str, gone: bool = False) -> None:
        """Another worker has given somebody up, or says that it leaves."""
        if rank == self.members.rank:
            self._given_up(why)
        else:
            self.lost(rank, why, gone)

    def _cut_from_most(self, rank: int, why: str) -> None:
        """This side of a cut is not the one that goes on."""
        name = self._transport.world.name(rank)
        self._fail(
            PeerLostError(
                self.sign(
                    f"this worker is cut off from most of the {self._quorum.counted} workers ({name}: {why}), which "
                    "may go on without it, so it stops; of two halves the one with the lowest rank goes on"
                )
            )
        )

    def _given_up(self, why: str) -> None:
        self._fail(
            PeerLostError(
                self.sign(
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

    def check(self) -> None:
        """Raise what has broken the cluster."""
        if self._failure is not None:
            raise self._failure

    # -- the end ----------------------------------------------------------------------------------

    def secure(self, rests: bool = True) -> None:
        """Wait until no push of this worker can be lost with one owner."""
        if rests:
            self.desk.rest()
        self.safekeeping.secure()

    def begin_anew(self) -> None:
        """This worker's pieces were put in the place of others: those at its heir are of no use any more."""
        self.safekeeping.renew(list(self.server.pieces))

    def settle(self) -> None:
        """Everybody is here, with nothing under way."""
        self._settled += 1
        self._say_for_all(HERE, self._settled)
        began = time.monotonic()
        while True:
            self.check()
            if self.members.lost:
                raise PeerLostError(
                    self.sign(
                        f"{self.names(sorted(self.members.lost))} left, and workers can no longer "
                        "come to one point together, which a checkpoint needs; start again from the last one"
                    )
                )
            with self._changed:
                missing = [rank for rank in self.members.live if self.members.here.get(rank, 0) < self._settled]
                if not missing:
                    return
                self._changed.wait(LOOK_EVERY_S)
                self._remind()
            self.give_up_silent(missing, "did not come to a point where all wait for all", began)

    def says(self, rank: int, kind: int, seen: int) -> None:
        """Worker `rank` has no more to push, has the final model, or waits for all."""
        with self._changed:
            if kind == HERE:
                self.members.here[rank] = seen
            elif kind == FINISH:
                self.members.finished.add(rank)
            else:
                self.members.parted[rank] = seen
            if kind != HERE:
                self.server.leave(rank)
                self.desk.finished(rank)
            self._changed.notify_all()

    def finish(self) -> None:
        """Say that this worker is done, and wait for the others."""
        self._say_for_all(FINISH, self._seen)
        self._wait_for(lambda rank: rank in self.members.finished, "made no step")
        self._seen = len(self.members.lost)

    def part(self) -> bool:
        """Say that this worker has the final model, and wait until all have.

        False: somebody was lost meanwhile, and what this worker has pulled from it may not be what others pull from the
        new owner; it has to pull again.
        """
        if len(self.members.lost) == self._seen:
            self._say_for_all(BYE, self._seen)
            self._wait_for(self._has_parted, "took no leave")
        if len(self.members.lost) != self._seen:
            self._seen = len(self.members.lost)
            return False
        self._parted = True
        for rank in self.members.live:
            self._lines[rank].flush(GOODBYE_S)
        return True

    def _has_parted(self, rank: int) -> bool:
        """Whether nobody has to wait for `rank`; nor for anybody once there is somebody new to be mourned."""
        return len(self.members.lost) != self._seen or self.members.parted.get(rank) == self._seen

    def _say_for_all(self, kind: int, number: int) -> None:
        with self._changed:
            self.says(self.members.rank, kind, number)
            self.say_all(kind, (number,))

    def say_all(self, kind: int, numbers: tuple[int, ...], note: Any = None) -> None:
        """A word to all others that live."""
        with self._changed:
            for rank in self.members.live:
                if rank != self.members.rank:
                    self._lines[rank].say(kind, numbers, note=note)

    def _wait_for(self, ready: Callable[[int], bool], what: str) -> None:
        """Wait until all who take part are ready; who is silent too long is given up."""
        began = time.monotonic()
        while True:
            self.check()
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
            leaves_early = bool(self._lines) and not self._parted and self._failure is None
            if leaves_early:  # others need not guess whether it goes on
                self.say_all(OUT, (self.members.rank, 1), "it has left before the end")
        for line in self._lines.values() if leaves_early else ():
            line.flush(OUT_S)
        with self._changed:
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
        rank, delay = self.members.rank, 0
        if ask.values is not None:
            settings = ticket.settings.get(ask.span, {})
            arriving = Arriving(rank, ticket.clock, ask.version, ticket.minibatches, settings, ticket.marks)
            answer = self.push(ask.piece, ask.values, arriving, ask.out)
            delay = answer.delay
            while not answer.may_start and self.held_back(ask.piece, rank):
                pass
        reader = NOBODY if ticket.looks else rank
        version = self.server.read(ask.piece, reader, ask.out, after_push=ask.values is not None)
        self.safekeeping.safe(rank, [(ask.piece, self.safekeeping.up_to(ask.piece, rank))])
        self.answer(ticket.number, ask.piece, version, delay, None, rank)
        if ask.values is not None:
            self.safekeeping.applied(ask.piece)


def _single(ready: threading.Barrier, body: Callable[[], None]) -> Callable[[], None]:
    """`body` in a thread whose torch keeps to one core: pieces are small, and the other cores compute."""

    def run() -> None:
        torch.set_num_threads(1)
        ready.wait()
        body()

    return run
