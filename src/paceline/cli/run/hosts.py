# SPDX-License-Identifier: Apache-2.0
"""The hosts of a run: from the options, completed by the scheduler."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.console import refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import checks
from paceline.communication import schedulers
from paceline.communication.schedulers import Hosts
from paceline.errors import PacelineError


@dataclass(frozen=True)
class HostOptions:
    """The options about hosts; None where not given.

    Attributes:
        workers: on each host.
        hosts: in all.
        host_index: of this host.
        master: HOST:PORT where the hosts meet.
    """

    workers: int | None
    hosts: int | None
    host_index: int | None
    master: str | None

    @property
    def complete(self) -> bool:
        """Whether the scheduler need not be asked."""
        return self.hosts == 1 or None not in (self.hosts, self.host_index, self.master)


def resolve_cluster(asked: HostOptions, timeout_s: float) -> tuple[LaunchCluster, Hosts | None]:
    """The shape of the run, and the scheduler that completed the options, if any."""
    known = _from_scheduler(asked)
    found = known or Hosts("no scheduler")
    index = found.index if asked.host_index is None else asked.host_index
    count = (found.count or 1) if asked.hosts is None else asked.hosts
    workers = (found.workers or 1) if asked.workers is None else asked.workers
    master = asked.master or (None if found.master is None else f"{found.master[0]}:{found.master[1]}")
    if known is not None and count > 1 and master is None:
        refuse(
            f"{found.says} does not say where the hosts meet: give --master HOST:PORT, or in Kubernetes let the pods "
            "have a subdomain, with a headless Service of that name"
        )
    return checks.cluster(workers, count, index, master, timeout_s), known


def _from_scheduler(asked: HostOptions) -> Hosts | None:
    """The scheduler's hosts, if the options are incomplete; refuses contradictions."""
    if asked.complete:
        return None
    try:
        found = schedulers.hosts(os.environ)
    except PacelineError as error:
        refuse(str(error))
    if found is None or (found.count is None and asked.hosts is None):  # a pod that knows no other pod
        return None
    if asked.hosts not in (None, found.count) and found.count is not None:
        refuse(
            f"--hosts {asked.hosts}, but {found.says} has {found.count}: leave --hosts out, or give --host-index and "
            "--master too"
        )
    if asked.host_index not in (None, found.index) and asked.master is None:
        refuse(
            f"--host-index {asked.host_index}, but {found.says} says {found.index}, and its host 0 is where the hosts "
            "meet: leave it out, or give --master too"
        )
    return found


def refuse_several_launchers() -> None:
    """Refuse to host an elastic run from several hosts at once."""
    if schedulers.several(os.environ):
        refuse(
            "--elastic leads a run from one host, and this command was started on several: start it on one of them "
            "(srun --nodes=1 --ntasks=1 ...), and on the other hosts --join HOST:PORT"
        )


def job_log_directory(found: Hosts | None) -> Path | None:
    """The log directory of a scheduler's job, the same on all hosts."""
    return Path(checks.LOGS) / found.name if found is not None and found.name else None
