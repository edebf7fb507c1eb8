# SPDX-License-Identifier: Apache-2.0
"""This process's rank among the workers of its launcher, and the store of a scheduler's job.

torchrun and `paceline run` have a store, which torch.distributed finds by itself. Under MPI, Slurm and Kubeflow rank 0
opens one here.

torchrun restarts all workers when one fails or a host joins, and its store, where the workers publish the addresses of
their sockets, lives on. The addresses of the dead workers are still there, under the same keys, and the connections of
the next attempt fail ("connectFullMesh failed"). The count of restarts does not identify an attempt, because it does
not change when a host joins. So rank 0 draws a new number from the store, and hands it to the live workers only: each
worker publishes a random token, gets the number under this token, and confirms it. Tokens of dead workers are answered
as well, but never confirmed.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.communication import schedulers
from paceline.communication.schedulers import Worker
from paceline.communication.torch.store import LOOPBACK, is_loopback, open_store, own_address
from paceline.core.world import World, host_name
from paceline.errors import PeerLostError, UnsupportedError
from paceline.extensions import RENDEZVOUS, extension

_met: list[tuple[Any, str]] = []  # this process's store, which must stay, and its address


def launched_worker() -> Worker | None:
    """This process among all workers; None if no launcher started several."""
    return schedulers.worker(os.environ)


def required_worker(what: str) -> Worker:
    """The same; UnsupportedError if no launcher started several, which `what` needs."""
    worker = launched_worker()
    if worker is None:
        raise UnsupportedError(
            f"{what} needs a launcher or a group, and {', '.join(schedulers.LAUNCHER_VARIABLES)} are not all set; "
            "start with `paceline run` or `torchrun`, or call torch.distributed.init_process_group before attach"
        )
    return worker


def address() -> str | None:
    """The address of the store, None if unknown."""
    if _met:
        return _met[0][1]
    return os.environ.get("MASTER_ADDR") or None


def store(worker: Worker, timeout_s: float) -> Any:
    """The store of a scheduler's job, opened by rank 0; the same one at every call.

    Raises:
        PeerLostError: it cannot be reached within the timeout.
        UnsupportedError: it cannot be opened at the job's address.
    """
    if not _met:
        if worker.master is None:
            _met.append(_agreed(worker, timeout_s))
        else:
            _met.append(((_open if worker.rank == 0 else _join)(worker, *worker.master, timeout_s), worker.master[0]))
    return _met[0][0]


def _agreed(worker: Worker, timeout_s: float) -> tuple[Any, str]:
    """The store at a free port, which rank 0 announces over hydra."""
    opened: list[Any] = []

    def opens(names: list[str]) -> str:
        host = _reached_by(worker, names)
        opened.append(_open(worker, host, 0, timeout_s))
        return f"{host}:{opened[0].port}"

    host, _, port = extension(RENDEZVOUS, "pmi")(worker, int(os.environ["PMI_FD"]), timeout_s, opens).rpartition(":")
    return (opened[0] if opened else _join(worker, host, int(port), timeout_s)), host


def _reached_by(worker: Worker, names: list[str]) -> str:
    """An address of this host that the other workers reach."""
    others = [name for name in names if name != host_name()]
    if worker.local_size == worker.size or not others:
        return LOOPBACK
    try:
        return own_address(others[0])
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error}; set MASTER_ADDR and MASTER_PORT for all processes, to this host and a free port of it"
        ) from error


def _open(worker: Worker, host: str, port: int, timeout_s: float) -> Any:
    try:
        return open_store(host, port, timedelta(seconds=timeout_s), worker.size)
    except (OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"rank 0 on {host_name()} cannot open the store at {host}:{port}, where {worker.says} lets the workers "
            f"meet ({str(error).splitlines()[0][:200]}); set MASTER_ADDR and MASTER_PORT for all of them"
        ) from error


def _join(worker: Worker, host: str, port: int, timeout_s: float) -> Any:
    try:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
    except (OSError, RuntimeError) as error:
        raise PeerLostError(
            f"rank 0 does not answer at {host}:{port}, where {worker.says} lets the workers meet, within "
            f"{timeout_s:g} s [rank {worker.rank} of {worker.size} on {socket.gethostname()}]: did its process begin, "
            "and can this host reach that address?"
        ) from error


def find_address(world: World, gather: Callable[[str], list[Any]]) -> str:
    """The address of this host's interface that leads to the workers' store.

    The store's host may resolve its own name to a loopback address. If other workers have a real address, it uses the
    interface that leads to them.

    Args:
        world: this worker, with all hosts.
        gather: given this worker's value, returns all workers' values in rank order.
    """
    hosts = [host for host in dict.fromkeys(world.hosts) if host != world.host]
    try:
        own = own_address(address() or (hosts[0] if hosts else LOOPBACK))
    except UnsupportedError as error:
        if hosts:
            raise UnsupportedError(
                world.sign(f"{error}; set MASTER_ADDR to an address of rank 0's host that all workers reach")
            ) from error
        own = LOOPBACK
    others = [str(one) for one in gather(own) if not is_loopback(str(one))]
    return own_address(others[0]) if is_loopback(own) and others else own


# -- restart attempts --------------------------------------------------------------------------------------------------

LOOK_EVERY_S = 0.02
PREFIX = "paceline/attempt"


def shares_store() -> bool:
    """Whether the workers' store is the launcher's, which outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(worker: Worker, timeout: timedelta) -> Any:
    """A part of the launcher's store for this attempt alone; PeerLostError names the workers that do not come."""
    assert worker.master is not None
    host, port = worker.master
    store = dist.TCPStore(host, port, None, False, timeout)  # type: ignore[attr-defined]
    number = agree(store, worker.rank, worker.size, timeout.total_seconds())
    return dist.PrefixStore(f"{PREFIX}/{number}", store)  # type: ignore[attr-defined]


def agree(store: Any, rank: int, size: int, timeout_s: float) -> int:
    """The number of this attempt: the same on all `size` workers, and new in the store."""
    token = secrets.token_hex(8)
    store.set(f"{PREFIX}/{size}/says/{rank}", token)
    return _lead(store, size, timeout_s) if rank == 0 else _follow(store, rank, token, timeout_s)


def _lead(store: Any, size: int, timeout_s: float) -> int:
    number = int(store.add(f"{PREFIX}/number", 1))
    missing, answered = set(range(1, size)), set()
    deadline = time.monotonic() + timeout_s
    while True:
        for rank in sorted(missing):
            token = _read(store, f"{PREFIX}/{size}/says/{rank}")
            if token and token not in answered:
                store.set(f"{PREFIX}/answer/{token}", str(number))
                answered.add(token)
            if token and _read(store, f"{PREFIX}/{number}/confirms/{rank}") == token:
                missing.discard(rank)
        if not missing:
            return number
        if time.monotonic() > deadline:
            who = ", ".join(str(rank) for rank in sorted(missing))
            raise PeerLostError(
                f"of {size} workers, {who} did not come within {timeout_s:g} s: look at their last lines"
            )
        time.sleep(LOOK_EVERY_S)


def _follow(store: Any, rank: int, token: str, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while not (content := _read(store, f"{PREFIX}/answer/{token}")):
        if time.monotonic() > deadline:
            raise PeerLostError(f"worker 0 did not answer within {timeout_s:g} s: look at its last lines")
        time.sleep(LOOK_EVERY_S)
    store.set(f"{PREFIX}/{content}/confirms/{rank}", token)
    return int(content)


def _read(store: Any, key: str) -> str:
    """The value of a key, "" if it is not set; never waits."""
    return store.get(key).decode() if store.check([key]) else ""
