# SPDX-License-Identifier: Apache-2.0
"""The donor sends its state to workers that join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.communication.base import Pending
from paceline.errors import PeerLostError
from paceline.flow.membership import ElasticMembership
from paceline.flow.state_transfer import PackedState
from paceline.update.monitor import Monitor


class Donor:
    """Sends this worker's state to joining workers, if the control plane names it the donor.

    Args:
        membership: this worker's membership.
        monitor: writes the event log.
        capture: gives this worker's state and the global model, as a checkpoint has them.
    """

    def __init__(
        self,
        membership: ElasticMembership,
        monitor: Monitor,
        capture: Callable[[], tuple[dict[str, Any], dict[str, Any]]],
    ) -> None:
        self._membership, self._monitor, self._capture = membership, monitor, capture
        self._sending: list[Pending] = []  # held until sent, or replaced by later ones

    def give(self) -> None:
        """If this worker is the donor, send the state to the generation's joining workers, in the background."""
        membership, generation = self._membership, self._membership.generation
        if generation.donor != membership.control.worker or not generation.newcomers:
            return
        packed = PackedState(*self._capture())
        self._sending = []
        for worker in sorted(generation.newcomers):
            try:
                self._sending += packed.give(membership.transport, membership.rank_of(worker))
            except PeerLostError:
                return  # the members will change again
        self._monitor.note("gave", workers=sorted(generation.newcomers), bytes=packed.nbytes)
