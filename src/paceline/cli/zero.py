# SPDX-License-Identifier: Apache-2.0
"""Which programs `paceline run` starts with zero lines around them: for torch on one device, that know no cluster."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from paceline.zero import hashing, mentions

from .cluster import Cluster
from .console import err, refuse

SEED = "PACELINE_SEED"  # of paceline.zero.seeds, which loads torch


def serves(script: Path, as_is: bool, random_data: bool) -> bool:
    """Whether zero lines go around the program; says why not, where a user may wonder."""
    if as_is:
        if random_data:
            refuse("--random-data is for programs that are started with zero lines around them: leave out --as-is")
        return False
    names = mentions.imported(script)
    if mentions.bare(names):
        return True
    other = mentions.other_cluster(names) if "torch" in names else ""
    if random_data:
        refuse(f"--random-data is for programs on one device as they are, and {script.name} {_why(other)}")
    if other:
        err().print(f"{script.name} {_why(other)}: it is started as it is")
    return False


def _why(other: str) -> str:
    return f"uses {other}, which makes a cluster itself" if other else "attaches paceline itself, or does not use torch"


def environment(cluster: Cluster, bare: bool, random_data: bool) -> dict[str, str]:
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


def refuse_elastic(script: Path | None, as_is: bool, random_data: bool) -> None:
    """Workers that come and go need a program that attaches."""
    if random_data:
        refuse("--random-data is not for --elastic: there the program has to attach paceline itself")
    if script is not None and not as_is and mentions.unaware(script):
        refuse(
            f"{script.name} does not attach paceline, and with --elastic it has to: add run = paceline.attach(model, "
            "optimizer) before its loop, and run.share(loader) to its loop"
        )
