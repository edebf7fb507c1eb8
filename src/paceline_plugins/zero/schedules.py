# SPDX-License-Identifier: Apache-2.0
"""Warns of rate schedules that several workers lead astray.

One that was made for more steps than a worker makes: one of N workers makes 1/N of them. And one that goes by the loss
of the batches that this worker trains on, which are not the other workers'.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline_plugins.zero.patches import Patches
from paceline_plugins.zero.reporter import Reporter

TOTALS = ("total_steps", "T_max", "total_iters")
"""Attributes of torch's schedulers that hold their total number of `step` calls."""
NAMES = (*TOTALS, "num_training_steps", "max_steps", "t_total", "total")
"""The same for the functions of a LambdaLR."""
NEAR = 0.1


class Schedules:
    """The schedulers that the program constructs.

    Args:
        workers: N.
        reporter: prints messages.
        where: gives the current line of the program.
        trains: whether a training pass is open.
    """

    def __init__(
        self, workers: int, reporter: Reporter, where: Callable[[], str], trains: Callable[[], bool] = lambda: False
    ) -> None:
        self._workers, self._reporter, self._where, self._trains = workers, reporter, where, trains
        self._made: weakref.WeakKeyDictionary[LRScheduler, str] = weakref.WeakKeyDictionary()

    def install(self, patches: Patches) -> None:
        """Patch their construction."""
        patches.replace(LRScheduler, "__init__", self._noticing)
        if self._workers > 1:
            patches.replace(ReduceLROnPlateau, "step", self._plateau)

    def _noticing(self, original: Any) -> Any:
        def noticed(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            self._made[scheduler] = self._where()

        return noticed

    def _plateau(self, original: Any) -> Any:
        def step(scheduler: ReduceLROnPlateau, *args: Any, **kwargs: Any) -> None:
            if self._trains():
                self._reporter.once(
                    "plateau",
                    f"{self._where()}: within a pass ReduceLROnPlateau goes by this worker's own loss, and the "
                    "workers' rates part; give it a value that they share, such as the held-out loss after the pass",
                )
            original(scheduler, *args, **kwargs)

        return step

    def begin(self) -> dict[LRScheduler, int]:
        """A pass begins; returns the steps of each scheduler so far."""
        return {one: one.last_epoch for one in self._made}

    def passed(self, before: dict[LRScheduler, int], steps: int, whole: int) -> None:
        """A pass is over, and the program had never asked for the loader's length.

        Args:
            before: the result of `begin`.
            steps: of this worker.
            whole: batches of the loader.
        """
        for one, then in before.items():
            total = total_of(one)
            each_step = steps > 1 and one.last_epoch - then >= steps * (1 - NEAR)
            if total is not None and each_step and whole > steps and total % whole == 0:
                made = f"{total // whole} passes of {whole:,} steps"
                self._say(one, f"{made}, and a pass of this worker has {steps:,}")

    def ended(self) -> None:
        """The program has ended."""
        for one in list(self._made):
            total, made = total_of(one), one.last_epoch
            if total is None and ends_at(one, made * self._workers):
                total = made * self._workers
            if total is not None and made > 1 and abs(made * self._workers / total - 1) <= NEAR:
                self._say(one, f"{total:,} steps, and has made {made:,}")

    def _say(self, one: LRScheduler, what: str) -> None:
        name, where = type(one).__name__, self._made[one]
        self._reporter.once(
            f"schedule {where}",
            f"{where}: {name} was made for {what}, since each of {self._workers} workers makes 1/{self._workers} "
            "of the steps: the rate stays in the first part of its course; make it from len(loader), which is that of "
            "a worker's part, or from epochs",
        )


def total_of(scheduler: Any) -> int | None:
    """Its total number of `step` calls; None if unknown."""
    for name in TOTALS:
        found = getattr(scheduler, name, None)
        if isinstance(found, int) and found > 0:
            return found
    for function in getattr(scheduler, "lr_lambdas", ()):
        known = dict(getattr(function, "keywords", None) or {})
        if inspect.isfunction(function):
            known |= dict(inspect.getclosurevars(function).nonlocals)
        for name in NAMES:
            if isinstance(known.get(name), int) and known[name] > 0:
                return int(known[name])
    return None


def ends_at(scheduler: Any, total: int) -> bool:
    """Whether a LambdaLR falls to nothing just there, or a little later."""
    functions = [one for one in getattr(scheduler, "lr_lambdas", ()) if inspect.isfunction(one)]
    try:
        return any(_falls(one, total) for one in functions) if isinstance(scheduler, LambdaLR) else False
    except Exception:  # the program's own function
        return False


def _falls(function: Callable[[int], float], total: int) -> bool:
    now, before = (abs(float(function(int(total * share)))) for share in (0.5, 1 - 1.5 * NEAR))
    end = min(abs(float(function(int(total * (1 + NEAR * tenths / 10))))) for tenths in range(11))
    return end <= NEAR**2 * now and before > 10 * end
