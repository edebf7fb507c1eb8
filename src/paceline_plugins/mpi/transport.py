# SPDX-License-Identifier: Apache-2.0
"""The transport over MPI's non-blocking operations, each channel and subgroup on a communicator of its own.

MPI adds numbers of the types in `SUMS`. Others (16-bit floats) travel as bytes: every worker adds one slice, in rank
order, and sends it to all. Slices and messages have tags, so that operations may be waited for in any order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.communication.base import (
    AGREEMENT,
    Pending,
    SubgroupTransport,
    check_other,
    check_sizes,
    ordered_sum,
    put,
    staged,
)
from paceline.core.world import World
from paceline.errors import MismatchError
from paceline_plugins.mpi.job import MpiJob
from paceline_plugins.mpi.operation import MpiOperation, Steps

SUMS = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
}
"""Types that MPI adds, with its names for them."""
MESSAGE = 0
"""Tag of messages; slices have the tags from 1."""
LEAST_TAG_LIMIT = 32767


class MpiTransport(SubgroupTransport["MpiTransport"]):
    """A connection of all processes of an MPI job.

    Args:
        job: this process's.
        world: this worker, with the hosts of all.
        timeout_s: deadline of every operation, seconds.
    """

    name = "mpi"

    def __init__(self, job: MpiJob, world: World, timeout_s: float) -> None:
        self._set_up(job, world, timeout_s, "all", list(range(world.size)), None)
        job.on_failure = lambda rows: self.when_failed(rows)
        job.connected(1)

    def _set_up(
        self, job: MpiJob, world: World, timeout_s: float, label: str, ranks: list[int], parent: MpiTransport | None
    ) -> None:
        super().__init__(world, parent)
        self._init_subgroups(label, ranks)
        self._job: MpiJob = job
        self._mpi, self.timeout_s = job.mpi, timeout_s
        self._begun: list[MpiOperation] = []
        self._slices, self._closed = 0, False
        self._limit = job.everyone.Get_attr(self._mpi.TAG_UB) or LEAST_TAG_LIMIT
        self._communicator: Any = self._opened(job.everyone if parent is None else parent._communicator, label, ranks)

    def _opened(self, present: Any, label: str, ranks: list[int]) -> Any:
        """A communicator of `ranks`; all workers of the `present` one have to open the same label, or another part."""
        kind = label.rpartition("/")[2].partition(".")[0]
        said = torch.tensor([zlib.crc32(kind.encode()), zlib.crc32(repr(ranks).encode()), len(ranks)])
        rows = torch.empty(present.Get_size(), len(said), dtype=torch.int64)

        def steps() -> Steps:
            yield [present.Iallgather(self._bytes(said), self._bytes(rows, len(rows)))]

        self._run(f"opening {label}", steps(), 0).wait()
        everybody = [tuple(row) for row in rows.tolist()]
        if any(row[0] != said[0] or everybody.count(row) != row[2] for row in everybody):
            raise MismatchError(
                self._job.world.sign(
                    f"the workers open different channels or parts: this one {label}, with ranks {ranks}"
                )
            )
        made = present.Split(min(ranks), ranks.index(self._job.world.rank))
        made.Set_errhandler(self._mpi.ERRORS_RETURN)
        return made

    def _subgroup(self, label: str, ranks: list[int], world: World) -> MpiTransport:
        if self._closed:
            raise self._job.ended(f"opening {label}")
        return _MpiSubgroup(self, label, ranks, world)

    @property
    def background(self) -> bool:
        """Whether MPI was started with MPI_THREAD_MULTIPLE."""
        return self._job.threads

    def wire_device(self, device: torch.device) -> torch.device:
        """Host memory, unless MPI says that it takes CUDA memory."""
        return device if device.type == "cuda" and self._job.takes_device_memory else torch.device("cpu")

    # -- operations -------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Pending:
        self.count("all_reduce", x)
        own, back = self._ready(x)
        if own.dtype in SUMS and own.device.type == "cpu":
            return self._start("all_reduce", self._sum_by_mpi(own, back), own)
        return self._start("all_reduce", self._sum_by_slices(own, back), own, several=True)

    def _sum_by_mpi(self, own: Tensor, back: Callable[[], None]) -> Steps:
        buffer = [self._bytes(own)[0], own.numel(), getattr(self._mpi, SUMS[own.dtype])]
        yield [self._communicator.Iallreduce(self._mpi.IN_PLACE, buffer, self._mpi.SUM)]
        back()

    def _sum_by_slices(self, own: Tensor, back: Callable[[], None]) -> Steps:
        me, slices, tag = self.world.rank, own.tensor_split(self.world.size), self._next_tag()
        arrived = own.new_empty(self.world.size, slices[me].numel())
        arrived[me] = slices[me]
        yield self._messages(slices, list(arrived), tag)
        slices[me].copy_(ordered_sum(arrived))
        self._settle(own)
        yield self._messages([slices[me]] * self.world.size, slices, tag + 1)
        back()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        self.count("reduce_scatter", x)
        own, _ = self._ready(x)
        rows = own.view(self.world.size, own.numel() // self.world.size)
        arrived = torch.empty_like(rows)

        def steps() -> Steps:
            yield [self._communicator.Ialltoall(self._bytes(rows, len(rows)), self._bytes(arrived, len(rows)))]
            put(out, ordered_sum(arrived))

        return self._start("reduce_scatter", steps(), own)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int] | None = None, in_sizes: Sequence[int] | None = None
    ) -> Pending:
        check_sizes(out, x, out_sizes, in_sizes, self.world.size)
        self.count("all_to_all", x, in_sizes[self.world.rank] if in_sizes is not None else None)
        (given, _), (taken, back) = self._ready(x), self._ready(out)

        def steps() -> Steps:
            yield [self._communicator.Ialltoallv(self._in_parts(given, in_sizes), self._in_parts(taken, out_sizes))]
            back()

        return self._start("all_to_all", steps(), given)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        self.count("all_gather", x)
        (given, _), (taken, back) = self._ready(x), self._ready(out)

        def steps() -> Steps:
            yield [self._communicator.Iallgather(self._bytes(given), self._bytes(taken, self.world.size))]
            back()

        return self._start("all_gather", steps(), taken)

    def broadcast(self, x: Tensor, source: int) -> Pending:
        if self.world.rank == source:
            self.count("broadcast", x)
        own, back = self._ready(x)

        def steps() -> Steps:
            yield [self._communicator.Ibcast(self._bytes(own), source)]
            back()

        return self._start("broadcast", steps(), own)

    def send(self, x: Tensor, to: int) -> Pending:
        check_other(self.world, to, "send to")
        self.count("send", x)
        own, _ = self._ready(x)

        def steps() -> Steps:
            yield [self._communicator.Isend(self._bytes(own), to, MESSAGE)]

        return self._start(f"send to {self._name_of(to)}", steps(), own)

    def receive(self, x: Tensor, source: int) -> Pending:
        check_other(self.world, source, "receive from")
        own, back = self._ready(x)
        name = f"receive from {self._name_of(source)}"

        def steps() -> Steps:
            [status] = yield [self._communicator.Irecv(self._bytes(own), source, MESSAGE)]
            arrived = status.Get_count(self._mpi.BYTE)
            if arrived != own.nbytes:
                raise MismatchError(self.world.sign(f"{name}: {arrived} bytes arrived, {own.nbytes} were expected"))
            back()

        return self._start(name, steps(), own)

    # -- memory -----------------------------------------------------------------------------------

    def _ready(self, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """As `staged`; CUDA memory stays where it is if MPI takes it, once its numbers are there."""
        if x.device.type == "cuda" and self._job.takes_device_memory and x.is_contiguous():
            self._settle(x)
            return x.detach().view(-1), lambda: None
        return staged(x)

    def _settle(self, x: Tensor) -> None:
        """Wait for the device's present work, of which MPI knows nothing."""
        if x.device.type == "cuda":
            torch.cuda.current_stream(x.device).synchronize()

    def _bytes(self, x: Tensor, parts: int = 1) -> list[Any]:
        """The memory of a contiguous tensor, for MPI, which counts the bytes of one of its equal `parts`."""
        return buffer(self._mpi, x, parts)

    def _in_parts(self, x: Tensor, sizes: Sequence[int] | None) -> list[Any]:
        """The same, in parts for all workers: equal ones, or of `sizes` elements."""
        counts = [x.numel() // self.world.size] * self.world.size if sizes is None else list(sizes)
        counts = [count * x.element_size() for count in counts]
        places = [sum(counts[:k]) for k in range(len(counts))]
        return [self._bytes(x)[0], (counts, places), self._mpi.BYTE]

    def _messages(self, outs: Sequence[Tensor], ins: Sequence[Tensor], tag: int) -> list[Any]:
        """Receive `ins[k]` from each other worker k, and send it `outs[k]`."""
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        taken = [self._communicator.Irecv(self._bytes(ins[rank]), rank, tag) for rank in others]
        return taken + [self._communicator.Isend(self._bytes(outs[rank]), rank, tag) for rank in others]

    def _next_tag(self) -> int:
        """The first of two tags; workers begin operations in the same order, so all get the same."""
        self._slices += 1
        return 1 + 2 * (self._slices % ((self._limit - 2) // 2))

    def _name_of(self, rank: int) -> str:
        return self._job.world.name(self._ranks[rank])

    # -- beginning and end ------------------------------------------------------------------------

    def _start(self, operation: str, steps: Steps, x: Tensor, several: bool = False) -> Pending:
        if self._closed:
            raise self._job.ended(operation)
        label = operation if self.call == AGREEMENT else f"{operation} for {self.call}"
        return self._run(label, steps, x.nbytes, several)

    def _run(self, operation: str, steps: Steps, nbytes: int, several: bool = False) -> MpiOperation:
        made = self._job.start(operation, steps, nbytes, self.timeout_s, several)
        self._begun = [one for one in self._begun if not one.complete] + [made]
        return made

    def close(self) -> None:
        for one in (*self._channels, *self._parts):
            one.close()
        if not self._closed:
            self._closed = True
            if self._parent is None:
                self._job.connected(-1)
            if self._job.close(self._begun):
                self._communicator.Free()


class _MpiSubgroup(MpiTransport):
    """A channel or subgroup of `parent`."""

    def __init__(self, parent: MpiTransport, label: str, ranks: list[int], world: World) -> None:
        self._set_up(parent._job, world, parent.timeout_s, f"{parent._label}/{label}", ranks, parent)


def buffer(mpi: Any, x: Tensor, parts: int = 1) -> list[Any]:
    """The memory of a contiguous tensor of bytes, for mpi4py, with the number of bytes of one of its equal parts."""
    return [mpi.memory.fromaddress(x.data_ptr(), x.nbytes), x.nbytes // parts, mpi.BYTE]


def gathered(job: MpiJob, text: str, timeout_s: float) -> list[str]:
    """Every process's `text`, of at most 255 bytes, in rank order: before any connection is there."""
    row = torch.zeros(256, dtype=torch.uint8)
    own = text.encode()[:255]
    row[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else row[:0]
    rows = torch.empty(job.world.size, 256, dtype=torch.uint8)

    def steps() -> Steps:
        yield [job.everyone.Iallgather(buffer(job.mpi, row), buffer(job.mpi, rows, len(rows)))]

    job.finish(job.start("the first meeting of the job", steps(), 0, timeout_s))
    return [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in rows]
