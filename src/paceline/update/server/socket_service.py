# SPDX-License-Identifier: Apache-2.0
"""The service between processes: sockets, and threads that serve while the worker computes.

Every worker listens, and connects to each other worker (:mod:`.rendezvous`). A connection carries its requests in
order; at the other end one thread answers them. A shard's answer leaves while the next shard arrives, so both
directions of a link are busy.

A worker that is silent too long, or whose connection ends, is declared lost (:mod:`.failures`): all workers learn that,
the next worker in rank order, which keeps the replicas of its shards, takes them over, and pending requests are sent to
it. Where two neighbours are lost, slices are lost with them, and the run ends. A worker that the other workers declared
lost learns it and stops.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from paceline.communication import Transport
from paceline.communication.sockets.channel import TLS, Channel
from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.ledger.leases import Leases
from paceline.errors import PacelineError
from paceline.update.monitor import Monitor
from paceline.update.server.barriers import Barriers
from paceline.update.server.context import ServiceContext
from paceline.update.server.durability import Durability
from paceline.update.server.exchanges import Exchanges
from paceline.update.server.failures import OUT_S, Failures, Heartbeat, identity
from paceline.update.server.frames import FrameKind
from paceline.update.server.ledger_client import DataAccess, SocketLedgerClient
from paceline.update.server.membership import ServerMembership
from paceline.update.server.owner import ShardServer
from paceline.update.server.peer_server import AnswerHandler, OwnPeer, PeerServer, ServiceParts
from paceline.update.server.peers import Peer, Peers, Receiver
from paceline.update.server.protocol import PendingExchange
from paceline.update.server.rendezvous import connect_all
from paceline.update.server.service_threads import ServiceThreads
from paceline.update.server.shard import LEDGER_SHARD
from paceline.update.server.shard_service import ShardService
from paceline.update.server.timers import Once


class SocketService:
    """A worker's connections to the owners of shards, and its own serving.

    Args:
        transport: the connection over which workers find each other.
        server: the shards that this worker owns.
        owners: shard -> rank.
        data: where this worker's samples come from.
        timeout_s: deadline of every wait for another worker, seconds.
        tls: certificates, where the network is not trusted.
        reports: takes reports about lost workers, from any thread.

    Attributes:
        leases: this worker's access to the ledger of the data.
    """

    def __init__(
        self,
        transport: Transport,
        server: ShardServer,
        owners: dict[int, int],
        data: DataAccess,
        timeout_s: float,
        tls: TLS | None,
        reports: Monitor,
    ) -> None:
        world = transport.world
        membership = ServerMembership(world.rank, world.size, owners)
        self._context = ServiceContext(transport, server, membership, reports, timeout_s)
        failures = Failures(self._context, transport.gather_json(identity()))
        incoming: dict[int, Channel] = {}
        peers = Peers(self._context, incoming)
        durability = Durability(self._context, peers, data.bounded, data.clients, self._done)
        self._ledger_client = SocketLedgerClient(self._context, peers, failures, durability, data)
        self.leases: Leases = self._ledger_client
        exchanges = Exchanges(self._context, peers, durability, self._ledger_client)
        shards = ShardService(self._context, failures)
        barriers = Barriers(self._context, peers, failures, self._ledger_client)
        self._parts = ServiceParts(
            self._context, peers, failures, durability, self._ledger_client, exchanges, shards, barriers
        )
        failures.on_loss = self._lost
        failures.on_gone = lambda rank, why: peers.say_all(FrameKind.OUT, (rank, 1), note=why)
        self._threads = ServiceThreads(self._context.fail)
        outgoing, accepted = connect_all(transport, timeout_s, tls)
        incoming |= accepted
        try:
            self._begin(outgoing)
        except BaseException:
            self.close()
            raise

    def _begin(self, outgoing: dict[int, Channel]) -> None:
        """Start all threads, before the first request."""
        parts, peers = self._parts, self._parts.peers
        answers = AnswerHandler(parts)
        receiver = Receiver(answers.place, answers.take, parts.failures.connection_ended)
        remote = {rank: Peer(self._context, receiver, rank, channel) for rank, channel in outgoing.items()}
        peers.connect(remote, OwnPeer(parts))
        bodies = {f"serve-{rank}": PeerServer(parts, rank, channel).run for rank, channel in peers.incoming.items()}
        bodies |= {f"peer-{rank}": peer.run for rank, peer in peers.all.items()}
        self._threads.start_single_core(bodies, self._context.timeout_s)
        self._threads.start("heartbeat", Heartbeat(self._context, peers, parts.failures).run)
        self._threads.start("timers", parts.exchanges.timers.run)

    def _done(self, marks: list[Mark]) -> None:
        """Report samples that every shard holds for good."""
        self._ledger_client.done(marks)

    # -- losses -----------------------------------------------------------------------------------

    def _lost(self, rank: int, why: str, gone: bool, moved: list[int]) -> None:
        """Fail over after a loss; `changed` is held."""
        parts, members = self._parts, self._context.membership
        owners = sorted({members.owners[shard] for shard in moved})
        self._context.reports.lost(rank, why, owners)
        if members.rank in owners:
            self._take_over(rank, moved)
        parts.peers.say_all(FrameKind.OUT, (rank, int(gone)), note=why)
        self._dismiss(rank, why)
        parts.exchanges.request_again(set(moved))
        parts.ledger_client.lost(rank, LEDGER_SHARD in moved)

    def _take_over(self, rank: int, shards: list[int]) -> None:
        """Become the owner of a lost worker's shards."""
        self._context.reports.takeover(rank, max(self._context.server.adopt(shard) for shard in shards))

    def _dismiss(self, rank: int, why: str) -> None:
        """Tell a lost worker so, over any connection that still works, and close both."""
        peer, incoming = self._parts.peers.remote[rank], self._parts.peers.incoming[rank]
        for channel in (peer.channel, incoming):
            with contextlib.suppress(PacelineError, OSError):
                self._context.send(channel, FrameKind.OUT, (rank,), note=why, deadline_s=0.1)
        peer.close()
        incoming.close()

    # -- requests ---------------------------------------------------------------------------------

    def computed(self, step: int) -> None:
        """Nothing: real time has passed."""

    def now(self) -> float:
        """Real time."""
        return runtime.monotonic()

    def exchange(self, pending: PendingExchange) -> None:
        """Start the exchange; only the training thread calls this."""
        self._parts.exchanges.start(pending)

    def exchange_later(self, pending: PendingExchange, after_s: float) -> Once:
        """Start the exchange in `after_s` seconds, or earlier when the returned function is called."""
        return self._parts.exchanges.start_later(pending, after_s)

    def done(self, pending: PendingExchange) -> bool:
        """Whether it is answered."""
        self._context.check()
        return pending.done

    def wait(self, pending: PendingExchange) -> None:
        """Wait for the answers; owners that are silent too long are declared lost meanwhile."""
        self._parts.peers.wait_until(lambda: pending.done)

    def taking(self) -> AbstractContextManager[object]:
        """Context without failovers, so that the pulled values and the ledger's news stay consistent."""
        return self._context.changed

    # -- all workers ------------------------------------------------------------------------------

    def secure(self, idle: bool = True) -> None:
        """Wait until no push of this worker can be lost with one owner."""
        self._ledger_client.secure(idle)

    def replicate_anew(self) -> None:
        """Replicate this worker's shards, which were replaced."""
        self._parts.durability.renew()

    def barrier(self, of_all: bool = True) -> None:
        """Wait until every worker is here, or every living one, with no exchange under way."""
        self._parts.barriers.barrier(of_all)

    def finish(self) -> None:
        """Announce that this worker has no more to push, and wait until no worker has."""
        self._parts.barriers.finish()

    def confirm_final_model(self) -> bool:
        """Wait until all workers have the final model; False where this worker has to pull it again."""
        return self._parts.barriers.confirm_final_model()

    def close(self) -> None:
        """Close every connection, which ends the threads."""
        context, peers = self._context, self._parts.peers
        with context.changed:
            if context.closed.is_set():
                return
            leaves_early = bool(peers.all) and not self._parts.barriers.all_have_final_model and context.failure is None
            if leaves_early:  # so that other workers need no timeout to notice
                peers.say_all(FrameKind.OUT, (context.membership.rank, 1), "it has left before the end")
        for peer in peers.all.values() if leaves_early else ():
            peer.flush(OUT_S)
        with context.changed:
            context.closed.set()
            self._parts.exchanges.timers.close()
            context.changed.notify_all()
        peers.close()
        self._threads.join()

    def state(self) -> dict[str, Any]:
        """Nothing: real time is not saved."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
