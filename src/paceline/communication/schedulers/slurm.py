# SPDX-License-Identifier: Apache-2.0
"""Slurm: the variables of a step, which `srun` sets, and of an allocation.

Only a step has a launcher on every node. In a batch script the variables describe the whole allocation, although the
script runs once, on the first node; so they are never used for a worker.

Slurm's lists of hosts: `node[001-003,7],gpu-a[1-2]b` are six names.

::

    list   = item {"," item}
    item   = text {"[" range {"," range} "]" text}     every bracket stands for each of its numbers in turn
    range  = digits ["-" digits]                       as many digits as the first number has, at least
"""

from __future__ import annotations

import re
from itertools import product

from paceline.communication.schedulers.place import PORTS, Environment, Hosts, Worker, number
from paceline.communication.schedulers.place import master as named_master
from paceline.errors import UnsupportedError

MOST = 65_536
"""Most names in a list."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PIECES = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_ITEMS = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")


def expand(text: str) -> list[str]:
    """The names of the hosts, in the order of the list.

    Raises:
        UnsupportedError: it is no such list, or one of more than `MOST` names.
    """
    items = _ITEMS.findall(text)
    if ",".join(items) != text or not items:
        raise _wrong(text, "brackets or commas do not match")
    result: list[str] = []
    for item in items:
        parts = [_numbers(inside, text) if not outside else [outside] for inside, outside in _PIECES.findall(item)]
        count = 1
        for part in parts:
            count *= len(part)
        if len(result) + count > MOST:
            raise _wrong(text, f"more than {MOST} hosts")
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
        if int(last) < int(first) or int(last) - int(first) >= MOST:
            raise _wrong(text, f"the range {part} is empty or too long")
        result += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return result


def _wrong(text: str, why: str) -> UnsupportedError:
    shown = text if len(text) < 80 else f"{text[:77]}..."
    return UnsupportedError(f"not a list of hosts such as node[001-003,7],gpu-a[1-2]: {shown!r} ({why})")


OWN_STEPS = 0xFFFF_FFF0

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts(environment: Environment) -> Hosts | None:
    """The nodes of the step that this launcher is part of, or of an allocation of one node; None without Slurm.

    Raises:
        UnsupportedError: the step has several launchers on a node, or there is no step and several nodes.
    """
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
    master = named_master(environment) or _master(environment) if count > 1 else None
    return Hosts(says, number(environment, "SLURM_NODEID"), count, master, name=_name(environment))


def worker(environment: Environment) -> Worker | None:
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
        named_master(environment) or _master(environment),
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
            f"{_says(environment)} does not say its nodes: {name} is not set; give --master HOST:PORT"
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
        if match is None or int(match[2] or 1) > MOST:
            raise UnsupportedError(f"tasks per node are told as in 2(x3),1, got {text!r}")
        result += [int(match[1])] * int(match[2] or 1)
    return result


def _master(environment: Environment) -> tuple[str, int]:
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
