# SPDX-License-Identifier: Apache-2.0
"""The server between processes: sockets, and threads that serve while the worker computes.

Every worker listens, and connects to each other worker. Over a connection go its requests, in order; at the other end
one thread answers them. A shard's answer leaves while the next shard comes, so both directions of a link are busy.

A worker that is silent too long, or whose connection ends, is lost (:mod:`.failures`): all are told, the next worker
in rank order takes its shards over, and pending requests are sent there again (:mod:`.failover`). A worker that the
others have given up learns it and stops. Nothing that arrives is executed; :mod:`.rendezvous` says how workers find
each other.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from paceline.communication import Transport
from paceline.communication.sockets.channel import TLS, Channel
from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.ledger.leases import Leases
from paceline.update.server.answer_handler import AnswerHandler
from paceline.update.server.barriers import Barriers
from paceline.update.server.context import Reports, ServiceContext
from paceline.update.server.durability import Durability
from paceline.update.server.exchanges import Exchanges
from paceline.update.server.failover import Failover
from paceline.update.server.failures import OUT_S, Failures
from paceline.update.server.frames import FrameKind
from paceline.update.server.heartbeat import Heartbeat
from paceline.update.server.ledger_client import DataAccess, SocketLedgerClient
from paceline.update.server.membership import ServerMembership
from paceline.update.server.own_peer import OwnPeer
from paceline.update.server.owner import ShardServer
from paceline.update.server.parts import ServiceParts
from paceline.update.server.peer import Peer
from paceline.update.server.peer_server import PeerServer
from paceline.update.server.peers import Peers
from paceline.update.server.protocol import PendingExchange
from paceline.update.server.quorum import identity
from paceline.update.server.rendezvous import meet
from paceline.update.server.service_threads import ServiceThreads
from paceline.update.server.shard_service import ShardService
from paceline.update.server.timers import Once


class SocketService:
    """A worker's connection to the owners of shards, and its own serving.

    Args:
        transport: the connection over which workers found each other; used to begin and to end, not between.
        server: what this worker owns.
        owners: shard -> rank.
        data: where this worker's places of the data come from and go.
        timeout_s: deadline of every wait for another worker, seconds.
        tls: certificates, where the network is not trusted.
        reports: hears what becomes of workers; from any thread.

    Attributes:
        membership: who takes part.
        durability: of pushes.
        leases: the way to the ledger of the data.
    """

    def __init__(
        self,
        transport: Transport,
        server: ShardServer,
        owners: dict[int, int],
        data: DataAccess,
        timeout_s: float,
        tls: TLS | None,
        reports: Reports,
    ) -> None:
        world = transport.world
        self.membership = ServerMembership(world.rank, world.size, owners)
        self._context = ServiceContext(transport, server, self.membership, reports, timeout_s)
        failures = Failures(self._context, transport.gather_json(identity()))
        incoming: dict[int, Channel] = {}
        peers = Peers(self._context, incoming)
        self.durability = Durability(self._context, peers, data.bounded, self._samples_done)
        self._ledger_client = SocketLedgerClient(self._context, peers, failures, self.durability, data)
        self.leases: Leases = self._ledger_client
        exchanges = Exchanges(self._context, peers, self.durability, self._ledger_client)
        shards = ShardService(self._context, failures)
        barriers = Barriers(self._context, peers, failures, self._ledger_client)
        self._parts = ServiceParts(
            self._context, peers, failures, self.durability, self._ledger_client, exchanges, shards, barriers
        )
        failures.on_loss = Failover(self._parts).lost
        self._threads = ServiceThreads(self._context.fail)
        outgoing, met = meet(transport, timeout_s, tls)
        incoming |= met
        try:
            self._begin(outgoing)
        except BaseException:
            self.close()
            raise

    def _samples_done(self, marks: list[Mark]) -> None:
        self._ledger_client.done(marks)

    def _begin(self, outgoing: dict[int, Channel]) -> None:
        """Start the threads; they are all there before the first request."""
        parts, peers = self._parts, self._parts.peers
        answers = AnswerHandler(parts)
        remote = {rank: Peer(self._context, answers, rank, channel) for rank, channel in outgoing.items()}
        peers.connect(remote, OwnPeer(parts))
        bodies = {f"serve-{rank}": PeerServer(parts, rank, channel).run for rank, channel in peers.incoming.items()}
        bodies |= {f"peer-{rank}": peer.run for rank, peer in peers.all.items()}
        self._threads.start_single_core(bodies, self._context.timeout_s)
        self._threads.start("heartbeat", Heartbeat(self._context, peers, parts.failures).run)
        self._threads.start("timers", parts.exchanges.timers.run)

    # -- requests ---------------------------------------------------------------------------------

    def computed(self, step: int) -> None:
        """Real time has passed by itself."""

    def now(self) -> float:
        """Real time."""
        return time.monotonic()

    def exchange(self, pending: PendingExchange) -> None:
        """Send it on its way; called by the training thread alone."""
        self._parts.exchanges.start(pending)

    def exchange_later(self, pending: PendingExchange, after_s: float) -> Once:
        """Send it in so many seconds, or when what is returned is called before."""
        return self._parts.exchanges.start_later(pending, after_s)

    def done(self, pending: PendingExchange) -> bool:
        """Whether it is answered."""
        return self._parts.exchanges.done(pending)

    def wait(self, pending: PendingExchange) -> None:
        """Wait for the answers; owners that are silent too long are given up meanwhile."""
        self._parts.peers.wait_until(lambda: pending.done)

    def taking(self) -> AbstractContextManager[object]:
        """Inside, nobody is given up: what was pulled and what is known of the ledger belong together."""
        return self._context.changed

    # -- all workers ------------------------------------------------------------------------------

    def secure(self, rests: bool = True) -> None:
        """Wait until no push of this worker can be lost with one owner."""
        self._ledger_client.secure(rests)

    def begin_anew(self) -> None:
        """This worker's shards were put in the place of others: their replicas are of no use any more."""
        self.durability.renew(list(self._context.server.shards))

    def settle(self) -> None:
        """Wait until every worker is here, with nothing under way."""
        self._parts.barriers.settle()

    def finish(self) -> None:
        """Say that this worker is done, and wait for the others."""
        self._parts.barriers.finish()

    def part(self) -> bool:
        """Say that this worker has the final model, and wait until all have; False where it has to be pulled again."""
        return self._parts.barriers.part()

    def close(self) -> None:
        """Close every connection; the threads end with them."""
        context, peers = self._context, self._parts.peers
        with context.changed:
            if context.closing:
                return
            leaves_early = bool(peers.all) and not self._parts.barriers.parted and context.status.failure is None
            if leaves_early:  # others need not guess whether it goes on
                peers.say_all(FrameKind.OUT, (context.rank, 1), "it has left before the end")
        for peer in peers.all.values() if leaves_early else ():
            peer.flush(OUT_S)
        with context.changed:
            context.status.closing = True
            context.status.closed.set()
            self._parts.exchanges.timers.close()
            context.changed.notify_all()
        peers.close()
        self._threads.join()

    def state(self) -> dict[str, Any]:
        """Nothing: real time goes on."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing was kept."""
