# SPDX-License-Identifier: Apache-2.0
"""Start the workers of a run, and show their output with a status line below it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.live import Live as Screen

from paceline.cli.console import out
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.prestart import prestart
from paceline.cli.run import failure, output, status
from paceline.observe.reports.live import Live

if TYPE_CHECKING:
    from paceline.cli.launch.launch import Outcome
    from paceline.cli.launch.spawn import Command, WorkerProcess


def environment(cluster: LaunchCluster, rule: str | None, directory: Path) -> dict[str, str]:
    """Variables that the workers get in addition to the launcher's own."""
    added = {
        "PACELINE_LOG": str(directory),
        "PACELINE_RUN": secrets.token_hex(8),
        "PACELINE_TIMEOUT_S": f"{cluster.timeout_s:g}",
        **loaded(cluster),
    }
    return added | ({} if rule is None else {"PACELINE_RULE": rule, "PACELINE_RULE_ASKED": "1"})


def count(cluster: LaunchCluster) -> str:
    """How many workers start on this host, for messages."""
    here = "1 worker" if cluster.workers == 1 else f"{cluster.workers} workers"
    return here if cluster.hosts == 1 else f"{here} on host {cluster.host_index} of {cluster.hosts}"


def loaded(cluster: LaunchCluster) -> dict[str, str]:
    """Those that Python and its libraries read when they are loaded."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // cluster.workers))
    return {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}


def transport_variable(transport: str) -> dict[str, str]:
    """The variable by which the workers learn of `--transport`."""
    return {} if transport == "auto" else {"PACELINE_TRANSPORT": transport}


@contextlib.contextmanager
def shown(
    directory: Path, workers: int, quiet: bool, rank_0_only: bool = False, names: Mapping[int, str] = output.EACH_RANK
) -> Iterator[output.Show]:
    """A function that prints a worker's line; unless `quiet`, a terminal gets a status line below it, and any other
    output one now and then.

    `rank_0_only`: print rank 0's lines alone, without the rank in front. `names`: printed instead of a rank.
    """
    console = out()
    show = output.shower(console, rank_0_only, names)
    if quiet:
        yield show
    elif console.is_terminal:
        live = Live(directory)
        line = status.Redrawn(lambda: status.describe(live.poll(), workers))
        with Screen(line, console=console, transient=True, refresh_per_second=4):
            yield show
    else:
        with status.lines(Live(directory), workers):
            yield show


def follow(cluster: LaunchCluster, command: Command, show: output.Show) -> Outcome:
    """Launch the workers and show everything that they print, until the last one ends."""
    tails = output.Tails(show)
    reported: set[int] = set()

    def on_poll(workers: list[WorkerProcess], stopping: bool, lost: dict[int, int]) -> None:
        tails.mute_errors = stopping  # N tracebacks of KeyboardInterrupt say nothing new
        for worker in workers[len(tails) :]:
            tails.follow(worker.rank, worker.stdout, worker.stderr)
        tails.read()
        for rank in sorted(lost.keys() - reported):
            reported.add(rank)
            show(rank, f"this worker is lost: {failure.exit_text(lost[rank])}; the other workers continue", True)

    with prestart(cluster, command) as prestarted:
        # here, because torch loads for seconds: the workers load it at the same time
        from paceline.cli.launch.launch import launch

        outcome = launch(cluster, command, on_poll, prestarted)
    on_poll(outcome.workers, outcome.stopped_by is not None, outcome.lost)
    tails.finish(failed=bool(outcome.codes))
    return replace(outcome, messages=tails.messages)
