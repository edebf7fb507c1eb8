# SPDX-License-Identifier: Apache-2.0
"""Decide whether `paceline run` adds zero lines: to torch programs for one device, without cluster code."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from rich.text import Text

from paceline.cli.console import err, error_panel, refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run.options import ProgramOptions
from paceline.cli.run.program import FUNCTION, Program
from paceline.observe.event_log import nothing_attached
from paceline_plugins.zero import cluster_detection, forks, framework_doors, hashing, module_file

EXECUTABLE = (
    "attach with paceline's C library, or let paceline blocks merge the model files of an unchanged tool: "
    "see docs/guide/tools.md"
)
find_module, fork_server, ZERO_LINES = module_file.find, forks.fork_server, forks.ZERO_LINES
LINES = "PACELINE_LINES"
"""`zero` or `random-data`, for the receipts: how the program runs again."""
SEED = "PACELINE_SEED"  # of paceline_plugins.zero.seeds, which loads torch


def serves(program: Program, options: ProgramOptions, workers: int) -> bool:
    """Whether to add zero lines to the program; prints why not if a user may expect them.

    Refuses a program that would certainly do the whole job on each of several workers.
    """
    if program.source is None:
        _refuse_for_executable(program, options)
        return False
    if options.as_is:
        if options.random_data:
            refuse("--random-data is for programs that run with zero lines: leave out --as-is")
        if options.force_zero_lines:
            refuse("--as-is and --force-zero-lines exclude each other: give one of them")
        return False
    names = cluster_detection.imported(program.source, program.root)
    own = cluster_detection.attaches(names)
    if options.force_zero_lines:
        if own:
            refuse(f"--force-zero-lines is for programs without paceline, and {program.name} {_why('')}")
        return True
    if cluster_detection.bare(names):
        return True
    other = cluster_detection.other_cluster(names) if not own else ""
    if options.random_data:
        force = f"; {framework_doors.FORCE}" if other else ""
        refuse(f"--random-data is for unchanged programs on one device, and {program.name} {_why(other)}{force}")
    framework, advice = framework_doors.of_framework(names) if not own else ("", "")
    why, advice = (_why(other), framework_doors.of_cluster(other)) if other else (f"trains with {framework}", advice)
    if workers > 1 and (other or framework):
        refuse(
            f"{program.name} {why}, and does not attach paceline: {workers} workers would do the whole job each; "
            f"{advice}; --as-is starts copies"
        )
    if other:
        err().print(f"{program.name} {_why(other)}: it runs without zero lines")
    elif workers > 1 and not own:
        err().print(
            f"{program.name} does not use torch, as far as its imports show: it runs without zero lines, and each of "
            f"{workers} workers does the whole job; {framework_doors.IF_TORCH}"
        )
    return False


def _refuse_for_executable(program: Program, options: ProgramOptions) -> None:
    for option, given in (("--random-data", options.random_data), ("--force-zero-lines", options.force_zero_lines)):
        if given:
            refuse(
                f"{option} is for Python programs, and {program.name} is an executable, which cannot have zero lines: "
                f"{EXECUTABLE}"
            )


def _why(other: str) -> str:
    return f"uses {other}, which makes a cluster itself" if other else "attaches paceline itself, or does not use torch"


def work_not_shared(directory: Path, options: ProgramOptions, program: Program, workers: int, rule: str | None) -> bool:
    """Whether each of several workers did the whole job by mistake; prints that."""
    intended = (options.as_is and rule is None) or module_file.asks_for_help(program.arguments)
    if workers == 1 or intended or not nothing_attached(directory):
        return False
    under = f" The rule {rule} was never used." if rule is not None else ""
    what = f"nothing attached paceline: each of the {workers} workers did the whole job by itself.{under}"
    hint = (
        "add paceline.attach and run.share to the program, or use the adapter of its framework "
        "(docs/guide/frameworks.md); "
        f"{framework_doors.IF_TORCH}"
    )
    copies = "--as-is starts independent copies"
    if program.is_tool:
        hint = EXECUTABLE
    elif FUNCTION in program.words:
        hint = "call paceline.attach and run.share inside the function that launch is given"
        copies = "launch(.., as_is=True) calls it in independent processes"
    parts = (Text(what, style="bold red"), Text(f"{hint}; {copies}", style="default"))
    err().print(error_panel("the work was not shared", *parts))
    return True


def environment(cluster: LaunchCluster, bare: bool, random_data: bool) -> dict[str, str]:
    """Variables of workers with zero lines: a common seed, and whether their samples must differ.

    Several hosts have no common seed here; their workers derive one from the name of the start.
    """
    added = {"PACELINE_RANDOM_DATA": "1"} if random_data else {}
    if bare:
        added[LINES] = "random-data" if random_data else "zero"
    if not bare or cluster.size == 1:
        return added
    if hashing.is_random(os.environ):
        added[hashing.VARIABLE] = hashing.SEED
    if cluster.hosts == 1 and not os.environ.get(SEED):
        added[SEED] = str(secrets.randbits(48))
    return added


def refuse_elastic(program: Program | None, options: ProgramOptions) -> None:
    """Refuse an elastic run of a program that does not attach."""
    for option, given in (("--random-data", options.random_data), ("--force-zero-lines", options.force_zero_lines)):
        if given:
            refuse(f"{option} is not for --elastic: there the program has to attach paceline itself")
    if program is None or program.source is None or options.as_is:
        return
    if cluster_detection.unaware(program.source, program.root):
        refuse(
            f"{program.name} does not attach paceline, and with --elastic it has to: add run = paceline.attach(model, "
            "optimizer) before its loop, and run.share(loader) to its loop"
        )
