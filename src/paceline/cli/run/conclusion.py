# SPDX-License-Identifier: Apache-2.0
"""The final messages of `paceline run`, and its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from paceline.cli.console import err, error_panel, near
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.messages import Messages
from paceline.cli.run import failure
from paceline.cli.run.output import missing
from paceline.errors import PacelineError
from paceline.observe.reports.live import Live, LiveSnapshot
from paceline.observe.reports.read import has_run
from paceline.observe.reports.summary import ranks_text, seconds_text, value_text
from paceline.update import few_blocks

if TYPE_CHECKING:
    from paceline.cli.launch.launch import Outcome

ENDING = "PACELINE_ENDING"
MOST_NAMES, MOST_WARNINGS, MOST_PRINTED = 3, 5, 120
"""Hosts or losses that are named; warnings in the summary; characters of the program's line."""


def conclude(outcome: Outcome, cluster: LaunchCluster, directory: Path, seconds: float, quiet: bool) -> int:
    """Print how the run ended; the exit code."""
    if outcome.codes:
        code = failed(outcome)
    elif outcome.stopped_by is not None:
        code = stopped(outcome.stopped_by)
    elif outcome.error is not None:
        if outcome.workers:
            _ended_elsewhere(outcome.error)
        else:
            _not_started(outcome.error, cluster)
        code = 1
    elif outcome.lost:
        files = {worker.rank: worker.stderr for worker in outcome.workers}
        code = finished_without(outcome.lost, files, seconds)
    else:
        code = finished(directory, quiet, len(outcome.workers), outcome.messages)
    if not quiet:
        point_at_logs(directory)
    return code


def finished(directory: Path, quiet: bool, workers: int, messages: Messages, kind: str = "worker") -> int:
    """Print what a finished run has reached, and what went wrong; the exit code.

    Args:
        directory: of the logs.
        quiet: print only what went wrong.
        workers: of this host.
        messages: of the workers.
        kind: of the workers.
    """
    live, lines = Live(directory), list[str]()
    shot = live.poll()
    if not quiet:
        reached = _reached(live, shot, messages, kind == "worker")
        lines.append(f"{workers} {kind}{'s' if workers > 1 else ''} finished{': ' if reached else ''}{reached}")
        lines += [f"printed last: {messages.held_out[:MOST_PRINTED]}"] if messages.held_out else []
    blocks, each = max((one.block for one in live.workers), default=0), max(shot.minibatches.values(), default=0)
    if shot.elastic_status is None and shot.delay is None:
        few = few_blocks.after(shot.rule, shot.size, each, blocks)
        lines += [f"warning: {few}"] if few else []
    lines += [f"auto chose {messages.choices} times: see the lines above"] if messages.choices > 1 else []
    lines += [f"warning: {text}" for text in messages.warnings[:MOST_WARNINGS]]
    if (more := len(messages.warnings) - MOST_WARNINGS) > 0:
        lines.append(f"and {more} other warnings: see {near(directory / 'output')}")
    if why := missing(directory):
        lines.append(f"warning: the log directory {near(directory)} {why}: the logs are incomplete")
    useless = {rank for one in live.workers for rank in one.always_rejected}
    if useless:
        lines.append(f"{ranks_text(sorted(useless))} contributed nothing to the model: exit code {failure.LOST}")
    for line in lines:
        err().print(line, markup=False, soft_wrap=True)
    return failure.LOST if useless else 0


def _reached(live: Live, shot: LiveSnapshot, messages: Messages, real: bool) -> str:
    """Loss, throughput and efficiency, as far as they are known; a loss is the mean of the workers that have one."""
    losses, parts = dict[str, list[float]](), list[str]()
    for one in live.workers:
        for name, (_, value) in one.losses.items():
            losses.setdefault(name, []).append(value)
    for name, all_ in list(losses.items())[:MOST_NAMES]:
        numbers = [value for value in all_ if value == value] or all_  # a warning tells of a worker with NaN
        parts.append(f"{name} {value_text(sum(numbers) / len(numbers))}")
    if not parts and messages.loss:
        parts.append(f"loss {messages.loss} (printed)")
    seconds = max((one.at_s for one in live.workers), default=0.0)
    if shot.total and seconds:
        samples = sum(one.samples for one in live.workers)
        speed = f"{(samples or shot.total) / seconds:,.0f} {'samples' if samples else 'minibatches'}/s"
        parts.append(f"{shot.total:,} minibatches in {seconds_text(seconds)} ({speed})")
    if shot.size > 1 and real:
        parts.append(f"efficiency {100 * (1 - shot.exchange_share):.0f} %")
    return ", ".join(parts)


def stopped(number: int) -> int:
    """Report the signal that ended the run; the exit code."""
    err().print(f"stopped by {failure.signal_name(number)}: no worker is left")
    return 128 + number


def failed(outcome: Outcome) -> int:
    """Print the panel of the worker that failed first; its exit code."""
    return report_failure(outcome.codes, {worker.rank: worker.stderr for worker in outcome.workers})


def report_failure(codes: Mapping[int, int], files: Mapping[int, Path], hosts: Sequence[str] = ()) -> int:
    """The same, from exit codes and files of stderr by rank; `hosts`: of each rank, where it is not this one."""
    rank = failure.culprit(codes, files)
    code = codes[rank]
    ranks = failure.same_error_ranks(rank, codes, files) if code > 0 else [rank]
    names = dict.fromkeys(hosts[other] for other in ranks) if hosts else []
    host = ", ".join(list(names)[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "") or None
    err().print(failure.panel(rank, code, files[rank], len(files) - len(ranks), ranks=ranks, host=host))
    return failure.exit_code(code)


def finished_without(
    lost: Mapping[int, int], files: Mapping[int, Path], seconds: float, hosts: Sequence[str] = ()
) -> int:
    """Report lost workers; the exit code tells of them."""
    for rank, code in sorted(lost.items()):
        host = hosts[rank] if hosts else None
        err().print(failure.panel(rank, code, files[rank], 0, "was lost; the other workers continued", host=host))
    names, count = ", ".join(str(rank) for rank in sorted(lost)), len(files) - len(lost)
    plural, here = "s" if count != 1 else "", "" if hosts else " here"
    err().print(f"{count} worker{plural} finished{here} after {seconds_text(seconds)}, without {names}")
    return failure.LOST


def _ended_elsewhere(error: BaseException) -> None:
    """Report a run that ended because of another host."""
    hint = "the workers of this host were stopped; see the output of the launcher there"
    if not isinstance(error, PacelineError):
        hint = f"the workers of this host were stopped ({type(error).__name__})"
    parts = (Text(str(error), style="bold red"), Text(hint, style="default"))
    err().print(error_panel("the run ended", *parts))


def _not_started(error: BaseException, cluster: LaunchCluster) -> None:
    cause = f"{type(error).__name__}: {error}"
    if cluster.master is None:
        err().print(error_panel("no worker was started", Text(cause, style="bold red")))
        return
    host, port = cluster.master
    summary = f"the {cluster.hosts} hosts did not meet at {host}:{port} within {cluster.timeout_s:g} s"
    hint = f"start the command on each host, with --host-index 0 to {cluster.hosts - 1}; all must reach that address"
    parts = (Text(summary, style="bold red"), Text(cause, style="dim"), Text(hint, style="default"))
    err().print(error_panel(f"host {cluster.host_index} started no worker", *parts))


def point_at_logs(directory: Path) -> None:
    """Print where the logs and the workers' output are."""
    how = f"; see them with: paceline report {shlex.quote(near(directory))}" if has_run(directory) else " (in output/)"
    err().print(f"logs: {near(directory)}{how}", soft_wrap=True)


PRIVATE = {"certificates": "its keys", "files": "each worker's own files"}
"""Folders of a run: its certificates, and what workers other than rank 0 wrote in place of the program's files."""


def clear(directory: Path, code: int, quiet: bool = False, cluster: LaunchCluster | None = None) -> int:
    """Remove the keys and the workers' own files of a run that ended well, else print where they are; the exit code.

    Hosts other than 0 remove their own ones alone: where they share a disk, host 0 may still need the rest.
    """
    kept = {directory / name: what for name, what in PRIVATE.items() if (directory / name).exists()}
    folders = list(kept)
    if cluster is not None and cluster.host_index:
        first = cluster.host_index * cluster.workers
        folders = [directory / "files" / f"rank-{first + k:03d}" for k in range(cluster.workers)]
        folders.append(directory / "certificates" / f"host-{cluster.host_index}")
    for folder in () if code else folders:
        shutil.rmtree(folder, ignore_errors=True)
    if code and kept and not quiet:
        where = ", ".join(f"{what} in {near(folder)}" for folder, what in kept.items())
        err().print(f"kept, as the run failed: {where}", markup=False, soft_wrap=True)
    return code


def take_ending_file() -> Path | None:
    """Where this launcher writes how it ended, for the process that started it; its workers do not see the variable."""
    name = os.environ.pop(ENDING, "")
    return Path(name) if name else None


def write_ending(path: Path | None, outcome: Outcome) -> None:
    """Write `{"codes": {"1": -9}, "lost": {}}`, where that was asked for."""
    if path is not None:
        with contextlib.suppress(OSError):  # a full disk: the exit code is still there
            path.write_text(json.dumps({"codes": outcome.codes, "lost": outcome.lost}), encoding="utf-8")
