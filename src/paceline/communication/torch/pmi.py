# SPDX-License-Identifier: Apache-2.0
"""What hydra's `mpiexec` offers its processes: a book of keys and values, and a barrier, over an inherited socket.

PMI version 1, as "13/Simple Process Manager Interface v1" of the Flux framework's RFCs writes it down: a line a word,
`cmd=NAME key=value ...`, answered by a line. It is what an MPI library does when it starts. A process may do so once,
so programs that use MPI themselves have to start it before `attach`, which then takes theirs.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from paceline.communication.schedulers import Worker
from paceline.core.world import host_name
from paceline.errors import PeerLostError, UnsupportedError

LONGEST = 8192
"""Bytes of an answer, at most."""

Open = Callable[[list[str]], str]
"""Given the names of all workers' hosts, opens the place where they meet, on rank 0, and says where it is."""


def agree(worker: Worker, descriptor: int, timeout_s: float, opens: Open) -> str:
    """Where the workers meet, as rank 0 says it; all of them call this once.

    Args:
        worker: this one.
        descriptor: of the socket to hydra (PMI_FD).
        timeout_s: for all to come.
        opens: called on rank 0.

    Raises:
        PeerLostError: somebody did not come in time, or hydra is gone.
        UnsupportedError: hydra does not speak the protocol.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        names = mpi.COMM_WORLD.allgather(host_name())
        return str(mpi.COMM_WORLD.bcast(opens(names) if worker.rank == 0 else None, root=0))
    book = _Book(descriptor, worker, timeout_s)
    try:
        book.begin()
        book.put(f"paceline-host-{worker.rank}", host_name())
        book.barrier()
        if worker.rank == 0:
            book.put("paceline-meet", opens([book.get(f"paceline-host-{rank}") for rank in range(worker.size)]))
        book.barrier()
        where = book.get("paceline-meet")
        book.finish()
        return where
    finally:
        book.close()


class _Book:
    """The keys and values of a job."""

    def __init__(self, descriptor: int, worker: Worker, timeout_s: float) -> None:
        self._who = f"process {worker.rank} of {worker.size} on {host_name()}"
        self._timeout_s = timeout_s
        try:
            self._socket = socket.socket(fileno=os.dup(descriptor))
        except OSError as error:
            raise UnsupportedError(
                f"{self._who}: PMI_FD={descriptor} is no socket to mpiexec ({error}); set MASTER_ADDR and MASTER_PORT "
                "for all processes, to the host of rank 0 and a free port of it"
            ) from error
        self._socket.settimeout(timeout_s)
        self._said, self._name = b"", ""

    def begin(self) -> None:
        """Before all else."""
        self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        self._name = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def put(self, key: str, value: str) -> None:
        """Write a value, which others see after the next barrier."""
        self._ask(f"put kvsname={self._name} key={key} value={value}", "put_result")

    def get(self, key: str) -> str:
        """A value that was written before the last barrier."""
        return self._ask(f"get kvsname={self._name} key={key}", "get_result")["value"]

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self._ask("barrier_in", "barrier_out")

    def finish(self) -> None:
        """Tell hydra that nothing more will be asked: without it the end of this process would count as a crash."""
        self._ask("finalize", "finalize_ack")

    def close(self) -> None:
        """Let the socket go; mpiexec keeps its own."""
        self._socket.close()

    def _ask(self, word: str, answer: str) -> dict[str, str]:
        """Say one word; what the answer says."""
        try:
            self._socket.sendall(f"cmd={word}\n".encode())
            line = self._line()
        except OSError as error:
            raise PeerLostError(
                f"{self._who}: mpiexec did not answer {word.split()[0]!r} within {self._timeout_s:g} s ({error}): did "
                "all processes of the job call attach?"
            ) from error
        found = dict(part.split("=", 1) for part in line.split() if "=" in part)
        if found.get("cmd") != answer or found.get("rc", "0") != "0":
            raise UnsupportedError(
                f"{self._who}: mpiexec answered {line!r} where {answer!r} was due; set MASTER_ADDR and MASTER_PORT for "
                "all processes, to the host of rank 0 and a free port of it"
            )
        return found

    def _line(self) -> str:
        while b"\n" not in self._said:
            came = self._socket.recv(LONGEST)
            if not came:
                raise ConnectionError("the connection was closed")
            self._said += came
            if len(self._said) > LONGEST:
                raise ConnectionError(f"an answer of more than {LONGEST} bytes")
        line, _, self._said = self._said.partition(b"\n")
        return line.decode(errors="replace")
