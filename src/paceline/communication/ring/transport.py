# SPDX-License-Identifier: Apache-2.0
"""The transport over our own sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.communication.base import Pending, SubgroupTransport, check_other, check_sizes, ordered_sum, put, staged
from paceline.communication.ring.connections import Connections
from paceline.communication.ring.listener import RingListener
from paceline.communication.ring.plans import Chain, OperationPlan, Pairwise, Ring
from paceline.communication.ring.wire import EAGER, RECEIVING, SENDING, Address
from paceline.communication.sockets.channel import TLS
from paceline.core.world import World


class RingTransport(SubgroupTransport["RingTransport"]):
    """A connection of the workers whose listeners are at `addresses`.

    The constructor returns at once; connections are made in the background, and the first operation waits for them. An
    operation fails after `timeout_s` without progress, or as soon as a worker that it needs is lost. All other
    operations then fail with it, on all workers, and the connection can only be closed.

    Args:
        listener: this process's; its transports share it.
        label: the same on all members, and new for every set of members.
        world: this worker among the members, with all hosts for messages.
        addresses: address and port of every rank's listener, in rank order, and what its certificate has to say.
        timeout_s: deadline of every operation, seconds without any progress.
        tls: certificates for the connections that this worker makes; None: the listener's, if any.
        owns_listener: `close` closes the listener as well.
    """

    name = "channel"

    def __init__(
        self,
        listener: RingListener,
        label: str,
        world: World,
        addresses: Sequence[tuple[str, int] | Address],
        timeout_s: float,
        tls: TLS | None = None,
        owns_listener: bool = False,
    ) -> None:
        connections = Connections(listener, label, world, addresses, timeout_s, tls or listener.tls)
        self._owned_listener = listener if owns_listener else None
        self._set_up(connections, world, "all", list(range(world.size)), None)

    def _set_up(
        self, connections: Connections, world: World, label: str, ranks: list[int], parent: RingTransport | None
    ) -> None:
        super().__init__(world, parent)
        self._init_subgroups(label, ranks)
        self._connections = connections
        self._sequence = connections.open(label, ranks)

    def _subgroup(self, label: str, ranks: list[int], world: World) -> RingTransport:
        return _RingSubgroup(self, label, ranks, world)

    @property
    def background(self) -> bool:
        return True

    def wire_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    @property
    def lost(self) -> frozenset[int]:
        return self._connections.lost

    def cancel(self, why: str) -> None:
        self._connections.cancel(why)

    def all_reduce(self, x: Tensor) -> Pending:
        self.count("all_reduce", x)
        own, back = staged(x)
        likeness = f"all_reduce {own.numel()} {own.dtype}"
        me, size = self.world.rank, self.world.size
        if own.nbytes <= EAGER or size == 1:
            rows = torch.empty(size, own.numel(), dtype=own.dtype)
            rows[me] = own

            def add() -> None:
                own.copy_(ordered_sum(rows))
                back()

            plan: OperationPlan = Pairwise(self._others(lambda _: rows[me]), self._others(lambda k: rows[k]))
            return self._start("all_reduce", likeness, plan, add)
        chunks = own.tensor_split(size)
        return self._start("all_reduce", likeness, Ring(self._ranks, me, chunks, 2 * (size - 1), size - 1), back)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        self.count("reduce_scatter", x)
        own, _ = staged(x)
        me, size = self.world.rank, self.world.size
        rows = own.view(size, own.numel() // size)
        arrived = torch.empty_like(rows)
        arrived[me] = rows[me]
        plan = Pairwise(self._others(lambda k: rows[k]), self._others(lambda k: arrived[k]))
        likeness = f"reduce_scatter {own.numel()} {own.dtype}"
        return self._start("reduce_scatter", likeness, plan, lambda: put(out, ordered_sum(arrived)))

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Pending:
        me, size = self.world.rank, self.world.size
        check_sizes(out, x, out_sizes, in_sizes, size)
        self.count("all_to_all", x, in_sizes[me] if in_sizes is not None else None)
        (given, _), (taken, back) = staged(x), staged(out)
        outs = torch.split(given, list(in_sizes)) if in_sizes is not None else given.tensor_split(size)
        ins = torch.split(taken, list(out_sizes)) if out_sizes is not None else taken.tensor_split(size)
        ins[me].copy_(outs[me])
        plan = Pairwise(self._others(lambda k: outs[k]), self._others(lambda k: ins[k]))
        return self._start("all_to_all", f"all_to_all {given.dtype}", plan, back)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        self.count("all_gather", x)
        (own, _), (taken, back) = staged(x), staged(out)
        me, size = self.world.rank, self.world.size
        rows = taken.view(size, own.numel())
        rows[me] = own
        if own.nbytes <= EAGER or size == 1:
            plan: OperationPlan = Pairwise(self._others(lambda _: own), self._others(lambda k: rows[k]))
        else:
            plan = Ring(self._ranks, me, rows.unbind(0), size - 1, 0)
        return self._start("all_gather", f"all_gather {own.numel()} {own.dtype}", plan, back)

    def broadcast(self, x: Tensor, source: int) -> Pending:
        me, size = self.world.rank, self.world.size
        if me == source:
            self.count("broadcast", x)
        own, back = staged(x)
        if own.nbytes > EAGER:
            chain = [self._ranks[(source + k) % size] for k in range(size)]
            plan: OperationPlan = Chain(chain, (me - source) % size, own)
        elif me == source:
            plan = Pairwise(self._others(lambda _: own), {}, asked=True)
        else:
            plan = Pairwise({}, {self._ranks[source]: own}, asked=True)
        return self._start("broadcast", f"broadcast {source} {own.numel()} {own.dtype}", plan, back)

    def send(self, x: Tensor, to: int) -> Pending:
        check_other(self.world, to, "send to")
        self.count("send", x)
        rank, own = self._ranks[to], staged(x)[0]
        plan = Pairwise({rank: own}, {}, asked=True)
        name = f"send to {self._connections.world.name(rank)}"
        return self._connections.start(self._sequence, name, _message(own), plan, None, SENDING, rank)

    def receive(self, x: Tensor, source: int) -> Pending:
        check_other(self.world, source, "receive from")
        rank, (own, back) = self._ranks[source], staged(x)
        plan = Pairwise({}, {rank: own}, asked=True)
        name = f"receive from {self._connections.world.name(rank)}"
        return self._connections.start(self._sequence, name, _message(own), plan, back, RECEIVING, rank)

    def _others(self, tensor: Callable[[int], Tensor]) -> dict[int, Tensor]:
        """For every other member its tensor, the next rank first, so that not all begin with the same one."""
        me, size = self.world.rank, self.world.size
        return {self._ranks[k]: tensor(k) for k in ((me + step) % size for step in range(1, size))}

    def _start(self, name: str, likeness: str, plan: OperationPlan, finish: Callable[[], None]) -> Pending:
        return self._connections.start(self._sequence, name, likeness, plan, finish)

    def close(self) -> None:
        self._close_sequences()
        self._connections.close()
        if self._owned_listener is not None:
            self._owned_listener.close()

    def _close_sequences(self) -> None:
        self._sequence.closed = True
        for one in (*self._channels, *self._parts):
            one._close_sequences()


class _RingSubgroup(RingTransport):
    """A channel or subgroup of `parent`."""

    def __init__(self, parent: RingTransport, label: str, ranks: list[int], world: World) -> None:
        self._set_up(parent._connections, world, f"{parent._label}/{label}", ranks, parent)

    def close(self) -> None:
        self._close_sequences()


def _message(x: Tensor) -> str:
    return f"message {x.numel()} {x.dtype}"
