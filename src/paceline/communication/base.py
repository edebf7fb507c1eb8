# SPDX-License-Identifier: Apache-2.0
"""The interface of all transports.

A transport has a few operations, started in the same order on every worker; each returns a :class:`Pending`. Sums are
sums, never means. Operations that must not wait for each other use different channels of one transport
(:meth:`Transport.open_channels`); operations among some of the workers use a subgroup (:meth:`Transport.part`).

`bytes_sent` counts what this worker sends, on its channels and subgroups as well, by the formulas below. They hold for
the ring and pairwise algorithms of the common back ends (S = bytes of the tensor `x`, N = workers):

==================  =======================
all_reduce          2 (N-1)/N S
reduce_scatter      (N-1)/N S
all_to_all          S less the part that stays here; (N-1)/N S for equal parts
all_gather          (N-1) S      (S of this worker's own part)
broadcast           (N-1) S      (counted at the source)
send                S            (counted at the sender)
==================  =======================

Every operation among all workers begins with a row of one shape: an exchange of the training with its header, a call
such as `run.save` with the row made here. So workers that make different calls compare their rows before they send
tensors of different sizes, which would make the back ends abort.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.core.world import World
from paceline.errors import ElsewhereError

WORDS = 11
"""Integers of a row."""
KIND, LEAVING, SIZE = 1, 3, 8
"""Places in a row: its kind (CALL or below for a call), whether the worker ends, bytes that follow."""
CALL = -10
BLOCK = 1000
"""Kind of the exchange of a block's first fragment; the other fragments' follow."""
AGREEMENT = "an agreement of all workers"

_ADVICE = {
    AGREEMENT: "every worker has to make the same calls in the same order",
    "run.save(..)": "for the model alone, rank 0 may write torch.save(run.global_state(), FILE) by itself",
    "run.resume(..)": "",
    "run.restore(..)": "",
    "run.merge()": "run.global_state() and run.model_for_export() need no other worker",
    "run.messages.broadcast(..)": "",
    "run.messages.all_reduce(..)": "",
    "run.messages.all_gather(..)": "",
    "run.messages.gather(..)": "",
    "run.messages.barrier()": "",
    "run.close()": "",
    "run.checkpoint()": "",
}
_NAMES = list(_ADVICE)


def row(call: str, size: int) -> Tensor:
    """The row of `call`, one of those above, int64, shape (WORDS,); `size` bytes follow."""
    values = [0] * WORDS
    values[KIND], values[SIZE] = CALL - _NAMES.index(call), size
    return torch.tensor(values, dtype=torch.int64)


def check_alike(kinds: Sequence[int], leaving: Sequence[bool], world: World) -> None:
    """Raise ElsewhereError, on every worker alike, if the workers make different calls.

    Args:
        kinds: of the workers' rows, in rank order.
        leaving: which of the workers end.
        world: this worker.
    """
    called = [_NAMES[CALL - kind] for kind in kinds if kind <= CALL]
    if not called or (len(called) == len(kinds) and len(set(called)) == 1):
        return
    where: dict[str, list[int]] = {}
    for rank, (kind, leaves) in enumerate(zip(kinds, leaving, strict=True)):
        where.setdefault(_doing(kind, leaves), []).append(rank)
    calls = ", ".join(f"{world.names(ranks)} {doing}" for doing, ranks in where.items())
    raise ElsewhereError(world.sign(f"the workers make different calls: {calls}. {advice(called[0])}"))


def advice(call: str) -> str:
    """What to do if some workers do not make `call`."""
    if call == AGREEMENT:
        return f"{_ADVICE[call][0].upper()}{_ADVICE[call][1:]}"
    more = f" ({_ADVICE[call]})" if _ADVICE[call] else ""
    return (
        f"Every worker has to call {call} at the same place of the program: take it out of "
        f"`if run.world.rank == 0:` or whatever keeps some workers from it{more}"
    )


def _doing(kind: int, leaves: bool) -> str:
    """What a worker with this row does; follows its name."""
    if kind <= CALL:
        return f"in {_NAMES[CALL - kind]}"
    if leaves:
        return "at its end, in run.close()"
    if kind == 0:
        return "in run.share, at the end of its pass"
    if kind >= BLOCK:
        return "in optimizer.step(), at the end of a block"
    return "in backward() or optimizer.step(), exchanging gradients" if kind > 0 else "in optimizer.step()"


class Pending(Protocol):
    """An operation in flight."""

    def wait(self) -> None:
        """Return once the result is there; raise `PeerLostError` if the deadline passes first."""


class CompletedOperation:
    """An operation that was complete when it was started."""

    def wait(self) -> None:
        """Return at once."""


class Transport(ABC):
    """One worker's connection to the others.

    Args:
        world: this worker among the members of the connection.
        parent: the connection of which this one is a channel or subgroup; it counts what is sent here.
    """

    name: str

    coarse = 1
    """Multiplies the least length of a chunk; above 1 if chunks in flight side by side gain nothing."""

    cluster: Any = None
    """The simulated cluster whose virtual workers share this process; None if a worker has its own process."""

    call = AGREEMENT
    """The user's call for which the workers agree."""

    def __init__(self, world: World, parent: Transport | None = None) -> None:
        self.world = world
        self.bytes_sent = 0
        self._before_call: Callable[[], None] = lambda: None
        self.when_failed: Callable[[list[dict[str, Any]]], None] = lambda rows: None
        self._parent = parent
        self._counting = threading.Lock()

    def count_for(self, parent: Transport) -> None:
        """From now on `parent` counts what is sent here."""
        self._parent = parent

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of the whole connection that are known to be lost so far, if the transport can tell."""
        return frozenset()

    def cancel(self, why: str) -> None:  # noqa: B027
        """End all operations, also later ones, with `PeerLostError(why)`, if the transport can; from any thread."""

    @property
    def serves_threads(self) -> bool:
        """Whether another thread may exchange while training does."""
        return self.world.size == 1 or self.background

    @property
    def background(self) -> bool:
        """Whether operations on different channels may be started and waited for in threads of their own."""
        return False

    def wire_device(self, device: torch.device) -> torch.device:
        """The device on which a tensor of `device` must be for an exchange."""
        return device

    def now(self) -> float:
        """Seconds on this worker's own clock: wall time, less the turns of other virtual workers."""
        return time.perf_counter()

    def on_failure(self, call: Callable[[list[dict[str, Any]]], None]) -> None:
        """Call this when the connection has failed, with a row for each worker: what it was doing."""
        self.when_failed = call

    def before_calls(self, call: Callable[[], None]) -> None:
        """Call this before every call of the program's that all workers make."""
        self._before_call = call

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Pending:
        """Sum `x` over the workers, in place, in an order that the transport chooses."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """`out`, shape (k,): the sum over the workers of row `rank` of `x`, shape (N, k), taken in rank order."""

    @abstractmethod
    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Pending:
        """Send part j of `x` to worker j, and receive part i of `out` from worker i.

        Args:
            out: shape (N, k), or of one dimension with `out_sizes`.
            x: shape (N, k), whose rows are the parts, or of one dimension with `in_sizes`.
            out_sizes: elements from each worker, in rank order; zeros are allowed.
            in_sizes: elements to each worker; give both sizes or neither.
        """

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """`out`, shape (N, k): row i is `x`, shape (k,), of worker i."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int) -> Pending:
        """Copy `x` of worker `source` into every worker's `x`."""

    @abstractmethod
    def send(self, x: Tensor, to: int) -> Pending:
        """Send `x` to worker `to`, which calls `receive` for it; messages between two workers keep their order."""

    @abstractmethod
    def receive(self, x: Tensor, source: int) -> Pending:
        """Receive the next message of worker `source` into `x`, of the same shape and dtype as there.

        Messages need no common order with the other operations. Their deadline is the same.
        """

    @abstractmethod
    def open_channels(self, number: int) -> None:
        """Make `channel(0)` to `channel(number - 1)`, unless they exist; every worker makes the same call."""

    @abstractmethod
    def channel(self, k: int) -> Transport:
        """Channel `k`: a connection of the same workers, whose operations never wait for those of other channels.

        Operations on different channels need no common order and may be started in different threads. Channel 0 is this
        connection itself.
        """

    @abstractmethod
    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        """The connection within this worker's group; every worker makes the same call.

        Ranks count within the group, in its order. Errors name workers as in the whole cluster, and a failure within a
        subgroup ends the whole connection.

        Args:
            groups: ranks of this connection; each in exactly one group.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection, with its channels and subgroups; no operation may be started afterwards."""

    def gather_json(self, value: Any) -> list[Any]:
        """Every worker's `value`, in rank order; sent as JSON, so that no received data is ever executed."""
        text = json.dumps(value).encode()
        sizes = self.meet(len(text))
        longest = max(sizes)
        row = torch.zeros(longest, dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = torch.empty(self.world.size, longest, dtype=torch.uint8)
        _gather(self, rows, row)
        texts = rows.numpy().tobytes()
        return [json.loads(texts[n * longest : n * longest + size]) for n, size in enumerate(sizes)]

    def meet(self, size: int = 0) -> list[int]:
        """Wait until every worker makes the same call as this one; returns each one's `size`, in rank order.

        Raises:
            MismatchError: some workers make another call; on every worker alike.
        """
        rows = torch.empty(self.world.size, WORDS, dtype=torch.int64)
        _gather(self, rows, row(self.call, size))
        check_alike(rows[:, KIND].tolist(), rows[:, LEAVING].bool().tolist(), self.world)
        return list(rows[:, SIZE].tolist())

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Context in which agreements belong to the user's `call`, one of those above.

        What `before_calls` named is called first.
        """
        self._before_call()
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def barrier(self) -> None:
        """Return once every worker has called it."""
        self.meet()

    def count(self, operation: str, x: Tensor, kept: int | None = None) -> None:
        """Add the bytes that this worker sends for an operation.

        Args:
            operation: its name.
            x: this worker's tensor.
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
        """Add bytes that this worker has sent, on this connection or beside it."""
        with self._counting:
            self.bytes_sent += nbytes
        if self._parent is not None:
            self._parent.sent(nbytes)


def check_other(world: World, rank: int, verb: str) -> None:
    """Refuse a peer that is no other worker."""
    if rank == world.rank or not 0 <= rank < world.size:
        raise ValueError(world.sign(f"cannot {verb} rank {rank}: name another one of 0 to {world.size - 1}"))


def group_of(world: World, groups: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """The index of this worker's group, and its ranks."""
    ranks = sorted(rank for group in groups for rank in group)
    if ranks != list(range(world.size)):
        raise ValueError(world.sign(f"groups must name each rank of 0 to {world.size - 1} once, got {groups!r}"))
    return next((k, list(group)) for k, group in enumerate(groups) if world.rank in group)


def _gather(transport: Transport, out: Tensor, x: Tensor) -> None:
    """all_gather of small host tensors, over the transport's device."""
    device = transport.wire_device(out.device)
    result = out.to(device)  # `out` itself where that is its device
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
    """`world` within a group of ranks, which count from 0 in the given order."""
    hosts = tuple(world.hosts[rank] for rank in ranks)
    rank = list(ranks).index(world.rank)
    mates = [other for other, host in enumerate(hosts) if host == world.host]
    return World(rank, len(ranks), mates.index(rank), len(mates), world.host, hosts)


class SoloTransport(Transport):
    """A cluster of one worker: every exchange is complete at once and sends nothing."""

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
        """Does nothing: every operation is complete when it is started."""

    def channel(self, k: int) -> Transport:
        return self

    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        group_of(self.world, groups)
        return self

    def close(self) -> None:
        """Does nothing."""


def same_json(transport: Transport, value: Any) -> bool:
    """Whether every worker's `value` is the same; False also where only the order of its keys differs."""
    digest = hashlib.sha256(json.dumps(value).encode()).digest()
    return len(set(transport.meet(int.from_bytes(digest[:7], "big")))) == 1


Kin = TypeVar("Kin", bound=Transport)


class SubgroupTransport(Transport, Generic[Kin]):
    """A transport whose channels and subgroups are of its own kind, with the same labels on all members."""

    def _init_subgroups(self, label: str, ranks: list[int]) -> None:
        """Begin without subgroups; `ranks` are those of the members in the whole cluster."""
        self._label, self._ranks = label, ranks
        self._channels: list[Kin] = []
        self._parts: list[Kin] = []

    @abstractmethod
    def _subgroup(self, label: str, ranks: list[int], world: World) -> Kin:
        """A new connection of some or all of this one's members."""

    def open_channels(self, number: int) -> None:
        while len(self._channels) + 1 < number:
            label = f"channel{len(self._channels) + 1}"
            self._channels.append(self._subgroup(label, self._ranks, self.world))

    def channel(self, k: int) -> Transport:
        if not 0 <= k <= len(self._channels):
            raise IndexError(f"channel {k} was not opened: open_channels({k + 1}) comes first, on every worker")
        return self if k == 0 else self._channels[k - 1]

    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        number, mine = group_of(self.world, groups)
        ranks = [self._ranks[rank] for rank in mine]
        part = self._subgroup(f"part{len(self._parts)}.{number}", ranks, world_within(self.world, mine))
        self._parts.append(part)
        return part


def flat(x: Tensor) -> Tensor:
    """A one-dimensional view of a contiguous host tensor: the same memory, without autograd."""
    if not x.numel():
        return torch.empty(0, dtype=x.dtype)
    return torch.from_numpy(x.detach().reshape(-1).view(torch.uint8).numpy()).view(x.dtype)


def staged(x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """The elements of `x`, one-dimensional in host memory, and a function that copies them back if that is a copy."""
    if x.device.type == "cpu" and x.is_contiguous():
        return flat(x), lambda: None
    copy = flat(x.detach().cpu().contiguous().clone())
    return copy, lambda: put(x, copy)


def put(place: Tensor, elements: Tensor) -> None:
    """Copy one-dimensional `elements` into `place`, of any shape and device."""
    place.detach().copy_(elements.view(place.shape))


def ordered_sum(rows: Tensor) -> Tensor:
    """The sum of the rows, in their order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total
