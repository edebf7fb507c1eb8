# SPDX-License-Identifier: Apache-2.0
"""Runs of the counting model under asynchronous rules: owners of every piece are killed at every place."""

from __future__ import annotations

import random
import time
from pathlib import Path

from devtools.counting.play import Played
from devtools.counting.pushes import Death, Pushes, Verdict, play

WORKERS, STEPS, PIECES = 5, 22, 2  # steps of a worker and pieces of an owner, about
PLACES = {  # place -> the latest time that it is come to, about
    "step": STEPS,
    "stepped": STEPS,
    "torn": STEPS * PIECES * (WORKERS - 1),
    "applied": STEPS * PIECES * WORKERS,
    "answered": STEPS * PIECES * (WORKERS - 1),
    "sends": 2 * PIECES,
    "kept": 2 * PIECES,
    "told": 2 * PIECES,
    "done": STEPS * 3,
    "dry": 2,
    "finish": 1,
    "part": 1,
}


def deaths_of(number: int, dice: random.Random) -> list[Death]:
    """Two workers of whom neither keeps the other's replicas, each at a place of its own."""
    names = list(PLACES)
    first = number % WORKERS
    ranks = (first, (first + 2) % WORKERS)
    found = []
    for k, rank in enumerate(ranks):
        place = names[(2 * number + k) % len(names)]
        if place == "done" and rank:
            rank = ranks[0] if k else rank
            place = place if rank == 0 else "applied"
        found.append(Death(rank, place, dice.randint(1, PLACES[place])))
    return found


def runs(rule: str, kills: int, seed: int, directory: Path) -> list[Played]:
    """Runs of two deaths each until so many workers were killed."""
    dice, found, number = random.Random(seed), list[Played](), seed
    while sum(one.kills for one in found) < kills:
        began = time.monotonic()
        job = Pushes(rule=rule, workers=WORKERS, deaths=deaths_of(number, dice), pauses=[0.001, 0.002, 0.003])
        verdict = play(job, directory / f"{number}", deadline_s=120.0)
        found.append(played(verdict, time.monotonic() - began))
        say(rule, number, job, found[-1])
        if found[-1].unfinished and not found[-1].kills:  # no worker came to a place: the next run would do no better
            break
        number += 1
    return found


def played(verdict: Verdict, seconds: float) -> Played:
    """What became of a run, in the terms of the other modes."""
    why = "; ".join(verdict.errors)
    if not verdict.agree:
        why = "workers ended with different weights; " + why
    bad = bool(verdict.errors) or not verdict.agree
    return Played(len(verdict.killed), verdict.lost, verdict.repeated, int(bad), round(seconds, 1), why)


def say(rule: str, number: int, job: Pushes, one: Played) -> None:
    """A line about a run."""
    places = "  ".join(f"rank {death.rank} {death.point} {death.nth}" for death in job.deaths)
    print(
        f"{rule:22s} {number:3d}  {one.kills} kills  lost {one.lost}  repeated {one.repeated}  {one.seconds:5.1f} s  "
        f"{places}  {one.why}",
        flush=True,
    )


def asgd(directory: Path, kills: int, seed: int, quick: bool) -> list[Played]:
    """Gradients are added."""
    return runs("asgd", 2 if quick else kills, seed, directory / "asgd")


def dc_asgd(directory: Path, kills: int, seed: int, quick: bool) -> list[Played]:
    """Gradients are compensated for their delay."""
    return runs("dc_asgd(strength=0.01)", 2 if quick else kills, seed + 1, directory / "dc_asgd")
