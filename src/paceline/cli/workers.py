# SPDX-License-Identifier: Apache-2.0
"""Workers for commands of other distributions: processes of this host, started as `paceline run` starts them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.launch.spawn import Command
from paceline.cli.run import checks, fixed
from paceline.cli.run.conclusion import clear, conclude
from paceline.cli.run.options import Security

TIMEOUT_S = 600.0


def run_on_workers(arguments: Sequence[str], workers: int, directory: Path, rule: str | None = None) -> int:
    """Start a command in `workers` processes of this host, show what they print, and wait for them.

    `paceline.attach` takes `rule` from the environment if the program names none. Logs of an earlier run in `directory`
    are replaced.

    Args:
        arguments: the command, such as `[sys.executable, "-m", "mine.worker", "folder"]`.
        workers: number of processes, at least 1.
        directory: where the event logs and the workers' output go.
        rule: such as "bmuf(period=16)"; None leaves it to the program.

    Returns:
        The exit code: 0, or that of the worker that failed first.

    Raises:
        typer.Exit: the rule or the number of workers cannot be; the reason is printed.
    """
    cluster = checks.cluster(workers, 1, 0, None, TIMEOUT_S)
    announces = checks.check_rule(rule)
    logs = checks.log_directory(directory, cluster, overwrite=True)
    security = Security()
    added = fixed.environment(cluster, rule, logs, security, announces)
    sign = fixed.signing(cluster, logs, security, announces)
    started = time.monotonic()
    outcome = fixed.launch(cluster, Command(list(arguments), added, logs / "output", sign))
    return clear(logs, conclude(outcome, cluster, logs, time.monotonic() - started, False))
