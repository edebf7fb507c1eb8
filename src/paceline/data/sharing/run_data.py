# SPDX-License-Identifier: Apache-2.0
"""What a shared loader needs of the data of its run; :mod:`.loader_registry` has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.core.world import World
from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.sampling.position import Position


class RunData(Protocol):
    """The data of a run, as one of its loaders sees it.

    Attributes:
        world: this worker; workers may come and go.
        seed: of the order of samples.
        began: called with (epoch, number of batches or None) at the start of every pass.
        waited: called with the seconds that the program waited for a batch.
        ready: called before the first batch of every pass.
    """

    world: World
    seed: int
    began: Callable[[int, int | None], None]
    waited: Callable[[float], None]
    ready: Callable[[], None]

    def begins(self, position: Position) -> object:
        """A pass over the data of `position` begins; the token that ends it."""

    def ends(self, position: Position, token: object) -> None:
        """It is over, or the program has left it."""

    def asked(self, position: Position) -> Callable[[], None] | None:
        """The program asks for the next batch; what is returned is to be called if there is one."""

    def handed_out(self, samples: int, nominal: int, marks: list[Mark]) -> None:
        """A batch goes to the program; samples is 0 where unknown."""

    def passed_over(self, marks: list[Mark]) -> None:
        """Places of which no batch came."""

    @property
    def since(self) -> tuple[int, int, int]:
        """Samples, batches and nominal samples handed out since the last step."""

    def untrained(self, since: tuple[int, int, int]) -> None:
        """Batches of a pass were not trained on."""
