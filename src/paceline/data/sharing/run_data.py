# SPDX-License-Identifier: Apache-2.0
"""The part of :class:`.loader_registry.LoaderRegistry` that a shared loader uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from paceline.core.world import World
from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.sampling.position import Position
from paceline.data.sharing.place_log import PlaceLog


class RunData(Protocol):
    """The data of a run, as one of its loaders sees it; attributes and methods are those of `LoaderRegistry`."""

    world: World
    seed: int
    began: Callable[[int, int | None], None]
    waited: Callable[[float], None]
    warn: Callable[[str, str], None]
    ready: Callable[[], None]
    places: PlaceLog | None

    def begins(self, position: Position, length: int | None, fewest: Callable[[], int]) -> Any: ...

    def ends(self, position: Position, one: Any, complete: bool) -> None: ...

    def leave(self, position: Position | None = None) -> None: ...

    def settle(self) -> None: ...

    def asked(self, position: Position) -> Callable[[], None] | None: ...

    def read_as_a_whole(self, number: int, checksum: int) -> None: ...

    def handed_out(self, samples: int, nominal: int, marks: list[Mark]) -> None: ...

    def passed_over(self, marks: list[Mark]) -> None: ...

    @property
    def since(self) -> tuple[int, int, int]: ...

    def untrained(self, since: tuple[int, int, int]) -> None: ...
