# SPDX-License-Identifier: Apache-2.0
"""One run, step by step, and one thing that goes wrong, at every step of it in turn."""

from __future__ import annotations

import random

import pytest

from paceline.flow.control.messages import Terms
from tests.flow.control.model import Run, Worker, act, beat, come_back

STEPS = 60
EVERY = 1
TROUBLES = (
    "restart",
    "crash",
    "die",
    "freeze",
    "fail",
    "join",
    "die and restart",
    "crash and die",
    "leave",
    "leave and restart",
)


def step(run: Run, draw: random.Random) -> None:
    """One worker hears one thing or does one, and a little time passes."""
    one = draw.choice(list(run.workers.values()))
    if one.away:
        come_back(run, one)
    elif one.inbox and not one.frozen:
        run.deliver(one)
    else:
        act(run, one)
    tick(run, 0.05)


def tick(run: Run, seconds: float) -> None:
    """Time passes, and all who can let hear of themselves."""
    run.now += seconds
    for one in list(run.workers.values()):
        if one.number in run.workers and not (one.frozen or one.away):
            run.do(beat, run, one)
    run.do(lambda now: run.machine.tick(now))


def happen(run: Run, trouble: str, draw: random.Random) -> None:
    """What goes wrong."""
    for what in trouble.split(" and "):
        one = draw.choice(list(run.workers.values()))
        if what == "restart":
            run.restart()
        elif what == "crash":
            run.crash_next = True
        elif what == "die":
            run.die(one)
        elif what == "freeze":
            one.frozen = True
        elif what == "fail" and one.ready and not one.trains:
            run.fail(one, [draw.choice(one.generation.workers)])
        elif what == "leave" and one.trains:
            run.leave_early(one)
        elif what == "join":
            run.join()


def finish(run: Run) -> None:
    """Everybody who answers comes to the end of the epoch; it is checked there that all of it is done once."""
    goal: dict[int, int] = {}
    for _ in range(300):
        while sum(not one.frozen for one in run.workers.values()) < run.terms.min_workers:
            run.join()
        for one in list(run.workers.values()):
            go_on(run, one)
        living = [one for one in run.workers.values() if not one.frozen]
        for one in living:
            goal.setdefault(one.number, one.epoch + 1)
        tick(run, 0.2)
        if all(one.epoch >= goal[one.number] for one in living):
            return
    raise AssertionError(f"stuck: {run.machine.status(run.now)}")


def go_on(run: Run, one: Worker) -> None:
    """All that it can do."""
    if one.away and not one.frozen and one.number in run.workers:
        come_back(run, one)
    if not one.frozen and one.number in run.workers:
        run.deliver_all(one)
        act(run, one)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_run_goes_on_and_nothing_is_lost(trouble: str) -> None:
    for at in range(TROUBLES.index(trouble) % EVERY, STEPS, EVERY):
        draw = random.Random(f"{trouble} {at}")
        run = Run(Terms(1 + draw.randrange(2), 64, 20.0, None, 1.0, 2, quorum_s=1e9))
        for _ in range(2 + draw.randrange(2)):
            run.join()
        for number in range(STEPS):
            if number == at:
                happen(run, trouble, draw)
            if run.workers:
                step(run, draw)
        finish(run)
        assert run.machine.ledger.strange == 0
        assert "die" in trouble or "freeze" in trouble or not run.machine.gone, run.machine.gone
