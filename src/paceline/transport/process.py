# SPDX-License-Identifier: Apache-2.0
"""Real processes over torch.distributed, on any back end that it offers.

The process group is made by us from what the launcher (torchrun, `paceline run`) put into the environment, or it is the
user's, who already called `init_process_group`. Either way the exchanges run on groups of our own with the deadline
that the user gave, so that nothing here waits for the thirty minutes that torch would.

When an exchange fails, the survivors say so in the store, tear their group down (which wakes those who still wait), and
look who else has spoken: who has not is named in the error.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PeerLostError, UnsupportedError
from paceline.transport.base import Pending, Transport
from paceline.world import World, host_name

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_opened = 0  # numbers the connections of this process, alike on every worker


def launched() -> bool:
    """Whether a launcher told this process that it is one of several, or the user made a group."""
    if dist.is_available() and dist.is_initialized():
        return True
    return all(name in os.environ for name in LAUNCHER_VARIABLES)


class _Work:
    """An operation of torch.distributed under way."""

    def __init__(self, transport: ProcessTransport, work: dist.Work, operation: str) -> None:
        self._transport, self._operation = transport, operation
        self.work: dist.Work | None = work

    def wait(self) -> None:
        if self.work is None:
            return
        try:
            self.work.wait()
        except RuntimeError as error:
            self._transport.fail(self._operation, error)
        self.work = None  # it refers to the group's connections, see ProcessTransport._abort
        self._transport.under_way.discard(self)


class ProcessTransport(Transport):
    """A connection among the processes of `group` (all of them by default).

    Args:
        timeout_s: deadline of every exchange, seconds.
        group: the user's group, used as it is; None makes one of our own over all processes.
    """

    def __init__(self, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
        global _opened
        self.timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        if not dist.is_initialized():
            _join_launcher(timeout)
        _opened += 1
        self._number = _opened
        self._operations = 0
        self.under_way: set[_Work] = set()
        self._own_group = group is None
        self._group: Any = dist.new_group(timeout=timeout) if group is None else group
        self.name = str(dist.get_backend(self._group))
        self._store = _store()
        self.bytes_sent = 0
        self.world = World(
            rank=dist.get_rank(self._group),
            size=dist.get_world_size(self._group),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )
        self._meet_hosts()

    def _meet_hosts(self) -> None:
        hosts = tuple(self.gather_json(host_name()))
        world = self.world
        mates = [rank for rank, host in enumerate(hosts) if host == world.host]
        self.world = World(world.rank, world.size, mates.index(world.rank), len(mates), world.host, hosts)

    def wire_device(self, device: torch.device) -> torch.device:
        """gloo and MPI take host memory, NCCL device memory; a group with both takes each where it lies."""
        cpu, cuda = "gloo" in self.name or "mpi" in self.name, "nccl" in self.name
        if device.type == "cpu" and not cpu and cuda:
            return torch.device("cuda", torch.cuda.current_device())
        if device.type != "cpu" and not cuda:
            return torch.device("cpu")
        return device

    def all_reduce(self, x: Tensor) -> Pending:
        self.count("all_reduce", x)
        return self._start("all_reduce", lambda: dist.all_reduce(x, group=self._group, async_op=True))

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        self.count("all_to_all", x)
        start = lambda: dist.all_to_all_single(out, x, group=self._group, async_op=True)  # noqa: E731
        return self._start("all_to_all", start)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        self.count("all_gather", x)
        rows = list(out.unbind(0))
        return self._start("all_gather", lambda: dist.all_gather(rows, x, group=self._group, async_op=True))

    def broadcast(self, x: Tensor, source: int) -> Pending:
        if self.world.rank == source:
            self.count("broadcast", x)
        sender = dist.get_global_rank(self._group, source)
        return self._start("broadcast", lambda: dist.broadcast(x, sender, group=self._group, async_op=True))

    def _start(self, operation: str, begin: Any) -> Pending:
        self._operations += 1
        try:
            work = _Work(self, begin(), operation)
            self.under_way.add(work)
            return work
        except RuntimeError as error:
            self.fail(operation, error)
            raise

    def fail(self, operation: str, error: RuntimeError) -> None:
        """Find out who is missing and raise `PeerLostError`."""
        traceback.clear_frames(error.__traceback__)  # torch's frames hold the group, which has to go
        place = f"paceline/{self._number}/failed"
        answered = self._roll_call(place)
        missing = [rank for rank in range(self.world.size) if rank not in answered]
        who = self.world.names(missing) if missing else "nobody that we can name"
        raise PeerLostError(
            self.world.sign(
                f"exchange {self._operations} ({operation}, deadline {self.timeout_s:g} s) failed: {who} did not "
                "answer. Look at the last lines of that worker; it died, hung, was cut off, or made fewer steps and "
                f"left without run.close(). The back end said: {_first_line(error)}"
            )
        ) from error

    def _roll_call(self, place: str) -> set[int]:
        """Say that we are alive, wake those who still wait, and see who else speaks up."""
        answered = {self.world.rank}
        with contextlib.suppress(Exception):  # without a store nobody can be named, and the error says so
            self._store.set(f"{place}/{self.world.rank}", b"alive")
            self._abort()
            grace_s = min(5.0, max(1.0, self.timeout_s / 4))
            until = time.monotonic() + grace_s
            while len(answered) < self.world.size and time.monotonic() < until:
                for rank in range(self.world.size):
                    if rank not in answered and self._store.check([f"{place}/{rank}"]):
                        answered.add(rank)
                time.sleep(0.02)
        return answered

    def _abort(self) -> None:
        """Drop our group: its sockets close, and peers that wait for us hear of it at once.

        gloo closes them when nothing refers to the group any more, and an operation under way does.
        """
        for work in self.under_way:
            work.work = None
        self.under_way.clear()
        if self._own_group:
            dist.destroy_process_group(self._group)
            self._group = None
            gc.collect()

    def close(self) -> None:
        if self._own_group and self._group is not None:
            with contextlib.suppress(Exception):  # after a failure there is nothing left to destroy
                dist.destroy_process_group(self._group)


def _join_launcher(timeout: timedelta) -> None:
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise UnsupportedError(
            f"the launcher's variables {', '.join(missing)} are not set; start with `paceline run` or `torchrun`, "
            "or call torch.distributed.init_process_group before attach"
        )
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    # The default group stays until the program ends: one that was destroyed cannot be made again over the same store,
    # where the old addresses still stand, and a program may attach more than once.
    atexit.register(_leave_launcher)


def _leave_launcher() -> None:
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()


def _store() -> Any:
    """The store over which the default group was made: our only way to speak when the group is gone."""
    getter = getattr(dist.distributed_c10d, "_get_default_store", None)
    with contextlib.suppress(Exception):
        store = getter() if getter is not None else None
        return store
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
