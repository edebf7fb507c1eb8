# SPDX-License-Identifier: Apache-2.0
"""The closing words of `paceline run`, and its exit code."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from paceline.cli.console import err, error_panel, near
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import failure
from paceline.errors import PacelineError
from paceline.observe.reports.read import has_run
from paceline.observe.reports.summary import seconds_text

if TYPE_CHECKING:
    from paceline.cli.launch.launch import Outcome


def conclude(outcome: Outcome, cluster: LaunchCluster, directory: Path, seconds: float, quiet: bool) -> int:
    """Say how it ended; the exit code."""
    console = err()
    if outcome.codes:
        code = failed(outcome)
    elif outcome.stopped_by is not None:
        console.print(f"stopped by {failure.signal_name(outcome.stopped_by)}: no worker is left")
        code = 128 + outcome.stopped_by
    elif outcome.error is not None:
        if outcome.workers:
            _ended_elsewhere(outcome.error)
        else:
            _not_started(outcome.error, cluster)
        code = 1
    elif outcome.lost:
        code = _finished_without(outcome, seconds)
    else:
        code = 0
        if not quiet:
            count = len(outcome.workers)
            plural = "s" if count > 1 else ""
            console.print(f"{count} worker{plural} finished after {seconds_text(seconds)}")
    if not quiet:
        _point_at(directory)
    return code


def failed(outcome: Outcome) -> int:
    files = {worker.rank: worker.stderr for worker in outcome.workers}
    rank = failure.culprit(outcome.codes, files)
    code = outcome.codes[rank]
    ranks = failure.alike(rank, files) if code > 0 else [rank]
    err().print(failure.panel(rank, code, files[rank], len(outcome.workers) - len(ranks), ranks=ranks))
    return failure.exit_code(code)


def _finished_without(outcome: Outcome, seconds: float) -> int:
    """Some were lost on the way; the exit code says so."""
    count, files = len(outcome.workers) - len(outcome.lost), {worker.rank: worker.stderr for worker in outcome.workers}
    for rank, code in sorted(outcome.lost.items()):
        err().print(failure.panel(rank, code, files[rank], 0, "was lost; the others went on without it"))
    names = ", ".join(str(rank) for rank in sorted(outcome.lost))
    plural = "s" if count != 1 else ""
    err().print(f"{count} worker{plural} finished here after {seconds_text(seconds)}, without {names}")
    return failure.LOST


def _ended_elsewhere(error: BaseException) -> None:
    """The workers were fine, but could not go on."""
    hint = "the workers of this host were stopped; the launcher over there says more"
    if not isinstance(error, PacelineError):
        hint = f"the workers of this host were stopped ({type(error).__name__})"
    parts = (Text(str(error), style="bold red"), Text(hint, style="default"))
    err().print(error_panel("the run ended", *parts))


def _not_started(error: BaseException, cluster: LaunchCluster) -> None:
    cause = f"{type(error).__name__}: {error}"
    if cluster.master is None:
        err().print(error_panel("no worker was started", Text(cause, style="bold red")))
        return
    where = f"{cluster.master[0]}:{cluster.master[1]}"
    says = f"the {cluster.hosts} hosts did not meet at {where} within {cluster.timeout_s:g} s"
    hint = (
        f"start the same command on each host, with --host-index 0 to {cluster.hosts - 1}, and "
        "check that all of them can reach that address"
    )
    parts = (Text(says, style="bold red"), Text(cause, style="dim"), Text(hint, style="default"))
    err().print(error_panel(f"host {cluster.host_index} started no worker", *parts))


def _point_at(directory: Path) -> None:
    shown = near(directory)
    if has_run(directory):
        err().print(f"logs: {shown}; see them with: paceline report {shlex.quote(shown)}", soft_wrap=True)
    else:
        err().print(f"the workers' output: {os.path.join(shown, 'output')}", soft_wrap=True)
