# SPDX-License-Identifier: Apache-2.0
"""Reads the environment variables of launchers and schedulers.

A worker gets its rank from torchrun and `paceline run`, MPI's launchers, Slurm for each task of a step, or Kubeflow in
pods of one worker; in this order, since an inner launcher knows more than the one that started it. A launcher
(`paceline run`) gets its hosts from Kubeflow, Slurm and Kubernetes.
"""

from __future__ import annotations

from paceline.communication.schedulers import kubernetes, mpi, slurm
from paceline.communication.schedulers.place import Environment, Hosts, Worker, number
from paceline.errors import UnsupportedError

__all__ = ["LAUNCHER_VARIABLES", "Environment", "Hosts", "Worker", "alone", "hosts", "mpi_process", "several", "worker"]

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OURS = (*LAUNCHER_VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PACELINE_CONTROL", "PACELINE_RELAY")
GROUPS = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
THEIRS = (*GROUPS, "SLURM_", "PMI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "PET_", "JOB_COMPLETION_INDEX", "TORCHELASTIC_")


def worker(environment: Environment) -> Worker | None:
    """This process among all workers; None if no launcher started several.

    Raises:
        UnsupportedError: the variables are invalid, or lack the store's address.
    """
    if all(name in environment for name in LAUNCHER_VARIABLES):
        return _launched(environment)
    task = slurm.worker(environment)
    first = None if task is None else task.master
    process = mpi.open_mpi(environment, first)
    if process is not None:
        return process
    if task is not None and number(environment, "PMI_SIZE", task.size) == task.size:  # srun sets hydra's variables, too
        return task
    return mpi.hydra(environment) or task or kubernetes.worker(environment)


def mpi_process(environment: Environment) -> Worker | None:
    """This process among those of `mpiexec` or `mpirun`, where that has started several and no other launcher has.

    Raises:
        UnsupportedError: the variables are invalid.
    """
    if "PMI_RANK" not in environment and "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    found = worker({**environment, "PACELINE_TRANSPORT": "mpi"})
    return found if found is not None and found.says in (mpi.HYDRA, mpi.OPEN_MPI) else None


def _launched(environment: Environment) -> Worker:
    return Worker(
        "the launcher",
        number(environment, "RANK"),
        number(environment, "WORLD_SIZE"),
        number(environment, "LOCAL_RANK", 0),
        number(environment, "LOCAL_WORLD_SIZE", 1),
        (environment["MASTER_ADDR"], number(environment, "MASTER_PORT")),
        env=True,
    )


def hosts(environment: Environment) -> Hosts | None:
    """The hosts of this launcher's job; None if unknown.

    Raises:
        UnsupportedError: the variables are invalid, or this launcher is not the only one of its host.
    """
    return kubernetes.kubeflow(environment) or slurm.hosts(environment) or kubernetes.indexed(environment)


def several(environment: Environment) -> bool:
    """Whether the same command has started launchers on several hosts."""
    try:
        found = hosts(environment)
    except UnsupportedError:
        return False
    return found is not None and (found.count or 1) > 1


def alone(environment: Environment) -> dict[str, str]:
    """The environment for a process that shall be a single worker."""
    return {name: value for name, value in environment.items() if name not in OURS and not name.startswith(THEIRS)}


def own_device(local_rank: int, size: int, visible: str | None, devices: int) -> str | None:
    """The CUDA_VISIBLE_DEVICES by which a worker's "cuda" is its own device; None where there is nothing to choose.

    Args:
        local_rank: of the worker within its host.
        size: workers.
        visible: the variable's present value, or None.
        devices: visible CUDA devices.
    """
    if devices < 2 or size == 1:
        return None
    names = [name.strip() for name in visible.split(",")] if visible else [str(number) for number in range(devices)]
    return names[local_rank % len(names)]
