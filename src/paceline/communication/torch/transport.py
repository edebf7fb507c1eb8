# SPDX-License-Identifier: Apache-2.0
"""The transport of processes over torch.distributed, on gloo, NCCL or both.

The default process group is made here, from the environment of the launcher or the scheduler (torchrun, `paceline run`,
MPI, Slurm), unless the user has called `init_process_group`. Exchanges always run on groups of our own
(:mod:`paceline.communication.torch.groups`), so the user's deadline holds instead of torch's thirty minutes.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.communication.base import (
    AGREEMENT,
    Pending,
    SubgroupTransport,
    check_other,
    check_sizes,
    ordered_sum,
    put,
    world_within,
)
from paceline.communication.torch import rendezvous
from paceline.communication.torch.groups import Begin, Connection, GroupHolder
from paceline.core.world import World, host_name

_opened: Counter[str] = Counter()  # connections so far, by their members: the same on every member


def launched() -> bool:
    """Whether this process is a launcher's worker, or the user made a group."""
    if dist.is_available() and dist.is_initialized():
        return True
    return rendezvous.launched_worker() is not None


class ProcessTransport(SubgroupTransport["ProcessTransport"]):
    """A connection among the processes of `group` (all of them by default).

    Args:
        timeout_s: deadline of every operation, seconds.
        group: the user's process group, whose members and back end are used; None for all processes.

    Attributes:
        global_ranks: the launcher's rank of each of its ranks.
    """

    def __init__(self, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            _join_launcher(timedelta(seconds=timeout_s))
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        connection = Connection(fresh_name(members), _backend(group), rank, size, timeout_s)
        world = World(rank, size, 0, 1, host_name())
        self.global_ranks = members
        connection.on_failure = lambda rows: self.when_failed(rows)
        self._set_up(connection, world, "all", list(range(size)), None)
        self.world = World(rank, size, 0, 1, world.host, tuple(self.gather_json(world.host)))
        self.world = connection.world = world_within(self.world, range(size))

    def _set_up(
        self, connection: Connection, world: World, label: str, ranks: list[int], parent: ProcessTransport | None
    ) -> None:
        super().__init__(world, parent)
        self.name, self.timeout_s = connection.backend, connection.timeout_s
        self._init_subgroups(label, ranks)
        self._connection = connection
        self._holder: GroupHolder = connection.open(label, ranks)

    def _subgroup(self, label: str, ranks: list[int], world: World) -> ProcessTransport:
        return _ProcessSubgroup(self, label, ranks, world)

    @property
    def background(self) -> bool:
        """False for NCCL: several communicators in use at once may deadlock."""
        return "nccl" not in self.name

    @property
    def serves_threads(self) -> bool:
        """NCCL does not; with gloo beside it, host memory goes over gloo."""
        return super().serves_threads or "gloo" in self.name

    def wire_device(self, device: torch.device) -> torch.device:
        """gloo takes host memory, NCCL device memory; a group with both takes either."""
        cpu, cuda = "gloo" in self.name, "nccl" in self.name
        if device.type == "cpu" and not cpu:
            return torch.device("cuda", torch.cuda.current_device())
        if device.type != "cpu" and not cuda:
            return torch.device("cpu")
        return device

    def all_reduce(self, x: Tensor) -> Pending:
        self.count("all_reduce", x)
        return self._start("all_reduce", lambda group: group.allreduce([x], dist.AllreduceOptions()))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        # gloo's own all-reduces the whole tensor: 100 ms with 4 workers and 20 MB, this 15 ms
        self.count("reduce_scatter", x)
        arrived = torch.empty_like(x)

        add = lambda: put(out, ordered_sum(arrived))  # noqa: E731
        return self._start("reduce_scatter", _to_all(arrived, x, [], []), add)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Pending:
        check_sizes(out, x, out_sizes, in_sizes, self.world.size)
        self.count("all_to_all", x, in_sizes[self.world.rank] if in_sizes is not None else None)
        return self._start("all_to_all", _to_all(out, x, list(out_sizes or []), list(in_sizes or [])))

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        self.count("all_gather", x)
        rows = list(out.unbind(0))
        return self._start("all_gather", lambda group: group.allgather([rows], [x]))

    def broadcast(self, x: Tensor, source: int) -> Pending:
        if self.world.rank == source:
            self.count("broadcast", x)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._start("broadcast", lambda group: group.broadcast([x], options))

    def send(self, x: Tensor, to: int) -> Pending:
        check_other(self.world, to, "send to")
        self.count("send", x)
        name = f"send to {self._connection.world.name(self._ranks[to])}"
        return self._start(name, lambda group: group.send([x], to, 0), collective=False)

    def receive(self, x: Tensor, source: int) -> Pending:
        check_other(self.world, source, "receive from")
        name = f"receive from {self._connection.world.name(self._ranks[source])}"
        return self._start(name, lambda group: group.recv([x], source, 0), collective=False)

    def _start(
        self, operation: str, begin: Begin, then: Callable[[], None] | None = None, collective: bool = True
    ) -> Pending:
        name = operation if self.call == AGREEMENT else f"{operation} for {self.call}"
        return self._connection.start(self._holder, name, begin, then, collective)

    def close(self) -> None:
        if self._parent is None:
            self._connection.close()
        else:
            self._connection.drop(self._holders())

    def _holders(self) -> list[GroupHolder]:
        return [self._holder, *(holder for one in (*self._channels, *self._parts) for holder in one._holders())]


class _ProcessSubgroup(ProcessTransport):
    """A channel or subgroup of `parent`."""

    def __init__(self, parent: ProcessTransport, label: str, ranks: list[int], world: World) -> None:
        self._set_up(parent._connection, world, f"{parent._label}/{label}", ranks, parent)


def _to_all(out: Tensor, x: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Begin:
    return lambda group: group.alltoall_base(out, x, out_sizes, in_sizes, dist.AllToAllOptions())


def _backend(group: dist.ProcessGroup | None) -> str:
    name = str(dist.get_backend(group))
    if name == "undefined":  # init_process_group without one: torch's default
        return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    return name


def fresh_name(ranks: list[int]) -> str:
    """A name for the next connection of `ranks`, from their number of earlier ones: the same on all of them."""
    members = "-".join(str(rank) for rank in ranks)
    short = hashlib.sha256(members.encode()).hexdigest()[:12]
    _opened[short] += 1
    return f"{short}.{_opened[short]}"


def _join_launcher(timeout: timedelta) -> None:
    worker = rendezvous.required_worker("a connection of several processes")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(worker.local_rank % torch.cuda.device_count())
    arguments: dict[str, Any] = {}
    if rendezvous.shares_store():
        arguments = {"store": rendezvous.fresh_store(worker, timeout)}
    elif not worker.env:
        store = rendezvous.store(worker, timeout.total_seconds())
        arguments = {"store": dist.PrefixStore("paceline/group", store)}  # type: ignore[attr-defined]
    if arguments:
        arguments |= {"rank": worker.rank, "world_size": worker.size}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout, **arguments)
    # The default group stays until the program ends: a destroyed one cannot be made again over the same store, which
    # has the old addresses, and a program may attach more than once.
    atexit.register(_leave_launcher)


def _leave_launcher() -> None:
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()
