# SPDX-License-Identifier: Apache-2.0
"""The words that are exchanged with hydra, with a hydra of our own at the other end of the socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.communication.schedulers import Worker
from paceline.core.world import host_name
from paceline.errors import PeerLostError, UnsupportedError
from paceline_plugins.mpi import pmi

PATIENCE_S = 30.0


class Hydra:
    """Serves the processes of one job, each from a thread."""

    def __init__(self, size: int) -> None:
        self.book: dict[str, str] = {}
        self.said: list[str] = []
        self.together = threading.Barrier(size)
        self.ends = [socket.socketpair() for _ in range(size)]
        self.threads = [threading.Thread(target=self._serve, args=(near,)) for near, _ in self.ends]
        for thread in self.threads:
            thread.start()

    def _serve(self, near: socket.socket) -> None:
        for line in near.makefile():
            self.said.append(line)
            near.sendall(self._answer(dict(part.split("=", 1) for part in line.split())).encode())

    def _answer(self, word: dict[str, str]) -> str:
        command = word["cmd"]
        if command == "barrier_in":
            self.together.wait(PATIENCE_S)
            return "cmd=barrier_out\n"
        if command == "put":
            self.book[word["key"]] = word["value"]
            return "cmd=put_result rc=0 msg=success\n"
        if command == "get":
            value = self.book.get(word["key"])
            return "cmd=get_result rc=-1\n" if value is None else f"cmd=get_result rc=0 msg=success value={value}\n"
        if command == "get_my_kvsname":
            return "cmd=my_kvsname kvsname=kvs_1_0\n"
        return {"init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n", "finalize": "cmd=finalize_ack\n"}[
            command
        ]


@contextmanager
def hydra(size: int) -> Iterator[Hydra]:
    made = Hydra(size)
    try:
        yield made
    finally:
        for near, far in made.ends:
            far.close()
            near.shutdown(socket.SHUT_RDWR)
        for thread in made.threads:
            thread.join(PATIENCE_S)
        for near, _ in made.ends:
            near.close()


def test_all_workers_get_rank_0s_address() -> None:
    heard: dict[int, str] = {}
    asked: list[list[str]] = []

    def opens(names: list[str]) -> str:
        asked.append(names)
        return "10.0.0.1:4000"

    with hydra(3) as server:

        def work(rank: int) -> None:
            heard[rank] = pmi.agree(Worker("MPI", rank, 3), server.ends[rank][1].fileno(), PATIENCE_S, opens)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert heard == dict.fromkeys(range(3), "10.0.0.1:4000")
    assert asked == [[host_name()] * 3]
    assert server.said.count("cmd=finalize\n") == 3  # or mpiexec takes the end of a process for a crash


def test_an_unexpected_answer_of_hydra_is_named() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"cmd=response-to-init;pmi-version=2;rc=0\n")
        with pytest.raises(
            UnsupportedError, match=r"process 1 of 2 on .*where 'response_to_init' was due; set MASTER_ADDR"
        ):
            pmi.agree(Worker("MPI", 1, 2), far.fileno(), PATIENCE_S, lambda names: "")


def test_a_missing_process() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(
            b"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\ncmd=my_kvsname kvsname=k\n"
            b"cmd=put_result rc=0 msg=success\n"
        )
        with pytest.raises(PeerLostError, match=r"'barrier_in' within 0\.05 s"):
            pmi.agree(Worker("MPI", 1, 2), far.fileno(), 0.05, lambda names: "")
