# SPDX-License-Identifier: Apache-2.0
"""Checkpoint steps of an elastic run under a storm, on a disk that all hosts share and that outlasts them.

When all workers that held the model are gone, the run goes on from its newest whole step, with the bits that it had
there before. Which steps are whole is read off the disk.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from devtools.storm import disk_faults
from devtools.storm.faults import KINDS, Faults
from devtools.storm.steps_checks import Resuming, StepChecks
from devtools.world.disk import SimDisk
from devtools.world.scheduler import Scheduler
from torch import nn

from paceline.errors import CheckpointError
from paceline.run.run import Run

PLACE = Path("/runs/steps")
SHARE = 0.4
"""Of all seeds, so many have steps."""


def kill_all(faults: Faults) -> str:
    """All workers are killed at once: nobody holds the model any more."""
    living = [one for one in faults.run.workers.values() if not one.dead]
    for one in living:
        one.kill()
    return f"{len(living)} workers" if living else ""


RUN_STEP_KINDS: dict[str, Callable[[Faults], str]] = {**KINDS, kill_all.__name__: kill_all, **disk_faults.OF_DISKS}
"""Faults of elastic runs with steps, by name."""


def drawn(seed: int, world: Scheduler, problems: list[str], faults: Collection[str]) -> RunSteps | None:
    """The steps of a seed's run; None: it has none. Nothing else that the seed decides depends on it.

    Args:
        seed, world, problems: of the storm.
        faults: that were asked for; if some need steps, there are steps.
    """
    rng = random.Random(f"steps {seed}")
    has = rng.random() < SHARE or not KINDS.keys() >= set(faults)
    return RunSteps(rng, world, problems) if has else None


class RunSteps:
    """The steps of one run.

    Args:
        rng: draws how often steps are taken, and how many are kept.
        world: that they lie in.
        problems: gets what is wrong.

    Attributes:
        disk: that all hosts share.
        every: exchanges from one step to the next.
        keep: how many are kept.
        checks: of the disk.
    """

    def __init__(self, rng: random.Random, world: Scheduler, problems: list[str]) -> None:
        self.disk = SimDisk(world)
        self.every, self.keep = rng.randint(1, 4), rng.randint(1, 3)
        self.checks = StepChecks(PLACE, [self.disk], self.keep, problems)
        self._problems = problems
        self._bits: dict[int, str] = {}  # of the model after each exchange, since the run last went on from a step

    def resume(self, run: Run, who: str, model: nn.Module) -> None:
        """Let a worker resume."""
        before, steps, monitor = Resuming(self.checks), [0], run._parts.context.monitor
        note = monitor.note

        def told(kind: str, **about: Any) -> None:
            if kind == "resume":
                steps.append(int(Path(about["path"]).name.partition("-")[2]))
            note(kind, **about)

        monitor.note = told  # type: ignore[method-assign]
        try:
            run.resume()
        except CheckpointError as error:
            if "is whole" in str(error):
                self.checks.none_is_whole(who, before)
                self.checks.moved_away()  # what the error asks the user for
            raise
        finally:
            monitor.note = note  # type: ignore[method-assign]
        elastic = run._parts.elastic
        assert elastic is not None
        if elastic.joining.given is None:  # nobody sent it the state
            self._goes_on(who, steps[-1], run.blocks, model, before)

    def _goes_on(self, who: str, step: int, exchanges: int, model: nn.Module, before: Resuming) -> None:
        self.checks.resumed(who, step, before)
        self.checks.all_resumed(step)
        self._bits = {number: bits for number, bits in self._bits.items() if number <= exchanges}
        if step:
            self.exchanged(who, exchanges, model)

    def exchanged(self, who: str, exchange: int, model: nn.Module, full: bool = False) -> None:
        """A worker holds the model after so many exchanges.

        Args:
            who, exchange, model: these.
            full: the record's disk was full, so that exchanges which it does not know of may be made anew.
        """
        digest = hashlib.sha256()
        for weights in model.parameters():
            digest.update(weights.detach().numpy().tobytes())
        bits = digest.hexdigest()
        before = self._bits.setdefault(exchange, bits)
        if full:
            self._bits[exchange] = bits
        elif before != bits:
            self._problems.append(f"{who} has other bits after {exchange} exchanges than the run had before")
