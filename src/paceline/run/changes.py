# SPDX-License-Identifier: Apache-2.0
"""Finds parameters that the program changes besides its optimizer, where the rule does not keep the change.

Such programs clamp, project, mask or round weights after each step, copy them, begin a layer anew or load a part.
Between two steps nobody else writes, so sums of the parameters are compared over that time where it tells something:

- after an exchange has written them: the program changes what the exchange left, so the merged model does not keep what
  the program wants. A change that the mean keeps (a box, a common mask without block momentum) is not seen, rightly.
- after a pass over the data, and before the first one, where layers are begun anew and parts are loaded.

Where all workers step with the same gradients, each makes the same change; those rules are not watched.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.core.flat import Fragment, flat_view, fragments
from paceline.errors import UnsupportedError
from paceline.update.engine.context import RunContext
from paceline.update.engine.protocol import EngineProtocol
from paceline.update.exchange.checksum import is_sampled

logger = logging.getLogger("paceline")
ROUNDING = 1e-6
"""A change of a sum relative to the sum of magnitudes that is no change of the program's."""


class ProgramChanges:
    """One worker's watch over its parameters.

    Args:
        context: what the parts of the run share.
        engine: exchanges by the rule.
    """

    def __init__(self, context: RunContext, engine: EngineProtocol) -> None:
        self._context, self._engine = context, engine
        self._everything = fragments("parameters", [pair for _, named in context.owned for pair in named])
        self._held: list[tuple[Fragment, Tensor]] = []
        self._found: list[tuple[list[str], Tensor]] = []
        self._at = (-1, -1)
        self._named: set[str] = set()

    @property
    def _now(self) -> tuple[int, int]:
        return self._engine.exchanged, self._context.progress.steps

    def stepped(self) -> None:
        """A step is over, with its exchange if there was one."""
        written = self._engine.take_written()
        if written and not self._context.rule.schedule.overlap:  # else this is within a block
            self.tell()
        if written and is_sampled(self._engine.exchanged):
            self._hold(written)

    def passed(self) -> None:
        """A pass over the data is over, or the first one is to come."""
        if not self._engine.gradients_due:
            self._hold(self._everything)

    def _hold(self, parts: Iterable[Fragment]) -> None:
        self._held, self._at = [(part, sums(part)) for part in parts], self._now

    def look(self) -> None:
        """An optimizer is about to step; what is found stays on the device, for which nothing waits within a block."""
        held, self._held = self._held, []
        if self._at == self._now:  # else a merge or a restored state came between
            with contextlib.suppress(UnsupportedError):  # the exchange refuses a model that has changed its shape
                self._found += [(part.names, changed(part, before)) for part, before in held]

    def tell(self) -> None:
        """Name what was found and not named yet."""
        found, self._found = self._found, []
        names = [name for part, apart in found for name, one in zip(part, apart.tolist(), strict=True) if one]
        new = [name for name in dict.fromkeys(names) if name not in self._named]
        self._named.update(new)
        world = self._context.transport.world
        if new and world.rank == 0:
            logger.warning("%s", world.sign(f"{', '.join(new)}: {CHANGED.format(self._context.rule.text())}"))


CHANGED = (
    "the program changes these parameters besides its optimizer (a clamp, a mask, rounding, a layer begun anew, a part "
    "that is loaded), and {} does not keep the change in the model that it merges. Make it once more in the model that "
    "you save, or use sync"
)


@torch.no_grad()
def sums(part: Fragment) -> Tensor:
    """The sum and the sum of magnitudes of each tensor, shape (n, 2), on its device."""
    part.refresh()
    rows = []
    for name, tensor in zip(part.names, part.tensors, strict=True):
        values = flat_view(name, tensor)
        magnitude = torch.linalg.vector_norm(values, 1, dtype=torch.float64)
        rows.append(torch.stack([values.sum(dtype=torch.float64), magnitude]))
    return torch.stack(rows)


def changed(part: Fragment, before: Tensor) -> Tensor:
    """Which tensors have other sums than before, shape (n,), on their device."""
    return ((sums(part) - before).abs() > ROUNDING * before[:, 1:]).any(1)
