# SPDX-License-Identifier: Apache-2.0
"""Transports whose channels and subgroups are connections of the same kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from paceline.communication.base import Transport, group_of, world_within
from paceline.core.world import World

Kin = TypeVar("Kin", bound=Transport)


class SubgroupTransport(Transport, Generic[Kin]):
    """A transport whose channels and subgroups are of its own kind, with the same labels on all members."""

    def _init_subgroups(self, label: str, ranks: list[int]) -> None:
        """Begin without subgroups; `ranks` are those of the members in the whole cluster."""
        self._label, self._ranks = label, ranks
        self._channels: list[Kin] = []
        self._parts: list[Kin] = []

    @abstractmethod
    def _subgroup(self, label: str, ranks: list[int], world: World) -> Kin:
        """A new connection of some or all of this one's members."""

    def open_channels(self, number: int) -> None:
        while len(self._channels) + 1 < number:
            label = f"channel{len(self._channels) + 1}"
            self._channels.append(self._subgroup(label, self._ranks, self.world))

    def channel(self, k: int) -> Transport:
        if not 0 <= k <= len(self._channels):
            raise IndexError(f"channel {k} was not opened: open_channels({k + 1}) comes first, on every worker")
        return self if k == 0 else self._channels[k - 1]

    def part(self, groups: Sequence[Sequence[int]]) -> Transport:
        number, mine = group_of(self.world, groups)
        ranks = [self._ranks[rank] for rank in mine]
        part = self._subgroup(f"part{len(self._parts)}.{number}", ranks, world_within(self.world, mine))
        self._parts.append(part)
        return part
