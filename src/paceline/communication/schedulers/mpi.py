# SPDX-License-Identifier: Apache-2.0
"""MPI's launchers: hydra (`mpiexec` of MPICH and Intel MPI) and Open MPI's `mpirun`. MPI itself is not needed here.

Both give a process its rank, but not rank 0's address. Hydra's processes can exchange it
(:mod:`paceline_plugins.mpi.pmi`); those of Open MPI cannot without its libraries: on one host they use the
loopback address, on several hosts MASTER_ADDR and MASTER_PORT must be set.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

from paceline.communication.schedulers.place import PORTS, Environment, Worker, master, number
from paceline.errors import UnsupportedError

JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""One of them identifies an `mpirun` on its host."""
LOOPBACK = "127.0.0.1"
HYDRA, OPEN_MPI = "MPI", "Open MPI"
"""What `Worker.says` of such a process."""


def hydra(environment: Environment) -> Worker | None:
    """A process of hydra's `mpiexec`; None elsewhere, and for a job of one."""
    if "PMI_RANK" not in environment or number(environment, "PMI_SIZE", 1) == 1:
        return None
    process = Worker(
        HYDRA,
        number(environment, "PMI_RANK"),
        number(environment, "PMI_SIZE"),
        number(environment, "MPI_LOCALRANKID", 0),
        number(environment, "MPI_LOCALNRANKS", 1),
        master(environment),
    )
    if process.master is None and not environment.get("PMI_FD") and not _meets_over_mpi(environment):
        raise UnsupportedError(
            f"this is process {process.rank} of {process.size} of an MPI job that does not say where they meet: set "
            "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port of it, for all (mpiexec -genv NAME VALUE)"
        )
    return process


def open_mpi(environment: Environment, first: tuple[str, int] | None = None) -> Worker | None:
    """A process of Open MPI's `mpirun`; None elsewhere, and for a job of one.

    Args:
        environment: of the process.
        first: the store's address from the scheduler around it, if any.
    """
    if "OMPI_COMM_WORLD_RANK" not in environment or number(environment, "OMPI_COMM_WORLD_SIZE", 1) == 1:
        return None
    process = Worker(
        OPEN_MPI,
        number(environment, "OMPI_COMM_WORLD_RANK"),
        number(environment, "OMPI_COMM_WORLD_SIZE"),
        number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
        master(environment) or first,
    )
    if process.master is not None or _meets_over_mpi(environment):
        return process
    job = next((environment[name] for name in JOB if environment.get(name)), "")
    if process.local_size != process.size or not job:
        raise UnsupportedError(
            f"this is process {process.rank} of {process.size} of an Open MPI job on several hosts, which does not say "
            "where they meet: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port of it, for all "
            "(mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500)"
        )
    return replace(process, master=(LOOPBACK, PORTS[zlib.crc32(job.encode()) % len(PORTS)]))


def _meets_over_mpi(environment: Environment) -> bool:
    """Whether the workers use MPI itself, which needs no address."""
    return environment.get("PACELINE_TRANSPORT") == "mpi"
