# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules by samples, where the number of workers that train grows.

    s(p) = steps that a schedule makes in an epoch of which p samples are in steps
         = rounds of all N workers that are complete at p  /  rounds between two calls of the program

While k < N workers train, each makes more steps than the share of one of N. A schedule that the program steps at every
minibatch would run ahead, and one of a fixed length beyond its end. So of those calls only as many reach the schedule
as N workers would have made by the same sample. Calls outside of a pass over shared data (at the end of an epoch), and
calls with an argument, reach it all.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.data.sharing.loader_registry import LoaderRegistry

BY_SAMPLES = "_paceline_by_samples"
"""Attribute of the class of a scheduler whose calls are counted here."""


class SampledSchedules:
    """The schedulers that the program has named, by their names.

    Args:
        loaders: the data that the run shares.
    """

    def __init__(self, loaders: LoaderRegistry) -> None:
        self._loaders = loaders
        self._at: dict[str, list[int]] = {}  # epoch, rounds, rounds of N, and those of N that are not used yet

    def watch(self, name: str, thing: Any) -> None:
        """Count the steps of an included object, if it is a scheduler."""
        if not isinstance(thing, LRScheduler) or isinstance(thing, ReduceLROnPlateau) or hasattr(thing, BY_SAMPLES):
            return
        kind, schedules = type(thing), self

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            for _ in range(1 if args or kwargs else schedules.due(name)):
                kind.step(scheduler, *args, **kwargs)

        body = {"step": step, BY_SAMPLES: True, "__module__": kind.__module__, "__doc__": kind.__doc__}
        thing.__class__ = type(kind.__name__, (kind,), body)

    def due(self, name: str) -> int:
        """How many steps the schedule makes at this call of the program."""
        share = self._loaders.leading
        now = share.rounds if share is not None else None
        if now is None:
            return 1
        epoch, rounds, fixed = now
        before = self._at.get(name, [epoch, 0, 0, 0])
        then_rounds, then_fixed = before[1:3] if before[0] == epoch else (0, 0)
        if rounds <= then_rounds:
            return 1
        times, rest = divmod(before[3] + fixed - then_fixed, rounds - then_rounds)
        self._at[name] = [epoch, rounds, fixed, rest]
        return times

    # -- checkpoints, and workers that begin -----------------------------------------------------

    def state_dict(self) -> dict[str, list[int]]:
        return {name: list(at) for name, at in self._at.items()}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self._at = {name: list(at) for name, at in state.items()}
