# SPDX-License-Identifier: Apache-2.0
"""`paceline run --debugger RANK`: one worker waits for an editor's debugger before its program begins."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from paceline.cli.console import err, refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.forks import ZERO_LINES
from paceline.cli.run.program import Program

Debugger = Annotated[
    int | None,
    typer.Option(
        "--debugger",
        metavar="RANK",
        help="This worker waits for a debugger (debugpy: VS Code, PyCharm) before it begins.",
        min=0,
    ),
]
HOST, FIRST_PORT = "127.0.0.1", 5678  # the port that VS Code proposes, plus the rank
PYTHON = len(ZERO_LINES[:2])  # words of a worker's command that start Python
PATIENCE_S = 86_400.0
"""Seconds that the other workers wait for the one that is debugged, unless `--timeout` was typed."""


def check(rank: int | None, program: Program | None, is_fixed: bool, print_only: bool) -> None:
    """Refuse a debugger where no worker could wait for one."""
    if rank is None:
        return
    if print_only:
        refuse("--print starts nothing that --debugger could wait in: leave one of them out")
    if not is_fixed or program is None:
        refuse("--debugger is for runs of a fixed size, and not for --elastic or mpiexec: leave one of them out")
    if program.is_tool:
        refuse(
            f"--debugger is for Python programs, and {program.name} is an executable: attach gdb to its worker's "
            "process (gdb -p PID)"
        )
    if importlib.util.find_spec("debugpy") is None:
        refuse("--debugger needs debugpy, which is not installed: pip install debugpy")


def timeout(rank: int | None, ctx: typer.Context) -> float:
    """Seconds for a worker to answer: a day while somebody steps through one of them."""
    asked: float = ctx.params["timeout"]
    source = ctx.get_parameter_source("timeout")
    return asked if rank is None or (source is not None and source.name != "DEFAULT") else PATIENCE_S


def commands(rank: int | None, cluster: LaunchCluster, command: list[str]) -> dict[int, list[str]]:
    """The command of the worker that waits, by its rank; none if another host has it. Says where it will listen."""
    if rank is None:
        return {}
    if rank >= cluster.size:
        refuse(f"--debugger {rank}: the run has the workers 0 to {cluster.size - 1}")
    here = range(cluster.host_index * cluster.workers, (cluster.host_index + 1) * cluster.workers)
    if rank not in here:
        return {}
    address = f"{HOST}:{FIRST_PORT + rank}"
    err().print(f"worker {rank} waits for a debugger at {address}", markup=False)
    return {rank: [*command[:PYTHON], "-m", "debugpy", "--listen", address, "--wait-for-client", *command[PYTHON:]]}
