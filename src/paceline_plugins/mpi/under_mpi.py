# SPDX-License-Identifier: Apache-2.0
"""`mpiexec -n 4 paceline run train.py`: mpiexec starts the workers, and each of these commands runs one of them.

The worker is a child of the command, with the files that mpiexec gave it, so that the program may use MPI itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from paceline.cli.console import err, refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import checks, failure, start
from paceline.cli.run.conclusion import point_at_logs
from paceline.cli.run.options import RunOptions, StartOptions
from paceline.cli.run.program import Program, starter
from paceline.communication.schedulers import Worker
from paceline.core import parent_death
from paceline.core.world import host_name


def run(own: Worker, program: Program, options: RunOptions) -> int:
    """Run this command's worker to its end; the exit code."""
    asked = options.start
    for option, given in (("--restarts", asked.restarts), ("--print", asked.print_only)):
        if given:
            refuse(f"{option} is for commands that start the workers, and here mpiexec has started them")
    if asked.receipts:
        refuse("--receipts needs a launcher that seals them: start the workers with paceline run, not with mpiexec")
    checks.check_rule(asked.rule, program=program)
    cluster = checks.cluster(1, own.size, own.rank, "mpiexec:1", asked.timeout)
    bare, certificates = starter().serves(program, options.program, own.size), _certificates(options)
    if bare:
        options.tracking.check_zero_lines(0)
    directory = _log_directory(own, cluster, asked)
    environment = {**os.environ, **_variables(own, cluster, directory, options), **certificates}
    environment |= starter().environment(cluster, bare, options.program.random_data)
    ended = _run(program.command(bare), environment, directory, own.rank if bare else 0)
    if ended < 0:  # mpiexec names the process, and not its rank
        err().print(f"worker {own.rank} on {host_name()}: {failure.exit_text(ended)}", markup=False, soft_wrap=True)
    code = failure.exit_code(ended)
    if not code and directory is not None:
        shutil.rmtree(directory / "files" / f"rank-{own.rank:03d}", ignore_errors=True)
    if own.rank == 0 and directory is not None:
        if not asked.quiet:
            point_at_logs(directory)
        if code == 0:
            code = int(starter().work_not_shared(directory, options.program, program, own.size, asked.rule))
    return code


def _variables(own: Worker, cluster: LaunchCluster, directory: Path | None, options: RunOptions) -> dict[str, str]:
    added = start.environment(cluster, options.start.rule, directory or Path())
    added |= start.transport_variable(options.start.transport) | options.tracking.environment()
    if "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // own.local_size))
    if directory is None:
        del added["PACELINE_LOG"]
    return added


def _certificates(options: RunOptions) -> dict[str, str]:
    """The user's certificates: none can be made here, since no command knows that it is the first."""
    security, rule = options.security, options.start.rule
    if security.job is not None:
        refuse("--job is for launchers that make certificates: under mpiexec give --tls FOLDER, or --open")
    if security.tls is not None:
        return {"PACELINE_TLS": str(security.tls.resolve())}
    if rule is not None and checks.check_rule(rule) and not security.in_the_clear:
        refuse(f"--rule {rule} opens connections of its own: under mpiexec give --tls FOLDER, or --open")
    return {}


def _log_directory(own: Worker, cluster: LaunchCluster, options: StartOptions) -> Path | None:
    """The directory that all workers share; None where only the user could name one."""
    log = options.log
    if log is None and own.local_size != own.size:
        if own.rank == 0 and not options.quiet:
            err().print("no logs: on several hosts, --log DIR names a directory that all of them share")
        return None
    if log is None:
        log = Path(checks.LOGS) / _name_of_job()
    return checks.log_directory(log, cluster, options.overwrite)


def _name_of_job() -> str:
    """A name for the logs, from the process of MPI that started all workers of this host: the same for them."""
    launcher = os.getppid()
    began = os.stat(f"/proc/{launcher}").st_ctime
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}-mpi-{launcher}"


def _run(command: list[str], environment: dict[str, str], directory: Path | None, hidden: int) -> int:
    """Run the worker to its exit code, minus a signal's number; a `hidden` rank other than 0 prints into a file."""
    with ExitStack() as stack:
        out = None
        if hidden:
            place = Path(os.devnull)
            if directory is not None:
                (directory / "output").mkdir(exist_ok=True)
                place = directory / "output" / f"rank-{hidden:03d}.out"
            out = stack.enter_context(place.open("wb"))
        worker = subprocess.Popen(
            [*parent_death.starter(), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            close_fds=False,  # one of them leads to mpiexec
        )
        try:
            return worker.wait()
        except BaseException:
            worker.kill()
            worker.wait()
            raise
