# SPDX-License-Identifier: Apache-2.0
"""A client of hydra's `mpiexec`: keys and values, and a barrier, over an inherited socket.

It speaks PMI version 1, as in "13/Simple Process Manager Interface v1" of the Flux framework's RFCs: each request is a
line `cmd=NAME key=value ...`, and so is each answer. An MPI library does the same when it starts, and a process may do
it once; so programs that use MPI themselves have to start it before `attach`, which then uses theirs.
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
"""Most bytes of an answer."""

Open = Callable[[list[str]], str]
"""Given the names of all workers' hosts, opens the store on rank 0 and returns its address."""


def agree(worker: Worker, descriptor: int, timeout_s: float, opens: Open) -> str:
    """The address of the workers' store, opened by rank 0; all workers call this once.

    Args:
        worker: this one.
        descriptor: of the socket to hydra (PMI_FD).
        timeout_s: for all workers to call it.
        opens: called on rank 0.

    Raises:
        PeerLostError: a worker did not call it in time, or hydra is gone.
        UnsupportedError: hydra does not speak the protocol.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        names = mpi.COMM_WORLD.allgather(host_name())
        return str(mpi.COMM_WORLD.bcast(opens(names) if worker.rank == 0 else None, root=0))
    client = _PmiClient(descriptor, worker, timeout_s)
    try:
        client.begin()
        client.put(f"paceline-host-{worker.rank}", host_name())
        client.barrier()
        if worker.rank == 0:
            client.put("paceline-meet", opens([client.get(f"paceline-host-{rank}") for rank in range(worker.size)]))
        client.barrier()
        where = client.get("paceline-meet")
        client.finish()
        return where
    finally:
        client.close()


class _PmiClient:
    """The keys and values of a job, and its barrier."""

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
        self._received, self._name = b"", ""

    def begin(self) -> None:
        self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        self._name = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def put(self, key: str, value: str) -> None:
        """Set a value; other workers see it after the next barrier."""
        self._ask(f"put kvsname={self._name} key={key} value={value}", "put_result")

    def get(self, key: str) -> str:
        """A value that was set before the last barrier."""
        return self._ask(f"get kvsname={self._name} key={key}", "get_result")["value"]

    def barrier(self) -> None:
        self._ask("barrier_in", "barrier_out")

    def finish(self) -> None:
        """End the session: without it the end of this process would count as a crash."""
        self._ask("finalize", "finalize_ack")

    def close(self) -> None:
        self._socket.close()

    def _ask(self, request: str, answer: str) -> dict[str, str]:
        """Send a request; returns the keys and values of its answer."""
        try:
            self._socket.sendall(f"cmd={request}\n".encode())
            line = self._line()
        except OSError as error:
            raise PeerLostError(
                f"{self._who}: mpiexec did not answer {request.split()[0]!r} within {self._timeout_s:g} s ({error}): "
                "did all processes of the job call attach?"
            ) from error
        found = dict(part.split("=", 1) for part in line.split() if "=" in part)
        if found.get("cmd") != answer or found.get("rc", "0") != "0":
            raise UnsupportedError(
                f"{self._who}: mpiexec answered {line!r} where {answer!r} was due; set MASTER_ADDR and MASTER_PORT for "
                "all processes, to the host of rank 0 and a free port of it"
            )
        return found

    def _line(self) -> str:
        while b"\n" not in self._received:
            data = self._socket.recv(LONGEST)
            if not data:
                raise ConnectionError("the connection was closed")
            self._received += data
            if len(self._received) > LONGEST:
                raise ConnectionError(f"an answer of more than {LONGEST} bytes")
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace")
