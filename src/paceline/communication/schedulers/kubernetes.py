# SPDX-License-Identifier: Apache-2.0
"""Kubernetes: a TrainJob of Kubeflow Trainer, and a plain Job whose pods have an index.

A TrainJob's pods have torchrun's settings (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...). The pods of an Indexed Job
have their index only: the user gives their number (`--hosts`), and the name of pod 0 follows from this pod's, since pod
k of the job `train` is the host `train-k`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

from paceline.communication.schedulers.place import Environment, Hosts, Worker, number
from paceline.errors import UnsupportedError

KUBEFLOW = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
INDEX = "JOB_COMPLETION_INDEX"
PORT = 29_400
"""Of an Indexed Job's store: pods have addresses of their own, so all jobs may use the same port."""


def kubeflow(environment: Environment) -> Hosts | None:
    """The pods of a TrainJob; None elsewhere.

    Raises:
        UnsupportedError: the number of pods is not fixed.
    """
    if not all(environment.get(name) for name in KUBEFLOW):
        return None
    nodes = environment["PET_NNODES"]
    if not nodes.isdecimal():
        raise UnsupportedError(f"PET_NNODES is {nodes!r}, and a run of a fixed size needs one number of pods")
    count, each = int(nodes), environment.get("PET_NPROC_PER_NODE", "")
    return Hosts(
        "Kubeflow",
        number(environment, "PET_NODE_RANK"),
        count,
        (environment["PET_MASTER_ADDR"], number(environment, "PET_MASTER_PORT")) if count > 1 else None,
        int(each) if each.isdecimal() else None,  # or "auto", "gpu", "cpu"
    )


def indexed(environment: Environment, name: Callable[[], str] = socket.getfqdn) -> Hosts | None:
    """The pods of an Indexed Job; None elsewhere.

    Args:
        environment: of the launcher.
        name: gives the full name of this host.
    """
    if not environment.get(INDEX):
        return None
    index = number(environment, INDEX)
    return Hosts(f"the Indexed Job, whose {INDEX} is {index}", index, None, _pod_0(environment, index, name))


def _pod_0(environment: Environment, index: int, name: Callable[[], str]) -> tuple[str, int] | None:
    port = number(environment, "MASTER_PORT", PORT)
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"], port
    host, dot, domain = name().partition(".")
    if not dot or re.search(rf"-{index}$", host) is None:
        return None  # without a headless Service pods have no DNS names
    return f"{host.removesuffix(str(index))}0.{domain}", port


def worker(environment: Environment) -> Worker | None:
    """A pod of a TrainJob that runs one worker without a launcher; None elsewhere.

    Raises:
        UnsupportedError: the pods shall run several workers each, and no launcher has started them.
    """
    job = kubeflow(environment)
    if job is None or job.count == 1:
        return None
    if job.workers != 1:
        raise UnsupportedError(
            f"Kubeflow tells this pod to run PET_NPROC_PER_NODE={environment.get('PET_NPROC_PER_NODE', '')} workers, "
            "and nothing has started them: let the command be `torchrun PROGRAM` or `paceline run --workers N PROGRAM`"
        )
    assert job.count is not None
    return Worker(job.says, job.index, job.count, master=job.master)
