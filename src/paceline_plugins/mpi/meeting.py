# SPDX-License-Identifier: Apache-2.0
"""How the processes of an MPI job become workers."""

from __future__ import annotations

import os
from typing import Any

import torch

from paceline.communication import schedulers
from paceline.communication.base import SoloTransport, Transport, world_within
from paceline.core.world import World, host_name
from paceline.errors import UnsupportedError
from paceline_plugins.mpi import library
from paceline_plugins.mpi.job import MpiJob, job
from paceline_plugins.mpi.transport import MpiTransport, gathered


def meet(timeout_s: float, group: Any = None) -> Transport:
    """The connection of all processes of `mpiexec`; a worker alone without it.

    Args:
        timeout_s: deadline of the meeting, and of every later operation.
        group: the user's process group; refused.

    Raises:
        PeerLostError: a process did not come.
        UnsupportedError: MPI cannot be used, or counts other processes than the launcher.
    """
    if group is not None:
        raise UnsupportedError('transport="mpi" joins all processes of mpiexec: leave group away')
    mpi = library.load(timeout_s)
    _check_launcher(mpi)
    if mpi.COMM_WORLD.Get_size() == 1:
        return SoloTransport(World())
    own = job(timeout_s)
    own.world = _world(own, timeout_s)
    if torch.cuda.is_available():
        torch.cuda.set_device(own.world.local_rank % torch.cuda.device_count())
    return MpiTransport(own, own.world, timeout_s)


def _world(own: MpiJob, timeout_s: float) -> World:
    rank, size = own.world.rank, own.world.size
    said = [line.split("\n", 1) for line in gathered(own, f"{host_name()}\n{library.version(own.mpi)}", timeout_s)]
    hosts, versions = [line[0] for line in said], [line[-1] for line in said]
    world = World(rank, size, 0, 1, hosts[rank], tuple(hosts))
    for other, version in enumerate(versions):
        if version != versions[0]:
            raise UnsupportedError(
                world.sign(
                    f"{world.name(0)} has {versions[0]!r} and {world.name(other)} has {version!r}: install the same "
                    "MPI on all hosts"
                )
            )
    return world_within(world, range(size))


def _check_launcher(mpi: Any) -> None:
    """Refuse a launcher with other ranks than MPI's: each process would train alone, or as somebody else."""
    try:
        found = schedulers.worker(os.environ)
    except UnsupportedError:  # it does not say where torch.distributed could meet, which MPI does not need
        return
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if found is not None and (found.rank, found.size) != (rank, size):
        raise UnsupportedError(
            f"{found.says} started this process as rank {found.rank} of {found.size}, and MPI "
            f"({library.version(mpi)}) counts it as rank {rank} of {size}: start the workers with the mpiexec of this "
            f"MPI (mpiexec -n {found.size} ...), without another launcher, or leave transport='mpi' away"
        )
