# SPDX-License-Identifier: Apache-2.0
"""Which programs `paceline run` starts with zero lines around them: for torch on one device, that know no cluster."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from paceline.cli.console import err, error_panel, refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.doors.zero import cluster_detection, framework_doors, hashing
from paceline.run import attach_marker

SEED = "PACELINE_SEED"  # of paceline.doors.zero.seeds, which loads torch


@dataclass(frozen=True)
class ZeroLineOptions:
    """What the options say about zero lines.

    Attributes:
        as_is: start the program as it is.
        force: go around it though it knows a cluster.
        random_data: the program makes its samples itself, at random.
    """

    as_is: bool = False
    force: bool = False
    random_data: bool = False


def serves(script: Path, wishes: ZeroLineOptions, workers: int) -> bool:
    """Whether zero lines go around the program; says why not, where a user may wonder.

    Refused is what would do the whole job on each of several workers, where that is known before it begins.
    """
    if wishes.as_is:
        if wishes.random_data:
            refuse("--random-data is for programs that are started with zero lines around them: leave out --as-is")
        if wishes.force:
            refuse("--as-is and --force-zero-lines exclude each other: give one of them")
        return False
    names = cluster_detection.imported(script)
    own = cluster_detection.attaches(names)
    if wishes.force:
        if own:
            refuse(f"--force-zero-lines is for programs that do not know of paceline, and {script.name} {_why('')}")
        return True
    if cluster_detection.bare(names):
        return True
    other = cluster_detection.other_cluster(names) if not own else ""
    if wishes.random_data:
        refuse(f"--random-data is for programs on one device as they are, and {script.name} {_why(other)}")
    framework, door = framework_doors.of_framework(names) if not own else ("", "")
    why, door = (_why(other), framework_doors.of_cluster(other)) if other else (f"trains with {framework}", door)
    if workers > 1 and (other or framework):
        _refuse_copies(script, workers, why, door)
    if other:
        err().print(f"{script.name} {_why(other)}: it is started as it is")
    return False


def _refuse_copies(script: Path, workers: int, why: str, door: str) -> None:
    refuse(
        f"{script.name} {why}, and does not attach paceline: {workers} workers would each do the whole job. To share "
        f"it, {door}. --as-is starts {workers} of it as they are"
    )


def _why(other: str) -> str:
    return f"uses {other}, which makes a cluster itself" if other else "attaches paceline itself, or does not use torch"


def all_alone(
    directory: Path, wishes: ZeroLineOptions, arguments: Sequence[str] | None, workers: int, rule: str | None
) -> bool:
    """Whether each of several workers has done the whole job, though nobody wished it; says so.

    Args:
        directory: of the logs.
        arguments: of the program.
        wishes: the options.
        workers: of all hosts.
        rule: that was asked for, if any.
    """
    wished = (wishes.as_is and rule is None) or attach_marker.asks_for_help(arguments or ())
    if workers == 1 or wished or not attach_marker.is_missing(directory):
        return False
    under = f" The rule {rule} was never used." if rule is not None else ""
    what = f"nothing attached paceline: each of the {workers} workers has done the whole job by itself.{under}"
    hint = (
        "add paceline.attach and run.share to the program, or take the door of its framework (docs/frameworks.md); "
        "--as-is says that so many copies are wanted"
    )
    err().print(error_panel("the work was not shared", Text(what, style="bold red"), Text(hint, style="default")))
    return True


def environment(cluster: LaunchCluster, bare: bool, random_data: bool) -> dict[str, str]:
    """For the workers of a program with zero lines around it: what makes them draw alike, and whether they are not to.

    Several hosts cannot agree on a seed that is drawn here; their workers make one of what names the start.
    """
    added = {"PACELINE_RANDOM_DATA": "1"} if random_data else {}
    if not bare or cluster.size == 1:
        return added
    if hashing.is_random(os.environ):
        added[hashing.VARIABLE] = hashing.SEED
    if cluster.hosts == 1 and not os.environ.get(SEED):
        added[SEED] = str(secrets.randbits(48))
    return added


def refuse_elastic(script: Path | None, wishes: ZeroLineOptions) -> None:
    """Workers that come and go need a program that attaches."""
    for option, given in (("--random-data", wishes.random_data), ("--force-zero-lines", wishes.force)):
        if given:
            refuse(f"{option} is not for --elastic: there the program has to attach paceline itself")
    if script is not None and not wishes.as_is and cluster_detection.unaware(script):
        refuse(
            f"{script.name} does not attach paceline, and with --elastic it has to: add run = paceline.attach(model, "
            "optimizer) before its loop, and run.share(loader) to its loop"
        )
