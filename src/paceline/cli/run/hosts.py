# SPDX-License-Identifier: Apache-2.0
"""The hosts of a run: from the options, completed by the scheduler."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.cli.console import refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import checks
from paceline.cli.run.options import HostOptions
from paceline.communication import schedulers
from paceline.communication.schedulers import Hosts, Worker
from paceline.errors import PacelineError

MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
"""Have the number of processes of mpiexec."""


def resolve_cluster(asked: HostOptions, timeout_s: float) -> tuple[LaunchCluster, Hosts | None]:
    """The shape of the run, and the scheduler that completed the options, if any."""
    known = _from_scheduler(asked)
    job = known or Hosts("no scheduler")
    index = job.index if asked.host_index is None else asked.host_index
    count = (job.count or 1) if asked.count is None else asked.count
    workers = (job.workers or 1) if asked.workers is None else asked.workers
    master = asked.master or (None if job.master is None else f"{job.master[0]}:{job.master[1]}")
    if known is not None and count > 1 and master is None:
        refuse(f"{job.says} does not say where the hosts meet: give --master HOST:PORT, or pods a headless Service")
    return checks.cluster(workers, count, index, master, timeout_s), known


def _from_scheduler(asked: HostOptions) -> Hosts | None:
    """The scheduler's hosts, if the options are incomplete; refuses contradictions."""
    if asked.complete:
        return None
    try:
        job = schedulers.hosts(os.environ)
    except PacelineError as error:
        refuse(str(error))
    if job is None or (job.count is None and asked.count is None):  # a pod that knows no other pod
        return None
    if asked.count not in (None, job.count) and job.count is not None:
        refuse(f"--hosts {asked.count}, but {job.says} has {job.count}: leave it out, or add --host-index and --master")
    if asked.host_index not in (None, job.index) and asked.master is None:
        refuse(f"--host-index {asked.host_index}, but {job.says} says {job.index}: leave it out, or add --master")
    return job


def mpi_process(asked: HostOptions) -> Worker | None:
    """This command among those that mpiexec started, unless the options make it a launcher of its own."""
    try:
        job = schedulers.mpi_process(os.environ)
    except PacelineError as error:
        refuse(str(error))
    return job if asked == HostOptions() else None


def chosen_transport(transport: str, own: Worker | None) -> str:
    """The transport to use: a worker that mpiexec started alone needs none. Refuses MPI where it started no worker."""
    if transport != "mpi" or own is not None:
        return transport
    if "1" in (os.environ.get(name) for name in MPI_SIZES):
        return "auto"
    refuse(
        "--transport mpi: let MPI start the workers, mpiexec -n 4 paceline run --transport mpi train.py, no --workers"
    )


def refuse_several_launchers() -> None:
    """Refuse to host an elastic run from several hosts at once."""
    if schedulers.several(os.environ):
        refuse(
            "--elastic leads a run from one host, and this command was started on several: start it on one of them "
            "(srun --nodes=1 --ntasks=1 ...), and on the other hosts --join HOST:PORT"
        )


def job_log_directory(job: Hosts | None) -> Path | None:
    """The log directory of a scheduler's job, the same on all hosts."""
    return Path(checks.LOGS) / job.name if job is not None and job.name else None
