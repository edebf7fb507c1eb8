# SPDX-License-Identifier: Apache-2.0
"""The seam between paceline and whatever carries its bytes.

A transport has a few operations, started in the same order on every worker, each answered by a :class:`Pending`. Sums
are sums, never means. What must not wait for one another goes over different channels of one transport
(:meth:`Transport.open_channels`); what concerns only some of the workers, over a part of it (:meth:`Transport.part`).

`bytes_sent` counts what this worker sends, on its channels and parts as well, by the formulas below, which hold for the
ring and pairwise algorithms of the common back ends (S = bytes of the tensor `x`, N = workers):

==================  =======================
all_reduce          2 (N-1)/N S
reduce_scatter      (N-1)/N S
all_to_all          S less the part that stays here, (N-1)/N S where all are alike
all_gather          (N-1) S      (S of this worker's own part)
broadcast           (N-1) S      (counted at the source)
send                S            (counted at the sender)
==================  =======================
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from paceline.communication import calls
from paceline.core.world import World

if TYPE_CHECKING:
    from paceline.communication.virtual.scheduler import Cluster


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the result is there; raise `PeerLostError` when the deadline passes first."""


class CompletedOperation:
    """An operation that was over when it began."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Transport(ABC):
    """One worker's connection to the others.

    Args:
        world: this worker among the members of the connection.
        parent: the connection that this one is a channel or a part of; it counts what is sent here.
    """

    name: str

    told: Callable[[list[dict[str, Any]]], None] | None = None
    """Called with a row for each worker, who waited for whom, when the connection has failed."""

    coarse = 1
    """How many times the usual least length a chunk has here; more where chunks in flight side by side gain nothing."""

    call = calls.AGREEMENT
    """What the user called, for which workers agree."""

    def __init__(self, world: World, parent: Transport | None = None) -> None:
        self.world = world
        self.bytes_sent = 0
        self._parent = parent
        self._counting = threading.Lock()

    @property
    def cluster(self) -> Cluster | None:
        """The simulated cluster whose virtual workers share this process; None where a worker has its own process."""
        return None

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of this connection that were found lost so far, where the carrier can tell."""
        return frozenset()

    def cancel(self, why: str) -> None:  # noqa: B027
        """End every operation under way with `PeerLostError(why)`, from any thread, where the carrier can."""

    @property
    def serves_threads(self) -> bool:
        """Whether a thread of its own may exchange while training does; a worker that is alone exchanges nothing."""
        return self.world.size == 1 or self.background

    @property
    def background(self) -> bool:
        """Whether operations on different channels may be started and waited for in threads of their own."""
        return False

    def wire_device(self, device: torch.device) -> torch.device:
        """Where a tensor of `device` has to lie for an exchange: the same device unless the carrier cannot."""
        return device

    def now(self) -> float:
        """Seconds of this worker's own time, since whenever; one that is alone in its process has the wall's."""
        return time.perf_counter()

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Pending:
        """Sum `x` over the workers, in place, in an order that the carrier chooses."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """`out`, shape (k,): the sum over the workers of row `rank` of `x`, shape (N, k), taken in rank order."""

    @abstractmethod
    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Pending:
        """Part j of `x` goes to worker j, and part i of `out` came from worker i.

        Args:
            out: shape (N, k), or of one dimension with `out_sizes`.
            x: shape (N, k), whose rows are the parts, or of one dimension with `in_sizes`.
            out_sizes: elements that come from each worker, in rank order; zeros are allowed.
            in_sizes: elements that go to each worker; both sizes are given or neither is.
        """

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """`out`, shape (N, k): row i is `x`, shape (k,), of worker i."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int) -> Pending:
        """Make `x` what it is on worker `source`, in place."""

    @abstractmethod
    def send(self, x: Tensor, to: int) -> Pending:
        """Send `x` to worker `to`, who calls `receive` for it; what one sends to another arrives in that order."""

    @abstractmethod
    def receive(self, x: Tensor, source: int) -> Pending:
        """Fill `x` with what worker `source` sends next to this one; same shape and dtype as there.

        Both take part in no order with the other operations. The deadline is that of every other operation.
        """

    @abstractmethod
    def open_channels(self, number: int) -> None:
        """Make `channel(0)` to `channel(number - 1)`, where they are not there yet; every worker calls it alike."""

    @abstractmethod
    def channel(self, k: int) -> Transport:
        """Channel `k`: a connection of the same workers, whose operations never wait for those of other channels.

        Operations on different channels need no common order and may come from different threads. Channel 0 is this
        connection itself.
        """

    @abstractmethod
    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        """The connection within this worker's group; every worker calls it with the same groups.

        Ranks count within the group, in the order in which it lists them. Errors still name workers as in the whole
        cluster, and a failure within a part ends the whole connection.

        Args:
            groups: ranks of this connection; each in exactly one group.
        """

    @abstractmethod
    def close(self) -> None:
        """Let the connection go, with its channels and parts; nothing may be started after it."""

    def gather_json(self, value: Any) -> list[Any]:
        """Every worker's `value`, in rank order. JSON, so that nothing that arrives is ever executed."""
        text = json.dumps(value).encode()
        sizes = self.meet(len(text))
        longest = max(sizes)
        row = torch.zeros(longest, dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = torch.empty(self.world.size, longest, dtype=torch.uint8)
        _gather_over_carrier(self, rows, row)
        return [json.loads(bytes(line[:size].tolist())) for line, size in zip(rows, sizes, strict=True)]

    def meet(self, size: int = 0) -> list[int]:
        """Return when every worker makes the same call as this one; what each said for `size`, in rank order.

        Raises:
            MismatchError: some are elsewhere, on every worker alike.
        """
        rows = torch.empty(self.world.size, calls.WORDS, dtype=torch.int64)
        _gather_over_carrier(self, rows, calls.row(self.call, size))
        calls.check_alike(rows[:, calls.KIND].tolist(), rows[:, calls.LEAVING].bool().tolist(), self.world)
        return [int(said) for said in rows[:, calls.SIZE]]

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Inside, agreements among all say that they belong to `call`, one of :mod:`paceline.communication.calls`."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def barrier(self) -> None:
        """Return when every worker has come here."""
        self.meet()

    def count(self, operation: str, x: Tensor, kept: int | None = None) -> None:
        """Add what this operation makes this worker send to `bytes_sent`.

        Args:
            operation: its name.
            x: what this worker brings.
            kept: of an all-to-all with sizes: the elements that stay here.
        """
        size, others = self.world.size, self.world.size - 1
        nbytes = x.numel() * x.element_size()
        if operation == "all_reduce":
            self.sent(2 * nbytes * others // size)
        elif operation == "send":
            self.sent(nbytes)
        elif kept is not None:
            self.sent(nbytes - kept * x.element_size())
        elif operation in ("all_to_all", "reduce_scatter"):
            self.sent(nbytes * others // size)
        else:  # all_gather, and a broadcast at its source
            self.sent(nbytes * others)

    def sent(self, nbytes: int) -> None:
        """Count bytes that this worker has sent, on this connection or beside it."""
        with self._counting:
            self.bytes_sent += nbytes
        if self._parent is not None:
            self._parent.sent(nbytes)


def check_other(world: World, rank: int, verb: str) -> None:
    """Refuse a partner that is no other worker."""
    if rank == world.rank or not 0 <= rank < world.size:
        raise ValueError(world.sign(f"cannot {verb} rank {rank}: name another one of 0 to {world.size - 1}"))


def group_of(world: World, groups: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """Which of `groups` this worker is in, and its ranks."""
    ranks = sorted(rank for group in groups for rank in group)
    if ranks != list(range(world.size)):
        raise ValueError(world.sign(f"groups must name each rank of 0 to {world.size - 1} once, got {groups!r}"))
    return next((k, list(group)) for k, group in enumerate(groups) if world.rank in group)


def _gather_over_carrier(transport: Transport, out: Tensor, x: Tensor) -> None:
    """all_gather of small host tensors over whatever device the carrier wants."""
    device = transport.wire_device(out.device)
    if device == out.device:
        transport.all_gather(out, x).wait()
        return
    result = out.to(device)
    transport.all_gather(result, x.to(device)).wait()
    out.copy_(result)


def check_sizes(
    out: Tensor, x: Tensor, out_sizes: Sequence[int] | None, in_sizes: Sequence[int] | None, workers: int
) -> None:
    """Refuse sizes that do not fit the tensors."""
    if out_sizes is None and in_sizes is None:
        return
    for sizes, tensor, name in ((out_sizes, out, "out"), (in_sizes, x, "in")):
        if sizes is None or len(sizes) != workers or min(sizes) < 0 or sum(sizes) != tensor.numel():
            raise ValueError(
                f"{name}_sizes must be {workers} counts that add up to {tensor.numel()} elements, got {sizes!r}"
            )


def world_within(world: World, ranks: Sequence[int]) -> World:
    """What `world` is among `ranks` only, which count from 0 in the order given."""
    hosts = tuple(world.hosts[rank] for rank in ranks)
    rank = list(ranks).index(world.rank)
    mates = [other for other, host in enumerate(hosts) if host == world.host]
    return World(rank, len(ranks), mates.index(rank), len(mates), world.host, hosts)


class SoloTransport(Transport):
    """A cluster of one: every exchange is over at once and sends nothing."""

    name = "none"

    def __init__(self, world: World | None = None) -> None:
        super().__init__(world or World())

    def all_reduce(self, x: Tensor) -> Pending:
        return CompletedOperation()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        out.copy_(x[0])
        return CompletedOperation()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Pending:
        check_sizes(out, x, out_sizes, in_sizes, 1)
        out.copy_(x)
        return CompletedOperation()

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        out[0].copy_(x)
        return CompletedOperation()

    def broadcast(self, x: Tensor, source: int) -> Pending:
        return CompletedOperation()

    def send(self, x: Tensor, to: int) -> Pending:
        raise ValueError(f"cannot send to rank {to}: this worker is alone")

    def receive(self, x: Tensor, source: int) -> Pending:
        raise ValueError(f"cannot receive from rank {source}: this worker is alone")

    def open_channels(self, number: int) -> None:
        """Nothing to open: every operation is over when it began."""

    def channel(self, k: int) -> Transport:
        return self

    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        group_of(self.world, groups)
        return self

    def close(self) -> None:
        """Nothing was opened."""
