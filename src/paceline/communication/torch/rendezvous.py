# SPDX-License-Identifier: Apache-2.0
"""This process's rank among the workers of its launcher, and the store of a scheduler's job.

torchrun and `paceline run` have a store, which torch.distributed finds by itself. Under MPI, Slurm and Kubeflow rank 0
opens one here.
"""

from __future__ import annotations

import os
import socket
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


def found() -> Worker | None:
    """This process among all workers; None if no launcher started several."""
    return schedulers.worker(os.environ)


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
        _met.append(_named(worker, timeout_s) if worker.master is not None else _agreed(worker, timeout_s))
    return _met[0][0]


def _named(worker: Worker, timeout_s: float) -> tuple[Any, str]:
    """The store at the address that all workers know."""
    assert worker.master is not None
    host, port = worker.master
    return (_open(worker, host, port, timeout_s) if worker.rank == 0 else _join(worker, host, port, timeout_s)), host


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
