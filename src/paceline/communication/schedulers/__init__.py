# SPDX-License-Identifier: Apache-2.0
"""What launchers and schedulers say in the environment, all of it read here.

A worker is told its rank by torchrun and `paceline run`, by MPI's launchers, by Slurm for each task of a step, and by
Kubeflow in pods of one worker; in this order, since the inner launcher knows more than the one that started it. A
launcher (`paceline run`) is told its hosts by Kubeflow, Slurm and Kubernetes.
"""

from __future__ import annotations

from paceline.communication.schedulers import kubernetes, mpi, slurm
from paceline.communication.schedulers.place import Environment, Hosts, Worker, number
from paceline.errors import UnsupportedError

__all__ = ["LAUNCHER_VARIABLES", "Environment", "Hosts", "Worker", "alone", "hosts", "several", "worker"]

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OURS = (*LAUNCHER_VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PACELINE_CONTROL")
THEIRS = ("SLURM_", "PMI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "PET_", "JOB_COMPLETION_INDEX", "TORCHELASTIC_")


def worker(environment: Environment) -> Worker | None:
    """This process among all workers; None if no launcher says that there are several.

    Raises:
        UnsupportedError: what is said makes no sense, or not where the workers meet.
    """
    if all(name in environment for name in LAUNCHER_VARIABLES):
        return _launched(environment)
    task = slurm.worker(environment)
    first = None if task is None else task.master
    process = mpi.open_mpi(environment, first)
    if process is not None:
        return process
    if task is not None and number(environment, "PMI_SIZE", task.size) == task.size:  # srun says what hydra would
        return task
    return mpi.hydra(environment) or task or kubernetes.worker(environment)


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
    """The hosts of the job that this launcher is part of; None if unknown.

    Raises:
        UnsupportedError: what is said makes no sense, or this is no launcher for a whole host.
    """
    return kubernetes.kubeflow(environment) or slurm.hosts(environment) or kubernetes.indexed(environment)


def several(environment: Environment) -> bool:
    """Whether this launcher has others beside it, started by the same command."""
    try:
        found = hosts(environment)
    except UnsupportedError:
        return False
    return found is not None and (found.count or 1) > 1


def alone(environment: Environment) -> dict[str, str]:
    """The environment of a process that is to be a worker by itself."""
    return {name: value for name, value in environment.items() if name not in OURS and not name.startswith(THEIRS)}
