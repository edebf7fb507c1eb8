# SPDX-License-Identifier: Apache-2.0
"""The service between virtual workers: the same shards; requests and answers are events on a simulated clock.

One ledger leases their samples without delay; waits take simulated time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from paceline.communication import Transport
from paceline.communication.virtual.transport import Cluster
from paceline.data.ledger.epoch_ledger import Leases, Mark, Question
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Ranges
from paceline.errors import PeerLostError
from paceline.rules.traffic import FRAME_BYTES
from paceline.update.server.protocol import PendingExchange, ShardRequest
from paceline.update.server.shard import LEDGER_SHARD, NO_READER, ShardServer


class SimulatedLedgerClient(Leases):
    """A virtual worker's access to the ledger, which all workers of the run share; none of them is ever lost.

    Where it `keeps` the ledger, that goes into this worker's checkpoint.
    """

    def __init__(self, service: SimulatedService, ledger: Ledger, keeps: bool) -> None:
        self._service, self._rank, self._ledger, self._keeps = service, service.rank, ledger, keeps

    def ask(self, question: Question) -> Mark | None:
        answers: list[Mark | None] = []
        self._service.soon(lambda: answers.append(self._ask(question)))  # independent of which worker ran last
        self._service.wait_for("work that is left", lambda: bool(answers))
        mark = answers[0]
        if mark is not None or not question.dry or self._over(question):
            return mark
        self._service.idle()

        def answered() -> bool:
            nonlocal mark
            mark = mark or self._ask(question)
            return mark is not None or self._over(question)

        self._service.wait_for("work that is left", answered)
        return mark

    def _ask(self, question: Question) -> Mark | None:
        return self._ledger.ask(self._rank, question, self._service.now())

    def _over(self, question: Question) -> bool:
        return self._ledger.over(question.loader, question.epoch)

    def leave_early(self, loader: int, epoch: int, marks: list[Mark]) -> None:
        self._ledger.leave_early(self._rank, loader, epoch, marks)

    def ends(self, loader: int, epoch: int, total: int) -> None:
        self._ledger.ends(loader, epoch, total)

    def done(self, marks: list[Mark]) -> None:
        self._ledger.done(self._rank, marks)

    def waits(self, now: bool) -> None:
        self._ledger.waits(self._rank, now)

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        self._ledger.epochs.expect(loader, epoch, rest)

    def state(self) -> dict[str, Any] | None:
        return self._ledger.state(self._service.now()) if self._keeps else None

    def load(self, state: dict[str, Any]) -> None:
        self._ledger.load(state, self._service.now())


class Hub:
    """What the virtual workers of one run share, by rank."""

    def __init__(self) -> None:
        self.servers: dict[int, ShardServer] = {}  # the shards of each
        self.transports: dict[int, Transport] = {}  # count the bytes
        # answers of each owner that wait for the slowest worker
        self.held: dict[int, list[tuple[int, PendingExchange, list[ShardRequest], list[int]]]] = {}
        self.ledger = Ledger()  # of the data
        self.finished: set[int] = set()  # workers that have no more to push
        self.failed: list[int] = []  # workers that left before the end


class SimulatedService:
    """A virtual worker's connection to the owners; all workers use the ledger of the first shard's owner."""

    def __init__(
        self, transport: Transport, cluster: Cluster, server: ShardServer, owners: dict[int, int], ledger: Ledger
    ) -> None:
        self._transport, self._owners = transport, owners
        self._cluster, self.rank = cluster, transport.world.rank
        self._clock, shared = cluster.clock, cluster.shared
        number = shared[f"attached {self.rank}"] = shared.get(f"attached {self.rank}", 0) + 1
        self._hub: Hub = shared.setdefault(f"asynchronous {number}", Hub())
        self._hub.servers[self.rank] = server
        self._hub.transports[self.rank] = transport
        self._hub.held[self.rank] = []
        keeps = LEDGER_SHARD in server.shards
        if keeps:
            self._hub.ledger = ledger
        self._has_final_model = False
        self.taking = contextlib.nullcontext()  # pulled values and the ledger's news agree: one worker runs at a time
        transport.barrier()
        self.leases: Leases = SimulatedLedgerClient(self, self._hub.ledger, keeps)

    def soon(self, action: Callable[[], None]) -> None:
        """Run an action at this simulated time, after those of lower ranks."""
        self._clock.wake(self.rank, 0.0, action)

    def computed(self, step: int) -> float:
        """Let the simulated time of the minibatch pass; the time then."""
        awake: list[bool] = []
        self._clock.wake(self.rank, self._clock.compute_s(self.rank, step), lambda: awake.append(True))
        self._cluster.wait(self.rank, "the end of its minibatch", lambda: bool(awake))
        return self._clock.now

    def now(self) -> float:
        return self._clock.now

    def exchange_later(self, pending: PendingExchange, after_s: float) -> Callable[[], None]:
        ask = partial(self._ask, pending)  # without `_check`: an event may not raise
        self._clock.wake(self.rank, after_s, ask)
        return ask

    def exchange(self, pending: PendingExchange) -> None:
        """Send every owner its requests, in one message."""
        self._check()
        self._ask(pending)

    def _ask(self, pending: PendingExchange) -> None:
        if pending.requested:
            return
        pending.requested, pending.requested_at = True, self._clock.now
        by_owner: dict[int, list[ShardRequest]] = {}
        for request in pending.requests.values():
            by_owner.setdefault(self._owners[request.shard], []).append(request)
        for owner, requests in by_owner.items():
            nbytes = sum(FRAME_BYTES + _nbytes(request.values) for request in requests)
            self._carry(self.rank, owner, nbytes, lambda o=owner, a=requests: self._arrive(o, pending, a))

    def _carry(self, source: int, to: int, nbytes: int, then: Any) -> None:
        if source != to:
            self._hub.transports[source].sent(nbytes)
        self._clock.carry(source, to, nbytes, then)

    def _arrive(self, owner: int, pending: PendingExchange, requests: list[ShardRequest]) -> None:
        """At the owner: apply the pushes, and answer when the bound on staleness allows."""
        server, delays = self._hub.servers[owner], []
        for request in requests:
            if request.values is None:
                delays.append(0)
                continue
            incoming = pending.incoming(self.rank, request)
            if request.shard == LEDGER_SHARD:
                self._hub.ledger.done(self.rank, pending.marks)
            delays.append(server.push(request.shard, request.values, incoming, request.out).delay)
        self._hub.held[owner].append((self.rank, pending, requests, delays))
        self._release(owner)

    def _release(self, owner: int) -> None:
        """Answer the workers that may go on."""
        server, held = self._hub.servers[owner], self._hub.held[owner]
        self._hub.held[owner] = []
        for entry in held:
            rank, pending, requests, delays = entry
            if pending.clock and not all(server.shards[request.shard].clocks.may_start(rank) for request in requests):
                self._hub.held[owner].append(entry)
                continue
            reader = NO_READER if pending.peeks else rank
            versions = [
                server.read(request.shard, reader, request.out, request.values is not None) for request in requests
            ]
            nbytes = sum(FRAME_BYTES + _nbytes(request.out) for request in requests)
            answers = list(zip(requests, versions, delays, strict=True))
            self._carry(owner, rank, nbytes, lambda t=pending, a=answers: self._answer(t, a))

    def _answer(self, pending: PendingExchange, answers: list[tuple[ShardRequest, int, int]]) -> None:
        for request, version, delay in answers:
            pending.answered(request.shard, version, delay)
        if pending.done:
            pending.release()
        pending.answered_at = self._clock.now

    def done(self, pending: PendingExchange) -> bool:
        self._check()
        return pending.done

    def wait(self, pending: PendingExchange) -> None:
        """Let other workers run until it is answered."""
        if not pending.done:
            self.wait_for("answers of the owners", lambda: pending.done)
        self._check()

    def wait_for(self, what: str, ready: Callable[[], bool]) -> None:
        """Let other workers run until it is so."""
        self._cluster.wait(self.rank, what, lambda: ready() or bool(self._hub.failed))
        self._check()

    def idle(self) -> None:
        for owner, server in self._hub.servers.items():
            server.idle(self.rank)
            self._release(owner)

    def _check(self) -> None:
        if self._hub.failed:
            raise PeerLostError(f"virtual worker {self._hub.failed[0]} failed; its error is the one that is raised")

    def secure(self, idle: bool = True) -> None:
        """Nothing: virtual workers are not lost."""

    def replicate_anew(self) -> None:
        """Nothing: there are no replicas."""

    def barrier(self, of_all: bool = True) -> None:
        """Wait until every worker is here; none is ever lost."""
        self._transport.barrier()

    def finish(self) -> None:
        """Leave at all owners, and wait until all workers have."""
        for owner in self._hub.servers:
            self._carry(self.rank, owner, FRAME_BYTES, lambda o=owner, r=self.rank: self._leave(o, r))
        self._hub.finished.add(self.rank)
        size = self._transport.world.size
        self.wait_for("the end of the others' work", lambda: len(self._hub.finished) == size)

    def _leave(self, owner: int, rank: int) -> None:
        self._hub.servers[owner].leave(rank)
        if LEDGER_SHARD in self._hub.servers[owner].shards:
            self._hub.ledger.lost(rank)
        self._release(owner)

    def confirm_final_model(self) -> bool:
        """Wait until all workers have the final model."""
        self._transport.barrier()
        self._has_final_model = True
        return True

    def close(self) -> None:
        """Leave; before the end that is a failure, and the other workers stop."""
        if not self._has_final_model:
            self._hub.failed.append(self.rank)

    def state(self) -> dict[str, Any]:
        return {"clock": self._clock.state()}

    def load(self, state: dict[str, Any]) -> None:
        if "clock" in state:
            self._clock.load(state["clock"])


def _nbytes(x: Tensor | None) -> int:
    return 0 if x is None else x.numel() * x.element_size()
