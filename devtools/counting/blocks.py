# SPDX-License-Identifier: Apache-2.0
"""Kills of the counting model under block rules: `paceline run --elastic`, and `--restarts`."""

from __future__ import annotations

from pathlib import Path

from devtools.counting.job import Job, Kill
from devtools.counting.play import Played, play, plays

TRAINING = frozenset({"step", "stepped", "exchange", "summed", "commit", "verdict", "applied"})
STEPS = frozenset({"written", "finish", "finished", "tidy"})
CONTROL = frozenset({"record", "recorded", "said"})
NEWCOMER, RESTORED = Kill("step"), Kill("stepped", 0, "all")
NEEDS = {"give": NEWCOMER, "take": NEWCOMER} | dict.fromkeys(("resume", "loaded", "resumed"), RESTORED)
FIRST_EPOCH = [  # what everybody asks first: nobody is left, before anything counts and right after
    Kill("step", 0, "all"),
    Kill("commit", 0, "all"),
    Kill("stepped", 1, "all"),
    Kill("resume"),
    Kill("exchange", 2, "all"),
]
ELASTIC = [
    *(Kill(point) for point in ("attach", "holds", "take", "give", "resume", "loaded", "resumed")),
    *(Kill(point) for point in (*sorted(TRAINING), *sorted(STEPS))),
    *(Kill(point, 0, "all") for point in (*sorted(TRAINING), "written", "finish", "finished", "leave")),
    *(Kill(point, 0, "control") for point in (*sorted(CONTROL), "commit", "verdict")),
    Kill("recorded", 0, "all"),
]
RESTARTS = [
    *(Kill(point) for point in ("attach", "resume", "loaded", "resumed", "step", "stepped", "exchange", "leave")),
    *(Kill(point) for point in sorted(STEPS)),
    *(Kill(point, 0, "all") for point in ("step", "stepped", "exchange", "written", "finish", "finished")),
    *(Kill(point, 0, "control") for point in ("step", "exchange", "finish", "resume")),
]
LAST = 18  # exchange, of about 20 with three workers


def elastic(directory: Path, kills: int, seed: int, quick: bool) -> list[Played]:
    """An elastic run of three workers after another; a short one of two in the quick form."""
    found = []
    workers, epochs = (2, 1) if quick else (3, 3)
    rows = (
        [[Kill("commit")]]
        if quick
        else [FIRST_EPOCH, *plays(ELASTIC, kills, 6, seed, TRAINING | STEPS | CONTROL, LAST, NEEDS)]
    )
    for number, row in enumerate(rows):
        place = f"{directory}/elastic-{number}"
        job = Job(place, workers=workers, epochs=epochs, checkpoint=f"{place}/steps", kills=row)
        log = f"{job.directory}/log"
        ask = ["run", "--elastic", "1:4", "--workers", f"{workers}", "--timeout", f"{job.timeout_s:g}", "--log", log]
        found.append(play(job, ask, ["run", "--again", log]))
        say("elastic", number, row, found[-1])
    return found


def restarts(directory: Path, kills: int, seed: int, quick: bool) -> list[Played]:
    """A run of two workers that is started again; a short one in the quick form."""
    found = []
    epochs = 1 if quick else 3
    first = [Kill("step", 0), Kill("stepped", 1, "all"), Kill("resume"), Kill("exchange", 2, "all")]
    rows = (
        [[Kill("finished")]]
        if quick
        else [first, *plays(RESTARTS, kills, 6, seed, TRAINING | STEPS, LAST, {"loaded": RESTORED})]
    )
    for number, row in enumerate(rows):
        place = f"{directory}/restarts-{number}"
        job = Job(place, workers=2, epochs=epochs, checkpoint=f"{place}/steps", every_blocks=1, kills=row)
        ask = ["run", "--workers", "2", "--restarts", str(len(row)), "--timeout", f"{job.timeout_s:g}"]
        found.append(play(job, [*ask, "--log", f"{place}/log", "--overwrite"], None))
        say("restarts", number, row, found[-1])
    return found


def say(mode: str, number: int, row: list[Kill], played: Played) -> None:
    """A line about a run."""
    names = " ".join(f"{kill.point}{'' if kill.whom == 'self' else ':' + kill.whom}" for kill in row)
    print(
        f"{mode:9s} {number:2d}  {played.kills} of {len(row)} kills  lost {played.lost}  repeated {played.repeated}  "
        f"{played.seconds:5.1f} s  {names}  {played.why}",
        flush=True,
    )
