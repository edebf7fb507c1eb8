# SPDX-License-Identifier: Apache-2.0
"""Reads the environment variables of launchers and schedulers.

A worker gets its rank from torchrun and `paceline run`, MPI's launchers, Slurm for each task of a step, or Kubeflow in
pods of one worker; in this order, since an inner launcher knows more than the one that started it. A launcher
(`paceline run`) gets its hosts from Kubeflow, Slurm and Kubernetes.
"""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from paceline.errors import UnsupportedError

Environment = Mapping[str, str]
PORTS = range(10_000, 30_000)
"""Ports for the stores of jobs: below the kernel's ephemeral ports."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, with one launcher on each.

    Attributes:
        says: the source of this information, for messages.
        index: of this host.
        count: of hosts; None if only the user knows it.
        master: address of host 0 and a port that is the same on all hosts; None on one host.
        workers: on this host; None if unknown.
        name: unique to the job, the same on all hosts; "" if unknown.
    """

    says: str
    index: int = 0
    count: int | None = 1
    master: tuple[str, int] | None = None
    workers: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Worker:
    """This process among all workers of a job.

    Attributes:
        says: the source of this information, for messages.
        rank: of this worker.
        size: number of workers.
        local_rank: on this host.
        local_size: workers on this host.
        master: the address of the store; None if the workers have to agree on it.
        env: whether torch.distributed's own variables are set.
    """

    says: str
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    master: tuple[str, int] | None = None
    env: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UnsupportedError(f"{self.says}: the rank must lie in 0..{self.size - 1}, got {self.rank}")


def number(environment: Environment, name: str, default: int | None = None) -> int:
    """The whole number in a variable; UnsupportedError if it has no number and no default."""
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        what = f"is {text!r}" if text else "is not set"
        raise UnsupportedError(f"{name} must be a whole number, and {what}: was it changed after the job began?")
    return int(text)


def named_master(environment: Environment) -> tuple[str, int] | None:
    """MASTER_ADDR and MASTER_PORT, if both are set."""
    if not (environment.get("MASTER_ADDR") and environment.get("MASTER_PORT")):
        return None
    return environment["MASTER_ADDR"], number(environment, "MASTER_PORT")


LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OURS = (*LAUNCHER_VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PACELINE_CONTROL", "PACELINE_RELAY")
GROUPS = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
THEIRS = (*GROUPS, "SLURM_", "PMI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "PET_", "JOB_COMPLETION_INDEX", "TORCHELASTIC_")


def worker(environment: Environment) -> Worker | None:
    """This process among all workers; None if no launcher started several.

    UnsupportedError if the variables are invalid, or lack the store's address.
    """
    if all(name in environment for name in LAUNCHER_VARIABLES):
        rank, size = number(environment, "RANK"), number(environment, "WORLD_SIZE")
        place = number(environment, "LOCAL_RANK", 0), number(environment, "LOCAL_WORLD_SIZE", 1)
        master = environment["MASTER_ADDR"], number(environment, "MASTER_PORT")
        return Worker("the launcher", rank, size, *place, master, env=True)
    task = slurm_worker(environment)
    first = None if task is None else task.master
    process = open_mpi(environment, first)
    if process is not None:
        return process
    if task is not None and number(environment, "PMI_SIZE", task.size) == task.size:  # srun sets hydra's variables, too
        return task
    return hydra(environment) or task or kubeflow_worker(environment)


def mpi_process(environment: Environment) -> Worker | None:
    """This process among those of `mpiexec` or `mpirun`, where that has started several and no other launcher has."""
    if "PMI_RANK" not in environment and "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    result = worker({**environment, "PACELINE_TRANSPORT": "mpi"})
    return result if result is not None and result.says in (HYDRA, OPEN_MPI) else None


def hosts(environment: Environment) -> Hosts | None:
    """The hosts of this launcher's job; None if unknown. UnsupportedError if its host has other launchers."""
    return kubeflow(environment) or slurm_hosts(environment) or indexed(environment)


def several(environment: Environment) -> bool:
    """Whether the same command has started launchers on several hosts."""
    try:
        result = hosts(environment)
    except UnsupportedError:
        return False
    return result is not None and (result.count or 1) > 1


def alone(environment: Environment) -> dict[str, str]:
    """The environment for a process that shall be a single worker."""
    return {name: value for name, value in environment.items() if name not in OURS and not name.startswith(THEIRS)}


def own_device(local_rank: int, size: int, visible: str | None, devices: int) -> str | None:
    """The CUDA_VISIBLE_DEVICES by which a worker's "cuda" is its own device; None where there is nothing to choose.

    `visible` is the variable's present value, and `devices` the number of visible devices.
    """
    if devices < 2 or size == 1:
        return None
    names = [name.strip() for name in visible.split(",")] if visible else [str(number) for number in range(devices)]
    return names[local_rank % len(names)]


# -- MPI's launchers ---------------------------------------------------------------------------------------------------
# Hydra (`mpiexec` of MPICH and Intel MPI) and Open MPI's `mpirun` give a process its rank, but not rank 0's address.
# Hydra's processes can exchange it (`paceline_plugins.mpi.pmi`); those of Open MPI cannot without its libraries: on one
# host they use the loopback address, on several hosts MASTER_ADDR and MASTER_PORT must be set.

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
        named_master(environment),
    )
    if process.master is None and not environment.get("PMI_FD") and not _meets_over_mpi(environment):
        raise UnsupportedError(
            f"this is process {process.rank} of {process.size} of an MPI job that does not say where they meet: set "
            "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port of it, for all (mpiexec -genv NAME VALUE)"
        )
    return process


def open_mpi(environment: Environment, first: tuple[str, int] | None = None) -> Worker | None:
    """A process of Open MPI's `mpirun`; None elsewhere, and for a job of one. `first`: the store's, from Slurm."""
    if "OMPI_COMM_WORLD_RANK" not in environment or number(environment, "OMPI_COMM_WORLD_SIZE", 1) == 1:
        return None
    process = Worker(
        OPEN_MPI,
        number(environment, "OMPI_COMM_WORLD_RANK"),
        number(environment, "OMPI_COMM_WORLD_SIZE"),
        number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
        named_master(environment) or first,
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


# -- Kubernetes --------------------------------------------------------------------------------------------------------
# The pods of a TrainJob of Kubeflow Trainer have torchrun's settings (PET_NNODES, PET_NODE_RANK, ...). The pods of an
# Indexed Job have their index only: the user gives their number (`--hosts`), and the name of pod 0 follows from this
# pod's, since pod k of the job `train` is the host `train-k`.

KUBEFLOW = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
INDEX = "JOB_COMPLETION_INDEX"
INDEXED_PORT = 29_400
"""Of an Indexed Job's store: pods have addresses of their own, so all jobs may use the same port."""


def kubeflow(environment: Environment) -> Hosts | None:
    """The pods of a TrainJob; None elsewhere. UnsupportedError if their number is not fixed."""
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
    """The pods of an Indexed Job; None elsewhere. `name` gives the full name of this host."""
    if not environment.get(INDEX):
        return None
    index = number(environment, INDEX)
    return Hosts(f"the Indexed Job, whose {INDEX} is {index}", index, None, _pod_0(environment, index, name))


def _pod_0(environment: Environment, index: int, name: Callable[[], str]) -> tuple[str, int] | None:
    port = number(environment, "MASTER_PORT", INDEXED_PORT)
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"], port
    host, dot, domain = name().partition(".")
    if not dot or re.search(rf"-{index}$", host) is None:
        return None  # without a headless Service pods have no DNS names
    return f"{host.removesuffix(str(index))}0.{domain}", port


def kubeflow_worker(environment: Environment) -> Worker | None:
    """A pod of a TrainJob that runs one worker without a launcher; None elsewhere."""
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


# -- Slurm -------------------------------------------------------------------------------------------------------------
# Only a step, which `srun` starts, has a launcher on every node. In a batch script the variables describe the whole
# allocation, although the script runs once, on the first node; so they are never used for a worker.
#
# Slurm's lists of hosts: `node[001-003,7],gpu-a[1-2]b` are six names.
#
#     list   = item {"," item}
#     item   = text {"[" range {"," range} "]" text}     a bracket means each of its numbers in turn
#     range  = digits ["-" digits]                       as many digits as the first number has, at least

MOST_HOSTS = 65_536
"""Most names in a list."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PIECES = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_ITEMS = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")


def expand(text: str) -> list[str]:
    """The names of the hosts, in the order of the list; at most `MOST_HOSTS`."""
    items = _ITEMS.findall(text)
    if ",".join(items) != text or not items:
        raise _wrong(text, "brackets or commas do not match")
    result: list[str] = []
    for item in items:
        parts = [_numbers(inside, text) if not outside else [outside] for inside, outside in _PIECES.findall(item)]
        count = 1
        for part in parts:
            count *= len(part)
        if len(result) + count > MOST_HOSTS:
            raise _wrong(text, f"more than {MOST_HOSTS} hosts")
        result += ["".join(name) for name in product(*parts)]
    return result


def _numbers(inside: str, text: str) -> list[str]:
    """The numbers of one pair of brackets, with their leading zeros."""
    result: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _wrong(text, f"{part!r} is no number and no range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MOST_HOSTS:
            raise _wrong(text, f"the range {part} is empty or too long")
        result += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return result


def _wrong(text: str, why: str) -> UnsupportedError:
    shown = text if len(text) < 80 else f"{text[:77]}..."
    return UnsupportedError(f"not a list of hosts such as node[001-003,7],gpu-a[1-2]: {shown!r} ({why})")


OWN_STEPS = 0xFFFF_FFF0

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def slurm_hosts(environment: Environment) -> Hosts | None:
    """The nodes of the step that this launcher is part of, or of an allocation of one node; None without Slurm."""
    if "SLURM_JOB_ID" not in environment:
        return None
    says, count = _says(environment), _nodes(environment)
    if not _in_step(environment):
        if count > 1:
            raise UnsupportedError(
                f"{says} has {count} nodes, and this launcher was not started by srun, so it runs on one of them: "
                "`srun --ntasks-per-node=1 paceline run ...` starts one on each; --hosts 1 takes this node alone"
            )
        return Hosts(says, name=_name(environment))
    tasks = _tasks(environment)
    if any(each != 1 for each in tasks):
        raise UnsupportedError(
            f"{says} has {max(tasks)} tasks on a node, and `paceline run` starts the workers of a node itself: "
            "srun --ntasks-per-node=1 paceline run --workers N ..., or srun python PROGRAM without `paceline run`"
        )
    master = named_master(environment) or _first_node(environment) if count > 1 else None
    return Hosts(says, number(environment, "SLURM_NODEID"), count, master, name=_name(environment))


def slurm_worker(environment: Environment) -> Worker | None:
    """This task of a step of several tasks; None elsewhere."""
    if not _in_step(environment) or "SLURM_PROCID" not in environment:
        return None
    size = number(environment, "SLURM_STEP_NUM_TASKS", 1)
    if size == 1:
        return None
    node = number(environment, "SLURM_NODEID", 0)
    tasks = _tasks(environment)
    if node >= len(tasks):
        raise UnsupportedError(f"SLURM_NODEID is {node}, and the step has {len(tasks)} nodes")
    return Worker(
        _says(environment),
        number(environment, "SLURM_PROCID"),
        size,
        number(environment, "SLURM_LOCALID", 0),
        tasks[node],
        named_master(environment) or _first_node(environment),
    )


def _in_step(environment: Environment) -> bool:
    """Whether `srun` started this process; the highest steps are Slurm's own, such as the shell of `salloc`."""
    return "SLURM_STEP_NODELIST" in environment and _step(environment) < OWN_STEPS


def _says(environment: Environment) -> str:
    step = f", step {environment['SLURM_STEP_ID']}" if _in_step(environment) else ""
    return f"Slurm job {environment['SLURM_JOB_ID']}{step}"


def _nodes(environment: Environment) -> int:
    names = ("SLURM_STEP_NUM_NODES",) if _in_step(environment) else ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    for name in names:
        if name in environment:
            return number(environment, name)
    return len(expand(_list(environment)))


def _list(environment: Environment) -> str:
    name = "SLURM_STEP_NODELIST" if _in_step(environment) else "SLURM_JOB_NODELIST"
    if not environment.get(name):
        raise UnsupportedError(
            f"{_says(environment)} does not say its nodes: {name} is not set; give --master HOST:INDEXED_PORT"
        )
    return environment[name]


def _tasks(environment: Environment) -> list[int]:
    """Tasks on each node of the step, from a text such as `2(x3),1`."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if not text:
        each = number(environment, "SLURM_NTASKS_PER_NODE", 1)
        return [each] * _nodes(environment)
    result: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None or int(match[2] or 1) > MOST_HOSTS:
            raise UnsupportedError(f"tasks per node are written as in 2(x3),1, got {text!r}")
        result += [int(match[1])] * int(match[2] or 1)
    return result


def _first_node(environment: Environment) -> tuple[str, int]:
    """The first node of the step, and a port that other steps of its nodes are unlikely to have."""
    names = expand(_list(environment))
    if len(names) != _nodes(environment):
        raise UnsupportedError(
            f"{_says(environment)} has {_nodes(environment)} nodes and names {len(names)}: {_list(environment)}"
        )
    return names[0], PORTS[(number(environment, "SLURM_JOB_ID") * 31 + _step(environment)) % len(PORTS)]


def _step(environment: Environment) -> int:
    return number(environment, "SLURM_STEP_ID", 0)


def _name(environment: Environment) -> str:
    """The job with step and restart: a requeued job keeps its number."""
    step = f".{_step(environment)}" if _in_step(environment) else ""
    restart = number(environment, "SLURM_RESTART_COUNT", 0)
    return f"slurm-{environment['SLURM_JOB_ID']}{step}" + (f"-again-{restart}" if restart else "")
