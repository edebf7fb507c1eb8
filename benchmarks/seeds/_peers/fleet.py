# SPDX-License-Identifier: Apache-2.0
"""Processes on emulated hosts, forked from one that has imported every library, so that a row starts at once.

A forked process enters its host, a network namespace, before it starts a thread. It meets the others over pipes to this
process, which cost the network nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing as mp
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from _network import EmulatedNetwork
from _network.delay import enter

from .counters import namespace_of, processes_in

NEW_UTS = 0x04000000
PORT = 29500


class RowError(Exception):
    """A row could not be measured; the message says why."""


@dataclass
class Place:
    """Where a forked process runs.

    Attributes:
        rank: 0..size-1; `size` for the host of services.
        size: workers.
        address: of this host.
        first: address of rank 0.
        service: what the row's service said of itself.
        pipe: to the process that forked it.
    """

    rank: int
    size: int
    address: str
    first: str
    service: Any
    pipe: Connection

    def meet(self, value: Any = None) -> list[Any]:
        """Wait for all workers, and return the values of all, by rank."""
        self.pipe.send(("met", value))
        values: list[Any] = self.pipe.recv()
        return values


Service = Callable[[Place], tuple[Any, Any]]
"""Starts to serve on its host; what must be kept meanwhile, and what the workers are told."""


class Fleet:
    """The hosts 0..workers-1, and one more for services such as a lighthouse."""

    def __init__(self, network: EmulatedNetwork, workers: int, folder: Path, deadline_s: float) -> None:
        self._network, self._size, self._folder, self._deadline_s = network, workers, folder, deadline_s
        self._paths = [f"/run/netns/{network.prefix(host)[3]}" for host in range(workers + 1)]
        self._inodes = {os.stat(path).st_ino for path in self._paths}

    def run(self, work: Callable[[Place], Any], service: Service | None = None) -> list[Any]:
        """What `work` returned on each host; afterwards no process is left on any of them.

        Raises:
            RowError: a worker failed, or somebody was missing at the deadline.
        """
        forked: list[int] = []
        kept = None
        try:
            kept, said = self._serve(service, forked) if service else (None, None)
            pipes = [self._fork(rank, work, said, forked) for rank in range(self._size)]
            return self._moderate(pipes)
        except RowError:
            self._ask_where(forked)
            raise
        finally:
            self._clear(forked)
            if kept is not None:
                kept.close()

    def _serve(self, service: Service, forked: list[int]) -> tuple[Connection, Any]:
        """Start it; its pipe, which tells it by its end that this process is gone, and what it said."""

        def work(place: Place) -> None:
            kept, said = service(place)
            place.meet(said)  # never answered: the service runs until it is killed
            del kept

        pipe = self._fork(self._size, work, None, forked)
        return pipe, self._gather([pipe], time.monotonic() + self._deadline_s)[0][1]

    def _moderate(self, pipes: Sequence[Connection]) -> list[Any]:
        deadline = time.monotonic() + self._deadline_s
        while True:
            said = self._gather(pipes, deadline)
            values = [value for _, value in said]
            if said[0][0] == "done":
                return values
            for pipe in pipes:
                pipe.send(values)

    def _gather(self, pipes: Sequence[Connection], deadline: float) -> list[tuple[str, Any]]:
        """One message of each."""
        said: dict[int, tuple[str, Any]] = {}
        while len(said) < len(pipes):
            missing = [rank for rank in range(len(pipes)) if rank not in said]
            ready = wait([pipes[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RowError(
                    f"rank {missing[0]} was not done within {self._deadline_s:g} s; {self._last_line(missing[0])}"
                )
            for rank in missing:
                if pipes[rank] in ready:
                    said[rank] = self._received(rank, pipes[rank])
        return [said[rank] for rank in range(len(pipes))]

    def _received(self, rank: int, pipe: Connection) -> tuple[str, Any]:
        try:
            kind, value = pipe.recv()
        except EOFError:
            raise RowError(f"rank {rank} died; {self._last_line(rank)}") from None
        if kind == "failed":
            raise RowError(f"rank {rank}: {value}")
        return kind, value

    def _last_line(self, rank: int) -> str:
        lines = self._log(rank).read_text(errors="replace").split("\n") if self._log(rank).exists() else []
        return "its last line: " + ([line.strip() for line in lines if line.strip()] or ["none"])[-1][:300]

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _fork(self, rank: int, work: Callable[[Place], Any], said: Any, forked: list[int]) -> Connection:
        ours, theirs = mp.Pipe()
        process = os.fork()
        if process:
            theirs.close()
            forked.append(process)
            return ours
        ours.close()
        try:
            self._settle(rank)
            address, first = self._network.address(rank), self._network.address(0)
            theirs.send(("done", work(Place(rank, self._size, address, first, said, theirs))))
        except BaseException as error:
            traceback.print_exc()
            theirs.send(("failed", f"{type(error).__name__}: {error}"[:300]))
        finally:
            sys.stderr.flush()
            os._exit(0)  # without the closing exchanges of each library, which are not measured

    def _settle(self, rank: int) -> None:
        """Become a process of the host: its network, a name that is its address, and the variables of a worker."""
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1)  # the parent asks where a late worker is
        log = os.open(self._log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        enter(self._paths[rank])
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_UTS):
            raise OSError(ctypes.get_errno(), "a host cannot have a name of its own")
        socket.sethostname(self._network.address(rank))
        os.environ.update(
            self._network.environment(rank),
            RANK=str(rank),
            WORLD_SIZE=str(self._size),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=self._network.address(0),
            MASTER_PORT=str(PORT),
        )

    def _ask_where(self, forked: Sequence[int]) -> None:
        """Let the workers that are left write to their logs where they are."""
        for process in forked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGUSR1)
        time.sleep(0.5)

    def _clear(self, forked: Sequence[int]) -> None:
        """Kill what runs on the hosts: the workers, and what they started."""
        for process in {*forked, *processes_in(self._inodes)}:
            if process in forked or namespace_of(process) in self._inodes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        for process in forked:
            os.waitpid(process, 0)
