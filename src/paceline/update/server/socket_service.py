# SPDX-License-Identifier: Apache-2.0
"""The service between processes: sockets, and threads that serve while the worker computes.

Every worker listens, and connects to each other worker (:mod:`.rendezvous`). A connection carries its requests in
order; at the other end one thread answers them. A shard's answer leaves while the next shard arrives, so both
directions of a link are busy.

A worker that is silent too long, or whose connection ends, is declared lost (:mod:`.membership`): all workers learn
that, the next worker in rank order, which keeps the replicas of its shards, takes them over, and pending requests are
sent to it. Where two neighbours are lost, slices are lost with them, and the run ends. A worker that the other workers
declared lost learns it and stops.

A frame that no worker sends ends its sender, and not the worker that has received it (`check`). The values of a push
are taken as they are: see `guard` for those.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.communication import Transport
from paceline.communication.sockets.channel import TLS, Channel, Frame, FrameHeader
from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Leases, Mark
from paceline.errors import MismatchError, PacelineError, PeerLostError
from paceline.update.monitor import Monitor
from paceline.update.server.durability import Durability
from paceline.update.server.ledger_client import DataAccess, SocketLedgerClient
from paceline.update.server.membership import (
    GOODBYE_S,
    LOOK_EVERY_S,
    OUT_S,
    Failures,
    ServerMembership,
    ServiceContext,
    identity,
    silence,
)
from paceline.update.server.peer import Peer, Peers, SendQueue, fresh
from paceline.update.server.protocol import BACKGROUND, LEDGER, FrameKind, PendingExchange, ShardRequest, check
from paceline.update.server.rendezvous import connect_all
from paceline.update.server.shard import LEDGER_SHARD, NO_READER, GroupSettings, IncomingPush, PushResult, ShardServer


class SocketService:
    """A worker's connections to the owners of shards, and its own serving."""

    ledger_client: SocketLedgerClient

    def __init__(
        self,
        transport: Transport,  # over which workers find each other
        server: ShardServer,  # the shards that this worker owns
        owners: dict[int, int],  # shard -> rank
        data: DataAccess,  # where this worker's samples come from
        timeout_s: float,  # deadline of every wait for another worker
        tls: TLS | None,
        reports: Monitor,
    ) -> None:
        world = transport.world
        self.members = ServerMembership(world.rank, world.size, owners)
        self.context = ServiceContext(transport, server, self.members, reports, timeout_s)
        self.taking = self.context.changed  # without failovers pulled values and the ledger's news agree
        self.failures = Failures(self.context, transport.gather_json(identity()))
        incoming: dict[int, Channel] = {}
        self.peers = Peers(self.context, incoming)
        done = lambda marks: self.ledger_client.done(marks)  # noqa: E731
        self.durability = Durability(self.context, self.peers, data.bounded, data.clients, done)
        self.ledger_client = SocketLedgerClient(self.context, self.peers, self.failures, self.durability, data)
        self.leases: Leases = self.ledger_client
        # `replicate_anew` comes before `barrier`, once a checkpoint has replaced the shards
        self.secure, self.replicate_anew = self.ledger_client.secure, self.durability.replicas.renew
        self._pending: dict[int, PendingExchange] = {}  # by number
        self._clocks: dict[int, int] = {}  # shard -> the clock of this worker's last push to it
        self._timers = Timers()  # send delayed pulls
        self._barriers = 0  # made so far
        self._lost_at_pull = 0  # how many workers were lost when the final model was pulled
        self._has_final_model = False
        self.failures.on_loss = self._lost
        self.failures.on_gone = lambda rank, why: self.peers.say_all(FrameKind.OUT, (rank, 1), note=why)
        self._threads = ServiceThreads(self.context.fail)
        outgoing, accepted = connect_all(transport, timeout_s, tls)
        incoming |= accepted
        try:
            self._begin(outgoing)
        except BaseException:
            self.close()
            raise

    def _begin(self, outgoing: dict[int, Channel]) -> None:
        """Start all threads, before the first request."""
        context, peers, ended = self.context, self.peers, self.failures.connection_ended
        remote = {
            rank: Peer(context, rank, channel, partial(self._place, rank), partial(self._take, rank), ended)
            for rank, channel in outgoing.items()
        }
        peers.connect(remote, OwnPeer(self))
        bodies = {f"serve-{rank}": PeerServer(self, rank, channel).run for rank, channel in peers.incoming.items()}
        bodies |= {f"peer-{rank}": peer.run for rank, peer in peers.all.items()}
        self._threads.start_single_core(bodies, context.timeout_s)
        self._threads.start("heartbeat", partial(watch, context, peers, self.failures))
        self._threads.start("timers", self._timers.run)

    # -- losses -----------------------------------------------------------------------------------

    def _lost(self, rank: int, why: str, gone: bool, moved: list[int]) -> None:
        """Fail over after a loss; `changed` is held."""
        owners = sorted({self.members.owners[shard] for shard in moved})
        self.context.reports.lost(rank, why, owners)
        if self.members.rank in owners:
            self._take_over(rank, moved)
        self.peers.say_all(FrameKind.OUT, (rank, int(gone)), note=why)
        peer, incoming = self.peers.remote[rank], self.peers.incoming[rank]
        for channel in (peer.channel, incoming):  # tell the lost worker, over any connection that still works
            with contextlib.suppress(PacelineError, OSError):
                self.context.send(channel, FrameKind.OUT, (rank,), note=why, deadline_s=0.1)
        peer.close()
        incoming.close()
        self._request_again(set(moved))
        self.ledger_client.lost(rank, LEDGER_SHARD in moved)

    def _take_over(self, rank: int, shards: list[int]) -> None:
        """Become the owner of a lost worker's shards."""
        self.context.reports.takeover(rank, max(self.context.server.adopt(shard) for shard in shards))

    # -- requests: the training thread ------------------------------------------------------------

    def computed(self, step: int) -> float:
        """The time: that of the minibatch has passed."""
        return runtime.monotonic()

    def now(self) -> float:
        return runtime.monotonic()

    def exchange(self, pending: PendingExchange) -> None:
        """Start an exchange; first wait where too many pushes are not replicated yet."""
        if pending.clock:
            self.ledger_client.idle = False
            self.durability.keep(pending)
        self._send(pending)
        self.ledger_client.report()  # after the push, whose samples this worker no longer holds

    def exchange_later(self, pending: PendingExchange, after_s: float) -> Callable[[], None]:
        """Start the exchange in `after_s` seconds, or earlier when the returned function is called."""
        send = partial(self._send, pending)
        if after_s > 0:
            self._timers.put(after_s, send)
        else:
            send()
        return send

    def _send(self, pending: PendingExchange) -> None:
        self.context.check()
        with self.context.changed:
            if pending.requested:
                return
            pending.requested, pending.requested_at = True, runtime.monotonic()
            self._pending[pending.number] = pending
            by_owner: dict[int, list[ShardRequest]] = {}
            for request in pending.requests.values():
                if request.values is not None:
                    self._clocks[request.shard] = pending.clock
                by_owner.setdefault(self.members.owners[request.shard], []).append(request)
            for owner, requests in by_owner.items():
                self.peers[owner].request(pending, *requests)
            self.peers.remind()

    def done(self, pending: PendingExchange) -> bool:
        self.context.check()
        return pending.done

    def wait(self, pending: PendingExchange) -> None:
        """Wait for the answers; owners that are silent too long are declared lost meanwhile."""
        self.peers.wait_until(lambda: pending.done)

    def answered(self, number: int, shard: int, version: int, delay: int, news: Any, rank: int) -> None:
        """Note an answer of worker `rank`, whose values have been received.

        Ignore late answers of a lost worker: its successor got the same request, and the successor's first answer
        brings the whole ledger, which must not be missed.
        """
        with self.context.changed:
            pending = self._pending.get(number)
            if pending is None or rank in self.members.lost:
                return
            pending.answered(shard, version, delay, news)
            if pending.done:
                pending.answered_at = runtime.monotonic()
                del self._pending[number]
                self.context.changed.notify_all()

    def _request_again(self, moved: set[int]) -> None:
        """Send the new owner of a lost worker's shards what its replicas may lack, and this worker's clock.

        The replica is older than the lost owner's state. Without the clock the new owner would hold back other workers
        for this one, although it is ahead of them and waits for them.
        """
        if not moved:
            return
        successor = self.members.owners[min(moved)]
        waiting = {(pending.number, request.shard) for pending in self._pending.values() for request in pending.waiting}
        pushed = set()
        for pending, request in self.durability.kept.again(moved, waiting):
            self.peers[successor].request(pending, request)
            pushed.add(request.shard)
        for pending in list(self._pending.values()):
            for request in pending.waiting:
                if request.shard in moved and request.values is None:
                    self.peers[successor].request(pending, request)
        clocks = [[shard, self._clocks[shard]] for shard in sorted(moved - pushed) if shard in self._clocks]
        if successor == self.members.rank:
            self.context.server.tick(successor, clocks)
        elif clocks:
            self.peers[successor].say(FrameKind.CLOCKS, (), note=clocks)
        self.ledger_client.idle_again()

    # -- this worker's shards: the threads that serve --------------------------------------------------

    def push(self, shard: int, values: Tensor, incoming: IncomingPush, out: Tensor | None) -> PushResult:
        answer = self.context.server.push(shard, values, incoming, out)
        if repeated := self.context.server.shards[shard].numbered.take_repeated():
            name = self.context.world.name(self.members.rank)
            self.context.reports.inexact(
                f"{repeated} samples (batches, where the program shares whole batches) are in slices of {name} twice: "
                "after a loss they were pushed together with others"
            )
        self.context.news()
        return answer

    def held_back(self, shard: int, rank: int) -> bool:
        """Whether `rank` has to wait for slower workers; declares stalled ones lost."""
        clocks = self.context.server.shards[shard].clocks
        if not clocks.may_start(rank):
            self.failures.give_up_silent(clocks.holding_up(rank), "made no step", 0.0)
        return not clocks.may_start(rank)

    def idle(self, rank: int) -> None:
        with self.context.changed:
            self.context.server.idle(rank)
        self.context.news()

    def tick(self, rank: int, clocks: Iterable[Sequence[int]]) -> None:
        with self.context.changed:
            self.context.server.tick(rank, clocks)
        self.context.news()

    # -- all workers ------------------------------------------------------------------------------

    def barrier(self, of_all: bool = True) -> None:
        """Wait until every worker is here, with no exchange under way: if `of_all`, lost ones, too, which is a
        `PeerLostError`; else the living ones."""
        self._barriers = number = self._barriers + 1
        self._announce(FrameKind.HERE, number)
        here = lambda rank: self.members.barriers.get(rank, 0) >= number  # noqa: E731
        self._wait_for(here, "did not come to a point where all wait for all", of_all)

    def finish(self) -> None:
        """Announce that this worker has no more to push, and wait until no worker has."""
        self._announce(FrameKind.FINISH, self._lost_at_pull)
        self._wait_for(lambda rank: rank in self.members.finished, "made no step")
        self._lost_at_pull = len(self.members.lost)

    def confirm_final_model(self) -> bool:
        """Announce that this worker has the final model, and wait until all workers have.

        False: a worker was lost since the pull, and its shards may differ from those that the new owner serves; this
        worker has to pull again, unless others have left with what it has.
        """
        if len(self.members.lost) == self._lost_at_pull:
            self._announce(FrameKind.BYE, self._lost_at_pull)
            self._wait_for(self._confirmed, "took no leave")
        # once a worker has left with the model that this one has pulled, nobody serves its shards any more
        taken = any(self.members.confirmed[rank] == self._lost_at_pull for rank in self.members.left)
        if len(self.members.lost) != self._lost_at_pull and not taken:
            self._lost_at_pull = len(self.members.lost)
            return False
        self._has_final_model = True
        for rank in self.members.live:
            self.peers[rank].flush(GOODBYE_S)
        return True

    def arrived(self, rank: int, kind: int, number: int) -> None:
        """Note what worker `rank` announced."""
        with self.context.changed:
            if kind == FrameKind.HERE:
                self.members.barriers[rank] = number
            elif kind == FrameKind.FINISH:
                self.members.finished.add(rank)
            else:
                self.members.confirmed[rank] = number
            if kind != FrameKind.HERE:
                self.context.server.leave(rank)
                self.ledger_client.lost(rank)
            self.context.news()

    def _confirmed(self, rank: int) -> bool:
        """Whether no wait for `rank` is needed: it has the model, or a loss makes all workers pull again."""
        lost_another = len(self.members.lost) != self._lost_at_pull
        return lost_another or self.members.confirmed.get(rank) == self._lost_at_pull

    def _announce(self, kind: FrameKind, number: int) -> None:
        with self.context.changed:
            self.arrived(self.members.rank, kind, number)
            self.peers.say_all(kind, (number,))

    def _wait_for(self, ready: Callable[[int], bool], what: str, of_all: bool | None = None) -> None:
        """Wait until all live workers are ready; declare workers that are silent for too long lost.

        `of_all`: at a barrier, where training goes on afterwards: whether it is one of lost workers, too.
        """
        began = runtime.monotonic()
        while True:
            self.context.check()
            if of_all and self.members.lost:
                raise self.context.lost_error(
                    f"{self.context.world.names(sorted(self.members.lost))} left, and workers can no longer "
                    "come to one point together, which a checkpoint needs; start again from the last one"
                )
            with self.context.changed:
                missing = [rank for rank in self.members.live if not ready(rank)]
                if not missing:
                    return
                self.context.changed.wait(LOOK_EVERY_S)
                if of_all is not None:
                    self.peers.remind()
            self.failures.give_up_silent(missing, what, began)

    def close(self) -> None:
        """Close every connection, which ends the threads."""
        context, peers = self.context, self.peers
        with context.changed:
            if context.closed.is_set():
                return
            leaves_early = bool(peers.all) and not self._has_final_model and context.failure is None
            if leaves_early:  # so that other workers need no timeout to notice
                peers.say_all(FrameKind.OUT, (context.membership.rank, 1), "it has left before the end")
        for peer in peers.all.values() if leaves_early else ():
            peer.flush(OUT_S)
        with context.changed:
            context.closed.set()
            self._timers.close()
            context.changed.notify_all()
        peers.close()
        self._threads.join()

    def state(self) -> dict[str, Any]:
        """Nothing: real time is not saved."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    # -- what owners send back over the connections that this worker made ---------------------------

    def _place(self, rank: int, header: FrameHeader) -> Tensor:
        """Memory for a frame's body: the destination of the exchange that awaits it, if one does."""
        awaited = header.kind == FrameKind.ANSWER and rank not in self.members.lost
        pending = self._pending.get(header.numbers[3]) if awaited else None
        request = pending.request(header.numbers[0]) if pending is not None else None
        return request.out if request is not None and request.out is not None else fresh(header)

    def _take(self, rank: int, frame: Frame) -> None:
        if frame.kind == FrameKind.OUT:
            self.failures.told(frame.numbers[0], str(frame.note), bool(frame.numbers[1]))
        elif frame.kind == FrameKind.ANSWER:
            shard, version, delay, number, *safe = frame.numbers[:6]
            self.durability.safe(rank, [(shard, *safe)])
            self.answered(number, shard, version, delay, frame.note, rank)
        elif frame.kind == FrameKind.KEPT:
            self.durability.replicas.kept(*frame.numbers[:2])
        elif frame.kind == FrameKind.LEASED:
            self.ledger_client.answered(frame.numbers)


class OwnPeer(SendQueue):
    """Answers this worker's own requests, in order, in a thread."""

    def __init__(self, service: SocketService) -> None:
        super().__init__(service.context.membership.rank)
        self._service = service
        self._held: list[tuple[PendingExchange, ShardRequest, int]] = []  # pushes whose answers have to wait
        service.context.watchers.append(lambda: self._put(self._release) if self._held else None)

    def run(self) -> None:
        while not self._over:
            self._queue.get()()

    def _send(self, pending: PendingExchange, request: ShardRequest) -> None:
        if request.values is None:
            self._answer(pending, request, 0)
            return
        incoming = pending.incoming(self.rank, request)
        answer = self._service.push(request.shard, request.values, incoming, request.out)
        if answer.may_start:
            self._answer(pending, request, answer.delay)
        else:  # what this worker says next must not wait for that
            self._held.append((pending, request, answer.delay))
            self._put(self._release)  # clocks may have changed before it was held
        self._service.durability.replicas.pushed(request.shard)

    def _release(self) -> None:
        """Answer the pushes after which this worker may go on."""
        still = []
        for pending, request, delay in self._held:
            if self._service.held_back(request.shard, self.rank):
                still.append((pending, request, delay))
            else:
                self._answer(pending, request, delay)
        self._held = still  # only now: until then, news has to queue another look

    def _answer(self, pending: PendingExchange, request: ShardRequest, delay: int) -> None:
        rank, shard = self.rank, request.shard
        server, durability = self._service.context.server, self._service.durability
        reader = NO_READER if pending.peeks else rank
        version = server.read(shard, reader, request.out, after_push=request.values is not None)
        durability.safe(rank, [(shard, *durability.replicas.safe(shard, rank))])
        self._service.answered(pending.number, shard, version, delay, None, rank)

    def _write(self, kind: FrameKind, numbers: tuple[int, ...], body: Tensor | None, note: Any) -> None:
        """Handle the only frames that a worker sends itself: to its shards' clocks and to the ledger that it keeps."""
        if kind == FrameKind.IDLE:
            self._service.idle(self.rank)
        elif kind in LEDGER:
            self._service.ledger_client.handle(self.rank, None, Frame(kind, numbers, None, note))


class _Held(NamedTuple):
    """A push whose answer has to wait: its shard, its delay, its exchange, and memory for the values, if wanted."""

    shard: int
    delay: int
    pending: int
    out: Tensor | None


class PeerServer:
    """Answers worker `rank` over the connection that it made, until it leaves; `run` is the body of a thread."""

    def __init__(self, service: SocketService, rank: int, channel: Channel) -> None:
        self._service, self._context, self._rank, self._channel = service, service.context, rank, channel
        self._server, self._members = service.context.server, service.context.membership
        # Reused: the first write to new memory costs more than the network.
        self._buffers: dict[tuple[int, torch.dtype, str], Tensor] = {}
        self._settings: dict[int, GroupSettings] = {}
        self._marks: tuple[int, list[Mark]] = (0, [])  # an exchange, and the sample ranges of its pushes
        self._held: list[_Held] = []  # answers that have to wait for slower workers
        self._waker = channel.waker()
        self._said = 0.0
        service.context.watchers.append(lambda: self._waker.wake() if self._held else None)

    def run(self) -> None:
        try:
            while not self._context.closed.is_set():
                if self._held:
                    ready = self._channel.wait(self._waker)
                    self._release()
                    if not ready:
                        continue
                frame = self._receive()
                if self._rank in self._members.lost:
                    return
                if frame.kind not in BACKGROUND:
                    self._members.acted[self._rank] = runtime.monotonic()
                self._handle(frame)
        except PeerLostError as error:
            self._service.failures.connection_ended(self._rank, str(error))
        finally:
            self._held.clear()
            self._waker.close()

    def _receive(self) -> Frame:
        """The next frame; one that no worker sends ends the connection, and with it its sender."""
        try:
            frame = self._channel.receive(self._place)
            check(frame, self._context.world.size)
        except MismatchError as error:
            self._channel.close()
            raise PeerLostError(f"what {self._context.world.name(self._rank)} sent makes no sense: {error}") from error
        return frame

    def _buffer(self, anchor: Tensor, use: str) -> Tensor:
        key = (anchor.numel(), anchor.dtype, use)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros_like(anchor)
        return self._buffers[key]

    def _place(self, header: FrameHeader) -> Tensor:
        if header.kind != FrameKind.PUSH:
            return fresh(header)
        return self._buffer(self._anchor(header.numbers[0]), "in")

    def _anchor(self, shard: int) -> Tensor:
        if shard not in self._server.shards:
            raise MismatchError(
                self._context.world.sign(f"was asked for shard {shard}, which belongs to another worker")
            )
        return self._server.shards[shard].anchor

    def _handle(self, frame: Frame) -> None:
        service, numbers = self._service, frame.numbers
        if frame.kind == FrameKind.SETTINGS:
            self._settings[numbers[0]] = frame.note
        elif frame.kind == FrameKind.MARKS:
            self._marks = numbers[0], frame.note
        elif frame.kind == FrameKind.PUSH:
            self._take_push(frame)
        elif frame.kind == FrameKind.PULL:
            shard, pending, peeks = numbers[:3]
            out = self._buffer(self._anchor(shard), "out")
            version = self._server.read(shard, NO_READER if peeks else self._rank, out, after_push=False)
            self._answer(shard, version, 0, pending, out)
        elif frame.kind == FrameKind.REPLICA:
            assert frame.body is not None
            self._server.keep_replica(frame.note, frame.body)
            self._context.send(self._channel, FrameKind.KEPT, numbers[:2])
        elif frame.kind == FrameKind.SECURE:
            service.durability.replicas.want(self._rank)
        elif frame.kind == FrameKind.SAFE:
            service.durability.safe(self._rank, frame.note)
        elif frame.kind == FrameKind.CLOCKS:
            service.tick(self._rank, frame.note)
        elif frame.kind == FrameKind.OUT:
            service.failures.told(numbers[0], str(frame.note), bool(numbers[1]))
            service.ledger_client.partial.told(self._rank, numbers[0])
        elif frame.kind in LEDGER:
            service.ledger_client.handle(self._rank, self._channel, frame)
        elif frame.kind == FrameKind.IDLE:
            service.idle(self._rank)
        elif frame.kind in (FrameKind.FINISH, FrameKind.BYE, FrameKind.HERE):
            service.arrived(self._rank, frame.kind, numbers[0])

    def _take_push(self, frame: Frame) -> None:
        shard, clock, version, minibatches, pending, span, answered_with_values = frame.numbers[:7]
        assert frame.body is not None
        marks = self._marks[1] if self._marks[0] == pending else ()
        incoming = IncomingPush(self._rank, clock, version, minibatches, self._settings.get(span, {}), marks)
        out = self._buffer(frame.body, "out") if answered_with_values else None
        answer = self._service.push(shard, frame.body, incoming, out)
        if answer.may_start:
            self._answer_push(_Held(shard, answer.delay, pending, out))
        else:  # frames that come after this one must not wait for that
            self._said = runtime.monotonic() if not self._held else self._said
            kept = out.clone() if out is not None and self._server.reads_before else out
            self._held.append(_Held(shard, answer.delay, pending, kept))
            self._waker.wake()  # clocks may have changed before it was held
        self._service.durability.replicas.pushed(shard)

    def _answer_push(self, held: _Held) -> None:
        version = self._server.read(held.shard, self._rank, held.out, after_push=True)
        self._answer(held.shard, version, held.delay, held.pending, held.out)

    def _answer(self, shard: int, version: int, delay: int, pending: int, out: Tensor | None) -> None:
        safe = self._service.durability.replicas.safe(shard, self._rank)
        news = self._server.shards[shard].news.pop(self._rank, None)
        self._context.send(self._channel, FrameKind.ANSWER, (shard, version, delay, pending, *safe), out, news)

    def _release(self) -> None:
        """Answer the pushes after which the worker may go on; send it signs of life while it has to wait."""
        self._waker.clear()
        still = []
        for one in self._held:
            if self._service.held_back(one.shard, self._rank):
                still.append(one)
            else:
                self._answer_push(one)
        self._held = still  # only now: until then, news has to wake this thread
        if self._held:
            self._members.acted[self._rank] = now = runtime.monotonic()  # its program waits for this worker
            if now - self._said > LOOK_EVERY_S:
                self._context.send(self._channel, FrameKind.STILL_HERE, (self._held[0].shard,))
                self._said = now


def watch(context: ServiceContext, peers: Peers, failures: Failures) -> None:
    """Send heartbeats and look for missing ones until the service closes, whatever the training thread does."""
    silence_s, stall_detector, members = silence(context.timeout_s), context.stall_detector, context.membership
    while not context.closed.wait(min(LOOK_EVERY_S, silence_s / 4)):
        now = stall_detector.beat()
        context.news()
        for peer in peers.live:
            if now - peer.spoke_at > silence_s / 4:
                peer.beat()
            rank, since = peer.rank, peer.waiting_since
            heard = max(members.heard[rank], peer.channel.heard_at, peers.incoming[rank].heard_at)
            if stall_detector.silent(heard) and rank not in members.confirmed:
                failures.declare_lost(rank, f"gave no sign of life for {silence_s:g} s")
            elif since is not None and stall_detector.overdue(since):
                failures.declare_lost(rank, f"did not answer within {context.timeout_s:g} s", gone=True)


class Timers:
    """Runs actions at their time; `run` is the body of a thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._changed = runtime.Condition()
        self._number, self._over = 0, False

    def put(self, after_s: float, action: Callable[[], None]) -> None:
        with self._changed:
            self._number += 1
            heapq.heappush(self._due, (runtime.monotonic() + after_s, self._number, action))
            self._changed.notify()

    def run(self) -> None:
        while (action := self._next()) is not None:
            action()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._over:
                left = self._due[0][0] - runtime.monotonic() if self._due else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(left)
        return None

    def close(self) -> None:
        """Drop all pending actions."""
        with self._changed:
            self._over = True
            self._changed.notify()


JOIN_S = 2.0
"""How long a thread may take to end when its connection is closed."""


class ServiceThreads:
    """Daemon threads whose errors are reported."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed  # called with a thread's error, for which the training thread might wait otherwise
        self._threads: list[threading.Thread] = []

    def start(self, name: str, body: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                body()
            except BaseException as error:
                self._failed(error)

        thread = runtime.thread(guarded, f"paceline-{name}")
        self._threads.append(thread)
        thread.start()

    def start_single_core(self, bodies: Mapping[str, Callable[[], None]], timeout_s: float) -> None:
        """Start threads in which torch uses one core each; returns when all of them run."""
        threads = torch.get_num_threads()
        waiting, changed = set(bodies), runtime.Condition()

        def single(name: str, body: Callable[[], None]) -> None:
            torch.set_num_threads(1)  # shards are small, and the other cores compute
            with changed:
                waiting.discard(name)
                changed.notify_all()
            body()

        for name, body in bodies.items():
            self.start(name, partial(single, name, body))
        with changed:
            if not changed.wait_for(lambda: not waiting, timeout_s):
                raise PacelineError(f"threads of this process did not start within {timeout_s:g} s: {sorted(waiting)}")
        torch.set_num_threads(threads)  # torch sets it for the program, too

    def join(self) -> None:
        for thread in self._threads:
            if thread is not runtime.current_thread():
                thread.join(JOIN_S)
