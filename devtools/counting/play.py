# SPDX-License-Identifier: Apache-2.0
"""Runs of the counting model through `paceline run`, and what their weights say."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from devtools.counting.job import Job, Kill
from devtools.counting.points import living
from devtools.storm.counting import Count, times
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
PROGRAM, LAUNCHER = HERE / "program.py", HERE / "launcher.py"
DEADLINE_S = 300.0  # of one run
LOOK_S = 0.05
AGAIN = 12  # starts of the launcher, at most


@dataclass(frozen=True)
class Played:
    """What became of a run.

    Attributes:
        kills: that happened.
        lost, repeated: samples of epochs.
        unfinished: 1 where the run did not end well, or left no weights, or weights that differ.
        seconds: it took.
        why: it is unfinished.
    """

    kills: int
    lost: int
    repeated: int
    unfinished: int
    seconds: float
    why: str = ""


def play(job: Job, first: list[str], again: list[str] | None) -> Played:
    """Launch until a launcher ends by itself.

    Args:
        job: of the run.
        first: what `paceline` is to do, without the program.
        again: the same after the launcher was killed, program and all; None: it is launched as it was.
    """
    path, began = str(job.write()), time.monotonic()
    whole = [*first, str(PROGRAM), path]
    arguments, code = whole, -int(signal.SIGKILL)
    for _ in range(AGAIN):
        code = launched(job, path, arguments, began + DEADLINE_S)
        if code != -signal.SIGKILL:
            break
        arguments = whole if again is None else again
    for pid in living(job):
        os.kill(pid, signal.SIGKILL)
    kills = len(list(job.marks.iterdir()))
    seconds = round(time.monotonic() - began, 1)
    if code != 0:
        return Played(kills, 0, 0, 1, seconds, f"the launcher ended with {code}: {tail(job)}")
    return judged(job, kills, seconds)


def launched(job: Job, path: str, arguments: list[str], until: float) -> int:
    """One launcher; its exit code, -1 where it had to be stopped."""
    paths = [os.environ.get("PYTHONPATH", ""), str(HERE.parents[1] / "src")]
    added = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with (Path(job.directory) / "launcher.txt").open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), path, *arguments],
            env={**os.environ, **added},
            stdout=out,
            stderr=out,
            cwd=job.directory,
            start_new_session=True,
        )
    while process.poll() is None:
        if time.monotonic() > until:
            process.terminate()
            process.wait(30.0)
            return -1
        time.sleep(LOOK_S)
    return process.wait()


def tail(job: Job) -> str:
    """What the launchers said last."""
    return (Path(job.directory) / "launcher.txt").read_text(errors="replace")[-2000:]


def judged(job: Job, kills: int, seconds: float) -> Played:
    """What the weights say with which the workers ended."""
    finals = [load_file(path) for path in sorted(job.finals.glob("*.safetensors"))]
    if not finals:
        return Played(kills, 0, 0, 1, seconds, "no worker left its weights")
    if any(not one[name].equal(finals[0][name]) for one in finals for name in one):
        return Played(kills, 0, 0, 1, seconds, "workers ended with different weights")
    try:
        count = Count.of(times(finals[0]["entered"], finals[0]["shares"]))
    except ValueError as error:
        return Played(kills, 0, 0, 1, seconds, str(error))
    return Played(kills, count.lost, count.repeated, 0, seconds)


def plays(
    kinds: list[Kill], number: int, most: int, seed: int, training: frozenset[str], last: int, needs: dict[str, Kill]
) -> list[list[Kill]]:
    """`number` kills in runs of about `most`: each kind in its turn, in random order, spread over the training.

    Args:
        kinds: to draw from.
        number: of kills, at least.
        most: in one run.
        seed: of the order.
        training: places that come again and again in the training; others come when a worker does.
        last: exchange by which all of a run have happened.
        needs: place -> the kill without which nobody comes to it.
    """
    dice, deck, found = random.Random(seed), list[Kill](), list[list[Kill]]()
    while number > sum(len(row) for row in found):
        row: list[Kill] = []
        while len(row) < most:
            exchange = len(row) * last // most
            deck = deck or dice.sample(kinds, len(kinds))
            kill = deck.pop()
            for one in [needs[kill.point], kill] if kill.point in needs else [kill]:
                row.append(replace(one, exchange=exchange) if one.point in training else one)
        found.append(row)
    return found


def summary(played: list[Played]) -> dict[str, Any]:
    """Of all runs of a mode."""
    return {
        "kills": sum(one.kills for one in played),
        "runs": len(played),
        "lost": sum(one.lost for one in played),
        "repeated": sum(one.repeated for one in played),
        "unfinished": sum(one.unfinished for one in played),
        "seconds": round(sum(one.seconds for one in played), 1),
    }
