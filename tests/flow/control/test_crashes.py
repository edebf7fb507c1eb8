# SPDX-License-Identifier: Apache-2.0
"""The control plane dies before each record that it writes and each word that it sends, one after another.

One history, with a newcomer, a death, and work that is left out of exchanges and given to others, is played as often as
it has such points; after the crash the control plane begins from its record, and the workers come back. However it
goes, each place is in the model once and the epochs come to their end (:mod:`tests.flow.control.model` looks at every
step).
"""

from __future__ import annotations

import pytest

from paceline.flow.control.messages import Terms
from tests.flow.control.model import Run, act, beat, come_back

EPOCHS, ROUNDS = 2, 200


def play(crash_at: list[int], arrives: bool, least: int) -> Run:
    """The history; crashes are at points from 1 on."""
    run = Run(Terms(least, 64, 20.0, None, 1.0, 2))
    run.spoils = {(2, 0), (3, 1), (5, 2), (6, 1)}
    run.join()
    run.join()
    run.points, run.crash_at, run.arrives = 0, crash_at, arrives
    for number in range(ROUNDS):
        if number == (8 if least == 1 else 30):  # below the minimum it waits for the newcomer
            run.join()
        if number == 24 and 0 in run.workers:  # perhaps behind its commit
            run.die(run.workers[0])
        for one in list(run.workers.values()):
            if one.away:
                come_back(run, one)
        for one in list(run.workers.values()):
            act(run, one)
        run.now += 0.2
        for one in list(run.workers.values()):
            if not one.away and one.number in run.workers:
                run.do(beat, run, one)
        run.do(lambda now: run.machine.tick(now))
        for one in list(run.workers.values()):
            run.deliver_all(one)
        if run.workers and all(one.epoch >= EPOCHS for one in run.workers.values()):
            return run
    raise AssertionError(f"stuck: {run.machine.status(run.now)} {run.workers}")


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("arrives", [False, True], ids=["what was on its way is lost", "what was sent arrives"])
def test_a_control_plane_that_dies_anywhere_loses_and_repeats_nothing(arrives: bool, least: int) -> None:
    calm = play([], arrives, least)
    assert calm.machine.exchange > 6 and len(calm.workers) == 2
    for point in range(1, calm.points + 1):
        try:
            play([point, point + 7] if arrives else [point], arrives, least)
        except AssertionError as error:
            raise AssertionError(f"it died before point {point} of {calm.points}: {error}") from error
